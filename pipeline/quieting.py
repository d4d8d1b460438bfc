"""Keeps libraries from talking on the command line. Nothing here happens when the library is imported."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import warnings
from typing import NoReturn

# What TensorFlow, XLA and gRPC write on standard error by themselves, much of it before they read the log level
# that the environment sets: notes and warnings, and TensorFlow's search for a GPU that it is not to use.
NOISE = re.compile(
    rb"[IW]\d{4} |WARNING: All log messages before absl|To enable the following instructions|E\d{4} .*cuInit|"
    # libtpu where there is no TPU; if there is one that does not start, JAX raises what it says.
    rb"Failed to find host bounds|WARNING: Logging before InitGoogle|E\d{4} .*TPU_WORKER_HOSTNAMES|"
    rb"=== Source Location Trace|learning/\S+libtpu"
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def quiet() -> None:
    """Silences what libraries tell themselves; for the command line only, before they are imported.

    What the user asked Python to show (`-W`, PYTHONWARNINGS) and what the user set stays, and so do errors.
    """
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "2"
    )  # for processes that do not write through ours
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    # It logs the traceback of whatever a worker raises, several times; the run says once what happened.
    logging.getLogger("apache_beam").setLevel(logging.CRITICAL)
    for name in ("pipeline", "model", "kernels"):
        logging.getLogger(name).setLevel(logging.WARNING)
    _filter_native_output()


def _filter_native_output() -> None:
    """Puts a process of a few lines between standard error and what native code writes there.

    (A thread would need the interpreter, which native code may hold while it writes, and would take the last
    words of a crash with it.) Python's own messages go straight to where standard error went before.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    reading, writing = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    if os.fork() == 0:
        _forward(
            reading, writing, terminal
        )  # lives on through these signals: they end the run, and that ends it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.close(reading)
    os.dup2(writing, 2)
    os.close(writing)
    sys.stderr = _StandardError(
        open(terminal, "wb"),  # noqa: SIM115
        encoding=sys.stderr.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


class _StandardError(io.TextIOWrapper):
    """Goes to nowhere once it cannot be written (its reader has gone, the disk is full): that fails no run."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._give_up()

    def _give_up(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)


def _forward(reading: int, writing: int, terminal: int) -> NoReturn:
    """Copies lines that are no noise until every process that writes has ended."""
    try:
        os.close(writing)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # whoever reads our output must see its end when the run ends
            os.dup2(null, standard)
        with open(reading, "rb") as lines:
            for line in lines:
                if not NOISE.match(line):
                    os.write(terminal, line)
    finally:
        os._exit(0)
