"""Over rows: whether a loss is a mean over rows, so that the shards' mean is the batch's."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.errors import LossError
from crossshard.gradients.mean import Mean, Term
from crossshard.jaxprs.mean_over_rows import Finding, found, is_free, is_mean, is_sum
from crossshard.jaxprs.proof import Proof
from crossshard.jaxprs.row_facts import (
    ADDS_SHARDS,
    ADDS_UNLIKE,
    BOUNDS,
    DECIDED,
    DIVIDES,
    MEETS_EARLIER,
    OF_FIXED,
    OF_GRADIENT,
    OF_NUMBER,
    OF_PLACE,
    OF_RANGE,
    PART_OF_SHARDS,
    SAME_NOISE,
    Free,
    OverRows,
    Total,
)
from crossshard.shards.axes import GroupAssignment
from crossshard.step.divisor import AS_MEAN, Divisor, doubt_of_ratio
from crossshard.step.microbatches import Weight

REMEDIES = (
    "Write loss_over='batch', and the loss is given all rows; or loss_over='shard', if each "
    "shard's own loss is meant."
)
# What to say besides, if there are microbatches.
LEAVE_OUT = (
    " And leave out accumulate_steps, with which a loss sees the rows of a microbatch, also one "
    "that names the axis of the shards."
)


class Doubt(NamedTuple):
    """What the trace of a loss does not decide."""

    finding: Finding  # what the loss is over its rows, as far as it is known
    sentence: str  # says what nothing proves
    key: Any  # the types of all inputs of the loss, and what is static in its model
    divisor: Divisor | None = None  # what divides the loss, if the weight may be something else
    # The places and names of the arrays of the model state that it is about; none if of the loss.
    of_state: tuple[tuple[int, str], ...] = ()


class CopiesCountError(Exception):
    """Copies of a row may count in a loss, and rows of zeros do not: the batch is padded again."""


class UndecidedError(LossError):
    """The trace of a loss does not prove what it is over its rows, and no numbers have shown it."""

    def __init__(self, doubt: Doubt):
        self.doubt = doubt
        super().__init__(
            f"{doubt.sentence} The first call of the step checks it by numbers; a step that is "
            f"lowered or traced before that, as a part of another program, has none. {REMEDIES}"
        )


def finding_of(facts: Any) -> Finding:
    """Return what a loss is over its rows, given the facts of the number or ``Mean`` it returns."""
    if not isinstance(facts, Mean):
        return found(facts)
    findings = [each for term in facts.terms for each in _findings_of_term(term)]
    a_mean = "the same for any rows, or a mean over them"
    added = "what is added to the Means"
    if facts.rest is not None:
        findings.append(_expect(is_mean(facts.rest), facts.rest, added, a_mean))
    order = OverRows.COMPARED, OverRows.OVER_SHARDS, OverRows.UNDECIDED
    return min(
        (each for each in findings if each.kind in order),
        key=lambda each: order.index(each.kind),
        default=Finding(OverRows.COUNTED),
    )


def _findings_of_term(term: Term) -> Iterator[Finding]:
    """Yield what the parts of a term are; total and count have to be two sums, or two means."""
    of = f"of the Mean {term.name!r}" if term.name else "of the Mean"
    scale, same, a_sum = term.scale, "the same for any rows", "a sum over the rows"
    yield _expect(is_free(scale), scale, f"what multiplies the quotient {of}", same)
    if is_mean(term.total) and is_mean(term.count):
        return
    yield _expect(is_sum(term.total), term.total, f"the total {of}", a_sum)
    yield _expect(is_sum(term.count), term.count, f"the count {of}", a_sum, divides=True)


def _expect(holds: bool, fact: Any, what: str, expected: str, *, divides: bool = False) -> Finding:
    """Return that a part of a ``Mean`` is as expected, or else what it is."""
    if holds:
        return Finding(OverRows.COUNTED)
    it_is = found(fact)
    if divides and it_is.reason == BOUNDS:  # which may change nothing
        it_is = dataclasses.replace(it_is, kind=OverRows.UNDECIDED)
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
    """What is known of a loss over the rows of its batch."""

    latest: Finding | None = None  # what its trace showed last; ``None`` if it has not been traced
    # What its traces showed, and what divides it if it is a ratio, by the types of its inputs.
    known: dict[Any, tuple[Finding, Divisor | None]] = dataclasses.field(default_factory=dict)
    # What they do not show of the model state that it returns, by the same types.
    states: dict[Any, Doubt] = dataclasses.field(default_factory=dict)
    # The doubts that numbers have removed.
    by_numbers: set[Doubt] = dataclasses.field(default_factory=set)
    returns_mean: bool = False  # whether it is a ``Mean``, as its last trace shows
    # Of each array of the model state whether rows change it, as its last trace shows.
    changed_by_rows: list[bool] | None = None
    proves: bool = True  # whether its trace has to show that it is one; not in a comparison
    # Whether the step runs now, so that numbers can be tried; else it is only lowered or traced.
    runs: bool = False
    # Whether a first call follows: it is not traced as a part of another program, as in a loop.
    lowers: bool = True
    # The doubts of a step that was lowered, which its first call removes.
    postponed: list[Doubt] = dataclasses.field(default_factory=list)
    # Whether the batch was filled up with rows of weight 0, and with copies of a row but for what
    # the weight reads; and whether rows of zeros, or such copies, may count in the loss.
    pads: bool = False
    pads_copies: bool = False
    counts_padding: bool = False
    counts_copies: bool = False
    # The traced losses of the step that is being traced, by the same types.
    traces: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def as_lowered(self) -> None:
        """Note that the step is lowered now, and its first call may remove doubts."""
        self.runs, self.lowers = False, True

    def __str__(self) -> str:
        if self.latest is None:
            return "not looked at"
        is_shown = any(doubt.finding == self.latest for doubt in self.by_numbers)
        shown = "by numbers it is a mean over the rows"
        if self.latest.assumes and not self.latest.compares:
            shown = "by numbers it is"
        elif self.latest.kind is OverRows.RATIO:
            shown = "in the first batch weight= is what it divides by"
        of_state = any(doubt.of_state for doubt in self.by_numbers)
        is_open = any(doubt not in self.by_numbers for doubt in self.states.values())
        return (
            f"{self.latest}"
            + f"; {shown}" * is_shown
            + "; by numbers its model state is that of the whole batch" * of_state
            + "; its first call compares its model state with that of the whole batch" * is_open
        )

    def check_padding(self) -> None:
        """Raise if the batch has rows of padding that may count in the loss.

        Raises:
          CopiesCountError: rows of zeros would not.
          LossError: these may, too.
        """
        if self.pads and self.counts_padding:
            raise LossError(
                "The rows of the batch do not divide, so that it is padded with rows of zeros, of "
                "weight 0, and nothing shows that they leave the loss as it is: it may sum over "
                "rows without the mask, or compare rows, as a batch norm does that takes their "
                "mean. Multiply by the mask below each sum over rows; or pass a batch whose rows "
                "divide."
            )
        if self.pads and self.pads_copies and self.counts_copies:
            raise CopiesCountError

    def checked(
        self, key: Any, rows: Any, weight: Weight | None, summed: bool, microbatches: int
    ) -> tuple[Finding, Divisor | None]:
        """Return what a loss is over the rows of a piece and its divisor, given a key of ``known``.

        Raises:
          LossError: the mean over the shards would not be the loss of the whole batch.
          UndecidedError: that is not known.
        """
        finding, divisor = self.known[key]
        of_size = finding.reason.endswith((OF_FIXED, OF_RANGE))
        if summed and finding.reason.startswith(OF_GRADIENT) and of_size:
            # The gradient of a sum is for each row what it is with more of them.
            finding = dataclasses.replace(finding, kind=OverRows.UNDECIDED)
        self.latest = finding
        where = f" ({finding.source})" if finding.source else ""
        refusal = _refusal(finding, where, summed, microbatches)
        if finding.reason == DIVIDES and weight is None:
            refusal = (
                f"The loss divides by a sum over the rows of the batch{where}, in which shards may "
                f"differ, so that the mean of their losses is not that of the whole batch. "
                f"{AS_MEAN} Or: {REMEDIES}"
            )
        if refusal:
            raise LossError(refusal + LEAVE_OUT * (microbatches > 1 and refusal.endswith(REMEDIES)))
        doubts = list[tuple[str, Divisor | None]]()
        of_states = [self.states[key]] if key in self.states else []
        of_ratio = ""
        if finding.kind is OverRows.UNDECIDED:
            what = "the loss is a mean"
            if finding.of:
                what = f"{finding.of} is a sum"
            doubts += [(f"{what} over the rows of the batch: {finding.reason}{where}", None)]
        by_itself = finding.kind is OverRows.OVER_SHARDS and not finding.is_whole
        if by_itself:
            what = "the mean of the shards' losses is the loss of one shard that has all rows"
            doubts += [(f"{what}: there is {finding.reason} in it{where}", None)]
        if finding.kind is OverRows.RATIO:
            of_ratio = doubt_of_ratio(finding, where, rows, weight, divisor)
        if of_ratio:
            doubts += [(f"{of_ratio}{where}", divisor)]
        if finding.assumes and not finding.compares:
            doubts += [(f"each row is computed alone by {', '.join(finding.assumes)}", None)]
        of_loss = [Doubt(finding, f"Nothing proves that {what}.", key, of) for what, of in doubts]
        for doubt in of_loss + of_states:
            if doubt in self.by_numbers:
                continue
            later = (by_itself or doubt.of_state) and self.lowers
            if self.runs or not later:
                raise UndecidedError(doubt)
            self.postponed.append(doubt)
        return finding, divisor


def _refusal(finding: Finding, where: str, summed: bool, microbatches: int) -> str:
    """Explain why a loss is no mean over rows, and what to write; empty if it may be one."""
    compares, reason = finding.kind is OverRows.COMPARED, finding.reason
    if finding.kind is OverRows.SUM and reason == PART_OF_SHARDS and not summed:
        return (
            f"The loss is {reason}, such as a sum over the shard's rows divided by a sum over "
            f"those of all, so that the mean of the shards' losses is as many times too small as "
            f"there are shards. Write the mean over rows, or jax.lax.psum(total, axis) / "
            f"jax.lax.psum(count, axis); or return crossshard.Mean(total, count), without "
            f"jax.lax.psum; or pass CrossShardOptimizer(optimizer, reduction='sum'), which adds up "
            f"the shards' gradients. If it has the number of shards as a constant, write "
            f"jax.lax.axis_size(axis) there."
        )
    if finding.kind is OverRows.SUM and not summed:
        return (
            "The loss is a sum over the rows of the batch, and the mean of the shards' sums is "
            "smaller than the sum of the whole batch. Write the mean over rows; or pass "
            "CrossShardOptimizer(optimizer, reduction='sum'), which adds up the shards' gradients."
        )
    if finding.kind is OverRows.SUM and microbatches > 1:
        return (
            f"The loss is a sum over the rows of the batch, and accumulate_steps={microbatches} "
            f"takes the mean of the microbatches. Write the mean over rows, without "
            f"reduction='sum'; or leave out accumulate_steps."
        )
    # Where two quotients may divide by the same sum, numbers would have to tell them apart.
    if finding.kind is not OverRows.MEAN and reason == ADDS_UNLIKE:
        adds = reason
        if finding.kind is OverRows.UNDECIDED:
            adds = "terms of which nothing shows that they depend alike on the number of rows"
        return (
            f"The loss adds {adds}{where}, such as a mean over rows and a regulariser that is "
            f"divided by their number, or means that divide by different sums: the mean of the "
            f"shards' losses is not that of the whole batch. Leave the number of rows out of the "
            f"regulariser. Return each quotient as a Mean, and add them up: "
            f"crossshard.Mean(total, count) + crossshard.Mean(other, its_count); a mean over rows "
            f"is Mean(losses.sum(), losses.size). Or: {REMEDIES}"
        )
    if not compares:
        return ""
    if reason == SAME_NOISE:
        return (
            f"The loss draws {reason}{where}, so that rows of several shards get the same numbers, "
            f"as no rows of one batch would. Let the loss take a key as its last parameter, rng, "
            f"which is each shard's own; or keep the key in model_state='per_shard'. {REMEDIES}"
        )
    if reason == ADDS_SHARDS:
        return (
            "The loss adds up the shards' means, or what is the same on all of them, with "
            "jax.lax.psum over their axis, or divides a sum over all shards by the number of rows "
            "of one, so that it is as many times too large as there are shards. Write "
            "jax.lax.pmean; or add up sums over rows, and divide by a sum over all. If it has the "
            "number of shards as a constant, write jax.lax.axis_size(axis) there."
        )
    if reason == DECIDED and not finding.of:
        return (
            f"In the loss {reason}{where}, such as whether any row has a flag, in which shards "
            f"differ, and nothing shows that what it chooses is the same. Choose for each row "
            f"alone, jnp.where(flags, terms, 0); leave out a branch that only saves work; for what "
            f"is not finite write nonfinite='skip'. Or: {REMEDIES}"
        )
    if reason == OF_PLACE:
        return (
            f"The loss computes with {reason} in the batch{where}, which each shard counts from 0: "
            f"nothing shows that it finds each row alone by it. Choose within each row, as "
            f"jax.vmap and jnp.take_along_axis do; or mark a function that computes each row alone "
            f"with crossshard.rowwise, and numbers try it. Or: {REMEDIES}"
        )
    if reason.endswith(OF_RANGE):
        return (
            f"The loss is not linear: {reason}{where}. What a shard casts is as many times larger "
            f"as there are shards, so that other numbers of it become 0. Divide by a scale before "
            f"the cast, such as the largest number of each row, and multiply by it afterwards. Or: "
            f"{REMEDIES}"
        )
    if finding.of:
        return (
            f"The loss returns a Mean, and {finding.of} {reason}{where}. Return the sum over the "
            f"rows and how many count in it, Mean((losses * mask).sum(), mask.sum()), and no mean "
            f"or quotient of them; where nothing counts, the Mean is 0. Or: {REMEDIES}"
        )
    # As in a recurrent network over [time, rows, …].
    advice, operation = "", reason.partition(" ")[0]
    if reason == MEETS_EARLIER:
        advice = "If the rows are along another axis, write batch_axis=1, or its number. "
    elif reason.endswith(OF_FIXED):
        advice = (
            "Divide that number by the number of rows, too; or bound what a row has before it is "
            "divided. "
        )
    elif operation in ("is_finite", "ne") and "of a sum over rows" in reason:
        advice = "Instead of a condition on what is finite, write nonfinite='skip'. "
    elif reason.startswith(f"{operation} of a sum over rows"):
        advice = (
            f"What is not linear in a mean over rows, as {operation} is not, needs the mean over "
            f"all rows. "
        )
    return (
        f"The loss compares rows of the batch: {reason}{where}. Each shard has its own rows, so "
        f"that the mean of the shards' losses is not that of the whole batch. {advice}{REMEDIES}"
    )


def check_state_is_mean(
    model_state: Any,
    proof: Proof,
    is_weight: Callable[[Finding, int], bool | None] | None,
    unequal: bool,
    microbatches: int,
    key: Any = None,
) -> Doubt | None:
    """Raise LossError if the mean of the states that shards return is not that of the batch.

    Returns the doubt, if the trace does not decide that; ``key`` is its.

    Args:
      model_state: the state before the loss.
      proof: what is known of the one after it.
      is_weight: tells of a ratio of sums, and its place, whether the shards' weights are what it
        divides by, ``None`` if nothing shows that; ``None`` if they have no weights.
      unequal: whether the weights may differ.
      microbatches: of how many on each shard the states are averaged, too.
    """
    paths, doubt = jax.tree_util.tree_leaves_with_path(model_state), None
    its_rows, leave_out, of_batch = "for its own rows", "", "loss_over='batch'"
    if microbatches > 1:
        # What is the same on all shards differs between these.
        its_rows = f"for the rows of each of its {microbatches} microbatches"
        leave_out = "leave out accumulate_steps, and "
        of_batch += " and no accumulate_steps"
    at_once = "leave out weight=, and " * (is_weight is not None)
    for place, ((path, leaf), fact) in enumerate(zip(paths, proof.facts, strict=True)):
        of = proof.concluded(found(fact))
        name = f"model_state{jax.tree_util.keystr(path)}"
        if not is_inexact(leaf):
            if of.kind is OverRows.UNDECIDED and of.reason.endswith(OF_NUMBER):
                where = f" ({of.source})" if of.source else ""
                raise LossError(
                    f"{name} ({leaf.dtype}) is made of {OF_NUMBER}{where}, of which each shard has "
                    f"a part. Return what is the same for any number, such as a count of steps; or "
                    f"write loss_over='batch', with which it is one device's; or "
                    f"loss_over='shard', if the number of a shard is meant."
                )
            continue
        is_none, said = of.kind in (OverRows.COMPARED, OverRows.SUM), str(of)
        remedy = "Return such means, as of squares, and compute from them where the state is used"
        not_shown = f"{name} is a mean over rows: {of.reason}" * _is_undecided(of)
        if of.kind is OverRows.RATIO:
            divides = is_weight is not None and is_weight(of, place)
            is_none = divides is False
            not_shown = f"weight= is what {name} divides by" * (divides is None)
            if is_weight is not None:
                said += ", and weight= is not what it divides by"
                remedy = "Divide by the sum that weight= counts, without a bound or an epsilon"
        elif unequal and isinstance(fact, Total) and is_mean(fact):
            is_none = True
            said = f"{OverRows.MEAN.value}, which count alike in it, and weight= lets shards differ"
            remedy = "Return a mean over what weight= counts"
        explained = (
            f"With model_state='mean' a step averages what each shard returns {its_rows}, which is "
            f"the state of the whole batch only if it is a mean over rows. {remedy}; or "
            f"{leave_out}return what is the same on all shards, by jax.lax.pmean, psum or "
            f"all_gather over their axis; or {at_once}write {of_batch}, with which it is one "
            f"device's; or loss_over='shard', if each shard's own is meant."
        )
        if is_none:
            raise LossError(f"{name} is {said}. {explained}")
        if doubt is None and not_shown:
            where = f" ({of.source})" if of.source else ""
            sentence = f"Nothing proves that {not_shown}{where}."
            floats = tuple(
                (place, f"model_state{jax.tree_util.keystr(path)}")
                for place, (path, x) in enumerate(paths)
                if is_inexact(x)
            )
            doubt = Doubt(of, f"{sentence} {explained}", key, of_state=floats)
    return doubt


def _is_undecided(of: Finding) -> bool:
    """Return whether a trace does not decide what a state is over the rows."""
    return of.kind is OverRows.UNDECIDED or (of.kind is OverRows.OVER_SHARDS and not of.is_whole)


def check_own_state(names: Mapping[int, str], proof: Proof, key: Any = None) -> Doubt | None:
    """Raise LossError if states that are the same on all shards are not those of the whole batch.

    Returns the doubt, if the trace does not decide that; ``key`` is its.

    Args:
      names: the names of the arrays, which the loss reads, by their places in the model state.
      proof: what is known of these arrays after the loss.
    """
    doubt = None
    explained = (
        "All shards have the same, but in later steps the mean of their losses is that of the "
        "whole batch only if that is what one device makes of all rows: by jax.lax.psum of sums, "
        "pmean of means, pmax of maxima, or all_gather of rows. Or write loss_over='batch', with "
        "which there is one state; or loss_over='shard', if the loss is meant as it is."
    )
    for name, fact in zip(names.values(), proof.facts, strict=True):
        of = proof.concluded(found(fact))
        if of.kind in (OverRows.COMPARED, OverRows.SUM, OverRows.RATIO):
            raise LossError(f"The loss reads the state {name}, which is {of}. {explained}")
        if doubt is None and _is_undecided(of):
            where = f" ({of.source})" if of.source else ""
            sentence = (
                f"The loss reads the state {name}, and nothing proves that it is that of the whole "
                f"batch: {of.reason}{where}."
            )
            doubt = Doubt(of, f"{sentence} {explained}", key, of_state=(*names.items(),))
    return doubt


def check_groups(sent: Sequence[Any], groups: GroupAssignment | None) -> None:
    """Raise LossError if shards that train in groups send others a part of their losses."""
    own = [] if groups is None else sorted(map(sorted, groups.groups))
    for each in sent:
        if sorted(map(sorted, each.params.get("axis_index_groups") or ())) != own:
            raise LossError(
                f"Shards train in groups, or as workers of their own, and the loss has "
                f"{each.primitive.name} over more than each alone ({_jax.sources_of(each)}), so "
                f"that its gradient would hold parts of the losses of others. Leave it out, or "
                f"name the groups, as in jax.lax.pmean(x, axis, axis_index_groups=groups); or "
                f"write loss_over='shard', which takes each shard's loss as it is."
            )
