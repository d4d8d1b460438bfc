"""Peak host memory of a run must not grow with the corpus.

    python tests/benchmarks/memory.py [--model MODEL] [--documents 2000 20000] [--files] [--json FILE]

Runs `lengthwise run` once for each number of documents of the same lengths, each in a process of its own, and
prints the peak resident memory of that process. Exits 1 if the largest corpus needs over 15 % more than the smallest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from corpora import write_jsonl, write_texts
from lengthwise_command import documents, start
from tiny_checkpoint import write_tiny_checkpoint

ALLOWED_GROWTH = 1.15
DATE = "2026-01-02"


def peak_bytes(folder: Path, number: int, model: str, write: Callable[..., Path]) -> int:
    """Peak resident bytes of one run over `number` documents."""
    corpus = write(folder / f"in-{number}", number, words=(5, 180))
    output = folder / f"out-{number}"
    process = start(
        "--input", corpus, "--output", output, "--model", model, "--date", DATE
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    said = process.stderr.read() + process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"the run failed:\n{said}")
    if documents(output, DATE).num_rows != number:
        sys.exit(f"expected {number} rows")
    return usage.ru_maxrss * 1024  # Linux counts KiB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="default: a tiny random checkpoint")
    parser.add_argument("--documents", type=int, nargs="+", default=[2_000, 20_000])
    parser.add_argument("--files", action="store_true", help="a document a file, not a line")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    write = write_texts if arguments.files else write_jsonl
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or str(write_tiny_checkpoint(folder / "model"))
        peaks = {n: peak_bytes(folder, n, model, write) for n in sorted(arguments.documents)}
    for number, peak in peaks.items():
        print(f"{number:>9,} documents: {peak / 2**20:,.0f} MiB")
    growth = peaks[max(peaks)] / peaks[min(peaks)]
    print(f"growth: ×{growth:.3f} (allowed ×{ALLOWED_GROWTH})")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"peak_bytes": peaks, "growth": growth}, indent=2) + "\n"
        )
    return 0 if growth <= ALLOWED_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
