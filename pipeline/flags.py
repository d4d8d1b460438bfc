"""The settings as command-line flags and as keys of a `--config` file: made from the fields of `pipeline.config`."""

from __future__ import annotations

import argparse
import datetime
import difflib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pipeline.config import Checkup, Job, SettingsError, Submission

EXPECTED = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One setting as users name it."""

    name: str  # without the dashes in front: max-windows
    section: str  # field of Job, or of another command's settings
    field: str  # field of that section
    kind: type  # str, int, float or bool
    repeats: bool  # a tuple of them
    required: bool
    default: Any
    help: str
    choices: tuple[str, ...]


@cache
def all_flags(command: type = Job) -> Mapping[str, Flag]:
    """Every setting of a command (a job's, if not another's) by its flag's name."""
    found = {}
    for section, settings in get_type_hints(command).items():
        types = get_type_hints(settings)
        for field in fields(settings):
            kind = types[field.name]
            repeats = get_origin(kind) is tuple
            # `int | None` is given as an int, `tuple[str, ...]` as one str after another.
            kind = next(one for one in (kind, *get_args(kind)) if one in EXPECTED)
            name = field.metadata["flag"] or field.name.replace("_", "-")
            found[name] = Flag(
                name=name,
                section=section,
                field=field.name,
                kind=kind,
                repeats=repeats,
                required=field.default is MISSING,
                default=field.default,
                help=field.metadata["help"],
                choices=field.metadata["choices"],
            )
    return found


def nearest(name: str, known: Collection[str], cutoff: float = 0.6) -> str | None:
    """The known name that looks most like this one, `-` and `_` being the same; None if none does."""
    alike = {other.replace("_", "-"): other for other in known}
    close = difflib.get_close_matches(name.replace("_", "-"), alike, n=1, cutoff=cutoff)
    return alike[close[0]] if close else None


def refuse_all(unknown: Sequence[str], known: Collection[str]) -> None:
    """Refuses what a command's parser has left over, where nothing passes through.

    Raises:
      SettingsError: there is something; it names the flag that may have been meant.
    """
    for text in unknown:
        if not text.startswith("--"):
            raise SettingsError(f"unexpected argument {text!r}: everything is given by flags")
        name = text[2:].split("=", 1)[0]
        meant = nearest(name, known)
        hint = f"; did you mean --{meant}?" if meant else ""
        raise SettingsError(f"unknown flag --{name}{hint}")


def add_flags(parser: argparse.ArgumentParser, command: type = Job) -> None:
    """Adds every setting, in one group a section. What is not given is absent from the namespace."""
    groups = {}
    for section, settings in get_type_hints(command).items():
        about = (settings.__doc__ or "").splitlines()[0]
        groups[section] = parser.add_argument_group(section, about)
    for flag in all_flags(command).values():
        more: dict[str, Any] = {"type": _converter(flag.kind), "metavar": _metavar(flag)}
        if flag.kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif flag.repeats:
            more |= {"action": "extend", "nargs": "+"}
        groups[flag.section].add_argument(
            f"--{flag.name}",
            dest=flag.name,
            default=argparse.SUPPRESS,
            help=(flag.help + _default(flag)).replace("%", "%%"),
            **more,
        )


def read_config(path: str, command: type = Job) -> tuple[dict[str, Any], list[str]]:
    """Reads a job file of `run`, or of another command that takes one.

    Returns:
      Settings by flag name, and the other keys as `--key=value` (Beam may know them).

    Raises:
      SettingsError: no such file, not TOML, or a value of the wrong type.
    """
    try:
        table = tomllib.loads(_read(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: expected TOML: {error}") from None
    values: dict[str, Any] = {}
    others = []
    for key, value in table.items():
        name = key.replace("_", "-")
        if name in values:
            raise SettingsError(f"--config {path}: {name} is given twice")
        if name in all_flags(command):
            values[name] = _checked(all_flags(command)[name], value, path)
        elif name == "runner" and isinstance(value, str):
            values[name] = value
        else:
            others += _as_flags(key, value, path)
    return values, others


def _read(path: str) -> bytes:
    try:
        if "://" not in path:
            return Path(path).read_bytes()
        from pipeline import storage  # Beam takes seconds to import: only where it is needed

        return storage.read(path)
    except Exception as error:  # each store has its own
        why = getattr(error, "strerror", None) or error
        raise SettingsError(f"--config {path}: cannot be read: {why}") from None


def make_job(values: Mapping[str, Any]) -> Job:
    """The job with these settings (by flag name) and the defaults of all others.

    Raises:
      SettingsError: a setting that has no default is missing, or a value cannot work.
    """
    return Job(**_sections(Job, values))


def make_submission(values: Mapping[str, Any]) -> Submission:
    """As `make_job`, a job for Dataflow."""
    return Submission(**_sections(Submission, values))


def make_checkup(values: Mapping[str, Any]) -> Checkup:
    """As `make_job`, what the doctor is to look at."""
    return Checkup(**_sections(Checkup, values))


def _sections(command: type, values: Mapping[str, Any]) -> dict[str, Any]:
    kinds = get_type_hints(command)
    sections: dict[str, dict[str, Any]] = {section: {} for section in kinds}
    missing = []
    for name, flag in all_flags(command).items():
        if name in values:
            value = values[name]
            sections[flag.section][flag.field] = tuple(value) if flag.repeats else value
        elif flag.required:
            missing.append(f"--{name}")
    if missing:
        raise SettingsError(f"needed and not given: {', '.join(missing)}")
    return {name: kind(**sections[name]) for name, kind in kinds.items()}


def _converter(kind: type) -> Any:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {EXPECTED[kind]}, got {text!r}") from None

    return convert


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "{" + ",".join(flag.choices) + "}"
    return {int: "N", float: "X"}.get(flag.kind) or flag.name.rsplit("-", 1)[-1].upper()


def _default(flag: Flag) -> str:
    if flag.required:
        return " (required)"
    if flag.default is None or flag.default == () or flag.default is False:
        return ""
    if flag.default is True:
        return " (default: on)"
    return f" (default: {flag.default})"


def _checked(flag: Flag, value: Any, path: str) -> Any:
    if flag.repeats:
        several = value if isinstance(value, list) else [value]
        return [_checked_one(flag, item, path) for item in several]
    return _checked_one(flag, value, path)


def _checked_one(flag: Flag, value: Any, path: str) -> Any:
    if flag.kind is str and type(value) is datetime.date:
        return value.isoformat()  # TOML writes a day without quotes
    if flag.kind is float and type(value) is int:
        return float(value)
    if type(value) is not flag.kind:
        raise SettingsError(
            f"--config {path}: {flag.name}: expected {EXPECTED[flag.kind]}, got {value!r}"
        )
    return value


def _as_flags(key: str, value: Any, path: str) -> list[str]:
    flag = "--" + key.replace("-", "_")  # Beam's own spelling
    if value is True:
        return [flag]
    several = value if isinstance(value, list) else [value]
    if not all(type(item) in (str, int, float) for item in several):
        raise SettingsError(
            f"--config {path}: {key}: expected one of this command's flags, or one of Beam's with text, "
            f"a number, true, or a list of them, got {value!r}"
        )
    return [f"{flag}={item}" for item in several]
