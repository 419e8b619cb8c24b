"""The training loop: blocks after every step, and evaluates on held-out text now and then."""

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator
from typing import Any, Self

import numpy as np

from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job
from examples.byte_lm.training import Training

# Evaluations on held-out text per run, without those of the first steps.
LOOKS = 10


@dataclasses.dataclass(frozen=True)
class Step:
    """The metrics of one step.

    Attributes:
      number: counted from 1.
      loss: nats per byte, the mean over all bytes that count.
      losses: each shard's mean over its part of the batch.
      seconds: the time from the batch to the loss.
      metrics: those of the stages by name, one number per group.
      held_out: bits per byte of a sample of held-out text after the step, one per group; ``None``
        after most steps.
      held_out_ema: the same with the moving average of the parameters, if there is one.
      faults: what was found not to be finite, or to differ between shards, a line each.
    """

    number: int
    loss: float
    losses: tuple[float, ...]
    seconds: float
    metrics: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    held_out: tuple[float, ...] | None = None
    held_out_ema: tuple[float, ...] | None = None
    faults: tuple[str, ...] = ()

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits."""
        return self.loss / math.log(2)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """A step as it stands in metrics.jsonl."""
        each = lambda value: tuple(value) if isinstance(value, list) else (value,)
        looks = [values.pop(f"held_out_bits_per_byte{ema}", None) for ema in ("", "_ema")]
        look, look_ema = (None if look is None else tuple(look) for look in looks)
        faults = tuple(values.pop("faults", ()))
        own = [values.pop(name) for name in ("step", "loss", "loss_per_shard", "seconds")]
        for name in ("bits_per_byte", "tokens_per_second"):
            del values[name]
        number, loss, losses, seconds = own
        metrics = {name: each(value) for name, value in values.items()}
        return cls(
            number,
            math.nan if loss is None else loss,
            tuple(math.nan if x is None else x for x in losses),
            seconds,
            metrics,
            look,
            look_ema,
            faults,
        )


def train(job: Job, training: Training, held_out: HeldOut, taken: int = 0) -> Iterator[Step]:
    """Train, for as many steps as were asked for or as are drawn from this.

    Those that were taken before count, and their batches are passed over. It ends early after a
    loss that is not finite: nothing that follows could be, unless ``nonfinite`` keeps it from the
    parameters.

    Raises:
      NonfiniteError, DivergenceError: steps have found too many faults.
    """
    guarded = job.options.nonfinite != "off"
    every = math.ceil(job.options.steps / LOOKS)
    looks = {2**power for power in range(every.bit_length())}
    looks |= set(range(every, job.options.steps + 1, every))
    batches = itertools.islice(job.batches(), taken, None)
    for number, batch in zip(range(taken + 1, job.options.steps + 1), batches, strict=False):
        began = time.perf_counter()
        metrics = training(batch)
        seconds = time.perf_counter() - began
        # [shards, microbatches]
        nats, counted = (metrics["aux"][name].reshape(job.shards, -1) for name in ("nats", "bytes"))
        # What does not count for the parameters does not count here.
        good = np.isfinite(nats).all(axis=1, keepdims=True) if guarded else True
        with np.errstate(invalid="ignore"):  # a shard may have nothing that counts
            loss = float(nats.sum(where=good) / counted.sum(where=good))
            losses = tuple((nats.sum(axis=1) / counted.sum(axis=1)).tolist())
        look = math.isfinite(loss) and number in looks
        bits = lambda ema: tuple(held_out.bits_per_byte(training, sample=True, ema=ema))
        yield Step(
            number,
            loss,
            losses,
            seconds,
            {n: value for n, value in metrics.items() if n not in ("aux", "loss", "faults")},
            bits(ema=False) if look else None,
            bits(ema=True) if look and job.options.ema else None,
            metrics["faults"],
        )
        if not (guarded or math.isfinite(loss)):
            return
