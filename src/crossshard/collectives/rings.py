"""Rings: products with a sharded array, whose slices go from shard to shard beside them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard.collectives.sums import wide
from crossshard.shards.axes import Shards

# A slice, and where it starts.
_Piece = tuple[jax.Array, jax.Array]
# Products with fewer rows or columns leave most of a TPU's matrix unit idle.
_LANES = 128
# The number of pieces of an array that is gathered piece by piece.
_PIECES = 4


@dataclasses.dataclass(frozen=True)
class Product:
    """A product ``x · w`` with an array that is split along an axis.

    Attributes:
      of_x, of_w: the axis of each that the product sums over.
      axis: the axis of ``w`` that is split.
      dtype: the dtype of the product.
      precision: as for ``jax.lax.dot_general``.
    """

    of_x: int
    of_w: int
    axis: int
    dtype: Any
    precision: Any = None

    def forward(self, x: jax.Array, part: jax.Array, shards: Shards) -> tuple[jax.Array, jax.Array]:
        """Return the product, and ``w`` in full; each slice is multiplied as it arrives."""
        slices: list[_Piece] = []
        for ring in reversed(_rings(shards)):
            size = part.shape[self.axis]
            arrived = [(place * size, w) for place, w in _ring_gather(part, ring)]
            part = _assembled(arrived, ring.size * size, self.axis)
            # The slices before make up this shard's own slice, which comes first.
            start, own = arrived[0]
            before = [(start + place, w) for place, w in slices]
            narrow = not before or before[0][1].shape[self.axis] < _LANES
            slices = [*([(start, own)] if narrow else before), *arrived[1:]]
        slices = [(place, w.astype(x.dtype)) for place, w in slices]
        whole = part.astype(x.dtype)
        if self.axis == self.of_w:
            summands = (
                self._dot(_at(x, place, w.shape[self.axis], self.of_x), w, wide(self.dtype))
                for place, w in slices
            )
            return functools.reduce(jnp.add, summands).astype(self.dtype), whole
        products = ((place, self._dot(x, w, self.dtype)) for place, w in slices)
        return _assembled(
            products, whole.shape[self.axis], self._axis_of_out(x.ndim, self.axis)
        ), whole

    def has_pieces(self, shape: Sequence[int]) -> bool:
        """Return whether ``w`` of this shape can be gathered in pieces, for ``in_pieces``."""
        return len(shape) == 2 and shape[1 - self.axis] % (_PIECES * _LANES) == 0

    def in_pieces(
        self, x: jax.Array, part: jax.Array, gather: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Return what ``forward`` returns, from pieces along the axis that is not split."""
        axis = 1 - self.axis
        arrived = [gather(each).astype(x.dtype) for each in jnp.split(part, _PIECES, axis)]
        whole = jnp.concatenate(arrived, axis)
        if axis != self.of_w:
            columns = [self._dot(x, w, self.dtype) for w in arrived]
            return jnp.concatenate(columns, self._axis_of_out(x.ndim, axis)), whole
        pairs = zip(jnp.split(x, _PIECES, self.of_x), arrived, strict=True)
        summands = (self._dot(x, w, wide(self.dtype)) for x, w in pairs)
        return functools.reduce(jnp.add, summands).astype(self.dtype), whole

    def backward(
        self,
        x: jax.Array,
        whole: jax.Array,
        gradient: jax.Array,
        shards: Shards,
        dtype: Any,
        sent: Callable[[jax.Array, Callable[[jax.Array], jax.Array]], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradient of ``x``, and this shard's slice of the sum of those of ``w``.

        Args:
          dtype: the dtype in which gradients of ``w`` are sent, each slice as soon as it is made.
          sent: returns what is to be summed, given a slice of the gradient, and a function that
            takes the same slice of an array with the shape of ``w``.
        """
        ring, *inner = _rings(shards)

        def piece(place: jax.Array) -> jax.Array:
            rows, columns = x, gradient
            if self.axis == self.of_w:
                rows = _slice(x, place, ring.size, self.of_x)
            else:
                columns = _slice(gradient, place, ring.size, self._axis_of_out(x.ndim, self.axis))
            found = self.gradient_of_w(rows, columns, wide(self.dtype))
            return sent(found, lambda y: _slice(y, place, ring.size, self.axis)).astype(dtype)

        total = _ring_sum(piece, ring)
        # This product alone hides what the other rings still send.
        total, gradient = lax.optimization_barrier((total, gradient))
        of_x = self.gradient_of_x(gradient, whole, x.dtype)
        for each in inner:
            part = functools.partial(_slice, total.astype(dtype), number=each.size, axis=self.axis)
            total = _ring_sum(part, each)
        return of_x, total

    def gradient_of_x(self, gradient: jax.Array, whole: jax.Array, dtype: Any) -> jax.Array:
        """Return the gradient of ``x``, from that of the product."""
        of_w = [axis for axis in range(whole.ndim) if axis != self.of_w]
        of_gradient = [*range(gradient.ndim - len(of_w), gradient.ndim)]
        found = self._contracted(gradient, whole, of_gradient, of_w, dtype)
        return jnp.moveaxis(found, -1, self.of_x)

    def gradient_of_w(self, x: jax.Array, gradient: jax.Array, dtype: Any) -> jax.Array:
        """Return the gradient of ``w``, from that of the product."""
        free = [axis for axis in range(x.ndim) if axis != self.of_x]
        found = self._contracted(x, gradient, free, [*range(len(free))], dtype)
        return jnp.moveaxis(found, 0, self.of_w)

    def _contracted(
        self, x: jax.Array, y: jax.Array, of_x: Sequence[int], of_y: Sequence[int], dtype: Any
    ) -> jax.Array:
        dimensions = (of_x, of_y), ((), ())
        return lax.dot_general(x, y, dimensions, self.precision, preferred_element_type=dtype)

    def _dot(self, x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
        return self._contracted(x, w, [self.of_x], [self.of_w], dtype)

    def _axis_of_out(self, dimensions_of_x: int, axis: int) -> int:
        """Return the axis of the product that is this axis of ``w``, if the product has it."""
        return dimensions_of_x - 1 + axis - (axis > self.of_w)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Groups of shards, in each of which shards send to their neighbours, both ways."""

    name: str  # the mesh axis
    members: Sequence[Sequence[int]]  # the shards of each group in order

    @property
    def size(self) -> int:
        return len(self.members[0])

    def position(self) -> jax.Array:
        """Return the position of this shard in its group, int32[]."""
        of = np.zeros(self.size * len(self.members), np.int32)
        for group in self.members:
            of[list(group)] = np.arange(self.size)
        return jnp.asarray(of)[lax.axis_index(self.name)]

    def after(self, position: jax.Array, steps: int) -> jax.Array:
        """Return the position ``steps`` further, int32[]."""
        return lax.rem(position + (steps + self.size), jnp.int32(self.size))

    def sent(self, x: jax.Array, steps: int) -> jax.Array:
        """Return what the shard ``steps`` before this one sent."""
        pairs = [
            (group[i], group[(i + steps) % self.size])
            for group in self.members
            for i in range(self.size)
        ]
        return lax.ppermute(x, self.name, pairs)


def _rings(shards: Shards) -> list[_Ring]:
    """Return the rings of a sum, in its order; a gather takes them the other way round."""
    everyone = [list(range(shards.num_shards))]
    return [_Ring(name, members or everyone) for name, members in shards.scatter_schedule()]


def _ring_gather(x: jax.Array, ring: _Ring) -> Iterator[_Piece]:
    """Yield the position and the ``x`` of every shard of a ring as it arrives: nearest first."""
    position = ring.position()
    yield position, x
    from_left = from_right = x
    for steps in range(1, ring.size // 2 + 1):
        from_left = ring.sent(from_left, 1)
        yield ring.after(position, -steps), from_left
        if 2 * steps < ring.size:
            from_right = ring.sent(from_right, -1)
            yield ring.after(position, steps), from_right


def _ring_sum(piece: Callable[[jax.Array], jax.Array], ring: _Ring) -> jax.Array:
    """Return the sum over a ring of every shard's ``piece(position)`` at this shard's position.

    Pieces of 16 bits are sent in 16 bits, and added in float32.
    """
    position = ring.position()
    own = piece(position)
    total = own.astype(wide(own.dtype))
    # One sum goes halfway round and grows on each shard; another comes from the other side.
    for way, steps in ((1, ring.size // 2), (-1, (ring.size - 1) // 2)):
        arrived: Any = None
        for step in range(steps, 0, -1):
            other = piece(ring.after(position, way * step))
            if arrived is not None:
                other = (arrived + other.astype(arrived.dtype)).astype(other.dtype)
            arrived = ring.sent(other, way).astype(total.dtype)
        total = total if arrived is None else total + arrived
    return total


def _assembled(pieces: Iterable[_Piece], length: int, axis: int) -> jax.Array:
    """Put pieces into an array, each at its place along an axis of this length."""
    whole: Any = None
    for place, x in pieces:
        if whole is None:
            whole = jnp.zeros((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)
        whole = lax.dynamic_update_slice_in_dim(whole, x, place, axis)
    return whole


def _slice(x: jax.Array, place: jax.Array, number: int, axis: int) -> jax.Array:
    """Return the slice at a place among ``number`` slices along an axis."""
    size = x.shape[axis] // number
    return _at(x, place * size, size, axis)


def _at(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis, allow_negative_indices=False)
