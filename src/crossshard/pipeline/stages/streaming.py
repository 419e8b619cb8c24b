"""Streaming: in every step the next piece of the workers' parameters becomes one again.

After Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard._annotations import PyTree
from crossshard.collectives.sums import widen
from crossshard.errors import ArgumentError
from crossshard.gradients.nesting import inside_optimizer
from crossshard.jaxprs.slices import why_not_elementwise
from crossshard.jaxprs.xla import in_loop, opaque_false
from crossshard.pipeline.stage import Gradients, StageContext
from crossshard.pipeline.stages.outer import Outer, OuterState, as_anchor
from crossshard.pipeline.update.arrays import Arrays, Parts, Whole
from crossshard.shards.groups import size_of_group
from crossshard.shards.partition import partition_for


@dataclasses.dataclass(frozen=True)
class Streaming(Outer):
    """Synchronises one piece of every array in each step, and each piece once in a round.

    The pseudogradient is of the parameters before the step, and what comes of it is used after the
    step, so that neither waits for the other. What the worker's step does to the piece meanwhile
    is added to the piece of the anchor. The states of the outer optimizer and of the sum are
    ``[pieces, …]``.
    """

    def init(self, params: PyTree) -> OuterState:
        """The state before the first step, of which the anchor is the parameters."""
        anchor = as_anchor(params)
        self._check_elementwise(anchor)
        cut = lambda at: jax.tree.map(lambda x: self._piece_of(x).cut(x, at), anchor)
        pieces = jax.vmap(cut)(jnp.arange(self.every))
        with inside_optimizer():
            inner_state = jax.vmap(self.optimizer.init, axis_size=self.every)(pieces)
        aggregate = jax.vmap(self.aggregator.init, axis_size=self.every)(pieces)
        return OuterState(anchor, inner_state, jnp.int32(0), aggregate)

    def update(
        self, gradients: Gradients, state: OuterState, context: StageContext
    ) -> tuple[Gradients, OuterState]:
        """The updated parameters, of which a piece is synchronised, and the next state."""
        assert gradients.updated is not None
        # Shards that count differently would sum different pieces.
        count = context.agreed(state.count)
        at = count % self.every
        cut = lambda tree: jax.tree.map(lambda x: self._piece_of(x).cut(x, at), tree)
        add = lambda x, update: self._piece_of(x).add(x, update, at)
        of_piece = lambda x: lax.dynamic_index_in_dim(x, at, 0, keepdims=False)
        keep = lambda x, own: lax.dynamic_update_index_in_dim(x, own, at, 0)

        def moved(x: jax.Array, start: jax.Array, now: jax.Array) -> jax.Array:
            # Of what the worker began with, which may have fewer bits than the anchor.
            return self._piece_of(x).own(widen(start.astype(now.dtype)) - widen(now), at)

        before, anchor = context.params, cut(state.anchor)
        pseudogradient = jax.tree.map(moved, before, anchor, cut(before))
        inner_state, aggregate = jax.tree.map(of_piece, (state.inner_state, state.aggregate))
        mean, aggregate = self._mean(
            *self._within_a_worker(pseudogradient, context), aggregate, context
        )

        def synchronised(updated: PyTree) -> tuple[PyTree, tuple[PyTree, PyTree]]:
            with inside_optimizer():
                found, after = self.optimizer.update(mean, inner_state, anchor)
            updates = jax.tree.map(lambda x, u: self._piece_of(x).own(u, at), before, found)
            # The pseudogradient takes the worker back to the anchor.
            back = jax.tree.map(jnp.add, updates, pseudogradient)
            return jax.tree.map(add, updated, back), (updates, after)

        updated, on_cpus = gradients.updated, context.shards.platform == "cpu"
        # XLA is to write over the parameters, and not to compute them where they are read.
        result, (updates, inner_state) = (
            in_loop(synchronised, updated.result, skip=opaque_false(count))
            if on_cpus
            else synchronised(jax.tree.map(lax.optimization_barrier, updated.result))
        )
        after = OuterState(
            jax.tree.map(add, state.anchor, updates),
            jax.tree.map(keep, state.inner_state, inner_state),
            optax.safe_increment(count),
            jax.tree.map(keep, state.aggregate, aggregate),
        )
        return gradients.replace(updated=updated._replace(result=result)), after

    def describe(self) -> str:
        """What is sent in each step, and how."""
        sent = self.aggregator.describe()
        part = "the" if self.every == 1 else f"the next 1/{self.every} of the"
        return (
            f"every step {part} mean over the workers{f' {sent}' * bool(sent)}, beside the step, "
            f"and its outer update"
        )

    def _piece_of(self, x: Any) -> "_Pieces":
        return _Pieces(jnp.shape(x), self.every)

    def _within_a_worker(self, pieces: PyTree, context: StageContext) -> tuple[PyTree, Arrays]:
        """The pieces as the shards of a worker split them between them."""
        if not isinstance(context.arrays, Parts):
            return pieces, Whole()
        number = size_of_group(context.groups, context.shards.number)
        partitions = tuple(partition_for(x.shape, number) for x in jax.tree.leaves(pieces))
        arrays = Parts(partitions, context.shards, context.groups)
        return arrays.split(pieces), arrays

    def _check_elementwise(self, anchor: PyTree) -> None:
        """Raise unless the outer optimizer updates a piece as it would update the whole.

        Raises:
          ArgumentError: it does not.
        """

        def update(params: PyTree, state: PyTree, gradients: PyTree) -> tuple[PyTree, PyTree]:
            with inside_optimizer():
                updates, after = self.optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), after

        def whole(x: jax.Array) -> jax.ShapeDtypeStruct:
            piece = self._piece_of(x).shape
            # A number cannot be cut, and is none of the others' pieces.
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


@dataclasses.dataclass(frozen=True)
class _Pieces:
    """How an array is cut: into rows where it has many of them, else between any two numbers.

    All pieces have one shape, with as many dimensions as the array. The last row of a piece may
    be the next one's first.

    Attributes:
      array: the shape of the array.
      number: the number of pieces.
    """

    array: tuple[int, ...]
    number: int

    @property
    def _view(self) -> tuple[int, ...]:
        rows = math.prod(self.array[:-1])
        # The last row of a piece, which is sent for nothing, is then a small part of it.
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
        """The piece with this index."""
        view = jnp.reshape(x, self._view)
        return lax.dynamic_slice_in_dim(view, self._start(at), self._rows).reshape(self.shape)

    def own(self, piece: jax.Array, at: Any) -> jax.Array:
        """The piece, with zeros in its last row if that is the next one's."""
        if self._view[0] % self.number == 0:
            return piece
        view = piece.reshape(self._rows, *self._view[1:])
        row = lax.broadcasted_iota(jnp.int32, view.shape, 0)
        is_own = (row < self._start(at + 1) - self._start(at)).reshape(piece.shape)
        return jnp.where(is_own, piece, 0)

    def add(self, x: jax.Array, piece: jax.Array, at: Any) -> jax.Array:
        """The array with this added to the piece."""
        new = (widen(self.cut(x, at)) + piece).astype(x.dtype)
        view, rows = jnp.reshape(x, self._view), new.reshape(self._rows, *self._view[1:])
        return lax.dynamic_update_slice_in_dim(view, rows, self._start(at), 0).reshape(self.array)


_MANY = 16
