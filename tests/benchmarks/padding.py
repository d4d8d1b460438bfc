"""How much of what the device computes is padding, and what that costs: our planner next to two usual ways.

python tests/benchmarks/padding.py [--tokens 1000000] [--json FILE]
python tests/benchmarks/padding.py --measure CHECKPOINT     # fits the cost model that estimates come from

Three mixes of lengths, in random order, cut into windows of 256 tokens:
* Lengthwise: Load after Load as the pipeline makes them, shapes chosen as they pay off;
* sorted, 32 each: everything sorted by length, 32 windows a batch, padded to the longest (sentence-transformers does so);
* Beam: SortAndBatchElements of up to 1,024 tokens a batch, all in one bundle, padded to the longest.
The two others see the whole corpus at once, which a pipeline that streams does not. Estimates are in the
time of the CPU cost model; each distinct shape is one program that XLA compiles.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import apache_beam as beam
import numpy as np

from pipeline.batching import BATCHES_PER_LOAD, Loads, LoadSize
from pipeline.packing import Planner, places, plan
from pipeline.records import Document, SpecialTokens, TokenizedChunk, TokenizedDocument
from pipeline.shapes import shape_table
from pipeline.tokenizing import windows as spans

WINDOW = 256
TABLE = shape_table("cpu", WINDOW, None, 1)


def mixes(tokens: int) -> dict[str, list[int]]:
    """Content tokens of documents."""
    random = np.random.default_rng(0)
    messages = np.clip(random.lognormal(3, 0.6, tokens // 22), 1, 60)
    articles = np.clip(random.lognormal(6.5, 0.6, tokens // 780), 50, 6000)
    heavy = np.exp(random.uniform(np.log(10), np.log(8000), tokens // 1190))
    return {
        "short messages": messages.astype(int).tolist(),
        "articles": articles.astype(int).tolist(),
        "heavy-tailed 10–8,000": heavy.astype(int).tolist(),
    }


def windows(document: int) -> list[int]:
    """Lengths of a document's windows, special tokens included."""
    return [min(WINDOW, document - start + 2) for start in range(0, document, WINDOW - 2)]


def lengthwise(documents: list[int]) -> list[tuple[int, int]]:
    size = LoadSize(
        batch_tokens=TABLE.max_tokens_per_batch,
        max_tokens=BATCHES_PER_LOAD * TABLE.max_tokens_per_batch,
    )
    loads = Loads(Planner(TABLE).plan, size)
    special = SpecialTokens(start_ids=(101,), end_ids=(102,))
    shapes = []
    for number, document in enumerate(documents):
        chunk = TokenizedChunk(documents=(tokenized(number, document),), special=special)
        shapes += [(b.B, b.T) for load in loads.add(chunk) for b in load.batches]
    return shapes + [(b.B, b.T) for load in loads.finish() for b in load.batches]


def tokenized(number: int, tokens: int) -> TokenizedDocument:
    name = str(number)
    return TokenizedDocument(
        document=Document(
            unit_id="", position=number, uri="", record=name, text="", media_type="", content_sha256=name, size_bytes=0
        ),
        characters=0,
        token_ids=np.zeros(tokens, np.int32),
        windows=spans(tokens, WINDOW - 2, 0, None)[0],
        truncated=False,
    )  # fmt: skip


def sorted_by_32(documents: list[int]) -> list[tuple[int, int]]:
    lengths = sorted((n for d in documents for n in windows(d)), reverse=True)
    return [(len(lengths[i : i + 32]), lengths[i]) for i in range(0, len(lengths), 32)]


def beams(documents: list[int]) -> list[tuple[int, int]]:
    lengths = [n for d in documents for n in windows(d)]
    sort = beam.transforms.util.SortAndBatchElements(
        min_batch_size=1, max_batch_size=1024, max_batch_weight=1024, element_size_fn=lambda n: n
    )
    with tempfile.NamedTemporaryFile("r") as file:
        path = file.name  # a pipeline works on copies of what it closes over
        with beam.Pipeline("FnApiRunner") as pipeline:
            batches = pipeline | beam.Create([lengths]) | beam.FlatMap(lambda all_: all_) | sort
            shapes = batches | beam.Map(lambda batch: (len(batch), max(batch)))
            _ = (
                shapes
                | beam.combiners.ToList()
                | beam.Map(lambda found: Path(path).write_text(json.dumps(found)))
            )
        return [tuple(shape) for shape in json.load(file)]


def compare(tokens: int) -> dict[str, dict[str, dict[str, float]]]:
    result: dict[str, dict[str, dict[str, float]]] = {}
    for mix, documents in mixes(tokens).items():
        real = sum(n for d in documents for n in windows(d))
        print(f"\n{mix}: {len(documents):,} documents, {real:,} tokens")
        result[mix] = {}
        for name, batch in (
            ("Lengthwise", lengthwise), ("sorted, 32 each", sorted_by_32), ("Beam", beams),
        ):  # fmt: skip
            shapes = batch(documents)
            row = {
                "efficiency": real / sum(B * T for B, T in shapes),
                "seconds": sum(TABLE.cost.batch(B, T) for B, T in shapes),
                "shapes": len(set(shapes)),
            }
            result[mix][name] = row
            print(
                f"  {name:16} real ÷ padded {row['efficiency']:.3f}   estimated {row['seconds']:6.1f} s"
                f"   shapes {row['shapes']:4.0f}"
            )
        lengths = np.array([n for d in documents for n in windows(d)], np.int32)
        in_use = [shape for shape in TABLE.full if shape[1] % 64 == 0]
        start = time.process_time()
        plan(lengths, TABLE, in_use)
        seconds = time.process_time() - start
        result[mix]["planning"] = {"microseconds_per_window": seconds / len(lengths) * 1e6}
        print(f"  planning takes {seconds / len(lengths) * 1e6:.1f} µs a window")
    return result


def measure(checkpoint: Path, rounds: int = 15) -> None:
    """Times batches of the table's shapes and fits the cost model to the least times."""
    from model.predictor import Predictor

    shapes = [(B, T) for B, T in TABLE.shapes if T in (16, 64, 128, 192, 256) and B * T >= 128]
    predictor = Predictor(
        checkpoint, task="embed", device="cpu", dtype="bfloat16", attention="auto", shapes=shapes
    )
    calls = {}
    for B, T in shapes:
        ids = np.full([B, T], 1000, np.int32)
        segments = np.ones([B, T], np.int32)
        positions = np.tile(np.arange(T, dtype=np.int32), [B, 1])
        calls[B, T] = (ids, segments, positions, places(T))
    least = dict.fromkeys(shapes, float("inf"))
    for _ in range(rounds + 1):
        for shape, call in calls.items():
            start = time.perf_counter()
            predictor.fetch(predictor.dispatch(*call))
            least[shape] = min(least[shape], time.perf_counter() - start)
    for (B, T), seconds in least.items():
        print(f"  {B:3} x {T:3}: {seconds * 1e3:6.1f} ms, {seconds / B / T * 1e6:5.1f} µs a token")
    columns = np.array([[1, B * T, B * T * T] for B, T in shapes], float)
    # Relative errors count: each row is divided by its time.
    weight = 1 / np.array(list(least.values()))[:, None]
    batch, token, attention = np.linalg.lstsq(columns * weight, np.ones(len(shapes)))[0]
    print(
        f"batch_seconds={batch:.2g}, token_seconds={token:.3g}, attention_tokens={token / attention:.0f}, "
        f"compile_seconds={predictor.compile_seconds / len(shapes):.2f}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
    else:
        found = compare(arguments.tokens)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
