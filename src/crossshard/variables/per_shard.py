"""Variables that hold one value for all shards, or one value for each."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossshard.errors import VariableError
from crossshard.variables.binding import bound
from crossshard.variables.describe import describe_variable

PER_SHARD = "per_shard"


def is_per_shard(variable: nnx.Variable) -> bool:
    """Whether the variable differs between shards, its value being ``[shards, …]``.

    A runner makes it so when a step leaves the shards with different values: parameters under
    groups, statistics that each shard keeps of its own batch.

    >>> from flax import nnx
    >>> is_per_shard(nnx.Param(0.0))
    False
    """
    if not isinstance(variable, nnx.Variable):
        raise VariableError(f"An nnx variable is wanted; got {type(variable).__name__}.")
    return bool(variable.get_metadata(PER_SHARD, None))


def set_shared(variable: nnx.Variable, value: Any) -> None:
    """Write one value for all shards to a variable, also where they differed until now.

    Raises:
      VariableError: not a variable, or a value that is no array.

    >>> from flax import nnx
    >>> variable = nnx.Param(0.0)
    >>> set_shared(variable, 1.0)
    >>> variable.get_value()
    Array(1., dtype=float32, weak_type=True)
    """
    value = _check_value(variable, value)
    if is_per_shard(variable) and not is_in_step(variable):
        variable.del_metadata(PER_SHARD)
    variable.set_value(value)


def set_per_shard(variable: nnx.Variable, values: Any) -> None:
    """Write one value per shard to a variable, ``[shards, …]``, to restore what was saved so.

    Raises:
      VariableError: not a variable, values that have no axis of shards, or called inside a step,
        where a variable holds one shard's value.

    >>> from flax import nnx
    >>> variable = nnx.Param(0.0)
    >>> set_per_shard(variable, [1.0, 2.0])
    >>> is_per_shard(variable)
    True
    """
    values = _check_value(variable, values)
    if values.ndim == 0:
        raise VariableError(
            f"One value per shard of {describe_variable(variable)} has shape [shards, …]; got a "
            f"scalar. Write it with crossshard.set_shared."
        )
    if is_in_step(variable):
        raise VariableError(
            f"Inside a step {describe_variable(variable)} holds one shard's value; write that to "
            f"it, or call set_per_shard outside."
        )
    variable.set_metadata(PER_SHARD, values.shape[0])
    variable.set_value(values)


def is_in_step(variable: nnx.Variable) -> bool:
    """Whether a runner has handed the variable in, so that it holds this shard's value alone."""
    around = bound()
    return around is not None and variable in around


def _check_value(variable: Any, value: Any) -> jax.Array:
    if not isinstance(variable, nnx.Variable):
        raise VariableError(f"An nnx variable is wanted; got {type(variable).__name__}.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise VariableError(
            f"{describe_variable(variable)} takes an array; got {value!r:.60}."
        ) from None
