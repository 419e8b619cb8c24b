"""What it costs to watch for faults, by copies and by quarantine: `python -m benchmarks.faults`.

A comparison of copies comes once in many steps, so its cost is measured where every step has one,
and the cost of the other steps where none has.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, Literal

import crossshard
from benchmarks import age, markdown
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import JaxCandidate, ours
from benchmarks.machine import this_machine
from benchmarks.models import transformer
from benchmarks.problem import Problem
from benchmarks.tables import three_digits
from benchmarks.timing import Timing

# As the page says.
EVERY = 100
WITHOUT, NEVER, ALWAYS = "without", "not compared", "compared at every step"
QUARANTINE, TOGETHER = "quarantine", "quarantine, not compared"
# The first step is compared, which the warm-up takes.
_NEVER, _ALWAYS = {"check_divergence": 2**30}, {"check_divergence": 1}
_QUARANTINE = {"nonfinite": "quarantine"}
_CASES: dict[str, dict[str, Any]] = {
    WITHOUT: {},
    NEVER: _NEVER,
    ALWAYS: _ALWAYS,
    QUARANTINE: _QUARANTINE,
    TOGETHER: _QUARANTINE | _NEVER,
}
Update = Literal["replicated", "sharded"]
_KINDS: tuple[tuple[Update, str], ...] = (
    ("replicated", "raise"),
    ("replicated", "repair"),
    ("sharded", "raise"),
)
_HEADS = (
    "shards",
    "weight update",
    "on_divergence",
    "ms per step, without",
    "other steps cost, ms",
    "quartiles",
    "a comparison costs, ms",
    "quartiles",
    f"every {EVERY} steps, % of a step",
    "quarantine costs, ms",
    "quartiles",
    "% of a step",
    "together, % of a step",
)


def main() -> None:
    """Measure the demo's transformer, and print or write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 8], help="numbers of shards")
    parser.add_argument("--rounds", type=int, default=25, help="turns of each candidate")
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--out", type=Path, help="write a page, such as docs/benchmarks/x.md")
    options = parser.parse_args()
    crossshard.cpu_devices(max(options.shards))
    machine, rows = this_machine(), []
    for shards in options.shards:
        problem = transformer(shards, **({"layers": 1, "width": 32} if options.quick else {}))
        for update, action in _KINDS:
            told = f"\r{shards} shards, {update}, {action}: "
            show = lambda number, told=told: print(
                f"{told}round {number} of {options.rounds}  ", end="", file=sys.stderr
            )
            timing, _ = interleave(
                make_candidates(problem, shards, update, action), options.rounds, show
            )
            rows.append([f"{shards}", update, action, *cells(timing)])
    print(file=sys.stderr)
    table = markdown.table(_HEADS, rows, names=(1, 2))
    print(table)
    if options.out is not None:
        shards = " ".join(map(str, options.shards))
        repeat = f"python -m benchmarks.faults --shards {shards} --rounds {options.rounds}"
        last = markdown.measured_on(machine, repeat)
        age.write(options.out, markdown.again("faults", [table], last))


def make_candidates(
    problem: Problem, shards: int, update: Update, action: str
) -> list[JaxCandidate]:
    """The five steps, of one weight update and one action."""
    candidates = []
    for name, options in _CASES.items():
        repairs = {"on_divergence": action} if "check_divergence" in options else {}
        candidate = ours(problem, shards, update, **options, **repairs)
        candidate.name = name
        candidate.clock = time.process_time
        candidates.append(candidate)
    return candidates


def cells(timing: Timing) -> list[str]:
    """The cells of a row."""
    step = timing.spread(WITHOUT).times(1000)
    others = timing.difference(NEVER, WITHOUT).times(1000)
    comparison = timing.difference(ALWAYS, NEVER).times(1000)
    quarantine = timing.difference(QUARANTINE, WITHOUT).times(1000)
    together = timing.difference(TOGETHER, WITHOUT).times(1000)
    of_step = lambda cost: f"{100 * cost / step.median:.2f}"
    return [
        three_digits(step.median),
        three_digits(others.median),
        f"{three_digits(others.low)} to {three_digits(others.high)}",
        three_digits(comparison.median),
        f"{three_digits(comparison.low)} to {three_digits(comparison.high)}",
        of_step(others.median + comparison.median / EVERY),
        three_digits(quarantine.median),
        f"{three_digits(quarantine.low)} to {three_digits(quarantine.high)}",
        of_step(quarantine.median),
        of_step(together.median + comparison.median / EVERY),
    ]


if __name__ == "__main__":
    main()
