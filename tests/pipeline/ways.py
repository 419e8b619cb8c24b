"""Ways: the same loss and data, trained in each way to use the package."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard import CrossShardOptimizer, make_train_step
from tests.step.common import in_shard_map, of_each_shard, on_variables

# After each call the parameters, [shards, …], and the metrics of a whole step.
Trained = Iterator[tuple[Any, dict[str, Any]]]


def by_update(opt: CrossShardOptimizer, number: int, *given: Any, **how: Any) -> Trained:
    for after, _ in in_shard_map(opt, *given, number=number, **how):
        yield of_each_shard(after, given[1], number), {}


def by_vmap(
    opt: CrossShardOptimizer, number: int, loss: Any, params: Any, batches: Iterable[Any]
) -> Trained:
    @functools.partial(jax.vmap, axis_name="shards")
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = opt.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    after = jax.tree.map(lambda x: jnp.stack([x] * number), params)
    state = jax.vmap(opt.init, axis_name="shards")(after)
    for batch in batches:
        after, state = step(after, state, batch)
        yield after, {}


def by_variables(opt: CrossShardOptimizer, number: int, *given: Any, **how: Any) -> Trained:
    for after, _, _ in on_variables(opt, *given, number=number, **how):
        yield of_each_shard(after, given[1], number), {}


def by_step(
    opt: CrossShardOptimizer,
    number: int,
    loss: Any,
    params: Any,
    batches: Iterable[Any],
    weight_update: str = "replicated",
) -> Trained:
    step = make_train_step(loss, opt, num_shards=number, weight_update=weight_update)
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch))
        yield of_each_shard(state.params, params, number), metrics


WAYS: dict[str, Callable[..., Trained]] = {
    "update, types": functools.partial(by_update, check_vma=True),
    "vmap": by_vmap,
    "variables, minimize": functools.partial(by_variables, minimize=True),
    "step, replicated": by_step,
    "step, sharded": functools.partial(by_step, weight_update="sharded"),
}


def trained(
    way: str,
    opt: CrossShardOptimizer,
    loss: Any,
    params: dict[str, Any],
    batches: Iterable[Any],
    *,
    number: int,
) -> Trained:
    """What a way to use the package shows after each batch.

    Args:
      way: one of ``WAYS``.
      opt: the optimizer.
      loss: from the parameters and one shard's rows to the loss of these.
      params: the parameters before the first step.
      batches: for each step a pytree of ``[shards, rows, …]``.
      number: the number of shards.
    """
    return WAYS[way](opt, number, loss, params, batches)
