"""Whether a loss is a mean over the rows of its batch.

The loss is traced twice, the second time with several times as many rows, and the jaxprs are walked
side by side. What differs between them shows where rows are: an array whose shape grows along an
axis has rows there, and a literal that grows as much counts them.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.kernels import Assumptions, of_kernel
from crossshard.jaxprs.row_facts import (
    ADDS,
    MOVES,
    Fact,
    Free,
    Index,
    Inverse,
    Never,
    Obstacle,
    OneRow,
    OverRows,
    Pair,
    Ratio,
    Rows,
    Shape,
    SoFar,
    Some,
    Total,
    is_inexact,
    is_zero,
    joined,
    power_of,
    worst,
)
from crossshard.jaxprs.row_gathers import gathered, of_index, own_number, scattered
from crossshard.jaxprs.row_moves import batches_of, of_rows
from crossshard.jaxprs.row_slopes import cotangent, is_slope, tangent
from crossshard.jaxprs.row_sums import ADDS_UNLIKE, added, of_sums
from crossshard.jaxprs.walk import Analysis, Equations, Mismatch, follow
from crossshard.shards.batch_axes import resized

__all__ = ["ADDS_UNLIKE", "MEETS_EARLIER", "SAME_NOISE", "Finding", "OverRows", "over_rows"]

MEETS_EARLIER = "a row meets those before it"
SAME_NOISE = "noise from a key that is the same on every shard"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a loss is in the rows of its batch, and why.

    Attributes:
      kind: what it is.
      reason: the operation that decides; empty for a mean.
      source: its source line; empty if unknown.
      entry: of a ratio, the place among the leaves of the batch of the one whose sum divides;
        ``None`` if it is none of them.
      assumes: the operations that it is assumed of to compute each row alone.
    """

    kind: OverRows
    reason: str = ""
    source: str = ""
    entry: int | None = None
    assumes: tuple[str, ...] = ()

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        alone = f", if each row is computed alone by {', '.join(self.assumes)}" * bool(self.assumes)
        return f"{self.kind.value}{reason}{f' ({self.source})' if self.source else ''}{alone}"


def over_rows(
    loss: Callable[..., Any],
    batch: Any,
    *others: Any,
    own: Any = (),
    axes: Sequence[int] | None = None,
    times: int = 2,
) -> Finding:
    """What ``loss(batch, *others, own)`` is in the rows of the batch.

    Args:
      loss: returns a scalar.
      batch: a pytree of arrays or types, each with rows.
      *others: what has no rows.
      own: what has none either, and differs from shard to shard, such as PRNG keys.
      axes: for each array of the batch the axis of its rows; axis 0 of all if ``None``.
      times: how many times as many rows the second trace has, a power of 2, by which a float is
        multiplied exactly.

    >>> import jax.numpy as jnp
    >>> over_rows(lambda x, w, own: ((x @ w) ** 2).mean(), jnp.ones((4, 3)), jnp.ones(3)).kind
    <OverRows.MEAN: 'a mean over the rows'>
    >>> over_rows(lambda x, w, own: (x @ w).std(), jnp.ones((4, 3)), jnp.ones(3)).kind
    <OverRows.COMPARED: 'a comparison of rows'>
    """
    leaves, tree = jax.tree.flatten(batch)
    axes = [0] * len(leaves) if axes is None else axes
    rows = leaves[0].shape[axes[0]]
    # With few rows, what is no power of their number may look like one; not so if they grow much.
    rows *= -(-(2 if times >= 8 else 4) // max(1, rows))
    traces = []
    for number in (rows, times * rows):
        of_number = tree.unflatten(
            [
                jax.ShapeDtypeStruct(resized(x.shape, axis, number), x.dtype)
                for x, axis in zip(leaves, axes, strict=True)
            ]
        )
        try:
            traces.append(jax.make_jaxpr(loss)(of_number, *others, own))
        except Exception as error:  # a loss may raise anything on other shapes
            if not traces:
                raise
            return Finding(OverRows.UNDECIDED, _FAILS, _jax.source_of_error(error))
    return found_in(traces, facts_of(axes, others, own), rows, times)


def facts_of(axes: Sequence[int], others: Any, own: Any) -> list[Fact]:
    """The facts of the inputs of a loss, as ``over_rows`` takes them."""
    inputs: list[Fact] = [Rows(axis, entry=place) for place, axis in enumerate(axes)]
    inputs += [Free()] * len(jax.tree.leaves(others))
    inputs += [Free(own=True)] * len(jax.tree.leaves(own))
    return inputs


def found_in(
    traces: Sequence[Any],
    inputs: Sequence[Fact],
    rows: int,
    times: int = 2,
    assumed: Assumptions | None = None,
) -> Finding:
    """What a loss is, of its jaxprs with some rows and with ``times`` as many.

    What it assumes of operations is written down in ``assumed``.
    """
    assumed = Assumptions() if assumed is None else assumed
    try:
        (fact,) = follow(_OverRows(rows, times, assumed=assumed), traces, inputs)
    except Mismatch as mismatch:
        return _found(Obstacle(OverRows.UNDECIDED, _DIFFERS, mismatch.equation))
    finding, names = _found(fact), assumed.names()
    if names and finding.kind is OverRows.COMPARED:
        # Of rows only if these operations compute each row alone.
        return replace(finding, kind=OverRows.UNDECIDED)
    return finding if finding.kind is OverRows.UNDECIDED else replace(finding, assumes=names)


_FAILS = "it cannot be traced with more rows"
_COUNTS = "it computes with the number of rows"
_DIFFERS = "it computes something different with more rows"


def _found(fact: Fact) -> Finding:
    match fact:
        case Obstacle(kind, reason, equation):
            return Finding(kind, reason, "" if equation is None else _jax.sources_of(equation))
        case Ratio(entry, equation):
            return Finding(OverRows.RATIO, "", _jax.sources_of(equation), entry)
        case Free(power=0) | Total(power=0, moved=False) | Never():
            return Finding(OverRows.MEAN)
        case Total(power=1, moved=False):
            return Finding(OverRows.SUM)
        case Total(moved=True) | Inverse() | Some():
            return Finding(OverRows.COMPARED, "something of a sum over rows that is not linear")
        case _:
            return Finding(OverRows.UNDECIDED, "it grows with the number of rows")


# Which return what they are given.
_PASSES = frozenset(
    "device_put layout_constraint mesh_cast name optimization_barrier pcast pvary reshard "
    "sharding_constraint".split()
)
_RANDOM = frozenset({"random_bits", "random_split"})


class _OverRows(Analysis[Fact]):
    """The facts of two traces, the second with several times as many rows as the first.

    Args:
      rows: the number of rows of the first.
      times: how many times as many the second has, a power of 2.
      derives: whether to look at the derivatives of functions that have their own.
      assumed: where to write down what is assumed of operations.
    """

    def __init__(
        self,
        rows: int,
        times: int,
        *,
        derives: bool = True,
        assumed: Assumptions | None = None,
    ):
        self._rows, self._times, self._derives = rows, times, derives
        self._assumed = Assumptions() if assumed is None else assumed
        self.memory = {}

    def constant(self, values: Sequence[Any]) -> Fact:
        # What is being traced around the loss is another value on each shard.
        if any(isinstance(value, jax.core.Tracer) for value in values):
            same = values[0] is values[1]
            return Free(own=True) if same else Obstacle(OverRows.UNDECIDED, _DIFFERS)
        return self.literal(values, None)

    def literal(self, values: Sequence[Any], equation: Any) -> Fact:
        one, other = values
        if one is other and np.ndim(one):
            return Free()
        try:
            one, other = np.asarray(one), np.asarray(other)
        except TypeError:
            same = one is other
            return Free() if same else Obstacle(OverRows.UNDECIDED, _DIFFERS, equation)
        if one.shape == other.shape:
            if np.array_equal(one, other) or (one.dtype.kind == "f" and _both_nan(one, other)):
                return Free(number=_number(one))
            if one.ndim == 1 and one.size < 9 and one.dtype.kind in "iu":
                return Shape(tuple(one.tolist()), tuple(other.tolist()))
            # Multiplied by a power of 2 a float is exact.
            powers = (
                p for p in (1, -1, 2, -2) if np.array_equal(other, one * float(self._times) ** p)
            )
            power = next(powers, None)
            if power is not None:
                return Free(power, number=_number(one))
        counts = one.ndim == 1 and np.array_equal(other, np.arange(self._times * self._rows))
        if counts and np.array_equal(one, np.arange(self._rows)):
            return Index(0)
        return Obstacle(OverRows.UNDECIDED, _COUNTS, equation)

    def join(self, facts: Sequence[Fact]) -> Fact:
        found = facts[0]
        for fact in facts[1:]:
            found = joined(found, fact)
        return found

    def control(self, equations: Equations, decides: Fact) -> Fact | None:
        name, pair = equations[0].primitive.name, self._pair(equations)
        match decides:
            case Free(power=0) | Never():
                return None
            case Obstacle() | OneRow(0) | Some():
                return decides
            case Total() | Ratio() | Inverse():
                return pair.compared(f"a sum over rows decides a {name}")
            case _:
                return pair.undecided(f"rows decide a {name}")

    def enters(self, equations: Equations) -> bool:
        kinds = [_jax.control_flow(each) for each in equations]
        loops = [each for each in kinds if isinstance(each, _jax.Scan)]
        return not _jax.is_rowwise(equations[0]) and len({each.steps for each in loops}) < 2

    def element(self, equations: Equations, fact: Fact) -> Fact:
        return self._beside(equations, fact, -1)

    def stacked(self, equations: Equations, fact: Fact) -> Fact:
        return self._beside(equations, fact, 1)

    def _beside(self, equations: Equations, fact: Fact, axes: int) -> Fact:
        """The fact of an array with an axis less or more in front."""
        match fact:
            case Rows(0) | Index(0) if axes < 0:
                return self._pair(equations).undecided("a scan over the rows")
            case Rows(axis):
                return replace(fact, axis=axis + axes, entry=None)
            case Index(axis):
                return replace(fact, axis=axis + axes)
            case Total():
                return replace(fact, single=False, entry=None)
        return fact

    def returned(
        self, equations: Equations, inputs: Sequence[Fact], outputs: Sequence[Fact]
    ) -> Sequence[Fact]:
        if self._derives and _jax.has_own_derivative(equations[0]):
            obstacle = self._of_derivative(equations, inputs, outputs)
            if obstacle is not None:
                outputs = [worst([fact, obstacle]) or obstacle for fact in outputs]
        # A value without a source line, as in a jit that JAX has traced before, takes the call's.
        return [
            replace(fact, equation=equations[0])
            if isinstance(fact, Obstacle | Ratio) and not _jax.has_source(fact.equation)
            else fact
            for fact in outputs
        ]

    def transfer(self, equations: Equations, inputs: Sequence[Fact]) -> Sequence[Fact]:
        pair, number = self._pair(equations), len(equations[0].outvars)
        if not number:  # a debug print
            return []
        if pair.name in _PASSES and len(inputs) == number:
            return inputs
        if pair.name == "select_n" and inputs[0] == Never():
            # As where an index is negative, which the number of a row is not.
            return [inputs[1]]
        if any(map(_jax.is_ref, (*pair.one.invars, *pair.one.outvars))):
            return [pair.undecided("a value that is written in place")] * number
        if pair.name == "axis_index":
            return [Free(own=True)]
        if _jax.names_axes(pair.one):
            return [Obstacle(OverRows.OVER_SHARDS, pair.name, pair.one)] * number
        obstacle = worst(inputs)
        if obstacle is not None:
            return [obstacle] * number
        if pair.name == "scan":
            return self._scan_over_rows(pair, inputs)
        if pair.name == "custom_linear_solve":
            return self._solved(pair, inputs)
        outputs = self._transferred(pair, inputs)
        if isinstance(outputs, Obstacle):
            return [outputs] * number
        return [
            self._of_shape(pair, fact, *both)
            for fact, *both in zip(outputs, pair.one.outvars, pair.other.outvars, strict=True)
        ]

    def _pair(self, equations: Equations) -> Pair:
        one, other = equations
        return Pair(one, other, self._rows, self._times)

    def _of_shape(self, pair: Pair, fact: Fact, one: Any, other: Any) -> Fact:
        """The fact of an output, given its shapes."""
        if not self._fits(fact, one, other):
            return pair.compared(f"{pair.name} of rows")
        if isinstance(fact, Total) and math.prod(_shape(one)) == 1:
            return replace(fact, single=True)
        return fact

    def _fits(self, fact: Fact, one: Any, other: Any) -> bool:
        """Whether the shape of a value grows only along the axis of its rows."""
        shapes = _shape(one), _shape(other)
        if not isinstance(fact, Rows | Index):
            return isinstance(fact, Obstacle | Never) or shapes[0] == shapes[1]
        slices = 1 if isinstance(fact, Index) else fact.outer * fact.inner
        if fact.axis >= len(shapes[0]) or shapes[0][fact.axis] != slices * self._rows:
            return False
        grown = list(shapes[0])
        grown[fact.axis] *= self._times
        return tuple(grown) == shapes[1]

    def _transferred(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        found = batches_of(pair, inputs) or of_kernel(self, pair, inputs, self._assumed)
        if found is not None:
            return found
        if not pair.is_alike():
            return pair.undecided(_DIFFERS)
        kinds = set(map(type, inputs))
        if Shape in kinds:
            return [self._of_shapes(pair, inputs)]
        if kinds & {OneRow, SoFar}:
            return self._of_one_row(pair, inputs)
        if kinds & {Total, Ratio, Inverse, Some}:
            return [of_sums(pair, inputs)] * len(pair.one.outvars)
        if Index in kinds:
            return self._of_index(pair, inputs)
        if Rows in kinds:
            return of_rows(pair, inputs)
        return self._of_free(pair, inputs)

    # Free of the batch.

    def _of_free(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        name, number = pair.name, len(pair.one.outvars)
        free = [fact for fact in inputs if isinstance(fact, Free)]
        if len(free) == 2 and _is_never(name, *free):
            return [Never()]
        own, power = any(fact.own for fact in free), power_of(pair, inputs)
        if power is None:
            return pair.undecided(f"{name} of the number of rows")
        if all(map(_same_shape, pair.one.outvars, pair.other.outvars)):
            kept = name in MOVES and not pair.converts() and len(free) == len(inputs)
            return [Free(power, own, free[0].number if kept and free else None)] * number
        axes = {
            _axis_that_grows(_shape(one), _shape(other), self._times)
            for one, other in zip(pair.one.outvars, pair.other.outvars, strict=True)
        }
        (axis,) = axes if len(axes) == 1 else (None,)
        if axis is None:
            return pair.undecided(f"{name} makes an array of rows by rows")
        inner, odd = divmod(_shape(pair.one.outvars[0])[axis], self._rows)
        if odd:
            return pair.undecided(f"{name} with the number of rows")
        if name == "iota" and pair.one.params["dimension"] == axis:
            return [Index(axis)] if inner == 1 else pair.undecided("iota over rows")
        if name in ("iota", "broadcast_in_dim"):
            zero = any(map(is_zero, free))
            return [Rows(axis, 1, inner, power, constant=True, zero=zero)]
        if name == "tile":
            return [Rows(axis, 1, inner, power, constant=inner == 1)]
        if name in _RANDOM:
            if not own:
                return pair.compared(SAME_NOISE)
            return [Rows(axis, 1, inner)] * number
        return pair.undecided(f"{name} with the number of rows")

    def _of_shapes(self, pair: Pair, inputs: Sequence[Fact]) -> Fact:
        match inputs:
            case [Shape(one, other)] if pair.name == "reduce_prod":
                return self.literal([math.prod(one), math.prod(other)], pair.one)
            case [Shape()] if pair.name == "convert_element_type" and not pair.converts():
                return inputs[0]
        return pair.undecided(_COUNTS)

    # Numbers of rows.

    def _of_index(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        if pair.name == "lt" and isinstance(inputs[0], Index) and is_zero(inputs[1]):
            return [Never()]
        axis = own_number(pair, inputs)
        if axis is not None:
            return [Rows(axis)]
        if pair.name == "gather" or pair.name.startswith("scatter"):
            of = [fact for fact in inputs if not isinstance(fact, Index)]
            power = power_of(pair, [of[0], Free(), *of[1:]])
            found = (gathered if pair.name == "gather" else scattered)(pair, inputs)
            if power is None or isinstance(found, Obstacle):
                return found if power is not None else pair.undecided(f"{pair.name} of powers")
            return [replace(fact, power=power, zero=False, entry=None) for fact in found]
        index = of_index(pair, inputs)
        return pair.compared("the position of a row") if index is None else [index]

    # One row after the other.

    def _of_one_row(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        number, sums = len(pair.one.outvars), [x for x in inputs if isinstance(x, SoFar)]
        if sums and pair.name in MOVES and not pair.converts():
            return sums
        if sums:
            match sorted(inputs, key=lambda fact: not isinstance(fact, SoFar)):
                case [SoFar(before), OneRow(by)] if before in (None, by):
                    if pair.name in ADDS and (pair.name != "sub" or inputs[0] in sums):
                        return [SoFar(by)]
            return pair.compared(MEETS_EARLIER)
        if not all(isinstance(fact, OneRow | Free | Never) for fact in inputs):
            return pair.undecided("a row meets others")
        power = power_of(pair, inputs)
        if power is None:
            return pair.undecided(f"{pair.name} of the number of rows")
        return [OneRow(power)] * number

    def _scan_over_rows(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """A loop over the rows, as ``lax.map`` makes: each turn reads its own row alone."""
        loops: Any = [_jax.control_flow(each) for each in (pair.one, pair.other)]
        constants, carried = loops[0].constants, loops[0].carried
        first, number = constants + carried, len(pair.one.outvars)
        steps = [each.steps for each in loops]
        if [steps[1]] != [(self._times * self._rows, steps[0][1])] or steps[0][0] != self._rows:
            return [pair.undecided("a scan with the number of rows")] * number
        if not all(isinstance(fact, Free) and fact.power == 0 for fact in inputs[:first]):
            return [pair.undecided("a scan over the rows")] * number
        rows: list[Fact] = []
        for fact in inputs[first:]:
            if not isinstance(fact, Rows) or fact.axis or not fact.is_plain:
                return [pair.undecided("a scan over the rows")] * number
            rows.append(Free(fact.power) if fact.constant else OneRow(fact.power))
        # What is carried is passed on, or a sum of rows.
        before: Any = inputs[constants:first]
        passed = [_jax.passes_on(loops[0], place) for place in range(carried)]
        drawn = [x.own and _jax.is_key(loops[0], place) for place, x in enumerate(before)]
        free = list(map(any, zip(passed, drawn, strict=True)))
        carry: list[Fact] = [
            fact if alone else SoFar() for fact, alone in zip(before, free, strict=True)
        ]
        while True:
            taken = [*inputs[:constants], *carry, *rows]
            outputs = follow(self, [each.body for each in loops], taken)
            obstacle = worst(outputs)
            if obstacle is None and any(
                not isinstance(fact, Free if alone else SoFar)
                for fact, alone in zip(outputs, free, strict=False)
            ):
                obstacle = pair.compared(MEETS_EARLIER)
            if obstacle is not None:
                return [obstacle] * number
            after = list(outputs[:carried])
            for place, alone in enumerate(free):
                after[place] = before[place] if alone else after[place]
            if after == carry:
                break
            carry = after
        found: list[Fact] = []
        for start, fact in zip(before, carry, strict=True):
            if not isinstance(fact, SoFar):
                found.append(fact)
            elif fact.power is None:
                found.append(start)
            else:
                mixed = pair.undecided("a sum of the rows and of something else")
                found.append(added([Total(fact.power + 1), start], mixed))
        for fact in outputs[carried:]:
            match fact:
                case OneRow(power):
                    found.append(Rows(0, power=power))
                case Free(power):
                    found.append(Rows(0, power=power, constant=True))
                case _:
                    found.append(pair.compared(MEETS_EARLIER))
        return found

    def _solved(self, pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """A linear system, which the user says how to solve, forwards and in the gradient."""
        first, *rest = [
            follow(self, [jaxpr for jaxpr, _ in both], [inputs[place] for place in both[0][1]])
            for both in zip(*map(_jax.solvers_of, (pair.one, pair.other)), strict=True)
        ]
        if all(all(map(is_slope, first, other)) for other in rest):
            return first
        return [worst(first) or pair.undecided("a linear system")] * len(first)

    # Functions with a derivative of their own: the gradient is what is trained on.

    def _of_derivative(
        self, equations: Equations, inputs: Sequence[Fact], outputs: Sequence[Fact]
    ) -> Obstacle | None:
        """Why the gradient would not be that of a mean over rows."""
        pair, one = self._pair(equations), equations[0]
        given = [fact for fact, x in zip(inputs, one.invars, strict=True) if is_inexact(x)]
        returned = [fact for fact, x in zip(outputs, one.outvars, strict=True) if is_inexact(x)]
        backward = one.primitive.name.startswith("custom_vjp")
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
            rules = [_jax.rule_of_derivative(each, backward=backward) for each in equations]
        except Exception:  # a rule of the user may raise anything
            return unknown
        without_rules = _OverRows(self._rows, self._times, derives=False, assumed=self._assumed)
        self._assumed.rules[id(pair.other)] = rules[1], slopes
        try:
            found = follow(without_rules, rules, [*inputs, *slopes])
        except Mismatch:
            return unknown
        obstacle = obstacle or worst(found)
        if obstacle is not None:
            reason = f"in a gradient of its own, {obstacle.reason}"
            return replace(obstacle, reason=reason, equation=obstacle.equation or pair.one)
        return None if all(map(is_slope, found, [*expected, *returned])) else unknown


def _number(value: np.ndarray[Any, Any]) -> float | None:
    """The number that all of an array is, if it is a scalar or 0."""
    if value.dtype.kind not in "biuf" or not value.size or (value.ndim and np.any(value)):
        return None
    return float(value.flat[0])


def _both_nan(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(one, other, equal_nan=True)


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _same_shape(one: Any, other: Any) -> bool:
    return _shape(one) == _shape(other)


def _axis_that_grows(one: Sequence[int], other: Sequence[int], times: int) -> int | None:
    if len(one) != len(other):
        return None
    differ = [axis for axis, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1]
    grows = len(differ) == 1 and other[differ[0]] == times * one[differ[0]]
    return differ[0] if grows else None


def _is_never(name: str, one: Free, other: Free) -> bool:
    """Whether two numbers are known, and a comparison of them is false with any number of rows."""
    if one.number is None or other.number is None:
        return False
    if name == "eq":
        return (one.number == 0) != (other.number == 0)
    return name == "lt" and one.power == other.power == 0 and one.number >= other.number
