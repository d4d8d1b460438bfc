"""Faults of the machine: after each, the run has published everything, or has failed loudly and can go on."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from corpora import write_jsonl
from lengthwise_command import COMMAND, documents, failures, job, reports, run, run_here, start
from model.predictor import Predictor
from pipeline import launching, storage

DATE = "2026-01-02"
NUMBER = 300


@pytest.fixture
def a_job(tiny_checkpoint, tmp_path):
    corpus = write_jsonl(tmp_path / "in", NUMBER)
    return job(corpus, tmp_path / "out", tiny_checkpoint, date=DATE, max_tokens_per_batch=256)


def assert_goes_on(a_job) -> None:
    """Nothing is published yet; the same job again publishes every document once."""
    output = Path(a_job.output.output)
    assert not (output / "documents" / f"date={DATE}").exists()
    assert run_here(a_job) == 0
    assert documents(output, DATE).num_rows == NUMBER
    assert failures(output, DATE).num_rows == 0
    [report] = [each for each in reports(output, DATE) if each["status"] == "published"]
    counts = report["documents"]
    assert counts["listed"] == counts["read"] == counts["written"] == NUMBER


def after(monkeypatch, calls: int, fault) -> None:
    """From this call of `Predictor.fetch` on, `fault` is called in its place."""
    fetch, done = Predictor.fetch, []

    def faulty(self, handle):
        done.append(1)
        return fetch(self, handle) if len(done) <= calls else fault(fetch(self, handle))

    monkeypatch.setattr(Predictor, "fetch", faulty)


def raising(error):
    def fault(_):
        raise error

    return fault


@pytest.mark.parametrize("status", ["INTERNAL", "UNAVAILABLE", "ABORTED"])
def test_a_device_that_fails_fails_the_run_and_no_document(status, a_job, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        after(patch, 5, raising(RuntimeError(f"{status}: the chip has halted")))
        assert run_here(a_job) == 1
    assert f"{status}: the chip has halted" in capsys.readouterr().err
    assert_goes_on(a_job)


def test_nan_for_one_document_costs_that_document_alone(tiny_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    for number in range(60):
        (tmp_path / "in" / f"{number}.txt").write_text(f"document {number} of sixty")
    (tmp_path / "in" / "bad.txt").write_text("zebra")
    dispatch, fetch = Predictor.dispatch, Predictor.fetch
    zebra = 29145  # the word in the tiny checkpoint's vocabulary

    def marked(self, token_ids, segment_ids, *rest, **more):
        return dispatch(self, token_ids, segment_ids, *rest, **more), token_ids, segment_ids

    def poisoned(self, handle):
        pooled, token_ids, segment_ids = fetch(self, handle[0]).copy(), *handle[1:]
        for row, column in np.argwhere(token_ids == zebra):
            pooled[row, segment_ids[row, column] - 1] = np.nan
        return pooled

    monkeypatch.setattr(Predictor, "dispatch", marked)
    monkeypatch.setattr(Predictor, "fetch", poisoned)
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    assert documents(tmp_path / "out", DATE).num_rows == 60
    [row] = failures(tmp_path / "out", DATE).to_pylist()
    assert (Path(row["uri"]).name, row["reason"]) == ("bad.txt", "non_finite_output")


def test_a_device_that_hangs_ends_the_run_and_the_next_one_goes_on(a_job, tmp_path):
    program = """
import sys, time
from pipeline import cli
from model.predictor import Predictor
fetch, done = Predictor.fetch, []
def hang(self, handle):
    done.append(1)
    return time.sleep(3600) if len(done) > 5 else fetch(self, handle)
Predictor.fetch = hang
sys.exit(cli.main(sys.argv[1:]))
"""
    settings = {
        "input": a_job.reading.inputs[0], "output": a_job.output.output, "model": a_job.model.model,
        "date": DATE, "max-tokens-per-batch": 256, "device-timeout-seconds": 10,
    }  # fmt: skip
    flags = [f"--{name}={value}" for name, value in settings.items()]
    result = subprocess.run(
        [sys.executable, "-c", program, "run", *flags],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "lengthwise: the device hangs: a batch of" in result.stderr
    assert_goes_on(a_job)


@pytest.mark.full
def test_a_worker_process_that_is_killed_fails_the_run_and_the_next_one_goes_on(
    tiny_checkpoint, tmp_path
):
    corpus, output = write_jsonl(tmp_path / "in", 12_000, words=(40, 50)), tmp_path / "out"
    arguments = [
        "--input", corpus, "--output", output, "--model", tiny_checkpoint, "--date", DATE,
        "--device=cpu", "--direct_running_mode=multi_processing", "--direct_num_workers=2",
    ]  # fmt: skip
    process = start(*arguments)
    deadline = time.monotonic() + 120
    while not list(output.glob("_staging/*/*/*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(worker_processes(process.pid)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a worker process died" in said
    assert not (output / "documents").exists()
    run(*arguments)
    assert documents(output, DATE).num_rows == 12_000
    runs = reports(output, DATE)[-1]["runs"]
    assert runs[0]["documents"] > 0, "what the killed run had staged is kept"
    assert sum(each["documents"] for each in runs) == 12_000


def worker_processes(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            ours = int(stat.read_text().rpartition(")")[2].split()[1]) == parent
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if ours and b"sdk_worker_main" in command:
            found.append(int(stat.parent.name))
    return found


def test_a_full_disk_fails_the_run_and_the_next_one_goes_on(a_job, monkeypatch, capsys):
    create, room = storage.create, [100_000]

    class OnAFullDisk:
        def __init__(self, path):
            self._file = create(path)

        def write(self, data):
            room[0] -= memoryview(data).nbytes
            if room[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self._file.write(data)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self._file.close()

    with monkeypatch.context() as patch:
        patch.setattr(storage, "create", OnAFullDisk)
        assert run_here(a_job) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "free some space and run again" in said
    assert_goes_on(a_job)


def test_an_output_folder_that_is_removed_fails_the_run_and_the_next_one_starts_over(
    a_job, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        after(
            patch,
            5,
            lambda pooled: (shutil.rmtree(a_job.output.output, ignore_errors=True), pooled)[1],
        )
        assert run_here(a_job) == 1
    said = capsys.readouterr().err
    assert "\nlengthwise: " in said and "No such file or directory" in said
    assert "No report either" in said
    assert_goes_on(a_job)


@pytest.mark.parametrize("hours", [-30, 30])
def test_a_clock_that_jumps_between_interrupted_runs_loses_and_doubles_nothing(
    hours, a_job, monkeypatch
):
    for number in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(
                launching.time, "time", lambda n=number, real=time.time: real() + n * hours * 3600
            )
            after(patch, 8, raising(RuntimeError("INTERNAL: again")))
            assert run_here(a_job) == 1
    assert_goes_on(a_job)
    report = reports(Path(a_job.output.output), DATE)
    assert all(each["seconds"]["total"] >= 0 for each in report)


@pytest.mark.parametrize("seconds", [-7200, 7200])
def test_a_clock_that_jumps_during_a_run_changes_no_result(seconds, a_job, monkeypatch):
    real, jumped = time.time, []
    monkeypatch.setattr(time, "time", lambda: real() + (seconds if jumped else 0))
    after(monkeypatch, 3, lambda pooled: (jumped.append(1), pooled)[1])
    assert run_here(a_job) == 0
    assert documents(Path(a_job.output.output), DATE).num_rows == NUMBER
    [report] = reports(Path(a_job.output.output), DATE)
    assert report["seconds"]["total"] > 0
    assert report["documents_per_second"] > 0


def test_a_run_started_with_its_streams_closed_publishes(tiny_checkpoint, tmp_path):
    (tmp_path / "a.txt").write_text("a text")
    arguments = ["--input", tmp_path / "a.txt", "--output", tmp_path / "out", "--date", DATE]
    command = (
        f"{COMMAND} run --model {tiny_checkpoint} {' '.join(map(str, arguments))} >&- 2>&- <&-"
    )
    assert subprocess.run(["sh", "-c", command], timeout=300).returncode == 0
    assert documents(tmp_path / "out", DATE).num_rows == 1
