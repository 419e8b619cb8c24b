"""FewBits: the sum of gradients that are sent in few bits; what is lost is added to the next."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard._check import is_inexact
from crossshard.collectives.few_bits import (
    DTYPES,
    Quantized,
    Tier,
    sum_in_few_bits,
    takes_few_bits,
)
from crossshard.collectives.sums import (
    bucketed_sum,
    wide,
    widen,
)
from crossshard.errors import ArgumentError, AxisError
from crossshard.pipeline.aggregator import (
    BySlices,
    Plain,
    Sent,
    sum_by_xla,
)
from crossshard.pipeline.stage import StageContext
from crossshard.shards.axes import GroupAssignment, Shards
from crossshard.shards.cut import Partition


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


def _widened(x: Sent) -> Sent:
    """Return a gradient, or what a stage sums beside it, in the dtype in which it is summed."""
    return x._replace(array=widen(x.array)) if is_inexact(x.array) else x


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
        before = self.residuals(state, tree) or [None] * len(own)
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
        wide = [_widened(x) for x, is_sent in pairs if not is_sent]
        sums = {True: iter(of_few), False: sum_by_xla(wide, shards)}
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

    def residuals(self, state: FewBitsState, tree: Any) -> list[Any] | None:
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


# The dtypes of 16 bits or more in which gradients are sent, and what to say of others.
_WIDER = "bfloat16", "float32"
_WORDS = (
    "bfloat16, float32 for gradients of 64 bits, int8, int4, float8_e4m3fn, a Quantized, or a dict "
    "of these by axis; float16 would make gradients below 6e-8 zero"
)


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
    dtype = _check.dtype_name(given)
    return Quantized(dtype) if dtype in DTYPES else _check.dtype(name, given, _WIDER, _WORDS)
