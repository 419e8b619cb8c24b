"""Dependence analysis of functions: which inputs the outputs depend on, or are."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.primitives import ADDS, OF_ZEROS
from crossshard.jaxprs.walk import Analysis, Equations, follow, through


def depends(function: Callable[..., Any], read: Any, *others: Any) -> bool:
    """Whether any output of ``function(read, *others)`` depends on a value in ``read``.

    Shapes and dtypes are not values. An output read through a Ref counts as dependent.

    >>> import jax.numpy as jnp
    >>> depends(lambda x, y: x.size * y, jnp.ones(2), jnp.ones(2))
    False
    """
    number = len(jax.tree.leaves(read))
    return any(bits & (1 << number) - 1 for bits in sources(function, read, *others))


def sources(function: Callable[..., Any], *args: Any) -> list[int]:
    """For each output of ``function(*args)`` the inputs on which it depends, one bit for each.

    >>> import jax.numpy as jnp
    >>> sources(lambda x, y, z: (x + z, jnp.zeros_like(y)), 1.0, 2.0, 3.0)
    [5, 0]
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    return list(follow(_Reads(), [jaxpr], [1 << i for i in range(len(jaxpr.in_avals))]))


def inputs_read(equation: Any) -> list[list[int]]:
    """For each output of an equation the places of the inputs on which it depends."""
    places = range(len(equation.invars))
    if len(equation.outvars) == 1 or _jax.control_flow(equation) is None:
        return [list(places)] * len(equation.outvars)
    found = through(_Reads(), (equation,), [1 << place for place in places])
    return [[place for place in places if bits >> place & 1] for bits in found]


def returned_inputs(function: Callable[..., Any], *args: Any) -> list[int | None]:
    """For each output of ``function(*args)`` the index of the input that it equals, or ``None``.

    >>> import jax.numpy as jnp
    >>> returned_inputs(lambda x, y: (y, x + jnp.zeros_like(x), x + y), 1.0, 2.0)
    [1, 0, None]
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    facts = follow(_Origin(), [jaxpr], list(range(len(jaxpr.in_avals))))

    def input_of(fact: int | None, out: Any) -> int | None:
        # A scan stacks what its body returns unchanged, so the shapes must be equal too.
        is_input = fact not in (None, _ZERO) and _alike(jaxpr.in_avals[fact], out)
        return fact if is_input else None

    return list(map(input_of, facts, jaxpr.out_avals))


def hands_on(function: Callable[[Any], Any], given: Any) -> bool:
    """Whether ``function(given)`` returns ``given`` unchanged, through calls and loops.

    >>> import jax, jax.numpy as jnp
    >>> hands_on(jax.checkpoint(lambda xs: xs), [jnp.ones(2), jnp.ones(2)])
    True
    >>> hands_on(lambda xs: xs[::-1], [jnp.ones(2), jnp.ones(2)])
    False
    """
    return returned_inputs(function, given) == list(range(len(jax.tree.leaves(given))))


class _Reads(Analysis[int]):
    """The inputs on which a value may depend, as bits."""

    def constant(self, values: Sequence[Any]) -> int:
        del values
        return 0

    def join(self, facts: Sequence[int]) -> int:
        return functools.reduce(operator.or_, facts, 0)

    def control(self, equations: Equations, decides: int) -> int:
        del equations
        return decides

    def transfer(self, equations: Equations, inputs: Sequence[int]) -> Sequence[int]:
        (equation,) = equations
        # Values written to a Ref are not tracked.
        read = _ALL if any(map(_jax.is_ref, equation.invars)) else self.join(inputs)
        return [read] * len(equation.outvars)


# The bits of all inputs.
_ALL = -1


class _Origin(Analysis[int | None]):
    """The index of the input that a value equals, ``_ZERO`` for zeros, or ``None``."""

    def constant(self, values: Sequence[Any]) -> None:
        del values

    def literal(self, values: Sequence[Any], equation: Any) -> int | None:
        del equation
        return _ZERO if np.ndim(values[0]) == 0 and values[0] == 0 else None

    def join(self, facts: Sequence[int | None]) -> int | None:
        return facts[0] if all(fact == facts[0] for fact in facts) else None

    def control(self, equations: Equations, decides: int | None) -> None:
        """Nothing: both branches may return the same input."""
        del equations, decides

    def transfer(self, equations: Equations, inputs: Sequence[int | None]) -> Sequence[int | None]:
        (equation,) = equations
        name = equation.primitive.name
        if name in ("optimization_barrier", "copy", "copy_p"):
            return inputs
        if name in OF_ZEROS and all(fact == _ZERO for fact in inputs):
            return [_ZERO] * len(equation.outvars)
        if name in ADDS and inputs[1] == _ZERO:
            alike = _alike(equation.invars[0].aval, equation.outvars[0].aval)
            return [inputs[0] if alike else None]
        return [None] * len(equation.outvars)


def _alike(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


_ZERO = -1
