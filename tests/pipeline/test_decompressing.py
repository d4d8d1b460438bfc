"""Compressed content is recognised by itself, read as far as it goes, and never taken as whole when it is cut."""

from __future__ import annotations

import bz2
import gzip
import io
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decompressing import blocks
from pipeline.objects import ObjectError
from read_files import read, reason, texts

Compress = Callable[[bytes], bytes]
COMPRESS: dict[str, Compress] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "bzip2": bz2.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
ENDINGS = {"gzip": ".gz", "bzip2": ".bz2", "zstd": ".zst"}
KINDS = pytest.mark.parametrize("kind", COMPRESS)

DATA = b"".join(
    b'{"text": "line %d %s"}\n' % (number, random.Random(number).randbytes(20).hex().encode())
    for number in range(5000)
)


def plain(data: bytes, kind: str) -> tuple[bytes, str | None]:
    """The plain content and the reason why it ends early."""
    found = b""
    try:
        for block in blocks(io.BytesIO(data), kind):
            assert block
            found += block
    except ObjectError as error:
        return found, error.reason
    return found, None


@KINDS
def test_whole_content_is_given_in_blocks(kind: str) -> None:
    assert plain(COMPRESS[kind](DATA), kind) == (DATA, None)


@KINDS
@pytest.mark.parametrize("data", [b"", b"x"])
def test_a_small_file_is_read(kind: str, data: bytes) -> None:
    assert plain(COMPRESS[kind](data), kind) == (data, None)


@given(
    kind=st.sampled_from(list(COMPRESS)),
    parts=st.lists(st.binary(max_size=9000), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_streams_after_one_another_are_one_content(kind: str, parts: list[bytes]) -> None:
    assert plain(b"".join(map(COMPRESS[kind], parts)), kind) == (b"".join(parts), None)


@KINDS
def test_a_cut_at_any_byte_is_noticed_and_loses_nothing_that_came_before(kind: str) -> None:
    data = DATA[:20_000]
    whole = COMPRESS[kind](data)
    longest = 0
    for size in [*range(0, len(whole), 97), *range(len(whole) - 20, len(whole))]:
        found, why = plain(whole[:size], kind)
        assert why == "truncated_object", size
        assert data.startswith(found)
        assert len(found) >= longest
        longest = len(found)


def test_a_cut_gzip_file_gives_all_but_its_last_bytes() -> None:
    assert len(plain(COMPRESS["gzip"](DATA)[:-1], "gzip")[0]) == len(DATA)
    whole = COMPRESS["gzip"](DATA)
    assert len(plain(whole[: len(whole) // 2], "gzip")[0]) > len(DATA) * 0.45


@KINDS
def test_a_cut_in_a_later_stream_is_noticed(kind: str) -> None:
    one = COMPRESS[kind](b"first")
    for size in (1, 5, len(one) - 1):
        found, why = plain(one + one[:size], kind)
        assert (found[:5], why) == (b"first", "truncated_object")


@KINDS
def test_flipped_bits_are_noticed(kind: str) -> None:
    whole = bytearray(COMPRESS[kind](DATA))
    for place in (len(whole) // 2, len(whole) - 2 if kind != "bzip2" else len(whole) // 3):
        changed = bytearray(whole)
        changed[place] ^= 0x55
        assert plain(bytes(changed), kind)[1] in ("corrupt_object", "truncated_object")


@KINDS
def test_other_data_after_the_end_is_a_fault_and_not_left_out_silently(kind: str) -> None:
    assert plain(COMPRESS[kind](b"data") + b"something else", kind) == (b"data", "corrupt_object")


def test_zeros_after_a_gzip_stream_are_padding() -> None:
    assert plain(COMPRESS["gzip"](b"data") + bytes(10_000), "gzip") == (b"data", None)
    assert plain(COMPRESS["gzip"](b"a") + bytes(512) + COMPRESS["gzip"](b"b"), "gzip") == (
        b"ab",
        None,
    )


@pytest.mark.parametrize("level", [1, 19])
def test_a_small_file_that_expands_a_lot_is_read_in_bounded_memory(level: int) -> None:
    size = 60_000_000
    for kind, data in {
        "gzip": gzip.compress(bytes(size), 9),
        "bzip2": bz2.compress(bytes(size)),
        "zstd": zstandard.ZstdCompressor(level=level).compress(bytes(size)),
    }.items():
        tracemalloc.start()
        total = sum(len(block) for block in blocks(io.BytesIO(data), kind))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == size
        assert peak < (130e6 if kind == "zstd" else 20e6), kind


# By name and by content


@KINDS
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.txt.bz2", "a.txt.zst"])
def test_content_says_how_it_is_compressed_whatever_the_name_says(
    tmp_path: Path, kind: str, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(COMPRESS[kind](b"content"))
    assert texts(path) == ["content"]


@KINDS
@pytest.mark.parametrize("text", ["plain", "BZh9 is no archive, but a text that begins so"])
def test_a_compressed_name_over_plain_text_is_read_as_plain(
    tmp_path: Path, kind: str, text: str
) -> None:
    path = tmp_path / f"a.txt{ENDINGS[kind]}"
    path.write_text(text)
    assert texts(path) == [text]


@pytest.mark.parametrize("frame", [0x50, 0x5F])
def test_a_zstd_file_may_begin_with_a_skippable_frame(tmp_path: Path, frame: int) -> None:
    path = tmp_path / "a.txt.zst"
    skippable = bytes([frame]) + b"\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"abcd"
    path.write_bytes(skippable + COMPRESS["zstd"](b"content"))
    assert texts(path) == ["content"]


@KINDS
@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_an_upload_that_broke_off_in_the_first_bytes_is_truncated_and_not_empty(
    tmp_path: Path, kind: str, kept: int
) -> None:
    path = tmp_path / f"a.jsonl{ENDINGS[kind]}"
    path.write_bytes(COMPRESS[kind](DATA)[:kept])
    assert reason(path) == "truncated_object"


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_records_before_a_cut_are_read_and_the_rest_is_one_failure(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"a.jsonl{ENDINGS[kind]}"
    lines = DATA * 4
    path.write_bytes(COMPRESS[kind](lines)[:-100])
    documents, [failure] = read(path)
    assert 1_000 < len(documents) < 20_000
    assert (failure.reason, failure.step, failure.record) == ("truncated_object", "read", None)
    last = documents[-1]
    assert failure.position == last.position + last.size_bytes + len(
        '{"text": ""}\n'
    )  # where the cut line starts


def test_a_text_file_that_is_cut_gives_no_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(COMPRESS["gzip"](DATA)[:-100])
    documents, [failure] = read(path)
    assert documents == []
    assert (failure.reason, failure.position) == ("truncated_object", -1)


def test_a_text_file_that_expands_past_the_limit_is_too_large(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(COMPRESS["gzip"](b"x" * 10_000_000))
    assert reason(path, max_document_bytes=1000) == "too_large"
