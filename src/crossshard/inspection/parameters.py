"""The parameters that a program trains, in bytes, and the least that keeps them the same."""

import dataclasses
import math
import numbers
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax

from crossshard.errors import ArgumentError, ArgumentTypeError


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Parameters of one dtype that a program keeps the same over equally many shards.

    Attributes:
      dtype: XLA's name of it: ``f32``, ``bf16``; none where only their bytes are known.
      bytes: of one whole copy; of layers that are split over devices, of one device's part.
      shards: over how many shards they are kept the same.
      updates: how often one call of the program updates them: once, or once in each round of a
        loop that trains.
    """

    dtype: str | None
    bytes: int
    shards: int
    updates: int = 1

    @property
    def lower_bound(self) -> float:
        """2(N−1)/N · P for each update: what a shard sends at least for N to average P bytes."""
        return 2 * (self.shards - 1) * self.bytes / self.shards * self.updates


def named_bytes(parameters: Any) -> Mapping[str | None, int]:
    """The bytes of one whole copy of the parameters, as the caller names them, by dtype.

    Args:
      parameters: a number of bytes, or a pytree of arrays or ``jax.ShapeDtypeStruct``. Leaves of
        one element are left aside, as their collectives are.

    Raises:
      ArgumentError: there are no bytes.
      ArgumentTypeError: a leaf is not an array.

    >>> import numpy as np
    >>> dict(named_bytes({"w": np.zeros((3, 4), np.float32), "scale": np.zeros((), np.float32)}))
    {'f32': 48}
    """
    found: Counter[str | None] = Counter()
    if isinstance(parameters, numbers.Integral) and not isinstance(parameters, bool):
        found[None] = int(parameters)
    else:
        for path, leaf in jax.tree_util.tree_leaves_with_path(parameters):
            _check_leaf(jax.tree_util.keystr(path), leaf)
            size = math.prod(leaf.shape)
            if size > 1:
                found[_xla_name(leaf.dtype.name)] += size * leaf.dtype.itemsize
    if found.total() <= 0:
        raise ArgumentError(
            "parameters must be arrays, not all of one element, or their number of bytes; got "
            f"{str(parameters)[:80]}, which has {found.total()} bytes to reduce."
        )
    return found


def _check_leaf(path: str, leaf: Any) -> None:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise ArgumentTypeError(
            "parameters must be a pytree of arrays or of jax.ShapeDtypeStruct, or a number of "
            f"bytes; got {type(leaf).__name__} at {path or 'its root'}."
        )


def _xla_name(dtype: str) -> str:
    """XLA's name of NumPy's dtype: ``f32`` of ``float32``, ``f8e4m3fn`` of ``float8_e4m3fn``."""
    for ours, theirs in (("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "s")):
        dtype = dtype.replace(ours, theirs)
    return dtype.replace("_", "")
