"""Codec: numbers of a few bits, in blocks that share a scale, as bytes to be sent."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

# For each dtype its largest number, and its bits.
_KINDS = {"int8": (127.0, 8), "int4": (7.0, 4), "float8_e4m3fn": (448.0, 8)}
DTYPES = tuple(_KINDS)
# The number of elements that share a scale: a row of the vector units of TPUs.
BLOCK = 128
_BYTES_OF_SCALE = 2
# The spacing of float8_e4m3fn next to zero, and its number of bits behind the point.
_TINY, _FRACTION = 2.0**-9, 3


@dataclasses.dataclass(frozen=True)
class Codec:
    """Writes numbers in blocks of 128, each with a scale of 16 bits, and reads them.

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
    def bytes_of_block(self) -> int:
        """How many bytes are sent of a block."""
        return BLOCK * _KINDS[self.dtype][1] // 8 + _BYTES_OF_SCALE

    def encode(
        self, x: Float[Array, "*rows width"], key: jax.Array | None = None
    ) -> UInt8[Array, "*rows bytes"]:
        """The bytes of numbers whose last axis is a multiple of the block.

        Args:
          x: the numbers.
          key: a PRNG key, to round stochastically.
        """
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
        top = _KINDS[self.dtype][0]
        largest = jnp.abs(blocks).max(-1, keepdims=True)
        # XLA for CPUs takes the maximum of the numbers that are left without NaN.
        finite = jnp.isfinite(blocks).all(-1, keepdims=True)
        scale = _up_to_16_bits(jnp.where(finite, largest / top, jnp.nan))
        ratio = blocks / jnp.where(scale == 0, 1, scale).astype(jnp.float32)
        # The scale is rounded up, but a quotient may be rounded up, too.
        ratio = jnp.clip(ratio, -top, top)
        if self.stochastic:
            assert key is not None
            noise = jax.random.bits(key, ratio.shape, jnp.uint16).astype(jnp.float32) / (1 << 16)
            ratio = self._rounded(ratio, noise)
        coded = jnp.concatenate([self._bytes_of(ratio), _as_bytes(scale[..., 0])], -1)
        return coded.reshape(*x.shape[:-1], -1)

    def decode(self, coded: UInt8[Array, "*rows bytes"]) -> Float[Array, "*rows width"]:
        """The numbers, float32."""
        blocks = coded.reshape(*coded.shape[:-1], -1, self.bytes_of_block)
        numbers, scale = jnp.split(blocks, [blocks.shape[-1] - _BYTES_OF_SCALE], -1)
        of_block = lax.bitcast_convert_type(scale, jnp.bfloat16).astype(jnp.float32)
        found = self._numbers_of(numbers) * of_block[..., None]
        return found.reshape(*coded.shape[:-1], -1)

    def _rounded(self, ratio: jax.Array, noise: jax.Array) -> jax.Array:
        """The ratio, rounded to one of its two neighbours."""
        if self.dtype != "float8_e4m3fn":
            return jnp.floor(ratio + noise)
        _, exponent = jnp.frexp(ratio)
        step = jnp.maximum(jnp.exp2((exponent - 1 - _FRACTION).astype(jnp.float32)), _TINY)
        return jnp.floor(ratio / step + noise) * step

    def _bytes_of(self, ratio: jax.Array) -> jax.Array:
        if self.dtype == "float8_e4m3fn":
            return lax.bitcast_convert_type(ratio.astype(jnp.float8_e4m3fn), jnp.uint8)
        whole = lax.bitcast_convert_type(jnp.round(ratio).astype(jnp.int8), jnp.uint8)
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
