"""Runs the installed `lengthwise` command and reads what it published, for end-to-end tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

COMMAND = str(Path(sys.executable).with_name("lengthwise"))


def start(*arguments: object, **popen: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, "run", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


def run(*arguments: object, expect: int = 0, **popen: Any) -> str:
    """Runs to the end, checks the exit status and returns what was printed on either stream."""
    process = start(*arguments, **popen)
    out, err = process.communicate(timeout=600)
    assert process.returncode == expect, f"exit status {process.returncode}\n{out}\n{err}"
    return out + err


def manifest(output: Path, date: str) -> dict[str, Any]:
    return json.loads((output / f"documents/date={date}/_manifest.json").read_text())


def documents(output: Path, date: str) -> pa.Table:
    """The published rows, in order of document_id."""
    return _read(output, manifest(output, date)["documents"]).sort_by("document_id")


def failures(output: Path, date: str) -> pa.Table:
    return _read(output, manifest(output, date)["failures"])


def _read(output: Path, files: list[dict[str, Any]]) -> pa.Table:
    return pa.concat_tables(
        pq.read_table(output / file["path"], partitioning=None) for file in files
    )


def reports(output: Path, date: str) -> list[dict[str, Any]]:
    """All reports of a date, oldest first."""
    return [
        json.loads(path.read_text())
        for path in sorted(output.glob(f"runs/date={date}/*/report.json"))
    ]


def assert_same(left: pa.Table, right: pa.Table) -> None:
    """The project's meaning of the same result: other columns exactly, embeddings within 1e-5 (float32)
    or at a cosine of 0.9999 (bfloat16)."""
    assert left.drop_columns("embedding").equals(right.drop_columns("embedding"))
    a, b = (np.array(table["embedding"].to_pylist(), np.float32) for table in (left, right))
    if left.schema.metadata[b"lengthwise.dtype"] == b"float32":
        np.testing.assert_allclose(a, b, atol=1e-5)
    else:
        assert ((a * b).sum(1) >= 0.9999).all()


def job(inputs: object, output: object, model: object, **settings: Any) -> Any:
    """A Job from flat settings, as the command line would make it."""
    from dataclasses import fields

    from pipeline.config import (
        BatchingSettings,
        Job,
        ModelSettings,
        OutputSettings,
        ReadingSettings,
    )

    flat = {"inputs": (str(inputs),), "output": str(output), "model": str(model), **settings}
    groups = {
        "reading": ReadingSettings,
        "model": ModelSettings,
        "batching": BatchingSettings,
        "output": OutputSettings,
    }
    made = {}
    for name, group in groups.items():
        mine = {field.name: flat.pop(field.name) for field in fields(group) if field.name in flat}
        made[name] = group(**mine)
    assert not flat, f"unknown settings {sorted(flat)}"
    return Job(**made)


def run_here(a_job: Any, *beam_options: str, runner: str = "DirectRunner") -> int:
    """Runs a job in this process, which has paid for the imports already."""
    from pipeline.running import run as run_job

    return run_job(a_job, list(beam_options), runner)
