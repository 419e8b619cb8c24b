"""Checks of numbers, and of scalars that can be a loss."""

from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard._flax import nnx
from crossshard.errors import ArgumentError, ArgumentTypeError


def is_number(leaf: Any) -> bool:
    """Whether a leaf is an array or a Python number, of which a bool is one.

    >>> is_number(3), is_number("3")
    (True, False)
    """
    return hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)


def is_inexact(leaf: Any) -> bool:
    """Whether a number is floating or complex, so that it can be differentiated."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def check_scalar(value: Any, what: str = "A loss", kinds: tuple[Any, ...] = (jnp.floating,)) -> Any:
    """Check that a value, or a variable's value, is a scalar of one of these kinds of dtype.

    Raises:
      ArgumentError: the value is not a scalar.
      ArgumentTypeError: the value is not a number, or its dtype is not of these kinds.
    """
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    if not is_number(value):
        raise ArgumentTypeError(f"{what} must be a floating scalar; got {type(value).__name__}.")
    _check.array(what, value)
    dtype, shape = jnp.result_type(value), jnp.shape(value)
    if shape != ():
        raise ArgumentError(
            f"{what} must be a floating scalar; got {dtype}[{','.join(map(str, shape))}], of shape "
            f"{shape}. Reduce it first, with jnp.mean, or with jnp.sum, as TensorFlow does for "
            f"a loss that is not a scalar."
        )
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        raise ArgumentTypeError(f"{what} must be a floating scalar; got {dtype}[].")
    return value


def describe_type(x: Any) -> str:
    """The type of an array as in ``f32[3,4]``, with the axes it is varying over."""
    return str(jax.typeof(x).str_short(short_dtypes=True))
