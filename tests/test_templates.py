"""Templates hold commands that the command line takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pipeline import cli

TEMPLATES = Path(__file__).parents[1] / "templates"


def test_the_cron_line_runs_for_yesterdays_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (TEMPLATES / "nightly.cron").read_text().splitlines()[-1]
    *_schedule, _user, command = line.split(maxsplit=6)
    # As cron does it: % must be escaped, and the rest is for the shell.
    script = command.replace("\\%", "%").replace("lengthwise run", "echo", 1)
    arguments = subprocess.run(
        script, shell=True, check=True, capture_output=True, text=True
    ).stdout.split()
    job = tmp_path / "nightly.toml"
    job.write_text(f'input = ["{tmp_path}/none"]\noutput = "{tmp_path}/out"\nmodel = "none"\n')
    arguments[arguments.index("--config") + 1] = str(job)
    monkeypatch.setattr("pipeline.cli.quiet", lambda: None)
    assert cli.main(["run", *arguments]) == 2
    # Every flag and the date were accepted; only the model is not there.
    assert "none" in capsys.readouterr().err
