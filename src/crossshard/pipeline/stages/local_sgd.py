"""Local SGD: workers that train alone for some steps, and then synchronise.

They take the mean of their parameters (local SGD, Stich 2019, arXiv 1805.09767); or an outer
optimizer updates these (DiLoCo, Douillard et al. 2023, arXiv 2311.08105); or each step synchronises
one piece of them (Streaming DiLoCo, Douillard et al. 2025, arXiv 2501.18512).
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _check
from crossshard._annotations import Given, PyTree
from crossshard.collectives.sums import bucketed_sum, wide, widen
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.status import Reduction, inside_optimizer
from crossshard.jaxprs.rewrite import in_loop, opaque_false
from crossshard.jaxprs.slices import why_not_elementwise
from crossshard.pipeline.aggregator import Peers, Plain
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged, Updated
from crossshard.pipeline.stages.few_bits import FewBits, check_reduce_dtype
from crossshard.pipeline.update.arrays import Arrays, Replicated, Sharded
from crossshard.pipeline.update.optimize import check_transformation
from crossshard.shards.cut import PER_SHARD, REPLICATED, Partition, partition_for


class LocalSGDState(NamedTuple):
    """The state of the synchronisation, which all workers share except for ``aggregate``."""

    anchor: PyTree  # the parameters after the last synchronisation, with at least 32 bits
    inner_state: PyTree  # the state of the outer optimizer
    count: PyTree  # int32[], the number of steps so far, skipped ones among them
    aggregate: PyTree = ()  # the state of the outer sum, one per shard


@dataclasses.dataclass(frozen=True)
class LocalSGD(Stage):
    """Synchronises the workers: each is a group of shards, and has parameters of its own.

    The pseudogradient of a worker is the anchor less its parameters. The outer optimizer updates
    the anchor with the mean over the workers, and all go on from there.

    With ``streaming`` each step synchronises one piece of every array, and each piece once in a
    round. The pseudogradient is that of the parameters before the step, and the result is used
    after the step, so that the step and the sum do not wait for each other. The change that the
    worker's step makes to the piece is added to the piece of the anchor. The states of the outer
    optimizer and of the sum are ``[pieces, …]``.
    """

    every: int  # the number of steps from one synchronisation to the next
    optimizer: optax.GradientTransformationExtraArgs  # the outer optimizer
    aggregator: Plain | FewBits  # what sums the pseudogradients
    streaming: bool = False  # whether each step synchronises a piece

    phase = Phase.UPDATE
    scope = state_field = "outer"
    options = ("sync_every", "outer_optimizer", "outer_reduce_dtype", "sync_streaming")
    of_steps = True
    joins_groups = True

    @property
    def sends_beside(self) -> bool:
        """Whether each step sends a piece."""
        return self.streaming

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self | None:
        """Return the stage of these options; ``None`` without ``sync_every``.

        Raises:
          ArgumentError: not a positive number, not a dtype, or another option without it.
          ArgumentTypeError: not a whole number, not an Optax optimizer, or not a bool.
        """
        streaming = _check.flag("sync_streaming", options.get("sync_streaming", False))
        given = {name: options.get(name) for name in cls.options[1:3]}
        if options.get("sync_every") is None:
            for name, value in {**given, "sync_streaming": streaming or None}.items():
                if value is not None:
                    raise ArgumentError(
                        f"{name} is for workers that train alone for some steps. Say for how many: "
                        f"sync_every=20, or leave {name} out."
                    )
            return None
        every = _check.whole_number("sync_every", options["sync_every"], hint="It counts steps.")
        # SGD with a rate of 1 results in the mean of the parameters.
        found = optax.sgd(1.0) if given["outer_optimizer"] is None else given["outer_optimizer"]
        if isinstance(getattr(found, "reduction", None), Reduction):
            raise ArgumentTypeError(
                "outer_optimizer updates with the mean over the workers, so it reduces nothing "
                "itself. Pass the Optax optimizer without CrossShardOptimizer."
            )
        found = optax.with_extra_args_support(check_transformation(found, "outer_optimizer"))
        wire = check_reduce_dtype(given["outer_reduce_dtype"], "outer_reduce_dtype", by_axis=False)
        if streaming and isinstance(wire, FewBits):
            # The sum of a piece goes on beside the whole step, and nothing of it may wait.
            wire = dataclasses.replace(wire, at_once=True)
        return cls(every, found, wire, streaming)

    def init(self, params: PyTree) -> LocalSGDState:
        """Return the state before the first step, whose anchor is the parameters."""
        # Copied, since two arrays of a donated state must not share a buffer.
        copy = lambda p: jnp.array(p, wide(jnp.result_type(p)), copy=True)
        anchor = jax.tree.map(copy, params)
        pieces, over_pieces = anchor, lambda init: init
        if self.streaming:
            self._check_elementwise(anchor)
            cut = lambda at: jax.tree.map(lambda x: self._piece_of(x).cut(x, at), anchor)
            pieces = jax.vmap(cut)(jnp.arange(self.every))
            over_pieces = functools.partial(jax.vmap, axis_size=self.every)
        with inside_optimizer():
            inner_state = over_pieces(self.optimizer.init)(pieces)
        aggregate = over_pieces(self.aggregator.init)(pieces)
        return LocalSGDState(anchor, inner_state, jnp.int32(0), aggregate)

    def placements(self, state: LocalSGDState) -> LocalSGDState:
        """Return the placements: what the sum keeps is per shard, all else replicated."""
        of_all = jax.tree.map(lambda _: REPLICATED, state)
        own = jax.tree.map(lambda _: PER_SHARD, state.aggregate)
        return of_all._replace(aggregate=own)

    def moved_to(self, state: LocalSGDState, spread: PyTree, number: int) -> LocalSGDState:
        """Return the state on other shards: they share out what the sum keeps; all else stays."""
        sums = self.aggregator.on_other_shards(state.aggregate, number)
        return state._replace(aggregate=sums)

    def follows_params(self, state: LocalSGDState) -> LocalSGDState:
        """Return that all is made anew: the outer momentum is of the way to the former anchor."""
        follows: LocalSGDState = jax.tree.map(lambda _: True, state)
        return follows

    def exported(self, state: LocalSGDState, params: PyTree) -> PyTree:
        """Return the parameters after the last synchronisation, in their own dtypes."""
        return jax.tree.map(lambda x, p: x.astype(p.dtype), state.anchor, params)

    def written(self) -> dict[str, Given]:
        """Return the options, with the number of pieces of the state for ``sync_streaming``."""
        return {
            "sync_every": self.every,
            "outer_optimizer": self.optimizer,
            "outer_reduce_dtype": self.aggregator,
            "sync_streaming": f"{self.every} pieces" if self.streaming else None,
        }

    def describe(self) -> str:
        """Describe how often workers synchronise, and how they send."""
        sent = self.aggregator.describe()
        mean = f"mean over the workers{f' {sent}' * bool(sent)}"
        if self.streaming:
            part = "the" if self.every == 1 else f"the next 1/{self.every} of the"
            return f"every step {part} {mean}, beside the step, and its outer update"
        often = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"{often} the {mean}, and the outer update"

    def update(self, gradients: Gradients, state: LocalSGDState, context: StageContext) -> Staged:
        """Return the updated parameters, synchronised if it is time, and the next state."""
        assert gradients.updated is not None
        synchronise = self._piece_synchronised if self.streaming else self._synchronised
        result, after = synchronise(gradients.updated, state, context)
        return gradients.replace(updated=gradients.updated._replace(result=result)), after

    def _synchronised(self, updated: Updated, state: LocalSGDState, context: StageContext) -> Any:
        state = state._replace(count=optax.safe_increment(context.agreed(state.count)))

        def synchronise(_: PyTree, state: LocalSGDState) -> tuple[PyTree, LocalSGDState]:
            # What every worker began with, which may have fewer bits than the anchor.
            rounded = jax.tree.map(lambda x, p: x.astype(p.dtype), state.anchor, updated.result)
            start = context.arrays.split(rounded)
            # Not from the updated parameters, which are rounded: in the first step after a
            # synchronisation this is the update itself.
            one = lambda start, before, update: -((widen(before) - widen(start)) + widen(update))
            moved = jax.tree.map(one, start, updated.params, updated.updates)
            mean, aggregate = self._mean(moved, context.arrays, state.aggregate, context)
            with inside_optimizer():
                updates, inner_state = self.optimizer.update(mean, state.inner_state, state.anchor)
            anchor = optax.apply_updates(state.anchor, updates)
            params = jax.tree.map(lambda x, p: x.astype(p.dtype), anchor, updated.result)
            return params, LocalSGDState(anchor, inner_state, state.count, aggregate)

        is_due = state.count % self.every == 0
        keep = lambda params, state: (params, state)
        return lax.cond(is_due, synchronise, keep, updated.result, state)

    def _mean(
        self, moved: PyTree, arrays: Arrays, state: PyTree, context: StageContext
    ) -> tuple[PyTree, PyTree]:
        """Return the mean over the workers, in full, and the next state of the aggregator."""
        groups, across = context.shards.groups, Peers(context.shards.across)
        if groups is None:
            return arrays.gather(moved), state
        mean = lambda tree: jax.tree.map(lambda x: x / len(groups.groups), tree)
        aggregator = self.aggregator
        # If the shards of a worker have slices, each sums its own.
        if isinstance(aggregator, Plain):
            return arrays.gather(mean(aggregator.sum(moved, (), across)[0])), state
        # What a worker holds back is the sum of what its shards keep, so that the sum over all
        # shards is that over the workers, whatever their number.
        take = functools.partial(_residuals_of_worker, arrays, groups.size)
        keep = functools.partial(_residuals_of_shard, arrays, groups.size)
        total, after = aggregator.sum(mean(moved), aggregator.map_residuals(state, take), across)
        after = aggregator.map_residuals(after, keep)
        return arrays.gather(total), jax.tree.map(lambda x, old: x.astype(old.dtype), after, state)

    # One piece in each step.

    def _piece_synchronised(
        self, updated: Updated, state: LocalSGDState, context: StageContext
    ) -> tuple[PyTree, LocalSGDState]:
        # The count of this step waits for no other shard, and so does no sum of a piece.
        count = state.count
        at = count % self.every
        cut = lambda tree: jax.tree.map(lambda x: self._piece_of(x).cut(x, at), tree)
        add = lambda x, update: self._piece_of(x).add(x, update, at)
        of_piece = lambda x: lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
        keep = lambda x, own: lax.dynamic_update_index_in_dim(x, own, at, 0)

        def moved(x: jax.Array, start: jax.Array, now: jax.Array) -> jax.Array:
            # From what the worker began with, which may have fewer bits than the anchor.
            return self._piece_of(x).own(widen(start.astype(now.dtype)) - widen(now), at)

        before, anchor = context.params, cut(state.anchor)
        pseudogradient = jax.tree.map(moved, before, anchor, cut(before))
        inner_state, aggregate = jax.tree.map(of_piece, (state.inner_state, state.aggregate))
        arrays: Arrays = Replicated()
        if isinstance(context.arrays, Sharded):
            # The shards of a worker split the pieces between them.
            size = context.shards.group_size
            partitions = [partition_for(x.shape, size) for x in jax.tree.leaves(anchor)]
            arrays = Sharded(tuple(partitions), context.shards)
        mean, aggregate = self._mean(arrays.split(pseudogradient), arrays, aggregate, context)

        def synchronised(updated: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
            with inside_optimizer():
                found, after = self.optimizer.update(mean, inner_state, anchor)
            updates = jax.tree.map(lambda x, u: self._piece_of(x).own(u, at), before, found)
            # The pseudogradient takes the worker back to the anchor.
            back = jax.tree.map(jnp.add, updates, pseudogradient)
            return jax.tree.map(add, updated, back), (updates, after)

        on_cpus = context.shards.platform == "cpu"
        # So that XLA overwrites the parameters, and does not compute them where they are read.
        result, (updates, inner_state) = (
            in_loop(synchronised, updated.result, skip=opaque_false(count))
            if on_cpus
            else synchronised(jax.tree.map(lax.optimization_barrier, updated.result))
        )
        after = LocalSGDState(
            jax.tree.map(add, state.anchor, updates),
            jax.tree.map(keep, state.inner_state, inner_state),
            # A copy of which a bit has flipped takes another piece once, and not for ever.
            optax.safe_increment(context.agreed(count)),
            jax.tree.map(keep, state.aggregate, aggregate),
        )
        return result, after

    def _piece_of(self, x: Any) -> "_Pieces":
        return _Pieces(jnp.shape(x), self.every)

    def _check_elementwise(self, anchor: PyTree) -> None:
        """Raise unless the outer optimizer updates a piece as it would update the whole array."""

        def update(params: PyTree, state: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree]:
            with inside_optimizer():
                updates, after = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), after

        def whole(x: jax.Array) -> jax.ShapeDtypeStruct:
            piece = self._piece_of(x).shape
            # A scalar cannot be cut, and must not look like a piece of another array.
            longer = (*piece[:-1], 2) if piece == x.shape else x.shape
            return jax.ShapeDtypeStruct(longer, x.dtype)

        part = lambda x: jax.ShapeDtypeStruct(self._piece_of(x).shape or (1,), x.dtype)
        trees = [jax.tree.map(kind, anchor) for kind in (whole, part)]
        with inside_optimizer():
            states = [jax.eval_shape(self.optimizer.init, tree) for tree in trees]
        pairs = [(tree, state, tree) for tree, state in zip(trees, states, strict=True)]
        obstacle = why_not_elementwise(update, *pairs)
        if obstacle is not None:
            raise ArgumentError(
                f"sync_streaming updates one piece of the parameters at a time, and this "
                f"outer_optimizer is not elementwise: {obstacle}. Leave sync_streaming out, or "
                f"pass one such as optax.sgd(0.7, momentum=0.9, nesterov=True)."
            )


def _residuals_of_worker(arrays: Arrays, size: int, held: PyTree) -> PyTree:
    """Return what a worker's shards hold back together; of split arrays, this shard's slice."""
    if not isinstance(arrays, Sharded):
        return jax.tree.map(lambda x: x * size, held)
    leaves, tree = jax.tree.flatten(held, is_leaf=lambda x: x is None)
    pairs = [each for each in zip(leaves, arrays.params, strict=True) if each[0] is not None]
    kept, partitions = [x for x, _ in pairs], [partition for _, partition in pairs]
    sums = iter(bucketed_sum(kept, partitions, arrays.shards))
    return tree.unflatten([None if x is None else next(sums) for x in leaves])


def _residuals_of_shard(arrays: Arrays, size: int, held: PyTree) -> PyTree:
    """Return what this shard holds back, in full: its slices, and its share of arrays not split."""
    if not isinstance(arrays, Sharded):
        return jax.tree.map(lambda x: x * (1 / size), held)
    index = arrays.shards.index_in_group()

    def one(x: jax.Array | None, partition: Partition) -> jax.Array | None:
        if x is None or partition.number == 1:
            return None if x is None else x / size
        axis = partition.axis or 0
        whole = jnp.zeros(partition.packed_shape, x.dtype)
        start = index * x.shape[axis]
        return partition.unpack(lax.dynamic_update_slice_in_dim(whole, x, start, axis))

    leaves, tree = jax.tree.flatten(held, is_leaf=lambda x: x is None)
    return tree.unflatten(list(map(one, leaves, arrays.params)))


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """How an array is cut into pieces: by rows if it has many of them, else by elements.

    All pieces have one shape, with as many dimensions as the array. The last row of a piece may
    be the first row of the next piece.
    """

    array: tuple[int, ...]  # the shape of the array
    number: int  # the number of pieces

    @property
    def _view(self) -> tuple[int, ...]:
        rows = math.prod(self.array[:-1])
        # The last row of a piece may be sent needlessly, and is then a small part of the piece.
        in_rows = len(self.array) > 1 and rows >= _MANY * self.number
        return (rows, self.array[-1]) if in_rows else (math.prod(self.array),)

    @property
    def _rows(self) -> int:
        return -(-self._view[0] // self.number)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each piece."""
        view = (self._rows, *self._view[1:])
        return (1,) * (len(self.array) - len(view)) + view if self.array else ()

    def _start(self, at: Any) -> Any:
        # The same as at · rows // number, which may overflow.
        each, rest = divmod(self._view[0], self.number)
        return at * each + at * rest // self.number

    def cut(self, x: jax.Array, at: Any) -> jax.Array:
        """Return the piece with this index."""
        view = jnp.reshape(x, self._view)
        return lax.dynamic_slice_in_dim(view, self._start(at), self._rows).reshape(self.shape)

    def own(self, piece: jax.Array, at: Any) -> jax.Array:
        """Return the piece, with zeros in its last row if that is the next piece's."""
        if self._view[0] % self.number == 0:
            return piece
        view = piece.reshape(self._rows, *self._view[1:])
        row = lax.broadcasted_iota(jnp.int32, view.shape, 0)
        is_own = (row < self._start(at + 1) - self._start(at)).reshape(piece.shape)
        return jnp.where(is_own, piece, 0)

    def add(self, x: jax.Array, piece: jax.Array, at: Any) -> jax.Array:
        """Return the array with ``piece`` added to the piece with this index."""
        new = (widen(self.cut(x, at)) + piece).astype(x.dtype)
        view, rows = jnp.reshape(x, self._view), new.reshape(self._rows, *self._view[1:])
        return lax.dynamic_update_slice_in_dim(view, rows, self._start(at), 0).reshape(self.array)


# An array is cut by rows if it has at least this many rows for each piece.
_MANY = 16
