"""Where a run's files lie, and what an interrupted run has left to go on from."""

from __future__ import annotations

import logging
import os
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline import sidecars, storage
from pipeline.records import MACHINE_REASONS, WorkUnit

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Layout:
    """Paths of one date under an output folder, a local one or a prefix of an object store's names (`gs://…`)."""

    output: str
    date: str  # YYYY-MM-DD

    def __post_init__(self) -> None:
        # Workers may have another working folder.
        output = os.path.abspath(self.output) if storage.is_local(self.output) else self.output
        object.__setattr__(self, "output", output.rstrip("/") or "/")

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

    def launched(self, run_id: str) -> str:
        """Folder of a run's listings, which its workers read."""
        return storage.join(self.staging, "runs", run_id)

    def control(self, run_id: str) -> str:
        """Folder on this machine of a run's stop flag and counters; they survive a kill."""
        if storage.is_local(self.output):
            return self.launched(run_id)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return os.path.join(cache, "lengthwise", "runs", run_id)

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
