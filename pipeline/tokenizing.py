"""Tokenize: text → token ids and the windows in which the model takes them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import apache_beam as beam
import numpy as np

from pipeline.config import ModelSettings, SettingsError
from pipeline.progress import busy
from pipeline.records import (
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
    """Chunks of documents → the same, tokenized."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def setup(self) -> None:
        self._tokenizer = _shared_tokenizer(self._run.checkpoint)

    def process(self, chunk: Chunk) -> Iterator[TokenizedChunk]:
        settings = self._run.job.model
        yield tokenize(
            chunk,
            self._tokenizer,
            window_tokens=self._run.window_tokens,
            window_overlap=settings.window_overlap,
            max_windows=settings.max_windows,
            offsets=False,
        )


@functools.cache
def _tokenizer_of(checkpoint: str) -> Tokenizer:
    from model.tokenizer import load_tokenizer

    return load_tokenizer(Path(checkpoint))


_loading = threading.Lock()


def _shared_tokenizer(checkpoint: str) -> Tokenizer:
    """One tokenizer for all threads of a process: it takes seconds to load and a tenth of a gigabyte."""
    with _loading:  # the cache alone would let two threads load it at once
        return _tokenizer_of(checkpoint)


def check_windows(settings: ModelSettings, config: EncoderConfig, special_tokens: int = 2) -> None:
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
) -> TokenizedChunk:
    """Tokenizes a chunk's documents; one that has no tokens, or no valid text, becomes a failure.

    Args:
      window_tokens: size of a window, special tokens included.
      window_overlap: tokens that neighbouring windows share.
      max_windows: how many windows of a document are kept; what lies behind them is cut off, also from its `token_ids`.
      offsets: whether to keep the tokens' places in the text.
    """
    special = SpecialTokens(
        start_ids=tokenizer.start_ids, end_ids=tokenizer.end_ids, pad_id=tokenizer.pad_id
    )
    size = content_tokens(window_tokens, window_overlap, len(special))
    figures = Figures()
    documents: list[TokenizedDocument] = []
    failures: list[Failure] = []
    with busy(figures, "tokenize"):
        encoded = _encode([document.text for document in chunk.documents], tokenizer, offsets)
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
    texts: Sequence[str], tokenizer: Tokenizer, offsets: bool
) -> Sequence[Tokens | ValueError]:
    """The tokens of each text, or why it has none."""
    try:
        return tokenizer.encode(texts, offsets=offsets)
    except ValueError as error:
        if len(texts) == 1:
            return [error]
    return [_encode([text], tokenizer, offsets)[0] for text in texts]


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
    )
