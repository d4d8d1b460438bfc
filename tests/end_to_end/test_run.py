"""Whole runs on a tiny model: what is published, replaced, refused, and the same whatever the runner."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from hashlib import sha256
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corpora import write_jsonl
from lengthwise_command import (
    assert_same,
    documents,
    failures,
    job,
    manifest,
    reports,
    run,
    run_here,
)
from pipeline.build import build
from pipeline.config import SettingsError
from pipeline.launching import launch

DATE = "2026-01-02"
SAMPLES = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("corpus"), 300)


@pytest.fixture(scope="module")
def undisturbed(corpus, tiny_checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed")
    assert run_here(job(corpus, output, tiny_checkpoint, date=DATE, dtype="float32")) == 0
    return documents(output, DATE)


def test_every_record_becomes_one_row_with_a_unit_embedding(undisturbed):
    assert undisturbed.num_rows == 300
    assert len(set(undisturbed["document_id"].to_pylist())) == 300
    vectors = np.array(undisturbed["embedding"].to_pylist())
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_the_report_accounts_for_every_record(corpus, tiny_checkpoint, tmp_path):
    assert run_here(job(corpus, tmp_path, tiny_checkpoint, date=DATE)) == 0
    (report,) = reports(tmp_path, DATE)
    counts = report["documents"]
    assert (counts["read"], counts["written"], counts["failed"]) == (300, 300, 0)
    assert counts["listed"] == counts["written"] + counts["failed"] + counts["skipped"]
    assert report["windows_inferred"] <= report["windows"] >= 300
    assert 0 < report["padding_efficiency"] <= 1
    assert report["compiled_programs"] == len(report["shapes"])
    assert report["attention"] == "xla"
    assert {"read", "tokenize", "batch", "inference", "assemble", "write"} <= set(report["seconds"])
    assert report["status"] == "published"


def test_running_a_date_again_replaces_it(corpus, undisturbed, tiny_checkpoint, tmp_path):
    for _ in range(2):
        assert run_here(job(corpus, tmp_path, tiny_checkpoint, date=DATE, dtype="float32")) == 0
    assert_same(documents(tmp_path, DATE), undisturbed)
    on_disk = {p.name for p in (tmp_path / f"documents/date={DATE}").glob("*.parquet")}
    assert on_disk == {Path(f["path"]).name for f in manifest(tmp_path, DATE)["documents"]}


@pytest.mark.parametrize(
    "options",
    [
        ["--direct_running_mode=multi_threading", "--direct_num_workers=2"],
        ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
    ],
    ids=["threads", "processes"],
)
def test_the_result_does_not_depend_on_the_running_mode(
    options, corpus, undisturbed, tiny_checkpoint, tmp_path, monkeypatch
):
    # A user's own model.py in the working folder must not shadow ours in worker processes.
    (tmp_path / "model.py").write_text("raise ImportError('the user\\'s own module was imported')")
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out"
    a_job = job(corpus, output, tiny_checkpoint, date=DATE, dtype="float32")
    assert run_here(a_job, *options) == 0
    assert_same(documents(output, DATE), undisturbed)


# (DirectRunner looks for an engine to hand over to, and takes FnApiRunner where it finds none.)
@pytest.mark.parametrize("runner", ["FnApiRunner", "DirectRunner"])
def test_the_pipeline_runs_inside_a_users_own_beam_pipeline(
    runner, corpus, undisturbed, tiny_checkpoint, tmp_path
):
    a_job = job(corpus, tmp_path, tiny_checkpoint, date=DATE, dtype="float32")
    with launch(a_job) as launched, beam.Pipeline(runner=runner) as pipeline:
        build(pipeline, launched)
    assert_same(documents(tmp_path, DATE), undisturbed)


def test_batching_settings_change_speed_and_never_results(
    corpus, undisturbed, tiny_checkpoint, tmp_path
):
    settings = {"max_tokens_per_batch": 256, "max_tokens_per_load": 700}
    assert (
        run_here(job(corpus, tmp_path, tiny_checkpoint, date=DATE, dtype="float32", **settings))
        == 0
    )
    assert_same(documents(tmp_path, DATE), undisturbed)


def test_all_sample_documents_are_published(tiny_checkpoint, tmp_path):
    assert run_here(job(SAMPLES / "documents", tmp_path, tiny_checkpoint, date=DATE)) == 0
    assert failures(tmp_path, DATE).num_rows == 0
    assert documents(tmp_path, DATE).num_rows >= 40


def test_every_broken_sample_is_a_failure_that_says_what_to_do(tiny_checkpoint, tmp_path):
    a_job = job(
        SAMPLES / "broken",
        tmp_path,
        tiny_checkpoint,
        date=DATE,
        max_failure_ratio=1.0,
        id_field="id",
    )
    assert run_here(a_job) == 0
    rows = failures(tmp_path, DATE).to_pylist()
    assert {Path(row["uri"]).name for row in rows} == {
        path.name for path in (SAMPLES / "broken").rglob("*") if path.is_file()
    }
    assert all(row["step"] and row["reason"] and row["message"] for row in rows)


def test_too_many_failures_publish_nothing_and_keep_the_report(tiny_checkpoint, tmp_path, capsys):
    assert run_here(job(SAMPLES / "broken", tmp_path, tiny_checkpoint, date=DATE)) == 1
    assert not (tmp_path / f"documents/date={DATE}").exists()
    (report,) = reports(tmp_path, DATE)
    assert report["status"] == "failed"
    assert "--max-failure-ratio" in capsys.readouterr().err


def test_an_input_without_matches_is_refused_before_anything_is_written(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(SettingsError, match="in"):
        run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint))
    assert not (tmp_path / "out").exists()


def test_an_allowed_empty_input_gives_a_valid_empty_partition(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    a_job = job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE, allow_empty=True)
    assert run_here(a_job) == 0
    table = documents(tmp_path / "out", DATE)
    assert table.num_rows == 0
    assert "embedding" in table.column_names


def test_output_inside_the_input_is_refused(corpus, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(corpus, tmp_path / "in")
    with pytest.raises(SettingsError, match="lies inside the input"):
        run_here(job(folder, folder / "out", tiny_checkpoint, date=DATE))


def test_an_output_that_its_own_input_would_match_is_refused(
    tiny_checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "a.txt").write_text("a text")
    with pytest.raises(SettingsError, match="lies inside the input"):
        run_here(job("documents", ".", tiny_checkpoint))
    glob = job("documents/**", "documents", tiny_checkpoint, date=DATE)
    assert run_here(glob) == 0
    with pytest.raises(SettingsError, match="an earlier run has written"):
        run_here(glob)


def test_an_output_whose_folders_are_files_is_refused_before_computing(
    corpus, tiny_checkpoint, tmp_path
):
    (tmp_path / "failures").touch()
    with pytest.raises(SettingsError, match="failures is a file"):
        run_here(job(corpus, tmp_path, tiny_checkpoint))


def test_a_second_run_of_the_same_date_is_refused_while_the_first_works(
    corpus, tiny_checkpoint, tmp_path
):
    a_job = job(corpus, tmp_path, tiny_checkpoint, date=DATE)
    with launch(a_job) as first, pytest.raises(SettingsError, match=first.run_id):
        run_here(a_job)
    assert run_here(a_job) == 0


def test_a_document_of_fifty_megabytes_is_one_row(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    source = tmp_path / "in" / "long.txt"
    with source.open("w") as file:
        for number in range(50 * 2**20 // 62):
            file.write(f"{number:08d} lorem ipsum dolor sit amet, consectetur adipiscing e\n")
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    (row,) = documents(tmp_path / "out", DATE).to_pylist()
    assert row["size_bytes"] == source.stat().st_size > 50_000_000
    assert row["windows"] > 50_000


def test_the_installed_command_publishes_and_says_where(corpus, tiny_checkpoint, tmp_path):
    said = run(
        "--input", corpus, "--output", tmp_path, "--model", tiny_checkpoint, "--date", DATE
    )  # fmt: skip
    assert "300 documents" in said
    assert "report.html" in said
    assert "Traceback" not in said and "WARNING" not in said


def test_a_file_replaced_under_the_same_time_is_read_again(tiny_checkpoint, tmp_path):
    source = tmp_path / "in" / "a.txt"
    source.parent.mkdir()
    (tmp_path / "in" / "empty.txt").touch()
    source.write_text("the first text")
    os.utime(source, ns=(10**18, 10**18))
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 1
    source.write_text("another, longer text")
    os.utime(source, ns=(10**18, 10**18))
    (tmp_path / "in" / "empty.txt").unlink()
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    (row,) = documents(tmp_path / "out", DATE).to_pylist()
    assert row["size_bytes"] == len("another, longer text")


def test_resuming_never_mixes_two_types_of_a_kept_field(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "z.txt").touch()  # a failure: nothing is published at first
    pq.write_table(pa.table({"text": ["one"], "x": [1]}), tmp_path / "in" / "b.parquet")
    arguments = {"date": DATE, "keep_fields": ("x",)}
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, **arguments)) == 1
    pq.write_table(pa.table({"text": ["two"], "x": ["1"]}), tmp_path / "in" / "a.parquet")
    arguments["max_failure_ratio"] = 1.0
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, **arguments)) == 0
    table = documents(tmp_path / "out", DATE)
    assert table.schema.field("x").type == pa.string()


def test_equal_texts_do_not_flatter_the_padding_efficiency(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "the same words"}\n' * 300)
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    (report,) = reports(tmp_path / "out", DATE)
    assert report["padding_efficiency"] <= 1
    assert documents(tmp_path / "out", DATE).num_rows == 300


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("attention", "flahs", "--attention 'flahs' is unknown; expected one of auto"),
        ("max_tokens_per_batch", 10, "--max-tokens-per-batch: expected at least 64"),
        ("window_tokens", 4096, "--window-tokens: expected at most 128"),
    ],
)
def test_settings_that_only_the_checkpoint_can_judge_are_refused_before_anything_is_written(
    setting, value, says, corpus, tiny_checkpoint, tmp_path
):
    with pytest.raises(SettingsError, match=says):
        run_here(job(corpus, tmp_path / "out", tiny_checkpoint, **{setting: value}))
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_refused(corpus, tiny_checkpoint, tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(SettingsError, match="is a file"):
        run_here(job(corpus, tmp_path / "out", tiny_checkpoint))


@pytest.mark.parametrize("mode", ["in_memory", "multi_threading"])
def test_a_failed_run_ends_by_saying_why_whatever_the_mode(mode, tiny_checkpoint, tmp_path):
    said = run(
        "--input", SAMPLES / "broken", "--output", tmp_path, "--model", tiny_checkpoint,
        f"--direct_running_mode={mode}", expect=1,
    )  # fmt: skip
    # In threads Beam's worker prints the traceback, whatever the log level; ours must not come on top.
    why, report = said.splitlines()[-2:]
    assert why.startswith("lengthwise: ") and "records failed" in why and "while running" not in why
    assert report.startswith("Report: ")
    assert mode == "multi_threading" or "Traceback" not in said


def test_a_device_fault_fails_the_run_with_a_report_and_the_next_run_goes_on(
    corpus, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    from model.predictor import Predictor

    fetch, fetched = Predictor.fetch, []

    def broken(self, handle):
        fetched.append(1)
        if len(fetched) > 5:
            raise RuntimeError("INTERNAL: the chip has halted")
        return fetch(self, handle)

    a_job = job(corpus, tmp_path, tiny_checkpoint, date=DATE, max_tokens_per_batch=256)
    monkeypatch.setattr(Predictor, "fetch", broken)
    assert run_here(a_job) == 1
    assert "the chip has halted" in capsys.readouterr().err
    (report,) = reports(tmp_path, DATE)
    assert report["status"] == "failed"
    assert "the chip has halted" in report["reason"]
    monkeypatch.undo()
    assert run_here(a_job) == 0
    assert documents(tmp_path, DATE).num_rows == 300
    assert failures(tmp_path, DATE).num_rows == 0


def test_the_next_date_computes_what_has_changed_and_holds_everything(tiny_checkpoint, tmp_path):
    folder, output = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for name in ("same", "changed", "deleted"):
        (folder / f"{name}.txt").write_text(f"the {name} document")
    (folder / "broken.txt").write_bytes(b"\xff\xff")
    settings = {"incremental": True, "max_failure_ratio": 1.0}
    assert run_here(job(folder, output, tiny_checkpoint, date="2026-01-01", **settings)) == 0
    (folder / "changed.txt").write_text("the document has changed")
    (folder / "deleted.txt").unlink()
    (folder / "new.txt").write_text("a new document")
    assert run_here(job(folder, output, tiny_checkpoint, date="2026-01-02", **settings)) == 0
    (report,) = reports(output, "2026-01-02")
    counts = report["documents"]
    assert (counts["skipped"], counts["written"], counts["failed"]) == (1, 2, 1)
    assert report["incremental"]["objects_deleted"] == 1

    whole = tmp_path / "whole"
    assert (
        run_here(job(folder, whole, tiny_checkpoint, date="2026-01-02", max_failure_ratio=1.0)) == 0
    )
    assert_same(documents(output, "2026-01-02"), documents(whole, "2026-01-02"))


def test_a_kept_field_is_null_where_the_format_has_none(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("plain text")
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "a record", "lang": "en"}\n')
    a_job = job(
        tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE, keep_fields=("lang",)
    )
    assert run_here(a_job) == 0
    table = documents(tmp_path / "out", DATE)
    assert sorted(table["lang"].to_pylist(), key=str) == [None, "en"]


def test_a_failure_holds_enough_to_act_on(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    line = b'{"text": 7}'
    (tmp_path / "in" / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    (tmp_path / "in" / "b.parquet").write_bytes(b"PAR1 is no container")
    (tmp_path / "in" / "c.txt").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "in" / "d.txt").write_text("\u200b")  # no token
    a_job = job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE, max_failure_ratio=1)
    assert run_here(a_job) == 0
    rows = failures(tmp_path / "out", DATE).to_pylist()
    assert [
        (Path(r["uri"]).name, r["record"], r["position"], r["step"], r["reason"]) for r in rows
    ] == [
        ("a.jsonl", "17", 17, "decode", "text_not_string"),
        ("b.parquet", None, None, "read", "not_parquet"),
        ("c.txt", "0", 0, "decode", "undecodable_text"),
        ("d.txt", "0", 0, "tokenize", "no_tokens"),
    ]
    assert [row["content_sha256"] for row in rows] == [
        sha256(line).hexdigest(),
        None,  # a container that cannot be opened is one failure, of the object
        sha256(b"\xff\xfe\xff").hexdigest(),
        sha256("\u200b".encode()).hexdigest(),
    ]


def test_fail_fast_stops_at_the_first_failure_and_the_next_run_goes_on(
    tiny_checkpoint, tmp_path, capsys
):
    corpus = write_jsonl(tmp_path / "in", 2_000)
    lines = (corpus / "part-2.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(250, b'{"id": "no text"}\n')
    (corpus / "part-2.jsonl").write_bytes(b"".join(lines))
    settings = {"date": DATE, "fail_fast": True, "max_tokens_per_load": 2_000}
    for _ in range(2):  # it stops there again while nothing is mended
        assert run_here(job(corpus, tmp_path / "out", tiny_checkpoint, **settings)) == 1
        said = capsys.readouterr().err
        assert "--fail-fast: record" in said and "part-2.jsonl failed to decode" in said
        assert "missing_text_field" in said and "Traceback" not in said
    report = reports(tmp_path / "out", DATE)[-1]
    assert report["status"] == "failed"
    assert 0 < report["documents"]["written"] < 2_000
    assert report["runs"][1]["windows_inferred"] < report["runs"][0]["windows_inferred"]
    assert run_here(job(corpus, tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    assert documents(tmp_path / "out", DATE).num_rows == 2_000
    report = reports(tmp_path / "out", DATE)[-1]
    assert sum(r["windows_inferred"] for r in report["runs"]) <= 1.1 * report["windows"]


@pytest.mark.parametrize(
    ("runner", "options", "says"),
    [
        ("no.such.Runner", (), "--runner no.such.Runner: Beam cannot load it"),
        (
            "DirectRunner",
            ("--direct_running_mode=multi_processing", "--direct_num_workers=-1"),
            "--direct_num_workers: expected 0",
        ),
    ],
)
def test_an_engine_that_cannot_be_is_refused(
    runner, options, says, corpus, tiny_checkpoint, tmp_path
):
    a_job = job(corpus, tmp_path, tiny_checkpoint, date=DATE, device="cpu")
    with pytest.raises(SettingsError, match=says):
        run_here(a_job, *options, runner=runner)


def test_a_run_whose_output_is_deleted_meanwhile_says_so(
    corpus, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    def build_and_delete(*made):
        build(*made)
        shutil.rmtree(tmp_path / "out")

    monkeypatch.setattr("pipeline.running.build", build_and_delete)
    assert run_here(job(corpus, tmp_path / "out", tiny_checkpoint, date=DATE)) == 1
    said = capsys.readouterr().err
    assert "out was deleted while the run worked in it" in said
    assert "Traceback" not in said


def test_a_published_run_that_cannot_delete_old_dates_says_so(
    corpus, tiny_checkpoint, tmp_path, monkeypatch, capsys
):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "old")

    monkeypatch.setattr("pipeline.publishing.delete_older", refuse)
    assert run_here(job(corpus, tmp_path, tiny_checkpoint, date=DATE, keep_days=3)) == 0
    said = capsys.readouterr().err
    assert "Published 300 documents" in said
    assert "was not all deleted: [Errno 13] Permission denied: 'old'" in said


def test_a_process_loads_the_model_once_whatever_its_threads_and_lets_it_go(
    tiny_checkpoint, tmp_path, monkeypatch
):
    from model.predictor import Predictor

    load, loaded = Predictor.__init__, []

    def noted(self, *rest, **more):
        loaded.append(weakref.ref(self))
        load(self, *rest, **more)

    monkeypatch.setattr(Predictor, "__init__", noted)
    threads = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
    corpus = write_jsonl(tmp_path / "in", 300)
    for number in (1, 2):
        a_job = job(corpus, tmp_path / "out", tiny_checkpoint, date=DATE)
        assert run_here(a_job, *threads) == 0
        assert len(loaded) == number
    gc.collect()
    assert loaded[0]() is None, "the next run's model has taken its place"
