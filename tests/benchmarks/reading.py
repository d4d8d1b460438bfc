"""CPU time and memory of reading one uncompressed JSON Lines file in ranges, without Beam.

python tests/benchmarks/reading.py [--megabytes 2000] [--words 12]

The file lies in the temporary folder while it is read.
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
    """Writes the same 10,000 records again and again."""
    chosen = random.Random(0)
    texts = (" ".join(chosen.choices(WORDS, k=words)) for _ in range(10_000))
    records = [
        json.dumps({"id": n, "text": text}, ensure_ascii=False) for n, text in enumerate(texts)
    ]
    block = "".join(f"{record}\n" for record in records).encode()
    with path.open("wb") as file:
        while file.tell() < megabytes * 10**6:
            file.write(block)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
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
