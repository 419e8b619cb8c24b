"""Stage: what happens to gradients between autodiff and the optimizer, one thing at a time."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax

from crossshard.gradients.incoming import Incoming
from crossshard.pipeline.arrays import Arrays, WholeArrays
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.placement import REPLICATED, Placement


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of one step, as a stage gets them and hands them on.

    Attributes:
      values: a pytree of arrays: this shard's own before the aggregate, the reduced ones after it.
      beside: what is reduced with them, by the name under which an optimizer takes it: ``"value"``,
        the loss, and ``"grad"``.
      weight: float[], what this shard counts in the mean, and after the aggregate what all of them
        count; ``None`` where all count alike.
      skip: bool[], after the aggregate: whether the step is to leave everything as it was; ``None``
        for never.
      status: per leaf of ``values`` what has been done to it already; ``None`` for a leaf without
        numbers (float0).
      beside_status: the same of ``beside``.

    >>> Gradients({"w": 1.0}).replace(values={"w": 0.5}).values
    {'w': 0.5}
    """

    values: Any
    beside: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: jax.Array | None = None
    skip: jax.Array | None = None
    status: tuple[Incoming | None, ...] = ()
    beside_status: tuple[Incoming | None, ...] = ()

    def replace(self, **changes: Any) -> Self:
        """A copy with other values in some fields."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where a stage runs.

    Attributes:
      shards: the shards that run it; ``shards.index()`` is this one's place, int32[].
      groups: the groups that reduce for themselves; ``None`` for all shards together.
      params: the parameters, whole; ``None`` if the caller gave none.
      extra_args: what the caller gave besides.
      arrays: how the optimizer's arrays are split.
      divisor: what a mean over the shards, or the group, divides by; 1 under SUM.

    >>> from crossshard.shards.axes import current_shards
    >>> import jax, jax.numpy as jnp
    >>> place = lambda x: Environment(current_shards()).shards.index()
    >>> jax.vmap(place, axis_name="shards")(jnp.zeros(3))
    Array([0, 1, 2], dtype=int32)
    """

    shards: Shards
    groups: GroupAssignment | None = None
    params: Any = None
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Arrays = dataclasses.field(default_factory=WholeArrays)
    divisor: int = 1


class Stage(abc.ABC):
    """One stage of the way of a gradient: an ``init``/``update`` pair, as in Optax.

    A stage is immutable, and its state is a pytree of arrays. ``update`` runs once per shard.

    Attributes:
      placement: how its state lies on the mesh, ``REPLICATED`` or ``PER_SHARD``.

    >>> import jax, jax.numpy as jnp, optax
    >>> from crossshard import CrossShardOptimizer, Stage
    >>> class Halve(Stage):
    ...     def update(self, gradients, state, environment):
    ...         half = jax.tree.map(lambda g: g / 2, gradients.values)
    ...         return gradients.replace(values=half), state
    >>> opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=Halve())
    >>> step = lambda gradient: opt.update(gradient, opt.init(gradient))[0]
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([-1., -1.], dtype=float32)
    """

    placement: Placement = REPLICATED

    def init(self, params: Any) -> Any:
        """The state before the first step; of one shard, if there is one per shard."""
        del params
        return ()

    @abc.abstractmethod
    def update(
        self, gradients: Gradients, state: Any, environment: Environment
    ) -> tuple[Gradients, Any]:
        """The gradients that this stage hands on, and its next state."""

    def describe(self) -> str:
        """What it does, in a few words."""
        return type(self).__name__
