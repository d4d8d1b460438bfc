"""The specification as a program: plain float32, nothing clever. Everything else is held to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from kernels.attention.contract import Case, Context, FusedProjection, SegmentIds, check_call


@dataclass(frozen=True)
class Reference:
    name: ClassVar[str] = "reference"

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
        heads = qkv.astype(jnp.float32).reshape(case.B, case.T, 3, case.N, case.H)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]

        i, j = jnp.arange(case.T)[:, None], jnp.arange(case.T)[None, :]
        attends = segment_ids[:, :, None] == segment_ids[:, None, :]
        attends &= (segment_ids != 0)[:, :, None]
        if window is not None:
            attends &= abs(i - j) <= window
        attends = attends[:, None]  # [B, 1, T, T]: the same for every head

        # A weight of 0 does not silence a value of NaN (0 · NaN = NaN). So such a value is replaced by 0,
        # and the score of its position by NaN, which reaches those who attend it and nobody else.
        finite = jnp.isfinite(value)
        spoiled = ~finite.all(-1).transpose(0, 2, 1)[:, :, None, :]  # [B, N, 1, T]
        value = jnp.where(finite, value, 0)

        # HIGHEST: by default TPUs and some GPUs multiply float32 in fewer bits.
        highest = jax.lax.Precision.HIGHEST
        scores = jnp.einsum("binh,bjnh->bnij", query, key, precision=highest) / case.H**0.5
        scores = jnp.where(spoiled, jnp.nan, scores)
        # Over the positions attended; where there are none, every weight is 0.
        weights = jax.nn.softmax(scores, axis=-1, where=attends)
        context = jnp.einsum("bnij,bjnh->binh", weights, value, precision=highest)
        return context.reshape(case.B, case.T, case.N * case.H).astype(qkv.dtype)
