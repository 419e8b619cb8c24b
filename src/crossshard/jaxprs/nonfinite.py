"""Finds the first equation of a jaxpr that makes a NaN or an infinity which reaches an output.

The jaxpr is evaluated one equation at a time, each in its own dtype, and a non-finite element of an
output is followed back: to the elements of operands that made it so, until an equation whose
operands are finite. An infinity that only constants made, such as that of a mask, counts as finite.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.jaxprs import rewrite
from crossshard.jaxprs.primitives import ELEMENTWISE
from crossshard.jaxprs.walk import Call, Cond, Scan, While, constants, control_flow, opened

Index = tuple[int, ...]
# What an operand gets in the place of a non-finite element, to see whether that one is at fault. No
# function of one number is infinite or NaN at both.
_FINITE = 0.5, 2.0


class Loop(NamedTuple):
    """A turn of a loop: where it is in the arrays of a scan, or its number in a while loop."""

    index: int
    length: int


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a non-finite element comes from: an equation, or an input of the jaxpr."""

    index: Index  # the element, of the equation's output or of the input
    value: Any  # what it is
    place: int | None = None  # the number of the input; ``None`` if an equation made it
    # The equation and the calls, branches and loops around it, innermost first.
    equations: tuple[Any, ...] = ()
    given: tuple[Any, ...] = ()  # the equation's operands
    loops: tuple[Loop, ...] = ()  # the loops around it, outermost first


def evaluate(jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr on arrays, one equation at a time, also within calls, branches and loops."""
    return rewrite.evaluate(jaxpr, inputs, _apply)


def first_nonfinite(x: Any) -> Index | None:
    """Return the index of the first NaN of an array, or else of its first infinity."""
    if not is_inexact(x):
        return None
    x = np.asarray(x)
    for is_bad in (np.isnan(x), ~np.isfinite(x)):
        if is_bad.any():
            return tuple(map(int, np.unravel_index(int(is_bad.argmax()), x.shape)))
    return None


def find_origin(jaxpr: Any, inputs: Sequence[Any], output: int, index: Index) -> Origin:
    """Return where a non-finite element of an output comes from.

    Args:
      jaxpr: a closed jaxpr.
      inputs: its inputs, arrays.
      output: the number of the output.
      index: the element.
    """
    first = _Node(_Scope(jaxpr, inputs), opened(jaxpr).outvars[output], index)
    stack, seen = [first], set[Any]()
    deepest: Origin | None = None
    while stack:
        node = stack[-1]
        following = next(node.following, None)
        if node.is_origin:
            return node.origin()
        if following is not None:
            if following.key not in seen:
                seen.add(following.key)
                stack.append(following)
            continue
        # Only intended infinities are behind it. A NaN of these is made here.
        if node.equation is not None and np.isnan(node.value):
            return node.origin()
        if deepest is None and node.equation is not None:
            deepest = node.origin()
        stack.pop()
    return deepest or first.origin()


def _apply(equation: Any, given: list[Any]) -> Sequence[Any]:
    match control_flow(equation):
        case Call(jaxpr):
            return evaluate(jaxpr, given)
        case Cond(branches):
            return evaluate(branches[_choice(given)], given[1:])
        case Scan() | While() as loop:
            turns = _turns(loop, given)
            if isinstance(loop, While):
                return turns[-1].carry
            stacked = [turn.out for turn in turns[:-1]][:: -1 if loop.steps[1] else 1]
            own = equation.outvars[loop.carried :]
            each = zip(*stacked, strict=True) if stacked else ((),) * len(own)
            none = [jnp.zeros(x.aval.shape, x.aval.dtype) for x in own]
            ys = [jnp.stack(x) if x else y for x, y in zip(each, none, strict=True)]
            return [*turns[-1].carry, *ys]
    return _jax.bound(equation, given)


def _choice(given: Sequence[Any]) -> int:
    return int(given[0])


class _Turn(NamedTuple):
    """The carry before a turn of a loop, what the turn is given, and what it stacks."""

    carry: Sequence[Any]
    given: Sequence[Any]
    out: Sequence[Any]


def _turns(loop: Scan | While, given: Sequence[Any]) -> list[_Turn]:
    """Run a loop; return its turns in the order in which they run, and one with the last carry."""
    turns = []
    if isinstance(loop, While):
        of_body = loop.cond_constants
        start = of_body + loop.body_constants
        carry = list(given[start:])
        while bool(evaluate(loop.cond, [*given[:of_body], *carry])[0]):
            inputs = [*given[of_body:start], *carry]
            turns.append(_Turn(carry, inputs, ()))
            carry = evaluate(loop.body, inputs)
        return [*turns, _Turn(carry, (), ())]
    length, reverse = loop.steps
    start = loop.constants + loop.carried
    carry = list(given[loop.constants : start])
    for place in reversed(range(length)) if reverse else range(length):
        inputs = [*given[: loop.constants], *carry, *(x[place] for x in given[start:])]
        found = evaluate(loop.body, inputs)
        turns.append(_Turn(carry, inputs, found[loop.carried :]))
        carry = found[: loop.carried]
    return [*turns, _Turn(carry, (), ())]


class _Scope:
    """A jaxpr on its inputs, with the values of all its variables.

    Attributes:
      equations: the calls, branches and loops around it, innermost first.
      loops: the turns of the loops around it, outermost first.
    """

    def __init__(
        self,
        jaxpr: Any,
        inputs: Sequence[Any],
        outer: "Callable[[int, Index], _Node] | None" = None,
        equations: tuple[Any, ...] = (),
        loops: tuple[Loop, ...] = (),
    ):
        body = opened(jaxpr)
        self.equations, self.loops, self.outer = equations, loops, outer
        self.body = body
        self._values = dict(zip(body.invars, inputs, strict=True))
        self._values |= dict(zip(body.constvars, constants(jaxpr), strict=True))
        self.place_of = {atom: place for place, atom in enumerate(body.invars)}
        self.maker: dict[Any, tuple[Any, int]] = {}
        self._turns: dict[int, list[_Turn]] = {}

        def apply(equation: Any, given: list[Any]) -> Sequence[Any]:
            found = _apply(equation, given)
            self._values |= dict(zip(equation.outvars, found, strict=True))
            self.maker |= {out: (equation, i) for i, out in enumerate(equation.outvars)}
            return found

        rewrite.evaluate(jaxpr, inputs, apply)

    def read(self, atom: Any) -> Any:
        """Return the value of a variable or a literal."""
        return atom.val if isinstance(atom, Literal) else self._values[atom]

    def given(self, equation: Any) -> list[Any]:
        """Return the operands of an equation."""
        return [self.read(atom) for atom in equation.invars]

    def turns(self, equation: Any, loop: Scan | While) -> list[_Turn]:
        """Return the turns of a loop."""
        key = id(equation)
        if key not in self._turns:
            self._turns[key] = _turns(loop, self.given(equation))
        return self._turns[key]


class _Node:
    """A non-finite element of a value, and the elements that it comes from."""

    def __init__(self, scope: _Scope, atom: Any, index: Index):
        self.scope, self.atom, self.index = scope, atom, index
        self.key = id(scope), atom if not isinstance(atom, Literal) else id(atom), index
        value = np.asarray(scope.read(atom))
        self.value, self._shape = value[index], value.shape
        is_made = not isinstance(atom, Literal) and atom in scope.maker
        # The equation that makes it, and which of its outputs it is.
        self.equation, self._output = scope.maker[atom] if is_made else (None, 0)
        self.is_origin = False
        self.following = self._following()

    def origin(self) -> Origin:
        """Return the element as the result."""
        scope = self.scope
        if self.equation is None:
            place = None if isinstance(self.atom, Literal) else scope.place_of.get(self.atom)
            return Origin(self.index, self.value, place)
        around = (self.equation, *scope.equations)
        given = tuple(scope.given(self.equation))
        return Origin(self.index, self.value, None, around, given, scope.loops)

    def _following(self) -> "Iterator[_Node]":
        scope, equation = self.scope, self.equation
        if equation is None:
            place = None if isinstance(self.atom, Literal) else scope.place_of.get(self.atom)
            if place is not None and scope.outer is not None:
                yield scope.outer(place, self.index)
            elif place is not None:
                # A mask may be passed as an argument.
                self.is_origin = not self.value == -np.inf
            return
        flow = control_flow(equation)
        if flow is None:
            yield from self._operands()
        elif isinstance(flow, Call):
            yield self._inside(flow.jaxpr, scope.given(equation), 0)
        elif isinstance(flow, Cond):
            given = scope.given(equation)
            yield self._inside(flow.branches[_choice(given)], given[1:], 1)
        else:
            yield self._in_loop(flow)

    def _inside(self, jaxpr: Any, given: Sequence[Any], first: int) -> "_Node":
        """Return the element within what a call runs, whose inputs begin at ``first``."""
        scope, equation = self.scope, self.equation
        outer = lambda place, index: _Node(scope, equation.invars[first + place], index)
        within = _Scope(jaxpr, given, outer, (equation, *scope.equations), scope.loops)
        return _Node(within, within.body.outvars[self._output], self.index)

    def _in_loop(self, loop: Scan | While) -> "_Node":
        """Return the element within the turn of a loop that made it."""
        scope, equation, index = self.scope, self.equation, self.index
        turns = scope.turns(equation, loop)
        number = len(turns) - 1
        is_scan = isinstance(loop, Scan)
        reverse = is_scan and loop.steps[1]
        place_of = lambda turn: number - 1 - turn if reverse else turn
        # The numbers of the inputs of the body: constants, the carry, and rows of arrays.
        skipped = 0 if is_scan else loop.cond_constants
        first = loop.constants if is_scan else loop.body_constants
        carried = loop.carried if is_scan else len(equation.outvars)

        def after(turn: int, output: int, index: Index) -> _Node:
            """Return an element of an output of a turn; of turn -1, of what the loop was given."""
            if turn < 0:
                return _Node(scope, equation.invars[skipped + first + output], index)

            def outer(place: int, index: Index) -> _Node:
                if first <= place < first + carried:
                    return after(turn - 1, place - first, index)
                row = () if place < first else (place_of(turn),)
                return _Node(scope, equation.invars[skipped + place], (*row, *index))

            loops = (*scope.loops, Loop(place_of(turn), number))
            around = (equation, *scope.equations)
            within = _Scope(loop.body, turns[turn].given, outer, around, loops)
            return _Node(within, within.body.outvars[output], index)

        if self._output < carried:
            return after(number - 1, self._output, index)
        return after(place_of(index[0]), self._output, index[1:])

    def _operands(self) -> "Iterator[_Node]":
        """Yield the elements of operands that suffice to make this one non-finite."""
        equation = self.equation
        given = [np.asarray(x) if is_inexact(x) else x for x in self.scope.given(equation)]
        aligned, shape = equation.primitive.name in ELEMENTWISE, self._shape

        def groups() -> Iterator[tuple[int, np.ndarray]]:
            """Yield operands with the places of their NaN, and then of their infinities."""
            for kind in (np.isnan, np.isposinf, np.isneginf):
                for operand, x in enumerate(given):
                    if not is_inexact(x) or (kind is not np.isnan and np.iscomplexobj(x)):
                        continue
                    is_bad = kind(x)
                    if aligned and x.shape == shape:
                        is_bad = np.zeros_like(is_bad)
                        is_bad[self.index] = kind(x[self.index])
                    places = np.flatnonzero(is_bad)
                    if places.size:
                        yield operand, places

        def makes(operand: int | None, places: Any, by: float = _FINITE[0]) -> bool:
            """Return whether it is non-finite if of all operands only these elements are."""
            changed = list(given)
            for each, x in enumerate(given):
                if is_inexact(x) and not np.isfinite(x).all():
                    flat = np.where(np.isfinite(x), x, np.asarray(by, x.dtype)).ravel()
                    if each == operand:
                        flat[places] = x.ravel()[places]
                    changed[each] = jnp.asarray(flat.reshape(x.shape))
            found = np.asarray(_jax.bound(equation, changed)[self._output])
            return not np.isfinite(found[self.index])

        found = list(groups())
        if not found or all(makes(None, (), by) for by in _FINITE):
            self.is_origin = True
            return
        sufficient = [group for group in found if makes(*group)] or found[:1]
        for operand, places in sufficient:
            while len(places) > 1:
                half, rest = np.array_split(places, 2)
                # If neither half suffices alone, follow the first.
                places = rest if not makes(operand, half) and makes(operand, rest) else half
            index = np.unravel_index(int(places[0]), given[operand].shape)
            yield _Node(self.scope, equation.invars[operand], tuple(map(int, index)))
