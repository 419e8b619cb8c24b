"""Merged: one model state for all shards of those that each of them has, such as statistics."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard._check import is_inexact
from crossshard._flax import AnyVariable, nnx
from crossshard.errors import ArgumentError
from crossshard.model.model_state import streams
from crossshard.model.models import combine
from crossshard.model.state import TrainState
from crossshard.shards.cut import one_for_all


class Metric(NamedTuple):
    """A metric over rows: its count, and what it has besides."""

    variables: list[AnyVariable]
    # Makes of their arrays, [shards, …], those of all rows, in the same dtypes.
    of_all: Callable[..., list[Any]]
    adds_up: tuple[bool, ...]  # of each variable whether it is a sum over rows

    def arrays(self) -> list[Any]:
        """Return the arrays of its variables."""
        return [each.get_raw_value() for each in self.variables]

    def write(self, arrays: Iterable[Any]) -> None:
        """Write arrays into its variables."""
        for variable, x in zip(self.variables, arrays, strict=True):
            variable.set_raw_value(x)


def metrics_among(nodes: Iterable[Any]) -> Iterator[Metric]:
    """Yield those of the nodes of a module that are a metric over rows."""
    for each in nodes:
        if isinstance(each, nnx.metrics.Average):
            yield Metric([each.count, each.total], _of_all(_added), (True, True))
        elif isinstance(each, nnx.metrics.Welford):
            yield Metric([each.count, each.mean, each.m2], _of_all(_welford), (True, False, True))


def _of_all(put_together: Callable[..., Sequence[Any]]) -> Callable[..., list[Any]]:
    def of_all(*arrays: Any) -> list[Any]:
        # What all shards have alike was counted over all of them, such as of gathered rows.
        alike = _alike(*arrays)
        pairs = zip(arrays, put_together(*arrays), strict=True)
        return [jnp.where(alike, x[0], found).astype(x.dtype) for x, found in pairs]

    return of_all


def _added(count: Any, total: Any) -> Sequence[Any]:
    return count.sum(0), total.sum(0)


def _welford(count: Any, mean: Any, m2: Any) -> Sequence[Any]:
    """Put statistics together by the formula of Chan, Golub and LeVeque (1979)."""
    of_each = _like(count, mean)
    whole = (of_each / jnp.maximum(of_each.sum(0), 1) * mean).sum(0)
    return count.sum(0), whole, (m2 + of_each * (mean - whole) ** 2).sum(0)


def _like(count: Any, x: Any) -> Any:
    """Return counts with as many axes as an array, whose last ones they may lack."""
    return count.reshape(count.shape + (1,) * (x.ndim - count.ndim))


def _alike(*arrays: Any) -> Any:
    """Return whether all shards have the same in arrays of ``[shards, …]``; NaN is the same."""
    same = lambda x: ((x == x[0]) | ((x != x) & (x[0] != x[0]))).all()
    return functools.reduce(jnp.logical_and, map(same, arrays))


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
    for each, target in zip(of_shards, of_one, strict=True):
        target.write(each.of_all(*each.arrays()))
    return state.skeleton.split(modules[1])[-1]


def counted_by_all(state: TrainState) -> list[Any]:
    """Return of each metric of a state of ``[shards, …]`` whether several shards have the same."""
    found = metrics_among(_nodes(_module(state, state.model_state))) if _has_metrics(state) else ()
    return [len(each.arrays()[0]) > 1 and _alike(*each.arrays()) for each in found]


def shared_out(state: TrainState, positions: Any, parts: int, by_all: Sequence[Any] = ()) -> Any:
    """Return a model state of ``[shards, …]`` whose metrics are shared out among the shards.

    So it counts once when it is put together again. The mean and the variance of a part are those
    of all; where fewer rows were counted than there are shards, some have none.

    Args:
      state: the state, in which each shard has all.
      positions: the part that each shard takes.
      parts: how many parts there are.
      by_all: of each metric whether all shards are to have all, as ``counted_by_all`` says.
    """
    if parts == 1 or not _has_metrics(state):
        return state.model_state
    module = _module(state, state.model_state)
    for place, each in enumerate(metrics_among(_nodes(module))):
        count, *_ = arrays = each.arrays()
        at = _like(jnp.asarray(positions), count)
        # Parts that all are alike would be taken for what all shards have counted.
        uneven = (count % parts == 0) & (count // parts > 1)
        moves = (at == 0).astype(count.dtype) - (at == parts - 1).astype(count.dtype)
        part = count // parts + (at < count % parts) + jnp.where(uneven, moves, 0)
        share, written = part / jnp.maximum(count, 1), []
        for x, adds_up in zip(arrays, each.adds_up, strict=True):
            own = x if not adds_up else part if x is count else x * _like(share, x)
            whole = by_all[place] if by_all else False
            written.append(jnp.where(whole, x, own).astype(x.dtype))
        each.write(written)
    return state.skeleton.split(module)[-1]


def together(state: TrainState, flags: list[bool]) -> list[bool]:
    """Return flags of the arrays of a model state, where those of a metric have the same."""
    found = list(flags)
    if _has_metrics(state):
        places = {id(x): place for place, x in enumerate(jax.tree.leaves(state.model_state))}
        for each in metrics_among(_nodes(_module(state, state.model_state))):
            of_metric = [places[id(x)] for x in each.arrays()]
            for place in of_metric:
                found[place] = any(flags[other] for other in of_metric)
    return found


def differing(state: TrainState) -> str:
    """Return the name of an array of which only the user knows what it is for all shards.

    It is an integer or a flag, or of a metric of another kind, and differs between the shards;
    empty if none does.
    """
    known, others = set[int](), set[int]()
    if state.skeleton.is_nnx:
        nodes = _nodes(_module(state, state.model_state))
        known = {id(x) for each in metrics_among(nodes) for x in each.arrays()}
        metrics = [each for each in nodes if isinstance(each, nnx.Metric)]
        inside = [x for each in metrics for x in _nodes(each) if isinstance(x, nnx.Variable)]
        others = {id(x) for each in inside for x in jax.tree.leaves(each.get_raw_value())}
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
        return not bool(_alike(x))


def check_alike(state: TrainState) -> None:
    """Raise ArgumentError if there is no model state of all shards."""
    name = differing(state)
    if name:
        raise ArgumentError(
            f"{name} differs between the shards, and only you know which value is that of all: a "
            f"sum, or the largest. Choose a shard, such as shard=0, whose statistics are then "
            f"taken, too; or let the loss make it the same on all shards, such as by jax.lax.psum "
            f"of what each adds."
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
