"""Problem: model, batch and loss, for crossshard and for the step written by hand."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.1
# The same, for the candidates of other processes.
NUMBERS_OF_ADAMW = {
    "learning_rate": LEARNING_RATE,
    "b1": B1,
    "b2": B2,
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
}


def adamw() -> optax.GradientTransformation:
    """The optimizer of every candidate, with the same hyperparameters."""
    return optax.adamw(LEARNING_RATE, B1, B2, EPS, weight_decay=WEIGHT_DECAY)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A step to repeat.

    Attributes:
      model: the model for crossshard: a tree of arrays, or an NNX module.
      loss_fn: the loss of the model and one shard's batch.
      params: the same model as a tree of arrays, for the step written by hand.
      value_and_grad: the loss and its gradients, from such a tree and one shard's batch.
      batch: a tree of arrays with the rows of all shards, in order.
      optimizer: the optimizer of every candidate that is not given another.
      loss_over: what crossshard is told of the loss.
    """

    model: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    params: Any
    value_and_grad: Callable[[Any, Any], tuple[jax.Array, Any]]
    batch: Any
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=adamw)
    loss_over: str = "rows"

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def of_tree(params: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any) -> Problem:
    """A problem whose parameters are a tree of arrays, differentiated by JAX."""
    return Problem(params, loss_fn, params, jax.value_and_grad(loss_fn), batch)
