"""The training loop: blocks after every step, and evaluates on held-out text now and then."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from crossshard import CrossShardOptimizer, shard
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job
from examples.byte_lm.model import ByteTransformer, loss
from examples.byte_lm.text import batches

# Evaluations on held-out text per run, without those of the first steps.
LOOKS = 10


@dataclasses.dataclass(frozen=True)
class Step:
    """The metrics of one step.

    Attributes:
      number: counted from 1.
      losses: nats per byte, each shard's mean over its part of the batch.
      seconds: the time from the batch to the loss; the first includes compilation.
      held_out: bits per byte of a sample of held-out text after the step, one per group; ``None``
        after most steps.
    """

    number: int
    losses: tuple[float, ...]
    seconds: float
    held_out: tuple[float, ...] | None = None

    @property
    def loss(self) -> float:
        """The mean over the shards, in nats per byte."""
        return sum(self.losses) / len(self.losses)

    @property
    def bits_per_byte(self) -> float:
        """The same in bits."""
        return self.loss / math.log(2)


def train(
    job: Job, model: ByteTransformer, optimizer: CrossShardOptimizer, held_out: HeldOut
) -> Iterator[Step]:
    """Train the model in place, for as many steps as were asked for or as are drawn from this.

    It ends early after a loss that is not finite: nothing that follows could be.
    """
    step = train_step(job.shards)
    drawn = batches(job.text.training, job.rows, job.options.context, job.options.seed)
    every = math.ceil(job.options.steps / LOOKS)
    looks = {2**power for power in range(every.bit_length())}
    looks |= set(range(every, job.options.steps + 1, every))
    for number in range(1, job.options.steps + 1):
        read, wanted = next(drawn)
        began = time.perf_counter()
        # Reading the loss blocks on the step: queued steps can deadlock virtual CPU devices.
        losses = np.asarray(step(model, optimizer, read, wanted), np.float64)
        seconds = time.perf_counter() - began
        finite = bool(np.isfinite(losses).all())
        look = finite and number in looks
        bits = tuple(held_out.bits_per_byte(model, sample=True)) if look else None
        yield Step(number, tuple(losses.tolist()), seconds, bits)
        if not finite:
            return


def train_step(shards: int) -> Callable[..., jax.Array]:
    """The step of one shard, compiled for all: float32[shards], each shard's own loss."""

    @shard(num_shards=shards)
    def step(
        model: ByteTransformer,
        optimizer: CrossShardOptimizer,
        read: jax.Array,
        wanted: jax.Array,
    ) -> jax.Array:
        return optimizer.minimize(lambda: loss(model, read, wanted), var_list=model)

    return step
