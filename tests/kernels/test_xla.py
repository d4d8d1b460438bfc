"""What only the implementation of XLA must keep."""

from __future__ import annotations

import platform
import re

import jax
import jax.numpy as jnp
import pytest

from kernels.attention.xla import Xla


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="XLA has YNNPACK on other processors, but does not always use it"
)  # fmt: skip
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_products_run_in_ynnpack_and_the_second_takes_softmax_along(
    dtype: str, window: int | None
) -> None:
    # Nothing else would tell when a change to the code or to XLA undoes this: results stay the same.
    attention = jax.jit(Xla(), static_argnames=("num_heads", "window"))
    qkv = jax.ShapeDtypeStruct((4, 128, 3 * 12 * 32), dtype)
    segment_ids = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    program = attention.lower(qkv, segment_ids, num_heads=12, window=window).compile().as_text()
    called = re.findall(r'calls=(%[\w.]+),.*"kind":"__ynn_fusion"', program)
    bodies = [program.split(f"\n{name} (")[1].split("\n}")[0] for name in called]
    assert sum(" exponential(" in body and " dot(" in body for body in bodies) == 1
    assert sum(" dot(" in body for body in bodies) == 2
    assert program.count(" dot(") == 2
