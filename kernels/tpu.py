"""TPUs that are not there: what a device of each generation is, and compiling for it with libtpu's compiler.

On any machine, with `pip install 'lengthwise[tpu]'`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

GIB = 2**30


class NoCompiler(RuntimeError):
    """libtpu is not installed."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """What JAX calls one device.

    Attributes:
      topology: libtpu's name of a machine with such chips.
      hbm_bytes: memory.
      cores: TensorCores, which share the grid of a kernel.
      flops: bfloat16 operations a second, as published (https://docs.cloud.google.com/tpu/docs/v6e and so on).
      flops_per_cycle: the most that its matrix units do. With libtpu's estimate of cycles for an 8192³ matmul it
        comes to 70 to 93 % of that.
      config: how libtpu calls the way its cores are used, where there are several.
    """

    topology: str
    hbm_bytes: int
    cores: int
    flops: float
    flops_per_cycle: int
    config: str | None = None

    @property
    def hertz(self) -> float:
        return self.flops / self.flops_per_cycle


NARROW, WIDE = 4 * 2 * 128**2, 4 * 2 * 256**2  # of a core, with matrix units of that width
CHIPS = {
    "v4": Chip(
        topology="v4:2x2x1", hbm_bytes=32 * GIB, cores=2, flops=275e12, flops_per_cycle=2 * NARROW,
        config="megacore",  # two cores are one device, as JAX has it on real ones
    ),
    "v5e": Chip(topology="v5e:2x2", hbm_bytes=16 * GIB, cores=1, flops=197e12, flops_per_cycle=NARROW),
    "v5p": Chip(topology="v5p:2x2x1", hbm_bytes=95 * GIB, cores=2, flops=459e12, flops_per_cycle=2 * NARROW),
    "v6e": Chip(topology="v6e:2x2", hbm_bytes=32 * GIB, cores=1, flops=918e12, flops_per_cycle=WIDE),
    # Half a chip is a device.
    "tpu7x": Chip(topology="tpu7x:2x2x1", hbm_bytes=96 * GIB, cores=1, flops=1153.5e12, flops_per_cycle=WIDE),
}  # fmt: skip

# What libtpu would otherwise ask of a Google Cloud machine, or of other processes on this one.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(chip: str) -> list[Any]:
    """At least four described devices of a generation in CHIPS: programs can be compiled for them, not run.

    Raises:
      NoCompiler: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise NoCompiler("needs libtpu, which has the compiler: pip install 'lengthwise[tpu]'")
    from jax.experimental import topologies

    config = CHIPS[chip].config
    with _environment():
        described = topologies.get_topology_desc(
            platform="tpu",
            topology_name=CHIPS[chip].topology,
            **({"chip_config_name": config} if config else {}),
        )
    return list(described.devices)


@contextmanager
def _environment() -> Iterator[None]:
    """ENVIRONMENT, but not for the processes that this one starts: they would wait for such a machine's TPU."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def compile_for(device: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """The compiled program for one device. `arguments` are (shape, dtype)."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, SingleDeviceSharding

    sharding = SingleDeviceSharding(device)
    shapes = [jax.ShapeDtypeStruct(*it, sharding=sharding) for it in arguments]
    # Tells the kernel, and some of JAX's rules, which chip it is.
    with jax.sharding.use_abstract_mesh(Mesh(np.array([device]), ("x",)).abstract_mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",)).compile()
