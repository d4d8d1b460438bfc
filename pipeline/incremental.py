"""Incremental: which objects an earlier run has computed already, and where their rows are carried over from.

Judged by name, size and generation, from the listing alone: an unchanged object is not opened.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.assembling import METADATA_PREFIX
from pipeline.config import SettingsError
from pipeline.merging import Source
from pipeline.partitions import OBJECTS_SCHEMA, published_dates, read_manifest, read_objects
from pipeline.reconciling import RunFailed
from pipeline.records import WorkUnit
from pipeline.state import Layout


@dataclass(frozen=True, kw_only=True)
class Base:
    """The published date that a run builds on."""

    date: str
    objects: pa.Table  # of OBJECTS_SCHEMA


@dataclass(frozen=True, kw_only=True)
class Changes:
    """The listing of a run, compared with its base."""

    units: tuple[WorkUnit, ...]  # of objects that are new or changed, or that failed
    unchanged: pa.Table  # of OBJECTS_SCHEMA: the objects whose rows are there already
    deleted: int  # objects of the base that are no longer listed


def latest_base(layout: Layout) -> Base | None:
    """The latest published date before this one; None if there is none."""
    for date in published_dates(layout.output):
        if (
            date < layout.date
            and (objects := read_objects(Layout(layout.output, date))) is not None
        ):
            return Base(date=date, objects=objects)
    return None


def own_base(layout: Layout) -> Base:
    """The date itself, whose failures are to be tried again.

    Raises:
      SettingsError: it has not been published.
    """
    objects = read_objects(layout)
    if objects is None:
        raise SettingsError(
            f"--retry-failures: expected that {layout.date} is published in {layout.output}, but it is not; "
            "run the date without --retry-failures first"
        )
    return Base(date=layout.date, objects=objects)


def compare(
    units: Sequence[WorkUnit], base: Base | None, layout: Layout, fingerprint: str
) -> Changes:
    """Tells objects that must be computed (all, without a base) from those that need not.

    An object is unchanged if the base knows it by this name, size and generation, computed it under the same
    fingerprint without a failure, and the partition that holds its rows has not been computed anew since.
    """
    if base is None:
        return Changes(units=tuple(units), unchanged=OBJECTS_SCHEMA.empty_table(), deleted=0)
    listed = {unit.uri: unit for unit in units}
    there = {
        date: _held(
            base.objects if date == base.date else read_objects(Layout(layout.output, date)), date
        )
        for date in pc.unique(base.objects["partition"]).to_pylist()
    }
    known = base.objects.to_pylist()
    unchanged = [
        row
        for row in known
        if (unit := listed.get(row["uri"])) is not None
        and (row["generation"], row["size"]) == (unit.generation, unit.size_bytes)
        and row["fingerprint"] == fingerprint
        and row["failed"] == 0
        and _identity(row) in there[row["partition"]]
    ]
    names = {row["uri"] for row in unchanged}
    return Changes(
        units=tuple(unit for unit in units if unit.uri not in names),
        unchanged=pa.Table.from_pylist(unchanged, schema=OBJECTS_SCHEMA),
        deleted=sum(row["uri"] not in listed for row in known),
    )


def _held(objects: pa.Table | None, date: str) -> set[tuple[Any, ...]]:
    """The objects whose rows lie in this date itself."""
    rows = objects.to_pylist() if objects is not None else []
    return {_identity(row) for row in rows if row["partition"] == date}


def _identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Of an object's rows: the same content under the same fingerprint gives the same."""
    return tuple(row[name] for name in ("uri", "generation", "size", "records", "fingerprint"))


def carried(unchanged: pa.Table, layout: Layout) -> Iterator[Source]:
    """The rows of unchanged objects, in the published files that hold them.

    Raises:
      RunFailed: they are not all there.
    """
    wanted: dict[str, list[dict[str, Any]]] = defaultdict(list)  # by partition
    for row in unchanged.to_pylist():
        wanted[row["partition"]].append(row)
    for date, objects in wanted.items():
        expected = {row["uri"]: row["records"] for row in objects}
        of_date = Layout(layout.output, date)
        manifest = read_manifest(of_date)
        held = _held(manifest and read_objects(of_date, manifest), date)
        if not held.issuperset(map(_identity, objects)):
            raise _gone(date, "it has been computed anew, or deleted, since this run began")
        found: Counter[str] = Counter()
        for entry in manifest["documents"] if manifest else ():
            path = storage.join(layout.output, entry["path"])
            try:
                with storage.open_input(path) as file:
                    parquet = pq.ParquetFile(file)
                    uris = parquet.read(["uri"], use_threads=False)["uri"]
                    metadata = parquet.schema_arrow.metadata or {}
            except (OSError, pa.ArrowException) as error:
                raise _gone(date, f"{path} cannot be read ({error})") from error
            keep = pc.is_in(uris, value_set=pa.array(expected, pa.string())).to_numpy()
            found.update(uris.filter(pa.array(keep)).to_pylist())
            rows = int(keep.sum())
            if rows:
                attention = metadata.get(f"{METADATA_PREFIX}attention".encode())
                yield Source(
                    path=path,
                    rows=rows,
                    size_bytes=entry["size_bytes"] * rows // len(keep),
                    keep=None if rows == len(keep) else np.asarray(keep),
                    facts={} if attention is None else {"attention": attention.decode()},
                )
        wrong = [uri for uri, rows in expected.items() if rows != found[uri]]
        if wrong:
            problem = (
                f"{found[wrong[0]]} rows of {wrong[0]}, where its state says {expected[wrong[0]]}"
            )
            raise _gone(date, problem)


def _gone(date: str, problem: str) -> RunFailed:
    return RunFailed(
        f"the partition of {date}, whose rows were to be carried over, is not whole: {problem}; nothing was published. "
        f"Run again without --incremental, or run {date} again first"
    )
