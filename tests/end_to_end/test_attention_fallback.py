"""A kernel that does not work costs speed and nothing else; one that was asked for by name stops the run at once."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pyarrow.parquet as pq
import pytest

from corpora import write_jsonl
from kernels.attention.contract import Attention, Case
from kernels.attention.pallas_tpu import PallasTpu
from kernels.attention.select import IMPLEMENTATIONS, select
from lengthwise_command import assert_same, documents, job, manifest, reports, run_here
from pipeline.config import SettingsError

DATE = "2026-01-02"


@dataclass(frozen=True)
class DoesNotCompile(PallasTpu):
    """Refuses nothing; then compiling it for a CPU fails, with words of Pallas."""

    def refusal(self, case: Case, device: jax.Device) -> str | None:
        return None


@dataclass(frozen=True)
class IgnoresPacking(PallasTpu):
    """Compiles and runs, but takes all texts of a row for one."""

    interpret: Any = True

    def __call__(self, qkv: Any, segment_ids: Any, **sizes: Any) -> jax.Array:
        return super().__call__(qkv, (segment_ids != 0).astype("int32"), **sizes)


BROKEN = {
    "refusal": (PallasTpu(), r"refuses .*: needs a TPU", logging.INFO),
    "compile error": (DoesNotCompile(), r"canary .*: ValueError: Only interpret mode", logging.WARNING),
    "failed canary": (IgnoresPacking(), r"canary .*: differs from the reference by \d", logging.WARNING),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("corpus"), 40)


@pytest.fixture(scope="module")
def undisturbed(
    corpus: Path, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    output = tmp_path_factory.mktemp("undisturbed")
    assert run_here(job(corpus, output, tiny_checkpoint, date=DATE, dtype="float32")) == 0
    return documents(output, DATE)


def install(implementation: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = (implementation, *IMPLEMENTATIONS[1:])
    monkeypatch.setitem(select.__kwdefaults__, "candidates", candidates)


@pytest.mark.parametrize(("kernel", "reason", "level"), BROKEN.values(), ids=BROKEN)
def test_by_default_the_run_goes_on_without_it_and_says_why_wherever_one_looks(
    kernel: Attention, reason: str, level: int, corpus: Path, undisturbed: Any, tiny_checkpoint: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    install(kernel, monkeypatch)
    caplog.set_level(logging.INFO, "kernels")
    assert run_here(job(corpus, tmp_path, tiny_checkpoint, date=DATE, dtype="float32")) == 0
    assert_same(documents(tmp_path, DATE), undisturbed)
    (line,) = [it for it in caplog.records if it.name.startswith("kernels")]
    assert line.levelno == level

    assert re.fullmatch(f"attention: xla on cpu; not pallas_tpu: {reason}.*", line.getMessage())
    (report,) = reports(tmp_path, DATE)
    assert report["attention"] == "xla"
    assert re.match(reason, report["attention_reasons"]["pallas_tpu"])
    for file in manifest(tmp_path, DATE)["documents"]:
        metadata = pq.read_metadata(tmp_path / file["path"]).metadata
        assert metadata[b"lengthwise.attention"] == b"xla"
        assert re.match(f"pallas_tpu: {reason}", metadata[b"lengthwise.attention_reasons"].decode())


@pytest.mark.parametrize(("kernel", "reason", "level"), BROKEN.values(), ids=BROKEN)
def test_asked_for_by_name_the_run_stops_before_it_reads_a_document(
    kernel: Attention, reason: str, level: int, corpus: Path, tiny_checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    install(kernel, monkeypatch)
    built: list[object] = []
    monkeypatch.setattr("pipeline.running.build", lambda *made: built.append(made))
    a_job = job(corpus, tmp_path / "out", tiny_checkpoint, dtype="float32", attention="pallas_tpu")
    with pytest.raises(SettingsError, match=f"^--attention pallas_tpu: {reason}"):
        run_here(a_job)
    assert built == []
    assert not (tmp_path / "out").exists()
