"""Bytes become text strictly: marks honoured, encodings declared, nothing replaced."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decoding.text import BYTE_ORDER_MARKS, DecodingError, decode
from read_files import read, reason, texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(
    text=TEXT,
    mark=st.sampled_from(BYTE_ORDER_MARKS),
    declared=st.sampled_from(["utf-8", "latin-1", "utf-16"]),
)
def test_a_byte_order_mark_says_the_encoding_and_is_no_part_of_the_text(
    text: str, mark: tuple[bytes, str], declared: str
) -> None:
    if mark[1] == "utf-16-le" and text.startswith("\0"):
        return  # these bytes are the mark of UTF-32-LE
    assert decode(mark[0] + text.encode(mark[1]), declared) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufeff")))
def test_utf8_without_a_mark_is_itself(text: str) -> None:
    assert decode(text.encode(), "utf-8") == text
    assert decode(text.encode(), "utf-8-sig") == text


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "Größe"),
        ("windows-1252", "„Maß“ €"),
        ("windows-1251", "Привет"),
        ("koi8-r", "Привет"),
        ("shift_jis", "表示ソ"),
        ("gb18030", "汉字"),
        ("euc-kr", "한글"),
        ("iso-2022-jp", "日本語"),
        ("utf-16", "text"),
        ("utf-16-be", "text"),
        ("utf-32", "text"),
        ("cp037", "text"),
    ],
)
def test_a_declared_encoding_is_used_where_there_is_no_mark(
    tmp_path: Path, encoding: str, text: str
) -> None:
    without = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}.get(encoding, encoding)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(without))
    assert texts(path, encoding=encoding) == [text]
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert texts(path, encoding=encoding) == [text]


@pytest.mark.parametrize(
    ("data", "encoding", "where"),
    [
        (b"caf\xe9", "utf-8", "at byte 3, got e9"),
        (b"\xc0\x80", "utf-8", "at byte 0"),
        ("\ud800".encode("utf-8", "surrogatepass"), "utf-8", "at byte 0, got ed a0 80"),
        (codecs.BOM_UTF8 + b"\xff", "latin-1", "utf-8 at byte 0"),
        (codecs.BOM_UTF16_LE + b"a", "utf-8", "utf-16-le at byte 0"),
        (b"\x00\xd8", "utf-16-le", "at byte 0"),
        (b"\x81", "windows-1252", "at byte 0"),
        (b"+2AA-", "utf-7", "expected utf-7"),
    ],
)
def test_what_cannot_be_decoded_is_an_error_that_says_where(
    data: bytes, encoding: str, where: str
) -> None:
    with pytest.raises(DecodingError, match=where) as caught:
        decode(data, encoding)
    assert caught.value.reason == "undecodable_text"
    assert "--encoding" in caught.value.message


@given(
    data=st.binary(),
    encoding=st.sampled_from(["utf-8", "utf-16", "utf-7", "shift_jis", "iso-2022-jp"]),
)
def test_any_bytes_give_text_or_a_decoding_error(data: bytes, encoding: str) -> None:
    try:
        text = decode(data, encoding)
    except DecodingError:
        return
    text.encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "empty"),
        (codecs.BOM_UTF8, "empty"),
        (codecs.BOM_UTF16_LE, "empty"),
        (b" \r\n\t", "whitespace_only"),
        ("\u3000\u2028\x85".encode(), "whitespace_only"),
        (b"a\0b", "nul_bytes"),
        (b"\0", "nul_bytes"),
        ("text".encode("utf-16-be"), "nul_bytes"),
        (b"caf\xe9", "undecodable_text"),
        (b"x" * 101, "too_large"),
        (codecs.BOM_UTF8 + b"x" * 101, "too_large"),
        (codecs.BOM_UTF16_LE + "字".encode("utf-16-le") * 34, "too_large"),  # 102 bytes of UTF-8
    ],
)
def test_a_file_without_usable_text_is_one_failure(
    tmp_path: Path, data: bytes, expected: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    documents, [failure] = read(path, max_document_bytes=100)
    assert documents == []
    assert (failure.reason, failure.step, failure.position, failure.record) == (
        expected,
        "decode",
        0,
        "0",
    )


@pytest.mark.parametrize(
    "data", [b"x" * 100, codecs.BOM_UTF8 + b"x" * 100, b"x", b"\x1f\x8b", b"BZh9 is no archive"]
)
def test_a_file_at_a_limit_is_a_document(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    if data.startswith(b"\x1f"):  # 0x8b is not UTF-8: read as what it is, not as gzip
        assert reason(path) == "undecodable_text"
        assert texts(path, encoding="latin-1") == ["\x1f\x8b"]
        return
    assert len(texts(path, max_document_bytes=100)) == 1
