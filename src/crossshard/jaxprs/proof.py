"""Proves that a loss is a mean over the rows of its batch, or finds why it is not.

It chooses which traces of the loss are compared: that of a piece of the batch, and that of one
device which has all pieces.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from crossshard import _jax
from crossshard.jaxprs.kernels import Assumptions
from crossshard.jaxprs.mean_over_rows import Finding, facts_of_outputs, is_mean, is_sum
from crossshard.jaxprs.row_facts import (
    ADDS_SHARDS,
    DIFFERS,
    DIVIDES,
    FALLS,
    GROWS,
    PART_OF_SHARDS,
    Divided,
    Fact,
    Free,
    Obstacle,
    OverRows,
    Rows,
    Total,
    is_inexact_type,
    worst,
)
from crossshard.jaxprs.same_program import is_same_program
from crossshard.jaxprs.walk import equations_of, named_axes
from crossshard.shards.batch_axes import resized

# With this many rows or more, none of JAX's functions leaves out operations.
_MANY = 4
_FAILS = "it cannot be traced with more rows"
_OF_FEW = "it computes something different with this number of rows"
_TRACES_DIFFER = (_FAILS, DIFFERS, _OF_FEW)
_OF_AXES = "what is summed over some axes of the shards is no sum over all of them"
_OF_MICROBATCH = "what is summed over the shards is that of a single microbatch"


class Proof(NamedTuple):
    """What is known of the outputs of a function."""

    facts: tuple[Fact, ...]  # how each output depends on the rows of the batch
    jaxpr: Any  # the jaxpr whose variables the facts name
    assumed: Assumptions  # what is assumed of operations

    def concluded(self, finding: Finding) -> Finding:
        """Return a finding about these outputs with what it assumes.

        A loss that sums over the shards itself gets the kind ``OVER_SHARDS``, unless something is
        wrong.
        """
        names = self.assumed.names()
        over_shards = next(iter(collectives_of(self.jaxpr)), None)
        if over_shards is not None and finding.reason in (FALLS, GROWS):
            adds = ADDS_SHARDS if finding.reason == FALLS else GROWS
            finding = replace(finding, kind=OverRows.COMPARED, reason=adds)
        if over_shards is not None and finding.kind is OverRows.SUM:
            finding = replace(finding, reason=PART_OF_SHARDS)
        if finding.kind is OverRows.COMPARED and names:
            # The reason may not hold if one of the operations does not compute each row alone.
            finding = replace(finding, kind=OverRows.UNDECIDED, assumes=names, compares=True)
        elif finding.kind is not OverRows.UNDECIDED:
            finding = replace(finding, assumes=names)
        stays = finding.reason in (*_TRACES_DIFFER, DIVIDES)
        stays |= finding.reason.endswith("of the number of rows")
        if finding.kind not in (OverRows.MEAN, OverRows.UNDECIDED) or stays or over_shards is None:
            return finding
        name, is_whole = (
            str(over_shards.primitive.name),
            finding.kind is OverRows.MEAN and not names,
        )
        sources = _jax.sources_of(over_shards)
        return Finding(OverRows.OVER_SHARDS, name, sources, is_whole=is_whole)


def collectives_of(jaxpr: Any, axes: Sequence[str] | None = None) -> list[Any]:
    """Return the collectives of a jaxpr over some of these axes, or over any."""
    found = list[Any]()
    for each in equations_of(jaxpr):
        names = named_axes(each)
        if each.primitive.name != "axis_index" and names and (axes is None or names & {*axes}):
            found.append(each)
    return found


def prove(
    trace: Callable[[int, Sequence[str]], Any],
    inputs: Sequence[Fact],
    rows: int,
    times: int = 2,
    shards: Sequence[str] | None = None,
) -> Proof:
    """Return how each output of a function depends on the rows of a batch.

    Its trace for a piece of the batch is compared with that for one device, which has all pieces.
    So Python code that asks for the number of rows, or of shards, gets the numbers of the step.

    Args:
      trace: returns the jaxpr of the function with so many rows, for one shard along the axes of
        the second argument. It may raise anything but for the rows of a piece.
      inputs: what is known of its inputs; see ``facts_of_inputs``.
      rows: the number of rows of a piece.
      times: the number of pieces, at least 2.
      shards: the mesh axes of the shards; all named axes if ``None``.
    """
    first, names = trace(rows, ()), () if shards is None else tuple(shards)
    sizes, of = _jax.bound_axes(), _Pieces(first, trace, inputs, rows, shards)
    number = math.prod(sizes.get(name, 1) for name in names)
    sums = number > 1 and bool(collectives_of(first, names))
    (microbatches, odd), joined = divmod(times, number), number if sums else 1
    in_two_steps = number > 1 and microbatches > 1 and not odd
    if not (sums and in_two_steps):
        proof = of.joined(times, names, 0 if odd and sums else joined)
        undecided = any(getattr(fact, "kind", None) is OverRows.UNDECIDED for fact in proof.facts)
        if not (undecided and in_two_steps):
            return proof
    # The microbatches of each shard are joined first, and then the shards. To a microbatch a sum
    # over the shards is one over its rows.
    whole = of.tried(microbatches * rows)
    if isinstance(whole, Obstacle):
        return Proof((whole,) * len(first.out_avals), first, Assumptions())
    of_shards = _Pieces(whole, trace, inputs, microbatches * rows, shards)
    both = of.compared(microbatches), of_shards.joined(number, names, joined)
    facts = tuple(map(_of_both, *(proof.facts for proof in both)))
    return Proof(facts, both[0].jaxpr, both[worst(both[0].facts) is None].assumed)


class _Pieces(NamedTuple):
    """The trace of a function for a piece of a batch, and what makes another one."""

    first: Any  # the jaxpr for a piece
    trace: Callable[[int, Sequence[str]], Any]  # as in ``prove``, and so are the others
    inputs: Sequence[Fact]
    rows: int
    shards: Sequence[str] | None
    done: Sequence[str] = ()  # the axes of shards along which it is one already

    def joined(self, times: int, names: Sequence[str], joined: int) -> Proof:
        """Return what a trace for one shard along these axes shows, with ``times`` as many rows.

        If something is summed over some of the axes alone, they are joined one after the other.
        """
        sizes = _jax.bound_axes()
        axes = [name for name in names if sizes.get(name, 1) > 1]
        over = [named_axes(each) & {*axes} for each in equations_of(self.first)]
        if joined != times or not any(0 < len(each) < len(axes) for each in over):
            return self.compared(times, along=axes, joined=joined)
        proofs, of = list[Proof](), self
        for axis in axes:
            proofs.append(of.compared(sizes[axis], along=(axis,), joined=sizes[axis]))
            rows, done = sizes[axis] * of.rows, (*of.done, axis)
            first = of.tried(rows, done)
            if isinstance(first, Obstacle):
                break
            of = of._replace(first=first, rows=rows, done=done)
        facts = tuple(map(_of_axes, zip(*(proof.facts for proof in proofs), strict=True)))
        return proofs[0]._replace(facts=facts)

    def compared(self, times: int, *, along: Sequence[str] = (), joined: int = 1) -> Proof:
        """Return what a trace with ``times`` as many rows shows, for one shard ``along`` axes.

        If the rows are few, a third trace is needed, with twice as many rows as the second.
        ``joined`` is as in ``_OverRows``.
        """
        first, inputs, rows, alone = self.first, self.inputs, self.rows, (*self.done, *along)
        whole, assumed = self.tried(times * rows, alone), Assumptions()
        of = functools.partial(
            facts_of_outputs,
            inputs=inputs,
            shards=self.shards,
            joined=joined,
            along=along,
            done=self.done,
        )
        facts = of((first, whole), rows=rows, times=times, assumed=assumed)
        differs = any(isinstance(fact, Obstacle) and fact.reason == DIFFERS for fact in facts)
        if along and (isinstance(whole, Obstacle) or (differs and joined != 1)):
            # Such as a ring of as many steps as there are shards.
            return self.compared(times, joined=1 if joined == 1 else 0)
        if assumed.names() and any(map(_compares, facts)):
            # Rows may be compared whatever the operations do, so that no numbers need to show it.
            nothing = Assumptions(allowed=False)
            known = of((first, whole), rows=rows, times=times, assumed=nothing)
            if any(map(_compares, known)):
                return Proof(known, first, nothing)
        is_known = not any(isinstance(fact, Obstacle) for fact in facts)
        if rows >= _MANY or is_known or joined != 1 or isinstance(whole, Obstacle):
            return Proof(facts, first, assumed)
        # With one row JAX leaves out operations that would repeat it. So the program with more rows
        # is analysed, and compared with the one of a single row.
        larger = self.tried(2 * times * rows, alone)
        general = of((whole, larger), rows=times * rows, times=2, assumed=assumed)
        if all(isinstance(fact, Obstacle) for fact in general):
            return Proof(facts, first, assumed)
        same = is_same_program((first, whole, larger), (rows, times * rows, 2 * times * rows))
        few = Obstacle(OverRows.UNDECIDED, _OF_FEW)

        def better(fact: Fact, of_more: Fact) -> Fact:
            if not isinstance(fact, Obstacle) or isinstance(of_more, Obstacle):
                return fact
            return of_more if same else few if fact.kind is OverRows.UNDECIDED else fact

        return Proof(tuple(map(better, facts, general)), whole, assumed)

    def tried(self, rows: int, alone: Sequence[str] = ()) -> Any:
        """Return the jaxpr with so many rows, or the obstacle that it raises something."""
        try:
            return self.trace(rows, alone)
        except Exception as error:  # a loss may raise anything on other shapes
            return Obstacle(OverRows.UNDECIDED, _FAILS, source=_jax.source_of_error(error))


def _of_axes(facts: Sequence[Fact]) -> Fact:
    """Return the fact of a value of each shard, given those along each axis of the shards."""
    obstacle, means = worst(facts), list(map(is_mean, facts))
    if obstacle is not None:
        return obstacle
    if any(means) and any(map(is_sum, facts)):
        return Obstacle(OverRows.COMPARED, _OF_AXES)
    return facts[means.index(False) if False in means else 0]


def _of_both(of_microbatches: Fact, of_shards: Fact) -> Fact:
    """Return the fact of a value of each microbatch of each shard."""
    one, other = of_microbatches, of_shards
    if isinstance(one, Divided) and getattr(other, "kind", None) is OverRows.UNDECIDED:
        return one  # it is a ratio, whatever the shards send each other
    obstacle = worst([one, other])
    if obstacle is not None:
        return obstacle
    if isinstance(one, Divided) and isinstance(other, Free | Total) and is_mean(other):
        return one
    if is_sum(one) and is_mean(other):
        return Obstacle(OverRows.COMPARED, _OF_MICROBATCH)
    return other


def _compares(fact: Fact) -> bool:
    return isinstance(fact, Obstacle) and fact.kind is OverRows.COMPARED


def types_with(batch: Any, axes: Sequence[int], rows: int) -> Any:
    """Return the types of a batch with ``rows`` rows along these axes of its arrays."""
    leaves, tree = jax.tree.flatten(batch)
    # Keeps the mesh in the type: without it jnp.where would reshard, unlike in the first trace.
    of = lambda x, axis: jax.typeof(x).update(shape=resized(x.shape, axis, rows))
    return tree.unflatten(list(map(of, leaves, axes)))


def facts_of_inputs(
    leaves: Sequence[Any], axes: Sequence[int], others: Any, own: Any
) -> list[Fact]:
    """Return the facts of the inputs of a function.

    Args:
      leaves: the arrays of the batch, which come first.
      axes: the axis of the rows of each.
      others: inputs without rows.
      own: inputs without rows that differ from piece to piece, such as PRNG keys.
    """
    inputs: list[Fact] = [
        Rows(axis, entry=place, counts=not is_inexact_type(x.dtype))
        for place, (x, axis) in enumerate(zip(leaves, axes, strict=True))
    ]
    inputs += [Free()] * len(jax.tree.leaves(others))
    return [*inputs, *[Free(own=True)] * len(jax.tree.leaves(own))]
