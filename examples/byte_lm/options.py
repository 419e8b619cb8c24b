"""What a training run is asked to do; the options of `crossshard train`, with their meaning."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Literal

from crossshard.errors import ArgumentError, GroupAssignmentError
from crossshard.shards.groups import GroupAssignment, check_group_assignment

DEFAULT_BATCH = 16
# Virtual CPU devices are threads and buffers; beyond this a machine is busy with nothing else.
MOST_SHARDS = 1024


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a small language model on text, each step split over shards.

    The model reads bytes and predicts the next one. Every shard computes the gradient of its part
    of the batch, CrossShardOptimizer reduces them, and the Optax optimizer of your choice steps.
    At the end the first steps are repeated on one shard, to prove that both trained alike.

    Ctrl-C stops after the current step, with everything so far written to the output folder.
    """

    data: Path | None = None
    """A text file, or a folder of them; by default the sources of Python's standard library."""

    optimizer: str = "adamw"
    """Any name in optax or optax.contrib, or package.module:factory for one of your own."""

    learning_rate: float | None = None
    """By default what the optimizer sets itself, else what suits it; printed at the start."""

    reduction: Literal["mean", "sum"] = "mean"
    """How the gradients of the shards become one."""

    groups: str | None = None
    """Shards that reduce apart: 2x4 for two groups of four, or JSON such as [[0,2],[1,3]]."""

    shards: int | None = None
    """By default as many as the groups have, else 8 where there is only a CPU, else all devices."""

    steps: int = 300
    """How many optimizer steps."""

    batch: int | None = None
    """Rows in a batch, over all shards; by default 16, rounded up to a multiple of the shards."""

    context: int = 64
    """Bytes in a row: how far the model looks back."""

    layers: int = 3
    """Layers of the model."""

    width: int = 160
    """Width of the model, a multiple of 32; the defaults give a million parameters."""

    seed: int = 0
    """Of the first parameters, and of the batches, which no number of shards changes."""

    out: Path | None = None
    """A new or empty folder for metrics, curves and summary; by default a fresh one in runs/."""

    def check(self) -> None:
        """Raise an ``ArgumentError`` for a number that cannot be, whatever the rest is."""
        for name in ("shards", "steps", "batch", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"--{name} must be at least 1; got {value}.")
        if not 0 <= self.seed < 2**32:
            raise ArgumentError(f"--seed must be from 0 to 2**32 - 1; got {self.seed}.")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ArgumentError(f"--learning-rate must be a number above 0; got {rate}.")

    def group_assignment(self) -> GroupAssignment | None:
        """The groups that ``groups`` names, ``None`` for all shards together.

        Raises:
          GroupAssignmentError: neither form, no partition into equal groups, or not of ``shards``.
        """
        if self.groups is None:
            return None
        groups = parse_groups(self.groups)
        if groups is not None and self.shards is not None:
            groups.check_covers(self.shards)
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
                f"Say --batch {near}."
            )
        return self.batch


def parse_groups(text: str) -> GroupAssignment | None:
    """The groups in ``2x4`` (two groups of four neighbours) or in a JSON list of lists.

    Raises:
      GroupAssignmentError: neither of these, or no partition into groups of one size.
    """
    product = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text.strip())
    if product:
        number, size = int(product[1]), int(product[2])
        if not 0 < number * size <= MOST_SHARDS:
            raise GroupAssignmentError(
                f"--groups {text} makes {number * size} shards; 1 to {MOST_SHARDS} are possible."
            )
        return check_group_assignment(
            [list(range(first, first + size)) for first in range(0, number * size, size)]
        )
    try:
        listed = json.loads(text)
    except ValueError:
        raise GroupAssignmentError(
            f"--groups must be like 2x4 (two groups of four) or JSON like [[0,1],[2,3]]; "
            f"got {text!r}."
        ) from None
    return check_group_assignment(listed)
