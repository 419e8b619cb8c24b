"""What it costs to compare the shards' copies: `python -m benchmarks.divergence`.

A comparison comes once in many steps, so its cost is measured where every step has one, and the
cost of the other steps where none has.
"""

import argparse
import dataclasses
import datetime
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import crossshard
from benchmarks.baselines import Candidate, Turn
from benchmarks.interleave import interleave
from benchmarks.jax_baselines import ours
from benchmarks.machine import this_machine
from benchmarks.models import transformer
from benchmarks.problem import Problem
from benchmarks.tables import three_digits
from benchmarks.timing import Timing

EVERY = 100
WITHOUT, NEVER, ALWAYS = "without", "not compared", "compared at every step"
# The first step is compared, which the warm-up takes.
_CASES = {WITHOUT: None, NEVER: 2**30, ALWAYS: 1}
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
    machine, rows, problem = this_machine(), [], None
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
    rule = ["---:" if index not in (1, 2) else "---" for index in range(len(_HEADS))]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (_HEADS, rule, *rows))
    print(table)
    if options.out is None:
        return
    assert problem is not None
    paragraphs = (
        "# Comparing copies",
        f"What `check_divergence={EVERY}` costs: the step of the demo's transformer of "
        f"{problem.parameters:,} parameters, with AdamW in float32.",
        table,
        f"Milliseconds of processor time of all devices, which are virtual and share the cores: "
        f"other load changes these less than the time by the clock. Three steps take turns of a "
        f"few steps each, of which the first is not timed: one without comparisons, one whose "
        f"comparison is never due, and one that compares before every step. *Other steps cost* is "
        f"the second less the first, and *a comparison costs* the third less the second, within a "
        f"round: medians and quartiles of {options.rounds} rounds. The last column is the first "
        f"cost and {EVERY}⁻¹ of the second, relative to the step without. A difference whose "
        f"quartiles have both signs is smaller than the noise.",
        f"{machine.cpu}, {machine.cores} cores; load {machine.load:g} before it began; JAX "
        f"{version('jax')}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. To repeat: "
        f"`python -m benchmarks.divergence`.",
    )
    options.out.write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")


def make_candidates(problem: Problem, shards: int, update: Update, action: str) -> list[Candidate]:
    """The three steps, of one weight update and one action."""
    candidates: list[Candidate] = []
    for name, every in _CASES.items():
        options = {} if every is None else {"check_divergence": every, "on_divergence": action}
        candidate = ours(problem, shards, update, **options)
        candidate.name = name
        candidates.append(_OfProcessor(candidate))
    return candidates


@dataclasses.dataclass(frozen=True)
class _OfProcessor:
    """A candidate that is timed by the processors rather than by the clock."""

    candidate: Candidate

    @property
    def name(self) -> str:
        return self.candidate.name

    def run(self, steps: int) -> Turn:
        began = time.process_time()
        turn = self.candidate.run(steps)
        return Turn(time.process_time() - began, turn.sample)


def cells(timing: Timing) -> list[str]:
    """The cells of a row."""
    step = timing.spread(WITHOUT).times(1000)
    others = timing.difference(NEVER, WITHOUT).times(1000)
    comparison = timing.difference(ALWAYS, NEVER).times(1000)
    share = (others.median + comparison.median / EVERY) / step.median
    return [
        three_digits(step.median),
        three_digits(others.median),
        f"{three_digits(others.low)} to {three_digits(others.high)}",
        three_digits(comparison.median),
        f"{three_digits(comparison.low)} to {three_digits(comparison.high)}",
        f"{100 * share:.2f}",
    ]


if __name__ == "__main__":
    main()
