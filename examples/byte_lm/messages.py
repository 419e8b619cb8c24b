"""The messages before and after a run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

import crossshard
from examples.byte_lm.job import Job
from examples.byte_lm.proof import STEPS, Comparison
from examples.byte_lm.record import Record, Step
from examples.byte_lm.screen import Screen
from examples.byte_lm.summary import Summary
from examples.byte_lm.text import printable

Rows = Iterator[tuple[str, str]]


def print_job(screen: Screen, job: Job, folder: Path) -> None:
    """Print the model, the data and the output folder."""
    options, text = job.options, job.text
    kind = "virtual CPU device" if job.platform == "cpu" else f"{job.platform.upper()} device"
    several = f" in {job.processes.number} processes" * (job.processes.number > 1)
    first, *more = job.step.describe().splitlines()
    rate = "which sets its learning rate itself"
    if job.inner.learning_rate is not None:
        chosen = " (default)" if options.learning_rate is None else ""
        scheduled = ", with a cosine" if options.schedule == "cosine" else ""
        rate = f"learning rate {job.inner.learning_rate:g}{chosen}{scheduled}"
    screen.say(Text.assemble(("crossshard", "bold"), f" {crossshard.__version__}"))
    screen.rows(
        [
            ("shards", f"{_plural(job.shards, kind)}{several}: {first}"),
            *(("", line) for line in more),
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
            ("optimizer", f"{options.optimizer}, {rate}"),
            ("batch", f"{job.rows} rows of {options.context} bytes, {options.steps} steps"),
            ("output", printable(folder)),
        ]
    )


def print_summary(screen: Screen, summary: Summary, record: Record, why_stopped: str) -> None:
    """Print the results."""
    stopped = {
        "stopped": f"after {_plural(summary.steps, 'step')}{why_stopped}",
        "not finite": (
            f"the loss of step {summary.steps} is not finite: the run diverged. "
            f"Try a smaller --learning-rate."
        ),
        "fault": f"after {_plural(summary.steps, 'step')}, by a fault",
    }
    rows = [("stopped", stopped[summary.ended])] if summary.ended in stopped else []
    rows += [*_measured(summary), *_proof(summary, record.steps)]
    rows.append(("written", f"{', '.join(record.written)} in {printable(record.folder)}"))
    screen.rows(rows)


def _measured(summary: Summary) -> Rows:
    bits, averaged = summary.held_out_bits_per_byte, summary.held_out_bits_per_byte_ema
    if bits is not None:
        also = f", {averaged:.3f} with averaged parameters" if averaged is not None else ""
        yield (
            "held-out",
            f"{bits:.3f} bits per byte{also}; gzip -9 needs {summary.gzip_bits_per_byte:.3f} for "
            f"the same {summary.held_out_bytes:,} bytes",
        )
    if summary.tokens_per_second is not None:
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s; {summary.seconds:.0f} s in all"
    sent = summary.sent
    if sent is not None and sent.bytes_sent:
        least = f", {sent.ratio:.3f} of what a plain sum takes" if sent.ratio is not None else ""
        hidden = f"; {sent.hidden_share:.0%} behind matrix products" if sent.hidden_share else ""
        yield "sent", f"{sent.bytes_sent:,.0f} bytes by each device in a step{least}{hidden}"


def _proof(summary: Summary, steps: Sequence[Step]) -> Rows:
    proof, verification = summary.proof, summary.verification
    if proof is None and verification is not None:
        first, *more = verification.describe().splitlines()
        yield "proof", f"with sgd, crossshard.verify: {first}"
        yield from (("", line) for line in more)
        return
    if proof is None:
        why = "the training did not finish"
        if summary.ended == "finished":
            left_out = any("faults" in step for step in steps[:STEPS])
            why = "the run was resumed after its first steps"
            why = "a shard was left out of one of the first steps" if left_out else why
        yield "proof", f"not run, since {why}"
        return
    yield (
        "proof",
        f"the first {_plural(proof.steps, 'step')} again on one shard with the same batches, by "
        f"JAX and Optax alone:",
    )
    yield (
        f"  {proof.optimizer}",
        f"no parameter differs by more than {proof.largest_difference:.1e}, where training "
        f"moved them by up to {proof.largest_change:.1e}",
    )
    if verification is not None:
        first, *more = verification.describe().splitlines()
        yield "  sgd", f"crossshard.verify: {first}"
        yield from (("", line) for line in more)
    if verification is not None or summary.shards == 1:
        yield "", verdict(summary.shards, proof, verification)
    else:
        yield "", "Not shown: with plain SGD, which hides no factor, the step was not verified."


def verdict(
    shards: int, proof: Comparison, verification: crossshard.tools.Verification | None
) -> str:
    """The conclusion of the proof, in a sentence or two."""
    if proof.same and verification is not None and not verification.ok:
        return "THE STEP IS WRONG: see above what crossshard.verify says of it."
    if proof.same:
        return (
            f"So {_plural(shards, 'shard')} trained as one does, but for rounding. A gradient that "
            f"was not shared would differ by as much as training moves, one that was summed twice "
            f"by far more."
        )
    return (
        f"THESE ARE NOT THE SAME: with {proof.optimizer} the parameters differ by "
        f"{proof.relative:.1%} of what training moved them, most of all in {proof.where}."
    )


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)
