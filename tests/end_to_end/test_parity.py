"""Published embeddings of the sample documents are those of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lengthwise_command import documents, job, run_here
from sample_texts import SAMPLES, name

DATE = "2026-01-02"
# The project's promise. Documents longer than a window are left out: sentence-transformers cuts them off.
COSINE = {"float32": 0.99999, "bfloat16": 0.9999}


@pytest.mark.parametrize("dtype", COSINE)
def test_published_embeddings_equal_sentence_transformers(
    dtype: str, minilm: Path, tmp_path: Path
) -> None:
    assert run_here(job(SAMPLES, tmp_path, minilm, date=DATE, dtype=dtype)) == 0
    ours = {name(row["uri"], row["record"]): row for row in documents(tmp_path, DATE).to_pylist()}
    golden = np.load(Path(__file__).with_name("samples.npz"))
    assert ours.keys() == set(golden["names"].tolist())
    cosines = {}
    for document, embedding, tokens, truncated in zip(
        golden["names"], golden["embeddings"], golden["tokens"], golden["truncated"], strict=True
    ):
        row = ours[document]
        if truncated:
            assert row["windows"] > 1, document
        else:
            assert (row["windows"], row["tokens"]) == (1, tokens - 2), document
            cosines[document] = float(np.dot(row["embedding"], embedding))
    assert len(cosines) >= 40
    worst = min(cosines, key=cosines.__getitem__)
    print(f"{dtype}: least cosine {cosines[worst]:.6f} ({worst}) of {len(cosines)} documents")
    assert cosines[worst] >= COSINE[dtype]
