"""Merge: many small staged files → few files sized for readers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import sidecars
from pipeline.merging import Source, merge, plan_merge
from pipeline.progress import Control
from staged_case import make_rows, make_run, make_unit, stage

UNIT = make_unit()


def fake(rows: int, size: int, name: str = "a") -> Source:
    return Source(path=name, rows=rows, size_bytes=size, facts={})


def merged(tmp_path: Path, *several: range, left_out=None, **limits) -> list[pa.Table]:
    run = make_run(tmp_path, [UNIT])
    sources = []
    for number, file in enumerate(
        stage(run, *(make_rows(run, UNIT, positions) for positions in several))
    ):
        sidecar = sidecars.read(file.sidecar)
        keep = ~np.isin(range(sidecar.rows), (left_out or {}).get(number, []))
        sources.append(
            Source(
                path=sidecar.file_path,
                rows=int(keep.sum()),
                size_bytes=sidecar.size_bytes,
                keep=None if keep.all() else keep,
                facts=sidecar.figures.facts,
            )
        )
    files = list(
        merge(
            sources,
            run.schema,
            folder=str(tmp_path / "built"),
            stem="part",
            **({"max_rows": 1000, "max_bytes": 10**9} | limits),
            control=Control(None),
        )
    )
    tables = [pq.read_table(file.path) for file in files]
    assert [table.num_rows for table in tables] == [file.rows for file in files]
    assert all(table.schema.equals(run.schema) for table in tables)
    assert all(Path(source.path).exists() for source in sources), "sources stay"
    return tables


def records(tables: list[pa.Table]) -> list[list[int]]:
    return [[int(record) for record in table["record"].to_pylist()] for table in tables]


def test_a_small_run_gives_one_file_with_one_row_group(tmp_path):
    [rows] = records(merged(tmp_path, range(3), range(3, 4), range(4, 9)))
    assert sorted(rows) == list(range(9))
    assert pq.ParquetFile(tmp_path / "built" / "part-00000.parquet").num_row_groups == 1


def test_nothing_gives_one_empty_file_of_the_schema(tmp_path):
    assert records(merged(tmp_path)) == [[]]


def test_a_file_at_least_half_as_big_as_allowed_is_taken_as_it_is(tmp_path):
    tables = merged(tmp_path, range(5), range(5, 7), range(7, 9), max_rows=10)
    assert sorted(map(len, tables)) == [4, 5]


def test_merged_rows_are_those_of_the_sources(tmp_path):
    [table] = merged(tmp_path, range(3), range(3, 6))
    for row in table.to_pylist():
        position = int(row["record"])
        assert row["embedding"] == [position, position + 0.125, position + 0.25, position + 0.375]


def test_rows_left_out_are_left_out_also_of_a_big_file(tmp_path):
    tables = merged(tmp_path, range(10), range(10, 12), left_out={0: [0, 9], 1: [1]}, max_rows=10)
    assert sorted(row for rows in records(tables) for row in rows) == [*range(1, 9), 10]


def test_the_attention_of_merged_files_is_known(tmp_path):
    merged(tmp_path, range(3), range(3, 6))
    metadata = pq.read_metadata(tmp_path / "built" / "part-00000.parquet").metadata
    assert metadata[b"lengthwise.attention"] == b"xla"


@pytest.mark.parametrize(("rows", "size"), [(1, 60), (60, 1)])
def test_rows_and_bytes_both_bound_a_file(rows, size):
    groups = plan_merge([fake(rows // 2, size // 2)] * 7, max_rows=100, max_bytes=100)
    assert [len(group) for group in groups] == [3, 3, 1]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 1000)), max_size=60))
def test_every_source_is_in_one_group_and_no_group_is_too_big_or_two_could_be_one(sizes):
    sources = [fake(rows, size, str(number)) for number, (rows, size) in enumerate(sizes)]
    groups = plan_merge(sources, max_rows=100, max_bytes=1000)
    assert sorted(int(s.path) for group in groups for s in group) == list(range(len(sources)))
    totals = [(sum(s.rows for s in g), sum(s.size_bytes for s in g)) for g in groups]
    assert all(rows <= 100 and size <= 1000 for rows, size in totals)
    merges = [total for total, group in zip(totals, groups, strict=True) if len(group) > 1]
    assert all(rows > 50 or size > 500 for rows, size in merges[:-1])
