"""The messages before and after a run."""

from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

import crossshard
from examples.byte_lm.job import Job
from examples.byte_lm.record import Record
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
        rate = f"learning rate {job.inner.learning_rate:g}{chosen}"
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
    rows += [*_measured(summary), *_proof(summary)]
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
        least = f", {sent.ratio:.3f} of the least" if sent.ratio is not None else ""
        hidden = f"; {sent.hidden_share:.0%} behind matrix products" if sent.hidden_share else ""
        yield "sent", f"{sent.bytes_sent:,.0f} bytes by each device in a step{least}{hidden}"


def _proof(summary: Summary) -> Rows:
    found = summary.verification
    if found is None:
        alone = summary.ended == "finished"
        why = "one shard sends nothing" if alone else "the training did not finish"
        yield "proof", f"not run, since {why}"
        return
    first, *more = found.describe().splitlines()
    yield "proof", f"a step of plain SGD, which hides no factor, by crossshard.verify: {first}"
    yield from (("", line) for line in more)
    yield "", f"So {summary.shards} shards train as one." if found.ok else "THE STEP IS WRONG."


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + "s" * (number != 1)
