"""What is below the modules, variables and optimizers that a step is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.errors import VariableError
from crossshard.nnx.computed import Computed
from crossshard.nnx.slots import SlotStore


class HasSlots:
    """An optimizer, as the runners see it.

    Attributes:
      slots: its state, a variable at every leaf.
      computed: the gradients that it computed in the current trace.
    """

    slots: SlotStore
    computed: Computed


@dataclasses.dataclass(frozen=True)
class Reached:
    """What some roots hold, each once, in a fixed order.

    Attributes:
      roots: the modules, variables and optimizers that were given.
      variables: every variable below these.
      modules: every NNX module below these.
      optimizers: every optimizer below these.
      constants: every array that is an attribute itself, not a variable's value.
    """

    roots: list[Any]
    variables: list[AnyVariable]
    modules: list[nnx.Pytree]
    optimizers: list[HasSlots]
    constants: list[Any]


def reached_in(values: Iterable[Any]) -> Reached:
    """What is below the modules, variables and optimizers in these values.

    Raises:
      VariableError: a variable of one of NNX's experimental kinds.
    """
    leaves = (leaf for value in values for leaf in jax.tree.leaves(value, is_leaf=is_stateful))
    roots = {id(leaf): leaf for leaf in leaves if is_stateful(leaf)}
    variables: dict[int, AnyVariable] = {}
    modules: dict[int, nnx.Pytree] = {}
    optimizers: dict[int, HasSlots] = {}
    constants: list[Any] = []
    for root in roots.values():
        for _, node in nnx.iter_graph(root):
            if isinstance(node, nnx.Variable):
                if node.hijax or node.ref:
                    raise VariableError(
                        f"{describe_variable(node)} is of NNX's experimental "
                        f"{'hijax' if node.hijax else 'ref'} kind; use an ordinary variable."
                    )
                variables.setdefault(id(node), node)
            elif isinstance(node, HasSlots):
                optimizers.setdefault(id(node), node)
            elif isinstance(node, nnx.Pytree):
                modules.setdefault(id(node), node)
            elif isinstance(node, jax.Array | np.ndarray):
                constants.append(node)
    return Reached(
        list(roots.values()),
        list(variables.values()),
        list(modules.values()),
        list(optimizers.values()),
        constants,
    )


def is_stateful(value: Any) -> bool:
    """Whether a runner binds this object to the step rather than splitting it over the shards."""
    return isinstance(value, nnx.Pytree | nnx.Variable | HasSlots)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values consist of identical array objects."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
