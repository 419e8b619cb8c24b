"""Progress on the screen: a live bar in a terminal, plain lines anywhere else."""

import math
from statistics import mean

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status

from examples.byte_lm.loop import Step

# Lines per run, without a terminal to update a line in.
LINES = 20

_TIME_LEFT = TimeRemainingColumn(compact=True)


class Screen:
    """A progress bar, with a spinner before and after; plain lines if it is not a terminal.

    Args:
      console: the console to print to.
      steps: the number of steps.
      tokens: the tokens of one step.
    """

    def __init__(self, console: Console, steps: int, tokens: int) -> None:
        self._console = console
        self._steps = steps
        self._tokens = tokens
        self._live = console.file.isatty() and console.is_terminal and not console.is_dumb_terminal
        self._status: Status | None = None
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

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
        self._stop_status()

    def show(self, step: Step) -> None:
        """Show a step."""
        if step.number == 1:
            self._stop_status()
            self._bar.start()
        self._bar.update(self._task, completed=step.number)
        speed, left = self._pace()
        self._bar.update(self._task, loss=_loss(step), speed=speed, left=left)
        for line in step.faults:
            self._say(f"step {step.number}: {line}")
        if not self._live:
            self._print(step, speed, left)

    def tell(self, what: str) -> None:
        """Show work other than a step."""
        self._bar.stop()
        self._stop_status()
        if self._live:
            self._status = self._console.status(f"{what} …")
            self._status.start()
        else:
            self._say(f"{what} …")

    def _pace(self) -> tuple[str, str]:
        """Tokens per second and the time left; empty after the first step."""
        task = self._bar.tasks[self._task]
        if task.speed is None:
            return "", ""
        return f"{task.speed * self._tokens:,.0f} tokens/s", f"{_TIME_LEFT.render(task)} left"

    def _print(self, step: Step, speed: str, left: str) -> None:
        every = math.ceil(self._steps / LINES)
        due = step.number in (1, self._steps) or step.number % every == 0
        if not due and step.held_out is None:
            return
        width = len(str(self._steps))
        parts = [f"step {step.number:{width}}/{self._steps}", _loss(step), speed, left]
        if step.held_out is not None:
            parts.append(f"held-out {mean(step.held_out):.3f}")
        if step.held_out_ema is not None:
            parts.append(f"averaged {mean(step.held_out_ema):.3f}")
        self._say("  ".join(part for part in parts if part))

    def _say(self, line: str) -> None:
        self._console.out(line, highlight=False)
        # Flush, since a pipe buffers lines.
        self._console.file.flush()

    def _stop_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def _loss(step: Step) -> str:
    metrics = [f"{name} {mean(each):.4g}" for name, each in step.metrics.items()]
    return "  ".join([f"loss {step.loss:.3f}", f"{step.bits_per_byte:.3f} bits/byte", *metrics])
