"""Lays token ids out as the device batches that a Predictor takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def device_batch(
    rows: Sequence[Sequence[Sequence[int] | np.ndarray]], T: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """token_ids, segment_ids and positions, int32[rows, T], of rows that hold several texts each (or none)."""
    token_ids, segment_ids, positions = np.zeros([3, len(rows), T], np.int32)
    for row, texts in enumerate(rows):
        column = 0
        for segment, ids in enumerate(texts, start=1):
            place = slice(column, column + len(ids))
            token_ids[row, place] = ids
            segment_ids[row, place] = segment
            positions[row, place] = np.arange(len(ids))
            column += len(ids)
    return token_ids, segment_ids, positions
