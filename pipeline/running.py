"""`lengthwise run`: one job on this machine, from launch to exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineRunner, create_runner
from apache_beam.transforms.environments import SubprocessSDKEnvironment

from pipeline import storage
from pipeline.beam_flags import LOCAL_RUNNERS
from pipeline.build import build
from pipeline.config import Job, SettingsError
from pipeline.dates import date_of, missed_dates
from pipeline.launching import launch
from pipeline.locking import DateLocked
from pipeline.progress import Control, display, signals_stop
from pipeline.publishing import report_failure
from pipeline.records import Run
from pipeline.state import Layout


def run(job: Job, beam_options: Sequence[str], runner: str) -> int:
    """Runs the job, after the dates that were missed if it is to catch up, and prints what came of each.

    A missed date that fails again does not keep the job's own date from being run.

    Returns:
      0: all published; 1: failed, or too many documents failed; 128 + signal number: stopped, and resumable.

    Raises:
      SettingsError: the job cannot start; nothing of its date was read.
    """
    date = date_of(job.output)
    missed_status = 0
    for missed in missed_dates(job.output, date) if job.output.catch_up else ():
        _say(f"Catching up: {missed} is not published")
        try:
            status = _run_date(job, missed, beam_options, runner)
        except (SettingsError, OSError) as error:
            _say(f"lengthwise: {error}")
            status = 0 if isinstance(error, DateLocked) else 1  # it is being written: not missed
        if status >= 128:
            return status
        missed_status = missed_status or status
    return _run_date(job, date, beam_options, runner) or missed_status


def _run_date(job: Job, date: str, beam_options: Sequence[str], runner: str) -> int:
    try:
        return _run_launched(job, date, beam_options, runner)
    except (SettingsError, OSError) as error:
        print_summary({"status": "refused", "date": date, "reason": str(error)})
        raise


def _run_launched(job: Job, date: str, beam_options: Sequence[str], runner: str) -> int:
    options = PipelineOptions(list(beam_options), runner=None)
    with launch(job, date) as launched:
        control = Control(launched.control)
        engine = _engine(runner, options, launched)
        hidden = f", {launched.hidden:,} hidden files left out" if launched.hidden else ""
        _say(
            f"Run {launched.run_id}: date {launched.date}, {launched.device}, {launched.dtype}{hidden}"
        )
        if launched.resumed:
            _say(f"Going on from {len(launched.resumed):,} files that interrupted runs have staged")
        error: Exception | None = None
        with signals_stop(control), display(control, launched):
            try:
                pipeline = beam.Pipeline(runner=engine, options=options)
                build(pipeline, launched)
                pipeline.run().wait_until_finish()
            except (
                Exception
            ) as raised:  # whatever a worker raises ends the run; it is explained below
                error = raised
        return _end(launched, error, control.stopped_by())


def _end(launched: Run, error: Exception | None, stopped_by: int | None) -> int:
    """Says what came of the run and gives its exit status."""
    job = launched.job
    path = Layout(job.output.output, launched.date).report(launched.run_id)
    try:
        if error is not None and not storage.exists(path):
            report_failure(launched, _last_line(error))
        report = json.loads(storage.read(path))
    except Exception as unwritten:  # where there is no more room, no output folder or no service
        if error is None:
            raise
        if storage.is_local(launched.listing) and not os.path.exists(launched.listing):
            _say(
                f"lengthwise: {job.output.output} was deleted while the run worked in it; run again"
            )
        else:
            _say_why(error, _last_line(error))
        _say(f"No report either: {_last_line(unwritten)}")
        print_summary({"status": "failed", "date": launched.date, "reason": _last_line(error)})
        return 1 if stopped_by is None else 128 + stopped_by
    print_summary(
        {name: report[name] for name in ("status", "date", "reason", "run_id")}
        | {
            "documents": sum(file["rows"] for file in report["files"]["documents"]),
            "failures": report["documents"]["failed"],
            "partition": report["partition"],
            "report": path,
        }
    )
    page = _short(path.removesuffix("json") + "html")
    if report["status"] == "published":
        _say(_summary(report, page))
        if error is not None:
            _say(f"lengthwise: what is no longer needed was not all deleted: {_last_line(error)}")
        return 0
    if report["status"] == "failed":
        _say_why(error, report["reason"])
        _say(f"Report: {page}")
    if stopped_by is None:
        return 1
    given = job.output.date == launched.date
    same = "the same command" + ("" if given else f" with --date {launched.date}")
    _say(f"Stopped by {signal.Signals(stopped_by).name}; nothing published. Run {same} to go on.")
    return 128 + stopped_by


def _short(path: str) -> str:
    """The path from the working folder, where it lies below."""
    if not storage.is_local(path):
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def _say(text: str) -> None:
    """Prints a text, in which names and messages of documents must not steer the terminal."""
    shown = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    print("".join(shown), file=sys.stderr)


def _say_why(error: Exception | None, reason: str) -> None:
    _say(f"lengthwise: {reason}")
    if error is not None and not _is_explained(error):
        _say("".join(traceback.format_exception(error)))


def print_summary(summary: Mapping[str, Any]) -> None:
    """For programs: a line of JSON a date, the job's own the last. People are told on standard error."""
    if sys.stdout.isatty():
        return
    try:
        print(json.dumps(summary), flush=True)
    except OSError:  # its reader has gone, which fails no run: nor shall what is left in the buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _engine(runner: str, options: PipelineOptions, launched: Run) -> PipelineRunner | str:
    """DirectRunner by its engine: asked for by the other name, Beam first tries to download another one."""
    if runner not in LOCAL_RUNNERS:
        try:
            return create_runner(runner)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingsError(f"--runner {runner}: Beam cannot load it: {error}") from error
    direct = options.view_as(DirectOptions)
    if direct.direct_running_mode != "multi_processing":
        return FnApiRunner()
    if direct.direct_num_workers < 0:
        raise SettingsError(
            f"--direct_num_workers: expected 0 (one a core) or more, got {direct.direct_num_workers}"
        )
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


def _summary(report: dict[str, Any], page: str) -> str:
    documents = report["documents"]
    failed = f", {documents['failed']:,} failed" if documents["failed"] else ""
    before = sum(run["documents"] for run in report["runs"] if run["run_id"] != report["run_id"])
    kept = f" ({before:,} of them computed by interrupted runs)" if before else ""
    how = "carried over" if report["incremental"]["carried_over"] else "left in earlier dates"
    unchanged = f", {documents['skipped']:,} unchanged {how}" if documents["skipped"] else ""
    return (
        f"Published {documents['written']:,} documents{kept}{failed}{unchanged} to {_short(report['partition'])} "
        f"in {report['seconds']['total']:.1f} s ({report['documents_per_second']:.1f} documents/s)\n"
        f"Report: {page}"
    )


# Errors whose message tells the user what to do; any other is a fault of ours, and its traceback is shown.
_EXPLAINED = ("RunFailed", "SettingsError", "CheckpointError", "DeviceError", "SelectionError")


def _last_line(error: Exception) -> str:
    """What went wrong, without the worker's traceback and Beam's remarks that it may come wrapped in."""
    lines = [line.strip() for line in str(error).splitlines()]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Failed|Exception|Memory)\b.*: ", line)
    ]
    line = (errors or lines or [""])[-1] or repr(error)
    if "Channel closed prematurely" in line:
        return "a worker process died (was it out of memory?); run again to go on"
    if os.strerror(errno.ENOSPC) in line:
        line += "; free some space and run again: what was written is kept"
    return re.sub(r"^[\w.]+: | \[while running '[^]]*\]", "", line)


def _is_explained(error: Exception) -> bool:
    """Whether it is one of _EXPLAINED, itself or in the text of the traceback that Beam made of it."""
    names = "|".join(_EXPLAINED)
    return type(error).__name__ in _EXPLAINED or bool(
        re.search(rf"^[\w.]*({names}): ", str(error), re.MULTILINE)
    )
