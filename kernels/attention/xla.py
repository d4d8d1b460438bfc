"""Attention that XLA fuses: runs everywhere, needs nothing, holds the T×T weights of every head in memory.

What it is shaped by, measured on CPU (`python tests/benchmarks/attention.py`), where XLA hands matmuls to YNNPACK:

- Softmax and the product with the values stay one YNNPACK call only in this plain form. A `where` on the
  result, to zero padding, takes it apart (×3.7 in time on JAX 0.10.2, bfloat16, 4×256). So padding is zeroed
  on the way in, by the copy that separates the heads.
- Heads before positions, [B, N, T, H], in that one copy: ×0.75–0.95 of the time of an einsum over
  [B, T, N, H] in bfloat16 and ×0.45–0.9 in float32, whose operand YNNPACK would have to repack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from kernels.attention.contract import Case, Context, FusedProjection, SegmentIds, check_call


@dataclass(frozen=True)
class Xla:
    name: ClassVar[str] = "xla"

    def refusal(self, case: Case, device: jax.Device) -> str | None:
        return None

    def __call__(
        self,
        qkv: FusedProjection,
        segment_ids: SegmentIds,
        *,
        num_heads: int,
        window: int | None = None,
    ) -> Context:
        case = check_call(qkv, segment_ids, num_heads=num_heads, window=window)
        qkv = jnp.where((segment_ids != 0)[:, :, None], qkv, 0)
        query, key, value = qkv.reshape(case.B, case.T, 3, case.N, case.H).transpose(2, 0, 3, 1, 4)

        # A weight of 0 does not silence a value of NaN. So such a value becomes 0 and the key of its
        # position NaN: the score is NaN for every query, and the mask keeps it from those who must not see it.
        finite = jnp.isfinite(value)
        key, value = jnp.where(finite, key, jnp.nan), jnp.where(finite, value, 0)

        # Padding attends padding: its values are 0, so its context is exactly 0, and as no row of the
        # mask is empty, no softmax divides by 0.
        attends = segment_ids[:, :, None] == segment_ids[:, None, :]
        if window is not None:
            position = jnp.arange(case.T)
            attends &= abs(position[:, None] - position[None, :]) <= window

        # HIGHEST: by default TPUs and some GPUs multiply float32 in fewer bits. It means nothing to bfloat16.
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum(
            "bnih,bnjh->bnij", query, key, precision=highest, preferred_element_type=jnp.float32
        )
        # The scale goes here, in float32, where it rides along with the mask for nothing; multiplied into
        # a bfloat16 query it would be rounded.
        scores = jnp.where(attends[:, None], scores * case.H**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(qkv.dtype)
        context = jnp.einsum("bnij,bnjh->bnih", weights, value, precision=highest)
        return context.transpose(0, 2, 1, 3).reshape(case.B, case.T, case.N * case.H)
