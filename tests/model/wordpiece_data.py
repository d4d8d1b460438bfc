"""Makes `model/data/bert_wordpiece.npz`: Hugging Face's text normalisation as tables for tensorflow-text.

    python tests/model/wordpiece_data.py [FILE]

needs the packages tokenizers and tensorflow-text. Run it when either changes what it does; `test_tokenizer.py` fails
when the committed file is no longer what this makes.

Both libraries normalise BERT text code point by code point, but by different tables. tensorflow-text takes its table from
the caller (`fast_bert_normalizer_model.fbs`: a trie of byte strings and a pool of replacements), so it is given Hugging
Face's, asked of the `tokenizers` library for every code point. Where the two split words differently, the
difference is folded into the same table:
* a character that only Hugging Face splits off gets spaces around it;
* a character that only tensorflow-text splits off gets a private-use *stand-in*, in texts and in the vocabulary
  alike. (Both remove private-use characters from texts, so stand-ins are free.)

One thing depends on context: Unicode's canonical ordering of combining marks, which shows for marks that Hugging Face
does not strip. The arrays for it are used for texts that hold such a mark, see `model.wordpiece`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from tokenizers import normalizers, pre_tokenizers

COMMITTED = Path(__file__).parents[2] / "model" / "data" / "bert_wordpiece.npz"
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
STAND_INS = range(0xF0000, 0xFFFFE)
# Of marks that may have to be reordered: in a plane whose UTF-8, alone, starts with byte F4, so that they are found fast.
MARK_STAND_INS = range(0x100000, 0x10FFFE)
# Name of the table: (lowercase, strip_accents).
MODES = {"uncased": (True, True), "lower": (True, False), "cased": (False, False)}


def make() -> dict[str, np.ndarray]:
    """All arrays of the data file, by name."""
    hf_pieces = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    hf_split = {c for c in CODE_POINTS if len(hf_pieces(f"a{chr(c)}b")) == 3}
    tf_split, tf_space = _tf_split()
    clean = _normalizations(lowercase=False, strip_accents=False)
    padded = {c for c, text in clean.items() if len(text) == 3}  # " 中 "
    strip = normalizers.BertNormalizer(lowercase=False, strip_accents=True).normalize_str
    alone = hf_split | padded | {ord(strip(chr(c))[1]) for c in padded} | {ord(" ")}
    ordering, kept_marks = _canonical_ordering(clean)
    stand_ins = dict(zip(sorted((tf_split | tf_space) - alone), map(chr, STAND_INS), strict=False))
    stand_ins |= dict(zip(sorted(kept_marks), map(chr, MARK_STAND_INS), strict=False))
    fold = stand_ins | {c: f" {chr(c)} " for c in hf_split - tf_split}

    arrays = {}
    for mode, (lowercase, strip_accents) in MODES.items():
        hf = _normalizations(lowercase=lowercase, strip_accents=strip_accents)
        table = fold | {c: text.translate(fold) for c, text in hf.items()}
        for c in padded:  # no spaces where tensorflow-text splits without them: a smaller table
            text = hf[c].strip(" ")
            if ord(text) in tf_split:
                table[c] = text
                if ord(text) == c:
                    del table[c]
        arrays[mode] = _normalizer_model(table)
    arrays["stand_ins"] = np.array([(c, ord(s)) for c, s in stand_ins.items()], np.uint32)
    arrays["removed"] = _ranges(c for c, text in clean.items() if text == "")
    return arrays | ordering


def _normalizations(*, lowercase: bool, strip_accents: bool) -> dict[int, str]:
    """What Hugging Face makes of each code point that it changes."""
    normalize = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=strip_accents
    ).normalize_str
    results = ((c, normalize(chr(c))) for c in CODE_POINTS)
    return {c: text for c, text in results if text != chr(c)}


def _tf_split() -> tuple[set[int], set[int]]:
    """The code points that tensorflow-text makes words of their own, and those it takes for spaces."""
    import tensorflow as tf
    import tensorflow_text as tft

    split = tft.FastWordpieceTokenizer(["[UNK]", "a"], token_out_type=tf.int32).tokenize
    words = split([f"a{chr(c)}a" for c in CODE_POINTS]).row_lengths().numpy()
    codes = np.array(CODE_POINTS)
    return set(codes[words == 3].tolist()), set(codes[words == 2].tolist())


def _canonical_ordering(clean: dict[int, str]) -> tuple[dict[str, np.ndarray], set[int]]:
    """What it takes to put marks into canonical order as Hugging Face does, and the marks that it does not strip.

    marks: uint32[m, 2], code point and combining class;
    decompositions: uint32[d, 5], code point and what it decomposes to (0-padded), where that holds marks.
    """
    decompose = normalizers.NFD().normalize_str
    strip = normalizers.BertNormalizer(lowercase=False, strip_accents=True).normalize_str
    classes = _combining_classes(decompose)
    kept = {c for c in classes if clean.get(c) != "" and strip(chr(c))}
    decomposed = {c: decompose(chr(c)) for c in CODE_POINTS}
    rows = [
        [c, *map(ord, text), *[0] * (4 - len(text))]
        for c, text in decomposed.items()
        if text != chr(c) and any(ord(x) in classes for x in text)
    ]
    arrays = {
        "marks": np.array(sorted(classes.items()), np.uint32),
        "decompositions": np.array(rows, np.uint32),
    }
    return arrays, kept


def _combining_classes(decompose) -> dict[int, int]:
    """A class for each combining mark, in the order of the canonical combining classes of `decompose` (NFD).

    The library's Unicode version is newer or older than Python's, so its classes are found by what it does:
    of two marks, it puts the one of the lower class first.
    """
    overlay, ypogegrammeni = chr(0x334), chr(0x345)  # of the lowest class, 1, and the highest, 240
    marks = []
    for c in CODE_POINTS:
        x = chr(c)
        if decompose(x) == x and (
            decompose(ypogegrammeni + x) != ypogegrammeni + x
            or decompose(x + overlay) != x + overlay
        ):
            marks.append(x)
    # One mark of each class, in order; a mark belongs where it moves neither before nor behind.
    marks += [overlay, ypogegrammeni]
    examples: list[str] = []
    classes: dict[int, int] = {}
    for x in marks:
        if not any(_same_class(x, e, decompose) for e in examples):
            examples.append(x)
    examples = sorted(examples, key=lambda x: sum(decompose(x + e) != x + e for e in examples))
    for x in marks:
        (classes[ord(x)],) = [i + 1 for i, e in enumerate(examples) if _same_class(x, e, decompose)]
    return classes


def _same_class(x: str, y: str, decompose) -> bool:
    return decompose(x + y) == x + y and decompose(y + x) == y + x


def _ranges(codes: Iterable[int]) -> np.ndarray:
    """uint32[n, 2]: first and last of each run of consecutive code points."""
    ordered = np.array(sorted(codes), np.uint32)
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    first = ordered[np.concatenate([[0], breaks + 1])]
    last = ordered[np.concatenate([breaks, [len(ordered) - 1]])]
    return np.stack([first, last], axis=1)


def _normalizer_model(table: dict[int, str]) -> np.ndarray:
    """tensorflow-text's normaliser model (a flatbuffer, uint8) for a table of replacements."""
    pool, places, values = bytearray(), {"": 0}, {}
    for c, text in table.items():
        data = text.encode()
        if text not in places:
            places[text] = len(pool) << 6 | len(data)
            pool += data
        values[c] = 0x40000000 | places[text]  # the bit says: differs from the input
    builder = flatbuffers.Builder(0)
    pool_vector = builder.CreateNumpyVector(np.frombuffer(bytes(pool), np.uint8))
    trie_vector = builder.CreateNumpyVector(_trie(values))
    builder.StartObject(4)
    builder.PrependUOffsetTRelativeSlot(3, pool_vector, 0)
    builder.PrependInt32Slot(2, values.get(0, 0), 0)  # the trie cannot hold U+0000
    builder.PrependUOffsetTRelativeSlot(1, trie_vector, 0)
    builder.PrependBoolSlot(0, True, False)
    builder.Finish(builder.EndObject())
    return np.frombuffer(bytes(builder.Output()), np.uint8)


def _trie(values: dict[int, int]) -> np.ndarray:
    """A double-array trie over the code points' UTF-8 bytes in darts-clone's layout: uint32 units.

    A unit is `label | has_leaf << 8 | offset << 10`; the child of the unit at i for byte b is at i ^ offset ^ b. A leaf is
    its value with bit 31 set, in the place of byte 0. Equal subtrees are stored once.
    """
    tree: dict[int, Any] = {}
    for c, value in values.items():
        if c != 0:
            *path, last = chr(c).encode()
            node = tree
            for byte in path:
                node = node.setdefault(byte, {})
            node[last] = value
    units = [0] * 256
    bases: dict[str, int] = {}

    def base_of(children: dict[int, Any], size: int) -> int:
        """Stores the children of one node; the one for byte b is at base ^ b."""
        key = repr(children)
        if key not in bases:
            block = len(
                units
            )  # a multiple of `size`, so that block + (b % size) is block ^ (b % size)
            leaves = block + size
            units.extend([0] * 2 * size)
            for byte, below in children.items():
                here = block + byte % size
                if isinstance(below, int):
                    leaf = leaves + byte % size
                    units[here] = byte | 1 << 8 | (here ^ leaf) << 10
                    units[leaf] = below | 1 << 31
                else:
                    units[here] = byte | (here ^ base_of(below, 64)) << 10
            # Bytes after the first are 0x80 to 0xBF.
            bases[key] = block if size == 256 else block ^ 0x80
        return bases[key]

    units[0] = base_of(tree, 256) << 10
    units.extend([0] * 256)
    if len(units) >= 1 << 21:
        raise ValueError(f"the table is too large for 21-bit offsets: {len(units)} units")
    return np.array(units, np.uint32)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else COMMITTED
    np.savez_compressed(target, **make())
    print(target, target.stat().st_size, "bytes")
