"""Storage that is not local is listed and read the same way, through Beam's FileSystems."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from apache_beam.io.filesystem import BeamIOError, FileMetadata, FileSystem

from pipeline.config import ReadingSettings, SettingsError
from pipeline.listing import list_units
from pipeline.reading import read_unit
from read_files import outcomes, settings_for


class BucketFileSystem(FileSystem):
    """Objects by name in memory, without folders, as buckets have them."""

    objects: ClassVar[dict[str, tuple[bytes, float]]] = {}

    @classmethod
    def scheme(cls) -> str:
        return "bucket"

    def join(self, basepath: str, *paths: str) -> str:
        return "/".join([basepath.rstrip("/"), *paths])

    def has_dirs(self) -> bool:
        return False

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        for name in sorted(self.objects):
            if name.startswith(dir_or_prefix):
                yield self.metadata(name)

    def metadata(self, path: str) -> FileMetadata:
        if path not in self.objects:
            raise BeamIOError("Metadata operation failed", {path: "not found"})
        data, updated = self.objects[path]
        return FileMetadata(path, len(data), updated)

    def exists(self, path: str) -> bool:
        return path in self.objects

    def open(self, path: str, mime_type: str = "", compression_type: str = "") -> Any:
        assert compression_type == "uncompressed"
        return io.BytesIO(self.objects[path][0])

    def split(self, path: str) -> Any: ...
    def mkdirs(self, path: str) -> Any: ...
    def create(self, path: str, mime_type: str = "", compression_type: str = "") -> Any: ...
    def copy(self, source_file_names: Any, destination_file_names: Any) -> Any: ...
    def rename(self, source_file_names: Any, destination_file_names: Any) -> Any: ...
    def size(self, path: str) -> Any: ...
    def last_updated(self, path: str) -> Any: ...
    def delete(self, paths: Any) -> Any: ...


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[bytes, float]]:
    objects = {
        f"bucket://b/{name}": (b'{"text": "x"}\n' * 20, 1.5)
        for name in (
            "in/a.jsonl", "in/é [1]/b.jsonl", "in/é [1]2/b.jsonl", "in/x/c.jsonl", "in/_SUCCESS", "in/x/.d.jsonl", "other/a.jsonl", "in2/a.jsonl", "in/x/",
        )
    }  # fmt: skip
    monkeypatch.setattr(BucketFileSystem, "objects", objects)
    return objects


def names(*inputs: str) -> list[str]:
    return [
        unit.uri.removeprefix("bucket://b/") for unit in list_units(settings_for(*inputs)).units
    ]


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("in", ["in/a.jsonl", "in/x/c.jsonl", "in/é [1]/b.jsonl", "in/é [1]2/b.jsonl"]),
        ("in/", ["in/a.jsonl", "in/x/c.jsonl", "in/é [1]/b.jsonl", "in/é [1]2/b.jsonl"]),
        ("in/a.jsonl", ["in/a.jsonl"]),
        ("in/é [1]/b.jsonl", ["in/é [1]/b.jsonl"]),
        ("in/é [1]", ["in/é [1]/b.jsonl"]),
        ("in/é [1]/*.jsonl", ["in/é [1]/b.jsonl"]),
        ("in/*.jsonl", ["in/a.jsonl"]),
        ("**/a.jsonl", ["in/a.jsonl", "in2/a.jsonl", "other/a.jsonl"]),
        ("{in2,other}/*", ["in2/a.jsonl", "other/a.jsonl"]),
        ("in?/*", ["in2/a.jsonl"]),
        ("in/x/.*", ["in/x/.d.jsonl"]),
        (
            "",
            [
                "in/a.jsonl",
                "in/x/c.jsonl",
                "in/é [1]/b.jsonl",
                "in/é [1]2/b.jsonl",
                "in2/a.jsonl",
                "other/a.jsonl",
            ],
        ),
    ],
)
def test_prefixes_globs_and_names_mean_what_they_mean_locally(
    given: str, expected: list[str]
) -> None:
    assert names(f"bucket://b/{given}") == expected


@pytest.mark.usefixtures("bucket")
def test_hidden_objects_are_counted() -> None:
    assert list_units(settings_for("bucket://b/in")).hidden == 2


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("given", ["in/missing.jsonl", "missing", "in/*.txt", "i"])
def test_what_matches_nothing_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match="found none"):
        names(f"bucket://b/{given}")


def test_objects_are_read_in_ranges(bucket: dict[str, tuple[bytes, float]]) -> None:
    settings = settings_for("bucket://b/in/a.jsonl", split_bytes=100)
    units = list_units(settings).units
    assert len(units) == 3
    documents, failures = outcomes(
        [chunk for unit in units for chunk in read_unit(unit, settings, ())]
    )
    assert [document.position for document in documents] == [14 * number for number in range(20)]
    assert failures == []


def test_an_object_that_has_changed_or_gone_is_one_failure(
    bucket: dict[str, tuple[bytes, float]],
) -> None:
    settings = settings_for("bucket://b/in/a.jsonl")
    [unit] = list_units(settings).units
    data, _ = bucket[unit.uri]
    bucket[unit.uri] = (data, 2.5)
    documents, [failure] = outcomes(list(read_unit(unit, settings, ())))
    assert (documents, failure.reason) == ([], "changed_object")
    del bucket[unit.uri]
    documents, [failure] = outcomes(list(read_unit(unit, settings, ())))
    assert (documents, failure.reason) == ([], "missing_object")


def test_an_object_that_changes_while_it_is_read_is_noticed_at_its_end(
    bucket: dict[str, tuple[bytes, float]],
) -> None:
    uri = "bucket://b/in/a.jsonl"
    bucket[uri] = (b'{"text": "x"}\n' * 600, 1.5)
    settings = settings_for(uri)
    chunks = read_unit(list_units(settings).units[0], settings, ())
    given = len(next(chunks).documents)
    bucket[uri] = (bucket[uri][0], 2.5)
    documents, [failure] = outcomes(list(chunks))
    assert failure.reason == "changed_object"
    assert given + len(documents) < 600


def test_a_manifest_may_lie_beside_its_objects_and_name_others(
    bucket: dict[str, tuple[bytes, float]], tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "local"}')
    lines = f"a.jsonl\nbucket://b/other/a.jsonl\n{tmp_path}/a.jsonl\nmissing.jsonl\n"
    bucket["bucket://b/in/list"] = (lines.encode(), 1.5)
    units = list_units(ReadingSettings(manifest="bucket://b/in/list")).units
    assert [(unit.uri, unit.generation == "") for unit in units] == [
        (f"{tmp_path}/a.jsonl", False),
        ("bucket://b/in/a.jsonl", False),
        ("bucket://b/in/missing.jsonl", True),
        ("bucket://b/other/a.jsonl", False),
    ]
