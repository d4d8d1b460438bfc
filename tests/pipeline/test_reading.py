"""Reading a work unit: every record once, as a document or a failure, in bounded chunks, from the listed content."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import pickle
import random
import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import reading
from pipeline.listing import list_units
from pipeline.objects import OpenObject
from pipeline.progress import Control
from pipeline.reading import Read, read_unit
from pipeline.records import Chunk, Document, Failure, WorkUnit
from read_files import outcomes, read, read_chunks, settings_for, texts, unit_of


def json_lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def many(path: Path, count: int, words: int = 5) -> Path:
    path.write_bytes(
        json_lines(*({"text": f"{number} " + "word " * words} for number in range(count)))
    )
    return path


def test_a_document_says_where_it_is_from_and_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines({"text": "first"}, {"text": "Größe"}))
    _, document = read(path)[0]
    data = "Größe".encode()
    assert document.uri == str(path)
    assert document.unit_id == unit_of(path).unit_id
    assert (document.position, document.record) == (18, "18")
    assert (document.text, document.media_type) == ("Größe", "application/jsonl")
    assert (document.content_sha256, document.size_bytes) == (
        hashlib.sha256(data).hexdigest(),
        len(data),
    )
    assert document.document_id == read(path)[0][1].document_id


@pytest.mark.parametrize(
    ("name", "media_type"), [("a.txt", "text/plain"), ("a.md", "text/markdown")]
)
def test_a_text_file_is_one_document_kept_as_it_is(
    tmp_path: Path, name: str, media_type: str
) -> None:
    path = tmp_path / name
    text = "\u2028# Title\r\n\r\ntext \t\n"
    path.write_bytes(text.encode())
    [document] = read(path)[0]
    assert (document.text, document.media_type) == (text, media_type)
    assert (document.position, document.record) == (0, "0")


def test_chunks_are_bounded_in_records_and_bytes(tmp_path: Path) -> None:
    chunks = read_chunks(many(tmp_path / "a.jsonl", 1000))
    assert [len(chunk.documents) for chunk in chunks] == [256, 256, 256, 232]
    big = tmp_path / "b.jsonl"
    big.write_bytes(json_lines(*({"text": "x" * 400_000} for _ in range(8))))
    assert [len(chunk.documents) for chunk in read_chunks(big)] == [3, 3, 2]


def test_failures_count_toward_a_chunk_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n" * 600)
    assert [len(chunk.failures) for chunk in read_chunks(path)] == [256, 256, 88]


def test_the_last_chunk_alone_completes_the_unit(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 512)
    path.write_bytes(path.read_bytes() + b"not JSON\n")
    chunks = read_chunks(path)
    assert [len(chunk.completions) for chunk in chunks] == [0] * (len(chunks) - 1) + [1]
    assert chunks[-1].completions[0].records == 513


def test_a_file_without_records_is_completed_with_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n \r\n")
    [chunk] = read_chunks(path)
    assert (chunk.documents, chunk.failures, chunk.completions[0].records) == ((), (), 0)


def test_figures_count_records_and_busy_seconds(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 300)
    path.write_bytes(path.read_bytes() + b"not JSON\n")
    chunks = read_chunks(path)
    assert sum(chunk.figures.counts["read"] for chunk in chunks) == 301
    assert all(chunk.figures.seconds["read"] > 0 for chunk in chunks)


@given(done=st.sets(st.integers(0, 29)), truncated=st.booleans())
@settings(max_examples=40, deadline=None)
def test_done_positions_are_counted_and_not_given(
    tmp_path_factory: pytest.TempPathFactory, done: set[int], truncated: bool
) -> None:
    path = tmp_path_factory.mktemp("done") / "a.jsonl.gz"
    lines = [
        json_lines({"id": number % 25, "text": random.Random(number).randbytes(30).hex()})
        for number in range(29)
    ]
    whole = gzip.compress(b"".join([*lines, b"not JSON\n"]))
    path.write_bytes(whole[:-30] if truncated else whole)
    everything = {one.position: one for found in read(path, id_field="id") for one in found}
    positions = sorted(everything)
    chosen = {positions[number] for number in done if number < len(positions)}
    left = {one.position: one for found in read(path, id_field="id", done=chosen) for one in found}
    assert left == {position: one for position, one in everything.items() if position not in chosen}


def test_done_positions_count_when_the_object_is_gone(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 5)
    unit = replace(unit_of(path), done=(0, 50))
    path.unlink()
    [chunk] = read_unit(unit, settings_for(path), ())
    assert [failure.position for failure in chunk.failures] == [-1]
    assert chunk.completions[0].records == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_stop_is_heeded_while_done_records_are_passed_over(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    records = [{"text": f"{number} {number * 'x'}"} for number in range(3000)]
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        data = json_lines(*records)
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    unit = replace(unit_of(path), done=[one.position for one in read(path)[0]])
    [chunk] = read_unit(unit, settings_for(path), ())
    assert (chunk.documents, chunk.completions[0].records) == ((), 3000)
    assert stopped_after(3, path, unit) == []


def test_a_stop_is_heeded_where_there_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b" " * 5_000_000 + b"\n" * 5_000_000)
    assert stopped_after(3, path, unit_of(path)) == []
    pq.write_table(
        pa.table({"text": ["x" * 100] * 50_000}),
        tmp_path / "a",
        compression="none",
        use_dictionary=False,
    )
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a").read_bytes(), 1))
    assert stopped_after(3, packed, unit_of(packed)) == []


def stopped_after(looks: int, path: Path, unit: WorkUnit) -> list[Chunk]:
    """What the step gives of a unit when it finds that it must stop at that look."""
    step = Read(run_over(path))
    answers = iter([False] * (looks - 1) + [True])
    step._control.stopping = lambda: next(answers)  # it must not look again
    chunks = list(step.process(unit))
    assert list(answers) == [], "the step did not look so often"
    return chunks


# Any division into ranges

_LINE = st.one_of(
    st.sampled_from(
        [
            b"",
            b" ",
            b"\r",
            b"not JSON",
            b'{"text": ""}',
            b'{"text": "\xe2\x80\xa8"}',
            b'{"no": 1}',
            b"\xff",
        ]
    ),
    st.text(max_size=40).map(
        lambda text: json.dumps({"text": text}, ensure_ascii=False).encode("utf-8", "replace")
    ),
    st.integers(0, 300).map(lambda size: b'{"text": "' + b"x" * size + b'"}'),
)


def comparable(one: Document | Failure) -> Document | Failure:
    """Without what depends on the range it was read in: lines are numbered only from a file's beginning."""
    if isinstance(one, Failure):
        one = replace(one, message=re.sub(r"^line \d+: ", "", one.message))
    return replace(one, unit_id="")


@given(
    lines=st.lists(_LINE, max_size=12),
    last=st.sampled_from([b"", b"\n", b"\r\n"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    edges=st.lists(st.integers(0, 10_000), max_size=6),
    encoding=st.sampled_from(["utf-8", "utf-16-le", "utf-32-be"]),
    block=st.integers(1, 64),
    limit=st.sampled_from([200, 10**6]),
)
@settings(max_examples=300, deadline=None)
def test_any_division_of_a_json_lines_file_gives_the_records_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    last: bytes,
    mark: bytes,
    edges: list[int],
    encoding: str,
    block: int,
    limit: int,
) -> None:
    data = mark + b"\n".join(lines) + last
    if encoding != "utf-8":
        data = data.decode("utf-8", "replace").removeprefix("\ufeff").encode(encoding)
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    path.write_bytes(data)
    given = settings_for(path, encoding=encoding, max_document_bytes=limit)
    unit = unit_of(path)

    def read_range(start: int, stop: int | None) -> list[Any]:
        chunks = list(read_unit(replace(unit, start=start, stop=stop), given, ()))
        found = [one for each in outcomes(chunks) for one in each]
        assert chunks[-1].completions[0].records == len(found)
        return [comparable(one) for one in sorted(found, key=lambda one: one.position)]

    bounds = sorted({0, len(data), *(edge % (len(data) + 1) for edge in edges)})
    whole = read_range(0, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.decompressing.BLOCK_BYTES", block)
        parts = [one for start, stop in pairwise(bounds) for one in read_range(start, stop)]
        assert read_range(0, None) == whole
    assert parts == whole
    if encoding == "utf-8" and b"\xff" not in data and limit > len(data):
        starts = [one.position for one in whole]
        expected, offset = [], 0
        for line in data.split(b"\n"):
            if line.removeprefix(mark if offset == 0 else b"").strip(b" \r"):
                expected.append(offset)
            offset += len(line) + 1
        assert starts == expected


def test_ranges_made_by_the_listing_give_the_records_of_the_whole(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 500)
    whole = [document.document_id for document in read(path)[0]]
    assert [document.document_id for document in read(path, split_bytes=1000)[0]] == whole


# Content that is not what was listed


def test_a_file_that_is_gone_is_one_failure(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 5)
    unit = unit_of(path)
    path.unlink()
    [chunk] = read_unit(unit, settings_for(path), ())
    [failure] = chunk.failures
    assert (failure.reason, failure.step, failure.record, failure.position) == (
        "missing_object",
        "read",
        None,
        -1,
    )
    assert (failure.uri, failure.unit_id) == (str(path), unit.unit_id)
    assert chunk.completions[0].records == 1


@pytest.mark.parametrize("change", ["content", "length"])
def test_a_file_that_was_changed_after_listing_is_one_failure(tmp_path: Path, change: str) -> None:
    path = many(tmp_path / "a.jsonl", 5)
    unit = unit_of(path)
    if change == "content":
        os.utime(path, ns=(0, 0))
    else:
        path.write_bytes(path.read_bytes() + b"\n")
        os.utime(path, ns=(0, int(unit.generation)))
    [chunk] = read_unit(unit, settings_for(path), ())
    [failure] = chunk.failures
    assert (chunk.documents, failure.reason) == ((), "changed_object")


@pytest.mark.parametrize("compressed", [False, True])
def test_a_file_that_is_overwritten_while_it_is_read_gives_nothing_of_its_new_content(
    tmp_path: Path, compressed: bool
) -> None:
    path = many(tmp_path / ("a.jsonl.gz" if compressed else "a.jsonl"), 40_000)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    chunks = read_unit(unit_of(path), settings_for(path), ())
    first = next(chunks)
    assert len(first.documents) == 256
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    rest = list(chunks)
    documents, failures = outcomes(rest)
    assert documents == []
    assert [failure.reason for failure in failures] == ["changed_object"]
    assert rest[-1].completions[0].records == 257


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_old_end(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 1000)
    expected = texts(path)
    chunks = read_unit(unit_of(path), settings_for(path), ())
    found = list(next(chunks).documents)
    os.replace(many(tmp_path / "new.jsonl", 3), path)
    found += outcomes(list(chunks))[0]
    assert [document.text for document in found] == expected


class _Failing:
    """A file that reads a little and then raises."""

    def __init__(self, file: BinaryIO, error: OSError) -> None:
        self.file, self.error, self.calls = file, error, 0

    def read(self, size: int = -1) -> bytes:
        self.calls += 1
        if self.calls > 2:
            raise self.error
        return self.file.read(min(size, 4096))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    enter = OpenObject.__enter__

    def wrapped(self: OpenObject) -> OpenObject:
        opened = enter(self)
        opened.file = _Failing(opened.file, OSError(number, os.strerror(number)))  # type: ignore[assignment]
        return opened

    monkeypatch.setattr(OpenObject, "__enter__", wrapped)


def test_a_disk_error_is_one_failure_after_the_records_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path / "a.jsonl", 1000)
    failing(monkeypatch, errno.EIO)
    documents, [failure] = read(path)
    assert 50 < len(documents) < 1000
    assert (failure.reason, failure.record) == ("unreadable_object", None)
    assert os.strerror(errno.EIO) in failure.message


def test_a_fault_of_the_machine_ends_the_run_and_makes_no_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path / "a.jsonl", 1000)
    failing(monkeypatch, errno.EMFILE)
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        read_chunks(path)


def test_a_file_that_may_not_be_opened_is_one_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = many(tmp_path / "a.jsonl", 5)

    def refuse(path: str) -> BinaryIO:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("pipeline.objects.open_input", refuse)
    _, [failure] = read(path)
    assert failure.reason == "unreadable_object"
    assert "Permission denied" in failure.message


def test_our_own_faults_are_raised_and_never_become_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(reading.text, "documents", broken)
    path = tmp_path / "a.txt"
    path.write_text("x")
    with pytest.raises(RuntimeError, match="a fault of ours"):
        read_chunks(path)


# Memory


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_memory_does_not_grow_with_a_json_lines_file(tmp_path: Path, ending: str) -> None:
    peaks = []
    for count in (10_000, 30_000):
        path = many(tmp_path / f"{count}.jsonl", count, words=40)
        if ending:
            data = gzip.compress(path.read_bytes(), 1)
            path = Path(f"{path}.gz")
            path.write_bytes(data)
            del data
        tracemalloc.start()
        assert (
            sum(len(chunk.documents) for chunk in read_unit(unit_of(path), settings_for(path), ()))
            == count
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 12e6


def test_a_line_that_is_too_long_is_a_failure_that_was_never_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before, after = json_lines({"text": "before"}), json_lines({"text": "after"})
    with path.open("wb") as file:
        file.write(before)
        file.write(b'{"text": "' + b"x" * 40_000_000 + b'"}\n')
        file.write(after)
    tracemalloc.start()
    documents, [failure] = read(path, max_document_bytes=1_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [document.text for document in documents] == ["before", "after"]
    assert (failure.reason, failure.position) == ("too_large", len(before))
    assert documents[1].position == len(before) + 40_000_013
    assert peak < 8e6


# In a pipeline


def run_over(path: Path, control: Path | None = None, **given: Any) -> SimpleNamespace:
    """As much of a Run as reading looks at."""
    reading_settings = settings_for(path, **given)
    schema = pa.schema([pa.field("document_id", pa.string()), pa.field("year", pa.int32())])
    return SimpleNamespace(
        job=SimpleNamespace(reading=reading_settings),
        schema=schema,
        control=str(control) if control else None,
    )


def test_a_pipeline_reads_every_format_with_one_step(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_bytes(json_lines({"text": "two", "year": 1999}, {"text": "three"}))
    pq.write_table(pa.table({"text": ["four"], "year": ["no number"]}), tmp_path / "c.parquet")
    run = run_over(tmp_path, keep_fields=("year:int32",))
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        chunks = pipeline | beam.Create(list_units(run.job.reading).units) | beam.ParDo(Read(run))
        found = chunks | beam.FlatMap(
            lambda chunk: [(one.text, one.fields) for one in chunk.documents]
        )
        faults = chunks | beam.FlatMap(lambda chunk: [one.reason for one in chunk.failures])
        assert_that(
            found,
            equal_to([("one", (None,)), ("two", (1999,)), ("three", (None,))]),
            label="documents",
        )
        assert_that(faults, equal_to(["field_type"]), label="failures")


def test_the_step_can_be_sent_to_workers(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(json_lines({"text": "x", "year": 7}))
    step = pickle.loads(pickle.dumps(Read(run_over(tmp_path, keep_fields=("year",)))))
    [chunk] = step.process(unit_of(tmp_path / "a.jsonl"))
    assert chunk.documents[0].fields == (7,)


def test_when_the_run_stops_a_unit_ends_early_and_is_not_completed(tmp_path: Path) -> None:
    path = many(tmp_path / "a.jsonl", 1000)
    folder = tmp_path / "control"
    folder.mkdir()
    step = Read(run_over(path, folder))
    chunks = step.process(unit_of(path))
    given: list[Chunk] = [next(chunks)]
    Control(str(folder)).stop(2)
    given += chunks
    assert len(given) == 1
    assert given[0].completions == ()
    assert list(step.process(unit_of(path))) == []


def test_a_unit_made_by_hand_needs_no_listing() -> None:
    unit = WorkUnit(
        uri="/no/such/file.txt",
        format="text",
        compression="none",
        start=0,
        stop=None,
        size_bytes=1,
        generation="1",
    )
    [chunk] = read_unit(unit, settings_for("/no"), ())
    assert chunk.failures[0].reason == "missing_object"
