"""Sizes of the flash kernel's tiles, by chip, width of heads and T; legal ones for everything else.

What chose them: cycles of the compiler's schedule for a head's 1024×1024 scores in bfloat16, packed (with a mask),
everything in, at T = 1,024 and N = 12: `python tests/benchmarks/kernel_cycles.py --peers`, JAX 0.12.0.1 with libtpu
0.0.50.1. No TPU was there, so nothing here knows of waiting for memory.

            H=32   H=64   H=128    what bounds it           flash of JAX      splash of JAX
    v5e     3,074  3,545  4,769    MXU 2,560 3,072 4,096    5,883 5,873 5,573  5,674 5,674 5,826
    v6e     1,952  2,056  2,408    MXU 1,216 1,344 1,600    3,872 3,860 3,774  3,753 3,753 3,859
    v5p     3,169  3,573  4,802    MXU, as v5e
    tpu7x   1,936  2,029  2,275    MXU, as v6e
    v4      4,404  5,379  6,621    VLOAD 3,341 3,596, MXU 4,352 (H=128)

- Tiles of 256×256 skip as finely as short texts need: eight of 128 tokens in a row of 1,024 cost a quarter of it. What small tiles
  lose, heads gain: with all heads of a model in a grid step, and two key tiles at a time, the MXU always has
  something to do. v6e, H=64: 256×256 with 12 heads, one key tile at a time 2,312, two 2,056; 512×512 with 4 heads 2,462;
  256×512 with 12 heads, two at a time 2,052, of which packed rows would have nothing.
- Sums of weights on the MXU: v6e, H=64: 2,056, on the VPU 2,256. v5e, H=64: 3,844 on the MXU, 3,658 on the VPU (then).
- Scores 6 items ahead of weights, weights 2 ahead of values (`AHEAD`, `BEHIND` in pallas_tpu.py). v6e, H=64: 4, 2: 2,080;
  5, 2: 2,126; 6, 1: 2,130; 6, 2: 2,056; 6, 3: 2,119; 8, 2: 2,063.
- What v6e and tpu7x lack to the bound: the MXU has work in three of four cycles of a body (H=64: 1,344 of 1,779), as the
  pipeline of 24 items fills and drains once for two key tiles, and per row and head 101 cycles go into Vᵀ, 160 into
  finishing tiles. More items at a time would be more code than the 12,000 bundles there are.
- A running maximum instead of looking at the sums afterwards would take two or three more VPU operations for each of the
  1,024 registers of scores: two for the maximum, one to mask before it. The prototype needed 3,294 against 2,192.
- How often the careful way is taken: all-MiniLM-L6-v2 and the sample documents (`python tests/benchmarks/row_sums.py`): sums from
  2**0.4 to 2**30, but for head 2 of layer 0, which reaches 2**136; 0.29 % of windows × heads of that layer are
  outside of RANGE, none of the other five layers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from kernels.attention.contract import Case

LANES = 128
MIB = 2**20

# Memory that a core computes from, by `device_kind`: what the compiler may give to one kernel.
VMEM = {
    "TPU v4": 16 * MIB,
    "TPU v5 lite": 128 * MIB,  # v5e
    "TPU v5": 64 * MIB,  # v5p
    "TPU v6 lite": 128 * MIB,  # v6e
    "TPU7x": 64 * MIB,
}
# A chip that is not in the list has at least as much as the smallest one.
LEAST_VMEM = min(VMEM.values())
# Their matrix units are 128 wide, and are what the kernel waits for: rows of ones would add to that.
NARROW_MXU = ("TPU v5 lite", "TPU v5")
# Heads of a grid step: more are more code, which has to be fetched too.
MOST_HEADS = 12
# What the compiler itself needs: spilled registers, semaphores.
RESERVE = 1 * MIB


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """
    Attributes:
      queries, keys: positions of a tile; multiples of 128 that divide T.
      groups: lane groups of a grid step. More give the compiler more to do at once.
      chunk: queries of a grid step, a multiple of `queries` that divides T: less than T where a row takes too much memory.
      sums_on_mxu: whether rows of ones under the values have the matrix unit add up the weights, or the vector
        units do.
    """

    queries: int
    keys: int
    groups: int
    chunk: int
    sums_on_mxu: bool

    def vmem_bytes(self, case: Case) -> int:
        """What the kernel needs, for a case that fills registers."""
        size = 4 if case.dtype == "float32" else 2
        width = self.groups * max(LANES, case.H)
        heads, rows = width // case.H, case.H + 16
        # The blocks of q and out, k and v, and the intervals (8 rows at least): the next step's are fetched while
        # this one computes.
        blocks = 2 * (width * size * 2 * (self.chunk + case.T) + 8 * case.T * 4)
        scratch = heads * (rows * case.T * size + (rows + 16) * self.queries * 4)
        # A row of its own takes 8.
        scratch += 2 * heads * 8 * self.chunk * 4 + 2 * self.keys * self.queries * size
        # What is under way at once: scores and weights of a few heads.
        return blocks + scratch + 12 * self.keys * self.queries * 4 + RESERVE


def fill_registers(case: Case) -> Case:
    """The case with a whole number of lane groups (H 32, 64 or a multiple of 128), and T a multiple of 128."""
    H = next((H for H in (32, 64) if case.H <= H), -(-case.H // LANES) * LANES)
    heads = max(LANES // H, 1)
    N, T = -(-case.N // heads) * heads, -(-case.T // LANES) * LANES
    return Case(B=case.B, T=T, N=N, H=H, dtype=case.dtype)


def refusal(case: Case, choose: Callable[[Case, str | None], Tiles], kind: str) -> str | None:
    """What to say of a case whose tiles do not fit the chip, or None."""
    padded = fill_registers(case)
    need, room = choose(padded, kind).vmem_bytes(padded), vmem_bytes(kind)
    if need <= room:
        return None
    return f"rows of {case.T} take {need // MIB} MiB of VMEM, and there are {room // MIB}"


def choose(case: Case, kind: str | None) -> Tiles:
    """The tiles for a case that fills registers, on a chip of this `device_kind` (None: not known).

    Where not even the smallest fit the chip, it is those.
    """
    # 256 skips as finely as short texts need (eight of 128 in a row of 1,024 cost a quarter of it).
    edge = next(edge for edge in (256, 384, 128) if case.T % edge == 0)
    lane_groups = case.N * case.H // max(LANES, case.H)
    heads = max(LANES // case.H, 1)
    chunks = [case.T, *(n for n in (1024, edge) if n % edge == 0 and case.T % n == 0)]
    candidates = [
        Tiles(
            queries=edge,
            keys=edge,
            groups=groups,
            chunk=chunk,
            sums_on_mxu=kind not in NARROW_MXU,
        )
        for chunk in chunks
        for groups in range(lane_groups, 0, -1)
        if lane_groups % groups == 0 and (groups == 1 or groups * heads <= MOST_HEADS)
    ]
    room = vmem_bytes(kind)
    return next((it for it in candidates if it.vmem_bytes(case) <= room), candidates[-1])


def vmem_bytes(kind: str | None) -> int:
    """What the chip has."""
    return VMEM.get(kind or "", LEAST_VMEM)


def kind_of_this_program() -> str | None:
    """The `device_kind` of the chip that the program being traced is for; None where it is no TPU."""
    # Inside shard_map, or when compiling for a chip that is not there, the mesh tells.
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind if device.platform == "tpu" else None
