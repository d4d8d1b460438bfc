"""Settings: what cannot work is refused when they are made, with the flag's name in the message."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any, get_type_hints

import pytest

from kernels.attention import contract
from model import devices
from pipeline import config
from pipeline.config import (
    BatchingSettings,
    Job,
    ModelSettings,
    OutputSettings,
    ReadingSettings,
    SettingsError,
)


def reading(**changes: Any) -> ReadingSettings:
    return ReadingSettings(**({"inputs": ("docs",)} | changes))


def model(**changes: Any) -> ModelSettings:
    return ModelSettings(**({"model": "folder"} | changes))


def output(**changes: Any) -> OutputSettings:
    return OutputSettings(**({"output": "out"} | changes))


SECTIONS = list(get_type_hints(Job).values())


def test_the_defaults_are_accepted_and_survive_the_way_to_a_worker():
    job = Job(reading=reading(), model=model(), batching=BatchingSettings(), output=output())
    assert pickle.loads(pickle.dumps(job)) == job


@pytest.mark.parametrize(
    ("make", "flag", "value"),
    [
        (reading, "format", "pdf"),
        (reading, "encoding", "utf-99"),
        *(
            (reading, "encoding", name)
            for name in ("unicode_escape", "raw_unicode_escape", "punycode", "idna", "undefined")
        ),
        *(
            (reading, "encoding", name)
            for name in ("Unicode-Escape", "base64", "rot13", "hex", "", "a\0b")
        ),
        (reading, "max_document_bytes", 0),
        (reading, "split_bytes", -1),
        (model, "task", "translate"),
        (model, "device", "npu"),
        (model, "dtype", "int8"),
        *(
            (model, "device_timeout_seconds", seconds)
            for seconds in (0.0, float("inf"), float("nan"))
        ),
        (model, "window_tokens", 2),
        (model, "window_overlap", -1),
        (model, "max_windows", 0),
        (BatchingSettings, "max_tokens_per_batch", 0),
        (BatchingSettings, "max_tokens_per_batch", 10**30),
        (BatchingSettings, "max_tokens_per_load", -5),
        (output, "output", ""),
        *(
            (output, "output", f"{name}")
            for name in (
                "gs://",
                "gs:///a",
                "gs://b/a*",
                "gs://b/[1]",
                "s3://a/b",
                "file:///a",
                "zzz://a",
            )
        ),
        (output, "max_failure_ratio", 1.5),
        (output, "max_failure_ratio", -0.1),
        (output, "max_failure_ratio", float("nan")),
        (output, "max_rows_per_file", 0),
        (output, "max_bytes_per_file", 0),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_flag_and_value(make, flag, value):
    with pytest.raises(SettingsError) as caught:
        make(**{flag: value})
    assert f"--{flag.replace('_', '-')}" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_refused_encoding_is_told_what_is_expected():
    with pytest.raises(SettingsError, match="expected a character encoding that Python knows"):
        reading(encoding="unicode_escape")
    for name in ("latin-1", "UTF-16", "utf-7", "shift_jis", "cp037", "utf_8_sig"):
        assert reading(encoding=name).encoding == name


@pytest.mark.parametrize(
    "date",
    [
        "2026-13-01",
        "2026-02-30",
        "20260101",
        "2026-W01-1",
        "today",
        "",
        "２０２６-01-01",
        "2026-01-01\n",
    ],
)
def test_only_a_day_of_the_calendar_written_with_dashes_is_a_date(date):
    with pytest.raises(SettingsError, match="--date"):
        output(date=date)


def test_a_leap_day_is_a_date():
    assert output(date="2028-02-29").date == "2028-02-29"


def test_no_input_at_all_is_refused_and_a_manifest_is_one():
    with pytest.raises(SettingsError, match="--input"):
        ReadingSettings()
    assert ReadingSettings(manifest="files.txt").inputs == ()


def test_the_devices_and_types_offered_are_those_that_the_model_and_attention_know():
    """Said twice because settings may not import JAX."""
    assert set(config.DEVICES) == {devices.AUTO, *devices.DEVICES}
    assert config.DTYPES == (devices.AUTO, *devices.DTYPES) == (devices.AUTO, *contract.DTYPES)


@pytest.mark.parametrize("settings", SECTIONS)
def test_every_setting_is_explained(settings):
    unexplained = [f.name for f in dataclasses.fields(settings) if not f.metadata.get("help")]
    assert not unexplained


@pytest.mark.parametrize("settings", SECTIONS)
def test_settings_cannot_be_changed_or_given_by_position(settings):
    assert settings.__dataclass_params__.frozen
    assert all(f.kw_only for f in dataclasses.fields(settings))
