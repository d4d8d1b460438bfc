"""A line of JSON becomes a document, or a failure that says what is wrong with it."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from read_files import read, reason, texts


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write(data: bytes | str, name: str = "a.jsonl") -> Path:
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    return write


@pytest.mark.parametrize(
    "data",
    [
        b'{"text": "a"}\n{"text": "b"}\n',
        b'{"text": "a"}\n{"text": "b"}',
        b'{"text": "a"}\r\n{"text": "b"}\r\n',
        b'\n\n{"text": "a"}\n \t\r\n{"text": "b"}\n\n',
        codecs.BOM_UTF8 + b'{"text": "a"}\n{"text": "b"}',
        codecs.BOM_UTF8 + b'\n{"text": "a"}\n{"text": "b"}',
        codecs.BOM_UTF16_LE + '{"text": "a"}\n{"text": "b"}\n'.encode("utf-16-le"),
        codecs.BOM_UTF16_BE + '{"text": "a"}\r\n\r\n{"text": "b"}'.encode("utf-16-be"),
        codecs.BOM_UTF32_LE + '{"text": "a"}\n{"text": "b"}\n'.encode("utf-32-le"),
    ],
)
def test_lines_end_at_line_feeds_and_blank_ones_are_no_records(put: Any, data: bytes) -> None:
    assert texts(put(data)) == ["a", "b"]


@pytest.mark.parametrize(
    "separator",
    ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r", "\u0a0a", "\u0a41\u4e00"],
)
def test_no_other_separator_ends_a_line(put: Any, separator: str) -> None:
    escaped = json.dumps({"text": f"a{separator}b"}, ensure_ascii=separator < " ")
    assert texts(put(f"{escaped}\n{escaped}\n")) == [f"a{separator}b"] * 2
    assert texts(put(f"{escaped}\n".encode("utf-16-le")), encoding="utf-16") == [f"a{separator}b"]


@pytest.mark.parametrize(
    ("encoding", "text"),
    [("latin-1", "Größe"), ("shift_jis", "表ソ"), ("utf-16-le", "ਊ文"), ("utf-32-be", "文"), ("cp037", "abc"), ("utf-7", "ü"), ("utf-8-sig", "ü")],
)  # fmt: skip
def test_lines_in_a_declared_encoding_are_read(put: Any, encoding: str, text: str) -> None:
    data = "".join(
        json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in (text, text + "2")
    )
    assert texts(put(data.encode(encoding)), encoding=encoding) == [text, text + "2"]


def test_a_line_that_cannot_be_decoded_costs_no_other_line(put: Any) -> None:
    lines = [line.encode("utf-16-le") for line in ('{"text": "a"}\n', '{"text": "b"}\n')]
    broken = '{"text": "'.encode("utf-16-le") + b"\x00\xd8" + '"}\n'.encode("utf-16-le")
    documents, [failure] = read(put(codecs.BOM_UTF16_LE + lines[0] + broken + lines[1]))
    assert [document.text for document in documents] == ["a", "b"]
    assert (failure.reason, failure.position) == ("undecodable_text", 2 + len(lines[0]))


def test_positions_are_byte_offsets_in_the_decompressed_file(put: Any) -> None:
    data = codecs.BOM_UTF8 + '{"text": "ü"}\n\n{"text": "b"}\nbad\n{"text": "c"}'.encode()
    documents, failures = read(put(data))
    offsets = [0, data.index(b'{"text": "b"'), data.index(b'{"text": "c"')]
    assert [document.position for document in documents] == offsets
    assert failures[0].position == data.index(b"bad")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "invalid_json"),
        (b"text", "invalid_json"),
        (b'{"text": "a"} {"text": "b"}', "invalid_json"),
        (b'{"text": "a",}', "invalid_json"),
        (b"{'text': 'a'}", "invalid_json"),
        (b'{"text": "a", "n": NaN}', "invalid_json"),
        (b'{"text": "a", "n": Infinity}', "invalid_json"),
        (b'{"text": "\\ud800"}', "invalid_json"),
        (b'{"text": "\\udc00\\ud800"}', "invalid_json"),
        (b'{"text": "a\tb"}', "invalid_json"),
        (b'{"text": "a\0b"}', "invalid_json"),
        (b'{"text": ' + b"[" * 100_000, "invalid_json"),
        (b'{"text": "\xff"}', "undecodable_text"),
        (b'{"text": "\xed\xa0\x80"}', "undecodable_text"),
        (b"\0\0\0\0", "invalid_json"),
        (b'"text"', "not_an_object"),
        (b"[]", "not_an_object"),
        (b"null", "not_an_object"),
        (b"3", "not_an_object"),
        (b"{}", "missing_text_field"),
        (b'{"Text": "a"}', "missing_text_field"),
        (b'{"inner": {"text": "a"}}', "missing_text_field"),
        (b'{"text": 1}', "text_not_string"),
        (b'{"text": null}', "text_not_string"),
        (b'{"text": true}', "text_not_string"),
        (b'{"text": ["a"]}', "text_not_string"),
        (b'{"text": "a", "text": "b"}', "repeated_field"),
        (b'{"text": "a", "te\\u0078t": "b"}', "repeated_field"),
        (b'{"text": "", "n": 1}', "empty"),
        (b'{"text": "\\u00a0\\n"}', "whitespace_only"),
        (b'{"text": "a\\u0000b"}', "nul_bytes"),
        (b'{"text": "' + b"x" * 600 + b'"}', "too_large"),
    ],
)
def test_a_line_that_gives_no_document_is_one_failure_with_its_reason(
    put: Any, line: bytes, expected: str
) -> None:
    limit = 500 if expected == "too_large" else 10**6
    good = b'{"text": "good"}\n'
    documents, [failure] = read(put(good + line + b"\n" + good), max_document_bytes=limit)
    assert [document.text for document in documents] == ["good", "good"]
    assert (failure.reason, failure.step, failure.position) == (expected, "decode", len(good))
    assert failure.record == str(len(good))
    assert failure.message.startswith("line 2: expected")


def test_a_failure_names_its_line_where_the_file_is_read_from_its_beginning(put: Any) -> None:
    path = put(b'\n{"text": "a"}\n\n{\n' + b'{"text": "b"}\n' * 10 + b'{"text": ""}\n{\n')
    _, failures = read(path)
    assert [one.message.partition(":")[0] for one in failures] == ["line 4", "line 15", "line 16"]
    _, [first, *later] = read(path, split_bytes=100)
    assert first.message.startswith("line 4: expected")
    assert len(later) == 2 and all(one.message.startswith("expected") for one in later)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "text", "text": "a"}',
        b'{"text": "a", "inner": {"text": "b"}}',
        b'{"text": "a", "inner": {"x": 1, "x": 2}}',
        b'{"x": 1, "x": 2, "text": "a"}',
        b'{"te\\u0078t": "a"}',
        b'{"text": "a", "n": 123456789012345678901234567890}',
    ],
)
def test_what_stands_in_fields_that_are_not_asked_for_does_not_matter(
    put: Any, line: bytes
) -> None:
    assert texts(put(line)) == ["a"]


@pytest.mark.parametrize("name", ["body", "größe", 'quo"te', "sla/sh", "back\\slash", "a.b", "字"])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_text_field_may_have_any_name(put: Any, name: str, ascii_only: bool) -> None:
    line = json.dumps({name: "a"}, ensure_ascii=ascii_only)
    assert texts(put(line), text_field=name) == ["a"]
    assert (
        reason(put(line[:-1] + ", " + json.dumps({name: "b"})[1:]), text_field=name)
        == "repeated_field"
    )


# Ids


def ids(path: Path) -> tuple[list[str], list[tuple[str, str | None]]]:
    documents, failures = read(path, id_field="id")
    return [document.record for document in documents], [
        (one.reason, one.record) for one in failures
    ]


def test_the_id_names_the_record(put: Any) -> None:
    lines = '{"id": "a", "text": "x"}\n{"id": 7, "text": "x"}\n{"id": -123456789012345678901234567890, "text": "x"}\n'
    assert ids(put(lines)) == (["a", "7", "-123456789012345678901234567890"], [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("null", "missing_id"), ("1.5", "bad_id"), ("1e30", "bad_id"), ("true", "bad_id"), ("[1]", "bad_id"), ("{}", "bad_id"),
        ('""', "bad_id"), ('"a\\u0000b"', "bad_id"),
    ],
)  # fmt: skip
def test_an_id_that_is_no_name_is_a_failure(put: Any, value: str, expected: str) -> None:
    assert ids(put(f'{{"id": {value}, "text": "x"}}')) == ([], [(expected, "0")])


def test_a_refused_id_is_told_why(put: Any) -> None:
    _, failures = read(
        put('{"id": "", "text": "x"}\n{"id": "\\u0000", "text": "x"}'), id_field="id"
    )
    assert [failure.message.partition("expected")[2] for failure in failures] == [
        " a name in the id field 'id', got an empty string",
        " a name in the id field 'id', got one with a NUL character: '\\x00'",
    ]


def test_a_missing_id_is_a_failure(put: Any) -> None:
    assert ids(put('{"text": "x"}')) == ([], [("missing_id", "0")])


def test_only_the_first_record_of_an_id_is_a_document(put: Any) -> None:
    lines = [
        {"id": 1, "text": "x"},
        {"id": "1", "text": "y"},
        {"id": 2, "text": ""},
        {"id": 2, "text": "z"},
    ]
    found, failed = ids(put("\n".join(map(json.dumps, lines))))
    assert found == ["1"]
    assert [reason for reason, _ in failed] == ["repeated_id", "empty", "repeated_id"]


def test_a_failure_has_the_id_of_its_record(put: Any) -> None:
    assert ids(put('{"id": "a", "text": 5}\n{"id": "b", "text": ""}\n{')) == (
        [],
        [("text_not_string", "a"), ("empty", "b"), ("invalid_json", "47")],
    )


# Kept fields


def kept(put: Any, value: str, kind: pa.DataType) -> Any:
    """The kept value, or the reason why there is no document."""
    documents, failures = read(
        put(f'{{"text": "x", "v": {value}}}'), keep_fields=("v",), fields=(pa.field("v", kind),)
    )
    if failures:
        return failures[0].reason
    pa.array([documents[0].fields[0]], kind)  # what the output does with it
    return documents[0].fields[0]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ('"a"', pa.string(), "a"),
        ("null", pa.string(), None),
        ("null", pa.int32(), None),
        ("12", pa.string(), "12"),
        ("12345678901234567890123", pa.string(), "12345678901234567890123"),
        ("9223372036854775808", pa.string(), "9223372036854775808"),
        ("1e30", pa.string(), "1e+30"),
        ("true", pa.string(), "true"),
        ("[1]", pa.string(), "field_type"),
        ('{"a": 1}', pa.string(), "field_type"),
        ("3", pa.int32(), 3),
        ("3.0", pa.int64(), 3),
        ("3.5", pa.int64(), "field_type"),
        ("true", pa.int64(), "field_type"),
        ('"3"', pa.int64(), "field_type"),
        ("2147483648", pa.int32(), "field_type"),
        ("9223372036854775807", pa.int64(), 2**63 - 1),
        ("9223372036854775808", pa.int64(), "field_type"),
        ("9" * 5000, pa.int64(), "invalid_json"),  # no double holds it
        ("3", pa.float64(), 3.0),
        ("9007199254740993", pa.float64(), "field_type"),
        ("1e300", pa.float32(), "field_type"),
        ("0.5", pa.float32(), 0.5),
        ("true", pa.float64(), "field_type"),
        ("false", pa.bool_(), False),
        ("0", pa.bool_(), "field_type"),
        ('["a", null]', pa.list_(pa.string()), ["a", None]),
        ("[1]", pa.list_(pa.string()), "field_type"),
        ('{"a": 1}', pa.struct([("a", pa.int64())]), {"a": 1}),
        ('"2024-01-01"', pa.date32(), "field_type"),
    ],
)
def test_a_kept_value_has_its_columns_type_or_is_a_failure(
    put: Any, value: str, kind: pa.DataType, expected: Any
) -> None:
    assert kept(put, value, kind) == expected


def test_a_kept_field_that_is_missing_is_null_and_one_that_is_there_twice_a_failure(
    put: Any,
) -> None:
    fields = (pa.field("a", pa.string()), pa.field("b", pa.string()))
    given = {"keep_fields": ("a", "b"), "fields": fields}
    documents, _ = read(put('{"text": "x", "b": "1"}'), **given)
    assert documents[0].fields == (None, "1")
    assert reason(put('{"text": "x", "b": "1", "b": "1"}'), **given) == "repeated_field"


# Whatever comes


@given(
    data=st.binary(max_size=60)
    | st.text(alphabet='{}[]":,\\utex1 \n', max_size=60).map(str.encode),
    encoding=st.sampled_from(["utf-8", "utf-16", "shift_jis"]),
    with_id=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_at_all_are_read_without_an_exception(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, encoding: str, with_id: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes(data)
    read(path, encoding=encoding, id_field="t" if with_id else None, text_field="e")


@given(
    values=st.lists(
        st.dictionaries(
            st.sampled_from(["text", "id", "other"]),
            st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
            | st.integers()
            | st.none(),
        ),
        max_size=8,
    ),
    ascii_only=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_record_is_what_the_standard_library_reads(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]], ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("same") / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps(value, ensure_ascii=ascii_only) for value in values),
        "utf-8",
        newline="\n",
    )
    documents, failures = read(path)
    assert len(documents) + len(failures) == len(values)
    usable = [
        value["text"]
        for value in values
        if isinstance(value.get("text"), str)
        and value["text"].strip()
        and "\0" not in value["text"]
    ]
    assert [document.text for document in documents] == usable
