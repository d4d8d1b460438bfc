"""Merge: staged files, many and small, → the few files of a partition, sized for readers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.progress import Control
from pipeline.sidecars import Sidecar
from pipeline.writing import RowGroupWriter, attention_metadata

READ_BYTES = 2**20  # of a column at a time
BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class MergedFile:
    """A file of the partition, still in the folder it was built in."""

    path: str
    rows: int


def plan_merge(staged: Sequence[Sidecar], *, max_rows: int, max_bytes: int) -> list[list[Sidecar]]:
    """Which staged files make which file, in order; a file at least half as big as allowed stands alone.

    `max_bytes` is checked with the staged sizes, which merging seldom raises.
    """
    groups: list[list[Sidecar]] = []
    small: list[Sidecar] = []
    rows = size = 0
    for sidecar in staged:
        if 2 * sidecar.rows >= max_rows or 2 * sidecar.size_bytes >= max_bytes:
            groups.append([sidecar])
            continue
        if small and (rows + sidecar.rows > max_rows or size + sidecar.size_bytes > max_bytes):
            groups.append(small)
            small, rows, size = [], 0, 0
        small.append(sidecar)
        rows += sidecar.rows
        size += sidecar.size_bytes
    return [*groups, small] if small else groups


def merge(
    staged: Sequence[Sidecar],
    left_out: Mapping[str, frozenset[int]],
    schema: pa.Schema,
    *,
    folder: str,
    stem: str,
    max_rows: int,
    max_bytes: int,
    control: Control,
) -> Iterator[MergedFile]:
    """Builds the partition's files `STEM-00000.parquet`, … in `folder`, at least one even without rows.

    `left_out` names rows, by the staged file's path, that do not come along. Staged files stay as they are, whatever
    happens: they are what an interrupted publication goes on from. Memory is bounded by about two row groups.

    Raises:
      Stopped: the run was asked to stop.
    """
    groups = plan_merge(staged, max_rows=max_rows, max_bytes=max_bytes)
    for number, group in enumerate(groups or [[]]):
        control.raise_if_stopping()
        path = storage.join(folder, f"{stem}-{number:05}.parquet")
        alone = len(group) == 1 and not left_out.get(group[0].file_path)
        if alone:
            storage.copy(group[0].file_path, path)
            yield MergedFile(path=path, rows=group[0].rows)
        else:
            rows = _concatenate(group, left_out, schema, path, control)
            yield MergedFile(path=path, rows=rows)


def _concatenate(
    group: Sequence[Sidecar],
    left_out: Mapping[str, frozenset[int]],
    schema: pa.Schema,
    path: str,
    control: Control,
) -> int:
    rows = 0
    writer = RowGroupWriter(path, schema)
    try:
        for sidecar in group:
            for table in _batches(sidecar, left_out.get(sidecar.file_path, frozenset())):
                control.raise_if_stopping()
                writer.write(table.cast(schema))
                rows += table.num_rows
        writer.close(attention_metadata(sidecar.figures.facts for sidecar in group))
    except BaseException:
        writer.abort()
        raise
    return rows


def _batches(sidecar: Sidecar, left_out: frozenset[int]) -> Iterator[pa.Table]:
    with storage.open_input(sidecar.file_path) as file:
        parquet = pq.ParquetFile(file, buffer_size=READ_BYTES)
        start = 0
        for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
            table = pa.Table.from_batches([batch])
            stop = start + table.num_rows
            if left_out:
                keep = ~np.isin(np.arange(start, stop), list(left_out))
                table = table.filter(pa.array(keep))
            start = stop
            yield table
