"""The names of the variables that an optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from crossshard import _check
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.errors import ArgumentError, VariableError, VariableTypeError
from crossshard.nnx.binding import bound
from crossshard.nnx.computed import Named


def trained_by_default() -> list[AnyVariable]:
    """Every ``nnx.Param`` that was given to the step.

    Raises:
      ArgumentError: there is no step of a runner here.
    """
    around = bound()
    if around is None:
        raise ArgumentError(
            "Outside of a step of crossshard.shard there is no list of all parameters. Pass the "
            "module whose parameters to train, var_list=model."
        )
    return [variable for variable in around.variables if isinstance(variable, nnx.Param)]


def named_variables(var_list: Any) -> Named:
    """The variables of a module, a variable or a list of both, with a name for each, by id.

    The variables of a module are its ``nnx.Param``s, named by their paths. A variable in a list is
    named by its metadata, else by its path in a module that was given to the step, else by its
    index: ``#0``.

    Raises:
      ArgumentError: there are no variables.
      VariableTypeError: an item is not a variable.
      VariableError: a variable that is not floating, or a duplicate.
    """
    items = list(var_list) if isinstance(var_list, list | tuple) else [var_list]
    found: Named = {}
    alone: list[AnyVariable] = []
    for index, item in enumerate(items):
        if isinstance(item, nnx.Variable):
            if id(item) in found:
                raise VariableError(f"{describe_variable(item)} is in var_list twice.")
            alone.append(item)
            named = [(f"#{index}", item)]
        elif isinstance(item, nnx.Pytree):
            prefix = f"{index}/" if len(items) > 1 else ""
            named = [(prefix + name, variable) for name, variable in _paths(item, nnx.Param)]
        else:
            raise VariableTypeError(
                f"var_list must be an nnx.Module or a list of nnx variables; item {index} is "
                f"{type(item).__name__} ({_check.shown(item)})."
            )
        for name, variable in named:
            _check_floating(variable)
            found[id(variable)] = (variable, name)
    if not found:
        raise ArgumentError("No variables to optimize.")
    return found | known_names(alone)


def known_names(variables: Iterable[AnyVariable]) -> Named:
    """Names of those variables that have one: their own, or a path in a module of the step."""
    found: Named = {}
    unnamed: dict[int, AnyVariable] = {}
    for variable in variables:
        own = variable.get_metadata("name", None)
        if own:
            found[id(variable)] = (variable, str(own))
        else:
            unnamed[id(variable)] = variable
    around = bound()
    in_roots: list[list[tuple[str, AnyVariable]]] = []
    for root in [] if around is None else around.reached.roots:
        if unnamed and isinstance(root, nnx.Pytree):
            named = [(name, v) for name, v in _paths(root, nnx.Variable) if id(v) in unnamed]
            for _, variable in named:
                del unnamed[id(variable)]
            in_roots += [named] if named else []
    for index, named in enumerate(in_roots):
        prefix = f"{index}/" if len(in_roots) > 1 else ""
        found |= {id(variable): (variable, prefix + name) for name, variable in named}
    return found


def _paths(module: nnx.Pytree, kind: type[AnyVariable]) -> list[tuple[str, AnyVariable]]:
    return [
        ("/".join(map(str, path)), leaf)
        for path, leaf in nnx.iter_graph(module)
        if isinstance(leaf, kind)
    ]


def _check_floating(variable: AnyVariable) -> None:
    dtype = getattr(variable.get_raw_value(), "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise VariableError(
            f"{describe_variable(variable)} cannot be optimized: its dtype must be floating."
        )
