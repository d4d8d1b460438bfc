"""How far from overflow and underflow the TPU kernel's sums of weights are, for a model and the sample documents.

python tests/benchmarks/row_sums.py [--checkpoint FOLDER]

The kernel computes weights as exp2(score) and has a careful, slow way for rows whose sum leaves `RANGE`
(kernels/attention/pallas_tpu.py). Prints log2 of the least and greatest sum in each layer, in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

sys.path.insert(0, str(Path(__file__).parents[1]))

from device_batches import device_batch
from kernels.attention.contract import check_call
from kernels.attention.pallas_tpu import RANGE
from kernels.attention.reference import Reference
from model import checkpoint
from model.config import EncoderConfig
from model.encoder import Encoder
from model.tokenizer import load_tokenizer
from sample_texts import sample_texts
from tiny_checkpoint import minilm_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=minilm_folder())
    folder = parser.parse_args().checkpoint
    config = EncoderConfig.from_checkpoint(folder)
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, jnp.dtype("float32"))))
    weights = checkpoint.load(folder, config)
    flat = {
        path: variable.replace(jnp.asarray(weights[path], variable.dtype))
        for path, variable in nnx.to_flat_state(state)
    }
    network = nnx.merge(graph, nnx.from_flat_state(flat))

    tokenizer = load_tokenizer(folder)
    room = config.max_tokens - len(tokenizer.start_ids) - len(tokenizer.end_ids)
    windows = [
        [*tokenizer.start_ids, *tokens.ids[first : first + room], *tokenizer.end_ids]
        for tokens in tokenizer.encode([text for _, text in sample_texts()])
        for first in range(0, max(len(tokens.ids), 1), room)
    ]
    layers: list[list[np.ndarray]] = [[] for _ in range(config.layers)]

    def spy(qkv: jax.Array, segment_ids: jax.Array, *, num_heads: int) -> jax.Array:
        case = check_call(qkv, segment_ids, num_heads=num_heads, window=None)
        query, key, _ = qkv.reshape(case.B, case.T, 3, case.N, case.H).transpose(2, 0, 3, 1, 4)
        scores = jnp.einsum("bnih,bnjh->bnij", query, key) * case.H**-0.5
        padding = (segment_ids == 0)[:, None]
        scores = jnp.where(padding[:, :, None], -jnp.inf, scores)
        sums = jax.nn.logsumexp(scores, axis=-1) / math.log(2)
        number = min(range(config.layers), key=lambda layer: len(layers[layer]))
        layers[number].append(np.asarray(jnp.where(padding, jnp.nan, sums)))
        return Reference()(qkv, segment_ids, num_heads=num_heads)

    for start in range(0, len(windows), 8):
        rows = [[window] for window in windows[start : start + 8]]
        network(*device_batch(rows, config.max_tokens), spy)
    print(f"{len(windows)} windows of {config.max_tokens}")
    for number, batches in enumerate(layers):
        sums = np.concatenate(batches)  # [windows, N, T]
        outside = (sums <= math.log2(RANGE[0])) | (sums >= math.log2(RANGE[1]))
        heads = np.flatnonzero(outside.any((0, 2)))
        print(
            f"layer {number}: {np.nanmin(sums):.1f} … {np.nanmax(sums):.1f}; outside of RANGE "
            f"{outside.any(2).mean():.2%} of (window, head), heads {heads.tolist()}"
        )


if __name__ == "__main__":
    main()
