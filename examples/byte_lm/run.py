"""A whole training run: steps, records, picture, judgement on held-out text, and the proof."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable

from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job
from examples.byte_lm.loop import Step, train
from examples.byte_lm.model import ByteTransformer
from examples.byte_lm.plots import draw_curves
from examples.byte_lm.proof import STEPS, Comparison, Proof, Values, values_of
from examples.byte_lm.record import Record
from examples.byte_lm.summary import Summary, tokens_per_second
from examples.byte_lm.text import batches


def run(
    job: Job,
    record: Record,
    show: Callable[[Step], None],
    tell: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Summary:
    """Train as the job says, and write all that comes of it.

    Args:
      job: what ``prepare`` made.
      record: of the folder to write to.
      show: is given every step once it is recorded.
      tell: is given a few words on what is being done besides.
      stopped: asked after every step, and within the proof, whether the user has had enough.

    Raises:
      ArgumentError: the folder cannot be written to.
    """
    began = time.perf_counter()
    record.write("options.json", job.options)
    tell("compiling the step")
    model = job.new_model()
    held_out = job.new_held_out()
    early = _train(job, model, held_out, record, show, stopped)
    finite = all(math.isfinite(step.loss) for step in record.steps)
    tell("judging by the held-out text")
    bits: list[float] = []
    # Who insists on stopping goes without this, but not without the rest.
    with contextlib.suppress(KeyboardInterrupt):
        bits = held_out.bits_per_byte(model) if finite else []
    summary = Summary(
        steps=len(record.steps),
        ended="stopped" if stopped() else "finished" if finite else "not finite",
        shards=job.shards,
        learning_rate=job.inner.learning_rate,
        parameters=job.parameters,
        bits_per_byte=record.steps[-1].bits_per_byte,
        held_out_bits_per_byte=bits,
        gzip_bits_per_byte=job.gzip_bits_per_byte,
        held_out_bytes=len(job.text.held_out),
        tokens_per_second=tokens_per_second(job, record.steps),
        seconds=time.perf_counter() - began,
        proof=[],
    )
    record.write("summary.json", summary)
    draw_curves(job, record.steps, summary, record.out / "curves.png")
    if finite and early and not stopped():
        tell("repeating the first steps on one shard")
        summary = dataclasses.replace(
            summary,
            proof=_prove(job, early, stopped),
            ended="stopped" if stopped() else "finished",
            seconds=time.perf_counter() - began,
        )
        record.write("summary.json", summary)
    return summary


def _train(
    job: Job,
    model: ByteTransformer,
    held_out: HeldOut,
    record: Record,
    show: Callable[[Step], None],
    stopped: Callable[[], bool],
) -> Values:
    """Train the model in place; its parameters after the steps that the proof repeats."""
    early: Values = {}
    for step in train(job, model, job.new_optimizer(job.inner), held_out):
        record.add(step, job.rows * job.options.context)
        show(step)
        if step.number == min(STEPS, job.options.steps):
            early = values_of(model)
        if stopped():
            break
    return early


def _prove(job: Job, early: Values, stopped: Callable[[], bool]) -> list[Comparison]:
    """Both comparisons, or the first alone if the user has had enough by then."""
    drawn = batches(job.text.training, job.rows, job.options.context, job.options.seed)
    proof = Proof(job, list(itertools.islice(drawn, min(STEPS, job.options.steps))))
    of_run = proof.of_run(early)
    return [of_run] if stopped() else [of_run, proof.of_sgd()]
