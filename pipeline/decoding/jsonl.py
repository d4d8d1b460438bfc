"""JSON Lines → documents, one a line.

orjson parses a short line three times as fast as the standard library (0.8 against 2.6 µs), but keeps the last of
repeated names without a word and rounds integers of more than 64 bits, so lines where that could matter are
looked at again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import orjson

from pipeline.decoding.fields import converter
from pipeline.decoding.lines import lines
from pipeline.decoding.origin import DecodingError, Origin, Outcome, RecordIds
from pipeline.decoding.text import decode_exactly, newline_of
from pipeline.records import Failure

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_ .:$@-]+")
_EXACT = json.JSONDecoder(
    object_pairs_hook=list, parse_int=str
)  # objects as pairs, integers as digits


def documents(
    blocks: Iterable[bytes],
    origin: Origin,
    *,
    encoding: str,
    mark: int,
    first: int,
    start: int,
    stop: int | None,
) -> Iterator[Outcome]:
    """The documents of the lines that start in [start, stop), in order. Blank lines are no records.

    `blocks` begin at the offset `first` (see lines.first_line_search), `mark` is the length of the byte-order mark.

    Raises:
      ObjectError: see lines.lines.
    """
    parser = _Parser(origin)
    limit = origin.settings.max_document_bytes
    found = lines(blocks, newline=newline_of(encoding), start=first, limit=limit)
    if first < start:
        next(found, None)  # belongs to the range before
    for number, (position, line) in enumerate(found, 1):
        if stop is not None and position >= stop:
            return
        if line is not None and position == 0:
            line = line[mark:]
        outcome = _outcome(position, line, parser, origin, encoding)
        if isinstance(outcome, Failure) and first == 0:  # else nobody knows its line
            outcome = replace(outcome, message=f"line {number}: {outcome.message}")
        if outcome is not None:
            yield outcome


def _outcome(
    position: int, line: bytes | None, parser: _Parser, origin: Origin, encoding: str
) -> Outcome | None:
    record = str(position)
    if line is None:
        limit = origin.settings.max_document_bytes
        return origin.too_large(position, record, f"a longer line of JSON (the limit is {limit})")
    try:
        if encoding != "utf-8":
            line = decode_exactly(line, encoding).encode()
        if not line or line.isspace():
            return None
        record, text, values = parser.parse(line, record)
    except DecodingError as error:
        named = parser.named or record
        return origin.failure(position, named, error.reason, error.message, content=line)
    return origin.document(position, record, text.encode(), text, values)


class _Parser:
    """A line of UTF-8 → record name, text, kept values."""

    def __init__(self, origin: Origin) -> None:
        settings = origin.settings
        self._text_field = settings.text_field
        self._id_field = settings.id_field
        self._ids = RecordIds(settings.id_field) if settings.id_field is not None else None
        self._kept = [(field.name, converter(field)) for field in origin.fields]
        self._names = {settings.text_field, *(name for name, _ in self._kept)}
        if settings.id_field is not None:
            self._names.add(settings.id_field)
        # A name that every writer spells alike, unless it hides ASCII behind \u00xx.
        plain = all(_PLAIN_NAME.fullmatch(name) for name in self._names)
        self._quoted = [f'"{name}"'.encode() for name in self._names] if plain else None
        self.named: str | None = None  # the id of the line last parsed, as far as that went

    def parse(self, line: bytes, record: str) -> tuple[str, str, tuple[Any, ...]]:
        """Raises: DecodingError."""
        self.named = None
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            decode_exactly(line, "utf-8")
            raise DecodingError(
                "invalid_json", f"expected a JSON object, got a fault: {error}"
            ) from None
        if type(value) is not dict:
            raise DecodingError("not_an_object", f"expected a JSON object, got {_kind(value)}")
        if (
            self._quoted is None
            or b"\\u00" in line
            or any(line.count(name) > 1 for name in self._quoted)
        ):
            self._refuse_repeated_names(line)
        if self._ids is not None:
            assert self._id_field is not None
            record = self._ids.name(self._exact(value.get(self._id_field), self._id_field, line))
            self.named = record
        text = value.get(self._text_field)
        if type(text) is not str:
            if self._text_field not in value:
                raise DecodingError(
                    "missing_text_field",
                    f"expected the field {self._text_field!r} (--text-field), got {_names(value)}",
                )
            raise DecodingError(
                "text_not_string",
                f"expected a string in field {self._text_field!r}, got {_kind(text)}",
            )
        if not self._kept:
            return record, text, ()
        return (
            record,
            text,
            tuple(
                convert(self._exact(value.get(name), name, line)) for name, convert in self._kept
            ),
        )

    def _refuse_repeated_names(self, line: bytes) -> None:
        seen: set[str] = set()
        for name, _ in _pairs(line):
            if name in seen and name in self._names:
                raise DecodingError("repeated_field", f"expected one field {name!r}, got several")
            seen.add(name)

    def _exact(self, value: Any, name: str, line: bytes) -> Any:
        """The value; an integer that orjson had to round is read again."""
        if type(value) is float and abs(value) >= 2.0**63:
            exact = dict(_pairs(line))[name]
            if isinstance(exact, str):
                return int(exact)
        return value


def _pairs(line: bytes) -> list[tuple[str, Any]]:
    try:
        pairs: list[tuple[str, Any]] = _EXACT.decode(line.decode())
    except RecursionError:
        raise DecodingError(
            "invalid_json", "expected a JSON object, got one nested too deeply"
        ) from None
    return pairs


def _kind(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _names(value: dict[str, Any]) -> str:
    shown = ", ".join(repr(name) for name in list(value)[:8])
    return f"only {shown}{', …' if len(value) > 8 else ''}" if value else "an empty object"
