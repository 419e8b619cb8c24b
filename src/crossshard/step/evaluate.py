"""Evaluate: the mean of a metric over all examples of a data set, in batches of any length."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard.distributed.agreement import check_agreement, processes_of
from crossshard.distributed.progress import PROGRESS, entering
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.model.models import Skeleton, combine
from crossshard.shards.context import shard_context
from crossshard.shards.devices import are_of_all_processes
from crossshard.shards.mesh import number_of_shards
from crossshard.shards.put import own_parts, put
from crossshard.step.batches import SumOf, Weight, check_rows
from crossshard.step.entries import EntryPlacer, specs_of, split_entries


class Evaluator:
    """Means of metrics over data sets, compiled once for each function and shape of a batch.

    Every batch is padded to as many rows as the longest before it. A row of padding is a copy of
    the first row, and does not count.

    Attributes:
      call: the name of the method that runs it, for the other processes.
    """

    call = "evaluate"

    def __init__(
        self,
        mesh: Mesh,
        axes: tuple[str, ...],
        weight: Weight | None,
        names: tuple[str, ...],
        takes_state: bool,
    ):
        self._number = number_of_shards(mesh, axes)
        self._split = PartitionSpec(axes)
        # The shards whose rows this process passes.
        self._parts = own_parts(NamedSharding(mesh, self._split), self._number)
        self._mesh = mesh
        self._in_processes = len(processes_of(mesh)) > 1
        self._is_watched = are_of_all_processes(mesh) or PROGRESS.is_alone
        self._axes = axes
        self._weight = weight
        self._names = names
        self._takes_state = takes_state
        self._whole = EntryPlacer(mesh, axes, None, names)
        self._sums = jax.jit(self._sums_of_batch, static_argnums=(0, 1))

    def __call__(
        self,
        metric_fn: Callable[..., Any],
        skeleton: Skeleton,
        arrays: tuple[Any, Any, Any],
        batches: Iterable[Any],
    ) -> Any:
        """The mean of each value that ``metric_fn`` returns, over all examples.

        Args:
          metric_fn: the metric.
          skeleton: the static part of the model.
          arrays: its parameters, its frozen arrays and its state, one value for all shards.
          batches: the data set.

        Raises:
          ArgumentError: there is no batch, no example counts, or processes pass unequal numbers
            of batches.
          ArgumentTypeError: ``batches`` is a single batch.
        """
        sums = lambda *batch: self._sums(metric_fn, skeleton, arrays, *batch)
        # In 64 bits, since the sums of many batches would round.
        found = [
            jax.tree.map(lambda x: np.asarray(x, np.float64), each)
            for each in jax.device_get(list(self._over(batches, sums)))
        ]
        totals = jax.tree.map(lambda *each: np.sum(each, axis=0), *found)
        return jax.tree.map(_mean, *totals)

    def _over(self, batches: Iterable[Any], run: Callable[[Any, jax.Array], Any]) -> Iterator[Any]:
        """What ``run`` returns for each batch on the devices, given which of its rows count."""
        if isinstance(batches, dict | str) or hasattr(batches, "dtype"):
            raise ArgumentTypeError(
                f"batches is an iterable of batches; got {type(batches).__name__}. Write [batch] "
                f"for a single one."
            )
        longest, number = 0, 0
        for batch in batches:
            with self._entering(), _jax.in_place_of_the_users_mesh(self._mesh):
                with jax.transfer_guard("allow"):
                    placed, counted = self._place(batch, longest, number)
                found = run(placed, counted)
            yield found
            number += 1
            longest = max(longest, counted.shape[0] * self._parts // self._number)
        with self._entering():
            self._check_agreement(f"{number}")
        if not number:
            raise ArgumentError("There is no batch: batches is empty.")

    # A batch.

    def _place(self, batch: Any, longest: int, before: int) -> tuple[Any, jax.Array]:
        """A batch on the devices, padded, and which of its rows count, float32[rows]."""
        rows, whole = split_entries(batch, self._names) if self._names else (batch, None)
        paths, tree = jax.tree_util.tree_flatten_with_path(rows)
        for path, leaf in paths:
            check_rows(path, leaf)
        lengths = sorted({leaf.shape[0] for _, leaf in paths})
        if len(lengths) != 1:
            raise ArgumentError(
                f"All arrays of a batch to evaluate must have as many rows; got {lengths}."
            )
        sharding = NamedSharding(self._mesh, self._split)
        leaves, counted = [leaf for _, leaf in paths], np.ones(lengths, np.float32)
        is_placed = all(getattr(leaf, "sharding", None) == sharding for leaf in leaves)
        own = lengths[0] * self._parts // self._number if is_placed else lengths[0]
        number = own if is_placed else max(longest, math.ceil(own / self._parts) * self._parts)
        each = ", ".join(f"{leaf.dtype}{[number, *leaf.shape[1:]]}" for leaf in leaves)
        self._check_agreement(f"{before} and a further one of {each}")
        if not is_placed:
            leaves = [put(_padded(leaf, number), sharding) for leaf in leaves]
            counted = np.pad(counted, (0, number - lengths[0]))
        elif self._parts < self._number:
            counted = counted[: lengths[0] * self._parts // self._number]
        placed = tree.unflatten(leaves)
        if whole is not None:
            placed = {**placed, **self._whole.place_whole(batch)}
        return placed, put(counted, sharding)

    def _entering(self) -> contextlib.AbstractContextManager[None]:
        return entering(self.call) if self._is_watched else contextlib.nullcontext()

    def _check_agreement(self, batches: str) -> None:
        """Raise unless every process passes a batch now, of as many rows, or none does.

        Before each batch: JAX's CPU devices make the host wait within a sum that others never join.
        On accelerators the last batch is still under way.
        """
        if self._in_processes:
            check_agreement(
                self.call,
                lambda: {"batches:": batches},
                self._mesh,
                "Pass as many batches in every process, of as many rows, of which only the last "
                "may have fewer: they are padded to the longest before them.",
            )

    # Its sums.

    def _sums_of_batch(
        self,
        metric_fn: Callable[..., Any],
        skeleton: Skeleton,
        arrays: tuple[Any, Any, Any],
        batch: Any,
        counted: jax.Array,
    ) -> tuple[Any, Any]:
        """For each value its weighted sum over the examples, and the sum of their weights."""

        def of_shard(arrays: tuple[Any, Any, Any], batch: Any, counted: jax.Array) -> Any:
            values = self._of_shard(metric_fn, skeleton, arrays, batch)
            weights = self._weights(batch, counted)
            paths, tree = jax.tree_util.tree_flatten_with_path(values)
            if not paths:
                raise ArgumentError("metric_fn returned nothing to average.")
            pairs = [_summed(path, value, weights) for path, value in paths]
            totals, of_weights = zip(*lax.psum(pairs, self._axes), strict=True)
            return tree.unflatten(totals), tree.unflatten(of_weights)

        return self._on_shards(of_shard, batch, PartitionSpec())(arrays, batch, counted)

    def _of_shard(
        self, function: Callable[..., Any], skeleton: Skeleton, arrays: Any, batch: Any
    ) -> Any:
        """What a function returns for one shard's rows."""
        model = [combine(skeleton, *arrays), *([arrays[2]] if self._takes_state else [])]
        with shard_context(self._number, axis_name=self._axes):
            return function(*model, batch)

    def _on_shards(
        self, of_shard: Callable[..., Any], batch: Any, out_specs: PartitionSpec
    ) -> Callable[..., Any]:
        """A function of arrays, a batch, and which of its rows count, run on every shard."""
        return jax.shard_map(
            of_shard,
            mesh=self._mesh,
            axis_names=frozenset(self._axes),
            in_specs=(PartitionSpec(), specs_of(batch, self._names, self._split), self._split),
            out_specs=out_specs,
            check_vma=False,
        )

    def _weights(self, batch: Any, counted: jax.Array) -> jax.Array:
        """The weight of each example, ``[rows]``, or of its parts, ``[rows, …]``."""
        if self._weight is None:
            return counted
        if isinstance(self._weight, SumOf):
            # Raises if there is no such entry.
            jax.eval_shape(self._weight, batch)
            given = jnp.asarray(batch[self._weight.key], counted.dtype)
            return _times(given, counted)
        # A function counts the examples of a batch, so also those of a batch of one row.
        rows, whole = split_entries(batch, self._names) if self._names else (batch, None)

        def of_row(row: Any) -> jax.Array:
            one = jax.tree.map(lambda x: x[None], row)
            given = self._weight({**one, **whole} if whole is not None else one)  # type: ignore[misc]
            return jnp.asarray(given, counted.dtype)

        return jax.vmap(of_row)(rows) * counted


def _summed(path: Any, value: Any, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    where = f"metric_fn's value{jax.tree_util.keystr(path)}"
    if not is_number(value):
        raise ArgumentTypeError(f"{where} must be an array; got {type(value).__name__}.")
    value = jnp.asarray(value)
    if value.shape[:1] != weights.shape[:1]:
        raise ArgumentError(
            f"{where} has shape {value.shape}, but a metric is one value per example, [rows, …], "
            f"here {weights.shape[0]} rows on each shard. Leave out the mean: it is taken over all "
            f"examples of all batches."
        )
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool) or jnp.iscomplexobj(
        value
    ):
        raise ArgumentTypeError(f"{where} is {value.dtype}; a metric is real.")
    if weights.shape != value.shape[: weights.ndim]:
        # Of parts of an example, such as tokens, while the value is the whole example's.
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


def _padded(leaf: Any, rows: int) -> Any:
    missing = rows - leaf.shape[0]
    if not missing:
        return leaf
    xp: Any = jnp if isinstance(leaf, jax.Array) else np
    return xp.concatenate([leaf, xp.broadcast_to(leaf[:1], (missing, *leaf.shape[1:]))])
