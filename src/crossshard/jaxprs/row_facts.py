"""Facts: how a value in a loss depends on the rows of the batch, and how facts join."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from crossshard.jaxprs.primitives import CHOOSES, HOMOGENEOUS, OF_COUNTS, OF_SIGN
from crossshard.jaxprs.walk import are_alike


class OverRows(enum.Enum):
    """How a loss depends on the rows of its batch."""

    MEAN = "a mean over the rows"
    SUM = "a sum over the rows"
    RATIO = "a ratio of two sums over the rows"
    COUNTED = "sums over the rows, divided by their counts"
    COMPARED = "a comparison of rows"
    OVER_SHARDS = "a sum over the shards by itself"
    UNDECIDED = "not decided"


# Reasons for which a step has messages or numbers of their own.
DIFFERS = "it computes something different with more rows"
GROWS = "it grows with the number of rows"
FALLS = "it falls with the number of rows"
ADDS_SHARDS = "the shards' means are added up"
PART_OF_SHARDS = "a shard's part of what all of them add up to"
ADDS_UNLIKE = "terms that depend differently on the number of rows"
ENDS_LOOP = "rows decide a while"
MEETS_EARLIER = "a row meets those before it"
OF_PLACE = "the position of a row"
OF_SHARD = "axis_index"
OF_NUMBER = "the number of rows"
OF_FIXED = "what changes with the number of rows, and of a fixed number"
OF_RANGE = "of what changes with the number of rows, to a type of at most 8 bits"
OF_GRADIENT = "in a gradient of its own, "
SAME_NOISE = "noise from a key that is the same on every shard"
DECIDED = "something of all rows decides"
DIVIDES = "a sum over rows divides what is not decided"
BOUNDS = "a bound of a sum over rows"


# Dataclasses, since tuples of two kinds could be equal.
@dataclass(frozen=True)
class Free:
    """A value that does not depend on the batch."""

    power: int = 0  # the power of the number of rows that it grows with
    own: bool = False  # whether it differs from shard to shard
    # The number that all its elements are, if known; in the trace with fewer rows.
    number: float | None = None
    added: bool = False  # whether it is a sum over the shards, and nothing was done to it since


@dataclass(frozen=True)
class Rows:
    """An array with rows along an axis, each computed from one row of the batch."""

    axis: int  # the axis, which reshapes to ``(outer, rows, inner)``
    outer: int = 1  # how many blocks of all rows follow each other along the axis
    inner: int = 1  # how many neighbouring slices along the axis belong to one row
    power: int = 0  # the power of the number of rows that it grows with
    # Whether all slices along the axis are equal, so that any ``outer`` and ``inner`` fit.
    constant: bool = False
    zero: bool = False  # whether all elements are 0
    # If it is a leaf of the batch, but for shape and dtype: the place of that leaf.
    entry: int | None = None
    counts: bool = False  # whether all elements are known to be integers, of any dtype
    noise: bool = False  # whether it is made of random numbers alone

    @property
    def is_plain(self) -> bool:
        """Whether each slice along the axis is one row."""
        return (self.outer, self.inner) == (1, 1)


@dataclass(frozen=True)
class Chunks:
    """Rows in a fixed number of chunks along axis 0, for a loop over them.

    Which rows are in the first chunk depends on the number of rows, so all chunks have to be
    treated alike.
    """

    number: int  # how many chunks there are
    size: int  # how many slices of rows a chunk has
    axis: int  # the axis of these slices
    power: int = 0  # the power of the number of rows that it grows with
    counts: bool = False  # as in ``Rows``


@dataclass(frozen=True)
class Index:
    """Indices that hold the number of each row: in one column of the last axis, or in all."""

    axis: int
    column: int | None = None  # ``None`` for all


@dataclass(frozen=True)
class Shape:
    """A vector of integers, among them the number of rows: Keras multiplies such shapes."""

    # Its values in each of the two traces.
    one: tuple[int, ...]
    other: tuple[int, ...]


@dataclass(frozen=True)
class OneRow:
    """A value of one row, in a scan over the rows; ``power`` is as in ``Rows``."""

    power: int = 0


@dataclass(frozen=True)
class SoFar:
    """A sum over the rows so far, in a scan over the rows or over chunks of them."""

    power: int | None = None  # of what each row adds; ``None`` if nothing was added yet
    counts: bool = True  # whether all that is added is known to be integers


@dataclass(frozen=True)
class Total:
    """A sum over rows."""

    power: int  # the power of the number of rows that it grows with: 1 for a sum, 0 for a mean
    # Which sum it is: the place of the batch's leaf that is summed, or a key that no other sum has;
    # ``None`` if unknown.
    of: Any = None
    # What was done to it since, after which it may only divide: ``"max"`` with a bound, ``"plus"``
    # something small, or ``"guard"``, another value where it is 0; empty if nothing was.
    moved: str = ""
    # That bound, what was added, or that value. If ``moved`` is empty: how much more each row
    # counts than what is summed, infinite if unknown.
    bound: float = 0.0
    counts: bool = False  # whether it was a sum of integers before it was moved
    single: bool = False  # whether it is one number
    equation: Any = field(default=None, compare=False)  # the one that did something to it

    def is_same(self, other: "Total") -> bool:
        """Return whether it is known to be the same value as another sum."""
        same = (self.of, self.moved, self.bound) == (other.of, other.moved, other.bound)
        return same and self.of is not None


@dataclass(frozen=True)
class Divided:
    """A value divided by a sum over rows, which is one number."""

    fact: Free | Rows | Total  # the dividend
    by: Total  # the divisor
    equation: Any = field(compare=False)  # the equation that divides
    adds: bool = False  # whether something is added to the quotient that is no sum over rows
    # What the equations return that divide, and those that compare the sum with 0 to choose.
    at: frozenset[Any] = field(default=frozenset(), compare=False)

    def together(self, *others: "Divided | NonZero", adds: bool = False) -> "Divided":
        """Return this value where others, too, take part in it, or choose it."""
        divided = [fact for fact in others if isinstance(fact, Divided)]
        guards = [set(fact.equation.outvars) for fact in others if isinstance(fact, NonZero)]
        at = self.at.union(*(fact.at for fact in divided), *guards)
        return replace(self, adds=any([self.adds, adds, *(x.adds for x in divided)]), at=at)

    def with_fact(self, fact: "Fact") -> "Fact":
        """Divide another value by the same sum; an obstacle stays one."""
        return replace(self, fact=fact) if isinstance(fact, Free | Rows | Total) else fact


@dataclass(frozen=True)
class NonZero:
    """A bool: whether a sum over rows is more than 0. It guards a division by that sum."""

    of: Any  # which sum, as in ``Total``
    negated: bool = False  # whether it is true where the sum is 0
    equation: Any = None  # the equation that compares

    def tests(self, total: Total) -> bool:
        """Return whether it is known to be about this sum."""
        return self.of is not None and self.of == total.of


@dataclass(frozen=True)
class Obstacle:
    """A value that is none of the above, because of an equation or a source line."""

    kind: OverRows  # what it is
    reason: str  # why
    equation: Any = None  # the equation that makes it so; ``None`` if unknown
    source: str = ""  # the source line, if it is known without an equation
    # Whether it has rows of other shards, so that the user means rows to be compared.
    brings: bool = False
    # Whether it holds something of all rows, such as a mean over them: what is not linear in it
    # compares rows. So no numbers are needed, which may hide that.
    of_all: bool = False
    by: Any = field(default=None, compare=False)  # the ``Total`` that divides in it, if one does


Fact = Free | Rows | Chunks | Index | Shape | OneRow | SoFar | Total | Divided | NonZero | Obstacle


class Pair(NamedTuple):
    """Corresponding equations of the two traces."""

    one: Any  # the equation of the trace with fewer rows
    other: Any  # the one of the trace with more rows
    rows: int  # the number of rows of the first trace
    times: int  # how many times as many rows the second trace has
    name: str  # the name of the primitive

    def compared(self, reason: str) -> Obstacle:
        """Return the obstacle that the equation compares rows."""
        return Obstacle(OverRows.COMPARED, reason, self.one)

    def undecided(self, reason: str) -> Obstacle:
        """Return the obstacle that nothing is known of the equation."""
        return Obstacle(OverRows.UNDECIDED, reason, self.one)

    def is_alike(self) -> bool:
        """Return whether the parameters are equal, but for lengths, which the shapes have too."""
        return are_alike(self.one, self.other, _OF_SHAPE)

    def converts(self) -> bool:
        """Return whether it changes numbers by their type, as from float to integer."""
        out = self.one.outvars[0].aval.dtype
        if self.name == "convert_element_type":
            return out == np.bool_ or (is_inexact(self.one.invars[0]) and not is_inexact_type(out))
        return self.name == "div" and not is_inexact_type(out)

    def narrows(self) -> bool:
        """Return whether it casts to so few bits that small numbers become 0."""
        out, params = self.one.outvars[0].aval.dtype, self.one.params
        if self.name == "reduce_precision":
            return bool(params["exponent_bits"] + params["mantissa_bits"] < 8)
        return self.name == "convert_element_type" and is_narrow(out)


# Parameters that hold the lengths of axes; and the function of a scatter, which its name implies.
_OF_SHAPE = frozenset(
    "limit_indices new_sizes out_sharding reps shape sharding slice_sizes update_jaxpr".split()
)


def are_counts(pair: Pair, facts: Sequence[Fact]) -> bool:
    """Return whether the output is known to be integers, of any dtype."""
    if _is_count(pair.one.outvars[0]):
        return True
    return pair.name in OF_COUNTS and all(map(_counts, facts, pair.one.invars))


def _is_count(atom: Any) -> bool:
    return getattr(atom.aval.dtype, "kind", "") in ("b", "i", "u")


def _counts(fact: Fact, atom: Any) -> bool:
    if _is_count(atom):
        return True
    match fact:
        case Free(number=float(number)):
            return number.is_integer()
        case Rows(counts=counts) | Chunks(counts=counts) | Total(counts=counts):
            return counts
        case SoFar(counts=counts):
            return counts
    return False


def shape_of(atom: Any) -> tuple[int, ...]:
    """Return the shape of a variable; empty if it has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def is_inexact(atom: Any) -> bool:
    """Return whether a variable has floats or complex numbers."""
    return is_inexact_type(atom.aval.dtype)


def is_narrow(dtype: Any) -> bool:
    """Return whether floats have at most 8 bits."""
    return is_inexact_type(dtype) and bool(jnp.finfo(dtype).bits <= 8)


def is_inexact_type(dtype: Any) -> bool:
    """Return whether a dtype is one of floats or complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def worst(facts: Sequence[Fact]) -> Obstacle | None:
    """Return the obstacle among facts that explains most; ``None`` if there is none."""
    order = OverRows.COMPARED, OverRows.OVER_SHARDS, OverRows.UNDECIDED
    found = [fact for fact in facts if type(fact) is Obstacle]
    rank = lambda x: (not x.brings, order.index(x.kind), x.reason != DIVIDES, not x.of_all)
    return min(found, key=rank, default=None)


def layout(facts: Sequence[Fact]) -> Rows | None:
    """Return a fact with the order of rows that all facts share; ``None`` if they share none."""
    rows = [fact for fact in facts if isinstance(fact, Rows)]
    varying = [fact for fact in rows if not fact.constant] or rows[:1]
    return varying[0] if len({(fact.outer, fact.inner) for fact in varying}) == 1 else None


def joined(one: Fact, other: Fact) -> Fact:
    """Return what is true of a value that has the one fact or the other."""
    if one == other:
        return one
    obstacle = worst([one, other])
    if obstacle is not None:
        return obstacle
    if isinstance(other, Free) and not isinstance(one, Free):
        one, other = other, one
    match one, other:
        case Free(power), Free(by) if power == by or one.number == 0 or other.number == 0:
            return Free(by if one.number == 0 else power, one.own or other.own)
        case Free(number=0), Total() | Divided(Total()) | OneRow():
            return other
        case Free(power), Total(by, moved="") if power == by:
            return Total(power, bound=math.inf)
        case Free(power), Divided(Total(by)) if power == by:
            return replace(other, adds=True)
        case Free(0), NonZero():
            return other
        case (NonZero() as guard, Divided(Total(), by) as ratio) | (
            Divided(Total(), by) as ratio,
            NonZero() as guard,
        ) if guard.tests(by):
            return ratio.together(guard)
        case Free(power), OneRow(by) if power == by:
            return other
        case Total(power, moved=""), Total(by, moved="") if power == by:
            return Total(power, bound=math.inf if one.bound or other.bound else 0.0)
        case Divided(by=by), Divided(by=also) if by == also or by.is_same(also):
            return one.together(other).with_fact(joined(one.fact, other.fact))
        case Rows(), Rows() if one.axis == other.axis:
            found = layout((one, other))
            if found is not None and (one.power == other.power or one.zero or other.zero):
                power = other.power if one.zero else one.power
                constant = one.constant and other.constant
                return Rows(one.axis, found.outer, found.inner, power, constant)
    for fact in (one, other):
        if isinstance(fact, NonZero):
            return Obstacle(OverRows.COMPARED, "a sum over rows decides", fact.equation)
    return Obstacle(OverRows.UNDECIDED, "one path treats rows in another way than the next")


def outside(fact: Fact, place: Any = None) -> Fact:
    """Return a fact from within a call, a branch or a loop as it is outside.

    A variable within may have several values, one for each call or iteration, so a sum that is
    identified by one needs a new key.

    Args:
      fact: the fact within.
      place: tells the values of this call from those of others; ``None`` if nothing does.
    """
    match fact:
        case Total(of=of) | NonZero(of=of):
            return replace(fact, of=_outside(of, place))
        case Divided(inner, by):
            own = replace(fact, by=replace(by, of=_outside(by.of, place)))
            return own.with_fact(outside(inner, place))
    return fact


def _outside(of: Any, place: Any) -> Any:
    if of is None or isinstance(of, int):
        return of
    return None if place is None else (place, of)


def chosen(name: str, facts: Sequence[Fact]) -> tuple[Sequence[Fact], Sequence[Fact]]:
    """Return the facts of the inputs that choose elements, and those of the rest."""
    where = range(len(facts))[CHOOSES.get(name, slice(0))]
    rest = [fact for place, fact in enumerate(facts) if place not in where]
    return [facts[place] for place in where], rest


def power_of(pair: Pair, facts: Sequence[Fact]) -> int | None:
    """Return the power of the number of rows that the output grows with; ``None`` if unknown."""
    name, powers = pair.name, list(map(_power, facts))
    if not any(powers):
        return 0
    if pair.converts() or pair.narrows():
        return None
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    if name == "integer_pow":
        return int(powers[0] * pair.one.params["y"])
    if name == "square":
        return 2 * powers[0]
    if name in ("sqrt", "rsqrt") and powers[0] % 2 == 0:
        return powers[0] // (2 if name == "sqrt" else -2)
    chooses, rest = chosen(name, facts)
    found = {_power(fact) for fact in rest if not is_zero(fact)}
    if len(found) > 1 or any(map(_power, chooses)):
        return None
    if name in OF_SIGN:
        return 0
    return max(found, default=0) if name in HOMOGENEOUS else None


def of_unlike_powers(pair: Pair, facts: Sequence[Fact]) -> Obstacle:
    """Return the obstacle if ``power_of`` is unknown.

    A bound of rows, or a comparison with one, that stays with more rows is another one for a shard.
    What is tiny or huge only guards, which numbers decide.
    """
    if pair.narrows():
        return pair.compared(f"a cast {OF_RANGE}")
    numbers = [abs(x.number) for x in facts if isinstance(x, Free) and x.number and not x.power]
    bounds = pair.name in _BOUNDS and any(_TINY < x < 1 / _TINY for x in numbers)
    if bounds and any(isinstance(x, Rows | OneRow) and x.power for x in facts):
        return pair.compared(f"{pair.name} of {OF_FIXED}")
    return pair.undecided(f"{pair.name} of {OF_NUMBER}")


_BOUNDS, _TINY = frozenset("clamp max min eq ne lt le gt ge".split()), 1e-6


def _power(fact: Fact) -> int:
    return fact.power if isinstance(fact, Free | Rows | OneRow) else 0


def is_zero(fact: Fact) -> bool:
    """Return whether a value is known to be 0 everywhere."""
    return (isinstance(fact, Free) and fact.number == 0) or (isinstance(fact, Rows) and fact.zero)


# The derivatives of a mean over rows, with which a function's own derivative is compared.

_NO_SLOPE = Obstacle(OverRows.UNDECIDED, "a derivative by what is no row and no sum")


def tangent(fact: Fact) -> Fact:
    """Return the fact of a value's tangent."""
    match fact:
        case Free(power, own):
            return Free(power, own)
        case Rows():
            return replace(fact, zero=False, entry=None)
        case Total(power, moved=""):
            return Total(power)
        case OneRow():
            return fact
    return _NO_SLOPE


def cotangent(fact: Fact) -> Fact:
    """Return the fact of a value's cotangent: the derivative of a mean over rows by the value."""
    match fact:
        case Free(power):
            return Total(-power)
        case Rows(axis, outer, inner, power):
            return Rows(axis, outer, inner, -1 - power)
        case Total(power, moved=""):
            return Free(-power)
        case OneRow(power):
            return OneRow(-1 - power)
    return _NO_SLOPE


def is_slope(fact: Fact, expected: Fact) -> bool:
    """Return whether a fact is the expected one, or that of zeros."""
    if is_zero(fact):
        return True
    match fact, expected:
        case Rows(), Rows():
            alike = layout([fact, expected]) is not None
            same = (fact.axis, fact.power) == (expected.axis, expected.power)
            return alike and same
        case ((Total(power, moved="") | Free(power)), Total(by)):
            return power == by
        case OneRow(power), Total(by):
            return power == by - 1
        case (Free(power), Free(by)) | ((OneRow(power) | Free(power)), OneRow(by)):
            return power == by
    return False
