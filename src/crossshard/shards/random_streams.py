"""Distinct random streams for the shards."""

from typing import Any

import jax
import jax.numpy as jnp


def own_stream(key: jax.Array, shard: jax.Array) -> jax.Array:
    """A shard's own keys, of any shape, typed or raw, derived from the shared ones.

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


def is_key(x: Any) -> bool:
    """Whether an array holds typed keys."""
    return bool(jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key))


def may_be_raw_key(x: Any) -> bool:
    """Whether an array may be the data of keys: as uint32, as ``PRNGKey`` and Keras hold them.

    >>> may_be_raw_key(jax.random.PRNGKey(0)), may_be_raw_key(jnp.zeros(2, jnp.int32))
    (True, False)
    """
    of_one = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return x.dtype == of_one.dtype and x.shape[-1:] == of_one.shape
