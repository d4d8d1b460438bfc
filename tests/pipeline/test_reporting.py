"""Report: figures for programs and a page for people."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline.progress import Control
from pipeline.publishing import RunFailed, publish
from pipeline.report_page import duration, size
from pipeline.reporting import status
from pipeline.state import find_resumable
from pipeline.writing import Write
from staged_case import (
    FINGERPRINT,
    layout,
    make_rows,
    make_run,
    make_unit,
    read_report,
    stage,
    writer,
)

A = make_unit("a.jsonl")


def published(tmp_path: Path, **changes) -> dict:
    run = make_run(tmp_path, [A], **changes)
    publish(
        run, stage(run, make_rows(run, A, [0, 1]), make_rows(run, A, [2], records=4, failed=[3]))
    )
    return read_report(run)


@pytest.fixture
def report(tmp_path) -> dict:
    return published(tmp_path, max_failure_ratio=0.25)


def test_the_report_says_what_became_of_every_document(report):
    assert report["status"] == "published"
    assert report["documents"] == {
        "listed": 4, "read": 4, "written": 3, "failed": 1, "skipped": 0, "not_started": 0,
    }  # fmt: skip
    assert report["units"] == {"listed": 1, "finished": 1, "not_started": 0}


def test_the_report_holds_the_figures_of_all_files_together(report):
    assert (report["windows"], report["windows_inferred"]) == (3, 3)
    assert report["tokens"] == {"real": 15, "padded": 24}
    assert report["padding_efficiency"] == pytest.approx(15 / 24)
    assert report["shapes"] == {"8x16": 2}
    assert report["attention"] == "xla"


def test_seconds_are_given_in_total_to_the_first_result_and_a_step(report):
    seconds = report["seconds"]
    assert seconds["first_result"] == pytest.approx(2)
    assert seconds["inference"] == pytest.approx(1)
    assert seconds["compile"] == 0
    assert {"total", "first_result", "compile", "inference", "assemble", "write"} == seconds.keys()
    assert report["documents_per_second"] == pytest.approx(3 / seconds["total"])


def test_the_report_names_the_model_the_settings_and_the_versions(report):
    assert report["model"] == {"name": "package:tiny", "fingerprint": FINGERPRINT}
    assert report["settings"]["output"]["max_failure_ratio"] == 0.25
    assert {"python", "apache-beam", "pyarrow"} <= report["versions"].keys()
    assert report["peak_host_bytes"] > 10 * 2**20


def test_failures_are_counted_by_reason_with_the_first_few_of_each(tmp_path):
    run = make_run(tmp_path, [A], max_failure_ratio=1.0)
    publish(run, stage(run, make_rows(run, A, records=9, failed=range(9))))
    [kind] = read_report(run)["failures"]
    assert (kind["reason"], kind["count"]) == ("bad_json", 9)
    assert [example["record"] for example in kind["examples"]] == ["0", "1", "2", "3", "4"]


def test_a_run_that_computed_nothing_has_no_made_up_figures(tmp_path):
    run = make_run(tmp_path, [])
    publish(run, [])
    report = read_report(run)
    assert report["padding_efficiency"] is None
    assert report["seconds"]["first_result"] is None
    assert report["documents_per_second"] == 0


def test_runs_say_what_each_run_computed_also_what_was_lost(tmp_path):
    killed = make_run(tmp_path, [A], run_id="run-1")
    Write(killed).setup()
    stage(killed, make_rows(killed, A, [0, 1]))
    assert killed.control is not None
    Control(killed.control).report({"windows_inferred": 7})
    early = make_run(tmp_path, [A], run_id="run-0")  # was killed before it had closed a file
    Write(early).setup()
    assert early.control is not None
    Control(early.control).report({"windows_inferred": 5})
    elsewhere = make_run(tmp_path, [A], run_id="run-9", fingerprint="e" * 64)
    Write(elsewhere).setup()
    found = find_resumable(layout(killed), FINGERPRINT, [A])
    run = make_run(tmp_path, [A], run_id="run-2", resumed=found.sidecars)
    publish(run, stage(run, make_rows(run, A, [2], records=3)))
    report = read_report(run)
    assert report["runs"] == [
        {"run_id": "run-0", "documents": 0, "windows_inferred": 5, "windows_kept": 0},
        {"run_id": "run-1", "documents": 2, "windows_inferred": 7, "windows_kept": 2},
        {"run_id": "run-2", "documents": 1, "windows_inferred": 1, "windows_kept": 1},
    ]
    assert (report["windows"], report["windows_inferred"]) == (3, 3)


def test_seconds_of_an_interrupted_run_are_not_added_to_those_of_the_next(tmp_path):
    killed = make_run(tmp_path, [A], run_id="run-1")
    stage(killed, make_rows(killed, A, [0, 1]))
    found = find_resumable(layout(killed), FINGERPRINT, [A])
    run = make_run(tmp_path, [A], run_id="run-2", resumed=found.sidecars)
    run = replace(run, started=time.time() - 10)
    publish(run, stage(run, make_rows(run, A, [2], records=3)))
    report = read_report(run)
    assert report["seconds"]["inference"] == pytest.approx(0.5)
    assert report["seconds"]["first_result"] == pytest.approx(2)
    assert report["documents_per_second"] == pytest.approx(0.1, rel=0.1)
    assert report["tokens"]["real"] == 15


def test_the_status_is_known_only_once_there_is_a_report(tmp_path):
    run = make_run(tmp_path, [A])
    assert status(layout(run), run.run_id) is None
    with pytest.raises(RunFailed):
        publish(run, [])
    assert status(layout(run), run.run_id) == "failed"


# --- the page


class Page(HTMLParser):
    """Collects the text of a page, and checks that its tags match and that it loads nothing."""

    VOID = ("meta", "br")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.open, self.tags = "", [], set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attributes}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + "\n"


def page_of(run) -> str:
    return Path(layout(run).run(run.run_id), "report.html").read_text()


def test_the_page_needs_nothing_else_and_shows_the_figures(tmp_path):
    published(tmp_path, max_failure_ratio=0.25)
    html = page_of(make_run(tmp_path, [A]))
    page = Page(html)
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in html
    for expected in ("published", "62.5%", "bad_json: 1", "part-run-1-00000.parquet", "xla"):
        assert expected in page.text


def test_names_and_messages_of_documents_are_never_markup(tmp_path):
    hostile = '<script>alert("1")</script>&amp;\'"'
    unit = make_unit(hostile)
    run = make_run(tmp_path, [unit], max_failure_ratio=1.0)
    files = writer(run)
    rows = make_rows(run, unit, [0], records=2)
    failure = make_rows(run, unit, failed=[1]).failures[0]
    rows = replace(
        rows, failures=(replace(failure, record=hostile, message=hostile, reason=hostile),)
    )
    publish(run, [*files.add(rows), *files.close()])
    page = Page(page_of(run))
    assert "script" not in page.tags
    assert page.text.count(hostile) >= 3


def test_the_page_of_a_failed_run_says_why(tmp_path):
    run = make_run(tmp_path, [A])
    with pytest.raises(RunFailed):
        publish(run, [])
    assert "1 of 1 work units were not read to their end" in Page(page_of(run)).text


def test_reports_are_plain_json(tmp_path):
    published(tmp_path, max_failure_ratio=0.25)
    text = Path(layout(make_run(tmp_path, [A])).report("run-1")).read_text()
    assert not re.search(r"\b(NaN|Infinity)\b", text)
    assert json.loads(text)["version"] == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.123, "0.12 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")],
)
def test_durations_read_well(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_sizes_read_well(number, text):
    assert size(number) == text
