"""The command line, `crossshard`: which command to run, and which exit code it ends with."""

import io
import os
import sys
from collections.abc import Sequence

import crossshard
from crossshard.cli.exits import DONE, FAILED, INTERRUPTED, REFUSED
from crossshard.errors import CrossshardError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code.

    0 if it did what was asked, 1 if it ran and failed, 2 with one line on stderr if what was asked
    cannot be done, 130 if the user stopped it.

    Args:
      arguments: the words after ``crossshard``; those of this process if ``None``.
    """
    for stream in (sys.stdout, sys.stderr):
        # Better a question mark than no sentence, where an old encoding lacks an arrow.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words == ["--version"]:
        print(f"crossshard {crossshard.__version__}")
        return DONE
    try:
        # Not at the top, since what they need is an extra that may not be there.
        from crossshard.bench.options import BenchOptions
        from crossshard.cli.arguments import parse
        from crossshard.cli.bench import bench_command
        from crossshard.cli.train import train_command
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "crossshard":
            raise
        return _refuse(
            f"{error.name} is not installed: the command line needs crossshard[train]. Run: "
            f'{sys.executable} -m pip install "crossshard[train]"'
        )
    try:
        options = parse(words)
        if isinstance(options, BenchOptions):
            return bench_command(options)
        return train_command(options)
    except CrossshardError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _refuse(why: str) -> int:
    print("crossshard: " + " ".join(why.split()), file=sys.stderr)
    return REFUSED
