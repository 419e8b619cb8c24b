"""`python -m benchmarks`: measure, print the tables, and write the reports."""

import sys
from collections.abc import Sequence

import tyro

from benchmarks.options import BenchOptions
from benchmarks.progress import Screen
from benchmarks.report import make_folder
from benchmarks.run import run
from crossshard.errors import CrossshardError

# The exit codes. The last is 128 and the number of SIGINT, as shells count.
DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and return the exit code.

    0 if all was measured and written, 1 if not, 2 if the options are refused, 130 if the user
    stopped it.

    Args:
      arguments: the words after ``python -m benchmarks``; those of this process if ``None``.
    """
    options = tyro.cli(BenchOptions, prog="python -m benchmarks", args=arguments)
    try:
        options.check()
        make_folder(options.out)
    except CrossshardError as error:
        return _say(error, REFUSED)
    try:
        for report in run(options, Screen(options.rounds)):
            print(report.tables())
    except CrossshardError as error:
        return _say(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"\nTables and raw times are in {options.out}.")
    return DONE


def _say(error: CrossshardError, code: int) -> int:
    print("benchmarks: " + " ".join(str(error).split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
