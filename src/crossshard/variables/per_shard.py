"""Variables that hold one value for all shards, or one value for each."""

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from crossshard.errors import ArgumentError, VariableError
from crossshard.variables.binding import bound
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import variables_in


@jax.tree_util.register_pytree_with_keys_class
class PerShardArray:
    """The values of all shards, as a variable that differs between them holds them.

    It is no array: a model that reads one shard's rows as if they were the features of a batch
    would compute nonsense, so arithmetic on it is refused. ``merge_shards`` gives a model to
    compute with; ``variable[...].array`` gives the values, as ``np.asarray(variable[...])`` does.

    In a checkpoint its path ends with ``per_shard``. To restore one, take a step with the fresh
    model and optimizer first, as slots are made by ``build``, so that they hold the same.

    Attributes:
      array: ``[shards, …]``.

    >>> from flax import nnx
    >>> variable = nnx.Param(0.0)
    >>> set_per_shard(variable, [1.0, 2.0])
    >>> variable[...].array
    Array([1., 2.], dtype=float32)
    """

    __slots__ = ("array",)
    # NumPy then leaves arithmetic to the methods below.
    __array_ufunc__ = None

    def __init__(self, array: Any):
        self.array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all values: ``[shards, …]``."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Of each value."""
        return self.array.dtype

    @property
    def ndim(self) -> int:
        """One more than each value has."""
        return self.array.ndim

    @property
    def size(self) -> int:
        """How many numbers all values have together."""
        return self.array.size

    @property
    def nbytes(self) -> int:
        """How many bytes all values have together."""
        return self.array.nbytes

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"PerShardArray({self.array!r})"

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __getitem__(self, index: Any) -> "PerShardArray":
        return self if index is ... else self._refuse()

    def __setitem__(self, index: Any, value: Any) -> None:
        """``variable[...] = value`` gives every shard this value, or each its row."""
        value = jnp.asarray(value, self.dtype) if index is ... else self._refuse()
        if value.shape not in (self.shape, self.shape[1:]):
            raise VariableError(
                f"Of a variable that differs between {self.shape[0]} shards a value has shape "
                f"{self.shape[1:]}, or {self.shape} for one each; got {value.shape}."
            )
        self.array = jnp.broadcast_to(value, self.shape)

    def _refuse(self, *_: Any) -> NoReturn:
        raise VariableError(
            f"A variable that differs between {self.shape[0]} shards, {self.dtype}"
            f"{list(self.shape)}, cannot be computed with as if it were one value. Evaluate "
            f"crossshard.merge_shards(model), where all shards' are one; or read them, "
            f"[shards, …], as variable[...].array."
        )

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], None]:
        """The array; its key says in a checkpoint what it is."""
        return ((jax.tree_util.GetAttrKey("per_shard"), self.array),), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "PerShardArray":
        """The reverse."""
        return cls(*children)


_REFUSED = """
    jax_array abs add bool complex contains divmod float floordiv ge gt index int invert iter le len
    lt matmul mod mul neg pos pow radd rdivmod rfloordiv rmatmul rmod rmul round rpow rsub rtruediv
    sub truediv
""".split()
for _name in _REFUSED:
    setattr(PerShardArray, f"__{_name}__", PerShardArray._refuse)


def is_per_shard_array(leaf: Any) -> bool:
    """Whether a leaf holds one array per shard."""
    return isinstance(leaf, PerShardArray)


def is_per_shard(variable: nnx.Variable) -> bool:
    """Whether the variable differs between shards, and holds a ``PerShardArray``.

    A runner makes it so when a step leaves the shards with different values: parameters under
    groups, statistics that each shard keeps of its own batch.

    >>> from flax import nnx
    >>> is_per_shard(nnx.Param(0.0))
    False
    """
    return number_of_shards(_check_variable(variable)) is not None


def number_of_shards(variable: nnx.Variable) -> int | None:
    """Between how many shards a variable differs; ``None`` if it does not."""
    value = variable.get_raw_value()
    if isinstance(value, jax.Array):  # as nearly all are, and this is asked at every step
        return None
    leaves = jax.tree.leaves(value, is_leaf=is_per_shard_array)
    sizes = (leaf.shape[0] for leaf in leaves if is_per_shard_array(leaf))
    return next(sizes, None)


def stacked(value: Any) -> Any:
    """What a variable holds, with ``[shards, …]`` arrays where it differs between shards."""
    if isinstance(value, jax.Array):
        return value
    unwrap = lambda leaf: leaf.array if is_per_shard_array(leaf) else leaf
    return jax.tree.map(unwrap, value, is_leaf=is_per_shard_array)


def per_shard(value: Any) -> Any:
    """The reverse: what a variable holds of ``[shards, …]`` arrays."""
    return jax.tree.map(PerShardArray, value)


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
    variable.set_value(_check_value(variable, value))


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
    variable.set_value(PerShardArray(values))


def is_in_step(variable: nnx.Variable) -> bool:
    """Whether a runner has handed the variable in, so that it holds this shard's value alone."""
    around = bound()
    return around is not None and variable in around


def merge_shards(node: Any, shard: int | None = None) -> Any:
    """A copy in which every variable has one value for all shards: to evaluate, or to export.

    What a step leaves different on the shards, such as the statistics of a batch norm, is held as
    a ``PerShardArray``, with which a model cannot compute outside of a step.

    Args:
      node: an NNX module, an optimizer, ``nnx.metrics``, or a pytree of these.
      shard: whose values to take. If ``None``, the mean of what is floating, else the first
        shard's.

    Returns:
      The copy; what was given stays as it is, and trains on.

    Raises:
      ArgumentError: there is no such shard.
      VariableError: an ``nnx.Param`` differs, as under ``group_assignment``, and no shard was
        named, since a mean of weights is another model.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.BatchNorm(1, use_running_average=True, rngs=nnx.Rngs(0))
    >>> set_per_shard(model.mean, [[1.0], [3.0]])
    >>> merge_shards(model).mean[...]
    Array([2.], dtype=float32)
    """
    merged = nnx.clone(node)
    for variable in variables_in([merged]):
        number = number_of_shards(variable)
        if number is None:
            continue
        if shard is not None and not -number <= shard < number:
            raise ArgumentError(f"shard must name one of the {number} shards; got {shard}.")
        values = stacked(variable.get_raw_value())
        if shard is not None:
            variable.set_raw_value(jax.tree.map(lambda x: x[shard], values))
            continue
        if isinstance(variable, nnx.Param) and not _all_equal(values):
            raise VariableError(
                f"{describe_variable(variable)} differs between {number} shards, and a mean of "
                f"weights is another model. Say whose to take: merge_shards(model, shard=0)."
            )
        variable.set_raw_value(jax.tree.map(of_all, values))
    return merged


def of_all(x: jax.Array) -> jax.Array:
    """What stands for all shards of what each has: the mean of statistics, else the first's."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    # Not the mean of equal numbers, which rounds.
    return jnp.where((x == x[0]).all(0), x[0], x.mean(0))


def _all_equal(values: Any) -> bool:
    rows = [np.asarray(leaf) for leaf in jax.tree.leaves(values)]
    return all(np.array_equal(x, np.broadcast_to(x[0], x.shape), equal_nan=True) for x in rows)


def _check_variable(variable: Any) -> nnx.Variable:
    if not isinstance(variable, nnx.Variable):
        raise VariableError(f"An nnx variable is wanted; got {type(variable).__name__}.")
    return variable


def _check_value(variable: Any, value: Any) -> jax.Array:
    _check_variable(variable)
    value = value.array if isinstance(value, PerShardArray) else value
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise VariableError(
            f"{describe_variable(variable)} takes an array; got {value!r:.60}."
        ) from None
