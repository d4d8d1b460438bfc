"""The kernel and the whole encoder compile for every TPU generation, with libtpu's compiler and no TPU.

Compiling fails where the kernel asks for more VMEM than the chip has, or the program for more HBM.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels.attention.contract import Case
from kernels.attention.pallas_tpu import PallasTpu
from kernels.tpu import CHIPS, compile_for, devices
from model.ahead import compile_ahead, hbm_bytes
from model.config import EncoderConfig
from pipeline.packing import places
from pipeline.shapes import shape_table

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install lengthwise[tpu]"
)

MINILM = EncoderConfig(
    model_type="bert",
    layers=6,
    embedding_dimensions=384,
    heads=12,
    feedforward_dimensions=1536,
    vocabulary_size=30522,
    positions=512,
    token_types=2,
    activation="gelu",
    norm_epsilon=1e-12,
    max_tokens=256,
    pooling="mean",
    normalize=True,
)


def few(*cases: Any, ordinary: set[Any]) -> list[Any]:
    """Parameters of which some are for every test run and the others for the full one."""
    return [
        pytest.param(
            *(it if isinstance(it, tuple) else (it,)),
            marks=[] if it in ordinary else [pytest.mark.full],
        )
        for it in cases
    ]


def compile_kernel(chip: str, case: Case) -> Any:
    device = devices(chip)[0]
    assert PallasTpu().refusal(case, device) is None
    return compile_for(
        device,
        partial(PallasTpu(), num_heads=case.N, window=case.window),
        ((case.B, case.T, 3 * case.N * case.H), case.dtype),
        ((case.B, case.T), "int32"),
    )


CASES = {
    "MiniLM": Case(B=32, T=256, N=12, H=32, dtype="bfloat16"),
    "BERT": Case(B=32, T=512, N=12, H=64, dtype="bfloat16"),
    "H=128": Case(B=4, T=1024, N=8, H=128, dtype="bfloat16"),
    "short rows": Case(B=256, T=128, N=12, H=32, dtype="bfloat16"),
    "T=384": Case(B=64, T=384, N=12, H=32, dtype="bfloat16"),
    "odd T": Case(B=2, T=500, N=12, H=64, dtype="bfloat16"),
    "long rows": Case(B=1, T=8192, N=12, H=64, dtype="bfloat16", window=64),
    "float32": Case(B=8, T=256, N=12, H=32, dtype="float32"),
    "odd heads": Case(B=2, T=128, N=3, H=20, dtype="bfloat16"),
}


@pytest.mark.parametrize("case", few(*CASES, ordinary={"MiniLM"}))
@pytest.mark.parametrize("chip", few(*CHIPS, ordinary={"v5e", "v6e"}))
def test_the_kernel_compiles(chip: str, case: str) -> None:
    program = compile_kernel(chip, CASES[case])
    assert "tpu_custom_call" in program.as_text()


def test_a_row_that_takes_more_memory_than_the_chip_has_is_refused() -> None:
    case = Case(B=1, T=2**20, N=12, H=64, dtype="bfloat16")
    refusal = PallasTpu().refusal(case, devices("v5e")[0])
    assert refusal is not None and re.fullmatch(
        r"rows of 1048576 take \d+ MiB of VMEM, and there are 128", refusal
    )


def test_other_devices_are_refused() -> None:
    case = CASES["MiniLM"]
    assert PallasTpu().refusal(case, jax.devices("cpu")[0]) == "needs a TPU"


def block(
    x: jax.Array, into: jax.Array, out: jax.Array, segment_ids: jax.Array, *, N: int
) -> jax.Array:
    qkv = jnp.matmul(x, into, preferred_element_type=jnp.float32).astype(x.dtype)
    context = PallasTpu()(qkv, segment_ids, num_heads=N)
    return jnp.matmul(context, out, preferred_element_type=jnp.float32).astype(x.dtype)


@pytest.mark.parametrize("H", few(32, 64, 128, ordinary={32}))
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_nothing_is_copied_or_transposed_around_the_kernel(chip: str, H: int) -> None:
    B, T, N = 64, 512, 12
    D = N * H
    shapes = [((B, T, D), "bfloat16"), ((D, 3 * D), "bfloat16"), ((D, D), "bfloat16")]
    program = compile_for(devices(chip)[0], partial(block, N=N), *shapes, ((B, T), "int32"))
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    # Everything that moves an array of the size of the context without computing anything; also inside fusions.
    moves = re.findall(
        r"= \(?bf16\[([\d,]+)\]\S* (copy|copy-start|transpose|reverse|concatenate|pad|slice|dynamic-slice)\(",
        text,
    )
    large = [it for it in moves if math.prod(map(int, it[0].split(","))) >= B * T * D]
    assert not large
    # And so nothing is in memory but qkv and the context.
    assert program.memory_analysis().temp_size_in_bytes <= 1.05 * 2 * B * T * 4 * D


@pytest.mark.parametrize("layers", few(1, MINILM.layers, ordinary={1}))
@pytest.mark.parametrize(
    ("chip", "count"), few(*itertools.product(CHIPS, (1, 4)), ordinary={("v5e", 1), ("v6e", 4)})
)
def test_the_encoder_compiles_for_a_shape_of_the_table(chip: str, count: int, layers: int) -> None:
    compile_encoder(chip, count, shape_table("tpu", MINILM.max_tokens, None, count).full[0], layers)


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("chip", CHIPS)
def test_the_encoder_compiles_for_every_shape_of_the_table(chip: str, count: int) -> None:
    shapes = shape_table("tpu", MINILM.max_tokens, None, count).shapes
    assert len(shapes) > 10
    for shape in shapes:
        compile_encoder(chip, count, shape, layers=1)


def compile_encoder(chip: str, count: int, shape: tuple[int, int], layers: int) -> None:
    """As the predictor does it, for parameters and inputs that are only described."""
    config = dataclasses.replace(MINILM, layers=layers)
    program = compile_ahead(
        config, devices(chip)[:count], shape, "bfloat16", attention=PallasTpu(), segments=places(shape[1])
    )  # fmt: skip
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == layers
    assert not re.search("all-reduce|all-gather|all-to-all|collective-permute", text)
    assert hbm_bytes(program) < CHIPS[chip].hbm_bytes / 2  # room for the next batch
