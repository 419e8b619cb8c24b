"""CrossShardState: the state of every stage and of the inner optimizer."""

from typing import NamedTuple

from crossshard._annotations import PyTree


class CrossShardState(NamedTuple):
    """The state of a CrossShardOptimizer, the same with and without stages.

    The state of a stage that is off is ``()``.

    Attributes:
      accumulate: an ``AccumulateState``: the sums of the calls since the last update, one per
        shard.
      preprocess: the state of the preprocessor, one per shard.
      aggregate: the state of the aggregator; ``()`` for the mean and the sum.
      loss_scale: a ``LossScaleState``.
      nonfinite: a ``NonfiniteState``: what was not finite at the last update.
      metrics: the requested metrics of the last update, by name, float32[].
      outer: an ``OuterState``: what the workers that synchronise rarely have in common.
      inner_state: the state of the inner optimizer.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import CrossShardOptimizer
    >>> CrossShardOptimizer(optax.trace(0.9)).init(jnp.zeros(2)).inner_state.trace
    Array([0., 0.], dtype=float32)
    """

    accumulate: PyTree = ()
    preprocess: PyTree = ()
    aggregate: PyTree = ()
    loss_scale: PyTree = ()
    nonfinite: PyTree = ()
    metrics: PyTree = ()
    outer: PyTree = ()
    inner_state: PyTree = ()
