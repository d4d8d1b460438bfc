"""Publish: reconcile → commit → report, or nothing at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from pipeline import sidecars
from pipeline.locking import DateLock
from pipeline.partitions import FAILURES_SCHEMA, read_objects
from pipeline.progress import Control
from pipeline.publishing import RunFailed, publish, report_failure
from pipeline.records import Run, StagedFile
from pipeline.state import find_resumable
from pipeline.writing import RowGroupWriter
from staged_case import (
    DATE,
    FINGERPRINT,
    layout,
    make_rows,
    make_run,
    make_unit,
    read_manifest,
    read_partition,
    read_report,
    stage,
    tree,
)

A, B = make_unit("a.jsonl"), make_unit("b.txt", format="text", size_bytes=7)


def two_units(tmp_path: Path, **changes) -> tuple[Run, list[StagedFile]]:
    """A run over two objects, staged in three files: five documents and one failure."""
    run = make_run(tmp_path, [A, B], **({"max_failure_ratio": 0.5} | changes))
    staged = stage(
        run,
        make_rows(run, A, [0, 10]),
        make_rows(run, A, [20, 30], records=5, failed=[40]),
        make_rows(run, B, [0], records=1),
    )
    return run, staged


def records_of(table: pa.Table) -> list[tuple[str, str]]:
    return sorted(zip(table["uri"].to_pylist(), table["record"].to_pylist(), strict=True))


ALL = [(A.uri, "0"), (A.uri, "10"), (A.uri, "20"), (A.uri, "30"), (B.uri, "0")]


def assert_nothing_published(run: Run) -> None:
    assert not Path(layout(run).documents).exists()
    assert not Path(layout(run).failures).exists()
    assert not Path(layout(run).state).exists()


# --- what is published


def test_a_run_gives_one_file_a_failures_file_a_state_and_a_report_and_no_more(tmp_path):
    run, staged = two_units(tmp_path)
    with DateLock(layout(run), run.run_id):
        publish(run, staged)
    assert tree(tmp_path) == [
        f"documents/date={DATE}/_manifest.json",
        f"documents/date={DATE}/part-run-1-00000.parquet",
        f"failures/date={DATE}/part-run-1-00000.parquet",
        f"runs/date={DATE}/run-1/report.html",
        f"runs/date={DATE}/run-1/report.json",
        f"state/date={DATE}/part-run-1-00000.parquet",
    ]
    assert records_of(read_partition(run)) == ALL
    assert not (tmp_path / "_staging").exists()


def test_rows_are_as_they_were_assembled(tmp_path):
    run, staged = two_units(tmp_path)
    publish(run, staged)
    row = read_partition(run).filter(pa.compute.field("record") == "30").to_pylist()[0]
    assert row["embedding"] == [30.0, 30.125, 30.25, 30.375]
    assert read_partition(run).schema.equals(run.schema)


def test_the_manifest_names_every_file_with_rows_bytes_and_checksum(tmp_path):
    run, staged = two_units(tmp_path, max_rows_per_file=3)
    publish(run, staged)
    manifest = read_manifest(run)
    assert len(manifest["documents"]) == 3
    for entry in (*manifest["documents"], *manifest["failures"], manifest["state"]):
        content = (tmp_path / entry["path"]).read_bytes()
        assert entry["size_bytes"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["rows"] == pq.read_metadata(tmp_path / entry["path"]).num_rows
    assert (manifest["run_id"], manifest["fingerprint"]) == ("run-1", FINGERPRINT)
    assert manifest["schema_version"] == 1


def test_each_failure_is_a_row_that_says_which_record_and_why(tmp_path):
    run, staged = two_units(tmp_path)
    publish(run, staged)
    assert read_partition(run, "failures").to_pylist() == [
        {
            "uri": A.uri,
            "record": "40",
            "position": 40,
            "step": "decode",
            "reason": "bad_json",
            "message": "made up",
            "content_sha256": "0" * 64,
        }
    ]


def test_a_failure_of_an_object_has_no_record(tmp_path):
    run = make_run(tmp_path, [A], max_failure_ratio=1.0)
    publish(run, stage(run, make_rows(run, A, records=1, failed=[-1])))
    [row] = read_partition(run, "failures").to_pylist()
    assert (row["record"], row["position"]) == (None, None)


def test_the_state_has_one_row_an_object_however_many_units_it_was_read_in(tmp_path):
    first, second = make_unit(stop=50), make_unit(start=50)
    run = make_run(tmp_path, [first, second, B], max_failure_ratio=1.0)
    publish(
        run,
        stage(
            run,
            make_rows(run, first, [0], records=2, failed=[10]),
            make_rows(run, second, [50], records=1),
            make_rows(run, B, [0], records=1),
        ),
    )
    assert read_objects(layout(run)).to_pylist() == [
        {"uri": A.uri, "generation": "1", "size": 1000, "records": 3, "failed": 1, "fingerprint": FINGERPRINT,
         "partition": DATE},
        {"uri": B.uri, "generation": "1", "size": 7, "records": 1, "failed": 0, "fingerprint": FINGERPRINT,
         "partition": DATE},
    ]  # fmt: skip


@pytest.mark.parametrize("units", [[], [A]], ids=["no unit", "a unit without records"])
def test_no_documents_give_an_empty_partition_with_its_schema(tmp_path, units):
    run = make_run(tmp_path, units)
    publish(run, stage(run, *(make_rows(run, unit, records=0) for unit in units)))
    assert read_partition(run).num_rows == 0
    assert read_partition(run).schema.equals(run.schema)
    assert read_partition(run, "failures").schema.equals(FAILURES_SCHEMA)
    assert read_report(run)["documents"]["written"] == 0


def test_readers_of_hive_datasets_do_not_trip_over_the_manifest(tmp_path):
    run, staged = two_units(tmp_path)
    publish(run, staged)
    dataset = ds.dataset(tmp_path / "documents", partitioning="hive")
    table = dataset.to_table()
    assert records_of(table) == ALL
    assert set(table["date"].to_pylist()) == {DATE}
    assert ds.dataset(tmp_path / "failures", partitioning="hive").count_rows() == 1


def test_a_date_that_is_run_again_is_replaced(tmp_path):
    run, staged = two_units(tmp_path)
    publish(run, staged)
    later = make_run(tmp_path, [B], run_id="run-2")
    publish(later, stage(later, make_rows(later, B, [0], records=1)))
    assert records_of(read_partition(later)) == [(B.uri, "0")]
    assert [name for name in tree(tmp_path) if "run-1" in name and "runs/" not in name] == []


def test_files_of_others_in_the_partition_are_left_alone(tmp_path):
    run, staged = two_units(tmp_path)
    note = Path(layout(run).documents, "_SUCCESS")
    note.parent.mkdir(parents=True)
    note.write_text("")
    publish(run, staged)
    assert note.exists()


def test_staged_files_of_another_fingerprint_are_neither_used_nor_kept(tmp_path):
    other = make_run(tmp_path, [A], run_id="run-0", fingerprint="e" * 64)
    stage(other, make_rows(other, A, [0], records=1))
    run, staged = two_units(tmp_path)
    with DateLock(layout(run), run.run_id):
        publish(run, staged)
    assert records_of(read_partition(run)) == ALL
    assert not (tmp_path / "_staging").exists()


def test_the_launcher_can_still_read_and_set_its_own_stop_flag_after_publication(tmp_path):
    earlier = make_run(tmp_path, [A, B], run_id="run-0")
    run, staged = two_units(tmp_path)
    with DateLock(layout(run), run.run_id):
        publish(run, staged)
        Control(run.control).stop(2)
        assert Control(run.control).stopped_by() == 2
        assert not Path(layout(earlier).control("run-0")).exists()
    assert not (tmp_path / "_staging").exists()


def test_only_files_of_successful_bundles_count(tmp_path):
    run, staged = two_units(tmp_path)
    stage(run, make_rows(run, A, [0, 10]))  # by a bundle that was tried again
    publish(run, staged)
    assert records_of(read_partition(run)) == ALL


# --- reconciliation


def dropping_a_row(staged: StagedFile) -> None:
    """Takes a row out of a staged file, as a writer that loses one would."""
    path = sidecars.read(staged.sidecar).file_path
    pq.write_table(pq.read_table(path).slice(1), path)


def dropping_a_key_too(staged: StagedFile) -> None:
    """Takes a document out of a staged file and its sidecar, as a lost element would."""
    dropping_a_row(staged)
    path = Path(staged.sidecar)
    data = json.loads(path.read_text())
    for column in data["documents"].values():
        del column[0]
    path.write_text(json.dumps(data))


def test_a_row_that_is_lost_by_the_writer_fails_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    dropping_a_row(staged[0])
    with pytest.raises(RunFailed, match="holds 1 documents, and not the 2 that its sidecar names"):
        publish(run, staged)
    assert_nothing_published(run)


def test_a_record_that_is_lost_on_the_way_fails_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    dropping_a_key_too(staged[0])
    with pytest.raises(
        RunFailed, match=r"1 of 2 work units do not add up .*a\.jsonl.*5 read, 3 written, 1 failed"
    ):
        publish(run, staged)
    assert_nothing_published(run)
    report = read_report(run)
    assert report["status"] == "failed"
    assert "do not add up" in report["reason"]


def test_a_work_unit_that_is_lost_fails_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    with pytest.raises(RunFailed, match=r"1 of 2 work units were not read to their end .*b\.txt"):
        publish(run, staged[:2])
    assert_nothing_published(run)
    assert [path for path in tree(layout(run).staged(FINGERPRINT)) if path.endswith(".json")]


def test_a_file_that_is_lost_fails_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    Path(sidecars.read(staged[0].sidecar).file_path).unlink()
    with pytest.raises(RunFailed, match="cannot be read"):
        publish(run, staged)
    Path(staged[0].sidecar).unlink()
    with pytest.raises(RunFailed, match="gone or damaged"):
        publish(run, staged)


def test_a_document_that_is_written_twice_fails_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    staged += stage(run, make_rows(run, B, [0]))
    with pytest.raises(RunFailed, match=r"b\.txt.*1 read, 2 written"):
        publish(run, staged)


def test_a_document_that_is_written_twice_in_place_of_another_fails_the_run(tmp_path):
    run = make_run(tmp_path, [A])
    staged = stage(run, make_rows(run, A, [0], records=2), make_rows(run, A, [0]))
    with pytest.raises(RunFailed, match="was written twice"):
        publish(run, staged)


def test_a_unit_that_is_read_twice_fails_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    staged += stage(run, make_rows(run, B, records=1))
    with pytest.raises(RunFailed, match=r"1 work units were read twice .*b\.txt"):
        publish(run, staged)


def test_rows_of_a_unit_that_was_not_listed_fail_the_run(tmp_path):
    run, staged = two_units(tmp_path)
    staged += stage(run, make_rows(run, make_unit("c.jsonl"), [0], records=1))
    with pytest.raises(RunFailed, match=r"1 work units were not listed .*c\.jsonl"):
        publish(run, staged)


def test_a_message_names_a_few_units_and_counts_the_rest(tmp_path):
    units = [make_unit(f"{n}.txt") for n in range(20)]
    run = make_run(tmp_path, units)
    with pytest.raises(RunFailed, match=r"20 of 20 work units .*0\.txt.*, and 15 more\)") as raised:
        publish(run, [])
    assert "/in/7.txt" not in str(raised.value)


# --- ids that come twice


def test_an_id_that_comes_twice_keeps_its_first_row_and_the_others_become_failures(tmp_path):
    first, second = make_unit(stop=50), make_unit(start=50)
    run = make_run(tmp_path, [first, second], max_failure_ratio=0.5)
    staged = stage(
        run,
        make_rows(run, second, [70, 60, 55], records=3, ids={70: "x", 60: "y", 55: "y"}),
        make_rows(run, first, [0, 10], records=2, ids={0: "z", 10: "x"}),
    )
    publish(run, staged)
    table = read_partition(run)
    assert records_of(table) == [(A.uri, "x"), (A.uri, "y"), (A.uri, "z")]
    kept = table.filter(pa.compute.field("record") == "x")
    assert kept["embedding"].to_pylist() == [[10.0, 10.125, 10.25, 10.375]]
    failures = read_partition(run, "failures").select(["record", "position", "reason"])
    assert failures.to_pylist() == [
        {"record": "y", "position": 60, "reason": "duplicate_id"},
        {"record": "x", "position": 70, "reason": "duplicate_id"},
    ]
    documents = read_report(run)["documents"]
    assert documents == {
        "listed": 5, "read": 5, "written": 3, "failed": 2, "skipped": 0, "not_started": 0,
    }  # fmt: skip
    [state] = read_objects(layout(run)).to_pylist()
    assert (state["records"], state["failed"]) == (5, 2)


# --- too many failures


def test_over_the_failure_ratio_nothing_is_published_and_what_was_computed_stays(tmp_path):
    run, staged = two_units(tmp_path, max_failure_ratio=0.1)
    with pytest.raises(
        RunFailed, match=r"1 of 6 records failed \(16\.7%\).*allows 10\.0%.*bad_json \(1\)"
    ):
        publish(run, staged)
    assert_nothing_published(run)
    assert read_report(run)["status"] == "failed"
    assert Path(layout(run).run(run.run_id), "report.html").exists()
    found = find_resumable(layout(run), FINGERPRINT, [A, B])
    assert (len(found.sidecars), found.units) == (3, ())


def test_what_a_refused_run_computed_is_published_once_more_failures_are_allowed(tmp_path):
    run, staged = two_units(tmp_path, max_failure_ratio=0.1)
    with pytest.raises(RunFailed):
        publish(run, staged)
    found = find_resumable(layout(run), FINGERPRINT, [A, B])
    again = make_run(
        tmp_path, [A, B], run_id="run-2", resumed=found.sidecars, max_failure_ratio=0.2
    )
    publish(again, [])
    assert records_of(read_partition(again)) == ALL


def test_exactly_the_allowed_share_of_failures_is_published(tmp_path):
    run = make_run(tmp_path, [A], max_failure_ratio=0.25)
    publish(run, stage(run, make_rows(run, A, [0, 1, 2], records=4, failed=[3])))
    assert read_partition(run).num_rows == 3


# --- stopping and resuming


def test_a_stopped_run_publishes_nothing_and_is_no_failure(tmp_path):
    run, staged = two_units(tmp_path)
    assert run.control is not None
    Control(run.control).stop(15)
    publish(run, staged[:2])
    assert_nothing_published(run)
    report = read_report(run)
    assert report["status"] == "stopped"
    assert report["documents"] == {
        "listed": 6, "read": 5, "written": 4, "failed": 1, "skipped": 0, "not_started": 1,
    }  # fmt: skip
    assert report["units"] == {"listed": 2, "finished": 1, "not_started": 1}


def test_a_run_that_is_stopped_while_its_files_are_built_publishes_nothing(tmp_path, monkeypatch):
    run, staged = two_units(tmp_path)
    rows = RowGroupWriter.write

    def write(self, table):
        rows(self, table)
        Control(run.control).stop(15)

    monkeypatch.setattr(RowGroupWriter, "write", write)
    publish(run, staged)
    assert_nothing_published(run)
    assert read_report(run)["status"] == "stopped"
    monkeypatch.undo()
    Path(run.control, "stop").unlink()
    Path(layout(run).report(run.run_id)).unlink()
    publish(run, staged)
    assert records_of(read_partition(run)) == ALL


def test_of_a_file_of_many_records_nobody_knows_how_many_were_not_started(tmp_path):
    run, staged = two_units(tmp_path)
    assert run.control is not None
    Control(run.control).stop(2)
    publish(run, [staged[0], staged[2]])
    documents = read_report(run)["documents"]
    assert (documents["listed"], documents["not_started"]) == (None, None)
    assert (documents["read"], documents["written"]) == (3, 3)


def test_an_interrupted_run_is_finished_by_the_next_with_one_row_a_document(tmp_path):
    run, _ = two_units(tmp_path, max_failure_ratio=0.5)
    for name in tree(layout(run).staged(FINGERPRINT)):
        if "b.txt" in Path(layout(run).staged(FINGERPRINT), name).read_bytes().decode(
            errors="ignore"
        ):
            Path(layout(run).staged(FINGERPRINT), name).unlink()
    found = find_resumable(layout(run), FINGERPRINT, [A, B])
    assert [unit.unit_id for unit in found.units] == [B.unit_id]
    again = make_run(
        tmp_path, [A, B], run_id="run-2", resumed=found.sidecars, max_failure_ratio=0.5
    )
    with DateLock(layout(again), again.run_id):
        publish(again, stage(again, make_rows(again, B, [0], records=1)))
    assert records_of(read_partition(again)) == ALL
    assert not (tmp_path / "_staging").exists()
    assert [(r["run_id"], r["documents"]) for r in read_report(again)["runs"]] == [
        ("run-1", 4),
        ("run-2", 1),
    ]


def test_a_unit_whose_end_was_reached_by_an_interrupted_run_too_is_no_fault(tmp_path):
    run = make_run(tmp_path, [A])
    stage(run, make_rows(run, A, [1], records=2))
    found = find_resumable(layout(run), FINGERPRINT, [A])
    again = make_run(tmp_path, [A], run_id="run-2", resumed=found.sidecars)
    publish(again, stage(again, make_rows(again, A, [0], records=2)))
    assert read_partition(again).num_rows == 2


def test_a_failure_that_is_met_again_when_a_unit_is_read_again_counts_once(tmp_path):
    run = make_run(tmp_path, [A])
    stage(run, make_rows(run, A, [0], failed=[-1]))
    found = find_resumable(layout(run), FINGERPRINT, [A])
    again = make_run(tmp_path, [A], run_id="run-2", resumed=found.sidecars, max_failure_ratio=0.5)
    publish(again, stage(again, make_rows(again, A, [1], records=3, failed=[-1])))
    assert read_partition(again, "failures").num_rows == 1


def test_an_object_that_changes_before_its_second_reading_is_what_the_second_reading_says(tmp_path):
    run = make_run(tmp_path, [A], run_id="run-9")  # the clock has been set back since
    stage(run, make_rows(run, A, [0, 1], records=9))
    found = find_resumable(layout(run), FINGERPRINT, [A])
    again = make_run(tmp_path, [A], run_id="run-2", resumed=found.sidecars, max_failure_ratio=0.5)
    publish(again, stage(again, make_rows(again, A, records=3, failed=[-1])))
    assert (read_partition(again).num_rows, read_partition(again, "failures").num_rows) == (2, 1)


def test_a_record_that_is_lost_at_the_second_reading_fails_the_run(tmp_path):
    run = make_run(tmp_path, [A])
    stage(run, make_rows(run, A, [1], records=3))
    found = find_resumable(layout(run), FINGERPRINT, [A])
    again = make_run(tmp_path, [A], run_id="run-2", resumed=found.sidecars)
    with pytest.raises(RunFailed, match="3 read, 2 written"):
        publish(again, stage(again, make_rows(again, A, [0], records=3)))


def test_a_run_that_fails_before_its_end_can_be_reported(tmp_path):
    run, _ = two_units(tmp_path)
    report_failure(run, "the device was lost")
    report = read_report(run)
    assert (report["status"], report["reason"]) == ("failed", "the device was lost")
    assert report["documents"]["written"] == 5
    report_failure(run, "later")
    assert read_report(run)["reason"] == "the device was lost"
