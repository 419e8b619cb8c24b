"""CrossShardOptimizer: one object for the Optax way and the stateful way; the latter is in nnx."""
