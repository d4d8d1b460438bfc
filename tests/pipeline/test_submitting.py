"""Submitting: the flags of a job for Dataflow, and which combinations are refused before anything is sent."""

from __future__ import annotations

import json

import pytest

from pipeline import cli
from pipeline.accelerators import ACCELERATORS
from pipeline.config import DEVICES, DTYPES

JOB = ["--input", "gs://in/docs", "--output", "gs://out", "--model", "gs://in/model"]
JOB += ["--date", "2026-01-02"]
CLOUD = ["--project", "a-project", "--region", "us-central1", "--staging", "gs://beam/jobs"]
CLOUD += ["--image", "image:1"]


@pytest.fixture(autouse=True)
def as_loud_as_before(monkeypatch):
    monkeypatch.setattr(cli, "quiet", lambda: None)


def dry_run(capsys, *flags: str) -> dict:
    assert cli.main(["submit", *JOB, *CLOUD, "--dry-run", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_accelerator_makes_a_request_that_beam_accepts(name, capsys):
    accelerator = ACCELERATORS[name]
    options = dry_run(capsys, "--accelerator", name)["options"]
    assert f"--machine_type={accelerator.machine_type}" in options
    kinds = [flag for flag in options if "worker_accelerator" in flag]
    assert kinds == (
        []
        if name == "none"
        else [f"--dataflow_service_options=worker_accelerator={accelerator.kind}"]
    )
    assert accelerator.device in DEVICES
    assert accelerator.dtype in DTYPES


def test_a_dry_run_prints_name_and_cost_and_reaches_no_bucket(capsys):
    assert "--price-per-worker-hour" in dry_run(capsys)["cost"]
    flags = ["--name", "nightly", "--workers", "2", "--max-workers", "5"]
    printed = dry_run(capsys, *flags, "--price-per-worker-hour", "1.5", "--experiments=x")  # fmt: skip
    assert printed["cost"] == {"per_hour_at_the_start": 3.0, "per_hour_at_most": 7.5}
    assert "--job_name=nightly-2026-01-02" in printed["options"]
    assert printed["options"][-1] == "--experiments=x"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--accelerator", "v5e"], "--accelerator: expected one of none, v5e-1, v5e-4, v5e-8, v6e-1"),
        (["--accelerator", "l4", "--device", "tpu"], "--device tpu: expected --accelerator v5e-1 or v5e-4 or"),
        (["--input", "docs"], "--input: expected gs://…, which workers can reach, got 'docs'"),
        (["--output", "out"], "--output: expected gs://"),
        (["--manifest", "list.txt"], "--manifest: expected gs://"),
        (["--model", "folder"], "--model: expected gs://…, or package:NAME"),
        (["--staging", "/tmp"], "--staging: expected a folder of a bucket"),
        (["--region", "us"], "--region: expected a region such as us-central1"),
        (["--zone", "us-east1-b"], "--zone: expected a zone of us-central1"),
        (["--workers", "0"], "--workers: expected 1 or more"),
        (["--workers", "3", "--max-workers", "2"], "--max-workers: expected at least --workers (3)"),
        (["--labels", "Team=x"], "--labels: expected name=value"),
        (["--name", "Nightly"], "--name: expected lower-case"),
        (["--catch-up", "7"], "--catch-up: expected none here"),
        (["--machine_type=n1-standard-1"], "--machine_type: it is set by the flags of this command"),
        (["--runner=DirectRunner"], "--runner: it is set by"),
        (["--acelerator", "l4"], "did you mean --accelerator?"),
        (["--dry_run"], "did you mean --dry-run?"),
        (["--service_account_email=a"], "did you mean --service-account?"),
        (["--project", "1234"], "Invalid Project ID (1234)"),
        (["--staging", "gs://X/y"], "--staging: expected a folder of a bucket, gs://…, got 'gs://X/y'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_with_what_would(flags, says, capsys):
    assert cli.main(["submit", *JOB, *CLOUD, "--dry-run", *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_a_job_file_may_hold_the_flags_of_submit(capsys, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('accelerator = "v6e-1"\nworkers = 3\nlabels = ["team=search"]\n')
    options = dry_run(capsys, "--config", str(path))["options"]
    assert {"--machine_type=ct6e-standard-1t", "--num_workers=3", "--labels=team=search"} <= set(options)  # fmt: skip
