"""Codec: numbers of a few bits, in blocks that share a scale, as bytes to be sent."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

# For each dtype its bits, and how many elements share a scale.
_KINDS = {"int8": (8, 128), "int4": (4, 64), "float8_e4m3fn": (8, 128)}
DTYPES = tuple(_KINDS)
# What every block divides: a row of the vector units of TPUs.
WIDTH = 128
_BYTES_OF_SCALE = 2
# The largest number of float8_e4m3fn, its spacing next to zero, and its bits behind the point.
_TOP, _TINY, _FRACTION = 448.0, 2.0**-9, 3


@dataclasses.dataclass(frozen=True)
class Codec:
    """Writes numbers in blocks of 128, or 64, each with a scale of 16 bits, and reads them.

    A number that is read is exactly a product of two short ones, so that what was lost of it,
    ``x - decode(encode(x))``, is exact in float32.

    Attributes:
      dtype: ``"int8"``, ``"int4"`` or ``"float8_e4m3fn"``.
      stochastic: whether a number is rounded up with the probability that keeps its mean, rather
        than to the nearest.

    >>> codec = Codec("int8")
    >>> codec.decode(codec.encode(jnp.linspace(0, 127, 128) + 0.3))[1:4]
    Array([1.0078125, 2.015625 , 3.0234375], dtype=float32)
    """

    dtype: str
    stochastic: bool = False

    def __str__(self) -> str:
        return self.dtype

    @property
    def _bits(self) -> int:
        return _KINDS[self.dtype][0]

    @property
    def _block(self) -> int:
        return _KINDS[self.dtype][1]

    def encode(
        self, x: Float[Array, "*rows width"], key: jax.Array | None = None
    ) -> UInt8[Array, "*rows bytes"]:
        """The bytes of numbers whose last axis is a multiple of ``WIDTH``.

        Args:
          x: the numbers.
          key: a PRNG key, to round stochastically.
        """
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self._block)
        scale = self._scale_of(blocks)
        ratio = blocks / jnp.where(scale == 0, 1, scale).astype(jnp.float32)
        if self.stochastic:
            assert key is not None
            noise = jax.random.bits(key, ratio.shape, jnp.uint16).astype(jnp.float32) / (1 << 16)
            ratio = self._rounded(ratio, noise)
        # All numbers, and then all scales: XLA for TPUs lays out blocks of 130 bytes badly.
        parts = self._bytes_of(ratio), _as_bytes(scale[..., 0])
        return jnp.concatenate([part.reshape(*x.shape[:-1], -1) for part in parts], -1)

    def decode(self, coded: UInt8[Array, "*rows bytes"]) -> Float[Array, "*rows width"]:
        """The numbers, float32."""
        of_numbers = self._block * self._bits // 8
        number = coded.shape[-1] // (of_numbers + _BYTES_OF_SCALE)
        numbers, scales = (
            part.reshape(*coded.shape[:-1], number, -1)
            for part in jnp.split(coded, [number * of_numbers], -1)
        )
        of_block = lax.bitcast_convert_type(scales, jnp.bfloat16).astype(jnp.float32)
        found = self._numbers_of(numbers) * of_block[..., None]
        return found.reshape(*coded.shape[:-1], -1)

    def _scale_of(self, blocks: jax.Array) -> jax.Array:
        """bfloat16[…, 1]: the scale of each block, so that its numbers fit."""
        above, below = (f(blocks, -1, keepdims=True) for f in (jnp.max, jnp.min))
        larger, smaller = jnp.maximum(above, -below), jnp.minimum(above, -below)
        if self.dtype == "float8_e4m3fn":
            size, sign = larger / _TOP, jnp.bfloat16(1)
        else:
            # There is one negative number more, so the larger end is written as negative, and
            # exactly. The other one may be rounded by half a unit, as any number.
            most = 1 << (self._bits - 1)
            half = 0 if self.stochastic else 0.5
            size = jnp.maximum(larger / most, smaller / (most - 1 + half))
            sign = jnp.where(above > -below, -1, 1).astype(jnp.bfloat16)
        # XLA for CPUs takes the maximum of the numbers that are left without NaN.
        finite = jnp.isfinite(blocks).all(-1, keepdims=True)
        return sign * _up_to_16_bits(jnp.where(finite, size, jnp.nan))

    def _rounded(self, ratio: jax.Array, noise: jax.Array) -> jax.Array:
        """The ratio, rounded to one of its two neighbours."""
        if self.dtype != "float8_e4m3fn":
            return jnp.floor(ratio + noise)
        _, exponent = jnp.frexp(ratio)
        step = jnp.maximum(jnp.exp2((exponent - 1 - _FRACTION).astype(jnp.float32)), _TINY)
        return jnp.floor(ratio / step + noise) * step

    def _bytes_of(self, ratio: jax.Array) -> jax.Array:
        # A quotient may be rounded up a little over the largest number.
        if self.dtype == "float8_e4m3fn":
            ratio = jnp.clip(ratio, -_TOP, _TOP)
            return lax.bitcast_convert_type(ratio.astype(jnp.float8_e4m3fn), jnp.uint8)
        most = 1 << (self._bits - 1)
        ratio = jnp.clip(jnp.round(ratio), -most, most - 1)
        whole = lax.bitcast_convert_type(ratio.astype(jnp.int8), jnp.uint8)
        if self.dtype == "int8":
            return whole
        # The halves of a block, side by side.
        low, high = jnp.split(whole, 2, -1)
        return (low & 15) | (high << 4)

    def _numbers_of(self, coded: jax.Array) -> jax.Array:
        if self.dtype == "float8_e4m3fn":
            return lax.bitcast_convert_type(coded, jnp.float8_e4m3fn).astype(jnp.float32)
        whole = lax.bitcast_convert_type(coded, jnp.int8)
        if self.dtype == "int4":
            # A shift of a signed number repeats its sign.
            whole = jnp.concatenate([(whole << 4) >> 4, whole >> 4], -1)
        return whole.astype(jnp.float32)


def _up_to_16_bits(x: jax.Array) -> jax.Array:
    """bfloat16: positive numbers, rounded up; NaN and infinity stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    up = lax.bitcast_convert_type(((bits + 0xFFFF) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), up, x.astype(jnp.bfloat16))


def _as_bytes(x: Any) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8)
