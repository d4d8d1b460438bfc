"""Checkpoint: what the user named → a folder on this machine. One in a bucket is downloaded once for each of its versions."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from model import checkpoint
from model.config import CheckpointError
from pipeline import objects, storage

log = logging.getLogger(__name__)

READ_BYTES = 2**24


# What `pinned` makes of a model in a bucket: its name, and which of its versions.
_PINNED = re.compile(r"(.*)#([0-9a-f]{32})", re.DOTALL)


def pinned(model: str, folder: Path) -> str:
    """The model whose `folder` this is, as workers find that version of it: a local one by its absolute path."""
    if model.startswith(checkpoint.PACKAGE):
        return model
    return str(folder) if storage.is_local(model) else f"{model}#{folder.name}"


def folder(model: str) -> Path:
    """The checkpoint's folder on this machine.

    Args:
      model: as the user has named it, or as `pinned` has.

    Raises:
      CheckpointError: there is none, it cannot be downloaded, or it is no longer the version that was pinned.
    """
    if storage.is_local(model):
        return checkpoint.locate(model)
    found = _PINNED.fullmatch(model)
    name, version = found.groups() if found else (model, None)
    try:
        return checkpoint.locate(str(_download(objects.absolute(name), version)))
    except OSError as error:
        raise CheckpointError(name, [f"cannot be downloaded: {error}"]) from error


def _list(model: str) -> list[tuple[str, objects.StoredObject]]:
    # Pickles would not be read, so they need not come.
    return [
        (name, found)
        for name, found in objects.below(model)
        if not any(Path(name).match(pickle) for pickle in checkpoint.PICKLES)
    ]


def _download(model: str, wanted: str | None) -> Path:
    cache = Path(
        os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "lengthwise", "models"
    )
    if wanted is not None and (cache / wanted).is_dir():
        return cache / wanted
    listed = _list(model)
    if not any(name == "config.json" for name, _ in listed):
        raise CheckpointError(
            model, ["no config.json in it; expected a folder of a bucket that holds a checkpoint"]
        )
    version = hashlib.sha256(repr((model, listed)).encode()).hexdigest()[:32]
    if wanted not in (None, version):
        raise CheckpointError(model, ["has been changed since the run began; run again"])
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
        if _list(model) != listed:  # new weights are often as long as the old ones
            raise CheckpointError(model, ["changed while it was downloaded; try again"])
        try:
            content.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target
