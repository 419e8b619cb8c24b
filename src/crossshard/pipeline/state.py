"""CrossShardState: the state of every stage and of the inner optimizer."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

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
      outer: what the workers that synchronise rarely have in common.
      others: the states of other stages, by their names; ``()`` without any.
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
    others: PyTree = ()
    inner_state: PyTree = ()

    @property
    def names(self) -> list[str]:
        """The names of the stages with a state, or without one, but for the optimizer's."""
        return [*self._fields[:-2], *dict(self.others)]

    def of(self, name: str) -> PyTree:
        """The state of a stage, by its name."""
        return getattr(self, name) if name in self._fields else dict(self.others).get(name, ())

    def with_states(self, **states: PyTree) -> Self:
        """The same with other states of these stages."""
        fields = {name: state for name, state in states.items() if name in self._fields}
        new = {name: state for name, state in states.items() if name not in self._fields}
        others = {"others": {**dict(self.others), **new}} if new else {}
        return self._replace(**fields, **others)


def name_at(path: Sequence[Any]) -> str:
    """The name of the stage whose state has an array at this path."""
    return str(path[1].key if path[0].name == "others" else path[0].name)
