"""Progress of a benchmark on the screen: a live bar in a terminal, plain lines anywhere else."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn


class Screen:
    """A line with the current measurement and its finished rounds; notes stay above it.

    Args:
      console: the console to print to.
      rounds: the rounds of each comparison.

    Attributes:
      notes: the notes since the last clear.
    """

    def __init__(self, console: Console, rounds: int) -> None:
        self.notes: list[str] = []
        self._console = console
        self._live = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(style="grey37", complete_style="cyan"),
            MofNCompleteColumn(),
            console=console,
            # Seldom, since it shares the cores with the measurement.
            refresh_per_second=2,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=rounds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Show nothing while entered, to make room for a table."""
        self._bar.stop()
        yield
        self._bar.start()

    def __enter__(self) -> "Screen":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def tell(self, what: str) -> None:
        """Show the current work and restart the count of rounds."""
        self._bar.update(self._task, description=what, completed=0)
        if not self._live:
            self._console.print(f"{what} …", markup=False, soft_wrap=True)

    def round(self, number: int) -> None:
        """Show that a round is finished."""
        self._bar.update(self._task, completed=number)

    def note(self, line: str) -> None:
        """Print a line once, and keep it for the report."""
        if line not in self.notes:
            self.notes.append(line)
            self._console.print(line, markup=False, soft_wrap=True)
