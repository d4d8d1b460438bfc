"""The sample documents are what the README and the other tests take them for; the broken ones break as named."""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.config import ReadingSettings
from pipeline.listing import list_units
from pipeline.reading import read_unit
from read_files import outcomes, read, settings_for

DATA = Path(__file__).parents[1] / "data"
BROKEN = sorted(path.name for path in (DATA / "broken").iterdir())
IDS = {"repeated_id", "missing_id", "bad_id"}


@pytest.fixture(scope="module")
def make_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_data", DATA / "make_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_sample_document_is_read_with_the_default_flags() -> None:
    documents, failures = read(DATA / "documents")
    assert failures == []
    assert len(documents) == 65


def test_the_samples_are_of_every_format_compression_and_length() -> None:
    units = list_units(ReadingSettings(inputs=(str(DATA / "documents"),))).units
    assert {unit.format for unit in units} == {"text", "markdown", "jsonl", "parquet"}
    assert {unit.compression for unit in units} == {"none", "gzip", "bzip2", "zstd"}
    words = sorted(len(document.text.split()) for document in read(DATA / "documents")[0])
    assert words[0] == 1
    assert words[-1] > 3000


def test_the_samples_are_in_many_scripts_and_two_have_equal_texts() -> None:
    documents, _ = read(DATA / "documents")
    scripts = Counter(
        unicodedata.name(
            next(letter for letter in document.text if letter.isalpha() and ord(letter) > 127), "-"
        ).split()[0]
        for document in documents
        if any(letter.isalpha() and ord(letter) > 127 for letter in document.text)
    )
    expected = (
        "LATIN CYRILLIC GREEK ARABIC HEBREW DEVANAGARI BENGALI TAMIL THAI HANGUL HIRAGANA CJK"
    )
    assert set(expected.split()) <= set(scripts)
    assert sorted(Counter(document.content_sha256 for document in documents).values())[-2:] == [
        1,
        2,
    ]


def test_the_data_are_small() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 400_000


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_fails_once_for_the_reason_that_its_name_begins_with(name: str) -> None:
    reason = re.split(r"[-.]", name)[0]
    settings = settings_for(DATA / "broken", id_field="id" if reason in IDS else None)
    [unit] = [unit for unit in list_units(settings).units if Path(unit.uri).name == name]
    documents, failures = outcomes(list(read_unit(unit, settings, ())))
    assert {failure.reason for failure in failures} == {reason}
    assert len(failures) == (2 if name == "text_not_string.parquet" else 1)
    if b"should be" in (DATA / "broken" / name).read_bytes():
        assert [document.text[:4] for document in documents] == ["Line", "Line"]


def test_the_files_that_are_made_are_those_that_the_script_makes(make_data: ModuleType) -> None:
    for folder, files in (("documents", make_data.documents()), ("broken", make_data.broken())):
        for name, data in files.items():
            stored = (DATA / folder / name).read_bytes()
            # Other versions of the libraries compress differently.
            assert stored == data or name.endswith((".parquet", ".zst", ".gz")), name
    assert sorted(make_data.broken()) == BROKEN
