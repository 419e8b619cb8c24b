"""Hashes find every change: of an array in a step, and of one on disk, however it is split."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import _hash
from crossshard._hash import from_words, hash_of, to_words, word_of
from tests.quick import deep

# The bits of arrays.

DTYPES = "bool int4 uint8 int16 float8_e4m3fn bfloat16 float32 complex64".split()


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_bits_of_a_dtype_come_back(dtype: str):
    x = np.random.default_rng(1).integers(256, size=(4, 8), dtype=np.uint8)
    x = (x % 2 == 1) if dtype == "bool" else x.view(np.uint8)
    x = jnp.asarray(x) if dtype in ("bool", "uint8") else _of_bytes(x, dtype)
    words = jax.jit(to_words)(x)
    back = jax.jit(from_words)(words, x)
    assert words.dtype == jnp.uint32
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    assert np.asarray(back).tobytes() == np.asarray(x).tobytes()


def _of_bytes(x: np.ndarray, dtype: str) -> jax.Array:
    if dtype in ("int4", "uint4"):
        return jnp.asarray(x % 8).astype(dtype)
    return jnp.asarray(x.view(jnp.dtype(dtype)))


# In a step and on disk.

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 24)).astype(np.float32)


def with_devices(x: jax.Array) -> str:
    first, second = jax.device_get(_hash._on_devices(x))
    return f"{int(first):08x}{int(second):08x}"


def test_it_is_the_same_however_an_array_is_split_and_where_it_is_computed():
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    whole = hash_of(jnp.asarray(X))
    for spec in (P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b"))):
        split = jax.device_put(X, NamedSharding(mesh, spec))
        assert hash_of(split) == with_devices(split) == whole


def test_it_is_what_a_loop_over_the_elements_computes():
    """The definition, with Python's integers."""

    def mixed(x: int, first: int, shift: int, second: int) -> int:
        x = (x ^ x >> 16) * first % 2**32
        x = (x ^ x >> shift) * second % 2**32
        return x ^ x >> 16

    halves = ""
    for step, *factors in (
        (0x9E3779B1, 0x85EBCA6B, 13, 0xC2B2AE35),
        (0x85EBCA77, 0x7FEB352D, 15, 0x846CA68B),
    ):
        total = 0
        for (i, j), word in np.ndenumerate(X.view(np.uint32)):
            place = mixed((i * step + j) % 2**32, *factors)
            total += mixed(int(word) ^ place ^ step, *factors)
        halves += f"{total % 2**32:08x}"
    assert hash_of(jnp.asarray(X)) == halves


@pytest.mark.parametrize("dtype", ["float32", "bool", deep("int4"), deep("complex64")])
def test_every_kind_of_array(dtype: str):
    x = jnp.asarray(RNG.integers(0, 2, size=(5, 7))).astype(dtype)
    changed = x.at[3, 2].set(x[3, 2] == 0)
    assert hash_of(x) == with_devices(x) != hash_of(changed)
    # In a step, its first half.
    assert f"{int(word_of(x)):08x}" == hash_of(x)[:8] != hash_of(changed)[:8]
    assert hash_of(x[:0]) == hash_of(x[:, :0])


def test_zeros_of_both_signs_and_all_nans_differ():
    words = np.array([0, 1 << 31, 0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    assert len({hash_of(jnp.asarray(word.view(np.float32))) for word in words}) == 5
    assert np.dtype(ml_dtypes.bfloat16).itemsize == 2


def test_no_flip_of_one_or_two_bits_or_signs_goes_unnoticed():
    clean = X[:4, :6].copy()
    seen = {hash_of(jnp.asarray(clean))}
    flips = [(k, bit) for k in range(24) for bit in range(32)]
    pairs = [(flips[a], flips[b]) for a, b in RNG.integers(len(flips), size=(500, 2)) if a != b]
    signs = [((a, 31), (b, 31)) for a in range(24) for b in range(a)]
    for group in [*((flip,) for flip in flips), *pairs, *signs]:
        other = clean.copy()
        for k, bit in set(group):
            other.reshape(-1).view(np.uint32)[k] ^= np.uint32(1 << bit)
        seen.add(_of_host(other))
    distinct = {tuple(sorted(set(group))) for group in [*((f,) for f in flips), *pairs, *signs]}
    assert len(seen) == len({each[:8] for each in seen}) == 1 + len(distinct)


def test_swapped_rows_and_elements_are_found():
    clean = _of_host(X)
    for a in range(16):
        for b in range(a):
            rows = X.copy()
            rows[[a, b]] = rows[[b, a]]
            assert _of_host(rows)[:8] != clean[:8]
    assert _of_host(X.T.copy())[:8] != clean[:8]


def _of_host(x: np.ndarray) -> str:
    first, second = _hash._on_host(x)
    return f"{int(first):08x}{int(second):08x}"
