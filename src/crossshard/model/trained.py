"""Trained: which parameters a step trains, as its ``wrt`` argument chooses them."""

import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from crossshard import _check
from crossshard._flax import AnyVariable, nnx
from crossshard.errors import ArgumentError, ArgumentTypeError

_WRITE = (
    "Write an NNX filter, such as nnx.LoRAParam, for an NNX module, or a function of path and "
    "leaf, such as wrt=lambda path, leaf: path[0].key == 'head', for a pytree."
)


def check_wrt(wrt: Any) -> Any:
    """The checked ``wrt`` argument: ``None``, an NNX filter, or a function of path and leaf.

    Raises:
      ArgumentTypeError: it is something else, or a function of other arguments.
    """
    if wrt is None:
        return None
    if _is_nnx_filter(wrt):
        try:
            nnx.filterlib.to_predicate(wrt)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"wrt={_check.shown(wrt)} holds what NNX cannot filter by."
            ) from None
        return wrt
    if not callable(wrt):
        raise ArgumentTypeError(f"wrt is {_check.described(wrt)}. {_WRITE}")
    try:
        inspect.signature(wrt).bind(None, None)
    except TypeError:
        raise ArgumentTypeError(f"wrt is a function of other arguments. {_WRITE}") from None
    except ValueError:  # a built-in function without a signature
        pass
    return wrt


def of_pytree(wrt: Any, model: Any) -> Callable[[tuple[Any, ...], Any], bool]:
    """Whether ``wrt`` chooses a floating leaf of a pytree, by the path that JAX gives it.

    Raises:
      ArgumentTypeError: ``wrt`` is an NNX filter.
    """
    if wrt is None:
        return lambda path, leaf: True
    if _is_nnx_filter(wrt):
        raise ArgumentTypeError(
            f"wrt={_check.shown(wrt)} is an NNX filter, which chooses variables of an NNX module, "
            f"but the parameters are a pytree ({type(model).__name__}). {_WRITE}"
        )
    return lambda path, leaf: _check_answer(wrt(path, leaf))


def of_module(wrt: Any) -> Callable[[tuple[Any, ...], Any], bool]:
    """Whether ``wrt`` chooses a variable of an NNX module, by the path that NNX gives it."""
    if wrt is None:
        return lambda path, variable: True
    predicate = nnx.filterlib.to_predicate(wrt)
    return lambda path, variable: _check_answer(predicate(path, variable))


def check_some_trained(wrt: Any, params: Any, frozen: Any) -> None:
    """Raise if ``wrt`` leaves nothing to train.

    Raises:
      ArgumentError: it chooses none of the parameters.
    """
    others = jax.tree_util.tree_leaves_with_path(frozen)
    if wrt is not None and not jax.tree.leaves(params):
        first = jax.tree_util.keystr(others[0][0]).removesuffix(".value") if others else ""
        raise ArgumentError(
            f"wrt chooses none of the model's parameters, of which the first is params{first}, so "
            f"there is nothing to train. {_WRITE}"
        )


def refuse_other_variable(path: tuple[Any, ...], variable: "AnyVariable") -> None:
    """Raise for a variable that ``wrt`` chooses though it is not a parameter.

    Raises:
      ArgumentError: always.
    """
    raise ArgumentError(
        f"wrt chooses {'/'.join(map(str, path))}, an nnx {type(variable).__name__}, but a step "
        f"trains only nnx.Params. Write wrt=nnx.All(nnx.Param, ...), or derive the variable's type "
        f"from nnx.Param."
    )


def _is_nnx_filter(wrt: Any) -> bool:
    kinds = type | str | bool | types.EllipsisType | list | tuple
    return isinstance(wrt, kinds) or type(wrt).__module__ == nnx.filterlib.__name__


def _check_answer(answer: Any) -> bool:
    if not isinstance(answer, bool | np.bool_):
        raise ArgumentTypeError(
            f"wrt must return True or False for each leaf; it returned {_check.shown(answer, 40)} "
            f"({type(answer).__name__})."
        )
    return bool(answer)
