"""The options of `python -m benchmarks`."""

import dataclasses
from pathlib import Path
from typing import Literal, get_args

import tyro

from crossshard.errors import ArgumentError

Bench = Literal[
    "update",
    "step",
    "processes",
    "accumulation",
    "same_bits",
    "ema",
    "parts",
    "dealt",
    "overhead",
    "import",
]
BENCHES: tuple[Bench, ...] = get_args(Bench)

# Virtual CPU devices beyond this measure only how threads queue.
MOST_SHARDS = 64


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Compare crossshard with baselines on this machine's CPU, interleaved within one run.

    update: AdamW over 8.4 million parameters with precomputed gradients, against a step written by
    hand with shard_map, pmean and Optax, and against PyTorch and TensorFlow.

    step: whole steps with forward and backward, from 10 thousand to 50 million parameters, against
    the step written by hand.

    processes: whole steps in 2 and 4 processes, in few bits, too, against PyTorch's DDP, its ZeRO
      and its fp16 hook over gloo.

    accumulation: four microbatches and one update, against optax.MultiSteps in the step written by
    hand: time, and bytes sent.

    same_bits: virtual shards, whose bits do not depend on the number of shards, against the plain
    step, and against one in as small pieces: time, and bytes sent.

    ema: a moving average of the parameters, sharded and replicated: time, and bytes of state.

    parts: sharded parameters, ours and those of `jax.jit` with shardings, against replicated
    ones: time, and bytes on a device.

    dealt: optimizers that look at norms or whole matrices, as Muon does, leaf by leaf, against the
    replicated update: time, bytes sent, and the time to compile.

    overhead: the Python time of calling our step beyond a bare ``jax.jit``.

    import: the time that importing crossshard takes after JAX and Optax.

    PyTorch and TensorFlow take part if `make bench-peers` has created their environments. Each
    benchmark writes a table and its raw times to the output folder.
    """

    benches: tyro.conf.Positional[tuple[Bench, ...]] = BENCHES
    """The benchmarks to run; by default all."""

    shards: tuple[int, ...] = ()
    """Numbers of shards to run each benchmark with, or of processes; each has a default."""

    rounds: int = 15
    """Rounds; in each, every candidate in turn takes some steps."""

    quick: tyro.conf.FlagCreatePairsOff[bool] = False
    """Small sizes, to see that it runs; what is written says so and is not a measurement."""

    peers: Path = Path(".venvs")
    """The folder that holds the environments peer-torch and peer-tensorflow."""

    out: Path = Path("docs/benchmarks")
    """The folder to write to; older files of the same benchmarks are replaced."""

    def check(self) -> None:
        """Raise an ``ArgumentError`` for an impossible number, or if no benchmark is named."""
        if not self.benches:
            raise ArgumentError(f"Name at least one of {', '.join(BENCHES)}, or none for all.")
        if self.rounds < 2:
            raise ArgumentError(
                f"--rounds must be at least 2, to measure a spread; got {self.rounds}."
            )
        for shards in self.shards:
            if not 1 <= shards <= MOST_SHARDS:
                raise ArgumentError(f"--shards must be from 1 to {MOST_SHARDS}; got {shards}.")

    def shards_for(self, bench: Bench) -> tuple[int, ...]:
        """The numbers of shards of a benchmark, without duplicates."""
        return tuple(dict.fromkeys(self.shards)) or _SHARDS[bench]


_SHARDS: dict[Bench, tuple[int, ...]] = {
    "update": (8, 2),
    "step": (1, 2, 4, 8),
    "processes": (2, 4),
    "accumulation": (2, 8),
    "same_bits": (2, 8),
    "ema": (2, 8),
    "parts": (8,),
    "dealt": (8,),
    "overhead": (1, 8),
    # Nothing steps.
    "import": (),
}
