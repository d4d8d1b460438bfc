"""Cycles of the flash kernel on TPU, counted in the compiler's schedule: needs libtpu, but no TPU.

libtpu writes the schedule that it made (`--xla_jf_dump_to`). A bundle is what the core starts in one cycle; where it
expects to wait there are empty ones. So a region of the program takes as many cycles as it has bundles, and a loop that
many times its trips. (Of its several dumps, `final_bundles` has lost the waits again.) Not in it: waiting for memory,
conflicts in it, loading of code. Against published measurements this is 10 to 30 % too little.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.attention import tiles as table
from kernels.attention.contract import Case
from kernels.attention.pallas_tpu import PallasTpu
from kernels.attention.tiles import LANES, Tiles
from kernels.tpu import compile_for, devices

UNITS = ("MATMUL", "MATPUSH", "VALU", "EUP", "VLOAD", "VSTORE", "XLU")
BRANCH = 5  # bundles: a branch and its four delay slots


class NotCounted(Exception):
    """The dump does not hold what it should."""


@dataclass(frozen=True)
class Region:
    """Bundles low … high - 1: of a loop, or of what a branch can skip."""

    low: int
    high: int

    @property
    def cycles(self) -> int:
        return self.high - self.low

    def __contains__(self, other: Region) -> bool:
        return self != other and self.low <= other.low and other.high <= self.high


@dataclass(frozen=True)
class Schedule:
    bundles: int
    loops: list[Region]  # ascending in cycles
    skippable: list[Region]
    units: dict[str, tuple[int, list[int]]]  # how many there are; how many are used in each bundle

    def uses(self, region: Region, unit: str) -> int:
        return sum(self.units[unit][1][region.low : region.high]) if unit in self.units else 0

    def bounds(self, region: Region) -> dict[str, float]:
        """Cycles that each unit would need by itself."""
        return {
            unit: self.uses(region, unit) / self.units[unit][0]
            for unit in UNITS
            if unit in self.units
        }

    def products(self, region: Region) -> list[Region]:
        """The innermost skippable regions inside it that use the matrix unit."""
        found = [it for it in self.skippable if it in region and self.uses(it, "MATMUL")]
        return [it for it in found if not any(other in it for other in found)]


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Cycles of one core for a head's T×T scores, everything in: set-up of the row, of query tiles, key tiles, writing.

    Attributes:
      cycles: where every key tile has a mask.
      cycles_unmasked: where none has.
      body: of `cycles`, what goes over key tiles.
      per_row, per_query_tiles: of both, what comes once a grid step and once a query tile.
      bounds: for each unit of the core, what it would need by itself for `body`.
      bundles: of instructions that the kernel has.
      tiles: those it was compiled with.
    """

    cycles: int
    cycles_unmasked: int
    body: int
    per_row: int
    per_query_tiles: int
    bounds: dict[str, int]
    bundles: int
    tiles: str


def dump_to(folder: Path) -> None:
    """Has libtpu write what it makes of every program. Only before this process first uses it."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


def count_apart(chip: str, case: Case) -> Counted:
    """As `count`, in a process of its own, since libtpu takes its settings when it is loaded. Takes 10 s and more.

    Raises:
      NotCounted: with the last line of what went wrong.
    """
    arguments = [sys.executable, "-P", "-m", "kernels.attention.cycles", chip]
    result = subprocess.run(
        [*arguments, json.dumps(asdict(case))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    if result.returncode:
        raise NotCounted((result.stderr.strip().splitlines() or ["no reason given"])[-1])
    return Counted(**json.loads(result.stdout.splitlines()[-1]))


def count(chip: str, case: Case, dump: Path) -> Counted:
    """Compiles the kernel for a chip and counts, once `dump_to` has named the folder.

    Raises:
      NotCounted: the schedule is not as this module knows the kernel's.
    """
    device = devices(chip)[0]
    padded = table.fill_registers(case)
    tiles = table.choose(padded, device.device_kind)
    schedule = compile_and_read(
        chip, dump, lambda qkv, ids: PallasTpu()(qkv, ids, num_heads=case.N, window=case.window),
        ((case.B, case.T, 3 * case.N * case.H), case.dtype), ((case.B, case.T), "int32"),
    )  # fmt: skip
    return _count(schedule, padded, tiles)


def _count(schedule: Schedule, case: Case, tiles: Tiles) -> Counted:
    # The loop over (pairs of) key tiles has two bodies, masked and not, and no loop inside; around it are that over
    # query tiles, which goes on with the last of an odd number, and that over grid steps, with the careful way.
    innermost = [
        it for it in schedule.loops
        if len(schedule.products(it)) == 2 and not any(other in it for other in schedule.loops)
    ]  # fmt: skip
    around = [it for it in schedule.loops if innermost and innermost[0] in it]
    query_tiles, key_tiles = tiles.chunk // tiles.queries, case.T // tiles.keys
    if len(innermost) != 1 or len(around) < min(query_tiles, 2):
        raise NotCounted(
            f"expected one loop over key tiles inside those over query tiles and the grid, found {innermost}, {around}"
        )
    over_keys, over_grid = innermost[0], around[-1]
    # A single query tile needs no loop: all is in the grid's.
    over_queries = around[0] if query_tiles > 1 else over_keys

    def after(inner: Region, outer: Region) -> Region:
        """What can be skipped of what comes after a loop in the one around it."""
        found = [
            it for it in schedule.skippable
            if it in outer and it.low >= inner.high and schedule.uses(it, "MATMUL")
        ]  # fmt: skip
        return max(found, key=lambda it: it.cycles, default=Region(0, 0))

    at_once = min(2, key_tiles)
    careful = after(over_queries, over_grid)
    odd = after(over_keys, over_queries if query_tiles > 1 else Region(over_grid.low, careful.low))
    unmasked, masked = sorted(schedule.products(over_keys), key=lambda it: it.low)
    if not careful.cycles or bool(odd.cycles) != (at_once > 1):
        raise NotCounted(
            f"expected a body for an odd tile and the careful way, found {odd}, {careful}"
        )
    key_steps, left = divmod(key_tiles, at_once)
    per_key_step = over_keys.cycles - unmasked.cycles - masked.cycles
    if query_tiles > 1:
        per_queries = over_queries.cycles - over_keys.cycles - odd.cycles
        grid = over_grid.cycles - over_queries.cycles - careful.cycles
    else:
        per_queries = 0
        grid = over_grid.cycles - over_keys.cycles - odd.cycles - careful.cycles
    heads = tiles.groups * max(1, LANES // case.H)
    share = case.T // tiles.chunk / heads  # grid steps, for a head

    def total(body: Region) -> int:
        keys = key_steps * (per_key_step + body.cycles) + left * odd.cycles
        return round(share * (grid + query_tiles * (per_queries + keys)))

    times = share * query_tiles * key_steps
    return Counted(
        cycles=total(masked),
        cycles_unmasked=total(unmasked),
        body=round(masked.cycles * times),
        per_row=round(share * grid),
        per_query_tiles=round(share * query_tiles * per_queries),
        bounds={unit: round(n * times) for unit, n in schedule.bounds(masked).items()},
        bundles=schedule.bundles,
        tiles=repr(tiles),
    )


def compile_and_read(
    chip: str, dump: Path, function: Callable[..., Any], *arguments: Any
) -> Schedule:
    """The schedule of the one kernel in a function, with `arguments` of (shape, dtype)."""
    for file in dump.iterdir():
        file.unlink()
    compile_for(devices(chip)[0], function, *arguments)
    return read_schedule(dump)


def read_schedule(dump: Path) -> Schedule:
    """The schedule of the one Mosaic kernel in a dump."""

    def newest(pattern: str, op: str = "") -> Path:
        found = [
            it for it in sorted(dump.iterdir()) if re.search(pattern, it.name) and op in it.name
        ]
        if not found:
            raise NotCounted(f"the dump has no file {pattern!r} of {op or 'any program'}")
        return found[-1]

    kernels = [
        it for it in sorted(dump.glob("*schedule-analysis_final_bundles.txt"))
        if "late-" not in it.name and "TLP" not in it.name and "tpu_custom_call" in it.read_text(errors="replace")
    ]  # fmt: skip
    if not kernels:
        raise NotCounted("the kernel is not in the dump")
    op = re.sub(r"^\d+-(.*)-\d+-schedule.*", r"\1", kernels[-1].name)

    lines = newest(r"\d-packed-bundles-post-ra\.txt$", op).read_text(errors="replace").splitlines()
    targets = dict(
        re.findall(
            r"%(\w+) = sbr\.rel.*target bundleno = (\d+)",
            newest(r"\d-post-bundle-packing-post-ra\.txt$", op).read_text(errors="replace"),
        )
    )
    bundles, loops, skippable = 0, set(), []
    for line in lines:
        bundle = re.match(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)*:\s*(?:>\s*)*\{", line)
        if not bundle:
            continue
        bundles += 1
        at = int(bundle[1], 16)
        for name in re.findall(r"%(\w+) = sbr\.rel", line):
            if name not in targets:
                continue
            target = int(targets[name])
            if target <= at:
                loops.add(Region(target, at + BRANCH))
            elif target > at + BRANCH:
                skippable.append(Region(at + BRANCH, target))

    usage = (
        newest(r"pre-delay_hlo-static-per-bundle-utilization\.txt$", op).read_text().splitlines()
    )
    head = next(n for n, line in enumerate(usage) if line.startswith("== CAP"))
    names = [name.strip() for name in usage[head + 1].split(",")]
    rows = [
        [int(n) for n in line.split()] for line in usage[head + 3 :] if re.match(r"^[\d ]+$", line)
    ]
    if abs(len(rows) - bundles) > 2:
        raise NotCounted(f"{bundles} bundles, but the use of units for {len(rows)}")
    counts = [int(n) for n in usage[head + 2].split()]
    units = {
        {"MXU": "MATMUL"}.get(name, name): (
            counts[n],
            [row[n] for row in rows],
        )  # MXU: libtpu 0.0.42
        for n, name in enumerate(names)
        if counts[n]
    }
    return Schedule(bundles, sorted(loops, key=lambda it: it.cycles), skippable, units)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        dump_to(Path(folder))
        chip, case = sys.argv[1:]
        print(json.dumps(asdict(count(chip, Case(**json.loads(case)), Path(folder)))))
