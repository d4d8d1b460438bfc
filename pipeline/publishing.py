"""Publish: the one last step of every run. Failure ratio → reconcile → commit → report, and safe to repeat.

The commit point is the replacement of the date's manifest. Everything before it only adds files that no manifest
names, everything after it only takes files away that no manifest names; so the step may die anywhere and be
repeated, by the same run or, from the staged files, by the next one.
"""

from __future__ import annotations

import datetime
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline import reporting, sidecars, storage
from pipeline.assembling import METADATA_PREFIX, SCHEMA_VERSION
from pipeline.incremental import carried
from pipeline.listing import read_listing
from pipeline.merging import Source, merge
from pipeline.partitions import (
    FAILURES_SCHEMA,
    OBJECTS_SCHEMA,
    delete_files,
    delete_older,
    read_manifest,
    unchanged_objects,
    write_table,
)
from pipeline.progress import Control, Stopped
from pipeline.reconciling import Reconciled, RunFailed, failed_fast, reconcile, tally
from pipeline.records import Failure, Run, StagedFile
from pipeline.sidecars import Sidecar
from pipeline.state import Layout

MANIFEST_VERSION = 1
BUILD = "publish"  # folder in the staging folder where the partition's files are built


def publish(run: Run, files: Iterable[StagedFile]) -> None:
    """Publishes the staged files of a run, and of those it resumed, as the date's partition; or says why not.

    A run that was asked to stop publishes nothing and is no failure: its report says "stopped".

    Raises:
      RunFailed: reconciliation found a loss, or too many records failed. The staged files and a report stay.
    """
    layout = Layout(run.job.output.output, run.date)
    manifest = read_manifest(layout)
    if manifest is not None and manifest["run_id"] != run.run_id:
        manifest = None  # ours is there when publishing is repeated
    if manifest is not None and reporting.status(layout, run.run_id) == "published":
        _tidy(layout, manifest, run)
        return
    staged = _gather(run, files)
    counted = tally(read_listing(run.listing), staged, run.run_id)
    control = Control(run.control)
    try:
        if manifest is None:
            control.raise_if_stopping()
        reconciled = reconcile(counted, staged)
        _check_failure_ratio(run, reconciled)
        if manifest is None:
            manifest = _commit(run, layout, staged, reconciled, control)
    except Stopped:
        reporting.write(run, layout, counted, staged, status="stopped", reason="asked to stop")
        return
    except RunFailed as error:
        reporting.write(run, layout, counted, staged, status="failed", reason=str(error))
        raise
    reporting.write(
        run, layout, counted, staged, status="published", reconciled=reconciled, manifest=manifest
    )
    _tidy(layout, manifest, run)


def report_failure(run: Run, reason: str) -> None:
    """Writes the report of a run that failed before its last step; what it has staged is counted and stays."""
    layout = Layout(run.job.output.output, run.date)
    if reporting.status(layout, run.run_id) is not None:
        return
    folder = layout.staged(run.fingerprint)
    own = [
        StagedFile(sidecar=storage.join(folder, name), rows=0, size_bytes=0)
        for name in storage.files(folder)
        if name.startswith(f"{run.run_id}-") and name.endswith(sidecars.SUFFIX)
    ]
    staged = _gather(run, own)
    counted = tally(read_listing(run.listing), staged, run.run_id)
    reporting.write(run, layout, counted, staged, status="failed", reason=reason)


def _gather(run: Run, files: Iterable[StagedFile]) -> list[Sidecar]:
    paths = sorted({*run.resumed, *(file.sidecar for file in files)})
    try:
        gathered = [sidecars.read(path) for path in paths]
    except sidecars.SidecarError as error:
        raise RunFailed(
            f"a staged file of this run is gone or damaged, nothing was published: {error}. Run again to go on"
        ) from error
    return gathered


def _check_failure_ratio(run: Run, reconciled: Reconciled) -> None:
    if run.job.output.fail_fast and reconciled.failures:  # of runs before, or found just now
        raise failed_fast(reconciled.failures[0])
    failed, allowed = len(reconciled.failures), run.job.output.max_failure_ratio
    # Of all the date's records: where only what failed is tried again, all that was read may fail again.
    records = reconciled.records + (pc.sum(unchanged_objects(run)["records"]).as_py() or 0)
    if failed <= allowed * records:
        return
    reasons = reporting.count_reasons(reconciled.failures)
    raise RunFailed(
        f"{failed} of {records} records failed ({failed / records:.1%}), nothing was published: "
        f"--max-failure-ratio allows {allowed:.1%}. Most frequent: "
        + ", ".join(f"{reason} ({count})" for reason, count in reasons[:3])
        + ". The report lists examples. Mend the input, or allow more: what was computed is kept for the next run"
    )


def _commit(
    run: Run, layout: Layout, staged: Sequence[Sidecar], reconciled: Reconciled, control: Control
) -> dict[str, Any]:
    """Builds the new files, puts them in place and replaces the manifest, which it returns.

    Raises:
      Stopped: the run was asked to stop while they were built. From then on it is too late.
      RunFailed: another run has published the date since this began.
    """
    stem = f"part-{run.run_id}"
    output = run.job.output
    build = storage.join(layout.staged(run.fingerprint), BUILD)
    storage.delete_folder(build)  # what an interrupted publication has left
    merged = list(
        merge(
            [*_staged_sources(staged, reconciled), *_carried_sources(run, layout)],
            run.schema,
            folder=build,
            stem=stem,
            max_rows=output.max_rows_per_file,
            max_bytes=output.max_bytes_per_file,
            control=control,
        )
    )
    documents = [_put(layout, file.path, layout.documents, file.rows) for file in merged]
    failed = _failures_table(run, reconciled.failures)
    failures_path = storage.join(build, "failures", f"{stem}-00000.parquet")
    write_table(failures_path, failed)
    failures = _put(layout, failures_path, layout.failures, failed.num_rows)
    objects = _objects_table(run, reconciled)
    objects_path = storage.join(build, "state", f"{stem}-00000.parquet")
    write_table(objects_path, objects)
    state = _put(layout, objects_path, layout.state, objects.num_rows)
    manifest = {
        "version": MANIFEST_VERSION,
        "schema_version": SCHEMA_VERSION,
        "date": run.date,
        "run_id": run.run_id,
        "fingerprint": run.fingerprint,
        "model": run.model_name,
        "task": run.job.model.task,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "documents": documents,
        "failures": [failures],
        "state": state,
    }
    content = json.dumps(manifest, indent=2).encode() + b"\n"
    if storage.is_local(layout.manifest):  # the date's lock keeps others out for good
        storage.write(layout.manifest, content)
    elif (
        storage.write_if(layout.manifest, content, run.manifest_version) is None
        and (read_manifest(layout) or {}).get("run_id") != run.run_id
    ):
        raise RunFailed(
            f"another run has published {run.date} in {output.output} meanwhile; nothing was replaced"
        )
    return manifest


def _staged_sources(staged: Sequence[Sidecar], reconciled: Reconciled) -> Iterator[Source]:
    for sidecar in staged:
        if sidecar.file is None:
            continue
        left_out = reconciled.left_out.get(sidecar.file_path, frozenset())
        keep = ~np.isin(np.arange(sidecar.rows), list(left_out)) if left_out else None
        yield Source(
            path=sidecar.file_path,
            rows=sidecar.rows - len(left_out),
            size_bytes=sidecar.size_bytes,
            keep=keep,
            facts=sidecar.figures.facts,
        )


def _carried_sources(run: Run, layout: Layout) -> Iterable[Source]:
    return carried(unchanged_objects(run), layout) if run.job.output.carry_over else ()


def _put(layout: Layout, path: str, folder: str, rows: int) -> dict[str, Any]:
    """Moves a finished file into its folder and gives its entry in the manifest."""
    target = storage.join(folder, storage.name_of(path))
    entry = {
        "path": layout.relative(target),
        "rows": rows,
        "size_bytes": storage.size(path),
        "sha256": storage.sha256(path),
    }
    storage.move(path, target)
    return entry


def _failures_table(run: Run, failures: Sequence[Failure]) -> pa.Table:
    ordered = sorted(failures, key=lambda failure: (failure.uri, failure.position))
    columns = {
        name: [getattr(failure, name) for failure in ordered]
        for name in FAILURES_SCHEMA.names
        if name != "position"
    }
    columns["position"] = [
        failure.position if failure.position >= 0 else None for failure in ordered
    ]
    metadata = {
        METADATA_PREFIX + "run_id": run.run_id,
        METADATA_PREFIX + "fingerprint": run.fingerprint,
    }
    return pa.table(columns, schema=FAILURES_SCHEMA.with_metadata(metadata))


def _objects_table(run: Run, reconciled: Reconciled) -> pa.Table:
    """One row an object, however many work units it was read in."""
    records: dict[str, int] = defaultdict(int)
    failed: dict[str, int] = defaultdict(int)
    counted = reconciled.tally
    objects = {unit.uri: unit for unit in counted.units.values()}
    for unit_id, count in counted.records.items():
        records[counted.units[unit_id].uri] += count
    for failure in reconciled.failures:
        failed[counted.units[failure.unit_id].uri] += 1
    unchanged = unchanged_objects(run)
    if run.job.output.carry_over:
        dates = pa.array([run.date] * unchanged.num_rows, pa.string())
        unchanged = unchanged.set_column(
            OBJECTS_SCHEMA.names.index("partition"), OBJECTS_SCHEMA.field("partition"), dates
        )
    computed = pa.table(
        {
            "uri": list(objects),
            "generation": [unit.generation for unit in objects.values()],
            "size": [unit.size_bytes for unit in objects.values()],
            "records": [records[uri] for uri in objects],
            "failed": [failed[uri] for uri in objects],
            "fingerprint": [run.fingerprint] * len(objects),
            "partition": [run.date] * len(objects),
        },
        schema=OBJECTS_SCHEMA,
    )
    return pa.concat_tables([computed, unchanged]).sort_by("uri")


def _tidy(layout: Layout, manifest: dict[str, Any], run: Run) -> None:
    """Deletes what the manifest does not name, the staging area but for what the running launcher still uses, and dates
    that are too old."""
    entries = (*manifest["documents"], *manifest["failures"], manifest["state"])
    delete_files(layout, keep={entry["path"] for entry in entries})
    for name in storage.folders(layout.staging):
        if name != "runs":
            storage.delete_folder(storage.join(layout.staging, name))
    for run_id in storage.folders(storage.join(layout.staging, "runs")):
        if run_id != run.run_id:
            storage.delete_folder(layout.launched(run_id))
            storage.delete_folder(layout.control(run_id))
    if run.job.output.keep_days is not None:
        delete_older(layout, run.job.output.keep_days, run.run_id)
