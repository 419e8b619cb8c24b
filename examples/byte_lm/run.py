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
from examples.byte_lm.options import PROFILED
from examples.byte_lm.plots import draw_curves
from examples.byte_lm.profile import traced
from examples.byte_lm.progress import Screen
from examples.byte_lm.proof import STEPS, Comparison, Proof, verify
from examples.byte_lm.record import Record
from examples.byte_lm.saving import Saving
from examples.byte_lm.stopping import Stopping
from examples.byte_lm.summary import Sent, Summary, tokens_per_second
from examples.byte_lm.training import Training, Values


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
    training, held_out = job.new_training(), job.new_held_out()
    saving = Saving(job, training, stopping.fail)
    taken = saving.resume()
    record.keep(taken)
    if taken:
        screen.tell(f"going on after step {taken}")
    sent: Sent | None = None
    early: Values = {}
    bits: list[float] = []
    bits_ema: list[float] = []
    fault = ""
    with stopping.skippable():
        if not stopping.agree():
            screen.tell("compiling the step")
            sent = Sent.of(crossshard.inspect(job.lowered))
            with contextlib.closing(saving):
                try:
                    early = _train(job, training, held_out, record, screen, stopping, saving)
                except (NonfiniteError, DivergenceError) as error:
                    fault = f"{error} {saving.after_fault(len(record.steps))}"
    finite = all(math.isfinite(step.loss) for step in record.steps[-1:])
    with stopping.skippable():
        if record.steps and finite and not (stopping.skipped or fault):
            screen.tell("evaluating on held-out text")
            bits = held_out.bits_per_byte(training)
            bits_ema = held_out.bits_per_byte(training, ema=True) if job.options.ema else []
    summary = Summary(
        steps=len(record.steps),
        ended=_ended(stopping, fault, finite=finite),
        fault=fault,
        shards=job.shards,
        learning_rate=job.inner.learning_rate,
        parameters=job.parameters,
        bits_per_byte=record.steps[-1].bits_per_byte if record.steps else None,
        held_out_bits_per_byte=bits,
        held_out_bits_per_byte_ema=bits_ema,
        gzip_bits_per_byte=job.gzip_bits_per_byte,
        held_out_bytes=len(job.text.held_out),
        tokens_per_second=tokens_per_second(job, record.steps),
        seconds=time.perf_counter() - began,
        sent=sent,
        proof=None,
        verification=None,
    )
    record.write_json("summary.json", summary)
    if record.steps:
        record.write("curves.png", draw_curves(job, record.steps, summary))
    if summary.ended == "finished" and early:
        with stopping.skippable():
            screen.tell("repeating the first steps on one shard")
            summary = dataclasses.replace(summary, proof=_prove(job, record, early))
            if not stopping.agree():
                screen.tell("verifying the step with plain SGD")
                summary = dataclasses.replace(summary, verification=verify(job))
        summary = dataclasses.replace(
            summary,
            ended="stopped" if stopping.agree() else "finished",
            seconds=time.perf_counter() - began,
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
    steps = train(job, training, held_out, taken)
    if job.options.profile and job.processes.is_first and job.options.steps - taken >= PROFILED:
        steps = traced(steps, record, stopping.fail)
    for step in steps:
        record.add(step, job.rows * job.options.context)
        screen.show(step)
        if step.number == min(STEPS, job.options.steps) and not taken:
            # One shard cannot repeat a step that a part of its rows made.
            left_out = quarantines and any(each.faults for each in record.steps)
            early = {} if left_out else training.values()
        stops = stopping.agree() or step.number == job.options.steps
        if math.isfinite(step.loss):
            saving.after(step.number, last=stops)
        if stops:
            break
    training.finish()
    return early


def _ended(stopping: Stopping, fault: str, *, finite: bool) -> str:
    stopped = stopping.agree()
    return "fault" if fault else "stopped" if stopped else "finished" if finite else "not finite"


def _prove(job: Job, record: Record, early: Values) -> Comparison:
    first = record.steps[:STEPS]
    proof = Proof(job, list(itertools.islice(job.batches(), len(first))))
    return proof.of_run(early, [step.metrics.get("skipped") for step in first])
