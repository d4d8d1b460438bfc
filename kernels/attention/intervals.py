"""What each position of a packed row attends, as an interval, and which tiles that makes live.

Texts are contiguous, so a position attends `first <= key < end`, a window included, and what a tile of queries
attends is one range of key tiles. Plain JAX on [B, T] integers, computed once for all layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

INT32_MIN = -(2**31)


def plan(
    segment_ids: jax.Array, window: int | None, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
    """What each query attends, and which key tiles each query tile needs.

    Returns:
      interval: int32[B, 2, T]. Position i attends `first <= key < first + count`; in row 0 stands INT32_MIN - first,
        in row 1 INT32_MIN + count, which makes it one comparison: key + row0 < row1 (sums wrap around).
        count is 0 for padding, and only there.
      ranges: int32[B, T / queries, 4]: first and end of the live key tiles, first and end of those without a mask.
    """
    B, T = segment_ids.shape
    position = jnp.arange(T, dtype=jnp.int32)[None]
    edge = jnp.ones((B, 1), bool)
    starts = jnp.concatenate([edge, segment_ids[:, 1:] != segment_ids[:, :-1]], 1)
    ends = jnp.concatenate([starts[:, 1:], edge], 1)
    first = lax.cummax(jnp.where(starts, position, 0), axis=1)
    end = lax.cummin(jnp.where(ends, position + 1, T), axis=1, reverse=True)
    if window is not None:
        first, end = jnp.maximum(first, position - window), jnp.minimum(end, position + window + 1)
    text = segment_ids != 0
    end = jnp.where(text, end, first)
    interval = jnp.stack([INT32_MIN - first, INT32_MIN + (end - first)], 1)

    def of_tile(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // queries, queries)

    low = of_tile(jnp.where(text, first, T)).min(-1) // keys
    high = -(-of_tile(jnp.where(text, end, 0)).max(-1) // keys)
    low = jnp.minimum(low, high)
    # Without a mask: every query of the tile attends all of the key tile. A padded query attends none.
    full_low = jnp.clip(-(-of_tile(first).max(-1) // keys), low, high)
    full_high = jnp.clip(of_tile(jnp.where(text, end, 0)).min(-1) // keys, full_low, high)
    return interval, jnp.stack([low, high, full_low, full_high], -1)
