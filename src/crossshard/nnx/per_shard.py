"""Variables that hold one value for all shards, or one value for each."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from crossshard import _flax
from crossshard._flax import AnyVariable, nnx
from crossshard.errors import VariableError


class PerShardArray:
    """The values of all shards, held by a variable that differs between them.

    It is not an array, and arithmetic on it raises: a model that took the axis of the shards for
    another axis would compute nonsense. ``merge_shards`` returns a model to compute with.
    ``variable[...].array`` and ``np.asarray(variable[...])`` are the values.

    In a checkpoint its path ends with ``per_shard``. To restore one, first take a step with the new
    model and optimizer, so that they have the same structure.

    Attributes:
      array: ``[shards, …]``.

    >>> from flax import nnx
    >>> variable = nnx.Param(PerShardArray(jnp.array([1.0, 2.0])))
    >>> variable[...].array
    Array([1., 2.], dtype=float32)
    """

    __slots__ = ("array",)
    # NumPy then leaves arithmetic to the methods below.
    __array_ufunc__ = None

    def __init__(self, array: jax.Array):
        self.array: jax.Array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all values: ``[shards, …]``."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the values."""
        return self.array.dtype

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"PerShardArray({self.array!r})"

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __getitem__(self, index: object) -> PerShardArray:
        return self if index is ... else self._refuse()

    def __setitem__(self, index: object, value: npt.ArrayLike) -> None:
        """Write one value to all shards, or to each shard its row: ``variable[...] = value``."""
        value = jnp.asarray(value, self.dtype) if index is ... else self._refuse()
        if value.shape not in (self.shape, self.shape[1:]):
            raise VariableError(
                f"The value of a variable that differs between {self.shape[0]} shards must have "
                f"shape {self.shape[1:]}, or {self.shape} for one each; got {value.shape}."
            )
        self.array = jnp.broadcast_to(value, self.shape)

    def _refuse(self, *_: Any) -> NoReturn:
        raise VariableError(
            f"A variable that differs between {self.shape[0]} shards, {self.dtype}"
            f"{list(self.shape)}, cannot be used as one value. Evaluate "
            f"crossshard.merge_shards(model), or read all values as variable[...].array."
        )


# In a checkpoint the path of its values ends with the key.
jax.tree_util.register_pytree_with_keys(
    PerShardArray,
    lambda held: (((jax.tree_util.GetAttrKey("per_shard"), held.array),), None),
    lambda _, children: PerShardArray(*children),
)

_REFUSED = """
    jax_array abs add bool complex contains divmod float floordiv ge gt index int invert iter le len
    lt matmul mod mul neg pos pow radd rdivmod rfloordiv rmatmul rmod rmul round rpow rsub rtruediv
    sub truediv
""".split()
for _name in _REFUSED:
    setattr(PerShardArray, f"__{_name}__", PerShardArray._refuse)


def _serialize() -> None:
    from flax import serialization

    to_save = lambda held: {"per_shard": held.array}
    from_saved = lambda _, saved: PerShardArray(saved["per_shard"])
    serialization.register_serialization_state(PerShardArray, to_save, from_saved)


_flax.when_loaded(_serialize)


def is_per_shard_array(leaf: Any) -> bool:
    """Return whether a leaf holds one array per shard."""
    return isinstance(leaf, PerShardArray)


def is_per_shard(variable: AnyVariable) -> bool:
    """Return whether a variable differs between shards, and so holds a ``PerShardArray``.

    After a step, runners store variables in this way if they differ between shards: parameters with
    groups, batch statistics.

    >>> from flax import nnx
    >>> is_per_shard(nnx.Param(0.0))
    False
    """
    return number_of_shards(_check_variable(variable)) is not None


def number_of_shards(variable: AnyVariable) -> int | None:
    """Return the number of shards between which a variable differs; ``None`` if it does not."""
    value = variable.get_raw_value()
    if isinstance(value, jax.Array):  # the common case, fast since this runs at every step
        return None
    leaves = jax.tree.leaves(value, is_leaf=is_per_shard_array)
    sizes = (leaf.shape[0] for leaf in leaves if is_per_shard_array(leaf))
    return next(sizes, None)


def stacked(value: Any) -> Any:
    """Replace each ``PerShardArray`` in a variable's value by its array ``[shards, …]``."""
    if isinstance(value, jax.Array):
        return value
    unwrap = lambda leaf: leaf.array if is_per_shard_array(leaf) else leaf
    return jax.tree.map(unwrap, value, is_leaf=is_per_shard_array)


def per_shard(value: Any) -> Any:
    """Wrap arrays ``[shards, …]`` as ``PerShardArray``; the inverse of ``stacked``."""
    return jax.tree.map(PerShardArray, value)


def _check_variable(variable: Any) -> AnyVariable:
    if not isinstance(variable, nnx.Variable):
        raise VariableError(f"Expected an nnx variable; got {type(variable).__name__}.")
    return variable
