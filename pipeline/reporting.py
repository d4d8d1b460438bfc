"""Report: what a run did, as `report.json` for programs and `report.html` for people.

Counts (documents, windows, tokens, shapes) describe the partition, whichever runs computed it; seconds, memory and
the device are this run's own; `runs` says what each run did.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import pyarrow.compute as pc

from pipeline import storage
from pipeline.partitions import unchanged_objects
from pipeline.progress import Control
from pipeline.reconciling import Reconciled, Tally
from pipeline.records import Failure, Figures, Run
from pipeline.report_page import render
from pipeline.sidecars import Sidecar
from pipeline.state import Layout
from pipeline.versions import versions
from pipeline.writing import RUN_SUFFIX

VERSION = 1
EXAMPLES = 5  # of each reason
Status = Literal["published", "stopped", "failed"]


def write(
    run: Run,
    layout: Layout,
    counted: Tally,
    staged: Sequence[Sidecar],
    *,
    status: Status,
    reason: str = "",
    reconciled: Reconciled | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes both files into the run's folder, and returns what report.json holds.

    `reconciled` and `manifest` are there for a published run; `reason` says why any other was not published.
    """
    report = make_report(
        run,
        layout,
        counted,
        staged,
        status=status,
        reason=reason,
        reconciled=reconciled,
        manifest=manifest,
    )
    page = storage.join(layout.run(run.run_id), "report.html")
    storage.write(page, render(report).encode())
    # Last, so that whoever finds report.json finds both.
    storage.write(layout.report(run.run_id), json.dumps(report, indent=2).encode() + b"\n")
    return report


def status(layout: Layout, run_id: str) -> Status | None:
    """How a run ended; None while there is no report."""
    path = layout.report(run_id)
    if not storage.exists(path):
        return None
    ended: Status = json.loads(storage.read(path))["status"]
    return ended


def make_report(
    run: Run,
    layout: Layout,
    counted: Tally,
    staged: Sequence[Sidecar],
    *,
    status: Status,
    reason: str,
    reconciled: Reconciled | None,
    manifest: Mapping[str, Any] | None,
) -> dict[str, Any]:
    now = time.time()
    unchanged = unchanged_objects(run)
    partition = Figures.total(sidecar.figures for sidecar in staged)
    own_files = [sidecar for sidecar in staged if sidecar.run_id == run.run_id]
    own = Figures.total(sidecar.figures for sidecar in own_files)
    total_seconds = now - run.started
    if total_seconds <= 0:  # the clock was set back; the steps are timed by another
        total_seconds = max(own.seconds.values(), default=0) or 1e-3
    real, padded = int(partition.counts["tokens_inferred"]), int(partition.counts["tokens_padded"])
    first_result = own.lows.get("first_result_at")
    # ru_maxrss counts KiB on Linux, bytes on macOS.
    own_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    own_peak *= 1 if sys.platform == "darwin" else 1024
    return {
        "version": VERSION,
        "status": status,
        "reason": reason,
        "run_id": run.run_id,
        "date": run.date,
        "partition": layout.documents,
        "started": _moment(run.started),
        "finished": _moment(now),
        "documents": _documents(
            counted, reconciled, skipped=pc.sum(unchanged["records"]).as_py() or 0
        ),
        "incremental": {
            "base": run.base,
            "objects_unchanged": unchanged.num_rows,
            "objects_deleted": run.deleted,
            "carried_over": run.job.output.carry_over,
        },
        "hidden_files": run.hidden,
        "units": {
            "listed": len(counted.units),
            "finished": len(counted.units) - len(counted.not_started),
            "not_started": len(counted.not_started),
        },
        "windows": reconciled.windows if reconciled else int(partition.counts["windows"]),
        "windows_inferred": int(partition.counts["windows_inferred"]),
        "tokens": {"real": real, "padded": padded},
        "padding_efficiency": real / padded if padded else None,
        "shapes": dict(sorted(partition.shapes.items(), key=lambda shape: (-shape[1], shape[0]))),
        "compiled_programs": int(own.peaks.get("compiled_programs", 0)),
        "seconds": {
            "total": total_seconds,
            "first_result": None if first_result is None else max(first_result - run.started, 0),
            "compile": float(own.seconds.get("compile", 0)),
            "inference": float(own.seconds.get("infer", 0)),
        }
        | {
            step: float(own.seconds[step])
            for step in own.seconds
            if step not in ("compile", "infer")
        },
        "documents_per_second": sum(sidecar.rows for sidecar in own_files) / total_seconds,
        "device": own.facts.get("device", run.device),
        "dtype": run.dtype,
        "attention": own.facts.get("attention"),
        "attention_reasons": own.facts.get("attention_reasons"),
        "model": {"name": run.model_name, "fingerprint": run.fingerprint},
        "versions": versions(),
        "peak_host_bytes": int(max(own_peak, own.peaks.get("peak_host_bytes", 0))),
        "runs": _runs(run, layout, staged),
        "settings": asdict(run.job),
        "failures": _failures(reconciled.failures if reconciled else counted.failures),
        "files": {
            kind: list(manifest[kind]) if manifest else [] for kind in ("documents", "failures")
        },
    }


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds")


def _documents(
    counted: Tally, reconciled: Reconciled | None, *, skipped: int
) -> dict[str, int | None]:
    """What became of the documents. `skipped` are those of unchanged objects, in an incremental run. `read` = `written` + `failed` + those lost on the way, in a run that failed.

    `listed` and `not_started` are None where a stopped run leaves files of many records unread: nobody knows how many.
    """
    failures = reconciled.failures if reconciled else counted.failures
    failed_by_unit = Counter(failure.unit_id for failure in counted.failures)
    unread = counted.not_started
    read = sum(counted.records.values())
    read += sum(counted.documents[u.unit_id] + failed_by_unit[u.unit_id] for u in unread)
    written = reconciled.documents if reconciled else counted.documents.total()
    listed = None
    if all(unit.format not in ("jsonl", "parquet") for unit in unread):  # a document a file
        listed = skipped + sum(counted.records.values()) + len(unread)
    return {
        "listed": listed,
        "read": read,
        "written": written,
        "failed": len(failures),
        "skipped": skipped,
        "not_started": None if listed is None else listed - skipped - read,
    }


def _runs(run: Run, layout: Layout, staged: Sequence[Sidecar]) -> list[dict[str, Any]]:
    """What each run did for this partition, oldest first: `windows_inferred` is all it computed, also what was lost."""
    kept: dict[str, Figures] = {}
    documents: Counter[str] = Counter()
    for sidecar in staged:
        kept.setdefault(sidecar.run_id, Figures()).add(sidecar.figures)
        documents[sidecar.run_id] += sidecar.rows
    run_ids = {run.run_id, *kept}
    if run.job.output.resume:
        names = storage.files(layout.staged(run.fingerprint))
        run_ids |= {name.removesuffix(RUN_SUFFIX) for name in names if name.endswith(RUN_SUFFIX)}
    described = []
    for run_id in sorted(run_ids):
        kept_windows = int(kept.get(run_id, Figures()).counts["windows_inferred"])
        folder = run.control if run_id == run.run_id else layout.control(run_id)
        counters = Control(folder).totals()
        described.append(
            {
                "run_id": run_id,
                "documents": documents[run_id],
                "windows_inferred": max(kept_windows, int(counters["windows_inferred"])),
                "windows_kept": kept_windows,
            }
        )
    return described


def count_reasons(failures: Iterable[Failure]) -> list[tuple[str, int]]:
    """Reasons and how many failures have each, the most frequent first."""
    counts = Counter(failure.reason for failure in failures)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _failures(failures: Sequence[Failure]) -> list[dict[str, Any]]:
    """By reason, the most frequent first, with the first few of each."""
    ordered = sorted(failures, key=lambda failure: (failure.uri, failure.position))
    return [
        {
            "reason": reason,
            "count": count,
            "examples": [
                {name: getattr(failure, name) for name in ("uri", "record", "step", "message")}
                for failure in ordered
                if failure.reason == reason
            ][:EXAMPLES],
        }
        for reason, count in count_reasons(failures)
    ]
