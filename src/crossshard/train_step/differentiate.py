"""Differentiate: one shard's loss and the gradients that the optimizer reads; zeros elsewhere."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.gradients.incoming import Incoming
from crossshard.gradients.local import value_and_grad
from crossshard.pipeline.stage import Gradients


def differentiate(
    loss_of: Callable[[Any], tuple[Any, Any]], params: Any, unread: Sequence[bool]
) -> tuple[Any, Any]:
    """The loss with its auxiliary output, and the gradients, without computing unread ones.

    Args:
      loss_of: the loss as a function of the parameters, which returns ``(loss, aux)``.
      params: the parameters.
      unread: for each, whether the optimizer does not read its gradient.
    """
    if not any(unread):
        out, gradients = value_and_grad(loss_of, has_aux=True)(params)
        return out, gradients
    leaves, tree = jax.tree.flatten(params)
    places = list(itertools.compress(range(len(leaves)), (not each for each in unread)))

    def filled(arrays: Sequence[Any], others: Sequence[Any]) -> Any:
        every = list(others)
        for place, array in zip(places, arrays, strict=True):
            every[place] = array
        return tree.unflatten(every)

    of_read = lambda arrays: loss_of(filled(arrays, leaves))
    out, gradients = value_and_grad(of_read, has_aux=True)([leaves[place] for place in places])
    return out, filled(gradients, list(map(jnp.zeros_like, leaves)))


def without_unread(gradients: Gradients, unread: Sequence[bool]) -> Gradients:
    """The gradients, of which those that nothing reads count as reduced: they are all zero."""
    if not any(unread):
        return gradients
    status = tuple(
        Incoming.REDUCED if is_unread else each
        for each, is_unread in zip(gradients.status, unread, strict=True)
    )
    return gradients.replace(status=status)
