"""Launch: a job's settings → a `Run`, in which everything is decided, under the date's lock.

All that can be wrong with the settings, the checkpoint or the input's names is found here, before a
document is read.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from model import checkpoint
from model.config import CheckpointError, EncoderConfig
from model.tokenizer import TokenizerConfig
from pipeline import checkpoints, storage
from pipeline.accelerators import Accelerator
from pipeline.assembling import SCHEMA_VERSION, document_schema
from pipeline.config import Job, ModelSettings, SettingsError
from pipeline.dates import date_of, on_date
from pipeline.incremental import compare, latest_base, own_base
from pipeline.listing import Listing, field_types, list_units, write_listing
from pipeline.locking import lock_date
from pipeline.objects import absolute, is_folder
from pipeline.partitions import write_table
from pipeline.progress import Control
from pipeline.records import Run
from pipeline.shapes import ShapeTable, shape_table
from pipeline.state import Layout, find_resumable
from pipeline.tokenizing import check_windows

# Part of the fingerprint: raise it when a change of ours (to reading, decoding, tokenizing or the network) changes what
# rows hold.
RESULTS_VERSION = 1


@contextmanager
def launch(job: Job, date: str | None = None, workers: Accelerator | None = None) -> Iterator[Run]:
    """Gives the Run for a job and holds the lock of its date meanwhile.

    Args:
      job: its settings.
      date: another one than they say.
      workers: what workers elsewhere have; None: this machine runs the job. The run goes on there when the lock is
        given back here; what it finds replaced then, it does not replace.

    Raises:
      SettingsError: a setting, the checkpoint, the device or the input cannot work.
    """
    started = time.time()
    moment = datetime.datetime.fromtimestamp(started, datetime.UTC)
    date = date or date_of(job.output)
    job = on_date(job, date)
    run_id = f"{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    folder, config, tokenizer = _load_configs(job.model.model)
    window_tokens = job.model.window_tokens or config.max_tokens
    check_windows(job.model, config, len(tokenizer.start_ids) + len(tokenizer.end_ids))
    listing = list_units(job.reading)
    _check_output(job, listing)
    fields = field_types(job.reading, listing)
    device, dtype, local_devices = _choose_device(job.model, workers)
    shapes = shape_table(device, window_tokens, job.batching.max_tokens_per_batch, local_devices)
    if workers is None:
        _check_attention(job.model.attention, config, device, dtype, shapes)
    fingerprint = _fingerprint(job, checkpoint.fingerprint(folder), window_tokens, dtype, fields)
    schema = document_schema(
        job,
        dimensions=config.embedding_dimensions,
        fields=fields,
        metadata={
            "model": job.model.model,
            "fingerprint": fingerprint,
            "dtype": dtype,
            "run_id": run_id,
            "settings": json.dumps(asdict(job)),
        },
    )
    layout = Layout(job.output.output, date)
    control = Control(layout.control(run_id) if workers is None else None)
    launched = layout.launched(run_id)
    if workers is not None:  # what is there stays when the lock is given back
        launched = storage.join(layout.staged(fingerprint), "launched", run_id)
    with lock_date(layout, run_id, lost=lambda: control.stop(signal.SIGTERM)):
        storage.make_folder(layout.staged(fingerprint))
        if control.folder is not None:
            storage.make_folder(control.folder)
        base = None
        if job.output.retry_failures:
            base = own_base(layout)
        elif job.output.incremental:
            base = latest_base(layout)
        changes = compare(listing.units, base, layout, fingerprint)
        resumed: tuple[str, ...] = ()
        todo = changes.units
        if job.output.resume:
            resumable = find_resumable(layout, fingerprint, changes.units)
            resumed, todo = resumable.sidecars, resumable.units
        run = Run(
            job=job,
            run_id=run_id,
            date=date,
            started=started,
            checkpoint=checkpoints.pinned(job.model.model, folder),
            model_name=job.model.model,
            fingerprint=fingerprint,
            device=device,
            dtype=dtype,
            local_devices=local_devices,
            window_tokens=window_tokens,
            shapes=shapes,
            schema=schema,
            listing=storage.join(launched, "listing.parquet"),
            hidden=listing.hidden,
            todo=storage.join(launched, "todo.parquet"),
            manifest_version=storage.version(layout.manifest),
            resumed=resumed,
            control=control.folder,
            base=base.date if base is not None else None,
            unchanged=storage.join(launched, "unchanged.parquet"),
            deleted=changes.deleted,
        )
        write_table(storage.join(launched, "unchanged.parquet"), changes.unchanged)
        write_listing(changes.units, run.listing)
        write_listing(todo, run.todo)
        yield run


def _load_configs(model: str) -> tuple[Path, EncoderConfig, TokenizerConfig]:
    """The checkpoint's folder and what its files say, all of them checked."""
    try:
        folder = checkpoints.folder(model)
        config = EncoderConfig.from_checkpoint(folder)
        checkpoint.check(folder, config)
        tokenizer = TokenizerConfig.from_checkpoint(folder)
        if tokenizer.vocabulary_size > config.vocabulary_size:
            problem = f"the tokenizer has {tokenizer.vocabulary_size} tokens, the model's embedding only {config.vocabulary_size}"
            raise CheckpointError(folder, [problem])
    except CheckpointError as error:
        raise SettingsError(str(error)) from error
    return folder, config, tokenizer


def _choose_device(settings: ModelSettings, workers: Accelerator | None) -> tuple[str, str, int]:
    """Device, dtype and the number of local devices. After all other checks: it takes the seconds of JAX's import."""
    if workers is not None:
        dtype = workers.dtype if settings.dtype == "auto" else settings.dtype
        return workers.device, dtype, workers.local_devices
    from model import predictor

    try:
        device = predictor.resolve_device(settings.device)
        dtype = predictor.resolve_dtype(settings.dtype, device)
    except predictor.DeviceError as error:
        raise SettingsError(str(error)) from error
    return device, dtype, predictor.local_device_count(device)


def _check_attention(
    name: str, config: EncoderConfig, device: str, dtype: str, shapes: ShapeTable
) -> None:
    """An implementation that was asked for works here: "auto" falls back, and may wait for the workers; a name does
    not, and no document is to be read in vain."""
    from kernels.attention import select
    from model import predictor

    if name == select.AUTO:
        return
    calls = predictor.cases(config, dtype, shapes.shapes, shapes.local_devices)
    try:
        select.select(name, calls, predictor.local_devices(device)[0])
    except select.SelectionError as error:
        raise SettingsError(f"--{error}") from error


def _fingerprint(
    job: Job,
    checkpoint_fingerprint: str,
    window_tokens: int,
    dtype: str,
    fields: Sequence[pa.Field],
) -> str:
    """Of everything that decides what rows hold; batching, device and attention do not (design of the results:
    the same whatever computes them)."""
    reading = asdict(job.reading)
    for name in ("inputs", "manifest", "allow_empty", "split_bytes"):
        del reading[name]  # which documents, not what they become
    decisive = {
        "checkpoint": checkpoint_fingerprint,
        "task": job.model.task,
        "window": [window_tokens, job.model.window_overlap, job.model.max_windows],
        "dtype": dtype,
        "reading": reading,
        "fields": [[field.name, str(field.type)] for field in fields],
        "versions": [RESULTS_VERSION, SCHEMA_VERSION],
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _check_output(job: Job, listing: Listing) -> None:
    """Refuses an output folder that cannot be written, or that the next run would read as input."""
    local = storage.is_local(job.output.output)
    output = os.path.realpath(job.output.output) if local else job.output.output.rstrip("/")
    kinds = [f"{output}/{kind}" for kind in ("documents", "failures", "state", "runs", "_staging")]
    for pattern in job.reading.inputs:
        folder = absolute(pattern)
        folder = os.path.realpath(folder) if storage.is_local(folder) else folder
        if is_folder(folder) and any(f"{kind}/".startswith(f"{folder}/") for kind in kinds):
            raise SettingsError(
                f"--output {job.output.output}: lies inside the input {pattern}, whose next run would read it; "
                "choose a folder outside of it"
            )
    ours = tuple(f"{kind}/date=" for kind in kinds)
    inside = next((unit.uri for unit in listing.units if unit.uri.startswith(ours)), None)
    if inside is not None:
        raise SettingsError(
            f"--output {job.output.output}: the input holds {inside}, which an earlier run has written there; "
            "choose an output folder that no input matches"
        )
    if not local:
        return  # the lock is written next
    parents = [Path(output), *Path(output).parents]
    present = next(folder for folder in parents if folder.exists())
    for path in (present, *(Path(kind) for kind in kinds if os.path.exists(kind))):
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            raise SettingsError(
                f"--output {job.output.output}: expected a folder that can be written, but {path} is "
                + ("not writable" if path.is_dir() else "a file")
            )
