"""Codec: numbers of a few bits, in blocks that share a scale, as bytes to be sent."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

# For each dtype its bits, and how many elements share a scale.
_KINDS = {"int8": (8, 128), "int4": (4, 64), "float8_e4m3fn": (8, 128)}
DTYPES = tuple(_KINDS)
# Numbers lie in rows of as many, the lanes of a TPU: it has no fast way, and its compiler takes
# minutes, to make one long row of a matrix.
LANES = 128
# The largest number of float8_e4m3fn, its spacing next to zero, and its bits behind the point.
_TOP, _TINY, _FRACTION = 448.0, 2.0**-9, 3


@dataclasses.dataclass(frozen=True)
class Codec:
    """Writes numbers in blocks of 128, or 64, each with a scale of 16 bits, and reads them.

    A number that is read is exactly a product of two short ones, so that what was lost of it,
    ``x - decode(encode(x))``, is exact in float32 if it was rounded to the nearest.

    Attributes:
      dtype: ``"int8"``, ``"int4"`` or ``"float8_e4m3fn"``.
      stochastic: whether a number is rounded up with the probability that keeps its mean, rather
        than to the nearest.

    >>> codec, x = Codec("int8"), jnp.linspace(0, 127, 256).reshape(2, 128)
    >>> float(abs(codec.decode(codec.encode(x), 2) - x).max()) <= 0.5
    True
    """

    dtype: str
    stochastic: bool = False

    def __str__(self) -> str:
        return self.dtype

    @property
    def _bits(self) -> int:
        return _KINDS[self.dtype][0]

    @property
    def _scales(self) -> int:
        """The number of scales of a row."""
        return LANES // _KINDS[self.dtype][1]

    def encode(
        self, x: Float[Array, "*shape rows 128"], key: jax.Array | None = None
    ) -> UInt8[Array, "*shape coded 128"]:
        """The bytes of numbers.

        Args:
          x: the numbers, in rows.
          key: a PRNG key, to round stochastically.
        """
        even = [*[(0, 0)] * (x.ndim - 2), (0, x.shape[-2] % 2), (0, 0)]
        wide = jnp.pad(x.astype(jnp.float32), even)
        scales = self._scales_of(wide)
        of_each = self._of_each(scales).astype(jnp.float32)
        ratio = wide / jnp.where(of_each == 0, 1, of_each)
        if self.stochastic:
            assert key is not None
            noise = jax.random.bits(key, ratio.shape, jnp.uint16).astype(jnp.float32) / (1 << 16)
            ratio = self._rounded(ratio, noise)
        bits = lax.bitcast_convert_type(scales, jnp.uint16).reshape(*x.shape[:-2], -1)
        filled = [(0, 0)] * (bits.ndim - 1) + [(0, -bits.shape[-1] % LANES)]
        bits = jnp.pad(bits, filled).reshape(*x.shape[:-2], -1, LANES)
        # The low bytes of all scales, and then the high ones.
        halves = [half.astype(jnp.uint8) for half in (bits & 255, bits >> 8)]
        return jnp.concatenate([self._bytes_of(ratio), *halves], -2)

    def decode(
        self, coded: UInt8[Array, "*shape coded 128"], rows: int
    ) -> Float[Array, "*shape {rows} 128"]:
        """The numbers, float32, given the number of their rows."""
        even = rows + rows % 2
        of_numbers = even * self._bits // 8
        numbers, low, high = jnp.split(
            coded, [of_numbers, (of_numbers + coded.shape[-2]) // 2], axis=-2
        )
        bits = low.astype(jnp.uint16) | (high.astype(jnp.uint16) << 8)
        flat = bits.reshape(*coded.shape[:-2], -1)[..., : even * self._scales]
        scales = lax.bitcast_convert_type(flat, jnp.bfloat16)
        of_each = self._of_each(scales.reshape(*coded.shape[:-2], even, self._scales))
        return (self._numbers_of(numbers) * of_each.astype(jnp.float32))[..., :rows, :]

    def _scales_of(self, x: jax.Array) -> jax.Array:
        """bfloat16[…, rows, scales]: the scale of each block, so that its numbers fit."""
        above, below = self._largest_of(x), self._largest_of(-x)
        larger, smaller = jnp.maximum(above, below), jnp.minimum(above, below)
        if self.dtype == "float8_e4m3fn":
            size, sign = larger / _TOP, jnp.bfloat16(1)
        else:
            # There is one negative number more, so the larger end is written as negative, and
            # exactly. The other one may be rounded by half a unit, as any number.
            most = 1 << (self._bits - 1)
            half = 0 if self.stochastic else 0.5
            size = jnp.maximum(larger / most, smaller / (most - 1 + half))
            sign = jnp.where(above > below, -1, 1).astype(jnp.bfloat16)
        # XLA for CPUs takes the maximum of the numbers that are left without NaN.
        finite = self._largest_of(jnp.where(jnp.isfinite(x), 0.0, 1.0)) == 0
        return sign * _up_to_16_bits(jnp.where(finite, size, jnp.nan))

    def _largest_of(self, x: jax.Array) -> jax.Array:
        """``[…, rows, scales]``: the largest number of each block."""
        block = jnp.arange(LANES) * self._scales // LANES
        own = [jnp.where(block == nth, x, -jnp.inf) for nth in range(self._scales)]
        return jnp.stack([(x if self._scales == 1 else each).max(-1) for each in own], -1)

    def _of_each(self, scales: jax.Array) -> jax.Array:
        """``[…, rows, 128]``: the scale of each number."""
        block = jnp.arange(LANES) * self._scales // LANES
        found = jnp.broadcast_to(scales[..., :1], (*scales.shape[:-1], LANES))
        for nth in range(1, self._scales):
            found = jnp.where(block == nth, scales[..., nth : nth + 1], found)
        return found

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
        # Two rows in one.
        low, high = jnp.split(whole, 2, -2)
        return (low & 15) | (high << 4)

    def _numbers_of(self, coded: jax.Array) -> jax.Array:
        if self.dtype == "float8_e4m3fn":
            return lax.bitcast_convert_type(coded, jnp.float8_e4m3fn).astype(jnp.float32)
        whole = lax.bitcast_convert_type(coded, jnp.int8)
        if self.dtype == "int4":
            # A shift of a signed number repeats its sign.
            whole = jnp.concatenate([(whole << 4) >> 4, whole >> 4], -2)
        return whole.astype(jnp.float32)


def _up_to_16_bits(x: jax.Array) -> jax.Array:
    """bfloat16: positive numbers, rounded up; NaN and infinity stay."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    up = lax.bitcast_convert_type(((bits + 0xFFFF) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), up, x.astype(jnp.bfloat16))
