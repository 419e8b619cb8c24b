"""Wire: sums and gathers over the shards; arrays of 16 bits are sent so, and added in float32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from crossshard.collectives.all_reduce import sum_over_shards
from crossshard.collectives.scatter import exchange, gather_parts, scatter_sum
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment


def send_scattered(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """This shard's slice along ``axis`` of the sum."""
    if not _is_narrow(x):
        return scatter_sum(x, axis, shards, groups)
    if not shards.manual:
        return scatter_sum(x.astype(jnp.float32), axis, shards, groups)
    return shards.by_platform(
        x,
        cpu=lambda x: _exchange(x, axis, shards, groups),
        default=lambda x: scatter_sum(x, axis, shards, groups).astype(jnp.float32),
    )


def send_sum(x: jax.Array, shards: Shards, groups: GroupAssignment | None = None) -> jax.Array:
    """The sum, which of 16 bits is rounded to 16 bits once more."""
    if not _is_narrow(x):
        return sum_over_shards(x, shards, groups)
    if not shards.manual or shards.number == 1:
        return sum_over_shards(x.astype(jnp.float32), shards, groups)

    def by_exchange(x: jax.Array) -> jax.Array:
        number = shards.number if groups is None else groups.size
        flat = jnp.pad(x.ravel(), (0, -x.size % number))
        part = _exchange(flat, 0, shards, groups).astype(x.dtype)
        return _gather_bits(part, 0, shards, groups)[: x.size].reshape(x.shape)

    total = shards.by_platform(
        x, cpu=by_exchange, default=lambda x: sum_over_shards(x, shards, groups)
    )
    return total.astype(jnp.float32)


def send_gathered(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """The slices of all shards, or of the group, concatenated along ``axis``."""
    if not _is_narrow(x):
        return gather_parts(x, axis, shards, groups)
    return shards.by_platform(
        x,
        cpu=lambda x: _gather_bits(x, axis, shards, groups),
        default=lambda x: gather_parts(x, axis, shards, groups),
    )


def send_exchanged(
    x: jax.Array, shards: Shards, groups: GroupAssignment | None = None
) -> jax.Array:
    """``[shards, …]``: what every shard has for this one, from the same of all of them."""
    if not _is_narrow(x):
        return exchange(x, 0, shards, groups)[:, 0]
    by_bits = lambda x: lax.bitcast_convert_type(
        exchange(_as_bits(x), 0, shards, groups)[:, 0], x.dtype
    )
    return shards.by_platform(
        x, cpu=by_bits, default=lambda x: exchange(x, 0, shards, groups)[:, 0]
    )


def _is_narrow(x: Any) -> bool:
    """Whether an array has fewer bits than those in which it is to be added."""
    return jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32


def _gather_bits(
    x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None
) -> jax.Array:
    bits = gather_parts(_as_bits(x), axis, shards, groups)
    return lax.bitcast_convert_type(bits, x.dtype)


def _exchange(x: jax.Array, axis: int, shards: Shards, groups: GroupAssignment | None) -> jax.Array:
    """float32: the sum of the slices that the other shards send to this one.

    XLA for CPUs adds in float32 and sends what it adds; bits that it does not add stay 16.
    """
    received = exchange(_as_bits(x), axis, shards, groups)
    return lax.bitcast_convert_type(received, x.dtype).astype(jnp.float32).sum(0)


def _as_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint16)
