"""`crossshard bench`: run the benches, and say how they went."""

import sys

from rich.console import Console
from rich.table import Table

from benchmarks.options import BenchOptions
from benchmarks.report import Report
from benchmarks.run import run
from benchmarks.progress import make_bench_screen
from examples.byte_lm.exit_codes import DONE


def bench_command(options: BenchOptions) -> int:
    """Run the benches as the options say; the exit code.

    Raises:
      CrossshardError: what they ask for cannot be done, or the output cannot be written.
    """
    # A file or pipe has no width that lines would have to be broken for.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    with make_bench_screen(console, options.rounds) as screen:
        for report in run(options, screen):
            screen.pause()
            _print(console, report)
    console.print(f"Tables, plots and raw times are in {options.out}.", soft_wrap=True)
    return DONE


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
