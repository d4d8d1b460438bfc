"""Checkpoint: what the user named → a folder on this machine. One in a bucket is downloaded once for each of its versions."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from model import checkpoint
from model.config import CheckpointError
from pipeline import objects, storage

log = logging.getLogger(__name__)

READ_BYTES = 2**24


def resolve(model: str) -> str:
    """The model as workers can find it: a local folder gets its absolute path.

    Raises:
      CheckpointError: there is none.
    """
    if not storage.is_local(model) or model.startswith(checkpoint.PACKAGE):
        return model
    return str(checkpoint.locate(model))


def folder(model: str) -> Path:
    """The checkpoint's folder on this machine.

    Raises:
      CheckpointError: there is none, or it cannot be downloaded.
    """
    if storage.is_local(model):
        return checkpoint.locate(model)
    try:
        return checkpoint.locate(str(_download(objects.absolute(model))))
    except OSError as error:
        raise CheckpointError(model, [f"cannot be downloaded: {error}"]) from error


def _download(model: str) -> Path:
    # Pickles would not be read, so they need not come.
    listed = [
        (name, found)
        for name, found in objects.below(model)
        if not any(Path(name).match(pickle) for pickle in checkpoint.PICKLES)
    ]
    if not any(name == "config.json" for name, _ in listed):
        raise CheckpointError(
            model, ["no config.json in it; expected a folder of a bucket that holds a checkpoint"]
        )
    version = hashlib.sha256(repr((model, listed)).encode()).hexdigest()[:32]
    cache = Path(
        os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "lengthwise", "models"
    )
    target = cache / version
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    log.warning(
        "downloading %s (%d MB)", model, sum(found.size_bytes for _, found in listed) // 2**20
    )
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        content = Path(temporary, "content")
        for name, found in listed:
            path = content / name
            if not path.resolve().is_relative_to(content.resolve()):
                raise CheckpointError(model, [f"{name!r} would lie outside of the folder"])
            path.parent.mkdir(parents=True, exist_ok=True)
            with storage.open_input(found.uri) as source, open(path, "wb") as file:
                shutil.copyfileobj(source, file, READ_BYTES)
            if path.stat().st_size != found.size_bytes:
                raise CheckpointError(model, [f"{name} changed while it was downloaded; try again"])
        try:
            content.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target
