"""Inputs become work units: each object once, the large ones in parts, nothing lost without a word."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import os
import pickle
import socket
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import ReadingSettings, SettingsError
from pipeline.listing import Listing, field_types, list_units, read_listing, write_listing
from pipeline.records import MACHINE_REASONS, WorkUnit
from read_files import read, settings_for, texts

Put = Callable[..., Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Writes a file below the test's folder."""

    def write(name: str, data: bytes = b"text") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return write


def listed(*inputs: Path | str, **settings: object) -> Listing:
    return list_units(settings_for(*inputs, **settings))


def names(listing: Listing, folder: Path) -> list[str]:
    return [os.path.relpath(unit.uri, folder) for unit in listing.units]


def test_a_folder_is_read_recursively_and_in_order(put: Put, tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/b/c.jsonl", "ä.txt", "a.txt"):
        put(name)
    assert names(listed(tmp_path), tmp_path) == ["a.txt", "a/b/c.jsonl", "a/z.md", "b.txt", "ä.txt"]


def test_uris_of_local_files_are_absolute(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("in/a.txt")
    monkeypatch.chdir(tmp_path)
    for given in (
        "in",
        "in/",
        "./in/a.txt",
        "in/../in/a.txt",
        "in/*.txt",
        "*/a.txt",
        "**/a.txt",
        "in//a.txt",
    ):
        assert [unit.uri for unit in listed(given).units] == [str(tmp_path / "in/a.txt")], given


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.txt", "text", "none"),
        ("a.TEXT", "text", "none"),
        ("a.md.gz", "markdown", "gzip"),
        ("a.markdown", "markdown", "none"),
        ("a.b.jsonl.bz2", "jsonl", "bzip2"),
        ("a.NDJSON.zst", "jsonl", "zstd"),
        ("part-0.snappy.parquet", "parquet", "none"),
        ("a.parquet.gz", "parquet", "gzip"),
        ("README", "unknown", "none"),
        ("a.docx", "unknown", "none"),
        ("a.gz", "unknown", "gzip"),
        ("txt", "unknown", "none"),
    ],
)
def test_the_name_says_format_and_compression(
    put: Put, name: str, kind: str, compression: str
) -> None:
    known = put("known.txt")
    unit = next(unit for unit in listed(put(name), known).units if unit.uri != str(known))
    assert (unit.format, unit.compression, unit.start, unit.stop) == (kind, compression, 0, None)


def test_format_reads_files_of_any_name(put: Put) -> None:
    assert listed(put("notes.log.gz"), format="text").units[0].format == "text"
    assert texts(put("notes.log", b"a line"), format="markdown") == ["a line"]


def test_a_file_of_unknown_format_becomes_a_failure_and_is_not_skipped(
    put: Put, tmp_path: Path
) -> None:
    put("a.txt")
    put("b.docx")
    documents, [failure] = read(tmp_path)
    assert len(documents) == 1
    assert (failure.reason, failure.uri, failure.record) == (
        "unsupported_format",
        str(tmp_path / "b.docx"),
        None,
    )
    assert ".txt" in failure.message and "--format" in failure.message


def test_an_input_of_unknown_formats_alone_is_refused(put: Put, tmp_path: Path) -> None:
    put("a.rst")
    put("b")
    with pytest.raises(SettingsError, match=r"known format.*a\.rst and others.*--format"):
        listed(tmp_path)


def test_hidden_files_and_folders_are_left_out_and_counted(put: Put, tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", "_SUCCESS", ".git/c.txt", "x/_tmp/d.txt", "x/e.txt"):
        put(name)
    listing = listed(tmp_path)
    assert names(listing, tmp_path) == ["a.txt", "x/e.txt"]
    assert listing.hidden == 4
    assert listed(f"{tmp_path}/*.txt").hidden == 1


def test_a_hidden_file_that_is_named_is_read_and_not_counted(put: Put, tmp_path: Path) -> None:
    put("a.txt")
    hidden = put("_notes/.b.txt")
    listing = listed(tmp_path, hidden)
    assert (names(listing, tmp_path), listing.hidden) == (["_notes/.b.txt", "a.txt"], 0)
    assert names(listed(f"{tmp_path}/_notes/.*"), tmp_path) == ["_notes/.b.txt"]
    assert names(listed(f"{tmp_path}/*.txt", tmp_path / "_notes" / ".b.txt"), tmp_path) == [
        "_notes/.b.txt",
        "a.txt",
    ]


@pytest.mark.parametrize(
    "folder", [".hidden", "_staging", "a[1]", "{x,y}", "*", "with space", "данные"]
)
def test_names_above_the_input_are_never_patterns_and_never_hidden(
    put: Put, tmp_path: Path, folder: str
) -> None:
    put(f"{folder}/a.txt")
    put("a1/a.txt")
    for given in (
        folder,
        f"{folder}/",
        f"{folder}/a.txt",
        f"{folder}/*.txt",
        f"{folder}/**/*.t?t",
        f"{folder}/{{a,b}}.txt",
    ):
        assert names(
            listed(tmp_path / given if "*" not in given else f"{tmp_path}/{given}"), tmp_path
        ) == [f"{folder}/a.txt"], given


@pytest.mark.parametrize(
    "name",
    [
        "a[1].txt",
        "{b}.txt",
        "{c,d}.txt",
        "*.txt",
        "e f.txt",
        "日本語 ü.txt",
        "#1.txt",
        "q?.txt",
        "a\nb.txt",
    ],
)
def test_an_existing_file_is_found_by_its_name_whatever_letters_it_has(
    put: Put, tmp_path: Path, name: str
) -> None:
    put("a1.txt")
    path = put(name, b"found")
    assert names(listed(path), tmp_path) == [name]
    assert texts(path) == ["found"]
    assert name in names(listed(tmp_path), tmp_path)


def test_braces_are_alternatives_of_which_one_must_match(put: Put, tmp_path: Path) -> None:
    for name in ("2024/a.txt", "2025/b.md", "2026/c.txt"):
        put(name)
    assert names(listed(f"{tmp_path}/{{2024,2025,2027}}/*.{{txt,md}}"), tmp_path) == [
        "2024/a.txt",
        "2025/b.md",
    ]
    with pytest.raises(SettingsError, match="found none"):
        listed(f"{tmp_path}/{{2027,2028}}/*")


def test_an_object_that_several_inputs_name_is_listed_once(put: Put, tmp_path: Path) -> None:
    a, b = put("a.txt"), put("b.txt")
    (tmp_path / "list.manifest").write_text("a.txt\n./b.txt\n")
    listing = listed(
        tmp_path / "?.txt", a, f"{tmp_path}/**/a.txt", manifest=str(tmp_path / "list.manifest")
    )
    assert [unit.uri for unit in listing.units] == [str(a), str(b)]


def test_a_glob_names_files_and_not_the_folders_beside_them(put: Put, tmp_path: Path) -> None:
    put("a.txt")
    put("sub/b.txt")
    assert names(listed(f"{tmp_path}/*"), tmp_path) == ["a.txt"]
    assert names(listed(f"{tmp_path}/*/"), tmp_path) == ["sub/b.txt"]


@pytest.mark.parametrize(
    "given",
    ["missing.txt", "missing/", "*.jsonl", "missing/*.txt", "empty", "{x,y}.txt", "a.txt/*"],
)
def test_an_input_that_matches_nothing_is_refused_unless_allowed(
    put: Put, tmp_path: Path, given: str
) -> None:
    put("a.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"--input .*found none.*--allow-empty"):
        listed(f"{tmp_path}/a.txt", f"{tmp_path}/{given}")
    assert names(listed(f"{tmp_path}/{given}", allow_empty=True), tmp_path) == []


def test_a_refusal_says_that_there_are_only_hidden_files(put: Put, tmp_path: Path) -> None:
    put("_SUCCESS")
    put(".a.txt")
    with pytest.raises(SettingsError, match="2 hidden files"):
        listed(tmp_path)


def test_a_scheme_that_no_filesystem_serves_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"--input ftp://host/a\.txt: cannot be listed"):
        listed("ftp://host/a.txt")


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("a.txt")
    put("locked/b.txt")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if os.fspath(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SettingsError, match=r"cannot be listed: .*Permission denied.*locked"):
        listed(tmp_path)


def test_links_are_followed_but_not_in_circles(put: Put, tmp_path: Path) -> None:
    put("in/a.txt", b"linked")
    put("elsewhere/b.txt", b"too")
    (tmp_path / "in/folder").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "in")
    assert names(listed(tmp_path / "in"), tmp_path) == ["in/a.txt", "in/folder/b.txt"]


def test_folders_that_link_to_each_other_are_listed_once(put: Put, tmp_path: Path) -> None:
    folders = [tmp_path / f"in/{number}" for number in range(8)]
    for folder in folders:
        put(f"in/{folder.name}/a.txt")
    for folder in folders:
        for other in folders:
            if other != folder:
                (folder / f"to-{other.name}").symlink_to(other)
    assert len(listed(tmp_path / "in").units) == 8


def test_a_link_to_itself_is_a_failure_and_the_rest_is_read(put: Put, tmp_path: Path) -> None:
    put("in/a.txt", b"text")
    (tmp_path / "in/loop.txt").symlink_to("loop.txt")
    documents, failures = read(tmp_path / "in")
    assert len(documents) == 1
    assert [Path(one.uri).name for one in failures] == ["loop.txt"]


def test_a_link_that_leads_nowhere_and_a_pipe_are_failures(put: Put, tmp_path: Path) -> None:
    put("a.txt")
    (tmp_path / "b.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "c.txt")
    documents, failures = read(tmp_path)
    assert len(documents) == 1
    assert [(Path(one.uri).name, one.reason) for one in failures] == [
        ("b.txt", "missing_object"),
        ("c.txt", "not_a_file"),
    ]


def test_what_is_no_file_fails_for_good_and_is_not_tried_again(put: Put, tmp_path: Path) -> None:
    put("a.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "device.txt").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(tmp_path / "socket.txt"))  # a socket's name may not be long
        _, failures = read(tmp_path)
    assert [Path(one.uri).name for one in failures] == [
        "device.txt",
        "loop.txt",
        "pipe.txt",
        "socket.txt",
    ]
    assert not MACHINE_REASONS & {one.reason for one in failures}
    assert "expected a file, got a pipe" in failures[2].message
    assert "expected a file, got a socket" in failures[3].message


def test_names_that_are_not_utf8_have_uris_of_their_own_that_can_be_stored_and_read(
    put: Put, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    folder = os.fsencode(tmp_path / "in")
    os.mkdir(folder + b"/\xff 100%")
    found = {
        b"caf\xe9.txt": "byte",
        b"caf\xe8.txt": "another byte",
        b"caf\\xe9.txt": "backslash",
        b"caf%E9.txt": "percent",
        b"\xff 100%/a.jsonl": "folder",
    }
    for name, text in found.items():
        data = json.dumps({"text": text}) if name.endswith(b"l") else text
        with open(folder + b"/" + name, "wb") as file:
            file.write(data.encode())
    documents, failures = read(tmp_path / "in")
    assert failures == []
    uris = {document.text: document.uri for document in documents}
    assert uris == {
        "byte": f"file://{tmp_path}/in/caf%E9.txt",
        "another byte": f"file://{tmp_path}/in/caf%E8.txt",
        "backslash": f"{tmp_path}/in/caf\\xe9.txt",
        "percent": f"{tmp_path}/in/caf%E9.txt",
        "folder": f"file://{tmp_path}/in/%FF%20100%25/a.jsonl",
    }
    for text, uri in uris.items():
        assert [unit.uri for unit in listed(uri).units] == [uri]
        assert texts(Path(uri)) == [text] if uri.startswith("/") else True
    manifest = put("list", "\n".join(uris.values()).encode())
    units = list_units(ReadingSettings(manifest=str(manifest))).units
    assert [unit.uri for unit in units] == sorted(uris.values())
    assert all(unit.generation for unit in units)


# Manifests


def test_a_manifest_names_a_file_a_line_relative_to_its_folder(put: Put, tmp_path: Path) -> None:
    for name in ("in/a.txt", "in/b [1].txt", "in/#c.txt", "elsewhere/d.txt", "in/not named.txt"):
        put(name)
    lines = [
        "a.txt",
        "",
        "b [1].txt\r",
        "#c.txt",
        str(tmp_path / "elsewhere/d.txt"),
        "../elsewhere/d.txt",
        "  ",
    ]
    manifest = put("in/list", codecs.BOM_UTF8 + "\n".join(lines).encode())
    listing = list_units(ReadingSettings(manifest=str(manifest)))
    assert names(listing, tmp_path) == ["elsewhere/d.txt", "in/#c.txt", "in/a.txt", "in/b [1].txt"]


def test_a_missing_file_of_a_manifest_is_one_failure(put: Put, tmp_path: Path) -> None:
    put("a.txt")
    put("folder/x.txt")
    manifest = put("list", b"a.txt\nmissing.txt\nfolder\nnul\0.txt\n")
    settings = ReadingSettings(manifest=str(manifest), format="text")
    units = list_units(settings).units
    assert [unit.generation == "" for unit in units] == [False, True, True, True]
    documents, failures = read(tmp_path / "a.txt", manifest=str(manifest), format="text")
    assert len(documents) == 1
    assert [(Path(one.uri).name, one.reason, one.step) for one in failures] == [
        ("folder", "not_a_file", "read"),
        ("missing.txt", "missing_object", "read"),
        ("nul\0.txt", "missing_object", "read"),
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"\xff\xfe", "UTF-8"), (b"\n \n", "found none"), (None, "cannot be read")],
)
def test_a_manifest_that_cannot_be_used_is_refused(
    put: Put, tmp_path: Path, data: bytes | None, message: str
) -> None:
    path = tmp_path / "list" if data is None else put("list", data)
    with pytest.raises(SettingsError, match=f"--manifest .*{message}"):
        list_units(ReadingSettings(manifest=str(path)))


def test_an_empty_manifest_is_allowed_when_asked_for(put: Put) -> None:
    assert list_units(ReadingSettings(manifest=str(put("list", b"")), allow_empty=True)).units == ()


# Parts of large objects


def test_a_large_json_lines_file_is_divided_into_ranges_without_gaps(put: Put) -> None:
    path = put("a.jsonl", b'{"text": "x"}\n' * 1000)
    units = listed(path, split_bytes=3000).units
    assert len(units) == 5
    assert units[0].start == 0
    assert units[-1].stop is None
    assert all(before.stop == after.start for before, after in pairwise(units))
    assert all((unit.stop or path.stat().st_size) - unit.start <= 3000 for unit in units)
    assert len({unit.unit_id for unit in units}) == 5


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"x" * 5000),
        ("a.jsonl.bz2", bz2.compress(os.urandom(5000))),
        ("a.jsonl.gz", b"x" * 5000),
        ("lies.jsonl", gzip.compress(os.urandom(5000))),
        ("utf16.jsonl", codecs.BOM_UTF16_LE + b"x\0" * 5000),
        ("small.jsonl", b"x" * 1000),
        ("broken.parquet", b"x" * 5000),
    ],
)
def test_whatever_cannot_be_divided_is_one_unit(put: Put, name: str, data: bytes) -> None:
    [unit] = listed(put(name, data), split_bytes=1000).units
    assert (unit.start, unit.stop) == (0, None)


def test_a_declared_wide_encoding_is_not_divided(put: Put) -> None:
    assert (
        len(listed(put("a.jsonl", b"x\0" * 5000), split_bytes=1000, encoding="utf-16-le").units)
        == 1
    )


def test_a_large_parquet_file_is_divided_by_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"text": [os.urandom(50).hex() for _ in range(1000)]})
    pq.write_table(table, path, row_group_size=100)
    units = listed(path, split_bytes=path.stat().st_size // 4).units
    assert len(units) >= 4
    assert (units[0].start, units[-1].stop) == (0, 10)
    assert all(before.stop == after.start for before, after in pairwise(units))
    documents, failures = read(path, split_bytes=path.stat().st_size // 4)
    assert [document.text for document in documents] == table["text"].to_pylist()
    assert [document.position for document in documents] == list(range(1000))
    assert failures == []


def test_the_unit_id_changes_with_the_content(put: Put) -> None:
    path = put("a.txt")
    [before] = listed(path).units
    os.utime(path, ns=(1, before.size_bytes))
    [after] = listed(path).units
    assert before.unit_id != after.unit_id


# The staged listing


def test_a_listing_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    common = {"size_bytes": 10, "generation": "7", "compression": "none"}
    units = [
        WorkUnit(uri="/ü [1].txt", format="text", start=0, stop=None, **common),
        WorkUnit(
            uri="/a.jsonl",
            format="jsonl",
            start=5,
            stop=2**40,
            done=array("q", [-1, 5, 2**40 - 1]),
            **common,
        ),
        *(
            WorkUnit(uri=f"/{number}.txt", format="text", start=0, stop=None, **common)
            for number in range(2500)
        ),
    ]
    path = str(tmp_path / "listing.parquet")
    write_listing(iter(units), path)
    assert list(read_listing(path)) == units


def test_done_positions_take_little_more_than_eight_bytes_each(tmp_path: Path) -> None:
    count, path = 200_000, str(tmp_path / "todo.parquet")
    unit = WorkUnit(
        uri="/a.jsonl",
        format="jsonl",
        start=0,
        stop=None,
        size_bytes=1,
        generation="7",
        compression="none",
    )
    units = [
        replace(unit, start=start, done=array("q", range(start, start + 52 * count, 52)))
        for start in range(20)
    ]
    tracemalloc.start()
    write_listing(units, path)
    peaks = [tracemalloc.get_traced_memory()[1]]
    tracemalloc.reset_peak()
    for number, found in enumerate(read_listing(path)):
        assert found == units[number]
    peaks.append(tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    assert max(peaks) < 5 * 8 * count  # some units at a time, and never all of them
    assert len(pickle.dumps(found)) < 9 * count


def test_an_empty_listing_is_read_back(tmp_path: Path) -> None:
    write_listing((), str(tmp_path / "listing.parquet"))
    assert list(read_listing(str(tmp_path / "listing.parquet"))) == []


# Types of the kept fields


def test_kept_fields_have_the_type_given_else_that_of_the_first_parquet_file_else_string(
    tmp_path: Path,
) -> None:
    (tmp_path / "0.parquet").write_bytes(b"broken")
    pq.write_table(
        pa.table(
            {
                "text": ["x"],
                "year": pa.array([1], pa.int16()),
                "tag": pa.array(["a"]).dictionary_encode(),
            }
        ),
        tmp_path / "1.parquet",
    )
    pq.write_table(pa.table({"text": ["x"], "year": ["1"]}), tmp_path / "2.parquet")
    settings = settings_for(
        tmp_path, keep_fields=("year", "tag", "other", "score:float64", "dc:title:string")
    )
    assert field_types(settings, list_units(settings)) == (
        pa.field("year", pa.int16()),
        pa.field("tag", pa.string()),
        pa.field("other", pa.string()),
        pa.field("score", pa.float64()),
        pa.field("dc:title", pa.string()),
    )


@pytest.mark.parametrize("given", ["year:int", "dc:title", ":string", "", "year:"])
def test_a_kept_field_that_cannot_be_understood_is_refused(put: Put, given: str) -> None:
    settings = settings_for(put("a.txt"), keep_fields=(given,))
    with pytest.raises(SettingsError, match="--keep-fields: expected NAME or NAME:TYPE"):
        field_types(settings, list_units(settings))
