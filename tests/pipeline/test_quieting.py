"""Silence on the command line: noise goes, everything that a user must see stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

NOISE = [
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1796126029.118076    6200 cpu_feature_guard.cc:227] This binary is optimized",
    "To enable the following instructions: AVX2 FMA, rebuild with the appropriate flags.",
    "I1201 11:56:37.520210    9325 pjrt_client.cc:579] PjRt-IFRT device count: total=1",
    "W1201 11:56:37.520210    9325 some.cc:1] careful",
    "E0000 00:00:1796127997.885276   18091 cuda_platform.cc:52] failed call to cuInit: INTERNAL",
    "Failed to find host bounds for accelerator type: WARNING: could not determine TPU accelerator type",
    "WARNING: Logging before InitGoogle() is written to STDERR",
    "E0000 00:00:1796138112.2 1008 common_lib.cc:554] INVALID_ARGUMENT: from env var TPU_WORKER_HOSTNAMES",
    "=== Source Location Trace: === ",
    "learning/45eac/tfrc/runtime/libtpu_init_utils.cc:327",
]
KEPT = [
    "E1201 11:56:37.520210    9325 pjrt_client.cc:1] out of memory",
    "F1201 11:56:37.520210    9325 check.cc:1] Check failed",
    "Fatal Python error: Segmentation fault",
    "I am a document",
]


def start(program: str, **more: object) -> subprocess.Popen[str]:
    program = f"import os, sys\nfrom pipeline.quieting import quiet\nquiet()\n{program}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-P", "-c", program], text=True, **pipes, **more)


def said(program: str, **more: object) -> str:
    return start(program, **more).communicate(timeout=60)[1]


def test_native_noise_goes_and_errors_stay():
    lines = "".join(f"{line}\n" for line in [*NOISE, *KEPT])
    assert said(f"os.write(2, {lines.encode()})").splitlines() == KEPT


def test_what_python_writes_stays_whatever_it_looks_like():
    assert said(f"print({NOISE[0]!r}, file=sys.stderr)") == NOISE[0] + "\n"


def test_libraries_log_errors_only_and_we_log_warnings():
    program = """
import logging, warnings
for name in (None, "apache_beam.runners", "absl"):
    logging.getLogger(name).warning("hidden")
    logging.getLogger(name).error("error of %s", name)
logging.getLogger("pipeline.state").warning("ours")
warnings.warn("hidden")
"""
    # Beam logs what a worker raises, several times over; the run says it once.
    expected = ["error of None", "error of absl", "ours"]
    assert said(program).splitlines() == expected


def test_warnings_that_the_user_asked_for_stay():
    program = "import warnings; warnings.warn('shown')"
    assert "UserWarning: shown" in said(program, env={**os.environ, "PYTHONWARNINGS": "default"})


def test_the_last_words_of_a_crash_are_not_lost():
    program = "os.write(2, b'why it died\\n'); os.kill(os.getpid(), 9)"
    process = start(program)
    assert process.communicate(timeout=60)[1] == "why it died\n"
    assert process.returncode == -signal.SIGKILL


def test_nobody_reading_what_it_says_fails_no_run():
    reading, writing = os.pipe()
    os.close(reading)
    program = """
from pipeline.quieting import quiet
quiet()
import sys
for _ in range(3):
    print("said", file=sys.stderr)
    sys.stderr.flush()
print("done")
"""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE, stderr=writing, timeout=60,
    )  # fmt: skip
    os.close(writing)
    assert (ended.stdout, ended.returncode) == (b"done\n", 0)


def test_more_than_a_pipe_holds_does_not_block():
    assert said("os.write(2, b'x' * 1_000_000 + b'\\n')").count("x") == 1_000_000


def test_what_child_processes_write_is_filtered_too():
    lines = f"{NOISE[1]}\n{KEPT[0]}\n"
    program = f"import subprocess; subprocess.run(['printf', '%s', {lines!r}], stdout=2)"
    assert said(program) == f"{KEPT[0]}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_leaves_the_last_lines_and_no_process(number):
    program = """
import signal, time
def handle(*_):
    os.write(2, b"last line\\n")
    sys.exit(3)
signal.signal(signal.SIGINT, handle)
signal.signal(signal.SIGTERM, handle)
print("ready", flush=True)
time.sleep(60)
"""
    process = start(program, start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, number)
    assert process.communicate(timeout=60)[1] == "last line\n"
    assert process.returncode == 3
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("a process of the group is still there")


def test_importing_it_changes_nothing():
    program = """
import logging, os, sys, warnings
before = (dict(os.environ), list(warnings.filters), sys.stderr)
import pipeline.quieting
assert before == (dict(os.environ), list(warnings.filters), sys.stderr)
assert logging.getLogger().level == logging.WARNING
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
