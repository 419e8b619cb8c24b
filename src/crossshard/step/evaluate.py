"""Evaluate: the mean of a metric over all examples of a data set, in batches of any length."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.model.models import Skeleton
from crossshard.shards.batch_axes import join
from crossshard.step.at_use import AtUse
from crossshard.step.config import StepConfig
from crossshard.step.data_set import OverDataSets
from crossshard.step.weight import SumOf


class Evaluator:
    """Means of metrics over data sets, compiled once for each function and shape of a batch."""

    def __init__(self, config: StepConfig):
        self._over = OverDataSets("evaluate", config)
        self._loss = config.loss
        self._sums = jax.jit(self._sums_of_batch, static_argnums=(0, 1, 2))

    def __call__(
        self,
        metric_fn: Callable[..., Any],
        skeleton: Skeleton,
        at_use: AtUse,
        arrays: tuple[Any, Any, Any],
        batches: Iterable[Any],
    ) -> Any:
        """The mean of each value that ``metric_fn`` returns, over all examples.

        Args:
          metric_fn: the metric.
          skeleton: the static part of the model.
          at_use: how a shard gets its parameters.
          arrays: its parameters, its frozen arrays and its state, one value for all shards.
          batches: the data set.

        Raises:
          ArgumentError: there is no batch, no example counts, or processes pass unequal numbers
            of batches.
          ArgumentTypeError: ``batches`` is a single batch.
        """
        sums = lambda *batch: self._sums(metric_fn, skeleton, at_use, arrays, *batch)
        # In 64 bits, since the sums of many batches would round.
        found = [
            jax.tree.map(lambda x: np.asarray(x, np.float64), each)
            for each in jax.device_get(list(self._over.over(batches, sums)))
        ]
        totals = jax.tree.map(lambda *each: np.sum(each, axis=0), *found)
        return jax.tree.map(_mean, *totals)

    def _sums_of_batch(
        self, metric_fn: Callable[..., Any], skeleton: Skeleton, at_use: AtUse, *batch: Any
    ) -> tuple[Any, Any]:
        """For each value its weighted sum over the examples, and the sum of their weights."""

        def sums(values: Any, batch: Any, counted: jax.Array) -> Any:
            weights = self._weights(batch, counted)
            paths, tree = jax.tree_util.tree_flatten_with_path(values)
            if not paths:
                raise ArgumentError("metric_fn returned nothing to average.")
            pairs = [_summed(path, value, weights) for path, value in paths]
            totals, of_weights = zip(*lax.psum(pairs, self._over.axes), strict=True)
            return tree.unflatten(totals), tree.unflatten(of_weights)

        found: tuple[Any, Any] = self._over.on_shards(
            metric_fn, sums, skeleton, at_use, *batch, out_specs=PartitionSpec()
        )
        return found

    def _weights(self, batch: Any, counted: jax.Array) -> jax.Array:
        """The weight of each example, ``[rows]``, or of its parts, ``[rows, …]``."""
        weight = self._loss.weight
        if weight is None:
            return counted
        if isinstance(weight, SumOf):
            # Raises if there is no such entry.
            jax.eval_shape(weight, batch)
            first = self._loss.batch_axes.map(lambda x, axis: jnp.moveaxis(x, axis, 0), batch)
            return _times(jnp.asarray(first[weight.key], counted.dtype), counted)
        # A function counts the examples of a batch, so also those of a batch of one row.
        rows, whole = self._loss.split(batch)
        axes = self._loss.batch_axes.tree_of(rows)

        def of_row(row: Any) -> jax.Array:
            one = jax.tree.map(jnp.expand_dims, row, axes)
            return jnp.asarray(weight(join(one, whole)), counted.dtype)

        return jax.vmap(of_row, (axes,))(rows) * counted


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
