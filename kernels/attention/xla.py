"""Attention that XLA fuses: runs everywhere, needs nothing, holds the T×T weights of every head in memory.

Its form was chosen by measuring on CPU (`python tests/benchmarks/attention.py`), where XLA hands products to
YNNPACK. A layer's attention with its projections, against the plain form of that benchmark, N = 12, H = 32:

    JAX 0.10.2  bfloat16 ×0.75 (4×256)  ×0.87 (8×128)  ×0.95 (32×16)    float32 ×0.65  ×0.70  ×0.98
    JAX 0.12    bfloat16 ×0.85          ×0.93          ×1.00            float32 ×0.93  ×0.96  ×1.00

- Heads before positions, [B, N, T, H], in the one copy that also zeroes padding. From [B, T, N, H] the
  product with the values would be a transposed one, which YNNPACK has to repack.
- Dividing by the sum of the weights after that product: exp, product, sum and division become one call.
- Padding is zeroed before, not after: a `where` on the result costs another 10 % (bfloat16, JAX 0.10.2).
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
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        context = jnp.einsum(
            "bnij,bnjh->bnih", weights.astype(qkv.dtype), value,
            precision=highest, preferred_element_type=jnp.float32,
        )  # fmt: skip
        context /= weights.sum(-1, keepdims=True)
        context = context.transpose(0, 2, 1, 3).reshape(case.B, case.T, case.N * case.H)
        return context.astype(qkv.dtype)
