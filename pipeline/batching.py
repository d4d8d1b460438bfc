"""Batch by length: tokenized documents → Loads, whole documents with the device batches that compute them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import apache_beam as beam
import numpy as np
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from pipeline.packing import Planner
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

# More of them waste less on the last one, and let tokenizing overlap computing; but a killed worker's Load is lost.
BATCHES_PER_LOAD = 16
FIRST_BATCHES = 4
# A Load is closed when it is so full: packing fills as much of its batches. More would start one that is nearly empty (of
# short messages 0.98 of the padded tokens are real then, else 0.94).
FULL = 0.98


class BatchByLength(beam.DoFn):
    """Gathers the documents of a bundle into Loads."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def setup(self) -> None:
        table = self._run.shapes
        self._loads_of = functools.partial(
            Loads,
            Planner(table).plan,  # one for all bundles: it learns
            LoadSize(
                batch_tokens=table.max_tokens_per_batch,
                max_tokens=self._run.job.batching.max_tokens_per_load
                or BATCHES_PER_LOAD * table.max_tokens_per_batch,
            ),
        )

    def start_bundle(self) -> None:
        self._loads = self._loads_of()

    def process(self, chunk: TokenizedChunk) -> Iterator[Load]:
        yield from self._loads.add(chunk)
        if chunk.failures and self._run.job.output.fail_fast:  # it is told at once
            yield from self._loads.finish()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        for load in self._loads.finish():
            yield GlobalWindows.windowed_value(load)


class LoadSize:
    """How many tokens a Load may hold: few at first, `max_tokens` once much has passed.

    A killed worker's Load is lost, on the average half of it. At 5 % of what has passed, that is little of the work
    however early the kill comes.
    """

    def __init__(self, *, batch_tokens: int, max_tokens: int) -> None:
        self._least = min(FIRST_BATCHES * batch_tokens, max_tokens)
        self._most = max_tokens
        self._passed = 0

    @property
    def tokens(self) -> int:
        return min(self._most, max(self._least, self._passed // 20))

    def passed(self, tokens: int) -> None:
        self._passed += tokens


class Loads:
    """Makes Loads of a size (in tokens, special ones included) from chunks; a larger document is a Load of its own.

    Failures, completions and figures leave with the documents gathered when they came, or later: a work unit is never
    complete before its last document has left.
    """

    def __init__(
        self, planner: Callable[[np.ndarray], tuple[PlannedBatch, ...]], size: LoadSize
    ) -> None:
        self._planner = planner
        self._size = size
        self._special = SpecialTokens()
        self._clear()

    def _clear(self) -> None:
        self._documents: list[TokenizedDocument] = []
        self._tokens = 0
        self._failures: list[Failure] = []
        self._completions: list[Completion] = []
        self._figures = Figures()

    def add(self, chunk: TokenizedChunk) -> Iterator[Load]:
        """The Loads that a chunk fills."""
        self._special = chunk.special
        for document in chunk.documents:
            tokens = _tokens(document, chunk.special)
            most = self._size.tokens
            if tokens > most:
                self._size.passed(tokens)
                yield make_load([document], chunk.special, self._planner)
                continue
            if self._tokens + tokens > most:
                yield self._load()
            self._documents.append(document)
            self._tokens += tokens
            if self._tokens >= FULL * most:
                yield self._load()
        self._failures += chunk.failures
        self._completions += chunk.completions
        self._figures.add(chunk.figures)

    def finish(self) -> Iterator[Load]:
        """The rest, also where it is only failures, completions or figures."""
        if self._documents or self._failures or self._completions or self._figures != Figures():
            yield self._load()

    def _load(self) -> Load:
        self._size.passed(self._tokens)
        load = make_load(
            self._documents,
            self._special,
            self._planner,
            failures=self._failures,
            completions=self._completions,
            figures=self._figures,
        )
        self._clear()
        return load


def make_load(
    documents: Sequence[TokenizedDocument],
    special: SpecialTokens,
    planner: Callable[[np.ndarray], tuple[PlannedBatch, ...]],
    *,
    failures: Sequence[Failure] = (),
    completions: Sequence[Completion] = (),
    figures: Figures | None = None,
) -> Load:
    """Documents and the batches that compute each distinct text among them once."""
    figures = figures or Figures()
    with busy(figures, "batch"):
        first_of_text: dict[str, int] = {}
        first_window = np.zeros(len(documents), np.int32)
        parts = [np.zeros([0, 3], np.int32)]
        windows = 0
        for i, document in enumerate(documents):
            first_window[i] = first_of_text.setdefault(document.document.content_sha256, windows)
            if first_window[i] == windows:
                parts.append(np.insert(document.windows, 0, i, axis=1))
                windows += len(document.windows)
        window_table = np.concatenate(parts)
        batches = planner(window_table[:, 2] - window_table[:, 1] + len(special))
    return Load(
        documents=tuple(documents),
        window_table=window_table,
        first_window=first_window,
        batches=batches,
        special=special,
        failures=tuple(failures),
        completions=tuple(completions),
        figures=figures,
    )


def _tokens(document: TokenizedDocument, special: SpecialTokens) -> int:
    """What the model computes for a document."""
    return int(np.diff(document.windows).sum()) + len(document.windows) * len(special)
