"""Our embeddings next to those of sentence-transformers, through the whole pipeline.

    python tests/benchmarks/parity.py --peer-python PYTHON [--documents 400] [--json FILE]

PYTHON is that of an environment as tests/benchmarks/peers.py describes. The documents are pieces of Python's own standard
library, 5 to 20,000 characters long. Two comparisons, each with sentence-transformers' float32:
* first windows: it cuts a text at the model's longest input, so ours runs with --max-windows 1. Its own bfloat16 is shown too;
* whole documents: its model computes every window of a text, and the mean is taken of all their tokens.
Prints least cosines and exits 1 if one is below what the project promises. With JAX 0.12, sentence-transformers 6.2
and torch 2.13, of 400 documents:

    first windows float32                least cosine 0.9999998  median 1.0000000
    first windows bfloat16               least cosine 0.9999640  median 0.9999857
    sentence-transformers' own bfloat16  least cosine 0.9998752  median 0.9999505, 2 below 0.9999
    whole documents float32              least cosine 0.9999998  median 1.0000000
    whole documents bfloat16             least cosine 0.9999703  median 0.9999869
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from corpora import library_texts
from lengthwise_command import documents, job, run_here
from tiny_checkpoint import minilm_folder

PROMISED = {"float32": 0.99999, "bfloat16": 0.9999}
DATE = "2026-01-02"


def theirs(python: str, kind: str, texts: Path) -> np.ndarray:
    """float32[texts, D]."""
    subprocess.run(
        [python, Path(__file__).with_name("peers.py"), kind, minilm_folder()],
        input=f"{texts}\n", stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return np.load(f"{texts}.npy")


def ours(texts: list[str], folder: Path, dtype: str, max_windows: int | None) -> np.ndarray:
    """float32[texts, D]."""
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts))
    )
    settings = {"id_field": "id", "dtype": dtype, "max_windows": max_windows, "date": DATE}
    output = folder / f"{dtype}-{max_windows}"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = run_here(job(corpus, output, minilm_folder(), device="cpu", **settings))
    if status != 0:
        sys.exit(said.getvalue())
    table = documents(output, DATE)
    records = np.array(table["record"].to_pylist(), int)
    if sorted(records.tolist()) != list(range(len(texts))):
        sys.exit(f"expected a row for each of {len(texts)} documents, got {len(records)}")
    return np.array(table["embedding"].to_pylist(), np.float32)[np.argsort(records)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    texts = library_texts(arguments.documents)
    found: dict[str, dict[str, float]] = {}
    broken = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        path = folder / "texts.json"
        path.write_text(json.dumps(texts))
        for what, kind, max_windows in (
            ("first windows", "sentence-transformers float32", 1),
            ("whole documents", "whole float32", None),
        ):
            expected = theirs(arguments.peer_python, kind, path)
            for dtype, promised in PROMISED.items():
                cosine = (ours(texts, folder, dtype, max_windows) * expected).sum(1)
                found[f"{what} {dtype}"] = summary(cosine, promised)
                broken |= bool(cosine.min() < promised)
            if max_windows:
                rounded = theirs(arguments.peer_python, "sentence-transformers bfloat16", path)
                rounded /= np.linalg.norm(rounded, axis=1, keepdims=True)
                cosine = (rounded * expected).sum(1)
                found["sentence-transformers' own bfloat16"] = summary(cosine, PROMISED["bfloat16"])
    for name, row in found.items():
        print(
            f"{name:36} least cosine {row['least']:.7f}  median {row['median']:.7f}  "
            f"{row['below']} of {len(texts)} below {row['promised']}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return int(broken)


def summary(cosine: np.ndarray, promised: float) -> dict[str, float]:
    return {
        "least": float(cosine.min()),
        "median": float(np.median(cosine)),
        "below": int((cosine < promised).sum()),
        "promised": promised,
    }


if __name__ == "__main__":
    sys.exit(main())
