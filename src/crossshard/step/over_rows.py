"""Checks that the loss of a step is a mean over rows, so that the shards' mean is the batch's."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax

from crossshard.errors import LossError
from crossshard.jaxprs.mean_over_rows import (
    ADDS_UNLIKE,
    MEETS_EARLIER,
    SAME_NOISE,
    Finding,
    OverRows,
)
from crossshard.step.weight import SumOf, Weight

# Of a recurrent network over [time, rows, …].
_OTHER_AXIS = "If the rows are along another axis, write batch_axis=1, or its number. "
_WAYS_ON = (
    "Write loss_over='batch', and the loss is given all rows; or loss_over='shard', if each "
    "shard's own loss is meant."
)


class Doubt(NamedTuple):
    """What the trace of a loss does not decide.

    Attributes:
      finding: what the loss is in its rows, as far as it is known.
      sentence: what nothing proves.
      types: the shapes and dtypes of the rows.
    """

    finding: Finding
    sentence: str
    types: tuple[Any, ...]


class UndecidedError(LossError):
    """The trace of a loss does not prove what it is in its rows, and no numbers have shown it.

    Attributes:
      doubt: what is not decided.
    """

    def __init__(self, doubt: Doubt):
        self.doubt = doubt
        super().__init__(
            f"{doubt.sentence} The first call of the step checks it by numbers; a step that is "
            f"lowered or traced before that has none. {_WAYS_ON}"
        )


@dataclasses.dataclass
class OverRowsRecord:
    """What is known of a loss in the rows of its batch.

    Attributes:
      latest: what its trace showed last; ``None`` if it has not been traced.
      known: what its traces showed, by the types of all that it took.
      by_numbers: the doubts that numbers have removed.
    """

    latest: Finding | None = None
    known: dict[Any, Finding] = dataclasses.field(default_factory=dict)
    by_numbers: set[Doubt] = dataclasses.field(default_factory=set)

    def __str__(self) -> str:
        if self.latest is None:
            return "not looked at"
        is_shown = any(doubt.finding == self.latest for doubt in self.by_numbers)
        shown = "it is" if self.latest.assumes else "it is a mean over the rows"
        return f"{self.latest}" + f"; by numbers {shown}" * is_shown


def check_over_rows(
    finding: Finding,
    rows: Any,
    *,
    weight: Weight | None,
    summed: bool,
    microbatches: int,
    record: OverRowsRecord,
) -> None:
    """Raise if a loss is no mean over rows.

    Args:
      finding: what its trace shows.
      rows: the rows of the batch.
      weight: the weight function of the step, if it has one.
      summed: whether the shards' losses are added up.
      microbatches: how many of a shard are averaged.
      record: what numbers have shown.

    Raises:
      LossError: the mean over the shards would not be the loss of the whole batch.
      UndecidedError: that is not known.
    """
    where = f" ({finding.source})" if finding.source else ""
    if finding.kind is OverRows.COMPARED and finding.reason == SAME_NOISE:
        raise LossError(
            f"The loss draws {finding.reason}{where}, so that rows of several shards get the same "
            f"numbers, and all rows of the batch would not. Let the loss take a key as its last "
            f"parameter, rng, which is each shard's own; or keep the key in "
            f"model_state='per_shard'. {_WAYS_ON}"
        )
    if finding.kind is OverRows.COMPARED and finding.reason == ADDS_UNLIKE:
        raise LossError(
            f"The loss adds {finding.reason}{where}, such as a mean over rows and a regulariser "
            f"that is divided by their number, or means with different weights, so that the mean "
            f"of the shards' losses is not that of the whole batch. Leave the number of rows out "
            f"of the regulariser, and give all means the same weights. Or: {_WAYS_ON}"
        )
    if finding.kind is OverRows.COMPARED:
        raise LossError(
            f"The loss compares rows of the batch: {finding.reason}{where}. Each shard has its own "
            f"rows, so that the mean of the shards' losses is not that of the whole batch. "
            f"{_OTHER_AXIS if finding.reason == MEETS_EARLIER else ''}{_WAYS_ON}"
        )
    if finding.kind is OverRows.UNDECIDED:
        what = "the loss is a mean over the rows of the batch"
        _check_is_shown(finding, f"{what}: {finding.reason}{where}", rows, record)
    if finding.kind is OverRows.SUM and not summed:
        raise LossError(
            "The loss is a sum over the rows of the batch, and the mean of the shards' sums is "
            "smaller than the sum of the whole batch. Write the mean over rows; or pass "
            "CrossShardOptimizer(optimizer, reduction='sum'), which adds up the shards' gradients."
        )
    if finding.kind is OverRows.SUM and microbatches > 1:
        raise LossError(
            f"The loss is a sum over the rows of the batch, and accumulate_steps={microbatches} "
            f"takes the mean of the microbatches, which is 1/{microbatches} of the sum of the "
            f"whole batch. Write the mean over rows, without reduction='sum'; or leave out "
            f"accumulate_steps; or write loss_over='shard', if this mean is meant."
        )
    if finding.kind is OverRows.RATIO:
        _check_weight(finding, where, rows, weight)
    if finding.kind is OverRows.MEAN and isinstance(weight, SumOf):
        raise LossError(
            f"The loss is a mean over rows, in which all rows count the same, and "
            f"weight={weight.key!r} lets a shard count as the sum of batch[{weight.key!r}]. Divide "
            f"by that sum: (losses * batch[{weight.key!r}]).sum() / batch[{weight.key!r}].sum(). "
            f"Or leave weight out."
        )
    if finding.assumes:
        what = f"each row is computed alone by {', '.join(finding.assumes)}"
        _check_is_shown(finding, what, rows, record)


def _check_is_shown(finding: Finding, what: str, rows: Any, record: OverRowsRecord) -> None:
    """Raise unless numbers have shown what nothing proves."""
    types = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(rows))
    doubt = Doubt(finding, f"Nothing proves that {what}.", types)
    if doubt not in record.by_numbers:
        raise UndecidedError(doubt)


def not_by_numbers(
    doubt: Doubt, rows: str, together: float, mean: float, gradients: float = 0.0
) -> LossError:
    """The error for a loss of which numbers do not show that it is a mean over rows.

    Args:
      doubt: what its trace does not decide.
      rows: whose rows were taken together.
      together: the loss of these rows.
      mean: the mean of the shards' own losses.
      gradients: how far the gradients are apart, relative to the largest; 0 if not compared.
    """
    numbers = f"of rows of {rows} the loss is {together:.6g}, and the mean of the shards' losses "
    numbers += f"is {mean:.6g}"
    if gradients:
        numbers += f"; the gradients are {gradients:.2g} of the largest apart"
    if not all(map(math.isfinite, (together, mean, gradients))):
        return LossError(
            f"{doubt.sentence} And numbers that are not finite cannot show it: {numbers}. Make "
            f"them finite in the first call. Or: {_WAYS_ON}"
        )
    return LossError(f"{doubt.sentence} And by numbers it is not so: {numbers}. {_WAYS_ON}")


def not_alone(doubt: Doubt, operation: str, change: str, apart: float) -> LossError:
    """The error for an operation that does not compute each row alone.

    Args:
      doubt: what the trace of the loss does not decide.
      operation: what it is.
      change: what was changed of the rows.
      apart: how far that changed its results, relative to them; of integers, how many.
    """
    if not math.isfinite(apart):
        return LossError(
            f"{doubt.sentence} And numbers that are not finite cannot show it of {operation}. Make "
            f"them finite in the first call. Or: {_WAYS_ON}"
        )
    return LossError(
        f"{doubt.sentence} And by numbers it is not so: of the same rows {change}, the results of "
        f"{operation} are {apart:.2g} of their size apart. {_WAYS_ON}"
    )


def not_of_other_rows(doubt: Doubt, error: Exception) -> LossError:
    """The error for a loss that raises one when it is given some of a shard's rows."""
    said = str(error).partition("\n")[0]
    return LossError(
        f"{doubt.sentence} And it cannot be computed of half of a shard's rows, to compare "
        f"numbers: {type(error).__name__}: {said:.200} {_WAYS_ON}"
    )


def _check_weight(finding: Finding, where: str, rows: Any, weight: Weight | None) -> None:
    """Raise if a ratio divides by another sum than the weight, as far as that is known."""
    entry = None
    if isinstance(rows, dict) and finding.entry is not None:
        entry = _name_of(rows, finding.entry)
    if weight is None:
        write = f"weight={entry!r}" if entry else "weight=lambda batch: …, the sum that divides"
        raise LossError(
            f"The loss divides a sum over the rows of the batch by another one{where}, in which "
            f"shards differ, so that the mean of their losses is not that of the whole batch. Pass "
            f"{write}, which is how much a shard counts; or write loss_over='shard', if all shards "
            f"are to count the same."
        )
    if entry and isinstance(weight, SumOf) and weight.key != entry:
        raise LossError(
            f"The loss divides by the sum of batch[{entry!r}]{where}, and weight={weight.key!r} "
            f"counts another entry. Pass weight={entry!r}."
        )


def _name_of(rows: dict[str, Any], place: int) -> str | None:
    """The name of the entry of a batch whose only array is this one of its leaves."""
    path = jax.tree_util.tree_leaves_with_path(rows)[place][0]
    return str(path[0].key) if len(path) == 1 else None
