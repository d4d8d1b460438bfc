"""Tokenizing: documents become windows of tokens, or failures that say why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.testing.util import assert_that
from hypothesis import given
from hypothesis import strategies as st

from model.tokenizer import Tokens
from pipeline.config import ModelSettings, SettingsError
from pipeline.progress import Control
from pipeline.records import Chunk, Completion, Document, Failure, Figures, TokenizedChunk
from pipeline.tokenizing import Tokenize, _failure, check_windows, content_tokens, tokenize, windows


class WordTokenizer:
    """One token a word, its length; "!" is refused."""

    start_ids, end_ids, pad_id, vocabulary_size = (101,), (102,), 0, 200

    def __init__(self):
        self.calls = []

    def encode(self, texts, *, offsets=False, check=lambda: None):
        check()
        self.calls.append(len(texts))
        if any("!" in text for text in texts):
            raise ValueError("found '!'")
        return [self._one(text, offsets) for text in texts]

    def _one(self, text, offsets):
        words = text.split()
        starts = np.cumsum([0, *(len(word) + 1 for word in words)])[: len(words)]
        spans = np.array([[s, s + len(w)] for s, w in zip(starts, words, strict=True)], np.int32)
        ids = np.array([len(word) for word in words], np.int32)
        return Tokens(ids, spans.reshape(-1, 2) if offsets else None)


def document(text: str, position: int = 0) -> Document:
    return Document(
        unit_id="u", position=position, uri="file.txt", record=str(position), text=text,
        media_type="text/plain", content_sha256=text, size_bytes=len(text),
    )  # fmt: skip


def tokenized(*texts: str, window_tokens=6, window_overlap=0, max_windows=None, offsets=False):
    chunk = Chunk(documents=tuple(document(text, i) for i, text in enumerate(texts)))
    return tokenize(
        chunk, WordTokenizer(), window_tokens=window_tokens, window_overlap=window_overlap,
        max_windows=max_windows, offsets=offsets,
    )  # fmt: skip


def test_a_document_carries_its_tokens_and_not_its_text():
    (found,) = tokenized("a bb ccc").documents
    assert found.token_ids.tolist() == [1, 2, 3] and found.token_ids.dtype == np.int32
    assert found.windows.tolist() == [[0, 3]] and found.windows.dtype == np.int32
    assert (found.characters, found.truncated, found.offsets) == (8, False, None)
    assert found.document == replace(document("a bb ccc"), text="")


def test_offsets_are_kept_where_asked_for():
    (found,) = tokenized("a bb ccc d e", offsets=True, max_windows=1).documents
    assert found.offsets.tolist() == [[0, 1], [2, 4], [5, 8], [9, 10]]


def test_a_window_holds_what_the_special_tokens_leave_of_it_and_the_last_one_the_rest():
    (found,) = tokenized("a " * 10, window_tokens=6).documents
    assert found.windows.tolist() == [[0, 4], [4, 8], [8, 10]]


def test_windows_that_overlap_share_that_many_tokens():
    (found,) = tokenized("a " * 10, window_tokens=6, window_overlap=1).documents
    assert found.windows.tolist() == [[0, 4], [3, 7], [6, 10]]


def test_a_document_with_too_many_windows_is_cut_and_says_so():
    cut, whole = tokenized("a " * 10, "a " * 8, max_windows=2).documents
    assert cut.truncated and cut.windows.tolist() == [[0, 4], [4, 8]] and cut.tokens == 8
    assert not whole.truncated and whole.tokens == 8


@given(
    tokens=st.integers(1, 300), size=st.integers(1, 40), overlap=st.integers(0, 39),
    most=st.none() | st.integers(1, 9),
)  # fmt: skip
def test_windows_cover_every_token_once_but_for_the_overlap(tokens, size, overlap, most):
    overlap = min(overlap, size - 1)
    spans, truncated = windows(tokens, size, overlap, most)
    starts, stops = spans.T
    assert starts[0] == 0 and (stops > starts).all() and (stops - starts <= size).all()
    assert (stops[:-1] - starts[1:] == overlap).all() and (stops[:-1] - starts[:-1] == size).all()
    assert len(starts) == 1 or stops[-1] > stops[-2]
    assert (stops[-1] < tokens) == truncated
    assert not truncated or len(starts) == most


def test_a_text_without_tokens_is_a_failure():
    found = tokenized("a", "  ")
    assert [d.document.position for d in found.documents] == [0]
    (failure,) = found.failures
    assert (failure.step, failure.reason, failure.record) == ("tokenize", "no_tokens", "1")


def test_a_text_that_the_tokenizer_refuses_fails_alone():
    found = tokenized("a", "b!", "c", "!")
    assert [d.document.position for d in found.documents] == [0, 2]
    assert [(f.position, f.reason, f.message) for f in found.failures] == [
        (1, "invalid_text", "found '!'"),
        (3, "invalid_text", "found '!'"),
    ]


def test_failures_completions_and_figures_travel_on_with_our_own():
    failure = Failure(
        unit_id="u", position=9, uri="file.txt", record="9", step="read", reason="r", message="m"
    )
    completion = Completion(unit_id="u", records=3)
    figures = Figures()
    figures.counts["read"] = 3
    chunk = Chunk(
        documents=(document("a b c d e"), document("f", 1)),
        failures=(failure,), completions=(completion,), figures=figures,
    )  # fmt: skip
    found = tokenize(
        chunk, WordTokenizer(), window_tokens=5, window_overlap=1, max_windows=None, offsets=False
    )
    assert found.failures == (failure,) and found.completions == (completion,)
    # Windows of 3, 3 and 1 tokens, each with two special ones.
    assert dict(found.figures.counts) == {"read": 3, "windows": 3, "tokens": 3 + 3 + 1 + 3 * 2}
    assert found.figures.seconds["tokenize"] > 0
    assert dict(figures.counts) == {"read": 3}
    assert (found.special.start_ids, found.special.end_ids, found.special.pad_id) == (
        (101,),
        (102,),
        0,
    )


def test_an_empty_chunk_passes():
    assert tokenized().documents == ()


@pytest.mark.parametrize(
    ("window_tokens", "overlap", "message"),
    [
        (2, 0, "--window-tokens: expected more than the 2 special tokens, got 2"),
        (10, 8, "--window-overlap: expected less than the 8 tokens"),
    ],
)
def test_windows_that_could_not_move_on_are_refused(window_tokens, overlap, message):
    with pytest.raises(SettingsError, match=message):
        content_tokens(window_tokens, overlap, 2)
    assert content_tokens(10, 7, 2) == 8


def test_launch_refuses_windows_longer_than_the_models_positions():
    config = SimpleNamespace(positions=512, max_tokens=256)
    check_windows(ModelSettings(model="m", window_tokens=512), config, 2)
    check_windows(ModelSettings(model="m"), config, 2)
    with pytest.raises(
        SettingsError, match="expected at most 512, the positions that m has, got 513"
    ):
        check_windows(ModelSettings(model="m", window_tokens=513), config, 2)
    with pytest.raises(SettingsError, match="--window-overlap"):
        check_windows(ModelSettings(model="m", window_overlap=254), config, 2)


def test_the_beam_step_uses_the_checkpoints_tokenizer_and_the_runs_windows(minilm):
    run = SimpleNamespace(
        checkpoint=str(minilm),
        control=None,
        window_tokens=4,
        job=SimpleNamespace(model=ModelSettings(model="m", window_overlap=1, max_windows=2)),
    )

    def check(chunks):
        (chunk,) = chunks
        (found,) = chunk.documents
        assert found.token_ids.tolist() == [7592, 2088, 7592]  # hello world hello
        assert found.windows.tolist() == [[0, 2], [1, 3]] and found.truncated

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        chunks = pipeline | beam.Create([Chunk(documents=(document("Hello world hello world"),))])
        assert_that(chunks | beam.ParDo(Tokenize(run)), check)


def step(tokenizer, control=None) -> Tokenize:
    """The Beam step at the beginning of a bundle."""
    settings = SimpleNamespace(model=ModelSettings(model="m"))
    found = Tokenize(SimpleNamespace(checkpoint="", control=control, window_tokens=9, job=settings))
    found._tokenizer = tokenizer
    found.start_bundle()
    return found


def bundle(tokenizer, chunks) -> list[TokenizedChunk]:
    one = step(tokenizer)
    found = [each for chunk in chunks for each in one.process(chunk)]
    return found + [each.value for each in one.finish_bundle()]


def test_small_files_share_a_call_and_nothing_of_them_is_lost():
    tokenizer = WordTokenizer()
    files = [
        Chunk(
            documents=(document(f"file {n}", n),),
            completions=(Completion(unit_id=f"u{n}", records=1),),
            figures=Figures(counts=Counter(read=1)),
        )
        for n in range(600)
    ]
    found = bundle(tokenizer, files)
    assert tokenizer.calls == [256, 256, 88]
    assert [d.document.position for each in found for d in each.documents] == list(range(600))
    assert [c.unit_id for each in found for c in each.completions] == [f"u{n}" for n in range(600)]
    assert sum(each.figures.counts["read"] for each in found) == 600
    assert [chunk.figures.counts["read"] for chunk in files] == [1] * 600


def test_large_chunks_wait_for_no_other_and_a_bundle_leaves_nothing_behind():
    tokenizer = WordTokenizer()
    large = Chunk(documents=(replace(document("a"), size_bytes=2**20),))
    failures = Chunk(failures=tuple(_failure(document("a", n), "r", "m") for n in range(256)))
    one = step(tokenizer)
    assert len(list(one.process(large))) == len(list(one.process(failures))) == 1
    assert list(one.process(Chunk(documents=(document("b"),)))) == []
    assert len(list(one.finish_bundle())) == 1
    assert list(one.finish_bundle()) == []
    empty = [Chunk(completions=(Completion(unit_id=f"u{n}", records=0),)) for n in range(256)]
    assert len(bundle(tokenizer, empty)) == 1


def test_a_stop_ends_tokenizing_and_completes_nothing(tmp_path):
    tokenizer = WordTokenizer()
    one = step(tokenizer, str(tmp_path))
    Control(str(tmp_path)).stop(2)
    assert list(one.process(Chunk(documents=(replace(document("a"), size_bytes=2**20),)))) == []
    assert list(one.finish_bundle()) == []
    assert tokenizer.calls == []
