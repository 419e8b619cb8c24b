"""Runs the benchmarks one after the other and writes their reports."""

from collections.abc import Iterator

import jax

import crossshard
from benchmarks import (
    accumulation,
    dealt,
    ema,
    imports,
    overhead,
    parts,
    processes,
    same_bits,
    step,
    update,
)
from benchmarks.machine import this_machine
from benchmarks.options import BenchOptions
from benchmarks.progress import Screen
from benchmarks.report import Report, write

_MEASURE = {
    "update": update.measure,
    "step": step.measure,
    "processes": processes.measure,
    "accumulation": accumulation.measure,
    "same_bits": same_bits.measure,
    "ema": ema.measure,
    "parts": parts.measure,
    "dealt": dealt.measure,
    "overhead": overhead.measure,
    "import": imports.measure,
}


def run(options: BenchOptions, screen: Screen) -> Iterator[Report]:
    """Run the benchmarks; yield each report once it is written.

    Raises:
      CrossshardError: an option cannot be satisfied, or a report cannot be written.
    """
    # The peers run on the CPU, so all other candidates do too.
    jax.config.update("jax_platforms", "cpu")
    shards = [number for bench in options.benches for number in options.shards_for(bench)]
    crossshard.cpu_devices(max(shards, default=1))
    for bench in dict.fromkeys(options.benches):
        screen.notes.clear()
        machine = this_machine()
        results = list(_MEASURE[bench](options, screen, machine.versions))
        report = Report(bench, machine, options.rounds, options.quick, [*screen.notes], results)
        write(report, options.out)
        yield report
