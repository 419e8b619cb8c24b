"""The results of a run, written to summary.json and printed at the end."""

import dataclasses
from typing import Self

import crossshard
from crossshard import Communication
from examples.byte_lm.job import Job
from examples.byte_lm.loop import Step
from examples.byte_lm.proof import Comparison


@dataclasses.dataclass(frozen=True)
class Sent:
    """What the compiled step sends.

    Attributes:
      bytes_sent: by each device, between the shards.
      ratio: to the least that these shards must send; ``None`` if that is not known.
      hidden_share: of the bytes, behind matrix products; ``None`` if nothing is sent.
    """

    bytes_sent: float
    ratio: float | None
    hidden_share: float | None

    @classmethod
    def of(cls, report: Communication) -> Self:
        """What a report says."""
        return cls(report.bytes_between_shards, report.ratio, report.hidden_share)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The results of a run.

    Attributes:
      steps: the number of steps taken.
      ended: ``"finished"``, ``"stopped"`` (by the user), ``"not finite"`` (the loss), or
        ``"fault"``.
      fault: what ``--nonfinite`` or ``--check-divergence`` ended the run for, and how to go on;
        empty if they did not.
      shards: the number of shards.
      learning_rate: of the optimizer, as far as it is known.
      parameters: the number of parameters of the model.
      bits_per_byte: of the last training batch; ``None`` if there was no step.
      held_out_bits_per_byte: of all held-out bytes, one number per group; empty if not taken.
      held_out_bits_per_byte_ema: the same with the moving average of the parameters; empty
        without one.
      gzip_bits_per_byte: what gzip needs for the same bytes.
      held_out_bytes: how many these are.
      tokens_per_second: in training, the first step and looks at held-out text left out.
      seconds: the time from the first step to the summary.
      sent: what a step sends; ``None`` if it was not compiled.
      proof: the run's first steps against the same on one shard; ``None`` if it was not run.
      verification: the step with plain SGD; ``None`` if it was not run.
    """

    steps: int
    ended: str
    fault: str
    shards: int
    learning_rate: float | None
    parameters: int
    bits_per_byte: float | None
    held_out_bits_per_byte: list[float]
    held_out_bits_per_byte_ema: list[float]
    gzip_bits_per_byte: float
    held_out_bytes: int
    tokens_per_second: float | None
    seconds: float
    sent: Sent | None
    proof: Comparison | None
    verification: crossshard.Verification | None


def tokens_per_second(job: Job, steps: list[Step]) -> float | None:
    """Training tokens per second, without the first step, which takes longer."""
    timed = [step.seconds for step in steps[1:]]
    return job.rows * job.options.context * len(timed) / sum(timed) if timed else None
