"""Aggregator: how the shards' gradients are summed, by XLA or by the user's own code."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.collectives.sums import (
    bucketed_sum,
    send_exchanged,
    send_gathered,
    sum_over_shards,
    widen,
)
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.pipeline.stage import StageContext
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition


@dataclasses.dataclass(frozen=True)
class Peers:
    """The shards that reduce together: all of them, or those of a group.

    >>> import jax, jax.numpy as jnp
    >>> from crossshard.shards.axes import current_shards
    >>> number = lambda x: Peers(current_shards()).sum(x)
    >>> jax.vmap(number, axis_name="shards")(jnp.arange(4.0))
    Array([6., 6., 6., 6.], dtype=float32)
    """

    shards: Shards

    @property
    def number(self) -> int:
        """The number of these shards."""
        return self.shards.group_size

    def index(self) -> jax.Array:
        """Return the position of this shard among them, int32[]."""
        return self.shards.index_in_group()

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum of ``x`` over them, in its shape and dtype; bools are counted in int32."""
        return jnp.asarray(sum_over_shards(x, self.shards))

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the ``x`` of each of them, ``[number, …]``, in order; the same on all."""
        own = jnp.asarray(x)[None]
        return own if self.number == 1 else send_gathered(own, 0, self.shards)

    def exchange(self, x: jax.Array) -> jax.Array:
        """Send row ``i`` of ``x`` to peer ``i``; row ``j`` of the result is from peer ``j``.

        Both are ``[number, …]``.
        """
        return x if self.number == 1 else send_exchanged(x, self.shards)


class Sent(NamedTuple):
    """An array that an aggregator is to sum over the shards."""

    array: jax.Array  # a gradient as ``Arrays.to_owners`` returns it, or another, such as the loss
    partition: Partition  # how it is split; its sum is this shard's slice
    place: int | None = None  # its index among the gradients' leaves; ``None`` for the others


class Aggregator(abc.ABC):
    """Sums the shards' gradients: an ``init``/``sum`` pair with a state per shard.

    Write one to send gradients in a way of your own. ``sum`` runs on each shard, and all shards
    must return the same sums. Under MEAN the values are divided by the number of shards before,
    so that the sum is the mean; with weights they are multiplied by the shard's weight and divided
    by the total weight. The state is kept per shard, saved in checkpoints, and left alone by steps
    that are skipped.

    >>> import jax, jax.numpy as jnp, optax
    >>> from crossshard import CrossShardOptimizer
    >>> from crossshard.pipeline import Aggregator
    >>> class Signs(Aggregator):
    ...     def sum(self, values, state, peers):
    ...         one = lambda g: peers.gather(jnp.sign(g).astype(jnp.int8)).sum(0, jnp.float32)
    ...         return jax.tree.map(one, values), state
    >>> opt = CrossShardOptimizer(optax.sgd(1.0), aggregator=Signs())
    >>> step = lambda gradient: opt.update(gradient, opt.init(gradient))[0]
    >>> jax.vmap(step, axis_name="shards")(jnp.array([0.1, 3.0, -7.0]))
    Array([-1., -1., -1.], dtype=float32)
    """

    # Whether values are divided before they are summed, so that the state is in units of the mean.
    divides_before = True
    # Whether sums may be finite where a shard's values are not, as those of signs are.
    may_hide_nonfinite = True

    def init(self, params: PyTree) -> PyTree:
        """Return the state of one shard before the first step."""
        del params
        return ()

    @abc.abstractmethod
    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        """Return the sums over the peers, in full, and the next state.

        Args:
          values: a pytree like the parameters, of this shard's values with at least 32 bits.
          state: the state of this shard.
          peers: the shards to sum over.
        """

    # For ``InOrder``, whose gradients have a leading axis of partial sums: ``each`` maps over that
    # axis, and ``one`` takes its first entry.

    def each(self, function: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
        """Map a function over the gradients of a shard: one, or one of each virtual shard."""
        return function

    def one(self, x: jax.Array) -> jax.Array:
        """Return one of the gradients of a shard, given one that is the same on all shards."""
        return x

    def on_other_shards(self, state: PyTree, number: int) -> PyTree:
        """Return the state on ``number`` shards, given that on the old shards, ``[shards, …]``.

        By default the sum over the shards stays the same, as it should for what was held back;
        arrays that are not floating are taken from the first shard.
        """

        def one(x: jax.Array) -> jax.Array:
            own = widen(x).sum(0) / number if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]
            return jnp.broadcast_to(own, (number, *own.shape)).astype(x.dtype)

        return jax.tree.map(one, state)

    def describe(self) -> str:
        """Describe what it does besides summing: by default, its name."""
        return f"by {type(self).__name__}"

    def reduce(
        self, gradients: PyTree, sent: Sequence[Sent], state: PyTree, context: StageContext
    ) -> tuple[list[jax.Array], PyTree]:
        """Return this shard's slice of the sum of each of the arrays, and the next state.

        Args:
          gradients: this shard's gradients, in the shapes of the parameters; in at least 32 bits
            if it ``divides_before``.
          sent: the arrays, among them the gradients that are to be summed.
          state: the state of this shard.
          context: the context.
        """
        shards, name = context.shards, f"{type(self).__name__}.sum"
        returned = self.sum(gradients, state, Peers(shards))
        totals, after = check_pair(returned, name, "(sums, state)", state)
        check_like(totals, gradients, f"The sums that {name} returned")
        whole = jax.tree.leaves(context.arrays.to_owners(totals))
        others = sum_by_xla([each for each in sent if each.place is None], shards)
        index = shards.index_in_group()
        own = lambda x: x.partition.local_slice(whole[x.place], index)
        return [next(others) if x.place is None else own(x) for x in sent], after


def sum_by_xla(sent: Sequence[Sent], shards: Shards) -> Iterator[jax.Array]:
    """Return the slices of the sums, by XLA; small arrays share a collective."""
    return iter(bucketed_sum([x.array for x in sent], [x.partition for x in sent], shards))


class BySlices(Aggregator):
    """An aggregator that implements ``reduce``; its ``sum`` is for ``LocalSGD``, of full arrays."""

    may_hide_nonfinite = False

    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.flatten(values)
        sent = [Sent(x, unsplit(x), place) for place, x in enumerate(leaves)]
        sums, after = self.reduce(values, sent, state, StageContext(peers.shards))
        return tree.unflatten(sums), after


@dataclasses.dataclass(frozen=True)
class Plain(BySlices):
    """The sum over the shards by XLA, sent in 32 or 16 bits."""

    dtype: Any = None  # the dtype in which gradients are sent; ``None`` for their own, or float32

    divides_before = False

    def reduce(
        self, gradients: PyTree, sent: Sequence[Sent], state: PyTree, context: StageContext
    ) -> tuple[list[jax.Array], PyTree]:
        """Return the slices of the sums; small arrays share a collective with the loss."""
        own = lambda x: x if x.place is None else x._replace(array=as_sent(x.array, self.dtype))
        return list(sum_by_xla(list(map(own, sent)), context.shards)), state

    def describe(self) -> str:
        return f"in {self.dtype}" if self.dtype is not None else ""


def as_sent(gradient: Any, dtype: Any) -> jax.Array:
    """Return a gradient in the dtype in which it is sent: this one, or its own, if wide enough."""
    wide = widen(gradient)
    return wide if dtype is None or jnp.iscomplexobj(wide) else wide.astype(dtype)


def unsplit(array: Any) -> Partition:
    """Return the partition of an array that each shard has in full."""
    return Partition(jnp.shape(array))


# What a user's own stage or aggregator returns.


def check_pair(returned: Any, name: str, form: str, state: PyTree) -> tuple[Any, PyTree]:
    """Return a pair whose second is the next state, if that has its old structure and shapes.

    Raises:
      ArgumentError: the state has another structure, or other shapes.
      ArgumentTypeError: it is not a pair.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        got = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        kind = type(returned).__name__
        raise ArgumentTypeError(f"{name} must return {form}; it returned {kind}{got}.")
    check_like(returned[1], state, f"The state that {name} returned")
    return returned[0], returned[1]


def check_like(given: PyTree, like: PyTree, what: str, *, shapes: bool = True) -> None:
    """Raise unless a tree has arrays, with the structure of ``like``, and with its shapes."""
    structures = jax.tree.structure(given), jax.tree.structure(like)
    if structures[0] != structures[1]:
        raise ArgumentError(
            f"{what} must have the structure that it had, {structures[1]}; got {structures[0]}."
        )
    paths = jax.tree_util.tree_leaves_with_path(given)
    for (path, leaf), old in zip(paths, jax.tree.leaves(like), strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        if jnp.shape(_check.array(where, leaf)) != jnp.shape(old) and shapes:
            raise ArgumentError(
                f"{where} must have shape {jnp.shape(old)}, which it had; got {jnp.shape(leaf)}."
            )
