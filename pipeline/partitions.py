"""Partition: what a published date holds, by its manifest, which is all that readers and later runs go by."""

from __future__ import annotations

import datetime
import io
import json
import logging
from collections.abc import Collection, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.locking import DateLocked, lock_date
from pipeline.records import Run
from pipeline.state import Layout

log = logging.getLogger(__name__)

FAILURES_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("record", pa.string()),  # null: the object itself
        pa.field("position", pa.int64()),  # byte offset or row; null: the object itself
        pa.field("step", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("content_sha256", pa.string()),  # null: nothing of the record was read
    ]
)
OBJECTS_SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("generation", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("records", pa.int64(), nullable=False),
        pa.field("failed", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("partition", pa.string(), nullable=False),  # the date that holds its rows
    ]
)


def read_manifest(layout: Layout) -> dict[str, Any] | None:
    """The manifest of a date; None where nothing is published, or where the file is none of ours."""
    if not storage.exists(layout.manifest):
        return None
    try:
        manifest: dict[str, Any] = json.loads(storage.read(layout.manifest))
        if "run_id" in manifest and all(
            path == layout.relative(storage.join(folder, storage.name_of(path)))
            for folder, path in _files_of(layout, manifest)
        ):
            return manifest
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    log.warning("%s is not a manifest of ours", layout.manifest)
    return None


def _files_of(layout: Layout, manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The path of each file that a manifest names, and the folder in which it has to be."""
    for entry in manifest["documents"]:
        yield layout.documents, entry["path"]
    for entry in manifest["failures"]:
        yield layout.failures, entry["path"]
    yield layout.state, manifest["state"]["path"]


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def published_dates(output: str) -> Iterator[str]:
    """The dates that have a folder of documents, the latest first; a folder of another name is not looked at."""
    for name in reversed(storage.folders(storage.join(output, "documents"))):
        date = name.removeprefix("date=")
        if name != date and _is_date(date):
            yield date


def unchanged_objects(run: Run) -> pa.Table:
    """The objects of a run that were computed before, as OBJECTS_SCHEMA says."""
    if run.unchanged is None:
        return OBJECTS_SCHEMA.empty_table()
    with storage.open_input(run.unchanged) as file:
        return pq.read_table(file, use_threads=False)


def delete_files(layout: Layout, *, keep: Collection[str] = ()) -> None:
    """Deletes a date's files but for these (paths as in a manifest); what others have put beside them stays."""
    for folder in (layout.documents, layout.failures, layout.state):
        for name in storage.files(folder):
            path = storage.join(folder, name)
            ours = name.startswith("part-") or name.startswith(storage.TEMPORARY)
            if ours and layout.relative(path) not in keep:
                storage.delete(path)


def delete_older(layout: Layout, days: int, run_id: str) -> list[str]:
    """Deletes the dates that are more than `days` days older than this one, and returns them.

    A date that a run is writing just now is left for the next time, and so is one whose rows a later date needs; all are,
    where a later date does not say whose it needs.
    """
    try:
        oldest = (datetime.date.fromisoformat(layout.date) - datetime.timedelta(days)).isoformat()
    except OverflowError:  # before the calendar's first day
        return []
    dates = list(published_dates(layout.output))
    needed: set[str] = set()
    for date in (date for date in dates if date >= oldest):
        kept = Layout(layout.output, date)
        manifest = read_manifest(kept)
        if manifest is None:
            continue
        objects = read_objects(kept, manifest)
        if objects is None:
            log.warning("older dates are kept: %s may need their rows", date)
            return []
        needed.update(objects["partition"].unique().to_pylist())
    deleted = []
    for date in dates:
        if date >= oldest or date in needed:
            continue
        old = Layout(layout.output, date)
        try:
            with lock_date(old, run_id):
                storage.delete(old.manifest)  # first: a date without one is not published
                delete_files(old)
        except DateLocked as error:
            log.warning("not deleted yet: %s", error)
            continue
        storage.delete_folder(old.runs)
        for folder in (old.documents, old.failures, old.state):
            storage.delete_empty_folder(folder)
        deleted.append(date)
    return deleted


def read_objects(layout: Layout, manifest: dict[str, Any] | None = None) -> pa.Table | None:
    """What became of each object of a date, as OBJECTS_SCHEMA says; None where that is not published or not readable.

    By its manifest as it is now, if none is given.
    """
    manifest = manifest or read_manifest(layout)
    if manifest is None:
        return None
    path = storage.join(layout.output, manifest["state"]["path"])
    try:
        with storage.open_input(path) as file:
            objects = pq.read_table(file, use_threads=False)
    except (OSError, pa.ArrowException) as error:
        log.warning("the state of %s cannot be read: %s", layout.date, error)
        return None
    dates = (
        objects["partition"].unique().to_pylist() if objects.schema.equals(OBJECTS_SCHEMA) else [""]
    )
    if not all(map(_is_date, dates)):  # they name folders
        log.warning("the state of %s is of another version: %s", layout.date, path)
        return None
    return objects


def write_table(path: str, table: pa.Table) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    with storage.create(path) as file:
        file.write(sink.getbuffer())
