"""How much of what the device computes is padding, and what that costs: our planner next to usual ways.

python tests/benchmarks/padding.py [--tokens 1000000] [--json FILE]
python tests/benchmarks/padding.py --time CHECKPOINT        # what the batches of each way take in truth
python tests/benchmarks/padding.py --measure CHECKPOINT     # fits the cost model that estimates come from

Three mixes of lengths, in random order, cut into windows of 256 tokens:
* Lengthwise: Load after Load as the pipeline makes them, shapes chosen as they pay off;
* buckets: everything sorted by length, one window a row, full batches of the planner's table, widths in steps of 16;
* sorted, 32 each: everything sorted by length, 32 windows a batch, padded to the longest (sentence-transformers does so);
* Beam: SortAndBatchElements of up to 1,024 tokens a batch, all in one bundle, padded to the longest.
The others see the whole corpus at once, which a pipeline that streams does not. Estimates are in the time of the CPU cost
model, with what compiling takes apart: each distinct shape is one program. The model knows nothing of caches, and flatters batches
of more than 1,024 tokens; `--time` asks the real model, in bfloat16. Its CPU seconds of a million tokens (two
Xeon cores with AMX, JAX 0.12; compiling, 1.5 s a program there, apart):

    short messages           Lengthwise  75.6 (3 shapes)  buckets 118.4 ( 4)  sorted, 32 each  80.8 (59)
    articles                 Lengthwise 109.0 (2)         buckets 108.1 (16)  sorted, 32 each 287.8 (41)
    heavy-tailed 10–8,000    Lengthwise 104.7 (2)         buckets  99.8 (16)  sorted, 32 each 275.2 (28)
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

import apache_beam as beam
import numpy as np

from pipeline.batching import BATCHES_PER_LOAD, Loads, LoadSize
from pipeline.packing import Planner, places
from pipeline.records import (
    Document,
    PlannedBatch,
    SpecialTokens,
    TokenizedChunk,
    TokenizedDocument,
)
from pipeline.shapes import Shape, shape_table
from pipeline.tokenizing import windows as spans

WINDOW = 256
TABLE = shape_table("cpu", WINDOW, None, 1)
SAMPLED = 8  # batches of each way that are timed


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


def lengthwise(documents: list[int], spent: list[float] | None = None) -> list[Shape]:
    """`spent` takes the CPU seconds of planning each Load."""
    planner = Planner(TABLE)

    def timed(lengths: np.ndarray) -> tuple[PlannedBatch, ...]:
        start = time.process_time()
        batches = planner.plan(lengths)
        if spent is not None:
            spent.append(time.process_time() - start)
        return batches

    size = LoadSize(
        batch_tokens=TABLE.max_tokens_per_batch,
        max_tokens=BATCHES_PER_LOAD * TABLE.max_tokens_per_batch,
    )
    loads = Loads(timed, size)
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


def buckets(documents: list[int]) -> list[Shape]:
    widths = [T for _, T in TABLE.full]
    of_width = Counter(bisect_left(widths, n) for d in documents for n in windows(d))
    return [TABLE.full[i] for i, n in of_width.items() for _ in range(-(-n // TABLE.full[i][0]))]


def sorted_by_32(documents: list[int]) -> list[Shape]:
    lengths = sorted((n for d in documents for n in windows(d)), reverse=True)
    return [(len(lengths[i : i + 32]), lengths[i]) for i in range(0, len(lengths), 32)]


def beams(documents: list[int]) -> list[Shape]:
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
            ("Lengthwise", lengthwise), ("buckets", buckets), ("sorted, 32 each", sorted_by_32), ("Beam", beams),
        ):  # fmt: skip
            shapes = batch(documents)
            row = {
                "efficiency": real / sum(B * T for B, T in shapes),
                "seconds": sum(TABLE.cost.batch(B, T) for B, T in shapes),
                "compile_seconds": len(set(shapes)) * TABLE.cost.compile_seconds,
                "shapes": len(set(shapes)),
            }
            result[mix][name] = row
            print(
                f"  {name:16} real ÷ padded {row['efficiency']:.3f}   estimated {row['seconds']:6.1f} s + "
                f"{row['compile_seconds']:5.1f} s compiling   shapes {row['shapes']:4.0f}"
            )
        spent: list[float] = []
        lengthwise(documents, spent)
        microseconds = sum(spent) / sum(len(windows(d)) for d in documents) * 1e6
        result[mix]["planning"] = {"microseconds_per_window": microseconds}
        print(f"  planning, choosing shapes included, takes {microseconds:.1f} µs a window")
    return result


def least_seconds(
    checkpoint: Path, shapes: Collection[Shape], clock: Callable[[], float], rounds: int = 10
) -> dict[Shape, float]:
    """What a batch of each shape takes in bfloat16, by this clock: the least of some rounds in which they take turns."""
    from model.predictor import Predictor

    predictor = Predictor(
        checkpoint, task="embed", device="cpu", dtype="bfloat16", attention="auto", shapes=shapes
    )
    calls = {}
    for B, T in shapes:
        positions = np.tile(np.arange(T, dtype=np.int32), [B, 1])
        calls[B, T] = (np.full_like(positions, 1000), np.ones_like(positions), positions, places(T))
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 1):  # the first one compiles
        for shape, call in calls.items():
            start = clock()
            predictor.fetch(predictor.dispatch(*call))
            least[shape] = min(least[shape], clock() - start)
    print(f"compile_seconds={predictor.compile_seconds / predictor.compiled_programs:.2f}")
    return least


def measure(checkpoint: Path) -> None:
    """Fits the cost model to batches of the table's shapes."""
    shapes = [(B, T) for B, T in TABLE.shapes if T in (16, 64, 128, 192, 256) and B * T >= 128]
    least = least_seconds(checkpoint, shapes, time.perf_counter)
    for (B, T), seconds in least.items():
        print(f"  {B:3} x {T:3}: {seconds * 1e3:6.1f} ms, {seconds / B / T * 1e6:5.1f} µs a token")
    columns = np.array([[1, B * T, B * T * T] for B, T in shapes], float)
    # Relative errors count: each row is divided by its time.
    weight = 1 / np.array(list(least.values()))[:, None]
    batch, token, attention = np.linalg.lstsq(columns * weight, np.ones(len(shapes)))[0]
    print(
        f"batch_seconds={batch:.2g}, token_seconds={token:.3g}, attention_tokens={token / attention:.0f}"
    )


def time_ways(checkpoint: Path, tokens: int) -> None:
    """CPU seconds of all batches of each way, judged by an even sample of them."""
    found = {}
    for mix, documents in mixes(tokens).items():
        for name, batch in (
            ("Lengthwise", lengthwise), ("buckets", buckets), ("sorted, 32 each", sorted_by_32),
        ):  # fmt: skip
            found[mix, name] = sorted(batch(documents), key=lambda shape: (shape[1], shape[0]))
    samples = {}
    for key, shapes in found.items():
        step = -(-len(shapes) // SAMPLED)
        samples[key] = shapes[step // 2 :: step]
    shapes = sorted({shape for sample in samples.values() for shape in sample})
    least = least_seconds(checkpoint, shapes, time.process_time)
    for (mix, name), sample in samples.items():
        seconds = sum(least[shape] for shape in sample) / len(sample) * len(found[mix, name])
        print(f"{mix:24} {name:16} {seconds:6.1f} CPU s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", type=Path, metavar="CHECKPOINT")
    parser.add_argument("--time", type=Path, metavar="CHECKPOINT")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
    elif arguments.time:
        time_ways(arguments.time, arguments.tokens)
    else:
        found = compare(arguments.tokens)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
