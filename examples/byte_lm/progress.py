"""Progress on the screen: a live bar in a terminal, plain lines anywhere else."""

import math
import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.status import Status

from examples.byte_lm.loop import Step

# Of a run, where there is no terminal to keep a line up to date in.
LINES = 20


class Screen(Protocol):
    """Where a run is shown."""

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

    def show(self, step: Step) -> None:
        """Show a step."""
        ...

    def tell(self, what: str) -> None:
        """Say what is being done when it is not a step."""
        ...


def make_screen(console: Console, steps: int, tokens: int) -> Screen:
    """A bar if the console is a terminal that can move its cursor, else lines.

    Args:
      console: where to print.
      steps: how many there will be.
      tokens: of one step.
    """
    live = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
    return Bar(console, steps, tokens) if live else Lines(console, steps, tokens)


class Pace:
    """Tokens a second of late, and the time left."""

    def __init__(self, steps: int, tokens: int) -> None:
        self._steps = steps
        self._tokens = tokens
        self._recent: float | None = None
        self._first: float | None = None

    def __call__(self, step: Step) -> tuple[str, str]:
        """Both in words; empty after the first step, most of which was compiling."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now
            return "", ""
        before = self._recent or step.seconds
        self._recent = 0.9 * before + 0.1 * step.seconds
        # From the clock, so that looks at held-out text, too, are counted on.
        left = (now - self._first) / (step.number - 1) * (self._steps - step.number)
        return f"{_short(self._tokens / self._recent)} tokens/s", f"{_clock(left)} left"


class Lines:
    """A line now and then."""

    def __init__(self, console: Console, steps: int, tokens: int) -> None:
        self._console = console
        self._steps = steps
        self._every = math.ceil(steps / LINES)
        self._pace = Pace(steps, tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def show(self, step: Step) -> None:
        """Print a line, if one is due."""
        speed, left = self._pace(step)
        due = step.number == 1 or step.number % self._every == 0 or step.number == self._steps
        if not due and step.held_out is None:
            return
        width = len(str(self._steps))
        parts = [f"step {step.number:{width}}/{self._steps}", _loss(step), speed, left]
        if step.held_out is not None:
            parts.append(f"held-out {_mean(step.held_out):.3f}")
        self._say("  ".join(part for part in parts if part))

    def tell(self, what: str) -> None:
        """Print it."""
        self._say(f"{what} …")

    def _say(self, line: str) -> None:
        self._console.out(line, highlight=False)
        # A pipe would keep lines back until there are many.
        self._console.file.flush()


class Bar:
    """A bar that fills, on one line, and a spinner before and after."""

    def __init__(self, console: Console, steps: int, tokens: int) -> None:
        self._console = console
        self._pace = Pace(steps, tokens)
        self._steps = steps
        self._status: Status | None = None
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None, style="grey37", complete_style="cyan"),
            TextColumn("[bold]{task.fields[loss]}"),
            TextColumn("[cyan]{task.fields[speed]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            # Often enough to look alive; it runs beside the training on the same few cores.
            refresh_per_second=5,
            expand=True,
        )
        self._task = self._bar.add_task("", total=steps, loss="", speed="", left="")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._stop_status()

    def show(self, step: Step) -> None:
        """Move the bar on."""
        if step.number == 1:
            self._stop_status()
            self._bar.start()
        speed, left = self._pace(step)
        self._bar.update(
            self._task, completed=step.number, loss=_loss(step), speed=speed, left=left
        )

    def tell(self, what: str) -> None:
        """Spin beside it until there is something else to show."""
        self._bar.stop()
        self._stop_status()
        self._status = self._console.status(f"{what} …")
        self._status.start()

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _loss(step: Step) -> str:
    return f"loss {step.loss:.3f}  {step.bits_per_byte:.3f} bits/byte"


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
