"""The whole run in buckets: Google's own clients against a real server."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq
import pytest

from lengthwise_command import assert_same, documents, job, run_here
from local_gcs import Faults, client, local_gcs

DATE = "2026-01-02"
TEXTS = {
    "plain.txt": "a document in a bucket",
    "with space/and [brackets].txt": "names are names and no patterns",
    "ünïcödé/文書.md": "# 見出し\n\n日本語の文書",
    "records.jsonl": "".join(json.dumps({"text": f"record {n}"}) + "\n" for n in range(200)),
}


@pytest.fixture
def gcs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with local_gcs("in", "out") as faults:
        for name, text in TEXTS.items():
            client().bucket("in").blob(f"docs/{name}").upload_from_string(text)
        yield faults


def names(prefix: str = "") -> list[str]:
    return [blob.name for blob in client().bucket("out").list_blobs(prefix=prefix)]


def content(name: str) -> bytes:
    return client().bucket("out").blob(name).download_as_bytes()


def partition(date: str = DATE):
    manifest = json.loads(content(f"documents/date={date}/_manifest.json"))
    [entry] = manifest["documents"]
    return pq.read_table(io.BytesIO(content(entry["path"]))).sort_by("document_id")


def gcs_job(model, **settings):
    return job("gs://in/docs", "gs://out", model, **({"date": DATE} | settings))


def test_documents_of_a_bucket_are_published_in_a_bucket(gcs, tiny_checkpoint, tmp_path):
    assert run_here(gcs_job(tiny_checkpoint)) == 0
    table = partition()
    assert set(table["uri"].to_pylist()) == {f"gs://in/docs/{name}" for name in TEXTS}
    assert table.num_rows == 203
    assert names("_staging") == []
    assert len(names("documents")) == 2


def test_local_files_and_a_bucket_give_the_same_rows(gcs, tiny_checkpoint, tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(text)
    assert run_here(gcs_job(tiny_checkpoint)) == 0
    assert run_here(job(tmp_path / "docs", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    drop = ["document_id", "uri"]
    order = [("content_sha256", "ascending"), ("record", "ascending")]
    here, there = (
        t.sort_by(order).drop_columns(drop)
        for t in (documents(tmp_path / "out", DATE), partition())
    )
    assert_same(here, there)


def test_a_second_run_at_once_is_refused(gcs, tiny_checkpoint):
    from pipeline.locking import DateLocked, lock_date
    from pipeline.state import Layout

    with lock_date(Layout("gs://out", DATE), "first"), pytest.raises(DateLocked, match="run first"):
        run_here(gcs_job(tiny_checkpoint))
    assert names() == []


def test_the_next_date_carries_unchanged_objects_over(gcs, tiny_checkpoint):
    assert run_here(gcs_job(tiny_checkpoint, incremental=True)) == 0
    client().bucket("in").blob("docs/plain.txt").upload_from_string("another text")
    client().bucket("in").blob("docs/records.jsonl").delete()
    gcs.seen.clear()
    assert run_here(gcs_job(tiny_checkpoint, incremental=True, date="2026-01-03")) == 0
    assert partition("2026-01-03").num_rows == 3
    read = [
        r.path for r in gcs.seen if r.method == "GET" and "/in/" in r.path and "alt=media" in r.path
    ]
    assert read
    assert all("plain.txt" in path for path in read), "unchanged objects are not opened"


@pytest.mark.parametrize("fault", [429, 503, "reset"])
def test_every_request_may_fail_at_first(fault, gcs: Faults, tiny_checkpoint):
    met: set[tuple[str, str]] = set()

    def once(request):
        key = (request.method, request.path.partition("&uploadType")[0])
        if key in met or request.path.startswith("/batch"):
            return None
        met.add(key)
        return fault

    gcs.before = once
    assert run_here(gcs_job(tiny_checkpoint)) == 0
    gcs.before = lambda request: None
    assert partition().num_rows == 203
    assert len(met) > 20
