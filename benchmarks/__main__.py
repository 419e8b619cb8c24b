"""`python -m benchmarks`: measure, print the tables, and write the reports."""

import sys
from collections.abc import Sequence

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.options import BenchOptions
from benchmarks.progress import Screen
from benchmarks.report import Report, make_folder
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
    # Do not wrap lines in a file or pipe.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    try:
        with Screen(console, options.rounds) as screen:
            for report in run(options, screen):
                with screen.paused():
                    _print(console, report)
    except CrossshardError as error:
        return _say(error, FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    console.print(f"Tables, plots and raw times are in {options.out}.", soft_wrap=True)
    return DONE


def _say(error: CrossshardError, code: int) -> int:
    print("benchmarks: " + " ".join(str(error).split()), file=sys.stderr)
    return code


def _print(console: Console, report: Report) -> None:
    for shown in report.tables():
        table = Table(
            title=shown.title, title_justify="left", title_style="bold", header_style="cyan"
        )
        for head, left in zip(shown.columns, shown.left(), strict=True):
            table.add_column(head, justify="left" if left else "right")
        for row in shown.rows:
            table.add_row(*row)
        console.print()
        console.print(table)
    console.print()


if __name__ == "__main__":
    sys.exit(main())
