"""The problem of the update alone: matrices, and gradients that are given, not computed.

The peers make the same numbers from the same few: `scales`, which they are told, and a ramp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problem import Problem


def scales(matrices: int, shards: int) -> list[list[float]]:
    """For each shard and matrix what to multiply the ramp by to get the gradient there.

    Normal, so that the mean over the shards is unlike any one of them: a candidate that leaves
    out the reduction steps the other way somewhere.
    """
    return np.random.default_rng(0).normal(size=(shards, matrices)).tolist()


def given_gradients(matrices: int, width: int, shards: int) -> Problem:
    """So many square matrices of ones, each shard's gradients of them being its part of the batch.

    Args:
      matrices: how many.
      width: of each.
      shards: how many parts the batch has.
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
    )


@jax.custom_vjp
def _loss_with_given_gradients(params: Any, batch: Any) -> jax.Array:
    """Zero, with the batch for a gradient: a loss of which neither direction is work."""
    return jnp.zeros(())


def _forward(params: Any, batch: Any) -> tuple[jax.Array, Any]:
    return jnp.zeros(()), batch


def _backward(batch: Any, of_loss: jax.Array) -> tuple[Any, None]:
    return batch, None


_loss_with_given_gradients.defvjp(_forward, _backward)
