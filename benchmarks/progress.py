"""Progress of a benchmark on the screen: a live bar in a terminal, plain lines anywhere else."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn


class Screen:
    """One line: what is measured, and how many of its rounds are over; notes stay above it.

    Args:
      console: where to print.
      rounds: how many each comparison has.

    Attributes:
      notes: what was noted since they were last cleared.
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
            # Seldom, since it runs beside what is measured on the same few cores.
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
        """Say what is being done while there is no round to count."""
        self._bar.update(self._task, description=what, completed=0)
        if not self._live:
            self._console.print(f"{what} …", markup=False, soft_wrap=True)

    def round(self, number: int) -> None:
        """A round is over."""
        self._bar.update(self._task, completed=number)

    def note(self, line: str) -> None:
        """Say something once that stays, and that belongs to what is written, too."""
        if line not in self.notes:
            self.notes.append(line)
            self._console.print(line, markup=False, soft_wrap=True)
