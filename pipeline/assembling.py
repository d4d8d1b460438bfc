"""Assemble: a Load's result → rows of the documents table, whose schema is decided here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from pipeline.config import Job, SettingsError
from pipeline.progress import busy
from pipeline.records import Figures, LoadResult, Rows
from pipeline.versions import versions

SCHEMA_VERSION = 1  # raise it when a column's name, type or meaning changes

OWN_COLUMNS = (
    pa.field("document_id", pa.string(), nullable=False),
    pa.field("uri", pa.string(), nullable=False),
    pa.field("record", pa.string(), nullable=False),
    pa.field("media_type", pa.string(), nullable=False),
    pa.field("content_sha256", pa.string(), nullable=False),
    pa.field("size_bytes", pa.int64(), nullable=False),
    pa.field("characters", pa.int64(), nullable=False),
    pa.field("tokens", pa.int64(), nullable=False),
    pa.field("windows", pa.int64(), nullable=False),
    pa.field("truncated", pa.bool_(), nullable=False),
)
PARTITION_COLUMN = "date"  # readers take it from the folder's name, date=YYYY-MM-DD
METADATA_PREFIX = "lengthwise."


def document_schema(
    job: Job, *, dimensions: int, fields: Sequence[pa.Field], metadata: Mapping[str, str]
) -> pa.Schema:
    """The schema of the documents files: our columns, the kept fields, then the task's columns.

    `metadata` goes into each file under `lengthwise.NAME`, with the versions of this environment; the attention
    implementation is added when a file is written, since only workers know it.

    Raises:
      SettingsError: a kept field has the name of another column.
    """
    task = _task_columns(job.model.task, dimensions)
    taken = {field.name.casefold(): "a column of the output" for field in (*OWN_COLUMNS, *task)}
    taken[PARTITION_COLUMN] = "the column readers make of the partition's folder"
    for field in fields:
        name = (
            field.name.casefold()
        )  # SQL engines fold case: columns that differ in it alone cannot be told apart
        if name in taken:
            raise SettingsError(
                f"--keep-fields: expected a name that no other column has, got {field.name!r}, which names "
                f"{taken[name]}; leave it out, or rename it in the input"
            )
        taken[name] = "another kept field"
    described = {"schema_version": str(SCHEMA_VERSION), "versions": json.dumps(versions())}
    return pa.schema(
        [*OWN_COLUMNS, *(field.with_nullable(True) for field in fields), *task],
        metadata={
            METADATA_PREFIX + name: value for name, value in (described | dict(metadata)).items()
        },
    )


def _task_columns(task: str, dimensions: int) -> tuple[pa.Field, ...]:
    if task == "embed":
        value = pa.field("element", pa.float32(), nullable=False)
        return (pa.field("embedding", pa.list_(value, dimensions), nullable=False),)
    raise SettingsError(f"--task: no output columns are defined for {task!r}")


def assemble(result: LoadResult, schema: pa.Schema) -> Rows:
    """The rows of a Load's documents, in their order, as one Arrow table of the given schema.

    Raises:
      ValueError: the encodings do not belong to the documents, or a kept value does not have its column's type
        (both are faults of a step before, never of a document).
    """
    figures = Figures()
    with busy(figures, "assemble"):
        table, keys = _rows(result, schema)
    return Rows(
        table=table,
        keys=keys,
        failures=result.failures,
        completions=result.completions,
        figures=figures.add(result.figures),
    )


def _rows(
    result: LoadResult, schema: pa.Schema
) -> tuple[pa.Table, tuple[tuple[str, int, str], ...]]:
    documents = result.documents
    vectors = schema.field("embedding").type
    encodings = np.ascontiguousarray(result.encodings, dtype=np.float32)
    if encodings.shape != (len(documents), vectors.list_size):
        raise ValueError(
            f"expected encodings of shape {(len(documents), vectors.list_size)}, one row a document, "
            f"got {encodings.shape}"
        )
    records = [tokenized.document for tokenized in documents]
    ids = [record.document_id for record in records]
    columns = {
        "document_id": ids,
        "uri": [record.uri for record in records],
        "record": [record.record for record in records],
        "media_type": [record.media_type for record in records],
        "content_sha256": [record.content_sha256 for record in records],
        "size_bytes": [record.size_bytes for record in records],
        "characters": [tokenized.characters for tokenized in documents],
        "tokens": [tokenized.tokens for tokenized in documents],
        "windows": [len(tokenized.windows) for tokenized in documents],
        "truncated": [tokenized.truncated for tokenized in documents],
    }
    kept = schema.names[len(OWN_COLUMNS) : -1]
    for index, name in enumerate(kept):
        columns[name] = [record.fields[index] for record in records]
    arrays = [pa.array(values, type=schema.field(name).type) for name, values in columns.items()]
    arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(encodings.reshape(-1)), type=vectors))
    keys = tuple(
        (record.unit_id, record.position, document_id)
        for record, document_id in zip(records, ids, strict=True)
    )
    return pa.Table.from_arrays(arrays, schema=schema), keys
