"""Where a run's files lie, who may write a date, and what an interrupted run has left to go on from."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

import numpy as np

from pipeline import sidecars, storage
from pipeline.config import SettingsError
from pipeline.records import MACHINE_REASONS, WorkUnit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Paths of one date under an output folder.

    Raises:
      SettingsError: the output is not a local folder.
    """

    output: str
    date: str  # YYYY-MM-DD

    def __post_init__(self) -> None:
        if not storage.is_local(self.output):
            raise SettingsError(f"--output: expected a local folder, got {self.output!r}")
        # Workers may have another working folder.
        object.__setattr__(self, "output", os.path.abspath(self.output))

    def _of_date(self, kind: str) -> str:
        return storage.join(self.output, kind, f"date={self.date}")

    @property
    def documents(self) -> str:
        return self._of_date("documents")

    @property
    def manifest(self) -> str:
        """The commit point: what it lists is published, nothing else."""
        return storage.join(self.documents, "_manifest.json")

    @property
    def failures(self) -> str:
        return self._of_date("failures")

    @property
    def state(self) -> str:
        """Where it says what became of each input object."""
        return self._of_date("state")

    @property
    def staging(self) -> str:
        return self._of_date("_staging")

    def staged(self, fingerprint: str) -> str:
        """Folder of the staged files and sidecars of one fingerprint."""
        return storage.join(self.staging, fingerprint[:16])

    def control(self, run_id: str) -> str:
        """Folder of a run's listings, stop flag and counters; they survive a kill."""
        return storage.join(self.staging, "runs", run_id)

    @property
    def lock(self) -> str:
        return storage.join(self.staging, "lock")

    @property
    def runs(self) -> str:
        return self._of_date("runs")

    def run(self, run_id: str) -> str:
        return storage.join(self.runs, run_id)

    def report(self, run_id: str) -> str:
        return storage.join(self.run(run_id), "report.json")

    def relative(self, path: str) -> str:
        """A path as the manifest names it: from the output folder on."""
        return path.removeprefix(self.output + "/")


class DateLocked(SettingsError):
    """Another run is writing this date."""


class DateLock:
    """Keeps a date of an output folder for one run, from `with` to its end.

    It is an flock on a file, so the system gives it back the moment its owner is gone, however it went: a
    lock left by SIGKILL never blocks the next run. Worker processes must not inherit it; Python's subprocess
    and spawn close it for them.

    Raises (on entering):
      DateLocked: another run holds it; the message names that run.
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
                owner = os.pread(file, 4096, 0).decode(errors="replace")
                os.close(file)
                raise DateLocked(self._refusal(owner)) from None
            # A lock on a file that its last owner has deleted since we opened it keeps nobody out.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    break
            os.close(file)
        owner = json.dumps({"run_id": self._run_id, "pid": os.getpid()})
        os.ftruncate(file, 0)
        os.pwrite(file, owner.encode(), 0)
        self._file = file
        return self

    def _refusal(self, owner: str) -> str:
        try:
            data = json.loads(owner)
            named = f"run {data['run_id']} (process {data['pid']})"
        except (ValueError, KeyError, TypeError):
            named = "another run"  # it has the lock but has not written its name yet
        return (
            f"--date {self._layout.date}: {named} is writing this date of {self._layout.output}; "
            "wait for its end or stop it, or choose another --date or --output"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        staging = self._layout.staging
        if set(storage.folders(staging)) <= {"runs"}:  # published: nothing to go on from
            storage.delete_folder(storage.join(staging, "runs"))
        os.unlink(self._layout.lock)
        os.close(self._file)
        self._file = -1
        for folder in (staging, os.path.dirname(staging)):
            with suppress(OSError):  # not empty, or another run has just come
                os.rmdir(folder)


@dataclass(frozen=True, kw_only=True)
class Resumable:
    """What is kept of interrupted runs (sidecar paths), and the work units still to do."""

    sidecars: tuple[str, ...]
    units: tuple[WorkUnit, ...]


def find_resumable(layout: Layout, fingerprint: str, units: Iterable[WorkUnit]) -> Resumable:
    """Chooses staged files of earlier runs so that no document or failure comes twice, the fullest first.

    A file counts only if its sidecar is whole and of this fingerprint, its size is right, and each work unit it names is
    listed now with the same content; one with a failure that lay in the machine is computed again. A unit is done when a kept completion says how many records it held and as
    many are kept; of any other, `done` holds the positions that are.
    """
    listed = {unit.unit_id: unit for unit in units}
    folder = layout.staged(fingerprint)
    present = storage.files(folder)
    candidates: list[_Candidate] = []
    for name in present:
        if name.startswith(storage.TEMPORARY) or not name.endswith(sidecars.SUFFIX):
            continue
        try:
            sidecar = sidecars.read(storage.join(folder, name))
        except sidecars.SidecarError as error:
            log.warning("staged file left out: %s", error)
            continue
        if sidecar.fingerprint != fingerprint:
            continue
        if any(failure.reason in MACHINE_REASONS for failure in sidecar.failures):
            continue
        if sidecar.file is not None and present.get(sidecar.file) != sidecar.size_bytes:
            log.warning(
                "staged file left out: %s does not have the size its sidecar says", sidecar.file
            )
            continue
        if _names(sidecar) <= listed.keys():
            candidates.append(_Candidate.of(sidecar))
    candidates.sort(key=lambda candidate: (-candidate.rows, candidate.path))

    kept: list[str] = []
    done: dict[str, list[np.ndarray]] = defaultdict(list)
    records: dict[str, tuple[str, int]] = {}  # unit_id → (last run that read it to its end, count)
    completed_by: set[tuple[str, str]] = set()
    for candidate in candidates:
        completions = {(unit_id, candidate.run_id) for unit_id, _ in candidate.completions}
        if (
            any(_repeats(positions) for positions in candidate.positions.values())
            or any(
                _overlap(positions, earlier)
                for unit_id, positions in candidate.positions.items()
                for earlier in done[unit_id]
            )
            or not completed_by.isdisjoint(completions)
        ):
            continue
        kept.append(candidate.path)
        for unit_id, positions in candidate.positions.items():
            done[unit_id].append(positions)
        completed_by |= completions
        for unit_id, count in candidate.completions:
            # Read again after an interruption, a unit holds what the last reading says.
            records[unit_id] = max(records.get(unit_id, ("", 0)), (candidate.run_id, count))
    left = tuple(
        replace(unit, done=_merged(done[unit_id])) if done[unit_id] else unit
        for unit_id, unit in listed.items()
        if unit_id not in records or records[unit_id][1] != sum(map(len, done[unit_id]))
    )
    return Resumable(sidecars=tuple(sorted(kept)), units=left)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """What of a sidecar decides whether it is kept: 8 bytes a record, where the sidecar takes hundreds."""

    path: str
    run_id: str
    rows: int
    positions: Mapping[str, np.ndarray]  # unit_id → of its documents and failures, sorted
    completions: Sequence[tuple[str, int]]  # unit_id, records

    @classmethod
    def of(cls, sidecar: sidecars.Sidecar) -> _Candidate:
        failed: dict[str, list[int]] = defaultdict(list)
        for failure in sidecar.failures:
            failed[failure.unit_id].append(failure.position)
        parts: dict[str, list[np.ndarray]] = defaultdict(list)
        for unit_id, those in failed.items():
            parts[unit_id].append(np.array(those, np.int64))
        order = np.argsort(sidecar.units, kind="stable")
        numbers, starts = np.unique(sidecar.units[order], return_index=True)
        of_units = np.split(sidecar.positions[order], starts[1:])
        for number, positions in zip(numbers, of_units, strict=False):  # no number: one empty part
            parts[sidecar.unit_ids[number]].append(positions)
        return cls(
            path=sidecar.path,
            run_id=sidecar.run_id,
            rows=sidecar.rows,
            positions={
                unit_id: np.sort(np.concatenate(several)) for unit_id, several in parts.items()
            },
            completions=[(one.unit_id, one.records) for one in sidecar.completions],
        )


def _repeats(positions: np.ndarray) -> bool:
    return bool((np.diff(positions) == 0).any())


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two sorted arrays share a position."""
    if a[-1] < b[0] or b[-1] < a[0]:
        return False
    return len(np.intersect1d(a, b, assume_unique=True)) > 0


def _merged(several: Sequence[np.ndarray]) -> array[int]:
    return array("q", np.sort(np.concatenate(several)).tobytes())


def _names(sidecar: sidecars.Sidecar) -> set[str]:
    return {
        *sidecar.unit_ids,
        *(failure.unit_id for failure in sidecar.failures),
        *(completion.unit_id for completion in sidecar.completions),
    }
