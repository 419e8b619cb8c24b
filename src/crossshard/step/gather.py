"""AtUse: gathers parameters where the loss uses them, and sums gradients where they are made."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding

from crossshard import _check, _jax
from crossshard.collectives.few_bits import DTYPES, LANES, Codec, gather_in_few_bits
from crossshard.collectives.rings import Product
from crossshard.collectives.sums import (
    average,
    bucketed_gather,
    bucketed_sum,
    send_gathered,
    sum_over_shards,
    to_average,
    wide,
)
from crossshard.gradients.local import check_sums, scaled, unscale
from crossshard.jaxprs.deferred import Deferred, Inside, Note, evaluate
from crossshard.model.layout import UsesRecord
from crossshard.pipeline.aggregator import as_sent
from crossshard.pipeline.stages.accumulate import add, mean
from crossshard.pipeline.stages.few_bits import FewBits
from crossshard.pipeline.stages.nonfinite import Rerun
from crossshard.pipeline.update.arrays import squared_norm
from crossshard.shards.axes import Shards
from crossshard.shards.cut import Partition


@dataclasses.dataclass(frozen=True)
class ByXLA:
    """How XLA gathers and sums arrays for a loss outside ``shard_map``: they are global, packed."""

    mesh: Mesh
    axes: tuple[str, ...]  # its shard axes

    def gather(
        self, parts: Sequence[jax.Array], partitions: Sequence[Partition]
    ) -> list[jax.Array]:
        """Replicate arrays, except over the other axes."""
        whole = lambda each: NamedSharding(self.mesh, each.other_axes)
        return [
            lax.with_sharding_constraint(self.split(x, each), whole(each))
            for x, each in zip(parts, partitions, strict=True)
        ]

    def split(self, x: jax.Array, partition: Partition) -> jax.Array:
        """Give each shard its slice of a packed array; XLA sums into it what is not summed yet."""
        placed = NamedSharding(self.mesh, partition.spec(self.axes))
        return lax.with_sharding_constraint(x, placed)


@dataclasses.dataclass(frozen=True)
class AtUse:
    """How the loss of one shard gets its parameters, and where their gradients are summed."""

    partitions: tuple[Partition, ...]  # the partition of each parameter
    shards: Shards
    params_sharded: bool = False  # whether the parameters are sharded
    # For each parameter, whether its gradient is not to be computed; empty for none.
    unread: tuple[bool, ...] = ()
    # The dtype in which gradients are sent; ``None`` for their own, or float32.
    reduce_dtype: Any = None
    # The dtype in which parameters are sent, or the codec; ``None`` for that in which they are
    # used.
    gather_dtype: Any = None
    # Whether all gradients are summed later, as for a stage that needs each shard's own.
    sums_later: bool = False
    # How the loss gets the frozen arrays; ``None`` if all of them are replicated.
    frozen: "AtUse | None" = None
    # Records, once the loss is traced, where it uses each parameter that is gathered, or summed,
    # there; ``None`` to record nothing.
    record: UsesRecord | None = dataclasses.field(default=None, compare=False)
    # The sums of the microbatches before this one, which is the last, as
    # ``pipeline.stages.accumulate`` adds them; ``None`` if there are none, or if they are added
    # later.
    before: Any = dataclasses.field(default=None, compare=False)
    # Sends gradients in few bits, after a division by the total weight or ``divisor``, with the
    # residual of each parameter in ``residuals``; ``None`` to send them in ``reduce_dtype``.
    few_bits: FewBits | None = None
    divisor: int = 1
    residuals: Any = dataclasses.field(default=None, compare=False)
    # Whether to measure the squared norm of this shard's own gradient.
    measures: bool = False
    # How the loss is computed again, if something was not finite; ``None`` the first time.
    rerun: Rerun | None = dataclasses.field(default=None, compare=False)
    # Replaces collectives outside ``shard_map``; ``None`` inside.
    by_xla: ByXLA | None = None

    def whole(self, params: Any) -> Any:
        """Gather all parameters at once."""
        if not self.params_sharded:
            return params
        leaves, tree = jax.tree.flatten(params)
        return tree.unflatten(self.gather(leaves, self.partitions))

    def types(self, params: Any) -> Any:
        """Return the types of the full parameters."""
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(leaves, self.partitions, strict=True)
        return tree.unflatten([jax.ShapeDtypeStruct(p.shape, x.dtype) for x, p in pairs])

    @property
    def always_early(self) -> tuple[bool, ...]:
        """Whether each gradient is summed where it is computed, whatever the loss is."""
        return tuple(self.params_sharded and each.travels_alone for each in self.partitions)

    def types_of_gradients(self, params: Any) -> Any:
        """Return the types of the gradients of any loss."""
        leaves, tree = jax.tree.flatten(self.types(params))
        types = [
            jax.ShapeDtypeStruct(self._shape(each), x.dtype) if is_early else x
            for x, each, is_early in zip(leaves, self.partitions, self.always_early, strict=True)
        ]
        return tree.unflatten(types)

    def call(self, function: Callable[[Any], Any], params: Any) -> Any:
        """Call a function of the parameters, which are gathered where it uses them."""
        if not self.params_sharded:
            return function(params)
        leaves = jax.tree.leaves(params)
        gathered_at_use = {i for i, is_early in enumerate(self.always_early) if is_early}
        inputs = self._at_start(leaves, gathered_at_use)
        for place in gathered_at_use:
            inputs[place] = self._leaf(place, leaves[place], None)
        return _call_traced(self._traced(function, params), inputs)

    def call_on_frozen(self, function: Callable[[Any], Any], frozen: Any) -> Any:
        """Call a function of the frozen arrays, which are gathered where it uses them."""
        return function(frozen) if self.frozen is None else self.frozen.call(function, frozen)

    def call_on_both(
        self, function: Callable[[tuple[Any, Any]], Any], params: Any, frozen: Any
    ) -> Any:
        """Call a function of the parameters and the frozen arrays, gathered where it uses them."""
        of_params = lambda params: self.call_on_frozen(lambda x: function((params, x)), frozen)
        return self.call(of_params, params)

    def types_of_frozen(self, frozen: Any) -> Any:
        """Return the frozen arrays, or the types of the full ones if some are sharded."""
        return frozen if self.frozen is None else self.frozen.types(frozen)

    def _traced(
        self, function: Callable[..., Any], params: Any, others: Sequence[Any] = ()
    ) -> tuple[Any, Any]:
        """Trace a function of the full parameters; return its jaxpr and the tree of its outputs."""
        jaxpr, out = jax.make_jaxpr(function, return_shape=True)(self.types(params), *others)
        return _jax.without_unread(jaxpr), jax.tree.structure(out)

    def value_and_grad(
        self,
        loss_of: Callable[..., tuple[Any, Any]],
        params: Any,
        weight: Any,
        loss_scale: Any,
        others: Sequence[Any],
    ) -> tuple[Any, Any, tuple[bool, ...], Sequence[Any], tuple[Any, Any]]:
        """Return ``(loss, aux)`` of a function of parameters and further arrays, and its gradients.

        The gradient of a parameter is full and local, or this shard's slice of the sum. The third
        result tells for each whether it is the latter, and is empty if none is. Then come the
        gradients of further arrays, which are full; and the next residuals, with the squared norm
        of those gradients of this shard that were summed.
        """
        leaves, tree = jax.tree.flatten(params)
        unread = self.unread or (False,) * len(leaves)
        read = [place for place, each in enumerate(unread) if not each]
        rows = [place for place in read if self.partitions[place].row is not None]
        # Without the trace the loss gets all parameters as they are.
        traced, gathered_at_use = None, set[int]()
        if self.params_sharded:
            traced = self._traced(loss_of, params, others)
            gathered_at_use = {i for i, is_early in enumerate(self.always_early) if is_early}
        elif rows and not self.sums_later:
            traced = self._traced(loss_of, params, others)
            gathered_at_use = self._used_in_rows(traced, leaves, rows, others)
            traced = traced if gathered_at_use else None
        whole = self._at_start(leaves, gathered_at_use)
        given = list(whole)
        for place in gathered_at_use.intersection(read):
            given[place] = self._slot(place, leaves[place])
        refs = self._refs(gathered_at_use.intersection(read))
        shared = self._shared(weight, loss_scale, refs.squared_norm)

        uses: dict[int, list[str]] = {}

        def note(place: int, used: Any, inside: Inside) -> None:
            uses.setdefault(place, []).append(used.describe_use(inside))

        def of_read(arrays: Sequence[Any], others: Sequence[Any]) -> tuple[Any, Any]:
            inputs = list(whole)
            for place, x in zip(read, arrays, strict=True):
                inputs[place] = x
            if traced is None:
                loss, aux = loss_of(tree.unflatten(inputs), *others)
            else:
                for place in gathered_at_use:
                    slot = None if unread[place] else inputs[place]
                    held = refs.held.get(place)
                    inputs[place] = self._leaf(place, leaves[place], slot, held, shared)
                uses.clear()
                loss, aux = _call_traced(traced, [*inputs, *others], note)
            return scaled(loss, loss_scale), (loss, aux)

        given_all = [given[place] for place in read], list(others)
        check_sums(lambda: jax.make_jaxpr(lambda *each: of_read(*each)[0])(*given_all), ())
        found, out = jax.grad(of_read, (0, 1), has_aux=True)(*given_all)
        found, of_others = unscale(found, loss_scale)
        if self.record is not None and traced is not None:
            self.record.latest = uses
        gradients = [
            jnp.zeros_like(x) if none else x for x, none in zip(given, unread, strict=True)
        ]
        for place, gradient in zip(read, found, strict=True):
            gradients[place] = gradient
        early = tuple(place in gathered_at_use for place in range(len(leaves)))
        early = early if gathered_at_use else ()
        return out, tree.unflatten(gradients), early, of_others, self._written(refs)

    def _at_start(self, leaves: Sequence[Any], gathered_at_use: set[int]) -> list[Any]:
        """Gather the sharded parameters, except those that are gathered where they are used."""
        if not self.params_sharded:
            return list(leaves)
        places = [place for place in range(len(leaves)) if place not in gathered_at_use]
        partitions = [self.partitions[place] for place in places]
        found = list(leaves)
        gathered = self.gather([leaves[place] for place in places], partitions)
        for place, x in zip(places, gathered, strict=True):
            found[place] = x
        return found

    def _used_in_rows(
        self, traced: Any, leaves: Sequence[Any], places: Sequence[int], others: Sequence[Any]
    ) -> set[int]:
        """Return which of these parameters the loss uses row by row, as in a loop over its layers.

        XLA sums a full gradient where it is computed, but puts no sum of a row into a loop.
        """
        found = set[int]()

        def note(place: int, used: Any, inside: Inside) -> None:
            found.update([place] * used.of_row)

        def survey(arrays: Sequence[Any]) -> Any:
            inputs: list[Any] = list(arrays)
            for place in places:
                x = arrays[place]
                inputs[place] = self._leaf(place, x, self._slot(place, x))
            return _call_traced(traced, [*inputs, *others], note)

        jax.eval_shape(survey, list(leaves))
        return found

    def _slot(self, place: int, x: Any) -> jax.Array:
        """Return zeros in the place of a gradient, in the shape that the backward pass gives it."""
        return jnp.zeros(self._shape(self.partitions[place]), wide(x.dtype))

    def _refs(self, places: Iterable[int]) -> "Refs":
        """Return what the backward pass writes beside the gradients at these places."""
        every = self.residuals or {}
        held: dict[int, Any] = {}
        for place in places if every else ():
            if every[place] is not None:
                lengths = _lengths(self.partitions[place])
                others = every[place].shape[len(lengths) :]
                held[place] = jax.new_ref(every[place].reshape(math.prod(lengths), *others))
        return Refs(held, jax.new_ref(jnp.zeros(())) if self.measures else None)

    def _written(self, refs: "Refs") -> tuple[Any, Any]:
        """Return the residuals, and the squared norm, as the backward pass has left them."""
        norm = None if refs.squared_norm is None else jax.freeze(refs.squared_norm)
        if self.residuals is None:
            return None, norm
        # What the loss does not use is not sent, and its residual stays.
        after = list(self.residuals)
        for place, ref in refs.held.items():
            after[place] = jax.freeze(ref).reshape(after[place].shape)
        return after, norm

    def _shared(self, weight: Any = None, scale: Any = None, norm: Any = None) -> dict[str, Any]:
        """Return what all parameters have in ``Leaf.shared``."""
        before = None if self.before is None else self.before[2]
        own = weight if weight is None or before is None else before + weight
        counted, total = own, None
        if self.rerun is not None:
            counted = jnp.where(self.rerun.counts, 1.0 if own is None else own, 0.0)
        if self.few_bits is not None and counted is not None:
            # Known before the gradients, which wait for no sum.
            total = sum_over_shards(counted, self.shards)
        weights = {"weight": weight, "before": before, "own": own, "counted": counted}
        scale = scale if self.measures else None
        return {**weights, "total": total, "rerun": self.rerun, "scale": scale, "norm": norm}

    def _leaf(self, place: int, x: Any, slot: Any, held: Any = None, shared: Any = None) -> "Leaf":
        partition = self.partitions[place]
        transfer = Transfer(self._of_one, partition, x.dtype, wide(x.dtype))
        arrays = {"value": x, "slot": slot}
        if held is not None and (lengths := _lengths(partition)):
            arrays["rows"] = jnp.arange(math.prod(lengths)).reshape(lengths)
        if self.before is not None:
            arrays["before"] = jax.tree.leaves(self.before[0])[place]
        shared = self._shared() if shared is None else shared
        return Leaf(place, transfer, arrays, held, shared)

    @functools.cached_property
    def _of_one(self) -> "AtUse":
        """This one without the fields of single parameters, so that equal layers share a trace."""
        return dataclasses.replace(
            self,
            partitions=(),
            unread=(),
            sums_later=False,
            frozen=None,
            record=None,
            before=None,
            residuals=None,
            rerun=None,
        )

    # Communication.

    def _shape(self, partition: Partition) -> tuple[int, ...]:
        """Return the shape of a slice, as the loss sees it."""
        return partition.local_shape if self.by_xla is None else partition.packed_shape

    def gather(
        self, parts: Sequence[Any], partitions: Sequence[Partition], dtypes: Sequence[Any] = ()
    ) -> list[jax.Array]:
        """Gather arrays from their slices, in these dtypes, or in their own."""
        dtypes = dtypes or [x.dtype for x in parts]
        each = list(zip(parts, partitions, dtypes, strict=True))
        few = [self.in_few_bits(partition, dtype) for _, partition, dtype in each]
        with jax.named_scope("gather"):
            plain = [
                (x if partition.number == 1 else x.astype(self.dtype_sent(dtype)), partition)
                for (x, partition, dtype), is_few in zip(each, few, strict=True)
                if not is_few
            ]
            sent = [x for x, _ in plain], [partition for _, partition in plain]
            codec, shards = self.gather_dtype, self.shards
            gather = functools.partial(bucketed_gather, shards=shards)
            others = iter((gather if self.by_xla is None else self.by_xla.gather)(*sent))
            return [
                (gather_in_few_bits(x, part, codec, shards) if is_few else next(others)).astype(
                    dtype
                )
                for (x, part, dtype), is_few in zip(each, few, strict=True)
            ]

    def dtype_sent(self, dtype: Any) -> Any:
        """Return the dtype in which a parameter that is used in this one is sent."""
        wanted = self.gather_dtype
        narrows = wanted is not None and not isinstance(wanted, Codec)
        return wanted if narrows and jnp.issubdtype(dtype, jnp.floating) else dtype

    def in_few_bits(self, partition: Partition, dtype: Any) -> bool:
        """Return whether a codec sends a parameter of this dtype, which has to fill blocks."""
        fills = partition.number > 1 and math.prod(partition.local_shape) >= LANES
        is_coded = isinstance(self.gather_dtype, Codec) and fills
        return is_coded and bool(jnp.issubdtype(dtype, jnp.floating))


def _call_traced(
    traced: Any, inputs: Sequence[Any], note: Note = lambda place, used, inside: None
) -> Any:
    """Call a traced loss; ``note`` is told where it uses parameters."""
    jaxpr, out = traced
    return jax.tree.unflatten(out, evaluate(jaxpr, inputs, note))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """How one parameter is gathered where it is used, and how its gradient is summed there."""

    at_use: AtUse  # what is the same for all parameters
    partition: Partition  # its partition, or that of its row
    dtype: Any  # the dtype in which it is used
    sum_dtype: Any  # the dtype of the sum of its gradients
    # The dtype that it gets back, where several uses convert it; ``None`` if it stays as it is.
    back: Any = None

    def forward(self, value: jax.Array) -> jax.Array:
        """Return the full parameter."""
        if self.at_use.params_sharded:
            (value,) = self.at_use.gather([value], [self.partition], [self.dtype])
        return value if self.back is None else value.astype(self.back)

    def backward(self, gradient: jax.Array, kept: "Kept") -> jax.Array:
        """Return this shard's slice of the sum of all gradients; write what is kept beside it."""
        at_use, rerun, held = self.at_use, kept.shared["rerun"], kept.held
        with jax.named_scope("reduce"):
            sent = self._sent(gradient, kept.shared, kept.before)
            if at_use.by_xla is not None:
                return at_use.by_xla.split(sent, self.partition).astype(self.sum_dtype)
            if at_use.few_bits is None:
                (total,) = bucketed_sum([sent], [self.partition], at_use.shards)
            else:
                before = None if held is None else _rows_of(held, kept.rows)
                of_one = at_use.few_bits.sum_one
                total, lost = of_one(sent, before, self.partition, at_use.shards)
                if held is not None:
                    _set_rows(held, kept.rows, lost)
            total = total.astype(self.sum_dtype)
            own, weight = self._own(gradient, kept.shared, kept.before), kept.shared["own"]
            if rerun is not None:
                # A shard, or a microbatch, of weight 0 may hold NaN.
                counts = True if weight is None else weight != 0
                is_bad = rerun.reports & counts & ~jnp.isfinite(own).all()
                total = jnp.where(is_bad, jnp.nan, total)
            if kept.shared["norm"] is not None:
                # Divided before it is squared: the square of a large scale overflows.
                norm = squared_norm(unscale(own, kept.shared["scale"]))
                kept.shared["norm"][...] += norm
            return total

    def _own(self, gradient: jax.Array, shared: Mapping[str, Any], before: Any) -> Any:
        """Return this shard's gradient, the mean of its microbatches."""
        if before is None:
            return gradient
        no_loss = jnp.zeros_like(shared["before"])
        sums = add((before, no_loss, shared["before"]), gradient, no_loss, shared["weight"])
        return mean(sums)[0]

    def _sent(self, gradient: jax.Array, shared: Mapping[str, Any], before: Any) -> jax.Array:
        """Return what is summed of a gradient, or of a slice of it."""
        weighted = to_average(self._own(gradient, shared, before), shared["counted"])
        if self.at_use.few_bits is None:
            return as_sent(weighted, self.at_use.reduce_dtype)
        # Residuals are in units of the mean.
        return average(weighted, shared["total"], self.at_use.divisor)

    def product(self, x: jax.Array, how: Mapping[str, Any]) -> Product | None:
        """Return the product with ``x`` if it need not wait for the full parameter, else ``None``.

        XLA for TPUs overlaps work with what a neighbour sends, and some with the gather of a piece.
        """
        axis, of, shards = self.partition.axis, self.at_use, self.at_use.shards
        free = not (shards.groups or shards.other_axes or how.get("out_sharding"))
        if not (of.params_sharded and free and shards.torus_factors) or axis is None:
            return None
        if of.in_few_bits(self.partition, self.dtype):
            return None
        (of_x, of_w), batched = how["dimension_numbers"]
        floating = x.dtype == self.dtype and jnp.issubdtype(self.dtype, jnp.floating)
        if any(batched) or len(of_w) != 1 or not floating:
            return None
        dtype = jnp.dtype(how["preferred_element_type"] or self.dtype)
        product = Product(of_x[0], of_w[0], axis, dtype, how["precision"])
        may = shards.in_rings or product.has_pieces(self.partition.shape)
        return product if may else None

    def multiplied(
        self, how: Product, x: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the product, and the full parameter."""
        shards = self.at_use.shards

        def gather(piece: jax.Array) -> jax.Array:
            return send_gathered(piece, how.axis, shards)

        with jax.named_scope("gather"):
            sent = value.astype(self.at_use.dtype_sent(self.dtype))
            if shards.in_rings:
                return how.forward(x, sent, shards)
            return how.in_pieces(x, sent, gather)

    def backward_of_product(
        self, how: Product, kept: "Kept", gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the gradient of ``x``, and what ``backward`` returns."""
        x, whole, shards = kept.x, kept.whole, self.at_use.shards
        shared, before = kept.shared, kept.before
        is_whole = self.at_use.few_bits is not None or shared["norm"] is not None
        if not shards.in_rings or is_whole:
            of_w = how.gradient_of_w(x, gradient, self.dtype)
            of_x = how.gradient_of_x(gradient, whole, x.dtype)
            return of_x, self.backward(of_w, kept)

        def sent(found: jax.Array, slice_of: Callable[[jax.Array], jax.Array]) -> jax.Array:
            return self._sent(found, shared, None if before is None else slice_of(before))

        with jax.named_scope("reduce"):
            dtype = self.at_use.reduce_dtype or wide(how.dtype)
            of_x, total = how.backward(x, whole, gradient, shards, dtype, sent)
            return of_x, total.astype(self.sum_dtype)


def _lengths(partition: Partition) -> tuple[int, ...]:
    """Return how many rows an array has, how many each of these has, and so on."""
    row = partition.row
    return () if row is None else (partition.shape[0], *_lengths(row))


def _rows_of(ref: Any, rows: jax.Array | None) -> jax.Array:
    """Return adjacent rows of an array; all of them for ``None``.

    XLA for GPUs updates rows in the kernel that reads them, if it sees that these are the same.
    """
    if rows is None:
        return jnp.asarray(ref[...])
    first = rows.ravel()[0]
    return lax.dynamic_slice_in_dim(ref[...], first, rows.size, allow_negative_indices=False)


def _set_rows(ref: Any, rows: jax.Array | None, value: jax.Array) -> None:
    """Replace what ``_rows_of`` returns."""
    if rows is None:
        ref[...] = value
        return
    at = rows.ravel()[0]
    ref[...] = lax.dynamic_update_slice_in_dim(ref[...], value, at, 0, allow_negative_indices=False)


class Kept(NamedTuple):
    """What the gradient of a parameter is computed from."""

    x: Any  # what it is multiplied with, and the parameter in full; ``None`` without a product
    whole: Any
    held: Any  # see ``Leaf``
    rows: Any
    shared: Any
    before: Any


class Refs(NamedTuple):
    """What the backward pass writes beside the gradients."""

    # The residual of each parameter by its place, as ``[rows, …]`` of its smallest rows.
    held: Mapping[int, Any]
    squared_norm: Any  # of this shard's own gradients; ``None`` if it is not measured


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _use(transfer: Transfer, how: Product | None, value: Any, slot: Any, kept: Kept) -> jax.Array:
    """Return the full parameter, or its product with ``kept.x``; ``slot`` gets its gradient."""
    return _use_forward(transfer, how, value, slot, kept)[0]


def _use_forward(
    transfer: Transfer, how: Product | None, value: Any, slot: Any, kept: Kept
) -> tuple[jax.Array, Kept]:
    del slot
    if how is None:
        return transfer.forward(value), kept
    product, whole = transfer.multiplied(how, kept.x, value)
    return product, kept._replace(whole=whole)


def _use_backward(
    transfer: Transfer, how: Product | None, kept: Kept, gradient: Any
) -> tuple[Any, ...]:
    of_x = None
    if how is None:
        of_slot = transfer.backward(gradient, kept)
    else:
        of_x, of_slot = transfer.backward_of_product(how, kept, gradient)
    return None, of_slot, Kept(of_x, *[None] * 5)


_use.defvjp(_use_forward, _use_backward)


@dataclasses.dataclass(frozen=True)
class Leaf(Deferred):
    """A parameter that waits for its use, to be gathered there, and its gradient summed."""

    name: int  # its place among the parameters
    transfer: Transfer  # how it is gathered and its gradient summed
    # ``value``, as it is kept; ``slot``, zeros in the place of its gradient, or ``None`` if that is
    # not computed; ``before``, the sum of earlier microbatches, if there are some; and ``rows``,
    # the places of its smallest rows among those of ``refs``.
    arrays: dict[str, Any]
    # The residual of all rows, which the backward pass replaces; ``None`` without.
    refs: Any
    # What is the same for all parameters: ``weight``, float[], of the rows, and ``before``, of the
    # microbatches before them; ``own``, of both, and ``counted``, 0 if the shard is left out; each
    # ``None`` if all count the same. ``total``, the sum over the shards, by which few bits divide.
    # ``scale``, of the loss, where norms are measured, and ``norm``, to which these are added.
    shared: dict[str, Any]
    of_row: bool = False  # whether it is a row of the parameter, or some
    in_ring: bool = False  # whether its slices are multiplied one by one as they arrive

    @property
    def kind(self) -> Hashable:
        """All but its arrays; of one step, all have the same in ``shared``."""
        return self.transfer, self.of_row, self.arrays["slot"] is None

    def describe_use(self, inside: Inside) -> str:
        """Describe where it is used."""
        rows = "row by row" if self.of_row else "where it is used"
        loop = f" in a loop of {inside.turns} turns" if inside.loops else ""
        ring = ", slice by slice beside their product" * self.in_ring
        again = ", and again in the backward pass of jax.checkpoint" * inside.checkpointed
        dtype = self.transfer.at_use.gather_dtype or self.transfer.dtype
        return f"{rows}{loop}{ring}, in {dtype}{again}"

    def of(self, arrays: Any, refs: Any) -> Self:
        """Return it with other arrays and references."""
        return dataclasses.replace(self, arrays=arrays, refs=refs)

    def used(self) -> jax.Array:
        """Return the full parameter, whose gradient is summed here."""
        value, slot = self.arrays["value"], self.arrays["slot"]
        if slot is None:
            return self.transfer.forward(value)
        if not (self.transfer.at_use.params_sharded or self.of_row):
            return value
        return _use(self.transfer, None, value, slot, self._kept(None))

    def multiplied(self, x: jax.Array, how: Mapping[str, Any]) -> tuple[Self, jax.Array] | None:
        """The product with it, if its slices can go round beside it."""
        product = self.transfer.product(x, how)
        # To report, the full gradient is needed at once.
        if product is None or self.shared["rerun"] is not None:
            return None
        value, slot = self.arrays["value"], self.arrays["slot"]
        used = dataclasses.replace(self, in_ring=True)
        if slot is None:
            return used, self.transfer.multiplied(product, x, value)[0]
        return used, _use(self.transfer, product, value, slot, self._kept(x))

    def _kept(self, x: Any) -> Kept:
        rows = self.arrays.get("rows") if self.of_row else None
        return Kept(x, None, self.refs, rows, self.shared, self.arrays.get("before"))

    def in_dtype(self, dtype: Any, *, back: bool = False) -> Self | None:
        """Return it in a dtype of at most as many bits; one that is sent is converted once."""
        own = self.transfer.dtype
        floating = jnp.issubdtype(own, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
        if not floating or jnp.finfo(dtype).bits > jnp.finfo(own).bits:
            return None
        if self.transfer.at_use.params_sharded and own != self.arrays["value"].dtype:
            # Two conversions round twice, and overflow in the first.
            return None
        transfer = dataclasses.replace(
            self.transfer, dtype=jnp.dtype(dtype), back=own if back else None
        )
        if transfer.at_use.params_sharded:
            return dataclasses.replace(self, transfer=transfer)
        arrays = {**self.arrays, "value": self.arrays["value"].astype(dtype)}
        return dataclasses.replace(self, transfer=transfer, arrays=arrays)

    def row(self) -> Self | None:
        """Return what a turn of a scan over its first axis gets; ``None`` if it has no rows."""
        row = self.transfer.partition.row
        return None if row is None else self._split_as(row)

    def rows(self, number: int) -> Self:
        """Return this many of its rows."""
        whole = self.transfer.partition
        return self._split_as(dataclasses.replace(whole, shape=(number, *whole.shape[1:])))

    def _split_as(self, partition: Partition) -> Self:
        transfer = dataclasses.replace(self.transfer, partition=partition)
        return dataclasses.replace(self, transfer=transfer, of_row=True)


def check_gather_dtype(given: Any) -> Any:
    """Return the dtype in which parameters are sent, or the codec; ``None`` for their own.

    Raises:
      ArgumentError: it is not such a dtype.
    """
    name, among = _check.dtype_name(given), ("bfloat16", "float16", "float32", "float64")
    words = (
        "bfloat16, float16, float32 or float64, the dtype in which parameters are sent, or int8, "
        "int4 or float8_e4m3fn, in blocks that share a scale"
    )
    return Codec(name) if name in DTYPES else _check.dtype("gather_dtype", given, among, words)
