"""Inference against a predictor whose faults are chosen: what is computed, what fails, and what is raised."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from model.predictor import InvalidInput, OutOfDeviceMemory
from pipeline.inferring import DeviceLimits, infer
from pipeline.progress import Control
from pipeline.records import (
    Completion,
    Document,
    Failure,
    Load,
    PlannedBatch,
    SpecialTokens,
    TokenizedDocument,
)

REFUSED, NOT_FINITE, SPREADS = 900, 901, 902  # token ids with which a document is at fault
SPECIAL = SpecialTokens(start_ids=(1,), end_ids=(2,), pad_id=0)


class FakePredictor:
    """Pools [sum of ids, tokens] of each segment; `device_tokens` is its memory, `fault` a device error."""

    config = SimpleNamespace(embedding_dimensions=2, normalize=False)
    compile_seconds = 0.0
    compiled_programs = 1
    local_devices = 1
    device = "cpu"
    attention = "fake"
    attention_reasons = ()

    def __init__(self, *, device_tokens=10**9, fault=None, fails_at="fetch"):
        self.device_tokens, self.fault, self.fails_at = device_tokens, fault, fails_at
        self.calls: list[str] = []

    def _check(self, moment, shape):
        if self.fails_at == moment:
            if self.fault is not None:
                raise self.fault
            if shape[0] * shape[1] > self.device_tokens:
                raise OutOfDeviceMemory("RESOURCE_EXHAUSTED: allocating")

    def dispatch(self, token_ids, segment_ids, positions, segments=1):
        self.calls.append(f"dispatch {len(token_ids)}")
        self._check("dispatch", token_ids.shape)
        if (token_ids == REFUSED).any():
            raise InvalidInput("token id 900 is outside the vocabulary")
        return token_ids, segment_ids, positions, segments

    def fetch(self, handle):
        token_ids, segment_ids, _positions, segments = handle
        self.calls.append(f"fetch {len(token_ids)}")
        self._check("fetch", token_ids.shape)
        pooled = np.zeros([len(token_ids), segments, 2], np.float32)
        for s in range(segments):
            mine = segment_ids == s + 1
            pooled[:, s, 0] = (token_ids * mine).sum(1)
            pooled[:, s, 1] = mine.sum(1)
            pooled[:, s][((token_ids == NOT_FINITE) & mine).any(1)] = np.nan
        pooled[(token_ids == SPREADS).any(1)] = np.inf
        return pooled


def document(number, tokens, windows=None):
    ids = np.array(tokens, np.int32)
    return TokenizedDocument(
        document=Document(
            unit_id="u",
            position=number,
            uri="/in/a.jsonl",
            record=str(number),
            text="",
            media_type="application/jsonl",
            content_sha256=f"{number}",
            size_bytes=1,
        ),
        characters=1,
        token_ids=ids,
        windows=np.array(windows or [[0, len(ids)]], np.int32),
        truncated=False,
    )


def load(documents, batches, first_window=None, **more):
    table, first = [], []
    for index, each in enumerate(documents):
        if first_window is not None and first_window[index] < len(table):
            first.append(first_window[index])
            continue
        first.append(len(table))
        table += [[index, start, stop] for start, stop in each.windows.tolist()]
    return Load(
        documents=tuple(documents),
        window_table=np.array(table, np.int32).reshape(-1, 3),
        first_window=np.array(first, np.int32),
        batches=tuple(batches),
        special=SPECIAL,
        **more,
    )


def batch(B, T, windows, rows=None, columns=None):
    rows = range(len(windows)) if rows is None else rows
    columns = [0] * len(windows) if columns is None else columns
    return PlannedBatch(
        B=B,
        T=T,
        windows=np.array(windows, np.int32),
        rows=np.array(rows, np.int32),
        columns=np.array(columns, np.int32),
    )


def compute(a_load, predictor=None, limits=None, control=None):
    return infer(
        a_load, predictor or FakePredictor(), limits or DeviceLimits(), control or Control(None)
    )


def test_each_document_gets_the_encoding_of_its_own_tokens_whatever_the_batch_order():
    documents = [document(0, [10]), document(1, [20, 21]), document(2, [30])]
    result = compute(load(documents, [batch(2, 4, [1, 2]), batch(1, 3, [0])]))
    assert [d.document.record for d in result.documents] == ["0", "1", "2"]
    assert result.encodings.tolist() == [[13, 3], [44, 4], [33, 3]]


def test_windows_that_share_a_row_are_its_segments_by_column():
    documents = [document(0, [10]), document(1, [20])]
    result = compute(load(documents, [batch(1, 8, [0, 1], rows=[0, 0], columns=[3, 0])]))
    assert result.encodings.tolist() == [[13, 3], [23, 3]]


def test_a_long_document_is_the_token_weighted_mean_of_its_windows():
    long = document(0, [10, 11, 12], windows=[[0, 2], [2, 3]])
    result = compute(load([long], [batch(2, 4, [0, 1])]))
    first, second = np.array([24, 4]), np.array([15, 3])
    np.testing.assert_allclose(result.encodings[0], (4 * first + 3 * second) / 7)


def test_equal_texts_are_computed_once_and_both_written():
    documents = [document(0, [10]), document(1, [20]), document(2, [10])]
    result = compute(load(documents, [batch(2, 3, [0, 1])], first_window=[0, 1, 0]))
    assert result.encodings.tolist() == [[13, 3], [23, 3], [13, 3]]
    assert result.figures.counts["windows_inferred"] == 2


@pytest.mark.parametrize(
    ("bad", "reason"), [(REFUSED, "invalid_input"), (NOT_FINITE, "non_finite_output")]
)
def test_only_the_document_at_fault_fails(bad, reason):
    documents = [document(i, [bad if i == 5 else 10 + i]) for i in range(8)]
    result = compute(load(documents, [batch(8, 4, range(8))]))
    assert [d.document.position for d in result.documents] == [0, 1, 2, 3, 4, 6, 7]
    (failure,) = result.failures
    assert (failure.position, failure.step, failure.reason) == (5, "infer", reason)
    assert np.isfinite(result.encodings).all()


def test_a_fault_that_spreads_over_its_row_fails_only_the_document_that_has_it():
    documents = [document(0, [10]), document(1, [SPREADS]), document(2, [12])]
    packed = batch(1, 16, [0, 1, 2], rows=[0, 0, 0], columns=[0, 3, 6])
    result = compute(load(documents, [packed]))
    assert [d.document.position for d in result.documents] == [0, 2]
    assert [f.position for f in result.failures] == [1]


def test_a_fault_in_one_window_fails_its_document_once():
    long = document(0, [NOT_FINITE, 11, NOT_FINITE], windows=[[0, 1], [1, 2], [2, 3]])
    result = compute(load([long, document(1, [10])], [batch(4, 3, range(4))]))
    assert [f.position for f in result.failures] == [0]
    assert [d.document.position for d in result.documents] == [1]


@pytest.mark.parametrize("moment", ["dispatch", "fetch"])
def test_out_of_memory_halves_the_rows_and_is_remembered(moment):
    predictor, limits = FakePredictor(device_tokens=8, fails_at=moment), DeviceLimits()
    documents = [document(i, [10 + i, 5]) for i in range(8)]
    a_load = load(documents, [batch(8, 4, range(8))])
    result = compute(a_load, predictor, limits)
    assert result.encodings[:, 0].tolist() == [18 + i for i in range(8)]
    assert not result.failures
    assert limits.max_tokens == 8
    predictor.calls.clear()
    compute(a_load, predictor, limits)
    assert set(predictor.calls) == {"dispatch 2", "fetch 2"}


def test_a_window_that_never_fits_becomes_a_failure_and_the_rest_is_computed():
    predictor = FakePredictor(device_tokens=8)
    documents = [document(0, list(range(10, 20))), document(1, [10])]
    result = compute(load(documents, [batch(1, 16, [0]), batch(1, 4, [1])]), predictor)
    assert [(f.position, f.reason) for f in result.failures] == [(0, "out_of_device_memory")]
    assert [d.document.position for d in result.documents] == [1]


@pytest.mark.parametrize("moment", ["dispatch", "fetch"])
@pytest.mark.parametrize("code", ["INTERNAL", "UNAVAILABLE"])
def test_a_device_fault_is_raised_and_no_document_fails_for_it(moment, code):
    predictor = FakePredictor(fault=RuntimeError(f"{code}: chip halted"), fails_at=moment)
    with pytest.raises(RuntimeError, match=code):
        compute(load([document(0, [10])], [batch(1, 4, [0])]), predictor)


def test_a_batch_that_fits_only_alone_is_computed_alone():
    class Crowded(FakePredictor):
        """Has room for one batch at a time."""

        resident = 0

        def dispatch(self, *arrays, **more):
            if self.resident:
                raise OutOfDeviceMemory("RESOURCE_EXHAUSTED: two at once")
            self.resident += 1
            return super().dispatch(*arrays, **more)

        def fetch(self, handle):
            self.resident -= 1
            return super().fetch(handle)

    documents = [document(i, [10 + i]) for i in range(3)]
    result = compute(load(documents, [batch(1, 4, [i]) for i in range(3)]), Crowded())
    assert not result.failures
    assert result.encodings[:, 0].tolist() == [13, 14, 15]


def test_a_batch_that_was_built_wrong_is_our_fault_and_raised():
    class Strict(FakePredictor):
        def dispatch(self, *arrays, **more):
            raise ValueError("token_ids: expected a shape the model was loaded for")

    with pytest.raises(ValueError, match="loaded for"):
        compute(load([document(0, [10])], [batch(1, 4, [0])]), Strict())


def test_windows_are_reported_as_they_are_computed(tmp_path):
    control = Control(str(tmp_path))
    predictor = FakePredictor(fault=RuntimeError("INTERNAL: chip halted"), fails_at="never")
    fetched = predictor.fetch

    def fetch(handle):
        if control.totals()["windows_inferred"] == 2:
            raise RuntimeError("killed")
        return fetched(handle)

    predictor.fetch = fetch
    with pytest.raises(RuntimeError, match="killed"):
        compute(
            load([document(i, [10]) for i in range(4)], [batch(2, 4, [0, 1]), batch(2, 4, [2, 3])]),
            predictor,
            control=control,
        )


def test_the_next_batch_is_dispatched_before_the_previous_is_fetched():
    predictor = FakePredictor()
    batches = [batch(1, 4, [i]) for i in range(3)]
    compute(load([document(i, [10]) for i in range(3)], batches), predictor)
    kinds = [call.split()[0] for call in predictor.calls]
    assert kinds == ["dispatch", "dispatch", "fetch", "dispatch", "fetch", "fetch"]


def test_a_stop_between_batches_leaves_the_load_not_started(tmp_path):
    control = Control(str(tmp_path))
    control.stop(15)
    completion = Completion(unit_id="u", records=2)
    a_load = load(
        [document(0, [10]), document(1, [11])], [batch(2, 4, [0, 1])], completions=(completion,)
    )
    result = compute(a_load, control=control)
    assert len(result.documents) == len(result.encodings) == 0
    assert result.completions == ()
    assert result.figures.counts["not_started"] == 2


def test_failures_completions_and_figures_of_earlier_steps_travel_on():
    failure = Failure(
        unit_id="u", position=9, uri="/in", record="9", step="read", reason="empty", message="m"
    )
    completion = Completion(unit_id="u", records=2)
    a_load = load(
        [document(0, [10])],
        [batch(1, 4, [0])],
        failures=(failure,),
        completions=(completion,),
    )
    a_load.figures.counts["read"] += 2
    result = compute(a_load)
    assert result.failures == (failure,)
    assert result.completions == (completion,)
    assert result.figures.counts["read"] == 2
    assert result.figures.counts["tokens_padded"] == 4
    assert result.figures.shapes == {"1x4": 1}


def test_a_load_without_documents_only_passes_its_news_on():
    completion = Completion(unit_id="u", records=0)
    result = compute(load([], [], completions=(completion,)))
    assert result.completions == (completion,)
    assert len(result.documents) == len(result.encodings) == 0


def hung(pause: str) -> subprocess.CompletedProcess[str]:
    program = f"""
import time
from pipeline.watchdog import watchdog
for _ in range(3):
    with watchdog(0.5, "a quick batch"):
        pass
with watchdog(0.5, "a batch of 8 × 64 tokens"):
    time.sleep({pause})
print("went on")
"""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_device_call_that_hangs_ends_the_process_and_says_which():
    result = hung("3600")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(
        "lengthwise: the device hangs: a batch of 8 × 64 tokens has not ended after 0.5 s"
    )
    assert "--device-timeout-seconds" in result.stderr


def test_a_device_call_that_ends_in_time_is_left_alone():
    assert hung("0").stdout == "went on\n"
