"""Few bits: sums over the shards that are sent in few bits, tier by tier, and what they lose."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from crossshard.collectives.codec import WIDTH, Codec
from crossshard.collectives.scatter import exchange, gather_parts
from crossshard.collectives.wire import send_gathered, send_scattered
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment, size_of_group
from crossshard.shards.partition import Partition, slice_index


class Tier(NamedTuple):
    """Shards that send to each other in one way: those along some of the axes.

    Attributes:
      axes: their axes; empty for all of them.
      wire: how numbers are sent: by a codec, in a dtype, or, if ``None``, as they are.
      feeds_back: whether what the codec loses is to be returned.
    """

    axes: tuple[str, ...]
    wire: Any
    feeds_back: bool = False


class Sent(NamedTuple):
    """What has been summed.

    Attributes:
      sums: this shard's slice of each sum, float32.
      lost: for each array what of this shard's was not sent, so that the sum over the shards of
        this and of ``sums`` is exact.
    """

    sums: list[jax.Array]
    lost: list[jax.Array]


def takes_few_bits(x: Any, shards: Shards, groups: GroupAssignment | None) -> bool:
    """Whether an array fills blocks; smaller ones are sent as they are."""
    number = size_of_group(groups, shards.number)
    return number > 1 and jnp.isrealobj(x) and x.size >= number * WIDTH


def sum_in_few_bits(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    tiers: Sequence[Tier],
    shards: Shards,
    groups: GroupAssignment | None = None,
    key: jax.Array | None = None,
) -> Sent:
    """This shard's slice of the sum of each array over the shards, or the groups.

    Each shard writes what it sends once, and adds what it receives in float32. Sums that every
    shard gets whole are written once more, by the shard that has added a slice of them.

    Args:
      xs: floating arrays of this shard.
      partitions: the partition of each.
      tiers: who sends how, inner ones first.
      shards: the shards.
      groups: the groups that reduce independently; they have one tier.
      key: a PRNG key of this shard, to round stochastically.
    """
    if not shards.other_axes:
        return _sum(xs, partitions, tiers, shards, groups, key)
    sizes = jax.sharding.get_abstract_mesh().shape
    blocks = [partition.of_block(sizes) for partition in partitions]
    specs = [partition.other_axes for partition in partitions]
    of_device = dataclasses.replace(shards, other_axes=())
    run = jax.shard_map(
        lambda xs, key: tuple(_sum(xs, blocks, tiers, of_device, groups, key)),
        axis_names=frozenset(shards.other_axes),
        in_specs=(specs, PartitionSpec()),
        out_specs=(specs, specs),
        check_vma=False,
    )
    return Sent(*run(list(xs), key))


def gather_in_few_bits(
    part: jax.Array,
    partition: Partition,
    codec: Codec,
    shards: Shards,
    groups: GroupAssignment | None = None,
) -> jax.Array:
    """An array in full, from the slices of all shards, or of the group, as they are read."""
    if shards.other_axes:
        block = partition.of_block(jax.sharding.get_abstract_mesh().shape)
        of_device = dataclasses.replace(shards, other_axes=())
        run = jax.shard_map(
            lambda part: gather_in_few_bits(part, block, codec, of_device, groups),
            axis_names=frozenset(shards.other_axes),
            in_specs=(partition.other_axes,),
            out_specs=partition.other_axes,
            check_vma=False,
        )
        return jnp.asarray(run(part))
    row = jnp.pad(part.ravel(), (0, -part.size % WIDTH))
    rows = codec.decode(gather_parts(codec.encode(row)[None], 0, shards, groups))
    return _from_rows(rows.astype(part.dtype), partition, partition.shape)


def _sum(
    xs: Sequence[jax.Array],
    partitions: Sequence[Partition],
    tiers: Sequence[Tier],
    shards: Shards,
    groups: GroupAssignment | None,
    key: jax.Array | None,
) -> Sent:
    number = size_of_group(groups, shards.number)
    buckets: dict[Any, list[int]] = {}
    for at, partition in enumerate(partitions):
        kind = partition.number if partition.is_small else None
        buckets.setdefault((kind, at if kind is None else 0), []).append(at)
    sums, lost = list(map(jnp.asarray, xs)), list(map(jnp.asarray, xs))
    for nth, places in enumerate(buckets.values()):
        whole = partitions[places[0]].number == 1
        own = None if key is None else jax.random.fold_in(key, nth)
        way = _Way(tiers, shards, groups, own)
        rows = [_as_rows(xs[at], partitions[at], number) for at in places]
        total, missing = way.scatter(jnp.concatenate(rows, 1))
        if whole:
            total, kept = way.gather(total)
            missing = missing.at[slice_index(shards, groups)].add(kept)
        ends = [sum(row.shape[1] for row in rows[: n + 1]) for n in range(len(rows) - 1)]
        for at, of_sum, of_lost in zip(
            places, jnp.split(total, ends, -1), jnp.split(missing, ends, -1), strict=True
        ):
            lost[at] = _from_rows(of_lost, partitions[at], xs[at].shape)
            sums[at] = (
                _from_rows(of_sum, partitions[at], xs[at].shape)
                if whole
                else _slice_of_rows(of_sum, partitions[at])
            )
    return Sent(sums, lost)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How rows, one for each shard, are summed: ``[shards, width]`` of whole blocks.

    Attributes:
      tiers, shards, groups, key: as for ``sum_in_few_bits``.
    """

    tiers: Sequence[Tier]
    shards: Shards
    groups: GroupAssignment | None
    key: jax.Array | None

    @property
    def _of_tiers(self) -> list[tuple[Tier, Shards]]:
        """Each tier with its shards."""
        found = []
        for tier in self.tiers:
            axes = tier.axes or self.shards.axes
            own = dataclasses.replace(
                self.shards,
                number=self._size(axes),
                axes=axes,
                torus_factors=self.shards.torus_factors if axes == self.shards.axes else (),
            )
            found.append((tier, own))
        return found

    def _size(self, axes: tuple[str, ...]) -> int:
        if axes == self.shards.axes:
            return self.shards.number
        return math.prod(lax.axis_size(axis) for axis in axes)

    def scatter(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``[width]``: the sum of this shard's row; and what of ``rows`` was not sent."""
        ways = self._of_tiers
        sizes = [size_of_group(self.groups, own.number) for _, own in reversed(ways)]
        lost = jnp.zeros_like(rows)
        x = rows.reshape(*sizes, -1)
        for nth, (tier, own) in enumerate(ways):
            # Those of the tiers that are left, of which this one is the last.
            x = jnp.moveaxis(x, len(sizes) - 1 - nth, 0)
            x, missing = self._scattered(x, tier, own, nth)
            if tier.feeds_back and missing is not None:
                lost += self._spread(jnp.moveaxis(missing, 0, -2), ways[:nth])
        return x, lost

    def _scattered(
        self, x: jax.Array, tier: Tier, own: Shards, nth: int
    ) -> tuple[jax.Array, jax.Array | None]:
        """The sum of this shard's of ``[shards, …]`` over a tier; and what was not sent."""
        codec = tier.wire
        if not isinstance(codec, Codec):
            sent = x if codec is None else x.astype(codec)
            return send_scattered(sent, 0, own, self.groups)[0].astype(x.dtype), None
        coded = codec.encode(x, self._key_of(nth))
        received = exchange(coded, 0, own, self.groups)[:, 0]
        total = codec.decode(received).sum(0)
        return total.astype(x.dtype), x - codec.decode(coded).astype(x.dtype)

    def gather(self, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``[shards, width]``: the rows of all shards, and what of this one's was not sent."""
        ways, kept = self._of_tiers, jnp.zeros_like(part)
        x = part
        for nth, (tier, own) in reversed(list(enumerate(ways))):
            codec = tier.wire
            if not isinstance(codec, Codec):
                sent = (x if codec is None else x.astype(codec))[None]
                x = send_gathered(sent, 0, own, self.groups).astype(part.dtype)
            else:
                coded = codec.encode(x, self._key_of(nth + len(ways)))
                missing = x - codec.decode(coded).astype(x.dtype)
                # The others along the outer tiers send the same.
                kept += self._own_row(missing, ways[nth + 1 :]) if tier.feeds_back else 0
                x = codec.decode(gather_parts(coded[None], 0, own, self.groups)).astype(x.dtype)
            # Major axes first: those of the outer tiers.
            x = jnp.moveaxis(x, 0, -2)
        return x.reshape(-1, part.shape[-1]), kept

    def _spread(self, missing: jax.Array, inner: Sequence[tuple[Tier, Shards]]) -> jax.Array:
        """``[shards, width]``: zeros, but for what this shard has added up of inner tiers."""
        for _, own in reversed(inner):
            row = jnp.arange(own.number) == own.index()
            missing = jnp.where(row[:, None], missing[..., None, :], 0)
        return missing.reshape(-1, missing.shape[-1])

    @staticmethod
    def _own_row(x: jax.Array, outer: Sequence[tuple[Tier, Shards]]) -> jax.Array:
        """``[width]``: this shard's of the rows of the outer tiers."""
        for _, own in reversed(outer):
            x = lax.dynamic_index_in_dim(x, own.index(), 0, keepdims=False)
        return x

    def _key_of(self, nth: int) -> jax.Array | None:
        return None if self.key is None else jax.random.fold_in(self.key, nth)


def _as_rows(x: jax.Array, partition: Partition, number: int) -> jax.Array:
    """``[shards, width]``: the slice of each shard, filled up to whole blocks."""
    if partition.number == 1:
        flat = jnp.ravel(x)
        rows = jnp.pad(flat, (0, -flat.size % number)).reshape(number, -1)
    elif partition.axis:
        rows = jnp.stack(jnp.split(x, number, partition.axis)).reshape(number, -1)
    else:
        rows = partition.pack(x).reshape(number, -1)
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % WIDTH)))


def _from_rows(rows: jax.Array, partition: Partition, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of ``_as_rows``."""
    if partition.number == 1:
        width = -(-math.prod(shape) // len(rows))
        return rows[:, :width].ravel()[: math.prod(shape)].reshape(shape)
    slices = [_slice_of_rows(row, partition) for row in rows]
    if partition.axis:
        return jnp.concatenate(slices, partition.axis)
    return partition.unpack(jnp.concatenate(slices, 0))


def _slice_of_rows(row: jax.Array, partition: Partition) -> jax.Array:
    shape = partition.local_shape
    return row[: math.prod(shape)].reshape(shape)
