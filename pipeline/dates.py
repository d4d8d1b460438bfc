"""Dates: the one that a run writes, and those that a schedule has missed."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import replace
from zoneinfo import ZoneInfo

from pipeline import storage
from pipeline.config import Job, OutputSettings
from pipeline.partitions import read_manifest
from pipeline.state import Layout

ONE_DAY = datetime.timedelta(days=1)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def date_of(output: OutputSettings) -> str:
    """The date that a run starting now writes: as given, else yesterday in its time zone, else today in UTC."""
    if output.date is not None:
        return output.date
    if output.time_zone is None:
        return now().date().isoformat()
    return (now().astimezone(ZoneInfo(output.time_zone)).date() - ONE_DAY).isoformat()


def on_date(job: Job, date: str) -> Job:
    """The job with `{date}` replaced in the names of its inputs."""
    reading = job.reading
    manifest = reading.manifest and reading.manifest.replace("{date}", date)
    inputs = tuple(pattern.replace("{date}", date) for pattern in reading.inputs)
    return replace(job, reading=replace(reading, inputs=inputs, manifest=manifest))


def missed_dates(output: OutputSettings, date: str) -> Iterator[str]:
    """The dates of the `catch_up` days before this one that are not published, oldest first.

    None is before the first that was ever run: a new output folder has missed nothing.
    """
    begun = [
        name.removeprefix("date=")
        for kind in ("documents", "runs", "_staging")
        for name in storage.folders(storage.join(Layout(output.output, date).output, kind))
        if name.startswith("date=")
    ]
    last = datetime.date.fromisoformat(date)
    for days in range(output.catch_up, 0, -1):
        earlier = (last - days * ONE_DAY).isoformat()
        if (
            begun
            and earlier >= min(begun)
            and read_manifest(Layout(output.output, earlier)) is None
        ):
            yield earlier
