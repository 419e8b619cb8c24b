"""CrossShardState: the state of every stage and of the inner optimizer."""

from typing import Any, NamedTuple


class CrossShardState(NamedTuple):
    """The state of a CrossShardOptimizer, the same with and without stages.

    Attributes:
      preprocess: the state of the preprocessor, one per shard; ``()`` without one.
      aggregate: the state of the aggregator; ``()`` for the mean and the sum.
      inner_state: the state of the inner optimizer.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import CrossShardOptimizer
    >>> CrossShardOptimizer(optax.trace(0.9)).init(jnp.zeros(2)).inner_state.trace
    Array([0., 0.], dtype=float32)
    """

    preprocess: Any
    aggregate: Any
    inner_state: Any
