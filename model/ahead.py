"""A model on a TPU that is not there: whether its batches fit, and how long they should take.

Nothing runs and no weights are read: programs are compiled (kernels/tpu.py), and what the compiler says of them is added up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kernels.attention import cycles, select
from kernels.attention.contract import Attention
from kernels.attention.pallas_tpu import PallasTpu
from kernels.tpu import CHIPS, devices
from model.config import EncoderConfig
from model.program import ROWS, cases, describe, everywhere, lower

# What libtpu writes for operations whose cycles it does not know is near 2**63.
UNKNOWN = 2**60
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # XLA's status


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the compiler says of a full batch of a shape on one device, all rows full.

    Attributes:
      problem: why it does not compile or fit, else None; then the others but B and T are None.
      hbm_bytes: parameters, inputs, temporaries, results and code.
      temporary_bytes: of these, what only lives while the batch is computed.
      attention_cycles: static cycles of all layers' attention (kernels/attention/cycles.py); None where it is left
        to XLA, or where `problem` or `not_counted` says why.
      not_counted: why the cycles of the kernel are not known, else None; then seconds lack them.
      seconds: attention_cycles and what libtpu estimates for everything else, at the published clock. Waiting for
        memory is only partly in it: expect 10 to 30 % more.
      tokens_per_second: padded ones.
      utilisation: the share of the chip's published FLOPs that the model's own (`model_flops`) come to.
    """

    B: int
    T: int
    problem: str | None = None
    hbm_bytes: int | None = None
    temporary_bytes: int | None = None
    attention_cycles: int | None = None
    not_counted: str | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    utilisation: float | None = None

    @property
    def out_of_memory(self) -> bool:
        """Whether fewer rows may do."""
        return self.problem is not None and OUT_OF_MEMORY in self.problem


def choose_attention(
    name: str, config: EncoderConfig, dtype: str, shapes: Sequence[tuple[int, int]], chip: str
) -> tuple[Attention, dict[str, str]]:
    """The implementation of that name; with "auto", the first that does not refuse the shapes on the chip. As no chip is
    there, no canary has the last word.

    Returns:
      It, and {name: why not} of those that were preferred to it.

    Raises:
      SelectionError: it refuses, or the name is unknown.
    """
    chosen = select.select(name, cases(config, dtype, shapes, 1), devices(chip)[0], canaries=False)
    return chosen.implementation, dict(chosen.reasons)


def estimate(
    config: EncoderConfig,
    chip: str,
    shape: tuple[int, int],
    dtype: str,
    *,
    attention: Attention,
    segments: int,
) -> Estimate:
    """Compiles the model for batches of a shape (B, T) on one device of a chip in kernels.tpu.CHIPS.

    Args:
      segments: most texts in a row.

    Raises:
      NoCompiler: libtpu is not installed.
    """
    B, T = shape
    device = devices(chip)[:1]
    try:
        program = compile_ahead(
            config, device, shape, dtype, attention=attention, segments=segments
        )
    # Any exception: compilers fail in ways of their own, and what they say is what was asked for.
    except Exception as error:
        return Estimate(B=B, T=T, problem=_first_line(error))
    hbm = hbm_bytes(program)
    if hbm > CHIPS[chip].hbm_bytes:
        return Estimate(B=B, T=T, problem=f"{OUT_OF_MEMORY}: takes {hbm} bytes of HBM")
    counted, not_counted = None, None
    if isinstance(attention, PallasTpu):
        (case,) = cases(config, dtype, [shape], 1)
        try:
            of_head = cycles.count_apart(chip, case).cycles
            counted = config.layers * B * case.N * of_head // CHIPS[chip].cores
        except cycles.NotCounted as error:
            not_counted = str(error)
    estimated = [int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', program.as_text() or "")]
    memory: Any = program.memory_analysis()
    seconds = (sum(n for n in estimated if n < UNKNOWN) + (counted or 0)) / CHIPS[chip].hertz
    return Estimate(
        B=B,
        T=T,
        hbm_bytes=hbm,
        temporary_bytes=memory.temp_size_in_bytes,
        attention_cycles=counted,
        not_counted=not_counted,
        seconds=seconds,
        tokens_per_second=B * T / seconds,
        utilisation=B * T * model_flops(config, T) / seconds / CHIPS[chip].flops,
    )


def compile_ahead(
    config: EncoderConfig,
    on: Sequence[Any],
    shape: tuple[int, int],
    dtype: str,
    *,
    attention: Attention,
    segments: int,
) -> jax.stages.Compiled:
    """The program of a shape (B, T) for devices that may only be described, rows spread over them."""
    mesh = Mesh(np.array(on), (ROWS,))
    network, state = describe(config, dtype)
    parameters = [
        jax.ShapeDtypeStruct(it.shape, it.dtype, sharding=everywhere(mesh))
        for it in jax.tree.leaves(state)
    ]
    return lower(
        network, parameters, mesh, shape,
        attention=attention, pooling=config.pooling, segments=segments,
    ).compile()  # fmt: skip


def hbm_bytes(program: jax.stages.Compiled) -> int:
    """All that a program keeps in a device's memory while it runs."""
    memory: Any = program.memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        + memory.generated_code_size_in_bytes
    )


def model_flops(config: EncoderConfig, T: int) -> int:
    """Operations of a token in a row of T that is one text: two for each weight of the matrices, and attention's
    products with T keys and T values (https://arxiv.org/abs/2204.02311, appendix B)."""
    D, F = config.embedding_dimensions, config.feedforward_dimensions
    return config.layers * (2 * (4 * D * D + 2 * D * F) + 4 * T * D)


def _first_line(error: Exception) -> str:
    line = next((it.strip() for it in str(error).splitlines() if it.strip()), repr(error))
    return line if len(line) <= 300 else line[:300] + " …"
