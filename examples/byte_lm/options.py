"""The options of the training command."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from crossshard.errors import ArgumentError, GroupAssignmentError
from examples.byte_lm.groups import Groups, parse_groups

DEFAULT_BATCH = 16


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a small language model on text, each step split over shards.

    The model reads bytes and predicts the next one. Every shard computes the gradient of its part
    of the batch, CrossShardOptimizer reduces them, and the Optax optimizer of your choice steps.
    At the end the first steps are repeated on one shard, to prove that both trained alike.

    Ctrl-C stops after the current step, with everything so far written to the output folder; a
    second one skips what is then being computed, a third one ends at once.

    The exit code is 0 if all went well; 1 if the training diverged, the proof failed or something
    could not be written; 2 if what was asked cannot be done; 130 after Ctrl-C.
    """

    data: Path | None = None
    """A text file, or a folder of them; by default the sources of Python's standard library."""

    optimizer: str = "adamw"
    """Any name in optax or optax.contrib, or package.module:factory for one of your own."""

    learning_rate: float | None = None
    """By default the optimizer's own, or one chosen for it; printed at the start."""

    reduction: Literal["mean", "sum"] = "mean"
    """The reduction of gradients over the shards."""

    groups: str | None = None
    """Groups that reduce on their own: 2x4 for two groups of four, or JSON as [[0,2],[1,3]]."""

    shards: int | None = None
    """By default as many as the groups have, else 8 on a CPU, else all devices."""

    steps: int = 300
    """The number of optimizer steps."""

    batch: int | None = None
    """Rows in a batch, over all shards; by default 16, rounded up to a multiple of the shards."""

    context: int = 64
    """Bytes in a row: how far the model looks back."""

    layers: int = 3
    """Layers of the model."""

    width: int = 160
    """Width of the model, a multiple of 32; the defaults give a million parameters."""

    seed: int = 0
    """Seed of initial parameters and batches; batches are the same for any number of shards."""

    out: Path | None = None
    """A new or empty folder for metrics, curves and summary; by default a fresh one in runs/."""

    def check(self) -> None:
        """Raise an ``ArgumentError`` for an impossible number."""
        for name in ("shards", "steps", "batch", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"--{name} must be at least 1; got {value}.")
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"--seed must be from 0 to 2**32 - 1; got {self.seed}.")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ArgumentError(f"--learning-rate must be a number above 0; got {rate}.")

    def parsed_groups(self) -> Groups | None:
        """The groups that ``groups`` names, ``None`` for all shards together.

        Raises:
          GroupAssignmentError: neither form, not a partition into equal groups, or one of other
            shards than ``shards``.
        """
        groups = None if self.groups is None else parse_groups(self.groups)
        if groups is not None and self.shards not in (None, groups.shards):
            raise GroupAssignmentError(
                f"--groups {self.groups} are groups of {groups.shards} shards, and --shards is "
                f"{self.shards}. Leave --shards out, or name groups of {self.shards}."
            )
        return groups

    def rows(self, shards: int) -> int:
        """Rows of the global batch on this many shards.

        Raises:
          ArgumentError: the batch does not divide by the number of shards.
        """
        if self.batch is None:
            return math.ceil(DEFAULT_BATCH / shards) * shards
        if self.batch % shards:
            below = self.batch // shards * shards
            near = f"{below} or {below + shards}" if below else f"{shards}"
            raise ArgumentError(
                f"A batch of {self.batch} rows does not divide evenly by {shards} shards. "
                f"Pass --batch {near}."
            )
        return self.batch
