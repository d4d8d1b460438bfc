"""Write: rows → staged files, each committed by its sidecar."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

from pipeline import sidecars, writing
from pipeline.records import StagedFile
from pipeline.writing import RowGroupWriter, Write
from staged_case import layout, make_rows, make_run, make_unit, stage, tree, writer

UNIT = make_unit()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it: `clock[0] += seconds`."""
    now = [1000.0]
    monkeypatch.setattr(writing.time, "monotonic", lambda: now[0])
    return now


def staged_folder(run) -> Path:
    return Path(layout(run).staged(run.fingerprint))


def test_a_closed_file_is_whole_and_its_sidecar_says_all_about_it(tmp_path):
    run = make_run(tmp_path, [UNIT])
    rows = make_rows(run, UNIT, [4, 9], records=3, failed=[5])
    [staged] = stage(run, rows)
    sidecar = sidecars.read(staged.sidecar)
    assert pq.read_table(sidecar.file_path).equals(rows.table)
    assert sidecar.size_bytes == Path(sidecar.file_path).stat().st_size == staged.size_bytes
    assert (sidecar.rows, staged.rows) == (2, 2)
    assert [sidecar.unit_ids[unit] for unit in sidecar.units] == [UNIT.unit_id] * 2
    assert sidecar.positions.tolist() == [4, 9]
    assert sidecar.document_ids.equals(rows.table["document_id"].combine_chunks())
    assert sidecar.failures == rows.failures
    assert sidecar.completions == rows.completions
    assert (sidecar.run_id, sidecar.fingerprint) == (run.run_id, run.fingerprint)
    assert sidecar.figures.counts["windows"] == 2
    assert sidecar.figures.seconds["write"] > 0


def test_the_attention_that_a_worker_chose_is_in_the_file(tmp_path):
    run = make_run(tmp_path, [UNIT])
    [staged] = stage(run, make_rows(run, UNIT, [0]))
    metadata = pq.read_metadata(sidecars.read(staged.sidecar).file_path).metadata
    assert metadata[b"lengthwise.attention"] == b"xla"
    assert metadata[b"lengthwise.model"] == b"package:tiny"


def test_failures_and_completions_without_rows_get_a_sidecar_and_no_file(tmp_path):
    run = make_run(tmp_path, [UNIT])
    [staged] = stage(run, make_rows(run, UNIT, records=1, failed=[-1]))
    sidecar = sidecars.read(staged.sidecar)
    assert sidecar.file is None
    assert len(sidecar.failures) == len(sidecar.completions) == 1
    assert [name for name in tree(staged_folder(run)) if name.endswith(".parquet")] == []


def test_rows_gather_in_one_file_until_it_is_closed(tmp_path, clock):
    run = make_run(tmp_path, [UNIT])
    files = writer(run)
    assert [staged for p in range(5) for staged in files.add(make_rows(run, UNIT, [p]))] == []
    [staged] = files.close()
    assert staged.rows == 5
    assert list(files.close()) == []


def test_a_file_is_closed_when_it_has_its_rows_and_a_big_table_spans_several(tmp_path, clock):
    run = make_run(tmp_path, [UNIT], max_rows_per_file=3)
    files = writer(run)
    rows = make_rows(run, UNIT, range(8), records=9, failed=[8])
    staged = [*files.add(rows), *files.close()]
    assert [file.rows for file in staged] == [3, 3, 2]
    read = [sidecars.read(file.sidecar) for file in staged]
    assert [position for s in read for position in s.positions] == list(range(8))
    assert pa.concat_tables(pq.read_table(s.file_path) for s in read).equals(rows.table)
    assert [len(s.completions) for s in read] == [0, 0, 1], "a completion goes with the last rows"


def test_no_file_has_more_rows_than_allowed_however_they_come(tmp_path, clock):
    run = make_run(tmp_path, [UNIT], max_rows_per_file=3)
    files = writer(run)
    staged = [f for p in range(0, 8, 2) for f in files.add(make_rows(run, UNIT, [p, p + 1]))]
    staged += files.close()
    assert [file.rows for file in staged] == [3, 3, 2]


def test_a_file_is_closed_when_it_has_its_bytes(tmp_path, clock):
    run = make_run(tmp_path, [UNIT], max_bytes_per_file=2000)
    files = writer(run)
    sizes = [len(list(files.add(make_rows(run, UNIT, [p])))) for p in range(100)]
    assert 3 < sum(sizes) < 50


def test_a_file_is_closed_after_a_tenth_of_a_second_at_first_and_two_percent_of_the_time_later(
    tmp_path, clock
):
    run = make_run(tmp_path, [UNIT])
    files = writer(run)
    closed_at = []
    for step in range(1, 2000):  # a hundred seconds
        clock[0] = 1000 + step / 20
        if list(files.add(make_rows(run, UNIT, [step]))):
            closed_at.append(step / 20)
    gaps = np.diff(closed_at)
    for gap, at in zip(gaps, closed_at[1:], strict=True):
        assert gap <= max(0.1, 0.02 * at) + 0.06, "one step of the clock more at most"
    assert gaps[-1] > 1.8, "and not much sooner"
    assert len(closed_at) < 50 + 50 * np.log(100 / 5) + 20


def test_rows_that_come_seldom_are_not_kept_waiting_for_the_next(tmp_path, clock):
    run = make_run(tmp_path, [UNIT])
    files = writer(run)
    for position in range(3):
        clock[0] += 10
        assert len(list(files.add(make_rows(run, UNIT, [position])))) == 1


def test_small_tables_share_a_row_group(tmp_path):
    run = make_run(tmp_path, [UNIT])
    file = RowGroupWriter(str(tmp_path / "a.parquet"), run.schema)
    for position in range(10):
        file.write(make_rows(run, UNIT, [position]).table)
    file.close({})
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 1


def test_a_row_group_is_written_when_it_is_big_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "ROW_GROUP_BYTES", 500)
    run = make_run(tmp_path, [UNIT])
    file = RowGroupWriter(str(tmp_path / "a.parquet"), run.schema)
    for position in range(10):
        file.write(make_rows(run, UNIT, [position]).table)
        assert file._waiting_bytes < 500
    file.close({})
    assert 1 < pq.ParquetFile(tmp_path / "a.parquet").num_row_groups < 10


def test_writers_in_several_threads_never_meet(tmp_path):
    run = make_run(tmp_path, [UNIT])
    staged: list[StagedFile] = []

    def work(number: int) -> None:
        for position in range(20):
            staged.extend(stage(run, make_rows(run, UNIT, [100 * number + position])))

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = [sidecars.read(file.sidecar) for file in staged]
    assert len({s.file for s in read}) == 80
    assert len({s.positions[0] for s in read}) == 80


def test_an_aborted_writer_leaves_nothing_and_may_go_on(tmp_path, clock):
    run = make_run(tmp_path, [UNIT])
    files = writer(run)
    assert list(files.add(make_rows(run, UNIT, [0]))) == []
    assert tree(staged_folder(run)) != []
    files.abort()
    assert tree(staged_folder(run)) == []
    [staged] = [*files.add(make_rows(run, UNIT, [1])), *files.close()]
    assert sidecars.read(staged.sidecar).positions.tolist() == [1]


def test_an_error_in_a_bundle_leaves_no_temporary_file(tmp_path):
    run = make_run(tmp_path, [UNIT])

    def rows_then_error(_):
        yield make_rows(run, UNIT, [0])
        raise RuntimeError("device gone")

    def pipeline() -> None:
        with beam.Pipeline(runner=FnApiRunner()) as p:
            p | beam.Create([0]) | beam.FlatMap(rows_then_error) | beam.ParDo(Write(run))

    with pytest.raises(RuntimeError, match="device gone"):
        pipeline()
    assert tree(staged_folder(run)) == [f"{run.run_id}.run"]


def test_in_a_pipeline_every_row_is_in_a_file_that_is_given_on(tmp_path):
    run = make_run(tmp_path, [UNIT], max_rows_per_file=4)

    def remember(file: StagedFile) -> None:
        with open(tmp_path / "given", "a") as given:
            print(file.sidecar, file=given)

    with beam.Pipeline(runner=FnApiRunner()) as p:
        rows = p | beam.Create(range(10)) | beam.Map(lambda p: make_rows(run, UNIT, [p]))
        rows | beam.ParDo(Write(run)) | beam.Map(remember)
    given = (tmp_path / "given").read_text().split()
    positions = [position for path in given for position in sidecars.read(path).positions]
    assert sorted(positions) == list(range(10))


def test_a_writer_killed_in_the_middle_leaves_only_whole_committed_files(tmp_path):
    script = """
        import sys
        from pathlib import Path
        sys.path.insert(0, TESTS)
        from staged_case import make_rows, make_run, make_unit, writer
        unit = make_unit()
        run = make_run(Path(sys.argv[1]), [unit], max_rows_per_file=50)
        files = writer(run)
        for position in range(1_000_000):
            for staged in files.add(make_rows(run, unit, [position])):
                print(staged.sidecar, flush=True)
    """
    tests = str(Path(__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script).replace("TESTS", repr(tests)), tmp_path],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    announced = [child.stdout.readline().strip() for _ in range(5)]
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    run = make_run(tmp_path, [UNIT])
    folder = staged_folder(run)
    found = sorted(folder.glob("*.json"))
    assert {Path(path) for path in announced} <= set(found)
    committed = [sidecars.read(str(path)) for path in found]
    for sidecar in committed:
        table = pq.read_table(sidecar.file_path)
        assert table["record"].to_pylist() == [str(p) for p in sidecar.positions]
    positions = sorted(p for sidecar in committed for p in sidecar.positions)
    assert positions == list(range(len(positions)))
    beyond = {path.name for path in folder.iterdir()} - {path.name for path in found}
    beyond -= {sidecar.file for sidecar in committed}
    assert len(beyond) <= 1, "at most the file that was open, or one not yet committed"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"file": "../elsewhere.parquet"},
        {"file": None},
        {"unit_ids": []},
        {"failures": [{"unit_id": "u"}]},
        {"documents": {"unit": [0], "position": [0], "document_id": [7]}},
        {"documents": {"unit": [0], "position": [], "document_id": ["a"]}},
        {"documents": None},
    ],
)
def test_a_sidecar_that_makes_no_sense_is_refused(tmp_path, change):
    run = make_run(tmp_path, [UNIT])
    [staged] = stage(run, make_rows(run, UNIT, [0]))
    path = Path(staged.sidecar)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(sidecars.SidecarError, match="expected a sidecar of version 1"):
        sidecars.read(staged.sidecar)
