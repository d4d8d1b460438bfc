"""Publish survives a crash at any point: every storage operation is made to fail in turn, before, amid and after."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline import storage
from pipeline.locking import DateLock
from pipeline.publishing import publish
from pipeline.records import Run, StagedFile
from pipeline.state import find_resumable
from staged_case import FINGERPRINT, layout, make_rows, make_run, make_unit, stage, tree

OPERATIONS = ("create", "move", "copy", "delete", "delete_folder")
A, B = make_unit("a.jsonl"), make_unit("b.jsonl")
OLD = [(B.uri, "0")]
NEW = [(A.uri, str(position)) for position in range(8)] + [(B.uri, str(p)) for p in range(3)]


class Crash(BaseException):
    """Like a kill: no handler of `Exception` sees it."""


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts storage operations in `["done"]`; number `["at"]` crashes in the way `["how"]` says."""
    plan = {"done": 0, "at": -1, "how": 0}
    originals = {name: getattr(storage, name) for name in OPERATIONS}

    def wrapped(name: str):
        def operation(*arguments):
            number = plan["done"]
            plan["done"] += 1
            if number != plan["at"]:
                return originals[name](*arguments)
            if plan["how"] == 1:
                halfway(name, *arguments)
            elif plan["how"] == 2:
                originals[name](*arguments)
            raise Crash

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(storage, name, wrapped(name))
    return plan


def halfway(name: str, *paths: str) -> None:
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


def published_before(output: Path) -> None:
    """The same date as an earlier run has left it."""
    run = make_run(output, [B], run_id="run-0")
    with DateLock(layout(run), run.run_id):
        publish(run, stage(run, make_rows(run, B, [0], records=1)))


def staged_run(output: Path) -> tuple[Run, list[StagedFile]]:
    """A run with a file that is taken as it is, two that are merged, and an id that comes twice."""
    run = make_run(output, [A, B], run_id="run-1", max_failure_ratio=0.5, max_rows_per_file=10)
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
    manifest = json.loads(Path(layout(run).manifest).read_text())
    for entry in (*manifest["documents"], *manifest["failures"]):
        path = Path(run.job.output.output, entry["path"])
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]
        table = pq.read_table(path)
        assert table.num_rows == entry["rows"]
        if "documents" in entry["path"]:
            rows += zip(table["uri"].to_pylist(), table["record"].to_pylist(), strict=True)
    return sorted(rows)


def assert_complete(run: Run, output: Path) -> None:
    assert published(run) == NEW
    manifest = json.loads(Path(layout(run).manifest).read_text())
    assert manifest["run_id"] == run.run_id
    assert len(manifest["documents"]) == 2
    assert [row["reason"] for row in failures(run, manifest)] == ["bad_json", "duplicate_id"]
    state = Path(output, manifest["state"]["path"])
    assert hashlib.sha256(state.read_bytes()).hexdigest() == manifest["state"]["sha256"]
    report = json.loads(Path(layout(run).report(run.run_id)).read_text())
    assert (report["status"], report["documents"]["written"]) == ("published", len(NEW))
    listed = {e["path"] for kind in ("documents", "failures") for e in manifest[kind]}
    left = {name for name in tree(output) if name.startswith(("documents/", "failures/"))}
    assert left - listed == {f"documents/date={run.date}/_manifest.json"}


def failures(run: Run, manifest: dict) -> list[dict]:
    [entry] = manifest["failures"]
    return sorted(
        pq.read_table(Path(run.job.output.output, entry["path"])).to_pylist(),
        key=lambda row: row["reason"],
    )


def crash_points(
    crashing: dict[str, int], tmp_path: Path
) -> Iterator[tuple[Path, Run, list[StagedFile]]]:
    """The same output folder, crashed at each operation in each way; ends after the last operation."""
    output, before = tmp_path / "out", tmp_path / "before"
    published_before(output)
    run, staged = staged_run(output)
    output.rename(before)
    number = 0
    while True:
        for how in range(3):
            shutil.copytree(before, output)
            crashing.update(done=0, at=number, how=how)
            try:
                with DateLock(layout(run), run.run_id):
                    publish(run, staged)
                    operations = crashing["done"]
                    crashing["at"] = -1
            except Crash:
                crashing["at"] = -1
                assert published(run) in (OLD, NEW), (
                    "whoever reads the manifest sees one or the other"
                )
                yield output, run, staged
            else:
                assert operations <= number
                assert number >= 18, "the operations are counted"
                return
            shutil.rmtree(output)
        number += 1


def test_publishing_again_after_a_crash_at_any_operation_completes_the_partition(
    tmp_path, crashing
):
    for output, run, staged in crash_points(crashing, tmp_path):
        documents = Path(layout(run).documents)
        before = {path.name: path.stat().st_ino for path in documents.glob("*.parquet")}
        complete = published(run) == NEW
        with DateLock(layout(run), run.run_id):
            publish(run, staged)
            assert_complete(run, output)
        if complete:
            after = {path.name: path.stat().st_ino for path in documents.glob("*.parquet")}
            assert after.items() <= before.items(), "files that are published are not touched again"
        assert not (output / "_staging").exists()


def test_the_next_run_after_a_crash_at_any_operation_has_nothing_to_compute_again(
    tmp_path, crashing
):
    for output, run, _ in crash_points(crashing, tmp_path):
        found = find_resumable(layout(run), FINGERPRINT, [A, B])
        if found.units:
            assert published(run) == NEW, "staged files go only once the partition is complete"
            continue
        later = make_run(
            output,
            [A, B],
            run_id="run-2",
            resumed=found.sidecars,
            max_failure_ratio=0.5,
            max_rows_per_file=10,
        )
        with DateLock(layout(later), later.run_id):
            publish(later, [])
            assert_complete(later, output)
        assert not (output / "_staging").exists()


def test_a_crash_amid_crashes_is_survived_too(tmp_path, crashing):
    published_before(tmp_path)
    run, staged = staged_run(tmp_path)
    for number in range(60):
        crashing.update(done=0, at=number, how=2)
        try:
            publish(run, staged)
            break
        except Crash:
            continue
    crashing["at"] = -1
    publish(run, staged)
    assert_complete(run, tmp_path)
