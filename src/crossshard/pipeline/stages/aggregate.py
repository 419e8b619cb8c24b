"""Aggregate: the mean or the sum of the shards' gradients, their weights, and what sums them.

XLA sums them, sent in 32 or 16 bits; or they are sent in few bits; or a user's aggregator does it.
"""

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from crossshard import _check
from crossshard._annotations import Given, PyTree
from crossshard._check import is_inexact, is_number
from crossshard.collectives.few_bits import (
    DTYPES,
    Codec,
    Quantized,
    Tier,
    sum_in_few_bits,
    takes_few_bits,
)
from crossshard.collectives.sums import (
    bucketed_sum,
    send_exchanged,
    send_gathered,
    sum_over_shards,
    to_average,
    wide,
    widen,
)
from crossshard.errors import ArgumentError, ArgumentTypeError, AxisError
from crossshard.gradients.status import GradientStatus, Reduction, check_shapes
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged, as_local
from crossshard.shards.axes import GroupAssignment, Shards
from crossshard.shards.cut import PER_SHARD, Partition


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
        return self.shards.size

    def index(self) -> jax.Array:
        """Return the position of this shard among them, int32[]."""
        return self.shards.position()

    def sum(self, x: jax.Array) -> jax.Array:
        """Return the sum of ``x`` over them, in its shape and dtype."""
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

    # Whether values are divided before they are summed, so that the state is in units of the mean.
    divides_before = True

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
          gradients: this shard's gradients, in the shapes of the parameters and in the dtypes in
            which they are added.
          sent: the arrays, among them the gradients that are to be summed.
          state: the state of this shard.
          context: the context.
        """
        shards, name = context.shards, f"{type(self).__name__}.sum"
        returned = self.sum(gradients, state, Peers(shards))
        totals, after = check_pair(returned, name, "(sums, state)", state)
        check_like(totals, gradients, f"The sums that {name} returned")
        whole = jax.tree.leaves(context.arrays.to_owners(totals))
        others = _sum([each for each in sent if each.place is None], shards)
        index = shards.position()
        own = lambda x: x.partition.local_slice(whole[x.place], index)
        return [next(others) if x.place is None else own(x) for x in sent], after


def _sum(sent: Sequence[Sent], shards: Shards) -> Iterator[jax.Array]:
    """Return the slices of the sums, by XLA; small arrays share a collective."""
    return iter(bucketed_sum([x.array for x in sent], [x.partition for x in sent], shards))


# ---- Sums by XLA, sent in 32 or 16 bits.


class BySlices(Aggregator):
    """An aggregator of crossshard's own, whose ``sum`` is a ``reduce`` of unsplit arrays."""

    def sum(self, values: PyTree, state: PyTree, peers: Peers) -> tuple[PyTree, PyTree]:
        leaves, tree = jax.tree.flatten(values)
        sent = [Sent(x, _unsplit(x), place) for place, x in enumerate(leaves)]
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
        return list(_sum(list(map(own, sent)), context.shards)), state

    def describe(self) -> str:
        return f"in {self.dtype}" if self.dtype is not None else ""


def as_sent(gradient: Any, dtype: Any) -> jax.Array:
    """Return a gradient in the dtype in which it is sent: this one, or its own, if wide enough."""
    wide = widen(gradient)
    return wide if dtype is None or jnp.iscomplexobj(wide) else wide.astype(dtype)


# ---- The stages.


def check_weighable(reduction: Reduction) -> None:
    """Raise ArgumentError under SUM, where shards cannot have weights."""
    if reduction is Reduction.SUM:
        raise ArgumentError(
            "weight is a shard's weight in a mean, but the optimizer's reduction is SUM. Use MEAN, "
            "or leave weight out and weigh the loss."
        )


def as_weight(given: Any, what: str = "got") -> Float[Array, ""]:
    """Return the weight of a shard in the mean, in JAX's default precision.

    Raises:
      ArgumentError: the weight is not a scalar.
      ArgumentTypeError: the weight is not a number.
    """
    if isinstance(given, int) and not isinstance(given, bool):
        given = _check.number("A shard's weight", given)
    value = _check.as_array("A shard's weight", given) if is_number(given) else None
    kinds = jnp.floating, jnp.integer, jnp.bool_
    if value is None or not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
        raise ArgumentTypeError(
            f"A shard's weight is one number; {what} {_check.described(given)}."
        )
    value = value.astype(float)
    if value.shape != ():
        raise ArgumentError(
            f"A shard's weight is one number; {what} an array of shape {value.shape}. Sum it."
        )
    if not isinstance(given, float | np.generic | np.ndarray):
        return value
    _check.finite("A shard's weight", given)
    if np.any(np.asarray(given) < 0):
        raise ArgumentError(f"A shard's weight is at least 0; {what} {given}.")
    return value


@dataclasses.dataclass(frozen=True)
class Weigh(Stage):
    """Multiplies gradients by the shard's weight; those of weight 0 are ignored, even NaN."""

    phase = Phase.LOCAL
    scope = "weigh"
    state_field = ""
    needs_local = ""
    options = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        del options
        return cls()

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the gradients, and the values reduced with them, times the weight."""
        weight = gradients.weight
        if weight is None or gradients.weighed:
            return gradients, state
        gradients = as_local(gradients, context, "weight multiplies")
        weigh = lambda leaf: to_average(leaf, weight)
        leaves, tree = jax.tree.flatten(gradients.values)
        early = gradients.early or [False] * len(leaves)
        values = [x if is_early else weigh(x) for x, is_early in zip(leaves, early, strict=True)]
        extra = jax.tree.map(weigh, dict(gradients.extra))
        return gradients.replace(values=tree.unflatten(values), extra=extra), state

    def describe(self) -> str:
        return "weigh"


@dataclasses.dataclass(frozen=True)
class Aggregate(Stage):
    """The mean or the sum over the shards, or over the group.

    With weights the mean is ``sum(w · g) / sum(w)``. See ``Pipeline`` for its attributes.
    """

    reduction: Reduction
    groups: GroupAssignment | None = None
    axis_name: tuple[str, ...] = ()
    aggregator: Aggregator = dataclasses.field(default_factory=Plain)

    phase = Phase.REDUCTION
    placement = PER_SHARD
    scope = "reduce"
    state_field = "aggregate"
    options = ("reduce_dtype", "aggregator")
    asked_by = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        """Return the stage.

        Raises:
          ArgumentError: no such dtype, or two ways to sum.
          ArgumentTypeError: not an aggregator.
        """
        given = options.get("reduce_dtype")
        wire = check_reduce_dtype(given)
        aggregator = options.get("aggregator")
        if aggregator is not None and not isinstance(aggregator, Aggregator):
            raise ArgumentTypeError(
                f"aggregator must be a crossshard.pipeline.Aggregator, whose sum(values, state, "
                f"peers) sums the gradients; got {_check.described(aggregator)}."
            )
        if aggregator is not None and given is not None:
            raise ArgumentError(
                f"reduce_dtype={given!r:.60} is for a sum of crossshard's own, and gradients are "
                f"already to be summed {aggregator.describe()}. Leave one of them out."
            )
        shared = options["reduction"], options["groups"], options["axis_name"]
        return cls(*shared, wire if aggregator is None else aggregator)

    def init(self, params: Any) -> Any:
        return self.aggregator.init(params)

    def moved_to(self, state: PyTree, spread: PyTree, number: int) -> PyTree:
        """Return the aggregator's state on another number of shards."""
        del spread
        return self.aggregator.on_other_shards(state, number)

    def written(self) -> dict[str, Given]:
        if isinstance(self.aggregator, Plain):
            return {"reduce_dtype": self.aggregator.dtype}
        return {"aggregator": self.aggregator}

    def describe(self) -> str:
        """Describe it, as ``mean over all shards``, with the axes and the dtype if given."""
        if self.groups is not None and self.groups.size == 1:
            return "each shard its own"
        word = "sum" if self.reduction is Reduction.SUM else "mean"
        over = "all shards" if self.groups is None else f"groups {self.groups}"
        axes = f" on {', '.join(self.axis_name)}" if self.axis_name else ""
        return f"{word} over {over}{axes} {self.aggregator.describe()}".rstrip()

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the sums of gradients: in full, or this shard's slices if arrays are split."""
        # Sharded parameters have other shapes than full gradients.
        params_sharded = any(gradients.early) or context.arrays.params_sharded
        # A single shard reduces nothing; nor does the user's own jit, on global arrays.
        if context.params is not None and not params_sharded and context.shards.number > 1:
            check_shapes(gradients.values, context.params)
        divisor = context.divisor
        if self.aggregator.divides_before:
            gradients, divisor = _divide(gradients, context), 1
        values = self.aggregator.each(context.arrays.to_owners)(gradients.values)
        leaves, tree = jax.tree.flatten((dict(gradients.extra), values))
        # A gradient that nothing reads counts as reduced: it is zero.
        unread = zip(gradients.status, context.unread or [False] * len(leaves), strict=False)
        known = (GradientStatus.REDUCED if is_unread else each for each, is_unread in unread)
        status = (*gradients.extra_status, *known)
        partitions = _partitions(gradients, context)
        to_sum = [place for place, each in enumerate(status) if each in _TO_SUM]
        # The weight and other sums travel in the bucket of the loss.
        others, other_tree = jax.tree.flatten((gradients.weight, dict(gradients.sums)))
        num_extra = len(gradients.extra_status)
        early = [False] * num_extra + list(gradients.early or [False] * len(gradients.status))
        index_of = lambda place: None if place < num_extra else place - num_extra
        sent = [Sent(widen(leaves[at]), partitions[at], index_of(at)) for at in to_sum]
        sent += [Sent(other, _unsplit(other)) for other in others]
        sums, state = self.aggregator.reduce(gradients.values, sent, state, context)
        totals = dict(zip(to_sum, sums, strict=False))
        total_weight, totals_of_others = other_tree.unflatten(sums[len(to_sum) :])

        def summed(place: int, leaf: Any) -> Any:
            if place in totals:
                return totals[place]
            if status[place] is None or early[place]:
                return leaf
            own = widen(self.aggregator.one(leaf))
            return partitions[place].local_slice(own, context.shards.position())

        extra, values = tree.unflatten(list(map(summed, range(len(leaves)), leaves)))
        dtypes = gradients.dtypes
        # If all weights are zero there is no gradient, and weights must not decay either.
        skip = None if total_weight is None else total_weight == 0
        reduced = Gradients(
            extra,
            weight=total_weight,
            sums=totals_of_others,
            skip=skip,
            status=status[:num_extra],
            dtypes=dtypes[:num_extra],
            divisor=context.divisor,
        )
        return reduced.replace(
            values=values,
            extra=reduced.settled().values,
            status=status[num_extra:],
            dtypes=dtypes[num_extra:],
            divisor=divisor,
        ), state


def _divide(gradients: Gradients, context: StageContext) -> Gradients:
    """Divide gradients by the number of shards, with at least 32 bits: their sum is the mean.

    Raises:
      IncomingError: they are already summed.
    """
    gradients = as_local(gradients, context, "aggregator sums")
    number = context.divisor if gradients.weight is None else 1

    def one(x: Any, status: GradientStatus | None) -> Any:
        if status is not GradientStatus.LOCAL:
            return x
        return widen(x) / number if number > 1 else widen(x)

    leaves, tree = jax.tree.flatten(gradients.values)
    return gradients.replace(values=tree.unflatten(map(one, leaves, gradients.status)))


# The statuses of gradients that the aggregator has to sum.
_TO_SUM = (GradientStatus.LOCAL, GradientStatus.SCALED)


def _partitions(gradients: Gradients, context: StageContext) -> list[Partition]:
    """Return the partition of each reduced leaf: as the parameter has it; a loss is replicated."""
    extra, of_gradients = gradients.extra, context.arrays.partitions_of
    found = [
        of_gradients(extra[name]) if name == "grad" else [_unsplit(extra[name])]
        for name in sorted(extra)
    ]
    return [*itertools.chain(*found), *of_gradients(gradients.values)]


def _unsplit(array: Any) -> Partition:
    return Partition(jnp.shape(array))


# ---- Sums in few bits; what is lost is added to the next gradients.


class FewBitsState(NamedTuple):
    """What one shard keeps.

    Attributes:
      residual: for each gradient, what has not been sent of it yet; ``()`` without error feedback.
        Its sum over the shards is what the mean, or the sum, still lacks. Elements that are not
        finite, as after a flipped bit, count as 0.
      count: int32[], the number of sums so far; ``()`` unless it rounds at random.

    >>> import jax.numpy as jnp, optax
    >>> import crossshard
    >>> opt = crossshard.CrossShardOptimizer(optax.sgd(0.1), reduce_dtype="int8")
    >>> with crossshard.shard_context(8):
    ...     opt.init({"w": jnp.ones(2)}).aggregate.residual["w"].shape
    (8, 2)
    """

    residual: PyTree = ()
    count: PyTree = ()


def _add_residual(x: jax.Array, held: jax.Array | None) -> jax.Array:
    """Return a gradient plus what was not sent of those before it."""
    if held is None:
        return x
    # A flipped bit may make a residual NaN, and with it every later gradient. The 0 is made from
    # the flag: beside a constant, XLA for GPUs does not update a residual where it reads it.
    is_finite = jnp.isfinite(held)
    return widen(x) + jnp.where(is_finite, held, is_finite.astype(held.dtype))


@dataclasses.dataclass(frozen=True)
class FewBits(BySlices):
    """The sum of gradients that are sent in few bits."""

    # How gradients are sent along an axis, or along all for ``None``: a ``Quantized``, a dtype, or
    # ``None`` for float32.
    wires: tuple[tuple[str | None, Any], ...]
    at_once: bool = False  # as in ``sum_in_few_bits``

    @property
    def _quantized(self) -> list[Quantized]:
        return [wire for _, wire in self.wires if isinstance(wire, Quantized)]

    @property
    def is_random(self) -> bool:
        """Whether a wire rounds at random."""
        return any(wire.is_random for wire in self._quantized)

    @property
    def _feeds_back(self) -> bool:
        return any(wire.error_feedback for wire in self._quantized)

    def init(self, params: PyTree) -> FewBitsState:
        """Return the state before the first step: nothing is held back yet."""
        is_held = lambda x: is_inexact(x) and not jnp.iscomplexobj(x)
        feeding = [wire for wire in self._quantized if wire.error_feedback]
        narrow = jnp.bfloat16 if all(wire.keeps_16_bits for wire in feeding) else None
        dtype = lambda x: narrow or wide(jnp.result_type(x))
        zeros = lambda x: jnp.zeros(jnp.shape(x), dtype(x)) if is_held(x) else None
        return FewBitsState(
            jax.tree.map(zeros, params) if self._feeds_back else (),
            jnp.int32(0) if self.is_random else (),
        )

    def reduce(
        self, gradients: PyTree, sent: Sequence[Sent], state: FewBitsState, context: StageContext
    ) -> tuple[list[jax.Array], FewBitsState]:
        """Return the slices of the sums, and the state with what was not sent."""
        shards, (own, tree) = context.shards, jax.tree.flatten(gradients)
        before = self.held(state, tree) or [None] * len(own)
        # The backward pass may have summed some, and stored what it held back of them.
        places = {x.place for x in sent}
        added = [
            _add_residual(x, held) if place in places else x
            for place, (x, held) in enumerate(zip(own, before, strict=True))
        ]
        leaves = jax.tree.leaves(context.arrays.to_owners(tree.unflatten(added)))
        every = [x if x.place is None else x._replace(array=leaves[x.place]) for x in sent]
        is_few = [x.place is not None and takes_few_bits(x.array, shards) for x in every]
        few = list(itertools.compress(every, is_few))
        key = None
        if self.is_random:
            # Every run draws the same numbers.
            key = jax.random.fold_in(jax.random.key(0), state.count)
        given = [x.array for x in few], [x.partition for x in few], shards, key
        of_few, lost = sum_in_few_bits(*given, self._tiers(shards), at_once=self.at_once)
        pairs = zip(every, is_few, strict=True)
        wide = [x._replace(array=widen(x.array)) for x, is_sent in pairs if not is_sent]
        sums = {True: iter(of_few), False: _sum(wide, shards)}
        held = [jnp.zeros_like(x) for x in leaves]
        for each, x in zip(few, lost, strict=True):
            assert each.place is not None
            held[each.place] = x
        residual = state.residual
        if self._feeds_back:
            new = jax.tree.leaves(context.arrays.from_owners(tree.unflatten(held)))
            after = [
                x.astype(old.dtype) if place in places and old is not None else old
                for place, (x, old) in enumerate(zip(new, before, strict=True))
            ]
            residual = tree.unflatten(after)
        count = optax.safe_increment(state.count) if self.is_random else ()
        return [next(sums[each]) for each in is_few], FewBitsState(residual, count)

    def held(self, state: FewBitsState, tree: Any) -> list[Any] | None:
        """Return the residual of each leaf of a ``tree``; ``None`` without error feedback."""
        return tree.flatten_up_to(state.residual) if self._feeds_back else None

    def sum_one(
        self, x: jax.Array, held: jax.Array | None, partition: Partition, shards: Shards
    ) -> tuple[jax.Array, jax.Array]:
        """Return this shard's slice of the sum of one gradient, and its next residual.

        ``held`` may have another shape, with its elements in the same order.
        """
        x = _add_residual(x if held is None else x.reshape(held.shape), held)
        if takes_few_bits(x, shards):
            (total,), (lost,) = sum_in_few_bits([x], [partition], shards, None, self._tiers(shards))
        else:
            own = x.reshape(partition.shape)
            total, lost = bucketed_sum([own], [partition], shards)[0], jnp.zeros_like(x)
        return total, lost if held is None else lost.astype(held.dtype)

    def map_residuals(
        self, state: FewBitsState, change: Callable[[PyTree], PyTree]
    ) -> FewBitsState:
        """Return the state with ``change`` applied to the residuals."""
        return state._replace(residual=change(state.residual)) if self._feeds_back else state

    def check_axes(self, axes: Sequence[str], groups: GroupAssignment | None) -> None:
        """Raise unless the shards have the axes that ``wires`` names, and sum over all of them."""
        named = [axis for axis, _ in self.wires if axis is not None]
        unknown = [axis for axis in named if axis not in axes]
        if unknown and axes:
            raise AxisError(
                f"reduce_dtype names the axis {unknown[0]!r}, and the shard axes are "
                f"{', '.join(map(repr, axes))}. Name these, or leave the dict out."
            )
        if named and groups is not None:
            raise ArgumentError(
                f"reduce_dtype has a dtype for each axis, along which it sums over all shards, and "
                f"with group_assignment {groups} only those of a group are summed. Pass one dtype."
            )

    def _tiers(self, shards: Shards) -> list[Tier]:
        """Return the tiers, inner ones first; adjacent axes that send in one way are one tier."""
        self.check_axes(shards.axes, shards.groups)
        wires = dict(self.wires)
        if None in wires:
            return [((), wires[None])]
        found: list[Tier] = []
        for axis in reversed(shards.axes):
            wire = wires.get(axis)
            inner = found.pop()[0] if found and found[-1][1] == wire else ()
            found.append(((axis, *inner), wire))
        return found

    def describe(self) -> str:
        return "in " + " and ".join(
            f"{wire or 'float32'}" + ("" if axis is None else f" over {axis!r}")
            for axis, wire in self.wires
        )


# ---- The options that are dtypes.


# The dtypes that an option takes, and the words for them in an error.
_DTYPES = {
    "gather_dtype": (
        ("bfloat16", "float16", "float32", "float64"),
        "bfloat16, float16, float32 or float64, the dtype in which parameters are sent, or int8, "
        "int4 or float8_e4m3fn, in blocks that share a scale",
    ),
    "reduce_dtype": (
        ("bfloat16", "float32"),
        "bfloat16, float32 for gradients of 64 bits, int8, int4, float8_e4m3fn, a Quantized, or a "
        "dict of these by axis; float16 would make gradients below 6e-8 zero",
    ),
    "master_dtype": (
        ("float32", "float64"),
        "float32 or float64, the dtype in which weights of 16 bits are also kept",
    ),
}


def check_dtype(name: str, given: Any) -> Any:
    """Return the dtype that an option gives; ``None`` without one."""
    among, words = _DTYPES[name.removeprefix("outer_")]
    if given is None or _name_of(given) in among:
        return None if given is None else jnp.dtype(given)
    raise ArgumentError(f"{name} must be {words}; got {_check.shown(given)}.")


def check_reduce_dtype(
    given: Any, name: str = "reduce_dtype", *, by_axis: bool = True
) -> Plain | FewBits:
    """Return the aggregator that sums gradients as ``reduce_dtype`` says.

    Args:
      given: the argument.
      name: the name of the argument.
      by_axis: whether each axis may have a dtype of its own.

    Raises:
      ArgumentError: it is not such a dtype.
    """
    if not isinstance(given, Mapping):
        wire = _wire_of(given, name)
        return FewBits(((None, wire),)) if isinstance(wire, Quantized) else Plain(wire)
    if not by_axis:
        raise ArgumentError(f"{name} is one for all axes; got {_check.shown(given)}.")
    if not given or not all(isinstance(axis, str) for axis in given):
        raise ArgumentError(
            f"{name} as a dict has the names of shard axes, such as {{'host': 'int8'}}; got "
            f"{_check.shown(given)}."
        )
    return FewBits(tuple((axis, _wire_of(wire, name)) for axis, wire in given.items()))


def _wire_of(given: Any, name: str) -> Any:
    if isinstance(given, Quantized):
        return given
    dtype = _name_of(given)
    return Quantized(dtype) if dtype in DTYPES else check_dtype(name, given)


def _name_of(dtype: Any) -> str | None:
    # Not an array, which has a dtype but was probably meant for something else.
    if not isinstance(dtype, str | type | np.dtype):
        return None
    try:
        return str(jnp.dtype(dtype).name)
    except (TypeError, ValueError):  # a word that is not a dtype, or cannot be encoded
        return None


def check_gather_dtype(given: Any) -> Any:
    """Return the dtype in which parameters are sent, or the codec; ``None`` for their own.

    Raises:
      ArgumentError: it is not such a dtype.
    """
    name = _name_of(given)
    return Codec(name) if name in DTYPES else check_dtype("gather_dtype", given)


# ---- What a user's own stage or aggregator returns.


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
