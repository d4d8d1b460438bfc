"""Deterministic documents of mixed lengths, for tests that need many."""

from __future__ import annotations

import json
import random
import sysconfig
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


def write_texts(folder: Path, documents: int, *, words: tuple[int, int] = (5, 60)) -> Path:
    """Writes as many text files; lengths are uniform over `words`."""
    folder.mkdir(parents=True, exist_ok=True)
    lengths = random.Random(documents)
    for seed in range(documents):
        (folder / f"{seed}.txt").write_text(text(seed, lengths.randint(*words)))
    return folder


def library_texts(number: int) -> list[str]:
    """Pieces of this interpreter's standard library, 5 to 20,000 characters long, as many of each magnitude, in random
    order. Runs of white space are one space: to a WordPiece vocabulary they are the same."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text("utf-8") for path in sorted(folder.glob("*.py"))]
    everything = " ".join(" ".join(sources).split())
    texts = []
    for i in range(number):
        fraction = i / (number - 1)
        length = round(5 * (20_000 / 5) ** fraction)
        start = round((len(everything) - length) * fraction)
        texts.append(everything[start : start + length])
    random.Random(number).shuffle(texts)
    return texts
