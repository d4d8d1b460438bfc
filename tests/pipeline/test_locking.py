"""The lease that locks a date in a bucket, against a real storage server."""

from __future__ import annotations

import json
import time

import pytest

from local_gcs import client, local_gcs
from pipeline import locking, storage
from pipeline.locking import DateLocked, lock_date
from pipeline.state import Layout

LAYOUT = Layout("gs://out", "2026-01-02")


@pytest.fixture
def gcs():
    with local_gcs("out") as faults:
        yield faults


@pytest.fixture
def often(monkeypatch):
    """A lease that is renewed every moment."""
    monkeypatch.setattr(locking, "RENEW_SECONDS", 0.05)


def names() -> list[str]:
    return [blob.name for blob in client().bucket("out").list_blobs()]


def until() -> float:
    return json.loads(storage.read(LAYOUT.lock))["until"]


def take_over() -> None:
    """What a run does that finds the lease run out."""
    content = json.dumps({"run_id": "other", "pid": 1, "until": time.time() + 100.0})
    storage.write(LAYOUT.lock, content.encode())


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_lease_is_renewed_and_given_back(gcs, often):
    with lock_date(LAYOUT, "run"):
        first = until()
        wait_for(lambda: until() > first)
        with pytest.raises(DateLocked, match="run run "), lock_date(LAYOUT, "other"):
            pass
    assert names() == []


def test_renewals_whose_answers_are_lost_are_still_ours(gcs, often):
    lost = []
    with lock_date(LAYOUT, "run", lambda: lost.append(1)):
        changes = []

        def lose_two_in_turn(request):
            if request.path.startswith("/upload"):
                changes.append(request)
                # Each is sent again, and then refused, as it is there already.
                return "lost" if len(changes) in (1, 3) else None

        gcs.before = lose_two_in_turn
        wait_for(lambda: len(changes) > 5)
    assert lost == []
    assert names() == []


def test_whoever_lost_the_lease_is_told_and_leaves_the_files_of_the_other_run_alone(gcs, often):
    lost = []
    listing = storage.join(LAYOUT.launched("other"), "listing.parquet")
    with lock_date(LAYOUT, "run", lambda: lost.append(1)):
        take_over()
        storage.write(listing, b"of the other run")
        wait_for(lambda: lost)
    assert storage.read(listing) == b"of the other run"
    assert json.loads(storage.read(LAYOUT.lock))["run_id"] == "other"


def test_a_lease_that_ran_out_is_taken_over(gcs):
    storage.write(LAYOUT.lock, json.dumps({"run_id": "dead", "pid": 1, "until": 0.0}).encode())
    with lock_date(LAYOUT, "run"):
        assert json.loads(storage.read(LAYOUT.lock))["run_id"] == "run"
