"""Leaf: one parameter on its way to where the loss uses it, and its gradient on its way back."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp

from crossshard.collectives.bucketing import bucketed_gather, bucketed_sum
from crossshard.jaxprs.deferred import Deferred
from crossshard.pipeline.means import to_average
from crossshard.pipeline.stages.accumulate import add, mean
from crossshard.pipeline.stages.aggregate import as_sent
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition


def dtype_sent(dtype: Any, wanted: Any) -> Any:
    """The dtype in which a parameter that is used in this one is sent."""
    return wanted if wanted is not None and jnp.issubdtype(dtype, jnp.floating) else dtype


@dataclasses.dataclass(frozen=True)
class Way:
    """How one parameter gets to its use, and its gradient from it.

    Attributes:
      partition: its partition, or that of its row.
      dtype: the dtype in which it is used.
      summed: the dtype of the sum of its gradients.
      shards, groups, in_parts, reduce_dtype, gather_dtype: as for ``AtUse``.
    """

    partition: Partition
    dtype: Any
    summed: Any
    shards: Shards
    groups: GroupAssignment | None
    in_parts: bool
    reduce_dtype: Any
    gather_dtype: Any

    def forward(self, value: jax.Array) -> jax.Array:
        """The parameter in full."""
        if not self.in_parts:
            return value
        with jax.named_scope("gather"):
            sent = value.astype(dtype_sent(self.dtype, self.gather_dtype))
            (whole,) = bucketed_gather([sent], [self.partition], self.shards, self.groups)
            return whole.astype(self.dtype)

    def backward(self, gradient: jax.Array, shared: Mapping[str, Any], before: Any) -> jax.Array:
        """This shard's slice of the sum of all shards' gradients."""
        weight = shared["weight"]
        if before is not None:
            no_loss = jnp.zeros_like(shared["before"])
            sums = add((before, no_loss, shared["before"]), gradient, no_loss, weight)
            gradient, _ = mean(sums)
            weight = None if weight is None else sums[2]
        with jax.named_scope("reduce"):
            sent = as_sent(to_average(gradient, weight), self.reduce_dtype)
            (total,) = bucketed_sum([sent], [self.partition], self.shards, self.groups)
            return total.astype(self.summed)


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
    """

    name: int
    way: Way
    arrays: dict[str, Any]
    shared: dict[str, Any]
    of_row: bool = False

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
