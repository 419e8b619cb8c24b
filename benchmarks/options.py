"""What a bench is asked to do; the options of `python -m benchmarks`, with their meaning."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from crossshard.errors import ArgumentError

Bench = Literal["update", "step", "overhead", "import"]

# Virtual CPU devices beyond this measure only how threads queue.
MOST_SHARDS = 64


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Measure ours against others, in turn within one run, on this machine's CPU.

    update: AdamW over 8.4 million parameters with the gradients given, against a step written by
    hand with shard_map, pmean and Optax, and against PyTorch and TensorFlow.

    step: whole steps with forward and backward, from 10 thousand to 50 million parameters, against
    the step written by hand.

    overhead: what calling our step costs in Python beyond calling its compiled program.

    import: what importing crossshard costs beyond importing JAX, Optax and Flax.

    PyTorch and TensorFlow take part where `make bench-peers` has made their environments. Each
    bench writes a table, a plot and its raw times to the output folder.
    """

    benches: Annotated[
        tyro.conf.Positional[tuple[Bench, ...]],
        tyro.conf.arg(
            metavar="[update] [step] [overhead] [import]", help_behavior_hint="(default: all)"
        ),
    ] = ("update", "step", "overhead", "import")
    """Which to run."""

    shards: Annotated[
        tuple[int, ...],
        tyro.conf.arg(
            metavar="INT ...",
            help_behavior_hint="(default: 8 2 for update, 1 2 4 8 for step, 1 8 for overhead)",
        ),
    ] = ()
    """Numbers of shards to run each bench with."""

    rounds: int = 15
    """In every round each candidate takes some steps, one candidate after the other."""

    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see that it runs; what is written says so and is not a measurement."""

    peers: Path = Path(".venvs")
    """The folder that holds the environments peer-torch and peer-tensorflow."""

    out: Path = Path("docs/benchmarks")
    """The folder to write to; older files of the same benches are replaced."""

    def check(self) -> None:
        """Raise an ``ArgumentError`` for a number that cannot be, or if no bench is named."""
        if not self.benches:
            raise ArgumentError(
                "Name at least one of update, step, overhead and import, or none for all."
            )
        if self.rounds < 2:
            raise ArgumentError(
                f"--rounds must be at least 2, since a spread is taken; got {self.rounds}."
            )
        for shards in self.shards:
            if not 1 <= shards <= MOST_SHARDS:
                raise ArgumentError(f"--shards must be from 1 to {MOST_SHARDS}; got {shards}.")

    def shards_for(self, bench: Bench) -> tuple[int, ...]:
        """The numbers of shards that a bench runs with, each once."""
        return tuple(dict.fromkeys(self.shards)) or _SHARDS[bench]


_SHARDS: dict[Bench, tuple[int, ...]] = {
    "update": (8, 2),
    "step": (1, 2, 4, 8),
    "overhead": (1, 8),
    # Nothing steps.
    "import": (),
}
