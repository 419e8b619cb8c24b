"""OverData: evaluates and predicts on data sets, in batches of any length, on every shard."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _check, _mesh
from crossshard.distributed.agreement import check_agreement
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.model.models import Skeleton, combine
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import join, resized
from crossshard.shards.cut import spec_over
from crossshard.shards.devices import put
from crossshard.step.batches import (
    BatchPlacer,
    check_batches,
    check_same_rows,
    copied,
    dtype_on_device,
    is_uneven,
    padded,
)
from crossshard.step.function import StepConfig
from crossshard.step.gather import AtUse
from crossshard.step.losses import changed
from crossshard.step.microbatches import SumOf

# A model that every shard reads: its static part, how a shard gets its parameters, and its
# parameters, frozen arrays and state, the same for all shards.
ToRead = tuple[Skeleton, AtUse, tuple[Any, Any, Any]]

# The relative difference of sums of weights that is rounding.
_APART = 1e-3


class OverData:
    """Runs functions on each batch of a data set, compiled once for each function and shape.

    Every batch is padded to as many rows as the longest before it. A row of padding is a copy of
    the first row, and does not count. ``entering`` tells other processes of each batch.
    """

    def __init__(self, config: StepConfig, entering: Callable[[str], Any]):
        self._loss, self._entering = config.loss, entering
        self._where = BatchPlacer(
            config.mesh, config.axes, changed(config.loss, virtual_shards=None)
        )
        once, rows = functools.partial(jax.jit, static_argnums=(0, 1, 2)), self._where.along(0)
        sums = functools.partial(self._on_shards, self._summed, PartitionSpec())
        as_is = functools.partial(self._on_shards, lambda values, *_: values, rows.spec)
        self._sums, self._rows = once(sums), once(as_is, out_shardings=rows)

    def evaluate(self, metric_fn: Callable[..., Any], model: ToRead, batches: Iterable[Any]) -> Any:
        """Return the mean of each value that ``metric_fn`` returns, over all examples."""
        given = self._sums, (metric_fn, *model)
        # In 64 bits, since the sums of many batches would round.
        found = [
            jax.tree.map(lambda x: np.asarray(x, np.float64), each)
            for each in jax.device_get([x for x, _ in self._over("evaluate", batches, *given)])
        ]
        *totals, apart = jax.tree.map(lambda *each: np.sum(each, axis=0), *found)
        if apart.min() > _APART * len(found):
            raise ArgumentError(
                "evaluate weighs each row alone, and of these batches weight= is another number "
                "than the sum of its rows, as with a bound: jnp.maximum(mask.sum(), 1). Pass the "
                "name of the entry, such as weight='mask', or leave the bound out."
            )
        return jax.tree.map(_mean, *totals)

    def predict(self, predict_fn: Callable[..., Any], model: ToRead, batches: Iterable[Any]) -> Any:
        """Return the values of all rows of this process, in their order; see ``TrainStep``."""
        given = self._rows, (predict_fn, *model)
        batch_by_batch, found = self._over("predict", batches, *given), list[Any]()
        latest = next(batch_by_batch)
        for each in batch_by_batch:
            # Fetched one batch later, while the devices compute the next one.
            found.append(_own_rows(*latest))
            latest = each
        found.append(_own_rows(*latest))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    # A batch.

    def _over(
        self, call: str, batches: Iterable[Any], run: Any, given: tuple[Any, ...]
    ) -> Iterator[tuple[Any, jax.Array]]:
        """Yield what ``run(*given, batch, counted)`` returns for each batch, and which rows count.

        Before, it is compared with what the other processes run.
        """
        seen, lower = set[Any](), lambda *batch: run.lower(*given, *batch)
        check_batches(batches)
        where = self._where
        longest, number = 0, 0
        for batch in batches:
            with self._entering(call), _mesh.in_place_of_the_users_mesh(where.mesh):
                with jax.transfer_guard("allow"):
                    placed, counted = self._place(call, batch, longest, number, lower, seen)
                found = run(*given, placed, counted)
            yield found, counted
            number += 1
            longest = max(longest, counted.shape[0] * where.parts // where.number)
        with self._entering(call):
            self._check_agreement(call, f"{number}")
        if not number:
            raise ArgumentError("There is no batch: batches is empty.")

    def _place(
        self,
        call: str,
        batch: Any,
        longest: int,
        before: int,
        lower: Callable[..., Any],
        seen: set[Any],
    ) -> tuple[Any, jax.Array]:
        """Put a batch on the devices, padded; also return which rows count, float32[rows].

        ``lower`` lowers what runs on it, which is compared if this kind of batch was not seen.
        """
        where = self._where
        batch = jax.tree.map(lambda leaf: _mesh.on_mesh(leaf, None), copied(batch))
        rows, whole = where.split(batch)
        where.check_rows(rows)
        if any(map(is_uneven, jax.tree.leaves(rows))):
            raise ArgumentError(
                "This batch was placed for a step whose virtual shards do not divide over the "
                "shards, with rows that do not count. Pass it as it was loaded."
            )
        check_same_rows(rows, where.batch_axes)
        axes, leaves = where.batch_axes.of_rows(rows), jax.tree.leaves(rows)
        length = leaves[0].shape[axes[0]]
        counted = np.ones(length, np.float32)
        is_placed = all(map(where.is_placed, leaves, axes))
        own = length * where.parts // where.number if is_placed else length
        number = own if is_placed else max(longest, math.ceil(own / where.parts) * where.parts)
        each = ", ".join(
            f"{dtype_on_device(leaf)}{list(resized(leaf.shape, axis, number))}"
            for leaf, axis in zip(leaves, axes, strict=True)
        )

        def lowered() -> jax.stages.Lowered:
            """Lower for the types of what is put on the devices below."""
            total = number * where.number // where.parts
            on = lambda x, shape, to: jax.ShapeDtypeStruct(shape, dtype_on_device(x), sharding=to)
            of_rows = lambda x, axis: on(x, resized(x.shape, axis, total), where.along(axis))
            of_whole = lambda x: on(x, x.shape, NamedSharding(where.mesh, PartitionSpec()))
            along = where.batch_axes.tree_of(rows)
            both = jax.tree.map(of_rows, rows, along), jax.tree.map(of_whole, whole)
            return lower(join(*both), on(counted, (total,), where.along(0)))

        kind = each, jax.tree.structure(rows), str(jax.tree.map(np.shape, whole))
        is_new = None if kind in seen else lowered
        self._check_agreement(call, f"{before} and a further one of {each}", is_new)
        seen.add(kind)
        if not is_placed:
            put_rows = lambda x, axis: put(padded(x, axis, number), where.along(axis))
            rows = jax.tree.map(put_rows, rows, where.batch_axes.tree_of(rows))
            counted = np.pad(counted, (0, number - length))
        elif where.parts < where.number:
            counted = counted[:own]
        return join(rows, where.place_whole(whole)), put(counted, where.along(0))

    def _check_agreement(self, call: str, batches: str, lower: Any = None) -> None:
        """Raise unless all processes now run the same on as many rows, or none of them has a batch.

        It runs before each batch: with JAX's CPU devices the host would hang in a sum that others
        never join. On accelerators the last batch is still running meanwhile.
        """
        check_agreement(
            call,
            lambda: {"batches:": batches},
            self._where.mesh,
            "Pass as many batches in every process, of as many rows, of which only the last may "
            "have fewer: they are padded to the longest before them.",
            lower,
        )

    def _on_shards(
        self,
        finish: Callable[[Any, Any, jax.Array], Any],
        out_specs: PartitionSpec,
        function: Callable[..., Any],
        skeleton: Skeleton,
        at_use: AtUse,
        arrays: Any,
        batch: Any,
        counted: jax.Array,
    ) -> Any:
        """Call ``finish(values, rows, counted)`` on each shard, for a function's values."""
        where, takes_state = self._where, self._loss.model_state is not None

        def of_shard(arrays: Any, batch: Any, counted: jax.Array) -> Any:
            params, frozen, model_state = arrays

            def of_model(both: tuple[Any, Any]) -> Any:
                model = combine(skeleton, *both, model_state)
                return function(model, *[model_state] * takes_state, batch)

            with shard_context(where.number, axis_name=where.axes):
                values = at_use.call_on_both(of_model, params, frozen)
            _check_values(values, counted.shape[0])
            return finish(values, batch, counted)

        def specs(use: AtUse | None, tree: Any) -> Any:
            if use is None or not use.params_sharded:
                return PartitionSpec()
            of_leaves = [spec_over(each.spec(where.axes), where.axes) for each in use.partitions]
            return jax.tree.structure(tree).unflatten(of_leaves)

        of_arrays = specs(at_use, arrays[0]), specs(at_use.frozen, arrays[1]), PartitionSpec()
        run = jax.shard_map(
            of_shard,
            mesh=where.mesh,
            axis_names=frozenset(where.axes),
            in_specs=(
                of_arrays,
                where.batch_axes.specs(batch, where.axes),
                PartitionSpec(where.axes),
            ),
            out_specs=out_specs,
            check_vma=False,
        )
        return run(arrays, batch, counted)

    def _summed(self, values: Any, batch: Any, counted: jax.Array) -> tuple[Any, Any, Any]:
        """Return each value's weighted sum over the examples, and the sum of their weights.

        And how far these are from the weight of a shard, relative to it, added over the shards.
        """
        (weights, apart), (leaves, tree) = self._weights(batch, counted), jax.tree.flatten(values)
        pairs = [_sum_of(x, weights) for x in leaves]
        pairs, apart = lax.psum((pairs, apart), self._where.axes)
        totals, of_weights = zip(*pairs, strict=True)
        return tree.unflatten(totals), tree.unflatten(of_weights), apart

    def _weights(self, batch: Any, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the weight of each example, ``[rows]``, or of its parts, ``[rows, …]``.

        And how far the sum of all is from the weight of the rows together, and from so many times
        that, ``[2]``: a mean over the rows weighs them alike, too.
        """
        weight, same = self._loss.weight_fn, jnp.zeros(2)
        if weight is None:
            return counted, same
        if isinstance(weight, SumOf):
            # Raises if there is no such entry.
            jax.eval_shape(weight, batch)
            axis = self._where.batch_axes.tree_of(batch)[weight.key]
            entry = jnp.moveaxis(batch[weight.key], axis, 0)
            return _times(jnp.asarray(entry, counted.dtype), counted), same
        # A function weighs a batch, so it also weighs a batch of one row.
        rows, whole = self._loss.split(batch)
        axes = self._where.batch_axes.tree_of(rows)

        def of_row(row: Any) -> jax.Array:
            one = jax.tree.map(jnp.expand_dims, row, axes)
            return jnp.asarray(weight(join(one, whole)), counted.dtype)

        alone, together = jax.vmap(of_row, (axes,))(rows), jnp.float32(weight(batch))
        total = alone.sum()
        apart = jnp.abs(total - together * jnp.array([1, len(alone)]))
        return alone * counted, apart / jnp.maximum(jnp.abs(total), 1e-30)


def _check_values(values: Any, rows: int) -> None:
    """Raise unless a function has returned arrays with a value for each row."""
    paths = jax.tree_util.tree_leaves_with_path(values)
    if not paths:
        raise ArgumentError("The function of the model and a batch returned nothing.")
    for path, value in paths:
        where = f"The function's value{jax.tree_util.keystr(path)}"
        _check.array(where, value)
        if np.shape(value)[:1] != (rows,):
            raise ArgumentError(
                f"{where} has shape {np.shape(value)}, but it must have a value for each row, "
                f"[rows, …], here {rows} rows on each shard. Leave out the mean: evaluate takes it "
                f"over all examples of all batches."
            )


def _sum_of(value: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    value = jnp.asarray(value)
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool) or jnp.iscomplexobj(
        value
    ):
        raise ArgumentTypeError(f"A metric is real; metric_fn returned {value.dtype}.")
    if weights.shape != value.shape[: weights.ndim]:
        # Weights of parts of an example, such as tokens, while the value is the whole example's.
        weights = weights.sum(range(1, weights.ndim))
    wide = jnp.promote_types(value.dtype, weights.dtype)
    over = tuple(range(weights.ndim))
    # `where`, because 0 · NaN is NaN.
    counts = _times(jnp.ones_like(value, wide), weights)
    total = jnp.where(counts != 0, value.astype(wide) * counts, 0).sum(over)
    return total, weights.sum()


def _times(x: jax.Array, weights: jax.Array) -> jax.Array:
    return x * weights.reshape(*weights.shape, *[1] * (x.ndim - weights.ndim)).astype(x.dtype)


def _mean(total: Any, weight: Any) -> Any:
    if weight == 0:
        raise ArgumentError("No example counts: the weights of all batches are zero.")
    return total / weight


def _own_rows(values: Any, counted: jax.Array) -> Any:
    """Return this process's rows of some arrays, on the host, without those of padding."""
    kept = _own(counted) != 0
    return jax.tree.map(lambda x: _own(x)[kept], values)


def _own(x: jax.Array) -> np.ndarray:
    # Keyed by their first rows, since devices along other axes have copies.
    pieces = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([jax.device_get(pieces[start]) for start in sorted(pieces)])
