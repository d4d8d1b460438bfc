"""How an attention implementation is added: everything that it takes, shown by a toy (kernels/README.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from kernels.attention.contract import Case, Context, FusedProjection, SegmentIds, check_call
from kernels.attention.select import IMPLEMENTATIONS, select


@dataclass(frozen=True)
class RowByRow:
    """One row after the other, so that the T×T weights of only one are in memory."""

    name: ClassVar[str] = "row_by_row"

    def refusal(self, case: Case, device: jax.Device) -> str | None:
        return None if case.window is None else "has no windows"

    def __call__(
        self,
        qkv: FusedProjection,
        segment_ids: SegmentIds,
        *,
        num_heads: int,
        window: int | None = None,
    ) -> Context:
        case = check_call(qkv, segment_ids, num_heads=num_heads, window=window)

        def one(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            fused, ids = row
            fused = jnp.where((ids != 0)[:, None], fused, 0)
            query, key, value = fused.reshape(case.T, 3, case.N, case.H).transpose(1, 2, 0, 3)
            scores = jnp.einsum("nih,njh->nij", query, key, preferred_element_type=jnp.float32)
            scores = jnp.where(ids[:, None] == ids[None, :], scores * case.H**-0.5, -jnp.inf)
            weights = jax.nn.softmax(scores).astype(qkv.dtype)
            return jnp.einsum("nij,njh->inh", weights, value).reshape(case.T, -1)

        return jax.lax.map(one, (qkv, segment_ids))


def test_a_new_implementation_is_a_class_and_an_entry_in_the_candidates() -> None:
    cpu, case = jax.devices("cpu")[0], Case(B=4, T=32, N=2, H=16, dtype="float32")
    candidates = (RowByRow(), *IMPLEMENTATIONS)
    # Its canary has compared it with the reference: packed, padded, with NaN in the padding.
    assert select("auto", [case], cpu, candidates=candidates).implementation == RowByRow()
    assert select("row_by_row", [case], cpu, candidates=candidates).reasons == {}


def test_what_it_refuses_goes_to_the_next() -> None:
    cpu, case = jax.devices("cpu")[0], Case(B=4, T=32, N=2, H=16, dtype="float32", window=8)
    chosen = select("auto", [case], cpu, candidates=(RowByRow(), *IMPLEMENTATIONS))
    assert chosen.implementation.name == "xla"
    assert chosen.reasons["row_by_row"].endswith("has no windows")
