"""Over rows: whether a loss is a mean over rows, so that the shards' mean is the batch's."""

import concurrent.futures
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from crossshard import _check, _jax
from crossshard._annotations import PyTree
from crossshard._check import is_inexact
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from crossshard.gradients.mean import Mean, Moved, Term, with_moved
from crossshard.jaxprs.kernels import ROWWISE
from crossshard.jaxprs.mean_over_rows import Finding, found, is_free, is_mean, is_sum
from crossshard.jaxprs.proof import Proof
from crossshard.jaxprs.rewrite import evaluate, inlined
from crossshard.jaxprs.row_facts import (
    ADDS_SHARDS,
    ADDS_UNLIKE,
    DIVIDES,
    MEETS_EARLIER,
    OF_PLACE,
    PART_OF_SHARDS,
    SAME_NOISE,
    Free,
    OverRows,
    Total,
)
from crossshard.jaxprs.walk import (
    Call,
    constants,
    control_flow,
    depends,
    equations_of,
    named_axes,
    opened,
)
from crossshard.shards.axes import GroupAssignment
from crossshard.shards.batch_axes import join
from crossshard.step.microbatches import SumOf, Weight

REMEDIES = (
    "Write loss_over='batch', and the loss is given all rows; or loss_over='shard', if each "
    "shard's own loss is meant."
)
# How often two functions are compared on random numbers; and up to which relative difference two
# float32 sums of the same numbers, in another order, count as equal.
_TRIALS, _TOLERANCE = 4, 1e-5
_NUMBERS = 32  # how many of the numbers of a program are tried
# float32 rounds off what is added to a count if it is no larger than this.
_ROUNDED = 1e-6
AS_MEAN = (
    "Return the two sums, which are then added up over all shards before they are divided:\n"
    "    total, count = (losses * mask).sum(), mask.sum()\n"
    "    return crossshard.Mean(total, count)\n"
    "and leave weight out."
)


class Arguments(NamedTuple):
    """The inputs of a loss."""

    given: Any  # the rows of the batch, and their keys
    whole: Any  # the entries of the batch that have no rows
    both: Any  # the parameters, trained and frozen
    of_all: Any  # the model state, if all shards have the same
    own: Any  # the key of the shard, and its model state


def types_of(tree: Any) -> tuple[Any, ...]:
    """Return the structure of a pytree, and the types of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)


class Divisor(NamedTuple):
    """The sum over rows that divides a loss."""

    of_batch: Callable[[Any], Any]  # computes it, float[], from a batch
    is_of_piece: bool  # whether it computes it from a piece of a batch
    is_weight: bool  # whether the weight is shown to be it, but for a constant, for any batch


class Doubt(NamedTuple):
    """What the trace of a loss does not decide."""

    finding: Finding  # what the loss is over its rows, as far as it is known
    sentence: str  # says what nothing proves
    key: Any  # the types of all inputs of the loss, and what is static in its model
    divisor: Divisor | None = None  # what divides the loss, if the weight may be something else
    of_state: bool = False  # whether it is about the model state, and not about the loss


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
    yield _expect(is_sum(term.count), term.count, f"the count {of}", a_sum)


def _expect(holds: bool, fact: Any, what: str, expected: str) -> Finding:
    """Return that a part of a ``Mean`` is as expected, or else what it is."""
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
    """What is known of a loss over the rows of its batch."""

    latest: Finding | None = None  # what its trace showed last; ``None`` if it has not been traced
    # What its traces showed, and what divides it if it is a ratio, by the types of its inputs.
    known: dict[Any, tuple[Finding, Divisor | None]] = dataclasses.field(default_factory=dict)
    # What they do not show of the model state that it returns, by the same types.
    states: dict[Any, Doubt] = dataclasses.field(default_factory=dict)
    # The doubts that numbers have removed.
    by_numbers: set[Doubt] = dataclasses.field(default_factory=set)
    # Whether the step runs now, so that numbers can be tried; else it is only lowered or traced.
    runs: bool = False
    # Whether a first call follows: it is not traced as a part of another program, as in a loop.
    lowers: bool = True
    # The doubts of a step that was lowered, which its first call removes.
    postponed: list[Doubt] = dataclasses.field(default_factory=list)
    # Whether the batch was filled up with rows of zeros, of weight 0; and whether these may count
    # in the loss all the same.
    pads: bool = False
    counts_padding: bool = False
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
        return f"{self.latest}" + f"; {shown}" * is_shown

    def check_padding(self) -> None:
        """Raise LossError if the batch has rows of padding that may count in the loss."""
        if self.pads and self.counts_padding:
            raise LossError(
                "The rows of the batch do not divide, so that it is padded with rows of zeros, of "
                "weight 0, and nothing shows that they leave the loss as it is: it may sum over "
                "rows without the mask, or take means over the rows of all shards, as a batch norm "
                "does. Multiply by the mask below each sum over rows; or pass a batch whose rows "
                "divide."
            )

    def checked(
        self, key: Any, rows: Any, weight: Weight | None, summed: bool, microbatches: int
    ) -> tuple[Finding, Divisor | None]:
        """Return what a loss is over the rows of a piece and its divisor, given a key of ``known``.

        Raises:
          LossError: the mean over the shards would not be the loss of the whole batch.
          UndecidedError: that is not known.
        """
        finding, divisor = self.known[key]
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
            raise LossError(refusal)
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
            of_ratio = _doubt_of_ratio(finding, where, rows, weight, divisor)
        if of_ratio:
            doubts += [(f"{of_ratio}{where}", divisor)]
        if finding.assumes and not finding.compares:
            doubts += [(f"each row is computed alone by {', '.join(finding.assumes)}", None)]
        of_loss = [Doubt(finding, f"Nothing proves that {what}.", key, of) for what, of in doubts]
        for doubt in of_loss + of_states:
            if doubt in self.by_numbers:
                continue
            # A step that meets a fraction is not finite, so this need not be known to trace it.
            later = (by_itself or doubt.of_state) and self.lowers
            later |= of_ratio == _NO_FRACTION and doubt in of_loss
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
    if reason == OF_PLACE:
        return (
            f"The loss computes with {reason} in the batch{where}, which each shard counts from 0: "
            f"nothing shows that it finds each row alone by it. Choose within each row, as "
            f"jax.vmap and jnp.take_along_axis do; or mark a function that computes each row alone "
            f"with crossshard.rowwise, and numbers try it. Or: {REMEDIES}"
        )
    if finding.of:
        return (
            f"The loss returns a Mean, and {finding.of} {reason}{where}. Return the sum over the "
            f"rows and how many count in it, Mean((losses * mask).sum(), mask.sum()), and no mean "
            f"or quotient of them; where nothing counts, the Mean is 0. Or: {REMEDIES}"
        )
    # As in a recurrent network over [time, rows, …].
    axis = "If the rows are along another axis, write batch_axis=1, or its number. "
    return (
        f"The loss compares rows of the batch: {reason}{where}. Each shard has its own rows, so "
        f"that the mean of the shards' losses is not that of the whole batch. "
        f"{axis if reason == MEETS_EARLIER else ''}{REMEDIES}"
    )


def check_state_is_mean(
    model_state: Any,
    proof: Proof,
    is_weight: Callable[[Finding], bool] | None,
    unequal: bool,
    key: Any = None,
) -> Doubt | None:
    """Raise LossError if the mean of the states that shards return is not that of the batch.

    Returns the doubt, if the trace does not decide that; ``key`` is its.

    Args:
      model_state: the state before the loss.
      proof: what is known of the one after it.
      is_weight: tells of a ratio of sums whether the shards' weights may be what it divides by;
        ``None`` if they have none.
      unequal: whether the weights may differ.
    """
    paths, doubt = jax.tree_util.tree_leaves_with_path(model_state), None
    for (path, leaf), fact in zip(paths, proof.facts, strict=True):
        if not is_inexact(leaf):
            continue
        of = proof.concluded(found(fact))
        is_none, said = of.kind in (OverRows.COMPARED, OverRows.SUM), str(of)
        remedy = "Return such means, as of squares, and compute from them where the state is used"
        if of.kind is OverRows.RATIO:
            is_none = is_weight is None or not is_weight(of)
            said += ", and weight= is not what it divides by" * (is_weight is not None)
        elif unequal and isinstance(fact, Total) and is_mean(fact):
            is_none = True
            said = f"{OverRows.MEAN.value}, which count alike in it, and weight= lets shards differ"
            remedy = "Return a mean over what weight= counts"
        explained = (
            f"With model_state='mean' a step averages what each shard returns for its own rows, "
            f"which is the state of the whole batch only if it is a mean over rows. {remedy}; or "
            f"return what is the same on all shards, by jax.lax.pmean, psum or all_gather over "
            f"their axis; or write loss_over='batch', with which it is one device's; or "
            f"loss_over='shard', if each shard's own is meant."
        )
        name = f"model_state{jax.tree_util.keystr(path)}"
        if is_none:
            raise LossError(f"{name} is {said}. {explained}")
        by_itself = of.kind is OverRows.OVER_SHARDS and not of.is_whole
        if doubt is None and (by_itself or of.kind is OverRows.UNDECIDED):
            where = f" ({of.source})" if of.source else ""
            sentence = f"Nothing proves that {name} is a mean over rows: {of.reason}{where}."
            doubt = Doubt(of, f"{sentence} {explained}", key, of_state=True)
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


# What is said of a ratio that is in doubt.
_IS_WEIGHT = "weight= is what the loss divides by"
_NO_FRACTION = "the sum that the loss divides by is no fraction of its bound on any shard"


def _doubt_of_ratio(
    finding: Finding, where: str, rows: Any, weight: Weight | None, divisor: Divisor | None
) -> str:
    """Return what is in doubt of a ratio; raise if it does not divide by its weight."""
    entry = _name_of(rows, finding.entry)
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
    rounded = finding.moved == "plus" and abs(finding.bound) <= _ROUNDED
    adds = finding.adds and not (rounded or is_exact(finding))
    if adds and not (finding.moved in ("max", "guard") and finding.power and finding.bound <= 1):
        raise LossError(
            f"The loss adds something to a quotient{where} that divides by a sum over rows with a "
            f"bound or an addend, which changes a shard's sum more than that of the batch: so each "
            f"shard would add too much. {AS_MEAN} Add the rest to the Mean."
        )
    is_of_piece = divisor is not None and divisor.is_of_piece
    is_weight = divisor is not None and divisor.is_weight
    if not is_of_piece and not (is_weight and is_exact(finding)):
        # The sum depends on more than the batch, or the trace does not show it.
        raise LossError(
            f"The loss divides by a sum over rows ({finding.source}) that cannot be computed from "
            f"the rows of one shard alone: it depends on more than the batch, is within a loop or "
            f"a branch, or the loss is another program for so few rows. So it cannot be compared "
            f"with {describe_weight(weight)}. {AS_MEAN}"
        )
    if not is_weight:
        return _IS_WEIGHT
    return _NO_FRACTION if adds and finding.moved == "max" else ""


def divisor_of(
    finding: Finding,
    jaxpr: Any,
    arguments: Arguments,
    split: Callable[[Any], tuple[Any, Any]],
    weight: Weight,
) -> Divisor | None:
    """Return what divides a ratio of two sums; ``None`` if it depends on more than the batch.

    ``finding`` is that of the trace ``jaxpr``; ``arguments`` are those of a piece, or their types.
    """
    (rows, keys), whole, *_ = arguments
    sizes = [len(jax.tree.leaves(each)) for each in (rows, keys, whole)]
    value = None if finding.by is None else _sum_in(jaxpr, finding.by)
    after = sizes[0] + sizes[1]
    places = [*range(sizes[0]), *range(after, after + sizes[2])]
    if value is None or not set(value[1]) <= set(places):
        return None
    compute, reads = value
    read = [places.index(place) for place in reads]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
    is_of_piece = [x.shape for x in types] == [jnp.shape(x) for x in jax.tree.leaves(arguments)]

    def of_batch(batch: Any) -> Any:
        leaves = jax.tree.leaves(split(batch))
        return compute(*(leaves[place] for place in read))

    of = lambda tree, found: jax.tree.unflatten(jax.tree.structure(tree), found)
    all_rows, all_whole = of(rows, types[: sizes[0]]), of(whole, types[after : after + sizes[2]])
    given = join(all_rows, all_whole)
    is_weight = isinstance(weight, SumOf) and _name_of(rows, finding.entry) == weight.key
    of_weight = lambda batch: jnp.asarray(weight(batch), float)
    return Divisor(of_batch, is_of_piece, is_weight or _agree(of_weight, of_batch, given))


def _sum_in(jaxpr: Any, of: Any) -> tuple[Callable[..., Any], list[int]] | None:
    """Return a function for the sum of a value in a closed jaxpr, and which inputs it reads.

    ``of`` is a variable, the place of an input, or ``(output, of)``, a value in the call that has
    this output; see ``Total.of``. Returns ``None`` if it is within a loop, or in a branch.
    """
    found: list[bool] = []

    def compute(*args: Any) -> Any:
        value = args[of] if isinstance(of, int) else _value_in(jaxpr, args, of)
        found.append(value is not None)
        return jnp.asarray(jnp.sum(0.0 if value is None else value), float)

    traced = jax.make_jaxpr(compute)(*jaxpr.in_avals)
    kept, reads = _jax.pruned(traced, [True])
    if not found[0] or any(isinstance(x, jax.core.Tracer) for x in kept.consts):
        return None
    if any(map(named_axes, equations_of(kept))):
        return None  # it is a sum over the shards
    run = jaxpr_as_fun(kept)
    return lambda *args: run(*args)[0], [place for place, each in enumerate(reads) if each]


def _value_in(jaxpr: Any, args: Sequence[Any], of: Any) -> Any:
    """Return the value if it is computed at the top of the jaxpr or in its calls, else ``None``."""
    (output, inner), wanted, body = of if isinstance(of, tuple) else (None, of), of, opened(jaxpr)
    while isinstance(wanted, tuple):
        _, wanted = wanted
    known = dict(zip(body.constvars, constants(jaxpr), strict=True))
    known |= dict(zip(body.invars, args, strict=True))
    found = [known[wanted]] if wanted in known else []

    def on(equation: Any, given: list[Any]) -> list[Any]:
        call = control_flow(equation) if equation.outvars[:1] == [output] else None
        if isinstance(call, Call) and not found:
            value = _value_in(_jax.closed(call.jaxpr), given, inner)
            found.extend([] if value is None else [value])
        outputs = _jax.bound(equation, given)
        pairs = zip(equation.outvars, outputs, strict=True)
        found.extend(value for variable, value in pairs if variable is wanted)
        return outputs

    evaluate(jaxpr, args, on)
    return found[0] if found else None


def _agree(one: Callable[..., Any], other: Callable[..., Any], *types: Any) -> bool:
    """Return whether two functions of these types are one program, or agree on random numbers.

    One may be the other times a constant.
    """
    traced = [jax.make_jaxpr(each)(*types) for each in (one, other)]
    if len({str(_jax.without_unread(inlined(each))) for each in traced}) == 1:
        return True
    both = jax.make_jaxpr(lambda *args: (one(*args), other(*args)))(*types)
    kept, reads = _jax.pruned(both, [True, True])
    if any(isinstance(x, jax.core.Tracer) for x in kept.consts):
        return False
    leaves = [x for x, is_read in zip(jax.tree.leaves(types), reads, strict=True) if is_read]
    draw = np.random.default_rng(0)
    atoms = [atom for each in equations_of(kept) for atom in each.invars]
    values = [x.val for x in atoms if isinstance(x, Literal) and np.ndim(x.val) == 0]
    numbers = sorted({float(x) for x in values if math.isfinite(x)})[:_NUMBERS]

    def run() -> Any:
        both = jax.jit(jaxpr_as_fun(kept))
        draws = (
            [_drawn(draw, x.shape, x.dtype, trial, numbers) for x in leaves]
            for trial in range(_TRIALS * (1 + len(numbers)))
        )
        with jax.enable_x64(x64):
            return np.array([jax.device_get(both(*each)) for each in draws], np.float64)

    # In a thread of its own, which is not tracing, and has no mesh set on which arrays would lie.
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(run).result()
    first, by = found[0]
    if not np.isfinite(found).all() or not first or not by:
        return False
    return all(are_equal(x * by, y * first) for x, y in found)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two sums of the same numbers are equal but for rounding."""
    one, other = np.float64(one), np.float64(other)
    return bool(np.abs(one - other) <= _TOLERANCE * max(np.abs(one), np.abs(other)))


def _drawn(
    draw: np.random.Generator, shape: Any, dtype: Any, trial: int, numbers: Sequence[float]
) -> Any:
    """Draw numbers of a dtype: small ones, and zeros among them; integers of both signs.

    Later trials have slices of zeros, as rows of padding are, and larger and smaller numbers: a sum
    may have bounds that it reaches only there. The last have the ``numbers`` of the program, too,
    such as a label that does not count, and their neighbours.
    """
    if trial >= _TRIALS and dtype != np.bool_:
        which, trial = divmod(trial - _TRIALS, _TRIALS)
        others = np.asarray(_drawn(draw, shape, dtype, trial, ()))
        near = numbers[which] + draw.integers(-1, 2, shape) * (trial % 2)
        if jnp.issubdtype(dtype, jnp.integer):
            near = np.clip(near, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        return jnp.where(draw.random(shape) < 0.5, jnp.asarray(near, dtype), others)
    kept = np.ones(shape, bool)
    if trial and shape:
        np.moveaxis(kept, (trial - 1) % len(shape), 0)[::2] = False
    if dtype == np.bool_:
        return kept & (draw.random(shape) < 0.5)
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -2
        end = 4 if trial % 3 != 1 else min(1_000, jnp.iinfo(dtype).max)
        return jnp.asarray(kept * draw.integers(low, end, shape), dtype)
    kept &= draw.random(shape) >= 0.3
    size = (1.0, 1e3, 1e-3)[trial % 3]
    return jnp.asarray(np.where(kept, size * draw.uniform(0, 2, shape), 0), dtype)


def is_exact(finding: Finding) -> bool:
    """Return whether the shards' mean, weighted by their divisors, is that of the batch.

    It is, unless what the loss does to the divisor changes a shard's and not the batch's.
    """
    if finding.moved == "guard":
        # A shard that counts nothing has weight 0, but its loss is its total over this number.
        return not (finding.bound and math.isfinite(finding.bound))
    small = {"": 0.0, "max": 1.0, "plus": _ROUNDED}[finding.moved]
    return not finding.moved or (finding.counts and abs(finding.bound) <= small)


def as_mean(loss: Any, divisor: Divisor, finding: Finding, batch: Any, weight: Any) -> Mean:
    """Return a piece's ratio as a ``Mean``, whose last term has the weight alone."""
    moved, count = Moved(finding.moved, finding.bound, not finding.power), divisor.of_batch(batch)
    by = lax.stop_gradient(moved(count))
    if finding.adds and finding.moved in ("max", "guard"):
        # What is added to the quotient counts as the rows of a shard do, and not as the bound. It
        # would be wrong where that moves a sum other than 0: then the loss is not finite.
        by = jnp.where(count == 0, 0, jnp.where(by == count, by, jnp.nan))
    wide = loss.astype(jnp.promote_types(loss.dtype, by.dtype))
    return with_moved(Mean(wide * by, count), moved) + 0.0 * Mean(0.0, weight, "weight")


def check_weight_of_mean(weight: Weight, rows: Any, whole: Any) -> None:
    """Raise unless the weight of a loss that is a mean over rows is the same for all shards."""
    if not depends(lambda rows: weight(join(rows, whole)), rows):
        return
    if isinstance(weight, SumOf):
        entry = f"batch[{weight.key!r}]"
        raise LossError(
            f"The loss is a mean over rows, in which all rows count the same, and "
            f"weight={weight.key!r} lets a shard count as the sum of {entry}. Divide by that sum: "
            f"(losses * {entry}).sum() / {entry}.sum(). Or leave weight out."
        )
    raise LossError(
        f"The loss is a mean over rows, in which all rows count the same, and weight= lets shards "
        f"count differently: {describe_weight(weight)}. Leave weight out. Or if rows are to count "
        f"differently: {AS_MEAN}"
    )


def describe_weight(weight: Weight) -> str:
    """Describe a weight as its author wrote it."""
    if isinstance(weight, SumOf):
        return f"{weight.key!r}, which is batch[{weight.key!r}].sum()"
    try:
        lines, first = inspect.getsourcelines(weight)
        file = inspect.getsourcefile(weight) or ""
    except (OSError, TypeError):
        return "weight=, a function"
    text = " ".join(line.strip() for line in lines[:3]) + (" …" if len(lines) > 3 else "")
    return f"{text} ({'/'.join(file.split('/')[-3:])}:{first})"


def wrong_weight_error(weight: Weight, finding: Finding, numbers: str) -> LossError:
    """Return the error for a weight that is not what the loss divides by."""
    code = f"{finding.code} ({finding.source})" if finding.code else finding.source
    return LossError(
        f"The loss divides by one sum over rows, and weight= is another:\n"
        f"    the loss: {code}\n    the weight: {describe_weight(weight)}\n{numbers}{AS_MEAN}"
    )


def _name_of(rows: Any, place: int | None) -> str | None:
    """Return the name of the entry of a batch whose only array is the leaf at this place."""
    if not isinstance(rows, dict) or place is None:
        return None
    path: Sequence[Any] = jax.tree_util.tree_leaves_with_path(rows)[place][0]
    return str(path[0].key) if len(path) == 1 else None


def rowwise(
    function: Callable[..., PyTree], *, in_axes: PyTree = 0, out_axes: PyTree = 0
) -> Callable[..., PyTree]:
    """Declare that a function computes each row of its outputs from that row of its inputs alone.

    ``make_train_step`` proves that a loss is a mean over rows, and cannot see into every kernel, or
    through rows that are sorted on their way, as those of experts are. It trusts this declaration,
    and tests it by numbers in the first call of the step: it gives the function, and its gradient,
    the same rows in another order, beside other rows, and in halves. The function itself does not
    change: it runs under ``jit``, ``grad``, ``vmap`` and ``jax.checkpoint``, too.

    Args:
      function: takes and returns pytrees of arrays, all of them with equally many rows.
      in_axes: the axis of the rows in each positional argument, as of ``jax.vmap``: one for all, or
        a tuple; ``None`` for what has no rows, such as parameters. Keyword arguments have none.
      out_axes: the axis of the rows in the outputs.

    Returns:
      The function, which raises ``ArgumentError`` where the numbers of rows differ.

    Raises:
      ArgumentTypeError: ``function`` cannot be called.

    >>> import jax.numpy as jnp
    >>> def experts(x, weights):  # x[rows, features], weights[experts, features]
    ...     chosen = jnp.argmax(x @ weights.T, -1)
    ...     order = jnp.argsort(chosen)
    ...     of_each = jax.lax.ragged_dot(
    ...         x[order], weights[:, :, None], jnp.bincount(chosen, length=len(weights))
    ...     )
    ...     return jnp.zeros((len(x), 1)).at[order].set(of_each)
    >>> rowwise(experts, in_axes=(0, None))(jnp.ones((4, 3)), jnp.ones((2, 3))).shape
    (4, 1)
    """
    if not callable(function):
        raise ArgumentTypeError(
            f"rowwise takes a function; got {type(function).__name__}. Write "
            f"rowwise(function)(x), or @rowwise above it."
        )
    name = getattr(function, "__name__", type(function).__name__)

    # Used as a decorator it keeps the function's own name, while the trace shows this one.
    def called(*args: PyTree, **kwargs: PyTree) -> PyTree:
        axes = tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,) * len(args)
        out = function(*args, **kwargs)
        nothing = lambda args, out: None
        try:
            # vmap checks that there are as many rows along all of these axes.
            jax.eval_shape(jax.vmap(nothing, (axes, out_axes)), args, out)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ArgumentError(
                f"rowwise({name}) takes and returns arrays with as many rows, along the axes "
                f"in_axes={_check.shown(in_axes)} and out_axes={_check.shown(out_axes)}. Say where "
                f"the rows are: in_axes=(0, None) for a second argument without rows; out_axes=1. "
                f"JAX says: {said:.300}"
            ) from error
        return out

    called.__name__ = called.__qualname__ = f"{ROWWISE}_{name}"
    return functools.wraps(function)(jax.jit(called))
