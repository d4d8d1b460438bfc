"""A planned batch as the arrays of the device, and as smaller batches of the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeline.records import Load, PlannedBatch


def segments(batch: PlannedBatch) -> np.ndarray:
    """int32[windows]: the number (1, 2, …) of each window among those of its row, by column."""
    order = np.lexsort([batch.columns, batch.rows])
    rows = batch.rows[order]
    numbers = np.empty(len(rows), np.int32)
    numbers[order] = np.arange(len(rows)) - np.searchsorted(rows, rows) + 1
    return numbers


def arrays(load: Load, batch: PlannedBatch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """token_ids, segment_ids and positions of a device batch, each int32[B, T]."""
    special = load.special
    token_ids = np.full([batch.B, batch.T], special.pad_id, np.int32)
    segment_ids = np.zeros([batch.B, batch.T], np.int32)
    positions = np.zeros([batch.B, batch.T], np.int32)
    before = len(special.start_ids)
    places_in_batch = (batch.windows, batch.rows, batch.columns, segments(batch))
    for window, row, column, segment in zip(*(a.tolist() for a in places_in_batch), strict=True):
        document, start, stop = load.window_table[window].tolist()
        content = column + before + stop - start
        end = content + len(special.end_ids)
        token_ids[row, column : column + before] = special.start_ids
        token_ids[row, column + before : content] = load.documents[document].token_ids[start:stop]
        token_ids[row, content:end] = special.end_ids
        segment_ids[row, column:end] = segment
        positions[row, column:end] = np.arange(end - column)
    return token_ids, segment_ids, positions


def subset(batch: PlannedBatch, keep: np.ndarray) -> PlannedBatch:
    """The same shape with only some of the windows (`keep` indexes or masks them)."""
    return replace(
        batch, windows=batch.windows[keep], rows=batch.rows[keep], columns=batch.columns[keep]
    )


def half_windows(batch: PlannedBatch) -> list[PlannedBatch]:
    middle = len(batch.windows) // 2
    index = np.arange(len(batch.windows))
    return [subset(batch, index < middle), subset(batch, index >= middle)]


def half_rows(batch: PlannedBatch) -> Iterator[PlannedBatch]:
    """Two batches of half the rows (B is a power of two, so the halves are shapes of the table); an empty one is left out."""
    half = batch.B // 2
    for low in (0, half):
        part = subset(batch, (batch.rows >= low) & (batch.rows < low + half))
        if len(part.windows):
            yield replace(part, B=half, rows=part.rows - low)
