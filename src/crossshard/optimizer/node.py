"""An optimizer as a node of JAX's trees and of NNX's graphs, whose children are its slots."""

from __future__ import annotations

from typing import Any

import jax

from crossshard import _flax
from crossshard._flax import nnx
from crossshard.nnx.slots import SlotStore


def register_node(kind: Any) -> None:
    """Register ``CrossShardOptimizer``, which its own file passes here."""

    def flatten(optimizer: Any) -> tuple[Any, Any]:
        # Equal for an optimizer and its rebuilt copies.
        static = optimizer._transformation, tuple(optimizer.slots.variables)
        return ((jax.tree_util.GetAttrKey("state"), optimizer.slots.tree),), static

    def unflatten(static: Any, children: Any) -> Any:
        transformation, keys = static
        return kind._made(transformation, SlotStore(dict.fromkeys(keys), *children))

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    # As nnx.Optimizer is.
    _flax.when_loaded(lambda: nnx.register_data_type(kind))
