"""Parquet → documents, one a row."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.decoding.fields import column_type, column_values
from pipeline.decoding.origin import DecodingError, Origin, Outcome, RecordIds
from pipeline.decoding.text import decode_exactly
from pipeline.decompressing import blocks
from pipeline.objects import ObjectError

# Columns are decoded a batch at a time and read through a small buffer: whole row groups, which may hold
# millions of rows, are never in memory.
_BATCH_BYTES = 4 * 2**20
_MAX_BATCH_ROWS = 1024
_BUFFER_BYTES = 2**20


@contextmanager
def opened(
    file: BinaryIO, compression: str = "none", check: Callable[[], None] = lambda: None
) -> Iterator[pq.ParquetFile]:
    """The Parquet file in an open object; a compressed one is unpacked to a temporary file meanwhile (with `check`, see
    `blocks`).

    Raises:
      ObjectError: not_parquet, or that of decompression.
    """
    with ExitStack() as stack:
        if compression != "none":
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            for block in blocks(file, compression, check):
                unpacked.write(block)
            file = unpacked
        try:
            parquet = pq.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise ObjectError(
                "not_parquet",
                f"expected a whole Parquet file: {_first_line(error)}; it may be cut short",
            ) from None
        yield parquet


def documents(
    parquet: pq.ParquetFile, origin: Origin, start: int, stop: int | None
) -> Iterator[Outcome]:
    """The documents of row groups [start, stop), in order; a document's position is its row's number in the file.

    Raises:
      ObjectError: a column is missing, or the file has a fault; its position is the first row not read.
    """
    metadata, schema = parquet.metadata, parquet.schema_arrow
    settings = origin.settings
    groups = range(metadata.num_row_groups)[start:stop]
    for flag, name in (("text", settings.text_field), ("id", settings.id_field)):
        if name is not None and name not in schema.names:
            if start > 0:
                return  # the file's first unit reports it, once
            raise ObjectError(
                f"missing_{flag}_field",
                f"expected the column {name!r} (--{flag}-field), got only {', '.join(map(repr, schema.names))}",
            )
    for name in (settings.text_field, settings.id_field, *(field.name for field in origin.fields)):
        if schema.names.count(name or "") > 1:
            raise ObjectError("repeated_field", f"expected one column {name!r}, got several")
    names = {settings.text_field, *(field.name for field in origin.fields)} & set(schema.names)
    if settings.id_field is not None:
        names.add(settings.id_field)
    ids = RecordIds(settings.id_field) if settings.id_field is not None else None
    position = sum(metadata.row_group(group).num_rows for group in range(start))
    for group in groups:
        rows = parquet.iter_batches(
            batch_size=_batch_rows(metadata.row_group(group)),
            row_groups=[group],
            columns=sorted(names),
            use_threads=False,
        )
        while (batch := _next(rows, position)) is not None:
            try:
                outcomes = list(_rows(batch, position, origin, ids))
            except _UNREPRESENTABLE as error:
                raise ObjectError(
                    "unrepresentable_value",
                    f"a value of the {batch.num_rows} rows from {position} on is none that Python can hold: "
                    f"{type(error).__name__}: {error}",
                    position,
                ) from None
            yield from outcomes
            position += batch.num_rows


# What pyarrow raises for dates, times and zones that Python does not have.
_UNREPRESENTABLE = (KeyError, OverflowError, ValueError, pa.ArrowException)


def _batch_rows(group: pq.RowGroupMetaData) -> int:
    row_bytes = group.total_byte_size / max(1, group.num_rows)
    return max(1, min(_MAX_BATCH_ROWS, int(_BATCH_BYTES / max(1, row_bytes))))


def _next(batches: Iterator[pa.RecordBatch], position: int) -> pa.RecordBatch | None:
    try:
        return next(batches, None)
    except (pa.ArrowException, OSError) as error:
        raise ObjectError(
            "corrupt_object",
            f"the Parquet file has a fault at row {position} or soon after: {_first_line(error)}",
            position,
        ) from None


def _rows(
    batch: pa.RecordBatch, first: int, origin: Origin, ids: RecordIds | None
) -> Iterator[Outcome]:
    column = _stored(batch.column(origin.settings.text_field))
    texts = _texts(column)
    encoding = "utf-8" if column.type in _AS_BYTES else origin.settings.encoding
    names = _plain(_stored(batch.column(origin.settings.id_field))) if ids is not None else None
    kept = [
        column_values(batch.column(field.name), field)
        if field.name in batch.schema.names
        else [None] * batch.num_rows
        for field in origin.fields
    ]
    for row, data in enumerate(texts):
        position = first + row
        record = str(position)
        try:
            if ids is not None:
                assert names is not None
                record = ids.name(names[row])
            if isinstance(data, DecodingError):
                raise data
            text = decode_exactly(data, encoding)
            values = tuple(column[row] for column in kept)
            fault = next((value for value in values if isinstance(value, DecodingError)), None)
            if fault is not None:
                raise fault
        except DecodingError as error:
            content = None if isinstance(data, DecodingError) else data
            yield origin.failure(position, record, error.reason, error.message, content=content)
            continue
        if encoding != "utf-8":
            data = text.encode()
        yield origin.document(position, record, data, text, values)


def _stored(column: pa.Array) -> pa.Array:
    """The values that a dictionary, or an extension type such as JSON, stands for."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column.cast(column_type(column.type))


# Parquet files may call bytes strings that are not UTF-8; as bytes they can be looked at one by one.
_AS_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}
_BYTES = (*_AS_BYTES.values(), pa.null())


def _texts(column: pa.Array) -> list[Any]:
    """The bytes of each value, or the DecodingError that says why there are none."""
    kind = _AS_BYTES.get(column.type, column.type)
    if kind not in _BYTES:
        fault = DecodingError("text_not_string", f"expected a string, got {kind}")
        return [fault] * len(column)
    if kind != column.type:
        column = column.view(kind)
    null = DecodingError("text_not_string", "expected a string, got null")
    return [null if value is None else value for value in column.to_pylist()]


def _plain(column: pa.Array) -> list[Any]:
    """The Python values of an id column."""
    try:
        return list(column.to_pylist())
    except ValueError:  # a string that is not UTF-8, or a time in nanoseconds: neither is an id
        return [_as_python(value) for value in column]


def _as_python(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except ValueError:
        return b""


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]
