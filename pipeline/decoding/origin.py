"""What all formats share: a record's text → its Document, or the Failure that says why there is none."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.config import ReadingSettings
from pipeline.records import Document, Failure

Outcome = Document | Failure


class DecodingError(ValueError):
    """A record has no usable text (or id, or kept field). `reason` and `message` are its Failure's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where records come from, and how they are read."""

    unit_id: str
    uri: str
    media_type: str
    settings: ReadingSettings
    fields: Sequence[pa.Field] = ()

    def document(
        self, position: int, record: str, data: bytes, text: str, values: tuple[Any, ...]
    ) -> Outcome:
        """The document with this text; `data` is the text in UTF-8."""
        if len(data) > self.settings.max_document_bytes:
            return self.too_large(position, record, f"{len(data)}", data)
        if "\0" in text:
            return self.failure(
                position,
                record,
                "nul_bytes",
                f"expected text, got a NUL character at {text.index(chr(0))}: binary data, or UTF-16 or UTF-32 "
                "without a byte-order mark (then --encoding says which)",
                content=data,
            )
        if not text or text.isspace():
            reason = "whitespace_only" if text else "empty"
            return self.failure(position, record, reason, "expected text, got none", content=data)
        return Document(
            unit_id=self.unit_id,
            position=position,
            uri=self.uri,
            record=record,
            text=text,
            media_type=self.media_type,
            content_sha256=hashlib.sha256(data).hexdigest(),
            size_bytes=len(data),
            fields=values,
        )

    def failure(
        self,
        position: int,
        record: str | None,
        reason: str,
        message: str,
        *,
        step: str = "decode",
        content: bytes | None = None,
    ) -> Failure:
        """`content` is the text in UTF-8, or where there is none the record's bytes, as far as they were read."""
        return Failure(
            unit_id=self.unit_id,
            position=position,
            uri=self.uri,
            record=record,
            step=step,
            reason=reason,
            message=message,
            content_sha256=None if content is None else hashlib.sha256(content).hexdigest(),
        )

    def too_large(
        self, position: int, record: str, size: str, content: bytes | None = None
    ) -> Failure:
        return self.failure(
            position,
            record,
            "too_large",
            f"expected at most {self.settings.max_document_bytes} bytes (--max-document-bytes), got {size}",
            content=content,
        )


class RecordIds:
    """The ids seen in one work unit. Ids that repeat across the units of an object are found at publishing.

    It holds them all: the only thing in reading that grows with a unit, by about 100 bytes a record.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._seen: set[str] = set()

    def name(self, value: Any) -> str:
        """The record's name for an id that is a string or an integer.

        Raises:
          DecodingError: missing_id, bad_id or repeated_id.
        """
        if value is None:
            raise DecodingError(
                "missing_id", f"expected a value in the id field {self._field!r}, got none"
            )
        if not isinstance(value, str) and (not isinstance(value, int) or isinstance(value, bool)):
            raise DecodingError(
                "bad_id",
                f"expected a string or an integer in the id field {self._field!r}, got {type(value).__name__}",
            )
        name = str(value)
        if not name or "\0" in name:
            got = f"one with a NUL character: {name!r}" if name else "an empty string"
            raise DecodingError(
                "bad_id", f"expected a name in the id field {self._field!r}, got {got}"
            )
        if name in self._seen:
            raise DecodingError(
                "repeated_id",
                f"the id {name!r} in field {self._field!r} names an earlier record of this file",
            )
        self._seen.add(name)
        return name
