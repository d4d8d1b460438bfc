"""The program of a device batch: the network and its head for one shape, spread over a mesh of devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels.attention.contract import Attention, Case
from model import heads
from model.config import EncoderConfig
from model.encoder import Encoder

# The name of the mesh's one axis, along which the rows of a batch are spread.
ROWS = "rows"

Network = Callable[[Sequence[jax.Array]], Encoder]


def cases(
    config: EncoderConfig, dtype: str, shapes: Sequence[tuple[int, int]], devices: int
) -> list[Case]:
    """Every kind of attention call that batches of these (B, T) make, spread over so many devices."""
    N, D = config.heads, config.embedding_dimensions
    return [Case(B=B // devices, T=T, N=N, H=D // N, dtype=dtype) for B, T in sorted(set(shapes))]


def describe(config: EncoderConfig, dtype: str) -> tuple[Network, nnx.State[Any, Any]]:
    """How to make the network of a list of parameters, and their shapes and types. Nothing is allocated."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, jnp.dtype(dtype))))
    structure = jax.tree.structure(state)
    return lambda leaves: nnx.merge(graph, jax.tree.unflatten(structure, leaves)), state


def everywhere(mesh: Mesh) -> NamedSharding:
    """How parameters are laid over the devices: each has all."""
    return NamedSharding(mesh, P())


def by_rows(mesh: Mesh) -> NamedSharding:
    """How a batch's arrays [3, B, T] are laid over the devices."""
    return NamedSharding(mesh, P(None, ROWS))


def lower(
    network: Network,
    parameters: Sequence[Any],
    mesh: Mesh,
    shape: tuple[int, int],
    *,
    attention: Attention,
    pooling: str,
    segments: int,
) -> jax.stages.Lowered:
    """The program for a shape (B, T), ready to be compiled. It takes the parameters and int32[3, B, T]: token ids,
    segment ids and positions; it gives float32[B, segments, D].

    Args:
      parameters: on the devices, or described (jax.ShapeDtypeStruct), for devices that may not be there.
    """
    forward = partial(
        _forward, network=network, attention=attention, pooling=pooling, segments=segments
    )
    # shard_map rather than a partitioned jit: a hand-written kernel is opaque to the partitioner.
    # Its check of which values differ between devices would be a burden on every kernel.
    sharded = jax.shard_map(
        forward, mesh=mesh, in_specs=(P(), P(None, ROWS)), out_specs=P(ROWS), check_vma=False
    )
    inputs = jax.ShapeDtypeStruct((3, *shape), jnp.int32, sharding=by_rows(mesh))
    return jax.jit(sharded).lower(parameters, inputs)


def _forward(
    parameters: Sequence[jax.Array],
    inputs: jax.Array,
    *,
    network: Network,
    attention: Attention,
    pooling: str,
    segments: int,
) -> jax.Array:
    token_ids, segment_ids, positions = inputs
    hidden = network(parameters)(token_ids, segment_ids, positions, attention)
    return heads.embed(hidden, segment_ids, pooling=pooling, segments=segments)
