"""The doctor: what it finds on this machine, and what a model would take on a TPU that is not here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kernels.attention import select
from kernels.attention.pallas_tpu import PallasTpu
from kernels.attention.xla import Xla
from kernels.tpu import CHIPS
from model import ahead
from pipeline.config import TPUS, CheckupSettings, SettingsError
from pipeline.doctor import examine

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install lengthwise[tpu]"
)


@dataclass(frozen=True)
class DoesNotCompile(PallasTpu):
    def refusal(self, *_: Any) -> None:
        return None


@pytest.fixture
def found(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Exit status and JSON of the doctor for the tiny model."""

    def examined(**settings: Any) -> tuple[int, dict[str, Any]]:
        model = str(tiny_checkpoint)
        status = examine(CheckupSettings(**{"model": model, "json": True, **settings}))
        return status, json.loads(capsys.readouterr().out)

    return examined


def test_it_tells_versions_devices_and_how_each_implementation_does(found: Any) -> None:
    status, report = found(device="cpu", dtype="float32")
    assert status == 0
    assert report["versions"]["python"] == sys.version.split()[0] and "jax" in report["versions"]
    assert len(report["devices"]["cpu"]) >= 1
    pallas, xla, reference = report["attention"]
    assert pallas["problem"].endswith("needs a TPU")
    assert xla["problem"] is reference["problem"] is None
    assert 0 < xla["difference"] < 1e-4 and reference["difference"] == 0
    assert xla["seconds"] > 0
    assert report["chosen"] == "xla"


def test_the_same_as_text(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert examine(CheckupSettings(model=str(tiny_checkpoint), device="cpu", dtype="float32")) == 0
    versions, device, title, pallas, xla, _reference = capsys.readouterr().out.splitlines()
    assert versions.startswith("python 3.")
    assert device.startswith("cpu: ") and title.endswith("in float32 on cpu:")
    assert pallas.startswith("  pallas_tpu  refuses float32") and pallas.endswith("needs a TPU")
    assert xla.startswith("→ xla ") and "from the reference" in xla


def test_without_a_model_it_tries_shapes_of_a_usual_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (PallasTpu(),))
    assert examine(CheckupSettings(device="cpu")) == 1
    assert "N=12 H=64: needs a TPU" in capsys.readouterr().out


def test_what_fails_its_canary_is_told_and_nothing_chosen_in_its_place_when_asked_for_by_name(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "IMPLEMENTATIONS", (DoesNotCompile(), Xla()))
    status, report = found(device="cpu")
    assert (status, report["chosen"]) == (0, "xla")
    assert "Only interpret mode" in report["attention"][0]["problem"]
    status, report = found(device="cpu", attention="pallas_tpu")
    assert (status, report["chosen"]) == (1, None)
    with pytest.raises(SettingsError, match="--attention: expected one of auto, pallas_tpu, xla"):
        found(attention="flahs")


def test_a_device_that_is_not_there_is_told(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = found(device="gpu")
    assert status == 1
    assert "device 'gpu' is not present" in report["problem"] and report["versions"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "no/such/folder"}, "no such folder"),
        ({"window_tokens": 4096}, "--window-tokens: expected at most 128"),
        ({"tpu": "v5e", "max_tokens_per_batch": 10}, "--max-tokens-per-batch: expected at least"),
        ({"tpu": "v5e", "attention": "flahs"}, "--attention 'flahs' is unknown"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    found: Any, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "devices", lambda chip: [None])
    with pytest.raises(SettingsError, match=message):
        found(**settings)


def test_without_libtpu_it_says_what_to_install(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda it: None if it == "libtpu" else find(it))
    with pytest.raises(SettingsError, match=r"--tpu v5e: needs libtpu.* install 'lengthwise\[tpu"):
        found(tpu="v5e")


def test_the_tpus_that_can_be_named_are_those_that_are_known() -> None:
    assert list(CHIPS) == list(TPUS)


def test_of_a_batch_that_does_not_fit_the_largest_that_does_is_told(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def estimate(config: Any, chip: str, shape: tuple[int, int], *_: Any, **__: Any) -> Any:
        B, T = shape
        if B > 64:
            return ahead.Estimate(B=B, T=T, problem="RESOURCE_EXHAUSTED: hbm")
        return ahead.Estimate(B=B, T=T, hbm_bytes=1, temporary_bytes=1, seconds=1.0)

    monkeypatch.setattr(ahead, "devices", lambda chip: [type("Device", (), {"device_kind": "TPU v5 lite", "platform": "tpu"})])  # fmt: skip
    monkeypatch.setattr(ahead, "estimate", estimate)
    status, report = found(tpu="v5e")
    assert status == 1
    assert [(row["B"], row["problem"] is None) for row in report["shapes"]] == [
        (512, False), (256, False), (128, False), (64, True),
    ]  # fmt: skip


@needs_libtpu
def test_a_model_is_compiled_for_a_tpu_that_is_not_there(found: Any) -> None:
    status, report = found(tpu="v5e", max_tokens_per_batch=512)
    assert status == 0
    assert (report["chosen"], report["device"], report["hbm_bytes"]) == ("pallas_tpu", "v5e", 2**34)
    (row,) = report["shapes"]
    assert (row["B"], row["T"], row["problem"], row["not_counted"]) == (8, 64, None, None)
    assert (
        0 <= row["temporary_bytes"] < row["hbm_bytes"] < 2**30
    )  # so small a model needs no HBM for them
    assert 0 < row["utilisation"] < 1
    assert row["tokens_per_second"] == pytest.approx(8 * 64 / row["seconds"])
    assert 0 < row["attention_cycles"] / 1.5e9 < row["seconds"]


@needs_libtpu
def test_what_does_not_fit_a_tpu_is_told_as_out_of_memory(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHIPS, "v5e", replace(CHIPS["v5e"], hbm_bytes=2**20))
    status, report = found(tpu="v5e", max_tokens_per_batch=128)
    assert status == 1
    assert [(row["B"], row["T"]) for row in report["shapes"]] == [(2, 64), (1, 64)]
    assert all("takes" in row["problem"] and row["seconds"] is None for row in report["shapes"])


PROGRAM = """
import sys
from model.devices import DeviceError, resolve_device
try:
    print(resolve_device(sys.argv[1]))
except DeviceError as error:
    print(error)
"""


@pytest.mark.parametrize("device", ["auto", "cpu", "tpu"])
def test_a_tpu_that_does_not_start_is_told_from_none(device: str) -> None:
    # As JAX sets it where it finds TPU chips, even if another process has them.
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, check=True,
        env=os.environ | {"JAX_PLATFORMS": "tpu,cpu"},
    )  # fmt: skip
    assert "does not start: Unable to initialize backend 'tpu'" in result.stdout


def test_it_speaks_in_any_encoding(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = os.fsencode(tmp_path) + b"/\xff"
    os.symlink(tiny_checkpoint, model)
    command = ["-c", "import sys; from pipeline.cli import main; sys.exit(main())", "doctor"]
    done = subprocess.run(
        [sys.executable, *command, "--device", "cpu", b"--model=" + model],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"\\udcff in bfloat16 on cpu" in done.stdout
