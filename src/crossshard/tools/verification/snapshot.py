"""Snapshots of a step's state: each array by name, as numpy arrays, one for each copy of it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from crossshard.shards.random_streams import is_key, may_be_raw_key, own_stream

_NUMBERS = jax.Array | np.ndarray | np.generic | float | int


@dataclasses.dataclass(frozen=True)
class Copies:
    """An array of a state, as its devices have it.

    Attributes:
      values: ``[copies, …]``; one copy if all devices have the same.
      dtype: the array's own; if it is a PRNG key, ``values`` are its data.
    """

    values: np.ndarray
    dtype: Any

    @property
    def is_float(self) -> bool:
        """Whether it has real numbers."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def rounding(self) -> float:
        """The norm of what is rounded off."""
        size = np.linalg.norm(self.values[0].astype(np.float64))
        return float(jnp.finfo(self.dtype).eps * size)

    def of_shape(self, shape: tuple[int, ...], number: int) -> np.ndarray | None:
        """float64[copies, size] of an array that has this shape on one device, if it has.

        If it is stacked, ``[shards, …]``, each shard's part is a copy.
        """
        own, values = self.values.shape[1:], self.values.astype(np.float64)
        if own == shape:
            return values.reshape(len(values), -1)
        if own == (number, *shape) or (shape[:1] == (1,) and own == (number, *shape[1:])):
            return values[0].reshape(number, -1)
        return None


def holds_nnx(tree: Any) -> bool:
    """Whether a tree has NNX modules or optimizers, which a step may change in place."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_nnx)
    return any(map(_is_nnx, leaves))


def snapshot(state: Sequence[Any]) -> dict[str, Copies]:
    """Every array of the arguments of a step, by its path.

    All processes that have a part of an array must call this.
    """
    tree: Any = tuple(state)
    if holds_nnx(tree):
        tree = nnx.state(tree)
    elif len(tree) == 1:
        (tree,) = tree
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, _NUMBERS):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found[name.removesuffix("/value").removesuffix("/array") or "params"] = copies_of(leaf)
    return found


def replaced(state: Sequence[Any], values: Mapping[str, np.ndarray]) -> tuple[Any, ...]:
    """The arguments of a step with other values of some arrays, by their paths in a snapshot."""
    names = iter(snapshot(state))

    def other(x: Any) -> Any:
        if not isinstance(x, _NUMBERS):
            return x
        value = values.get(next(names))
        return x if value is None else _like(x, value)

    return map_arrays(other, tuple(state))


def _like(x: Any, value: np.ndarray) -> Any:
    """An array of this value that is sharded as another one is, if it has the same shape."""
    value = np.asarray(value, jnp.result_type(x))
    if not isinstance(x, jax.Array) or not x.committed or x.shape != value.shape:
        return jnp.asarray(value)
    pieces = [jax.device_put(value[each.index], each.device) for each in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)


def copies_of(x: Any) -> Copies:
    """An array, as each device of this process has it."""
    if not isinstance(x, jax.Array):
        value = np.asarray(x)
        return Copies(value[None], value.dtype)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return Copies(np.asarray(jax.random.key_data(x))[None], x.dtype)
    if not (x.is_fully_addressable or x.is_fully_replicated):
        # Others have a part of it.
        everywhere = NamedSharding(x.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
        x = jax.jit(lambda x: x, out_shardings=everywhere)(x)
    by_index: dict[Any, list[Any]] = {}
    order = _order(x.sharding)
    for shard in sorted(x.addressable_shards, key=lambda each: order[each.device]):
        by_index.setdefault(str(shard.index), []).append(shard)
    number = min(map(len, by_index.values()))
    whole = np.empty((number, *x.shape), x.dtype)
    for pieces in by_index.values():
        for copy, shard in enumerate(pieces[:number]):
            whole[(copy, *shard.index)] = np.asarray(shard.data)
    same = all(piece.tobytes() == whole[0].tobytes() for piece in whole[1:])
    return Copies(whole[:1] if same else whole, x.dtype)


def fresh(state: Sequence[Any], seed: int = 0) -> tuple[Any, ...]:
    """Copies of the arguments of a step, whose random keys are other ones if seed is not 0.

    Args:
      state: the arguments, which stay as they are.
      seed: what is folded into the keys, typed, or raw as ``PRNGKey`` and Keras hold them.
    """

    def copy(x: Any) -> Any:
        if not isinstance(x, jax.Array | np.ndarray):
            return x
        if seed and (is_key(x) or may_be_raw_key(x)):
            return own_stream(jnp.asarray(x), jnp.int32(seed))
        return jnp.copy(x) if isinstance(x, jax.Array) else x.copy()

    return map_arrays(copy, tuple(state))


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree, which may have NNX modules, with other arrays; the modules are copies."""
    if not holds_nnx(tree):
        return jax.tree.map(function, tree)
    split: Any = nnx.split(tree)
    graph, arrays = split
    return nnx.merge(graph, jax.tree.map(function, arrays))


def _is_nnx(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)


def _order(sharding: Any) -> dict[Any, int]:
    mesh = getattr(sharding, "mesh", None)
    devices = (
        sorted(sharding.device_set, key=lambda each: each.id)
        if mesh is None
        else list(mesh.devices.flat)
    )
    return {device: place for place, device in enumerate(devices)}
