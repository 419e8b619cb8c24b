"""The results of a run, written to summary.json and printed at the end."""

import dataclasses

from crossshard.tools import Communication, Verification
from examples.byte_lm.proof import Comparison


@dataclasses.dataclass(frozen=True)
class Sent:
    """What each device sends in a compiled step, on average."""

    bytes_sent: float
    # To the least that these shards must send; None if that is not known.
    ratio: float | None
    # Of the bytes, behind matrix products; None if nothing is sent.
    hidden_share: float | None


def sent_by(report: Communication, every: int) -> Sent:
    """What each device sends in a step on average, of which some only in one of ``every``."""
    whole, seldom = report.bytes_between_shards, report.bytes_in_branches
    on_average = whole - seldom + seldom / every
    ratio = report.ratio and report.ratio * on_average / whole
    return Sent(on_average, ratio, report.hidden_share)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The results of a run; what was not computed is ``None``, empty or left out."""

    steps: int
    # "finished", "stopped" (by the user), "not finite" (the loss), or "fault".
    ended: str
    # What --nonfinite or --check-divergence ended the run for, and how to go on.
    fault: str
    shards: int
    learning_rate: float | None
    parameters: int
    # Of the last training batch.
    bits_per_byte: float | None
    # Of all held-out bytes; with the moving average of the parameters, too.
    held_out_bits_per_byte: float | None
    held_out_bits_per_byte_ema: float | None
    gzip_bits_per_byte: float
    held_out_bytes: int
    # In training, the first step and looks at held-out text left out.
    tokens_per_second: float | None
    seconds: float
    sent: Sent | None = None
    # The first steps again on one shard, by JAX and Optax alone.
    proof: Comparison | None = None
    # The step with plain SGD on all shards and on one device.
    verification: Verification | None = None
