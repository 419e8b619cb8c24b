"""A whole training run: steps, records, plot, evaluation on held-out text, and the proof."""

import dataclasses
import itertools
import math
import time

from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job
from examples.byte_lm.loop import train
from examples.byte_lm.model import ByteTransformer
from examples.byte_lm.plots import draw_curves
from examples.byte_lm.progress import Screen
from examples.byte_lm.proof import STEPS, Comparison, Proof, Values, values_of
from examples.byte_lm.record import Record
from examples.byte_lm.stopping import Stopping
from examples.byte_lm.summary import Summary, tokens_per_second
from examples.byte_lm.text import batches


def run(job: Job, record: Record, screen: Screen, stopping: Stopping) -> Summary:
    """Train and write the results.

    Args:
      job: the job from ``prepare``.
      record: the record to write to.
      screen: shows every recorded step and other work.
      stopping: asked after every step, and within the proof, whether to stop.
    """
    began = time.perf_counter()
    record.write_json("options.json", job.options)
    model, held_out = job.new_model(), job.new_held_out()
    early: Values = {}
    bits: list[float] = []
    with stopping.skippable():
        if not stopping.asked:
            screen.tell("compiling the step")
            early = _train(job, model, held_out, record, screen, stopping)
    finite = all(math.isfinite(step.loss) for step in record.steps)
    with stopping.skippable():
        if record.steps and finite and not stopping.skipped:
            screen.tell("evaluating on held-out text")
            bits = held_out.bits_per_byte(model)
    summary = Summary(
        steps=len(record.steps),
        ended="stopped" if stopping.asked else "finished" if finite else "not finite",
        shards=job.shards,
        learning_rate=job.inner.learning_rate,
        parameters=job.parameters,
        bits_per_byte=record.steps[-1].bits_per_byte if record.steps else None,
        held_out_bits_per_byte=bits,
        gzip_bits_per_byte=job.gzip_bits_per_byte,
        held_out_bytes=len(job.text.held_out),
        tokens_per_second=tokens_per_second(job, record.steps),
        seconds=time.perf_counter() - began,
        proof=[],
    )
    record.write_json("summary.json", summary)
    if record.steps:
        record.write("curves.png", draw_curves(job, record.steps, summary))
    if summary.ended == "finished" and early:
        proof: list[Comparison] = []
        with stopping.skippable():
            screen.tell("repeating the first steps on one shard")
            proof = _prove(job, early, stopping)
        summary = dataclasses.replace(
            summary,
            proof=proof,
            ended="stopped" if stopping.asked else "finished",
            seconds=time.perf_counter() - began,
        )
        record.write_json("summary.json", summary)
    return summary


def _train(
    job: Job,
    model: ByteTransformer,
    held_out: HeldOut,
    record: Record,
    screen: Screen,
    stopping: Stopping,
) -> Values:
    """Train the model in place; return its parameters after the steps that the proof repeats."""
    early: Values = {}
    for step in train(job, model, job.new_optimizer(job.inner), held_out):
        record.add(step, job.rows * job.options.context)
        screen.show(step)
        if step.number == min(STEPS, job.options.steps):
            early = values_of(model)
        if stopping.asked:
            break
    return early


def _prove(job: Job, early: Values, stopping: Stopping) -> list[Comparison]:
    """Both comparisons, or only the first if the run is stopped."""
    drawn = batches(job.text.training, job.rows, job.options.context, job.options.seed)
    proof = Proof(job, list(itertools.islice(drawn, min(STEPS, job.options.steps))))
    of_run = proof.of_run(early)
    return [of_run] if stopping.asked else [of_run, proof.of_sgd()]
