"""One value for all shards, to evaluate, to export, or to go on with another number of shards."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _check, _mesh
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.errors import VariableError
from crossshard.model.merged import metrics_among
from crossshard.nnx.per_shard import is_per_shard, number_of_shards, stacked
from crossshard.nnx.slots import HasSlots
from crossshard.shards.cut import one_for_all
from crossshard.shards.devices import on_every_device

_Node = TypeVar("_Node")


def merge_shards(node: _Node, shard: int | None = None) -> _Node:
    """Return a copy in which every variable has one value for all shards, to evaluate or export.

    Variables that differ between shards after a step, such as batch statistics, hold a
    ``PerShardArray``, which a model cannot use outside of a step.

    Args:
      node: an NNX module, an optimizer, ``nnx.metrics``, or a pytree of these.
      shard: the shard whose values to take. If ``None``, floating values are averaged over the
        shards, and random streams are those of the first shard. ``nnx.metrics.Average``, with what
        derives from it, and ``Welford`` become those of all rows; reset them before a step goes
        on. What few bits, or an aggregator, hold back is added up, and is one shard's; the next
        step gives each shard an equal part of it.

    Returns:
      The copy; ``node`` does not change. If there are several processes, all must call it.

    Raises:
      ArgumentError: there is no such shard.
      VariableError: an ``nnx.Param`` differs, as with ``group_assignment``, and ``shard`` is
        ``None``: a mean of weights is a different model. Or an integer differs, such as a counter,
        or another metric.

    >>> import crossshard, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.BatchNorm(1, use_running_average=True, rngs=nnx.Rngs(0))
    >>> model.mean.set_value(crossshard.nnx.PerShardArray(jnp.array([[1.0], [3.0]])))
    >>> merge_shards(model).mean[...]
    Array([2.], dtype=float32)
    """
    if shard is not None:
        _check.whole_number("shard", shard, least=0)
    merged = nnx.clone(node)
    found, held, unknown = [each for _, each in nnx.iter_graph(merged)], set[int](), set[int]()
    for each in found if shard is None else ():
        if isinstance(each, HasSlots):
            each._share_out(1)
            held |= set(map(id, each._held_back()))
        elif isinstance(each, nnx.Metric):
            unknown |= {id(variable) for _, variable in nnx.iter_graph(each)}
    for metric in metrics_among(found if shard is None else ()):
        _put_together(metric.variables, metric.of_all)
        unknown -= set(map(id, metric.variables))
    for variable in found:
        number = number_of_shards(variable) if isinstance(variable, nnx.Variable) else None
        if number is None or id(variable) in held:
            continue
        values = jax.tree.map(on_every_device, stacked(variable.get_raw_value()))
        if shard is not None:
            _check.index("shard", shard, number, "shards")
        elif isinstance(variable, nnx.Param) and not _all_equal(values):
            raise VariableError(
                f"{describe_variable(variable)} differs between {number} shards, and a mean of "
                f"weights is a different model. Choose a shard: merge_shards(model, shard=0)."
            )
        elif (id(variable) in unknown or _counts(variable, values)) and not _all_equal(values):
            raise VariableError(
                f"{describe_variable(variable)} differs between {number} shards, and only you know "
                f"which value is that of all: a sum, or the largest. Write it before, "
                f"variable.set_value(variable[...].array.sum(0)); or choose a shard, "
                f"merge_shards(..., shard=0)."
            )
        row = one_for_all if shard is None else operator.itemgetter(shard)
        variable.set_raw_value(jax.tree.map(functools.partial(_mesh.of_rows, row), values))
    return merged


def _put_together(variables: list[AnyVariable], of_all: Callable[..., Any]) -> None:
    """Write into variables what a function makes of their ``[shards, …]``."""
    if number := next(filter(None, map(number_of_shards, variables)), None):
        values = [on_every_device(stacked(variable.get_raw_value())) for variable in variables]
        is_own = list(map(is_per_shard, variables))
        of_each = lambda x, own: x if own else jnp.broadcast_to(x, (number, *x.shape))
        rows = lambda values: list(map(of_each, values, is_own))
        found = _mesh.of_rows(lambda values: of_all(*rows(values)), values)
        for variable, value in zip(variables, found, strict=True):
            variable.set_raw_value(value)


def _counts(variable: AnyVariable, values: Any) -> bool:
    """Return whether a variable has integers or flags, and is no random stream."""
    is_integer = lambda x: jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    streams = isinstance(variable, nnx.RngState)
    return not streams and any(map(is_integer, jax.tree.leaves(values)))


def _all_equal(values: Any) -> bool:
    rows = [np.asarray(leaf) for leaf in jax.tree.leaves(values)]
    return all(np.array_equal(x, np.broadcast_to(x[0], x.shape), equal_nan=True) for x in rows)
