"""A checkpoint in a bucket is the same for all of a run, whatever becomes of the bucket meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from local_gcs import Faults, client, local_gcs
from model.config import CheckpointError
from pipeline import checkpoints
from pipeline.config import CheckupSettings, SettingsError
from pipeline.doctor import examine

MODEL = "gs://in/models/a"


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with local_gcs("in") as faults:
        put("config.json", "{}")
        put("model.safetensors", "old weights")
        yield faults


def put(name: str, text: str) -> None:
    client().bucket("in").blob(f"models/a/{name}").upload_from_string(text)


def weights(folder: Path) -> str:
    return (folder / "model.safetensors").read_text()


def test_it_is_downloaded_once_for_each_of_its_versions(gcs: Faults):
    first = checkpoints.folder(MODEL)
    gcs.seen.clear()
    assert checkpoints.folder(f"{MODEL}/") == first
    assert not [request for request in gcs.seen if "alt=media" in request.path]
    put("model.safetensors", "new weights")
    assert weights(checkpoints.folder(MODEL)) == "new weights"
    assert weights(first) == "old weights"


def test_one_that_is_replaced_while_it_is_downloaded_is_not_kept(gcs: Faults):
    replaced = []

    def replace_weights(request):
        if not replaced and request.method == "GET" and "safetensors" in request.path:
            replaced.append(request)
            put("model.safetensors", "new weights")  # as long as the old ones

    gcs.before = replace_weights
    with pytest.raises(CheckpointError, match="changed while it was downloaded; try again"):
        checkpoints.folder(MODEL)
    assert replaced
    assert weights(checkpoints.folder(MODEL)) == "new weights"


def test_workers_take_the_version_that_the_run_began_with_or_none(gcs: Faults):
    folder = checkpoints.folder(MODEL)
    pinned = checkpoints.pinned(MODEL, folder)
    put("model.safetensors", "new weights")
    assert weights(checkpoints.folder(pinned)) == "old weights"
    shutil.rmtree(folder)  # as on another machine
    with pytest.raises(CheckpointError, match="has been changed since the run began"):
        checkpoints.folder(pinned)


def test_workers_elsewhere_download_the_version_that_the_run_began_with(gcs: Faults):
    folder = checkpoints.folder(MODEL)
    pinned = checkpoints.pinned(MODEL, folder)
    shutil.rmtree(folder)
    assert weights(checkpoints.folder(pinned)) == "old weights"


def test_the_doctor_looks_at_it_too(gcs: Faults):
    with pytest.raises(SettingsError, match="model_type"):
        examine(CheckupSettings(model=MODEL))


def test_a_local_one_is_named_by_its_absolute_path_and_a_package_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert checkpoints.pinned("model", checkpoints.folder("model")) == str(tmp_path / "model")
    assert checkpoints.pinned("package:some", tmp_path) == "package:some"
