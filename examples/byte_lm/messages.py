"""The messages before and after a run."""

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.text import Text

import crossshard
from examples.byte_lm.job import Job
from examples.byte_lm.loop import Step
from examples.byte_lm.proof import STEPS, Comparison
from examples.byte_lm.record import Record
from examples.byte_lm.summary import Summary
from examples.byte_lm.text import printable

Row = tuple[str, str]


def print_job(console: Console, job: Job, folder: Path) -> None:
    """Print the model, the data and the output folder."""
    options, text = job.options, job.text
    console.print(f"[bold]crossshard[/] {crossshard.__version__}", highlight=False)
    _print_rows(
        console,
        [
            *_step(job),
            (
                "text",
                f"{text.name}: {_plural(text.files, 'file')}, {len(text.training):,} bytes to "
                f"train on, {len(text.held_out):,} held out",
            ),
            (
                "model",
                f"{job.parameters:,} parameters: {_plural(options.layers, 'layer')}, width "
                f"{options.width}, context {options.context}",
            ),
            ("optimizer", f"{job.inner.name}, {_learning_rate(job)}"),
            ("batch", f"{job.rows} rows of {options.context} bytes, {options.steps} steps"),
            ("output", printable(folder)),
        ],
    )


def print_summary(
    console: Console, job: Job, summary: Summary, record: Record, why_stopped: str
) -> None:
    """Print the results."""
    rows = []
    if summary.ended == "stopped":
        rows.append(("stopped", f"after {_plural(summary.steps, 'step')}{why_stopped}"))
    if summary.ended == "not finite":
        rows.append(
            (
                "stopped",
                f"the loss of step {summary.steps} is not finite: the run diverged. "
                f"Try a smaller --learning-rate.",
            )
        )
    if summary.ended == "fault":
        rows.append(("stopped", f"after {_plural(summary.steps, 'step')}, by a fault"))
    rows += [
        *_held_out(summary),
        *_speed(summary),
        *_sent(summary),
        *_proof(job, summary, record.steps),
    ]
    rows.append(("written", f"{', '.join(record.written)} in {printable(record.folder)}"))
    _print_rows(console, rows)


def _step(job: Job) -> Iterable[Row]:
    first, *more = job.step.describe().splitlines()
    yield "shards", f"{_devices(job)}: {first}"
    yield from (("", line) for line in more)


def _held_out(summary: Summary) -> Iterable[Row]:
    bits, averaged = summary.held_out_bits_per_byte, summary.held_out_bits_per_byte_ema
    if bits:
        also = f", {_bits(averaged)} with averaged parameters" if averaged else ""
        yield (
            "held-out",
            f"{_bits(bits)}{also}; gzip -9 needs {summary.gzip_bits_per_byte:.3f} for the same "
            f"{summary.held_out_bytes:,} bytes",
        )


def _bits(of_groups: list[float]) -> str:
    groups = ", ".join(f"{bits:.3f}" for bits in of_groups)
    each = f" ({groups} in the groups)" if len(of_groups) > 1 else ""
    return f"{mean(of_groups):.3f} bits per byte{each}"


def _speed(summary: Summary) -> Iterable[Row]:
    if summary.tokens_per_second is not None:
        yield (
            "speed",
            f"{summary.tokens_per_second:,.0f} tokens/s; {summary.seconds:.0f} s in all",
        )


def _sent(summary: Summary) -> Iterable[Row]:
    sent = summary.sent
    if sent is not None and sent.bytes_sent:
        least = f", {sent.ratio:.3f} of the least" if sent.ratio is not None else ""
        hidden = f"; {sent.hidden_share:.0%} behind matrix products" if sent.hidden_share else ""
        yield "sent", f"{sent.bytes_sent:,.0f} bytes by each device in a step{least}{hidden}"


def _proof(job: Job, summary: Summary, steps: Sequence[Step]) -> Iterable[Row]:
    proof, verification = summary.proof, summary.verification
    if proof is None:
        why = "the training did not finish"
        if summary.ended == "finished":
            left_out = any(step.faults for step in steps[:STEPS])
            why = "the run was resumed after its first steps"
            why = "a shard was left out of one of the first steps" if left_out else why
        yield "proof", f"not run, since {why}"
        return
    unit = "each group's rows" if len(job.groups.members) > 1 else "the same batches"
    yield (
        "proof",
        f"the first {_plural(proof.steps, 'step')} again on one shard with {unit}, by "
        f"JAX and Optax alone:",
    )
    yield (
        f"  {proof.optimizer}",
        f"no parameter differs by more than {proof.largest_difference:.1e}, where training "
        f"moved them by up to {proof.largest_change:.1e}",
    )
    if verification is not None:
        yield from _verified(verification)
    if verification is not None or job.shards == 1:
        yield "", verdict(job, proof, verification)
    else:
        yield "", "Not shown: with plain SGD, which hides no factor, the step was not verified."


def _verified(verification: crossshard.Verification) -> Iterable[Row]:
    """What ``crossshard.verify`` says of the step."""
    first, *more = verification.describe().splitlines()
    yield "  sgd", f"crossshard.verify: {first}"
    yield from (("", line) for line in more)


def verdict(job: Job, proof: Comparison, verification: crossshard.Verification | None) -> str:
    """The conclusion of the proof, in a sentence or two."""
    if proof.same and verification is not None and not verification.ok:
        return "THE STEP IS WRONG: see above what crossshard.verify says of it."
    if proof.same:
        who = f"{_plural(job.shards, 'shard')} trained as one does"
        if len(job.groups.members) > 1:
            who = f"each group of {job.groups.size} trained as one shard with its rows does"
        return (
            f"So {who}, but for rounding. A gradient that was not shared would differ by as much "
            f"as training moves, one that was summed twice by far more."
        )
    return (
        f"THESE ARE NOT THE SAME: with {proof.optimizer} the parameters differ by "
        f"{proof.relative:.1%} of what training moved them, most of all in {proof.where}."
    )


def _devices(job: Job) -> str:
    kind = "virtual CPU device" if job.platform == "cpu" else f"{job.platform.upper()} device"
    devices = _plural(job.shards * job.options.model_shards, kind)
    several = f" in {job.processes.number} processes" * (job.processes.number > 1)
    return f"{devices}{several}"


def _learning_rate(job: Job) -> str:
    rate = job.inner.learning_rate
    if rate is None:
        return "which sets its learning rate itself"
    chosen = " (default)" if job.options.learning_rate is None else ""
    return f"learning rate {rate:g}{chosen}"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)


def _print_rows(console: Console, rows: Iterable[Row]) -> None:
    rows = list(rows)
    indent = max(len(label) for label, _ in rows) + 4
    console.print()
    for label, value in rows:
        # Beside the labels, not below them.
        first, *more = textwrap.wrap(value, console.width - indent, break_long_words=False)
        console.print(Text.assemble((f"  {label}".ljust(indent), "cyan"), first), soft_wrap=True)
        for line in more:
            console.print(Text(" " * indent + line), soft_wrap=True)
    console.print()
