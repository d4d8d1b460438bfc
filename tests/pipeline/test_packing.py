"""Windows that share rows, and documents that share batches, give what each gives alone."""

from __future__ import annotations

import numpy as np
import pytest

from model.predictor import Predictor
from pipeline.batching import make_load
from pipeline.inferring import DeviceLimits, infer
from pipeline.packing import plan
from pipeline.progress import Control
from pipeline.records import Document, SpecialTokens, TokenizedDocument
from pipeline.shapes import shape_table
from pipeline.tokenizing import windows
from tiny_checkpoint import write_tiny_checkpoint

WINDOW = 64
SPECIAL = SpecialTokens(start_ids=(101,), end_ids=(102,), pad_id=0)


def documents() -> list[TokenizedDocument]:
    """Of 1 to 200 tokens, in windows of 64 that overlap."""
    random = np.random.default_rng(0)
    found = []
    for i, tokens in enumerate(
        [1, 1, 2, 3, 5, 7, 11, 17, 25, 40, 61, 62, 63, 100, 200, 9, 8, 30, 31, 20]
    ):
        spans, truncated = windows(tokens, WINDOW - 2, 5, None)
        found.append(
            TokenizedDocument(
                document=Document(
                    unit_id="u", position=i, uri="uri", record=str(i), text="", media_type="text/plain",
                    content_sha256=str(i), size_bytes=1,
                ),
                characters=1,
                token_ids=random.integers(1000, 30000, tokens).astype(np.int32),
                windows=spans,
                truncated=truncated,
            )
        )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("pooling", "dtype"),
    [("mean", "float32"), ("cls", "float32"), ("max", "float32"), ("mean", "bfloat16")],
)
def test_a_document_gives_the_same_alone_and_packed_with_others_in_any_order(
    tmp_path, pooling, dtype
):
    table = shape_table("cpu", WINDOW, None, 1)
    predictor = Predictor(
        write_tiny_checkpoint(tmp_path, pooling=pooling), task="embed", device="cpu", dtype=dtype,
        attention="xla", shapes=table.shapes,
    )  # fmt: skip

    def compute(several: list[TokenizedDocument], in_use: list[tuple[int, int]]) -> np.ndarray:
        load = make_load(several, SPECIAL, lambda lengths: plan(lengths, table, in_use))
        result = infer(load, predictor, DeviceLimits(), Control(None))
        assert result.documents == tuple(several)
        return result.encodings

    several = documents()
    alone = np.concatenate([compute([document], [(16, 64)]) for document in several])
    together = compute(several, [(32, 32), (16, 64)])
    backwards = compute(several[::-1], [(16, 64)])[::-1]
    for encodings in (together, backwards):
        if dtype == "float32":
            np.testing.assert_allclose(encodings, alone, atol=1e-5)
        else:
            assert (encodings * alone).sum(1).min() >= 0.9999
    # They do share rows.
    load = make_load(several, SPECIAL, lambda lengths: plan(lengths, table, [(16, 64)]))
    assert sum(len(batch.windows) for batch in load.batches) > sum(
        len(np.unique(batch.rows)) for batch in load.batches
    )
