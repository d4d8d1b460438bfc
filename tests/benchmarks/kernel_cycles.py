"""Cycles of the attention kernel on TPU, counted in the compiler's schedule: needs libtpu, but no TPU.

python tests/benchmarks/kernel_cycles.py [--json] [--chips v5e v6e] [--heads 32 64 128] [--peers] [--check | --store]

Prints, for each chip and width of heads, cycles for a head's 1024×1024 scores in bfloat16 with T = 1024, everything in:
set-up of the row, of query tiles, key tiles with a mask (`cycles`) or without (`cycles_unmasked`), writing. Then what each
unit of the chip would need by itself for a masked tile (`bounds`), and how many bundles of instructions the
kernel has. `--peers` adds JAX's own flash and splash kernels, with segment ids. `--check` compares ours with
kernel_cycles.json beside this file and fails where it grew by more than 3 %; `--store` writes that file.

How it counts: libtpu writes the schedule that it made (`--xla_jf_dump_to`). A bundle is what the core starts in one
cycle; where it expects to wait there are empty ones. So a region of the program takes as many cycles as it
has bundles, and a loop that many times its trips. (Of its several dumps, `final_bundles` has lost the
waits again.) Not in it: waiting for memory, conflicts in it, loading of code. Against published
measurements this is 10 to 30 % too little. It is exact for a compiler, hence the baseline's libtpu version.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tpu_compiler import TOPOLOGIES, compile_for, devices

BASELINE = Path(__file__).with_suffix(".json")
GROWTH = 0.03
N, T = 12, 1024
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
        return {
            unit: self.uses(region, unit) / self.units[unit][0]
            for unit in UNITS
            if unit in self.units
        }

    def products(self, region: Region) -> list[Region]:
        """The innermost skippable regions inside it that use the matrix unit."""
        found = [it for it in self.skippable if it in region and self.uses(it, "MATMUL")]
        return [it for it in found if not any(other in it for other in found)]


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


def compile_kernel(
    chip: str, dump: Path, function: Callable[..., Any], *arguments: Any
) -> Schedule:
    """Compiles for a chip, with `arguments` of (shape, dtype)."""
    for file in dump.iterdir():
        file.unlink()
    compile_for(devices(chip)[0], function, *arguments)
    return read_schedule(dump)


def count_ours(chip: str, dump: Path, H: int, tiles: Any = None) -> dict[str, Any]:
    from kernels.attention import tiles as table
    from kernels.attention.contract import Case
    from kernels.attention.pallas_tpu import PallasTpu

    kind = devices(chip)[0].device_kind
    tiles = tiles or table.choose(Case(B=32, T=T, N=N, H=H, dtype="bfloat16"), kind)
    attention = PallasTpu(choose_tiles=lambda case, kind: tiles)
    schedule = compile_kernel(
        chip, dump, lambda qkv, ids: attention(qkv, ids, num_heads=N),
        ((32, T, 3 * N * H), "bfloat16"), ((32, T), "int32"),
    )  # fmt: skip
    # The loop over pairs of key tiles has two bodies, masked and not, and no loop inside; around it are those over
    # query tiles, which goes on with the last of an odd number, and over grid steps, with the careful way.
    innermost = [
        it for it in schedule.loops
        if len(schedule.products(it)) == 2 and not any(other in it for other in schedule.loops)
    ]  # fmt: skip
    around = [it for it in schedule.loops if innermost and innermost[0] in it]
    if len(innermost) != 1 or len(around) < 2:
        raise NotCounted(
            f"expected one loop over key tiles and two around it, found {innermost}, {around}"
        )
    over_keys, over_queries, over_grid = innermost[0], around[0], around[-1]
    bodies = sorted(schedule.products(over_keys), key=lambda it: it.low)

    def after(inner: Region, outer: Region) -> Region:
        """What can be skipped of what comes after a loop in the one around it."""
        found = [
            it for it in schedule.skippable
            if it in outer and it.low >= inner.high and schedule.uses(it, "MATMUL")
        ]  # fmt: skip
        return max(found, key=lambda it: it.cycles, default=Region(0, 0))

    odd, careful = after(over_keys, over_queries), after(over_queries, over_grid)
    if len(bodies) != 2 or not odd.cycles or not careful.cycles:
        raise NotCounted(
            f"expected two bodies, one for an odd tile and the careful way, found {bodies}, {odd}, {careful}"
        )
    heads, full = tiles.groups * max(1, 128 // H), T // tiles.queries
    key_steps = T // tiles.keys // 2
    grid = over_grid.cycles - over_queries.cycles - careful.cycles
    per_queries = over_queries.cycles - over_keys.cycles - odd.cycles
    per_keys = over_keys.cycles - sum(it.cycles for it in bodies)

    def total(body: Region) -> int:
        step = per_keys + body.cycles
        return round((grid + full * (per_queries + key_steps * step)) / heads)

    unmasked, masked = bodies
    share = full * key_steps / heads
    return {
        "cycles": total(masked),
        "cycles_unmasked": total(unmasked),
        "body": round(masked.cycles * share),
        "per_row": round(grid / heads),
        "per_query_tiles": round(full * per_queries / heads),
        "bounds": {unit: round(n * share) for unit, n in schedule.bounds(masked).items()},
        "bundles": schedule.bundles,
        "tiles": repr(tiles),
    }


def peers(H: int) -> Iterator[tuple[str, Callable[..., Any], int, int]]:
    """JAX's own kernels: name, function of q, k, v, segment ids, and tiles of queries and keys that suit them."""
    import jax
    from jax.experimental.pallas.ops.tpu import flash_attention as flash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    for queries, keys in ((1024, 1024), (512, 1024)):
        sizes = flash.BlockSizes(block_q=queries, block_k_major=keys, block_k=512, block_b=1)
        yield (
            "flash",
            lambda q, k, v, ids, sizes=sizes: flash.flash_attention(
                q, k, v, segment_ids=flash.SegmentIds(ids, ids), sm_scale=H**-0.5, block_sizes=sizes
            ),
            queries,
            keys,
        )
        kernel = splash.make_splash_mha(
            masks.MultiHeadMask([masks.FullMask((T, T))] * N),
            block_sizes=splash.BlockSizes(block_q=queries, block_kv=keys, block_kv_compute=512),
            head_shards=1,
            q_seq_shards=1,
        )
        yield (
            "splash",
            lambda q, k, v, ids, kernel=kernel: jax.vmap(
                lambda q, k, v, ids: kernel(q, k, v, segment_ids=splash.SegmentIds(ids, ids))
            )(q, k, v, ids),
            queries,
            keys,
        )


def count_peers(chip: str, dump: Path, H: int) -> dict[str, Any]:
    best: dict[str, Any] = {}
    for name, function, queries, keys in peers(H):
        head = ((8, N, T, H), "bfloat16")
        try:
            schedule = compile_kernel(chip, dump, function, head, head, head, ((8, T), "int32"))
        except Exception as error:  # of their compiling: too large for the chip, say
            best.setdefault(name, {"error": str(error)[:200]})
            continue
        grid = schedule.loops[-1]  # one grid step: everything, as there is one tile of keys
        cycles = round(grid.cycles * T * T / (queries * keys))
        if cycles < best.get(name, {}).get("cycles", float("inf")):
            best[name] = {
                "cycles": cycles,
                "queries": queries,
                "keys": keys,
                "bundles": schedule.bundles,
            }
    return best


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", default=list(TOPOLOGIES), choices=list(TOPOLOGIES))
    parser.add_argument(
        "--heads", nargs="+", type=int, default=[32, 64, 128], help="widths of heads"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()

    os.environ["JAX_PLATFORMS"] = "cpu"
    libtpu = importlib.metadata.version("libtpu")
    counted: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        for chip in options.chips:
            for H in options.heads:
                ours = count_ours(chip, Path(folder), H)
                counted[f"{chip} H={H}"] = ours
                if options.peers:
                    ours["peers"] = count_peers(chip, Path(folder), H)
                if not options.json:
                    print(chip, f"H={H}", json.dumps(ours), flush=True)
    if options.json:
        print(json.dumps({"libtpu": libtpu, "counted": counted}, indent=1))
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if options.store:
        cycles = {key: it["cycles"] for key, it in counted.items()}
        BASELINE.write_text(
            json.dumps(baseline | {libtpu: baseline.get(libtpu, {}) | cycles}, indent=1) + "\n"
        )
    if options.check:
        wrong = compare(
            {key: it["cycles"] for key, it in counted.items()}, baseline.get(libtpu, {}), libtpu
        )
        print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
        return 1 if wrong else 0
    return 0


def compare(counted: dict[str, int], stored: dict[str, int], libtpu: str) -> list[str]:
    """What speaks against the counted cycles."""
    return [
        f"{key}: no baseline for libtpu {libtpu} (--store writes it)"
        if key not in stored
        else f"{key}: {cycles} cycles, over {GROWTH:.0%} more than the stored {stored[key]}"
        for key, cycles in counted.items()
        if cycles > stored.get(key, 0) * (1 + GROWTH)
    ]


if __name__ == "__main__":
    sys.exit(main())
