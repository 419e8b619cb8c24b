"""Random streams: one of its own for each shard."""

import jax


def own_stream(key: jax.Array, shard: jax.Array) -> jax.Array:
    """A shard's own keys, of any shape, made from those that all shards have."""
    # The same key on every shard would drop the same units of every part of the batch.
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, shard)
