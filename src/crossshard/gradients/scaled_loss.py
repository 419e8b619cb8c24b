"""Scaled loss: gradients of a loss that is multiplied first, so that float16 does not underflow."""

from typing import Any

import jax

from crossshard.collectives.sums import widen


def scaled(loss: Any, scale: Any) -> Any:
    """``loss * scale`` in the dtype of the loss; the loss itself if ``scale`` is ``None``."""
    return loss if scale is None else loss * scale.astype(loss.dtype)


def unscale(gradients: Any, scale: Any) -> Any:
    """The gradients of a loss, with at least 32 bits, from those of ``scaled(loss, scale)``."""
    if scale is None:
        return gradients

    def one(leaf: Any) -> Any:
        if leaf.dtype == jax.dtypes.float0:
            return leaf
        wide = widen(leaf)
        return wide / scale.astype(wide.dtype)

    return jax.tree.map(one, gradients)
