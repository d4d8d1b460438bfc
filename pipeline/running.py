"""`lengthwise run`: one job on this machine, from launch to exit status."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineRunner
from apache_beam.transforms.environments import SubprocessSDKEnvironment

from pipeline.build import build
from pipeline.config import Job, SettingsError
from pipeline.launching import launch
from pipeline.progress import Control, display, signals_stop
from pipeline.publishing import RunFailed
from pipeline.records import Run
from pipeline.state import Layout

LOCAL_RUNNERS = ("DirectRunner", "FnApiRunner")


def run(job: Job, beam_options: Sequence[str], runner: str) -> int:
    """Runs the job and prints what came of it.

    Returns:
      0: published; 1: failed, or too many documents failed; 128 + signal number: stopped, and resumable.

    Raises:
      SettingsError: the job cannot start; nothing was read.
    """
    options = PipelineOptions(list(beam_options), runner=None)
    with launch(job) as launched:
        control = Control(launched.control)
        engine = _engine(runner, options, launched)
        say = lambda line: print(line, file=sys.stderr)  # noqa: E731
        error: BaseException | None = None
        with signals_stop(control), display(control, launched):
            try:
                pipeline = beam.Pipeline(runner=engine, options=options)
                build(pipeline, launched)
                pipeline.run().wait_until_finish()
            except Exception as raised:  # noqa: BLE001: whatever a worker raises ends the run; it is explained below
                error = raised
        report_path = Path(Layout(job.output.output, launched.date).report(launched.run_id))
        report = json.loads(report_path.read_text()) if report_path.exists() else None
        stopped_by = control.stopped_by()
        if error is None and report is not None and report["status"] == "published":
            say(_summary(report, report_path))
            return 0
        if stopped_by is not None:
            say(f"Stopped by {signal.Signals(stopped_by).name}; nothing published. Run the same command to go on.")
            return 128 + stopped_by
        say(f"lengthwise: {_explain(error)}")
        if report is not None:
            say(f"Report: {report_path}")
        return 1


def _engine(runner: str, options: PipelineOptions, launched: Run) -> PipelineRunner | str:
    """DirectRunner by its engine: asked for by the other name, Beam first tries to download another one."""
    if runner not in LOCAL_RUNNERS:
        return runner
    direct = options.view_as(DirectOptions)
    if direct.direct_running_mode != "multi_processing":
        return FnApiRunner()
    if launched.device != "cpu":
        raise SettingsError(
            f"--direct_running_mode multi_processing: expected a CPU, since one process owns a {launched.device}; "
            "use in_memory or multi_threading, or --device cpu"
        )
    direct.direct_running_mode = "in_memory"  # or Beam replaces the command below with its own
    # Ctrl-C reaches the whole process group: workers ignore it and stop at the flag. `-P` keeps the working
    # folder off the module path, where a user's model.py would shadow ours.
    command = f"trap '' INT TERM; exec {shlex.quote(sys.executable)} -P -m apache_beam.runners.worker.sdk_worker_main"
    return FnApiRunner(
        default_environment=SubprocessSDKEnvironment.from_command_string(command_string=command)
    )


def _summary(report: dict, path: Path) -> str:
    documents = report["documents"]
    failed = f", {documents['failed']:,} failed" if documents["failed"] else ""
    return (
        f"Published {documents['written']:,} documents{failed} to {report['partition']} "
        f"in {report['seconds']['total']:.1f} s ({report['documents_per_second']:.1f} documents/s)\n"
        f"Report: {path.with_suffix('.html')}"
    )


def _explain(error: BaseException | None) -> str:
    """One line for an error that a user can act on; the whole traceback for a fault of ours."""
    if error is None:
        return "the pipeline ended without a report"
    if isinstance(error, (RunFailed, SettingsError)):
        return str(error)
    return "".join(traceback.format_exception(error))
