"""What attention means in this project, and the form every implementation of it has.

The letters, with the same meaning everywhere:

    B  rows of a device batch           H  width of a head
    T  positions of a row               D  width of the model, N·H
    N  attention heads                  F  width of the feed-forward layer
                                        V  size of the vocabulary

`attention(qkv, segment_ids, *, num_heads, window=None) -> context`

qkv          [B, T, 3·N·H]  float32 or bfloat16: query, key and value side by side, heads side by side in each,
                            as one matmul gives them.
segment_ids  [B, T]         int32: 0 is padding, 1, 2, … the texts that share a row. A text is contiguous;
                            padding comes last.
window                      None, or how far a position sees to each side.
context      [B, T, N·H]    in the type of qkv.

Position i attends position j where segment_ids[i] == segment_ids[j] != 0 and, with a window,
abs(i - j) <= window. Then context[i] = sum over j of softmax_j(query[i]·key[j] / √H) · value[j] for each head
(https://arxiv.org/abs/1706.03762, section 3.2.1), with scores and softmax in float32.

- Where segment_ids is 0 the context is exactly 0.
- What i does not attend never reaches context[i], NaN and infinity included.
- Where a value that i attends is not finite, something in that head of context[i] is not either (which
  lanes is left open).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import jax
from jaxtyping import Array, Float, Int32

DTYPES = ("float32", "bfloat16")

# A shape cannot say 3·N·H before it knows N, hence a letter of their own for the fused widths;
# `check_call` compares them with the number of heads.
FusedProjection = Float[Array, "B T QKV"]
SegmentIds = Int32[Array, "B T"]
Context = Float[Array, "B T NH"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of call, known when a model is loaded: what implementations judge and are compiled for.

    Raises:
      ValueError: no implementation could ever serve it.
    """

    B: int
    T: int
    N: int
    H: int
    dtype: str  # one of DTYPES
    window: int | None = None

    def __post_init__(self) -> None:
        for letter in ("B", "T", "N", "H"):
            _require_int(letter, getattr(self, letter), at_least=1)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.window is not None:
            _require_int("window", self.window, at_least=0, otherwise="None or ")


class Attention(Protocol):
    """An implementation: a frozen dataclass, so that it can be compared, hashed and printed.

    A call that breaks the contract raises ValueError (`check_call`). A call that keeps it, but that this
    implementation cannot serve, has a refusal.
    """

    @property
    def name(self) -> str:
        """What the user writes to ask for it."""
        ...

    def __hash__(self) -> int: ...

    def refusal(self, case: Case, device: jax.Device) -> str | None:
        """Why it cannot serve the case on the device, or None when it can. Compiles nothing."""
        ...

    def __call__(
        self,
        qkv: FusedProjection,
        segment_ids: SegmentIds,
        *,
        num_heads: int,
        window: int | None = None,
    ) -> Context:
        """The context, as this module defines it. `num_heads` and `window` are fixed when compiling."""
        ...


def check_call(
    qkv: FusedProjection, segment_ids: SegmentIds, *, num_heads: int, window: int | None
) -> Case:
    """The case of a call; every implementation starts with it. Costs nothing once compiled.

    Raises:
      ValueError: the call breaks the contract.
    """
    if len(qkv.shape) != 3:
        raise ValueError(f"qkv: expected the shape [B, T, 3·N·H], got {list(qkv.shape)}")
    B, T, width = qkv.shape
    if tuple(segment_ids.shape) != (B, T):
        raise ValueError(
            f"segment_ids: expected the shape [B, T] = {[B, T]} of qkv, got {list(segment_ids.shape)}"
        )
    if str(segment_ids.dtype) != "int32":
        raise ValueError(f"segment_ids: expected int32, got {segment_ids.dtype}")
    _require_int("num_heads", num_heads, at_least=1)
    if width % (3 * num_heads):
        raise ValueError(
            f"qkv: expected a last dimension of 3·N·H, a multiple of 3·{num_heads} = {3 * num_heads} "
            f"for num_heads={num_heads}, got {width}"
        )
    H = width // (3 * num_heads)
    return Case(B=B, T=T, N=num_heads, H=H, dtype=str(qkv.dtype), window=window)


def _require_int(name: str, value: object, *, at_least: int, otherwise: str = "") -> None:
    # bool is an int to Python; an array (a traced one above all) is none.
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(
            f"{name}: expected {otherwise}a Python int, {at_least} or more, got {value!r}"
        )
