"""The screen: a live bar in a terminal, plain lines anywhere else."""

import contextlib
import math
import textwrap
from collections.abc import Iterable, Iterator
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from examples.byte_lm.record import Step, metrics_of
from examples.byte_lm.stopping import Stopping, discard

# Lines per run, without a terminal to update a line in.
LINES = 20

_TIME_LEFT = TimeRemainingColumn(compact=True)


class Screen:
    """A progress bar, and plain lines; lines alone if it is not a terminal.

    Args:
      stopping: told when standard output cannot be written to; then nothing more is printed.
      steps: the number of steps.
      tokens: the tokens of one step.
      silent: print nothing, since another process does.
    """

    def __init__(
        self, stopping: Stopping, steps: int, tokens: int, *, silent: bool = False
    ) -> None:
        self._stopping = stopping
        self._steps = steps
        self._tokens = tokens
        self._console = _Console(highlight=False, markup=False, emoji=False, quiet=silent)
        console = self._console
        self._live = console.file.isatty() and console.is_terminal and not console.is_dumb_terminal
        if not console.file.isatty():
            # Do not wrap lines in a file or pipe.
            console.width = 1000
        self._bar = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=None, style="grey37", complete_style="cyan"),
            TextColumn("[bold]{task.fields[loss]}"),
            TextColumn("[cyan]{task.fields[speed]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            # Seldom, since it shares the cores with the training.
            refresh_per_second=5,
            # Seconds, so many that some steps are in them.
            speed_estimate_period=300,
            expand=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("", total=steps, loss="", speed="", left="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def show(self, step: Step) -> None:
        """Show a step."""
        if not self._bar.live.is_started:
            with self._writing():
                self._bar.start()
        self._bar.update(self._task, completed=step["step"])
        speed, left = self._pace()
        self._bar.update(self._task, loss=_loss(step), speed=speed, left=left)
        for line in step.get("faults", ()):
            self.say(f"step {step['step']}: {line}")
        if not self._live:
            self._print_step(step, speed, left)

    def tell(self, what: str) -> None:
        """Show work other than a step."""
        self._stop()
        self.say(f"{what} …")

    def say(self, line: str | Text) -> None:
        """Print a line."""
        with self._writing():
            self._console.print(line, soft_wrap=True)

    def rows(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print labels, and a text beside each."""
        rows = list(rows)
        indent = max(len(label) for label, _ in rows) + 4
        self.say("")
        for label, value in rows:
            # Beside the labels, not below them.
            width = self._console.width - indent
            first, *more = textwrap.wrap(value, width, break_long_words=False)
            self.say(Text.assemble((f"  {label}".ljust(indent), "cyan"), first))
            for line in more:
                self.say(" " * indent + line)
        self.say("")

    def _pace(self) -> tuple[str, str]:
        """Tokens per second and the time left; empty after the first step."""
        task = self._bar.tasks[self._task]
        if task.speed is None:
            return "", ""
        return f"{task.speed * self._tokens:,.0f} tokens/s", f"{_TIME_LEFT.render(task)} left"

    def _print_step(self, step: Step, speed: str, left: str) -> None:
        number, every = step["step"], math.ceil(self._steps / LINES)
        look, look_ema = (step.get(f"held_out_bits_per_byte{ema}") for ema in ("", "_ema"))
        if not (number in (1, self._steps) or number % every == 0 or look):
            return
        width = len(str(self._steps))
        parts = [f"step {number:{width}}/{self._steps}", _loss(step), speed, left]
        parts += [f"held-out {look:.3f}"] if look else []
        parts += [f"averaged {look_ema:.3f}"] if look_ema else []
        self.say("  ".join(part for part in parts if part))

    def _stop(self) -> None:
        with self._writing():
            self._bar.stop()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._stopping.writing("standard output"):
            try:
                yield
            except OSError:
                self._console.quiet = True
                discard(1)
                raise


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Unlike Rich, which ends the process, let the run write its files."""
        raise


def _loss(step: Step) -> str:
    metrics = [f"{name} {each:.4g}" for name, each in metrics_of(step).items()]
    loss, bits = step["loss"], step["bits_per_byte"]
    return "  ".join([f"loss {loss:.3f}", f"{bits:.3f} bits/byte", *metrics])
