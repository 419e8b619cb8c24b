"""Few bits: sums over the shards that are sent in few bits, tier by tier, and what they lose."""

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from crossshard import _check
from crossshard.collectives.sums import (
    exchange,
    gather_slices,
    on_blocks,
    send_gathered,
    send_scattered,
)
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition

# For each dtype its bits, and how many elements share a scale.
_KINDS = {"int8": (8, 128), "int4": (4, 64), "float8_e4m3fn": (8, 128)}
DTYPES = tuple(_KINDS)
# Numbers lie in rows of this length, the lanes of a TPU: to make one long row of a matrix is slow
# on a TPU, and takes its compiler minutes.
LANES = 128
# The largest number of float8_e4m3fn, its spacing next to zero, and its bits behind the point.
_TOP, _TINY, _FRACTION = 448.0, 2.0**-9, 3


@dataclasses.dataclass(frozen=True)
class Codec:
    """Encodes numbers in blocks of 128, or 64, each with a scale of 16 bits, and decodes them.

    A decoded number is exactly a product of two short ones, so that what was lost of it,
    ``x - decode(encode(x))``, is exact in float32 if it was rounded to the nearest.

    >>> codec, x = Codec("int8"), jnp.linspace(0, 127, 256).reshape(2, 128)
    >>> coded = codec.encode(x, codec.scales(x))
    >>> float(abs(codec.decode(coded, 2) - x).max()) <= 0.5
    True
    """

    dtype: str  # ``"int8"``, ``"int4"`` or ``"float8_e4m3fn"``
    # Whether a number is rounded up with the probability that keeps its mean; if not, it is rounded
    # to the nearest.
    stochastic: bool = False

    def __str__(self) -> str:
        return self.dtype

    @property
    def _bits(self) -> int:
        return _KINDS[self.dtype][0]

    @property
    def _scales(self) -> int:
        """The number of scales of a row."""
        return LANES // _KINDS[self.dtype][1]

    def noise(self, x: jax.Array, key: jax.Array | None) -> jax.Array | None:
        """Return what is added to each number, before it is rounded; ``None`` without a key."""
        if not self.stochastic:
            return None
        assert key is not None
        return jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.float32) / (1 << 16)

    def rounded(
        self, x: Float[Array, "*shape"], scale: Float[Array, "*shape"], noise: jax.Array | None
    ) -> Float[Array, "*shape"]:
        """Return numbers as they are decoded, float32, given their scales, and the noise."""
        return self._codes(x, scale, noise).astype(jnp.float32) * scale.astype(jnp.float32)

    def encode(
        self,
        x: Float[Array, "*shape rows 128"],
        scales: Float[Array, "*shape rows scales"],
        noise: jax.Array | None = None,
    ) -> UInt8[Array, "*shape coded 128"]:
        """Encode numbers as bytes.

        Args:
          x: the numbers, in rows.
          scales: what ``scales`` returns.
          noise: what ``noise`` returns, to round stochastically.
        """
        codes = self._codes(x, self.of_each(scales), noise)
        # Rows fill bytes, and their scales rows.
        even = [*[(0, 0)] * (x.ndim - 2), (0, x.shape[-2] % 2), (0, 0)]
        scales, codes = jnp.pad(scales, even), jnp.pad(codes, even)
        bits = lax.bitcast_convert_type(scales, jnp.uint16).reshape(*x.shape[:-2], -1)
        filled = [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % LANES)]
        bits = jnp.pad(bits, filled).reshape(*x.shape[:-2], -1, LANES)
        # The low bytes of all scales, and then the high ones.
        halves = [half.astype(jnp.uint8) for half in (bits & 255, bits >> 8)]
        return jnp.concatenate([self._bytes_of(codes), *halves], -2)

    def decode(
        self, coded: UInt8[Array, "*shape coded 128"], rows: int
    ) -> Float[Array, "*shape {rows} 128"]:
        """Decode the numbers as float32, given the number of their rows."""
        even = rows + rows % 2
        of_numbers = even * self._bits // 8
        numbers, low, high = jnp.split(
            coded, [of_numbers, (of_numbers + coded.shape[-2]) // 2], axis=-2
        )
        bits = low.astype(jnp.uint16) | (high.astype(jnp.uint16) << 8)
        flat = bits.reshape(*coded.shape[:-2], -1)[..., : even * self._scales]
        scales = lax.bitcast_convert_type(flat, jnp.bfloat16)
        of_each = self.of_each(scales.reshape(*coded.shape[:-2], even, self._scales))
        codes = self._codes_of(numbers).astype(jnp.float32)
        return (codes * of_each.astype(jnp.float32))[..., :rows, :]

    def scales(self, x: Float[Array, "*shape rows 128"]) -> Float[Array, "*shape rows scales"]:
        """Return the scale of each block, in bfloat16, so that its numbers fit."""
        x = x.astype(jnp.float32)
        above, below = self._largest_of(x), self._largest_of(-x)
        larger, smaller = jnp.maximum(above, below), jnp.minimum(above, below)
        if self.dtype == "float8_e4m3fn":
            size, sign = larger / _TOP, jnp.bfloat16(1)
        else:
            # There is one more negative number than positive ones, so the larger end is written as
            # negative, and exactly. The other end may be rounded by half a unit, as any number.
            most = 1 << (self._bits - 1)
            half = 0 if self.stochastic else 0.5
            size = jnp.maximum(larger / most, smaller / (most - 1 + half))
            sign = jnp.where(above > below, -1, 1).astype(jnp.bfloat16)
        # XLA for CPUs ignores NaN in a maximum.
        finite = self._largest_of(jnp.where(jnp.isfinite(x), 0.0, 1.0)) == 0
        return sign * _up_to_16_bits(jnp.where(finite, size, jnp.nan))

    def _largest_of(self, x: jax.Array) -> jax.Array:
        """Return the largest number of each block, ``[…, rows, scales]``."""
        number = self._scales
        if number == 1:
            return x.max(-1, keepdims=True)

        def of_lanes(x: jax.Array) -> jax.Array:
            block = jnp.arange(LANES) * number // LANES
            own = [jnp.where(block == nth, x, -jnp.inf).max(-1) for nth in range(number)]
            return jnp.stack(own, -1)

        def of_blocks(x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:-1], number, -1).max(-1)

        # On a TPU, shorter rows would not fill its lanes.
        found: jax.Array = lax.platform_dependent(x, tpu=of_lanes, default=of_blocks)
        return found

    def of_each(self, scales: jax.Array) -> jax.Array:
        """Return the scale of each number, ``[…, rows, 128]``."""
        block = jnp.arange(LANES) * self._scales // LANES
        found = jnp.broadcast_to(scales[..., :1], (*scales.shape[:-1], LANES))
        for nth in range(1, self._scales):
            found = jnp.where(block == nth, scales[..., nth : nth + 1], found)
        return found

    def _codes(self, x: jax.Array, scale: jax.Array, noise: jax.Array | None) -> jax.Array:
        """Return the code of each number: int8 or float8."""
        scale = scale.astype(jnp.float32)
        ratio = x.astype(jnp.float32) / jnp.where(scale == 0, 1, scale)
        if noise is not None:
            ratio = self._neighbour(ratio, noise)
        # A quotient may be rounded to a little more than the largest number.
        if self.dtype == "float8_e4m3fn":
            return jnp.clip(ratio, -_TOP, _TOP).astype(jnp.float8_e4m3fn)
        most = 1 << (self._bits - 1)
        return jnp.clip(jnp.round(ratio), -most, most - 1).astype(jnp.int8)

    def _neighbour(self, ratio: jax.Array, noise: jax.Array) -> jax.Array:
        """Return the ratio, rounded to one of its two neighbours."""
        if self.dtype != "float8_e4m3fn":
            return jnp.floor(ratio + noise)
        _, exponent = jnp.frexp(ratio)
        step = jnp.maximum(jnp.exp2((exponent - 1 - _FRACTION).astype(jnp.float32)), _TINY)
        return jnp.floor(ratio / step + noise) * step

    def _bytes_of(self, codes: jax.Array) -> jax.Array:
        each = lax.bitcast_convert_type(codes, jnp.uint8)
        if self.dtype != "int4":
            return each
        # Two rows share the bytes of one.
        low, high = jnp.split(each, 2, -2)
        return (low & 15) | (high << 4)

    def _codes_of(self, numbers: jax.Array) -> jax.Array:
        if self.dtype == "float8_e4m3fn":
            return lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn)
        codes = lax.bitcast_convert_type(numbers, jnp.int8)
        if self.dtype == "int8":
            return codes
        # A right shift of a signed number repeats its sign.
        return jnp.concatenate([(codes << 4) >> 4, codes >> 4], -2)


def _up_to_16_bits(x: jax.Array) -> jax.Array:
    """Round positive numbers up to bfloat16; NaN and infinity stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    up = lax.bitcast_convert_type(((bits + 0xFFFF) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), up, x.astype(jnp.bfloat16))


# ---- Sums over the shards.


# The ``error_feedback`` that keeps what was lost in 16 bits.
_IN_16_BITS = "bfloat16"
# Arrays of at least this many rows on each shard have a collective of their own.
_MANY = 512


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
        2014; arXiv 1901.09847). It is kept in the state, one array per shard for each gradient, in
        float32; with ``"bfloat16"`` in half the memory, rounded to 16 bits.

    >>> Quantized("int4").dtype
    'int4'
    """

    dtype: str
    rounding: str = Rounding.NEAREST
    error_feedback: bool | str = True

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ArgumentError(
                f"Quantized takes {', '.join(DTYPES)}; got {_check.shown(self.dtype)}. For "
                f"bfloat16 write reduce_dtype='bfloat16'."
            )
        _check.choice("rounding", self.rounding, Rounding)
        kind = self.error_feedback
        if not isinstance(kind, bool) and not (isinstance(kind, str) and kind == _IN_16_BITS):
            raise ArgumentTypeError(
                f"error_feedback must be True, which keeps float32, 'bfloat16' or False; got "
                f"{_check.shown(self.error_feedback)}."
            )

    def __str__(self) -> str:
        random = ", rounded at random" if self.is_random else ""
        feedback = " with error feedback" if self.error_feedback else ""
        of_16_bits = " in bfloat16" if self.keeps_16_bits else ""
        return f"{self.dtype}{random}{feedback}{of_16_bits}"

    @property
    def is_random(self) -> bool:
        """Whether it rounds at random."""
        return self.rounding == Rounding.STOCHASTIC

    @property
    def keeps_16_bits(self) -> bool:
        """Whether what was lost is kept in 16 bits."""
        return self.error_feedback == _IN_16_BITS

    def codec(self) -> Codec:
        """Return the codec that writes the numbers."""
        return Codec(self.dtype, self.is_random)


# The axes along which shards send in one way, or no axes for all of them; and how they send: as a
# ``Quantized`` says, in a dtype, or, if it is ``None``, as the numbers are.
Tier = tuple[tuple[str, ...], Any]


def takes_few_bits(x: Any, shards: Shards) -> bool:
    """Return whether an array fills blocks; smaller ones are sent as they are."""
    return shards.group_size > 1 and jnp.isrealobj(x) and x.size >= shards.group_size * LANES


def sum_in_few_bits(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    shards: Shards,
    key: jax.Array | None,
    tiers: Sequence[Tier],
    *,
    at_once: bool = False,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return this shard's slice of the sum of each array, and what was not sent of the array.

    Sums are over the shards, or over the groups, and float32. A sum, and the sum over the shards of
    what was not sent, add up to the exact sum.

    Each shard encodes what it sends once, and adds what it receives in float32. Sums that every
    shard gets in full are encoded once more, by the shard that has added a slice of them.

    Args:
      xs: floating arrays of this shard; one may have another shape than its partition.
      partitions: the partition of each.
      shards: the shards; groups have one tier.
      key: a PRNG key, the same on all shards, to round stochastically; else ``None``.
      tiers: how shards send along which axes, inner tiers first.
      at_once: whether what is not sent is computed beside what is, so that nothing waits for it.
        Otherwise it is in an array's own shape, which reads and writes less.
    """
    pairs = list(zip(xs, partitions, strict=True))
    if shards.other_axes:
        run = functools.partial(sum_in_few_bits, tiers=tiers, at_once=at_once)
        both = lambda specs: (specs, specs)
        given = [x.reshape(each.shape) for x, each in pairs]
        sums, lost = on_blocks(run, given, partitions, shards, key, out_specs=both)
        return sums, [x.reshape(each.shape) for x, each in zip(lost, xs, strict=True)]
    rows = [_as_rows(x.reshape(each.shape), each, shards.group_size) for x, each in pairs]
    buckets: dict[Any, list[int]] = {}
    for at, (row, partition) in enumerate(zip(rows, partitions, strict=True)):
        alone = row.shape[1] >= _MANY
        buckets.setdefault((partition.number, at if alone else None), []).append(at)
    sums, lost = list(map(jnp.asarray, xs)), list(map(jnp.zeros_like, xs))
    for nth, places in enumerate(buckets.values()):
        own = None if key is None else jax.random.fold_in(key, nth)
        tiered = _TieredSum(tiers, shards, own, at_once)
        total, missing = tiered.scatter(jnp.concatenate([rows[at] for at in places], 1))
        whole = partitions[places[0]].number == 1
        if whole:
            total, kept = tiered.gather(total)
            if kept is not None:
                here = shards.index_in_group()
                missing = missing.and_then(jnp.zeros_like(total).at[here].set(kept))
        ends = list(itertools.accumulate(rows[at].shape[1] for at in places))
        for at, start, end in zip(places, [0, *ends], ends, strict=False):
            x, partition = xs[at], partitions[at]
            cut = functools.partial(lax.slice_in_dim, start_index=start, limit_index=end, axis=-2)
            native = functools.partial(_from_rows, partition=partition, shape=x.shape)
            lost[at] = jax.tree.map(native, jax.tree.map(cut, missing)).of(x)
            if whole:
                sums[at] = _from_rows(cut(total), partition, partition.shape)
            else:
                sums[at] = _from_lanes(cut(total)[None], partition.local_shape)[0]
    return sums, lost


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["scale", "noise", "more"], meta_fields=["codec"]
)
@dataclasses.dataclass(frozen=True)
class _Missing:
    """What was not sent of numbers: in rows, or in an array's own shape.

    What rounding loses is computed in an array's own shape. XLA for GPUs reads a residual and
    updates it in place in one kernel, if all that is between is elementwise.
    """

    codec: Codec | None = None  # what has rounded the numbers; ``None`` if that loses nothing
    scale: Any = None  # the scale of each number, and its noise
    noise: Any = None
    more: Any = None  # what was lost after that; ``None`` for nothing

    def and_then(self, lost: jax.Array) -> "_Missing":
        """Return this, and what was lost later."""
        return dataclasses.replace(self, more=lost if self.more is None else self.more + lost)

    def of(self, x: jax.Array) -> jax.Array:
        """Return what was not sent of an array."""
        lost = jnp.zeros_like(x)
        if self.codec is not None:
            lost = x - self.codec.rounded(x, self.scale, self.noise).astype(x.dtype)
        return lost if self.more is None else lost + self.more


def gather_in_few_bits(
    part: jax.Array,
    partition: Partition,
    codec: Codec,
    shards: Shards,
) -> jax.Array:
    """Gather an array in full, as it is decoded, from the slices of all shards, or of the group."""
    if shards.other_axes:
        of_block = lambda xs, blocks, device: [gather_in_few_bits(xs[0], blocks[0], codec, device)]
        return jnp.asarray(on_blocks(of_block, [part], [partition], shards)[0])
    row = _in_lanes(part[None])
    coded = codec.encode(row, codec.scales(row))
    found = codec.decode(gather_slices(coded, 0, shards), row.shape[1])
    return _from_rows(found.astype(part.dtype), partition, partition.shape)


@dataclasses.dataclass(frozen=True)
class _TieredSum:
    """A sum of ``[shards, rows, 128]``, with rows for each shard, tier by tier."""

    tiers: Sequence[Tier]
    shards: Shards
    key: jax.Array | None
    at_once: bool = False  # as in ``sum_in_few_bits``

    @property
    def _of_tiers(self) -> list[tuple[Any, Shards]]:
        """How each tier sends, with its shards."""
        found = []
        for axes, wire in self.tiers:
            axes = axes or self.shards.axes
            own = self.shards
            if axes != own.axes:
                own = dataclasses.replace(
                    own,
                    num_shards=math.prod(map(lax.axis_size, axes)),
                    axes=axes,
                    torus_factors=(),
                    slices=1,
                )
            found.append((wire, own))
        return found

    def scatter(self, x: jax.Array) -> tuple[jax.Array, _Missing]:
        """Return the sum of this shard's rows, ``[rows, 128]``, and what was not sent of ``x``."""
        ways, missing = self._of_tiers, _Missing()
        sizes = [own.group_size for _, own in reversed(ways)]
        x = x.reshape(*sizes, *x.shape[1:])
        for nth, (wire, own) in enumerate(ways):
            # The axes of the tiers that are left come first, that of this tier last of them.
            x = jnp.moveaxis(x, len(sizes) - 1 - nth, 0)
            if not isinstance(wire, Quantized):
                sent = x if wire is None else x.astype(wire)
                x = send_scattered(sent, 0, own)[0].astype(x.dtype)
                continue
            codec = wire.codec()
            noise = codec.noise(x, self._key_of(nth, self.shards))
            scales = codec.scales(x)
            coded = codec.encode(x, scales, noise)
            if wire.error_feedback:
                # A residual is replaced only after all that reads it, or XLA may copy it.
                scales, coded = lax.optimization_barrier((scales, coded))
                lost = _Missing(codec, codec.of_each(scales), noise)
                spread = functools.partial(self._spread, inner=ways[:nth])
                if nth or self.at_once:
                    missing = missing.and_then(spread(lost.of(x)))
                else:
                    missing = jax.tree.map(spread, lost)
            total = codec.decode(exchange(coded, 0, own)[:, 0], x.shape[-2]).sum(0)
            x = total.astype(x.dtype)
        return x, missing

    def gather(self, part: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Gather the rows of all shards, ``[shards, rows, 128]``; also return what was not sent."""
        x, ways, kept = part, self._of_tiers, None
        for nth, (wire, own) in reversed(list(enumerate(ways))):
            if not isinstance(wire, Quantized):
                sent = (x if wire is None else x.astype(wire))[None]
                x = send_gathered(sent, 0, own).astype(part.dtype)
            else:
                # Other shards along the outer tiers have the same rows, and must round them alike.
                those, codec = [each for _, each in ways[: nth + 1]], wire.codec()
                noise = codec.noise(x, self._key_of(nth + len(ways), *those))
                scales = codec.scales(x)
                coded = codec.encode(x, scales, noise)
                if wire.error_feedback:
                    lost = _Missing(codec, codec.of_each(scales), noise).of(x)
                    lost = self._own_rows(lost, ways[nth + 1 :])
                    kept = lost if kept is None else kept + lost
                x = codec.decode(gather_slices(coded[None], 0, own), x.shape[-2])
                x = x.astype(part.dtype)
            # The axes of the outer tiers are the major ones.
            x = jnp.moveaxis(x, 0, -3)
        return x.reshape(-1, *part.shape), kept

    @staticmethod
    def _spread(missing: jax.Array, inner: Sequence[tuple[Any, Shards]]) -> jax.Array:
        """Return ``[shards, rows, 128]``, zero but for the sums of this shard in inner tiers."""
        missing = jnp.moveaxis(missing, 0, -3)
        for _, own in reversed(inner):
            is_own = jnp.arange(own.num_shards) == own.index()
            missing = jnp.where(is_own[:, None, None], missing[..., None, :, :], 0)
        return missing.reshape(-1, *missing.shape[-2:])

    @staticmethod
    def _own_rows(x: jax.Array, outer: Sequence[tuple[Any, Shards]]) -> jax.Array:
        """Return this shard's of the rows of the outer tiers, ``[rows, 128]``."""
        for _, own in reversed(outer):
            x = lax.dynamic_index_in_dim(x, own.index(), 0, keepdims=False)
        return x

    def _key_of(self, nth: int, *those: Shards) -> jax.Array | None:
        """Return the key of what is sent, another for each place among ``those`` shards."""
        if self.key is None:
            return None
        key = jax.random.fold_in(self.key, nth)
        for shards in those:
            # Shards with the same place in their groups may send the same.
            key = jax.random.fold_in(key, shards.index_in_group())
        return key


def _as_rows(x: jax.Array, partition: Partition, number: int) -> jax.Array:
    """Return the slice of each shard, or an equal part for each, ``[shards, rows, 128]``."""
    if partition.number == 1:
        missing = -x.size % (number * LANES)
        filled = jnp.pad(jnp.ravel(x), (0, missing)) if missing else x
        return filled.reshape(number, -1, LANES)
    return _in_lanes(partition.slices(x))


def _from_rows(rows: jax.Array, partition: Partition, shape: tuple[int, ...]) -> jax.Array:
    """Undo ``_as_rows``, and return the array in this shape."""
    size = math.prod(partition.shape)
    if partition.number == 1:
        return (rows if rows.size == size else rows.ravel()[:size]).reshape(shape)
    return partition.joined(_from_lanes(rows, partition.local_shape)).reshape(shape)


def _in_lanes(x: jax.Array) -> jax.Array:
    """Return the elements of each of ``[shards, …]``, filled up, as ``[shards, rows, 128]``."""
    if math.prod(x.shape[1:]) % LANES:
        x = x.reshape(len(x), -1)
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES)))
    return x.reshape(len(x), -1, LANES)


def _from_lanes(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo ``_in_lanes``; return ``[shards, …]``."""
    size = math.prod(shape)
    if rows[0].size != size:
        rows = rows.reshape(len(rows), -1)[:, :size]
    return rows.reshape(len(rows), *shape)
