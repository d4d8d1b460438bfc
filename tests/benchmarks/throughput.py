"""Documents per second end to end, Beam included, next to sentence-transformers and ONNX Runtime.

    python tests/benchmarks/throughput.py --peer-python PYTHON [--documents 400] [--rounds 5] [--json FILE]

PYTHON is that of an environment as tests/benchmarks/peers.py describes. Every contestant computes all-MiniLM-L6-v2 embeddings of
the same documents, pieces of Python's own standard library, cut at 256 tokens (ours by --max-windows 1), on all cores.
Start-up is left out: of ours, what n other documents take is taken off what 2n take, and compiling off both; the others are loaded and
have computed the n others before. They take turns, so that what else the machine does meets all of them. A
ratio is the median over the rounds; of wall seconds, and of the processes' CPU seconds, in which threads that wait
for work without sleeping count as well.

Medians of five rounds of `--documents 200` (two Xeon cores with AMX, busy with other work; JAX 0.12, sentence-transformers 6.2, torch 2.13,
ONNX Runtime 1.32), wall and CPU; single rounds scatter from half to twice that:

    lengthwise bfloat16 ÷ sentence-transformers float32 ×2.24 ×3.17, bfloat16 ×1.78 ×1.74, onnxruntime float32 ×3.28 ×3.17
    lengthwise float32  ÷ sentence-transformers float32 ×1.18 ×1.51, bfloat16 ×0.89 ×0.84, onnxruntime float32 ×1.72 ×1.73
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from corpora import library_texts
from lengthwise_command import job, reports, run_here
from tiny_checkpoint import minilm_folder

DATE = "2026-01-02"
OURS = ("lengthwise float32", "lengthwise bfloat16")
PEERS = (
    "sentence-transformers float32",
    "sentence-transformers bfloat16",
    "onnxruntime float32",
)
CLOCKS = ("wall", "cpu")

Seconds = dict[str, float]  # by clock


class Peer:
    """A library in a process of its own, loaded once."""

    def __init__(self, python: str, kind: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("peers.py"), kind, minilm_folder(), folder / "model.onnx"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def seconds(self, texts: Path) -> Seconds:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{texts}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else sys.exit("a peer failed: see above")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


def ours(corpus: Path, dtype: str, output: Path) -> Seconds:
    """What a whole run takes, compiling left out."""
    a_job = job(
        corpus, output, minilm_folder(), device="cpu", dtype=dtype, max_windows=1, date=DATE, resume=False
    )  # fmt: skip
    before = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = run_here(a_job)
    wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
    if status != 0:
        sys.exit(said.getvalue())
    compiling = reports(output, DATE)[-1]["seconds"]["compile"]
    return {"wall": wall - compiling, "cpu": cpu - compiling}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n = arguments.documents
    seconds: dict[str, list[Seconds]] = {name: [] for name in (*OURS, *PEERS)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        texts = library_texts(2 * n)
        others, counted = folder / "others.json", folder / "counted.json"
        others.write_text(json.dumps(texts[:n]))
        counted.write_text(json.dumps(texts[n:]))
        once, twice = folder / "once.jsonl", folder / "twice.jsonl"
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        once.write_text("".join(lines[:n]))
        twice.write_text("".join(lines))

        peers = {name: Peer(arguments.peer_python, name, folder) for name in PEERS}
        for peer in peers.values():
            peer.seconds(others)
        for name in OURS:  # fills the cache of compiled programs
            ours(twice, name.split()[1], folder / "out")
        for number in range(arguments.rounds):
            for name in OURS:
                short, long = (
                    ours(corpus, name.split()[1], folder / "out") for corpus in (once, twice)
                )
                seconds[name].append({clock: long[clock] - short[clock] for clock in CLOCKS})
            for name, peer in peers.items():
                seconds[name].append(peer.seconds(counted))
            print(f"round {number + 1}: seconds (of CPU)", flush=True)
            for name, found in seconds.items():
                print(f"  {found[-1]['wall']:6.2f} ({found[-1]['cpu']:6.2f})  {name}", flush=True)
        for peer in peers.values():
            peer.close()

    rates = {name: n / statistics.median(s["wall"] for s in all_) for name, all_ in seconds.items()}
    for name, rate in rates.items():
        print(f"{rate:8.1f} documents/s  {name}")
    ratios: dict[str, Any] = {}
    for mine in OURS:
        for peer_name in PEERS:
            pairs = list(zip(seconds[peer_name], seconds[mine], strict=True))
            ratio = {c: statistics.median(a[c] / b[c] for a, b in pairs) for c in CLOCKS}
            ratios[f"{mine} ÷ {peer_name}"] = ratio
            print(f"×{ratio['wall']:.2f} (CPU ×{ratio['cpu']:.2f})  {mine} ÷ {peer_name}")
    if arguments.json:
        found = {"seconds": seconds, "documents_per_second": rates, "ratios": ratios}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
