"""Pieces: some outputs of a jaxpr, computed from the inputs that they need."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from crossshard import _jax


class Piece(NamedTuple):
    """A function of some inputs of a jaxpr.

    Attributes:
      run: the function.
      taken: the places of its inputs.
      text: the same for functions that compute the same from other inputs.
    """

    run: Callable[..., list[Any]]
    taken: tuple[int, ...]
    text: str


class Pieces:
    """The pieces of a closed jaxpr; each is found in the time that it takes to compute it."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr
        self._constants = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
        self._equations = jaxpr.jaxpr.eqns
        self._maker = {
            out: place for place, each in enumerate(self._equations) for out in each.outvars
        }
        self._known: dict[tuple[int, ...], Piece] = {}

    def of(self, outputs: Sequence[int]) -> Piece:
        """What computes the outputs at these places, in their order."""
        key = tuple(outputs)
        if key not in self._known:
            self._known[key] = self._found(key)
        return self._known[key]

    def _found(self, outputs: tuple[int, ...]) -> Piece:
        wanted = [self._jaxpr.jaxpr.outvars[place] for place in outputs]
        places, left = set[int](), list(wanted)
        while left:
            atom = left.pop()
            place = None if _jax.is_literal(atom) else self._maker.get(atom)
            if place is not None and place not in places:
                places.add(place)
                left += self._equations[place].invars
        equations = [self._equations[place] for place in sorted(places)]
        inputs = self._jaxpr.jaxpr.invars
        jaxpr = _jax.with_equations(self._jaxpr, self._constants, inputs, wanted, equations)
        pruned, taken = _jax.pruned(jaxpr, [True] * len(wanted))
        kept = tuple(place for place, each in enumerate(taken) if each)
        return Piece(_jax.as_function(pruned), kept, str(pruned.jaxpr))
