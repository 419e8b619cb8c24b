"""A whole training run: steps, records, plot, evaluation on held-out text, and the proof."""

import contextlib
import dataclasses
import itertools
import math
import time

import crossshard
from crossshard.errors import DivergenceError, NonfiniteError
from examples.byte_lm.held_out import HeldOut
from examples.byte_lm.job import Job
from examples.byte_lm.loop import train
from examples.byte_lm.proof import STEPS, Comparison, compare, verify
from examples.byte_lm.record import Record
from examples.byte_lm.saving import Saving
from examples.byte_lm.screen import Screen
from examples.byte_lm.stopping import Stopping
from examples.byte_lm.summary import Sent, Summary, sent_by
from examples.byte_lm.training import Training, Values


def run(job: Job, record: Record, screen: Screen, stopping: Stopping) -> Summary:
    """Train and write the results.

    Args:
      job: the job from ``prepare``.
      record: the record to write to.
      screen: shows every recorded step and other work.
      stopping: asked after every step, and after other work, whether to stop.
    """
    began = time.perf_counter()
    record.write_json("options.json", job.options)
    training, held_out = job.new_training(), HeldOut(job.text.held_out, job.options.context)
    saving = Saving(job, training, stopping)
    taken = saving.resume()
    record.keep(taken)
    if taken:
        screen.say(f"{saving.source} is restored: the run goes on after step {taken}.")
    sent: Sent | None = None
    early: Values = {}
    fault = ""
    if not stopping.agree():
        screen.tell("compiling the step")
        sent = sent_by(crossshard.inspect(job.lowered), job.options.sync_every or 1)
        with contextlib.closing(saving):
            try:
                early = _train(job, training, held_out, record, screen, stopping, saving)
            except (NonfiniteError, DivergenceError) as error:
                fault = f"{error} {saving.after_fault(len(record.steps))}"
    steps = record.steps
    finite = all(math.isfinite(step["loss"]) for step in steps[-1:])
    bits = bits_ema = None
    if steps and finite and not fault:
        screen.tell("evaluating on held-out text")
        bits = held_out.bits_per_byte(training)
        bits_ema = held_out.bits_per_byte(training, ema=True) if job.options.ema else None
    ended = "stopped" if stopping.agree() else "finished" if finite else "not finite"
    # The first step takes longer.
    timed, tokens = [step["seconds"] for step in steps[1:]], job.rows * job.options.context
    summary = Summary(
        steps=len(steps),
        ended="fault" if fault else ended,
        fault=fault,
        shards=job.shards,
        learning_rate=job.inner.learning_rate,
        parameters=job.parameters,
        bits_per_byte=steps[-1]["bits_per_byte"] if steps else None,
        held_out_bits_per_byte=bits,
        held_out_bits_per_byte_ema=bits_ema,
        gzip_bits_per_byte=job.gzip_bits_per_byte,
        held_out_bytes=len(job.text.held_out),
        tokens_per_second=tokens * len(timed) / sum(timed) if timed else None,
        seconds=time.perf_counter() - began,
        sent=sent,
    )
    record.write_json("summary.json", summary)
    if steps and job.processes.is_first:
        # Matplotlib takes half a second to import, in which a run that starts again has begun.
        from examples.byte_lm.plots import draw_curves

        record.write("curves.png", draw_curves(steps, summary))
    if summary.ended == "finished" and early:
        proof = verification = None
        if not job.options.unlike_one_shard():
            screen.tell("repeating the first steps on one shard")
            proof = _prove(job, record, early)
        if not stopping.agree():
            screen.tell("verifying the step with plain SGD")
            verification = verify(job)
        summary = dataclasses.replace(
            summary,
            ended="stopped" if stopping.agree() else "finished",
            seconds=time.perf_counter() - began,
            proof=proof,
            verification=verification,
        )
        record.write_json("summary.json", summary)
    return summary


def _train(
    job: Job,
    training: Training,
    held_out: HeldOut,
    record: Record,
    screen: Screen,
    stopping: Stopping,
    saving: Saving,
) -> Values:
    """Train; return the parameters after the steps that the proof repeats.

    Raises:
      NonfiniteError, DivergenceError: too many gradients were not finite, or copies differ.
    """
    early: Values = {}
    taken = len(record.steps)
    quarantines = job.options.nonfinite == "quarantine"
    for step in train(job, training, held_out, taken):
        record.add(step)
        screen.show(step)
        number = step["step"]
        if number == min(STEPS, job.options.steps) and not taken:
            # One shard cannot repeat a step that a part of its rows made.
            left_out = quarantines and any("faults" in each for each in record.steps)
            early = {} if left_out else training.values()
        stops = stopping.agree() or number == job.options.steps
        if math.isfinite(step["loss"]):
            saving.after(number, last=stops)
        if stops:
            break
    training.finish()
    return early


def _prove(job: Job, record: Record, early: Values) -> Comparison:
    first = record.steps[:STEPS]
    skipped = [bool(step.get("skipped")) for step in first]
    return compare(job, list(itertools.islice(job.batches(), len(first))), early, skipped)
