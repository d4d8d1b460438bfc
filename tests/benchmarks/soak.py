"""A run that goes on and on takes no more memory, files or threads than after its first minutes, and compiles nothing new.

    python tests/benchmarks/soak.py [--minutes 30] [--model MODEL] [--json FILE]

One run in this process over a corpus that does not end in that time (one file under many names), stopped as by Ctrl-C.
Once a second it counts resident memory, open files, threads and compiled programs. The first third is for warming up;
over the rest a straight line is fitted, which must not rise by more than the noise: twice the standard deviation
around it, and for memory no less than 2 % of its mean. Exits 1 if something grows.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from corpora import write_jsonl
from lengthwise_command import job, reports, run_here
from tiny_checkpoint import write_tiny_checkpoint

SECONDS_BETWEEN_SAMPLES = 1.0
WARM_UP = 1 / 3  # of the time
MEMORY_NOISE = 0.02  # of its mean: what an allocator keeps for later
DOCUMENTS = 20_000  # of the one file
DATE = "2026-01-02"


def endless(folder: Path, minutes: float) -> Path:
    """More documents than any machine computes in that time, without taking up room."""
    corpus = write_jsonl(folder / "in", DOCUMENTS, files=1, words=(5, 180))
    [first] = corpus.iterdir()
    for number in range(1, 2 + round(20 * minutes)):
        os.link(first, corpus / f"part-{number}.jsonl")
    return corpus


def watch(stop_after: float, samples: list[dict[str, float]], predictors: Any) -> None:
    """Samples this process until the time is over, then asks the run to stop."""
    start = time.monotonic()
    while (now := time.monotonic() - start) < stop_after:
        compiled = [predictor.compiled_programs for predictor in predictors]
        if compiled:  # the run has begun
            samples.append(
                {
                    "seconds": now,
                    "memory": int(Path("/proc/self/statm").read_text().split()[1])
                    * os.sysconf("SC_PAGE_SIZE"),
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "programs": sum(compiled),
                }
            )
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    os.kill(os.getpid(), signal.SIGINT)


def trend(seconds: np.ndarray, values: np.ndarray, least: float) -> dict[str, Any]:
    """How much a straight line through the values rises over their time, and how much it may."""
    slope, base = np.polyfit(seconds, values, 1)
    rise = float(slope * (seconds[-1] - seconds[0]))
    noise = float(np.std(values - (slope * seconds + base)))
    allowed = max(2 * noise, least)
    return {
        "mean": float(values.mean()), "rise": rise, "allowed": allowed, "flat": bool(rise <= allowed),
    }  # fmt: skip


def judge(samples: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    rest = samples[int(len(samples) * WARM_UP) :]
    columns = {name: np.array([sample[name] for sample in rest]) for name in rest[0]}
    seconds = columns.pop("seconds")
    verdicts = {
        name: trend(seconds, values, MEMORY_NOISE * values.mean() if name == "memory" else 0.5)
        for name, values in columns.items()
    }
    verdicts["programs"]["flat"] = bool(np.ptp(columns["programs"]) == 0)
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", help="default: a tiny random checkpoint")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    from model.predictor import Predictor

    predictors: Any = weakref.WeakSet()
    load = Predictor.__init__

    def noted(self: Predictor, *rest: Any, **more: Any) -> None:
        load(self, *rest, **more)
        predictors.add(self)

    Predictor.__init__ = noted  # type: ignore[method-assign]
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or str(write_tiny_checkpoint(folder / "model"))
        corpus = endless(folder, arguments.minutes)
        watcher = threading.Thread(target=watch, args=(60 * arguments.minutes, samples, predictors))
        watcher.start()
        status = run_here(job(corpus, folder / "out", model, date=DATE))
        watcher.join()
        [report] = reports(folder / "out", DATE)
    if status != 128 + signal.SIGINT:
        sys.exit(f"expected a run that had to be stopped, got exit status {status}")
    verdicts = judge(samples)
    documents = report["documents"]["written"]
    print(f"{documents:,} documents in {arguments.minutes:g} minutes, {len(samples)} samples")
    for name, verdict in verdicts.items():
        unit, scale = ("MiB", 2**20) if name == "memory" else ("", 1)
        mean, rise, allowed = (verdict[key] / scale for key in ("mean", "rise", "allowed"))
        print(
            f"{name:<9}{mean:>9,.1f} {unit:<4} rise {rise:+8.2f} (allowed {allowed:.2f})  "
            + ("flat" if verdict["flat"] else "GROWS")
        )
    flat = all(verdict["flat"] for verdict in verdicts.values())
    print("flat" if flat else "something grows")
    if arguments.json:
        figures = {"minutes": arguments.minutes, "documents": documents, "flat": flat}
        arguments.json.write_text(
            json.dumps(figures | {"verdicts": verdicts, "samples": samples}, indent=2) + "\n"
        )
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
