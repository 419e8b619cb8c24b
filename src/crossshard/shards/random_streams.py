"""Distinct random streams for the shards, keys of rows, and keys that tries are made with."""

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax


def own_stream(key: jax.Array, shard: jax.Array) -> jax.Array:
    """Return a shard's own keys, of any shape, typed or raw, derived from the shared ones.

    >>> own_stream(jax.random.PRNGKey(0), 3) == jax.random.fold_in(jax.random.PRNGKey(0), 3)
    Array([ True,  True], dtype=bool)
    """
    if not is_key(key):
        return jax.random.key_data(own_stream(jax.random.wrap_key_data(key), shard))
    # The same key would apply the same dropout mask on every shard.
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, shard)


def keys_of_rows(key: jax.Array, places: jax.Array) -> jax.Array:
    """Return a key for each row, folded from its place in the global batch.

    >>> keys_of_rows(jax.random.key(0), jnp.arange(4, 8)).shape
    (4,)
    """
    return jax.vmap(jax.random.fold_in, (None, 0))(key, places)


def is_key(x: Any) -> bool:
    """Return whether an array holds typed keys."""
    return bool(jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key))


def may_be_raw_key(x: Any) -> bool:
    """Return whether an array may be the data of keys: uint32, as ``PRNGKey`` and Keras hold them.

    >>> may_be_raw_key(jax.random.PRNGKey(0)), may_be_raw_key(jnp.zeros(2, jnp.int32))
    (True, False)
    """
    of_one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return x.dtype == of_one.dtype and x.shape[-1:] == of_one.shape


def alike_keys(shape: tuple[int, ...], rows: int, seed: Any) -> jax.Array:
    """Return equal keys whose noise is the same in all rows, of parts with so many rows.

    So a part of a batch gets the noise that the whole batch gets. All numbers are equal along an
    axis whose length is a multiple of ``rows``; keys that are split off along one, or folded from a
    number below 65,536, as of a row or a layer, are equal, too.

    >>> noise = jax.random.normal(alike_keys((), 4, 0), (8, 3))
    >>> bool((noise == noise[0]).all()), bool((noise == noise[:, :1]).all())
    (True, False)
    """
    data = jnp.broadcast_to(jnp.asarray(seed, jnp.uint32), (*shape, 1))
    return jax.random.wrap_key_data(data, impl=_quick(rows))


def quick_key(seed: Any) -> jax.Array:
    """Return a key whose noise takes a fraction of the time to compile that JAX's own takes.

    It is good enough to try other numbers, not to train with.

    >>> jax.random.bits(quick_key(0), (2,)) == jax.random.bits(quick_key(1), (2,))
    Array([False, False], dtype=bool)
    """
    return jax.random.key(seed, impl=_quick(None))


@functools.cache
def _quick(rows: int | None) -> Any:
    """Return the noise of ``alike_keys``, or of ``quick_key`` for ``None``."""
    bits_of_rows = 0 if rows is None else 16

    def places(shape: tuple[int, ...]) -> jax.Array:
        found = jnp.zeros(shape, jnp.uint32)
        for axis, size in enumerate(shape):
            is_alike = rows is not None and size % rows == 0
            own = lax.broadcasted_iota(jnp.uint32, shape, axis)
            found = jnp.uint32(0x9E3779B1) * found + (jnp.uint32(0) if is_alike else own)
        return found

    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        found = _mixed(key[0] ^ places(shape))
        if width > 32:
            return found.astype(jnp.uint64) << 32 | _mixed(found)
        return (found >> (32 - width)).astype(f"uint{width}")

    return jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: _mixed(seed.astype(jnp.uint32) + 4)[None],
        split=lambda key, shape: _mixed(key ^ _mixed(places(shape) + 2)[..., None]),
        random_bits=bits,
        fold_in=lambda key, data: _mixed(key ^ _mixed((data >> bits_of_rows) + 3)),
        name="quick" if rows is None else f"alike in {rows} rows",
        tag="quick",
    )


def _mixed(x: Any) -> jax.Array:
    """Mix the bits of integers, as MurmurHash3 does at its end."""
    x = (x ^ x >> 16) * jnp.uint32(0x85EBCA6B)
    x = (x ^ x >> 13) * jnp.uint32(0xC2B2AE35)
    return x ^ x >> 16
