"""Finds whether rows that do not count leave a loss as it is, such as those of padding.

The loss is walked as if no row counted. The mask of such rows is 0, and so is what it multiplies or
chooses, whatever the parameters are: a sum over these rows adds nothing.
"""

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.primitives import ADDS, CHOOSES, HOMOGENEOUS, LINEAR, MOVES, PASSES
from crossshard.jaxprs.rewrite import without_repeats
from crossshard.jaxprs.row_facts import is_inexact, shape_of
from crossshard.jaxprs.walk import (
    Analysis,
    Equations,
    Mismatch,
    Scan,
    control_flow,
    follow,
    has_effect,
    named_axes,
    opened,
)


class _Known(enum.Enum):
    """What is known of a value, if it is not the one number that all of its elements are."""

    FREE = enum.auto()  # it is computed from no row
    SAME = enum.auto()  # a scalar that rows of padding leave as it is
    ZERO = enum.auto()  # in rows of padding it is 0, and so is what they add to a sum
    ROWS = enum.auto()  # a literal that depends on the number of rows
    ANY = enum.auto()


_Fact = _Known | float
_FOLDED: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "and": lambda x, y: bool(x) and bool(y),
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "max": max,
    "min": min,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "not": lambda x: not x,
    "or": lambda x, y: bool(x) or bool(y),
    "sign": np.sign,
    "square": lambda x: x * x,
    "sub": operator.sub,
}
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
# Of equal numbers they are that number.
_COMPARED = {"reduce_max", "reduce_min", "reduce_and", "reduce_or", "concatenate"}


def counts_nothing(
    jaxprs: Sequence[Any],
    zeros: Sequence[bool],
    rows: int,
    masks: Collection[Any] = frozenset(),
) -> bool:
    """Return whether rows of padding are known to leave the outputs of a function as they are.

    Args:
      jaxprs: the jaxpr of scalars that are means over rows, or quotients of two sums over them. If
        shards send each other something that need not be one: and the jaxpr for more rows.
      zeros: of each of its inputs with rows, which come first, whether padding is 0 in it; if not,
        it may be anything.
      rows: the number of rows of the first.
      masks: variables of the first that are 0, too.
    """
    given: list[_Fact] = [0.0 if is_zero else _Known.ANY for is_zero in zeros]
    inputs = given + [_Known.FREE] * (len(jaxprs[0].in_avals) - len(given))
    analysis = _OfPadding(rows, masks)
    try:
        found = follow(analysis, jaxprs, inputs)
    except Mismatch:
        return False
    is_same = all(fact in (_Known.FREE, _Known.SAME, 0.0) for fact in found)
    return analysis.sends_nothing and is_same


def vanishes_with(jaxpr: Any, count: Any, inputs: int, rows: int) -> bool:
    """Return whether outputs as of ``counts_nothing`` are as they are if no row counts.

    Args:
      jaxpr: their closed jaxpr.
      count: the sum of what counts, a variable; or the input with rows that is summed, its place.
      inputs: the number of inputs with rows, which come first.
      rows: the number of rows.
    """
    body, masks = jaxpr.jaxpr, list[Any]()
    if isinstance(count, tuple):
        return False  # it is within a call, of which there may be others
    if not isinstance(count, int):
        known = dict(zip(body.constvars, jaxpr.consts, strict=True))
        outputs = [*body.outvars, count]
        # A mask may be computed once for the count, and once more for what it multiplies.
        jaxpr = without_repeats(
            _jax.with_equations(jaxpr, known, body.invars, outputs, list(body.eqns))
        )
        masks = _masks(jaxpr, jaxpr.jaxpr.outvars[-1])
    given = jaxpr.jaxpr.invars[:inputs]
    zeros = [place == count or variable in masks for place, variable in enumerate(given)]
    return counts_nothing([jaxpr], zeros, rows, masks)


def _masks(jaxpr: Any, count: Any) -> list[Any]:
    """Return the arrays in a jaxpr whose elements add up to a variable of it."""
    found = [count]
    for equation in reversed(opened(jaxpr).eqns):
        read, (out, *_) = equation.invars, equation.outvars
        adds = equation.primitive.name in MOVES | {"reduce_sum", "squeeze"} and len(read) == 1
        if out is found[-1] and adds and (is_inexact(out) or not is_inexact(read[0])):
            found += read
    return [each for each in found if shape_of(each)]


def _is_zero(fact: _Fact) -> bool:
    return fact in (_Known.ZERO, 0.0)


@dataclasses.dataclass(eq=False)
class _OfPadding(Analysis[_Fact]):
    """What is known of each value if all rows are padding."""

    rows: int
    masks: Collection[Any]  # the variables that are 0
    # Whether shards send each other nothing that holds padding: other rows would be computed of it.
    sends_nothing: bool = True

    def constant(self, values: Sequence[Any]) -> _Fact:
        value = values[0]
        if not all(map(functools.partial(np.array_equal, value), values[1:])):
            return _Known.ROWS
        if np.ndim(value) or isinstance(value, jax.core.Tracer):
            return _Known.FREE
        kind = jnp.result_type(value)
        is_real = any(jnp.issubdtype(kind, each) for each in (bool, jnp.integer, jnp.floating))
        return float(value) if is_real and math.isfinite(value) else _Known.FREE

    def join(self, facts: Sequence[_Fact]) -> _Fact:
        def joined(one: _Fact, other: _Fact) -> _Fact:
            pair = {one, other}
            if len(pair) == 1:
                return one
            if all(map(_is_zero, pair)):
                return _Known.ZERO
            return _Known.SAME if _Known.SAME in pair and pair & {0.0, _Known.FREE} else _Known.ANY

        return functools.reduce(joined, facts)

    def control(self, equations: Equations, decides: _Fact) -> _Fact | None:
        del equations
        # What no row decides.
        return None if decides in (_Known.FREE, _Known.SAME) else _Known.ANY

    def element(self, equations: Equations, fact: _Fact) -> _Fact:
        kind = control_flow(equations[0])
        is_row = isinstance(kind, Scan) and kind.steps[0] == self.rows
        return _Known.ANY if is_row and fact is not _Known.FREE else fact

    def stacked(self, equations: Equations, fact: _Fact) -> _Fact:
        return _Known.ANY if fact is _Known.SAME else self.element(equations, fact)

    def returned(
        self, equations: Equations, inputs: Sequence[_Fact], outputs: Sequence[_Fact]
    ) -> Sequence[_Fact]:
        pairs = zip(equations[0].outvars, outputs, strict=True)
        return [0.0 if variable in self.masks else fact for variable, fact in pairs]

    def transfer(self, equations: Equations, inputs: Sequence[_Fact]) -> Sequence[_Fact]:
        return self.returned(equations, inputs, self._transferred(equations[0], inputs))

    def _transferred(self, equation: Any, inputs: Sequence[_Fact]) -> Sequence[_Fact]:
        shapes = [getattr(x.aval, "shape", None) for x in (*equation.invars, *equation.outvars)]
        before, after = shapes[: len(inputs)], shapes[len(inputs) :]
        are_scalars = all(map(self._is_scalar, shapes))
        found = _Known.ANY if has_effect(equation) else self._of(equation, inputs, are_scalars)
        if found in (_Known.FREE, _Known.ANY):
            return [found] * len(after)
        is_sum = not all(map(self._is_scalar, before))  # it has become a scalar
        return [self._as_shaped(found, shape, is_sum=is_sum) for shape in after]

    def _is_scalar(self, shape: Any) -> bool:
        """Return whether an array is one number: also as of a sum that keeps its axes."""
        return shape == () or (shape is not None and self.rows > 1 and math.prod(shape) == 1)

    def _as_shaped(self, fact: _Fact, shape: Any, *, is_sum: bool) -> _Fact:
        if self._is_scalar(shape) and is_sum:
            return _Known.SAME if _is_zero(fact) or fact is _Known.SAME else _Known.ANY
        return _Known.ANY if not self._is_scalar(shape) and fact is _Known.SAME else fact

    def _of(self, equation: Any, inputs: Sequence[_Fact], are_scalars: bool) -> _Fact:
        name, numbers = str(equation.primitive.name), [x for x in inputs if isinstance(x, float)]
        are_numbers = len(numbers) == len(inputs)
        if all(fact is _Known.FREE for fact in inputs):
            return _Known.FREE
        if _Known.ROWS in inputs:
            return _Known.ANY
        if named_axes(equation):
            if are_scalars and _Known.ANY not in inputs:
                return _Known.SAME
            is_sum = name.startswith("psum") and _Known.ANY is not self._zeros(inputs)
            self.sends_nothing &= is_sum
            return _Known.ANY
        if are_numbers and name in _FOLDED:
            return float(_FOLDED[name](*numbers))
        if len(inputs) == 1 and (
            name in MOVES | PASSES or name in ("squeeze", "transpose", "slice")
        ):
            return inputs[0]
        if are_numbers and name in _COMPARED and len(set(numbers)) == 1:
            return numbers[0]
        if name in _PRODUCTS and any(map(_is_zero, inputs)):
            return _Known.ZERO
        if name == "div" and _is_zero(inputs[0]):
            return _Known.ZERO
        if name == "select_n" and isinstance(inputs[0], float):
            return inputs[1 + int(inputs[0])]
        if are_scalars:
            return _Known.ANY if _Known.ANY in inputs else _Known.SAME
        if name in CHOOSES:
            chosen = range(len(inputs))[CHOOSES[name]]
            return self._zeros([x for place, x in enumerate(inputs) if place not in chosen])
        return self._zeros(inputs) if name in LINEAR | ADDS | HOMOGENEOUS else _Known.ANY

    @staticmethod
    def _zeros(inputs: Sequence[_Fact]) -> _Fact:
        return _Known.ZERO if all(map(_is_zero, inputs)) else _Known.ANY
