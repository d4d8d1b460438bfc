"""Compiling for TPUs that are not there, with the compiler in the package libtpu (`pip install lengthwise[tpu]`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

# How libtpu calls a machine with chips of each generation.
TOPOLOGIES = {
    "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1",
}  # fmt: skip
HBM_GIB = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 96}
# What libtpu would otherwise ask of a Google Cloud machine, or of other processes on this one.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(chip: str) -> list[Any]:
    """At least four of them."""
    from jax.experimental import topologies

    os.environ.update(ENVIRONMENT)
    described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return list(described.devices)


def compile_for(device: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The compiled program for one chip. `arguments` are (shape, dtype)."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, SingleDeviceSharding

    sharding = SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*it, sharding=sharding) for it in arguments]
    # Tells the kernel, and some of JAX's rules, which chip it is.
    with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("x",)).abstract_mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
