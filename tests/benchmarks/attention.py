"""Time of every attention implementation on this device, next to the plain form most encoders are written in.

python tests/benchmarks/attention.py [--rounds 60]

One line a shape: milliseconds of the plain form, then the time of each implementation as a share of it (median over
rounds, each of which calls all of them in a random order). `alone` is attention by itself; `block` has the
projections around it, as in an encoder. For one core: `taskset -c 0 python …`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention.contract import Attention, Case
from kernels.attention.select import IMPLEMENTATIONS

N, H = 12, 32  # MiniLM
SHAPES = ((4, 256), (8, 128), (32, 16))


def plain(
    qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int, window: int | None = None
) -> jax.Array:
    """One text a row; padding is hidden from texts but neither zeroed nor harmless when it holds NaN."""
    B, T, width = qkv.shape
    heads = qkv.reshape(B, T, 3, num_heads, -1)
    scores = jnp.einsum(
        "binh,bjnh->bnij", heads[:, :, 0], heads[:, :, 1], preferred_element_type=jnp.float32
    )
    scores = scores / np.sqrt(heads.shape[-1])
    weights = jax.nn.softmax(jnp.where((segment_ids != 0)[:, None, None], scores, -1e9), -1)
    context = jnp.einsum("bnij,bjnh->binh", weights.astype(qkv.dtype), heads[:, :, 2])
    return context.reshape(B, T, width // 3)


def block(
    attention: Callable[..., jax.Array],
    x: jax.Array,
    into: jax.Array,
    out: jax.Array,
    segment_ids: jax.Array,
) -> jax.Array:
    qkv = jnp.matmul(x, into, preferred_element_type=jnp.float32).astype(x.dtype)
    context = attention(qkv, segment_ids, num_heads=N)
    return jnp.matmul(context, out, preferred_element_type=jnp.float32) + x


def measure(calls: dict[str, Callable[[], jax.Array]], rounds: int) -> str:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call().block_until_ready()
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]().block_until_ready()
            seconds[name].append(time.perf_counter() - start)
    base = np.array(seconds.pop("plain"))
    shares = (f"{name} ×{np.median(np.array(s) / base):.2f}" for name, s in seconds.items())
    return f"plain {np.median(base) * 1e3:6.2f} ms  {'  '.join(shares)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    device = jax.devices()[0]
    print(f"JAX {jax.__version__}, {device.device_kind}, N={N} H={H}")
    normal = np.random.default_rng(0).standard_normal
    for dtype in ("bfloat16", "float32"):
        for B, T in SHAPES:
            case = Case(B=B, T=T, N=N, H=H, dtype=dtype)
            served: dict[str, Attention] = {
                it.name: it for it in IMPLEMENTATIONS if it.refusal(case, device) is None
            }
            lengths = np.linspace(T, T // 2, B).astype(int)
            segment_ids = jnp.asarray(np.arange(T) < lengths[:, None], jnp.int32)
            D = N * H
            qkv, x, into, out = (
                jnp.asarray(normal(shape) * scale, dtype)
                for shape, scale in (
                    ((B, T, 3 * D), 1),
                    ((B, T, D), 1),
                    ((D, 3 * D), D**-0.5),
                    ((D, D), D**-0.5),
                )
            )
            alone, blocks = {}, {}
            for name, it in {"plain": plain, **served}.items():
                alone[name] = partial(jax.jit(partial(it, num_heads=N)), qkv, segment_ids)
                blocks[name] = partial(jax.jit(partial(block, it)), x, into, out, segment_ids)
            print(f"{dtype:8} {B:2}×{T:<3} alone  {measure(alone, rounds)}", flush=True)
            print(f"{dtype:8} {B:2}×{T:<3} block  {measure(blocks, rounds)}", flush=True)


if __name__ == "__main__":
    main()
