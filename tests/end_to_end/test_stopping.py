"""A run that is told to stop, or killed, goes on where it was."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from corpora import write_jsonl
from lengthwise_command import assert_same, documents, job, manifest, reports, run, run_here, start

DATE = "2026-01-02"


def counted(output: Path) -> dict[str, int]:
    """Windows inferred so far by each run whose staging is still there."""
    counts: dict[str, int] = {}
    for path in output.glob(f"_staging/date={DATE}/runs/*/counts-*.json"):
        run_id = path.parent.name
        counts[run_id] = counts.get(run_id, 0) + json.loads(path.read_text()).get(
            "windows_inferred", 0
        )
    return counts


def wait_for_windows(process, output: Path, more_than: int) -> bool:
    """Waits until the newest run has inferred more windows; False if the process ended before."""
    before = set(counted(output))
    while process.poll() is None:
        now = counted(output)
        if any(n > more_than for run_id, n in now.items() if run_id not in before):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_stops_cleanly_within_two_seconds_and_the_next_run_goes_on(
    name, tiny_checkpoint, tmp_path
):
    corpus, output = write_jsonl(tmp_path / "in", 20_000, words=(40, 50)), tmp_path / "out"
    arguments = ["--input", corpus, "--output", output, "--model", tiny_checkpoint, "--date", DATE]
    process = start(*arguments)
    assert wait_for_windows(process, output, 2_000)
    process.send_signal(signal.Signals[name])
    asked = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - asked < 2.5
    assert process.returncode == 128 + signal.Signals[name]
    assert "Run the same command to go on" in said
    assert "Traceback" not in said
    assert not (output / f"documents/date={DATE}").exists()
    (report,) = reports(output, DATE)
    assert report["status"] == "stopped"
    assert report["units"]["not_started"] > 0

    run(*arguments)
    assert documents(output, DATE).num_rows == 20_000
    _first, second = reports(output, DATE)
    assert second["windows"] == 20_000
    again = sum(r["windows_inferred"] for r in second["runs"]) - second["windows"]
    assert again <= 0.1 * second["windows"]


def kill_and_resume(
    corpus: Path, output: Path, model: object, kills: int, documents_total: int
) -> float:
    """Kills runs at random moments, lets the last one finish, and returns work done ÷ work needed."""
    arguments = ["--input", corpus, "--output", output, "--model", model, "--date", DATE]
    moments = random.Random(7)
    for number in range(kills):
        process = start(*arguments)
        done = sum(counted(output).values())
        left = max(documents_total - done, 0) / (kills - number)
        if wait_for_windows(process, output, int(moments.uniform(0, 1.5) * left)):
            time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.communicate()
    run(*arguments)
    report = reports(output, DATE)[-1]
    print("windows inferred by each run:", [r["windows_inferred"] for r in report["runs"]])
    return sum(r["windows_inferred"] for r in report["runs"]) / report["windows"]


def test_a_killed_run_is_resumed_without_doubling_or_losing_a_document(tiny_checkpoint, tmp_path):
    corpus = write_jsonl(tmp_path / "in", 20_000, words=(40, 50))
    work = kill_and_resume(corpus, tmp_path / "killed", tiny_checkpoint, 2, 20_000)
    assert work <= 1.10
    assert run_here(job(corpus, tmp_path / "whole", tiny_checkpoint, date=DATE)) == 0
    assert_same(documents(tmp_path / "killed", DATE), documents(tmp_path / "whole", DATE))
    assert not (tmp_path / "killed" / "_staging" / f"date={DATE}").exists() or not list(
        (tmp_path / "killed" / "_staging" / f"date={DATE}").rglob("*.parquet")
    )
    assert manifest(tmp_path / "killed", DATE)["documents"]


@pytest.mark.full
def test_ten_kills_of_five_thousand_documents_repeat_at_most_a_tenth_of_the_work(minilm, tmp_path):
    corpus = write_jsonl(tmp_path / "in", 5_000, words=(20, 180))
    work = kill_and_resume(corpus, tmp_path / "killed", minilm, 10, 5_000)
    print(f"windows inferred over all runs ÷ windows: {work:.3f}")
    assert work <= 1.10
    assert run_here(job(corpus, tmp_path / "whole", minilm, date=DATE)) == 0
    assert_same(documents(tmp_path / "killed", DATE), documents(tmp_path / "whole", DATE))
