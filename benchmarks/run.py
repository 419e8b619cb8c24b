"""A whole run of `crossshard bench`: devices, the benches one after the other, what they leave."""

from collections.abc import Iterator

import jax

from benchmarks import imports, overhead, step, update
from benchmarks.machine import this_machine
from benchmarks.options import Bench, BenchOptions
from benchmarks.report import Report, make_folder, write
from benchmarks.result import Result, Screen
from crossshard.shards.devices import cpu_devices


class _Notes:
    """A screen that also keeps what is noted."""

    def __init__(self, screen: Screen) -> None:
        self.tell = screen.tell
        self.round = screen.round
        self._screen = screen
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        """Show it once, however often it is said."""
        if line not in self.lines:
            self.lines.append(line)
            self._screen.note(line)


def run(options: BenchOptions, screen: Screen) -> Iterator[Report]:
    """Run the benches; each report is written when it is handed out.

    Raises:
      CrossshardError: something that was asked for cannot be done.
    """
    options.check()
    make_folder(options.out)
    # The peers run on the CPU, and so do all others beside them.
    jax.config.update("jax_platforms", "cpu")
    shards = [n for bench in options.benches for n in options.shards_for(bench)]
    cpu_devices(max(shards, default=1))
    for bench in dict.fromkeys(options.benches):
        notes, machine = _Notes(screen), this_machine()
        results = list(_results(bench, options, notes, machine.versions))
        report = Report(bench, machine, options.rounds, options.quick, notes.lines, results)
        write(report, options.out)
        yield report


def _results(
    bench: Bench, options: BenchOptions, screen: Screen, versions: dict[str, str]
) -> Iterator[Result]:
    if bench == "update":
        return update.measure(options, screen, versions)
    return {"step": step, "overhead": overhead, "import": imports}[bench].measure(options, screen)
