"""Batch by length: tokenized documents → Loads, whole documents with the plan of device batches that computes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import apache_beam as beam
import numpy as np
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.progress import busy
from pipeline.records import (
    Completion,
    Failure,
    Figures,
    Load,
    PlannedBatch,
    Run,
    SpecialTokens,
    TokenizedChunk,
    TokenizedDocument,
)

# Padded tokens of a device batch.
BATCH_TOKENS = {"cpu": 1024, "gpu": 32768, "tpu": 32768}
BATCHES_PER_LOAD = 16
STEP = 16


@dataclass(frozen=True, kw_only=True)
class ShapeTable:
    """The shapes (B, T) that device batches may have."""

    shapes: tuple[tuple[int, int], ...]

    @property
    def max_tokens_per_batch(self) -> int:
        return max(B * T for B, T in self.shapes)


def shape_table(
    device: str, window_tokens: int, max_tokens_per_batch: int | None, local_devices: int
) -> ShapeTable:
    """The shapes for a device: T steps up to a window, B is a power of two times `local_devices`."""
    budget = max_tokens_per_batch or BATCH_TOKENS[device]
    shapes = []
    for T in [*range(STEP, window_tokens, STEP), window_tokens]:
        B = local_devices
        while B * 2 * T <= budget:
            B *= 2
        shapes.append((B, T))
    return ShapeTable(shapes=tuple(shapes))


def plan(lengths: np.ndarray, table: ShapeTable) -> tuple[PlannedBatch, ...]:
    """Puts each window (int32[n] lengths, special tokens included) into one batch, longest first."""
    order = np.argsort(-lengths, kind="stable").astype(np.int32)
    shapes = sorted(table.shapes, key=lambda shape: shape[1])
    widths = np.array([T for _, T in shapes])
    batches = []
    start = 0
    while start < len(order):
        B, T = shapes[int(np.searchsorted(widths, lengths[order[start]]))]
        windows = order[start : start + B]
        rows = np.arange(len(windows), dtype=np.int32)
        batches.append(
            PlannedBatch(B=B, T=T, windows=windows, rows=rows, columns=np.zeros_like(rows))
        )
        start += B
    return tuple(batches)


class BatchByLength(beam.DoFn):
    """Gathers the documents of a bundle into Loads.

    A Load is closed before the document that would take it over `max_tokens_per_load`; a document larger than that is a Load
    of its own. Failures, completions and figures travel with the next Load, so a work unit is never
    reported complete before all its documents have passed.
    """

    def __init__(self, run: Run) -> None:
        settings = run.job.batching
        self._table = shape_table(
            run.device, run.window_tokens, settings.max_tokens_per_batch, run.local_devices
        )
        self._max_tokens = (
            settings.max_tokens_per_load or BATCHES_PER_LOAD * self._table.max_tokens_per_batch
        )

    def start_bundle(self) -> None:
        self._special = SpecialTokens()
        self._clear()

    def _clear(self) -> None:
        self._documents: list[TokenizedDocument] = []
        self._tokens = 0
        self._failures: list[Failure] = []
        self._completions: list[Completion] = []
        self._figures = Figures()

    def process(self, chunk: TokenizedChunk) -> Iterator[Load]:
        self._special = chunk.special
        for document in chunk.documents:
            tokens = document.tokens + len(document.windows) * len(chunk.special)
            if self._documents and self._tokens + tokens > self._max_tokens:
                yield self._load()
            self._documents.append(document)
            self._tokens += tokens
        self._failures += chunk.failures
        self._completions += chunk.completions
        self._figures.add(chunk.figures)

    def finish_bundle(self) -> Iterator[WindowedValue]:
        if self._documents or self._failures or self._completions:
            yield GlobalWindows.windowed_value(self._load())

    def _load(self) -> Load:
        load = make_load(
            tuple(self._documents),
            self._special,
            self._table,
            failures=tuple(self._failures),
            completions=tuple(self._completions),
            figures=self._figures,
        )
        self._clear()
        return load


def make_load(
    documents: tuple[TokenizedDocument, ...],
    special: SpecialTokens,
    table: ShapeTable,
    *,
    failures: tuple[Failure, ...],
    completions: tuple[Completion, ...],
    figures: Figures,
) -> Load:
    """Documents and the plan that computes each distinct text among them once."""
    with busy(figures, "batch"):
        seen: dict[str, int] = {}
        first_window = np.zeros(len(documents), np.int32)
        parts = [np.zeros([0, 3], np.int32)]
        rows = 0
        for i, document in enumerate(documents):
            first = seen.setdefault(document.document.content_sha256, rows)
            first_window[i] = first
            if first == rows:
                part = np.empty([len(document.windows), 3], np.int32)
                part[:, 0] = i
                part[:, 1:] = document.windows
                parts.append(part)
                rows += len(part)
        window_table = np.concatenate(parts)
        batches = plan(window_table[:, 2] - window_table[:, 1] + len(special), table)
    return Load(
        documents=documents,
        window_table=window_table,
        first_window=first_window,
        batches=batches,
        special=special,
        failures=failures,
        completions=completions,
        figures=figures,
    )
