"""How a running job is stopped, counted and shown: by files in one local folder.

Beam's counters can be read only after a run, and its workers may be other processes, so every process
writes what it has counted to a small file of its own, and whoever started the run adds the files up.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.records import Figures

SECONDS_BETWEEN_WRITES = 0.25


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

    def stop(self, signal_number: int) -> None:
        """Asks every worker to stop, on behalf of this signal. The first signal is the one remembered.

        Takes no lock, so a signal handler may call it.
        """
        if self.folder is not None and not self.stopping():
            _write(Path(self._flag()), str(signal_number))

    def stopped_by(self) -> int | None:
        """The signal that stopped the run, or None."""
        return int(Path(self._flag()).read_text()) if self.stopping() else None

    def report(self, counts: Mapping[str, float]) -> None:
        """Adds these counts to what this process has counted (they are increments, not totals).

        Written out at most four times a second: call it as often as suits the caller. The display shows
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
