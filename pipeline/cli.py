"""The command line: arguments → settings → one command.

`--help` and wrong usage must answer at once, so nothing slow is imported before the job's settings are right.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pipeline.beam_flags import refuse_typing_errors, refuse_unknown, refuse_unknown_runner
from pipeline.config import Checkup, Job, SettingsError, Submission
from pipeline.flags import (
    Flag,
    add_flags,
    all_flags,
    make_checkup,
    make_job,
    make_submission,
    nearest,
    read_config,
    refuse_all,
)
from pipeline.packages import check_packages
from pipeline.quieting import quiet

COMMANDS = {
    "run": "run a job: documents in, embeddings out, in Parquet",
    "submit": "run a job on Dataflow",
    "doctor": "say what is installed, what it can run, and what a model would take on a TPU",
}

EXIT_STATUS = """\
exit status: 0 all good, 1 the run failed or too many documents failed, 2 wrong usage,
130 or 143 stopped by SIGINT or SIGTERM (the same command goes on from there)"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, where argparse would print its usage first."""

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    _open_standard_streams()
    try:
        return _command(list(sys.argv[1:] if argv is None else argv))
    except SettingsError as error:
        print(f"lengthwise: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # of the launch: what a worker raises is explained by the run
        print(f"lengthwise: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not _is_of_storage(error):
            raise
        print(f"lengthwise: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the run began: there is nothing to stop or to resume
        return 130


def _open_standard_streams() -> None:
    """Puts /dev/null where we were started without a stream: the next file that is opened would take its number, and
    what native code writes there would end up in it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null == number:
            os.set_inheritable(null, True)  # for workers
        setattr(sys, name, open(null, mode, encoding="utf-8"))  # noqa: SIM115


def _is_of_storage(error: Exception) -> bool:
    """Whether a storage service has refused something, a bucket that is not there say. Its errors are no OSErrors, and
    their classes slow to import."""
    names = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
    return not names.isdisjoint(
        (
            "google.GoogleAPIError",
            "google.GoogleAuthError",
            "google.InvalidResponse",
            "apache_beam.BeamIOError",
        )
    )


def _command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _top_parser().print_help()
        return 0 if argv else 2
    if argv[0] == "--version":
        from importlib import metadata

        print(f"lengthwise {metadata.version('lengthwise')}")
        return 0
    if argv[0] not in COMMANDS:
        meant = nearest(argv[0], COMMANDS)
        hint = f"did you mean {meant}?" if meant else "see lengthwise --help"
        raise SettingsError(f"expected a command ({', '.join(COMMANDS)}), got {argv[0]!r}; {hint}")
    return {"run": _run, "submit": _submit, "doctor": _doctor}[argv[0]](argv[1:])


def _run(argv: list[str]) -> int:
    values, not_ours = _read_flags(_run_parser(), argv, Job)
    runner = values.pop("runner", "DirectRunner")
    job = make_job(values)
    others = _beams(not_ours, Job)
    refuse_unknown_runner(runner)

    _only_this_device(job.model.device)
    quiet()
    print("Starting …", file=sys.stderr, flush=True)  # the imports below take seconds
    from pipeline.running import run

    status = run(job, others, runner)
    # Or the interpreter's last collection walks through all that TensorFlow and JAX have made: 5 s instead of 0.6 s.
    gc.freeze()
    return status


def _submit(argv: list[str]) -> int:
    values, not_ours = _read_flags(_submit_parser(), argv, Submission)
    if "runner" in values:
        raise SettingsError("--config: runner: expected none here, since submit is for Dataflow")
    job = make_submission(values)
    others = _beams(not_ours, Submission)
    quiet()
    print("Starting …", file=sys.stderr, flush=True)
    from pipeline.submitting import submit

    return submit(job, others)


def _read_flags(
    parser: argparse.ArgumentParser, argv: list[str], command: type
) -> tuple[dict[str, Any], list[tuple[list[str], str]]]:
    """Settings by flag name, from the command line and the job file; and from each what is not ours, with its source."""
    namespace, unknown = parser.parse_known_args(argv)
    values = vars(namespace)
    config = values.pop("config", None)
    from_file, others = ({}, []) if config is None else read_config(config, command)
    not_ours = [(others, f"--config {config}: "), (unknown, "")]
    for arguments, source in not_ours:
        refuse_typing_errors(arguments, _ours(command), source)
    return {**from_file, **values}, not_ours


def _beams(not_ours: list[tuple[list[str], str]], command: type) -> list[str]:
    """What is Beam's of it, which is all; the later one wins."""
    check_packages()
    for arguments, source in not_ours:
        refuse_unknown(arguments, _ours(command), source)
    return [argument for arguments, _ in not_ours for argument in arguments]


def _ours(command: type) -> set[str]:
    flags = all_flags(command)
    more = {"config", "help"} | ({"runner"} if command is Job else set())
    return {*flags, *_negations(flags), *more}


def _doctor(argv: list[str]) -> int:
    parser = _Parser(
        prog="lengthwise doctor",
        usage="lengthwise doctor [flags]",
        description="Says what is installed, which devices and attention implementations work, and with --tpu whether "
        "a model fits a TPU and how fast it should be, without one.",
        epilog="exit status: 0 all good, 1 something does not work or does not fit, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, Checkup)
    namespace, unknown = parser.parse_known_args(argv)
    flags = all_flags(Checkup)
    refuse_all(unknown, {*flags, *_negations(flags), "help"})
    settings = make_checkup(vars(namespace)).checking
    check_packages()
    _only_this_device("cpu" if settings.tpu else settings.device)
    quiet()
    from pipeline.doctor import examine

    status = examine(settings)
    gc.freeze()  # as above
    return status


def _only_this_device(device: str) -> None:
    """Before JAX is imported, and for worker processes: JAX would take hold of every TPU and GPU that it finds, though
    only a CPU is asked for, and fail where another process has the TPU."""
    if device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"


def _negations(flags: Mapping[str, Flag]) -> list[str]:
    return [f"no-{name}" for name, flag in flags.items() if flag.kind is bool]


def _top_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lengthwise",
        usage="lengthwise COMMAND [flags]",
        description="Turns folders of documents into Parquet with a transformer encoder.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=f"{about} (lengthwise {name} --help)")
    return parser


def _run_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lengthwise run",
        usage="lengthwise run --input PATTERN ... --output FOLDER --model MODEL [flags]",
        description="Reads documents, computes an embedding for each, and publishes them in Parquet.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser)
    group = parser.add_argument_group(
        "running", "Where the pipeline runs, and where flags come from."
    )
    _add_config(group)
    group.add_argument(
        "--runner",
        metavar="NAME",
        default=argparse.SUPPRESS,
        help="Beam runner (default: DirectRunner, this machine); Beam's own flags are passed to it",
    )
    return parser


def _submit_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="lengthwise submit",
        usage="lengthwise submit --project PROJECT --region REGION --staging gs://… --image IMAGE [flags of run]",
        description="Launches a job of `lengthwise run` on Dataflow; Beam's own flags are passed to it.",
        epilog="exit status: 0 submitted, 1 Dataflow refused it, 2 wrong usage",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, Submission)
    _add_config(parser.add_argument_group("launching", "Where flags come from."))
    return parser


def _add_config(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file that holds any of these flags, without the dashes in front; flags override it",
    )
