"""Parts of the network against their definitions, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from model import heads
from model.encoder import Dense, LayerNorm, gelu


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (jnp.float32, 1e-6),
        (jnp.bfloat16, 9e-5),  # the polynomial's, as its docstring says
    ],
)
def test_gelu_is_the_exact_one_within_what_its_docstring_says(
    dtype: jnp.dtype, tolerance: float
) -> None:
    x = np.concatenate([np.linspace(-12, 12, 24001), [-1e4, -50, 50, 1e4]]).astype(np.float32)
    exact = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(np.float64)])
    rounding = 2**-21 * np.abs(x)
    assert (
        np.abs(np.asarray(gelu(jnp.asarray(x), jnp.dtype(dtype))) - exact) <= tolerance + rounding
    ).all()


def test_a_norm_is_exact_where_the_mean_is_far_larger_than_the_deviation() -> None:
    x = (1000 + np.random.default_rng(0).standard_normal([4, 64])).astype(np.float32)
    exact = x.astype(np.float64)
    exact -= exact.mean(-1, keepdims=True)
    exact /= np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-12)
    assert np.abs(np.asarray(LayerNorm(64, 1e-12)(jnp.asarray(x))) - exact).max() <= 1e-4


def test_a_matmul_in_bfloat16_keeps_its_float32_sum() -> None:
    dense = Dense(256, 1, jnp.dtype(jnp.bfloat16))
    dense.kernel[...] = jnp.ones([256, 1], jnp.bfloat16)
    x = np.ones([1, 256], np.float32)
    x[0, 0] = 2
    result = dense(jnp.asarray(x))
    assert result.dtype == jnp.float32
    assert float(result[0, 0]) == 257  # bfloat16 has 256 and 258


SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 0], [1, 0, 0, 0, 0, 0]], np.int32)
HIDDEN = np.random.default_rng(0).standard_normal([2, 6, 8]).astype(np.float32)


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ("mean", lambda tokens: tokens.mean(0)),
        ("cls", lambda tokens: tokens[0]),
        ("max", lambda tokens: tokens.max(0)),
    ],
)
def test_each_text_of_a_row_is_pooled_by_itself_and_absent_ones_are_zero(
    pooling: str, pool: Callable[[np.ndarray], np.ndarray]
) -> None:
    hidden, segment_ids = jnp.asarray(HIDDEN), jnp.asarray(SEGMENT_IDS)
    pooled = np.asarray(heads.embed(hidden, segment_ids, pooling=pooling, segments=3))
    assert (pooled.shape, pooled.dtype) == ((2, 3, 8), np.float32)
    expected = np.zeros([2, 3, 8])
    expected[0, 0], expected[0, 1] = pool(HIDDEN[0, :3]), pool(HIDDEN[0, 3:5])
    expected[1, 0] = pool(HIDDEN[1, :1])
    assert np.abs(pooled - expected).max() <= 1e-6


def test_shapes_in_signatures_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        heads.embed(jnp.zeros([2, 6, 8]), jnp.zeros([2, 5], int), pooling="mean", segments=1)
