"""Weigh: each shard's gradient times its weight in the mean."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.collectives.all_reduce import widen
from crossshard.pipeline.stage import Environment, Gradients, Stage


@dataclasses.dataclass(frozen=True)
class Weigh(Stage):
    """Multiplies gradients by the shard's weight; those of weight 0 are ignored, even NaN."""

    def update(
        self, gradients: Gradients, state: Any, environment: Environment
    ) -> tuple[Gradients, Any]:
        """The gradients, and the values reduced with them, times the weight."""
        del environment
        weight = gradients.weight
        assert weight is not None

        def weigh(leaf: Any) -> jax.Array:
            wide = widen(leaf)
            # `where`, because 0 · NaN is NaN.
            return jnp.where(weight != 0, wide * weight.astype(wide.dtype), 0)

        extra, values = jax.tree.map(weigh, (dict(gradients.extra), gradients.values))
        return gradients.replace(values=values, extra=extra), state

    def describe(self) -> str:
        """``weigh``."""
        return "weigh"
