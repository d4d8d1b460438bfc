"""What a storage service refuses is told as the system tells it of files, and its troubles are no faults of objects."""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from local_gcs import Faults, client, local_gcs
from pipeline import sidecars, storage
from pipeline.config import ReadingSettings
from pipeline.objects import StoredObject, look
from pipeline.reading import read_unit
from pipeline.records import WorkUnit

URI = "gs://in/a.txt"


@pytest.fixture
def gcs():
    with local_gcs("in") as faults:
        client().bucket("in").blob("a.txt").upload_from_string("a text")
        yield faults


def unit_of(listed: StoredObject) -> WorkUnit:
    return WorkUnit(
        uri=listed.uri, format="text", compression="none", start=0, stop=None,
        size_bytes=listed.size_bytes, generation=listed.generation,
    )  # fmt: skip


def read(unit: WorkUnit) -> list[str]:
    chunks = list(read_unit(unit, ReadingSettings(inputs=("gs://in",)), []))
    assert chunks[-1].completions
    return [failure.reason for chunk in chunks for failure in chunk.failures]


def refuse(faults: Faults, status: int) -> None:
    """All that is asked about the object from now on."""
    faults.before = lambda request: status if "/o/a.txt" in unquote(request.path) else None


def test_what_is_not_there_is_told_as_of_files(gcs):
    for path in ("gs://in/none", "gs://none/none"):
        with pytest.raises(FileNotFoundError):
            storage.read(path)
        with pytest.raises(sidecars.SidecarError):
            sidecars.read(path)
        assert not storage.exists(path)


def test_what_may_not_be_read_is_told_as_of_files(gcs):
    refuse(gcs, 403)
    with pytest.raises(PermissionError):
        storage.read(URI)
    with pytest.raises(PermissionError):
        storage.exists(URI)


def test_an_object_that_may_not_be_read_or_has_gone_is_a_failure(gcs):
    unit = unit_of(look(URI))
    assert read(unit) == []
    refuse(gcs, 403)
    assert read(unit) == ["unreadable_object"]
    assert look(URI).generation == ""
    gcs.before = lambda request: None
    client().bucket("in").blob("a.txt").delete()
    assert read(unit) == ["missing_object"]
    assert look(URI).generation == ""


def test_trouble_of_the_service_does_not_make_a_failure_of_a_good_object(gcs):
    unit = unit_of(look(URI))

    def later(request):  # once it is open
        if "alt=media" in request.path:
            refuse(gcs, 400)  # stands for what is not tried again

    gcs.before = later
    with pytest.raises(Exception, match="400 GET"):
        read(unit)
    with pytest.raises(Exception, match="400 GET"):
        look(URI)
