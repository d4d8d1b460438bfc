"""How a running job is stopped, counted and shown: by files in one local folder.

Beam's counters can be read only after a run, and its workers may be other processes, so every process
writes what it has counted to a small file of its own, and whoever started the run adds the files up.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.records import Figures, Run

SECONDS_BETWEEN_WRITES = 0.05
SECONDS_BETWEEN_FRAMES = 0.25
SECONDS_BETWEEN_LINES = 10.0
SECONDS_OF_A_RATE = 30.0
# Launchers forward the Ctrl-C that the terminal has already sent to all of us: that is one signal, not two.
SECONDS_OF_ONE_SIGNAL = 1.0
WORKER = b"sdk_worker_main"  # in the command line of a worker process


class Stopped(Exception):
    """The run has been asked to stop."""


class _Tally:
    """What this process has counted for one run, and the file that tells the others."""

    def __init__(self, folder: str) -> None:
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.path = Path(folder) / f"counts-{os.getpid()}-{uuid.uuid4().hex}.json"
        self.written = float("-inf")

    def add(self, counts: Mapping[str, float]) -> None:
        with self.lock:
            self.counts.update(counts)
            if time.monotonic() - self.written >= SECONDS_BETWEEN_WRITES:
                # Counts are only shown, never relied on: a full disk is for the writer to report.
                with suppress(OSError):
                    _write(self.path, json.dumps(self.counts))
                self.written = time.monotonic()


def _write(path: Path, text: str) -> None:
    """Puts a whole file in place at once, so that no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


# Keyed by process as well, since a forked worker inherits the dictionary.
_tallies: dict[tuple[int, str], _Tally] = {}
_tallies_lock = threading.Lock()


class Control:
    """The line between a run and its workers: asks them to stop, and adds up what they have counted.

    It is pickled into the pipeline's steps; all copies with the same folder are one. The folder is on this
    machine and belongs to one run. With `folder=None` (workers elsewhere) it never stops anything and
    reports nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder

    def stopping(self) -> bool:
        """Whether the run has been asked to stop. Cheap (one `stat`): read it between device batches."""
        return self.folder is not None and os.path.exists(self._flag())

    def raise_if_stopping(self) -> None:
        """
        Raises:
          Stopped: the run has been asked to stop.
        """
        if self.stopping():
            raise Stopped

    def stop(self, signal_number: int) -> None:
        """Asks every worker to stop, on behalf of this signal. The first signal is the one remembered.

        Takes no lock, so a signal handler may call it.
        """
        if self.folder is not None and not self.stopping():
            os.makedirs(self.folder, exist_ok=True)  # someone may have deleted it
            _write(Path(self._flag()), str(signal_number))

    def stopped_by(self) -> int | None:
        """The signal that stopped the run, or None."""
        return int(Path(self._flag()).read_text()) if self.stopping() else None

    def report(self, counts: Mapping[str, float]) -> None:
        """Adds these counts to what this process has counted (they are increments, not totals).

        Written out at most twenty times a second: call it as often as suits the caller. The display shows
        `inferred` and `failed` (documents) and `tokens`.
        """
        if self.folder is not None:
            _tally(self.folder).add(counts)

    def totals(self) -> Counter[str]:
        """What all processes of the run have counted so far: this one exactly, others as last written."""
        total: Counter[str] = Counter()
        if self.folder is None:
            return total
        own = _tally(self.folder)
        with own.lock:
            total.update(own.counts)
        for path in Path(self.folder).glob("counts-*.json"):
            if path != own.path:
                total.update(json.loads(path.read_text()))
        return total

    def _flag(self) -> str:
        assert self.folder is not None
        return os.path.join(self.folder, "stop")


def _tally(folder: str) -> _Tally:
    with _tallies_lock:
        key = (os.getpid(), folder)
        if key not in _tallies:
            _tallies[key] = _Tally(folder)
        return _tallies[key]


@contextmanager
def busy(figures: Figures, step: str) -> Iterator[None]:
    """Adds the seconds spent inside the block to `figures.seconds[step]`, also when it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        figures.seconds[step] += time.perf_counter() - start  # type: ignore[assignment]  # as above


@contextmanager
def signals_stop(control: Control) -> Iterator[None]:
    """Turns SIGINT and SIGTERM inside the block into `control.stop`; a second one ends the process at once.

    (Everything written so far stays resumable in both cases. Beam would wrap a KeyboardInterrupt.) Python lets
    only the main thread handle signals; in another one the block runs as if there were no handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = [float("inf")]

    def handle(number: int, _frame: object) -> None:
        if not control.stopping():
            try:
                control.stop(number)
            except OSError:  # no space left, say: the workers cannot be asked
                _exit(128 + number)
            first[0] = time.monotonic()
        elif time.monotonic() - first[0] > SECONDS_OF_ONE_SIGNAL:
            _exit(128 + number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(status: int) -> None:
    """Ends this process at once, and first Beam's workers, which would tell at length that it has gone."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                if WORKER in Path(f"/proc/{child}/cmdline").read_bytes():
                    os.kill(int(child), signal.SIGKILL)
    os._exit(status)


@contextmanager
def display(control: Control, run: Run) -> Iterator[None]:
    """Shows on standard error how far the run is: a bar on a terminal, a line every ten seconds elsewhere."""
    show = _show_bar if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _show_lines
    ended = threading.Event()
    thread = threading.Thread(target=show, args=(control, run, ended), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show_bar(control: Control, run: Run, ended: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TimeElapsedColumn(),
        BarColumn(20),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("starting", total=None)
        outlook = Outlook(documents(run), time.monotonic())
        while True:
            last = ended.wait(SECONDS_BETWEEN_FRAMES)
            line = outlook.line(
                control.totals(), time.monotonic(), stopping=control.stopping(), ended=last
            )
            bar.update(
                task, description=line, completed=outlook.done, total=outlook.total, refresh=True
            )
            if last:
                return


def _show_lines(control: Control, run: Run, ended: threading.Event) -> None:
    start = shown = time.monotonic()
    outlook = Outlook(documents(run), start)
    stopping = False
    while True:
        last = ended.wait(SECONDS_BETWEEN_FRAMES)
        now = time.monotonic()
        begins_to_stop = control.stopping() and not stopping
        if last or begins_to_stop or now - shown >= SECONDS_BETWEEN_LINES:
            stopping, shown = control.stopping(), now
            line = outlook.line(control.totals(), now, stopping=stopping and not last, ended=last)
            print(f"{_clock(now - start)} {line}", file=sys.stderr, flush=True)
        if last:
            return


def documents(run: Run) -> int | None:
    """How many documents the run will read, where that is known before reading: one a file."""
    from pipeline.listing import read_listing

    total = 0
    for unit in read_listing(run.todo):
        if unit.format not in ("text", "markdown"):
            return None
        total += 1
    return total


class Outlook:
    """Where a run stands: what is done, how fast it goes, and when it will have ended."""

    def __init__(self, total: int | None, start: float) -> None:
        self.total = total
        self.done = 0.0
        self._start = start
        self._earlier: deque[tuple[float, float, float]] = deque([(start, 0.0, 0.0)])

    def line(
        self,
        counts: Mapping[str, float],
        now: float,
        *,
        stopping: bool = False,
        ended: bool = False,
    ) -> str:
        """One line for people; rates are of the last half minute. `now` is in seconds, and never goes back."""
        if not (counts or stopping or ended):
            return "loading the tokenizer and the model"
        failed, tokens = counts.get("failed", 0), counts.get("tokens", 0)
        self.done = counts.get("inferred", 0) + failed
        self._earlier.append((now, self.done, tokens))
        while len(self._earlier) > 2 and now - self._earlier[1][0] >= SECONDS_OF_A_RATE:
            self._earlier.popleft()
        then, done_then, tokens_then = self._earlier[0]
        seconds = max(now - then, 1e-9)
        of = f" of {self.total:,}" if self.total is not None else ""
        parts = [
            f"{self.done:,.0f}{of} documents",
            f"{(tokens - tokens_then) / seconds:,.0f} tokens/s",
        ]
        if failed:
            parts.append(f"{failed:,.0f} failed")
        if self.total is not None and self.done > done_then:
            left = (self.total - self.done) * seconds / (self.done - done_then)
            parts.append(f"{_clock(left)} left")
        if stopping:
            parts.append("stopping after the current device batch (a second signal ends at once)")
        return ", ".join(parts)


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(max(seconds, 0))))
