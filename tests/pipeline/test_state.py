"""Who may write a date, and what is kept of interrupted runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pytest

from pipeline import sidecars
from pipeline.locking import DateLock, DateLocked
from pipeline.records import Figures, WorkUnit
from pipeline.state import Layout, Resumable, find_resumable
from staged_case import (
    DATE,
    FINGERPRINT,
    layout,
    make_rows,
    make_run,
    make_unit,
    stage,
    tree,
)

UNIT = make_unit()
OTHER = make_unit("b.jsonl")


def test_a_local_layout_is_absolute_and_a_bucket_is_as_it_was_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Layout("out/", DATE).manifest == f"{tmp_path}/out/documents/date={DATE}/_manifest.json"
    assert Layout("gs://b/out/", DATE).documents == f"gs://b/out/documents/date={DATE}"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert Layout("gs://b/out", DATE).control("run") == f"{tmp_path}/cache/lengthwise/runs/run"


# --- the lock


def test_of_two_runs_on_one_date_the_second_is_refused_and_told_who_has_it(tmp_path):
    with (
        DateLock(Layout(str(tmp_path), DATE), "first"),
        pytest.raises(DateLocked, match=rf"--date {DATE}: run first \(process {os.getpid()}\)"),
        DateLock(Layout(str(tmp_path), DATE), "second"),
    ):
        pass


def test_another_date_or_output_may_be_written_meanwhile(tmp_path):
    with (
        DateLock(Layout(str(tmp_path), DATE), "first"),
        DateLock(Layout(str(tmp_path), "2026-01-03"), "second"),
        DateLock(Layout(str(tmp_path / "other"), DATE), "third"),
    ):
        pass


def test_a_lock_is_free_again_after_the_run_and_leaves_nothing_behind(tmp_path):
    for run_id in ("first", "second"):
        with DateLock(Layout(str(tmp_path), DATE), run_id):
            pass
        assert list(tmp_path.iterdir()) == []


def test_a_lock_left_by_sigkill_never_blocks_the_next_run_even_if_a_worker_lives_on(tmp_path):
    script = """
        import subprocess, sys
        from pipeline.locking import DateLock
        from pipeline.state import Layout
        with DateLock(Layout(sys.argv[1], sys.argv[2]), "killed"):
            worker = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
            print(worker.pid, flush=True)
            worker.wait()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path, DATE],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    worker = int(child.stdout.readline())
    try:
        with (
            pytest.raises(DateLocked, match=rf"run killed \(process {child.pid}\)"),
            DateLock(Layout(str(tmp_path), DATE), "second"),
        ):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with DateLock(Layout(str(tmp_path), DATE), "third"):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_lock_on_a_file_that_its_last_owner_has_just_deleted_keeps_nobody_out(
    tmp_path, monkeypatch
):
    first, second, third = (DateLock(Layout(str(tmp_path), DATE), f"run-{n}") for n in (1, 2, 3))
    first.__enter__()
    flock = fcntl.flock

    def others_come_in_between(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.__exit__(None, None, None)
        third.__enter__()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", others_come_in_between)
    with pytest.raises(DateLocked, match="run-3"):
        second.__enter__()
    third.__exit__(None, None, None)
    with second:
        pass


def test_the_end_of_the_lock_keeps_what_an_unpublished_run_has_left(tmp_path):
    run = make_run(tmp_path, [UNIT])
    with DateLock(layout(run), run.run_id):
        stage(run, make_rows(run, UNIT, [0]))
        before = set(tree(tmp_path))
    assert before - set(tree(tmp_path)) == {f"_staging/date={DATE}/lock"}


def test_the_end_of_a_lock_that_was_deleted_leaves_the_next_run_alone(tmp_path):
    output = tmp_path / "out"
    first, second = (DateLock(Layout(str(output), DATE), f"run-{n}") for n in (1, 2))
    with first:
        shutil.rmtree(output)
    assert not output.exists()
    first.__enter__()
    shutil.rmtree(output)
    with second:
        (output / "_staging" / f"date={DATE}" / "runs").mkdir()
        before = tree(tmp_path)
        first.__exit__(None, None, None)
        assert tree(tmp_path) == before


# --- resuming


def resume(run, *units: WorkUnit, fingerprint: str = FINGERPRINT) -> Resumable:
    return find_resumable(layout(run), fingerprint, units)


def positions_kept(resumable: Resumable) -> list[int]:
    return sorted(p for path in resumable.sidecars for p in sidecars.read(path).positions.tolist())


def test_without_staged_files_everything_is_to_do(tmp_path):
    run = make_run(tmp_path, [UNIT, OTHER])
    assert resume(run, UNIT, OTHER) == Resumable(sidecars=(), units=(UNIT, OTHER))


def test_a_whole_unit_is_kept_and_a_partial_one_goes_on_where_it_was(tmp_path):
    run = make_run(tmp_path, [UNIT, OTHER])
    stage(run, make_rows(run, UNIT, [0, 1], records=3, failed=[2]), make_rows(run, OTHER, [5, 7]))
    found = resume(run, UNIT, OTHER)
    assert len(found.sidecars) == 2
    [left] = found.units
    assert (left.unit_id, list(left.done)) == (OTHER.unit_id, [5, 7])


def test_a_unit_is_whole_only_when_all_of_its_records_are_kept(tmp_path):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, [2], records=3, failed=[1]))
    [left] = resume(run, UNIT).units
    assert list(left.done) == [1, 2]


def test_the_last_reading_of_a_unit_says_how_many_records_it_has(tmp_path):
    run = make_run(tmp_path, [UNIT])
    again = make_run(tmp_path, [UNIT], run_id="run-2")
    stage(run, make_rows(run, UNIT, [0, 1], records=5))
    stage(again, make_rows(again, UNIT, records=3, failed=[-1]))
    assert resume(run, UNIT).units == ()


def test_a_unit_without_records_is_done_once_it_is_read(tmp_path):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, records=0))
    assert resume(run, UNIT).units == ()


def test_a_failure_of_the_object_itself_counts_as_done(tmp_path):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, records=1, failed=[-1]))
    assert resume(run, UNIT).units == ()


def test_of_overlapping_files_a_set_is_kept_that_holds_no_record_twice(tmp_path):
    run = make_run(tmp_path, [UNIT])
    again = make_run(tmp_path, [UNIT], run_id="run-2")
    stage(run, make_rows(run, UNIT, [1, 2, 3]), make_rows(run, UNIT, [6]))
    stage(again, make_rows(again, UNIT, [0, 1]), make_rows(again, UNIT, [2, 3, 4, 5]))
    found = resume(run, UNIT)
    assert positions_kept(found) == [0, 1, 2, 3, 4, 5, 6]
    assert list(found.units[0].done) == list(range(7))


def test_what_is_kept_of_a_unit_takes_little_memory(tmp_path):
    run = make_run(tmp_path, [UNIT])
    count = 30_000
    for start in (1, 0):
        keys = [
            (UNIT.unit_id, position, f"{position:032}") for position in range(start, 2 * count, 2)
        ]
        path = f"{layout(run).staged(FINGERPRINT)}/{start}.json"
        Path(path.replace("json", "parquet")).write_bytes(b"")
        sidecars.write(
            path, file=f"{start}.parquet", size_bytes=0, fingerprint=FINGERPRINT, run_id="run-1", keys=keys, failures=(), completions=(), figures=Figures(),
        )  # fmt: skip
    tracemalloc.start()
    found = resume(run, UNIT)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert list(found.units[0].done) == list(range(2 * count))
    assert kept < 10 * 2 * count


def test_a_failure_kept_once_is_not_kept_again(tmp_path):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, [0, 1], failed=[2]), make_rows(run, UNIT, [3], failed=[2]))
    assert positions_kept(resume(run, UNIT)) == [0, 1]


def test_a_bundle_that_was_tried_twice_completes_its_unit_once(tmp_path):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, [0], records=1), make_rows(run, UNIT, records=1))
    found = resume(run, UNIT)
    assert len(found.sidecars) == 1
    assert found.units == ()


@pytest.mark.parametrize(
    "now",
    [make_unit(generation="2"), make_unit(start=10), OTHER],
    ids=["changed", "split elsewhere", "gone"],
)
def test_rows_of_an_object_that_is_no_longer_listed_are_computed_again(tmp_path, now):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, [0], records=1))
    assert resume(run, now) == Resumable(sidecars=(), units=(now,))


def test_a_changed_object_takes_only_the_files_with_it_that_name_it(tmp_path):
    run = make_run(tmp_path, [UNIT, OTHER])
    stage(run, make_rows(run, UNIT, [0], records=1), make_rows(run, OTHER, [1], records=1))
    changed = make_unit(generation="2")
    found = resume(run, changed, OTHER)
    assert positions_kept(found) == [1]
    assert found.units == (changed,)


def test_another_fingerprint_keeps_nothing(tmp_path):
    run = make_run(tmp_path, [UNIT])
    stage(run, make_rows(run, UNIT, [0], records=1))
    assert resume(run, UNIT, fingerprint="e" * 64).sidecars == ()
    # The folder's name holds only the first letters of it.
    assert resume(run, UNIT, fingerprint=FINGERPRINT[:-1] + "0").sidecars == ()


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "not an object", "parquet gone", "parquet cut"]
)
def test_a_damaged_staged_file_is_left_out_and_the_rest_is_kept(tmp_path, damage):
    run = make_run(tmp_path, [UNIT])
    bad, _ = stage(run, make_rows(run, UNIT, [0]), make_rows(run, UNIT, [1]))
    path = Path(bad.sidecar)
    parquet = Path(sidecars.read(bad.sidecar).file_path)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "not an object":
        path.write_text("[]")
    elif damage == "parquet gone":
        parquet.unlink()
    else:
        parquet.write_bytes(parquet.read_bytes()[:-1])
    found = resume(run, UNIT)
    assert positions_kept(found) == [1]
    assert list(found.units[0].done) == [1]


def test_an_unfinished_sidecar_was_never_committed(tmp_path):
    run = make_run(tmp_path, [UNIT])
    [staged] = stage(run, make_rows(run, UNIT, [0]))
    path = Path(staged.sidecar)
    path.rename(path.with_name("_tmp-" + path.name))
    assert resume(run, UNIT).sidecars == ()


def test_the_lock_file_names_its_owner(tmp_path):
    with DateLock(Layout(str(tmp_path), DATE), "first"):
        owner = json.loads(Path(Layout(str(tmp_path), DATE).lock).read_text())
    assert owner == {"run_id": "first", "pid": os.getpid()}
