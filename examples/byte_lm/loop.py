"""The training loop: blocks after every step, and evaluates on held-out text now and then."""

import itertools
import math
import time
from collections.abc import Iterator

import numpy as np

from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job
from examples.byte_lm.record import Step
from examples.byte_lm.training import Training

# Evaluations on held-out text per run, without those of the first steps.
LOOKS = 10


def train(job: Job, training: Training, held_out: HeldOut, taken: int = 0) -> Iterator[Step]:
    """Train, for as many steps as were asked for or as are drawn from this.

    Those that were taken before count, and their batches are passed over. It ends early after a
    loss that is not finite: nothing that follows could be, unless ``nonfinite`` keeps it from the
    parameters.

    Raises:
      NonfiniteError, DivergenceError: steps have found too many faults.
    """
    options = job.options
    guarded = options.nonfinite != "off"
    every = math.ceil(options.steps / LOOKS)
    looks = {2**power for power in range(every.bit_length())}
    looks |= set(range(every, options.steps + 1, every))
    batches = itertools.islice(job.batches(), taken, None)
    for number, batch in zip(range(taken + 1, options.steps + 1), batches, strict=False):
        began = time.perf_counter()
        metrics = training(batch)
        seconds = time.perf_counter() - began
        aux, faults = metrics.pop("aux"), metrics.pop("faults")
        # [shards or virtual shards, microbatches]
        nats, counted = (x.reshape(len(x), -1) for x in (aux["nats"], aux["bytes"]))
        of_shards = np.array_split(np.arange(len(nats)), job.shards)
        # What does not count for the parameters does not count here.
        good = [np.full((len(own), 1), np.isfinite(nats[own]).all()) for own in of_shards]
        where = np.concatenate(good) if guarded else True
        with np.errstate(invalid="ignore"):  # a shard may have nothing that counts
            loss = float(nats.sum(where=where) / counted.sum(where=where))
            losses = [float(nats[own].sum() / counted[own].sum()) for own in of_shards]
        step = {
            "step": number,
            "loss": loss,
            "bits_per_byte": loss / math.log(2),
            "loss_per_shard": losses,
            "seconds": round(seconds, 6),
            "tokens_per_second": round(job.rows * options.context / seconds, 1),
            **metrics,
        }
        if faults:
            step["faults"] = faults
        if math.isfinite(loss) and number in looks:
            bits = lambda ema: held_out.bits_per_byte(training, sample=True, ema=ema)
            step["held_out_bits_per_byte"] = bits(ema=False)
            if options.ema:
                step["held_out_bits_per_byte_ema"] = bits(ema=True)
        yield step
        if not (guarded or math.isfinite(loss)):
            return
