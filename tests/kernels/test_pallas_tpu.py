"""What only the TPU kernel has: intervals and live tiles, sizes of tiles, the careful way."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import pallas_tpu, tiles
from kernels.attention.contract import Case
from kernels.attention.intervals import INT32_MIN, plan
from kernels.attention.pallas_tpu import PallasTpu
from kernels.attention.tiles import Tiles

MINILM = Case(B=1, T=1024, N=12, H=32, dtype="bfloat16")
KINDS = [*tiles.VMEM, None, "TPU v9"]


def row(T: int, *lengths: int) -> np.ndarray:
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, T - len(ids))).astype(np.int32)


def executed(segment_ids: np.ndarray, window: int | None = None) -> float:
    """The share of the dense area that the kernel goes over, with the tiles it would choose."""
    (T,) = segment_ids.shape
    chosen = tiles.choose(replace(MINILM, T=T), "TPU v5 lite")
    _, ranges = plan(jnp.asarray(segment_ids[None]), window, chosen.queries, chosen.keys)
    low, high = np.asarray(ranges)[0, :, 0], np.asarray(ranges)[0, :, 1]
    return float((high - low).sum() * chosen.queries * chosen.keys / T**2)


def test_eight_texts_of_128_in_a_row_of_1024_take_a_quarter_of_it() -> None:
    assert executed(row(1024, *[128] * 8)) == 1 / 4
    assert executed(row(1024, 1024)) == 1


def test_a_window_takes_time_in_proportion_to_the_row() -> None:
    # Three key tiles of 256 for each query tile, two at both ends.
    assert executed(row(8192, 8192), window=64) == (3 * 32 - 2) * 256 * 256 / 8192**2


def test_padding_is_skipped() -> None:
    assert executed(row(1024)) == 0
    assert executed(row(1024, 256)) == 1 / 16


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=9),
    window=st.sampled_from([None, 0, 3, 17]),
    queries=st.sampled_from([8, 16, 64]),
    keys=st.sampled_from([8, 16, 64]),
)
def test_a_tile_is_live_where_a_query_attends_a_key_and_unmasked_where_all_do(
    lengths: list[int], window: int | None, queries: int, keys: int
) -> None:
    T = 64
    lengths = [n for i, n in enumerate(lengths) if sum(lengths[: i + 1]) <= T]
    ids = row(T, *lengths)
    interval, ranges = (
        np.asarray(it) for it in plan(jnp.asarray(ids[None]), window, queries, keys)
    )
    i, j = np.arange(T)[:, None], np.arange(T)[None]
    attends = (ids[:, None] == ids[None]) & (ids != 0)[:, None]
    if window is not None:
        attends &= abs(i - j) <= window
    row0, row1 = interval[0].astype(np.int32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(j.astype(np.int32) + row0[:, None] < row1[:, None], attends)
    np.testing.assert_array_equal(row1 == INT32_MIN, ids == 0)
    by_tile = attends.reshape(T // queries, queries, T // keys, keys)
    number = np.arange(T // keys)
    low, high, full_low, full_high = ranges[0].T[..., None]
    np.testing.assert_array_equal((low <= number) & (number < high), by_tile.any((1, 3)))
    np.testing.assert_array_equal((full_low <= number) & (number < full_high), by_tile.all((1, 3)))


def test_positions_beyond_16_bits_are_kept_apart() -> None:
    T = 2**17
    interval, ranges = plan(jnp.asarray(row(T, 70_000, 50_000)[None]), None, 256, 256)
    row0, row1 = np.asarray(interval[0], np.int64)
    first, count = INT32_MIN - row0, row1 - INT32_MIN
    assert (first[100_000] + 2**32) % 2**32 == 70_000 and count[100_000] == 50_000
    assert list(np.asarray(ranges)[0, 100_000 // 256][:2]) == [70_000 // 256, -(-120_000 // 256)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_has_legal_tiles_that_fit(kind: str | None) -> None:
    for T in (128, 256, 384, 512, 640, 768, 896, 1024, 1152, 2048):
        for N, H in ((12, 32), (16, 64), (12, 64), (4, 32), (8, 128), (7, 128)):
            for dtype in ("bfloat16", "float32"):
                case = Case(B=8, T=T, N=N, H=H, dtype=dtype)
                chosen = tiles.choose(case, kind)
                assert T % chosen.chunk == chosen.chunk % chosen.queries == T % chosen.keys == 0
                assert chosen.queries % 128 == chosen.keys % 128 == 0
                assert N * H % (chosen.groups * 128) == 0
                assert chosen.vmem_bytes(case) <= tiles.vmem_bytes(kind), (case, chosen)


def test_the_kernel_computes_what_it_is_told_is_live_and_nothing_else() -> None:
    # Otherwise the counts above would say nothing about it.
    size = Tiles(queries=128, keys=128, groups=1, chunk=256, sums_on_mxu=True)
    case = Case(B=1, T=256, N=1, H=128, dtype="float32")
    qkv = jnp.asarray(np.random.default_rng(0).standard_normal((1, 256, 3 * 128)), "float32")
    interval, ranges = plan(jnp.asarray(row(256, 256)[None]), None, 128, 128)
    assert ranges.tolist() == [[[0, 2, 0, 2]] * 2]

    def run(ranges: jax.Array) -> np.ndarray:
        context = pallas_tpu._flash(
            ranges,
            interval,
            qkv,
            case=case,
            tiles=size,
            scale=0.1,
            interpret=pltpu.InterpretParams(),
        )
        return np.asarray(context)[0]

    # The second query tile is told of the second key tile alone, the first of none: as if they were not there.
    part = run(jnp.asarray([[[0, 0, 0, 0], [1, 2, 1, 2]]], jnp.int32))
    scores = np.asarray(qkv[0, 128:, :128] @ qkv[0, 128:, 128:256].T, np.float64) * 0.1
    weights = 2.0**scores
    wanted = weights / weights.sum(1, keepdims=True) @ np.asarray(qkv[0, 128:, 256:], np.float64)
    assert not part[:128].any()
    np.testing.assert_allclose(part[128:], wanted, atol=1e-5)
    assert np.abs(run(ranges)[128:] - wanted).max() > 0.1


def test_a_text_that_needs_the_careful_way_changes_no_bit_of_its_neighbours() -> None:
    attention = PallasTpu(
        choose_tiles=lambda case, kind: Tiles(
            queries=128, keys=128, groups=1, chunk=128, sums_on_mxu=True
        ),
        interpret=pltpu.InterpretParams(),
    )
    ids = jnp.asarray(row(128, 60, 60)[None])
    qkv = np.random.default_rng(0).standard_normal((1, 128, 3 * 128)).astype(np.float32)
    usual = np.asarray(attention(jnp.asarray(qkv), ids, num_heads=1))
    qkv[0, 60:120, :256] *= 40
    large = np.asarray(attention(jnp.asarray(qkv), ids, num_heads=1))
    np.testing.assert_array_equal(large[0, :60], usual[0, :60])
    # Scores of thousands: each query attends one key, and every context is that key's value.
    scores = qkv[0, 60:120, :128] @ qkv[0, 60:120, 128:256].T
    np.testing.assert_allclose(large[0, 60:120], qkv[0, 60:120, 256:][scores.argmax(1)], atol=1e-3)
