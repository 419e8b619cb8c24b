"""AtUse: gathers parameters where the loss uses them, and sums gradients where they are made."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard import _jax
from crossshard.collectives.bucketing import bucketed_gather
from crossshard.collectives.few_bits import gather_in_few_bits
from crossshard.collectives.sums import wide
from crossshard.gradients.local import value_and_grad
from crossshard.jaxprs.deferred import Inside, evaluate
from crossshard.model.layout import UsesRecord
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition
from crossshard.step.leaf import Leaf, OnMesh, Way, dtype_sent, in_few_bits


class Use(NamedTuple):
    """Where the loss uses a parameter.

    Attributes:
      inside: what the use stands inside of.
      dtype: the dtype in which it is used.
      of_row: whether it uses one of its rows, or some.
      in_ring: whether its slices meet a product one by one.
    """

    inside: Inside
    dtype: Any
    of_row: bool
    in_ring: bool


class Found(NamedTuple):
    """What differentiating a loss found.

    Attributes:
      out: the loss with its auxiliary output.
      gradients: the gradients: whole and local, or, where ``early``, this shard's slice of the sum.
      early: for each gradient, whether the backward pass has summed it; empty if none is.
      of_others: the gradients of the other arrays.
    """

    out: Any
    gradients: Any
    early: tuple[bool, ...]
    of_others: Sequence[Any] = ()


@dataclasses.dataclass(frozen=True)
class AtUse:
    """How the loss of one shard gets its parameters, and where their gradients are summed.

    Attributes:
      partitions: the partition of each parameter.
      shards: the shards.
      groups: the groups that reduce independently; ``None`` for all shards.
      in_parts: whether the parameters rest in parts.
      unread: for each parameter, whether its gradient is not to be computed; empty for none.
      reduce_dtype: the dtype in which gradients are sent; ``None`` for their own, or float32.
      gather_dtype: the dtype in which parameters are sent, or the codec; ``None`` for that in
        which they are used.
      waits: whether a stage needs each shard's own gradient, so that all are summed after it.
      frozen: how the arrays get there that are not trained; ``None`` if all of them rest whole.
      record: what is told, once the loss is traced, where it uses each parameter that is gathered,
        or summed, there; ``None`` if nobody asks.
      before: the sums of the microbatches before this one, which is the last, as
        ``pipeline.stages.accumulate`` adds them; ``None`` if there are none, or if they are added
        later.
      on_mesh: where the arrays lie, if they are global ones, of a loss over the batch; ``None``
        inside of ``shard_map``.
    """

    partitions: tuple[Partition, ...]
    shards: Shards
    groups: GroupAssignment | None = None
    in_parts: bool = False
    unread: tuple[bool, ...] = ()
    reduce_dtype: Any = None
    gather_dtype: Any = None
    waits: bool = False
    frozen: "AtUse | None" = None
    record: UsesRecord | None = dataclasses.field(default=None, compare=False)
    before: Any = dataclasses.field(default=None, compare=False)
    on_mesh: OnMesh | None = None

    def over_batch(self, on_mesh: OnMesh) -> "AtUse":
        """The same for global arrays and a loss of all rows, whose gradient XLA sums.

        One shard has all rows, so that the key does not depend on the number of shards, either.
        """
        frozen = None if self.frozen is None else self.frozen.over_batch(on_mesh)
        return dataclasses.replace(
            self, shards=Shards(1), waits=not self.in_parts, frozen=frozen, on_mesh=on_mesh
        )

    def whole(self, params: Any) -> Any:
        """The parameters in full, gathered at once."""
        if not self.in_parts:
            return params
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten(self._gathered(leaves, range(len(leaves))))

    def types(self, params: Any) -> Any:
        """The types of the parameters in full."""
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves, self.partitions, strict=True)
        return tree.unflatten([jax.ShapeDtypeStruct(p.shape, x.dtype) for x, p in pairs])

    @property
    def early(self) -> tuple[bool, ...]:
        """Which gradients are summed where they are made, whatever the loss is."""
        if not self.in_parts:
            return ()
        return tuple(each.travels_alone for each in self.partitions)

    def types_of_gradients(self, params: Any) -> Any:
        """The types of the gradients of any loss."""
        leaves, tree = jax.tree.flatten(self.types(params))
        early = self.early or (False,) * len(leaves)
        types = [
            jax.ShapeDtypeStruct(self._shape_of_sum(each), x.dtype) if is_early else x
            for x, each, is_early in zip(leaves, self.partitions, early, strict=True)
        ]
        return tree.unflatten(types)

    def value_and_grad(
        self,
        loss_of: Callable[..., tuple[Any, Any]],
        params: Any,
        weight: Any = None,
        loss_scale: Any = None,
        others: Sequence[Any] = (),
    ) -> Found:
        """The loss with its auxiliary output, and the gradients that are read.

        Args:
          loss_of: the loss as a function of the parameters and the other arrays, which returns
            ``(loss, aux)``.
          params: the parameters as they rest.
          weight: float[], the weight of this shard; ``None`` if all count the same.
          loss_scale: the scale of the loss; see ``crossshard.value_and_grad``.
          others: further arrays to differentiate, which every shard has whole.
        """
        leaves, tree = jax.tree.flatten(params)
        unread = self.unread or (False,) * len(leaves)
        read = [place for place, each in enumerate(unread) if not each]
        traced, late = self._late(loss_of, params, read, others)
        whole = self._at_start(leaves, late)
        given = list(whole)
        for place in late.intersection(read):
            given[place] = self._slot(place, leaves[place])

        uses: dict[int, list[Use]] = {}

        def of_read(arrays: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
            inputs = list(whole)
            for place, x in zip(read, arrays, strict=True):
                inputs[place] = x
            if traced is None:
                return loss_of(tree.unflatten(inputs), *others)
            for place in late:
                slot = None if unread[place] else inputs[place]
                inputs[place] = self._leaf(place, leaves[place], slot, weight)
            found: tuple[Any, Any] = self._evaluated(traced, [*inputs, *others], uses)
            return found

        compute = value_and_grad(of_read, (0, 1), has_aux=True, loss_scale=loss_scale)
        out, (found, of_others) = compute([given[place] for place in read], list(others))
        if self.record is not None and traced is not None:
            self.record.latest = uses
        gradients = [
            jnp.zeros_like(x) if none else x for x, none in zip(given, unread, strict=True)
        ]
        for place, gradient in zip(read, found, strict=True):
            gradients[place] = gradient
        early = tuple(place in late for place in range(len(leaves))) if late else ()
        return Found(out, tree.unflatten(gradients), early, of_others)

    def call(self, function: Callable[[Any], Any], params: Any) -> Any:
        """What a function of the parameters returns, which are gathered where it uses them."""
        if not self.in_parts:
            return function(params)
        leaves, late = jax.tree.leaves(params), {i for i, waits in enumerate(self.early) if waits}
        inputs = self._at_start(leaves, late)
        for place in late:
            inputs[place] = self._leaf(place, leaves[place], None, None)
        return self._evaluated(self._traced(function, params), inputs, {})

    def with_frozen(self, function: Callable[[Any], Any], frozen: Any) -> Any:
        """What a function of the arrays that are not trained returns; as ``call``."""
        return function(frozen) if self.frozen is None else self.frozen.call(function, frozen)

    def types_of_frozen(self, frozen: Any) -> Any:
        """The arrays that are not trained, or their types in full if some rest in parts."""
        return frozen if self.frozen is None else self.frozen.types(frozen)

    def _traced(
        self, function: Callable[..., Any], params: Any, others: Sequence[Any] = ()
    ) -> tuple[Any, Any]:
        """The jaxpr of a function of the parameters in full, and the tree of its outputs."""
        jaxpr, out = jax.make_jaxpr(function, return_shape=True)(self.types(params), *others)
        return _jax.without_unread(jaxpr), jax.tree.structure(out)

    def _late(
        self,
        loss_of: Callable[..., tuple[Any, Any]],
        params: Any,
        read: Sequence[int],
        others: Sequence[Any],
    ) -> tuple[Any, set[int]]:
        """The traced loss, and the places of the parameters that wait until it uses them.

        ``None``, and none, where it gets all of them as they are.
        """
        rows = [place for place in read if self.partitions[place].row is not None]
        if not self.in_parts and (self.waits or not rows):
            return None, set()
        traced = self._traced(loss_of, params, others)
        if self.in_parts:
            return traced, {place for place, waits in enumerate(self.early) if waits}
        late = self._used_in_rows(traced, jax.tree.leaves(params), rows, others)
        return (traced, late) if late else (None, late)

    def _at_start(self, leaves: Sequence[Any], late: set[int]) -> list[Any]:
        """The parameters, of which those in parts that do not wait are gathered."""
        if not self.in_parts:
            return list(leaves)
        places = [place for place in range(len(leaves)) if place not in late]
        found = list(leaves)
        for place, x in zip(
            places, self._gathered([leaves[i] for i in places], places), strict=True
        ):
            found[place] = x
        return found

    def _used_in_rows(
        self, traced: Any, leaves: Sequence[Any], places: Sequence[int], others: Sequence[Any]
    ) -> set[int]:
        """Which of these parameters the loss uses row by row, as in a loop over its layers.

        XLA puts the sum of a whole gradient where it is made, but one of a row in no loop.
        """
        uses: dict[int, list[Use]] = {}

        def survey(arrays: Sequence[Any]) -> Any:
            inputs: list[Any] = list(arrays)
            for place in places:
                x = arrays[place]
                inputs[place] = self._leaf(place, x, self._slot(place, x), None)
            return self._evaluated(traced, [*inputs, *others], uses)

        jax.eval_shape(survey, list(leaves))
        return {place for place, found in uses.items() if any(use.of_row for use in found)}

    @staticmethod
    def _evaluated(traced: Any, inputs: Sequence[Any], uses: dict[int, list[Use]]) -> Any:
        """What the traced loss returns; where it uses parameters is written down."""
        jaxpr, out = traced
        uses.clear()

        def note(place: int, used: Any, inside: Inside) -> None:
            uses.setdefault(place, []).append(
                Use(inside, used.way.dtype, used.of_row, used.in_ring)
            )

        return jax.tree.unflatten(out, evaluate(jaxpr, inputs, note))

    def _slot(self, place: int, x: Any) -> jax.Array:
        """Zeros in the place of a gradient: what the backward pass leaves of it."""
        return jnp.zeros(self._shape_of_sum(self.partitions[place]), wide(x.dtype))

    def _shape_of_sum(self, partition: Partition) -> tuple[int, ...]:
        """The shape of what the backward pass leaves of a gradient."""
        return partition.local_shape if self.on_mesh is None else partition.packed_shape

    def _leaf(self, place: int, x: Any, slot: Any, weight: Any) -> Leaf:
        sent = (self.shards, self.groups, self.in_parts, self.reduce_dtype, self.gather_dtype)
        way = Way(self.partitions[place], x.dtype, wide(x.dtype), *sent, self.on_mesh)
        arrays = {"value": x, "slot": slot}
        shared = {"weight": weight}
        if self.before is not None:
            values, _, total = self.before
            arrays["before"] = jax.tree.leaves(values)[place]
            shared["before"] = total
        return Leaf(place, way, arrays, shared)

    def _gathered(self, parts: Sequence[Any], places: Sequence[int]) -> list[jax.Array]:
        partitions = [self.partitions[place] for place in places]
        pairs = list(zip(parts, partitions, strict=True))
        codec = self.gather_dtype
        few = [in_few_bits(each, x.dtype, codec) for x, each in pairs]
        with jax.named_scope("gather"):
            sent = [
                x if each.number == 1 else x.astype(dtype_sent(x.dtype, codec))
                for (x, each), is_few in zip(pairs, few, strict=True)
                if not is_few
            ]
            rest = [each for each, is_few in zip(partitions, few, strict=True) if not is_few]
            if self.on_mesh is None:
                others = iter(bucketed_gather(sent, rest, self.shards.within(self.groups)))
            else:
                others = map(self.on_mesh.whole, sent, rest)
            return [
                gather_in_few_bits(x, each, codec, self.shards.within(self.groups))
                if is_few
                else next(others).astype(x.dtype)
                for (x, each), is_few in zip(pairs, few, strict=True)
            ]
