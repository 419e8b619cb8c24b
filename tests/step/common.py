"""What several tests of steps share: one device, one's own shard_map, variables, comparisons."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step


def assert_close(got: Any, expected: Any, atol: float = 1e-6, rtol: float = 0.0) -> None:
    """Every leaf of one pytree is close to that of another."""
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(lambda a, b: close(np.asarray(a), np.asarray(b)), got, expected)


def assert_same(got: Any, expected: Any) -> None:
    """Every leaf of one pytree has the values of that of another."""
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def sgd_step(loss: Any, rate: float, number: int, **options: Any) -> Any:
    """A step of plain SGD on a number of shards."""
    return make_train_step(loss, optax.sgd(rate), num_shards=number, **options)


def train(step: Any, state: Any, batches: Iterable[Any]) -> Any:
    """The state after a step on each batch."""
    for batch in batches:
        state, _ = step(state, batch)
    return state


@functools.cache
def _one_device_step(loss: Any, optimizer: Any, needs_value: bool) -> Any:
    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        extra = {"value": value} if needs_value else {}
        updates, state = optimizer.update(gradients, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


def on_one_device(
    loss: Any, optimizer: Any, params: Any, batches: Iterable[Any], *, needs_value: bool = False
) -> Any:
    """The parameters and the state that plain Optax reaches on the whole batches."""
    params = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(params)
    for batch in batches:
        params, state = _one_device_step(loss, optimizer, needs_value)(params, state, batch)
    return jax.device_get((params, state))


def follows_one_device(
    loss: Any, optimizer: Any, start: Any, batches: Any, /, *, atol: float = 1e-6, **options: Any
) -> tuple[Any, Any]:
    """A step and its state after the batches, whose model is that of one device."""
    step = make_train_step(loss, optimizer, **options)
    state = train(step, step.init(start), batches)
    assert_close(step.model(state), on_one_device(loss, optimizer, start, batches)[0], atol)
    return step, state


def shard_map_of(
    opt: CrossShardOptimizer, loss: Any, params: Any, number: int, check_vma: bool, weigh: Any
) -> tuple[Any, Any]:
    """``init(params)`` and ``step(carry, batch)`` of the Optax idiom, in one's own shard_map.

    Of a batch each shard gets one entry along axis 0. ``weigh`` is its weight, or ``None``.
    """
    devices = jax.devices()[:number]
    mesh = jax.make_mesh((number,), ("shards",), axis_types=(AxisType.Auto,), devices=devices)
    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    # Under groups parameters and state differ between shards.
    grouped = opt.group_assignment is not None
    one = lambda tree: jax.tree.map(lambda x: x[0], tree) if grouped else tree
    each = lambda tree: jax.tree.map(lambda x: x[None], tree) if grouped else tree
    carried = (P("shards"), P("shards")) if grouped else (P(), opt.state_specs(params, number))

    @jax.jit
    @functools.partial(over, in_specs=P(), out_specs=carried)
    def init(params: Any) -> Any:
        return each((params, opt.init(params)))

    @jax.jit
    @functools.partial(over, in_specs=(carried, P("shards")), out_specs=carried)
    def step(carry: Any, batch: Any) -> Any:
        params, state = one(carry)
        batch = jax.tree.map(lambda x: x[0], batch)
        differentiate = crossshard.value_and_grad(loss, loss_scale=state.loss_scale)
        _, gradients = differentiate(params, batch)
        weight = {} if weigh is None else {"weight": weigh(batch)}
        updates, state = opt.update(gradients, state, params, **weight)
        return each((optax.apply_updates(params, updates), state))

    return init, step


def in_shard_map(
    opt: CrossShardOptimizer,
    loss: Any,
    params: Any,
    batches: Iterable[Any],
    *,
    check_vma: bool = True,
    weigh: Any = None,
    number: int = 4,
) -> Iterator[tuple[Any, Any]]:
    """The parameters and the state after each call of the Optax idiom."""
    init, step = shard_map_of(opt, loss, params, number, check_vma, weigh)
    carry = init(params)
    for batch in batches:
        carry = step(carry, batch)
        yield carry


class Parameters(nnx.Module):
    """A module of a dictionary of parameters."""

    def __init__(self, params: dict[str, Any]):
        self.names = tuple(params)
        for name, x in params.items():
            setattr(self, name, nnx.Param(jnp.asarray(x)))

    def values(self) -> dict[str, Any]:
        """The values of the parameters."""
        return {name: getattr(self, name)[...] for name in self.names}


def on_variables(
    opt: CrossShardOptimizer,
    loss: Any,
    params: dict[str, Any],
    batches: Iterable[Any],
    *,
    minimize: bool = True,
    number: int = 4,
) -> Iterator[tuple[dict[str, Any], Any, int]]:
    """The parameters, the state and the global step after each call on NNX variables."""
    model, count = Parameters(params), nnx.Variable(jnp.array(0))

    @crossshard.shard(num_shards=number)
    def step(model: Any, opt: Any, count: Any, batch: Any) -> None:
        batch = jax.tree.map(lambda x: x[0], batch)
        own_loss = lambda: loss(model.values(), batch)
        if minimize:
            opt.minimize(own_loss, count, var_list=model)
        else:
            pairs = opt.compute_gradients(own_loss, var_list=model)
            opt.apply_gradients(pairs, count)

    for batch in batches:
        step(model, opt, count, batch)
        yield model.values(), opt.state, int(count[...])


def of_each_shard(params: Any, like: Any, number: int = 4) -> Any:
    """``[shards, …]`` of parameters that are stored so, or once for all shards."""

    def one(x: Any, like: Any) -> np.ndarray:
        x = np.asarray(x.array if isinstance(x, crossshard.nnx.PerShardArray) else x)
        return x if x.ndim > np.ndim(like) else np.broadcast_to(x, (number, *x.shape))

    return jax.tree.map(one, params, like, is_leaf=lambda x: hasattr(x, "array"))
