"""Batching: the plan computes every window exactly once in few shapes, and Loads keep documents whole."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.testing.util import assert_that
from apache_beam.transforms.window import GlobalWindow
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batching import (
    BATCHES_PER_LOAD,
    FULL,
    BatchByLength,
    Loads,
    LoadSize,
    make_load,
)
from pipeline.config import BatchingSettings, SettingsError
from pipeline.packing import MOST_PROGRAMS, Planner, choose_shapes, places, plan
from pipeline.records import (
    Completion,
    Document,
    Failure,
    Figures,
    Load,
    SpecialTokens,
    TokenizedChunk,
    TokenizedDocument,
)
from pipeline.shapes import shape_table

SPECIAL = SpecialTokens(start_ids=(101,), end_ids=(102,), pad_id=0)
CPU = shape_table("cpu", 256, None, 1)

tables = st.builds(
    shape_table,
    st.sampled_from(["cpu", "gpu", "tpu"]),
    st.integers(3, 600),
    st.just(None) | st.integers(8 * 600, 10_000),
    st.sampled_from([1, 2, 4, 8]),
)


@st.composite
def lengths_and_table(draw):
    """Lengths of windows, of few or many different values, and a table that takes them."""
    table = draw(tables)
    longest = table.full[-1][1]
    values = draw(st.lists(st.integers(1, longest), min_size=1, max_size=8))
    lengths = draw(st.lists(st.sampled_from(values) | st.integers(1, longest), max_size=300))
    return np.array(lengths, np.int32), table


def assert_sound(batches, lengths, shapes):
    """Every window once, inside its row, apart from its neighbours; only these shapes; widest first."""
    seen = [w for batch in batches for w in batch.windows.tolist()]
    assert sorted(seen) == list(range(len(lengths)))
    assert [batch.T for batch in batches] == sorted((batch.T for batch in batches), reverse=True)
    for batch in batches:
        assert (batch.B, batch.T) in shapes
        assert len(batch.windows) > 0
        taken = np.zeros([batch.B, batch.T], int)
        for window, row, column in zip(batch.windows, batch.rows, batch.columns, strict=True):
            assert column + lengths[window] <= batch.T
            taken[row, column : column + lengths[window]] += 1
        assert taken.max() == 1
        # Rows are filled from their start and windows come in order of place, as segments are counted.
        assert (np.diff(taken, axis=1) <= 0).all()
        place = batch.rows.astype(int) * batch.T + batch.columns
        assert (np.diff(place) > 0).all()
        assert np.bincount(batch.rows).max() <= places(batch.T)
        assert {a.dtype for a in (batch.windows, batch.rows, batch.columns)} == {np.dtype(np.int32)}


def multiset(batches, lengths):
    return [
        (
            batch.B,
            batch.T,
            batch.rows.tolist(),
            batch.columns.tolist(),
            lengths[batch.windows].tolist(),
        )
        for batch in batches
    ]


@given(lengths_and_table())
def test_a_plan_computes_every_window_once_in_shapes_of_the_table(case):
    lengths, table = case
    assert_sound(plan(lengths, table), lengths, table.shapes)


@given(lengths_and_table(), st.randoms(use_true_random=False))
def test_a_plan_depends_on_the_lengths_and_not_on_their_order(case, random):
    lengths, table = case
    shuffled = lengths.tolist()
    random.shuffle(shuffled)
    shuffled = np.array(shuffled, np.int32)
    expected = multiset(plan(lengths, table), lengths)
    assert multiset(plan(lengths, table), lengths) == expected
    assert multiset(plan(shuffled, table), shuffled) == expected


@given(st.lists(lengths_and_table(), min_size=1, max_size=4))
def test_what_a_planner_learns_changes_shapes_and_nothing_else(cases):
    table = max((table for _, table in cases), key=lambda table: table.full[-1][1])
    planner = Planner(table)
    used = set()
    for lengths, _ in cases:
        batches = planner.plan(lengths)
        assert_sound(batches, lengths, table.shapes)
        used |= {(batch.B, batch.T) for batch in batches}
    assert len(used) <= MOST_PROGRAMS


@given(tables)
def test_no_shape_is_over_the_budget_and_rows_split_evenly_over_the_devices(table):
    assert len(set(table.shapes)) == len(table.shapes)
    assert [T for _, T in table.full] == sorted({T for _, T in table.full})
    for B, T in table.shapes:
        assert B * T <= table.max_tokens_per_batch
        rows = B // table.local_devices
        assert B % table.local_devices == 0 and rows & (rows - 1) == 0  # a power of two
        assert B == table.local_devices or (B // 2, T) in table.shapes
    for shape in table.full:
        assert table.quarter(shape) in table.shapes


def test_a_batch_stays_within_the_budget_that_was_set():
    table = shape_table("cpu", 256, 600, 1)
    assert max(B * T for B, T in table.shapes) <= 600
    assert table.full[-1] == (2, 256)


def test_a_budget_too_small_for_one_window_on_each_device_is_refused():
    with pytest.raises(SettingsError, match="--max-tokens-per-batch: expected at least 1024"):
        shape_table("cpu", 256, 1023, 4)
    assert shape_table("cpu", 2048, None, 1).full[-1] == (1, 2048)  # the default makes room


def test_a_window_longer_than_every_shape_is_refused():
    too_long = np.array([257], np.int32)
    with pytest.raises(ValueError, match="expected at most 256, got 257"):
        plan(too_long, CPU)
    with pytest.raises(ValueError, match="expected at most 256, got 257"):
        Planner(CPU).plan(too_long)


def loads_of(lengths, tokens=int(FULL * BATCHES_PER_LOAD * 1024)):
    """The lengths in their order, cut into Loads."""
    load = np.cumsum(lengths) // tokens
    return [lengths[load == i] for i in np.unique(load)]


def mix(name, tokens=400_000):
    random = np.random.default_rng(0)
    if name == "messages":
        return np.clip(random.lognormal(3.1, 0.6, tokens // 25), 3, 60).astype(np.int32)
    words = np.clip(random.lognormal(6.5, 0.6, tokens // 800), 50, 6000).astype(int)
    windows = [length for n in words.tolist() for length in [256] * (n // 254) + [n % 254 + 2]]
    return np.array(windows, np.int32)


@pytest.mark.parametrize("name", ["messages", "articles"])
def test_little_is_padded_and_few_programs_are_compiled(name):
    planner = Planner(CPU)
    lengths = mix(name)
    batches = [batch for load in loads_of(lengths) for batch in planner.plan(load)]
    assert lengths.sum() / sum(batch.B * batch.T for batch in batches) >= 0.95
    assert len({(batch.B, batch.T) for batch in batches}) <= 4


def test_a_small_corpus_compiles_one_program_and_a_large_one_what_pays_off():
    random = np.random.default_rng(0)
    lengths = np.clip(random.normal(140, 15, 20_000), 60, 250).astype(np.int32)
    lengths[0] = 256
    planner = Planner(CPU)
    shapes = [{(b.B, b.T) for b in planner.plan(load)} for load in loads_of(lengths)]
    assert len(shapes[0]) == 1
    assert 1 < len(set.union(*shapes)) <= MOST_PROGRAMS


def test_a_shape_is_chosen_when_it_saves_more_than_it_costs_to_compile():
    counts = np.zeros(257, np.int64)
    counts[140] = 10
    counts[250] = 1
    serves_all = choose_shapes(counts, 1, CPU)
    assert serves_all == {(4, 256)}
    assert choose_shapes(counts, 1, CPU, serves_all, serves_all) == serves_all
    # (4, 144) would have saved 4 ms of 30 each time.
    assert (4, 144) in choose_shapes(counts * 1000, 1000, CPU, serves_all, serves_all)
    compiled = frozenset([(4, 144), (4, 256)])
    assert choose_shapes(counts, 1, CPU, serves_all, compiled) == compiled


def test_programs_stay_few_even_if_compiling_cost_nothing():
    table = shape_table("cpu", 600, None, 1)
    free = replace(table, cost=replace(table.cost, compile_seconds=0.0))
    counts = np.full(601, 1_000_000)
    assert len(choose_shapes(counts, 1, free)) == MOST_PROGRAMS


def test_rows_too_few_for_a_batch_of_their_width_move_to_the_widest():
    lengths = np.array([10, 250, 10, 10], np.int32)
    (batch,) = plan(lengths, CPU, [(64, 16), (4, 256)])
    assert (batch.B, batch.T) == (4, 256)
    many = np.array([16] * 60, np.int32)  # 64 rows cost less than to move on
    assert [(b.B, b.T) for b in plan(many, CPU, [(64, 16), (4, 256)])] == [(64, 16)]


def test_the_last_batch_may_have_a_quarter_of_the_rows():
    lengths = np.array([256] * 5, np.int32)
    in_use = [(4, 256), (1, 256)]
    assert [(b.B, b.T) for b in plan(lengths, CPU, in_use)] == [(4, 256), (1, 256)]
    assert [(b.B, b.T) for b in plan(lengths, CPU, in_use[:1])] == [(4, 256), (4, 256)]


def test_planning_takes_microseconds_a_window():
    loads = list(loads_of(mix("articles")))
    seconds = []
    for _ in range(5):
        planner = Planner(CPU)
        start = time.process_time()
        for lengths in loads:
            planner.plan(lengths)
        seconds.append(time.process_time() - start)
    assert min(seconds) / sum(map(len, loads)) < 10e-6  # 3 µs on an idle machine


def document(
    tokens: int, name: str = "a", text: str | None = None, size: int = 8
) -> TokenizedDocument:
    """A document of so many tokens in windows of `size`; documents with the same `text` are equal."""
    starts = np.arange(0, tokens, size, dtype=np.int32)
    return TokenizedDocument(
        document=Document(
            unit_id="u", position=0, uri="uri", record=name, text="", media_type="text/plain",
            content_sha256=text or name, size_bytes=1,
        ),
        characters=1,
        token_ids=np.arange(tokens, dtype=np.int32),
        windows=np.stack([starts, np.minimum(starts + size, tokens)], axis=1),
        truncated=False,
    )  # fmt: skip


def chunk(*documents: TokenizedDocument, unit: str | None = None, failures=()) -> TokenizedChunk:
    """A chunk; with `unit`, the last of that work unit."""
    completions = () if unit is None else (Completion(unit_id=unit, records=len(documents)),)
    figures = Figures()
    figures.counts["read"] += len(documents)
    return TokenizedChunk(
        documents=documents,
        special=SPECIAL,
        failures=failures,
        completions=completions,
        figures=figures,
    )


def loads(*chunks: TokenizedChunk, max_tokens: int) -> list[Load]:
    gathered = Loads(
        lambda lengths: plan(lengths, CPU), LoadSize(batch_tokens=max_tokens, max_tokens=max_tokens)
    )
    return [load for c in chunks for load in gathered.add(c)] + list(gathered.finish())


def names(load: Load) -> list[str]:
    return [d.document.record for d in load.documents]


def test_equal_texts_are_computed_once():
    a, b, c = document(20, "a", "same"), document(3, "b"), document(20, "c", "same")
    load = make_load([a, b, c], SPECIAL, lambda lengths: plan(lengths, CPU))
    assert load.window_table.tolist() == [[0, 0, 8], [0, 8, 16], [0, 16, 20], [1, 0, 3]]
    assert load.first_window.tolist() == [0, 3, 0]
    assert load.window_table.dtype == load.first_window.dtype == np.int32
    assert_sound(load.batches, np.array([10, 10, 6, 5]), CPU.shapes)
    assert len(load) == 3 and load.special == SPECIAL and load.figures.seconds["batch"] > 0


def test_a_load_is_closed_before_the_document_that_would_overfill_it():
    documents = [document(8, name) for name in "abcde"]  # 10 tokens each with the special ones
    found = loads(chunk(*documents[:3]), chunk(*documents[3:]), max_tokens=20)
    assert [names(load) for load in found] == [["a", "b"], ["c", "d"], ["e"]]
    assert all(load.special == SPECIAL for load in found)


def test_a_load_is_closed_when_it_is_nearly_full():
    found = loads(chunk(*(document(8, str(i)) for i in range(100))), max_tokens=1000)
    assert [len(load) for load in found] == [98, 2]


def test_a_document_larger_than_a_load_is_a_load_of_its_own():
    found = loads(
        chunk(document(8, "a"), document(80, "big"), document(8, "b"), unit="u"), max_tokens=25
    )
    assert [names(load) for load in found] == [["big"], ["a", "b"]]
    assert [len(load.window_table) for load in found] == [10, 2]
    assert [len(load.completions) for load in found] == [0, 1]


def test_a_work_unit_is_complete_only_when_its_documents_have_left():
    failure = Failure(
        unit_id="u", position=1, uri="uri", record="x", step="read", reason="r", message="m"
    )
    found = loads(
        chunk(*(document(8, name) for name in "abc"), unit="u1", failures=(failure,)),
        chunk(document(8, "d"), unit="u2"),
        chunk(document(8, "e")),
        max_tokens=20,
    )
    left: set[str] = set()
    for load in found:
        left |= set(names(load))
        for completion in load.completions:
            assert {"u1": {"a", "b", "c"}, "u2": {"d"}}[completion.unit_id] <= left
    assert sorted(c.unit_id for load in found for c in load.completions) == ["u1", "u2"]
    assert [f for load in found for f in load.failures] == [failure]
    assert sum(load.figures.counts["read"] for load in found) == 5


def test_failures_and_completions_without_documents_wait_for_the_next_load():
    found = loads(chunk(unit="u1"), chunk(unit="u2"), chunk(document(8, "a")), max_tokens=20)
    assert [(names(load), len(load.completions)) for load in found] == [(["a"], 2)]


def test_a_bundle_without_documents_still_passes_its_completions_on():
    (load,) = loads(chunk(unit="u1"), max_tokens=20)
    assert len(load) == 0 and load.batches == () and len(load.completions) == 1
    assert load.window_table.shape == (0, 3) and load.first_window.shape == (0,)
    assert loads(max_tokens=20) == []


@given(st.lists(st.lists(st.integers(1, 60), max_size=5), max_size=8), st.integers(10, 100))
def test_loads_hold_every_document_once_and_keep_to_their_size(sizes, max_tokens):
    chunks = [
        chunk(*(document(n, f"{i}.{j}") for j, n in enumerate(part)), unit=f"u{i}")
        for i, part in enumerate(sizes)
    ]
    found = loads(*chunks, max_tokens=max_tokens)
    expected = [d.document.record for c in chunks for d in c.documents]
    assert sorted(name for load in found for name in names(load)) == sorted(expected)
    assert [c.unit_id for load in found for c in load.completions] == [
        f"u{i}" for i in range(len(sizes))
    ]
    for load in found:
        tokens = sum(d.tokens + 2 * len(d.windows) for d in load.documents)
        assert tokens <= max_tokens or len(load) == 1


def test_loads_are_small_at_first_and_grow_with_what_has_passed():
    size = LoadSize(batch_tokens=1024, max_tokens=16 * 1024)
    sizes = []
    for _ in range(400):
        sizes.append(size.tokens)
        size.passed(size.tokens)
    assert sizes[0] == 4 * 1024
    assert sizes[-1] == 16 * 1024
    passed = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    assert all(now <= max(4 * 1024, before / 20) for now, before in zip(sizes, passed, strict=True))


def test_the_beam_step_flushes_at_the_end_of_a_bundle_and_needs_no_device():
    run = SimpleNamespace(
        shapes=shape_table("cpu", 16, None, 1),
        job=SimpleNamespace(batching=BatchingSettings(max_tokens_per_load=100)),
    )  # fmt: skip
    documents = [document(8, str(i)) for i in range(25)]

    def check(found):
        assert sorted(name for load in found for name in names(load)) == sorted(map(str, range(25)))
        assert {unit.unit_id for load in found for unit in load.completions} == {"u"}
        assert all(isinstance(load, Load) and len(load) <= 10 for load in found)

    class InGlobalWindow(beam.DoFn):
        def process(self, load, window=beam.DoFn.WindowParam):
            assert isinstance(window, GlobalWindow)
            yield load

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        chunks = pipeline | beam.Create([chunk(*documents[:20]), chunk(*documents[20:], unit="u")])
        found = chunks | beam.ParDo(BatchByLength(run)) | beam.ParDo(InGlobalWindow())
        assert_that(found, check)
