"""What it costs to watch for faults, by copies and by quarantine: `python -m benchmarks.faults`.

A comparison of copies comes once in many steps, so its cost is measured where every step has one,
and the cost of the other steps where none has.
"""

import sys
import time
from pathlib import Path
from typing import Any, Literal

import crossshard
from benchmarks import markdown
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


def main(
    shards: tuple[int, ...] = (2, 8), rounds: int = 25, quick: bool = False, out: Path | None = None
) -> None:
    """What it costs to watch for faults, on the demo's transformer.

    Args:
      shards: numbers of shards.
      rounds: turns of each candidate.
      quick: a small model, to see that it runs.
      out: write a page, such as docs/benchmarks/x.md.
    """
    crossshard.cpu_devices(max(shards))
    machine, rows = this_machine(), []
    for number in shards:
        problem = transformer(number, **({"layers": 1, "width": 32} if quick else {}))
        for update, action in _KINDS:
            told = f"\r{number} shards, {update}, {action}: "
            show = lambda turn, told=told: print(
                f"{told}round {turn} of {rounds}  ", end="", file=sys.stderr
            )
            candidates = make_candidates(problem, number, update, action)
            timing, _ = interleave(candidates, rounds, show)
            rows.append([f"{number}", update, action, *cells(timing)])
    print(file=sys.stderr)
    told = f"--shards {' '.join(map(str, shards))} --rounds {rounds}"
    last = markdown.measured_on(machine, f"python -m benchmarks.faults {told}")
    markdown.publish("faults", [markdown.table(_HEADS, rows, names=(1, 2))], last, out)


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
    markdown.command(main)
