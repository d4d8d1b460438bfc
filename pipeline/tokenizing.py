"""Tokenize: text → token ids and the windows in which the model takes them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import apache_beam as beam
import numpy as np
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue

from pipeline import checkpoints
from pipeline.config import ModelSettings, SettingsError
from pipeline.progress import Control, Stopped, busy
from pipeline.records import (
    MAX_CHUNK_BYTES,
    MAX_CHUNK_RECORDS,
    Chunk,
    Document,
    Failure,
    Figures,
    Run,
    SpecialTokens,
    TokenizedChunk,
    TokenizedDocument,
)

if TYPE_CHECKING:
    from model.config import EncoderConfig
    from model.tokenizer import Tokenizer, Tokens


class Tokenize(beam.DoFn):
    """Chunks of documents → the same, tokenized.

    Small files give small chunks, and a call of the tokenizer costs as much as ten such files: chunks of a bundle are
    gathered up to the size of a full one. When the run is asked to stop, what is being tokenized is left out.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._control = Control(run.control)

    def setup(self) -> None:
        self._tokenizer = _shared_tokenizer(self._run.checkpoint)

    def start_bundle(self) -> None:
        self._waiting: list[Chunk] = []
        self._records = self._bytes = 0

    def process(self, chunk: Chunk) -> Iterator[TokenizedChunk]:
        self._waiting.append(chunk)
        self._records += len(chunk.documents) + len(chunk.failures) or 1  # an empty file's too
        self._bytes += sum(document.size_bytes for document in chunk.documents)
        if self._records >= MAX_CHUNK_RECORDS or self._bytes >= MAX_CHUNK_BYTES:
            yield from self._tokenized()

    def finish_bundle(self) -> Iterator[WindowedValue]:
        for chunk in self._tokenized():
            yield GlobalWindows.windowed_value(chunk)

    def _tokenized(self) -> Iterator[TokenizedChunk]:
        waiting = self._waiting
        self.start_bundle()
        if not waiting:
            return
        settings = self._run.job.model
        with suppress(Stopped):
            yield tokenize(
                gathered(waiting),
                self._tokenizer,
                window_tokens=self._run.window_tokens,
                window_overlap=settings.window_overlap,
                max_windows=settings.max_windows,
                offsets=False,
                check=self._control.raise_if_stopping,
            )


def gathered(chunks: Sequence[Chunk]) -> Chunk:
    """All that several chunks carry, in one."""
    return Chunk(
        documents=tuple(chain.from_iterable(chunk.documents for chunk in chunks)),
        failures=tuple(chain.from_iterable(chunk.failures for chunk in chunks)),
        completions=tuple(chain.from_iterable(chunk.completions for chunk in chunks)),
        figures=Figures.total(chunk.figures for chunk in chunks),
    )


@functools.cache
def _tokenizer_of(checkpoint: str) -> Tokenizer:
    from model.tokenizer import load_tokenizer

    return load_tokenizer(checkpoints.folder(checkpoint))


_loading = threading.Lock()


def _shared_tokenizer(checkpoint: str) -> Tokenizer:
    """One tokenizer for all threads of a process: it takes seconds to load and a tenth of a gigabyte."""
    with _loading:  # the cache alone would let two threads load it at once
        return _tokenizer_of(checkpoint)


def check_windows(settings: ModelSettings, config: EncoderConfig, special_tokens: int) -> None:
    """Refuses windows that the model cannot take, at launch.

    Raises:
      SettingsError: a window is longer than the model's positions, or its overlap leaves no room to move on.
    """
    size = settings.window_tokens or config.max_tokens
    if size > config.positions:
        raise SettingsError(
            f"--window-tokens: expected at most {config.positions}, the positions that {settings.model} has, got {size}"
        )
    content_tokens(size, settings.window_overlap, special_tokens)


def content_tokens(window_tokens: int, window_overlap: int, special_tokens: int) -> int:
    """Tokens of a document that a window holds beside the special tokens.

    Raises:
      SettingsError: there is no room for any, or neighbouring windows would share all of them.
    """
    size = window_tokens - special_tokens
    if size < 1:
        raise SettingsError(
            f"--window-tokens: expected more than the {special_tokens} special tokens, got {window_tokens}"
        )
    if window_overlap >= size:
        raise SettingsError(
            f"--window-overlap: expected less than the {size} tokens of a document that a window of {window_tokens} holds, "
            f"got {window_overlap}"
        )
    return size


def tokenize(
    chunk: Chunk,
    tokenizer: Tokenizer,
    *,
    window_tokens: int,
    window_overlap: int,
    max_windows: int | None,
    offsets: bool,
    check: Callable[[], None] = lambda: None,
) -> TokenizedChunk:
    """Tokenizes a chunk's documents; one that has no tokens, or no valid text, becomes a failure.

    Args:
      window_tokens: size of a window, special tokens included.
      window_overlap: tokens that neighbouring windows share.
      max_windows: how many windows of a document are kept; what lies behind them is cut off, also from its `token_ids`.
      offsets: whether to keep the tokens' places in the text.
      check: called every so often; what it raises gives the chunk up.
    """
    special = SpecialTokens(
        start_ids=tokenizer.start_ids, end_ids=tokenizer.end_ids, pad_id=tokenizer.pad_id
    )
    size = content_tokens(window_tokens, window_overlap, len(special))
    figures = Figures()
    documents: list[TokenizedDocument] = []
    failures: list[Failure] = []
    with busy(figures, "tokenize"):
        texts = [document.text for document in chunk.documents]
        encoded = _encode(texts, tokenizer, offsets, check)
        for document, tokens in zip(chunk.documents, encoded, strict=True):
            if isinstance(tokens, ValueError):
                failures.append(_failure(document, "invalid_text", str(tokens)))
            elif len(tokens.ids) == 0:
                message = "the text holds nothing that the tokenizer makes a token of"
                failures.append(_failure(document, "no_tokens", message))
            else:
                documents.append(_tokenized(document, tokens, size, window_overlap, max_windows))
        windows = sum(len(document.windows) for document in documents)
        figures.counts["windows"] += windows
        figures.counts["tokens"] += windows * len(special) + sum(
            int(np.diff(document.windows).sum()) for document in documents
        )
    return TokenizedChunk(
        documents=tuple(documents),
        special=special,
        failures=chunk.failures + tuple(failures),
        completions=chunk.completions,
        figures=figures.add(chunk.figures),
    )


def _encode(
    texts: Sequence[str], tokenizer: Tokenizer, offsets: bool, check: Callable[[], None]
) -> Sequence[Tokens | ValueError]:
    """The tokens of each text, or why it has none."""
    try:
        return tokenizer.encode(texts, offsets=offsets, check=check)
    except ValueError as error:
        if len(texts) == 1:
            return [error]
    return [_encode([text], tokenizer, offsets, check)[0] for text in texts]


def _tokenized(
    document: Document, tokens: Tokens, size: int, overlap: int, max_windows: int | None
) -> TokenizedDocument:
    spans, truncated = windows(len(tokens.ids), size, overlap, max_windows)
    token_ids, offsets = tokens
    if truncated:  # copied, so that what was cut off is freed
        token_ids = token_ids[: spans[-1, 1]].copy()
        offsets = None if offsets is None else offsets[: spans[-1, 1]].copy()
    return TokenizedDocument(
        document=replace(document, text=""),
        characters=len(document.text),
        token_ids=token_ids,
        windows=spans,
        truncated=truncated,
        offsets=offsets,
    )


def windows(
    tokens: int, size: int, overlap: int, max_windows: int | None
) -> tuple[np.ndarray, bool]:
    """int32[windows, 2], start and stop of each window over `tokens` ≥ 1, and whether `max_windows` cut some off.

    Windows hold `size` tokens and share `overlap` with the one before; the last holds the rest.
    """
    count = 1 + max(0, -(-(tokens - size) // (size - overlap)))
    kept = count if max_windows is None else min(count, max_windows)
    start = np.arange(kept, dtype=np.int32) * (size - overlap)
    return np.stack([start, np.minimum(start + size, tokens)], axis=1), kept < count


def _failure(document: Document, reason: str, message: str) -> Failure:
    return Failure(
        unit_id=document.unit_id,
        position=document.position,
        uri=document.uri,
        record=document.record,
        step="tokenize",
        reason=reason,
        message=message,
        content_sha256=document.content_sha256,
    )
