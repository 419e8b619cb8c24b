"""Bits: arrays as words of 32 bits, and a hash of them that notices any changed element."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def hash_of(x: Any) -> jax.Array:
    """uint32[]: the sum over all elements of their bits, mixed with their index.

    For each index the mixing is a bijection, so that a change of one word is never missed. Changes
    of several cancel each other in one of 2**32 cases: a plain sum, or one weighted by the index,
    would miss every pair of flipped signs. The constants are those of MurmurHash3 (Appleby 2011).

    >>> x = jnp.array([1.0, 2.0])
    >>> bool(hash_of(x) == hash_of(x[::-1])), bool(hash_of(x) == hash_of(-x))
    (False, False)
    """
    words = to_words(x)
    mixed = words ^ (_index(words.shape) * jnp.uint32(0x9E3779B9))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _index(shape: tuple[int, ...]) -> jax.Array:
    """uint32[…]: the index of each element in row-major order."""
    # Without a reshape, which would copy arrays that TPUs keep in tiles.
    index, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    return index


def to_words(x: Any) -> jax.Array:
    """uint32[…]: the bits of each element; of wider ones along a further axis."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    bits = _bits(x.dtype)
    if bits > 32:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, f"uint{bits}").astype(jnp.uint32)


def from_words(words: jax.Array, like: Any) -> jax.Array:
    """The inverse of ``to_words``, given an array of the same dtype."""
    dtype = like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_words(words, like.real)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_:
        return words.astype(dtype)
    bits = _bits(dtype)
    return lax.bitcast_convert_type(words if bits > 32 else words.astype(f"uint{bits}"), dtype)


def _bits(dtype: Any) -> int:
    of = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(of(dtype).bits)
