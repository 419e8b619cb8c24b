"""A pipeline as an Optax transformation; the stateful methods around it are in nnx."""
