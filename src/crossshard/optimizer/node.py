"""An optimizer as a node of JAX's trees and of NNX's graphs, whose children are its slots."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from crossshard import _flax
from crossshard._flax import nnx
from crossshard.nnx.slots import SlotStore
from crossshard.optimizer.transformation import Transformation


@dataclasses.dataclass(frozen=True, repr=False)
class _Static:
    """All of an optimizer but its slots; equal for an optimizer and its rebuilt copies."""

    transformation: Transformation
    keys: tuple[str, ...]
    built: frozenset[str]

    def __repr__(self) -> str:
        return f"slots of {', '.join(self.keys) or 'nothing'}"


def register_node(kind: Any) -> None:
    """Register ``CrossShardOptimizer``, which its own file passes here."""

    def flatten(optimizer: Any) -> tuple[Any, _Static]:
        slots = optimizer.slots
        static = _Static(optimizer._transformation, slots.known_keys, slots.built)
        return ((jax.tree_util.GetAttrKey("state"), slots.tree),), static

    def unflatten(static: _Static, children: Any) -> Any:
        slots = SlotStore(dict.fromkeys(static.keys), static.built, *children)
        return kind._made(static.transformation, slots)

    jax.tree_util.register_pytree_with_keys(kind, flatten, unflatten)
    # As nnx.Optimizer is.
    _flax.when_loaded(lambda: nnx.register_data_type(kind))
