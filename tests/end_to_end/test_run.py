"""Whole runs on a tiny model: what is published, replaced, refused, and the same whatever the runner."""

from __future__ import annotations

import shutil
from pathlib import Path

import apache_beam as beam
import numpy as np
import pytest
from corpora import write_jsonl
from lengthwise_command import assert_same, documents, failures, job, manifest, reports, run, run_here
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


def test_the_pipeline_runs_inside_a_users_own_beam_pipeline(
    corpus, undisturbed, tiny_checkpoint, tmp_path
):
    with launch(job(corpus, tmp_path, tiny_checkpoint, date=DATE, dtype="float32")) as launched:
        with beam.Pipeline(runner="FnApiRunner") as pipeline:
            build(pipeline, launched)
    assert_same(documents(tmp_path, DATE), undisturbed)


def test_batching_settings_change_speed_and_never_results(
    corpus, undisturbed, tiny_checkpoint, tmp_path
):
    settings = {"max_tokens_per_batch": 256, "max_tokens_per_load": 700}
    assert run_here(job(corpus, tmp_path, tiny_checkpoint, date=DATE, dtype="float32", **settings)) == 0
    assert_same(documents(tmp_path, DATE), undisturbed)


def test_all_sample_documents_are_published(tiny_checkpoint, tmp_path):
    assert run_here(job(SAMPLES / "documents", tmp_path, tiny_checkpoint, date=DATE)) == 0
    assert failures(tmp_path, DATE).num_rows == 0
    assert documents(tmp_path, DATE).num_rows >= 40


def test_every_broken_sample_is_a_failure_that_says_what_to_do(tiny_checkpoint, tmp_path):
    a_job = job(
        SAMPLES / "broken", tmp_path, tiny_checkpoint, date=DATE, max_failure_ratio=1.0, id_field="id"
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
    assert run_here(job(folder, folder / "out", tiny_checkpoint, date=DATE)) == 0
    with pytest.raises(SettingsError, match="lies inside the input"):
        run_here(job(folder, folder / "out", tiny_checkpoint, date=DATE))


def test_a_second_run_of_the_same_date_is_refused_while_the_first_works(
    corpus, tiny_checkpoint, tmp_path
):
    a_job = job(corpus, tmp_path, tiny_checkpoint, date=DATE)
    with launch(a_job) as first:
        with pytest.raises(SettingsError, match=first.run_id):
            run_here(a_job)
    assert run_here(a_job) == 0


def test_a_document_of_fifty_megabytes_is_one_row(tiny_checkpoint, tmp_path):
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "long.txt").open("w") as file:
        for number in range(50 * 2**20 // 64):
            file.write(f"{number:08d} lorem ipsum dolor sit amet, consectetur adipiscing e\n")
    assert run_here(job(tmp_path / "in", tmp_path / "out", tiny_checkpoint, date=DATE)) == 0
    (row,) = documents(tmp_path / "out", DATE).to_pylist()
    assert row["size_bytes"] == 50 * 2**20 // 64 * 64
    assert row["windows"] > 50_000


def test_the_installed_command_publishes_and_says_where(corpus, tiny_checkpoint, tmp_path):
    said = run(
        "--input", corpus, "--output", tmp_path, "--model", tiny_checkpoint, "--date", DATE
    )  # fmt: skip
    assert "300 documents" in said
    assert "report.html" in said
    assert "Traceback" not in said and "WARNING" not in said
