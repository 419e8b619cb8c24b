"""Finds the first equation of a jaxpr that makes a NaN or an infinity which reaches an output.

The jaxpr is evaluated one equation at a time, each in its own dtype. A non-finite element of an
output is followed back, through the elements of operands that made it so, to an equation whose
operands are finite. An infinity that only constants made, such as that of a mask, counts as finite.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.jaxprs import rewrite
from crossshard.jaxprs.primitives import PASSES
from crossshard.jaxprs.walk import Call, Cond, Scan, While, constants, control_flow, opened

Index = tuple[int, ...]
# What operands get in the place of non-finite elements, to see which of these are at fault. No
# function of one number is infinite or NaN at both.
_FINITE = 0.5, 2.0


def first_nonfinite(x: Any) -> Index | None:
    """Return the index of the first NaN of an array, or else of its first infinity."""
    x = np.asarray(x) if is_inexact(x) else np.zeros(())
    is_bad = np.isnan(x) if np.isnan(x).any() else ~np.isfinite(x)
    place = np.unravel_index(int(is_bad.argmax()), x.shape) if is_bad.any() else None
    return None if place is None else tuple(map(int, place))


def evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on arrays, one equation at a time, also within calls, branches and loops."""
    return rewrite.evaluate(jaxpr, inputs, _apply)


def _apply(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    flow = control_flow(equation)
    if flow is None:
        # On one device there is nothing to shard.
        is_same = equation.primitive.name in PASSES
        return given if is_same else _jax.bound(equation, given)
    if isinstance(flow, Call | Cond):
        jaxpr, first = _called(flow, given)
        return evaluate(jaxpr, given[first:])
    turns, (_, start, end) = _turns(flow, given), _parts(flow, given)
    carry = turns[-1].out[: end - start] if turns else given[start:end]
    rows = [turn.out[end - start :] for turn in sorted(turns, key=lambda turn: turn.place)]
    types = [x.aval for x in equation.outvars[end - start :]]
    none = [jnp.zeros(x.shape, x.dtype) for x in types]
    return [*carry, *(map(jnp.stack, zip(*rows, strict=True)) if rows else none)]


def _called(flow: Call | Cond, given: Sequence[Any]) -> tuple[Any, int]:
    """Return the jaxpr that is called, and the number of its first input among all."""
    return (flow.jaxpr, 0) if isinstance(flow, Call) else (flow.branches[int(given[0])], 1)


class _Turn(NamedTuple):
    place: int
    given: Sequence[Any]
    out: Sequence[Any]


def _parts(loop: Scan | While, given: Sequence[Any]) -> tuple[int, int, int]:
    """Return where the inputs of the body, the carry, and what comes after it begin."""
    if isinstance(loop, Scan):
        return 0, loop.constants, loop.constants + loop.carried
    return loop.cond_constants, loop.cond_constants + loop.body_constants, len(given)


def _turns(loop: Scan | While, given: Sequence[Any]) -> list[_Turn]:
    """Run a loop, and return its turns in the order in which they run."""
    first, start, end = _parts(loop, given)
    places: Any = itertools.count()
    if isinstance(loop, Scan):
        length, reverse = loop.steps
        places = range(length)[:: -1 if reverse else 1]
    turns, carry = list[_Turn](), given[start:end]
    for place in places:
        if isinstance(loop, While) and not evaluate(loop.cond, [*given[:first], *carry])[0]:
            break
        inputs = [*given[first:start], *carry, *(x[place] for x in given[end:])]
        turns.append(_Turn(place, inputs, evaluate(loop.body, inputs)))
        carry = turns[-1].out[: end - start]
    return turns


class Scope:
    """A jaxpr on its inputs, with the values of all its variables, and where they come from.

    Attributes:
      around: the calls, branches and loops around it, innermost first.
      loops: for each loop around it, outermost first, the turn and the number of turns. The turn of
        a scan is the place in its arrays, in reverse, too.
    """

    def __init__(
        self,
        jaxpr: Any,
        inputs: Sequence[Any],
        outer: "Callable[[int, Index], Element] | None" = None,
        around: tuple[Any, ...] = (),
        loops: tuple[tuple[int, int], ...] = (),
    ):
        # ``outer`` returns the element outside that an element of an input is.
        self.outer, self.around, self.loops = outer, around, loops
        self._values, self._makers = dict[Any, Any](), dict[Any, tuple[Any, int]]()
        body = opened(jaxpr)
        self._values |= dict(zip(body.constvars, constants(jaxpr), strict=True))
        self._note(None, body.invars, inputs)

        def apply(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
            found = _apply(equation, given)
            self._note(equation, equation.outvars, found)
            return found

        rewrite.evaluate(jaxpr, inputs, apply)

    def _note(self, maker: Any, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for number, (variable, value) in enumerate(zip(variables, values, strict=True)):
            self._values[variable], self._makers[variable] = value, (maker, number)

    def read(self, atom: Any) -> tuple[Any, Any, Any]:
        """Return the value of an atom, the equation that makes it, and the number of the output.

        Without an equation the number is that of the input; ``None`` of a constant.
        """
        if isinstance(atom, Literal):
            return atom.val, None, None
        return self._values[atom], *self._makers.get(atom, (None, None))


class Element:
    """A non-finite element of a value.

    Attributes:
      index: which element it is.
      value: NaN or an infinity.
      equation: the equation that makes it; ``None`` if none does.
      number: which of its outputs it is in, or which input of the jaxpr; ``None`` of a constant.
      given: the values of the equation's operands.
      scope: the jaxpr that the equation is in.
    """

    def __init__(self, scope: Scope, atom: Any, index: Index):
        self.scope, self.atom, self.index = scope, atom, index
        value, self.equation, self.number = scope.read(atom)
        self.value = np.asarray(value)[index]
        atoms = self.equation.invars if self.equation is not None else ()
        self.given = [scope.read(each)[0] for each in atoms]

    def sources(self) -> "Iterator[Element | None]":
        """Yield the elements that it comes from; ``None`` if it is the origin."""
        scope, equation, number, given = self.scope, self.equation, self.number, self.given
        if equation is None:
            if number is not None and scope.outer is not None:
                yield scope.outer(number, self.index)
            elif number is not None and self.value != -np.inf:
                yield None  # -inf may be a mask that is passed as an argument
            return
        outside = lambda place, index: Element(scope, equation.invars[place], index)
        flow, around = control_flow(equation), (equation, *scope.around)
        if flow is None:
            for found in _guilty(equation, given, number, self.index):
                yield found and outside(*found)
        elif isinstance(flow, Call | Cond):
            jaxpr, first = _called(flow, given)
            outer = lambda place, index: outside(first + place, index)
            within = Scope(jaxpr, given[first:], outer, around, scope.loops)
            yield Element(within, opened(jaxpr).outvars[number], self.index)
        else:
            first, start, end = _parts(flow, given)
            turns = _turns(flow, given)

            def after(turn: int, output: int, index: Index) -> Element:
                """Return an element of what a turn returns, or of what the first one is given."""
                if turn < 0:
                    return outside(start + output, index)
                place = turns[turn].place

                def outer(number: int, index: Index) -> Element:
                    number += first
                    if start <= number < end:
                        return after(turn - 1, number - start, index)
                    return outside(number, index if number < start else (place, *index))

                loops = (*scope.loops, (place, len(turns)))
                within = Scope(flow.body, turns[turn].given, outer, around, loops)
                return Element(within, opened(flow.body).outvars[output], index)

            if number < end - start:
                yield after(len(turns) - 1, number, self.index)
            else:
                places = [turn.place for turn in turns]
                yield after(places.index(self.index[0]), number, self.index[1:])


def find_origin(jaxpr: Any, inputs: Sequence[Any], output: int, index: Index) -> Element:
    """Return where a non-finite element of an output comes from.

    Args:
      jaxpr: a closed jaxpr.
      inputs: its inputs, arrays.
      output: the number of the output.
      index: the element.
    """
    first = Element(Scope(jaxpr, inputs), opened(jaxpr).outvars[output], index)
    path, seen, deepest = [(first, first.sources())], dict[Any, Element](), None
    while path:
        element, sources = path[-1]
        source = next(sources, element)
        if source is None:
            return element
        if source is not element:
            key = id(source.scope), id(source.atom), source.index
            if seen.setdefault(key, source) is source:
                path.append((source, source.sources()))
            continue
        # Only infinities of constants are behind it. A NaN of these is made here.
        if element.equation is not None:
            if np.isnan(element.value):
                return element
            deepest = deepest or element
        path.pop()
    return deepest or first


def _guilty(
    equation: Any, given: Sequence[Any], output: int, index: Index
) -> Iterator[tuple[int, Index] | None]:
    """Yield the operands' elements each of which makes that of the output non-finite.

    ``None`` if it is not finite without any of them.
    """
    given = [np.asarray(x) if is_inexact(x) else x for x in given]
    # NaN first: infinities beside it may be meant.
    kinds = np.isnan, lambda x: x == np.inf, lambda x: x == -np.inf
    floats = [(operand, x) for operand, x in enumerate(given) if is_inexact(x)]
    bad = [(operand, np.flatnonzero(kind(x))) for kind in kinds for operand, x in floats]
    bad = [(operand, places) for operand, places in bad if places.size]

    def makes(operand: int | None, places: Any, instead: float = _FINITE[0]) -> bool:
        """Return whether it is non-finite if these elements are, and no others."""
        changed = list(given)
        for each, x in floats:
            flat = np.where(np.isfinite(x), x, np.asarray(instead, x.dtype)).ravel()
            if each == operand:
                flat[places] = x.ravel()[places]
            changed[each] = jnp.asarray(flat.reshape(x.shape))
        return not np.isfinite(np.asarray(_apply(equation, changed)[output])[index])

    if not bad or all(makes(None, [], instead) for instead in _FINITE):
        yield None
        return
    for operand, places in [each for each in bad if makes(*each)] or bad[:1]:
        while len(places) > 1:
            half, rest = np.array_split(places, 2)
            # If neither half suffices alone, follow the first.
            places = rest if not makes(operand, half) and makes(operand, rest) else half
        found = np.unravel_index(int(places[0]), given[operand].shape)
        yield operand, tuple(map(int, found))
