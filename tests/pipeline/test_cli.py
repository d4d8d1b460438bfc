"""The command line: what reaches the job, what is refused, and how fast it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.beam_flags import NEVER, TYPING_ERROR
from pipeline.config import CheckupSettings, Job, SettingsError
from pipeline.flags import all_flags, nearest

NEEDED = ["--input", "docs", "--output", "out", "--model", "folder"]


@pytest.fixture(autouse=True)
def as_loud_as_before(monkeypatch):
    """The command line silences libraries for the whole process, which here is that of all tests."""
    monkeypatch.setattr(cli, "quiet", lambda: None)


@pytest.fixture
def ran(monkeypatch):
    """Calls that reached the run command: (job, Beam's options, runner)."""
    calls: list[tuple[Job, list[str], str]] = []

    def run(job: Job, beam_options: list[str], runner: str) -> int:
        calls.append((job, beam_options, runner))
        return 0

    monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=run))
    return calls


@pytest.fixture
def refused(ran, capsys):
    """Runs a command line that must be refused, and gives its message."""

    def refuse(*argv: str) -> str:
        assert cli.main(argv) == 2
        assert ran == []
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("lengthwise: ")
        assert err.count("\n") == 1
        return err

    return refuse


def config(tmp_path: Path, text: str) -> str:
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    return str(tmp_path / "job.toml")


# What reaches the job


def test_flags_become_settings_and_the_rest_keeps_its_defaults(ran):
    flags = ["--max-windows", "3", "--max-failure-ratio=0.5", "--no-resume", "--allow-empty"]
    assert cli.main(["run", *NEEDED, *flags]) == 0
    ((job, options, runner),) = ran
    assert job.reading.inputs == ("docs",)
    assert (job.output.output, job.model.model) == ("out", "folder")
    assert (job.model.max_windows, job.output.max_failure_ratio) == (3, 0.5)
    assert job.output.resume is False
    assert job.reading.allow_empty is True
    assert job.reading.encoding == "utf-8"
    assert (options, runner) == ([], "DirectRunner")


def test_inputs_may_be_repeated_and_several_may_follow_one_flag(ran):
    assert cli.main(["run", *NEEDED, "--input", "a b", "c/*.txt", "--input=d"]) == 0
    assert ran[0][0].reading.inputs == ("docs", "a b", "c/*.txt", "d")


def test_every_setting_is_a_flag_that_help_shows(capsys):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = capsys.readouterr().out
    assert len(all_flags()) >= 20
    for name in (*all_flags(), "config", "runner", "no-resume"):
        assert f"--{name}" in shown


def test_the_exit_status_is_that_of_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=lambda *_: 143))
    assert cli.main(["run", *NEEDED]) == 143


def test_a_setting_that_the_run_finds_impossible_is_wrong_usage(monkeypatch, capsys):
    def run(*_: object) -> int:
        raise SettingsError("--input docs: matches nothing")

    monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=run))
    assert cli.main(["run", *NEEDED]) == 2
    assert capsys.readouterr().err == "Starting …\nlengthwise: --input docs: matches nothing\n"


# What is refused


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rn"], "did you mean run?"),
        (["--input", "docs"], "expected a command"),
        (["run"], "--model, --output"),
        (["run", "docs"], "unexpected argument 'docs'"),
        (["run", "-o", "x"], "unknown flag -o"),
        (["run", "--outptu", "x"], "unknown flag --outptu; did you mean --output?"),
        (["run", "--no-resum"], "did you mean --no-resume?"),
        (["run", "--max_windows", "3"], "did you mean --max-windows?"),
        (["run", "--max-window", "3"], "did you mean --max-windows?"),
        (["run", "--confg=job.toml"], "did you mean --config?"),
        (["run", "--streaming"], "makes no sense here"),
        (["run", "--dry_run"], "makes no sense here"),
        (["run", *NEEDED, "--max-windows", "x"], "--max-windows: expected a whole number, got 'x'"),
        (["run", *NEEDED, "--max-failure-ratio", "x"], "expected a number, got 'x'"),
        (["run", *NEEDED, "--max-windows"], "--max-windows: expected one argument"),
        (["run", *NEEDED, "--device", "tpuu"], "--device: expected one of auto, cpu, gpu, tpu"),
        (
            ["run", "--output", "out", "--model", "folder"],
            "give --input PATTERN or --manifest FILE",
        ),
        (["run", *NEEDED, "--runner", "DaskRunner"], "loses documents"),
        (["run", "--config", "no/such/file.toml"], "cannot be read"),
        (["doctro"], "did you mean doctor?"),
        (["doctor", "--tpuu", "v5e"], "unknown flag --tpuu; did you mean --tpu?"),
        (["doctor", "--max_tokens_per_batch=3"], "did you mean --max-tokens-per-batch?"),
        (["doctor", "v5e"], "unexpected argument 'v5e'"),
        (["doctor", "--tpu", "v5e"], "--tpu v5e: expected --model with it"),
        (
            ["doctor", "--tpu", "v5", "--model", "m"],
            "--tpu: expected one of v4, v5e, v5p, v6e, tpu7x",
        ),
        (
            ["doctor", "--tpu", "v5e", "--model", "m", "--device", "cpu"],
            "expected no other --device",
        ),
        (["doctor", "--window-tokens", "2"], "--window-tokens: expected 3 or more, got 2"),
    ],
)
def test_wrong_usage_is_refused_in_one_line_without_asking_beam(
    refused, monkeypatch, argv, message
):
    monkeypatch.setitem(sys.modules, "apache_beam.options.pipeline_options", None)
    assert message in refused(*argv)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--direct_num_worker=2"], "did you mean --direct_num_workers?"),
        (["--direct-num-workers=2"], "did you mean --direct_num_workers?"),
        (["--qwertyuiop"], "unknown flag --qwertyuiop"),
        (["--direct_num_workers", "2", "stray"], "unexpected argument 'stray'"),
        (["--direct_num_workers", "two"], "invalid int value: 'two'"),
        (["--direct_running_mode=threads"], "invalid choice: 'threads'"),
        (["--runner", "FlinkRuner"], "did you mean FlinkRunner?"),
        (["--runner", "SparklingRunner99"], "Beam has no runner of that name"),
    ],
)
def test_what_neither_we_nor_beam_know_is_refused(refused, argv, message):
    assert message in refused("run", *NEEDED, *argv)


def test_flags_are_not_abbreviated(refused):
    assert "did you mean --output?" in refused("run", "--outpu", "x")
    assert "unknown flag --max" in refused("run", *NEEDED, "--max", "3")


# The doctor


def test_flags_become_what_the_doctor_looks_at_and_its_exit_status_is_ours(monkeypatch):
    looked: list[CheckupSettings] = []
    module = types.SimpleNamespace(examine=lambda settings: looked.append(settings) or 1)
    monkeypatch.setitem(sys.modules, "pipeline.doctor", module)
    monkeypatch.setenv("JAX_PLATFORMS", "as before")
    assert cli.main(["doctor", "--model", "folder", "--json"]) == 1
    assert looked == [CheckupSettings(model="folder", json=True)]
    assert os.environ["JAX_PLATFORMS"] == "as before"


@pytest.mark.parametrize(
    "argv",
    [
        ["run", *NEEDED, "--device", "cpu"],
        ["doctor", "--device", "cpu"],
        ["doctor", "--model", "m", "--tpu", "v5e"],
    ],
)
def test_where_only_a_cpu_is_asked_for_jax_looks_for_nothing_else(ran, monkeypatch, argv):
    module = types.SimpleNamespace(examine=lambda settings: 0)
    monkeypatch.setitem(sys.modules, "pipeline.doctor", module)
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert cli.main(argv) == 0
    assert os.environ["JAX_PLATFORMS"] == "cpu"


# What is Beam's


def test_flags_of_beam_pass_through_as_they_are(ran):
    beams = [
        "--direct_num_workers",
        "2",
        "--direct_running_mode=multi_threading",
        "--experiments=a",
    ]
    assert cli.main(["run", *beams[:2], *NEEDED, *beams[2:], "--runner", "FnApiRunner"]) == 0
    assert ran[0][1:] == (beams, "FnApiRunner")


@pytest.mark.parametrize("runner", ["FlinkRunner", "DataflowRunner", "my.engine.Runner"])
def test_any_runner_that_beam_could_find_passes_through(ran, runner):
    assert cli.main(["run", *NEEDED, "--runner", runner]) == 0
    assert ran[0][2] == runner


def beam_names() -> set[str]:
    from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser

    parser = _BeamArgumentParser(add_help=False)
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    return {name[2:] for action in parser._actions for name in action.option_strings}


def test_no_flag_of_beam_is_taken_for_a_typing_error_of_ours():
    ours = {*all_flags(), "config", "runner", "help"}
    taken = {name: nearest(name, ours, TYPING_ERROR) for name in beam_names() - {"runner", *NEVER}}
    assert {name: meant for name, meant in taken.items() if meant} == {}


def test_what_is_refused_of_beam_is_still_there():
    assert set(NEVER) <= beam_names()


# The job file


def test_a_job_file_holds_any_flag_and_flags_override_it(ran, tmp_path):
    path = config(
        tmp_path,
        """
        input = ["a", "b"]
        output = "out"
        model = "folder"
        max_windows = 5
        max-failure-ratio = 1
        resume = false
        date = 2026-01-31
        keep-fields = "title"
        runner = "FnApiRunner"
        direct-num-workers = 2
        experiments = ["x", "y"]
        """,
    )
    flags = ["--input", "c", "--resume", "--direct_num_workers=3"]
    assert cli.main(["run", "--config", path, *flags]) == 0
    ((job, options, runner),) = ran
    assert job.reading.inputs == ("c",)
    assert (job.output.output, job.output.date, job.output.resume) == ("out", "2026-01-31", True)
    assert (job.model.max_windows, job.output.max_failure_ratio) == (5, 1.0)
    assert job.reading.keep_fields == ("title",)
    assert runner == "FnApiRunner"
    beams = [
        "--direct_num_workers=2",
        "--experiments=x",
        "--experiments=y",
        "--direct_num_workers=3",
    ]
    assert options == beams


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inputs = 'a'", "job.toml: unknown flag --inputs; did you mean --input?"),
        ("max_window = 3", "did you mean --max-windows?"),
        ("no-resume = true", "did you mean"),
        ("streaming = true", "makes no sense here"),
        ("max-windows = '3'", "job.toml: max-windows: expected a whole number, got '3'"),
        ("max-windows = 3.5", "expected a whole number, got 3.5"),
        ("max-windows = true", "expected a whole number, got True"),
        ("resume = 'no'", "resume: expected true or false, got 'no'"),
        ("input = ['a', 1]", "input: expected text, got 1"),
        ("output = ['a']", "output: expected text, got ['a']"),
        ("max-windows = 3\nmax_windows = 4", "given twice"),
        ("[model]\nmodel = 'folder'", "model: expected text"),
        ("[direct]\nnum_workers = 2", "direct: expected"),
        ("output = ", "expected TOML"),
        ("output = 'out'", "needed and not given: --model"),
    ],
)
def test_a_job_file_with_a_fault_is_refused_by_file_and_key(refused, tmp_path, text, message):
    assert message in refused("run", "--config", config(tmp_path, text))


def test_a_key_that_neither_we_nor_beam_know_is_refused(refused, tmp_path):
    path = config(tmp_path, "qwertyuiop = 1")
    assert f"{path}: unknown flag --qwertyuiop" in refused("run", *NEEDED, "--config", path)


# From outside


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from pipeline.cli import main; sys.exit(main())"
    arguments = [sys.executable, "-P", "-c", program, *argv]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["doctor", "--help"], 0),
        (["doctor", "--tpu", "v5"], 2),
        (["run", "--outptu", "x"], 2),
        (["run", *NEEDED, "--date", "yesterday"], 2),
    ],
)
def test_help_and_wrong_usage_answer_within_half_a_second(argv, status):
    seconds = []
    for _ in range(5):  # other processes may slow down some of them
        start = time.perf_counter()
        result = command(*argv)
        seconds.append(time.perf_counter() - start)
        assert result.returncode == status
        assert "Traceback" not in result.stderr
    assert min(seconds) < 0.5


def test_alone_it_prints_its_help(capsys):
    assert cli.main([]) == 2
    assert "lengthwise COMMAND" in capsys.readouterr().out


def test_the_version_is_that_of_the_distribution(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", {"lengthwise": "1.2.3"}.__getitem__)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "lengthwise 1.2.3\n"


def test_what_a_storage_service_refuses_is_said_in_one_line(monkeypatch, capsys):
    from apache_beam.io.filesystem import BeamIOError
    from google.api_core.exceptions import Forbidden
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud.storage.exceptions import InvalidResponse

    errors = [
        Forbidden("no access\nto it"),
        DefaultCredentialsError("none"),
        BeamIOError("gone"),
        InvalidResponse(None, "no upload of that name"),
    ]
    for error in errors:

        def run(*_, error=error):
            raise error

        monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=run))
        assert cli.main(["run", *NEEDED]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line != "Starting …"]
    assert said[0] == "lengthwise: 403 no access to it"
    assert len(said) == len(errors)


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def run(*_):
        raise ZeroDivisionError

    monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=run))
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", *NEEDED])


def test_ctrl_c_before_the_run_begins_leaves_no_traceback(monkeypatch):
    def run(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "pipeline.running", types.SimpleNamespace(run=run))
    assert cli.main(["run", *NEEDED]) == 130
