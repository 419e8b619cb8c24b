"""StateLayout: the placement of each array of a step's state on the mesh."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard._flax import nnx
from crossshard.errors import ArgumentError
from crossshard.gradients.scalars import is_inexact
from crossshard.model.model_state import ModelState, holds_keys
from crossshard.model.models import Skeleton
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.state import CrossShardState
from crossshard.pipeline.update.arrays import Arrays, Parts
from crossshard.pipeline.update.owners import Owners
from crossshard.shards.axes import Shards
from crossshard.shards.cut import (
    PER_SHARD,
    REPLICATED,
    WHOLE,
    Partition,
    Placement,
    of_all,
    only,
    other_axes_like,
    partition_along_axis,
    tile_for,
)
from crossshard.shards.devices import sends_beside_products, slices_in_order, torus_factors
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.random_streams import own_stream


@dataclasses.dataclass
class UsesRecord:
    """Where the loss uses its parameters.

    Attributes:
      latest: for each parameter that is gathered, or summed, there, by its place, as the step that
        was traced last to its end has it; ``None`` if none was.
    """

    latest: Mapping[int, Any] | None = None


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The placement of a state on the mesh.

    Attributes:
      mesh: the mesh.
      axes: its shard axes.
      arrays: how the parameters and the optimizer's state are split, and where the update runs.
      why: the reason for that, in a few words.
      groups: the groups whose parameters differ; ``None`` if all shards have the same.
      pipeline: the pipeline, whose stages have states.
      params: the types of one set of parameters.
      model_state: how the state that a loss returns is kept; ``None`` if it returns none.
      other_axes: for each array of the parameters, the frozen arrays and the model state its
        spec on the other axes of the mesh; empty if none is split over these.
      has_one_state: whether there is one model state for all shards, as of a loss over the batch.
      uses: where the loss uses each parameter, by its place, as found when a step was last traced;
        of those that are gathered, or summed, there.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    arrays: Arrays
    why: str
    groups: GroupAssignment | None
    pipeline: Pipeline
    params: Any = dataclasses.field(compare=False)
    model_state: ModelState | None = None
    other_axes: tuple[PartitionSpec, ...] = ()
    has_one_state: bool = False
    uses: UsesRecord = dataclasses.field(default_factory=UsesRecord, compare=False, repr=False)

    @functools.cached_property
    def types(self) -> CrossShardState:
        """The types of one shard's whole optimizer state, of all stages."""
        types: CrossShardState = jax.eval_shape(self.pipeline.init, self.params)
        return types

    @property
    def number_of_shards(self) -> int:
        """The number of shards."""
        return self.shards.number

    @functools.cached_property
    def shards(self) -> Shards:
        """The shards, inside ``shard_map``."""
        return shards_of(self.mesh, self.axes)

    @property
    def unnamed_axes(self) -> tuple[str, ...]:
        """The other axes of the mesh."""
        return self.shards.other_axes

    def specs_of_arrays(self, frozen: Any) -> tuple[PartitionSpec, ...]:
        """The specs with which ``initial`` gets its arrays, without those that are whole.

        Args:
          frozen: the arrays that are not trained, or their types.
        """
        if not self.arrays.in_parts:
            return self.other_axes
        partitions = *self.arrays.params, *self.partitions_of_frozen(frozen)
        in_parts = tuple(each.spec(self.axes) for each in partitions)
        return in_parts + self.other_axes[len(in_parts) :]

    def partitions_of_frozen(self, frozen: Any) -> tuple[Partition, ...]:
        """The partition of each array that is not trained: large ones rest as parameters do."""
        first, leaves = len(self.arrays.params), jax.tree.leaves(frozen)
        others = self.other_axes[first : first + len(leaves)] or [WHOLE] * len(leaves)
        tile = tile_for(self.mesh, self.arrays.in_parts)

        def one(x: Any, own: PartitionSpec) -> Partition:
            split = partition_along_axis(x.shape, self.number_of_shards, tile, own)
            stays = not self.arrays.in_parts or not is_inexact(x) or split.is_small
            return Partition(x.shape, other_axes=own) if stays else split

        return tuple(map(one, leaves, others))

    def keeps_per_shard(self, state: TrainState) -> bool:
        """Whether each shard has its own model state here, if there is any."""
        if self.has_one_state or not jax.tree.leaves(state.model_state):
            return False
        of_function = self.model_state is ModelState.PER_SHARD
        return state.skeleton.is_nnx or of_function or self.groups is not None

    def placements(self, state: TrainState) -> TrainState:
        """The placement of every array of a state."""
        own = REPLICATED if self.groups is None else PER_SHARD
        params, frozen = _all(own, state.params), _all(REPLICATED, state.frozen)
        if self.arrays.in_parts:
            placed = lambda parts, tree: jax.tree.structure(tree).unflatten(map(Placement, parts))
            params = placed(self.arrays.params, state.params)
            frozen = placed(self.partitions_of_frozen(state.frozen), state.frozen)
        model_state = PER_SHARD if state.per_shard else REPLICATED
        of_inner = [Placement(each, own.per_shard, self.groups) for each in self.arrays.state]
        inner = jax.tree.structure(state.opt_state.inner_state).unflatten(of_inner)
        opt_state = self.pipeline.placements(state.opt_state, inner)
        arrays: Any = state  # of which each is replaced by its placement
        placements = dataclasses.replace(
            arrays,
            step=REPLICATED,
            params=params,
            opt_state=opt_state,
            frozen=frozen,
            model_state=_all(model_state, state.model_state),
            rng=REPLICATED,
        )
        return self._beside_shards(placements, state) if self.other_axes else placements

    def _beside_shards(self, placements: TrainState, state: TrainState) -> TrainState:
        """The placements with the other axes of the mesh."""

        def beside(where: Any, tree: Any, specs: Sequence[PartitionSpec]) -> Any:
            each = zip(jax.tree.leaves(where), jax.tree.leaves(tree), specs, strict=True)
            placements = [own.beside(x.shape[own.per_shard :], spec) for own, x, spec in each]
            return jax.tree.structure(where).unflatten(placements)

        number, of_frozen = len(jax.tree.leaves(state.params)), len(jax.tree.leaves(state.frozen))
        of_params, others = self.other_axes[:number], self.other_axes[number:]
        # One of several, or one for each shard: its shape ends with the parameter's.
        params = jax.tree.map(self._one, placements.params, state.params)
        stages = placements.opt_state[:-1], state.opt_state[:-1]
        of_stages = other_axes_like(jax.tree.map(self._one, *stages), params, of_params)
        return dataclasses.replace(
            placements,
            params=beside(placements.params, state.params, of_params),
            opt_state=type(placements.opt_state)._make(
                (*beside(*stages, of_stages), placements.opt_state.inner_state)
            ),
            frozen=beside(placements.frozen, state.frozen, others[:of_frozen]),
            model_state=beside(placements.model_state, state.model_state, others[of_frozen:]),
        )

    @staticmethod
    def _one(placement: Placement, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[placement.per_shard :], x.dtype)

    def specs(self, state: TrainState) -> TrainState:
        """The spec of every array of a state over the shards."""
        axes = self.axes
        return self._map(lambda placement, _: only(placement.spec(axes), axes), state)

    def shardings(self, state: TrainState) -> TrainState:
        """The sharding of every array of a state."""
        return self._map(
            lambda placement, _: NamedSharding(self.mesh, placement.spec(self.axes)), state
        )

    def unsharded(self, state: TrainState) -> TrainState:
        """The sharding of every array of an unsharded state: split over the other axes alone."""
        return self._map(
            lambda placement, _: NamedSharding(
                self.mesh, PartitionSpec(*[None] * placement.per_shard, *placement.other_axes)
            ),
            state,
        )

    def incoming(self, state: TrainState) -> TrainState:
        """The sharding of every array of an unsharded state that comes to the mesh.

        An array that is stored in its own shape comes as it is stored, since all of it may be too
        large for one device; any other as ``unsharded`` says.
        """

        def stays(own: Placement, x: Any) -> bool:
            if own.per_shard:
                return bool(x.shape[0] == self.number_of_shards)
            return own.partition is None or own.partition.packed_shape == own.partition.shape

        def place(own: Placement, x: Any, stored: Any, whole: Any) -> Any:
            if stays(own, x):
                return stored
            return self.of_other_shards(own, x.shape) if own.per_shard else whole

        return jax.tree.map(
            place,
            self.own.placements(state),
            state,
            self.own.shardings(state),
            self.own.unsharded(state),
        )

    def of_other_shards(self, own: Placement, shape: tuple[int, ...]) -> NamedSharding:
        """The sharding of what each of another number of shards has, which together is large."""
        others = PartitionSpec(None, *own.other_axes)
        split = partition_along_axis(shape, self.number_of_shards, other_axes=others)
        return NamedSharding(self.mesh, split.spec(self.axes))

    def constrain(self, state: TrainState) -> TrainState:
        """The state as it is placed, since XLA decides about other axes."""
        if not self.unnamed_axes:
            return state
        return jax.lax.with_sharding_constraint(state, self.shardings(state))

    @functools.cached_property
    def own(self) -> "StateLayout":
        """The same without rows: every array in its own shape, or in slices of it."""
        arrays = self.arrays
        if not isinstance(arrays, Owners):
            return self
        kept = arrays.state_in_slices, arrays.unread, arrays.in_parts
        return dataclasses.replace(self, arrays=Parts(arrays.params, arrays.shards, None, *kept))

    def collected(self, state: TrainState) -> TrainState:
        """The state as ``own`` places it."""
        return self._moved("state_from_owners", state, self, self.own)

    def collected_types(self, state: TrainState) -> TrainState:
        """The types of the arrays of ``collected``."""
        types: TrainState = jax.eval_shape(self.collected, state)
        return types

    def dealt_out(self, state: TrainState) -> TrainState:
        """The inverse of ``collected``."""
        return self._moved("state_to_owners", state, self.own, self)

    def _moved(
        self, how: str, state: TrainState, one: "StateLayout", other: "StateLayout"
    ) -> TrainState:
        arrays = self.arrays
        if not isinstance(arrays, Owners) or not arrays.state_blocks:
            return state
        leaves, tree = jax.tree.flatten(state.opt_state.inner_state)
        before, after = (
            [each.spec(self.axes) for each in layout.arrays.state] for layout in (one, other)
        )
        run = _jax.shard_map(
            getattr(arrays, how),
            mesh=self.mesh,
            axis_names=frozenset(self.axes),
            in_specs=(before,),
            out_specs=after,
        )
        inner = tree.unflatten(run(leaves))
        return dataclasses.replace(state, opt_state=state.opt_state._replace(inner_state=inner))

    def local(self, state: TrainState) -> TrainState:
        """One shard's state, inside ``shard_map``."""
        return self._map(lambda placement, x: placement.local(x), state)

    def stored(self, state: TrainState) -> TrainState:
        """The inverse of ``local``."""
        return self._map(lambda placement, x: placement.stored(x), state)

    def pack(self, state: TrainState) -> TrainState:
        """The state as it is stored, from arrays in the optimizer's own shapes."""
        own = self.own
        return self.dealt_out(own._map(lambda placement, x: placement.pack(x), state))

    def unpack(self, state: TrainState) -> TrainState:
        """The inverse of ``pack``."""
        own = self.own
        return own._map(lambda placement, x: placement.unpack(x), self.collected(state))

    def _map(self, function: Callable[[Placement, Any], Any], state: TrainState) -> TrainState:
        return jax.tree.map(function, self.placements(state), state)

    def initial(self, skeleton: Skeleton, rng_impl: Any, arrays: Any, rng: Any) -> TrainState:
        """The state before the first step, from arrays placed by ``specs_of_arrays``."""
        # Copied, since a step donates its state, and two arrays must not share a buffer.
        params, frozen, model_state = jax.tree.map(strong_copy, arrays)
        opt_state = jax.tree.map(strong_copy, self.pipeline.init(params))
        state = TrainState(
            jnp.int32(0),
            params,
            opt_state,
            frozen,
            model_state,
            jnp.copy(rng),
            skeleton,
            rng_impl,
            self.groups is not None,
        )
        return self.pack(self._spread(state))

    def _spread(self, state: TrainState) -> TrainState:
        """A replicated state with its per-shard arrays broadcast to ``[shards, …]``.

        Each shard gets its own random streams.

        Raises:
          ArgumentError: what may be a key cannot be told from other numbers.
        """

        def streams(path: Any, leaf: Any) -> Any:
            each = jax.tree.map(self._on_each, leaf)
            if not holds_keys(path, leaf) or self.number_of_shards == 1:
                return each
            own = lambda keys: jax.vmap(own_stream)(keys, jnp.arange(self.number_of_shards))
            return jax.tree.map(own, each)

        state = dataclasses.replace(state, per_shard=self.keeps_per_shard(state))
        on_each = lambda placement, x: self._on_each(x) if placement.per_shard else x
        spread = self._map(on_each, state)
        of_shards = state.skeleton.is_nnx or self.model_state is ModelState.PER_SHARD
        if not (state.per_shard and of_shards):
            return spread
        model_state = jax.tree_util.tree_map_with_path(
            streams, state.model_state, is_leaf=_is_variable
        )
        return dataclasses.replace(spread, model_state=model_state)

    def _on_each(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, (self.number_of_shards, *x.shape))

    def is_of_these_shards(self, state: TrainState) -> bool:
        """Whether what each shard has of its own is so here, and ``[shards, …]`` of this mesh."""
        if state.per_shard != self.keeps_per_shard(state):
            return False
        fits = lambda placement, x: not placement.per_shard or x.shape[0] == self.number_of_shards
        return all(jax.tree.leaves(self._map(fits, state)))

    def on_other_shards(self, state: TrainState) -> TrainState:
        """A state of one set of parameters, taken from other shards to these, as it is stored here.

        Of what each has of its own, the new ones have what the others had on average, unless the
        stage says otherwise.
        """
        common = lambda placement, x: of_all(x) if placement.per_shard else x
        one, before, number = self._map(common, state), state.opt_state, self.number_of_shards
        spread = self._spread(one)
        opt_state = self.pipeline.moved_to(before, spread.opt_state, number)
        return self.pack(dataclasses.replace(spread, opt_state=opt_state))

    # The checks of a state.

    def check(self, state: TrainState) -> None:
        """Raise unless a state fits this step.

        Raises:
          ArgumentError: the optimizer state is another optimizer's or is sharded differently, or
            the arrays ``[shards, …]`` have another number of shards.
        """
        self.check_optimizer(state)
        if state.per_shard != self.keeps_per_shard(state):
            kept = ["one for all shards", "one for each shard"]
            raise ArgumentError(
                f"The model state is of another step: it is {kept[state.per_shard]}, and this step "
                f"keeps {kept[not state.per_shard]}. Write step.reshard(other.unshard(state))."
            )
        placements = self.placements(state)
        inner = state.opt_state.inner_state, placements.opt_state.inner_state
        for what, tree, where in (
            ("The optimizer state", *inner),
            ("The stages' state", state.opt_state[:-1], placements.opt_state[:-1]),
            ("The state's parameters", state.params, placements.params),
            ("What is frozen", state.frozen, placements.frozen),
            ("The model state", state.model_state, placements.model_state),
        ):
            shapes = [
                placement.stored_shape(leaf.shape[placement.per_shard :], self.number_of_shards)
                for placement, leaf in zip(*map(jax.tree.leaves, (where, tree)), strict=True)
            ]
            _check_shapes(what, tree, shapes)

    def check_unsharded(self, state: TrainState) -> None:
        """Raise unless the arrays of a state of this optimizer have the optimizer's own shapes.

        Raises:
          ArgumentError: they are flattened and padded, as another step stores them.
        """
        inner = state.opt_state.inner_state
        own = jax.tree.leaves(self.placements(state).opt_state.inner_state)
        shapes = [
            (*leaf.shape[: placement.per_shard], *partition.shape)
            for leaf, placement, partition in zip(
                jax.tree.leaves(inner), own, self.own.arrays.state, strict=True
            )
        ]
        _check_shapes("The optimizer state", inner, shapes)

    def check_optimizer(self, state: TrainState) -> None:
        """Raise unless a state is of this step's optimizer, with groups if this step has them."""
        if state.grouped != (self.groups is not None):
            raise ArgumentError(
                f"The state is of a step {'with' if state.grouped else 'without'} groups that "
                f"diverge, and this step is one {'without' if state.grouped else 'with'} them. "
                f"Choose parameters with other.model(state) and init with them."
            )
        others = [
            name
            for name in dict.fromkeys([*state.opt_state.names, *self.types.names])
            if jax.tree.structure(state.opt_state.of(name))
            != jax.tree.structure(self.types.of(name))
        ]
        if others:
            raise ArgumentError(
                f"The state is of a step with other options: of {' and '.join(others)} this one "
                f"keeps another state, or none. Write step.reshard(other.unshard(state)), which "
                f"makes what is new and drops what is gone."
            )
        self.pipeline.check_states(state.opt_state, self.types)
        structure = jax.tree.structure(state.opt_state.inner_state)
        expected = jax.tree.structure(self.types.inner_state)
        if structure != expected:
            raise ArgumentError(
                f"The optimizer state is another optimizer's: expected {expected}, got "
                f"{structure}. If only ema or master_dtype differ, write "
                f"step.reshard(other.unshard(state))."
            )


def shards_of(mesh: Mesh, axes: tuple[str, ...]) -> Shards:
    """The shards on these axes of a mesh, inside ``shard_map``."""
    return Shards(
        math.prod(mesh.shape[axis] for axis in axes),
        axes,
        manual=True,
        torus_factors=torus_factors(mesh),
        other_axes=tuple(axis for axis in mesh.axis_names if axis not in axes),
        platform=mesh.devices.flat[0].platform,
        in_rings=sends_beside_products(mesh),
        slices=slices_in_order(mesh),
    )


def _all(placement: Placement, tree: Any) -> Any:
    return jax.tree.map(lambda _: placement, tree)


def _check_shapes(what: str, tree: Any, expected: list[tuple[int, ...]]) -> None:
    given = [leaf.shape for leaf in jax.tree.leaves(tree)]
    if given != expected:
        raise ArgumentError(
            f"{what} was sharded by another step: the arrays have shapes {given}, and this step "
            f"expects {expected}. Write step.reshard(other.unshard(state))."
        )


def strong_copy(x: Any) -> jax.Array:
    """A copy without a weak type, which would compile the step a second time."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.copy(jnp.asarray(x, dtype))


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
