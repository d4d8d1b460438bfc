"""Runs, work units and rows made by hand, for tests of what comes after inference."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.assembling import assemble, document_schema
from pipeline.config import BatchingSettings, Job, ModelSettings, OutputSettings, ReadingSettings
from pipeline.listing import write_listing
from pipeline.records import (
    Completion,
    Document,
    Failure,
    Figures,
    LoadResult,
    Rows,
    Run,
    StagedFile,
    TokenizedDocument,
    WorkUnit,
)
from pipeline.shapes import shape_table
from pipeline.state import Layout
from pipeline.writing import StagedFiles

D = 4
DATE = "2026-01-02"
FINGERPRINT = "f" * 64


def make_unit(name: str = "a.jsonl", *, generation: str = "1", **changes: Any) -> WorkUnit:
    settings = {
        "uri": f"/in/{name}",
        "format": "jsonl",
        "compression": "none",
        "start": 0,
        "stop": None,
        "size_bytes": 1000,
        "generation": generation,
    }
    return WorkUnit(**(settings | changes))


def make_job(output: Path | str, *, keep_fields: tuple[str, ...] = (), **changes: Any) -> Job:
    return Job(
        reading=ReadingSettings(inputs=("/in",), keep_fields=keep_fields),
        model=ModelSettings(model="package:tiny"),
        batching=BatchingSettings(),
        output=OutputSettings(output=str(output), date=DATE, **changes),
    )


def make_run(
    output: Path | str,
    units: Sequence[WorkUnit],
    *,
    run_id: str = "run-1",
    fingerprint: str = FINGERPRINT,
    resumed: tuple[str, ...] = (),
    fields: Sequence[pa.Field] = (),
    **changes: Any,
) -> Run:
    """A run as the launcher would start it; `changes` are output settings."""
    job = make_job(output, **changes)
    layout = Layout(job.output.output, DATE)
    storage.make_folder(layout.staged(fingerprint))
    control = Path(layout.control(run_id))
    control.mkdir(parents=True, exist_ok=True)
    write_listing(units, str(control / "listing.parquet"))
    return Run(
        job=job,
        run_id=run_id,
        date=DATE,
        started=1_767_000_000.0,
        checkpoint="/model",
        model_name="package:tiny",
        fingerprint=fingerprint,
        device="cpu",
        dtype="float32",
        local_devices=1,
        window_tokens=16,
        shapes=shape_table("cpu", 16, None, 1),
        hidden=0,
        schema=document_schema(
            job, dimensions=D, fields=fields, metadata={"run_id": run_id, "model": "package:tiny"}
        ),
        listing=str(control / "listing.parquet"),
        todo=str(control / "listing.parquet"),
        manifest_version=storage.version(layout.manifest),
        resumed=resumed,
        control=str(control),
    )


def make_document(
    unit: WorkUnit, position: int, record: str | None = None, fields: tuple[Any, ...] = ()
) -> TokenizedDocument:
    """A document of 3 tokens in one window."""
    return TokenizedDocument(
        document=Document(
            unit_id=unit.unit_id,
            position=position,
            uri=unit.uri,
            record=str(position) if record is None else record,
            text="",
            media_type="text/plain",
            content_sha256="0" * 64,
            size_bytes=11,
            fields=fields,
        ),
        characters=10,
        token_ids=np.arange(3, dtype=np.int32),
        windows=np.array([[0, 3]], np.int32),
        truncated=False,
    )


def make_failure(unit: WorkUnit, position: int, reason: str = "bad_json") -> Failure:
    return Failure(
        unit_id=unit.unit_id,
        position=position,
        uri=unit.uri,
        record=None if position < 0 else str(position),
        step="decode",
        reason=reason,
        message="made up",
        content_sha256=None if position < 0 else "0" * 64,
    )


def make_rows(
    run: Run,
    unit: WorkUnit,
    positions: Iterable[int] = (),
    *,
    records: int | None = None,
    failed: Iterable[int] = (),
    ids: dict[int, str] | None = None,
    fields: tuple[Any, ...] = (),
) -> Rows:
    """Rows of one unit, whose embeddings are made of their positions; `records` adds the unit's completion."""
    documents = tuple(make_document(unit, p, (ids or {}).get(p), fields) for p in positions)
    figures = Figures()
    figures.counts.update(
        read=len(documents), windows=len(documents), windows_inferred=len(documents)
    )
    figures.counts.update(tokens_inferred=5 * len(documents), tokens_padded=8 * len(documents))
    figures.shapes["8x16"] += 1
    figures.seconds["infer"] += 0.5
    figures.lows["first_result_at"] = run.started + 2
    figures.facts["attention"] = "xla"
    encodings = [[document.document.position + d / 8 for d in range(D)] for document in documents]
    result = LoadResult(
        documents=documents,
        encodings=np.array(encodings, np.float32).reshape(-1, D),
        failures=tuple(make_failure(unit, p) for p in failed),
        completions=() if records is None else (Completion(unit_id=unit.unit_id, records=records),),
        figures=figures,
    )
    return assemble(result, run.schema)


def writer(run: Run) -> StagedFiles:
    output = run.job.output
    return StagedFiles(
        layout(run).staged(run.fingerprint),
        schema=run.schema,
        run_id=run.run_id,
        fingerprint=run.fingerprint,
        max_rows=output.max_rows_per_file,
        max_bytes=output.max_bytes_per_file,
    )


def stage(run: Run, *several: Rows) -> list[StagedFile]:
    """Writes rows, each into a staged file of its own."""
    staged = []
    for rows in several:
        files = writer(run)
        staged += [*files.add(rows), *files.close()]
    return staged


def layout(run: Run) -> Layout:
    return Layout(run.job.output.output, run.date)


def read_manifest(run: Run) -> dict[str, Any]:
    return json.loads(storage.read(layout(run).manifest))


def read_partition(run: Run, kind: str = "documents") -> pa.Table:
    """What the manifest lists, as one table."""
    entries = read_manifest(run)[kind]
    return pa.concat_tables(pq.read_table(Path(run.job.output.output, e["path"])) for e in entries)


def read_report(run: Run) -> dict[str, Any]:
    return json.loads(storage.read(layout(run).report(run.run_id)))


def tree(folder: str | Path) -> list[str]:
    """Every file under a folder, by its path from there."""
    return sorted(str(p.relative_to(folder)) for p in Path(folder).rglob("*") if p.is_file())
