"""A checkpoint's tokenizer: texts in, token ids and character offsets out.

What a checkpoint says about its tokenizer is read without TensorFlow, so that it can be checked at launch. Whatever would not be
computed exactly as Hugging Face does is refused there, never approximated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from model.config import CheckpointError

# Of checkpoints without tokenizer.json: those whose vocab.txt is used in BERT's way.
_TOKENIZER_CLASSES = ("BertTokenizer", "BertTokenizerFast")
# Marks a word piece that continues a word.
CONTINUATION = "##"
# A longer word is unknown as a whole.
MAX_WORD_CHARACTERS = 100


class Tokens(NamedTuple):
    """The tokens of one text, without special tokens.

    ids: int32[n]. offsets: int32[n, 2], first character of each token and one past its last, or None if not asked for.
    """

    ids: np.ndarray
    offsets: np.ndarray | None


class Tokenizer(Protocol):
    """start_ids and end_ids go before and after every window; ids are below vocabulary_size."""

    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    pad_id: int
    vocabulary_size: int

    def encode(
        self, texts: Sequence[str], *, offsets: bool = False, check: Callable[[], None] = ...
    ) -> list[Tokens]:
        """The tokens of each text, without special tokens. Special tokens written in a text are plain text.

        `check` is called every few hundred thousand characters: what it raises gives the texts up.

        Raises:
          ValueError: a text holds a lone surrogate, which is no character and has no UTF-8.
        """
        ...


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Imports TensorFlow: takes about 10 s in a new process.

    Raises:
      CheckpointError: see `TokenizerConfig.from_checkpoint`.
    """
    config = TokenizerConfig.from_checkpoint(checkpoint)
    from model.wordpiece import WordPiece

    return WordPiece(config)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A WordPiece vocabulary and how texts are normalised.

    `vocabulary` lists the tokens by id; an id without a token, or whose token can never come out, has the empty string.
    `vocabulary_size` counts special tokens that were added to it too.
    """

    vocabulary: tuple[str, ...]
    vocabulary_size: int
    unknown_token: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    pad_id: int
    lowercase: bool
    strip_accents: bool

    @classmethod
    def from_checkpoint(cls, folder: Path) -> TokenizerConfig:
        """Reads tokenizer.json, else vocab.txt, and tokenizer_config.json.

        Raises:
          CheckpointError: a file is missing or broken, or asks for something that is not computed exactly here; one
            error lists all of it.
        """
        problems: list[str] = []
        declared = _read_json(folder / "tokenizer_config.json", problems)
        fields: dict[str, Any] = {}
        try:
            if (folder / "tokenizer.json").exists():
                found = _read_json(folder / "tokenizer.json", problems)
                fields = _from_tokenizer_json(found, declared, problems)
            elif (folder / "vocab.txt").exists():
                fields = _from_vocabulary_file(folder / "vocab.txt", declared, problems)
            else:
                problems.append("expected tokenizer.json or vocab.txt, found neither")
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            problems.append(
                f"the tokenizer's files are not of the form they should have: {error!r}"
            )
        if problems:
            raise CheckpointError(folder, problems)
        return cls(**fields)


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        problems.append(f"{path.name}: expected JSON: {error}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name}: expected a JSON object, found {type(found).__name__}")
        return {}
    return found


def _from_tokenizer_json(
    found: dict[str, Any], declared: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Fields of a TokenizerConfig from tokenizer.json; what is wrong with it is added to `problems`."""

    def expect(part: str, key: str, *expected: object) -> Any:
        value = (found.get(part) or {}).get(key)
        if value not in expected:
            wanted = " or ".join(map(repr, expected))
            problems.append(
                f"tokenizer.json: {part}.{key}: only {wanted} is supported, found {value!r}"
            )
        return value

    if (found.get("model") or {}).get("type", "WordPiece") != "WordPiece":
        expect("model", "type", "WordPiece")
        return {}
    expect("model", "continuing_subword_prefix", CONTINUATION)
    expect("model", "max_input_chars_per_word", MAX_WORD_CHARACTERS)
    expect("normalizer", "type", "BertNormalizer")
    expect("normalizer", "clean_text", True)
    expect("normalizer", "handle_chinese_chars", True)
    expect("pre_tokenizer", "type", "BertPreTokenizer")
    lowercase = expect("normalizer", "lowercase", True, False)
    strip_accents = expect("normalizer", "strip_accents", True, False, None)
    # Libraries differ in which of the two files they believe.
    for ours, theirs in (
        ("lowercase", "do_lower_case"),
        ("strip_accents", "strip_accents"),
        ("handle_chinese_chars", "tokenize_chinese_chars"),
    ):
        value = (found.get("normalizer") or {}).get(ours)
        if declared.get(theirs, value) != value:
            problems.append(
                f"tokenizer.json says normalizer.{ours} = {value!r}, but tokenizer_config.json says "
                f"{theirs} = {declared[theirs]!r}: make them agree"
            )
    tokens = found["model"].get("vocab") or {}
    ids = dict(tokens)
    for token in found.get("added_tokens") or []:
        ids.setdefault(token["content"], token["id"])
        if not token.get("special"):
            problems.append(
                f"tokenizer.json: the added token {token['content']!r} is not special: such are not supported"
            )
    special = _special_tokens(found.get("post_processor") or {}, problems)
    pad = (found.get("padding") or {}).get("pad_token") or _content(
        declared.get("pad_token"), "[PAD]"
    )
    return _fields(
        tokens,
        ids,
        start=special[0],
        end=special[1],
        pad=pad,
        unknown=found["model"].get("unk_token"),
        lowercase=bool(lowercase),
        strip_accents=bool(lowercase if strip_accents is None else strip_accents),
        problems=problems,
    )


def _special_tokens(
    found: dict[str, Any], problems: list[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens that a post-processor puts before and after a text."""
    if found.get("type") == "BertProcessing":
        return (found["cls"][0],), (found["sep"][0],)
    if found.get("type") == "TemplateProcessing":
        template = found["single"]
        names = [part.get("SpecialToken", {}).get("id") for part in template]
        if names.count(None) == 1:
            text = names.index(None)
            return tuple(names[:text]), tuple(names[text + 1 :])
    problems.append(
        "tokenizer.json: post_processor: only BertProcessing, or TemplateProcessing of one text with "
        f"special tokens around it, is supported, found {found!r}"
    )
    return (), ()


def _from_vocabulary_file(
    path: Path, declared: dict[str, Any], problems: list[str]
) -> dict[str, Any]:
    """Fields of a TokenizerConfig from vocab.txt, one token a line, in the order of ids."""

    def expect(key: str, default: object, *expected: object) -> Any:
        value = declared.get(key, default)
        if value not in expected:
            wanted = " or ".join(map(repr, expected))
            problems.append(
                f"tokenizer_config.json: {key}: only {wanted} is supported, found {value!r}"
            )
        return value

    expect("tokenizer_class", "BertTokenizer", *_TOKENIZER_CLASSES)
    expect("do_basic_tokenize", True, True)
    expect("tokenize_chinese_chars", True, True)
    expect("never_split", None, None, [])
    lowercase = expect("do_lower_case", True, True, False)
    strip_accents = expect("strip_accents", None, None, True, False)
    for token in (declared.get("added_tokens_decoder") or {}).values():
        if not token.get("special"):
            problems.append(
                f"tokenizer_config.json: the added token {token['content']!r} is not special: such are not supported"
            )
    lines = path.read_text("utf-8").removesuffix("\n").split("\n")
    ids = {token: i for i, token in enumerate(lines)}
    return _fields(
        ids,
        ids,
        start=(_content(declared.get("cls_token"), "[CLS]"),),
        end=(_content(declared.get("sep_token"), "[SEP]"),),
        pad=_content(declared.get("pad_token"), "[PAD]"),
        unknown=_content(declared.get("unk_token"), "[UNK]"),
        lowercase=bool(lowercase),
        strip_accents=bool(lowercase if strip_accents is None else strip_accents),
        problems=problems,
    )


def _content(token: Any, default: str) -> str:
    """A token of tokenizer_config.json is a string, or an object that holds it."""
    return str(token.get("content") if isinstance(token, dict) else token or default)


def _fields(
    tokens: dict[str, int],
    ids: dict[str, int],
    *,
    start: tuple[str, ...],
    end: tuple[str, ...],
    pad: str,
    unknown: Any,
    lowercase: bool,
    strip_accents: bool,
    problems: list[str],
) -> dict[str, Any]:
    """`tokens` are those that texts may become; `ids` holds added special tokens too."""
    if unknown not in tokens:
        problems.append(f"the vocabulary lacks the unknown token {unknown!r}")
    for token in (*start, *end, pad):
        if token not in ids:
            problems.append(f"the vocabulary lacks the special token {token!r}")
    if strip_accents and not lowercase:
        problems.append("strip_accents without lowercase is not supported")
    if problems:
        return {}
    vocabulary = [""] * (max(tokens.values()) + 1)
    for token, i in tokens.items():
        vocabulary[i] = token
    return {
        "vocabulary": tuple(vocabulary),
        "vocabulary_size": max(ids.values()) + 1,
        "unknown_token": unknown,
        "start_ids": tuple(ids[token] for token in start),
        "end_ids": tuple(ids[token] for token in end),
        "pad_id": ids[pad],
        "lowercase": lowercase,
        "strip_accents": strip_accents,
    }
