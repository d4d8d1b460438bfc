"""Incremental: what an earlier date has computed is not computed again, and every date is whole all the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.config import OutputSettings, SettingsError
from pipeline.incremental import compare, latest_base, own_base
from pipeline.listing import write_listing
from pipeline.locking import DateLock
from pipeline.partitions import delete_older, published_dates, read_objects
from pipeline.publishing import RunFailed, publish
from pipeline.records import Run, WorkUnit
from pipeline.state import Layout
from staged_case import FINGERPRINT, make_rows, make_run, make_unit, read_partition, stage

MONDAY, TUESDAY, WEDNESDAY = "2026-01-05", "2026-01-06", "2026-01-07"
NUMBERS = itertools.count()
A, B, C = (make_unit(name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))


def at(output: Path, date: str) -> Layout:
    return Layout(str(output), date)


def night(
    output: Path,
    date: str,
    units: list[WorkUnit],
    *,
    failed=(),
    fingerprint: str = FINGERPRINT,
    meanwhile: Callable[[], object] = lambda: None,
    max_failure_ratio: float = 1.0,
    **settings,
) -> Run:
    """Publishes a date: two rows an object, their `record`s 0 and 10; one more that failed for the objects in `failed`."""
    run = make_run(
        output,
        [],
        run_id=f"run-{date}",
        max_failure_ratio=max_failure_ratio,
        fingerprint=fingerprint,
        **settings,
    )
    layout = at(output, date)
    base = None
    if settings.get("incremental"):
        base = latest_base(layout)
    elif settings.get("retry_failures"):
        base = own_base(layout)
    changes = compare(units, base, layout, fingerprint)
    control = Path(layout.control(run.run_id))
    control.mkdir(parents=True)
    Path(layout.staged(fingerprint)).mkdir(parents=True, exist_ok=True)
    pq.write_table(changes.unchanged, control / "unchanged.parquet")
    write_listing(changes.units, str(control / "listing.parquet"))
    run = replace(
        run,
        date=date,
        control=str(control),
        listing=str(control / "listing.parquet"),
        unchanged=str(control / "unchanged.parquet"),
        base=base.date if base else None,
        deleted=changes.deleted,
        run_id=f"run-{date}-{next(NUMBERS)}",
    )
    staged = []
    meanwhile()
    for unit in changes.units:
        bad = [20] if unit in failed else []
        staged += stage(run, make_rows(run, unit, [0, 10], records=2 + len(bad), failed=bad))
    publish(run, staged)
    return run


def rows(run: Run) -> list[tuple[str, str]]:
    table = read_partition(run)
    return sorted(zip(table["uri"].to_pylist(), table["record"].to_pylist(), strict=True))


def both(*units: WorkUnit) -> list[tuple[str, str]]:
    return sorted((unit.uri, record) for unit in units for record in ("0", "10"))


def report(run: Run) -> dict:
    return json.loads(
        Path(at(Path(run.job.output.output), run.date).report(run.run_id)).read_text()
    )


def test_unchanged_objects_are_carried_over_and_changed_and_new_ones_are_computed(tmp_path):
    night(tmp_path, MONDAY, [A, B])
    changed = replace(B, generation="2")
    run = night(tmp_path, TUESDAY, [A, changed, C], incremental=True)
    assert rows(run) == both(A, B, C)
    counts = report(run)["documents"]
    assert counts == {
        "listed": 6, "read": 4, "written": 4, "failed": 0, "skipped": 2, "not_started": 0,
    }  # fmt: skip
    objects = read_objects(at(tmp_path, TUESDAY))
    assert objects["partition"].to_pylist() == [TUESDAY] * 3
    assert objects["generation"].to_pylist() == ["1", "2", "1"]


def test_rows_of_deleted_objects_do_not_come_along(tmp_path):
    night(tmp_path, MONDAY, [A, B])
    run = night(tmp_path, TUESDAY, [B], incremental=True)
    assert rows(run) == both(B)
    assert report(run)["incremental"] == {
        "base": MONDAY, "objects_unchanged": 1, "objects_deleted": 1, "carried_over": True,
    }  # fmt: skip
    page = Path(at(tmp_path, TUESDAY).report(run.run_id)).with_suffix(".html").read_text()
    assert (
        f"Builds on {MONDAY}: rows of 1 unchanged objects carried over, 1 objects deleted" in page
    )
    assert read_objects(at(tmp_path, TUESDAY))["uri"].to_pylist() == [B.uri]


def test_an_object_with_a_failure_is_tried_again_and_none_else(tmp_path):
    night(tmp_path, MONDAY, [A, B], failed=[B])
    run = night(tmp_path, TUESDAY, [A, B], incremental=True)
    assert report(run)["documents"]["skipped"] == 2
    assert report(run)["documents"]["read"] == 2
    assert rows(run) == both(A, B)
    assert read_objects(at(tmp_path, TUESDAY))["failed"].to_pylist() == [0, 0]


@pytest.mark.parametrize("how", ["incremental", "retry_failures"])
def test_a_failure_that_stays_is_measured_by_all_records_and_not_by_those_tried_again(
    how, tmp_path
):
    night(tmp_path, MONDAY, [A, B], failed=[B])
    date = MONDAY if how == "retry_failures" else TUESDAY
    run = night(tmp_path, date, [A, B], failed=[B], max_failure_ratio=0.2, **{how: True})
    assert rows(run) == both(A, B)
    with pytest.raises(RunFailed, match=r"1 of 5 records failed \(20\.0%\)"):
        night(tmp_path, date, [A, B], failed=[B], max_failure_ratio=0.19, **{how: True})


def test_failures_of_a_date_can_be_tried_again_in_place(tmp_path):
    night(tmp_path, MONDAY, [A, B], failed=[B])
    run = night(tmp_path, MONDAY, [A, B], retry_failures=True)
    assert rows(run) == both(A, B)
    assert report(run)["documents"]["skipped"] == 2
    assert read_partition(run, "failures").num_rows == 0
    assert len(list((tmp_path / "documents" / f"date={MONDAY}").glob("part-*"))) == 1


def test_failures_of_a_date_that_is_not_there_cannot_be_tried_again(tmp_path):
    with pytest.raises(SettingsError, match=f"expected that {MONDAY} is published"):
        own_base(at(tmp_path, MONDAY))


def test_another_fingerprint_computes_everything(tmp_path):
    night(tmp_path, MONDAY, [A, B])
    layout = at(tmp_path, TUESDAY)
    changes = compare([A, B], latest_base(layout), layout, "another")
    assert changes.units == (A, B)
    assert changes.unchanged.num_rows == 0


def test_the_base_is_the_latest_published_date_before_also_for_a_backfill(tmp_path):
    night(tmp_path, MONDAY, [A])
    night(tmp_path, WEDNESDAY, [A, B])
    (tmp_path / "documents" / "date=2026-01-04").mkdir()
    (tmp_path / "documents" / "others").mkdir()
    assert latest_base(at(tmp_path, TUESDAY)).date == MONDAY
    assert latest_base(at(tmp_path, MONDAY)) is None
    assert list(published_dates(str(tmp_path))) == [WEDNESDAY, MONDAY, "2026-01-04"]


def test_the_same_date_twice_is_computed_from_the_same_base(tmp_path):
    night(tmp_path, MONDAY, [A])
    night(tmp_path, TUESDAY, [A, B], incremental=True)
    again = night(tmp_path, TUESDAY, [A, B], incremental=True, keep_days=30)
    assert report(again)["documents"]["skipped"] == 2
    assert rows(again) == both(A, B)


def test_without_carry_over_rows_stay_where_they_are_and_can_be_carried_later(tmp_path):
    night(tmp_path, MONDAY, [A, B])
    run = night(tmp_path, TUESDAY, [A, B, C], incremental=True, carry_over=False)
    assert rows(run) == both(C)
    assert read_objects(at(tmp_path, TUESDAY))["partition"].to_pylist() == [MONDAY, MONDAY, TUESDAY]
    whole = night(tmp_path, WEDNESDAY, [A, C], incremental=True)
    assert rows(whole) == both(A, C)
    assert report(whole)["documents"]["read"] == 0


def test_objects_whose_partition_has_gone_are_computed_again(tmp_path):
    night(tmp_path, MONDAY, [A])
    night(tmp_path, TUESDAY, [A, B], incremental=True, carry_over=False)
    Path(at(tmp_path, MONDAY).manifest).unlink()
    run = night(tmp_path, WEDNESDAY, [A, B], incremental=True)
    assert report(run)["documents"]["skipped"] == 2
    assert rows(run) == both(A, B)


@pytest.mark.parametrize(
    ("again", "fingerprint"),
    [([A], "another model" * 5), ([replace(A, generation="2")], FINGERPRINT), ([], FINGERPRINT)],
    ids=["by another model", "with another content", "without it"],
)
def test_rows_left_in_a_date_that_was_computed_anew_are_not_taken_for_the_old_ones(
    again, fingerprint, tmp_path
):
    night(tmp_path, MONDAY, [A])
    night(tmp_path, TUESDAY, [A, B], incremental=True, carry_over=False)
    night(tmp_path, MONDAY, again, fingerprint=fingerprint)
    run = night(tmp_path, WEDNESDAY, [A, B], incremental=True)
    assert report(run)["documents"] | {"read": 2, "skipped": 2} == report(run)["documents"]
    assert rows(run) == both(A, B)


def test_a_base_that_is_computed_anew_meanwhile_fails_the_run(tmp_path):
    night(tmp_path, MONDAY, [A])
    with pytest.raises(RunFailed, match=f"the partition of {MONDAY}.*has been computed anew"):
        night(
            tmp_path, TUESDAY, [A, B], incremental=True,
            meanwhile=lambda: night(tmp_path, MONDAY, [A], fingerprint="another model" * 5),
        )  # fmt: skip
    assert not Path(at(tmp_path, TUESDAY).manifest).exists()


@pytest.mark.parametrize("how", ["a file is gone", "a row is gone"])
def test_a_base_that_is_not_whole_fails_the_run(how, tmp_path):
    night(tmp_path, MONDAY, [A, B])
    [part] = (tmp_path / "documents" / f"date={MONDAY}").glob("part-*")
    if how == "a file is gone":
        part.unlink()
    else:
        pq.write_table(pq.read_table(part, partitioning=None)[1:], part)
    with pytest.raises(RunFailed, match=f"the partition of {MONDAY}.*is not whole"):
        night(tmp_path, TUESDAY, [A, B], incremental=True)
    assert not Path(at(tmp_path, TUESDAY).manifest).exists()


@pytest.mark.parametrize("content", [b"", b"PAR1", b"{}"])
def test_a_state_that_cannot_be_read_is_not_built_on(content, tmp_path, caplog):
    night(tmp_path, MONDAY, [A])
    [state] = Path(at(tmp_path, MONDAY).state).iterdir()
    state.write_bytes(content)
    assert latest_base(at(tmp_path, TUESDAY)) is None
    assert f"the state of {MONDAY} cannot be read" in caplog.text


def test_dates_that_are_too_old_are_deleted(tmp_path):
    night(tmp_path, "2025-12-30", [A])
    night(tmp_path, MONDAY, [A])
    foreign = tmp_path / "documents" / "date=2025-12-30" / "notes.txt"
    foreign.write_text("not ours")
    run = night(tmp_path, TUESDAY, [A], incremental=True, keep_days=1)
    assert rows(run) == both(A)
    assert list(published_dates(str(tmp_path))) == [TUESDAY, MONDAY, "2025-12-30"]
    left = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("date=2025-12-30/**/*"))
    assert left == [foreign.relative_to(tmp_path)]


@pytest.mark.parametrize(("date", "days"), [(TUESDAY, 10**30), (TUESDAY, 10**7), ("0001-01-02", 3)])
def test_no_date_is_older_than_the_calendar(date, days, tmp_path):
    night(tmp_path, MONDAY, [A])
    assert delete_older(at(tmp_path, date), days, "run") == []


def test_a_date_whose_rows_a_later_one_needs_is_kept(tmp_path):
    night(tmp_path, "2025-12-30", [A])
    night(tmp_path, MONDAY, [A, B], incremental=True, carry_over=False)
    assert delete_older(at(tmp_path, TUESDAY), 2, "run") == []
    assert read_objects(at(tmp_path, "2025-12-30")) is not None


def test_nothing_is_deleted_while_nobody_can_say_whose_rows_a_later_date_needs(tmp_path, caplog):
    night(tmp_path, "2025-12-30", [A])
    night(tmp_path, MONDAY, [A, B], incremental=True, carry_over=False)
    [state] = Path(at(tmp_path, MONDAY).state).iterdir()
    content = state.read_bytes()
    state.write_bytes(b"")
    assert delete_older(at(tmp_path, TUESDAY), 2, "run") == []
    assert f"older dates are kept: {MONDAY} may need their rows" in caplog.text
    state.write_bytes(content)
    assert read_objects(at(tmp_path, "2025-12-30")) is not None


def test_a_date_that_is_being_written_is_not_deleted(tmp_path, caplog):
    night(tmp_path, "2025-12-30", [A])
    with DateLock(at(tmp_path, "2025-12-30"), "another"):
        assert delete_older(at(tmp_path, TUESDAY), 2, "run") == []
    assert "not deleted yet" in caplog.text
    assert delete_older(at(tmp_path, TUESDAY), 2, "run") == ["2025-12-30"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"incremental": True, "retry_failures": True}, "expected one of them"),
        ({"carry_over": False}, "expected --incremental"),
        ({"carry_over": False, "incremental": True, "keep_days": 3}, "expected carry-over"),
        ({"keep_days": 0}, "more than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(SettingsError, match=says):
        OutputSettings(output="out", **settings)
