"""Weight: how much a shard's rows count in the mean, from an entry of the batch or a function."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.jaxprs.dependence import depends
from crossshard.pipeline.stages.weigh import as_weight

Weight = Callable[[Any], Any]


def check_weight(weight: Any) -> Weight | None:
    """The weight function of the ``weight`` argument: from a shard's batch to its weight.

    Raises:
      ArgumentTypeError: ``weight`` is neither a function nor the name of an entry.
    """
    if weight is None or callable(weight):
        return weight
    if isinstance(weight, str):
        return SumOf(weight)
    raise ArgumentTypeError(
        f"weight must be the name of the batch's entry that counts examples or tokens, or a "
        f"function from a shard's batch to its weight; got {_check.described(weight)}."
    )


@dataclasses.dataclass(frozen=True)
class SumOf:
    """The sum of one entry of the batch, such as a mask."""

    key: str

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, dict) or self.key not in batch:
            known = list(batch) if isinstance(batch, dict) else type(batch).__name__
            raise ArgumentError(
                f"weight={self.key!r} names an entry of the batch, but the batch has {known}."
            )
        return jnp.sum(jnp.asarray(batch[self.key], float))


def check_weight_is_read(
    weight: Weight, batch: Any, loss: Callable[[Any, Any], Any], params: Any
) -> None:
    """Raise if a loss does not read the entry of the batch that counts its rows.

    Args:
      weight: the weight function.
      batch: one shard's rows of the batch.
      loss: the loss as a function of the batch and the parameters.
      params: the parameters, or their types.

    Raises:
      ArgumentError: the loss does not read the entry, so rows of weight 0 count in it.
    """
    if not isinstance(weight, SumOf):
        return
    key = weight.key
    # Raises if there is no such entry.
    jax.eval_shape(weight, batch)
    of_entry = lambda entry, params: loss({**batch, key: entry}, params)
    if not depends(of_entry, batch[key], params):
        raise ArgumentError(
            f"weight={key!r} means that batch[{key!r}] counts rows, but the loss does not read it, "
            f"so rows of weight 0, such as those of padding, count in its mean. Write "
            f"(loss_of_rows * batch[{key!r}]).sum() / batch[{key!r}].sum(). If the loss leaves "
            f"such rows out on its own, pass weight=lambda batch: batch[{key!r}].sum()."
        )


def weight_of(weight: Weight, batch: Any) -> jax.Array:
    """float[]: the weight of one shard's rows of the batch; for errors see ``as_weight``."""
    return as_weight(weight(batch), "weight returned")
