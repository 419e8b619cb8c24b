"""Distinct random streams for the shards, keys of rows, and keys that switch noise off."""

import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp


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


def quiet_keys(shape: tuple[int, ...]) -> jax.Array:
    """Return keys whose random bits are all the same, in the middle of their range.

    Uniform numbers are just below 1/2 then, normal ones nearly 0, and dropout that keeps a half or
    more keeps all.

    >>> round(float(jax.random.uniform(quiet_keys(()))), 6)
    0.5
    >>> bool(jax.random.bernoulli(quiet_keys(()), 0.5))
    True
    """
    return jax.random.wrap_key_data(jnp.zeros((*shape, 1), jnp.uint32), impl=_quiet())


@functools.cache
def _quiet() -> Any:
    def bits(key: Any, width: int, shape: tuple[int, ...]) -> jax.Array:
        del key
        return jnp.full(shape, (1 << (width - 1)) - 1, f"uint{width}")

    return jax.extend.random.define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: jnp.zeros(1, jnp.uint32),
        split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
        random_bits=bits,
        fold_in=lambda key, data: key,
        name="quiet",
        tag="quiet",
    )
