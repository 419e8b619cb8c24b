"""Hashes of arrays, in a step, on disk and between processes, and of texts.

A checkpoint has 64 bits of each array, however it is sharded (``hash_of``), and a compiled step
computes half of these (``word_of``). Processes compare pytrees that each has in full by 32 bits
(``checksum``). Texts are identified by 256 bits (``sha256``), or shortened to 32 (``crc32``).
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard import _mesh


def crc32(text: str) -> str:
    """Return a 32-bit hash of a text, as 8 hexadecimal digits.

    >>> crc32("a"), crc32("b")
    ('e8b7be43', '71beeff9')
    """
    return f"{zlib.crc32(text.encode()):08x}"


def sha256(value: Any) -> str:
    """Return a 256-bit hash of a value's JSON, as 64 hexadecimal digits.

    >>> sha256({"a": 1, "b": 2}) == sha256({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum(tree: Any) -> str:
    """Return ``checksum 1a2b3c4d`` of a pytree's paths, shapes, dtypes and values.

    Its leaves are arrays, numbers or types.

    >>> import jax.numpy as jnp
    >>> checksum({"w": jnp.ones(3)}) == checksum({"w": np.ones(3, np.float32)})
    True
    """
    found = 0
    for path, given in jax.tree_util.tree_leaves_with_path(tree):
        x: Any = given if hasattr(given, "dtype") else np.asarray(given)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        name = f"{jax.tree_util.keystr(path)} {dtype} {x.shape}"
        found = zlib.crc32(name.encode(), found)
        # Each process has a different part of an array that is sharded over processes.
        is_here = getattr(x, "is_fully_addressable", True)
        if isinstance(x, jax.ShapeDtypeStruct) or not (is_here or x.is_fully_replicated):
            continue
        x = key_data(x)
        x = x if is_here else x.addressable_data(0)
        values = np.ascontiguousarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
        found = zlib.crc32(values.reshape(-1).view(np.uint8).data, found)
    return f"checksum {found:08x}"


# The bits of arrays.


def key_data(x: Any) -> Any:
    """Return the data of an array of keys; another array as it is."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def to_words(x: Any) -> jax.Array:
    """Return the bits of each element, uint32[…]; those of wider ones along a further axis."""
    x = key_data(jnp.asarray(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return cast(jax.Array, x.astype(jnp.uint32))
    bits = jax.dtypes.itemsize_bits(x.dtype)
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)


def from_words(words: jax.Array, like: Any) -> jax.Array:
    """Invert ``to_words``, given an array of the same dtype."""
    dtype = like.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = from_words(words, like.real)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype == jnp.bool_:
        return words.astype(dtype)
    bits = jax.dtypes.itemsize_bits(dtype)
    return lax.bitcast_convert_type(words.astype(f"uint{min(bits, 32)}"), dtype)


# Arrays in a step and on disk.

# A shift and a factor for each round, which mix all bits: of MurmurHash3, and of "lowbias32".
_ROUNDS = (
    ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)),
    ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)),
)
# One odd factor for each of the two halves, so that no two positions collide in both.
_STEPS = (0x9E3779B1, 0x85EBCA77)
# In blocks of this many elements, numpy's intermediate results stay in a core's cache.
_BLOCK = 1 << 15


def word_of(x: Any) -> jax.Array:
    """Return the first half of an array's hash, uint32[], inside a compiled step.

    A change of one 32-bit word is never missed: for each position the mixing is a bijection.
    Changes of several words cancel each other in one of 2**32 cases.

    >>> x = jnp.array([1.0, 2.0])
    >>> bool(word_of(x) == word_of(x[::-1])), bool(word_of(x) == word_of(-x))
    (False, False)
    """
    return cast(jax.Array, _half(to_words(x), _places(x.shape, 0), 0, jnp))


def hash_of(x: jax.Array) -> str:
    """Return a 64-bit hash of an array's values and their positions, as 16 hexadecimal digits.

    Each half is a sum, modulo 2**32, of one number for each element and its position. So devices
    hash their own parts, and the hash does not depend on how the array is sharded. Any change of
    one 32-bit word changes it; others go unnoticed with a probability of 2**-64. It does not
    protect against forgery: whoever changes the array could write a new hash as well.

    >>> x = jnp.arange(4, dtype=jnp.int32)
    >>> hash_of(x) == hash_of(x + 0), hash_of(x) == hash_of(x[::-1])
    (True, False)
    """
    return hash_later(x)()


def hash_later(x: jax.Array) -> Callable[[], str]:
    """Return a function that returns the hash of an array, which may be donated meanwhile.

    An array on the host is hashed with numpy when the function is called. Another one is hashed by
    its devices, which start at once, and the function waits for them.
    """
    if x.is_fully_replicated:
        # Only the copy that is written, so that devices do not repeat the same work.
        copies = {shard.replica_id: shard.data for shard in x.addressable_shards}
        x = copies[min(copies)]
    if not _is_on_host(x):
        with _mesh.without_mesh():
            halves = _on_devices(x)
        return lambda: "".join(f"{int(half):08x}" for half in jax.device_get(halves))
    # These are views: while there is one, JAX does not reuse the memory.
    parts = [
        (np.asarray(shard.data), tuple(along.start or 0 for along in shard.index))
        for shard in x.addressable_shards
        if shard.replica_id == 0
    ]

    def add_up() -> str:
        found = [_on_host(part, start) for part, start in parts]
        return "".join(f"{sum(map(int, each)) % 2**32:08x}" for each in zip(*found, strict=True))

    return add_up


def _is_on_host(x: jax.Array) -> bool:
    """Return whether the host can read all of an array without a copy."""
    devices: Any = x.sharding.device_set
    return x.is_fully_addressable and all(device.platform == "cpu" for device in devices)


@jax.jit
def _on_devices(x: jax.Array) -> tuple[Any, Any]:
    # Positions are not indices in the flat array, which would not fit 32 bits.
    words = to_words(x)
    return _half(words, _places(x.shape, 0), 0, jnp), _half(words, _places(x.shape, 1), 1, jnp)


def _on_host(x: np.ndarray, start: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Return both halves of the hash of a part that starts at these indices, with numpy."""
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
                words = _words_on_host(rows[block])
                for half in (0, 1):
                    places = of_rows[half][block[0]] * np.uint32(_STEPS[half]) + along[block[1]]
                    total[half] += _half(words, places, half, np)
    return total[0], total[1]


def _words_on_host(x: np.ndarray) -> np.ndarray:
    """Return ``to_words``, with all words of an element along one further axis."""
    bits = jax.dtypes.itemsize_bits(x.dtype)
    # A number of fewer than 8 bits is in the low ones of a byte.
    words = np.ascontiguousarray(x)[..., None].view(f"uint{min(32, max(8, bits))}")
    return words.astype(np.uint32) & np.uint32(2 ** min(bits, 32) - 1)


def _places(shape: tuple[int, ...], half: int, start: tuple[int, ...] = (), xp: Any = jnp) -> Any:
    """Return a number for the position of each element, uint32, if the first is at ``start``."""
    place = xp.zeros((1,) * len(shape), np.uint32)
    for axis, size in enumerate(shape):
        along = xp.arange(size, dtype=np.uint32) + np.uint32(start[axis] if start else 0)
        along = along.reshape(-1, *(1,) * (len(shape) - 1 - axis))
        place = place * np.uint32(_STEPS[half]) + along
    return place


def _half(words: Any, places: Any, half: int, xp: Any) -> Any:
    """Return one half of the hash, uint32[], of one word or more for each place.

    ``xp`` is numpy or JAX's.
    """
    step, total = np.uint32(_STEPS[half]), np.uint32(0)
    for number, at in enumerate(np.ndindex(words.shape[places.ndim :])):
        own = _mixed(places ^ np.uint32(number * 0xA511E9B3 % 2**32), half)
        total = total + xp.sum(_mixed(words[(..., *at)] ^ own ^ step, half), dtype=np.uint32)
    return total


def _mixed(x: Any, half: int) -> Any:
    for shift, factor in _ROUNDS[half]:
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x
