"""Night after night: whatever happens, each date holds what the inputs held when it was last run, computed by the model of then."""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from lengthwise_command import documents, failures, job, run_here
from pipeline import dates, running
from pipeline.config import SettingsError
from pipeline.locking import DateLocked
from tiny_checkpoint import write_tiny_checkpoint

ZONE = "Pacific/Auckland"  # where the nights are those of another day than in UTC
JSONL = "records.jsonl"

# Dies by SIGKILL in the middle of publishing, when the documents are in place and the manifest is not.
KILLED = """
import datetime, os, signal, sys
from pipeline import cli, dates, publishing
moment = datetime.datetime.fromisoformat(sys.argv[1])
dates.now = lambda: moment
put = publishing._put
def put_one(*arguments):
    entry = put(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
publishing._put = put_one
cli.main(sys.argv[2:])
"""


def published(output: Path) -> list[str]:
    return sorted(p.parent.name[5:] for p in output.glob("documents/date=*/_manifest.json"))


class World:
    """Input and output folders, and an independent account of what each date is to hold."""

    def __init__(self, folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs, self.output, self.model = folder / "in", folder / "out", model
        self.inputs.mkdir()
        self.lines: list[str] = []  # of the JSON Lines file; "" is a broken one
        self.expected: dict[str, tuple[Counter[str], Counter[str]]] = {}  # rows, failures
        self.models: dict[str, Path] = {}  # the model of each date
        monkeypatch.setattr(dates, "now", lambda: self.moment)

    def write(self, name: str, text: str | bytes) -> None:
        (self.inputs / name).write_bytes(text.encode() if isinstance(text, str) else text)

    def write_lines(self, *lines: str) -> None:
        self.write(JSONL, "".join(json.dumps({"text": t}) + "\n" if t else "{\n" for t in lines))
        self.lines = list(lines)

    def begin(self, night: int) -> str:
        """Sets the clock to two at night of the day after, and gives the date that is to be written."""
        date = datetime.date(2026, 3, night)
        self.moment = datetime.datetime.fromisoformat(f"{date}T13:00:00+00:00")  # 2026-03-… 02:00
        return date.isoformat()

    def job(self, **settings):
        nightly = {
            "time_zone": ZONE,
            "catch_up": 7,
            "incremental": True,
            "max_failure_ratio": 0.5,
            "window_tokens": 16,
        }
        inputs = settings.pop("inputs", self.inputs)
        return job(inputs, self.output, self.model, **(nightly | settings))

    def note(self, *written: str) -> None:
        """These dates hold what is there now, by the model of now."""
        rows: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for path in self.inputs.iterdir():
            if path.name == JSONL:
                rows.update(f"{path} {text}" for text in self.lines if text)
                failed[str(path)] += self.lines.count("")
            elif path.read_bytes().startswith(b"\xff"):
                failed[str(path)] += 1
            else:
                rows[f"{path} {path.read_text()}"] += 1
        for date in written:
            self.expected[date] = (rows, +failed)
            self.models[date] = self.model

    def check(self, vectors: dict[Path, dict[str, np.ndarray]] | None = None) -> None:
        assert sorted(self.expected) == published(self.output)
        for date, (rows, failed) in self.expected.items():
            table = documents(self.output, date)
            hashes = Counter(zip(table["uri"].to_pylist(), table["content_sha256"].to_pylist(), strict=True))  # fmt: skip
            split = [row.split(" ", 1) for row in rows.elements()]
            assert hashes == Counter((uri, digest(text)) for uri, text in split), date
            assert Counter(failures(self.output, date)["uri"].to_pylist()) == failed, date
            assert len(set(table["document_id"].to_pylist())) == table.num_rows
            for row in table.to_pylist() if vectors else ():
                want = vectors[self.models[date]][row["content_sha256"]]
                np.testing.assert_allclose(row["embedding"], want, atol=1e-5, err_msg=date)


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def embeddings(texts: set[str], model: Path, folder: Path) -> dict[str, np.ndarray]:
    """Of each text by its hash, from a run that knows nothing of nights."""
    (folder / "in").mkdir(parents=True)
    (folder / "in" / JSONL).write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    assert run_here(job(folder / "in", folder / "out", model, date="2026-01-01", dtype="float32", window_tokens=16)) == 0  # fmt: skip
    rows = documents(folder / "out", "2026-01-01").to_pylist()
    return {row["content_sha256"]: np.array(row["embedding"]) for row in rows}


@pytest.mark.full
def test_ten_nights(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    world = World(tmp_path, tiny_checkpoint, monkeypatch)

    def night(number: int, *also: str, **settings) -> list[dict]:
        """An uneventful night; `also` are the dates that it catches up on. Gives the printed summaries."""
        date = world.begin(number)
        assert run_here(world.job(dtype="float32", **settings)) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["date"] for line in lines] == [*also, date]
        world.note(*also, date)
        world.check()
        return lines

    world.write("a.txt", "the first document")
    world.write("b.txt", "the second document")
    world.write("broken.txt", b"\xff is no UTF-8")
    world.write_lines("one record", "", "another record", "one record")
    [line] = night(1)
    partition = world.output / "documents" / "date=2026-03-01"
    assert line == {
        "status": "published", "date": "2026-03-01", "reason": "", "run_id": line["run_id"],
        "documents": 5, "failures": 2, "partition": str(partition), "report": line["report"],
    }  # fmt: skip
    assert json.loads(Path(line["report"]).read_text())["run_id"] == line["run_id"]

    world.write("c.txt", "a new document")
    world.write("a.txt", "the first document has changed")
    night(2)

    (world.inputs / "b.txt").unlink()
    world.write("broken.txt", "it has been mended")
    night(3)

    # The fourth is killed; the fifth catches up, when there is more to read.
    world.write("d.txt", "a document of the fourth night")
    world.write_lines("one record", "a record in place of the broken one")
    world.begin(4)
    flags = ["--input", world.inputs, "--output", world.output, "--model", world.model]
    flags += ["--time-zone", ZONE, "--incremental", "--max-failure-ratio", "0.5", "--window-tokens", 16, "--dtype", "float32"]  # fmt: skip
    command = [sys.executable, "-P", "-c", KILLED, world.moment.isoformat(), "run", *flags]
    died = subprocess.run(list(map(str, command)), check=False, capture_output=True, timeout=300)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert list((world.output / "documents" / "date=2026-03-04").glob("part-*"))
    world.check()
    world.write("e.txt", "a document of the fifth night")
    night(5, "2026-03-04")

    # The sixth is started twice: at once, and again when it has ended.
    world.write("c.txt", "a changed document")
    build, refused = running.build, []

    def start_another(*arguments):
        monkeypatch.setattr(running, "build", build)
        with pytest.raises(DateLocked) as caught:
            run_here(world.job(dtype="float32"))
        refused.append(str(caught.value))
        return build(*arguments)

    monkeypatch.setattr(running, "build", start_another)
    world.begin(6)
    assert run_here(world.job(dtype="float32")) == 0
    assert "is writing this date" in refused[0]
    second, first = map(json.loads, capsys.readouterr().out.splitlines())
    assert (second["status"], first["status"]) == ("refused", "published")
    night(6)

    night(7)  # nothing has changed
    report = json.loads(max(world.output.glob("runs/date=2026-03-07/*/report.json")).read_text())
    assert report["documents"]["read"] == 0

    world.model = write_tiny_checkpoint(tmp_path / "another", seed=1)
    world.write("broken-again.txt", b"\xff\xff")
    night(8)
    report = json.loads(max(world.output.glob("runs/date=2026-03-08/*/report.json")).read_text())
    assert report["documents"]["skipped"] == 0

    # Before the ninth, the third is run again, with the model and the documents of now.
    (world.inputs / "d.txt").unlink()
    world.begin(9)
    assert run_here(world.job(dtype="float32", date="2026-03-03", catch_up=0)) == 0
    capsys.readouterr()
    world.note("2026-03-03")
    world.check()
    night(9)

    world.write_lines("", "")
    world.write("f.txt", "the last document")
    for old in ("2026-03-01", "2026-03-02"):
        del world.expected[old]
    night(10, keep_days=7)

    texts = {row.split(" ", 1)[1] for rows, _ in world.expected.values() for row in rows}
    models = set(world.models.values())
    assert len(models) == 2
    world.check({model: embeddings(texts, model, tmp_path / model.name) for model in models})


@pytest.fixture
def world(tiny_checkpoint, tmp_path, monkeypatch) -> World:
    made = World(tmp_path, tiny_checkpoint, monkeypatch)
    made.write("a.txt", "a document")
    return made


def test_inputs_named_by_date_are_those_of_each_night_that_is_caught_up(world):
    for number in (1, 2, 3):
        folder = world.inputs / f"day=2026-03-0{number}"
        folder.mkdir()
        (folder / "a.txt").write_text(f"document of day {number}")
    (world.inputs / "list-2026-03-03.txt").write_text("a.txt\n")
    settings = {"inputs": f"{world.inputs}/day={{date}}", "incremental": False}
    for number in (1, 3):
        world.begin(number)
        manifest = f"{world.inputs}/list-{{date}}.txt" if number == 3 else None
        (world.inputs / "list-2026-03-02.txt").write_text("a.txt\n")
        assert run_here(world.job(**settings, manifest=manifest)) == 0
    for number in (1, 2, 3):
        date = f"2026-03-0{number}"
        uris = set(documents(world.output, date)["uri"].to_pylist())
        assert f"{world.inputs}/day={date}/a.txt" in uris
        assert len(uris) == (1 if number == 1 else 2)


def test_a_missed_date_that_fails_again_does_not_keep_tonight_from_running(world, capsys):
    settings = {"inputs": f"{world.inputs}/{{date}}*.txt"}
    for number in (1, 3):
        world.write(f"2026-03-0{number}.txt", "a document")
    world.begin(1)
    assert run_here(world.job(**settings)) == 0
    world.begin(3)
    capsys.readouterr()
    assert run_here(world.job(**settings)) == 1
    out, err = capsys.readouterr()
    missed, tonight = map(json.loads, out.splitlines())
    assert (missed["date"], missed["status"]) == ("2026-03-02", "refused")
    assert "2026-03-02*.txt: expected at least one file" in missed["reason"]
    assert (tonight["date"], tonight["status"]) == ("2026-03-03", "published")
    assert "Catching up: 2026-03-02 is not published" in err
    assert published(world.output) == ["2026-03-01", "2026-03-03"]


def test_a_missed_date_that_is_being_run_is_left_alone(world, capsys):
    from pipeline.locking import lock_date
    from pipeline.state import Layout

    world.begin(1)
    assert run_here(world.job()) == 0
    world.begin(3)
    with lock_date(Layout(str(world.output), "2026-03-02"), "another"):
        assert run_here(world.job()) == 0
    assert "run another" in capsys.readouterr().err
    assert published(world.output) == ["2026-03-01", "2026-03-03"]


def test_a_stop_while_catching_up_stops_all_of_it(world, monkeypatch):
    from pipeline.progress import Control

    world.begin(1)
    assert run_here(world.job()) == 0
    world.begin(4)
    build = running.build

    def stopped(pipeline, run):
        Control(run.control).stop(signal.SIGTERM)
        return build(pipeline, run)

    monkeypatch.setattr(running, "build", stopped)
    assert run_here(world.job()) == 143
    assert published(world.output) == ["2026-03-01"]


def test_a_new_output_has_missed_nothing_and_only_days_in_reach_are_caught_up(world):
    world.begin(1)
    assert list(dates.missed_dates(world.job().output, "2026-03-05")) == []
    assert run_here(world.job()) == 0
    assert list(dates.missed_dates(world.job(catch_up=2).output, "2026-03-05")) == ["2026-03-03", "2026-03-04"]  # fmt: skip
    assert list(dates.missed_dates(world.job().output, "2026-03-03")) == ["2026-03-02"]


@pytest.mark.parametrize(
    ("moment", "zone", "date"),
    [
        ("2026-03-02T12:59:00+00:00", None, "2026-03-02"),
        ("2026-03-02T10:59:00+00:00", ZONE, "2026-03-01"),
        ("2026-03-02T11:00:00+00:00", ZONE, "2026-03-02"),
        ("2026-03-02T07:59:00+00:00", "America/Los_Angeles", "2026-02-28"),
        ("2026-03-29T01:30:00+00:00", "Europe/Berlin", "2026-03-28"),  # the night of summer time
    ],
)
def test_the_date_is_yesterday_in_the_time_zone_or_today_in_utc(moment, zone, date, monkeypatch):
    monkeypatch.setattr(dates, "now", lambda: datetime.datetime.fromisoformat(moment))
    assert dates.date_of(job("in", "out", "m", time_zone=zone).output) == date
    assert dates.date_of(job("in", "out", "m", time_zone=zone, date="2025-01-01").output) == "2025-01-01"  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"time_zone": "Europe/Berln"}, "--time-zone: expected a time zone .* got 'Europe/Berln'"),
        *(({"time_zone": zone}, "--time-zone") for zone in ("", "/etc/passwd", "../x", "Europe", "+02:00")),
        ({"catch_up": -1}, "--catch-up: expected 0 to 366 days, got -1"),
        ({"catch_up": 1, "retry_failures": True}, "--retry-failures"),
        ({"catch_up": 8, "keep_days": 7}, "--catch-up 8: expected at most --keep-days 7"),
    ],
)  # fmt: skip
def test_nightly_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(SettingsError, match=says):
        job("in", "out", "m", **settings)
