"""StateLayout: the placement of each array of a step's state on the mesh."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard._flax import nnx
from crossshard.errors import ArgumentError
from crossshard.model.merged import counted_by_all, merged, shared_out
from crossshard.model.model_state import ModelState, holds_keys
from crossshard.model.models import Skeleton
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import CrossShardState
from crossshard.pipeline.update.arrays import Arrays, Sharded
from crossshard.pipeline.update.owners import Owners
from crossshard.shards.axes import GroupAssignment, Shards
from crossshard.shards.cut import (
    PER_SHARD,
    REPLICATED,
    WHOLE,
    Partition,
    Placement,
    one_for_all,
    other_axes_like,
    partition_along_axis,
    spec_over,
    stored_shapes,
    tile_for,
)
from crossshard.shards.random_streams import own_stream


@dataclasses.dataclass
class UsesRecord:
    """Where the loss uses each parameter that is gathered or summed at its use, by index.

    It is filled while a step is traced, and ``describe`` reads it.
    """

    # From the last step whose trace was completed; ``None`` if there was none.
    latest: Mapping[int, Any] | None = None


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The placement of a state on the mesh."""

    mesh: Mesh
    shards: Shards  # the shards as ``shard_map`` binds them
    arrays: Arrays  # how parameters and the optimizer's state are split, and where the update runs
    why: str  # the reason for where the update runs, in a few words
    pipeline: Pipeline
    params: Any = dataclasses.field(compare=False)  # the types of one set of parameters
    model_state: ModelState | None = None  # how the state that a loss returns is kept
    # The spec on the other axes of the mesh of each array of the parameters, the frozen arrays and
    # the model state, in this order; empty if none is split over these axes.
    other_axes: tuple[PartitionSpec, ...] = ()
    has_one_state: bool = False  # whether shards share one model state, as in a loss over a batch
    uses: UsesRecord = dataclasses.field(default_factory=UsesRecord, compare=False, repr=False)
    # Caches ``placements``, by the structure and shapes of the state.
    _known: dict[Any, TrainState] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @functools.cached_property
    def types(self) -> CrossShardState:
        """The types of one shard's whole optimizer state, of all stages."""
        types: CrossShardState = jax.eval_shape(self.pipeline.init, self.params)
        return types

    @property
    def number_of_shards(self) -> int:
        """The number of shards."""
        return self.shards.num_shards

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the shards."""
        return self.shards.axes

    @property
    def groups(self) -> GroupAssignment | None:
        """The groups whose parameters differ; ``None`` if all shards have the same."""
        return self.shards.groups

    def specs_of_arrays(self, frozen: Any) -> tuple[PartitionSpec, ...]:
        """Return the specs of the arrays given to ``initial``; those without one are replicated."""
        if not self.arrays.params_sharded:
            return self.other_axes
        partitions = *self.arrays.params, *self.partitions_of_frozen(frozen)
        sharded_specs = tuple(each.spec(self.axes) for each in partitions)
        return sharded_specs + self.other_axes[len(sharded_specs) :]

    def partitions_of_frozen(self, frozen: Any) -> tuple[Partition, ...]:
        """Return the partition of each frozen array: large ones are sharded like parameters."""
        tile = tile_for(self.mesh, self.arrays.params_sharded)
        specs = itertools.chain(self.other_axes[len(self.arrays.params) :], itertools.repeat(WHOLE))

        def one(x: Any, own: PartitionSpec) -> Partition:
            split = partition_along_axis(x.shape, self.number_of_shards, tile, own)
            stays = not self.arrays.params_sharded or not is_inexact(x) or split.is_small
            return Partition(x.shape, other_axes=own) if stays else split

        return tuple(map(one, jax.tree.leaves(frozen), specs))

    def keeps_per_shard(self, state: TrainState) -> bool:
        """Return whether each shard has its own model state here, if there is any."""
        if self.has_one_state or not jax.tree.leaves(state.model_state):
            return False
        of_function = self.model_state is ModelState.PER_SHARD
        return state.skeleton.is_nnx or of_function or self.groups is not None

    def placements(self, state: TrainState) -> TrainState:
        """Return the placement of every array of a state."""
        leaves, tree = jax.tree.flatten(state)
        key = tree, tuple(map(jnp.shape, leaves))
        if key not in self._known:
            self._known[key] = self._placements(state)
        return self._known[key]

    def _placements(self, state: TrainState) -> TrainState:
        own = REPLICATED if self.groups is None else PER_SHARD
        # Those of parameters, frozen arrays and model state, one after the other.
        specs = iter(self.other_axes)

        def beside(own: Placement, x: Any, spec: PartitionSpec) -> Placement:
            return own.with_other_axes(x.shape[own.per_shard :], spec) if spec else own

        def placed(own: Placement, tree: Any, partitions: Iterable[Partition] = ()) -> Any:
            """Return the placements of arrays with these partitions, or split over other axes."""
            split = map(Placement, partitions)
            one = lambda x: beside(next(split, own), x, next(specs, WHOLE))
            return jax.tree.map(one, tree)

        params_sharded = self.arrays.params_sharded
        params = placed(own, state.params, self.arrays.params if params_sharded else ())
        of_frozen = self.partitions_of_frozen(state.frozen) if params_sharded else ()
        frozen = placed(REPLICATED, state.frozen, of_frozen)
        model_state = placed(PER_SHARD if state.per_shard else REPLICATED, state.model_state)
        of_inner = [Placement(each, own.per_shard, self.groups) for each in self.arrays.state]
        inner = jax.tree.structure(state.opt_state.inner_state).unflatten(of_inner)
        stages = self.pipeline.placements(state.opt_state)
        if self.other_axes:
            # Match the state of stages with parameters by shape, without the shard axis.
            one = lambda own, x: jax.ShapeDtypeStruct(x.shape[own.per_shard :], x.dtype)
            before = state.opt_state._replace(inner_state=())
            types = jax.tree.map(one, stages, before)
            of_params = self.other_axes[: len(self.arrays.params)]
            of_stages = iter(other_axes_like(types, self.params, of_params))
            stages = jax.tree.map(lambda own, x: beside(own, x, next(of_stages)), stages, before)
        arrays: Any = state  # ``Any``, since placements take the place of arrays
        placements: TrainState = dataclasses.replace(
            arrays,
            step=REPLICATED,
            params=params,
            opt_state=stages._replace(inner_state=inner),
            frozen=frozen,
            model_state=model_state,
            rng=REPLICATED,
        )
        return placements

    def specs(self, state: TrainState) -> TrainState:
        """Return the spec of every array of a state over the shards."""
        of = functools.cache(lambda own: spec_over(own.spec(self.axes), self.axes))
        return jax.tree.map(of, self.placements(state))

    def shardings(self, state: TrainState) -> TrainState:
        """Return the sharding of every array of a state."""
        return jax.tree.map(functools.cache(self._stored), self.placements(state))

    def shardings_of_unsharded(self, state: TrainState) -> TrainState:
        """Return the sharding of every array of an unsharded state: over the other axes alone."""
        return jax.tree.map(self._whole, self.placements(state))

    def _stored(self, own: Placement) -> NamedSharding:
        return NamedSharding(self.mesh, own.spec(self.axes))

    def _whole(self, own: Placement) -> NamedSharding:
        spec = PartitionSpec(*[None] * own.per_shard, *own.other_axes)
        return NamedSharding(self.mesh, spec)

    def shardings_of_incoming(self, state: TrainState) -> TrainState:
        """Return the sharding with which each array of an unsharded state is put on the mesh.

        An array that is stored in its own shape gets the sharding in which it is stored, since it
        may be too large for one device. Any other gets that of ``shardings_of_unsharded``.
        """

        def place(own: Placement, x: Any) -> NamedSharding:
            if own.per_shard and x.shape[0] != self.number_of_shards:
                return self.of_other_shards(own, x.shape)
            cut = own.partition
            stays = own.per_shard or cut is None or cut.packed_shape == cut.shape
            return self._stored(own) if stays else self._whole(own)

        return self.without_owners._map(place, state)

    def of_other_shards(self, own: Placement, shape: tuple[int, ...]) -> NamedSharding:
        """Return a sharding for ``[other shards, …]``, which may be large, along another axis."""
        others = PartitionSpec(None, *own.other_axes)
        split = partition_along_axis(shape, self.number_of_shards, other_axes=others)
        return NamedSharding(self.mesh, split.spec(self.axes))

    def constrain(self, state: TrainState) -> TrainState:
        """Constrain the state to its shardings; XLA would choose others on the other axes."""
        if not self.shards.other_axes:
            return state
        return jax.lax.with_sharding_constraint(state, self.shardings(state))

    @functools.cached_property
    def without_owners(self) -> "StateLayout":
        """This layout without ``Owners``: arrays in their own shapes, or slices of them."""
        arrays = self.arrays
        if not isinstance(arrays, Owners):
            return self
        kept = arrays.state_in_slices, arrays.unread, arrays.params_sharded
        return dataclasses.replace(self, arrays=Sharded(arrays.params, arrays.shards, *kept))

    def collected(self, state: TrainState) -> TrainState:
        """Move a state from this layout to ``without_owners``."""
        return self._moved(state, self, self.without_owners)

    def _moved(self, state: TrainState, one: "StateLayout", other: "StateLayout") -> TrainState:
        """Move the optimizer's state from one layout to another: this, and ``without_owners``."""
        arrays = self.arrays
        if not isinstance(arrays, Owners) or not arrays.state_blocks:
            return state
        leaves, tree = jax.tree.flatten(state.opt_state.inner_state)
        before, after = (
            [each.spec(self.axes) for each in layout.arrays.state] for layout in (one, other)
        )
        run = _jax.shard_map(
            arrays.state_from_owners if one is self else arrays.state_to_owners,
            mesh=self.mesh,
            axis_names=frozenset(self.axes),
            in_specs=(before,),
            out_specs=after,
        )
        inner = tree.unflatten(run(leaves))
        return dataclasses.replace(state, opt_state=state.opt_state._replace(inner_state=inner))

    def local(self, state: TrainState) -> TrainState:
        """Return one shard's state, inside ``shard_map``."""
        return self._map(Placement.local, state)

    def stored(self, state: TrainState) -> TrainState:
        """Add the shard axis again, inside ``shard_map``; the inverse of ``local``."""
        return self._map(Placement.stored, state)

    def pack(self, state: TrainState) -> TrainState:
        """Pad and cut arrays of the optimizer's own shapes, as they are stored."""
        packed = jax.tree.map(Placement.pack, self.without_owners.placements(state), state)
        return self._moved(packed, self.without_owners, self)

    def unpack(self, state: TrainState) -> TrainState:
        """Invert ``pack``."""
        placements = self.without_owners.placements(state)
        return jax.tree.map(Placement.unpack, placements, self.collected(state))

    def _map(self, function: Callable[[Placement, Any], Any], state: TrainState) -> TrainState:
        return jax.tree.map(function, self.placements(state), state)

    def initial(self, skeleton: Skeleton, rng_impl: Any, arrays: Any, rng: Any) -> TrainState:
        """Return the state before the first step, from arrays placed by ``specs_of_arrays``."""
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

    def _spread(self, state: TrainState, by_all: Sequence[Any] = ()) -> TrainState:
        """Broadcast the per-shard arrays of a replicated state to ``[shards, …]``.

        Each shard gets its own random streams, and its part of what metrics have counted; all of
        it, of a metric that ``by_all`` says so of.
        """
        number = self.number_of_shards
        on_each = lambda x: jnp.broadcast_to(x, (number, *x.shape))

        def streams(path: Any, leaf: Any) -> Any:
            each = jax.tree.map(on_each, leaf)
            if not holds_keys(path, leaf) or number == 1:
                return each
            own = lambda keys: jax.vmap(own_stream)(keys, jnp.arange(number))
            return jax.tree.map(own, each)

        state = dataclasses.replace(state, per_shard=self.keeps_per_shard(state))
        spread = self._map(lambda own, x: on_each(x) if own.per_shard else x, state)
        of_shards = state.skeleton.is_nnx or self.model_state is ModelState.PER_SHARD
        if not (state.per_shard and of_shards):
            return spread
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
        model_state = jax.tree_util.tree_map_with_path(
            streams, state.model_state, is_leaf=is_variable
        )
        spread = dataclasses.replace(spread, model_state=model_state)
        positions, parts = np.arange(number), number
        if self.groups is not None and not self.pipeline.joins_groups:
            positions, parts = self.groups.position_of, self.groups.size
        model_state = shared_out(spread, positions, parts, by_all)
        return dataclasses.replace(spread, model_state=model_state)

    def is_of_these_shards(self, state: TrainState) -> bool:
        """Return whether a state has the per-shard arrays of this layout, for as many shards."""
        if state.per_shard != self.keeps_per_shard(state):
            return False
        fits = lambda placement, x: not placement.per_shard or x.shape[0] == self.number_of_shards
        return all(jax.tree.leaves(self._map(fits, state)))

    def on_other_shards(self, state: TrainState) -> TrainState:
        """Move a state with one set of parameters from another number of shards to this layout's.

        New per-shard arrays are the mean of the old ones, unless a stage's ``moved_to`` differs,
        or they are a metric, which goes on from that of all rows.
        The result is stored as this layout stores it.
        """
        common = lambda placement, x: one_for_all(x) if placement.per_shard else x
        one, before, number = self._map(common, state), state.opt_state, self.number_of_shards
        by_all: Sequence[Any] = ()
        if state.per_shard:
            one = dataclasses.replace(one, model_state=merged(state))
            by_all = counted_by_all(state)
        spread = self._spread(one, by_all)
        opt_state = self.pipeline.moved_to(before, spread.opt_state, number)
        return self.pack(dataclasses.replace(spread, opt_state=opt_state))

    # The checks of a state.

    def check(self, state: TrainState) -> None:
        """Raise unless a state is of this step's optimizer, and has the shapes of this layout."""
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
            _check_shapes(what, tree, stored_shapes(where, tree, self.number_of_shards))

    def check_unsharded(self, state: TrainState) -> None:
        """Raise unless the arrays of a state of this optimizer have the optimizer's own shapes."""
        inner = state.opt_state.inner_state
        own = jax.tree.leaves(self.placements(state).opt_state.inner_state)
        shapes = [
            (*leaf.shape[: placement.per_shard], *partition.shape)
            for leaf, placement, partition in zip(
                jax.tree.leaves(inner), own, self.without_owners.arrays.state, strict=True
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
        given, own = state.opt_state, self.types
        differ = lambda one, other: jax.tree.structure(one) != jax.tree.structure(other)
        if differ(given, own):
            names = dict.fromkeys([*given.names, *own.names])
            others = [name for name in names if differ(given.of(name), own.of(name))]
            what = f"of a step with other options, {' and '.join(others)}"
            if not others:
                inner = jax.tree.structure(given.inner_state), jax.tree.structure(own.inner_state)
                what = f"another optimizer's: expected {inner[1]}, got {inner[0]}"
            raise ArgumentError(
                f"The optimizer state is {what}. If only options such as ema or master_dtype "
                f"differ, write step.reshard(other.unshard(state)), which adds the missing states "
                f"and drops the others."
            )
        self.pipeline.check_shapes(given, own)


def _check_shapes(what: str, tree: Any, expected: list[tuple[int, ...]]) -> None:
    given = [leaf.shape for leaf in jax.tree.leaves(tree)]
    if given != expected:
        raise ArgumentError(
            f"{what} has arrays of other shapes than this step's: {given}, where it expects "
            f"{expected}. If the state comes from another step, write "
            f"step.reshard(other.unshard(state))."
        )


def strong_copy(x: Any) -> jax.Array:
    """Copy an array without its weak type, which would compile the step a second time."""
    dtype = jnp.result_type(x)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.copy(jnp.asarray(x, dtype))
