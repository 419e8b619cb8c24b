"""The hash of an array's bits: against numpy, and against faults that a plain sum would miss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossshard.train_step.bits import from_words, hash_of, to_words

DTYPES = (
    "bool int4 uint4 int8 uint8 int16 int32 uint32 float8_e4m3fn float8_e5m2 bfloat16 float16 "
    "float32 complex64"
).split()


def expected(x: np.ndarray) -> int:
    """The hash of a float32 array, in Python's integers."""
    total = 0
    for index, word in enumerate(x.reshape(-1).view(np.uint32).tolist()):
        mixed = word ^ (index * 0x9E3779B9) % 2**32
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B % 2**32
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35 % 2**32
        total += mixed ^ (mixed >> 16)
    return total % 2**32


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 4), (2, 3, 5)])
def test_it_is_what_python_computes(shape: tuple[int, ...]):
    x = np.float32(np.random.default_rng(0).normal(size=shape))
    assert int(hash_of(x)) == expected(x)


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


def test_typed_keys_come_back():
    keys = jax.random.split(jax.random.key(3), 4)
    back = from_words(to_words(keys), keys)
    assert back.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(back), jax.random.key_data(keys))


def test_64_bits():
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.int64):
            x = jnp.arange(5).astype(dtype) - 2
            words = to_words(x)
            assert words.shape == (5, 2)
            np.testing.assert_array_equal(from_words(words, x), x)


def test_every_pair_of_flipped_signs_is_seen():
    x = np.float32(np.random.default_rng(2).normal(size=(6, 10)))
    clean = int(hash_of(x))
    flipped = []
    for one in range(x.size):
        for other in range(one):
            signs = np.ones(x.size, np.float32)
            signs[[one, other]] = -1
            flipped.append(x * signs.reshape(x.shape))
    found = jax.jit(jax.vmap(hash_of))(np.stack(flipped))
    assert clean not in np.asarray(found).tolist()


def test_every_single_bit_is_seen():
    x = np.float32(np.random.default_rng(3).normal(size=33))
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    flipped = np.stack([x.view(np.uint32)] * 33 * 32)
    flipped[np.arange(33 * 32), np.repeat(np.arange(33), 32)] ^= np.tile(bits, 33)
    found = jax.jit(jax.vmap(hash_of))(flipped.view(np.float32))
    assert int(hash_of(x)) not in np.asarray(found).tolist()


def test_elements_that_change_places_are_seen():
    x = np.float32(np.arange(12)).reshape(3, 4)
    assert int(hash_of(x)) != int(hash_of(x[::-1]))
    assert int(hash_of(x)) != int(hash_of(np.ascontiguousarray(x[:, ::-1])))
