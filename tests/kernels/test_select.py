"""How an implementation is chosen, and what is said about those that were not."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest

from kernels.attention.contract import Case
from kernels.attention.reference import Reference
from kernels.attention.select import IMPLEMENTATIONS, SelectionError, canary, select
from kernels.attention.xla import Xla

CPU = jax.devices("cpu")[0]
CASES = (
    Case(B=2, T=24, N=2, H=8, dtype="float32"),
    Case(B=4, T=12, N=2, H=8, dtype="float32"),
    Case(B=1, T=48, N=2, H=8, dtype="float32"),
)
Call = Callable[..., jax.Array]
REFERENCE = Reference()


@dataclass(frozen=True)
class Fake:
    """`calls` instead of the reference; refuses cases that are longer than `longest`."""

    name: str
    calls: Call = REFERENCE
    longest: int = 1_000_000

    def refusal(self, case: Case, device: jax.Device) -> str | None:
        return f"rows over {self.longest}" if case.T > self.longest else None

    def __call__(
        self,
        qkv: jax.Array,
        segment_ids: jax.Array,
        *,
        num_heads: int,
        window: int | None = None,
    ) -> jax.Array:
        return self.calls(qkv, segment_ids, num_heads=num_heads, window=window)


def fails_to_compile(*_: object, **__: object) -> jax.Array:
    raise NotImplementedError("scoped vmem\n  of 16 MiB\n" + "exceeded " * 1000)


def ignores_packing(
    qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None
) -> jax.Array:
    one = (segment_ids != 0).astype(jnp.int32)
    return Reference()(qkv, one, num_heads=num_heads, window=window)


def ignores_windows(
    qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None
) -> jax.Array:
    return Reference()(qkv, segment_ids, num_heads=num_heads)


def lets_nan_through(
    qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None
) -> jax.Array:
    context = Reference()(qkv, segment_ids, num_heads=num_heads, window=window)
    last = qkv[:, -1:, : context.shape[-1]]
    return jnp.where((segment_ids == 0)[:, :, None], 0, context + 0 * last)


def leaves_something_at_padding(
    qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None
) -> jax.Array:
    context = Reference()(qkv, segment_ids, num_heads=num_heads, window=window)
    return jnp.where((segment_ids == 0)[:, :, None], 1e-6, context)


def returns_another_type(
    qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None
) -> jax.Array:
    return Reference()(qkv, segment_ids, num_heads=num_heads, window=window).astype(jnp.bfloat16)


WRONG = [
    (fails_to_compile, "NotImplementedError: scoped vmem of 16 MiB exceeded"),
    (ignores_packing, "differs from the reference by"),
    (lets_nan_through, "differs from the reference by nan"),
    (leaves_something_at_padding, "the context of padding is not 0"),
    (returns_another_type, r"result is bfloat16\[4, 12, 16\]"),
]


def test_auto_takes_the_first_candidate_and_says_so_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        chosen = select("auto", CASES, CPU, candidates=(Fake("first"), Fake("second")))
    assert chosen.implementation == Fake("first")
    assert chosen.reasons == {}
    assert [record.getMessage() for record in caplog.records] == ["attention: first on cpu"]


def test_auto_passes_over_what_refuses_any_of_the_cases(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = select("auto", CASES, CPU, candidates=(Fake("short", longest=24), Fake("second")))
    assert chosen.implementation == Fake("second")
    assert chosen.reasons == {"short": "refuses float32 B=1 T=48 N=2 H=8: rows over 24"}
    (line,) = caplog.records
    assert line.levelname == "INFO"
    assert line.getMessage() == (
        "attention: second on cpu; not short: refuses float32 B=1 T=48 N=2 H=8: rows over 24"
    )


@pytest.mark.parametrize(("calls", "reason"), WRONG)
def test_auto_passes_over_what_fails_its_canary_with_a_warning_of_one_line(
    calls: Call, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = select("auto", CASES, CPU, candidates=(Fake("wrong", calls), Fake("second")))
    assert chosen.implementation == Fake("second")
    assert list(chosen.reasons) == ["wrong"]
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    assert line.getMessage().startswith(
        "attention: second on cpu; not wrong: canary float32 B=4 T=12 N=2 H=8: "
    )
    assert re.search(reason, line.getMessage())
    assert len(line.getMessage()) < 500
    assert "\n" not in line.getMessage()


@pytest.mark.parametrize(("calls", "reason"), WRONG)
def test_a_name_never_falls_back(calls: Call, reason: str) -> None:
    with pytest.raises(SelectionError, match=f"attention wrong: canary .*: ({reason})"):
        select("wrong", CASES, CPU, candidates=(Fake("wrong", calls), Fake("second")))


def test_a_name_that_refuses_is_an_error_with_the_refusal() -> None:
    with pytest.raises(
        SelectionError, match="attention short: refuses float32 B=1 T=48 N=2 H=8: rows over 24"
    ):
        select("short", CASES, CPU, candidates=(Fake("second"), Fake("short", longest=24)))


def test_a_name_is_taken_whatever_would_be_preferred_to_it() -> None:
    chosen = select("second", CASES, CPU, candidates=(Fake("first"), Fake("second")))
    assert (chosen.implementation, chosen.reasons) == (Fake("second"), {})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        SelectionError, match="'flash' is unknown; expected one of auto, pallas_tpu, xla, "
    ):
        select("flash", CASES, CPU)


def test_auto_without_any_usable_candidate_names_every_reason() -> None:
    candidates = (Fake("short", longest=24), Fake("broken", fails_to_compile))
    with pytest.raises(
        SelectionError, match=r"short: refuses .*rows over 24; broken: canary .*NotImplementedError"
    ):
        select("auto", CASES, CPU, candidates=candidates)


def test_the_canary_is_the_shortest_case_of_each_kind_and_small() -> None:
    seen = []

    def spy(
        qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None
    ) -> jax.Array:
        seen.append((*segment_ids.shape, str(qkv.dtype), window))
        return Reference()(qkv, segment_ids, num_heads=num_heads, window=window)

    cases = [
        *CASES,
        Case(B=64, T=40, N=2, H=8, dtype="bfloat16"),
        Case(B=1, T=24, N=2, H=8, dtype="float32", window=64),
        Case(B=1, T=96, N=2, H=8, dtype="float32", window=64),
    ]
    assert canary(Fake("spy", spy), cases, CPU).problem is None
    assert seen == [
        (4, 12, "float32", None),
        (1, 24, "float32", 6),  # a window of 64 would hide nothing of 24
        (4, 40, "bfloat16", None),
    ]


def test_the_canary_notices_a_window_that_is_ignored() -> None:
    case = Case(B=1, T=64, N=2, H=8, dtype="bfloat16", window=64)
    assert "differs" in str(canary(Fake("wrong", ignores_windows), [case], CPU).problem)
    assert canary(Fake("right"), [case], CPU).problem is None


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("implementation", [Xla(), REFERENCE], ids=lambda it: it.name)
def test_rows_too_short_for_two_texts_have_a_canary_too(
    implementation: Reference | Xla, T: int
) -> None:
    assert canary(implementation, [Case(B=4, T=T, N=1, H=8, dtype="bfloat16")], CPU).problem is None


def test_a_canary_tells_how_far_it_is_from_the_reference_and_how_long_it_takes() -> None:
    def slow_and_off(*call: jax.Array, **sizes: int) -> jax.Array:
        jax.debug.callback(lambda: time.sleep(0.05))
        return Reference()(*call, **sizes) * (1 + 2**-15)

    found = canary(Fake("slow and off", slow_and_off), CASES, CPU)
    assert found.problem is None
    assert 1e-6 < found.difference < 1e-4
    assert found.seconds >= 0.05
    assert canary(Fake("wrong", ignores_packing), CASES, CPU).difference > 0.1


def test_without_canaries_refusals_alone_decide() -> None:
    candidates = (Fake("short", longest=24), Fake("broken", fails_to_compile))
    chosen = select("auto", CASES, CPU, candidates=candidates, canaries=False)
    assert chosen.implementation == candidates[1]


def test_no_cases_is_an_error() -> None:
    with pytest.raises(ValueError, match="cases: expected at least one"):
        select("auto", [], CPU)


def test_a_model_on_cpu_runs_on_xla() -> None:
    cases = [Case(B=4, T=256, N=12, H=32, dtype=dtype) for dtype in ("float32", "bfloat16")]
    chosen = select("auto", cases, CPU)
    assert chosen.implementation == Xla()
    assert chosen.reasons == {
        "pallas_tpu": "refuses float32 B=4 T=256 N=12 H=32: needs a TPU",
    }
    assert [it.name for it in IMPLEMENTATIONS] == ["pallas_tpu", "xla", "reference"]
