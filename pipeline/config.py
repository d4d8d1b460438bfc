"""The user's settings: frozen dataclasses that hold every default once and check every value.

The command line, the `--config` file and (later) the template's metadata are all made from these
fields, so a setting is added here and nowhere else. This module imports nothing heavy: usage errors
must appear at once.
"""

from __future__ import annotations

import codecs
import datetime
import re
import threading
import zoneinfo
from dataclasses import MISSING, dataclass, field
from typing import Any

from pipeline.accelerators import ACCELERATORS

TASKS = ("embed",)
DEVICES = ("auto", "cpu", "gpu", "tpu")
DTYPES = ("auto", "float32", "bfloat16")
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
FORMATS = ("auto", "text", "markdown", "jsonl", "parquet")


MAX_TOKENS_PER_BATCH = 2**24  # the activations of a small model alone would take 30 GB


class SettingsError(ValueError):
    """A setting that cannot work; raised before any document is read (exit status 2)."""


def setting(
    help: str, default: Any = MISSING, *, flag: str = "", choices: tuple[str, ...] = ()
) -> Any:
    """A dataclass field that the command line shows as a flag (`--field-name`, or `--flag`)."""
    metadata = {"help": help, "flag": flag, "choices": choices}
    return field(default=default, metadata=metadata)


# Python's encodings of literals and host names, which are text themselves.
_NOT_OF_CHARACTERS = {"unicode-escape", "raw-unicode-escape", "punycode", "idna"}


def _is_character_encoding(name: str) -> bool:
    try:
        "".encode(name)  # refuses codecs of bytes, such as base64
        return codecs.lookup(name).name not in _NOT_OF_CHARACTERS
    except (LookupError, ValueError):
        return False


def _require(ok: bool, flag: str, expected: str, value: object) -> None:
    if not ok:
        raise SettingsError(f"--{flag}: expected {expected}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ReadingSettings:
    """Which documents are read, and how a record becomes a document."""

    inputs: tuple[str, ...] = setting(
        "file, folder (read recursively) or glob, with {date} for the run's date; may be repeated",
        (),
        flag="input",
    )
    manifest: str | None = setting(
        "text file that names one input file a line; its own name may have {date} too", None
    )
    allow_empty: bool = setting("an input that matches nothing is not an error", False)
    format: str = setting("format of every input; auto: by file name", "auto", choices=FORMATS)
    encoding: str = setting("encoding of text and JSON Lines without a byte-order mark", "utf-8")
    text_field: str = setting("field or column that holds the text of a record", "text")
    id_field: str | None = setting("field or column that names a record within its file", None)
    keep_fields: tuple[str, ...] = setting(
        "field or column copied to the output, as name or name:type; may be repeated", ()
    )
    max_document_bytes: int = setting("a larger document becomes a failure", 256 * 2**20)
    split_bytes: int = setting("size of the ranges in which a large file is read", 64 * 2**20)

    def __post_init__(self) -> None:
        if not self.inputs and self.manifest is None:
            raise SettingsError("nothing to read: give --input PATTERN or --manifest FILE")
        _require(self.format in FORMATS, "format", f"one of {', '.join(FORMATS)}", self.format)
        _require(
            self.max_document_bytes > 0,
            "max-document-bytes",
            "more than 0",
            self.max_document_bytes,
        )
        _require(self.split_bytes > 0, "split-bytes", "more than 0", self.split_bytes)
        _require(
            _is_character_encoding(self.encoding),
            "encoding",
            "a character encoding that Python knows, such as latin-1",
            self.encoding,
        )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is computed for each document."""

    model: str = setting("checkpoint folder, or package:NAME for one in an installed package")
    task: str = setting("what is computed", "embed", choices=TASKS)
    device: str = setting("where the model runs", "auto", choices=DEVICES)
    dtype: str = setting(
        "type of matmul inputs; auto: bfloat16 where the device has it", "auto", choices=DTYPES
    )
    attention: str = setting(
        "attention implementation; auto: the best that passes its check", "auto"
    )
    device_timeout_seconds: float = setting(
        "a call to the device, compiling included, that takes longer ends the process", 1800.0
    )
    window_tokens: int | None = setting(
        "tokens of a window, special tokens included; default: as the checkpoint says", None
    )
    window_overlap: int = setting("tokens that neighbouring windows of a document share", 0)
    max_windows: int | None = setting("cut documents after this many windows", None)

    def __post_init__(self) -> None:
        _require(self.task in TASKS, "task", f"one of {', '.join(TASKS)}", self.task)
        _require(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}", self.device)
        _require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        _require(
            0 < self.device_timeout_seconds <= threading.TIMEOUT_MAX,
            "device-timeout-seconds",
            "more than 0",
            self.device_timeout_seconds,
        )
        _require(
            self.window_tokens is None or self.window_tokens >= 3,
            "window-tokens",
            "3 or more (two are special tokens)",
            self.window_tokens,
        )
        _require(self.window_overlap >= 0, "window-overlap", "0 or more", self.window_overlap)
        _require(
            self.max_windows is None or self.max_windows >= 1,
            "max-windows",
            "1 or more",
            self.max_windows,
        )


def _check_batch(tokens: int | None) -> None:
    _require(
        tokens is None or 0 < tokens <= MAX_TOKENS_PER_BATCH,
        "max-tokens-per-batch",
        f"more than 0, at most {MAX_TOKENS_PER_BATCH}",
        tokens,
    )


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """How documents are grouped for the device. Changes speed, never results."""

    max_tokens_per_batch: int | None = setting(
        "padded tokens of a device batch; default: what suits the device", None
    )
    max_tokens_per_load: int | None = setting(
        "tokens planned together; default: 16 device batches", None
    )

    def __post_init__(self) -> None:
        load = self.max_tokens_per_load
        _require(load is None or load > 0, "max-tokens-per-load", "more than 0", load)
        _check_batch(self.max_tokens_per_batch)


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """Where results go and when they count."""

    output: str = setting("folder that receives documents/, failures/, state/ and runs/")
    date: str | None = setting(
        "partition to write, YYYY-MM-DD; default: yesterday in --time-zone if that is given, else today in UTC",
        None,
    )
    time_zone: str | None = setting("time zone of the nights, such as Europe/Berlin", None)
    catch_up: int = setting("first run those of the N days before --date that were missed", 0)
    max_failure_ratio: float = setting(
        "publish nothing when more than this share of records failed", 0.05
    )
    fail_fast: bool = setting("stop at the first record that fails, and publish nothing", False)
    max_rows_per_file: int = setting("rows of an output file", 1_000_000)
    max_bytes_per_file: int = setting("size of an output file, roughly", 256 * 2**20)
    resume: bool = setting("go on from an interrupted run of the same job", True)
    incremental: bool = setting(
        "compute only what changed since the latest date published before this one", False
    )
    carry_over: bool = setting(
        "with --incremental: copy the rows of unchanged objects, so that each date is whole", True
    )
    retry_failures: bool = setting(
        "compute only what failed or changed since this date was published", False
    )
    keep_days: int | None = setting(
        "after publishing, delete dates more than this many days older", None
    )

    def __post_init__(self) -> None:
        ok = bool(self.output) and "\0" not in self.output and self.output.isprintable()
        _require(ok, "output", "a folder, its name in printable characters", self.output)
        # The lock and the manifest need what only these two have; and Beam reads wildcards in names, to delete as well.
        scheme = re.match(r"[^/]*://", self.output)
        ok = scheme is None or re.fullmatch(r"gs://[^/][^*?\[]*", self.output) is not None
        _require(
            ok, "output", "a local folder or gs://BUCKET/FOLDER without *, ? or [", self.output
        )
        if self.date is not None:
            # fromisoformat also takes 20260102 and 2026-W01-1, which would name other folders.
            ok = re.fullmatch(r"\d{4}-\d{2}-\d{2}", self.date, re.ASCII) is not None
            try:
                datetime.date.fromisoformat(self.date)
            except ValueError:
                ok = False
            _require(ok, "date", "a day as YYYY-MM-DD", self.date)
        if self.time_zone is not None:
            try:
                zoneinfo.ZoneInfo(self.time_zone)
            except (KeyError, ValueError, OSError):
                example = "a time zone of the IANA database, such as Europe/Berlin or UTC"
                _require(False, "time-zone", example, self.time_zone)
        _require(0 <= self.catch_up <= 366, "catch-up", "0 to 366 days", self.catch_up)
        if self.catch_up and self.retry_failures:
            raise SettingsError(
                "--catch-up: expected no --retry-failures, which needs a published date"
            )
        if self.keep_days is not None and self.catch_up > self.keep_days:
            raise SettingsError(
                f"--catch-up {self.catch_up}: expected at most --keep-days {self.keep_days}, since older dates are deleted"
            )
        if self.incremental and self.retry_failures:
            raise SettingsError(
                "--incremental and --retry-failures: expected one of them, since they build on different dates"
            )
        if not self.carry_over and not self.incremental:
            raise SettingsError("--no-carry-over: expected --incremental with it")
        if not self.carry_over and self.keep_days is not None:
            raise SettingsError(
                "--keep-days: expected carry-over, since with --no-carry-over later dates need the rows of older ones"
            )
        _require(
            self.keep_days is None or self.keep_days > 0, "keep-days", "more than 0", self.keep_days
        )
        _require(
            0 <= self.max_failure_ratio <= 1, "max-failure-ratio", "0 to 1", self.max_failure_ratio
        )
        _require(
            self.max_rows_per_file > 0, "max-rows-per-file", "more than 0", self.max_rows_per_file
        )
        _require(
            self.max_bytes_per_file > 0,
            "max-bytes-per-file",
            "more than 0",
            self.max_bytes_per_file,
        )


@dataclass(frozen=True, kw_only=True)
class Job:
    """All settings of one job."""

    reading: ReadingSettings
    model: ModelSettings
    batching: BatchingSettings
    output: OutputSettings


@dataclass(frozen=True, kw_only=True)
class CloudSettings:
    """Where Dataflow runs the job, and on which workers."""

    project: str = setting("Google Cloud project that runs and pays for the job")
    region: str = setting("region of the job, such as us-central1")
    staging: str = setting("gs:// folder for what Dataflow needs to start and run the job")
    image: str = setting("container image of the workers, which has Lengthwise in it")
    accelerator: str = setting("of each worker", "none", choices=tuple(ACCELERATORS))
    workers: int = setting("number of workers at the start", 1)
    max_workers: int | None = setting("most workers; default: as many as at the start", None)
    zone: str | None = setting("zone of the workers; default: any of the region", None)
    network: str | None = setting("network of the workers", None)
    subnetwork: str | None = setting("subnetwork of the workers", None)
    service_account: str | None = setting("account that the workers act as", None)
    labels: tuple[str, ...] = setting("label of the job, as name=value; may be repeated", ())
    name: str = setting("of the job; the date is added to it", "lengthwise")
    price_per_worker_hour: float | None = setting("for the cost that --dry-run prints", None)
    dry_run: bool = setting("print what would be submitted and submit nothing", False)

    def __post_init__(self) -> None:
        known = tuple(ACCELERATORS)
        ok = self.accelerator in known
        _require(ok, "accelerator", f"one of {', '.join(known)}", self.accelerator)
        ok = re.fullmatch(r"gs://[a-z0-9][-_a-z0-9.]+[a-z0-9](/.*)?", self.staging) is not None
        _require(ok, "staging", "a folder of a bucket, gs://…", self.staging)
        ok = re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", self.name) is not None
        _require(ok, "name", "lower-case letters, digits and dashes, at most 52", self.name)
        _require(self.workers >= 1, "workers", "1 or more", self.workers)
        ok = self.max_workers is None or self.max_workers >= self.workers
        expected = f"at least --workers ({self.workers})"
        _require(ok, "max-workers", expected, self.max_workers)
        ok = re.fullmatch(r"[a-z]+-[a-z]+[0-9]+", self.region) is not None
        _require(ok, "region", "a region such as us-central1", self.region)
        ok = self.zone is None or re.fullmatch(f"{self.region}-[a-z]", self.zone) is not None
        _require(ok, "zone", f"a zone of {self.region}, such as {self.region}-a", self.zone)
        for label in self.labels:
            ok = re.fullmatch(r"[a-z][a-z0-9_-]{0,62}=[a-z0-9_-]{0,63}", label) is not None
            _require(ok, "labels", "name=value in lower case", label)


@dataclass(frozen=True, kw_only=True)
class Submission(Job):
    """All settings of a job that Dataflow runs."""

    cloud: CloudSettings

    def __post_init__(self) -> None:
        there = {
            "output": (self.output.output,),
            "input": self.reading.inputs,
            "manifest": (self.reading.manifest,) if self.reading.manifest else (),
        }
        for flag, paths in there.items():
            for path in paths:
                _require(path.startswith("gs://"), flag, "gs://…, which workers can reach", path)
        ok = self.model.model.startswith(("gs://", "package:"))
        expected = "gs://…, or package:NAME of a package in the image"
        _require(ok, "model", expected, self.model.model)
        device = ACCELERATORS[self.cloud.accelerator].device
        if self.model.device not in ("auto", device):
            fitting = [name for name, a in ACCELERATORS.items() if a.device == self.model.device]
            raise SettingsError(
                f"--device {self.model.device}: expected --accelerator {' or '.join(fitting)} with it, "
                f"got {self.cloud.accelerator!r}"
            )
        if self.output.catch_up:
            raise SettingsError("--catch-up: expected none here; submit each date with --date")


@dataclass(frozen=True, kw_only=True)
class CheckupSettings:
    """What is looked at."""

    model: str | None = setting(
        "checkpoint folder, or package:NAME for one in an installed package; default: shapes like BERT-base's",
        None,
    )
    device: str = setting("where the model would run", "auto", choices=DEVICES)
    dtype: str = setting("as for run", "auto", choices=DTYPES)
    attention: str = setting("as for run", "auto")
    window_tokens: int | None = setting("as for run", None)
    max_tokens_per_batch: int | None = setting("as for run", None)
    tpu: str | None = setting(
        "compile the model for this TPU, which need not be there (needs lengthwise[tpu])",
        None,
        choices=TPUS,
    )
    json: bool = setting("print JSON", False)

    def __post_init__(self) -> None:
        _require(self.device in DEVICES, "device", f"one of {', '.join(DEVICES)}", self.device)
        _require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        window = self.window_tokens
        _require(window is None or window >= 3, "window-tokens", "3 or more", window)
        _check_batch(self.max_tokens_per_batch)
        if self.tpu is not None:
            _require(self.tpu in TPUS, "tpu", f"one of {', '.join(TPUS)}", self.tpu)
            if self.model is None:
                raise SettingsError(
                    f"--tpu {self.tpu}: expected --model with it, which is compiled"
                )
            if self.device not in ("auto", "tpu"):
                raise SettingsError(
                    f"--tpu {self.tpu}: expected no other --device, got {self.device!r}"
                )


@dataclass(frozen=True, kw_only=True)
class Checkup:
    """All settings of the doctor."""

    checking: CheckupSettings
