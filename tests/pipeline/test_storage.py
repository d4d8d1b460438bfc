"""Storage: names are names, whatever letters they hold, and a file appears whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import storage

AWKWARD = ["a[1]", "sp ace", "star*", "what?", "{a,b}", "ünï", "x.gz", "new\nline", "'quoted'"]


@pytest.mark.parametrize("name", AWKWARD)
def test_every_operation_takes_names_as_they_are(tmp_path, name):
    folder = str(tmp_path / name)
    path = storage.join(folder, name)
    storage.write(path, b"one")
    assert Path(path).read_bytes() == b"one", "a name chooses no compression"
    assert storage.read(path) == b"one"
    assert storage.files(folder) == {name: 3}
    assert storage.folders(str(tmp_path)) == [name]
    storage.copy(path, storage.join(folder, "copies", name))
    storage.move(path, storage.join(folder, "moved", name))
    assert storage.folders(folder) == ["copies", "moved"]
    storage.delete(storage.join(folder, "moved", name))
    assert not storage.exists(storage.join(folder, "moved", name))
    assert storage.exists(storage.join(folder, "copies", name))
    storage.delete_folder(folder)
    assert list(tmp_path.iterdir()) == []


def test_deleting_a_name_that_looks_like_a_pattern_deletes_no_other_file(tmp_path):
    (tmp_path / "part-1").write_text("keep")
    storage.delete(str(tmp_path / "part-[1]"))
    storage.delete(str(tmp_path / "part-*"))
    assert (tmp_path / "part-1").exists()


def test_writing_replaces_a_file_and_leaves_no_temporary_one(tmp_path):
    for content in (b"old, and longer", b"new"):
        storage.write(str(tmp_path / "a"), content)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_deletions_can_be_repeated(tmp_path):
    storage.delete(str(tmp_path / "gone"))
    storage.delete_folder(str(tmp_path / "gone"))
    assert storage.files(str(tmp_path / "gone")) == {}
    assert storage.folders(str(tmp_path / "gone")) == []
