"""Compressed bytes → plain bytes, as far as they go, and an error where they break off.

Beam's own decompression reports a cut gzip file as complete, and pyarrow's loses what it had decompressed
before the fault, so the streams are driven here, a piece at a time.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import zstandard

from pipeline.objects import ObjectError

BLOCK_BYTES = 2**20
# Bounds what one call can give: zlib expands up to 1,032 times, zstd (which takes no bound) 32,768 times.
_PIECE_BYTES = 4096

_NEW: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(wbits=31),
    "bzip2": bz2.BZ2Decompressor,
    "zstd": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


def blocks(
    file: BinaryIO, compression: str, check: Callable[[], None] = lambda: None
) -> Iterator[bytes]:
    """The plain content from the file's current position on, in blocks that are never empty.

    `check` is called for each of them: what it raises ends the reading.

    Raises:
      ObjectError: truncated_object or corrupt_object, after all that came before has been given.
    """
    if compression == "none":
        while block := file.read(BLOCK_BYTES):
            check()
            yield block
        return
    gathered: list[bytes] = []
    size = 0
    try:
        for piece in _decompressed(file, compression):
            gathered.append(piece)
            size += len(piece)
            if size >= BLOCK_BYTES:
                check()
                yield b"".join(gathered)
                gathered, size = [], 0
    except ObjectError:
        if size:
            yield b"".join(gathered)
        raise
    if size:
        yield b"".join(gathered)


def _decompressed(file: BinaryIO, compression: str) -> Iterator[bytes]:
    stream, streams = None, 0
    while piece := file.read(_PIECE_BYTES):
        while piece:
            if stream is None:
                # gzip files on tapes and disks are filled up with zeros, which its tools ignore.
                if compression == "gzip" and streams and not (piece := piece.lstrip(b"\0")):
                    break
                stream = _NEW[compression]()
                streams += 1
            try:
                yield from _outputs(stream, piece, compression)
            except (zlib.error, OSError, EOFError, zstandard.ZstdError) as error:
                after = f" in its stream {streams}" if streams > 1 else ""
                raise ObjectError(
                    "corrupt_object", f"expected {compression} data{after}, got a fault: {error}"
                ) from None
            piece = stream.unused_data if stream.eof else b""
            if stream.eof:
                stream = None
    if stream is not None or not streams:
        raise ObjectError(
            "truncated_object",
            f"the {compression} data breaks off before its end: a partial copy or upload",
        )


def _outputs(stream: Any, piece: bytes, compression: str) -> Iterator[bytes]:
    if compression != "bzip2":
        yield stream.decompress(piece)
        return
    yield stream.decompress(piece, BLOCK_BYTES)
    while not (stream.eof or stream.needs_input):
        yield stream.decompress(b"", BLOCK_BYTES)
