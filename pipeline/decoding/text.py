"""Bytes → text: byte-order marks honoured, everything strict."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from pipeline.decoding.origin import DecodingError, Origin, Outcome

# The longer mark first: that of UTF-32-LE begins with that of UTF-16-LE.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
MARK_BYTES = max(len(mark) for mark, _ in BYTE_ORDER_MARKS)
# What the codecs that expect a mark mean without one.
_WITHOUT_MARK = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}


def detect(head: bytes, declared: str) -> tuple[str, int]:
    """The encoding of data that begins with `head`, and the length of its byte-order mark.

    A mark says the encoding; without one it is the declared one.
    """
    for mark, encoding in BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return encoding, len(mark)
    name = codecs.lookup(declared).name
    return _WITHOUT_MARK.get(name, name), 0


def newline_of(encoding: str) -> bytes:
    """The bytes of a line feed in an encoding given by `detect`."""
    return "\n".encode(encoding)


def decode(data: bytes, encoding: str) -> str:
    """The text of a whole document, without its byte-order mark.

    Raises:
      DecodingError: undecodable; never a replacement character.
    """
    found, mark = detect(data[:MARK_BYTES], encoding)
    return decode_exactly(data[mark:] if mark else data, found)


def decode_exactly(data: bytes, encoding: str) -> str:
    try:
        text = data.decode(encoding)
        if encoding != "utf-8":
            text.encode()  # utf-7 and its like let halves of surrogate pairs through
    except UnicodeError as error:
        where, got = "", ""
        if isinstance(error, UnicodeDecodeError):
            where = f" at byte {error.start}"
            got = f", got {data[error.start : error.start + 4].hex(' ')}"
        raise DecodingError(
            "undecodable_text",
            f"expected {encoding}{where}{got}; --encoding NAME declares another encoding for files without a "
            "byte-order mark",
        ) from None
    return text


def documents(blocks: Iterable[bytes], origin: Origin) -> Iterator[Outcome]:
    """The one document of a text file: all of it."""
    limit = origin.settings.max_document_bytes
    held: list[bytes] = []
    size = 0
    for block in blocks:
        held.append(block)
        size += len(block)
        if size > limit + MARK_BYTES:
            yield origin.too_large(0, "0", f"more than {limit}")
            return
    data = held[0] if len(held) == 1 else b"".join(held)
    held.clear()  # joined, or data is all there is: do not hold a large document twice
    try:
        text = decode(data, origin.settings.encoding)
    except DecodingError as error:
        yield origin.failure(0, "0", error.reason, error.message, content=data)
        return
    del data
    without_fields = (None,) * len(origin.fields)
    yield origin.document(0, "0", text.encode(), text, without_fields)
