"""Aggregator: sums the gradients of the shards, with a state per shard."""

import abc
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.collectives.sums import send_exchanged, send_gathered, sum_over_shards
from crossshard.errors import ArgumentTypeError
from crossshard.pipeline.own import check_like, check_pair
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
        """How many they are."""
        return self.shards.size

    def index(self) -> jax.Array:
        """int32[]: the position of this shard among them."""
        return self.shards.position()

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of ``x`` over them; the same shape and dtype."""
        return jnp.asarray(sum_over_shards(x, self.shards))

    def gather(self, x: jax.Array) -> jax.Array:
        """``[number, …]``: the ``x`` of each of them, in order, the same on all."""
        own = jnp.asarray(x)[None]
        return own if self.number == 1 else send_gathered(own, 0, self.shards)

    def exchange(self, x: jax.Array) -> jax.Array:
        """``[number, …]``: what each of them has for this shard, from the same of all of them."""
        return x if self.number == 1 else send_exchanged(x, self.shards)


@dataclasses.dataclass(frozen=True)
class Summands:
    """What an aggregator is to sum over the shards.

    Attributes:
      gradients: a pytree of this shard's gradients, in the shapes of the parameters and in the
        dtypes in which they are added.
      arrays: the arrays to sum: those of the gradients that are to be summed, as they travel to
        their owners, and others such as the loss.
      partitions: the partition of each of these arrays; its sum is this shard's slice.
      places: the place of each array among the leaves of these gradients; ``None`` for the others.
    """

    gradients: PyTree
    arrays: list[jax.Array]
    partitions: list[Partition]
    places: list[int | None]

    def of_others(self) -> tuple[list[jax.Array], list[Partition]]:
        """The arrays that are no gradients, and their partitions."""
        kept = [at for at, place in enumerate(self.places) if place is None]
        return [self.arrays[at] for at in kept], [self.partitions[at] for at in kept]


class Aggregator(abc.ABC):
    """Sums the shards' gradients: an ``init``/``sum`` pair with a state per shard.

    Write one to send gradients in a way of your own. ``sum`` runs on each shard, and all shards
    must return the same sums. Under MEAN the values are divided by the number of shards before,
    so that the sum is the mean; with weights they are multiplied by the shard's weight before,
    and the sum is divided by the total weight after. The state is kept per shard, saved in
    checkpoints, and left alone by steps that are skipped.

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

    # Whether values are divided before they are summed, so that what is kept of them is of a mean.
    divides_before = True
    # Whether arrays have the partial sums of a shard's virtual shards, weighed, along a first axis.
    takes_nodes = False

    def init(self, params: PyTree) -> PyTree:
        """The state of one shard before the first step."""
        del params
        return ()

    @abc.abstractmethod
    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        """The sums over the peers, in full, and the next state.

        Args:
          values: a pytree like the parameters, of this shard's values with at least 32 bits.
          state: the state of this shard.
          peers: the shards to sum over.
        """

    def on_other_shards(self, state: PyTree, number: int) -> PyTree:
        """The state of each of another number of shards, from that of all, ``[shards, …]``.

        By default the sum over the shards stays as it is, as it should for what was held back;
        what is not floating is taken from the first shard.
        """

        def one(x: jax.Array) -> jax.Array:
            own = x.sum(0) / number if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]
            return jnp.broadcast_to(own, (number, *own.shape)).astype(x.dtype)

        return jax.tree.map(one, state)

    def describe(self) -> str:
        """What it does besides summing, for ``describe``: by default its name."""
        return f"by {type(self).__name__}"

    def reduce(
        self, summands: Summands, state: PyTree, context: StageContext
    ) -> tuple[list[jax.Array], PyTree]:
        """This shard's slice of the sum of each of the arrays, and the next state."""
        shards = context.shards
        returned = self.sum(summands.gradients, state, Peers(shards))
        name = f"{type(self).__name__}.sum"
        totals, after = check_pair(returned, name, "(sums, state)", state)
        check_like(totals, summands.gradients, f"The sums that {name} returned")
        whole = jax.tree.leaves(context.arrays.to_owners(totals))
        others = iter(bucketed_sum(*summands.of_others(), shards))
        index: Any = shards.position()
        sums = [
            next(others) if place is None else partition.local_slice(whole[place], index)
            for place, partition in zip(summands.places, summands.partitions, strict=True)
        ]
        return sums, after


def check_aggregator(aggregator: Any) -> Aggregator | None:
    """The checked ``aggregator`` argument; ``None`` without one.

    Raises:
      ArgumentTypeError: not an aggregator.
    """
    if aggregator is None or isinstance(aggregator, Aggregator):
        return aggregator
    if isinstance(aggregator, type) and issubclass(aggregator, Aggregator):
        raise ArgumentTypeError(
            f"aggregator must be an aggregator; got the class {aggregator.__name__}. Call it."
        )
    raise ArgumentTypeError(
        f"aggregator must be a crossshard.pipeline.Aggregator, whose sum(values, state, peers) "
        f"sums the gradients; got {_check.described(aggregator)}."
    )
