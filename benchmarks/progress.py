"""Progress of a bench on the screen: a live bar in a terminal, plain lines anywhere else."""

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from benchmarks.result import Screen


class BenchScreen(Screen, Protocol):
    """Where a bench is shown, and which makes room for its tables."""

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the screen as it should stay."""
        ...

    def pause(self) -> None:
        """Show nothing until there is something to tell again."""
        ...


def make_bench_screen(console: Console, rounds: int) -> BenchScreen:
    """A bar if the console is a terminal that can move its cursor, else lines.

    Args:
      console: where to print.
      rounds: how many each comparison has.
    """
    live = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    return _Bar(console, rounds) if live else _Lines(console)


class _Lines:
    """A line for whatever is told."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def tell(self, what: str) -> None:
        self.note(f"{what} …")

    def round(self, number: int) -> None:
        pass

    def note(self, line: str) -> None:
        self._console.out(line, highlight=False)
        # A pipe would keep lines back until there are many.
        self._console.file.flush()

    def pause(self) -> None:
        pass


class _Bar:
    """One line: what is measured, and how many of its rounds are over."""

    def __init__(self, console: Console, rounds: int) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(style="grey37", complete_style="cyan"),
            MofNCompleteColumn(),
            console=console,
            # Seldom, since it runs beside what is measured on the same few cores.
            refresh_per_second=2,
            transient=True,
        )
        self._task = self._bar.add_task("", total=rounds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def tell(self, what: str) -> None:
        self._bar.start()
        self._bar.update(self._task, description=what, completed=0)

    def round(self, number: int) -> None:
        self._bar.update(self._task, completed=number)

    def note(self, line: str) -> None:
        self._console.print(line, soft_wrap=True)

    def pause(self) -> None:
        self._bar.stop()
