"""A row of a Parquet file becomes a document, or a failure that says what is wrong with it."""

from __future__ import annotations

import bz2
import datetime
import gzip
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config import ReadingSettings
from pipeline.listing import field_types, list_units
from pipeline.reading import read_unit
from read_files import read, read_chunks, reason, settings_for, texts, unit_of


def write(folder: Path, columns: dict[str, Any], **options: Any) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table(columns), path, **options)
    return path


def not_utf8(values: Sequence[bytes]) -> pa.Array:
    """A string column whose bytes nobody has checked, as other writers make them."""
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def test_a_row_is_a_document_at_its_number_in_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"n": [1, 2, 3], "text": ["a", "ü", "c"]}, row_group_size=2)
    documents, failures = read(path)
    assert [(one.position, one.record, one.text) for one in documents] == [
        (0, "0", "a"),
        (1, "1", "ü"),
        (2, "2", "c"),
    ]
    assert documents[1].size_bytes == 2
    assert {one.media_type for one in documents} == {"application/vnd.apache.parquet"}
    assert failures == []


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["ä", "b"]),
        pa.array(["ä", "b"], pa.large_string()),
        pa.array(["ä", "b"]).dictionary_encode(),
        pa.array(["ä", "b"], pa.large_string()).dictionary_encode(),
        pa.array(["ä", "b"], pa.string_view()),
        pa.array(["ä", "b"], pa.json_()),
        pa.array(["ä", "b"], pa.json_(pa.large_string())),
        pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "a", "b"), pa.array(["ä", "b"])),
        pa.array(["ä".encode(), b"b"], pa.binary_view()),
        pa.array(["ä".encode(), b"b"]),
        pa.array(["ä".encode(), b"b"], pa.large_binary()),
    ],
)
def test_strings_and_bytes_of_every_arrow_kind_are_text(tmp_path: Path, column: pa.Array) -> None:
    assert texts(write(tmp_path, {"text": column})) == ["ä", "b"]


def test_bytes_are_decoded_as_declared_and_strings_are_utf8(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": pa.array(["ä".encode("latin-1")]), "other": ["ä"]})
    assert texts(path, encoding="latin-1") == ["ä"]
    assert texts(path, encoding="latin-1", text_field="other") == ["ä"]
    assert reason(path) == "undecodable_text"


@pytest.mark.parametrize(
    ("value", "expected"), [("", "empty"), (" \n", "whitespace_only"), ("a\0", "nul_bytes"), (None, "text_not_string"), ("x" * 600, "too_large")]
)  # fmt: skip
def test_a_row_without_usable_text_is_one_failure(
    tmp_path: Path, value: str | None, expected: str
) -> None:
    path = write(tmp_path, {"text": ["good", value, "good"]})
    documents, [failure] = read(path, max_document_bytes=500)
    assert [document.position for document in documents] == [0, 2]
    assert (failure.reason, failure.position, failure.record, failure.step) == (
        expected,
        1,
        "1",
        "decode",
    )


def test_a_string_that_is_not_utf8_costs_no_other_row(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": not_utf8([b"a", b"\xff", b"c"])})
    documents, [failure] = read(path)
    assert [document.text for document in documents] == ["a", "c"]
    assert (failure.reason, failure.position) == ("undecodable_text", 1)


@pytest.mark.parametrize(
    "column",
    [pa.array([1, 2]), pa.array([1.5, 2]), pa.array([True, False]), pa.array([["a"], ["b"]]), pa.array([{"text": "a"}] * 2),
     pa.array([None, None]), pa.array([b"ab", b"cd"], pa.binary(2)), pa.array([b"a" * 16] * 2, pa.uuid())],
)  # fmt: skip
def test_a_text_column_of_another_type_is_a_failure_a_row(tmp_path: Path, column: pa.Array) -> None:
    documents, failures = read(write(tmp_path, {"text": column}))
    assert documents == []
    assert [(failure.position, failure.reason) for failure in failures] == [
        (0, "text_not_string"),
        (1, "text_not_string"),
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "missing_text_field"), ({"text_field": "body", "id_field": "id"}, "missing_id_field")],
)
def test_a_missing_column_is_one_failure_for_the_file(
    tmp_path: Path, given: dict[str, str], expected: str
) -> None:
    path = write(
        tmp_path,
        {"body": ["a" * 500] * 100},
        row_group_size=10,
        compression="none",
        use_dictionary=False,
    )
    assert len(list_units(ReadingSettings(inputs=(str(path),), split_bytes=5000)).units) > 5
    documents, [failure] = read(path, split_bytes=5000, **given)
    assert documents == []
    assert (failure.reason, failure.position, failure.record) == (expected, -1, None)
    assert "'body'" in failure.message


def test_a_column_that_is_there_twice_is_one_failure(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path
    )
    assert reason(path) == "repeated_field"


def test_a_column_name_with_a_dot_is_a_name(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.b": ["x"], "a": [{"b": "y"}]})
    assert texts(path, text_field="a.b") == ["x"]


def test_a_file_without_rows_is_completed_with_none(tmp_path: Path) -> None:
    assert read(write(tmp_path, {"text": pa.array([], pa.string())})) == ([], [])


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b"text", "cut"])
def test_a_file_that_is_no_whole_parquet_file_is_one_failure(
    tmp_path: Path, data: bytes | str
) -> None:
    path = write(tmp_path, {"text": ["a"] * 100})
    path.write_bytes(path.read_bytes()[:-10] if isinstance(data, str) else data)
    documents, [failure] = read(path)
    assert documents == []
    assert (failure.reason, failure.step, failure.position, failure.record) == (
        "not_parquet",
        "read",
        -1,
        None,
    )


def test_rows_before_a_fault_in_the_file_are_read_and_the_rest_is_one_failure(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, {"text": [f"row {number}" for number in range(30)]}, row_group_size=10)
    data = bytearray(path.read_bytes())
    fault = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    data[fault : fault + 20] = b"\xff" * 20
    path.write_bytes(data)
    documents, [failure] = read(path)
    assert len(documents) == 10
    assert (failure.reason, failure.position, failure.record) == ("corrupt_object", 10, None)


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".zst", zstandard.ZstdCompressor().compress),
        ("", gzip.compress),
    ],
)
def test_a_parquet_file_may_be_compressed_as_a_whole(
    tmp_path: Path, ending: str, compress: Any
) -> None:
    plain = write(tmp_path, {"text": ["a", "b"]})
    path = tmp_path / f"b.parquet{ending}"
    path.write_bytes(compress(plain.read_bytes()))
    assert texts(path) == ["a", "b"]
    path.write_bytes(compress(plain.read_bytes())[:-5])
    assert reason(path) == "truncated_object"


def test_memory_is_that_of_a_batch_and_not_of_a_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        rows = 8_000
        writer.write_table(
            pa.table({"text": [f"{number:05000}" for number in range(rows)]}), row_group_size=rows
        )
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    peak = 0
    for chunk in _lazily(path):
        peak = max(peak, pa.total_allocated_bytes() - before)
        rows -= len(chunk.documents)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 0
    assert peak < 16e6  # the text is 40 MB, one row group
    assert python < 16e6


def _lazily(path: Path) -> Any:

    return read_unit(unit_of(path), settings_for(path), ())


# Ids


@pytest.mark.parametrize(
    ("column", "found", "failed"),
    [
        (["a", "b"], ["a", "b"], []),
        (pa.array(["a", "b"]).dictionary_encode(), ["a", "b"], []),
        (pa.array([2**64 - 1, 0], pa.uint64()), ["18446744073709551615", "0"], []),
        (pa.array(["a", "b"], pa.string_view()), ["a", "b"], []),
        (pa.array(["a", "b"], pa.json_()), ["a", "b"], []),
        (["a", ""], ["a"], ["bad_id"]),
        (["a", "b\0"], ["a"], ["bad_id"]),
        (["a", None], ["a"], ["missing_id"]),
        (["a", "a"], ["a"], ["repeated_id"]),
        ([1.0, 2.0], [], ["bad_id", "bad_id"]),
        (pa.array([1, 2], pa.timestamp("ns")), [], ["bad_id", "bad_id"]),
        (not_utf8([b"\xff", b"b"]), ["b"], ["bad_id"]),
        ([b"a", b"b"], [], ["bad_id", "bad_id"]),
    ],
)
def test_the_id_column_names_the_rows(
    tmp_path: Path, column: Any, found: list[str], failed: list[str]
) -> None:
    documents, failures = read(write(tmp_path, {"text": ["x", "y"], "id": column}), id_field="id")
    assert [document.record for document in documents] == found
    assert [failure.reason for failure in failures] == failed


def test_ids_are_unique_in_the_whole_unit(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"text": ["x"] * 3000, "id": [number % 2999 for number in range(3000)]},
        row_group_size=500,
    )
    documents, [failure] = read(path, id_field="id")
    assert (len(documents), failure.reason, failure.position) == (2999, "repeated_id", 2999)


# Kept columns


def kept(folder: Path, column: Any, kind: pa.DataType | None = None) -> list[Any]:
    """The kept values, the reason in the place of one that does not fit."""
    path = write(folder, {"text": ["x"] * len(column), "v": column})
    settings = ReadingSettings(inputs=(str(path),), keep_fields=("v",))
    fields = (
        (pa.field("v", kind),) if kind is not None else field_types(settings, list_units(settings))
    )
    documents, failures = read(path, keep_fields=("v",), fields=fields)
    rows = {one.position: one.fields[0] for one in documents} | {
        one.position: one.reason for one in failures
    }
    pa.array([one.fields[0] for one in documents], fields[0].type)  # what the output does with them
    return [rows[number] for number in sorted(rows)]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["a", None]),
        pa.array(["a", None]).dictionary_encode(),
        pa.array(["a", None], pa.string_view()),
        pa.array(["a", None], pa.json_()),
        pa.array([1, None], pa.int8()),
        pa.array([0.1, None]),
        pa.array([True, None]),
        pa.array([datetime.date(2024, 1, 2), None]),
        pa.array([datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC), None]),
        pa.array([1_700_000_000_123_456_789, None], pa.timestamp("ns")),
        pa.array([1, None], pa.duration("ns")),
        pa.array([b"\xff", None]),
        pa.array([["a", None], None]),
        pa.array([{"a": 1}, None]),
        pa.array([None, None]),
    ],
)
def test_values_of_the_columns_own_type_come_through_unchanged(
    tmp_path: Path, column: pa.Array
) -> None:
    expected = (
        column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
    )
    assert pa.array(kept(tmp_path, column), expected.type).equals(expected)


@pytest.mark.parametrize(
    ("column", "kind", "expected"),
    [
        (pa.array([1, 2**40, None]), pa.int32(), [1, "field_type", None]),
        (pa.array([1.0, 1.5, None]), pa.int64(), [1, "field_type", None]),
        (pa.array([1, 2**60 + 1]), pa.float64(), [1.0, "field_type"]),
        (pa.array([0.5, 1e300, float("inf")]), pa.float32(), [0.5, "field_type", float("inf")]),
        (pa.array([1, None]), pa.string(), ["1", None]),
        (pa.array([datetime.date(2024, 1, 2)]), pa.string(), ["2024-01-02"]),
        (pa.array(["1", None]), pa.int64(), ["field_type", None]),
        (pa.array([True, None]), pa.int64(), ["field_type", None]),
        (pa.array([1, None]), pa.bool_(), ["field_type", None]),
        (pa.array([["a"]]), pa.string(), ["field_type"]),
        (pa.array([b"a", b"\xff"]), pa.string(), ["a", "field_type"]),
        (not_utf8([b"a", b"\xff"]), pa.string(), ["a", "field_type"]),
        (pa.array([None, None]), pa.int64(), [None, None]),
    ],
)
def test_values_of_another_type_are_converted_where_nothing_is_lost(
    tmp_path: Path, column: pa.Array, kind: pa.DataType, expected: list[Any]
) -> None:
    assert kept(tmp_path, column, kind) == expected


def test_a_kept_column_that_is_missing_is_null(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": ["x"]})
    [chunk] = read_chunks(path, keep_fields=("v",), fields=(pa.field("v", pa.int64()),))
    assert chunk.documents[0].fields == (None,)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 1], pa.timestamp("us", "Mars/Phobos")),
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([[0], [2**62 + 1]], pa.list_(pa.timestamp("ns"))),
    ],
    ids=["zone", "year", "nanoseconds in a list"],
)
def test_a_value_that_python_does_not_have_ends_in_failures_and_not_the_run(
    column: pa.Array, tmp_path: Path
) -> None:
    path = write(tmp_path, {"text": ["one", "two"], "when": column})
    fields = field_types(settings_for(path, keep_fields=("when",)), list_units(settings_for(path)))
    documents, failures = read(path, fields=fields, keep_fields=("when",))
    assert failures or len(documents) == 2
    as_text = [pa.field("when", pa.string())]
    documents, failures = read(path, fields=as_text, keep_fields=("when",))
    assert failures or len(documents) == 2


def test_a_kept_column_that_stands_twice_is_one_failure(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([["a"], ["x"], ["y"]], names=["text", "k", "k"])
    pq.write_table(table, tmp_path / "a.parquet")
    documents, failures = read(
        tmp_path / "a.parquet", fields=[pa.field("k", pa.string())], keep_fields=("k",)
    )
    assert not documents
    assert [one.reason for one in failures] == ["repeated_field"]


def test_a_column_without_values_says_nothing_about_its_type(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": ["a"], "k": pa.array([None], pa.null())})
    settings = settings_for(path, keep_fields=("k",))
    assert field_types(settings, list_units(settings)) == (pa.field("k", pa.string()),)
