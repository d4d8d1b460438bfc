"""BERT's WordPiece with Hugging Face's ids and offsets, computed by tensorflow-text.

Two tensorflow-text ops do the work: one normalises by a table of code points, one finds words and word pieces. The table
is ours (`data/bert_wordpiece.npz`; its generator, tests/model/wordpiece_data.py, says what is in it) and makes both
steps agree with the `tokenizers` library on any text. What the ops cannot express is put right in NumPy: the limit
on a word's length, which counts characters and not bytes, and the canonical order of rare combining marks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.tokenizer import CONTINUATION, MAX_WORD_CHARACTERS, TokenizerConfig, Tokens

TABLES = Path(__file__).with_name("data") / "bert_wordpiece.npz"
# Long texts are cut into pieces of about this many characters, and the ops are given about as many at once: memory
# stays bounded (offsets alone take 8 bytes for each byte of text).
PIECE_CHARACTERS = 1 << 19
# Cutting behind one of these changes nothing: a word ends there, and no combining mark trades places with it.
_CUT = re.compile("[\t\n\r !-/:-@\\[-`{-~\u3001\u3002\u4e00-\u9fff]")
# First byte of the UTF-8 of the stand-ins for marks that may have to be reordered, and of hardly anything else.
_MARK = b"\xf4"
# Spaces, NUL and private-use characters, which no word holds.
_UNREACHABLE = re.compile("[\\s\0\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")


class WordPiece:
    """A `model.tokenizer.Tokenizer`. Safe to use from several threads; the ops release the GIL."""

    def __init__(self, config: TokenizerConfig) -> None:
        # TensorFlow writes to stderr what is of no use to our users.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        import tensorflow as tf
        import tensorflow_text as tft

        # A program that has used TensorFlow before keeps its own settings.
        with suppress(RuntimeError):
            tf.config.set_visible_devices([], "GPU")  # the accelerator is JAX's
            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        tables = dict(np.load(TABLES))
        self.start_ids = config.start_ids
        self.end_ids = config.end_ids
        self.pad_id = config.pad_id
        self.vocabulary_size = config.vocabulary_size
        self._unknown_id = config.vocabulary.index(config.unknown_token)
        self._continues = np.array([token.startswith(CONTINUATION) for token in config.vocabulary])
        mode = "cased" if not config.lowercase else "uncased" if config.strip_accents else "lower"
        # Only stripping accents decomposes characters, which is what orders marks.
        self._ordering = _CanonicalOrder(tables) if config.strip_accents else None
        self._to_tensor = tf.constant
        self._normalizer = tft.FastBertNormalizer(model_buffer=tf.constant(tables[mode]))
        self._splitter = tft.FastWordpieceTokenizer(
            _reachable(config.vocabulary, dict(tables["stand_ins"].tolist())),
            max_bytes_per_word=4 * MAX_WORD_CHARACTERS,
            unknown_token=config.unknown_token,
            token_out_type=tf.int32,
        )

    def encode(
        self,
        texts: Sequence[str],
        *,
        offsets: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> list[Tokens]:
        """The tokens of each text, without special tokens; see `Tokenizer.encode`."""
        nothing = Tokens(np.zeros(0, np.int32), np.zeros([0, 2], np.int32) if offsets else None)
        found = [nothing] * len(texts)
        rest: dict[int, list[Tokens]] = {}
        for group in _groups(texts):
            check()
            pieces = [texts[i][start:stop] for i, start, stop in group]
            try:
                encoded = self._encode(pieces, offsets)
            except UnicodeEncodeError:
                raise _surrogate(texts) from None
            for (i, start, _), tokens in zip(group, encoded, strict=True):
                if start == 0:
                    found[i] = tokens
                else:
                    rest.setdefault(i, []).append(tokens)
                    if tokens.offsets is not None:
                        tokens.offsets[:] += start
        for i, pieces_of_text in rest.items():
            found[i] = _joined([found[i], *pieces_of_text])
        return found

    def _encode(self, texts: list[str], offsets: bool) -> list[Tokens]:
        normalized, places = self._normalize(texts, offsets)
        sources: dict[int, np.ndarray] = {}
        if self._ordering and _MARK in b"".join(normalized):
            for i, text in enumerate(normalized):
                if _MARK in text:
                    texts[i], sources[i] = self._ordering.apply(texts[i])
            normalized, places = self._normalize(texts, offsets)
        ids, starts, ends = self._splitter.tokenize_with_offsets(self._to_tensor(normalized))
        pieces = _Pieces(
            ids.values.numpy(), ids.row_splits.numpy(), starts.values.numpy(), ends.values.numpy()
        )
        pieces = self._limit_words(pieces, normalized)
        splits = pieces.splits.tolist()
        rows = list(pairwise(splits))
        if places is None:
            return [Tokens(pieces.ids[start:stop], None) for start, stop in rows]
        spans = _character_spans(pieces, texts, places)
        for i, source in sources.items():
            row = slice(*rows[i])
            spans[row] = source[spans[row] - [0, 1]] + [0, 1]
        return [Tokens(pieces.ids[start:stop], spans[start:stop]) for start, stop in rows]

    def _normalize(self, texts: list[str], offsets: bool) -> tuple[np.ndarray, Any]:
        """The texts' normal forms (bytes), and where asked for, a ragged tensor: for each byte of them, its place in the
        text's UTF-8."""
        data = self._to_tensor([text.encode() for text in texts])
        if offsets:
            normalized, places = self._normalizer.normalize_with_offsets(data)
            return normalized.numpy(), places
        return self._normalizer.normalize(data).numpy(), None

    def _limit_words(self, pieces: _Pieces, normalized: np.ndarray) -> _Pieces:
        """Makes one unknown token of each word with too many characters."""
        ids, splits, starts, ends = pieces
        if len(ids) == 0:
            return pieces
        begins = ~self._continues[ids]
        begins[splits[splits < len(ids)]] = True
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(ids)) - 1
        long = np.flatnonzero(ends[last] - starts[first] > MAX_WORD_CHARACTERS)  # in bytes
        if len(long) == 0:
            return pieces
        first, last = first[long], last[long]
        row = np.searchsorted(splits, first, side="right") - 1
        base = _starts(normalized)[row]
        characters = np.append(0, np.cumsum(_begin_character(normalized)))
        long = np.flatnonzero(
            characters[base + ends[last]] - characters[base + starts[first]] > MAX_WORD_CHARACTERS
        )
        first, last = first[long], last[long]
        ids, ends = ids.copy(), ends.copy()  # they were TensorFlow's memory
        ids[first], ends[first] = self._unknown_id, ends[last]
        dropped = np.zeros(len(ids) + 1, np.int8)
        dropped[first + 1] += 1
        dropped[last + 1] -= 1
        keep = np.cumsum(dropped[:-1]) == 0
        return _Pieces(ids[keep], np.append(0, np.cumsum(keep))[splits], starts[keep], ends[keep])


class _Pieces(NamedTuple):
    """Word pieces of several texts: ids int32[n]; splits int64[texts + 1], where in them each text starts; starts and ends
    int64[n], bytes of the normalised text."""

    ids: np.ndarray
    splits: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class _CanonicalOrder:
    """Unicode's canonical ordering as the `tokenizers` library does it.

    That is: decompose, then sort each run of combining marks by their class. The library then takes the n-th
    character of the result that does not merely continue a decomposition for the n-th character of the text,
    wherever it was before; offsets show it.
    """

    def __init__(self, tables: Mapping[str, np.ndarray]) -> None:
        self._removed = tables["removed"]
        self._marks = tables["marks"]
        self._decompositions = tables["decompositions"]

    def apply(self, text: str) -> tuple[str, np.ndarray]:
        """The text in canonical order, and int[its characters]: which of the given text's each one is taken for."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        first, last = self._removed.T  # ranges; the first one starts at 0
        source = np.flatnonzero(codes > last[np.searchsorted(first, codes, side="right") - 1])
        codes = codes[source]

        parts = np.zeros([len(codes), self._decompositions.shape[1] - 1], np.uint32)
        parts[:, 0] = codes
        row, known = _lookup(self._decompositions[:, 0], codes)
        parts[known] = self._decompositions[row[known], 1:]
        character, part = np.nonzero(parts)
        codes = parts[character, part]

        row, known = _lookup(self._marks[:, 0], codes)
        classes = np.where(known, self._marks[row, 1], 0)
        order = np.lexsort([classes, np.cumsum(classes == 0)])
        codes = codes[order]
        number = np.cumsum(part[order] == 0) - 1
        return codes.tobytes().decode("utf-32-le"), source[number]


def _lookup(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where in the sorted keys each value is, and whether it is there."""
    index = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
    return index, keys[index] == values


def _character_spans(pieces: _Pieces, texts: Sequence[str], places: Any) -> np.ndarray:
    """int32[n, 2]: the characters of its text that each piece comes from.

    `places` leads from bytes of the normalised text to bytes of the text. A piece ends with the character
    of its last byte: the next byte's place may lie behind characters that were removed.
    """
    data = [text.encode() for text in texts]
    row = np.repeat(np.arange(len(texts)), np.diff(pieces.splits))
    base = places.row_splits.numpy()[row]
    place = places.values.numpy()
    character = np.cumsum(_begin_character(data)) - 1
    byte_base, character_base = _starts(data)[row], _starts(texts)[row]
    spans = np.empty([len(row), 2], np.int32)
    spans[:, 0] = character[byte_base + place[base + pieces.starts]] - character_base
    spans[:, 1] = character[byte_base + place[base + pieces.ends - 1]] - character_base + 1
    return spans


def _starts(texts: Iterable[Sized]) -> np.ndarray:
    """int[texts + 1]: where each text starts when they are joined."""
    return np.cumsum([0, *map(len, texts)])


def _begin_character(texts: Iterable[bytes]) -> np.ndarray:
    """bool[bytes]: whether each byte of the joined texts begins a character."""
    begins: np.ndarray = (np.frombuffer(b"".join(texts), np.uint8) & 0xC0) != 0x80
    return begins


def _reachable(vocabulary: Sequence[str], stand_ins: Mapping[int, int]) -> list[str]:
    """The vocabulary for texts with stand-ins. A token that no text can give, because it is missing or holds what
    normalising removes, gets a name that no text can give."""
    return [
        f"\ue000{i}" if _UNREACHABLE.search(token) or not token else token.translate(stand_ins)
        for i, token in enumerate(vocabulary)
    ]


def _groups(texts: Sequence[str]) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces (text, start, stop) of the texts in order, as many at a time as the ops should be given at once."""
    group, characters = [], 0
    for i, text in enumerate(texts):
        start = 0
        while start < len(text):
            cut = _CUT.search(text, start + PIECE_CHARACTERS)
            stop = cut.end() if cut else len(text)
            group.append((i, start, stop))
            characters += stop - start
            start = stop
            if characters >= PIECE_CHARACTERS:
                yield group
                group, characters = [], 0
    if group:
        yield group


def _surrogate(texts: Sequence[str]) -> ValueError:
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at character {error.start}"
            return ValueError(
                f"text {i}: expected Unicode characters, found a lone surrogate, {found}"
            )
    raise AssertionError("no text holds a surrogate")


def _joined(pieces: Sequence[Tokens]) -> Tokens:
    """One text's pieces as one."""
    offsets = [piece.offsets for piece in pieces if piece.offsets is not None]
    return Tokens(
        np.concatenate([piece.ids for piece in pieces]),
        np.concatenate(offsets) if offsets else None,
    )
