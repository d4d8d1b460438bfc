"""What every attention implementation must do, whatever it is made of (kernels/attention/contract.py).

A new implementation is one entry in IMPLEMENTATIONS. conftest.py leaves some of the slow ones to the full run. Expected results come from `expected`, NumPy loops over
texts in float64, which share nothing with any of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from kernels.attention.contract import Attention, Case
from kernels.attention.pallas_tpu import PallasTpu
from kernels.attention.reference import Reference
from kernels.attention.tiles import Tiles
from kernels.attention.xla import Xla


def small_tiles(case: Case, kind: str | None) -> Tiles:
    """So that rows of 129 have edges inside, and programs for the CPU stay small. H = 64 has the other kind of sums."""
    chunk = case.T if case.T <= 512 else 1024
    queries = 256 if case.T > 512 else 128
    return Tiles(queries=queries, keys=128, groups=1, chunk=chunk, sums_on_mxu=case.H != 64)


# Memory that was not written is NaN, reading beyond an edge and races are errors.
LIKE_TPU = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
PALLAS_TPU = PallasTpu(choose_tiles=small_tiles, interpret=LIKE_TPU)

IMPLEMENTATIONS: dict[str, Attention] = {
    "reference": Reference(),
    "xla": Xla(),
    "pallas_tpu": PALLAS_TPU,
    # The same on the CPU's own terms.
    "pallas_tpu-plain": PallasTpu(choose_tiles=small_tiles, interpret=True),
}

# Largest difference for values that are standard normal. All sums are accumulated in float32.
TOLERANCE = {
    # Against `expected`: float32 sums of up to 511 terms, measured 1e-6.
    ("float32", "expected"): 1e-5,
    # Weights and result are rounded to 8 bits: half a unit in the last place of results up to 4 is 8e-3, and
    # as much again for the weights.
    ("bfloat16", "expected"): 1.6e-2,
    # The same text in rows of other lengths: only the order of summing differs.
    ("float32", "elsewhere"): 2e-6,
    # … which may tip one rounding to bfloat16: a unit in the last place of results up to 4.
    ("bfloat16", "elsewhere"): 1.6e-2,
    # Through three layers (results up to 2): the above, three times, grown by weights of norm 1.
    ("float32", "layers"): 1e-5,
    ("bfloat16", "layers"): 5e-2,
}


@pytest.fixture(scope="session", params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Attention:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def compiled(implementation: Attention) -> Callable[..., Any]:
    if isinstance(implementation, PallasTpu):
        return implementation  # has a program for each shape after padding, which is fewer
    return jax.jit(implementation, static_argnames=("num_heads", "window"))


def attend(
    implementation: Attention,
    qkv: np.ndarray,
    segment_ids: np.ndarray,
    *,
    dtype: str,
    num_heads: int,
    window: int | None = None,
) -> np.ndarray:
    """The result as float32; `qkv` must be exact in `dtype`."""
    arguments = jnp.asarray(qkv, dtype), jnp.asarray(segment_ids)
    context = compiled(implementation)(*arguments, num_heads=num_heads, window=window)
    assert context.dtype == dtype
    return np.asarray(context, np.float32)


def normal(*shape: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Standard normal float32 that are exact in `dtype`."""
    values = np.random.default_rng(seed).standard_normal(shape)
    return np.array(jnp.asarray(values, dtype), np.float32)


def rows(T: int, *lengths: Sequence[int]) -> np.ndarray:
    """segment_ids of rows of T positions that hold texts of these lengths."""
    segment_ids = np.zeros((len(lengths), T), np.int32)
    for row, row_lengths in zip(segment_ids, lengths, strict=True):
        ids = np.repeat(np.arange(1, len(row_lengths) + 1), row_lengths)
        row[: len(ids)] = ids
    return segment_ids


def expected(
    qkv: np.ndarray, segment_ids: np.ndarray, num_heads: int, window: int | None = None
) -> np.ndarray:
    B, T, width = qkv.shape
    heads = qkv.astype(np.float64).reshape(B, T, 3, num_heads, -1)
    context = np.zeros(heads[:, :, 0].shape)
    for b in range(B):
        for segment in set(segment_ids[b].tolist()) - {0}:
            at = np.flatnonzero(segment_ids[b] == segment)
            for n in range(num_heads):
                query, key, value = heads[b, at, :, n].transpose(1, 0, 2)
                scores = query @ key.T / np.sqrt(key.shape[-1])
                if window is not None:
                    scores[np.abs(at[:, None] - at[None, :]) > window] = -np.inf
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                context[b, at, n] = weights / weights.sum(-1, keepdims=True) @ value
    return context.reshape(B, T, width // 3)


def assert_close(actual: np.ndarray, wanted: np.ndarray, dtype: str, kind: str) -> None:
    tolerance = TOLERANCE[dtype, kind]
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=tolerance, equal_nan=False)


# A batch that most tests share: two packed rows, a full one, a short one, an empty one. N·H = 2·32.
PACKED = rows(128, (40, 1, 60), (100, 20), (128,), (5,), ())
N = 2
PADDING = PACKED == 0


def packed_qkv(dtype: str) -> np.ndarray:
    return normal(*PACKED.shape, 3 * N * 32, dtype=dtype)


def test_packed_rows_give_the_attention_of_each_text(implementation: Attention, dtype: str) -> None:
    qkv = packed_qkv(dtype)
    context = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    assert_close(context, expected(qkv, PACKED, N), dtype, "expected")


def test_padding_is_exactly_zero_in_part_of_a_row_and_in_an_empty_row(
    implementation: Attention, dtype: str
) -> None:
    context = attend(implementation, packed_qkv(dtype), PACKED, dtype=dtype, num_heads=N)
    assert not context[PADDING].any()
    assert context[~PADDING].all()


@pytest.mark.parametrize("content", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("part", ["query", "key", "value", "all"])
def test_what_stands_at_padding_changes_no_bit(
    implementation: Attention, dtype: str, content: float, part: str
) -> None:
    qkv = packed_qkv(dtype)
    clean = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    third = {"query": 0, "key": 1, "value": 2}.get(part)
    columns = slice(None) if third is None else slice(third * N * 32, (third + 1) * N * 32)
    qkv[PADDING, columns] = content
    dirty = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    np.testing.assert_array_equal(dirty, clean)


def test_nan_at_padding_stays_there_through_layers(implementation: Attention, dtype: str) -> None:
    # As in an encoder: the residual sum keeps the NaN of padding alive from layer to layer.
    weights = normal(3, N * 32, 3 * N * 32, dtype=dtype, seed=1) / 8

    def layers(x: np.ndarray, segment_ids: np.ndarray) -> np.ndarray:
        for weight in weights:
            qkv = np.asarray(jnp.asarray(x @ weight, dtype), np.float32)
            x = x + attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=N)
        return x

    x = normal(*PACKED.shape, N * 32, dtype=dtype)
    x[PADDING] = np.nan
    hidden = layers(x, PACKED)
    alone = layers(x[:1, 41:101], rows(60, (60,)))  # the third text of the first row
    assert np.isnan(hidden[PADDING]).all()
    assert np.isfinite(hidden[~PADDING]).all()
    assert_close(hidden[:1, 41:101], alone, dtype, "layers")


def test_padding_does_not_attend_padding(implementation: Attention, dtype: str) -> None:
    # If it did, the mean of these equal values would stand there.
    qkv = np.ones((*PACKED.shape, 3 * N * 32), np.float32)
    context = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    wanted = np.broadcast_to((PACKED != 0)[:, :, None], context.shape)
    assert_close(context, wanted.astype(np.float32), dtype, "elsewhere")


def test_a_text_gives_the_same_alone_and_packed(implementation: Attention, dtype: str) -> None:
    qkv = packed_qkv(dtype)
    context = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    for first, length in ((0, 40), (40, 1), (41, 60)):
        text = slice(first, first + length)
        alone = attend(
            implementation, qkv[:1, text], rows(length, (length,)), dtype=dtype, num_heads=N
        )
        assert_close(context[:1, text], alone, dtype, "elsewhere")


def test_where_in_a_row_a_text_stands_does_not_matter(
    implementation: Attention, dtype: str
) -> None:
    # The same 30 tokens at 0, in the middle (across a multiple of 32) and at the end.
    text = normal(30, 3 * N * 32, dtype=dtype)
    qkv = packed_qkv(dtype)
    segment_ids = rows(128, (30, 98), (50, 30), (98, 30), (), ())
    places = ((0, 0), (1, 50), (2, 98))
    for row, first in places:
        qkv[row, first : first + 30] = text
    context = attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=N)
    (at_0, middle, end) = (context[row, first : first + 30] for row, first in places)
    assert_close(middle, at_0, dtype, "elsewhere")
    assert_close(end, at_0, dtype, "elsewhere")


def test_the_mask_changes_the_result(implementation: Attention, dtype: str) -> None:
    # What would also hold with no mask at all proves nothing.
    qkv = packed_qkv(dtype)
    qkv[:] = qkv[0]
    segment_ids = rows(128, (128,), (60, 68), (60,), (30, 30), (30, 98))
    context = attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=N)
    results = [context[0, :30], context[1, :30], context[3, :30]]
    results.append(
        attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=N, window=20)[0, :30]
    )
    for i, one in enumerate(results):
        for other in results[i + 1 :]:
            assert np.abs(one - other).max() > 0.1


def test_a_text_that_is_not_finite_spoils_itself_and_no_other(
    implementation: Attention, dtype: str
) -> None:
    qkv = packed_qkv(dtype)
    clean = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    first, middle = PACKED[0] == 1, PACKED[0] == 3
    others = ~PADDING
    others[0] &= ~(first | middle)
    qkv[0, 7, 2 * N * 32 + 3] = np.inf  # one lane of a value of head 0
    qkv[0, 50, N * 32 :] = np.nan  # every key of a position but those of head 0, and its values
    context = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=N)
    assert not np.isfinite(context[0, first, :32]).all(-1).any()
    assert not np.isfinite(context[0, middle]).any()
    np.testing.assert_array_equal(context[0, first, 32:], clean[0, first, 32:])
    np.testing.assert_array_equal(context[others], clean[others])


@pytest.mark.parametrize("window", [0, 1, 64, 127, 1000])
def test_a_window_reaches_exactly_as_far_as_it_says(
    implementation: Attention, dtype: str, window: int
) -> None:
    # Values are unit vectors, so the result is the matrix of weights: here its columns 96 to 159,
    # on both sides of a tile edge. Text 1 ends at 150.
    T, H, columns = 192, 64, np.arange(96, 160)
    qkv = normal(1, T, 3 * H, dtype=dtype)
    qkv[0, :, 2 * H :] = 0
    qkv[0, columns, 2 * H :] = np.eye(H)
    segment_ids = rows(T, (150, 30))
    weights = attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=1, window=window)[0]
    distance = np.abs(np.arange(T)[:, None] - columns[None, :])
    same = segment_ids[0][:, None] == segment_ids[0][columns][None, :]
    same &= segment_ids[0][:, None] != 0
    np.testing.assert_array_equal(weights > 0, same & (distance <= window))
    assert_close(weights[None], expected(qkv, segment_ids, 1, window), dtype, "expected")


@pytest.mark.parametrize("T", [1, 127, 129, 511])
def test_odd_lengths(implementation: Attention, dtype: str, T: int) -> None:
    segment_ids = rows(T, (T,), (T // 3, T // 2))
    qkv = normal(2, T, 3 * 32, dtype=dtype)
    context = attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=1, window=100)
    assert_close(context, expected(qkv, segment_ids, 1, 100), dtype, "expected")


def test_a_row_of_8191(implementation: Attention) -> None:
    lengths = (1, 500, 127, 129, *[512] * 13, 700)  # 8113 of 8191
    segment_ids = rows(8191, lengths)
    qkv = normal(1, 8191, 3 * 32, dtype="bfloat16")
    context = attend(implementation, qkv, segment_ids, dtype="bfloat16", num_heads=1)
    assert_close(context, expected(qkv, segment_ids, 1), "bfloat16", "expected")


@pytest.mark.parametrize(("N", "H"), [(12, 32), (3, 64), (2, 128), (1, 1), (3, 20)])
def test_widths_of_heads(implementation: Attention, dtype: str, N: int, H: int) -> None:
    segment_ids = rows(24, (10, 9), (24,))
    qkv = normal(2, 24, 3 * N * H, dtype=dtype)
    context = attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=N)
    assert_close(context, expected(qkv, segment_ids, N), dtype, "expected")


@pytest.mark.parametrize("offset", [0, 1024, -1024])
def test_scores_beyond_the_range_of_exp(implementation: Attention, dtype: str, offset: int) -> None:
    # exp(89) is the last finite one in float32, exp(-104) the last that is not 0. Queries and keys are small
    # whole numbers, so their products are exact: scores of ±1024 and around 0 with a deviation of 85.
    qkv = packed_qkv(dtype)
    H = 64
    qkv[..., : 2 * H] = np.random.default_rng(1).integers(-16, 17, (*PACKED.shape, 2 * H))
    if offset:
        qkv[..., 0], qkv[..., H] = 64, offset * 8 / 64
    context = attend(implementation, qkv, PACKED, dtype=dtype, num_heads=1)
    assert_close(context, expected(qkv, PACKED, 1), dtype, "expected")


@settings(max_examples=25, deadline=None)
@given(
    packing=st.lists(st.lists(st.integers(1, 32), max_size=6), min_size=3, max_size=3),
    window=st.sampled_from([None, 3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_packing(
    implementation: Attention, dtype: str, packing: list[list[int]], window: int | None, seed: int
) -> None:
    fitting = [[n for i, n in enumerate(row) if sum(row[: i + 1]) <= 32] for row in packing]
    segment_ids = rows(32, *fitting)
    qkv = normal(3, 32, 3 * 16, dtype=dtype, seed=seed)
    wanted = expected(qkv, segment_ids, 2, window)
    qkv[segment_ids == 0] = np.nan
    context = attend(implementation, qkv, segment_ids, dtype=dtype, num_heads=2, window=window)
    assert_close(context, wanted, dtype, "expected")


def test_one_program_is_compiled_for_each_shape(implementation: Attention) -> None:
    # Nothing in the data may ask for another program. Python runs once for each.
    traced: list[tuple[int, ...]] = []

    def counted(qkv: jax.Array, segment_ids: jax.Array) -> jax.Array:
        traced.append(segment_ids.shape)
        return implementation(qkv, segment_ids, num_heads=2)

    run = jax.jit(counted)
    for B, T in ((2, 8), (4, 8)):
        for lengths in ((), (3,), (2, 4), (8,)):
            run(jnp.zeros((B, T, 48)), jnp.asarray(rows(T, *[lengths] * B)))
    assert traced == [(2, 8), (4, 8)]


def test_results_have_the_annotated_shapes(implementation: Attention, dtype: str) -> None:
    checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)(type(implementation).__call__)
    call = functools.partial(checked, implementation, num_heads=3, window=2)
    qkv = jax.ShapeDtypeStruct((2, 8, 3 * 6), dtype)
    context = jax.eval_shape(call, qkv, jax.ShapeDtypeStruct((2, 8), jnp.int32))
    assert (context.shape, context.dtype) == ((2, 8, 6), dtype)
    with pytest.raises(jaxtyping.TypeCheckError):
        jax.eval_shape(call, qkv, jax.ShapeDtypeStruct((2, 7), jnp.int32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": jnp.zeros((8, 18))}, r"qkv: expected the shape \[B, T, 3·N·H\], got \[8, 18\]"),
        ({"qkv": jnp.zeros((2, 8, 18), jnp.float16)}, "dtype: expected .*, got 'float16'"),
        ({"qkv": jnp.zeros((2, 8, 16))}, "multiple of 3·2 = 6 for num_heads=2, got 16"),
        ({"qkv": jnp.zeros((2, 8, 0))}, "H: expected a Python int, 1 or more, got 0"),
        ({"qkv": jnp.zeros((2, 0, 18)), "segment_ids": jnp.zeros((2, 0), jnp.int32)}, "T: .*got 0"),
        ({"segment_ids": jnp.zeros((2, 7), jnp.int32)}, r"= \[2, 8\] of qkv, got \[2, 7\]"),
        ({"segment_ids": jnp.zeros((2, 8))}, "segment_ids: expected int32, got float32"),
        ({"num_heads": 0}, "num_heads: expected a Python int, 1 or more, got 0"),
        ({"num_heads": 2.0}, "num_heads: .* got 2.0"),
        ({"window": -1}, "window: expected None or a Python int, 0 or more, got -1"),
        ({"window": True}, "window: .* got True"),
        ({"window": 1.5}, "window: .* got 1.5"),
    ],
)
def test_a_wrong_call_says_what_was_expected_and_what_came(
    implementation: Attention, change: dict[str, Any], message: str
) -> None:
    call = {
        "qkv": jnp.zeros((2, 8, 18)),
        "segment_ids": jnp.zeros((2, 8), jnp.int32),
        "num_heads": 2,
        "window": None,
    }
    with pytest.raises(ValueError, match=message):
        implementation(**(call | change))


def test_implementations_compare_and_hash_by_what_they_are(implementation: Attention) -> None:
    again = dataclasses.replace(implementation)  # type: ignore[type-var]
    assert (again, hash(again)) == (implementation, hash(implementation))
    with pytest.raises(AttributeError):
        implementation.name = "other"  # type: ignore[misc]
