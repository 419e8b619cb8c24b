"""Merged: one model state for all shards of those that each of them has, such as statistics."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from crossshard._check import is_inexact
from crossshard._flax import AnyVariable, nnx
from crossshard.errors import ArgumentError
from crossshard.model.model_state import streams
from crossshard.model.models import combine
from crossshard.model.state import TrainState
from crossshard.shards.cut import one_for_all

# The variables of a metric, and what makes of their arrays, [shards], those of all rows.
Metric = tuple[list[AnyVariable], Callable[..., tuple[Any, ...]]]


def metrics_among(nodes: Iterable[Any]) -> Iterator[Metric]:
    """Yield those of the nodes of a module that are a metric over rows."""
    for each in nodes:
        if isinstance(each, nnx.metrics.Average):
            yield [each.count, each.total], lambda count, total: (count.sum(0), total.sum(0))
        elif isinstance(each, nnx.metrics.Welford):
            yield [each.count, each.mean, each.m2], _welford


def _welford(count: Any, mean: Any, m2: Any) -> tuple[Any, ...]:
    """Put statistics together by the formula of Chan, Golub and LeVeque (1979)."""
    total = count.sum()
    whole = (count / jnp.maximum(total, 1) * mean).sum()
    return total, whole, (m2 + count * (mean - whole) ** 2).sum()


def merged(state: TrainState) -> Any:
    """Return the model state of all shards, given one of ``[shards, …]``.

    Metrics over rows are those of all rows. Other floats are averaged, and what else there is is
    that of the first shard.
    """
    one = jax.tree.map(one_for_all, state.model_state)
    if not _has_metrics(state):
        return one
    modules = [_module(state, each) for each in (state.model_state, one)]
    of_shards, of_one = (metrics_among(_nodes(each)) for each in modules)
    for (variables, of_all), (targets, _) in zip(of_shards, of_one, strict=True):
        found = of_all(*(each.get_raw_value() for each in variables))
        for target, x in zip(targets, found, strict=True):
            target.set_raw_value(x)
    return state.skeleton.split(modules[1])[-1]


def on_first_shard(state: TrainState) -> Any:
    """Return a model state of ``[shards, …]`` whose metrics are 0 on all shards but the first.

    So what all shards have got counts once, when it is put together again.
    """
    if not _has_metrics(state):
        return state.model_state
    module = _module(state, state.model_state)
    for variable in (each for variables, _ in metrics_among(_nodes(module)) for each in variables):
        variable.set_raw_value(variable.get_raw_value().at[1:].set(0))
    return state.skeleton.split(module)[-1]


def differing(state: TrainState) -> str:
    """Return the name of an array of which only the user knows what it is for all shards.

    It is an integer or a flag, or of a metric of another kind, and differs between the shards;
    empty if none does.
    """
    known, others = set[int](), set[int]()
    if _has_metrics(state):
        nodes = _nodes(_module(state, state.model_state))
        arrays = lambda found: {id(x.get_raw_value()) for x in found if isinstance(x, nnx.Variable)}
        known |= arrays(x for variables, _ in metrics_among(nodes) for x in variables)
        others |= arrays(x for each in nodes if isinstance(each, nnx.Metric) for x in _nodes(each))
    leaves = jax.tree_util.tree_leaves_with_path(state.model_state)
    for (path, x), is_stream in zip(leaves, streams(state.model_state), strict=True):
        counts = id(x) in others or not (is_stream or is_inexact(x))
        if counts and id(x) not in known and _differs(x):
            name = jax.tree_util.keystr(path).removesuffix(".value")
            return f"{'model' if state.skeleton.is_nnx else 'model_state'}{name} ({x.dtype})"
    return ""


def _differs(x: Any) -> bool:
    if isinstance(x, jax.core.Tracer):
        return False  # its numbers are not known
    # Indexing moves the index from the host to the devices.
    with jax.transfer_guard("allow"):
        return bool((x != x[0]).any())


def check_alike(state: TrainState) -> None:
    """Raise ArgumentError if there is no model state of all shards."""
    name = differing(state)
    if name:
        raise ArgumentError(
            f"{name} differs between the shards, and only you know which value is that of all: a "
            f"sum, or the largest. Choose a shard, such as shard=0; or let the loss make it the "
            f"same on all shards, such as by jax.lax.psum of what each adds."
        )


def _has_metrics(state: TrainState) -> bool:
    if not state.skeleton.is_nnx:
        return False
    is_variable = lambda leaf: isinstance(leaf, nnx.Variable)
    variables = jax.tree.leaves(state.model_state, is_leaf=is_variable)
    return any(isinstance(each, nnx.metrics.MetricState) for each in variables)


def _module(state: TrainState, model_state: Any) -> Any:
    return combine(state.skeleton, state.params, state.frozen, model_state)


def _nodes(module: Any) -> list[Any]:
    return [node for _, node in nnx.iter_graph(module)]
