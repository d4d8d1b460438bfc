"""What a task makes of the encoder's hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def embed(
    hidden: Float[Array, "B T D"],
    segment_ids: Int[Array, "B T"],
    *,
    pooling: str,
    segments: int,
) -> Float[Array, "B S D"]:
    """One vector for each of the first S = `segments` texts of every row, not normalised; zeros where there is none.

    Args:
      hidden: float32 hidden states.
      segment_ids: 0 for padding, 1, 2, … for the texts of a row.
      pooling: "mean" over a text's tokens, "max" over them, or "cls", the first of them. Special tokens count.
    """
    member = segment_ids[:, None, :] == jnp.arange(1, segments + 1)[None, :, None]  # [B, S, T]
    present = member.any(-1)[..., None]
    if pooling == "mean":
        weight = member.astype(jnp.float32)
        total = jnp.einsum("bst,btd->bsd", weight, hidden, precision=jax.lax.Precision.HIGHEST)
        return total / jnp.maximum(weight.sum(-1), 1)[..., None]
    if pooling == "cls":
        first = jnp.argmax(member, axis=-1)  # the first True
        return jnp.where(present, jnp.take_along_axis(hidden, first[..., None], axis=1), 0)
    if pooling == "max":
        highest = jnp.where(member[..., None], hidden[:, None], -jnp.inf).max(2)
        return jnp.where(present, highest, 0)
    raise ValueError(f"pooling: expected mean, cls or max, got {pooling!r}")
