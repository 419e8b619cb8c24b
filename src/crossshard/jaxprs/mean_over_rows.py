"""How a loss depends on the rows of its batch, given two traces of it, walked side by side.

The second has several times as many rows. The differences show where rows are: an array whose shape
grows along an axis has rows there, and a literal that grows by the same factor counts them.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _jax
from crossshard.jaxprs import row_rules as rules
from crossshard.jaxprs.kernels import DEFINED_BY_JAXPR, Assumptions, is_rowwise, of_kernel
from crossshard.jaxprs.primitives import ADDS, ELEMENTWISE, KEYS, MOVES, OVER_SHARDS, PASSES
from crossshard.jaxprs.row_facts import (
    BOUNDS,
    DECIDED,
    DIFFERS,
    DIVIDES,
    ENDS_LOOP,
    FALLS,
    GROWS,
    MEETS_EARLIER,
    OF_GRADIENT,
    OF_PLACE,
    OF_RANGE,
    OF_SHARD,
    Chunks,
    Divided,
    Fact,
    Free,
    Index,
    NonZero,
    Obstacle,
    OneRow,
    OverRows,
    Pair,
    Rows,
    Shape,
    SoFar,
    Total,
    are_counts,
    cotangent,
    is_inexact,
    is_narrow,
    is_slope,
    is_zero,
    joined,
    of_unlike_powers,
    outside,
    power_of,
    shape_of,
    tangent,
    worst,
)
from crossshard.jaxprs.same_program import (
    do_the_same,
    rule_of_derivative,
    scales,
    takes_cotangents,
)
from crossshard.jaxprs.slices import axis_of_slices
from crossshard.jaxprs.walk import (
    Analysis,
    Equations,
    Mismatch,
    Scan,
    control_flow,
    follow,
    has_own_derivative,
    has_ref,
    named_axes,
    opened,
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """How a loss depends on the rows of its batch, and why."""

    kind: OverRows  # what it is
    reason: str = ""  # the operation that decides; empty for a mean
    source: str = ""  # its source line; empty if unknown
    # The following describe the divisor of a ratio, which is a sum over rows.
    # If it is the sum of a leaf of the batch: the place of that leaf.
    entry: int | None = None
    power: int = 1  # the power of the number of rows that it grows with
    # What was done to it: ``"max"`` with a bound, ``"plus"`` something small, or ``"guard"``,
    # another value where it is 0; empty if nothing was.
    moved: str = ""
    bound: float = 0.0  # that bound, what was added, or that value
    counts: bool = False  # whether it is known to be a sum of integers
    adds: bool = False  # as in ``Divided``
    code: str = ""  # the line of code that divides; empty if unknown
    by: Any = dataclasses.field(default=None, compare=False, repr=False)  # see ``Total.of``
    # As in ``Divided``.
    at: frozenset[Any] = dataclasses.field(default=frozenset(), compare=False, repr=False)
    # These describe every finding.
    assumes: tuple[str, ...] = ()  # the operations that are assumed to compute each row alone
    compares: bool = False  # whether it compares rows if those do; of what is undecided
    is_whole: bool = False  # of a sum over the shards: whether it is shown to be one shard's of all
    of: str = ""  # the part of a ``Mean`` that it describes; empty for a number

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        assumes = bool(self.assumes) and not self.compares
        alone = f", if each row is computed alone by {', '.join(self.assumes)}" * assumes
        return f"{self.kind.value}{reason}{f' ({self.source})' if self.source else ''}{alone}"


def facts_of_outputs(
    traces: Sequence[Any],
    inputs: Sequence[Fact],
    rows: int,
    times: int,
    shards: Sequence[str] | None,
    assumed: Assumptions,
    joined: int = 1,
    along: Sequence[str] = (),
    done: Sequence[str] = (),
) -> tuple[Fact, ...]:
    """Return the facts of the outputs of two jaxprs, the second with ``times`` as many rows.

    What this assumes of operations is added to ``assumed``; what follows is as in ``_OverRows``.
    """
    if isinstance(traces[1], Obstacle):
        return (traces[1],) * len(traces[0].out_avals)
    try:
        analysis = _OverRows(rows, times, shards, assumed, joined, along, done)
        return tuple(follow(analysis, traces, inputs))
    except Mismatch as mismatch:
        differs = Obstacle(OverRows.UNDECIDED, DIFFERS, mismatch.equation)
        return (differs,) * len(traces[0].out_avals)


_COUNTS = "it computes with the number of rows"


def is_mean(fact: Fact) -> bool:
    """Return whether the mean of the pieces' values is the value of the whole."""
    return isinstance(fact, Free | Total) and found(fact).kind is OverRows.MEAN


def is_sum(fact: Fact) -> bool:
    """Return whether the sum of the pieces' values is the value of the whole."""
    match fact:
        case Total(power=1, moved="") | Free(power=1):
            return True
    return False


def is_free(fact: Fact) -> bool:
    """Return whether a value is the same for each piece and for the whole."""
    return isinstance(fact, Free) and not (fact.power or fact.own)


def found(fact: Fact) -> Finding:
    """Return the finding about a loss, given its fact."""
    match fact:
        case Obstacle(kind, reason, equation, source):
            by = None if fact.by is None else fact.by.of
            code = "" if by is None else _jax.code_of(equation)
            source = source or _jax.sources_of(equation) if equation else source
            kind = OverRows.COMPARED if reason == BOUNDS else kind  # it has divided nothing
            return Finding(kind, reason, source, code=code, by=by)
        case Divided(Total(0), by, equation, adds, at):
            return Finding(
                OverRows.RATIO,
                source=_jax.sources_of(equation),
                entry=by.of if isinstance(by.of, int) else None,
                power=by.power,
                moved=by.moved,
                bound=by.bound,
                counts=by.counts,
                code=_jax.code_of(equation),
                by=by.of,
                adds=adds,
                at=at,
            )
        case Free(power=0) | Total(power=0, moved=""):
            return Finding(OverRows.MEAN)
        case Total(power=1, moved=""):
            return Finding(OverRows.SUM)
        case Total(moved="plus", equation=equation):
            reason = "a number that is added to a sum over rows"
            return Finding(OverRows.COMPARED, reason, _jax.sources_of(equation))
        case Total(moved="max" | "guard", equation=equation) | Divided(Free(), equation=equation):
            reason = f"{equation.primitive.name} of a sum over rows"
            return Finding(OverRows.COMPARED, reason, _jax.sources_of(equation))
        case NonZero():
            return Finding(OverRows.COMPARED, "a sum over rows decides")
        case Free(power) | Total(power) | Divided(Total(power)) if power < 0:
            return Finding(OverRows.UNDECIDED, FALLS)
        case _:
            return Finding(OverRows.UNDECIDED, GROWS)


@dataclasses.dataclass(eq=False)
class _OverRows(Analysis[Fact]):
    """The facts of two traces, the second with several times as many rows as the first."""

    rows: int  # the number of rows of the first
    times: int  # how many times as many rows the second has
    shards: Sequence[str] | None = None  # the mesh axes of the shards; ``None`` for all
    assumed: Assumptions = dataclasses.field(default_factory=Assumptions)
    # How many shards of the first are one in the second, which has the rows of all; 0 if nothing is
    # known of what they send each other.
    joined: int = 1
    along: Sequence[str] = ()  # the axes of those shards
    done: Sequence[str] = ()  # the axes along which both have one shard
    # Whether custom derivatives are analysed, too; not within one.
    derives: bool = True

    def __post_init__(self) -> None:
        self.memory = {}

    def constant(self, values: Sequence[Any]) -> Fact:
        # A value that is traced outside of the loss may differ from shard to shard.
        if any(isinstance(value, jax.core.Tracer) for value in values):
            same = values[0] is values[1]
            return Free(own=True) if same else Obstacle(OverRows.UNDECIDED, DIFFERS)
        return self.literal(values, None)

    def literal(self, values: Sequence[Any], equation: Any) -> Fact:
        one, other = values
        if one is other and np.ndim(one):
            return Free()
        try:
            one, other = np.asarray(one), np.asarray(other)
        except TypeError:
            same = one is other
            return Free() if same else Obstacle(OverRows.UNDECIDED, DIFFERS, equation)
        if one.shape == other.shape:
            if np.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.inexact)):
                return Free(number=_number(one))
            if one.ndim == 1 and one.size < 9 and one.dtype.kind in "iu":
                return Shape(tuple(one.tolist()), tuple(other.tolist()))
            powers = (p for p in (1, -1, 2, -2) if scales(one, other, self.times, p))
            power = next(powers, None)
            if power is not None:
                return Free(power, number=_number(one))
        counts = one.ndim == 1 and np.array_equal(other, np.arange(self.times * self.rows))
        if counts and np.array_equal(one, np.arange(self.rows)):
            return Index(0)
        return Obstacle(OverRows.UNDECIDED, _COUNTS, equation)

    def join(self, facts: Sequence[Fact]) -> Fact:
        first, *rest = facts
        if isinstance(first, Obstacle) and first.reason == DECIDED:
            if len(rest) > 1 and len({*rest}) == 1 and getattr(rest[0], "number", None) is not None:
                return rest[0]  # such as the 1 of a ``Mean``, whatever is chosen
            if rules.may_guard(rest):
                facts = [replace(first, kind=OverRows.UNDECIDED), *rest]
        return outside(functools.reduce(joined, facts))

    def control(self, equations: Equations, decides: Fact) -> Fact | None:
        name, pair = equations[0].primitive.name, self._pair(equations)
        match decides:
            case Free(power=0):
                return None
            case Obstacle(OverRows.UNDECIDED, of_all=True) if name == "cond":
                return pair.compared(DECIDED)
            case Obstacle():
                return replace(decides, of_all=False)
            case OneRow(0) | NonZero():
                return decides
            case Total() | Divided(Total() | Free()):
                return pair.compared(f"a sum over rows decides a {name}")
            case _:
                return pair.undecided(ENDS_LOOP if name == "while" else f"rows decide a {name}")

    def enters(self, equations: Equations, inputs: Sequence[Fact]) -> bool:
        kinds = [control_flow(each) for each in equations]
        loops = [each for each in kinds if isinstance(each, Scan)]
        if is_rowwise(equations[0]):
            return False
        in_chunks = bool(loops) and any(isinstance(fact, Chunks) for fact in inputs)
        return len({each.steps for each in loops}) < 2 and not in_chunks

    def element(self, equations: Equations, fact: Fact) -> Fact:
        return self._with_axes(equations, fact, -1)

    def stacked(self, equations: Equations, fact: Fact) -> Fact:
        return self._with_axes(equations, fact, 1)

    def _with_axes(self, equations: Equations, fact: Fact, axes: int) -> Fact:
        """Return the fact of an array with one axis more in front; one less if ``axes`` is -1."""
        match fact:
            case Rows(0) | Index(0) if axes < 0:
                return self._pair(equations).undecided("a scan over the rows")
            case Rows(axis):
                return replace(fact, axis=axis + axes, entry=None)
            case Index(axis):
                return replace(fact, axis=axis + axes)
            case Total():
                return replace(fact, single=False, of=None)
            case Divided(inner):
                return fact.with_fact(self._with_axes(equations, inner, axes))
        return fact

    def returned(
        self, equations: Equations, inputs: Sequence[Fact], outputs: Sequence[Fact]
    ) -> Sequence[Fact]:
        if self.derives and has_own_derivative(equations[0]):
            obstacle = self._of_derivative(equations, inputs, outputs)
            if obstacle is not None:
                outputs = [rules.with_own_derivative(fact, obstacle) for fact in outputs]
        # Another call of the same jaxpr has other values.
        outputs = [
            fact if fact in inputs else outside(fact, equations[0].outvars[0]) for fact in outputs
        ]
        # A function that JAX has traced before has no source lines, and takes the call's.
        return [
            replace(fact, equation=equations[0])
            if isinstance(fact, Obstacle | Divided) and not _jax.has_source(fact.equation)
            else fact
            for fact in outputs
        ]

    def left(self, equations: Equations, outputs: Sequence[Fact]) -> Sequence[Fact]:
        # A sum that a loop carries is what its output is, whatever is done to it afterwards.
        def named(fact: Fact, out: Any) -> Fact:
            is_new = isinstance(fact, Total) and fact.of is None and not fact.moved
            return self._checked_output(self._pair(equations), fact, out, out) if is_new else fact

        return list(map(named, outputs, equations[0].outvars))

    def transfer(self, equations: Equations, inputs: Sequence[Fact]) -> Sequence[Fact]:
        pair = self._pair(equations)
        return rules.of_all_rows(pair, inputs, self._outputs(pair, inputs))

    def _outputs(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact]:
        number = len(pair.one.outvars)
        if not number:  # a debug print
            return []
        if pair.name in PASSES and len(inputs) == number:
            return inputs
        if pair.name == "select_n" and is_zero(inputs[0]):
            # Such as a wrap-around of negative indices, which no row's number needs.
            return [inputs[1]]
        if has_ref(pair.one):
            return [pair.undecided("a value that is written in place")] * number
        if pair.name == "axis_index":
            return [self._index_of_shard(pair)]
        if named_axes(pair.one):
            return self._over_shards(pair, inputs)
        if pair.one.effects and pair.name != "scan":
            return [pair.undecided(f"{pair.name}, which has an effect")] * number
        obstacle = worst(inputs)
        if obstacle is not None:
            same = all(map(_same_shape, pair.one.outvars, pair.other.outvars))
            if obstacle.reason == OF_SHARD and pair.name == "random_fold_in" and same:
                return [Free(own=True)]
            return [rules.of_undecided(pair, inputs, obstacle)] * number
        if pair.name == "scan":
            return self._checked(pair, self._scan_over_rows(pair, inputs))
        if pair.name == "custom_linear_solve":
            return self._solved(pair, inputs)
        outputs = self._transferred(pair, inputs)
        if isinstance(outputs, Obstacle):
            return [outputs] * number
        return self._checked(pair, outputs)

    def _checked(self, pair: Pair, outputs: Sequence[Fact]) -> list[Fact]:
        return [
            self._checked_output(pair, fact, *both)
            for fact, *both in zip(outputs, pair.one.outvars, pair.other.outvars, strict=True)
        ]

    def _index_of_shard(self, pair: Pair) -> Fact:
        """Return the fact of a shard's index: one shard that has all rows has the index 0."""
        names, sizes = named_axes(pair.one), _jax.bound_axes()
        if names <= {*self.done} or all(sizes.get(name, 1) == 1 for name in names):
            return Free()
        if self.shards is not None and not names & set(self.shards):
            return Free(own=True)
        return Obstacle(OverRows.OVER_SHARDS, OF_SHARD, pair.one)

    def _over_shards(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a collective in the loss.

        Where the second trace joins the shards, a sum over them is the same on all of them, and one
        shard has it, too: as many times the shards' mean as there are shards. To microbatches it is
        a sum over rows as before. A collective that brings rows of other shards shows that the user
        means to compare these.
        """
        names = named_axes(pair.one)
        elsewhere = self.shards is not None and not names & set(self.shards)
        brings = pair.name not in OVER_SHARDS and not elsewhere
        by_itself = Obstacle(OverRows.OVER_SHARDS, pair.name, pair.one, brings=brings)
        if brings or len(inputs) != len(pair.one.outvars):
            free = all(isinstance(fact, Free) and fact.power == 0 for fact in inputs)
            return [Free(own=True) if free else by_itself] * len(pair.one.outvars)
        known = pair.one.params.get("axis_index_groups") is None and self.derives and self.joined
        adds, sizes = pair.name.startswith("psum"), _jax.bound_axes()
        if names <= {*self.done}:
            return inputs
        over, along = {name for name in names if sizes.get(name, 1) > 1}, {*self.along}
        others = self.joined == 1 or not over & along
        # Shards along other axes have another sum.
        of_all = self.joined > 1 and along <= over <= {*(self.shards or ())}

        def of(fact: Fact) -> Fact:
            match fact:
                case Rows() if elsewhere:
                    # Devices along the other axes have the same rows, as with model parallelism.
                    return replace(fact, entry=None, counts=False)
                case Total(power, moved="") if elsewhere and adds:
                    return Total(power)
                case Obstacle() if elsewhere or fact.reason == DIVIDES:
                    return fact
                case Free(power, own) if elsewhere:
                    return Free(power, own)
                case Divided(Total()) if not elsewhere:
                    return pair.compared(f"{pair.name} of each shard's ratio of sums over rows")
                case Free(power) if known and (not adds or others):
                    return Free(power)
                case Free(power) | Total(power, moved="") if known and adds and of_all:
                    # As many times their mean as there are shards; on one shard it is just that.
                    return Free(power - 1, added=True)
                case Total(power, moved="") if known and adds and (power or others):
                    return Total(power)
            return by_itself

        return list(map(of, inputs))

    def _pair(self, equations: Equations) -> Pair:
        one, other = equations
        return Pair(one, other, self.rows, self.times, str(one.primitive.name))

    def _checked_output(self, pair: Pair, fact: Fact, one: Any, other: Any) -> Fact:
        """Return the fact of an output, or an obstacle if its shapes do not fit the fact."""
        if isinstance(fact, Divided):
            return fact.with_fact(self._checked_output(pair, fact.fact, one, other))
        if not self._fits(fact, one, other):
            return pair.undecided(f"{pair.name} of rows")
        if isinstance(fact, Total) and math.prod(shape_of(one)) == 1:
            return replace(fact, single=True, of=one if fact.of is None else fact.of)
        return fact

    def _fits(self, fact: Fact, one: Any, other: Any) -> bool:
        """Return whether the shape of a value grows only along the axis of its rows."""
        shapes = shape_of(one), shape_of(other)
        if isinstance(fact, Chunks):
            fits = shapes[0][0] == fact.number and shapes[0][fact.axis] == fact.size
            grown = list(shapes[0])
            grown[fact.axis] *= self.times
            return fits and tuple(grown) == shapes[1]
        if not isinstance(fact, Rows | Index):
            return isinstance(fact, Obstacle) or shapes[0] == shapes[1]
        slices = 1 if isinstance(fact, Index) else fact.outer * fact.inner
        if fact.axis >= len(shapes[0]) or shapes[0][fact.axis] != slices * self.rows:
            return False
        grown = list(shapes[0])
        grown[fact.axis] *= self.times
        return tuple(grown) == shapes[1]

    def _transferred(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        kinds = set(map(type, inputs))
        if Chunks in kinds:
            # All chunks have to be treated alike, as in a loop over them.
            return pair.undecided(f"{pair.name} of chunks of rows")
        if Divided in kinds and pair.name not in DEFINED_BY_JAXPR:
            return rules.of_divided(pair, inputs, self._transferred)
        found = rules.sliced_batches(pair, inputs) or of_kernel(self, pair, inputs, self.assumed)
        if found is not None:
            return found
        if not pair.is_alike():
            return self._of_unlike(pair, inputs)
        if Shape in kinds:
            return [self._of_shapes(pair, inputs)]
        if kinds & {OneRow, SoFar}:
            return self._of_one_row(pair, inputs)
        if kinds & {Total, NonZero}:
            return [rules.of_sums(pair, inputs)] * len(pair.one.outvars)
        if Index in kinds:
            return self._of_index(pair, inputs)
        if Rows in kinds:
            return rules.of_rows(pair, inputs)
        return self._of_free(pair, inputs)

    def _of_unlike(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        """Return the facts of a kernel, or another program, that each trace creates anew."""
        if pair.name == "top_k" and isinstance(inputs[0], Rows):
            # Of so many rows as a share of them, which the first batch may spread evenly.
            axis, shape = inputs[0].axis, shape_of(pair.one.invars[0])
            along = pair.one.params.get("axis", -1) % len(shape) == axis
            if along and pair.one.params["k"] < shape[axis]:
                return pair.compared("top_k over the rows")
        free = [fact for fact in inputs if isinstance(fact, Free) and not fact.power]
        atoms = [(*each.invars, *each.outvars) for each in pair[:2]]
        same = all(map(_same_shape, *atoms)) and pair.name not in KEYS
        if len(free) < len(inputs) or not (same and do_the_same(*pair[:2])):
            return pair.undecided(DIFFERS)
        return [Free(own=any(fact.own for fact in free))] * len(pair.one.outvars)

    # Inputs that are free of the batch.

    def _of_free(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        name, number = pair.name, len(pair.one.outvars)
        free = [fact for fact in inputs if isinstance(fact, Free)]
        if len(free) == 2 and _is_never(name, *free):
            return [Free(number=0)]
        if KEYS.get(name, 0) is None:
            return pair.undecided(f"{name}, of which nothing is known")
        own, power = any(fact.own for fact in free), power_of(pair, inputs)
        if power is None:
            return pair.undecided(f"{name} of the number of rows")
        power += self._by_number_of_shards(name, free)
        if all(map(_same_shape, pair.one.outvars, pair.other.outvars)):
            kept = name in MOVES and not pair.converts() and len(free) == len(inputs)
            of_all = free[0].number if kept and free else None
            return [Free(power, own, of_all, kept and any(x.added for x in free))] * number
        shapes = [tuple(map(shape_of, each.outvars)) for each in pair[:2]]
        axes = set(map(axis_of_slices, *shapes))
        axis = axes.pop() if len(axes) == 1 else None
        pairs = zip(*shapes, strict=True)
        if axis is None or any(more[axis] != self.times * few[axis] for few, more in pairs):
            return pair.undecided(f"{name} makes an array of rows by rows")
        inner, odd = divmod(shapes[0][0][axis], self.rows)
        if odd:
            return pair.undecided(f"{name} with the number of rows")
        if name == "iota" and pair.one.params["dimension"] == axis:
            return [Index(axis)] if inner == 1 else pair.undecided("iota over rows")
        if name in ("iota", "broadcast_in_dim"):
            zero = any(map(is_zero, free))
            counts = are_counts(pair, inputs)
            return [Rows(axis, 1, inner, power, constant=True, zero=zero, counts=counts)]
        if name == "tile":
            return [Rows(axis, 1, inner, power, constant=inner == 1)]
        if name in KEYS and inner == 1:
            return rules.drawn(pair, inputs, axis)
        return pair.undecided(f"{name} with the number of rows")

    def _by_number_of_shards(self, name: str, free: Sequence[Free]) -> int:
        """Return 1 if a sum of the shards' means is divided by how many they are, as a literal."""
        match sorted(free, key=lambda fact: fact.power):
            case [Free(-1, added=True), Free(0, number=float(by))]:
                is_inverse = name == "div" and free[1].number == self.joined
                return int(is_inverse or (name == "mul" and by * self.joined == 1))
        return 0

    def _of_shapes(self, pair: Pair, inputs: Sequence[Fact]) -> Fact:
        match inputs:
            case [Shape(one, other)] if pair.name == "reduce_prod":
                return self.literal([math.prod(one), math.prod(other)], pair.one)
            case [Shape()] if pair.name == "convert_element_type" and not pair.converts():
                return inputs[0]
        return pair.undecided(_COUNTS)

    # Inputs that hold the numbers of rows.

    def _of_index(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        match inputs:
            case [Index(axis, None), other] if pair.name == "lt" and is_zero(other):
                return [Rows(axis, constant=True, zero=True)]
        if pair.name == "random_fold_in":
            return rules.keys_of_rows(pair, inputs)
        if pair.name == "gather" or pair.name.startswith("scatter"):
            of = [fact for fact in inputs if not isinstance(fact, Index)]
            power = power_of(pair, [of[0], Free(), *of[1:]])
            found = (rules.gathered if pair.name == "gather" else rules.scattered)(pair, inputs)
            if power is None or isinstance(found, Obstacle):
                return found if power is not None else pair.undecided(f"{pair.name} of powers")
            return [replace(fact, power=power, zero=False, entry=None) for fact in found]
        index = rules.of_index(pair, inputs)
        if index is not None:
            return [index]
        known = pair.name in ELEMENTWISE or rules.sorts_by_noise(pair, inputs)
        return (pair.compared if known else pair.undecided)(OF_PLACE)

    # Loops over the rows.

    def _of_one_row(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        number, sums = len(pair.one.outvars), [x for x in inputs if isinstance(x, SoFar)]
        if sums and pair.name in MOVES and not pair.converts():
            return sums
        if sums:
            match sorted(inputs, key=lambda fact: not isinstance(fact, SoFar)):
                case [SoFar(before), OneRow() | Total(moved="") as more]:
                    by = more.power - isinstance(more, Total)
                    adds = pair.name in ADDS and (pair.name != "sub" or inputs[0] in sums)
                    if adds and before in (None, by):
                        return [SoFar(by, are_counts(pair, inputs))]
            return pair.compared(MEETS_EARLIER)
        if not all(isinstance(fact, OneRow | Free) for fact in inputs):
            return pair.undecided("a row meets others")
        power = power_of(pair, inputs)
        if power is None:
            return of_unlike_powers(pair, inputs)
        return [OneRow(power)] * number

    def _scan_over_rows(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of a loop over the rows, as ``lax.map`` makes, or over chunks of them.

        Each iteration must read only its own row, or chunk, and do the same with it.
        """
        loops: Any = [control_flow(each) for each in (pair.one, pair.other)]
        constants, carried = loops[0].constants, loops[0].carried
        first, number = constants + carried, len(pair.one.outvars)
        unknown = [pair.undecided("a scan over the rows")] * number
        if not all(isinstance(fact, Free) and fact.power == 0 for fact in inputs[:first]):
            return unknown
        chunks = [fact for fact in inputs[first:] if isinstance(fact, Chunks)]
        steps, within = [each.steps for each in loops], self
        if chunks:
            size = chunks[0].size
            within = replace(self, rows=size)
            if steps[0] != steps[1] or {fact.size for fact in chunks} != {size}:
                return unknown
        elif steps[1] != (self.times * self.rows, steps[0][1]) or steps[0][0] != self.rows:
            return [pair.undecided("a scan with the number of rows")] * number
        rows: list[Fact] = []
        for fact in inputs[first:]:
            match fact:
                case Chunks(_, _, axis, power, counts):
                    rows.append(Rows(axis - 1, power=power, counts=counts))
                case Rows(0, 1, 1, power, constant) if not chunks:
                    rows.append(Free(power) if constant else OneRow(power))
                case _:
                    return unknown
        # What is carried must stay as it is, or be a sum of rows.
        before: Any = inputs[constants:first]
        body = opened(loops[0].body)
        given = body.invars[constants:first]
        free = [
            x is out or (fact.own and _is_key(x.aval.dtype))
            for fact, x, out in zip(before, given, body.outvars, strict=False)
        ]
        carry: list[Fact] = [
            fact if alone else SoFar() for fact, alone in zip(before, free, strict=True)
        ]
        while True:
            taken = [*inputs[:constants], *carry, *rows]
            outputs = follow(within, [each.body for each in loops], taken)
            obstacle = worst(outputs)
            if obstacle is None and any(
                not isinstance(fact, Free if alone else SoFar)
                for fact, alone in zip(outputs, free, strict=False)
            ):
                obstacle = pair.compared(MEETS_EARLIER)
            if obstacle is not None:
                if chunks and obstacle.reason == MEETS_EARLIER:
                    obstacle = replace(obstacle, kind=OverRows.UNDECIDED)
                if not _jax.has_source(obstacle.equation):
                    obstacle = replace(obstacle, equation=pair.one)
                return [obstacle] * number
            after = list(outputs[:carried])
            for place, alone in enumerate(free):
                after[place] = before[place] if alone else after[place]
            if after == carry:
                break
            carry = after
        found: list[Fact] = []
        for start, fact, atom in zip(before, carry, pair.one.outvars, strict=False):
            if not isinstance(fact, SoFar):
                found.append(fact)
            elif fact.power is None:
                found.append(start)
            else:
                mixed = pair.undecided("a sum of the rows and of something else")
                total = rules.added([Total(fact.power + 1), start], mixed)
                if isinstance(total, Total):
                    counts = fact.counts or not is_inexact(atom)
                    total = replace(total, counts=counts and start.number == 0)
                found.append(total)
        for fact in outputs[carried:]:
            match fact:
                case OneRow(power):
                    found.append(Rows(0, power=power))
                case Free(power) if not chunks:
                    found.append(Rows(0, power=power, constant=True))
                case _:
                    unlike = pair.undecided if chunks else pair.compared
                    found.append(unlike(MEETS_EARLIER))
        return found

    def _solved(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of ``custom_linear_solve``, if all its solvers treat rows alike."""
        first, *rest = [
            follow(self, [jaxpr for jaxpr, _ in both], [inputs[place] for place in both[0][1]])
            for both in zip(*map(_solvers_of, pair[:2]), strict=True)
        ]
        if all(all(map(is_slope, first, other)) for other in rest):
            return first
        return [worst(first) or pair.undecided("a linear system")] * len(first)

    # Custom derivatives: the gradient, not the value, is what the model is trained on.

    def _of_derivative(
        self, equations: Equations, inputs: Sequence[Fact], outputs: Sequence[Fact]
    ) -> Obstacle | None:
        """Return why a custom gradient would not be that of a mean over rows, or ``None``."""
        pair, one = self._pair(equations), equations[0]
        given = [fact for fact, x in zip(inputs, one.invars, strict=True) if is_inexact(x)]
        returned = [fact for fact, x in zip(outputs, one.outvars, strict=True) if is_inexact(x)]
        backward = takes_cotangents(one)
        if worst(outputs) is not None or not returned:
            return None
        if not backward and all(isinstance(fact, Free) for fact in inputs):
            return None  # it is linear
        unknown = pair.undecided("a function with a gradient of its own")
        slope = cotangent if backward else tangent
        slopes, expected = list(map(slope, given)), list(map(slope, returned))
        if backward:
            slopes, expected = expected, slopes
        obstacle = worst([*slopes, *expected])
        try:
            rules = list(map(rule_of_derivative, equations))
        except Exception:  # a rule of the user may raise anything
            return unknown
        without_rules = replace(self, derives=False)
        self.assumed.rules[id(pair.other)] = rules[1], slopes
        try:
            found = follow(without_rules, rules, [*inputs, *slopes])
        except Mismatch:
            return unknown
        if backward:
            atoms = filter(is_inexact, [*one.invars, *one.outvars])
            found = list(map(_of_own_gradient, found, [*expected, *returned], atoms))
        obstacle = obstacle or worst(found)
        if obstacle is not None:
            reason = f"{OF_GRADIENT}{obstacle.reason}"
            return replace(obstacle, reason=reason, equation=obstacle.equation or pair.one)
        return None if all(map(is_slope, found, [*expected, *returned])) else unknown


def _of_own_gradient(fact: Fact, expected: Fact, atom: Any) -> Fact:
    """Return the fact of a gradient that a function of the user's returns for one of its inputs."""
    if not isinstance(fact, Obstacle):
        return fact
    if fact.reason.endswith(OF_RANGE) and is_narrow(atom.aval.dtype):
        return expected  # JAX wants it in the dtype of the input, and autodiff casts it so
    # Of an input that has no rows it is a sum over them: it says nothing of the outputs.
    return replace(fact, of_all=False) if isinstance(expected, Total) else fact


def _solvers_of(equation: Any) -> list[tuple[Any, list[int]]]:
    """Return the jaxprs of a ``custom_linear_solve``, each with the places of its inputs."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    found, first, right = [], 0, range(sum(lengths), len(equation.invars))
    for jaxpr, length in zip(jaxprs, lengths, strict=True):
        if jaxpr is not None:
            found.append((jaxpr, [*range(first, first + length), *right]))
        first += length
    return found


def _is_key(dtype: Any) -> bool:
    """Return whether a dtype is one of PRNG keys, typed or legacy."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == np.uint32)


def _number(value: np.ndarray[Any, Any]) -> float | None:
    """Return the number that all elements of an array are, if it is a scalar or all are 0."""
    # bfloat16 has another dtype kind than NumPy's floats.
    is_real = value.dtype.kind in "biu" or jnp.issubdtype(value.dtype, jnp.floating)
    if not is_real or not value.size or (value.ndim and np.any(value)):
        return None
    return float(value.flat[0])


def _same_shape(one: Any, other: Any) -> bool:
    return shape_of(one) == shape_of(other)


def _is_never(name: str, one: Free, other: Free) -> bool:
    """Return whether a comparison of two numbers is known to be false with any number of rows."""
    if one.number is None or other.number is None:
        return False
    if name == "eq":
        return (one.number == 0) != (other.number == 0)
    return name == "lt" and one.power == other.power == 0 and one.number >= other.number
