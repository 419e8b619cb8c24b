"""The `crossshard` command: dispatch and exit codes."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import crossshard
from crossshard.errors import ArgumentError, CrossshardError
from crossshard.tools.cli import (
    doctor_command,
    inspect_command,
    launch_command,
    plan_command,
    verify_command,
)
from crossshard.tools.cli.command import INTERRUPTED, NOT_READ, REFUSED

_DESCRIPTION = "Wrap any Optax optimizer, and every shard steps correctly."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
      arguments: the arguments after ``crossshard``; those of this process if ``None``.
    """
    if sys.stdout is None:
        return _refuse("There is no stdout to write to; leave it open.")
    for stream in (sys.stdout, sys.stderr):
        # Replace characters that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
    except CrossshardError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return NOT_READ
    except OSError as error:
        _drop_output()
        return _refuse(f"The report cannot be written: {error.strerror or error}.")
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message}. See {self.prog} --help.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="crossshard", description=_DESCRIPTION, allow_abbrev=False)
    version = f"crossshard {crossshard.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (doctor_command, inspect_command, launch_command, plan_command, verify_command):
        command.add_to(commands)
    return parser


def _refuse(why: str) -> int:
    print("crossshard: " + " ".join(why.split()), file=sys.stderr)
    return REFUSED


def _drop_output() -> None:
    # Otherwise Python flushes the rest at exit, and reports the error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
