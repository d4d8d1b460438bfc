"""The planner: lengths of windows → device batches of a few shapes, at the least estimated time.

Windows share rows: each goes where it fits best, longest first, and opens a row of the narrowest width in use when it fits
nowhere. Which shapes are in use is decided apart (`choose_shapes`), since each is one more program to compile: a small
corpus gets by with one, and the more has passed, the more of them pay off.

Nothing of it shows in the results.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from pipeline.records import PlannedBatch
from pipeline.shapes import CostModel, Shape, ShapeTable

# So many quantiles stand for all lengths that have passed when shapes are chosen.
SAMPLE = 128
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
    widest = max(full)
    if descending[0] > widest:
        raise ValueError(f"lengths: expected at most {widest}, got {descending[0]}")
    row, column, width = _pack(descending, sorted(full))
    loose = _loose(width, full, table.cost)
    moved = np.flatnonzero(loose[row])
    if len(moved):
        row[moved], column[moved], more = _pack([descending[i] for i in moved], [widest])
        row[moved] += len(width)
        width = np.concatenate([np.where(loose, 0, width), more])

    shapes: list[Shape] = []
    batch_of_row = np.zeros(len(width), np.int32)
    place_of_row = np.zeros(len(width), np.int32)
    for T in sorted(full, reverse=True):
        rows = np.flatnonzero(width == T)
        sizes = _sizes(len(rows), full[T], table, in_use)
        batch_of_row[rows] = np.repeat(np.arange(len(sizes)), sizes)[: len(rows)] + len(shapes)
        place_of_row[rows] = [place for B in sizes for place in range(B)][: len(rows)]
        shapes += [(B, T) for B in sizes]

    batch, place = batch_of_row[row], place_of_row[row]
    by_place = np.lexsort([place, batch])  # stable: a row was filled from its start
    windows, place, column = order[by_place], place[by_place], column[by_place]
    stops = np.cumsum(np.bincount(batch, minlength=len(shapes))).tolist()
    return tuple(
        PlannedBatch(
            B=B,
            T=T,
            windows=windows[start:stop],
            rows=place[start:stop],
            columns=column[start:stop],
        )
        for (B, T), start, stop in zip(shapes, [0, *stops[:-1]], stops, strict=True)
    )


def _pack(
    descending: Sequence[int], widths: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where windows go, best fit first: row and column of each (int32[n]), and the width of each row (int32[rows])."""
    free: list[list[int]] = [[] for _ in range(widths[-1] + 1)]  # rows by the tokens left in them
    some_free = 0  # bit f is set where free[f] holds a row: finds the best fit in one step
    rows: list[int] = []
    columns: list[int] = []
    width: list[int] = []
    places_left: list[int] = []
    for length in descending:
        fitting = some_free >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            candidates = free[left]
            row = candidates.pop()
            if not candidates:
                some_free ^= 1 << left
        else:
            row = len(width)
            left = widths[bisect_left(widths, length)]
            width.append(left)
            places_left.append(places(left))
        rows.append(row)
        columns.append(width[row] - left)
        left -= length
        places_left[row] -= 1
        if left and places_left[row]:
            if not free[left]:
                some_free |= 1 << left
            free[left].append(row)
    return np.array(rows, np.int32), np.array(columns, np.int32), np.array(width, np.int32)


def _loose(width: np.ndarray, full: Mapping[int, Shape], cost: CostModel) -> np.ndarray:
    """bool[rows]: the last rows of a width, too few for a batch, that take less time when moved to the widest."""
    loose = np.zeros(len(width), bool)
    widest = max(full)
    for T, (B, _) in full.items():
        rows = np.flatnonzero(width == T)
        rest = len(rows) % B
        if T < widest and rest * T * cost.token(widest) < cost.batch(B, T):
            loose[rows[len(rows) - rest :]] = True
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
        _, _, width = _pack(descending, widths)
        result = len(shapes - compiled) * cost.compile_seconds
        for T in widths:
            rows = np.count_nonzero(width == T) * total / size
            result += rows * cost.batch(*full[T]) / full[T][0]
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
    if _widest(in_use) >= longest:
        candidates.append(in_use)
    best = min(candidates, key=seconds)
    while True:
        candidates = [v for v in variants(best) if len(v | compiled) <= MOST_PROGRAMS]
        better = min(candidates, key=seconds, default=best)
        if seconds(better) >= seconds(best):
            return best
        best = better


def _widest(shapes: Collection[Shape]) -> int:
    return max((T for _, T in shapes), default=0)
