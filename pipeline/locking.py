"""Lock: one run at a time writes a date."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from pipeline import storage
from pipeline.config import SettingsError
from pipeline.state import Layout

log = logging.getLogger(__name__)

# A lease that was not renewed for so long may be taken over. Far longer than clocks of two machines differ.
LEASE_SECONDS = 600.0
RENEW_SECONDS = 60.0


class DateLocked(SettingsError):
    """Another run is writing this date."""


def lock_date(
    layout: Layout, run_id: str, lost: Callable[[], None] = lambda: None
) -> AbstractContextManager[object]:
    """Keeps a date of an output folder for one run, from `with` to its end.

    Locally it is a lock of the system's, which ends with its owner; elsewhere a lease, which is renewed from a thread
    and runs out. `lost` is called in that thread if another run has taken the lease over.

    Raises (on entering):
      DateLocked: another run holds it; the message names that run.
    """
    if storage.is_local(layout.output):
        return DateLock(layout, run_id)
    return _lease(layout, run_id, lost)


class DateLock:
    """A date of a local folder, kept by an flock on a file.

    The system gives it back the moment its owner is gone, however it went: a lock left by SIGKILL never blocks the next
    run. Worker processes must not inherit it; Python's subprocess and spawn close it for them.
    """

    def __init__(self, layout: Layout, run_id: str) -> None:
        self._layout = layout
        self._run_id = run_id
        self._file = -1

    def __enter__(self) -> Self:
        path = self._layout.lock
        while True:
            try:
                os.makedirs(self._layout.staging, exist_ok=True)
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:  # the last owner tidied the folder away in between
                continue
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.pread(file, 4096, 0)
                os.close(file)
                raise _locked(self._layout, owner) from None
            # A lock on a file that its last owner has deleted since we opened it keeps nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    break
            os.close(file)
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"run_id": self._run_id, "pid": os.getpid()}).encode(), 0)
        self._file = file
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The output folder may have been deleted meanwhile; what is there now is the next run's.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._file), os.stat(self._layout.lock)):
                _tidy(self._layout)
                os.unlink(self._layout.lock)
        os.close(self._file)
        self._file = -1
        # Unless something is in them, or another run has just come.
        storage.delete_empty_folder(self._layout.staging)
        storage.delete_empty_folder(os.path.dirname(self._layout.staging))


@contextmanager
def _lease(layout: Layout, run_id: str, lost: Callable[[], None]) -> Iterator[None]:
    lease = _Lease(layout, run_id)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_SECONDS):
            if not lease.renew():
                log.error("--date %s: another run has taken over; this one stops", layout.date)
                lost()
                return

    thread = threading.Thread(target=renew, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        lease.give_back()


class _Lease:
    """An object that names who writes a date until when; every change of it is conditional on the one before."""

    def __init__(self, layout: Layout, run_id: str) -> None:
        self._layout = layout
        self._path = layout.lock
        # Tells our own write, whose answer was lost on the way, from that of a run with our name.
        self._owner = {"run_id": run_id, "pid": os.getpid(), "nonce": secrets.token_hex(8)}
        while True:
            found = storage.read_versioned(self._path)
            if found is not None and not self._is_ours(found[0]) and not _ran_out(found[0]):
                raise _locked(layout, found[0])
            if self._write(found[1] if found is not None else 0):
                return

    def _write(self, version: int) -> bool:
        content = json.dumps(self._owner | {"until": time.time() + LEASE_SECONDS})
        written = storage.write_if(self._path, content.encode(), version)
        if written is not None:
            self._version = written
        return written is not None

    def _is_ours(self, content: bytes) -> bool:
        return _parse(content).get("nonce") == self._owner["nonce"]

    def renew(self) -> bool:
        """Whether the lease is still ours. An answer that does not come is no reason to give it up: it has not run out."""
        try:
            while not self._write(self._version):
                found = storage.read_versioned(self._path)
                if found is None or not self._is_ours(found[0]):
                    return False
                self._version = found[1]  # of a write of ours whose answer was lost
            return True
        except Exception as error:
            log.warning("the lock of the date could not be renewed yet: %s", error)
            return True

    def give_back(self) -> None:
        """Ends the lease if it is still ours; what another run has begun to write is its own."""
        try:
            found = storage.read_versioned(self._path)
            if found is not None and self._is_ours(found[0]):
                _tidy(self._layout)
                storage.delete(self._path)
        except Exception as error:  # what the run did is done
            log.warning(
                "the lock of the date could not be given back, it ends by itself in %.0f minutes: %s",
                LEASE_SECONDS / 60,
                error,
            )


def _tidy(layout: Layout) -> None:
    """Takes away what runs have left for those after them, unless there is something to go on from."""
    if set(storage.folders(layout.staging)) <= {"runs"}:
        storage.delete_folder(storage.join(layout.staging, "runs"))


def _parse(owner: bytes) -> dict[str, Any]:
    try:
        data = json.loads(owner)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _ran_out(owner: bytes) -> bool:
    until = _parse(owner).get("until")
    return not isinstance(until, float) or until < time.time()


def _locked(layout: Layout, owner: bytes) -> DateLocked:
    data = _parse(owner)
    # It may have the lock and not have written its name yet.
    named = (
        f"run {data['run_id']} (process {data['pid']})"
        if {"run_id", "pid"} <= data.keys()
        else "another run"
    )
    return DateLocked(
        f"--date {layout.date}: {named} is writing this date of {layout.output}; "
        "wait for its end or stop it, or choose another --date or --output"
    )
