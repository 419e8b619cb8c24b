"""Dependence analysis of functions: which inputs the outputs depend on, or are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from crossshard import _jax
from crossshard.jaxprs.walk import Analysis, Equations, follow


def depends(function: Callable[..., Any], read: Any, *others: Any) -> bool:
    """Whether any output of ``function(read, *others)`` depends on a value in ``read``.

    Shapes and dtypes are not values. An output read through a Ref counts as dependent.

    >>> import jax.numpy as jnp
    >>> depends(lambda x, y: x.size * y, jnp.ones(2), jnp.ones(2))
    False
    """
    jaxpr = jax.make_jaxpr(function)(read, *others)
    number = len(jax.tree.leaves(read))
    inputs = [index < number for index in range(len(jaxpr.in_avals))]
    outputs = follow(_Reads(), [jaxpr], inputs)
    return any(outputs)


def hands_on(function: Callable[[Any], Any], given: Any) -> bool:
    """Whether ``function(given)`` returns ``given`` unchanged, through calls and loops.

    >>> import jax, jax.numpy as jnp
    >>> hands_on(jax.checkpoint(lambda xs: xs), [jnp.ones(2), jnp.ones(2)])
    True
    >>> hands_on(lambda xs: xs[::-1], [jnp.ones(2), jnp.ones(2)])
    False
    """
    jaxpr = jax.make_jaxpr(function)(given)
    indices = range(len(jaxpr.in_avals))
    outputs = follow(_Origin(), [jaxpr], list(indices))
    # A scan stacks what its body returns unchanged, so the shapes must be equal too.
    return list(outputs) == list(indices) and jaxpr.in_avals == jaxpr.out_avals


class _Reads(Analysis[bool]):
    """Whether a value may depend on the tracked inputs."""

    def constant(self, values: Sequence[Any]) -> bool:
        del values
        return False

    def join(self, facts: Sequence[bool]) -> bool:
        return any(facts)

    def is_top(self, fact: bool) -> bool:
        return fact

    def control(self, equations: Equations, decides: bool) -> bool:
        del equations
        return decides

    def transfer(self, equations: Equations, inputs: Sequence[bool]) -> Sequence[bool]:
        (equation,) = equations
        # Values written to a Ref are not tracked.
        return [any(inputs) or any(map(_jax.is_ref, equation.invars))] * len(equation.outvars)


class _Origin(Analysis[int | None]):
    """The index of the input that a value equals, or ``None``."""

    def constant(self, values: Sequence[Any]) -> None:
        del values

    def join(self, facts: Sequence[int | None]) -> int | None:
        return facts[0] if all(fact == facts[0] for fact in facts) else None

    def is_top(self, fact: int | None) -> bool:
        return fact is None

    def control(self, equations: Equations, decides: int | None) -> None:
        """Nothing: both branches may return the same input."""
        del equations, decides

    def transfer(self, equations: Equations, inputs: Sequence[int | None]) -> Sequence[int | None]:
        (equation,) = equations
        if equation.primitive.name in ("optimization_barrier", "copy", "copy_p"):
            return inputs
        return [None] * len(equation.outvars)
