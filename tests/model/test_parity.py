"""Our embeddings are those of sentence-transformers (make_goldens.py wrote them)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from device_batches import device_batch
from model.predictor import Predictor
from tiny_checkpoint import write_tiny_checkpoint

GOLDENS = Path(__file__).parent / "goldens"

# Least cosine to the goldens, which are float32: the project's promise.
COSINE = {"float32": 0.99999, "bfloat16": 0.9999}


def texts_of(golden: np.lib.npyio.NpzFile) -> list[np.ndarray]:
    """Token ids of each text, special tokens included."""
    return np.split(golden["token_ids"], np.cumsum(golden["tokens"])[:-1])


def encode(predictor: Predictor, texts: list[np.ndarray], B: int, T: int) -> np.ndarray:
    """float32[texts, D], one text a row."""
    pooled = []
    for start in range(0, len(texts), B):
        rows = [[text] for text in texts[start : start + B]]
        rows += [[]] * (B - len(rows))
        pooled.append(predictor.fetch(predictor.dispatch(*device_batch(rows, T)))[:, 0])
    return np.concatenate(pooled)[: len(texts)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embeddings_of_a_published_model_equal_sentence_transformers(
    load_model: Callable[..., Predictor], minilm: Path, dtype: str
) -> None:
    golden = np.load(GOLDENS / "minilm.npz")
    predictor = load_model(minilm, ((4, 256),), dtype)
    ours = encode(predictor, texts_of(golden), 4, 256)
    ours /= np.linalg.norm(ours, axis=-1, keepdims=True)
    cosine = (ours * golden["embeddings"]).sum(-1)
    assert cosine.min() >= COSINE[dtype], dict(zip(golden["names"], cosine, strict=True))
    if dtype == "float32":
        assert np.abs(ours - golden["embeddings"]).max() <= 1e-5


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_pooled_vectors_equal_sentence_transformers_before_normalising(
    load_model: Callable[..., Predictor], tmp_path: Path, pooling: str
) -> None:
    golden = np.load(GOLDENS / f"tiny-{pooling}.npz")
    write_tiny_checkpoint(tmp_path, pooling=pooling, normalize=False)
    ours = encode(load_model(tmp_path, ((4, 64),)), texts_of(golden), 4, 64)
    # Vectors of norm 3 to 10 through two layers in float32, other orders of summing.
    assert np.abs(ours - golden["embeddings"]).max() <= 2e-5
