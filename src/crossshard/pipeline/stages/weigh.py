"""Weigh: each shard's gradient times its weight in the mean."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from crossshard import _check
from crossshard._annotations import Given
from crossshard._check import is_number
from crossshard.collectives.sums import to_average
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.status import Reduction
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, as_local


def check_weighable(reduction: Reduction) -> None:
    """Raise ArgumentError if shards cannot have weights: under SUM."""
    if reduction is Reduction.SUM:
        raise ArgumentError(
            "weight is a shard's weight in a mean, but the optimizer's reduction is SUM. Use MEAN, "
            "or leave weight out and weigh the loss."
        )


def as_weight(given: Any, what: str = "got") -> Float[Array, ""]:
    """The weight of a shard in the mean, in JAX's default precision.

    Raises:
      ArgumentError: the weight is not a scalar.
      ArgumentTypeError: the weight is not a number.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        given = _check.number("A shard's weight", given)
    value = _check.as_array("A shard's weight", given) if is_number(given) else None
    kinds = jnp.floating, jnp.integer, jnp.bool_
    if value is None or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise ArgumentTypeError(
            f"A shard's weight is one number; {what} {_check.described(given)}."
        )
    value = value.astype(float)
    if value.shape != ():
        raise ArgumentError(
            f"A shard's weight is one number; {what} an array of shape {value.shape}. Sum it."
        )
    if not isinstance(given, float | np.generic | np.ndarray):
        return value
    _check.finite("A shard's weight", given)
    if np.any(np.asarray(given) < 0):
        raise ArgumentError(f"A shard's weight is at least 0; {what} {given}.")
    return value


@dataclasses.dataclass(frozen=True)
class Weigh(Stage):
    """Multiplies gradients by the shard's weight; those of weight 0 are ignored, even NaN."""

    phase = Phase.LOCAL
    scope = "weigh"
    state_field = ""
    needs_local = ""
    options = ()
    # A call, or another stage, may bring a weight.
    is_always_there = True

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        """The stage."""
        del options
        return cls()

    def update(
        self, gradients: Gradients, state: Any, context: StageContext
    ) -> tuple[Gradients, Any]:
        """The gradients, and the values reduced with them, times the weight."""
        weight = gradients.weight
        if weight is None or gradients.weighed:
            return gradients, state
        gradients = as_local(gradients, context, "weight multiplies")
        weigh = lambda leaf: to_average(leaf, weight)
        leaves, tree = jax.tree.flatten(gradients.values)
        early = gradients.early or [False] * len(leaves)
        values = [x if done else weigh(x) for x, done in zip(leaves, early, strict=True)]
        extra = jax.tree.map(weigh, dict(gradients.extra))
        return gradients.replace(values=tree.unflatten(values), extra=extra), state

    def describe(self) -> str:
        """``weigh``."""
        return "weigh"
