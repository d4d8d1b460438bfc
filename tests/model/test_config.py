"""What is read from a checkpoint's JSON files, and what is refused."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from model.config import CheckpointError, EncoderConfig
from tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the test's own, which it may change."""
    return write_tiny_checkpoint(tmp_path)


def change(folder: Path, name: str, **entries: Any) -> None:
    """Replaces entries of a JSON file; those that become None go."""
    path = folder / name
    content = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def problems(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        EncoderConfig.from_checkpoint(folder)
    return str(caught.value)


def test_a_published_checkpoint_is_read_as_it_is(minilm: Path) -> None:
    assert EncoderConfig.from_checkpoint(minilm) == EncoderConfig(
        model_type="bert",
        layers=6,
        embedding_dimensions=384,
        heads=12,
        feedforward_dimensions=1536,
        vocabulary_size=30522,
        positions=512,
        token_types=2,
        activation="gelu",
        norm_epsilon=1e-12,
        max_tokens=256,
        pooling="mean",
        normalize=True,
    )


def test_a_bare_encoder_is_pooled_by_mean_and_not_normalised(checkpoint: Path) -> None:
    (checkpoint / "modules.json").unlink()
    config = EncoderConfig.from_checkpoint(checkpoint)
    assert (config.pooling, config.normalize) == ("mean", False)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalisation_are_what_the_modules_declare(
    tmp_path: Path, pooling: str, normalize: bool
) -> None:
    write_tiny_checkpoint(tmp_path, pooling=pooling, normalize=normalize)
    config = EncoderConfig.from_checkpoint(tmp_path)
    assert (config.pooling, config.normalize) == (pooling, normalize)


def test_files_written_by_sentence_transformers_6_mean_the_same(checkpoint: Path) -> None:
    before = EncoderConfig.from_checkpoint(checkpoint)
    path = "sentence_transformers.base.modules."
    kinds = {"Transformer": "transformer.Transformer", "Normalize": "normalize.Normalize"}
    modules = json.loads((checkpoint / "modules.json").read_text())
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        module["type"] = path + kinds.get(kind, "pooling.Pooling")
    (checkpoint / "modules.json").write_text(json.dumps(modules))
    pooling = {"embedding_dimension": 32, "pooling_mode": "mean", "include_prompt": True}
    (checkpoint / "1_Pooling/config.json").write_text(json.dumps(pooling))
    change(checkpoint, "sentence_bert_config.json", max_seq_length=None)
    change(checkpoint, "tokenizer_config.json", model_max_length=64)
    assert EncoderConfig.from_checkpoint(checkpoint) == before


@pytest.mark.parametrize(
    ("max_seq_length", "model_max_length", "expected"),
    [(64, 100, 64), (None, 100, 100), (None, None, 128), (500, 100, 128), (None, 1e30, 128)],
)
def test_the_longest_input_is_the_declared_one_within_the_position_limit(
    tmp_path: Path, max_seq_length: int | None, model_max_length: float | None, expected: int
) -> None:
    write_tiny_checkpoint(tmp_path, max_seq_length=max_seq_length)
    change(tmp_path, "tokenizer_config.json", model_max_length=model_max_length)
    assert EncoderConfig.from_checkpoint(tmp_path).max_tokens == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; supported: bert"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported: gelu"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type is 'relative_key'; supported: absolute",
        ),
        ({"is_decoder": True}, "is_decoder is set"),
        ({"hidden_size": 30}, "hidden_size is 30; supported: a multiple of its 4 heads"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
    ],
)
def test_a_network_that_is_not_supported_is_refused_with_what_is(
    checkpoint: Path, changes: dict[str, Any], message: str
) -> None:
    change(checkpoint, "config.json", **changes)
    assert f"config.json: {message}" in problems(checkpoint)


def test_everything_that_is_wrong_is_in_one_error(checkpoint: Path) -> None:
    change(checkpoint, "config.json", model_type="t5", hidden_act="relu", vocab_size=-1)
    change(checkpoint, "sentence_bert_config.json", max_seq_length=0)
    (checkpoint / "1_Pooling/config.json").unlink()
    message = problems(checkpoint)
    for part in (
        "t5",
        "relu",
        "vocab_size",
        "max_seq_length is 0",
        "1_Pooling/config.json: missing",
    ):
        assert part in message
    assert len(message.splitlines()) == 6


def add_dense(folder: Path) -> None:
    path = folder / "modules.json"
    modules = json.loads(path.read_text())
    modules.insert(2, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    path.write_text(json.dumps(modules))


def add_foreign(folder: Path) -> None:
    path = folder / "modules.json"
    path.write_text(path.read_text().replace("sentence_transformers.models.Tr", "custom_st.Tr"))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (add_dense, "the modules are Transformer, Pooling, Dense, Normalize"),
        (add_foreign, "the modules are custom_st.Transformer"),
        (
            lambda folder: change(folder, "1_Pooling/config.json", pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True),
            "pooling is lasttoken; supported: one of mean, cls, max",
        ),
        (
            lambda folder: change(folder, "1_Pooling/config.json", pooling_mode_cls_token=True),
            "pooling is cls + mean",
        ),
        (
            lambda folder: change(folder, "sentence_bert_config.json", transformer_task="fill-mask"),
            "transformer_task is 'fill-mask'",
        ),
        (
            lambda folder: [
                change(folder, "sentence_bert_config.json", do_lower_case=True),
                change(folder, "tokenizer_config.json", do_lower_case=False),
            ],
            "do_lower_case is set",
        ),
        (
            lambda folder: (folder / "config_sentence_transformers.json").write_text(
                '{"prompts": {"query": "query: "}, "default_prompt_name": "query"}'
            ),
            "default_prompt_name is 'query'",
        ),
        (lambda folder: (folder / "modules.json").write_text("{}"), "expected a list in JSON, got dict"),
        (lambda folder: (folder / "config.json").write_text("[]"), "expected an object in JSON, got list"),
        (lambda folder: (folder / "config.json").write_text("{}"), "model_type is None"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: expected JSON, got"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: missing"),
    ],
)  # fmt: skip
def test_what_would_change_the_result_and_is_not_computed_is_refused(
    checkpoint: Path, break_it: Callable[[Path], Any], message: str
) -> None:
    break_it(checkpoint)
    assert message in problems(checkpoint)


def test_the_error_survives_pickling_between_processes() -> None:
    error = CheckpointError("folder", ["a: missing", "b: unused"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "checkpoint folder:\n  a: missing\n  b: unused"
    assert again.problems == ("a: missing", "b: unused")


def test_reading_a_config_imports_neither_jax_nor_numpy() -> None:
    code = "import sys, model.config; assert not {'jax', 'numpy'} & set(sys.modules), 'imported'"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
