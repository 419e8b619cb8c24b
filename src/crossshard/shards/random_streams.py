"""Distinct random streams for the shards."""

import jax


def own_stream(key: jax.Array, shard: jax.Array) -> jax.Array:
    """A shard's own keys, of any shape, derived from the shared ones."""
    # The same key would apply the same dropout mask on every shard.
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, shard)
