"""Means: how the values of shards, or microbatches, are weighed, summed and divided."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Inexact, Shaped

from crossshard.collectives.sums import widen


def to_average(x: Any, weight: Float[Array, ""] | None) -> Inexact[Array, "..."]:
    """This shard's summand of a mean: times its weight, and zero if that is zero, even for NaN."""
    wide = widen(x)
    if weight is None:
        return wide
    return jnp.where(weight != 0, wide * weight.astype(wide.dtype), 0)


def to_sum(x: Any, weight: Float[Array, ""] | None) -> Shaped[Array, "..."]:
    """This shard's summand of a sum: zero if its weight is zero."""
    wide = widen(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.asarray(x)
    return wide if weight is None else jnp.where(weight != 0, wide, 0)


def average(
    total: Inexact[Array, "*shape"], weight: Float[Array, ""] | None, number: int = 1
) -> Inexact[Array, "*shape"]:
    """The mean, from the sum of all summands and weights; zero if nothing has weight.

    Args:
      total: the sum of ``to_average`` over the shards.
      weight: the total weight; ``None`` if all shards count the same.
      number: the number of shards, if all count the same.
    """
    if weight is None:
        return total / number if number > 1 else total
    # Not a quotient, which XLA does not compute anew in each kernel that reads it, but stores.
    return total * jnp.where(weight != 0, 1 / weight.astype(total.dtype), 0)
