"""Templates hold commands that the command line takes."""

from __future__ import annotations

import shlex
import sys
import types
from pathlib import Path

import pytest

from pipeline import cli

TEMPLATES = Path(__file__).parents[1] / "templates"


def test_the_cron_line_catches_up_to_yesterday_in_its_own_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    *_, zone, line = (TEMPLATES / "nightly.cron").read_text().splitlines()
    minute, hour, *_days, user, command = line.split(maxsplit=6)
    assert (minute.isdigit(), hour.isdigit(), user) == (True, True, "lengthwise")
    assert "%" not in command  # cron takes it for the end of the line
    flock, nonblock, lock, *argv = shlex.split(command)
    assert (flock, nonblock, argv[:2]) == ("flock", "--nonblock", ["lengthwise", "run"])
    assert argv[argv.index("--config") + 1] == lock  # a file that is there

    ran = []
    running = types.SimpleNamespace(run=lambda job, *_: ran.append(job.output) or 0)
    monkeypatch.setitem(sys.modules, "pipeline.running", running)
    monkeypatch.setattr(cli, "quiet", lambda: None)
    job = tmp_path / "nightly.toml"
    job.write_text('input = ["docs"]\noutput = "out"\nmodel = "none"\n')
    argv[argv.index("--config") + 1] = str(job)
    assert cli.main(argv[1:]) == 0
    [output] = ran
    assert zone == f"CRON_TZ={output.time_zone}"
    assert (output.date, output.incremental, output.catch_up) == (None, True, 7)
