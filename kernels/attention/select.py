"""Which attention implementation a model runs with: decided once, when it is loaded, and explained."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.contract import Attention, Case
from kernels.attention.pallas_tpu import PallasTpu
from kernels.attention.reference import Reference
from kernels.attention.xla import Xla

AUTO = "auto"

# Every implementation, in the order in which `auto` tries them.
IMPLEMENTATIONS: tuple[Attention, ...] = (PallasTpu(), Xla(), Reference())

# How far the canary may be from the reference. Its values are standard normal, so a wrong mask shows as
# differences of 0.1 and more.
CANARY_TOLERANCE = {
    "float32": 1e-4,  # another order of summing, another exp: 1e-6 on CPU, some 1e-5 elsewhere
    "bfloat16": 3e-2,  # weights and result are rounded to 8 bits: 2**-9 of values up to 4, twice
}

log = logging.getLogger(__name__)


class SelectionError(Exception):
    """No implementation can be used as asked. Says which were tried, and what stood against each."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The implementation chosen, and for each one that was preferred to it, by name, why it was not."""

    implementation: Attention
    reasons: Mapping[str, str]


def select(
    name: str,
    cases: Sequence[Case],
    device: jax.Device,
    *,
    candidates: Sequence[Attention] = IMPLEMENTATIONS,
    canaries: bool = True,
) -> Selection:
    """The implementation called `name`; with "auto", the first that no refusal and no canary speaks against.

    Writes one line to the log. A name never falls back to another implementation.

    Args:
      cases: every kind of call the model will make (all shapes, all windows); the one implementation serves
        them all.
      device: where it will run.
      candidates: in order of preference.
      canaries: False where the device is only described, and nothing can run on it.

    Raises:
      SelectionError: the name is unknown, or it (with "auto": every candidate) refuses or fails.
    """
    wanted = [it for it in candidates if name in (AUTO, it.name)]
    if not wanted:
        known = ", ".join([AUTO, *(it.name for it in candidates)])
        raise SelectionError(f"attention {name!r} is unknown; expected one of {known}")
    reasons: dict[str, str] = {}
    level = logging.INFO
    for implementation in wanted:
        reason = refusal(implementation, cases, device)
        if reason is None and canaries:
            reason = canary(implementation, cases, device).problem
            if reason is not None:
                level = logging.WARNING  # a refusal is expected, this is not
        if reason is None:
            passed_over = "".join(f"; not {other}: {why}" for other, why in reasons.items())
            chosen = f"{implementation.name} on {device.device_kind}"
            log.log(level, "attention: %s%s", chosen, passed_over)
            return Selection(implementation=implementation, reasons=reasons)
        reasons[implementation.name] = reason
    against = "; ".join(f"{other}: {why}" for other, why in reasons.items())
    raise SelectionError(
        f"no attention implementation can be used on {device.device_kind}. {against}"
        if name == AUTO
        else f"attention {against} (on {device.device_kind}; {AUTO!r} takes one that can be used)"
    )


def refusal(implementation: Attention, cases: Sequence[Case], device: jax.Device) -> str | None:
    """The first refusal of any of the cases, or None."""
    if not cases:
        raise ValueError("cases: expected at least one, got none")
    for case in cases:
        reason = implementation.refusal(case, device)
        if reason is not None:
            return f"refuses {_short(case)}: {reason}"
    return None


@dataclass(frozen=True, kw_only=True)
class Canary:
    """What came of the small batches on which an implementation is tried.

    Attributes:
      problem: what is wrong, in one line, or None.
      difference: the largest from the reference, whatever is allowed; 0 where it got nowhere.
      seconds: of the slowest batch, once compiled.
    """

    problem: str | None
    difference: float
    seconds: float


def canary(implementation: Attention, cases: Sequence[Case], device: jax.Device) -> Canary:
    """How it does on a small batch for each kind of call, packed, padded, with NaN in the padding, compared with the
    reference on the device itself. Stops at the first that goes wrong."""
    difference = seconds = 0.0
    for case in _canaries(cases):
        try:
            problem, differs, took = _compare(implementation, case, device)
        # Any exception: compilers fail in ways of their own, and none of them may stop a run on "auto".
        except Exception as error:
            problem, differs, took = f"{type(error).__name__}: {error}", 0.0, 0.0
        difference, seconds = max(difference, differs), max(seconds, took)
        if problem is not None:
            problem = f"canary {_short(case)}: {_one_line(problem)}"
            return Canary(problem=problem, difference=difference, seconds=seconds)
    return Canary(problem=None, difference=difference, seconds=seconds)


def _canaries(cases: Sequence[Case]) -> Iterator[Case]:
    """For each kind of call, its shortest case with few rows and a window that cuts something off."""
    shortest: dict[tuple[Any, ...], Case] = {}
    for case in sorted(cases, key=lambda case: case.T):
        shortest.setdefault((case.N, case.H, case.dtype, case.window), case)
    for case in shortest.values():
        window = None if case.window is None else min(case.window, case.T // 4)
        yield replace(case, B=min(case.B, 4), window=window)


def _compare(
    implementation: Attention, case: Case, device: jax.Device
) -> tuple[str | None, float, float]:
    """Of a canary: what is wrong, or None; its largest difference from the reference; seconds it takes."""
    # Rows in order of what they can tell, as a case may have only one: two texts and padding, a full
    # row, nothing but padding, a single token.
    lengths = [(case.T // 3, case.T // 3), (case.T,), (), (1,)][: case.B]
    segment_ids = np.zeros((case.B, case.T), np.int32)
    for row, row_lengths in enumerate(lengths):
        ids = np.repeat(np.arange(1, len(row_lengths) + 1), row_lengths)
        segment_ids[row, : len(ids)] = ids
    padding = segment_ids == 0
    values = np.random.default_rng(0).standard_normal((case.B, case.T, 3 * case.N * case.H))
    values[padding] = np.nan
    qkv = jax.device_put(jnp.asarray(values, case.dtype), device)
    ids_on_device = jax.device_put(segment_ids, device)

    def run(attention: Attention) -> np.ndarray:
        call = _compiled(attention)
        context = call(qkv, ids_on_device, num_heads=case.N, window=case.window)
        if (context.shape, context.dtype) != ((case.B, case.T, case.N * case.H), qkv.dtype):
            raise ValueError(f"result is {context.dtype}{list(context.shape)}")
        return np.asarray(context, np.float32)

    run(implementation)  # compiles
    started = time.perf_counter()
    context = run(implementation)
    seconds = time.perf_counter() - started
    difference = float(np.abs(context - run(Reference())).max())
    tolerance = CANARY_TOLERANCE[case.dtype]
    problem = None
    if context[padding].any():  # NaN counts as true
        problem = "the context of padding is not 0"
    elif not difference <= tolerance:  # so that NaN fails
        problem = f"differs from the reference by {difference:.2g}, more than {tolerance:g}"
    return problem, difference, seconds


@functools.cache  # so that the reference is compiled once for all candidates
def _compiled(attention: Attention) -> Callable[..., jax.Array]:
    return jax.jit(attention, static_argnames=("num_heads", "window"))


def _short(case: Case) -> str:
    window = "" if case.window is None else f", window {case.window}"
    return f"{case.dtype} B={case.B} T={case.T} N={case.N} H={case.H}{window}"


def _one_line(text: str) -> str:
    """The text on one line, without the pages that compilers append."""
    line = " ".join(text.split())
    return line if len(line) <= 300 else line[:300] + " …"
