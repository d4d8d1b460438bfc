"""The libraries that ours is compared with: computes embeddings of texts and says how long it took.

    PYTHON tests/benchmarks/peers.py KIND CHECKPOINT [ONNX]

PYTHON is that of an environment of its own, with sentence-transformers, onnxruntime, onnx and onnxscript. KIND is one of KINDS
below; ONNX is where the model is exported to unless it is there. Each line of standard input names a JSON file, a list of
texts. The answer is a line of JSON, {"wall": seconds, "cpu": seconds}, and the embeddings (float32[texts, D])
stand in a file of that name with .npy behind it.

Texts are cut at the model's longest input, but for the kind "whole float32": it computes all windows of a text and takes the
mean of all their tokens, as ours does without --max-windows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = (
    "sentence-transformers float32",
    "sentence-transformers bfloat16",
    "onnxruntime float32",
    "whole float32",
)
BATCH = 32  # the default of sentence-transformers
THREADS = os.cpu_count() or 1

Encode = Callable[[list[str]], Any]


def sentence_transformers(checkpoint: str, dtype: str) -> Any:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(THREADS)
    return SentenceTransformer(
        checkpoint, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
    )


def truncated(checkpoint: str, dtype: str) -> Encode:
    model = sentence_transformers(checkpoint, dtype)
    return lambda texts: model.encode(texts, batch_size=BATCH, show_progress_bar=False)


def whole(checkpoint: str) -> Encode:
    import torch

    model = sentence_transformers(checkpoint, "float32")
    tokenizer = model.tokenizer
    size = model.max_seq_length - 2

    def encode_one(text: str) -> Any:
        ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)[
            "input_ids"
        ]
        windows = [
            [tokenizer.cls_token_id, *ids[start : start + size], tokenizer.sep_token_id]
            for start in range(0, len(ids), size)
        ]
        features = tokenizer.pad({"input_ids": windows}, return_tensors="pt")
        with torch.inference_mode():
            hidden = model[0](dict(features))["token_embeddings"]
        mean = hidden[features["attention_mask"].bool()].mean(0)
        return torch.nn.functional.normalize(mean, dim=0).numpy()

    return lambda texts: [encode_one(text) for text in texts]


def onnxruntime(checkpoint: str, path: Path) -> Encode:
    """Sorted by length, padded batch by batch: what sentence-transformers does, on another engine."""
    import numpy as np
    import onnxruntime
    from tokenizers import Tokenizer

    if not path.exists():
        export(checkpoint, path)
    limit = json.loads(Path(checkpoint, "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
    tokenizer.enable_truncation(limit)
    tokenizer.no_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def encode(texts: list[str]) -> Any:
        ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]), reverse=True)
        found: list[Any] = [None] * len(ids)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            token_ids = np.zeros([len(batch), len(ids[batch[0]])], np.int64)
            mask = np.zeros_like(token_ids)
            for row, i in enumerate(batch):
                token_ids[row, : len(ids[i])] = ids[i]
                mask[row, : len(ids[i])] = 1
            inputs = {"input_ids": token_ids, "attention_mask": mask}
            (hidden,) = session.run(["hidden"], inputs)
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            mean /= np.linalg.norm(mean, axis=1, keepdims=True)
            for row, i in enumerate(batch):
                found[i] = mean[row]
        return found

    return encode


def export(checkpoint: str, path: Path) -> None:
    """Writes the encoder as ONNX: input_ids and attention_mask, int64[batch, tokens] → float32[batch, tokens, D]."""
    import torch

    encoder = sentence_transformers(checkpoint, "float32")[0].auto_model.eval()
    encoder.set_attn_implementation("eager")
    example = torch.ones([2, 8], dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch", max=4096), 1: torch.export.Dim("tokens", max=512)}
    torch.onnx.export(
        encoder,
        (example, example),
        path,
        input_names=["input_ids", "attention_mask"],
        output_names=["hidden"],
        dynamic_shapes={"input_ids": sizes, "attention_mask": sizes},
        verbose=False,
    )


def main() -> None:
    kind, checkpoint, *onnx = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    if kind == "whole float32":
        encode = whole(checkpoint)
    elif kind == "onnxruntime float32":
        encode = onnxruntime(checkpoint, Path(*onnx))
    elif kind in KINDS:
        encode = truncated(checkpoint, kind.split()[1])
    else:
        sys.exit(f"KIND: expected one of {', '.join(KINDS)}, got {kind!r}")
    import numpy as np

    for line in sys.stdin:
        path = Path(line.rstrip("\n"))
        texts = json.loads(path.read_text())
        before = time.perf_counter(), time.process_time()
        embeddings = encode(texts)
        wall, cpu = time.perf_counter() - before[0], time.process_time() - before[1]
        np.save(f"{path}.npy", np.asarray(embeddings, np.float32))
        print(json.dumps({"wall": wall, "cpu": cpu}), file=answers, flush=True)


if __name__ == "__main__":
    main()
