"""Runs the benchmarks one after the other and writes their reports."""

from collections.abc import Iterator

import jax

import crossshard
from benchmarks import accumulation, ema, imports, overhead, processes, step, update
from benchmarks.machine import this_machine
from benchmarks.options import Bench, BenchOptions
from benchmarks.progress import Screen
from benchmarks.report import Report, write
from benchmarks.result import Result


def run(options: BenchOptions, screen: Screen) -> Iterator[Report]:
    """Run the benchmarks; yield each report once it is written.

    Raises:
      CrossshardError: an option cannot be satisfied, or a report cannot be written.
    """
    # The peers run on the CPU, so all other candidates do too.
    jax.config.update("jax_platforms", "cpu")
    shards = [n for bench in options.benches for n in options.shards_for(bench)]
    crossshard.cpu_devices(max(shards, default=1))
    for bench in dict.fromkeys(options.benches):
        screen.notes.clear()
        machine = this_machine()
        results = list(_results(bench, options, screen, machine.versions))
        report = Report(bench, machine, options.rounds, options.quick, [*screen.notes], results)
        write(report, options.out)
        yield report


def _results(
    bench: Bench, options: BenchOptions, screen: Screen, versions: dict[str, str]
) -> Iterator[Result]:
    if bench == "update":
        return update.measure(options, screen, versions)
    if bench == "processes":
        return processes.measure(options, screen, versions)
    benches = {
        "step": step,
        "accumulation": accumulation,
        "ema": ema,
        "overhead": overhead,
        "import": imports,
    }
    return benches[bench].measure(options, screen)
