"""Unread: the gradients on which no parameter ever depends, so that none need be computed or sent.

Such are those of parameters that an optimizer leaves alone, as ``optax.set_to_zero`` does.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from crossshard.jaxprs.dependence import returned_inputs, sources


@dataclasses.dataclass(frozen=True)
class Unread:
    """What an update does not read.

    Attributes:
      gradients: for each parameter, whether no parameter ever depends on its gradient, now or
        through the optimizer's state.
      still: for each parameter, whether it stays unchanged besides, so that it need not travel.
      state: for each array of the optimizer's state, whether it is one of such a parameter.
    """

    gradients: tuple[bool, ...]
    still: tuple[bool, ...]
    state: tuple[bool, ...]


def find_unread(update: Callable[..., Any], params: Any, state: Any, loss: Any) -> Unread:
    """What an update from ``(params, state, gradients, loss)`` to the new two does not read.

    With ``optax.clip_by_global_norm`` before it, ``set_to_zero`` leaves nothing unread: the norm
    is that of all gradients.
    """
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (params, state)]
    number, arrays = map(len, shapes)
    read = sources(update, params, state, params, loss)
    # Bits of the inputs: parameters, state, gradients.
    live = 0
    for bits in read[:number]:
        live |= bits
    while True:
        more = live
        for place, bits in enumerate(read[number:]):
            more |= bits if live >> number + place & 1 else 0
        if more == live:
            break
        live = more
    unread = tuple(not live >> number + arrays + place & 1 for place in range(number))
    if not any(unread):
        return Unread(unread, unread, (False,) * arrays)
    after = returned_inputs(update, params, state, params, loss)
    still = tuple(each and after[place] == place for place, each in enumerate(unread))
    of_still = tuple(
        any(
            each and shape == shapes[0][place] and bits >> number + arrays + place & 1
            for place, each in enumerate(still)
        )
        for shape, bits in zip(shapes[1], read[number:], strict=True)
    )
    return Unread(unread, still, of_still)
