"""How an object is read: its format by name, its compression by name and content."""

from __future__ import annotations

import re

# Unknown: nothing is skipped without a word, so such a file becomes a failure when it is read.
UNKNOWN = "unknown"
FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".zst": "zstd"}
MEDIA_TYPES = {
    "text": "text/plain",
    "markdown": "text/markdown",
    "jsonl": "application/jsonl",
    "parquet": "application/vnd.apache.parquet",
    UNKNOWN: "application/octet-stream",
}

HEAD_BYTES = 16  # of an object's content, enough for `compression_by_content`
_GZIP = b"\x1f\x8b\x08"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18", re.DOTALL)  # pzstd begins its files so
# "BZh1" could begin a text; what follows in a stream is the digits of π, or of its root in an empty one.
_BZIP2 = re.compile(rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)", re.DOTALL)


def by_name(name: str, declared: str = "auto") -> tuple[str, str]:
    """Format and compression that a file's name says; `declared` is the format where the user gave one."""
    stem = name.rsplit("/", 1)[-1].lower()
    compression = "none"
    for ending, kind in COMPRESSIONS.items():
        if stem.endswith(ending):
            stem, compression = stem.removesuffix(ending), kind
            break
    if declared != "auto":
        return declared, compression
    dot = stem.rfind(".")
    return FORMATS.get(stem[dot:], UNKNOWN) if dot > 0 else UNKNOWN, compression


def compression_by_content(head: bytes, named: str) -> str:
    """The compression that the first bytes of an object show; names lie.

    A `.gz` object may arrive decompressed (Google Cloud Storage does so on request of its metadata), and a
    file without the ending may be compressed. A head too short to tell (an upload that broke off) is taken as named.
    """
    if len(head) < 4:
        return named
    if head.startswith(_GZIP):
        return "gzip"
    if head.startswith(_ZSTD) or _ZSTD_SKIPPABLE.match(head):
        return "zstd"
    if _BZIP2.match(head) or (named == "bzip2" and len(head) < 10 and head.startswith(b"BZh")):
        return "bzip2"
    return "none"


def expected_names() -> str:
    """For messages: what names say a format."""
    return f"{', '.join(FORMATS)}, each also with {', '.join(COMPRESSIONS)}"
