"""Blocks of bytes → lines, with their offsets and with bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeline.objects import ObjectError


def first_line_search(start: int, newline: bytes) -> int:
    """Where to begin reading to find the first line that starts at `start` or later, by dropping one line.

    `start` is more than 0. Lines start at multiples of the newline's width (2 in UTF-16).
    """
    width = len(newline)
    return (start - 1) // width * width


def lines(
    blocks: Iterable[bytes], *, newline: bytes, start: int, limit: int
) -> Iterator[tuple[int, bytes | None]]:
    """Each line's offset and its bytes without the newline; None for a line longer than `limit` bytes.

    `start` is the offset of the first block. Lines end at the newline only, never at other characters that
    Unicode ends lines at. A line that is too long is dropped as it is read.

    Raises:
      ObjectError: that of `blocks`, with the offset of the line that it cut as its position.
    """
    width = len(newline)
    held: list[bytes] = []  # the line so far
    size = 0  # its length, dropped bytes included
    offset = start  # where it starts
    try:
        for block in blocks if width == 1 else _whole_units(blocks, width):
            parts = block.split(newline) if width == 1 else _split(block, newline)
            last = parts.pop()
            for part in parts:
                if size:
                    size += len(part)
                    held.append(part)
                    line = b"".join(held) if size <= limit else None
                    held.clear()
                else:
                    size = len(part)
                    line = part if size <= limit else None
                yield offset, line
                offset += size + width
                size = 0
            size += len(last)
            if size <= limit:
                held.append(last)
            else:
                held.clear()
    except ObjectError as error:
        raise ObjectError(error.reason, error.message, offset) from None
    if size:
        yield offset, b"".join(held) if size <= limit else None


def _whole_units(blocks: Iterable[bytes], width: int) -> Iterator[bytes]:
    """The same bytes in blocks whose lengths are multiples of the newline's width, the last one's excepted."""
    rest = b""
    for block in blocks:
        block = rest + block
        whole = len(block) // width * width
        rest = block[whole:]
        if whole:
            yield block[:whole]
    if rest:
        yield rest


def _split(block: bytes, newline: bytes) -> list[bytes]:
    """Like `bytes.split`, for newlines at multiples of their width only."""
    parts, begin, search = [], 0, 0
    while (found := block.find(newline, search)) >= 0:
        if found % len(newline):
            search = found + 1
            continue
        parts.append(block[begin:found])
        begin = search = found + len(newline)
    parts.append(block[begin:])
    return parts
