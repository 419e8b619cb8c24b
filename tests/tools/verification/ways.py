"""One training step, run in three ways; what it does on each shard is a function of ours."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import crossshard
from tests.tools.steps import first_params, mesh_of, over, updated

AXIS, ROWS = "s", 32


@dataclasses.dataclass(frozen=True)
class Here:
    """The shards, as the code on one of them sees them."""

    n: int

    def index(self) -> Any:
        return lax.axis_index(AXIS)

    def sum(self, x: Any) -> Any:
        return lax.psum(x, AXIS)

    def mean(self, x: Any) -> Any:
        return lax.pmean(x, AXIS)

    def weighted(self, x: Any, weight: Callable[[Any], Any]) -> Any:
        """The sum of what the shards have times a weight by their number."""
        own = weight(self.index())
        return jax.tree.map(lambda x: self.sum(own * x), x)

    def of(self, x: Any, shard: int) -> Any:
        return self.weighted(x, lambda i: jnp.where(i == min(shard, self.n - 1), 1.0, 0.0))

    def group_sum(self, x: Any, size: int) -> Any:
        """The sum over each group of neighbours."""

        def one(x: Any) -> Any:
            placed = jnp.where(jnp.arange(self.n) == self.index(), 1.0, 0.0)
            every = self.sum(placed.reshape(-1, *[1] * x.ndim) * x)
            mine = jnp.where(jnp.arange(self.n) // size == self.index() // size, 1.0, 0.0)
            return jnp.tensordot(mine, every, 1)

        return jax.tree.map(one, x)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step: what it does on a shard, and how its state and batch lie."""

    # (here, params, rest, x, y, key) -> (gradients, loss, rest)
    body: Callable[..., tuple[Any, Any, Any]]
    per_shard: bool = False  # whether each shard has a copy of the state
    # Arrays of the state beside the parameters: statistics, counters, keys.
    rest: dict[str, Any] = dataclasses.field(default_factory=dict)
    key: Any = None  # the last argument of the step
    chain: Callable[[Any], Any] = lambda optimizer: optimizer

    def verified(self, way: str, **options: Any) -> crossshard.tools.Verification:
        make_step = lambda optimizer, n: WAYS[way](self, self.chain(optimizer), n)
        return crossshard.verify(make_step, *BATCH, num_shards=8, key=self.key, **options)


@dataclasses.dataclass(frozen=True)
class Making:
    """A step that is made of a plan, for n shards."""

    plan: Plan
    optimizer: Any
    n: int
    is_pmap: bool = False

    @property
    def mesh(self) -> Any:
        return mesh_of(s=self.n)

    @property
    def stacked(self) -> bool:
        return self.plan.per_shard or self.is_pmap

    @property
    def specs(self) -> tuple[Any, ...]:
        """How the state, x, y and the key lie."""
        keys = [] if self.plan.key is None else [P()]
        return (P(AXIS) if self.stacked else P(), P(AXIS), P(AXIS), *keys)

    def split(self, x: Any) -> Any:
        return x.reshape(self.n, -1, *x.shape[1:])

    def state(self) -> Any:
        params = first_params()
        state = params, self.optimizer.init(params), self.plan.rest
        stack = lambda x: jnp.broadcast_to(x, (self.n, *jnp.shape(x)))
        return jax.tree.map(stack, state) if self.stacked else state

    def on_shard(self, params: Any, rest: Any, x: Any, y: Any, key: Any = None) -> Any:
        return self.plan.body(Here(self.n), params, rest, x, y, key)

    def one(self, state: Any, x: Any, y: Any, *key: Any) -> Any:
        params, opt_state, rest = state
        gradients, loss, rest = self.on_shard(params, rest, x, y, *key)
        return (*updated(self.optimizer, params, opt_state, gradients), rest), loss


def in_shard_map(making: Making) -> Any:
    def step(state: Any, x: Any, y: Any, *key: Any) -> Any:
        first = jax.tree.map(lambda x: x[0], state) if making.stacked else state
        after, loss = making.one(first, x, y, *key)
        return (jax.tree.map(lambda x: x[None], after) if making.stacked else after), loss

    specs = making.specs
    return over(step, specs, (specs[0], P()), making.mesh), making.state()


def in_pmap(making: Making) -> Any:
    axes = (0, 0, 0, None)[: len(making.specs)]
    run = jax.pmap(making.one, AXIS, in_axes=axes, devices=jax.devices()[: making.n])

    def step(state: Any, x: Any, y: Any, *key: Any) -> Any:
        state, loss = run(state, making.split(x), making.split(y), *key)
        return state, loss[0]

    return step, making.state()


class Net(nnx.Module):
    def __init__(self, rest: dict[str, Any]):
        for name, value in first_params().items():
            setattr(self, name, nnx.Param(value))
        for name, value in rest.items():
            setattr(self, name, nnx.BatchStat(value))


def in_nnx_shard_map(making: Making) -> Any:
    """The model and the optimizer are changed in place."""
    model = Net(making.plan.rest)
    opt = nnx.Optimizer(model, making.optimizer, wrt=nnx.Param)

    def reshape(how: Callable[[Any], Any], *nodes: Any) -> None:
        for each in nodes if making.stacked else ():
            nnx.update(each, jax.tree.map(how, nnx.state(each)))

    reshape(lambda x: jnp.broadcast_to(x, (making.n, *x.shape)), model, opt)
    lie, *others = making.specs

    @nnx.jit
    @nnx.shard_map(mesh=making.mesh, in_specs=(lie, lie, *others), out_specs=P(), check_vma=False)
    def step(model: Any, opt: Any, x: Any, y: Any, *key: Any) -> Any:
        reshape(lambda x: x[0], model, opt)
        params = {"a": model.a[...], "b": model.b[...]}
        rest = {name: getattr(model, name)[...] for name in making.plan.rest}
        gradients, loss, rest = making.on_shard(params, rest, x, y, *key)
        like = nnx.state(model, nnx.Param)
        opt.update(model, jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(gradients)))
        for name, value in rest.items():
            getattr(model, name)[...] = value
        reshape(lambda x: x[None], model, opt)
        return loss

    return step, model, opt


WAYS: dict[str, Callable[[Plan, Any, int], Any]] = {
    "shard_map": lambda *made: in_shard_map(Making(*made)),
    "pmap": lambda *made: in_pmap(Making(*made, is_pmap=True)),
    "nnx.shard_map": lambda *made: in_nnx_shard_map(Making(*made)),
}


# The loss, and a batch whose parts differ.


def batch() -> tuple[np.ndarray, np.ndarray]:
    """The last column of x is a mask, of which each shard has another number of ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32)
    x[:, 4] = np.arange(ROWS) % 4 <= np.arange(ROWS) // 4 % 4
    return x, (x[:, 0] - x[:, 1] + np.arange(ROWS) / 10).astype(np.float32)


BATCH = batch()


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x[:, :4] @ params["a"])


def errors(params: Any, x: Any, y: Any) -> Any:
    """float[rows]."""
    return (hidden(params, x) @ params["b"] - y) ** 2


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    return errors(params, x, y).mean()


def dropped(params: Any, x: Any, y: Any, key: Any) -> Any:
    """The loss, with dropout by this key."""
    h = hidden(params, x)
    kept = jax.random.bernoulli(key, 0.8, h.shape)
    return jnp.mean((jnp.where(kept, h / 0.8, 0) @ params["b"] - y) ** 2)
