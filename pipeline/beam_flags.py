"""Flags that are not ours: Beam's own pass through to it, typing errors are refused.

Beam itself only logs what it does not know, so a misspelt flag would be lost. Importing it takes seconds, which
is why this module does so only where it has something to look up.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from pipeline.config import SettingsError
from pipeline.flags import nearest

LOCAL_RUNNERS = ("DirectRunner", "FnApiRunner")

# So like one of our flags that it is taken for a typing error without asking Beam. No flag of Beam's is.
TYPING_ERROR = 0.8

NEVER = {
    "streaming": "a run reads a fixed set of documents",
    "enable_streaming_engine": "a run reads a fixed set of documents",
    "update": "only a streaming job can be updated; run the job again instead",
    "transform_name_mapping": "only a streaming job can be updated; run the job again instead",
    "create_from_snapshot": "only a streaming job has snapshots; run the job again instead",
    "dry_run": "it is for Beam's own tests, and the job would run all the same",
    "direct_runner_bundle_repeat": "it would write every document several times",
    "save_main_session": "nothing of a job lives in the main module",
}


def refuse_typing_errors(unknown: Sequence[str], ours: Collection[str], source: str = "") -> None:
    """Refuses what can be refused without Beam.

    Arguments:
      unknown: what is left of the command line (or of a job file) when our flags are taken out.
      ours: names of our flags, without the dashes in front.
      source: where they come from, for messages.

    Raises:
      SettingsError: a flag that is nearly one of ours, or one that makes no sense here.
    """
    if unknown and not unknown[0].startswith("-"):
        raise SettingsError(
            f"unexpected argument {unknown[0]!r}: everything is given by flags, documents as --input PATTERN"
        )
    for text in unknown:
        if re.match("-[A-Za-z]", text):
            raise SettingsError(f"unknown flag {text}: flags begin with two dashes")
    for name in _names(unknown):
        if name.replace("-", "_") in NEVER and name.replace("_", "-") not in ours:
            raise SettingsError(
                f"{source}--{name} makes no sense here: {NEVER[name.replace('-', '_')]}"
            )
        meant = nearest(name, ours, TYPING_ERROR)
        if meant is not None:
            raise SettingsError(f"{source}unknown flag --{name}; did you mean --{meant}?")


def refuse_unknown(unknown: Sequence[str], ours: Collection[str], source: str = "") -> None:
    """Refuses every flag that is not Beam's either (arguments as above), and values that Beam cannot take."""
    if not unknown:
        return
    from apache_beam.options.pipeline_options import PipelineOptions

    parser: Any = _BeamParser(prog="lengthwise run", allow_abbrev=False, add_help=False)
    for options in PipelineOptions.__subclasses__():
        options._add_argparse_args(parser)
    _, left = parser.parse_known_args(unknown)
    if not left:
        return
    for name in _names(left):
        meant = nearest(name, {*ours, *parser.names})
        hint = f"; did you mean --{meant}?" if meant else ""
        raise SettingsError(f"{source}unknown flag --{name}{hint}")
    raise SettingsError(f"unexpected argument {left[0]!r}: everything is given by flags")


def refuse_unknown_runner(runner: str) -> None:
    """Refuses a runner that Beam does not have, and one that loses data."""
    if runner in LOCAL_RUNNERS:
        return
    if "dask" in runner.lower():
        raise SettingsError(f"--runner {runner}: Beam's Dask runner loses documents without a word")
    from apache_beam.options.pipeline_options import StandardOptions

    known = StandardOptions.KNOWN_RUNNER_NAMES
    if runner not in known and "." not in runner:
        meant = nearest(runner, known)
        hint = f"did you mean {meant}?" if meant else f"Beam has {', '.join(known)}"
        raise SettingsError(f"--runner {runner}: Beam has no runner of that name; {hint}")


def _names(arguments: Sequence[str]) -> list[str]:
    return [text[2:].split("=", 1)[0] for text in arguments if text.startswith("--")]


class _BeamParser(argparse.ArgumentParser):
    """What Beam's option classes expect to be given, remembering their flags."""

    def __init__(self, **settings: Any) -> None:
        self.names: set[str] = set()
        super().__init__(**settings)

    def add_argument(self, *names: str, **settings: Any) -> argparse.Action:
        self.names.update(name.removeprefix("--") for name in names)
        return super().add_argument(*names, **settings)

    def add_value_provider_argument(self, *names: str, **settings: Any) -> None:
        self.add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)
