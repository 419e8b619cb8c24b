"""Stage: one transformation of the gradients between autodiff and the optimizer."""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from crossshard.collectives.all_reduce import sum_over_shards
from crossshard.gradients.incoming import Incoming
from crossshard.pipeline.arrays import Arrays, WholeArrays
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.placement import REPLICATED, Placement


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of one step, as a stage takes and returns them.

    Attributes:
      values: a pytree of arrays: this shard's own before the aggregate, the reduced ones after it.
      extra: values reduced with them, by the argument name of the optimizer: ``"value"``, the
        loss, and ``"grad"``.
      weight: float[], the weight of this shard in the mean, after the aggregate the total weight;
        ``None`` if all weights are equal.
      sums: arrays by name, that the aggregate only sums over the shards, or the group.
      skip: bool[], after the aggregate: whether the step leaves everything unchanged; ``None`` for
        never.
      status: for each leaf of ``values`` how far it is reduced; ``None`` for float0.
      extra_status: the same for ``extra``.
      widened: whether ``values`` have more bits than the gradients that they stand for.

    >>> Gradients({"w": 1.0}).replace(values={"w": 0.5}).values
    {'w': 0.5}
    """

    values: Any
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weight: jax.Array | None = None
    sums: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    skip: jax.Array | None = None
    status: tuple[Incoming | None, ...] = ()
    extra_status: tuple[Incoming | None, ...] = ()
    widened: bool = False

    def replace(self, **changes: Any) -> Self:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Environment:
    """The context in which a stage runs.

    Attributes:
      shards: the shards that run it; ``shards.index()`` is the index of this one, int32[].
      groups: the groups that reduce independently; ``None`` for all shards.
      params: the full parameters; ``None`` if the caller passed none.
      extra_args: the caller's extra arguments.
      arrays: how the optimizer's arrays are split.
      divisor: the divisor of a mean over the shards, or the group; 1 under SUM.
      unread: for each gradient, whether the optimizer does not read it; then it is zero, and not
        sent. Empty if it reads all.
      examples: the number of examples of one shard's gradient; 1 if it is not known.
      skips_by_loop: whether an update that may be skipped runs in a loop of one turn, or none.

    >>> from crossshard.shards.axes import current_shards
    >>> import jax, jax.numpy as jnp
    >>> index = lambda x: Environment(current_shards()).shards.index()
    >>> jax.vmap(index, axis_name="shards")(jnp.zeros(3))
    Array([0, 1, 2], dtype=int32)
    """

    shards: Shards
    groups: GroupAssignment | None = None
    params: Any = None
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    arrays: Arrays = dataclasses.field(default_factory=WholeArrays)
    divisor: int = 1
    unread: tuple[bool, ...] = ()
    examples: int = 1
    skips_by_loop: bool = False

    def on_all_shards(self, flag: jax.Array, *, of_parts: bool = False) -> jax.Array:
        """bool[]: whether a flag is set on all shards, of all groups.

        ``of_parts`` says that it was computed from arrays which may be split over the shards.
        """
        if self.groups is None and not (of_parts and self.arrays.is_local):
            return flag
        return sum_over_shards(jnp.float32(~flag), self.shards) == 0


class Stage(abc.ABC):
    """One stage of the gradient pipeline: an ``init``/``update`` pair, as in Optax.

    A stage is immutable, and its state is a pytree of arrays. ``update`` runs once per shard.

    Attributes:
      placement: the placement of its state on the mesh, ``REPLICATED`` or ``PER_SHARD``.

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
        """The state before the first step; one shard's, if the state is per shard."""
        del params
        return ()

    def placements(self, state: Any) -> Any:
        """The placement of each array of the state."""
        return jax.tree.map(lambda _: self.placement, state)

    @abc.abstractmethod
    def update(
        self, gradients: Gradients, state: Any, environment: Environment
    ) -> tuple[Gradients, Any]:
        """The gradients for the next stage, and this stage's next state."""

    def describe(self) -> str:
        """A short description of the stage."""
        return type(self).__name__
