"""Differentiate: one shard's loss and the gradients that the optimizer reads; zeros elsewhere."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.gradients.local import value_and_grad


def differentiate(
    loss_of: Callable[[Any], tuple[Any, Any]],
    params: Any,
    unread: Sequence[bool],
    loss_scale: Any = None,
) -> tuple[Any, Any]:
    """The loss with its auxiliary output, and the gradients, without computing unread ones.

    Args:
      loss_of: the loss as a function of the parameters, which returns ``(loss, aux)``.
      params: the parameters.
      unread: for each, whether the optimizer does not read its gradient.
      loss_scale: the scale of the loss; see ``crossshard.value_and_grad``.
    """
    if not any(unread):
        out, gradients = value_and_grad(loss_of, has_aux=True, loss_scale=loss_scale)(params)
        return out, gradients
    leaves, tree = jax.tree.flatten(params)
    places = list(itertools.compress(range(len(leaves)), (not each for each in unread)))

    def filled(arrays: Sequence[Any], others: Sequence[Any]) -> Any:
        every = list(others)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return tree.unflatten(every)

    of_read = lambda arrays: loss_of(filled(arrays, leaves))
    compute = value_and_grad(of_read, has_aux=True, loss_scale=loss_scale)
    out, gradients = compute([leaves[place] for place in places])
    return out, filled(gradients, list(map(jnp.zeros_like, leaves)))
