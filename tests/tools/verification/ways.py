"""One training step, run in seven ways; what it does on each shard is a function of ours."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import _jax
from tests.tools.steps import first_params, mesh_of, over, updated

AXIS = "s"
WAYS = ["vma", "no vma", "pmap", "jit", "nnx.shard_map", "nnx.jit", "nnx.pmap"]


@dataclasses.dataclass(frozen=True)
class Here:
    """The shards, as the code on one of them sees them."""

    n: int
    vma: bool

    def local(self, params: Any) -> Any:
        """So that gradients are those of the shard's own rows."""
        varies = lambda x: not self.vma or AXIS in _jax.varying_axes(x)
        cast = lambda x: x if varies(x) else lax.pcast(x, (AXIS,), to="varying")
        return jax.tree.map(cast, params)

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


# body(here, params, stats, x, y, key) -> (gradients, loss, stats)
Body = Callable[..., tuple[Any, Any, Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step: what it does on a shard, and how its state and batch lie."""

    body: Body
    per_shard: bool = False
    whole_batch: bool = False
    stats: bool = False
    keyed: bool = False


def first_stats(plan: Plan) -> dict[str, jax.Array]:
    return {"mean": jnp.zeros(6)} if plan.stats else {}


class Net(nnx.Module):
    def __init__(self, plan: Plan):
        params = first_params()
        self.a, self.b = nnx.Param(params["a"]), nnx.Param(params["b"])
        self.mean = nnx.BatchStat(jnp.zeros(6))
        self.uses = plan.stats

    def stats(self) -> dict[str, jax.Array]:
        return {"mean": self.mean[...]} if self.uses else {}


def factory(way: str, plan: Plan) -> Callable[[Any, int], Any]:
    """``make_step`` of this way."""
    return lambda optimizer, n: _build(way, plan, optimizer, n)


def _build(way: str, plan: Plan, optimizer: Any, n: int) -> Any:
    mesh = mesh_of(s=n)
    stacked = plan.per_shard or way.endswith("pmap")
    here = Here(n, way == "vma")
    stack = lambda tree: jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree)
    lie, rows = (P(AXIS) if stacked else P()), (P() if plan.whole_batch else P(AXIS))
    keys = (P(),) if plan.keyed else ()

    def split(x: Any) -> Any:
        if plan.whole_batch:
            return jnp.broadcast_to(x, (n, *x.shape))
        return x.reshape(n, -1, *x.shape[1:])

    def of_shard(params: Any, stats: Any, x: Any, y: Any, key: Any = None) -> Any:
        return plan.body(here, params, stats, x, y, key)

    if not way.startswith("nnx"):
        params = first_params()
        state: Any = (params, optimizer.init(params), first_stats(plan))
        state = stack(state) if stacked else state

        def one(state: Any, x: Any, y: Any, *key: Any) -> Any:
            params, opt_state, stats = state
            gradients, loss, stats = of_shard(params, stats, x, y, *key)
            return (*updated(optimizer, params, opt_state, gradients), stats), loss

        if way == "pmap":
            axes = (0, 0, 0, None)[: 3 + plan.keyed]
            run = jax.pmap(one, AXIS, in_axes=axes, devices=jax.devices()[:n])

            def step(state: Any, x: Any, y: Any, *key: Any) -> Any:
                state, loss = run(state, split(x), split(y), *key)
                return state, loss[0]

            return step, state
        if way == "jit":

            @jax.jit
            def step(state: Any, x: Any, y: Any, *key: Any) -> Any:
                place = lambda x: lax.with_sharding_constraint(
                    x.reshape(x.shape), NamedSharding(mesh, rows)
                )
                at = 0 if stacked else None
                axes = (at, 0, 0, *[None for _ in key])
                run = jax.vmap(one, axes, (at, None), axis_name=AXIS)
                if plan.whole_batch:
                    return jax.vmap(one, (at, None, None), (at, None), AXIS, axis_size=n)(
                        state, place(x), place(y)
                    )
                return run(state, split(place(x)), split(place(y)), *key)

            return step, state

        def step(state: Any, x: Any, y: Any, *key: Any) -> Any:
            first = jax.tree.map(lambda x: x[0], state) if stacked else state
            after, loss = one(first, x, y, *key)
            return (jax.tree.map(lambda x: x[None], after) if stacked else after), loss

        return over(step, (lie, rows, rows, *keys), (lie, P()), mesh, way == "vma"), state
    return _build_nnx(way, plan, optimizer, n, mesh, stacked, of_shard, split)


def _build_nnx(
    way: str,
    plan: Plan,
    optimizer: Any,
    n: int,
    mesh: Any,
    stacked: bool,
    of_shard: Any,
    split: Any,
) -> Any:
    lie, rows = (P(AXIS) if stacked else P()), (P() if plan.whole_batch else P(AXIS))
    model = Net(plan)
    opt = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def reshape(how: Callable[[Any], Any], *nodes: Any) -> None:
        for each in nodes:
            nnx.update(each, jax.tree.map(how, nnx.state(each)))

    if stacked:
        nodes = (model,) if way == "nnx.jit" else (model, opt)
        reshape(lambda x: jnp.broadcast_to(x, (n, *x.shape)), *nodes)

    def update(model: Any, opt: Any, gradients: Any, stats: Any) -> None:
        like = nnx.state(model, nnx.Param)
        opt.update(model, jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(gradients)))
        if plan.stats:
            model.mean[...] = stats["mean"]

    params_of = lambda model: {"a": model.a[...], "b": model.b[...]}

    def one(model: Any, opt: Any, x: Any, y: Any, *key: Any) -> Any:
        gradients, loss, stats = of_shard(params_of(model), model.stats(), x, y, *key)
        update(model, opt, gradients, stats)
        return loss

    if way == "nnx.pmap":
        axes = (0, 0, 0, 0, None)[: 4 + plan.keyed]
        run = nnx.pmap(one, axis_name=AXIS, in_axes=axes, devices=jax.devices()[:n])
        step = lambda model, opt, x, y, *key: run(model, opt, split(x), split(y), *key)[0]
        return step, model, opt
    if way == "nnx.jit":

        @nnx.jit
        def step(model: Any, opt: Any, x: Any, y: Any, *key: Any) -> Any:
            place = lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, rows))
            at = 0 if stacked else None
            axes = (at, at, None if plan.whole_batch else 0, None if plan.whole_batch else 0)
            run = jax.vmap(
                of_shard, (*axes, *[None for _ in key]), (at, None, at), AXIS, axis_size=n
            )
            part = (lambda x: x) if plan.whole_batch else split
            gradients, loss, stats = run(
                params_of(model), model.stats(), part(place(x)), part(place(y)), *key
            )
            update(model, opt, gradients, stats)
            return loss

        return step, model, opt
    keys = (P(),) if plan.keyed else ()

    @nnx.jit
    @nnx.shard_map(
        mesh=mesh, in_specs=(lie, lie, rows, rows, *keys), out_specs=P(), check_vma=False
    )
    def mapped(model: Any, opt: Any, x: Any, y: Any, *key: Any) -> Any:
        if stacked:
            reshape(lambda x: x[0], model, opt)
        loss = one(model, opt, x, y, *key)
        if stacked:
            reshape(lambda x: x[None], model, opt)
        return loss

    return mapped, model, opt


# The loss, and a batch whose parts differ.

ROWS = 32


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x[:, :4] @ params["a"])


def errors(params: Any, x: Any, y: Any) -> Any:
    """float[rows]."""
    return (hidden(params, x) @ params["b"] - y) ** 2


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    return errors(params, x, y).mean()


def batch() -> tuple[np.ndarray, np.ndarray]:
    """The last column of x is a mask, of which each shard has another number of ones."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 5)).astype(np.float32)
    x[:, 4] = np.arange(ROWS) % 4 <= np.arange(ROWS) // 4 % 4
    return x, (x[:, 0] - x[:, 1] + np.arange(ROWS) / 10).astype(np.float32)


def skip_all_but(soak_steps: int, order: int) -> None:
    """Skip a test of a soak, by its order, unless so many are asked for: one for 100 steps."""
    if order > soak_steps // 100:
        pytest.skip(f"with SOAK_STEPS={100 * order}")
