"""Tokens per CPU second: ours next to the `tokenizers` library, on Python's own sources and the sample documents.

python tests/benchmarks/tokenizing.py CHECKPOINT [--rounds 7]

CPU time of the process, the least of some rounds, both on one thread. "short lines" are single lines of source, where what
is done for each text weighs most.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"  # read when tokenizers is imported

import tokenizers

from model.tokenizer import load_tokenizer

DOCUMENTS = Path(__file__).parents[1] / "data" / "documents"


def corpora() -> dict[str, list[str]]:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    texts = [path.read_text("utf-8", "replace") for path in sources]
    samples = [path for path in sorted(DOCUMENTS.rglob("*")) if path.suffix in (".txt", ".md")]
    return {
        "sources": texts,
        "short lines": [line for text in texts for line in text.splitlines() if line.strip()][
            :20_000
        ],
        "sample documents": [path.read_bytes().decode("utf-8", "replace") for path in samples] * 10,
    }


def least_seconds(call: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return min(seconds)


def main(checkpoint: Path, rounds: int) -> None:
    ours = load_tokenizer(checkpoint)
    theirs = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    theirs.encode_special_tokens = True
    for name, texts in corpora().items():
        tokens = sum(len(found.ids) for found in ours.encode(texts))
        print(f"{name}: {len(texts):,} texts, {tokens:,} tokens")
        for what, our_call, their_call in (
            ("ids", lambda t=texts: ours.encode(t), lambda t=texts: theirs.encode_batch_fast(t)),
            (
                "ids and offsets",
                lambda t=texts: ours.encode(t, offsets=True),
                lambda t=texts: theirs.encode_batch(t),
            ),
        ):
            a, b = least_seconds(our_call, rounds), least_seconds(their_call, rounds)
            print(
                f"  {what:16} ours {tokens / a / 1e6:5.2f} M tokens/s, tokenizers {tokens / b / 1e6:5.2f}, × {b / a:.1f}"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    main(arguments.checkpoint, arguments.rounds)
