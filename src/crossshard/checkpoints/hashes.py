"""Hashes: 64 bits of an array's values, the same however it is split over devices."""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from crossshard import _jax

# A shift and a factor for each round, which mix all bits: of MurmurHash3, and of "lowbias32".
_ROUNDS = (
    ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)),
    ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)),
)
# One odd factor for each of the two halves, so that no two positions collide in both.
_STEPS = (0x9E3779B1, 0x85EBCA77)
# Smaller arrays are hashed with numpy: a compilation for their shape takes longer.
_FEW = 1 << 18
# Numpy's intermediate results of so many elements stay in a core's cache.
_BLOCK = 1 << 15


def hash_of(x: jax.Array) -> str:
    """64 bits of an array's values and of their positions, as 16 hexadecimal digits.

    It is a sum, modulo 2**32 in each half, of what one element and its position give. So devices
    hash their own parts, and it does not depend on how the array is split. Any change of one 32-bit
    word changes it; others go unnoticed with a probability of 2**-64. It does not withstand a
    forger, who could write a new hash as well.

    >>> x = jnp.arange(4, dtype=jnp.int32)
    >>> hash_of(x) == hash_of(x + 0), hash_of(x) == hash_of(x[::-1])
    (True, False)
    """
    return hash_later(x, on_host=x.is_fully_addressable and x.size < _FEW)()


def hash_later(x: jax.Array, *, on_host: bool) -> Callable[[], str]:
    """A function that returns the hash of an array, which may be donated meanwhile.

    Args:
      x: the array.
      on_host: whether to hash with numpy, when the function is called, what the host has or gets
        now; else the devices do it next, and the function waits for them.
    """
    if x.is_fully_replicated:
        # Of the copy that is written, and without the same work on every device.
        copies = {shard.replica_id: shard.data for shard in x.addressable_shards}
        x = copies[min(copies)]
    if not on_host:
        with _jax.in_place_of_the_users_mesh(_mesh_of(x)):
            halves = _on_devices(x)
        return lambda: _text(*jax.device_get(halves))
    # Where the device is this CPU, a view: while there is one, JAX leaves its memory alone.
    parts = [
        (np.asarray(shard.data), tuple(along.start or 0 for along in shard.index))
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]

    def add_up() -> str:
        found = [_on_host(part, start) for part, start in parts]
        return _text(*(sum(int(each[half]) for each in found) % 2**32 for half in (0, 1)))

    return add_up


def _mesh_of(x: jax.Array) -> Mesh:
    if isinstance(x.sharding, NamedSharding) and x.sharding.mesh.axis_names:
        return cast(Mesh, x.sharding.mesh)
    return Mesh(np.array(list(x.sharding.device_set)), ("one",))


def _text(first: Any, second: Any) -> str:
    return f"{int(first):08x}{int(second):08x}"


@jax.jit
def _on_devices(x: jax.Array) -> tuple[Any, Any]:
    words = _words(x, lax.bitcast_convert_type, jnp)
    # Not the index in the flat array, which would not fit 32 bits.
    return tuple(_half(words, _places(x.shape, half), half, jnp) for half in (0, 1))


def _on_host(x: np.ndarray, start: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """The same of a part of an array that starts at these indices."""
    if not x.size:
        return 0, 0
    rows = np.ascontiguousarray(x).reshape(math.prod(x.shape[:-1]), -1)
    total = np.zeros(2, np.uint32)
    with np.errstate(over="ignore"):
        of_rows = [_places(x.shape[:-1], half, start[:-1], np).reshape(-1, 1) for half in (0, 1)]
        along = np.arange(rows.shape[1], dtype=np.uint32) + np.uint32((start or (0,))[-1])
        high = max(1, _BLOCK // rows.shape[1])
        for row in range(0, rows.shape[0], high):
            for column in range(0, rows.shape[1], _BLOCK):
                block = slice(row, row + high), slice(column, column + _BLOCK)
                words = _words(rows[block], _bits_of, np)
                for half in (0, 1):
                    places = of_rows[half][block[0]] * np.uint32(_STEPS[half]) + along[block[1]]
                    total[half] += _half(words, places, half, np)
    return total[0], total[1]


def _bits_of(x: np.ndarray, dtype: str) -> np.ndarray:
    words = np.ascontiguousarray(x).reshape(*x.shape, 1).view(dtype)
    return words if words.shape[-1] > 1 else words[..., 0]


def _places(shape: tuple[int, ...], half: int, start: tuple[int, ...] = (), xp: Any = jnp) -> Any:
    """uint32: what stands for the position of each element, if the first one is at ``start``."""
    place = xp.zeros((1,) * len(shape), np.uint32)
    for axis, size in enumerate(shape):
        along = xp.arange(size, dtype=np.uint32) + np.uint32(start[axis] if start else 0)
        along = along.reshape(-1, *(1,) * (len(shape) - 1 - axis))
        place = place * np.uint32(_STEPS[half]) + along
    return place


def _half(words: list[Any], places: Any, half: int, xp: Any) -> Any:
    """uint32[]: one half of the hash, with numpy or JAX."""
    step, total = np.uint32(_STEPS[half]), np.uint32(0)
    for number, word in enumerate(words):
        own = _mixed(places ^ np.uint32(number * 0xA511E9B3 % 2**32), half)
        total = total + xp.sum(_mixed(word ^ own ^ step, half), dtype=np.uint32)
    return total


def _mixed(x: Any, half: int) -> Any:
    for shift, factor in _ROUNDS[half]:
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x


def _words(x: Any, bits_of: Any, xp: Any) -> list[Any]:
    """The bits of each element: one uint32 array of the array's shape, or several."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real, bits_of, xp), *_words(x.imag, bits_of, xp)]
    if x.dtype == jnp.bool:
        return [x.astype(np.uint32)]
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits < 8:
        # Each of these few numbers is one of the wider type, with bits of its own.
        wider = np.int8 if jnp.issubdtype(x.dtype, jnp.integer) else np.float32
        return _words(x.astype(wider), bits_of, xp)
    if bits == 64:
        both = bits_of(x, "uint32")
        return [both[..., 0], both[..., 1]]
    return [bits_of(x, f"uint{bits}").astype(np.uint32)]
