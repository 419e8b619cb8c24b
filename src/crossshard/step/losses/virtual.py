"""VirtualLoss: parts of the batch that each shard computes one after the other, added in order.

What a step computes must not depend on how many parts a shard has. So XLA has to compile the same
operations together for any number of shards, and contract and round them in the same way.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from crossshard import _jax
from crossshard._annotations import PyTree
from crossshard.collectives.in_order import (
    add_summand,
    empty_sums,
    sum_in_order,
    sum_of_nodes,
)
from crossshard.collectives.sums import send_gathered, to_average
from crossshard.errors import ArgumentError
from crossshard.jaxprs.rewrite import opaque_false, without_repeats
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.aggregator import Aggregator, Peers, Sent
from crossshard.pipeline.stage import StageContext
from crossshard.shards.batch_axes import VirtualShards, join
from crossshard.step.gather import AtUse
from crossshard.step.losses.loss import StepLoss
from crossshard.step.losses.proven import check_alone
from crossshard.step.losses.rows import begin_trace, compute_part
from crossshard.step.microbatches import LocalResult, pieces_of


@final
@dataclasses.dataclass(frozen=True)
class VirtualLoss(StepLoss):
    """The losses of a shard's virtual shards, each with rows and a key of its own."""

    why_no_own_state = (
        "Each shard keeps its own variables of this module, such as statistics or random streams; "
        "with virtual_shards the parameters are not to depend on the number of shards. Write the "
        "loss as a function with model_state='mean', and take random numbers from its argument rng."
    )

    def enter(
        self, layout: StateLayout, state: TrainState, batch: Any, at_use: AtUse
    ) -> tuple[Any, Any, Any]:
        """Return the batch, of which each shard gets its rows, and its specs."""
        return batch, self.batch_axes.specs(batch, layout.axes), None

    def local(
        self, before: TrainState, given: Any, at_use: AtUse, counts_in: Any = None
    ) -> tuple[LocalResult, Any]:
        """Return the weighted partial sums over the virtual shards of this one.

        Raises:
          ArgumentError: its rows do not divide.
          AxisError: the loss communicates with other shards.
        """
        state, at_use, like = self.prepare_params(before, at_use)
        if at_use.frozen is not None:
            # Once for all virtual shards, and in full: a product with slices rounds differently.
            frozen = at_use.frozen.whole(state.frozen)
            state = dataclasses.replace(state, frozen=frozen)
            at_use = dataclasses.replace(at_use, frozen=None)
        number, shard = at_use.shards.num_shards, at_use.shards.index()
        virtual = VirtualShards(self.parts(number), number)
        count = virtual.most
        size, microbatches = self.number_of_rows(given), self.accumulate_steps
        if size % (count * microbatches):
            of = f" of {microbatches} microbatches each" if microbatches > 1 else ""
            raise ArgumentError(
                f"A shard has {size} rows of this batch, which do not divide over its {count} "
                f"virtual shards{of}. Pass a multiple of {count * microbatches} rows for each "
                f"shard."
            )
        counting, (rows, whole) = (
            begin_trace(self, state, given, at_use, counts_in),
            self.split(given),
        )
        shared = state.params, state.frozen, state.model_state, whole, counting.counts
        pieces = pieces_of(rows, self.batch_axes, count)
        params, structure = jax.tree.flatten(state.params)
        unread = at_use.unread or (False,) * len(params)

        def one(index: Any, rows: Any, given: Any) -> tuple[Any, Any, Any]:
            params, frozen, model_state, whole, counts = given
            here = dataclasses.replace(state, params=params, frozen=frozen, model_state=model_state)
            index, own = virtual.first(shard) + index, dataclasses.replace(counting, counts=counts)
            local = compute_part(self, here, join(rows, whole), at_use, index, own)
            weigh = lambda x: to_average(x, local.weight)
            values = zip(jax.tree.leaves(local.values), unread, strict=True)
            read = [weigh(x) for x, is_unread in values if not is_unread]
            to_sum = read, weigh(local.loss), local.weight, self.sums(local)
            return to_sum, local.model_state, local.aux

        nth = lambda index: jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, index, 0, keepdims=False), pieces
        )
        first = jnp.int32(0)
        jaxpr, types = jax.make_jaxpr(one, return_shape=True)(first, nth(first), shared)
        jaxpr = without_repeats(_jax.without_unread(jaxpr))
        check_alone(jaxpr, at_use.shards.axes)
        run, tree = jaxpr_as_fun(jaxpr), jax.tree.structure(types)
        to_sum, of_sums = jax.tree.flatten(types[0])
        # So that XLA keeps the loops, and compiles them alike for any count.
        opaque_zero = opaque_false(state.step).astype(jnp.int32)
        levels = virtual.levels + opaque_zero

        def turn(carry: Any) -> Any:
            index, sums, _, every = carry
            # Or XLA would compute before the loop what is the same in all turns; with one turn,
            # that is all of it.
            index, rows, own = lax.optimization_barrier((index, nth(index), shared))
            summands, model_state, aux = tree.unflatten(run(*jax.tree.leaves((index, rows, own))))
            put = lambda x, new: lax.dynamic_update_index_in_dim(x, new, index, 0)
            every = jax.tree.map(put, every, aux)
            sums = add_summand(sums, jax.tree.leaves(summands), index, levels)
            return index + 1, sums, model_state, every

        every = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), types[2])
        start = first, empty_sums(to_sum, virtual), state.model_state, every
        is_left = lambda carry: carry[0] < virtual.count(shard) + opaque_zero
        _, sums, model_state, aux = lax.while_loop(is_left, turn, start)
        if not virtual.is_even:
            gather = lambda x: virtual.filled(send_gathered(x, 0, at_use.shards))
            aux = jax.tree.map(gather, aux)
        read, loss, weight, others = of_sums.unflatten([x[virtual.levels :] for x in sums])
        found = iter(read)
        shape = lambda x: (virtual.nodes, *jnp.shape(x))
        values = [
            jnp.zeros(shape(x), x.dtype) if is_unread else next(found)
            for x, is_unread in zip(params, unread, strict=True)
        ]
        summed = structure.unflatten(values)
        local = LocalResult(loss, summed, weight, model_state, aux, sums=others, is_weighted=True)
        of_nodes = lambda x, like: jax.ShapeDtypeStruct(x.shape, like.dtype)
        return local, jax.tree.map(of_nodes, summed, like)


@dataclasses.dataclass(frozen=True)
class InOrder(Aggregator):
    """The sum over virtual shards, of which every shard gives as many partial sums."""

    virtual_shards: int  # how many there are on all shards together

    divides_before = False
    may_hide_nonfinite = False

    def each(self, function: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
        """Apply a function to each of the partial sums ``[nodes, …]``."""
        return jax.vmap(function)

    def one(self, x: jax.Array) -> jax.Array:
        """Return the first of the partial sums."""
        return x[0]

    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        """Return the sums of arrays ``[nodes, …]``, one by one."""
        virtual = VirtualShards(self.virtual_shards, peers.number)
        of_all = lambda x: virtual.filled(peers.gather(x).reshape(-1, *x.shape[1:]))
        return jax.tree.map(lambda x: sum_of_nodes(of_all(x)), values), state

    def reduce(
        self, gradients: PyTree, sent: Sequence[Sent], state: PyTree, context: StageContext
    ) -> tuple[list[jax.Array], PyTree]:
        """Return the slices of the sums of arrays ``[nodes, …]`` that are weighted already."""
        arrays, whole = [x.array for x in sent], [x.partition for x in sent]
        partitions = [
            each if each.number > 1 else dataclasses.replace(each, shape=x.shape[1:])
            for x, each in zip(arrays, whole, strict=True)
        ]
        virtual = VirtualShards(self.virtual_shards, context.shards.num_shards)
        return sum_in_order(arrays, partitions, context.shards, virtual), state

    def describe(self) -> str:
        """Describe how many virtual shards there are."""
        return f"as {self.virtual_shards} virtual shards, added in a fixed order"
