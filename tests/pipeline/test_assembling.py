"""Assemble: rows and their schema."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.assembling import assemble, document_schema
from pipeline.config import SettingsError
from pipeline.records import Completion, Failure, Figures, LoadResult
from staged_case import D, make_document, make_job, make_unit

JOB = make_job(Path("/out"))


def schema_with(*fields: pa.Field) -> pa.Schema:
    return document_schema(JOB, dimensions=D, fields=fields, metadata={"model": "tiny"})


def result_of(*documents, **changes) -> LoadResult:
    encodings = np.arange(len(documents) * D, dtype=np.float32).reshape(-1, D)
    return LoadResult(**({"documents": documents, "encodings": encodings} | changes))


def test_the_columns_are_ours_then_the_kept_ones_then_the_tasks():
    schema = schema_with(pa.field("lang", pa.string()), pa.field("year", pa.int64()))
    assert schema.names == [
        "document_id", "uri", "record", "media_type", "content_sha256", "size_bytes", "characters", "tokens",
        "windows", "truncated", "lang", "year", "embedding",
    ]  # fmt: skip
    assert [field.name for field in schema if field.nullable] == ["lang", "year"]
    assert schema.field("embedding").type.list_size == D
    assert schema.field("embedding").type.value_type == pa.float32()


def test_the_file_metadata_names_the_model_and_the_versions():
    metadata = schema_with().metadata
    assert metadata[b"lengthwise.model"] == b"tiny"
    assert "pyarrow" in json.loads(metadata[b"lengthwise.versions"])


@pytest.mark.parametrize("name", ["uri", "Embedding", "date"])
def test_a_kept_field_with_the_name_of_our_column_is_refused(name):
    with pytest.raises(SettingsError, match=f"keep-fields.*{name!r}"):
        schema_with(pa.field(name, pa.string()))


def test_two_kept_fields_that_differ_in_case_alone_are_refused():
    with pytest.raises(SettingsError, match="another kept field"):
        schema_with(pa.field("Lang", pa.string()), pa.field("lang", pa.string()))


def test_a_row_holds_what_its_document_is_and_keys_come_in_row_order():
    unit = make_unit()
    documents = [make_document(unit, 7), make_document(unit, 3, record="id-3")]
    rows = assemble(result_of(*documents), schema_with())
    first, second = rows.table.to_pylist()
    assert first == {
        "document_id": documents[0].document.document_id,
        "uri": "/in/a.jsonl",
        "record": "7",
        "media_type": "text/plain",
        "content_sha256": "0" * 64,
        "size_bytes": 11,
        "characters": 10,
        "tokens": 3,
        "windows": 1,
        "truncated": False,
        "embedding": [0.0, 1.0, 2.0, 3.0],
    }
    assert second["record"] == "id-3"
    assert second["embedding"] == [4.0, 5.0, 6.0, 7.0]
    assert rows.keys == tuple(
        (unit.unit_id, d.document.position, d.document.document_id) for d in documents
    )


def test_kept_fields_that_are_all_null_or_missing_keep_their_type():
    document = make_document(make_unit(), 0, fields=(None, 2020))
    schema = schema_with(pa.field("lang", pa.string()), pa.field("year", pa.int32()))
    table = assemble(result_of(document), schema).table
    assert table.schema.equals(schema)
    assert table.select(["lang", "year"]).to_pylist() == [{"lang": None, "year": 2020}]


def test_a_result_without_documents_gives_an_empty_table_of_the_same_schema():
    schema = schema_with(pa.field("lang", pa.string()))
    rows = assemble(LoadResult(encodings=np.zeros([0, D], np.float32)), schema)
    assert rows.table.num_rows == 0
    assert rows.table.schema.equals(schema)


def test_rows_survive_a_parquet_file_unchanged(tmp_path):
    documents = [make_document(make_unit(), p) for p in range(3)]
    rows = assemble(result_of(*documents), schema_with())
    pq.write_table(rows.table, tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet").equals(rows.table)


def test_failures_completions_and_figures_of_earlier_steps_are_passed_on():
    failure = Failure(
        unit_id="u", position=1, uri="/in/a", record="1", step="infer", reason="r", message="m"
    )
    before = Figures()
    before.counts["windows"] += 1
    rows = assemble(
        result_of(
            failures=(failure,),
            completions=(Completion(unit_id="u", records=1),),
            encodings=np.zeros([0, D], np.float32),
            figures=before,
        ),
        schema_with(),
    )
    assert rows.failures == (failure,)
    assert rows.completions == (Completion(unit_id="u", records=1),)
    assert rows.figures.counts == {"windows": 1}
    assert rows.figures.seconds["assemble"] > 0
    assert not before.seconds, "the input's figures are not changed"


@pytest.mark.parametrize("shape", [(1, D), (3, D), (2, D + 1)])
def test_encodings_that_do_not_belong_to_the_documents_are_refused(shape):
    documents = [make_document(make_unit(), p) for p in range(2)]
    with pytest.raises(ValueError, match="one row a document"):
        assemble(result_of(*documents, encodings=np.zeros(shape, np.float32)), schema_with())
