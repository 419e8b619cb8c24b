"""Checks that the loss of a step is a mean over rows, so that the shards' mean is the batch's."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from crossshard.errors import LossError
from crossshard.gradients.mean import Mean, Term
from crossshard.jaxprs.mean_over_rows import Finding, found, is_free, is_mean, is_sum
from crossshard.jaxprs.row_facts import (
    ADDS_SHARDS,
    ADDS_UNLIKE,
    MEETS_EARLIER,
    SAME_NOISE,
    Free,
    OverRows,
    Total,
)
from crossshard.step.weight import (
    AS_MEAN,
    Divisor,
    SumOf,
    Weight,
    is_exact,
    name_of,
    not_of_the_batch,
)

# What a part of a Mean has to be.
A_SUM = "a sum over the rows"
A_MEAN = "the same for any rows, or a mean over them"
THE_SAME = "the same for any rows"
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
      divisor: what divides the loss, if the doubt is whether the weight is that.
    """

    def __init__(self, doubt: Doubt, divisor: Divisor | None = None):
        self.doubt, self.divisor = doubt, divisor
        super().__init__(
            f"{doubt.sentence} The first call of the step checks it by numbers; a step that is "
            f"lowered or traced before that has none. {_WAYS_ON}"
        )


def finding_of(facts: Any) -> Finding:
    """What a loss is in its rows, given the fact of the number, or of the ``Mean``, it returned."""
    if not isinstance(facts, Mean):
        return found(facts)
    findings = [each for term in facts.terms for each in _of_term(term)]
    findings.append(_if(is_mean(facts.rest), facts.rest, "what is added to the Means", A_MEAN))
    order = OverRows.COMPARED, OverRows.OVER_SHARDS, OverRows.UNDECIDED
    return min(
        (each for each in findings if each.kind in order),
        key=lambda each: order.index(each.kind),
        default=Finding(OverRows.COUNTED),
    )


def _of_term(term: Term) -> Iterator[Finding]:
    """What the parts of a term are, each to be a sum over rows, or a mean with a fixed count."""
    of = f"of the Mean {term.name!r}" if term.name else "of the Mean"
    yield _if(is_free(term.scale), term.scale, f"what multiplies the quotient {of}", THE_SAME)
    if is_mean(term.total) and is_mean(term.count):
        return
    yield _if(is_sum(term.total), term.total, f"the total {of}", A_SUM)
    yield _if(is_sum(term.count), term.count, f"the count {of}", A_SUM)


def _if(holds: bool, fact: Any, what: str, expected: str) -> Finding:
    """That a part of a ``Mean`` is as it has to be, or what it is in place of that."""
    if holds:
        return Finding(OverRows.COUNTED)
    it_is = found(fact)
    if it_is.kind in (OverRows.OVER_SHARDS, OverRows.UNDECIDED):
        return dataclasses.replace(it_is, of=what)
    is_said = it_is.kind.value
    if isinstance(fact, Free) and not fact.power:
        is_said = "the same number for any rows, of which each shard would add its own"
    elif isinstance(fact, Total) and fact.moved:
        is_said = "a sum over rows that something is done to, such as a bound or an epsilon"
    elif it_is.kind is OverRows.COMPARED:
        is_said = f"no sum of what single rows have: {it_is.reason}"
    reason = f"is {is_said}; it has to be {expected}"
    return dataclasses.replace(it_is, kind=OverRows.COMPARED, reason=reason, of=what)


@dataclasses.dataclass
class OverRowsRecord:
    """What is known of a loss in the rows of its batch.

    Attributes:
      latest: what its trace showed last; ``None`` if it has not been traced.
      known: what its traces showed, by the types of all that it took.
      by_numbers: the doubts that numbers have removed.
      divisors: what divides a loss that is a ratio, by the same.
      traces: the traced losses of the step that is being traced, by the same.
      returns_mean: whether the loss returns a ``Mean``; ``None`` if it has not been traced.
    """

    latest: Finding | None = None
    known: dict[Any, Finding] = dataclasses.field(default_factory=dict)
    by_numbers: set[Doubt] = dataclasses.field(default_factory=set)
    divisors: dict[Any, Divisor | None] = dataclasses.field(default_factory=dict)
    traces: dict[Any, Any] = dataclasses.field(default_factory=dict)
    returns_mean: bool | None = None

    def __str__(self) -> str:
        if self.latest is None:
            return "not looked at"
        is_shown = any(doubt.finding == self.latest for doubt in self.by_numbers)
        shown = "by numbers it is a mean over the rows"
        if self.latest.assumes:
            shown = "by numbers it is"
        elif self.latest.kind is OverRows.RATIO:
            shown = "in the first batch weight= is what it divides by"
        return f"{self.latest}" + f"; {shown}" * is_shown


def check_over_rows(
    finding: Finding,
    rows: Any,
    *,
    weight: Weight | None,
    summed: bool,
    microbatches: int,
    record: OverRowsRecord,
    divisor: Divisor | None,
) -> None:
    """Raise if a loss is no mean over rows.

    Args:
      finding: what its trace shows.
      rows: the rows of the batch.
      weight: the weight function of the step, if it has one.
      summed: whether the shards' losses are added up.
      microbatches: how many of a shard are averaged.
      record: what numbers have shown.
      divisor: what divides the loss, if that is known.

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
    # Where two quotients may divide by the same sum, numbers would have to tell them apart.
    if finding.kind is not OverRows.MEAN and finding.reason == ADDS_UNLIKE:
        adds = finding.reason
        if finding.kind is OverRows.UNDECIDED:
            adds = "terms of which nothing shows that they depend alike on the number of rows"
        raise LossError(
            f"The loss adds {adds}{where}, such as a mean over rows and a regulariser "
            f"that is divided by their number, or means that divide by different sums, so that the "
            f"mean of the shards' losses is not that of the whole batch. Leave the number of rows "
            f"out of the regulariser. Return each quotient as a Mean, and add them up: "
            f"crossshard.Mean(total, count) + crossshard.Mean(other, its_count); a mean over rows "
            f"is Mean(losses.sum(), losses.size). Or: {_WAYS_ON}"
        )
    if finding.kind is OverRows.COMPARED and finding.reason == ADDS_SHARDS:
        raise LossError(
            "The loss adds up the shards' means, or what is the same on all of them, with "
            "jax.lax.psum over their axis, so that it is as many times too large as there are "
            "shards. Write jax.lax.pmean; or add up sums over rows, and divide by a sum over all."
        )
    if finding.kind is OverRows.COMPARED and finding.of:
        raise LossError(
            f"The loss returns a Mean, and {finding.of} {finding.reason}{where}. Return the sum "
            f"over the rows and how many count in it, Mean((losses * mask).sum(), mask.sum()), and "
            f"no mean or quotient of them; where nothing counts, the Mean is 0. Or: {_WAYS_ON}"
        )
    if finding.kind is OverRows.COMPARED:
        raise LossError(
            f"The loss compares rows of the batch: {finding.reason}{where}. Each shard has its own "
            f"rows, so that the mean of the shards' losses is not that of the whole batch. "
            f"{_OTHER_AXIS if finding.reason == MEETS_EARLIER else ''}{_WAYS_ON}"
        )
    if finding.kind is OverRows.UNDECIDED:
        what = "the loss is a mean over the rows of the batch"
        if finding.of:
            what = f"{finding.of} is a sum over the rows of the batch"
        _ask_numbers(finding, f"Nothing proves that {what}: {finding.reason}{where}.", rows, record)
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
        _check_weight(finding, where, rows, weight, divisor, record)
    if finding.assumes:
        what = f"each row is computed alone by {', '.join(finding.assumes)}"
        _ask_numbers(finding, f"Nothing proves that {what}.", rows, record)


def _ask_numbers(
    finding: Finding,
    sentence: str,
    rows: Any,
    record: OverRowsRecord,
    divisor: Divisor | None = None,
) -> None:
    """Raise unless numbers have shown, for rows of these types, what the trace does not."""
    types = tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(rows))
    doubt = Doubt(finding, sentence, types)
    if doubt not in record.by_numbers:
        raise UndecidedError(doubt, divisor)


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


def _check_weight(
    finding: Finding,
    where: str,
    rows: Any,
    weight: Weight | None,
    divisor: Divisor | None,
    record: OverRowsRecord,
) -> None:
    """Raise unless the weight is the sum by which a ratio divides."""
    entry = name_of(rows, finding.entry)
    if weight is None:
        passed = f"Pass weight={entry!r}, which is how much a shard counts. Or: " if entry else ""
        raise LossError(
            f"The loss divides a sum over the rows of the batch by another one{where}, in which "
            f"shards differ, so that the mean of their losses is not that of the whole batch. "
            f"{passed}{AS_MEAN} Or write loss_over='shard', if all shards are to count the same."
        )
    if entry and isinstance(weight, SumOf) and weight.key != entry:
        raise LossError(
            f"The loss divides by the sum of batch[{entry!r}]{where}, and weight={weight.key!r} "
            f"counts another entry. Pass weight={entry!r}."
        )
    if not is_exact(finding) and (divisor is None or not divisor.is_of_piece):
        raise not_of_the_batch(weight, finding)
    if divisor is None or not (divisor.is_weight or divisor.is_of_piece):
        raise not_of_the_batch(weight, finding)
    if not divisor.is_weight:
        what = f"Nothing proves that weight= is what the loss divides by{where}."
        _ask_numbers(finding, what, rows, record, divisor)
