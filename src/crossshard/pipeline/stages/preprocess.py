"""Preprocess: an Optax transformation of each shard's local gradient, before it is reduced."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard.gradients.nesting import inside_optimizer
from crossshard.pipeline.stage import Gradients, Stage, StageContext
from crossshard.shards.axes import Shards
from crossshard.shards.placement import PER_SHARD
from crossshard.shards.random_streams import own_stream


@dataclasses.dataclass(frozen=True)
class Preprocess(Stage):
    """An Optax transformation as a stage, with a state per shard.

    Attributes:
      transformation: the transformation.
      name: its name in ``describe``.
    """

    transformation: optax.GradientTransformationExtraArgs
    name: str

    placement = PER_SHARD

    def init(self, params: Any) -> Any:
        """The transformation's own state."""
        with inside_optimizer():
            return self.transformation.init(params)

    def update(
        self, gradients: Gradients, state: Any, context: StageContext
    ) -> tuple[Gradients, Any]:
        """The transformed gradients."""
        shards = context.shards
        state = jax.tree.map(lambda x: _own_key(shards.as_varying(x), shards), state)
        params = jax.tree.map(shards.as_varying, context.params)
        with inside_optimizer():
            values, after = self.transformation.update(
                gradients.values, state, params, **context.extra_args
            )
        return gradients.replace(values=values), _as_stored(after, state)

    def describe(self) -> str:
        """The name of the transformation."""
        return f"preprocess ({self.name})"


def _as_stored(after: Any, before: Any) -> Any:
    """A state in the dtypes in which it is stored; of wider gradients Optax makes a wider one."""
    if jax.tree.structure(after) != jax.tree.structure(before):
        return after
    one = lambda new, old: new if new.dtype == old.dtype else new.astype(old.dtype)
    return jax.tree.map(one, after, before)


def _own_key(x: Any, shards: Shards) -> Any:
    # With the same key, every shard would draw the same numbers.
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not shards.axes:
        return x
    return own_stream(x, shards.index())
