"""Infer: a Load's plan of device batches → one encoding a document, through Beam's RunInference.

Three kinds of fault are told apart (each has a test):
* a *document* fault — the predictor refuses a token, or a result is not finite — is narrowed down
  until only the windows at fault are left; their documents become failures and all others are computed;
* *out of device memory* halves the rows of the batch, is remembered, and the run goes on;
* any other *device* fault is raised: the runner tries the Load again elsewhere, since a bad chip must never turn
  good documents into failures. A call that hangs cannot even be interrupted: the process ends (`watchdog.py`).
"""

from __future__ import annotations

import resource
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from apache_beam.ml.inference.base import ModelHandler

from pipeline import checkpoints
from pipeline.device_batches import arrays, half_rows, half_windows, segments, subset
from pipeline.packing import places
from pipeline.progress import Control, busy
from pipeline.records import Failure, Figures, Load, LoadResult, PlannedBatch
from pipeline.watchdog import watchdog

if TYPE_CHECKING:
    from model.predictor import Predictor

# Batches on the device at once: the next is dispatched before the previous one is fetched.
BATCHES_IN_FLIGHT = 2


class FlaxModelHandler(ModelHandler[Load, LoadResult, "Predictor"]):
    """Runs Loads through a published checkpoint: one Load in, one LoadResult out.

    Args:
      checkpoint: folder of the checkpoint, also in a bucket, or "package:NAME".
      task: what is computed, see `pipeline.config.TASKS`.
      device, dtype: decided ("cpu", "bfloat16"), not "auto": all workers must do the same.
      attention: name of an implementation, or "auto".
      shapes: every (B, T) that a planned batch may have.
      timeout_seconds: a call to the device that takes longer ends the process.
      control: where the stop flag is, and where progress is told.
    """

    def __init__(
        self,
        checkpoint: str,
        *,
        task: str,
        device: str,
        dtype: str,
        attention: str,
        shapes: Sequence[tuple[int, int]],
        timeout_seconds: float,
        control: Control,
    ) -> None:
        super().__init__()
        self._predictor_settings: dict[str, Any] = {
            "task": task, "device": device, "dtype": dtype, "attention": attention, "shapes": tuple(shapes),
        }  # fmt: skip
        self._checkpoint = checkpoint
        self._control = control
        self._limits = DeviceLimits(seconds=timeout_seconds)

    def load_model(self) -> Predictor:
        from model.predictor import Predictor

        folder = checkpoints.folder(self._checkpoint)
        with watchdog(self._limits.seconds, "loading the model"):
            return Predictor(folder, **self._predictor_settings)

    def run_inference(  # type: ignore[override]
        self, batch: Load, model: Predictor, inference_args: dict[str, Any] | None = None
    ) -> list[LoadResult]:
        with model.lock:  # the runner may call from several threads; the device is one queue
            result = infer(batch, model, self._limits, self._control)
        self._control.report(
            {name: n for name, n in result.figures.counts.items() if name != "windows_inferred"}
        )
        return [result]

    def should_skip_batching(self) -> bool:
        # Loads are batches already. (`with_no_batching()` would drop other overrides.)
        return True

    def get_num_bytes(self, batch: Load) -> int:  # type: ignore[override]
        return sum(document.token_ids.nbytes for document in batch.documents)

    def get_metrics_namespace(self) -> str:
        return "BeamML_Flax"


@dataclass
class DeviceLimits:
    """How long a call to the device may take, and what was learned about its memory: no batch of more padded tokens than
    this is tried again."""

    seconds: float = threading.TIMEOUT_MAX
    max_tokens: int | None = None

    def remember(self, max_tokens: int) -> None:
        self.max_tokens = min(max_tokens, self.max_tokens or max_tokens)

    def too_big(self, batch: PlannedBatch) -> bool:
        return self.max_tokens is not None and batch.B * batch.T > self.max_tokens


def infer(load: Load, predictor: Predictor, limits: DeviceLimits, control: Control) -> LoadResult:
    """Computes a Load.

    Returns its documents that were computed with their encodings, and a failure for each other one. If the run
    is told to stop between two batches, the result holds no documents and counts them as `not_started`.
    """
    figures = Figures()
    vectors = np.zeros([len(load.window_table), predictor.config.embedding_dimensions], np.float32)
    compiled_before = predictor.compile_seconds
    with busy(figures, "infer"):
        faults = _compute(load, predictor, limits, control, vectors, figures)
        if faults is None:
            figures.counts["not_started"] += len(load)
            return LoadResult(
                failures=load.failures,
                figures=figures.add(load.figures),
                encodings=np.zeros([0, vectors.shape[1]], np.float32),
            )
        encodings = _combine(load, vectors, normalize=predictor.config.normalize)
    compile_seconds = predictor.compile_seconds - compiled_before
    figures.seconds.update(compile=compile_seconds, infer=-compile_seconds)  # type: ignore[call-overload]

    good, failures = [], []
    for index, document in enumerate(load.documents):
        first = load.first_window[index]
        fault = next(
            (faults[w] for w in range(first, first + len(document.windows)) if w in faults), None
        )
        if fault is None:
            good.append(index)
        else:
            failures.append(_failure(load, index, *fault))
    figures.counts["tokens_inferred"] += int(_lengths(load).sum())
    figures.counts["inferred"] += len(load)
    figures.counts["failed"] += len(failures) + len(load.failures)
    figures.peaks["compiled_programs"] = predictor.compiled_programs
    # Linux counts ru_maxrss in KiB.
    figures.peaks["peak_host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures.facts |= {
        "device": predictor.device,
        "attention": predictor.attention,
        "attention_reasons": predictor.attention_reasons,
    }
    figures.lows["first_result_at"] = time.time()
    return LoadResult(
        documents=tuple(load.documents[i] for i in good),
        encodings=encodings[good],
        failures=load.failures + tuple(failures),
        completions=load.completions,
        figures=figures.add(load.figures),
    )


def _compute(
    load: Load,
    predictor: Predictor,
    limits: DeviceLimits,
    control: Control,
    vectors: np.ndarray,
    figures: Figures,
) -> dict[int, tuple[str, str]] | None:
    """Fills `vectors` [windows, D] with pooled, unnormalised vectors; returns {window: (reason, message)} of those at
    fault, or None if the run was told to stop."""
    from model.predictor import InvalidInput, OutOfDeviceMemory

    faults: dict[int, tuple[str, str]] = {}
    waiting = deque(load.batches)
    flying: deque[tuple[PlannedBatch, Any]] = deque()

    def split(batch: PlannedBatch, error: Exception) -> None:
        """What to do with a batch that did not fit the device's memory."""
        if flying:  # it may have been the other batch's share that was missing
            waiting.appendleft(batch)
        elif batch.B > predictor.local_devices:
            limits.remember(batch.B * batch.T // 2)
            waiting.extendleft(reversed(list(half_rows(batch))))
        else:
            message = f"{batch.B} × {batch.T} tokens do not fit the device's memory: {error}"
            faults.update(dict.fromkeys(batch.windows.tolist(), ("out_of_device_memory", message)))

    in_flight = BATCHES_IN_FLIGHT
    while waiting or flying:
        if control.stopping():
            return None
        while waiting and len(flying) < in_flight:
            batch = waiting.popleft()
            if limits.too_big(batch) and batch.B > predictor.local_devices:
                waiting.extendleft(reversed(list(half_rows(batch))))
                continue
            figures.shapes[f"{batch.B}x{batch.T}"] += 1
            figures.counts["tokens_padded"] += batch.B * batch.T
            try:
                with watchdog(limits.seconds, f"starting a batch of {batch.B} × {batch.T} tokens"):
                    handle = predictor.dispatch(*arrays(load, batch), segments=places(batch.T))
            except OutOfDeviceMemory as error:
                split(batch, error)
                in_flight = 1
            except InvalidInput as error:
                if len(batch.windows) == 1:
                    faults[int(batch.windows[0])] = ("invalid_input", str(error))
                else:
                    waiting.extendleft(reversed(half_windows(batch)))
            else:
                flying.append((batch, handle))
        if not flying:
            continue
        batch, handle = flying.popleft()
        try:
            with watchdog(limits.seconds, f"a batch of {batch.B} × {batch.T} tokens"):
                pooled = predictor.fetch(handle)
        except OutOfDeviceMemory as error:
            split(batch, error)
            in_flight = 1
            continue
        # Told as it is done: what a kill makes vain was work all the same.
        figures.counts["windows_inferred"] += len(batch.windows)
        control.report({"windows_inferred": len(batch.windows)})
        found = pooled[batch.rows, segments(batch) - 1]
        vectors[batch.windows] = found
        finite = np.isfinite(found).all(axis=-1)
        if finite.all():
            continue
        # Rows never influence each other, so a window alone in its row is at fault itself; one that
        # shares its row is computed again alone.
        in_row = np.bincount(batch.rows, minlength=batch.B)[batch.rows]
        for i in np.flatnonzero(~finite):
            if in_row[i] == 1:
                message = "the model's result for this document is not finite (NaN or infinity)"
                faults[int(batch.windows[i])] = ("non_finite_output", message)
            else:
                waiting.append(subset(batch, np.array([i])))
    return faults


def _lengths(load: Load) -> np.ndarray:
    """int32[distinct windows]: tokens of each, special tokens included."""
    lengths: np.ndarray = np.diff(load.window_table[:, 1:])[:, 0] + len(load.special)
    return lengths


def _combine(load: Load, vectors: np.ndarray, *, normalize: bool) -> np.ndarray:
    """The token-weighted mean (special tokens counted) of each document's windows: float32[documents, D]."""
    weights = _lengths(load).astype(np.float32)
    # Windows of one text stand together in the table, so texts are its runs.
    starts = np.unique(load.first_window)
    if len(starts) == 0:
        return vectors
    sums = np.add.reduceat(vectors * weights[:, None], starts, axis=0)
    means = sums / np.add.reduceat(weights, starts)[:, None]
    if normalize:
        means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    encodings: np.ndarray = means[np.searchsorted(starts, load.first_window)]
    return encodings


def _failure(load: Load, index: int, reason: str, message: str) -> Failure:
    document = load.documents[index].document
    return Failure(
        unit_id=document.unit_id,
        position=document.position,
        uri=document.uri,
        record=document.record,
        step="infer",
        reason=reason,
        message=message,
        content_sha256=document.content_sha256,
    )
