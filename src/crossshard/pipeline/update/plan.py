"""Planner: decides how the arrays of a weight update are split, and gives the reason (ZeRO-1).

Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training"
(arXiv 2004.13336).
"""

import contextlib
import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from crossshard import _jax
from crossshard.errors import ArgumentError, CrossshardError, WeightUpdateError
from crossshard.gradients.status import inside_optimizer, leaf_name
from crossshard.jaxprs.leafwise import NotLeafwise, find_leafwise
from crossshard.jaxprs.slices import is_elementwise, why_not_elementwise
from crossshard.pipeline.update.arrays import Arrays, Global, Replicated, Sharded
from crossshard.pipeline.update.optimize import Unread, find_unread, takes_loss
from crossshard.pipeline.update.owners import Block, Owners, bytes_of_type, cost_of, owners_of
from crossshard.shards.axes import Shards
from crossshard.shards.cut import (
    ANY,
    WHOLE,
    Partition,
    map_partitions,
    other_axes_like,
    partition_along_axis,
    partition_for,
    tile_for,
)


class WeightUpdate(enum.StrEnum):
    """Where the weights are updated.

    REPLICATED: every shard updates all weights and has the full optimizer state.
    SHARDED: every shard updates its slice and has its slice of the optimizer state.
    AUTO: sharded if the optimizer updates each parameter from its own arrays and from scalars, and
      the parameters are large enough, else replicated.
    """

    AUTO = "auto"
    REPLICATED = "replicated"
    SHARDED = "sharded"


class ParamsPlacement(enum.StrEnum):
    """How parameters are kept between steps.

    REPLICATED: every shard has all of them.
    SHARDED: every shard has its slice of each, and the update is sharded too; a parameter of which
      no axis divides stays replicated, and so does its update.
    """

    REPLICATED = "replicated"
    SHARDED = "sharded"


# Below this the two collectives of a sharded update cost more than the split saves.
_WORTH_BYTES = 1 << 19
_LOSS = jax.ShapeDtypeStruct((), "float32")
Partitions = tuple[Partition, ...]


@dataclasses.dataclass(eq=False)
class Planner:
    """Plans the update of some parameters.

    Raises:
      ArgumentError: the optimizer changes the shape of a parameter, or the structure of its state,
        or needs arguments that a step does not have.
    """

    optimizer: optax.GradientTransformationExtraArgs  # the inner optimizer
    params: Any  # the parameters, a pytree with shapes and dtypes
    shards: Shards  # the shards; with groups, arrays are split within each of these
    # The mesh; ``None`` inside a ``shard_map`` of the user's. There, and with groups, only slices
    # are possible.
    mesh: Mesh | None = None
    wanted: WeightUpdate = WeightUpdate.AUTO  # the requested weight update
    params_sharded: bool = False  # whether the parameters are to be sharded
    leave_unread: bool = False  # whether gradients that the optimizer does not read may be left out
    # For each parameter its spec on other axes; empty if none is split over these.
    other_axes: Sequence[PartitionSpec] = ()
    # ``None``, or a number no smaller than that of the shards: the update then has the same bits on
    # any number of shards up to it.
    virtual_shards: int | None = None

    def __post_init__(self) -> None:
        # JAX 0.12 warns of a 64-bit type, but would narrow an array silently.
        dtype = lambda x: jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        abstract = lambda x: jax.ShapeDtypeStruct(x.shape, dtype(x))
        self.params = jax.tree.map(abstract, self.params)
        with inside_optimizer():
            self._state = jax.eval_shape(self.optimizer.init, self.params)
        # JAX runs Python once for arguments of the same types.
        self._find_updates = jax.jit(as_updates(self.optimizer))
        self._update = as_function(self._find_updates)
        self._check_state_stays()
        axes = self.other_axes or [WHOLE] * len(jax.tree.leaves(self.params))
        of_state = other_axes_like(self._state, self.params, axes)
        # Partitions that split nothing over the shards: of the parameters, and of the state.
        self._partitions = _unsplit(self.params, axes), _unsplit(self._state, of_state)
        self._tile = ANY if self.mesh is None else tile_for(self.mesh, self.params_sharded)
        none, of_none = ((False,) * len(each) for each in self._partitions)
        self._unread = Unread(none, none, of_none)
        if self.leave_unread:
            self._unread = find_unread(self._update, self.params, self._state, _LOSS)

    def plan(self) -> tuple[Arrays, str]:
        """Plan how the arrays are split; return the plan, and the reason in a few words.

        Raises:
          WeightUpdateError: only slices are possible and the optimizer is not elementwise, or the
            same bits are wanted and it does not run leaf by leaf either.
        """
        if self.wanted is WeightUpdate.REPLICATED:
            return self._replicated, "as requested"
        if self.shards.group_size == 1:
            return self._replicated, "there is one shard"
        # Sharded parameters keep their shapes, so that they are split along an axis.
        params = self._cut(partition_along_axis if self.params_sharded else partition_for)
        pairs = zip(jax.tree.leaves(self.params), params, strict=True)
        size = sum(bytes_of_type(leaf) for leaf, partition in pairs if partition.number > 1)
        if not size:
            # ``params_sharded`` is kept: frozen arrays may be large enough to be sharded.
            whole = dataclasses.replace(self._replicated, params_sharded=self.params_sharded)
            undivided = ", or none of its axes divides" * self.params_sharded
            return whole, f"every parameter is tiny{undivided}"
        if self.wanted is WeightUpdate.AUTO and size < _WORTH_BYTES:
            return self._replicated, "the parameters are too small to gain from it"
        _, whole_state = self._partitions
        # The state of a parameter that stays unchanged is not split.
        stays = [False] * len(whole_state) if self.params_sharded else self._unread.state
        alike = zip(whole_state, _split_alike(whole_state, params), stays, strict=True)
        state = tuple(whole if still else split for whole, split, still in alike)
        arguments = whole_and_slices(self.params, self._state, params, state)
        if self._leaf_by_leaf is None and is_elementwise(self._update, *arguments):
            kept = state, self._unread.gradients, self.params_sharded
            return Sharded(params, self.shards, *kept), "the update is elementwise"
        return self._if_not_elementwise(params, arguments)

    def _if_not_elementwise(self, params: Partitions, arguments: Any) -> tuple[Arrays, str]:
        """Plan the update leaf by leaf if possible, else replicated, or on global arrays."""
        auto, same_bits = self.wanted is WeightUpdate.AUTO, self.virtual_shards is not None
        if self.virtual_shards is not None and self.virtual_shards % self.shards.num_shards:
            whole = dataclasses.replace(self._replicated, params_sharded=self.params_sharded)
            return whole, (
                f"it is not elementwise, and {self.virtual_shards} virtual shards do not divide "
                f"over {self.shards.num_shards}"
            )
        only_slices = self.mesh is None or self.shards.groups is not None
        not_leafwise = ""
        if only_slices and not auto:
            obstacle = why_not_elementwise(self._update, *arguments)
            raise WeightUpdateError(
                f"The weight update cannot be sharded here: with groups, or inside your own "
                f"shard_map, each shard updates its slice alone, and this update is not "
                f"elementwise: {obstacle}. Pass weight_update='replicated', or use make_train_step "
                f"without groups."
            )
        # For equal bits, an update that one shard compiles as one program must be one everywhere.
        may_have_owners = self._leaf_by_leaf is not None or not same_bits
        if may_have_owners and not (only_slices or any(self.other_axes)):
            # A gradient that nothing reads is not sent, so its leaf has no owner.
            pairs = zip(params, self._unread.gradients, strict=True)
            read = [Partition(each.shape) if unread else each for each, unread in pairs]
            try:
                found = self._owners(read, self.params_sharded)
            except NotLeafwise as reason:
                not_leafwise = str(reason)
            else:
                if auto and same_bits and found.exchanged:
                    return self._replicated, "gradients would travel twice, to be updated whole"
                return found, "each leaf is updated from its own arrays, and from scalars"
        obstacle = why_not_elementwise(self._update, *arguments)
        if not_leafwise not in ("", obstacle):
            obstacle = f"{obstacle}; nor leaf by leaf: {not_leafwise}"
        if same_bits and not auto:
            raise WeightUpdateError(
                f"With virtual_shards the bits must not depend on the number of shards, and a "
                f"sharded update of this optimizer, which is neither elementwise nor leaf by leaf, "
                f"is compiled differently for each of them: {obstacle}. Pass "
                f"weight_update='replicated', and leave params='sharded' out."
            )
        why = f"the update is not elementwise: {obstacle}"
        if self.mesh is None or auto:
            return self._replicated, why
        along_axis = functools.partial(self._slices, partition_along_axis)
        params = self._cut(partition_along_axis)
        state = tuple(map(along_axis, self._partitions[1]))
        kept = self._unread.gradients, self.params_sharded
        return Global(params, state, self.shards, self.mesh, *kept), why

    def _owners(self, params: Sequence[Partition], params_sharded: bool) -> Owners:
        """Plan an update leaf by leaf; every shard updates the leaves that are not split.

        Raises:
          NotLeafwise: it cannot be computed leaf by leaf.
        """
        number, virtual, tile = self.shards.num_shards, self.virtual_shards, self._tile
        # XLA for CPUs does not overlap a sum with other work, so this gains nothing there.
        sums_in_loops = virtual is None and self.shards.platform != "cpu"
        partitions, cut = [_within_layers(each) for each in params], dict[int, Partition]()
        if virtual is not None:
            # Without the tile, which may depend on the number of shards.
            along = [partition_along_axis(each.shape, virtual) for each in partitions]
            cut = {i: each for i, each in enumerate(along) if each.number > 1}
            for i, piece in cut.items():
                if partitions[i].number > 1:
                    partitions[i] = dataclasses.replace(piece, number=number, tile=tile)
        split = {i: each for i, each in enumerate(partitions) if each.number > 1}
        # The number of layers of each leaf whose layers may have owners, or divide evenly.
        layers = {
            i: each.shape[0]
            for i, each in split.items()
            if _has_layers(each) and (each.shape[0] % number == 0 or each.axis)
        }
        if virtual is None:
            slices = {i: each.local_shape for i, each in split.items()}
            # The number of layers that a shard updates at once: all of its own if they divide
            # evenly, else one, since each layer then has an owner.
            layers_at_once = {
                i: own // number if own % number == 0 else 1 for i, own in layers.items()
            }
        else:
            # All leaves, split or not, so that this does not depend on the number of shards.
            slices = {i: cut.get(i, each).local_shape for i, each in enumerate(partitions)}
            layers_at_once = {i: 1 for i, each in enumerate(partitions) if _has_layers(each)}
        stay = [] if virtual is None else [i for i in slices if i not in cut]
        found = find_leafwise(
            self._find_updates,
            self.params,
            self._state,
            [_LOSS],
            slices,
            {i: (own, *partitions[i].shape[1:]) for i, own in layers_at_once.items()},
            padded=[i for i, each in split.items() if each.packed_shape != each.shape],
            stay=dict.fromkeys(stay, f"it has no axis that divides by {virtual}"),
        )
        pieces = {} if virtual is None else dict.fromkeys(found.stacked, (0, 1))
        for i in set(cut).difference(found.stacked, found.whole):
            axis = cut[i].axis or 0
            pieces[i] = axis, cut[i].local_shape[axis]
        even_stacks = [i for i in found.stacked if i in layers and layers[i] % number == 0]
        owned_stacks = [i for i in found.stacked if i in layers and layers[i] % number]
        owned = [i for i in found.whole if i in split]
        costs: dict[Block, float] = {(i, None): cost_of(partitions[i].shape) for i in owned}
        for i in owned_stacks:
            costs |= {(i, layer): cost_of(partitions[i].shape[1:]) for layer in range(layers[i])}
        # Gradients that are summed layer by layer, where the backward pass makes them, are slices.
        in_loop = lambda each: sums_in_loops and (each.row or Partition(each.shape).row) is not None
        # The leaves whose gradients travel to their owners in full.
        in_full = [
            i for i in (*owned, *owned_stacks) if not (params_sharded or in_loop(partitions[i]))
        ]
        chosen = list(partitions)
        for i in (*in_full, *found.stacked.difference(layers)):
            chosen[i] = Partition(partitions[i].shape)
        for i in even_stacks:
            if not params_sharded and not (sums_in_loops and partitions[i].axis):
                chosen[i] = Partition(partitions[i].shape, number, 0, tile)
        planned = Owners(
            tuple(chosen),
            found,
            owners_of(costs, number),
            (jax.tree.leaves(self.params), jax.tree.leaves(self._state)),
            self.shards,
            tile,
            pieces,
            self._unread.gradients,
            params_sharded,
        )
        own_bytes = sum(bytes_of_type(planned.types[0][i]) for i in in_full)
        sent_bytes = sum(number * each.width * each.dtype.itemsize for each in planned.blocks)
        if sent_bytes <= own_bytes + own_bytes / number:
            return planned
        # Rows would be mostly padding: owners get the slices of their leaves instead.
        for i in in_full:
            chosen[i] = partitions[i]
        return dataclasses.replace(planned, params=tuple(chosen))

    @property
    def _replicated(self) -> Replicated:
        """Every array replicated."""
        return Replicated(
            *self._partitions,
            self._unread.gradients,
            shards=self.shards,
            leaf_by_leaf=self._leaf_by_leaf,
        )

    @functools.cached_property
    def _leaf_by_leaf(self) -> Owners | None:
        """A plan that compiles each leaf on its own, for bits that are the same everywhere."""
        if self.virtual_shards is None:
            return None
        params, state = self._partitions
        # Halves stand for the slices of any number of shards.
        halves = [partition_for(each.shape, 2) for each in params]
        of_halves = halves, _split_alike(state, halves)
        given = whole_and_slices(self.params, self._state, *of_halves)
        if is_elementwise(self._update, *given):
            return None
        with contextlib.suppress(NotLeafwise):
            return self._owners(params, params_sharded=False)
        return None

    def _slices(self, split_one: Callable[..., Partition], whole: Partition) -> Partition:
        return split_one(whole.shape, self.shards.group_size, self._tile, whole.other_axes)

    def _cut(self, split_one: Callable[..., Partition]) -> Partitions:
        """Return the partitions of parameters in slices; unchanged parameters are not split."""
        params, _ = self._partitions
        stays = [False] * len(params) if self.params_sharded else self._unread.unchanged
        pairs = zip(params, stays, strict=True)
        return tuple(each if still else self._slices(split_one, each) for each, still in pairs)

    def _is_of_loss(self, error: Exception) -> bool:
        """Return whether an update raised an error since it was handed the loss."""
        if not str(error).endswith("unexpected keyword argument 'value'"):
            return False
        try:
            update = lambda u, state, params: self.optimizer.update(u, state, params=params)
            jax.eval_shape(update, self.params, self._state, self.params)
        except Exception:  # of any kind: then the first error is the one to tell
            return False
        return True

    def _check_state_stays(self) -> None:
        params, state = self.params, self._state
        try:
            after = jax.eval_shape(self._update, params, state, params, _LOSS)
        except CrossshardError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if self._is_of_loss(error):
                raise ArgumentError(
                    f"The optimizer hands the loss, value=, to a part that takes none, though its "
                    f"type says so: {error}. Write optax.GradientTransformation(part.init, "
                    f"part.update) in the place of that part, such as optax.contrib.sam(...)."
                ) from error
            raise ArgumentError(
                f"The optimizer cannot update these parameters, or needs more than gradients and "
                f"the loss, which is all that a step has: {type(error).__name__}, "
                f"{str(error).splitlines()[0]}. One with a line search, or that takes the gradient "
                f"of each example, or parameters of a form of its own, as optax.lookahead, is for "
                f"the Optax idiom: init and update, in a loop of your own."
            ) from error
        was, now = _types_by_name(params, state), _types_by_name(*after)
        if name := next((name for name in now | was if was.get(name) != now.get(name)), None):
            measures = " If it measures, as optax.monitor does, write metrics=, or measure outside."
            raise ArgumentError(
                f"The optimizer changes {name} from {was.get(name, 'nothing')} to "
                f"{now.get(name, 'nothing')} in a step, but a step is compiled for one of them."
                f"{measures * (name not in was)}"
            )


def _types_by_name(params: Any, state: Any) -> dict[str, Any]:
    """Return the types of all arrays, and last the structure of the state, for messages."""
    found = {
        name + jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}"
        for name, tree in (("params", params), ("state", state))
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    return found | {"the structure of its state": jax.tree.structure(state)}


def _unsplit(tree: Any, other_axes: Sequence[PartitionSpec]) -> Partitions:
    pairs = zip(jax.tree.leaves(tree), other_axes, strict=True)
    return tuple(Partition(leaf.shape, other_axes=own) for leaf, own in pairs)


def _split_alike(state: Sequence[Partition], params: Sequence[Partition]) -> list[Partition]:
    """Split arrays of the state that have the shape of a parameter like that parameter."""
    alike = {(each.shape, each.other_axes): each for each in params if each.number > 1}
    return [alike.get((each.shape, each.other_axes), each) for each in state]


def _within_layers(partition: Partition) -> Partition:
    """Return the partition, or one within each layer if the layers do not divide evenly."""
    shape, number = partition.shape, partition.number
    if partition.axis or len(shape) < 3 or shape[0] % number == 0:
        return partition
    within = partition_along_axis(shape, number, partition.tile)
    return within if within.axis else partition


def _has_layers(partition: Partition) -> bool:
    return len(partition.shape) > 2 and partition.shape[0] > 1


def as_updates(optimizer: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    """Return an optimizer as ``(params, state, gradients, loss) -> (updates, state)``, to trace."""

    def update(params: Any, state: Any, gradients: Any, loss: Any) -> tuple[Any, Any]:
        extra_args = {"value": loss} if takes_loss(optimizer) else {}
        with inside_optimizer():
            return optimizer.update(gradients, state, params, **extra_args)

    return update


def as_function(find_updates: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``(params, state, gradients, loss) -> (params, state)``, from ``as_updates``."""

    def update(params: Any, state: Any, gradients: Any, loss: Any) -> tuple[Any, Any]:
        updates, after = find_updates(params, state, gradients, loss)
        return optax.apply_updates(params, updates), after

    return update


def whole_and_slices(
    params: Any, state: Any, of_params: Sequence[Partition], of_state: Sequence[Partition]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return argument types of an update ``as_function``: full arrays, and a shard's slices."""
    local = lambda partition, x: jax.ShapeDtypeStruct(partition.local_shape, x.dtype)
    slices = map_partitions(local, of_params, params)
    of_slices = map_partitions(local, of_state, state)
    return (params, state, params, _LOSS), (slices, of_slices, slices, _LOSS)


# ---- Updates inside a shard_map of the user's, of blocks that other axes have split.


def check_blocks(
    transformations: Sequence[optax.GradientTransformationExtraArgs],
    obstacles: Sequence[str],
    params: Any,
    shards: Shards,
) -> None:
    """Raise if parameters are split over other manual axes, and an update needs full arrays.

    ``obstacles`` says what the stages do that needs them.
    Without ``check_vma`` types do not tell what is split, and every parameter counts as split.
    """
    unnamed = _jax.manual_axes().difference(shards.axes) if shards.axes else frozenset()
    axes = sorted(axis for axis in unnamed if lax.axis_size(axis) > 1)
    if not axes:
        return
    tracked = all(map(_jax.has_vma, axes))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    is_split = lambda x: not tracked or not _jax.varying_axes(x).isdisjoint(axes)
    splits: list[Any] = [("split",) if is_split(x) else () for _, x in leaves]
    if not any(splits):
        return
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)

    def blocks(tree: Any, splits: Sequence[Any]) -> list[Partition]:
        pairs = zip(jax.tree.leaves(tree), splits, strict=True)
        return [_half(x.shape) if own else Partition(x.shape) for x, own in pairs]

    def obstacle_of(each: optax.GradientTransformationExtraArgs) -> str | None:
        with inside_optimizer():
            state = jax.eval_shape(each.init, whole)
        of_state = blocks(state, other_axes_like(state, whole, splits))
        given = whole_and_slices(whole, state, blocks(whole, splits), of_state)
        try:
            return why_not_elementwise(as_function(as_updates(each)), *given)
        except TypeError as error:  # it takes more arguments, such as the loss function
            return f"it needs more than gradients and the loss, {str(error).splitlines()[0]}"

    of_updates = filter(None, map(obstacle_of, transformations))
    obstacle = next(itertools.chain(obstacles, of_updates), None)
    if obstacle is None:
        return
    name = next(leaf_name(path) for path, x in leaves if is_split(x))
    what, named = (", ".join(map(repr, names)) for names in (axes, shards.axes))
    found = f"{name} is split" if tracked else f"Parameters such as {name} may be split"
    types = "" if tracked else " If they are not, pass check_vma=True, so that types tell."
    raise WeightUpdateError(
        f"{found} over {what}, which is not a shard axis here, and each device would update its "
        f"block alone, but the update needs whole arrays: {obstacle}. Leave {what} to XLA, with "
        f"jax.shard_map(..., axis_names={{{named}}}), or write crossshard.make_train_step(..., "
        f"mesh=mesh, axis_name={shards.axes!r}).{types}"
    )


def _half(shape: tuple[int, ...]) -> Partition:
    """Return a partition in two, along an axis if one divides; a single element is not split."""
    axis = next((axis for axis, size in enumerate(shape) if size % 2 == 0), None)
    return Partition(shape, 2, axis) if math.prod(shape) > 1 else Partition(shape)
