"""Merge: rows of staged files, many and small, and of earlier partitions → the few files of a partition, sized for
readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.progress import Control
from pipeline.writing import RowGroupWriter, attention_metadata

READ_BYTES = 2**20  # of a column at a time
BATCH_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file some or all of whose rows go into the partition. It stays as it is."""

    path: str
    rows: int  # that go
    size_bytes: int  # that they take, about
    keep: np.ndarray | None = None  # bool[rows of the file]: which go; None: all
    facts: Mapping[str, Any]  # what its workers decided, see Figures.facts


@dataclass(frozen=True, kw_only=True)
class MergedFile:
    """A file of the partition, still in the folder it was built in."""

    path: str
    rows: int


def plan_merge(sources: Iterable[Source], *, max_rows: int, max_bytes: int) -> list[list[Source]]:
    """Which sources make which file, in order; one at least half as big as allowed stands alone.

    `max_bytes` is checked with the sources' sizes, which merging seldom raises.
    """
    groups: list[list[Source]] = []
    small: list[Source] = []
    rows = size = 0
    for source in sources:
        if 2 * source.rows >= max_rows or 2 * source.size_bytes >= max_bytes:
            groups.append([source])
            continue
        if small and (rows + source.rows > max_rows or size + source.size_bytes > max_bytes):
            groups.append(small)
            small, rows, size = [], 0, 0
        small.append(source)
        rows += source.rows
        size += source.size_bytes
    return [*groups, small] if small else groups


def merge(
    sources: Iterable[Source],
    schema: pa.Schema,
    *,
    folder: str,
    stem: str,
    max_rows: int,
    max_bytes: int,
    control: Control,
) -> Iterator[MergedFile]:
    """Builds the partition's files `STEM-00000.parquet`, … in `folder`, at least one even without rows.

    Sources stay as they are, whatever happens: they are what an interrupted publication goes on from. Memory is bounded
    by about two row groups.

    Raises:
      Stopped: the run was asked to stop.
    """
    groups = plan_merge(sources, max_rows=max_rows, max_bytes=max_bytes)
    for number, group in enumerate(groups or [[]]):
        control.raise_if_stopping()
        path = storage.join(folder, f"{stem}-{number:05}.parquet")
        if len(group) == 1 and group[0].keep is None:
            storage.copy(group[0].path, path)
        else:
            _concatenate(group, schema, path, control)
        yield MergedFile(path=path, rows=sum(source.rows for source in group))


def _concatenate(group: Sequence[Source], schema: pa.Schema, path: str, control: Control) -> None:
    writer = RowGroupWriter(path, schema)
    try:
        for source in group:
            for table in _batches(source):
                control.raise_if_stopping()
                writer.write(table.cast(schema))
        writer.close(attention_metadata(source.facts for source in group))
    except BaseException:
        writer.abort()
        raise


def _batches(source: Source) -> Iterator[pa.Table]:
    with storage.open_input(source.path) as file:
        parquet = pq.ParquetFile(file, buffer_size=READ_BYTES)
        start = 0
        for batch in parquet.iter_batches(BATCH_ROWS, use_threads=False):
            table = pa.Table.from_batches([batch])
            stop = start + table.num_rows
            if source.keep is not None:
                table = table.filter(pa.array(source.keep[start:stop]))
            start = stop
            yield table
