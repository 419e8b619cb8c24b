"""The bytes of the parameters that a program trains, and the lower bound on communication."""

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
    """The parameters of one dtype that are synchronized over one number of shards.

    Attributes:
      dtype: its XLA name: ``f32``, ``bf16``; ``None`` if only the bytes are known.
      bytes: the bytes of one copy; of layers that are split over devices, of one device's slice.
      shards: the number of shards that keep a copy.
      updates: how often one call of the program updates them: once, or once per iteration of a
        training loop.
      gathered: the bytes of what an update gathers; ``None`` for ``bytes``. Of parameters that
        rest in parts, in the dtype that is sent, and twice those that are gathered in the backward
        pass again.
      reduced: the bytes of the gradients; ``None`` for ``bytes``. Of parameters that rest in parts,
        in the dtype that is sent.
    """

    dtype: str | None
    bytes: int
    shards: int
    updates: int = 1
    gathered: int | None = None
    reduced: int | None = None

    @property
    def on_wire(self) -> int:
        """``gathered`` and ``reduced`` together: 2 · P if they are not in parts."""
        return sum(self.bytes if own is None else own for own in (self.gathered, self.reduced))

    @property
    def lower_bound(self) -> float:
        """(N−1)/N · ``on_wire`` for each update: the least that one of N shards sends."""
        return (self.shards - 1) * self.on_wire / self.shards * self.updates


def named_bytes(parameters: Any) -> Mapping[str | None, int]:
    """The bytes of one copy of the given parameters, by dtype.

    Args:
      parameters: a number of bytes, or a pytree of arrays or ``jax.ShapeDtypeStruct``. Scalars are
        not counted, like their collectives.

    Raises:
      ArgumentError: there is nothing to count.
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
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ArgumentTypeError(
                    "parameters must be a pytree of arrays or of jax.ShapeDtypeStruct, or a number "
                    f"of bytes; got {type(leaf).__name__} at "
                    f"{jax.tree_util.keystr(path) or 'its root'}."
                )
            size = math.prod(leaf.shape)
            if size > 1:
                found[_xla_name(leaf.dtype.name)] += size * leaf.dtype.itemsize
    if found.total() <= 0:
        raise ArgumentError(
            "parameters must be arrays, not only scalars, or their number of bytes; got "
            f"{str(parameters)[:80]}, which has {found.total()} bytes to reduce."
        )
    return found


def _xla_name(dtype: str) -> str:
    """XLA's name of a NumPy dtype: ``f32`` for ``float32``, ``f8e4m3fn`` for ``float8_e4m3fn``."""
    for numpy_name, xla_name in (("float", "f"), ("complex", "c"), ("uint", "u"), ("int", "s")):
        dtype = dtype.replace(numpy_name, xla_name)
    return dtype.replace("_", "")
