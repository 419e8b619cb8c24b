"""Stage: one transformation of the gradients between autodiff and the updated parameters."""

import abc
import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from crossshard._annotations import Given, PyTree
from crossshard.collectives.sums import average, sum_over_shards
from crossshard.errors import ArgumentTypeError, IncomingError
from crossshard.gradients.status import GradientStatus, Statuses
from crossshard.pipeline.update.arrays import Arrays, Replicated
from crossshard.shards.axes import Shards
from crossshard.shards.cut import REPLICATED, Placement


class Phase(enum.IntEnum):
    """When a stage runs, in this order.

    CALL: at every call; with ``accumulate_steps`` the other phases run at the last call only.
    ARRIVAL: on each shard's gradient as it arrived.
    LOCAL: on each shard's gradient before it is reduced.
    REDUCTION: over the shards.
    UPDATE: on the reduced gradient: in full, in slices, or as global arrays outside ``shard_map``.
    """

    CALL = enum.auto()
    ARRIVAL = enum.auto()
    LOCAL = enum.auto()
    REDUCTION = enum.auto()
    UPDATE = enum.auto()


class Updated(NamedTuple):
    """The result of an optimizer's update."""

    # The updates, or the updated parameters: in full, or in slices if parameters are sharded.
    result: Any
    updates: Any = None  # the updates, split as the optimizer's arrays are
    # The parameters before it, split in the same way; ``None`` if the caller passed none.
    params: Any = None
    state: Any = None  # the optimizer's next state
    # The updates before a skipped step replaces them with zeros; ``None`` if none does.
    unskipped: Any = None
    # The updated parameters, split in the same way; ``None`` if the caller applies the updates.
    applied: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of one step, as a stage takes and returns them.

    Attributes:
      values: a pytree of arrays: this shard's own gradients before the aggregate; after it their
        sums, from which ``settled`` computes the reduced gradients.
      extra: values reduced with them, by the argument name of the optimizer: ``"value"``, the
        loss, and ``"grad"``.
      weight: float[], the weight of this shard in the mean, after the aggregate the total weight;
        ``None`` if all weights are equal. Of virtual shards it is ``[nodes]``, as all values are.
      sums: further pytrees of arrays, by names that all stages share, which the aggregate sums
        over the shards, or the group. They stay whole where ``values`` become slices.
      skip: bool[], after the aggregate: whether the step leaves everything unchanged; ``None`` for
        never.
      finite: bool[], after the aggregate: whether the reduced gradients are finite on all shards;
        ``None`` if no stage asks for it.
      updated: after the optimizer, an ``Updated``; before it, ``None``.
      state_has_nans: before the aggregate: for each array of this shard's model state, bool[],
        whether it has a NaN that was not there before.
      status: for each leaf of ``values`` how far it was reduced before the aggregate; ``None`` for
        float0.
      extra_status: the same for ``extra``.
      early: for each leaf of ``values`` whether the loss has summed it already, so that it is this
        shard's slice of the sum; empty if no leaf is. Such a leaf is ``SUMMED``, weighted before,
        and divided, too, if the aggregator ``divides_before``.
      early_squares: before the aggregate: float32[], the sum of squares of this shard's gradients
        of the ``early`` leaves; ``None`` if no stage asks for it.
      own_weight: before the aggregate: float[], the weight of this shard, if ``weight`` is not it
        because a ``Mean`` has weighted the gradients; else ``None``.
      total_weight: before the aggregate: float[], the sum of all weights, if it is known; else
        ``None``.
      weighted: before the aggregate: whether ``values``, ``extra`` and ``sums`` have been
        multiplied by the weight.
      dtypes: the dtypes that the reduced ``extra`` and ``values`` are to have, leaf by leaf; stages
        may widen them on the way. After the aggregate, those of ``values``.
      divisor: after the aggregate: what the sums in ``values`` are to be divided by, if there are
        no weights; ``None`` if they are final.

    >>> Gradients({"w": 1.0}).replace(values={"w": 0.5}).values
    {'w': 0.5}
    """

    values: PyTree
    extra: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    weight: jax.Array | None = None
    sums: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    skip: jax.Array | None = None
    finite: jax.Array | None = None
    updated: Updated | None = None
    state_has_nans: PyTree = ()
    early_squares: jax.Array | None = None
    own_weight: jax.Array | None = None
    total_weight: jax.Array | None = None
    status: Statuses = dataclasses.field(default=(), metadata={"static": True})
    extra_status: Statuses = dataclasses.field(default=(), metadata={"static": True})
    early: tuple[bool, ...] = dataclasses.field(default=(), metadata={"static": True})
    weighted: bool = dataclasses.field(default=False, metadata={"static": True})
    dtypes: tuple[np.dtype, ...] = dataclasses.field(default=(), metadata={"static": True})
    divisor: int | None = dataclasses.field(default=None, metadata={"static": True})

    def replace(self, **changes: PyTree) -> Self:
        """Return a copy with these fields changed.

        Raises:
          ArgumentTypeError: there is no such field.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in changes.keys() - names:
            raise ArgumentTypeError(
                f"Gradients have no field {name!r}. Their fields are {', '.join(names)}."
            )
        return dataclasses.replace(self, **changes)

    def skipped_if(self, flag: Bool[Array, ""]) -> Self:
        """Return the gradients of a step that leaves everything unchanged if the flag is set."""
        return self.replace(skip=flag if self.skip is None else self.skip | flag)

    def settled(self) -> Self:
        """Return a copy with the reduced gradients in place of their sums, after the aggregate.

        Code that reads them in a loop should call this in the loop: XLA recomputes a mean in each
        kernel that reads it, but writes one that enters a loop to memory.
        """
        if self.divisor is None:
            return self
        number = self.divisor

        def one(total: Any, status: GradientStatus | None, dtype: Any) -> Any:
            if status in _TO_DIVIDE:
                total = average(total, self.weight, number)
            return total if status is None else total.astype(dtype)

        totals, tree = jax.tree.flatten(self.values)
        values = tree.unflatten(map(one, totals, self.status, self.dtypes))
        return self.replace(values=values, status=(), dtypes=(), divisor=None)


# What a stage returns: the gradients for the next one, and its own next state.
Staged: TypeAlias = tuple[Gradients, PyTree]


@dataclasses.dataclass(frozen=True)
class StageContext:
    """The context in which a stage runs.

    Attributes:
      shards: the shards that run it, with their groups; ``shards.index()`` is the index of this
        one, int32[].
      params: the parameters as the update takes them: in full, or this shard's slices if they are
        sharded; before the reduction perhaps their types. ``None`` if the caller passed none.
      extra_args: the caller's extra arguments.
      arrays: how the optimizer's arrays are split.
      divisor: the number of parts of which the mean is taken: shards, those of the group, or
        virtual shards; 1 under SUM, and for a loss over the batch.
      examples: the number of examples that a weight of 1 stands for; without weights, the number
        on each shard; 1 if it is not known.
      opaque_false: bool[], a ``False`` that XLA cannot fold: with it the update runs in a loop,
        which XLA does not fuse with the code around it, so that its bits do not depend on that
        code. ``None`` to let XLA fuse.
      skips_by_loop: whether an update that may be skipped runs in a while loop, once or not at all.
      apply_updates: whether the update returns updated parameters, rather than updates.
      over_batch: whether there is one loss of the whole batch, so that no shard has a loss, or a
        gradient, of its own.

    >>> from crossshard.shards.axes import current_shards
    >>> import jax, jax.numpy as jnp
    >>> index = lambda x: StageContext(current_shards()).shards.index()
    >>> jax.vmap(index, axis_name="shards")(jnp.zeros(3))
    Array([0, 1, 2], dtype=int32)
    """

    shards: Shards
    params: PyTree = None
    extra_args: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)
    arrays: Arrays = dataclasses.field(default_factory=Replicated)
    divisor: int = 1
    examples: int = 1
    opaque_false: jax.Array | None = None
    skips_by_loop: bool = False
    apply_updates: bool = False
    over_batch: bool = False

    def on_all_shards(self, flag: Bool[Array, ""], *, differs: bool = False) -> Bool[Array, ""]:
        """Return whether a flag is set on all shards, of all groups.

        ``differs`` says that the flag may differ within a group.
        """
        if self.shards.groups is None and not differs:
            return flag
        return sum_over_shards(jnp.float32(~flag), self.shards.all) == 0

    def agreed(self, count: Int[Array, ""]) -> Int[Array, ""]:
        """Return the count that most shards have.

        Each shard has a copy. If a bit of one copy flips, and the copy decides when its shard
        communicates, the other shards wait for that shard forever.
        """
        number = self.shards.num_shards
        if number == 1:
            return count
        own = jnp.where(jnp.arange(number) == self.shards.index(), count, 0)
        # The median is what more than half of the shards have.
        return jnp.sort(sum_over_shards(own, self.shards.all))[number // 2]


class Stage(abc.ABC):
    """One stage of the gradient pipeline: an ``init``/``update`` pair, as in Optax.

    A stage is immutable, and its state is a pytree of arrays. ``update`` runs once per shard.

    Attributes:
      placement: the placement of its state on the mesh, ``REPLICATED`` or ``PER_SHARD``.
      phase: when it runs; by default when ``preprocess`` does.
      scope: its name in profiles.
      state_field: the name of its state in ``CrossShardState``; empty without one.
      needs_local: for a stage before the reduction, what it does to each shard's local gradient,
        in the words of an error, the option first, such as ``"noise perturbs"``; empty if it takes
        gradients that are already summed.
      needs_whole: what it computes of whole arrays, in the words of an error, the option first;
        empty if each device may have its block of them.
      takes_summed: whether it also takes leaves that the backward pass has summed, since it finds
        elsewhere what it needs of them.
      options: the names of its options. Any one of them asks for the stage.
      asked_by: the options that ask for it, if not its own; empty if it is always there.
      of_steps: whether these options are only for whole steps.
      is_compared: whether a restore compares these options. It need not if they do not change what
        a state becomes.
      joins_groups: whether it synchronises the parameters of all groups, so that groups may change,
        and a state has one set of parameters for all.
      sends_beside: whether it communicates while the loss is computed.

    >>> import jax, jax.numpy as jnp, optax
    >>> from crossshard import CrossShardOptimizer, Stage
    >>> class Halve(Stage):
    ...     def update(self, gradients, state, context):
    ...         half = jax.tree.map(lambda g: g / 2, gradients.values)
    ...         return gradients.replace(values=half), state
    >>> opt = CrossShardOptimizer(optax.sgd(1.0), preprocess=Halve())
    >>> step = lambda gradient: opt.update(gradient, opt.init(gradient))[0]
    >>> jax.vmap(step, axis_name="shards")(jnp.array([1.0, 3.0]))
    Array([-1., -1.], dtype=float32)
    """

    placement: Placement = REPLICATED
    phase: Phase = Phase.LOCAL
    scope: str = "preprocess"
    state_field: str = "preprocess"
    needs_local: str = "preprocess applies to"
    needs_whole: str = ""
    takes_summed: bool = False
    options: tuple[str, ...] = ("preprocess",)
    asked_by: tuple[str, ...] | None = None
    of_steps: bool = False
    is_compared: bool = True
    joins_groups: bool = False

    @property
    def sends_beside(self) -> bool:
        """Whether it communicates while the loss is computed."""
        return False

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> "Stage | None":
        """Check the options, and return the stage that they ask for; ``None`` if they turn it off.

        Args:
          options: what the user has passed, by name; and of the pipeline ``"inner"``, the
            optimizer, ``"reduction"``, ``"groups"`` and ``"axis_name"``.
        """
        del options
        return None

    def init(self, params: PyTree) -> PyTree:
        """Return the state before the first step; one shard's, if the state is per shard."""
        del params
        return ()

    def placements(self, state: PyTree) -> PyTree:
        """Return the placement of each array of the state."""
        return jax.tree.map(lambda _: self.placement, state)

    @abc.abstractmethod
    def update(self, gradients: Gradients, state: PyTree, context: StageContext) -> Staged:
        """Return the gradients for the next stage, and this stage's next state."""

    def moved_to(self, state: PyTree, spread: PyTree, number: int) -> PyTree:
        """Return the state on another number of shards.

        Args:
          state: the state on the old shards, ``[shards, …]`` where each has its own.
          spread: the state on the new shards, each of which has the mean of the old ones.
          number: the number of new shards.
        """
        del state, number
        return spread

    def follows_params(self, state: PyTree) -> PyTree:
        """Return for each array of the state whether other parameters make it anew, by ``init``."""
        return jax.tree.map(lambda _: False, state)

    def exported(self, state: PyTree, params: PyTree) -> PyTree:
        """Return what ``model(state)`` exports: ``params``, or the parameters in this state."""
        del state
        return params

    def written(self) -> dict[str, Given]:
        """Return its options by name, as a checkpoint stores and a restore compares them."""
        return {self.options[0]: self} if self.options else {}

    def describe(self) -> str:
        """Describe the stage in short: its class's name, or nothing if it has no option."""
        return type(self).__name__ if self.options else ""


def as_local(gradients: Gradients, context: StageContext, what: str) -> Gradients:
    """Undo the division of ``SCALED`` gradients, so that each shard has those of its own loss.

    Gradients of a loss over the batch stay as they are. ``what`` begins the error message, as in
    ``"weight multiplies"``.

    Raises:
      IncomingError: they are already summed.
    """
    if context.over_batch:
        return gradients
    early = gradients.early or (False,) * len(gradients.status)
    pairs = list(zip(gradients.status, early, strict=True))
    summed = {status for status, is_early in pairs if status in _SUMMED and not is_early}
    if summed and context.shards.num_shards > 1:
        raise IncomingError(
            f"{what} each shard's local gradient before it is reduced, and these gradients are "
            f"already {summed.pop()}. Differentiate with crossshard.value_and_grad, or leave "
            f"{what.split()[0]} out."
        )
    leaves, tree = jax.tree.flatten(gradients.values)
    local = [
        leaf * context.divisor if status is GradientStatus.SCALED else leaf
        for leaf, status in zip(leaves, gradients.status, strict=True)
    ]
    status = tuple(one if is_early else one and GradientStatus.LOCAL for one, is_early in pairs)
    return gradients.replace(values=tree.unflatten(local), status=status)


# The statuses of gradients that are already summed over the shards.
_SUMMED = (GradientStatus.SUMMED, GradientStatus.REDUCED)
# ``settled`` divides the sums of these. ``SCALED`` ones were divided before; ``REDUCED`` are final.
_TO_DIVIDE = (GradientStatus.LOCAL, GradientStatus.SUMMED)


# ---- The states of all stages.


class CrossShardState(NamedTuple):
    """The state of a CrossShardOptimizer, whose fields are the same with and without stages.

    The state of a stage that is off is ``()``.

    Attributes:
      accumulate: an ``AccumulateState``: the sums of the calls since the last update, one per
        shard.
      preprocess: the state of the preprocessor, one per shard.
      aggregate: the state of the aggregator; ``()`` for the mean and the sum.
      loss_scale: a ``LossScaleState``.
      nonfinite: a ``NonfiniteState``: what was not finite at the last update.
      metrics: the requested metrics of the last update, by name, float32[].
      outer: the state that workers share, if they synchronise rarely.
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
        """The names of the states that ``of`` returns, except the optimizer's."""
        return [*self._fields[:-2], *dict(self.others)]

    def of(self, name: str) -> PyTree:
        """Return the state of a stage, by its name."""
        return getattr(self, name) if name in self._fields else dict(self.others).get(name, ())

    def with_states(self, **states: PyTree) -> Self:
        """Return a copy with other states of these stages."""
        fields = {name: state for name, state in states.items() if name in self._fields}
        new = {name: state for name, state in states.items() if name not in self._fields}
        others = {"others": {**dict(self.others), **new}} if new else {}
        return self._replace(**fields, **others)
