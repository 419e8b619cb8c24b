"""Cache keys of values that have no hash, or that compare element by element."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


class ByValue:
    """A value as a cache key: compares by type and value, and arrays by their bytes."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = hash(type(value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or type(self.value) is not type(other.value):
            return False
        ours, theirs = self.value, other.value
        if ours is theirs and isinstance(ours, jax.Array):
            return True
        if isinstance(ours, jax.Array | np.ndarray):
            return _same_bytes(ours, theirs)
        try:
            return bool(ours == theirs)
        except ValueError:  # such as a list of arrays
            return ours is theirs


def _same_bytes(ours: Any, theirs: Any) -> bool:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    if not all(getattr(each, "is_fully_addressable", True) for each in (ours, theirs)):
        return False  # other processes have the rest
    return _bytes_of(ours) == _bytes_of(theirs)


def _bytes_of(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def kept(key: Any) -> Any:
    """A copy of a key that stays the same when a mutable value in it changes."""
    if isinstance(key, tuple):
        return tuple(map(kept, key))
    if not isinstance(key, ByValue) or isinstance(key.value, jax.Array):
        return key
    kind = type(key.value)
    # What has a hash is not written to, and a copy of what compares by identity is another.
    if kind.__hash__ is not None or kind.__eq__ is object.__eq__:
        return key
    try:
        return ByValue(copy.deepcopy(key.value))
    except Exception:  # a user's class may raise anything
        return key
