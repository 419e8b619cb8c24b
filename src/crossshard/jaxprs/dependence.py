"""Dependence: which inputs the outputs of a function depend on, or are, and which axes."""

import functools
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from crossshard import _jax
from crossshard.jaxprs.primitives import ADDS, EQUALIZES, OF_ZEROS
from crossshard.jaxprs.walk import Analysis, Equations, equations_within, follow, through

Axes = frozenset[str]

_INVARIANT: Axes = frozenset()


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


def varying_axes_of_outputs(sharded: ClosedJaxpr) -> Sequence[Axes]:
    """For each output of a traced ``shard_map``, the mesh axes over which it may vary.

    JAX's types (``check_vma=True``) also show them, but reject correct steps: a loop whose carry
    starts invariant and ends varying, a sum over groups. Here a step is traced without types, and
    the axes over which a value may vary are propagated from the inputs to the outputs.

    Args:
      sharded: the jaxpr of a function that is a single ``shard_map``.
    """
    (equation,) = sharded.jaxpr.eqns
    mesh_axes, in_specs, jaxpr = _jax.shard_map_parts(equation)
    inputs = [_names_in(spec) & mesh_axes for spec in in_specs]
    return follow(Variance(mesh_axes), [jaxpr], inputs)


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
        # What a Ref holds, or what a callback returns, is not tracked.
        read = _ALL if _jax.has_effect(equation) else self.join(inputs)
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


class Variance(Analysis[Axes]):
    """The mesh axes over which a value may vary."""

    def __init__(self, mesh_axes: Axes):
        self._mesh_axes = mesh_axes

    def constant(self, values: Sequence[Any]) -> Axes:
        del values
        return _INVARIANT

    def join(self, facts: Sequence[Axes]) -> Axes:
        return _INVARIANT.union(*facts)

    def control(self, equations: Equations, decides: Axes) -> Axes:
        # Shards that take different branches or leave a loop at different times diverge.
        del equations
        return decides

    def transfer(self, equations: Equations, inputs: Sequence[Axes]) -> Sequence[Axes]:
        (equation,) = equations
        if _jax.has_effect(equation):
            return [self._mesh_axes] * len(equation.outvars)
        varies = self.join([*inputs, *map(self._named_by, equations_within(equation))])
        over = self._named_by(equation)
        out = varies - over if _equalizes(equation) else varies | over
        return [out] * len(equation.outvars)

    def _named_by(self, equation: Any) -> Axes:
        return _names_in(_jax.named_axes(equation)) & self._mesh_axes


def _equalizes(equation: Any) -> bool:
    """Whether an equation is a collective whose output is equal on all shards along its axes."""
    ungrouped = equation.params.get("axis_index_groups") is None
    return equation.primitive.name in EQUALIZES and ungrouped


def _names_in(names: Any) -> Axes:
    """The axis names in a nested spec or parameter; positions are not names."""
    if names is None or isinstance(names, numbers.Integral):
        return _INVARIANT
    if isinstance(names, str):
        return frozenset([names])
    return _INVARIANT.union(*map(_names_in, names))
