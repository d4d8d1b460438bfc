"""The planner: lengths of windows → device batches of a few shapes, at the least estimated time.

Windows share rows: each goes where it fits best, longest first, and opens a row of the narrowest width in use when it fits
nowhere. Which shapes are in use is decided apart (`choose_shapes`), since each is one more program to compile: a small
corpus gets by with one, and the more has passed, the more of them pay off.

Nothing of it shows in the results.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from pipeline.records import PlannedBatch
from pipeline.shapes import CostModel, Shape, ShapeTable

# Windows (by number) and the columns at which they start.
Row = list[tuple[int, int]]

# So many quantiles stand for all lengths that have passed when shapes are chosen.
SAMPLE = 64
# More programs than this are never compiled for the sake of speed.
MOST_PROGRAMS = 17


def places(T: int) -> int:
    """How many windows a row of T tokens may hold. Each takes a place in the result, used or not; hardly a window is
    shorter than 4 tokens, so next to nothing is lost by the limit."""
    return max(1, T // 4)


def plan(
    lengths: np.ndarray, table: ShapeTable, in_use: Collection[Shape] | None = None
) -> tuple[PlannedBatch, ...]:
    """Device batches that compute windows of these lengths (int32[n], special tokens included), each once; widest first.

    What comes out depends on the lengths alone and not on their order, but for which of several windows of
    one length is which.

    Args:
      in_use: shapes that may be used, a full one of each width among them; default: all full ones of the table.

    Raises:
      ValueError: a window is longer than every shape.
    """
    if len(lengths) == 0:
        return ()
    in_use = frozenset(table.full if in_use is None else in_use)
    full = {T: (B, T) for B, T in table.full if (B, T) in in_use}
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    descending = lengths[order].tolist()
    widths = list(full)
    widest = widths[-1]
    if descending[0] > widest:
        raise ValueError(f"lengths: expected at most {widest}, got {descending[0]}")
    rows = _pack(enumerate(descending), widths)
    moved = sorted(window for row in _loose(rows, full, table.cost) for window, _ in row)
    rows[widest] += _pack(((window, descending[window]) for window in moved), [widest])[widest]

    # Lists first: for a few windows at a time they take half the time of arrays.
    windows: list[int] = []
    row_of: list[int] = []
    column_of: list[int] = []
    stops: list[tuple[Shape, int]] = []
    for T in reversed(widths):
        remaining = iter(rows[T])
        for B in _sizes(len(rows[T]), full[T], table, in_use):
            for number, row in enumerate(islice(remaining, B)):
                for window, column in row:
                    windows.append(window)
                    row_of.append(number)
                    column_of.append(column)
            stops.append(((B, T), len(windows)))
    w, r, c = order[windows], np.array(row_of, np.int32), np.array(column_of, np.int32)
    batches = []
    start = 0
    for (B, T), stop in stops:
        part = slice(start, stop)
        batches.append(PlannedBatch(B=B, T=T, windows=w[part], rows=r[part], columns=c[part]))
        start = stop
    return tuple(batches)


def _pack(lengths: Iterable[tuple[int, int]], widths: Sequence[int]) -> dict[int, list[Row]]:
    """Rows of each width that hold windows (number, length), which come longest first: each goes where it fits best."""
    rows: dict[int, list[Row]] = {T: [] for T in widths}
    free: defaultdict[int, list[tuple[int, Row]]] = defaultdict(list)  # rows by the tokens left
    some_free = 0  # bit f is set where free[f] holds a row: finds the best fit in one step
    for window, length in lengths:
        if fitting := some_free >> length:
            left = length + (fitting & -fitting).bit_length() - 1
            candidates = free[left]
            T, row = candidates.pop()
            if not candidates:
                some_free ^= 1 << left
        else:
            left = T = widths[bisect_left(widths, length)]
            row = []
            rows[T].append(row)
        row.append((window, T - left))
        left -= length
        if left and len(row) < places(T):
            free[left].append((T, row))
            some_free |= 1 << left
    return rows


def _loose(rows: Mapping[int, list[Row]], full: Mapping[int, Shape], cost: CostModel) -> list[Row]:
    """Takes out the last rows of a width, too few for a batch, that take less time when moved to the widest."""
    loose: list[Row] = []
    widest = max(full)
    for T, (B, _) in full.items():
        rest = len(rows[T]) % B
        if T < widest and rest * T * cost.token(widest) < cost.batch(B, T):
            whole = len(rows[T]) - rest
            loose += rows[T][whole:]
            del rows[T][whole:]
    return loose


def _sizes(rows: int, full: Shape, table: ShapeTable, in_use: Collection[Shape]) -> list[int]:
    """B of each batch for so many rows of one width: full ones, then what takes least time for the rest."""
    B, T = full
    sizes = [B] * (rows // B)
    if rest := rows % B:
        quarter, _ = table.quarter(full)
        quarters = -(-rest // quarter)
        several = quarters * table.cost.batch(quarter, T)
        if (quarter, T) in in_use and several < table.cost.batch(B, T):
            sizes += [quarter] * quarters
        else:
            sizes.append(B)
    return sizes


class Planner:
    """Plans one Load after another with shapes that suit what has passed, chosen anew whenever that has doubled."""

    def __init__(self, table: ShapeTable) -> None:
        self._table = table
        self._counts = np.zeros(table.full[-1][1] + 1, np.int64)
        self._loads = 0
        self._tokens_at_choice = 0
        self._in_use: frozenset[Shape] = frozenset()
        self._compiled: frozenset[Shape] = frozenset()

    def plan(self, lengths: np.ndarray) -> tuple[PlannedBatch, ...]:
        """As the function `plan`."""
        if len(lengths) == 0:
            return ()
        if lengths.max() >= len(self._counts):
            raise ValueError(
                f"lengths: expected at most {len(self._counts) - 1}, got {lengths.max()}"
            )
        self._loads += 1
        self._counts += np.bincount(lengths, minlength=len(self._counts))
        tokens = int(self._counts @ np.arange(len(self._counts)))
        if tokens >= 2 * self._tokens_at_choice or lengths.max() > _widest(self._in_use):
            self._tokens_at_choice = tokens
            self._in_use = choose_shapes(
                self._counts, self._loads, self._table, self._in_use, self._compiled
            )
        batches = plan(lengths, self._table, self._in_use)
        self._compiled |= {(batch.B, batch.T) for batch in batches}
        return batches


def choose_shapes(
    counts: np.ndarray,
    loads: int,
    table: ShapeTable,
    in_use: frozenset[Shape] = frozenset(),
    compiled: frozenset[Shape] = frozenset(),
) -> frozenset[Shape]:
    """The shapes with which all that has passed would have taken the least time, compiling new ones included.

    So a shape comes into use when it would already have saved what it costs: not too early for a small corpus,
    nor much too late for a large one.

    Args:
      counts: int[T + 1], how many windows of each length have passed; at least one.
      loads: how many Loads they made.
      in_use: a set to improve on. The search adds or drops one shape at a time.
      compiled: shapes that cost nothing to use.
    """
    total = int(counts.sum())
    longest = int(np.flatnonzero(counts)[-1])
    size = min(total, SAMPLE)
    ranks = (np.arange(size) + 0.5) * total / size
    descending = np.searchsorted(np.cumsum(counts), ranks, side="right")[::-1].tolist()
    full = {T: (B, T) for B, T in table.full}
    cost = table.cost

    @functools.cache
    def seconds(shapes: frozenset[Shape]) -> float:
        widths = sorted({T for _, T in shapes})
        rows = _pack(enumerate(descending), widths)
        result = len(shapes - compiled) * cost.compile_seconds
        for T in widths:
            result += len(rows[T]) * total / size * cost.batch(*full[T]) / full[T][0]
            if T < widths[-1]:
                # What moving a Load's loose rows, or padding them, costs on the average.
                result += loads * cost.batch(*full[T]) / 8
        last = table.quarter(full[widths[-1]])
        return result + loads * cost.batch(*(last if last in shapes else full[widths[-1]])) / 2

    def variants(shapes: frozenset[Shape]) -> Iterator[frozenset[Shape]]:
        """One width more or less, or the other answer to whether the last batch may be a quarter."""
        fulls = shapes.intersection(table.full)
        quarter = fulls != shapes
        others = [(fulls, not quarter), *((fulls ^ {shape}, quarter) for shape in table.full)]
        for changed, with_quarter in others:
            if _widest(changed) >= longest:
                last = table.quarter(full[_widest(changed)])
                yield changed | {last} if with_quarter else changed

    candidates = [frozenset([shape]) for shape in table.full if shape[1] >= longest]
    candidates += [s for s in (in_use, compiled & {*table.full}) if _widest(s) >= longest]
    best = min(candidates, key=seconds)
    # Goes on while one more program might pay for itself: no set does better than if nothing were padded.
    floor = _least_seconds(descending, table) * total / size
    while seconds(best) - floor > cost.compile_seconds * (1 + len(best - compiled)):
        candidates = [v for v in variants(best) if len(v | compiled) <= MOST_PROGRAMS]
        better = min(candidates, key=seconds, default=best)
        if seconds(better) >= seconds(best):
            break
        best = better
    return best


def _least_seconds(lengths: Sequence[int], table: ShapeTable) -> float:
    """What windows would take if batches of the best width for each were always full."""
    token = [table.cost.batch(B, T) / (B * T) for B, T in table.full]
    best = [min(token[i:]) for i in range(len(token))]
    widths = [T for _, T in table.full]
    return sum(length * best[bisect_left(widths, length)] for length in lengths)


def _widest(shapes: Collection[Shape]) -> int:
    return max((T for _, T in shapes), default=0)
