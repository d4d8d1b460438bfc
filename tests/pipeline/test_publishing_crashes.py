"""Publish survives a crash at any point: every storage operation is made to fail in turn, before, amid and after.

In a bucket it is every request that changes something, before and after: an object is never there in part.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from local_gcs import client, local_gcs
from pipeline import storage
from pipeline.locking import DateLock
from pipeline.publishing import RunFailed, publish
from pipeline.records import Run, StagedFile
from pipeline.state import find_resumable
from staged_case import (
    FINGERPRINT,
    layout,
    make_rows,
    make_run,
    make_unit,
    read_manifest,
    read_report,
    stage,
    tree,
)

OPERATIONS = ("create", "move", "copy", "delete", "delete_folder")
A, B = make_unit("a.jsonl"), make_unit("b.jsonl")
OLD = [(B.uri, "0")]
NEW = [(A.uri, str(position)) for position in range(8)] + [(B.uri, str(p)) for p in range(3)]
BEFORE, HALFWAY, AFTER = range(3)


class Crash(BaseException):
    """Like a kill: no handler of `Exception` sees it."""


class Crashes:
    """Counts operations in `done`; number `at` crashes, before, halfway or after it as `how` says."""

    def __init__(self) -> None:
        self.done, self.at, self.how = 0, -1, BEFORE

    def plan(self, at: int, how: int = BEFORE) -> None:
        self.done, self.at, self.how = 0, at, how

    def wrap(self, operation: Callable[..., Any], halfway: Callable[..., Any]) -> Any:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            number = self.done
            self.done += 1
            if number != self.at:
                return operation(*arguments, **more)
            if self.how == HALFWAY:
                halfway(*arguments)
            elif self.how == AFTER:
                operation(*arguments, **more)
            raise Crash

        return wrapped


class Folder:
    """An output folder on this machine."""

    hows = (BEFORE, HALFWAY, AFTER)
    least = 18  # operations that there are

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.output = str(folder / "out")
        self._saved = folder / "saved"
        self.crashes = Crashes()
        for name in OPERATIONS:
            wrapped = self.crashes.wrap(
                getattr(storage, name), lambda *paths, name=name: _halfway(name, *paths)
            )
            monkeypatch.setattr(storage, name, wrapped)

    def lock(self, run: Run) -> Any:
        return DateLock(layout(run), run.run_id)

    def save(self) -> None:
        Path(self.output).rename(self._saved)

    def restore(self) -> None:
        shutil.rmtree(self.output, ignore_errors=True)
        shutil.copytree(self._saved, self.output)

    def names(self) -> list[str]:
        return tree(self.output)

    def versions(self) -> dict[str, int]:
        """Tells each published file from another one of its name."""
        names = [name for name in self.names() if name.startswith("documents/") and "part-" in name]
        return {name: Path(self.output, name).stat().st_ino for name in names}


class Bucket:
    """A bucket of a local server."""

    hows = (BEFORE, AFTER)
    least = 25
    output = "gs://out"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._bucket = client().bucket("out")
        self.crashes = Crashes()
        from google.auth.transport.requests import AuthorizedSession

        request = AuthorizedSession.request
        counted = self.crashes.wrap(request, request)

        def sent(session: Any, method: str, url: str, *arguments: Any, **more: Any) -> Any:
            if method == "GET":
                return request(session, method, url, *arguments, **more)
            if 0 <= self.crashes.at < self.crashes.done:
                raise Crash  # who is dead changes nothing more
            return counted(session, method, url, *arguments, **more)

        monkeypatch.setattr(AuthorizedSession, "request", sent)

    def lock(self, run: Run) -> Any:
        return nullcontext()  # a lease makes requests of its own

    def save(self) -> None:
        self._saved = {blob.name: blob.download_as_bytes() for blob in self._bucket.list_blobs()}

    def restore(self) -> None:
        there = {blob.name: blob for blob in self._bucket.list_blobs()}
        for name in there.keys() - self._saved.keys():
            there[name].delete()
        for name, content in self._saved.items():
            if name not in there or "manifest" in name:
                self._bucket.blob(name).upload_from_string(content)

    def names(self) -> list[str]:
        return [blob.name for blob in self._bucket.list_blobs()]

    def versions(self) -> dict[str, int]:
        blobs = self._bucket.list_blobs(prefix="documents/")
        return {blob.name: blob.generation for blob in blobs if "part-" in blob.name}


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.full)])
def place(request, tmp_path, monkeypatch) -> Iterator[Folder | Bucket]:
    if request.param == "folder":
        yield Folder(tmp_path, monkeypatch)
        return
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with local_gcs("out"):
        yield Bucket(monkeypatch)


def _halfway(name: str, *paths: str) -> None:
    """What an operation that is not atomic may leave when it is cut off."""
    if name == "copy":
        Path(paths[1]).parent.mkdir(parents=True, exist_ok=True)
        Path(paths[1]).write_bytes(Path(paths[0]).read_bytes()[:100])
    elif name == "create":
        Path(paths[0]).parent.mkdir(parents=True, exist_ok=True)
        Path(paths[0]).write_bytes(b"PAR1")
    elif name == "delete_folder":
        for path in [p for p in sorted(Path(paths[0]).rglob("*")) if p.is_file()][::2]:
            path.unlink()


def published_before(place: Folder | Bucket) -> None:
    """The same date as an earlier run has left it."""
    run = make_run(place.output, [B], run_id="run-0")
    with place.lock(run):
        publish(run, stage(run, make_rows(run, B, [0], records=1)))


def staged_run(place: Folder | Bucket) -> tuple[Run, list[StagedFile]]:
    """A run with a file that is taken as it is, two that are merged, and an id that comes twice."""
    run = make_run(
        place.output, [A, B], run_id="run-1", max_failure_ratio=0.5, max_rows_per_file=10
    )
    return run, stage(
        run,
        make_rows(run, A, range(5)),
        make_rows(run, A, [5, 6], records=9, failed=[8]),
        make_rows(run, A, [7]),
        make_rows(run, B, [0, 1, 2, 3], records=4, ids={3: "1"}),
    )


def published(run: Run) -> list[tuple[str, str]]:
    """What the manifest lists; every file must be there and as the manifest says."""
    rows = []
    manifest = read_manifest(run)
    for entry in (*manifest["documents"], *manifest["failures"]):
        content = storage.read(storage.join(run.job.output.output, entry["path"]))
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        table = pq.read_table(io.BytesIO(content))
        assert table.num_rows == entry["rows"]
        if "documents" in entry["path"]:
            rows += zip(table["uri"].to_pylist(), table["record"].to_pylist(), strict=True)
    return sorted(rows)


def assert_complete(run: Run, place: Folder | Bucket) -> None:
    assert published(run) == NEW
    manifest = read_manifest(run)
    assert manifest["run_id"] == run.run_id
    assert len(manifest["documents"]) == 2
    [entry] = manifest["failures"]
    rows = pq.read_table(
        io.BytesIO(storage.read(storage.join(place.output, entry["path"])))
    ).to_pylist()
    assert sorted(row["reason"] for row in rows) == ["bad_json", "duplicate_id"]
    state = storage.read(storage.join(place.output, manifest["state"]["path"]))
    assert hashlib.sha256(state).hexdigest() == manifest["state"]["sha256"]
    report = read_report(run)
    assert (report["status"], report["documents"]["written"]) == ("published", len(NEW))
    listed = {e["path"] for kind in ("documents", "failures") for e in manifest[kind]}
    left = {name for name in place.names() if name.startswith(("documents/", "failures/"))}
    assert left - listed == {f"documents/date={run.date}/_manifest.json"}


def assert_nothing_staged(place: Folder | Bucket) -> None:
    assert not [name for name in place.names() if name.startswith("_staging/")]
    assert not Path(place.output, "_staging").exists()


def crash_points(place: Folder | Bucket) -> Iterator[tuple[Run, list[StagedFile]]]:
    """The same output, crashed at each operation in each way; ends after the last operation."""
    published_before(place)
    run, staged = staged_run(place)
    place.save()
    number = 0
    while True:
        for how in place.hows:
            place.restore()
            place.crashes.plan(number, how)
            try:
                with place.lock(run):
                    publish(run, staged)
                    operations = place.crashes.done
                    place.crashes.plan(-1)
            except Crash:
                place.crashes.plan(-1)
                assert published(run) in (OLD, NEW), (
                    "whoever reads the manifest sees one or the other"
                )
                yield run, staged
            else:
                assert operations <= number
                assert number >= place.least, "the operations are counted"
                return
        number += 1


def test_publishing_again_after_a_crash_at_any_operation_completes_the_partition(place):
    for run, staged in crash_points(place):
        before = place.versions()
        complete = published(run) == NEW
        with place.lock(run):
            publish(run, staged)
            assert_complete(run, place)
        if complete:
            after = place.versions()
            assert after.items() <= before.items(), "files that are published are not touched again"
        assert_nothing_staged(place)


def test_the_next_run_after_a_crash_at_any_operation_has_nothing_to_compute_again(place):
    for run, _ in crash_points(place):
        found = find_resumable(layout(run), FINGERPRINT, [A, B])
        if found.units:
            assert published(run) == NEW, "staged files go only once the partition is complete"
            continue
        later = make_run(
            place.output,
            [A, B],
            run_id="run-2",
            resumed=found.sidecars,
            max_failure_ratio=0.5,
            max_rows_per_file=10,
        )
        with place.lock(later):
            publish(later, [])
            assert_complete(later, place)
        assert_nothing_staged(place)


def test_a_crash_amid_crashes_is_survived_too(place):
    published_before(place)
    run, staged = staged_run(place)
    for number in range(200):
        place.crashes.plan(number, AFTER)
        try:
            publish(run, staged)
            break
        except Crash:
            continue
    place.crashes.plan(-1)
    publish(run, staged)
    assert_complete(run, place)


def test_in_a_bucket_a_run_replaces_only_what_was_published_when_it_began(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with local_gcs("out"):
        place = Bucket(monkeypatch)
        published_before(place)
        run, staged = staged_run(place)
        began_before = replace(run, manifest_version=0)  # when nothing was published
        with pytest.raises(RunFailed, match="another run has published"):
            publish(began_before, staged)
        assert published(run) == OLD
