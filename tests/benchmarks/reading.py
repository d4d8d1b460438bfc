"""CPU time and memory of reading one uncompressed JSON Lines file, without Beam.

python tests/benchmarks/reading.py [--megabytes 200] [--words 12]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

from pipeline.config import ReadingSettings
from pipeline.listing import list_units
from pipeline.reading import read_unit

WORDS = "harbour ledger window Straße river señal маркет сезон 手紙 engine garden notice".split()


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write(path: Path, megabytes: int, words: int) -> None:
    chosen = random.Random(0)
    with path.open("w") as file:
        number = 0
        while file.tell() < megabytes * 10**6:
            for _ in range(1000):
                text = " ".join(chosen.choices(WORDS, k=words))
                file.write(json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n")
                number += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--words", type=int, default=12)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        write(path, given.megabytes, given.words)
        settings = ReadingSettings(inputs=(str(path),))
        units = list_units(settings).units
        before = peak_megabytes()
        start = time.process_time()
        records = 0
        for unit in units:
            for chunk in read_unit(unit, settings, ()):
                records += len(chunk.documents)
        seconds = time.process_time() - start
        print(
            f"{path.stat().st_size / 1e6:.0f} MB in {len(units)} units, {records:,} records: "
            f"{seconds / records * 1e6:.1f} µs of CPU a record, {path.stat().st_size / seconds / 1e6:.0f} MB/s; "
            f"peak memory {before:.0f} MB before, {peak_megabytes():.0f} MB after"
        )


if __name__ == "__main__":
    main()
