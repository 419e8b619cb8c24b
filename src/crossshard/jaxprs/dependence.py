"""What a function's outputs depend on, and which of its inputs it hands on as they are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from crossshard import _jax
from crossshard.jaxprs.walk import Analysis, Equations, follow


def depends(function: Callable[..., Any], read: Any, *others: Any) -> bool:
    """Whether any output of ``function(read, *others)`` depends on a value in ``read``.

    Shapes and dtypes are not values. An output that is read through a Ref counts as dependent.

    >>> import jax.numpy as jnp
    >>> depends(lambda x, y: x.size * y, jnp.ones(2), jnp.ones(2))
    False
    """
    jaxpr = jax.make_jaxpr(function)(read, *others)
    number = len(jax.tree.leaves(read))
    inputs = [place < number for place in range(len(jaxpr.in_avals))]
    outputs = follow(_Reads(), [jaxpr], inputs)
    return any(outputs)


def hands_on(function: Callable[[Any], Any], given: Any) -> bool:
    """Whether ``function(given)`` returns ``given``, whatever calls and loops it goes through.

    >>> import jax, jax.numpy as jnp
    >>> hands_on(jax.checkpoint(lambda xs: xs), [jnp.ones(2), jnp.ones(2)])
    True
    >>> hands_on(lambda xs: xs[::-1], [jnp.ones(2), jnp.ones(2)])
    False
    """
    jaxpr = jax.make_jaxpr(function)(given)
    places = range(len(jaxpr.in_avals))
    outputs = follow(_Origin(), [jaxpr], list(places))
    # A scan stacks an array that it hands on, so that one of another shape is not the same.
    return list(outputs) == list(places) and jaxpr.in_avals == jaxpr.out_avals


class _Reads(Analysis[bool]):
    """Whether values depend on those of some inputs; errs on the side of yes."""

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
        # What was written to a Ref is not followed.
        return [any(inputs) or any(map(_jax.is_ref, equation.invars))] * len(equation.outvars)


class _Origin(Analysis[int | None]):
    """Which input a value is, unchanged; ``None`` if it is not one."""

    def constant(self, values: Sequence[Any]) -> None:
        del values

    def join(self, facts: Sequence[int | None]) -> int | None:
        return facts[0] if all(fact == facts[0] for fact in facts) else None

    def is_top(self, fact: int | None) -> bool:
        return fact is None

    def control(self, equations: Equations, decides: int | None) -> None:
        """Nothing: both branches may hand on the same."""
        del equations, decides

    def transfer(self, equations: Equations, inputs: Sequence[int | None]) -> Sequence[int | None]:
        (equation,) = equations
        if equation.primitive.name in ("optimization_barrier", "copy", "copy_p"):
            return inputs
        return [None] * len(equation.outvars)
