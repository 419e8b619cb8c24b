"""Leaf: one parameter on its way to where the loss uses it, and its gradient on its way back."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard.collectives.bucketing import bucketed_gather, bucketed_sum
from crossshard.collectives.codec import LANES, Codec
from crossshard.collectives.few_bits import gather_in_few_bits
from crossshard.collectives.rings import Product
from crossshard.collectives.sums import send_gathered, wide
from crossshard.jaxprs.deferred import Deferred
from crossshard.pipeline.aggregators.plain import as_sent
from crossshard.pipeline.means import to_average
from crossshard.pipeline.stages.accumulate import add, mean
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition


def dtype_sent(dtype: Any, wanted: Any) -> Any:
    """The dtype in which a parameter that is used in this one is sent."""
    narrows = wanted is not None and not isinstance(wanted, Codec)
    return wanted if narrows and jnp.issubdtype(dtype, jnp.floating) else dtype


def in_few_bits(partition: Partition, dtype: Any, wanted: Any) -> bool:
    """Whether a parameter of this dtype is sent by a codec: if it fills blocks."""
    fills = partition.number > 1 and math.prod(partition.local_shape) >= LANES
    return isinstance(wanted, Codec) and fills and bool(jnp.issubdtype(dtype, jnp.floating))


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """Where global arrays lie, outside of ``shard_map``: XLA gathers and sums them.

    Attributes:
      mesh: the mesh.
      axes: its shard axes.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    def whole(self, part: jax.Array, partition: Partition) -> jax.Array:
        """An array that is split, gathered."""
        return self._as(self.split(part, partition), partition.other_axes)

    def split(self, x: jax.Array, partition: Partition) -> jax.Array:
        """An array, packed, of which each shard has its slice."""
        return self._as(x, partition.spec(self.axes))

    def _as(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))


@dataclasses.dataclass(frozen=True)
class Way:
    """How one parameter gets to its use, and its gradient from it.

    Attributes:
      partition: its partition, or that of its row.
      dtype: the dtype in which it is used.
      summed: the dtype of the sum of its gradients.
      shards, groups, in_parts, reduce_dtype, gather_dtype, on_mesh: as for ``AtUse``.
    """

    partition: Partition
    dtype: Any
    summed: Any
    shards: Shards
    groups: GroupAssignment | None
    in_parts: bool
    reduce_dtype: Any
    gather_dtype: Any
    on_mesh: OnMesh | None

    def forward(self, value: jax.Array) -> jax.Array:
        """The parameter in full."""
        if not self.in_parts:
            return value
        with jax.named_scope("gather"):
            if in_few_bits(self.partition, self.dtype, self.gather_dtype):
                members = self.gather_dtype, self.shards.within(self.groups)
                return gather_in_few_bits(value, self.partition, *members).astype(self.dtype)
            sent = value.astype(dtype_sent(self.dtype, self.gather_dtype))
            if self.on_mesh is not None:
                return self.on_mesh.whole(sent, self.partition).astype(self.dtype)
            (whole,) = bucketed_gather([sent], [self.partition], self.shards.within(self.groups))
            return whole.astype(self.dtype)

    def backward(self, gradient: jax.Array, shared: Mapping[str, Any], before: Any) -> jax.Array:
        """This shard's slice of the sum of all shards' gradients."""
        with jax.named_scope("reduce"):
            if self.on_mesh is not None:
                return self.on_mesh.split(gradient.astype(self.summed), self.partition)
            sent = self._sent(gradient, shared, before)
            (total,) = bucketed_sum([sent], [self.partition], self.shards.within(self.groups))
            return total.astype(self.summed)

    def _sent(self, gradient: jax.Array, shared: Mapping[str, Any], before: Any) -> jax.Array:
        """What is to be summed of a gradient, or of a slice of it."""
        weight = shared["weight"]
        if before is not None:
            no_loss = jnp.zeros_like(shared["before"])
            sums = add((before, no_loss, shared["before"]), gradient, no_loss, weight)
            gradient, _ = mean(sums)
            weight = None if weight is None else sums[2]
        return as_sent(to_average(gradient, weight), self.reduce_dtype)

    def product(self, x: jax.Array, how: Mapping[str, Any]) -> Product | None:
        """The product with ``x``, if it need not wait for the whole parameter; else ``None``.

        XLA for TPUs has work done while a neighbour sends, and some beside a gather of a piece.
        """
        axis = self.partition.axis
        free = not (self.groups or self.shards.other_axes or how.get("out_sharding"))
        if not (self.in_parts and free and self.shards.torus_factors) or axis is None:
            return None
        if in_few_bits(self.partition, self.dtype, self.gather_dtype):
            return None
        (of_x, of_w), batched = how["dimension_numbers"]
        floating = x.dtype == self.dtype and jnp.issubdtype(self.dtype, jnp.floating)
        if any(batched) or len(of_w) != 1 or not floating:
            return None
        dtype = jnp.dtype(how["preferred_element_type"] or self.dtype)
        product = Product(of_x[0], of_w[0], axis, dtype, how["precision"])
        may = self.shards.in_rings or product.has_pieces(self.partition.shape)
        return product if may else None

    def multiplied(
        self, how: Product, x: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The product, and the parameter in full."""

        def gather(piece: jax.Array) -> jax.Array:
            return send_gathered(piece, how.axis, self.shards)

        with jax.named_scope("gather"):
            sent = value.astype(dtype_sent(self.dtype, self.gather_dtype))
            if self.shards.in_rings:
                return how.forward(x, sent, self.shards)
            return how.in_pieces(x, sent, gather)

    def backward_of_product(
        self, how: Product, kept: Any, gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The gradient of ``x``, and this shard's slice of the sum of all shards' gradients."""
        x, whole, shared, before = kept
        if not self.shards.in_rings:
            of_w = how.gradient_of_w(x, gradient, self.dtype)
            of_x = how.gradient_of_x(gradient, whole, x.dtype)
            return of_x, self.backward(of_w, shared, before)

        def sent(found: jax.Array, slice_of: Callable[[jax.Array], jax.Array]) -> jax.Array:
            return self._sent(found, shared, None if before is None else slice_of(before))

        with jax.named_scope("reduce"):
            dtype = self.reduce_dtype or wide(how.dtype)
            of_x, total = how.backward(x, whole, gradient, self.shards, dtype, sent)
            return of_x, total.astype(self.summed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use(way: Way, value: Any, slot: Any, shared: Any, before: Any) -> jax.Array:
    del slot, shared, before
    return way.forward(value)


def _use_forward(
    way: Way, value: Any, slot: Any, shared: Any, before: Any
) -> tuple[jax.Array, Any]:
    del slot
    return way.forward(value), (shared, before)


def _use_backward(way: Way, kept: Any, gradient: Any) -> tuple[Any, ...]:
    return None, way.backward(gradient, *kept), None, None


_use.defvjp(_use_forward, _use_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    way: Way, how: Product, x: jax.Array, value: Any, slot: Any, shared: Any, before: Any
) -> jax.Array:
    del slot, shared, before
    return way.multiplied(how, x, value)[0]


def _multiply_forward(
    way: Way, how: Product, x: jax.Array, value: Any, slot: Any, shared: Any, before: Any
) -> tuple[jax.Array, Any]:
    del slot
    product, whole = way.multiplied(how, x, value)
    return product, (x, whole, shared, before)


def _multiply_backward(way: Way, how: Product, kept: Any, gradient: Any) -> tuple[Any, ...]:
    of_x, of_slot = way.backward_of_product(how, kept, gradient)
    return of_x, None, of_slot, None, None


_multiply.defvjp(_multiply_forward, _multiply_backward)


@dataclasses.dataclass(frozen=True)
class Leaf(Deferred):
    """A parameter until the loss uses it.

    Attributes:
      name: its place among the parameters.
      way: how it gets there.
      arrays: ``value``, as it rests; ``slot``, zeros in the place of its gradient, or ``None`` if
        that is not computed; and ``before``, the sum of earlier microbatches, if there are some.
      shared: what is the same for all rows: ``weight``, float[], of this shard, or ``None`` if all
        count the same; and ``before``, the sum of those of earlier microbatches.
      of_row: whether it is a row of the parameter, or some.
      in_ring: whether its slices meet a product one by one.
    """

    name: int
    way: Way
    arrays: dict[str, Any]
    shared: dict[str, Any]
    of_row: bool = False
    in_ring: bool = False

    @property
    def kind(self) -> Hashable:
        """All but its arrays; of one step, all have the same in ``shared``."""
        return self.way, self.of_row, self.arrays["slot"] is None

    def of(self, arrays: Any) -> Self:
        """The same, made of other arrays."""
        return dataclasses.replace(self, arrays=arrays)

    def used(self) -> jax.Array:
        """The parameter in full, whose gradient is summed here."""
        value, slot = self.arrays["value"], self.arrays["slot"]
        if slot is None:
            return self.way.forward(value)
        if not (self.way.in_parts or self.of_row):
            return value
        return _use(self.way, value, slot, self.shared, self.arrays.get("before"))

    def multiplied(self, x: jax.Array, how: Mapping[str, Any]) -> tuple[Self, jax.Array] | None:
        """The product with it, if its slices can go round beside it."""
        product = self.way.product(x, how)
        if product is None:
            return None
        value, slot = self.arrays["value"], self.arrays["slot"]
        used = dataclasses.replace(self, in_ring=True)
        if slot is None:
            return used, self.way.multiplied(product, x, value)[0]
        before = self.arrays.get("before")
        return used, _multiply(self.way, product, x, value, slot, self.shared, before)

    def in_dtype(self, dtype: Any) -> Self | None:
        """The same in a dtype with as many bits, or fewer; one that is sent is converted once."""
        own = self.way.dtype
        floating = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        if not floating or jnp.finfo(dtype).bits > jnp.finfo(own).bits:
            return None
        if self.way.in_parts and own != self.arrays["value"].dtype:
            # Two conversions round twice, and overflow in the first.
            return None
        way = dataclasses.replace(self.way, dtype=jnp.dtype(dtype))
        if way.in_parts:
            return dataclasses.replace(self, way=way)
        arrays = {**self.arrays, "value": self.arrays["value"].astype(dtype)}
        return dataclasses.replace(self, way=way, arrays=arrays)

    def row(self) -> Self | None:
        """What a turn of a scan over its first axis gets."""
        row = self.way.partition.row
        return None if row is None else self._split_as(row)

    def rows(self, number: int) -> Self:
        """So many rows."""
        whole = self.way.partition
        return self._split_as(dataclasses.replace(whole, shape=(number, *whole.shape[1:])))

    def _split_as(self, partition: Partition) -> Self:
        way = dataclasses.replace(self.way, partition=partition)
        return dataclasses.replace(self, way=way, of_row=True)
