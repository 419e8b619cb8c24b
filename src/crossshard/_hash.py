"""Hash: each kind of hash once: of arrays in a step, on disk and between processes, and of texts.

Of an array, however it is split, a checkpoint has 64 bits (``hash_of``), and a compiled step has
half of these (``word_of``). Pytrees that each process has in full are compared by 32 bits
(``checksum``), texts are told apart by 256 (``sha256``) or made short with 32 (``crc32``).
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
    """32 bits of a text, as 8 hexadecimal digits.

    >>> crc32("a"), crc32("b")
    ('e8b7be43', '71beeff9')
    """
    return f"{zlib.crc32(text.encode()):08x}"


def sha256(value: Any) -> str:
    """256 bits of a value as JSON writes it, as 64 hexadecimal digits.

    >>> sha256({"a": 1, "b": 2}) == sha256({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum(tree: Any) -> str:
    """``checksum 1a2b3c4d`` of a pytree of arrays, numbers or types: paths, shapes, dtypes, values.

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
        # Of an array that is split over processes each has another part.
        is_here = getattr(x, "is_fully_addressable", True)
        if isinstance(x, jax.ShapeDtypeStruct) or not (is_here or x.is_fully_replicated):
            continue
        x = _data(x)
        x = x if is_here else x.addressable_data(0)
        values = np.ascontiguousarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
        found = zlib.crc32(values.reshape(-1).view(np.uint8).data, found)
    return f"checksum {found:08x}"


# The bits of arrays.


def _data(x: Any) -> Any:
    """An array that has values: the data of keys."""
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def to_words(x: Any) -> jax.Array:
    """uint32[…]: the bits of each element; of wider ones along a further axis."""
    x = _data(jnp.asarray(x))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == jnp.bool_:
        return cast(jax.Array, x.astype(jnp.uint32))
    bits = jax.dtypes.itemsize_bits(x.dtype)
    return lax.bitcast_convert_type(x, f"uint{min(bits, 32)}").astype(jnp.uint32)


def from_words(words: jax.Array, like: Any) -> jax.Array:
    """The inverse of ``to_words``, given an array of the same dtype."""
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
# Numpy's intermediate results of so many elements stay in a core's cache.
_BLOCK = 1 << 15


def word_of(x: Any) -> jax.Array:
    """uint32[]: the first half of an array's hash, inside of a compiled step.

    A change of one 32-bit word is never missed: for each position the mixing is a bijection.
    Changes of several cancel each other in one of 2**32 cases.

    >>> x = jnp.array([1.0, 2.0])
    >>> bool(word_of(x) == word_of(x[::-1])), bool(word_of(x) == word_of(-x))
    (False, False)
    """
    return cast(jax.Array, _half(to_words(x), _places(x.shape, 0), 0, jnp))


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
    return hash_later(x)()


def hash_later(x: jax.Array) -> Callable[[], str]:
    """A function that returns the hash of an array, which may be donated meanwhile.

    What the host has is hashed with numpy when the function is called. Other arrays are hashed by
    their devices, which do it next, and the function waits for them.
    """
    if x.is_fully_replicated:
        # Of the copy that is written, and without the same work on every device.
        copies = {shard.replica_id: shard.data for shard in x.addressable_shards}
        x = copies[min(copies)]
    if not _is_on_host(x):
        with _mesh.without_mesh():
            halves = _on_devices(x)
        return lambda: "".join(f"{int(half):08x}" for half in jax.device_get(halves))
    # Views: while there is one, JAX leaves the memory alone.
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
    """Whether the host can read all of an array without a copy."""
    devices: Any = x.sharding.device_set
    return x.is_fully_addressable and all(device.platform == "cpu" for device in devices)


@jax.jit
def _on_devices(x: jax.Array) -> tuple[Any, Any]:
    # Not the index in the flat array, which would not fit 32 bits.
    words = to_words(x)
    return _half(words, _places(x.shape, 0), 0, jnp), _half(words, _places(x.shape, 1), 1, jnp)


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
                words = _words_on_host(rows[block])
                for half in (0, 1):
                    places = of_rows[half][block[0]] * np.uint32(_STEPS[half]) + along[block[1]]
                    total[half] += _half(words, places, half, np)
    return total[0], total[1]


def _words_on_host(x: np.ndarray) -> np.ndarray:
    """What ``to_words`` returns, with all words of an element along one further axis."""
    bits = jax.dtypes.itemsize_bits(x.dtype)
    # A number of fewer than 8 bits is in the low ones of a byte.
    words = np.ascontiguousarray(x)[..., None].view(f"uint{min(32, max(8, bits))}")
    return words.astype(np.uint32) & np.uint32(2 ** min(bits, 32) - 1)


def _places(shape: tuple[int, ...], half: int, start: tuple[int, ...] = (), xp: Any = jnp) -> Any:
    """uint32: what stands for the position of each element, if the first one is at ``start``."""
    place = xp.zeros((1,) * len(shape), np.uint32)
    for axis, size in enumerate(shape):
        along = xp.arange(size, dtype=np.uint32) + np.uint32(start[axis] if start else 0)
        along = along.reshape(-1, *(1,) * (len(shape) - 1 - axis))
        place = place * np.uint32(_STEPS[half]) + along
    return place


def _half(words: Any, places: Any, half: int, xp: Any) -> Any:
    """uint32[]: one half of the hash, with numpy or JAX, of one word or more for each place."""
    step, total = np.uint32(_STEPS[half]), np.uint32(0)
    for number, at in enumerate(np.ndindex(words.shape[places.ndim :])):
        own = _mixed(places ^ np.uint32(number * 0xA511E9B3 % 2**32), half)
        total = total + xp.sum(_mixed(words[(..., *at)] ^ own ^ step, half), dtype=np.uint32)
    return total


def _mixed(x: Any, half: int) -> Any:
    for shift, factor in _ROUNDS[half]:
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x
