"""AtUse: gathers parameters where the loss uses them, and sums gradients where they are made."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from crossshard import _jax
from crossshard.collectives.all_reduce import wide, widen
from crossshard.collectives.bucketing import bucketed_gather, bucketed_sum
from crossshard.gradients.local import value_and_grad
from crossshard.jaxprs.deferred import Deferred, Inside, evaluate
from crossshard.pipeline.means import to_average
from crossshard.pipeline.stages.accumulate import add, mean
from crossshard.pipeline.stages.aggregate import as_sent
from crossshard.shards.axes import Shards
from crossshard.shards.groups import GroupAssignment
from crossshard.shards.partition import Partition


class Use(NamedTuple):
    """Where the loss uses a parameter.

    Attributes:
      inside: what the use stands inside of.
      dtype: the dtype in which it is used.
    """

    inside: Inside
    dtype: Any


class Found(NamedTuple):
    """What differentiating a loss found.

    Attributes:
      out: the loss with its auxiliary output.
      gradients: the gradients: whole and local, or, where ``early``, this shard's slice of the sum.
      early: for each gradient, whether the backward pass has summed it; empty if none is.
    """

    out: Any
    gradients: Any
    early: tuple[bool, ...]


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
      gather_dtype: the dtype in which parameters are sent; ``None`` for that in which they are
        used.
      waits: whether a stage needs each shard's own gradient, so that all are summed after it.
      frozen: how the arrays get there that are not trained; ``None`` if all of them rest whole.
      before: the sums of the microbatches before this one, which is the last, as
        ``pipeline.stages.accumulate`` adds them; ``None`` if there are none, or if they are added
        later.
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
    before: Any = dataclasses.field(default=None, compare=False)

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
        return tuple(each.number > 1 and not each.is_small for each in self.partitions)

    def types_of_gradients(self, params: Any) -> Any:
        """The types of the gradients of any loss."""
        leaves, tree = jax.tree.flatten(self.types(params))
        early = self.early or (False,) * len(leaves)
        types = [
            jax.ShapeDtypeStruct(each.local_shape, x.dtype) if is_early else x
            for x, each, is_early in zip(leaves, self.partitions, early, strict=True)
        ]
        return tree.unflatten(types)

    def value_and_grad(
        self,
        loss_of: Callable[[Any], tuple[Any, Any]],
        params: Any,
        weight: Any = None,
        loss_scale: Any = None,
    ) -> Found:
        """The loss with its auxiliary output, and the gradients that are read.

        Args:
          loss_of: the loss as a function of the parameters, which returns ``(loss, aux)``.
          params: the parameters as they rest.
          weight: float[], the weight of this shard; ``None`` if all count the same.
          loss_scale: the scale of the loss; see ``crossshard.value_and_grad``.
        """
        leaves, tree = jax.tree.flatten(params)
        unread = self.unread or (False,) * len(leaves)
        jaxpr, out_tree = None, None
        if self.in_parts or not self.waits:
            jaxpr, out_tree = _traced(loss_of, self.types(params))
        late = self._used_late(jaxpr, leaves, unread)
        if not self.in_parts and not late:
            out, gradients = self._of_whole(loss_of, leaves, tree, unread, loss_scale)
            return Found(out, gradients, ())
        small = [place for place in range(len(leaves)) if self.in_parts and place not in late]
        whole = dict(zip(small, self._gathered([leaves[i] for i in small], small), strict=True))
        read = [place for place, each in enumerate(unread) if not each]
        scaled = self._scaled(loss_scale)
        slots = [
            self._slot(place, leaves[place]) if place in late else whole.get(place, leaves[place])
            for place in read
        ]

        def of_read(given: Sequence[Any]) -> tuple[Any, Any]:
            of = dict(zip(read, given, strict=True))
            inputs = [
                scaled._leaf(place, x, of.get(place), weight, [])
                if place in late
                else of.get(place, whole.get(place, x))
                for place, x in enumerate(leaves)
            ]
            found: tuple[Any, Any] = jax.tree.unflatten(out_tree, evaluate(jaxpr, inputs))
            return found

        compute = value_and_grad(of_read, has_aux=True, loss_scale=loss_scale)
        out, found = compute(slots)
        gradients = dict(zip(read, found, strict=True))
        every = [
            gradients[place] if place in gradients else jnp.zeros_like(whole.get(place, x))
            for place, x in enumerate(leaves)
        ]
        early = tuple(place in late for place in range(len(leaves)))
        return Found(out, tree.unflatten(every), early)

    def _scaled(self, loss_scale: Any) -> "AtUse":
        """The same, with the sums before this microbatch scaled as its own backward pass is."""
        if self.before is None or loss_scale is None:
            return self
        values, loss, total = self.before
        values = jax.tree.map(lambda x: x * jnp.asarray(loss_scale, x.dtype), values)
        return dataclasses.replace(self, before=(values, loss, total))

    def call(self, function: Callable[[Any], Any], params: Any) -> Any:
        """What a function of the parameters returns, which are gathered where it uses them."""
        if not self.in_parts:
            return function(params)
        leaves = jax.tree.leaves(params)
        jaxpr, out_tree = _traced(function, self.types(params))
        small = [each.number > 1 and each.is_small for each in self.partitions]
        together = list(itertools.compress(range(len(leaves)), small))
        gathered = self._gathered([leaves[place] for place in together], together)
        whole = dict(zip(together, gathered, strict=True))
        inputs = [
            self._leaf(place, x, None, None, []) if is_late else whole.get(place, x)
            for place, (x, is_late) in enumerate(zip(leaves, self.early, strict=True))
        ]
        return jax.tree.unflatten(out_tree, evaluate(jaxpr, inputs))

    def with_frozen(self, function: Callable[[Any], Any], frozen: Any) -> Any:
        """What a function of the arrays that are not trained returns; as ``call``."""
        return function(frozen) if self.frozen is None else self.frozen.call(function, frozen)

    def types_of_frozen(self, frozen: Any) -> Any:
        """The arrays that are not trained, or their types in full if some rest in parts."""
        return frozen if self.frozen is None else self.frozen.types(frozen)

    def _of_whole(
        self,
        loss_of: Callable[[Any], tuple[Any, Any]],
        leaves: Sequence[Any],
        tree: Any,
        unread: Sequence[bool],
        loss_scale: Any,
    ) -> tuple[Any, Any]:
        places = list(itertools.compress(range(len(leaves)), (not each for each in unread)))

        def filled(arrays: Sequence[Any], others: Sequence[Any]) -> Any:
            every = list(others)
            for place, array in zip(places, arrays, strict=True):
                every[place] = array
            return tree.unflatten(every)

        of_read = lambda arrays: loss_of(filled(arrays, leaves))
        compute = value_and_grad(of_read, has_aux=True, loss_scale=loss_scale)
        out, gradients = compute([leaves[place] for place in places])
        return out, filled(gradients, list(map(jnp.zeros_like, leaves)))

    def _used_late(self, jaxpr: Any, leaves: Sequence[Any], unread: Sequence[bool]) -> set[int]:
        """The places of the parameters that are gathered, or summed, where they are used."""
        if self.in_parts:
            return set(itertools.compress(range(len(leaves)), self.early))
        if self.waits or not _jax.has_scan(jaxpr):
            return set()
        # Outside of loops XLA puts a sum where its gradient is made.
        uses: dict[int, list[Use]] = {}

        def survey(arrays: Sequence[Any]) -> Any:
            inputs: list[Any] = list(arrays)
            for place, x in enumerate(arrays):
                if not unread[place] and self.partitions[place].row is not None:
                    found = uses.setdefault(place, [])
                    inputs[place] = self._leaf(place, x, self._slot(place, x), None, found)
            return evaluate(jaxpr, inputs)

        jax.eval_shape(survey, list(leaves))
        return {place for place, found in uses.items() if any(use.inside.loops for use in found)}

    def _slot(self, place: int, x: Any) -> jax.Array:
        """Zeros in the place of a gradient: what the backward pass leaves of it."""
        return jnp.zeros(self.partitions[place].local_shape, wide(x.dtype))

    def _leaf(self, place: int, x: Any, slot: Any, weight: Any, found: list[Use]) -> "_Leaf":
        how = _Way(dataclasses.replace(self, before=None), self.partitions[place], x.dtype)
        arrays = {"value": x, "slot": slot}
        shared = {"weight": weight}
        if self.before is not None:
            values, _, total = self.before
            arrays["before"] = jax.tree.leaves(values)[place]
            shared["before"] = total
        return _Leaf(how, arrays, shared, found)

    def _gathered(self, parts: Sequence[Any], places: Sequence[int]) -> list[jax.Array]:
        partitions = [self.partitions[place] for place in places]
        with jax.named_scope("gather"):
            sent = [x.astype(_dtype_sent(x.dtype, self.gather_dtype)) for x in parts]
            whole = bucketed_gather(sent, partitions, self.shards, self.groups)
            return [x.astype(part.dtype) for x, part in zip(whole, parts, strict=True)]


def _dtype_sent(own: Any, gather_dtype: Any) -> Any:
    """The dtype in which a parameter that is used in its own is sent: complex ones stay."""
    return own if jnp.issubdtype(own, jnp.complexfloating) else gather_dtype or own


def _traced(loss_of: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
    """The jaxpr of the loss, and the tree of its outputs."""
    jaxpr, out = jax.make_jaxpr(loss_of, return_shape=True)(params)
    return _jax.without_unread(jaxpr), jax.tree.structure(out)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How one parameter gets to its use, and its gradient from it.

    Attributes:
      at_use: what all parameters share.
      partition: its partition, or that of its row.
      dtype: the dtype in which it is used.
    """

    at_use: AtUse
    partition: Partition
    dtype: Any

    def forward(self, value: jax.Array) -> jax.Array:
        """The parameter in full."""
        every = self.at_use
        if not every.in_parts:
            return value
        with jax.named_scope("gather"):
            sent = value.astype(_dtype_sent(self.dtype, every.gather_dtype))
            (whole,) = bucketed_gather([sent], [self.partition], every.shards, every.groups)
            return whole.astype(self.dtype)

    def backward(self, gradient: jax.Array, shared: Mapping[str, Any], before: Any) -> jax.Array:
        """This shard's slice of the sum of all shards' gradients."""
        every, weight = self.at_use, shared["weight"]
        if before is not None:
            no_loss = jnp.zeros_like(shared["before"])
            sums = add((before, no_loss, shared["before"]), gradient, no_loss, weight)
            gradient, _ = mean(sums)
            weight = None if weight is None else sums[2]
        with jax.named_scope("reduce"):
            sent = as_sent(to_average(gradient, weight), every.reduce_dtype)
            (total,) = bucketed_sum([sent], [self.partition], every.shards, every.groups)
            return widen(total)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _use(way: _Way, value: Any, slot: Any, shared: Any, before: Any) -> jax.Array:
    del slot, shared, before
    return way.forward(value)


def _use_forward(
    way: _Way, value: Any, slot: Any, shared: Any, before: Any
) -> tuple[jax.Array, Any]:
    del slot
    return way.forward(value), (shared, before)


def _use_backward(way: _Way, kept: Any, gradient: Any) -> tuple[Any, ...]:
    return None, way.backward(gradient, *kept), None, None


_use.defvjp(_use_forward, _use_backward)


@dataclasses.dataclass(frozen=True)
class _Leaf(Deferred):
    """A parameter until the loss uses it.

    Attributes:
      way: how it gets there.
      arrays: ``value``, as it rests; ``slot``, zeros in the place of its gradient, or ``None`` if
        that is not computed; and ``before``, the sum of earlier microbatches, if there are some.
      shared: what is the same for all rows: ``weight``, float[], of this shard, or ``None`` if all
        count the same; and ``before``, the sum of those of earlier microbatches.
      found: gets its uses.
    """

    way: _Way
    arrays: dict[str, Any]
    shared: dict[str, Any]
    found: list[Use]

    def of(self, arrays: Any) -> Self:
        """The same, made of other arrays."""
        return dataclasses.replace(self, arrays=arrays)

    def used(self, inside: Inside) -> jax.Array:
        """The parameter in full, whose gradient is summed here."""
        self.found.append(Use(inside, self.way.dtype))
        value, slot = self.arrays["value"], self.arrays["slot"]
        if slot is None:
            return self.way.forward(value)
        if not self.way.at_use.in_parts and not inside.loops:
            return value
        return _use(self.way, value, slot, self.shared, self.arrays.get("before"))

    def in_dtype(self, dtype: Any) -> Self | None:
        """The same in a dtype with as many bits, or fewer."""
        own = self.way.dtype
        floating = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        if not floating or jnp.finfo(dtype).bits > jnp.finfo(own).bits:
            return None
        way = dataclasses.replace(self.way, dtype=jnp.dtype(dtype))
        if way.at_use.in_parts:
            return dataclasses.replace(self, way=way)
        arrays = {**self.arrays, "value": self.arrays["value"].astype(dtype)}
        return dataclasses.replace(self, way=way, arrays=arrays)

    def row(self) -> Self | None:
        """What a turn of a scan over its first axis gets."""
        row = self.way.partition.row
        return row and dataclasses.replace(self, way=dataclasses.replace(self.way, partition=row))
