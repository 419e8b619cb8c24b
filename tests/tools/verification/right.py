"""Right steps as users write them: with Optax, Flax, Equinox and Haiku, and with crossshard."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from tests.examples.test_examples import load
from tests.tools.steps import SPLIT, WHOLE, first_params, mean, mesh_of, over, updated

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = (X[:, 0] * X[:, 1]).astype(np.float32)
BATCH = {"x": X, "y": Y}
RIGHT: dict[str, Callable[[], crossshard.tools.Verification]] = {}


def right(name: str, make_step: Callable, *batch: Any, num_shards: int = 8, **options: Any) -> None:
    given = batch or (X, Y)
    RIGHT[name] = lambda: crossshard.verify(make_step, *given, num_shards=num_shards, **options)


def named(function: Callable) -> str:
    return function.__name__.replace("_", " ")


def step_factory(*batch: Any, **options: Any) -> Callable:
    """Keeps ``make_step(optimizer, n)``."""
    return lambda make_step: right(named(make_step), make_step, *batch, **options)


def in_shard_map(*batch: Any, vma: bool = False, chain: Any = None) -> Callable:
    """Keeps ``how(optimizer, n, params, state, *rows)`` as a step in ``shard_map``."""
    specs = (WHOLE, WHOLE, *[SPLIT] * (len(batch) or 2))

    def keep(how: Callable) -> None:
        def make_step(optimizer: Any, n: int) -> Any:
            optimizer = chain(optimizer) if chain else optimizer
            step = lambda *args: how(optimizer, n, *args)
            params = first_params()
            # What is given away, as users do.
            run = jax.jit(over(step, specs, WHOLE, mesh_of(s=n), vma), donate_argnums=(0, 1))
            return run, params, optimizer.init(params)

        right(named(how), make_step, *batch)

    return keep


def mse(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def dropped(params: Any, x: Any, y: Any, key: Any) -> Any:
    h = jnp.tanh(x @ params["a"])
    kept = jax.random.bernoulli(key, 0.8, h.shape)
    return jnp.mean((jnp.where(kept, h / 0.8, 0) @ params["b"] - y) ** 2)


# Optax.


@in_shard_map(vma=True)
def optax_in_shard_map_autodiff_sums(optimizer, n, params, state, x, y):
    loss, gradients = jax.value_and_grad(lambda p: mse(p, x, y) / n)(params)
    return *updated(optimizer, params, state, gradients), lax.psum(loss, "s")


def plain(optimizer, n, params, state, x, y):
    return updated(optimizer, params, state, mean(jax.grad(mse)(params, x, y)))


@in_shard_map(
    chain=lambda sgd: optax.chain(
        optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1), sgd
    )
)
def optax_with_clipping_and_weight_decay(*args):
    return plain(*args)


@in_shard_map(
    chain=lambda sgd: optax.chain(
        optax.adaptive_grad_clip(0.01),
        optax.partition({"on": sgd, "off": optax.set_to_zero()}, {"a": "on", "b": "off"}),
    )
)
def optax_with_adaptive_clipping_and_a_frozen_leaf(*args):
    return plain(*args)


@in_shard_map(X, Y, (np.arange(32) % 4 <= np.arange(32) // 8).astype(np.float32))
def optax_with_a_token_weighted_mean(optimizer, n, params, state, x, y, mask):
    def loss(p: Any) -> Any:
        each = (jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2
        return (each * mask).sum() / lax.psum(mask.sum(), "s")

    loss_value, gradients = lax.psum(jax.value_and_grad(loss)(params), "s")
    return *updated(optimizer, params, state, gradients), {"loss": loss_value}


@in_shard_map()
def optax_in_bfloat16_with_float32_parameters(optimizer, n, params, state, x, y):
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    gradients = jax.grad(lambda p: mse(half(p), half(x), y).astype(jnp.float32))(params)
    return updated(optimizer, params, state, mean(gradients))


@step_factory()
def optax_with_a_moving_average_of_parameters(optimizer, n):
    def step(state: Any, x: Any, y: Any) -> Any:
        params, opt_state, ema, count = state
        gradients = mean(jax.grad(mse)(params, x, y))
        params, opt_state = updated(optimizer, params, opt_state, gradients)
        ema = optax.incremental_update(params, ema, 0.1)
        return (params, opt_state, ema, count + n * len(x))

    params = first_params()
    run = over(step, (WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, (params, optimizer.init(params), params, jnp.int32(0))


@in_shard_map()
def a_contrastive_loss_over_all_shards(optimizer, n, params, state, x, y):
    def loss(p: Any) -> Any:
        own = jnp.tanh(x @ p["a"]) * p["b"]
        every = lax.all_gather(own, "s", tiled=True)
        labels = lax.axis_index("s") * len(own) + jnp.arange(len(own))
        scores = own @ every.T
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    return updated(optimizer, params, state, mean(jax.grad(loss)(params)))


@step_factory(key=jax.random.key(0))
def noise_on_weights_that_all_shards_share(optimizer, n):
    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        noise = {k: 0.1 * jax.random.normal(key, p.shape) for k, p in params.items()}
        loss = lambda p: mse(jax.tree.map(jnp.add, p, noise), x, y)
        return updated(optimizer, params, state, mean(jax.grad(loss)(params)))

    params = first_params()
    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT, WHOLE), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params)


# jit on global arrays.


def on_rows(run: Callable, n: int) -> Callable:
    """A step that splits the two arrays of its batch; what comes before and after stays."""
    rows = NamedSharding(mesh_of(s=n), SPLIT)

    def step(first: Any, second: Any, x: Any, y: Any, *rest: Any) -> Any:
        return run(first, second, *jax.device_put((x, y), rows), *rest)

    return step


def on_global_arrays(loss: Any, params: Any, lie: Any = None) -> Callable:
    def make_step(optimizer: Any, n: int) -> Any:
        @jax.jit
        def run(params: Any, state: Any, x: Any, y: Any, *key: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x, y, *key)
            return *updated(optimizer, params, state, gradients), {"loss": value}

        mesh = mesh_of(s=n)
        place = lambda p: jax.device_put(p, NamedSharding(mesh, lie(p) if lie else WHOLE))
        placed = jax.tree.map(place, params)
        return on_rows(run, n), placed, optimizer.init(placed)

    return make_step


WIDE = {"a": first_params()["a"].repeat(4, 1), "b": first_params()["b"].repeat(4)}
COLUMNS = lambda p: P(*[None] * (p.ndim - 1), "s")
right("jit with split parameters", on_global_arrays(mse, WIDE, COLUMNS))
right(
    "jit with global dropout",
    on_global_arrays(dropped, first_params()),
    key=jax.random.PRNGKey(0),
)


# Flax.


class LinenNet(nn.Module):
    norm: str = ""

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(not train, momentum=0.9, axis_name=self.norm or None)(x)
        return nn.Dense(1)(nn.tanh(x))[:, 0]


class StatsState(TrainState):
    batch_stats: Any = None


def linen_state(norm: str, optimizer: Any) -> StatsState:
    # With a bias before the norm, whose gradient is nothing but rounding.
    variables = LinenNet().init(jax.random.key(0), X)
    apply, stats = LinenNet(norm).apply, variables["batch_stats"]
    return StatsState.create(
        apply_fn=apply, params=variables["params"], tx=optimizer, batch_stats=stats
    )


def linen_gradients(state: StatsState, x: Any, y: Any) -> Any:
    def loss(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new["batch_stats"]

    (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
    return value, stats, gradients


def linen_pmap(norm: str, mean_of_stats: bool) -> Callable:
    """As in Flax's ImageNet example: pmap, replicated state, statistics averaged or not."""

    def make_step(optimizer: Any, n: int) -> Any:
        def one(state: Any, x: Any, y: Any) -> Any:
            value, stats, gradients = linen_gradients(state, x, y)
            after = state.apply_gradients(grads=mean(gradients))
            stats = mean(stats) if mean_of_stats else stats
            return after.replace(batch_stats=stats), {"loss": mean(value)}

        run = jax.pmap(one, "s", devices=jax.devices()[:n])
        step = lambda state, x, y: run(state, x.reshape(n, -1, 4), y.reshape(n, -1))
        stack = lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x)))
        return step, jax.tree.map(stack, linen_state(norm, optimizer))

    return make_step


right("linen batch norm over all shards in pmap", linen_pmap("s", True))
right("linen batch norm of each shard in pmap", linen_pmap("", False))


@step_factory()
def linen_batch_norm_in_jit(optimizer, n):
    @jax.jit
    def run(state: Any, x: Any, y: Any) -> Any:
        value, stats, gradients = linen_gradients(state, x, y)
        return state.apply_gradients(grads=gradients, batch_stats=stats), value

    rows = NamedSharding(mesh_of(s=n), SPLIT)
    step = lambda state, x, y: run(state, *jax.device_put((x, y), rows))
    return step, linen_state("", optimizer)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0, axis: str | None = None):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs, axis_name=axis)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.norm(self.first(x)))
        return self.second(x if self.dropout is None else self.dropout(x))[:, 0]


def nnx_loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((model(x) - y) ** 2)


def nnx_jit(rate: float) -> Callable:
    """As in Flax's guide to SPMD: nnx.jit on global arrays."""

    def make_step(optimizer: Any, n: int) -> Any:
        @nnx.jit
        def run(model: Any, opt: Any, x: Any, y: Any) -> Any:
            loss, gradients = nnx.value_and_grad(nnx_loss)(model, x, y)
            opt.update(model, gradients)
            return loss

        model = NnxNet(nnx.Rngs(0), rate)
        return on_rows(run, n), model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    return make_step


right("nnx optimizer in nnx jit", nnx_jit(0.0))
right("nnx dropout in nnx jit", nnx_jit(0.2))


@step_factory()
def nnx_batch_norm_in_nnx_shard_map(optimizer, n):
    specs = (WHOLE, WHOLE, SPLIT, SPLIT)

    @nnx.jit
    @nnx.shard_map(mesh=mesh_of(s=n), in_specs=specs, out_specs=WHOLE, check_vma=False)
    def step(model: Any, opt: Any, x: Any, y: Any) -> Any:
        loss, gradients = nnx.value_and_grad(nnx_loss)(model, x, y)
        opt.update(model, mean(gradients))
        return mean(loss)

    model = NnxNet(nnx.Rngs(0), axis="s")
    return step, model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


@step_factory()
def nnx_functional_in_shard_map(optimizer, n):
    graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0), axis="s"), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        return nnx_loss(model, x, y), nnx.state(model, nnx.Not(nnx.Param))

    def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
        gradients, rest = jax.grad(loss, has_aux=True)(params, rest, x, y)
        return *updated(optimizer, params, state, mean(gradients)), rest

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params), rest


# Equinox.


def eqx_loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def eqx_model() -> Any:
    return eqx.nn.MLP(4, 1, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))


@step_factory()
def equinox_filter_shard(optimizer, n):
    """As in Equinox's example of data parallelism."""
    mesh = mesh_of(s=n)
    rows, whole = NamedSharding(mesh, SPLIT), NamedSharding(mesh, WHOLE)
    model = eqx_model()

    @eqx.filter_jit(donate="none")
    def run(model: Any, state: Any, x: Any, y: Any) -> Any:
        model, state = eqx.filter_shard((model, state), whole)
        x, y = eqx.filter_shard((x, y), rows)
        value, gradients = eqx.filter_value_and_grad(eqx_loss)(model, x, y)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.filter_shard((eqx.apply_updates(model, updates), state), whole), value

    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        (model, state), value = run(model, state, *eqx.filter_shard((x, y), rows))
        return model, state, value

    return step, model, optimizer.init(eqx.filter(model, eqx.is_array))


# crossshard's own idioms, and its examples.


@in_shard_map(vma=True, chain=crossshard.CrossShardOptimizer)
def crossshard_optax_idiom(optimizer, n, params, state, x, y):
    loss, gradients = crossshard.value_and_grad(mse)(params, x, y)
    return *updated(optimizer, params, state, gradients), mean(loss)


@step_factory()
def crossshard_stateful_idiom(optimizer, n):
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    opt = crossshard.CrossShardOptimizer(optimizer)

    @crossshard.shard(num_shards=n)
    def run(model: Any, opt: Any, x: Any, y: Any) -> Any:
        loss = lambda: ((model(x)[:, 0] - y) ** 2).mean()
        opt.apply_gradients(opt.compute_gradients(loss, var_list=model))

    return run, model, opt


def mse_of(params: Any, batch: Any) -> Any:
    return mse(params, batch["x"], batch["y"])


def of_step(
    name: str,
    loss: Any = mse_of,
    optimizer: Any = None,
    first: Any = None,
    batch: Any = BATCH,
    **options: Any,
) -> None:
    def run() -> Any:
        rule = optimizer or optax.adam(1e-3)
        step = crossshard.make_train_step(loss, rule, num_shards=8, **options)
        return crossshard.verify(step, first or first_params(), batch)

    RIGHT[f"train step {name}"] = run


def wrapped(**options: Any) -> Any:
    return crossshard.CrossShardOptimizer(optax.sgd(1.0), **options)


GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]
SCALED = {"loss_scale": "dynamic", "master_dtype": "float32", "ema": 0.9, "nonfinite": "skip"}
of_step(
    "sharded in microbatches", weight_update="sharded", accumulate_steps=2, metrics=["grad_norm"]
)
of_step("in 16 bits with master weights", **SCALED)
of_step("with groups", optimizer=wrapped(group_assignment=GROUPS))
of_step("that sums", optimizer=wrapped(reduction="sum"))
of_step("with dropout", lambda params, batch, rng: dropped(params, batch["x"], batch["y"], rng))


def of_example(name: str, model: Any, batch: Any = None, **options: Any) -> None:
    def run() -> Any:
        module = load(name)
        step = crossshard.make_train_step(module.loss_fn, module.OPTIMIZER, num_shards=8, **options)
        found = batch(module) if batch else module.data()
        return crossshard.verify(step, *model(module, found), found)

    RIGHT[f"example {name}"] = run


def linen_norm(module: Any, batch: Any) -> list[Any]:
    stats = module.network.init(jax.random.key(0), batch["x"], train=False)
    return [stats.pop("params"), stats]


first = lambda module: {name: rows[:116] for name, rows in module.data().items()}
of_example("linen_batch_norm", linen_norm, model_state="mean", loss_scale="dynamic")
of_example(
    "equinox_state",
    lambda module, batch: eqx.nn.make_with_state(module.Network)(jax.random.key(0)),
    model_state="mean",
)
of_example(
    "haiku_state",
    lambda module, batch: module.network.init(jax.random.key(0), batch["x"]),
    model_state="mean",
)
of_example("gallery/lora", lambda module, batch: [module.Network(nnx.Rngs(0))], wrt=nnx.LoRAParam)
of_example(
    "whole_step",
    lambda module, batch: [module.Network(nnx.Rngs(0))],
    first,
    weight_update="sharded",
    weight="mask",
)
