"""The problem of the update alone: matrices with precomputed gradients.

The baselines in `peers/` compute the same gradients from `scales`, which they get, and a ramp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problem import Problem


def scales(matrices: int, shards: int) -> list[list[float]]:
    """The factor of the ramp in each gradient, by shard and matrix.

    Normally distributed, so that the mean differs from every shard's gradient: a candidate that
    leaves out the reduction moves some parameter in the other direction.
    """
    return np.random.default_rng(0).normal(size=(shards, matrices)).tolist()


def given_gradients(matrices: int, width: int, shards: int) -> Problem:
    """Square matrices of ones; each shard's gradients are its part of the batch.

    Args:
      matrices: the number of matrices.
      width: the rows and columns of each.
      shards: the number of parts of the batch.
    """
    params = [np.ones((width, width), np.float32) for _ in range(matrices)]
    ramp = np.linspace(-1, 1, width * width, dtype=np.float32).reshape(width, width)
    by_matrix = np.array(scales(matrices, shards), np.float32).T
    batch = [(scale[:, None, None] * ramp).reshape(-1, width) for scale in by_matrix]
    return Problem(
        model=params,
        loss_fn=_loss_with_given_gradients,
        params=params,
        value_and_grad=lambda params, batch: (jnp.zeros(()), batch),
        batch=batch,
        # Of another number of rows there is no such gradient.
        loss_over="shard",
    )


@jax.custom_vjp
def _loss_with_given_gradients(params: Any, batch: Any) -> jax.Array:
    """A loss of zero whose gradient is the batch, so that neither pass computes anything."""
    return jnp.zeros(())


def _forward(params: Any, batch: Any) -> tuple[jax.Array, Any]:
    return jnp.zeros(()), batch


def _backward(batch: Any, of_loss: jax.Array) -> tuple[Any, None]:
    return batch, None


_loss_with_given_gradients.defvjp(_forward, _backward)
