"""Cycles of the attention kernel on TPU, counted in the compiler's schedule: needs libtpu, but no TPU.

python tests/benchmarks/kernel_cycles.py [--json] [--chips v5e v6e] [--heads 32 64 128] [--peers] [--check | --store]

Prints, for each chip and width of heads, cycles for a head's 1024×1024 scores in bfloat16 with T = 1024, everything in:
set-up of the row, of query tiles, key tiles with a mask (`cycles`) or without (`cycles_unmasked`), writing. Then what each
unit of the chip would need by itself for a masked tile (`bounds`), and how many bundles of instructions the
kernel has. `--peers` adds JAX's own flash and splash kernels, with segment ids. `--check` compares ours with
kernel_cycles.json beside this file and fails where it grew by more than 3 %; `--store` writes that file.

How it counts, and what is not in it: kernels/attention/cycles.py. It is exact for a compiler, hence the baseline's
libtpu version.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from kernels.attention.contract import Case
from kernels.attention.cycles import compile_and_read, count, dump_to
from kernels.tpu import CHIPS

BASELINE = Path(__file__).with_suffix(".json")
GROWTH = 0.03
N, T = 12, 1024


def peers(H: int) -> Iterator[tuple[str, Callable[..., Any], int, int]]:
    """JAX's own kernels: name, function of q, k, v, segment ids, and tiles of queries and keys that suit them."""
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
            schedule = compile_and_read(chip, dump, function, head, head, head, ((8, T), "int32"))
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
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument(
        "--heads", nargs="+", type=int, default=[32, 64, 128], help="widths of heads"
    )
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--store", action="store_true")
    options = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    libtpu = importlib.metadata.version("libtpu")
    counted: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        dump_to(Path(folder))
        for chip in options.chips:
            for H in options.heads:
                case = Case(B=32, T=T, N=N, H=H, dtype="bfloat16")
                ours: dict[str, Any] = asdict(count(chip, case, Path(folder)))
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
