"""Deterministic documents of mixed lengths, for tests that need many."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = (
    "harbour ledger copper window river season market letter engine garden notice station valley "
    "winter report carriage paper signal bridge morning theatre village railway question answer "
    "silver mountain kitchen journal weather council library company history building measure"
).split()


def text(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words)) + "."


def write_jsonl(
    folder: Path, documents: int, *, files: int = 4, words: tuple[int, int] = (5, 60)
) -> Path:
    """Writes `documents` records over `files` JSON Lines files; lengths are uniform over `words`."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = random.Random(documents)
    for number in range(files):
        with (folder / f"part-{number}.jsonl").open("w") as file:
            for seed in range(number, documents, files):
                record = {"text": text(seed, lengths.randint(*words)), "number": seed}
                file.write(json.dumps(record) + "\n")
    return folder
