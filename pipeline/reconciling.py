"""Reconcile: proves that what was listed is what was written or failed, before anything is published.

Two independent checks: every listed work unit was read to its end exactly once; and the records counted by the
reader are the distinct documents found in the Parquet files themselves plus the failures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.records import Failure, WorkUnit
from pipeline.sidecars import Sidecar

NAMED_IN_A_MESSAGE = 5
DUPLICATE_ID = "duplicate_id"


class RunFailed(RuntimeError):
    """Nothing may be published; the message says why, and what to do."""


def failed_fast(failure: Failure) -> RunFailed:
    """What --fail-fast makes of the first failure."""
    record = "" if failure.record is None else f"record {failure.record!r} of "
    return RunFailed(
        f"--fail-fast: {record}{failure.uri} failed to {failure.step}, nothing was published: {failure.message} "
        f"({failure.reason}). Mend the input, or run without --fail-fast: what was computed is kept for the next run"
    )


@dataclass(frozen=True, kw_only=True)
class Tally:
    """What the sidecars say, unit by unit. Makes no judgement, so it also describes a run that did not get through."""

    units: Mapping[str, WorkUnit]  # unit_id → every listed unit
    # unit_id → (run id, records) of each time it was read to its end, the latest last
    completions: Mapping[str, Sequence[tuple[str, int]]]
    documents: Counter[str]  # unit_id → rows
    failures: tuple[Failure, ...]  # one a (unit, position)

    @property
    def not_started(self) -> list[WorkUnit]:
        """Units that were not read to their end."""
        return [unit for unit_id, unit in self.units.items() if unit_id not in self.completions]

    @property
    def records(self) -> dict[str, int]:
        """unit_id → records its reader counted, the last time if an interrupted run got to its end before."""
        return {unit_id: readings[-1][1] for unit_id, readings in self.completions.items()}


@dataclass(frozen=True, kw_only=True)
class Reconciled:
    """The proven contents of a partition."""

    tally: Tally
    failures: tuple[Failure, ...]  # with those found here: ids that come twice
    left_out: Mapping[str, frozenset[int]]  # staged file's path → its rows that failed here
    records: int
    documents: int
    windows: int


def tally(units: Iterable[WorkUnit], sidecars: Iterable[Sidecar], run_id: str) -> Tally:
    """Counts up what the sidecars of run `run_id`, and of those it resumed, say about the units listed."""
    completions: dict[str, list[tuple[str, int]]] = defaultdict(list)
    documents: Counter[str] = Counter()
    failures: dict[tuple[str, int], Failure] = {}
    for sidecar in sidecars:
        for completion in sidecar.completions:
            completions[completion.unit_id].append((sidecar.run_id, completion.records))
        for number, rows in Counter(sidecar.units.tolist()).items():
            documents[sidecar.unit_ids[number]] += rows
        for failure in sidecar.failures:
            # A unit that is read again after an interruption fails again where it did.
            failures.setdefault((failure.unit_id, failure.position), failure)
    for readings in completions.values():
        # Run ids begin with the time, but a clock may have been set back since.
        readings.sort(key=lambda reading: (reading[0] == run_id, reading[0]))
    return Tally(
        units={unit.unit_id: unit for unit in units},
        completions=dict(completions),
        documents=documents,
        failures=tuple(failures.values()),
    )


def reconcile(counted: Tally, sidecars: Iterable[Sidecar]) -> Reconciled:
    """Checks the tally against the listing and the staged files.

    A document id that comes at two positions of an object (an --id-field that repeats across ranges) is a fault of the
    input: the first position keeps its row, the others become failures.

    Raises:
      RunFailed: something was lost, or came twice.
    """
    faults = _unit_faults(counted)
    written = [sidecar for sidecar in sidecars if sidecar.file is not None]
    ids, windows = [], 0
    for sidecar in written:
        try:
            table = _read(sidecar, "document_id", "windows")
        except (OSError, pa.ArrowException) as error:
            faults.append(f"the staged file {sidecar.file_path} cannot be read ({error})")
            continue
        ids.append(table["document_id"].combine_chunks())
        windows += pc.sum(table["windows"]).as_py() or 0
        if not ids[-1].equals(sidecar.document_ids):
            faults.append(
                f"the staged file {sidecar.file_path} holds {table.num_rows} documents, and not the "
                f"{sidecar.rows} that its sidecar names"
            )
    if faults:
        raise _refusal(faults)
    repeated = _repeated(ids, written)
    left_out: dict[str, set[int]] = defaultdict(set)
    for document_id, places in repeated.items():
        positions = [sidecar.positions[row] for sidecar, row in places]
        if len(set(positions)) < len(positions):
            faults.append(f"the document {document_id} was written twice")
        for sidecar, row in places[1:]:
            left_out[sidecar.file_path].add(row)
    failures = counted.failures + tuple(
        failure
        for sidecar in written
        if sidecar.file_path in left_out
        for failure in _duplicates(sidecar, sorted(left_out[sidecar.file_path]), counted.units)
    )
    documents = sum(map(len, ids)) - sum(map(len, left_out.values()))
    records = sum(counted.records.values())
    if records != documents + len(failures):
        faults.append(
            f"{records} records were read, but {documents} documents were written and {len(failures)} failed"
        )
    if faults:
        raise _refusal(faults)
    return Reconciled(
        tally=counted,
        failures=failures,
        left_out={path: frozenset(rows) for path, rows in left_out.items()},
        records=records,
        documents=documents,
        windows=windows,
    )


def _refusal(faults: Sequence[str]) -> RunFailed:
    return RunFailed(
        f"reconciliation failed, nothing was published: {'; '.join(faults)}. This is a fault of lengthwise and not of "
        "the documents: please report it. The staged files are kept; --no-resume computes everything again"
    )


def _unit_faults(counted: Tally) -> list[str]:
    faults = []
    if missing := counted.not_started:
        faults.append(
            f"{len(missing)} of {len(counted.units)} work units were not read to their end "
            f"({_some(unit.unit_id for unit in missing)})"
        )
    if strange := sorted(
        {*counted.completions, *counted.documents, *(f.unit_id for f in counted.failures)}
        - counted.units.keys()
    ):
        faults.append(f"{len(strange)} work units were not listed ({_some(strange)})")
    # Once in each run, that is: one that was interrupted may have read a unit to its end and lost rows of it.
    if twice := [
        unit_id
        for unit_id, readings in counted.completions.items()
        if len({run_id for run_id, _ in readings}) < len(readings)
    ]:
        faults.append(f"{len(twice)} work units were read twice ({_some(twice)})")
    failed = Counter(failure.unit_id for failure in counted.failures)
    unequal = [
        f"{unit_id}: {records} read, {counted.documents[unit_id]} written, {failed[unit_id]} failed"
        for unit_id, records in counted.records.items()
        if records != counted.documents[unit_id] + failed[unit_id]
    ]
    if unequal:
        faults.append(
            f"{len(unequal)} of {len(counted.units)} work units do not add up ({_some(unequal)})"
        )
    return faults


def _read(sidecar: Sidecar, *columns: str) -> pa.Table:
    with storage.open_input(sidecar.file_path) as file:
        return pq.ParquetFile(file).read(columns=list(columns), use_threads=False)


def _repeated(
    ids: Sequence[pa.Array], written: Sequence[Sidecar]
) -> dict[str, list[tuple[Sidecar, int]]]:
    """Document id → (file, row) of each of its rows, for ids that have several; in order of position."""
    counts = pc.value_counts(pa.chunked_array(ids, pa.string()))
    several = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    places: dict[str, list[tuple[Sidecar, int]]] = defaultdict(list)
    if len(several):
        for column, sidecar in zip(ids, written, strict=True):
            for row in pc.indices_nonzero(pc.is_in(column, value_set=several)).to_pylist():
                places[column[row].as_py()].append((sidecar, row))
    for rows in places.values():
        rows.sort(key=lambda place: place[0].positions[place[1]])
    return dict(places)


def _duplicates(
    sidecar: Sidecar, rows: Sequence[int], units: Mapping[str, WorkUnit]
) -> Iterator[Failure]:
    columns = _read(sidecar, "record", "content_sha256").take(pa.array(rows)).to_pylist()
    for row, found in zip(rows, columns, strict=True):
        unit_id = sidecar.unit_ids[sidecar.units[row]]
        yield Failure(
            unit_id=unit_id,
            position=int(sidecar.positions[row]),
            uri=units[unit_id].uri,
            record=found["record"],
            step="read",
            reason=DUPLICATE_ID,
            message=f"an earlier record of this object also has the id {found['record']!r}",
            content_sha256=found["content_sha256"],
        )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - NAMED_IN_A_MESSAGE
    return ", ".join(listed[:NAMED_IN_A_MESSAGE]) + (f", and {more} more" if more > 0 else "")
