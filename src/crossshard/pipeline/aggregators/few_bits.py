"""FewBits: gradients are sent in few bits, and what that loses is added to the next ones."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard._check import is_inexact
from crossshard.collectives.bucketing import bucketed_sum
from crossshard.collectives.codec import DTYPES, Codec
from crossshard.collectives.few_bits import Tier, sum_in_few_bits, takes_few_bits
from crossshard.collectives.sums import wide, widen
from crossshard.errors import ArgumentError, AxisError
from crossshard.pipeline.aggregators.aggregator import Aggregator, Peers, Summands
from crossshard.pipeline.stage import StageContext
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition
from crossshard.shards.groups import GroupAssignment


class Rounding(enum.StrEnum):
    """How a number is rounded to one of few bits.

    NEAREST: to the nearest.
    STOCHASTIC: up or down, at random, so that its mean stays.
    """

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclasses.dataclass(frozen=True)
class Quantized:
    """How gradients are sent in few bits, for ``reduce_dtype``.

    Blocks of 128 numbers, or of 64 with 4 bits, share a scale of 16 bits. Each shard rounds what it
    sends once, and gradients are added in float32. Arrays of fewer than 128 numbers for each shard
    are sent in float32.

    Attributes:
      dtype: ``"int8"``, ``"int4"`` or ``"float8_e4m3fn"``.
      rounding: ``"nearest"`` or ``"stochastic"``.
      error_feedback: whether what was lost is added to the shard's next gradient (Seide et al.
        2014; arXiv 1901.09847). It is kept in the state, one array per shard for each gradient.

    >>> Quantized("int4").dtype
    'int4'
    """

    dtype: str
    rounding: str = Rounding.NEAREST
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ArgumentError(
                f"Quantized takes {', '.join(DTYPES)}; got {_check.shown(self.dtype)}. For "
                f"bfloat16 write reduce_dtype='bfloat16'."
            )
        _check.choice("rounding", self.rounding, Rounding)
        _check.flag("error_feedback", self.error_feedback)

    def __str__(self) -> str:
        random = ", rounded at random" if self.is_random else ""
        feedback = " with error feedback" if self.error_feedback else ""
        return f"{self.dtype}{random}{feedback}"

    @property
    def is_random(self) -> bool:
        """Whether it rounds at random."""
        return self.rounding == Rounding.STOCHASTIC

    def codec(self) -> Codec:
        """What writes the numbers."""
        return Codec(self.dtype, self.is_random)


class FewBitsState(NamedTuple):
    """What one shard keeps.

    Attributes:
      residual: for each gradient what was not sent of it yet; ``()`` without error feedback. Its
        sum over the shards is what the mean, or the sum, still lacks. What is not finite in it,
        as after a flipped bit, counts as 0.
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


@dataclasses.dataclass(frozen=True)
class FewBits(Aggregator):
    """The sum of gradients that are sent in few bits.

    Attributes:
      wires: how they are sent along each axis, the last one first: a ``Quantized``, a dtype, or
        ``None`` for float32. One without an axis is for all of them.
    """

    wires: tuple[tuple[str | None, Any], ...]

    @property
    def _quantized(self) -> list[Quantized]:
        return [wire for _, wire in self.wires if isinstance(wire, Quantized)]

    @property
    def _is_random(self) -> bool:
        return any(wire.is_random for wire in self._quantized)

    @property
    def _feeds_back(self) -> bool:
        return any(wire.error_feedback for wire in self._quantized)

    def init(self, params: PyTree) -> FewBitsState:
        """Nothing is held back yet."""
        is_held = lambda x: is_inexact(x) and not jnp.iscomplexobj(x)
        zeros = lambda x: jnp.zeros(jnp.shape(x), wide(jnp.result_type(x))) if is_held(x) else None
        return FewBitsState(
            jax.tree.map(zeros, params) if self._feeds_back else (),
            jnp.int32(0) if self._is_random else (),
        )

    def sum(self, values: PyTree, state: FewBitsState, peers: Peers) -> tuple[PyTree, FewBitsState]:
        """The sums in full, and what was not sent."""
        leaves, tree = jax.tree.flatten(self._with_held(values, state))
        wholes = [Partition(jnp.shape(x)) for x in leaves]
        sums, lost = self._sent(leaves, wholes, [*range(len(leaves))], state, peers.shards)
        return tree.unflatten(sums), self._after(tree.unflatten(lost), state)

    def reduce(
        self, summands: Summands, state: FewBitsState, context: StageContext
    ) -> tuple[list[jax.Array], FewBitsState]:
        """The slices of the sums, and what was not sent."""
        sent = context.arrays.to_owners(self._with_held(summands.gradients, state))
        leaves, tree = jax.tree.flatten(sent)
        arrays = [
            x if place is None else leaves[place]
            for x, place in zip(summands.arrays, summands.places, strict=True)
        ]
        shards = context.shards.within(context.groups)
        sums, kept = self._sent(arrays, summands.partitions, summands.places, state, shards)
        lost = [jnp.zeros_like(x) for x in leaves]
        for place, x in zip(summands.places, kept, strict=True):
            if place is not None:
                lost[place] = x
        return sums, self._after(context.arrays.from_owners(tree.unflatten(lost)), state)

    def change_held(self, state: FewBitsState, change: Callable[[PyTree], PyTree]) -> FewBitsState:
        """The state with other residuals."""
        return state._replace(residual=change(state.residual)) if self._feeds_back else state

    def _with_held(self, values: PyTree, state: FewBitsState) -> PyTree:
        """The values with what was not sent of those before them."""
        if not self._feeds_back:
            return values
        # A flipped bit may make it NaN, and each later gradient would be so, too.
        known = lambda held: jnp.where(jnp.isfinite(held), held, 0)
        add = lambda held, x: x if held is None else widen(x) + known(held)
        return jax.tree.map(add, state.residual, values, is_leaf=lambda x: x is None)

    def _sent(
        self,
        arrays: Sequence[jax.Array],
        partitions: Sequence[Partition],
        places: Sequence[int | None],
        state: FewBitsState,
        shards: Shards,
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """This shard's slice of each sum, and what was not sent of each array."""
        few = [
            place is not None and takes_few_bits(x, shards)
            for x, place in zip(arrays, places, strict=True)
        ]
        of = lambda items, kind: [x for x, is_few in zip(items, few, strict=True) if is_few is kind]
        tiers = self._tiers(shards)
        key = None
        if self._is_random:
            # All runs draw the same numbers.
            key = jax.random.fold_in(jax.random.key(0), state.count)
        sent = sum_in_few_bits(of(arrays, True), of(partitions, True), tiers, shards, key)
        whole = [widen(x) for x in of(arrays, False)]
        others = bucketed_sum(whole, of(partitions, False), shards)
        sums, lost = ([iter(sent.sums), iter(others)], iter(sent.lost))
        found = [next(sums[not is_few]) for is_few in few]
        kept = [
            next(lost) if is_few else jnp.zeros_like(x)
            for x, is_few in zip(arrays, few, strict=True)
        ]
        return found, kept

    def _after(self, lost: PyTree, state: FewBitsState) -> FewBitsState:
        residual = state.residual
        if self._feeds_back:
            keep = lambda held, x: None if held is None else x
            residual = jax.tree.map(keep, residual, lost, is_leaf=lambda x: x is None)
        count = optax.safe_increment(state.count) if self._is_random else ()
        return FewBitsState(residual, count)

    def check_axes(self, axes: Sequence[str], groups: GroupAssignment | None) -> None:
        """Raise unless the shards have these axes, over all of which they sum.

        Raises:
          AxisError: an axis is none of the shards'.
          ArgumentError: there are groups.
        """
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
        """Who sends how, inner ones first; neighbours that send alike are one tier."""
        self.check_axes(shards.axes, shards.groups)
        wires = dict(self.wires)
        if None in wires:
            return [_tier((), wires[None])]
        found: list[Tier] = []
        for axis in reversed(shards.axes):
            own = _tier((axis,), wires.get(axis))
            if found and found[-1][1:] == own[1:]:
                own = own._replace(axes=(axis, *found.pop().axes))
            found.append(own)
        return found

    def describe(self) -> str:
        """The wires."""
        return "in " + " and ".join(
            f"{wire or 'float32'}" + ("" if axis is None else f" over {axis!r}")
            for axis, wire in self.wires
        )


def _tier(axes: tuple[str, ...], wire: Any) -> Tier:
    is_quantized = isinstance(wire, Quantized)
    return Tier(axes, wire.codec() if is_quantized else wire, is_quantized and wire.error_feedback)
