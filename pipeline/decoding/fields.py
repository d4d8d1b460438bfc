"""Kept fields: what `--keep-fields` names, and values → the column's type, or an error; nothing is cast that loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config import ReadingSettings, SettingsError
from pipeline.decoding.origin import DecodingError

TYPES = {
    "string": pa.string(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
_LARGEST_FLOAT32 = 3.4028234663852886e38


def kept_fields(settings: ReadingSettings) -> tuple[tuple[str, pa.DataType | None], ...]:
    """Name and type of each kept field, the type None where it is left to the input.

    Raises:
      SettingsError: a type is not one of TYPES, or a name is empty.
    """
    return tuple(_kept_field(given) for given in settings.keep_fields)


def _kept_field(given: str) -> tuple[str, pa.DataType | None]:
    name, colon, kind = given.rpartition(":")
    if not colon:
        name, kind = given, ""
    if not name or (kind and kind not in TYPES) or (colon and not kind):
        raise SettingsError(
            f"--keep-fields: expected NAME or NAME:TYPE with a type of {', '.join(TYPES)}, got {given!r}"
            + (
                f" (a name that holds a colon needs its type: {given}:string)"
                if name and kind
                else ""
            )
        )
    return name, TYPES[kind] if kind else None


def converter(field: pa.Field) -> Callable[[Any], Any]:
    """A function from a JSON value to a value of the field's type; None stays None.

    It raises DecodingError(field_type) where a value does not fit.
    """
    fits = _FITTING.get(field.type, _fits_arrow)

    def convert(value: Any) -> Any:
        if value is None:
            return None
        try:
            return fits(value, field.type)
        except (ValueError, TypeError, OverflowError, pa.ArrowException):
            raise _does_not_fit(field, type(value).__name__, repr(value)) from None

    return convert


def _does_not_fit(field: pa.Field, kind: str, value: str) -> DecodingError:
    shown = value if len(value) <= 60 else f"{value[:57]}..."
    return DecodingError(
        "field_type", f"expected {field.type} in field {field.name!r}, got {kind} {shown}"
    )


def _fits_string(value: Any, kind: pa.DataType) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    raise TypeError


def _fits_integer(value: Any, kind: pa.DataType) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    bound = 2 ** (kind.bit_width - 1)
    if not -bound <= value < bound:
        raise OverflowError
    return value


def _fits_float(value: Any, kind: pa.DataType) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError
    result = float(value)
    if isinstance(value, int) and int(result) != value:
        raise OverflowError
    if kind.bit_width == 32 and abs(result) > _LARGEST_FLOAT32:
        raise OverflowError
    return result


def _fits_bool(value: Any, kind: pa.DataType) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _fits_arrow(value: Any, kind: pa.DataType) -> Any:
    """For types that a Parquet file has brought: whatever pyarrow takes as such a value."""
    pa.scalar(value, type=kind)
    return value


_FITTING: dict[pa.DataType, Callable[[Any, pa.DataType], Any]] = {
    pa.string(): _fits_string,
    pa.large_string(): _fits_string,
    pa.int32(): _fits_integer,
    pa.int64(): _fits_integer,
    pa.float32(): _fits_float,
    pa.float64(): _fits_float,
    pa.bool_(): _fits_bool,
}


def column_type(kind: pa.DataType) -> pa.DataType:
    """The type of the output's column for a kept column of a Parquet file."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def column_values(column: pa.Array, field: pa.Field) -> list[Any]:
    """The values of a Parquet column as the field's type; a DecodingError stands where one does not fit."""
    try:
        return _cast_values(column, field.type)
    except (ValueError, TypeError, OverflowError, pa.ArrowException):
        pass  # look for the values that are at fault
    values: list[Any] = []
    for index in range(len(column)):
        if not column[index].is_valid:
            values.append(None)
            continue
        try:
            values.extend(_cast_values(column.slice(index, 1), field.type))
        except (ValueError, TypeError, OverflowError, pa.ArrowException):
            values.append(_does_not_fit(field, str(column.type), _shown(column[index])))
    return values


def _cast_values(column: pa.Array, kind: pa.DataType) -> list[Any]:
    if pa.types.is_null(column.type):
        return [None] * len(column)
    if column_type(column.type) != kind:
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not text and (
            _is_text(column.type) or pa.types.is_boolean(column.type) or pa.types.is_boolean(kind)
        ):
            raise TypeError  # Arrow would parse strings, and call any number true
    cast = column.cast(kind)  # raises where a value would change, save for the next
    if (
        kind == pa.float32()
        and pc.any(pc.is_inf(cast)).as_py()
        and not pc.is_inf(column).equals(pc.is_inf(cast))
    ):
        raise OverflowError
    column = cast
    if getattr(kind, "unit", None) == "ns":
        column = column.cast(
            pa.int64()
        )  # Python's times hold microseconds; Arrow takes integers as well
    values: list[Any] = column.to_pylist()
    return values


def _is_text(kind: pa.DataType) -> bool:
    kind = column_type(kind)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _shown(scalar: pa.Scalar) -> str:
    try:
        return str(scalar)
    except (ValueError, OverflowError, KeyError, pa.ArrowException):  # nothing that Python can show
        return f"a {scalar.type}"
