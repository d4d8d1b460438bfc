"""The tokenizer gives what the `tokenizers` library gives, ids and character offsets, for any text."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import model.wordpiece
from model.config import CheckpointError
from model.tokenizer import TokenizerConfig, load_tokenizer

tokenizers = pytest.importorskip("tokenizers")

DOCUMENTS = Path(__file__).parents[1] / "data" / "documents"
CODE_POINTS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
# Where the two libraries' Unicode tables, or their ideas of a word, differ.
TRICKY = [
    chr(int(code, 16))
    for code in """
    00 0B 1C 85 A0 AD B4 A8 B5 DF 130 131 149 1F0 316 344 345 3A3 3C2 7FD 890 8D4 115F 1160 13A0 166D 1734 180E 1B44 1C89
    1F88 1E9E 200B 200D 2028 2126 212A 2E43 2E52 302E 3000 AC00 E000 FA0E FB01 FDFA FEFF FF21 FFFD 111C9 11938 16EA0 1D15E
    1D161 1D165 1E94A 2B81F 2B820 2B91F 2B920 2F800 10FFFD 10FFFE
    """.split()
]
STRINGS = [
    "", " ", "\n", "z\u030c\u302e", "\u302e\U0001d165", "é\u0316\u302e", "\U0001d15e\u1b44", "ﬁ\u00adx", "don't [SEP] [CLS]x ##a",
    "a" * 100, "a" * 101, "é" * 100, "é" * 101, "\u0939" * 100, "\u0939" * 101, "a\u0301" * 100, "a\u0301" * 101,
    "x" * 60 + "\u00ad" * 50 + "y" * 40, "x" * 60 + "\u00ad" * 50 + "y" * 41, f"x {'é' * 101} y {'b' * 150}.",
]  # fmt: skip
MODES = {
    "uncased": {"do_lower_case": True, "strip_accents": None},
    "lower": {"do_lower_case": True, "strip_accents": False},
    "cased": {"do_lower_case": False, "strip_accents": None},
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def odd_vocabulary() -> list[str]:
    """Tokens of every tricky character and every stand-in, so that ids tell them apart; and tokens that never come out."""
    tables = np.load(model.wordpiece.TABLES)
    characters = [*TRICKY, *map(chr, tables["stand_ins"][:, 0].tolist()), *"aébz.[]#\u0301中"]
    tokens = [*SPECIAL, *characters, *(f"##{c}" for c in characters)]
    tokens += [
        "don't",
        "a b",
        "##",
        "",
        "中国",
        "##国",
        "##,",
        "\ue000a",
        "\U000f0000",
        "\U00100000",
        "##\U00100000",
    ]
    # In a file a line is a token, so none holds a line break.
    return [
        token
        for token in tokens
        if not set(token) & set("\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
    ]


class Pair:
    """Our tokenizer and Hugging Face's for one vocabulary and mode."""

    def __init__(self, vocabulary: list[str], mode: str, folder: Path) -> None:
        settings = MODES[mode]
        (folder / "vocab.txt").write_text("".join(f"{t}\n" for t in vocabulary), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.ours = load_tokenizer(folder)
        self.theirs = tokenizers.Tokenizer(
            tokenizers.models.WordPiece({t: i for i, t in enumerate(vocabulary)}, unk_token="[UNK]")
        )
        self.theirs.normalizer = tokenizers.normalizers.BertNormalizer(
            lowercase=settings["do_lower_case"], strip_accents=settings["strip_accents"]
        )
        self.theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
        self.theirs.add_special_tokens(SPECIAL)
        self.theirs.encode_special_tokens = True  # written in a text, they are text

    def assert_equal(self, texts: list[str]) -> None:
        """Both give the same ids and offsets for each text, and ours the same ids without offsets."""
        with_offsets = self.ours.encode(texts, offsets=True)
        ids_alone = self.ours.encode(texts)
        theirs = self.theirs.encode_batch(texts, add_special_tokens=False)
        for text, tokens, alone, expected in zip(
            texts, with_offsets, ids_alone, theirs, strict=True
        ):
            ids = np.array(expected.ids, np.int32)
            offsets = np.array(expected.offsets, np.int32).reshape(-1, 2)
            if not np.array_equal(tokens.ids, ids) or not np.array_equal(tokens.offsets, offsets):
                pairs = zip(
                    tokens.offsets.tolist(), tokens.ids, offsets.tolist(), ids, strict=False
                )
                same = [a == c and b == d for a, b, c, d in pairs]
                start = offsets[same.index(False), 0] if False in same else len(text)
                near = text[max(0, start - 5) : start + 15]
                pytest.fail(f"differs near {near!r} ({' '.join(f'{ord(c):X}' for c in near)})")
            assert np.array_equal(alone.ids, ids), repr(text[:80])


@pytest.fixture(
    scope="module", params=[(v, m) for v in ("minilm", "odd") for m in MODES], ids="-".join
)
def pair(request, minilm, tmp_path_factory) -> Pair:
    vocabulary, mode = request.param
    tokens = (minilm / "vocab.txt").read_text("utf-8").split("\n")[:-1]
    folder = tmp_path_factory.mktemp("checkpoint")
    return Pair(tokens if vocabulary == "minilm" else odd_vocabulary(), mode, folder)


@pytest.fixture(scope="module")
def tokenizer(minilm):
    return load_tokenizer(minilm)


def contexts(characters: list[str]) -> list[str]:
    """Each character inside a word, behind an accent, and before one; a hundred to a text."""
    several = [f"a{c}b é{c} b {c}\u0301\n" for c in characters]
    return ["".join(several[i : i + 100]) for i in range(0, len(several), 100)]


def random_strings(count: int, seed: int) -> list[str]:
    """Half of any characters, half of those that are likely to be trouble."""
    source = random.Random(seed)
    pool = [*TRICKY, *"abz é,.[]#中", "[SEP]", "##a", "hello", " the ", "a" * 60]
    return [
        "".join(source.choices(pool if i % 2 else CODE_POINTS, k=source.randrange(30)))
        for i in range(count)
    ]


def test_characters_on_which_the_libraries_differ_give_the_same_tokens(pair):
    pair.assert_equal([*TRICKY, *(f"{c}a" for c in TRICKY), *contexts(TRICKY)])


def test_word_limits_marks_and_literal_special_tokens_give_the_same_tokens(pair):
    pair.assert_equal(STRINGS)


def test_a_sample_of_all_characters_gives_the_same_tokens(pair):
    pair.assert_equal(contexts(CODE_POINTS[::97]))


def test_random_strings_give_the_same_tokens(pair):
    pair.assert_equal(random_strings(3_000, seed=1))


def test_sample_documents_give_the_same_tokens(pair):
    paths = [
        path for path in sorted(DOCUMENTS.rglob("*")) if path.suffix in (".txt", ".md", ".jsonl")
    ]
    texts = [path.read_bytes().decode("utf-8", "replace") for path in paths]
    assert len(texts) > 10
    pair.assert_equal(texts)


@pytest.mark.full
def test_every_character_gives_the_same_tokens(pair):
    pair.assert_equal(contexts(CODE_POINTS))


@pytest.mark.full
def test_two_hundred_thousand_random_strings_give_the_same_tokens(pair):
    pair.assert_equal(random_strings(200_000, seed=2))


@pytest.mark.full
def test_the_committed_table_is_what_its_generator_makes():
    path = Path(__file__).with_name("wordpiece_data.py")
    spec = importlib.util.spec_from_file_location("wordpiece_data", path)
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    committed = np.load(generator.COMMITTED)
    made = generator.make()
    assert set(made) == set(committed)
    for name, array in made.items():
        np.testing.assert_array_equal(array, committed[name], err_msg=name)


def test_cutting_long_texts_into_pieces_changes_nothing(pair, monkeypatch):
    texts = [*random_strings(300, seed=3), *STRINGS, "文字だけ、" * 10, "abc" * 100, "x\u0301" * 90]
    whole = pair.ours.encode(texts, offsets=True)
    monkeypatch.setattr(model.wordpiece, "PIECE_CHARACTERS", 7)
    pieces = pair.ours.encode(texts, offsets=True)
    for text, expected, found in zip(texts, whole, pieces, strict=True):
        assert found.ids.tolist() == expected.ids.tolist(), repr(text)
        assert found.offsets.tolist() == expected.offsets.tolist(), repr(text)


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
        * 1024
    )


def test_a_text_of_5_mb_is_exact_in_bounded_memory(tokenizer):
    paragraph = (
        "It's 1 long text – naïve café, 東京都.\n\tZwölf Boxkämpfer jagen \u0394\u1f70 quer.\n"
    )
    count = 5_000_000 // len(paragraph.encode())
    one = tokenizer.encode([paragraph], offsets=True)[0]
    text = paragraph * count
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = peak_bytes()
    tokens = tokenizer.encode([text], offsets=True)[0]
    assert peak_bytes() - before < 150 * 2**20
    np.testing.assert_array_equal(tokens.ids, np.tile(one.ids, count))
    starts = np.arange(count).repeat(len(one.ids))[:, None] * len(paragraph)
    np.testing.assert_array_equal(tokens.offsets, np.tile(one.offsets, [count, 1]) + starts)
    assert tokens.ids.dtype == tokens.offsets.dtype == np.int32


def test_a_long_text_without_any_break_is_one_unknown_word(tokenizer):
    tokens = tokenizer.encode(["ab" * 1_000_000], offsets=True)[0]
    assert tokens.ids.tolist() == [100]
    assert tokens.offsets.tolist() == [[0, 2_000_000]]


def test_a_long_text_can_be_given_up_between_its_pieces(tokenizer, monkeypatch):
    monkeypatch.setattr(model.wordpiece, "PIECE_CHARACTERS", 1000)
    looks = []

    def check():
        looks.append(None)
        if len(looks) == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        tokenizer.encode(["long text " * 1_000], check=check)
    assert len(looks) == 4


def test_a_lone_surrogate_is_refused_by_its_place(tokenizer):
    with pytest.raises(ValueError, match=r"text 1: .*U\+D83D at character 4"):
        tokenizer.encode(["good", "bad \ud83d!"])


def test_no_texts_and_empty_texts_have_no_tokens(tokenizer):
    assert tokenizer.encode([]) == []
    ids, offsets = tokenizer.encode([""], offsets=True)[0]
    assert ids.shape == (0,) and offsets.shape == (0, 2) and ids.dtype == offsets.dtype == np.int32
    assert tokenizer.encode(["\ue000"])[0].offsets is None


def test_threads_may_share_a_tokenizer(tokenizer):
    texts = random_strings(2_000, seed=4)
    expected = [tokens.ids.tolist() for tokens in tokenizer.encode(texts)]
    found = [[] for _ in range(4)]

    def work(i):
        for _ in range(3):
            found[i] = [tokens.ids.tolist() for tokens in tokenizer.encode(texts)]

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ids == expected for ids in found)


def test_special_tokens_are_those_of_the_checkpoint(tokenizer):
    assert (tokenizer.start_ids, tokenizer.end_ids, tokenizer.pad_id) == ((101,), (102,), 0)
    assert tokenizer.vocabulary_size == 30522


def test_tokenizer_json_and_the_vocabulary_file_say_the_same(minilm, tmp_path):
    (tmp_path / "vocab.txt").write_bytes((minilm / "vocab.txt").read_bytes())
    both = TokenizerConfig.from_checkpoint(minilm)
    assert TokenizerConfig.from_checkpoint(tmp_path) == both
    assert both.vocabulary[2054] == "what"


def test_reading_the_configuration_imports_no_tensorflow():
    program = "import sys, model.tokenizer; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def tokenizer_json(minilm: Path, **changes) -> dict:
    """MiniLM's tokenizer.json with a short vocabulary; `part__key=value` changes one entry."""
    found = json.loads((minilm / "tokenizer.json").read_text("utf-8"))
    found["model"]["vocab"] = {token: i for i, token in enumerate([*SPECIAL, "a"])}
    found["added_tokens"] = [{"id": 3, "content": "[SEP]", "special": True}]
    for path, value in changes.items():
        *parts, key = path.split("__")
        target = found
        for part in parts:
            target = target[part]
        target[key] = value
    return found


@pytest.mark.parametrize(
    ("changes", "declared", "message"),
    [
        ({"model__type": "Unigram"}, {}, "only 'WordPiece' is supported, found 'Unigram'"),
        ({"model__max_input_chars_per_word": 50}, {}, "only 100 is supported, found 50"),
        ({"model__continuing_subword_prefix": "@@"}, {}, "only '##'"),
        ({"model__unk_token": "<unk>"}, {}, "lacks the unknown token '<unk>'"),
        ({"normalizer__type": "NFC"}, {}, "only 'BertNormalizer'"),
        ({"normalizer": None}, {}, "only 'BertNormalizer' is supported, found None"),
        ({"normalizer__handle_chinese_chars": False}, {}, "handle_chinese_chars"),
        ({"normalizer__clean_text": False}, {}, "clean_text"),
        ({"pre_tokenizer__type": "Whitespace"}, {}, "only 'BertPreTokenizer'"),
        ({"post_processor": {"type": "RobertaProcessing"}}, {}, "post_processor"),
        ({"added_tokens": [{"id": 6, "content": "<x>", "special": False}]}, {}, "'<x>' is not special"),
        ({"added_tokens": 7}, {}, "not of the form"),
        ({"normalizer__strip_accents": True, "normalizer__lowercase": False}, {}, "strip_accents without"),
        ({}, {"do_lower_case": False}, "make them agree"),
        ({}, {"tokenize_chinese_chars": False}, "make them agree"),
        ({}, {"pad_token": "<pad>"}, None),  # tokenizer.json names its own
    ],
)  # fmt: skip
def test_what_would_not_be_exact_is_refused(minilm, tmp_path, changes, declared, message):
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(minilm, **changes)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    if message is None:
        assert TokenizerConfig.from_checkpoint(tmp_path).pad_id == 0
        return
    with pytest.raises(CheckpointError, match="checkpoint") as raised:
        TokenizerConfig.from_checkpoint(tmp_path)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, "tokenizer_class: only 'BertTokenizer'"),
        ({"do_basic_tokenize": False}, "do_basic_tokenize"),
        ({"tokenize_chinese_chars": False}, "tokenize_chinese_chars"),
        ({"never_split": ["x"]}, "never_split"),
        ({"cls_token": {"content": "<s>"}}, "lacks the special token '<s>'"),
        (
            {"added_tokens_decoder": {"9": {"content": "<x>", "special": False}}},
            "'<x>' is not special",
        ),
    ],
)
def test_a_vocabulary_file_used_in_another_way_is_refused(tmp_path, declared, message):
    (tmp_path / "vocab.txt").write_text("\n".join(SPECIAL))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(CheckpointError) as raised:
        TokenizerConfig.from_checkpoint(tmp_path)
    assert message in str(raised.value)


def test_all_that_is_wrong_is_listed_at_once(minilm, tmp_path):
    changed = tokenizer_json(minilm, normalizer__type="NFC", model__unk_token="?")
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError) as raised:
        TokenizerConfig.from_checkpoint(tmp_path)
    assert len(raised.value.problems) == 3


def test_a_checkpoint_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"expected tokenizer\.json or vocab\.txt, found neither"
    ):
        TokenizerConfig.from_checkpoint(tmp_path)


def test_ids_without_a_token_never_come_out(minilm, tmp_path):
    tokens = {"[PAD]": 0, "[UNK]": 3, "[CLS]": 7, "[SEP]": 8, "a": 20, "##b": 31}
    found = tokenizer_json(minilm, model__vocab=tokens)
    found["added_tokens"] = [{"id": 40, "content": "[X]", "special": True}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode(["ab b [X]"])[0].ids.tolist() == [20, 31, 3, 3, 3, 3]
    assert (tokenizer.start_ids, tokenizer.end_ids, tokenizer.vocabulary_size) == ((7,), (8,), 41)
