"""The whole run in buckets: Google's own clients against a real server."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from urllib.parse import unquote

import pyarrow.parquet as pq
import pytest

from lengthwise_command import assert_same, documents, job, run, run_here, start
from local_gcs import Faults, client, local_gcs
from pipeline.config import SettingsError

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


@pytest.mark.parametrize(
    "fault",
    [503, *(pytest.param(fault, marks=pytest.mark.full) for fault in (429, "reset"))],
)
def test_every_request_may_fail_at_first(fault, gcs: Faults, tiny_checkpoint, monkeypatch):
    from google.api_core.retry import retry_unary

    # Its waits are the library's, a second or so each: a hundred of them are of no use here.
    waits = itertools.repeat(0.02)
    monkeypatch.setattr(retry_unary, "exponential_sleep_generator", lambda *_, **__: waits)
    met: set[tuple[str, str]] = set()
    batches: list[bytes] = []

    def once(request):
        if request.path.startswith("/batch"):  # renames and deletions: every second one
            batches.append(request.body)
            return fault if len(batches) % 2 else None
        key = (request.method, request.path.partition("&uploadType")[0])
        if key in met:
            return None
        met.add(key)
        return fault

    gcs.before = once
    assert run_here(gcs_job(tiny_checkpoint)) == 0
    gcs.before = lambda request: None
    assert partition().num_rows == 203
    assert len(met) > 20
    assert len(batches) > 5


def put(name: str, data: bytes, encoding: str | None = None) -> None:
    blob = client().bucket("in").blob(name)
    blob.content_encoding = encoding
    blob.upload_from_string(data, content_type="text/plain")


def test_gzip_is_read_whether_the_service_or_the_user_stored_it_so(gcs, tiny_checkpoint):
    text = "a document that is stored as gzip " * 50
    put("zip/stored.txt.gz", gzip.compress(text.encode()))
    put("zip/no name says it.txt", gzip.compress(text.encode()))
    put("zip/transcoded.txt", gzip.compress(text.encode()), encoding="gzip")
    assert run_here(job("gs://in/zip", "gs://out", tiny_checkpoint, date=DATE)) == 0
    assert partition()["content_sha256"].to_pylist() == [sha256(text.encode()).hexdigest()] * 3


def test_an_object_that_changes_during_the_run_is_a_failure_and_never_mixed(gcs, tiny_checkpoint):
    path = "/in/o/docs/records.jsonl"
    replaced = []

    def replace_it(request):
        asked = unquote(request.path)
        if not replaced and request.method == "GET" and path in asked and "alt=media" in asked:
            replaced.append(asked)
            client().bucket("in").blob("docs/records.jsonl").upload_from_string('{"text": "new"}\n')

    gcs.before = replace_it
    assert run_here(gcs_job(tiny_checkpoint, max_failure_ratio=1.0)) == 0
    assert replaced
    manifest = json.loads(content(f"documents/date={DATE}/_manifest.json"))
    [entry] = manifest["failures"]
    [failure] = pq.read_table(io.BytesIO(content(entry["path"]))).to_pylist()
    assert (failure["uri"], failure["reason"]) == ("gs://in/docs/records.jsonl", "changed_object")
    assert partition().num_rows == 3


def test_the_model_and_a_manifest_may_lie_in_a_bucket(gcs, tiny_checkpoint, tmp_path):
    for file in sorted(path for path in tiny_checkpoint.rglob("*") if path.is_file()):
        name = f"models/tiny/{file.relative_to(tiny_checkpoint)}"
        client().bucket("in").blob(name).upload_from_filename(file)
    put("list.txt", b"gs://in/docs/plain.txt\ngs://in/docs/gone.txt\n")
    a_job = job(
        "gs://in/none/*", "gs://out", "gs://in/models/tiny", date=DATE,
        manifest="gs://in/list.txt", allow_empty=True, max_failure_ratio=0.5,
    )  # fmt: skip
    assert run_here(a_job) == 0
    assert partition()["uri"].to_pylist() == ["gs://in/docs/plain.txt"]
    gcs.seen.clear()
    assert run_here(a_job) == 0
    assert not [r for r in gcs.seen if "safetensors" in r.path and "alt=media" in r.path]


def test_a_model_that_is_not_in_the_bucket_is_refused(gcs):
    with pytest.raises(SettingsError, match=r"gs://in/docs: no config\.json in it"):
        run_here(gcs_job("gs://in/docs"))


def test_a_killed_run_goes_on_from_what_it_has_staged(gcs, tiny_checkpoint):
    put(
        "docs/many.jsonl",
        "".join(json.dumps({"text": f"record {n}"}) + "\n" for n in range(20_000)).encode(),
    )
    arguments = [
        "--input",
        "gs://in/docs",
        "--output",
        "gs://out",
        "--model",
        tiny_checkpoint,
        "--date",
        DATE,
    ]
    process = start(*arguments)
    deadline = time.monotonic() + 300
    while not any(name.endswith(".json") for name in names(f"_staging/date={DATE}")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.kill()
    process.communicate()
    lock = f"_staging/date={DATE}/lock"
    owner = json.loads(content(lock))
    said = run(*arguments, expect=2)
    assert f"run {owner['run_id']}" in said
    # As if ten minutes had gone by.
    client().bucket("out").blob(lock).upload_from_string(json.dumps(owner | {"until": 0.0}))
    run(*arguments)
    assert partition().num_rows == 20_203
    [report] = [name for name in names("runs") if name.endswith(".json")]
    first, second = json.loads(content(report))["runs"]
    assert first["documents"] > 0
    assert first["documents"] + second["documents"] == 20_203


def test_a_bucket_that_is_not_there_is_said_in_one_line(gcs, tiny_checkpoint, tmp_path):
    for output in ("gs://nowhere/out", "gs://nowhere"):
        said = run(
            "--input", "gs://in/docs", "--output", output, "--model", tiny_checkpoint, expect=1
        )
        assert "Traceback" not in said
        assert "nowhere" in said and "404" in said


def test_a_lease_that_cannot_be_given_back_fails_no_run(gcs, tiny_checkpoint, caplog):
    def refuse(request):
        deletes = request.method == "DELETE" or b"DELETE" in request.body  # alone or in a batch
        return 403 if deletes and "2Flock" in request.path + str(request.body) else None

    gcs.before = refuse
    assert run_here(gcs_job(tiny_checkpoint)) == 0
    assert "could not be given back" in caplog.text
    assert partition().num_rows == 203


def test_a_run_whose_lease_was_taken_over_leaves_the_next_one_alone(gcs):
    from pipeline.locking import lock_date
    from pipeline.state import Layout

    mine, listing = (
        f"_staging/date={DATE}/lock",
        f"_staging/date={DATE}/runs/second/listing.parquet",
    )
    with lock_date(Layout("gs://out", DATE), "first"):
        owner = json.dumps({"run_id": "second", "pid": 1, "until": time.time() + 600})
        client().bucket("out").blob(mine).upload_from_string(owner)
        client().bucket("out").blob(listing).upload_from_string("units")
    assert names() == [mine, listing]


@pytest.mark.full
def test_ten_thousand_small_objects(gcs, tiny_checkpoint):
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: put(f"small/{n}.txt", f"document {n}".encode()), range(10_000)))
    assert run_here(job("gs://in/small", "gs://out", tiny_checkpoint, date=DATE)) == 0
    assert partition().num_rows == 10_000


def test_a_job_file_may_lie_in_a_bucket(gcs, tmp_path, monkeypatch, capsys):
    from pipeline import cli
    from pipeline.flags import read_config

    put(
        "job.toml",
        b'input = "gs://in/docs"\noutput = "gs://out"\nmax-windows = 3\ndate = 2026-01-02\n',
    )
    values, others = read_config("gs://in/job.toml")
    assert values == {
        "input": ["gs://in/docs"],
        "output": "gs://out",
        "max-windows": 3,
        "date": DATE,
    }
    assert others == []
    assert cli.main(["run", "--config", "gs://in/none.toml"]) == 2
    assert "--config gs://in/none.toml: cannot be read" in capsys.readouterr().err
    put("job.toml", b"\xff")
    assert cli.main(["run", "--config", "gs://in/job.toml"]) == 2
    assert "--config gs://in/job.toml: expected TOML" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["lost", "truncated", "slow"])
def test_an_answer_that_is_lost_cut_off_or_slow_changes_no_operation(fault, gcs: Faults):
    from pipeline import storage

    def operation(work):
        met: set[tuple[str, str]] = set()

        def once(request):
            key = (request.method, request.path.partition("&uploadType")[0])
            return None if key in met else met.add(key) or fault

        gcs.before = once
        result = work()
        gcs.before = lambda request: None
        return result

    operation(lambda: storage.write("gs://out/a", b"content" * 1000))
    assert operation(lambda: storage.read("gs://out/a")) == b"content" * 1000
    operation(lambda: storage.move("gs://out/a", "gs://out/b"))
    assert operation(lambda: storage.files("gs://out")) == {"b": 7000}
    operation(lambda: storage.delete("gs://out/b"))
    assert names() == []
