"""Fences for XLA: a loop of one turn, and a false that XLA cannot fold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.jaxprs.rewrite import computed_once


def opaque_false(count: jax.Array) -> jax.Array:
    """bool[]: a ``False`` that XLA cannot fold, from a count, which is never negative."""
    return count < 0


def in_loop(
    function: Callable[..., tuple[Any, Any]], carry: Any, *given: Any, skip: Any
) -> tuple[Any, Any]:
    """``function(carry, *given)`` in a while loop with one turn, or none if ``skip`` is set.

    XLA updates the arrays of the carry in place, where for CPUs it copies those that a select or a
    conditional may keep. It hoists nothing that is computed of what is given, and compiles the
    body apart from all else, so that its bits do not depend on that.

    Args:
      function: returns the carry as it is afterwards, with the same types, and other arrays.
      carry: arrays that the function reads and replaces.
      given: what it only reads.
      skip: bool[]. XLA leaves the loop out if it can tell that it runs; see ``opaque_false``.

    Returns:
      What the function returns; if it is skipped, the carry as it was, and zeros.
    """
    none = zeros(jax.eval_shape(function, carry, *given)[1])

    def turn(before: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        done, carry, _ = before
        if not given:
            return jnp.bool_(True), *function(carry)
        # Or XLA would compute before the loop what is the same in all turns.
        _, own = lax.optimization_barrier((done, given))
        return jnp.bool_(True), *computed_once(function, carry, *own)

    _, carry, others = lax.while_loop(lambda before: ~before[0], turn, (skip, carry, none))
    return carry, others


def zeros(types: Any) -> Any:
    """Zeros of these types."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types)
