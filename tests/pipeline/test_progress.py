"""Stopping, counting and showing a run: between threads, between processes, and on both kinds of screen."""

from __future__ import annotations

import json
import os
import pickle
import pty
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from pipeline import progress
from pipeline.progress import Control, Outlook, busy, display, signals_stop
from pipeline.records import Figures


@pytest.fixture
def control(tmp_path):
    return Control(str(tmp_path))


def python(program: str, *arguments: object, **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, text=True, **more)


# Stopping


def test_stopping_is_seen_by_every_copy_and_names_the_first_signal(control):
    copy = pickle.loads(pickle.dumps(control))
    assert (copy.stopping(), copy.stopped_by()) == (False, None)
    control.stop(signal.SIGTERM)
    control.stop(signal.SIGINT)
    assert (copy.stopping(), copy.stopped_by()) == (True, signal.SIGTERM)


def test_without_a_folder_nothing_stops_and_nothing_is_reported():
    control = Control(None)
    control.stop(signal.SIGINT)
    control.report({"tokens": 1})
    assert (control.stopping(), control.stopped_by(), control.totals()) == (False, None, {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_only_sets_the_flag_and_handlers_are_put_back(control, number):
    before = signal.getsignal(number)
    with signals_stop(control):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        os.kill(os.getpid(), number)  # at once after the first: the same Ctrl-C, forwarded
        time.sleep(0.01)
    assert control.stopped_by() == number
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    program = """
import sys, time
from pipeline import progress
progress.SECONDS_OF_ONE_SIGNAL = 0.05
control = progress.Control(sys.argv[1])
with progress.signals_stop(control):
    print("ready", flush=True)
    time.sleep(60)
"""
    process = python(program, tmp_path, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    while not Control(str(tmp_path)).stopping():
        time.sleep(0.01)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=5) == 130
    assert Control(str(tmp_path)).stopped_by() == signal.SIGTERM


def test_a_second_signal_ends_workers_as_well_and_no_other_process(tmp_path):
    program = """
import subprocess, sys, threading, time
from pipeline import progress
progress.SECONDS_OF_ONE_SIGNAL = 0.05
control = progress.Control(sys.argv[1])
def begin(*arguments):
    child = subprocess.Popen(["sh", "-c", "trap '' INT TERM; echo $$; sleep 60; :", *arguments])
thread = threading.Thread(target=begin, args=("sdk_worker_main",))
thread.start()
thread.join()
time.sleep(0.5)
begin("another")
with progress.signals_stop(control):
    time.sleep(0.5)
    print("ready", flush=True)
    time.sleep(60)
"""
    process = python(program, tmp_path, stdout=subprocess.PIPE)
    worker, other = int(process.stdout.readline()), int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    while not Control(str(tmp_path)).stopping():
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 143
    os.kill(other, signal.SIGKILL)
    stat = Path(f"/proc/{worker}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_in_another_thread_the_block_runs_without_handlers(control):
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with signals_stop(control):
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


# Counting


def test_counts_of_threads_and_copies_add_up_exactly(control):
    interval = sys.getswitchinterval()

    def count():
        copy = pickle.loads(pickle.dumps(control))
        for _ in range(1000):
            copy.report({"tokens": 2, "inferred": 1})

    threads = [threading.Thread(target=count) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert control.totals() == {"tokens": 8000, "inferred": 4000}


def test_counts_of_other_processes_are_added_as_last_written(control, tmp_path):
    control.report({"tokens": 1})
    program = "import sys; from pipeline.progress import Control; Control(sys.argv[1]).report({'tokens': 10})"
    for _ in range(2):
        assert python(program, tmp_path).wait(timeout=60) == 0
    assert control.totals() == {"tokens": 21}


def test_counts_are_written_only_so_often(control, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_WRITES", 0.25)
    start = time.monotonic()
    seen = set()
    while time.monotonic() - start < 0.6:
        control.report({"tokens": 1})
        (file,) = tmp_path.glob("counts-*.json")
        seen.add(json.loads(file.read_text())["tokens"])
    assert 2 <= len(seen) <= 4


def test_two_runs_in_one_process_are_counted_apart(tmp_path):
    for name, tokens in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        Control(str(tmp_path / name)).report({"tokens": tokens})
    assert Control(str(tmp_path / "a")).totals() == {"tokens": 1}
    assert Control(str(tmp_path / "b")).totals() == {"tokens": 2}


def test_a_folder_that_is_gone_does_not_fail_the_worker(tmp_path):
    Control(str(tmp_path / "gone")).report({"tokens": 1})


def test_a_run_whose_folder_is_gone_can_be_stopped(tmp_path):
    control = Control(str(tmp_path / "gone"))
    with signals_stop(control):
        os.kill(os.getpid(), signal.SIGTERM)
        assert control.stopped_by() == signal.SIGTERM


def test_a_run_that_cannot_be_asked_to_stop_ends_at_once(tmp_path):
    program = """
import os, signal, sys
from pipeline import progress
with progress.signals_stop(progress.Control(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGTERM)
"""
    (tmp_path / "file").touch()
    process = python(program, tmp_path / "file" / "folder", stderr=subprocess.PIPE)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 143


# Timing


def test_busy_seconds_add_up_a_step_also_where_it_raises():
    figures = Figures()

    def fail() -> None:
        time.sleep(0.02)
        raise ValueError("bad")

    for _ in range(2):
        with pytest.raises(ValueError, match="bad"), busy(figures, "read"):
            fail()
    with busy(figures, "write"):
        pass
    assert 0.04 <= figures.seconds["read"] < 1
    assert 0 <= figures.seconds["write"] < 0.02


# Showing


def test_the_line_tells_documents_speed_failures_and_time_left():
    outlook = Outlook(1000, 0.0)
    assert outlook.line({}, 0.0) == "loading the tokenizer and the model"
    assert outlook.line({}, 0.0, ended=True) == "0 of 1,000 documents, 0 tokens/s"
    line = outlook.line({"inferred": 90, "failed": 10, "tokens": 5000}, 10.0)
    assert line == "100 of 1,000 documents, 500 tokens/s, 10 failed, 0:01:30 left"


def test_the_time_left_is_not_guessed_while_the_total_is_unknown():
    line = Outlook(None, 0.0).line({"inferred": 90, "tokens": 5000}, 10.0)
    assert line == "90 documents, 500 tokens/s"


def test_the_speed_is_that_of_the_last_half_minute():
    outlook = Outlook(None, 0.0)
    for second in range(0, 101):  # nothing for 50 seconds, then 10 tokens a second
        line = outlook.line({"tokens": 10 * max(0, second - 50)}, float(second))
    assert line == "0 documents, 10 tokens/s"


def test_a_run_that_stops_says_what_it_waits_for():
    assert "stopping after the current device batch" in Outlook(None, 0.0).line(
        {}, 1.0, stopping=True
    )


@pytest.mark.parametrize(
    ("formats", "total"), [(["text", "markdown"], 2), (["text", "jsonl"], None), ([], 0)]
)
def test_the_total_is_known_where_each_file_is_one_document(monkeypatch, formats, total):
    units = [types.SimpleNamespace(format=format) for format in formats]
    listing = types.SimpleNamespace(read_listing=lambda path: iter(units))
    monkeypatch.setitem(sys.modules, "pipeline.listing", listing)
    assert progress.documents(types.SimpleNamespace(todo="todo.parquet")) == total


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(progress, "documents", lambda run: 10)


@pytest.mark.usefixtures("run")
def test_elsewhere_than_on_a_terminal_lines_are_printed(control, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.3)
    with display(control, None):
        control.report({"inferred": 4, "tokens": 100})
        time.sleep(1)
        control.report({"inferred": 6, "tokens": 100})
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert 2 <= len(lines) <= 4
    assert "4 of 10 documents" in lines[0]
    assert lines[-1].startswith("0:00:01 10 of 10 documents")


@pytest.mark.usefixtures("run")
def test_a_stop_is_announced_without_waiting_for_the_next_line(control, capsys):
    with display(control, None):
        control.stop(signal.SIGINT)
        time.sleep(0.6)
        announced = capsys.readouterr().err
    assert announced.count("stopping") == 1
    assert "stopping" not in capsys.readouterr().err


def test_on_a_terminal_there_is_a_bar(tmp_path):
    program = """
import sys, time
import rich.progress  # the bar's thread would import it now, and miss what comes first
from pipeline import progress
progress.documents = lambda run: 10
control = progress.Control(sys.argv[1])
with progress.display(control, None):
    control.report({"inferred": 4, "tokens": 100})
    time.sleep(1)
    control.report({"inferred": 6, "tokens": 100})
"""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = python(program, tmp_path, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # Linux's way to say that the other side is closed
        pass
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "4 of 10 documents" in text
    assert "10 of 10 documents" in text
    assert "━" in text
    assert "\x1b[" in text


@pytest.mark.usefixtures("run")
def test_the_display_ends_with_the_run_also_where_it_raises(control):
    before = threading.active_count()
    with pytest.raises(ValueError, match="bad"), display(control, None):
        raise ValueError("bad")
    assert threading.active_count() == before
