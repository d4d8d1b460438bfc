"""What a checkpoint's own files say about the network and about how its output is used.

Imports neither JAX nor NumPy: settings are checked before anything heavy is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("bert",)
ACTIVATIONS = ("gelu",)
POSITIONS = ("absolute",)
POOLINGS = ("mean", "cls", "max")

# Names of the pooling modes in files written before sentence-transformers 6.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as it is; `problems` holds everything that is wrong with it."""

    def __init__(self, checkpoint: Path | str, problems: Sequence[str]) -> None:
        super().__init__(checkpoint, problems)
        self.checkpoint, self.problems = checkpoint, tuple(problems)

    def __str__(self) -> str:
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"checkpoint {self.checkpoint}:" + (lines if len(self.problems) > 1 else lines[2:])


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder, and what is made of its output.

    `max_tokens` is the longest input, special tokens included: `max_seq_length` of sentence_bert_config.json, else
    `model_max_length` of tokenizer_config.json, but never more than `positions`.
    """

    model_type: str
    layers: int
    embedding_dimensions: int  # D
    heads: int  # N
    feedforward_dimensions: int  # F
    vocabulary_size: int  # V
    positions: int
    token_types: int
    activation: str
    norm_epsilon: float
    max_tokens: int
    pooling: str
    normalize: bool

    @classmethod
    def from_checkpoint(cls, folder: Path) -> EncoderConfig:
        """Reads config.json and, where present, the files that sentence-transformers adds.

        Without modules.json the folder is a bare encoder: the mean over tokens is taken and not normalised.

        Raises:
          CheckpointError: a file is missing or broken, or asks for something that is not computed here;
            one error lists all of it.
        """
        files = _Files(folder)
        pooling, normalize = _output(files)
        network = files.object("config.json", required=True)
        if not network and files.problems:
            raise CheckpointError(folder, files.problems)

        def one_of(key: str, supported: Sequence[str], default: str | None = None) -> str:
            value = network.get(key, default)
            if value not in supported:
                files.refuse("config.json", f"{key} is {value!r}", ", ".join(supported))
            return str(value)

        def number(key: str) -> int:
            value = network.get(key)
            if type(value) is int and value > 0:
                return value
            files.refuse("config.json", f"{key} is {value!r}", "a whole number above 0")
            return 1

        one_of("position_embedding_type", POSITIONS, default="absolute")
        for key in ("is_decoder", "add_cross_attention"):
            if network.get(key):
                files.refuse("config.json", f"{key} is set", "encoders alone")
        D, N = number("hidden_size"), number("num_attention_heads")
        if D % N:
            files.refuse("config.json", f"hidden_size is {D}", f"a multiple of its {N} heads")
        epsilon = network.get("layer_norm_eps", 1e-12)
        if not isinstance(epsilon, float) or not 0 < epsilon < 1:
            files.refuse("config.json", f"layer_norm_eps is {epsilon!r}", "between 0 and 1")
        positions = number("max_position_embeddings")
        config = cls(
            model_type=one_of("model_type", MODEL_TYPES),
            layers=number("num_hidden_layers"),
            embedding_dimensions=D,
            heads=N,
            feedforward_dimensions=number("intermediate_size"),
            vocabulary_size=number("vocab_size"),
            positions=positions,
            token_types=number("type_vocab_size"),
            activation=one_of("hidden_act", ACTIVATIONS),
            norm_epsilon=epsilon,
            max_tokens=min(_longest(files), positions),
            pooling=pooling,
            normalize=normalize,
        )
        if files.problems:
            raise CheckpointError(folder, files.problems)
        return config


class _Files:
    """A checkpoint's JSON files, each read once, and all that is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[str, Any] = {}
        self.problems: list[str] = []

    def refuse(self, name: str, found: str, supported: str) -> None:
        self.problems.append(f"{name}: {found}; supported: {supported}")

    def object(self, name: str, *, required: bool = False) -> dict[str, Any]:
        """The JSON object in a file; empty if the file is absent or broken."""
        content = self.content(name, dict, required=required)
        return content if content is not None else {}

    def content(self, name: str, kind: type, *, required: bool = False) -> Any:
        """What a file holds, a dict or a list; None if the file is absent or broken."""
        if name not in self._contents:
            self._contents[name] = self._read(name, kind, required)
        return self._contents[name]

    def _read(self, name: str, kind: type, required: bool) -> Any:
        try:
            content = json.loads((self._folder / name).read_bytes())
        except FileNotFoundError:
            if required:
                self.problems.append(f"{name}: missing")
            return None
        except (OSError, ValueError) as error:
            self.problems.append(f"{name}: expected JSON, got: {error}")
            return None
        if isinstance(content, kind):
            return content
        expected = "an object" if kind is dict else "a list"
        self.problems.append(f"{name}: expected {expected} in JSON, got {type(content).__name__}")
        return None


def _output(files: _Files) -> tuple[str, bool]:
    """Pooling, and whether its result is normalised, as modules.json declares."""
    modules = files.content("modules.json", list)
    if modules is None:
        return "mean", False
    names, paths = [], []
    for module in modules:
        described = module if isinstance(module, dict) else {}
        kind = str(described.get("type"))
        # "sentence_transformers.models.Pooling", or since version 6 a longer path to the same class.
        # A class from elsewhere may do anything, whatever its name.
        ours = kind.startswith("sentence_transformers.")
        names.append(kind.rpartition(".")[2] if ours else kind)
        paths.append(str(described.get("path", "")))
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]):
        files.refuse(
            "modules.json", f"the modules are {', '.join(names) or 'none'}",
            "Transformer, Pooling and after them, if need be, Normalize",
        )  # fmt: skip
        return "mean", False
    if paths[0]:
        files.refuse("modules.json", f"the Transformer's path is {paths[0]!r}", "'', this folder")
    _refuse_changed_input(files)
    return _pooling(files, f"{paths[1]}/config.json"), "Normalize" in names


def _pooling(files: _Files, name: str) -> str:
    settings = files.object(name, required=True)
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _POOLING_FLAGS.items() if settings.get(flag)] or "mean"
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        found = f"pooling is {' + '.join(map(str, modes))}"
        files.refuse(name, found, f"one of {', '.join(POOLINGS)}")
    return str(modes[0])


def _refuse_changed_input(files: _Files) -> None:
    """Refuses what makes sentence-transformers feed the network something else than the text."""
    name = "config_sentence_transformers.json"
    default = files.object(name).get("default_prompt_name")
    if default is not None and (files.object(name).get("prompts") or {}).get(default):
        files.refuse(name, f"default_prompt_name is {default!r}", "no prompt before every text")
    name = "sentence_bert_config.json"
    task = files.object(name).get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        files.refuse(name, f"transformer_task is {task!r}", "feature-extraction")
    lowercases = files.object("tokenizer_config.json").get("do_lower_case")
    if files.object(name).get("do_lower_case") and not lowercases:
        files.refuse(name, "do_lower_case is set", "a tokenizer that lowercases by itself")


def _longest(files: _Files) -> int:
    """Longest input in tokens, by the files beside config.json."""
    # Since version 6 sentence-transformers writes the length to the tokenizer's file alone.
    name, key = "sentence_bert_config.json", "max_seq_length"
    if files.object(name).get(key) is None:
        name, key = "tokenizer_config.json", "model_max_length"
    declared = files.object(name).get(key)
    if declared is None:
        return 2**31
    # transformers writes a huge number, at times as a float, where there is no limit.
    if isinstance(declared, int | float) and declared >= 3:
        return int(min(declared, 2**31))
    files.refuse(name, f"{key} is {declared!r}", "a number of tokens, 3 or more")
    return 3
