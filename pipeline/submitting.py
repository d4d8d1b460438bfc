"""`lengthwise submit`: the same pipeline as a job of Dataflow, launched here and run there."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import cast

import apache_beam as beam
from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    TestOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.dataflow.dataflow_runner import DataflowPipelineResult, DataflowRunner
from apache_beam.runners.dataflow.internal.apiclient import DataflowJobAlreadyExistsError
from google.api_core.exceptions import GoogleAPICallError

from pipeline import storage
from pipeline.accelerators import ACCELERATORS
from pipeline.build import build
from pipeline.config import CloudSettings, SettingsError, Submission
from pipeline.dates import date_of
from pipeline.launching import launch
from pipeline.running import print_summary
from pipeline.state import Layout

ADDED_TO = ("experiments", "dataflow_service_options", "labels")  # lists: ours and the user's


def submit(job: Submission, beam_options: Sequence[str]) -> int:
    """Submits the job and prints what was submitted; or prints what would be.

    Returns:
      0: Dataflow has taken it, and what becomes of it is in the date's report; 1: it has not.

    Raises:
      SettingsError: the job cannot start; nothing was submitted.
    """
    date = date_of(job.output)
    flags = dataflow_options(job.cloud, date)
    _refuse_repeated(flags, beam_options)
    flags += beam_options
    _validate(flags)
    if job.cloud.dry_run:
        print(json.dumps({"date": date, "options": flags, "cost": cost(job.cloud)}, indent=2))
        return 0
    with launch(job, date, workers=ACCELERATORS[job.cloud.accelerator]) as run:
        pipeline = beam.Pipeline(options=PipelineOptions(flags))
        build(pipeline, run)
        try:
            result = cast(DataflowPipelineResult, pipeline.run())
        except Exception as error:
            storage.delete_folder(run.listing.rpartition("/")[0])
            if isinstance(error, DataflowJobAlreadyExistsError):
                raise SettingsError(
                    f"--name {job.cloud.name}: Dataflow has an active job {job_name(job.cloud, date)}; wait for its end or "
                    "cancel it, or choose another name for a job of another output"
                ) from error
            if isinstance(error, GoogleAPICallError):
                print(f"lengthwise: Dataflow has refused the job: {error.message}", file=sys.stderr)
                return 1
            raise
    layout = Layout(job.output.output, date)
    job_id = result.job_id()
    print_summary(
        {
            "status": "submitted",
            "date": date,
            "run_id": run.run_id,
            "job": job_id,
            "partition": layout.documents,
            "report": layout.report(run.run_id),
        }
    )
    console = "https://console.cloud.google.com/dataflow/jobs"
    print(
        f"Submitted {job_name(job.cloud, date)}: {console}/{job.cloud.region}/{job_id}?project={job.cloud.project}\n"
        f"Report, when it has ended: {layout.report(run.run_id).removesuffix('json')}html",
        file=sys.stderr,
    )
    return 0


def job_name(cloud: CloudSettings, date: str) -> str:
    """From the date: Dataflow refuses a second active job of the same name, and so a night that is started twice."""
    return f"{cloud.name}-{date}"


def dataflow_options(cloud: CloudSettings, date: str) -> list[str]:
    """The job's settings as flags of Beam."""
    given = {
        "num_workers": cloud.workers,
        "max_num_workers": cloud.max_workers or cloud.workers,
        "worker_zone": cloud.zone,
        "network": cloud.network,
        "subnetwork": cloud.subnetwork,
        "service_account_email": cloud.service_account,
    }
    staging = cloud.staging.rstrip("/")
    return [
        "--runner=DataflowRunner",
        f"--job_name={job_name(cloud, date)}",
        f"--project={cloud.project}",
        f"--region={cloud.region}",
        f"--staging_location={staging}/staging",
        f"--temp_location={staging}/temp",
        f"--sdk_container_image={cloud.image}",
        "--sdk_location=container",
        *ACCELERATORS[cloud.accelerator].beam_options(),
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        *(f"--labels={label}" for label in cloud.labels),
    ]


def cost(cloud: CloudSettings) -> dict[str, float] | str:
    """What the workers cost an hour, at the start and at the most."""
    price = cloud.price_per_worker_hour
    if price is None:
        return "give --price-per-worker-hour for an estimate"
    most = cloud.max_workers or cloud.workers
    return {"per_hour_at_the_start": price * cloud.workers, "per_hour_at_most": price * most}


def _refuse_repeated(ours: Sequence[str], users: Sequence[str]) -> None:
    names = {flag.partition("=")[0] for flag in ours} - {f"--{name}" for name in ADDED_TO}
    for flag in users:
        name = flag.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        if name in names:
            raise SettingsError(
                f"{name}: it is set by the flags of this command (lengthwise submit --help)"
            )


def _validate(flags: Sequence[str]) -> None:
    """Beam's own checks, which it leaves out itself for a service on this machine."""
    options = PipelineOptions(list(flags))
    options.view_as(GoogleCloudOptions).dataflow_endpoint = GoogleCloudOptions.DATAFLOW_ENDPOINT
    options.view_as(TestOptions).dry_run = True  # of the checks: they do not reach for a bucket
    errors = PipelineOptionsValidator(options, DataflowRunner()).validate()
    if errors:
        raise SettingsError("; ".join(re.sub(r"\.$", "", str(error)) for error in errors))
