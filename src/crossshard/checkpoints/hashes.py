"""Hashes: 64 bits of an array's values, the same however it is split over devices."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

# A shift and a factor for each round, which mix all bits: of MurmurHash3, and "lowbias32" (Wellons).
_ROUNDS = (
    ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)),
    ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)),
)
# One odd factor for each of the two halves, so that no two positions collide in both.
_STEPS = (0x9E3779B1, 0x85EBCA77)


def hash_of(x: jax.Array) -> str:
    """64 bits of an array's values and of their positions, as 16 hexadecimal digits.

    It is a sum, modulo 2**32 in each half, of what one element and its position give. So devices
    hash their own parts, and it does not depend on how the array is split. Any change of one 32-bit
    word changes it; others go unnoticed with a probability of 2**-64. It does not withstand a
    forger, who could write a new hash as well.

    >>> x = jnp.arange(4, dtype=jnp.int32)
    >>> hash_of(x) == hash_of(x + 0), hash_of(x) == hash_of(x[::-1])
    (True, False)
    """
    if x.is_fully_replicated:
        # Of the copy that is written, and without the same work on every device.
        copies = {shard.replica_id: shard.data for shard in x.addressable_shards}
        x = copies[min(copies)]
    first, second = jax.device_get(_hash(x))
    return f"{int(first):08x}{int(second):08x}"


@jax.jit
def _hash(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _half(x, 0), _half(x, 1)


def _half(x: jax.Array, half: int) -> jax.Array:
    """uint32[]: one half of the hash."""
    mixed = functools.partial(_mixed, rounds=_ROUNDS[half])
    # Not the index in the flat array, which would not fit 32 bits.
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis in range(x.ndim):
        place = place * jnp.uint32(_STEPS[half]) + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    total = jnp.uint32(0)
    for number, word in enumerate(_words(x)):
        own = mixed(place ^ jnp.uint32(number * 0xA511E9B3 % 2**32))
        total += jnp.sum(mixed(word ^ own ^ jnp.uint32(_STEPS[half])), dtype=jnp.uint32)
    return total


def _mixed(x: jax.Array, rounds: tuple[tuple[int, int], ...]) -> jax.Array:
    for shift, factor in rounds:
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of each element: one uint32 of the array's shape, or several."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool:
        return [x.astype(jnp.uint32)]
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits < 8:
        # Each of these few numbers is one of the wider type, whose bits differ.
        return _words(x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32))
    if bits == 64:
        both = lax.bitcast_convert_type(x, jnp.uint32)
        return [both[..., 0], both[..., 1]]
    return [lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)]


def number_of_bytes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> int:
    """The bytes of an array of this shape."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize
