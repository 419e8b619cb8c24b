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
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from tests.examples.test_examples import load

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = (X[:, 0] * X[:, 1]).astype(np.float32)
BATCH = {"x": X, "y": Y}
RIGHT: dict[str, Callable[[], crossshard.Verification]] = {}


def right(function: Callable[[], Any]) -> Callable[[], Any]:
    RIGHT[function.__name__.replace("_", " ")] = function
    return function


def mesh_of(n: int) -> Mesh:
    return jax.make_mesh((n,), ("s",), axis_types=(AxisType.Auto,), devices=jax.devices()[:n])


def verify(make_step: Any, *batch: Any, **options: Any) -> crossshard.Verification:
    return crossshard.verify(make_step, *(batch or (X, Y)), num_shards=8, **options)


def first_params() -> Any:
    keys = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(keys[0], (4, 6)), "b": jax.random.normal(keys[1], (6,))}


def mse(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def over_shards(how: Callable[..., Any], *, vma: bool, chain: Any = None, n_batch: int = 2) -> Any:
    """``make_step`` of ``how(optimizer, n, params, state, *rows)`` in ``shard_map``."""

    def make_step(optimizer: Any, n: int) -> Any:
        optimizer = chain(optimizer) if chain else optimizer
        specs = (P(), P(), *[P("s")] * n_batch)
        run = jax.shard_map(
            lambda *args: how(optimizer, n, *args),
            mesh=mesh_of(n), in_specs=specs, out_specs=P(), check_vma=vma,
        )  # fmt: skip
        params = first_params()
        return jax.jit(run, donate_argnums=(0, 1)), params, optimizer.init(params)

    return make_step


def apply(optimizer: Any, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


# Optax.


@right
def optax_in_shard_map_autodiff_sums() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: mse(p, x, y) / n)(params)
        return *apply(optimizer, gradients, state, params), lax.psum(loss, "s")

    return verify(over_shards(how, vma=True))


@right
def optax_with_clipping_and_weight_decay() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = lax.pmean(jax.grad(mse)(params, x, y), "s")
        return apply(optimizer, gradients, state, params)

    chain = lambda sgd: optax.chain(
        optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1), sgd
    )
    return verify(over_shards(how, vma=False, chain=chain))


@right
def optax_with_adaptive_clipping_and_a_frozen_leaf() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = lax.pmean(jax.grad(mse)(params, x, y), "s")
        return apply(optimizer, gradients, state, params)

    chain = lambda sgd: optax.chain(
        optax.adaptive_grad_clip(0.01),
        optax.partition({"on": sgd, "off": optax.set_to_zero()}, {"a": "on", "b": "off"}),
    )
    return verify(over_shards(how, vma=False, chain=chain))


@right
def optax_accumulation_in_a_scan() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        parts = x.reshape(-1, 2, 4), y.reshape(-1, 2)
        add = lambda total, part: (
            jax.tree.map(jnp.add, total, jax.grad(mse)(params, *part)),
            None,
        )
        total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        mean = jax.tree.map(lambda g: lax.pmean(g / len(parts[1]), "s"), total)
        return apply(optimizer, mean, state, params)

    return verify(over_shards(how, vma=False))


@right
def optax_with_a_token_weighted_mean() -> Any:
    mask = (np.arange(32) % 4 <= np.arange(32) // 8).astype(np.float32)

    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any, mask: Any) -> Any:
        def loss(p: Any) -> Any:
            each = (jnp.tanh(x @ p["a"]) @ p["b"] - y) ** 2
            return (each * mask).sum() / lax.psum(mask.sum(), "s")

        loss_value, gradients = jax.value_and_grad(loss)(params)
        total = lax.psum((gradients, loss_value), "s")
        return *apply(optimizer, total[0], state, params), {"loss": total[1]}

    return verify(over_shards(how, vma=False, n_batch=3), X, Y, mask)


@right
def optax_in_bfloat16_with_float32_parameters() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
        gradients = jax.grad(lambda p: mse(half(p), half(x), y).astype(jnp.float32))(params)
        return apply(optimizer, lax.pmean(gradients, "s"), state, params)

    return verify(over_shards(how, vma=False))


@right
def optax_with_a_moving_average_of_parameters() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        @jax.jit
        @jax.shard_map(
            mesh=mesh_of(n), in_specs=(P(), P("s"), P("s")), out_specs=P(), check_vma=False
        )
        def step(state: Any, x: Any, y: Any) -> Any:
            params, opt_state, ema, count = state
            gradients = lax.pmean(jax.grad(mse)(params, x, y), "s")
            params, opt_state = apply(optimizer, gradients, opt_state, params)
            ema = optax.incremental_update(params, ema, 0.1)
            return (params, opt_state, ema, count + n * len(x))

        params = first_params()
        return step, (params, optimizer.init(params), params, jnp.int32(0))

    return verify(make_step)


@right
def a_contrastive_loss_over_all_shards() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            own = jnp.tanh(x @ p["a"]) * p["b"]
            every = lax.all_gather(own, "s", tiled=True)
            labels = lax.axis_index("s") * len(own) + jnp.arange(len(own))
            scores = own @ every.T
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        return apply(optimizer, lax.pmean(jax.grad(loss)(params), "s"), state, params)

    return verify(over_shards(how, vma=False))


@right
def noise_on_weights_that_all_shards_share() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        @jax.jit
        @jax.shard_map(
            mesh=mesh_of(n), in_specs=(P(), P(), P("s"), P("s"), P()), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
            noise = {k: 0.1 * jax.random.normal(key, p.shape) for k, p in params.items()}
            loss = lambda p: mse(jax.tree.map(jnp.add, p, noise), x, y)
            return apply(optimizer, lax.pmean(jax.grad(loss)(params), "s"), state, params)

        params = first_params()
        return step, params, optimizer.init(params)

    return verify(make_step, key=jax.random.key(0))


# jit on global arrays.


def on_global_arrays(loss: Any, params: Any, lie: Any = None) -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        mesh = mesh_of(n)
        rows = NamedSharding(mesh, P("s"))

        @jax.jit
        def run(params: Any, state: Any, x: Any, y: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x, y)
            return *apply(optimizer, gradients, state, params), {"loss": value}

        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            return run(params, state, *jax.device_put((x, y), rows))

        place = lambda p: jax.device_put(p, NamedSharding(mesh, lie(p) if lie else P()))
        placed = jax.tree.map(place, params)
        return step, placed, optimizer.init(placed)

    return make_step


@right
def jit_on_global_arrays() -> Any:
    return verify(on_global_arrays(mse, first_params()))


@right
def jit_with_split_parameters() -> Any:
    params = {"a": first_params()["a"].repeat(4, 1), "b": first_params()["b"].repeat(4)}
    return verify(on_global_arrays(mse, params, lambda p: P(*[None] * (p.ndim - 1), "s")))


@right
def jit_with_global_dropout() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        rows = NamedSharding(mesh_of(n), P("s"))

        @jax.jit
        def run(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
            def loss(p: Any) -> Any:
                h = jnp.tanh(x @ p["a"])
                kept = jax.random.bernoulli(key, 0.8, h.shape)
                return jnp.mean((jnp.where(kept, h / 0.8, 0) @ p["b"] - y) ** 2)

            return apply(optimizer, jax.grad(loss)(params), state, params)

        step = lambda p, s, x, y, key: run(p, s, *jax.device_put((x, y), rows), key)
        params = first_params()
        return step, params, optimizer.init(params)

    return verify(make_step, key=jax.random.PRNGKey(0))


# Flax.


class LinenNet(nn.Module):
    norm: str | None = None
    bias: bool = True

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = nn.Dense(16, use_bias=self.bias)(x)
        if self.norm is not None:
            x = nn.BatchNorm(not train, momentum=0.9, axis_name=self.norm or None)(x)
        return nn.Dense(1)(nn.tanh(x))[:, 0]


class StatsState(TrainState):
    batch_stats: Any = None


def linen_pmap(norm: str | None, mean_of_stats: bool) -> Any:
    """As in Flax's ImageNet example: pmap, replicated state, statistics averaged or not."""

    def make_step(optimizer: Any, n: int) -> Any:
        # With a bias before the norm, whose gradient is nothing but rounding.
        net = LinenNet(norm)
        variables = LinenNet(None if norm is None else "").init(jax.random.key(0), X)
        state = StatsState.create(
            apply_fn=net.apply, params=variables["params"], tx=optimizer,
            batch_stats=variables.get("batch_stats", {}),
        )  # fmt: skip

        def one(state: Any, x: Any, y: Any) -> Any:
            def loss(params: Any) -> Any:
                variables = {"params": params, "batch_stats": state.batch_stats}
                out, new = net.apply(variables, x, mutable=["batch_stats"])
                return jnp.mean((out - y) ** 2), new.get("batch_stats", {})

            (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
            if mean_of_stats:
                stats = lax.pmean(stats, "s")
            after = state.apply_gradients(grads=lax.pmean(gradients, "s"))
            return after.replace(batch_stats=stats), {"loss": lax.pmean(value, "s")}

        run = jax.pmap(one, "s", devices=jax.devices()[:n])
        step = lambda state, x, y: run(state, x.reshape(n, -1, 4), y.reshape(n, -1))
        stack = lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x)))
        return step, jax.tree.map(stack, state)

    return verify(make_step)


@right
def linen_train_state_in_pmap() -> Any:
    return linen_pmap(None, False)


@right
def linen_batch_norm_over_all_shards_in_pmap() -> Any:
    return linen_pmap("s", True)


@right
def linen_batch_norm_of_each_shard_in_pmap() -> Any:
    return linen_pmap("", False)


@right
def linen_batch_norm_in_jit() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        net = LinenNet("")
        variables = net.init(jax.random.key(0), X)
        state = StatsState.create(
            apply_fn=net.apply, params=variables["params"], tx=optimizer,
            batch_stats=variables["batch_stats"],
        )  # fmt: skip
        rows = NamedSharding(mesh_of(n), P("s"))

        @jax.jit
        def run(state: Any, x: Any, y: Any) -> Any:
            def loss(params: Any) -> Any:
                variables = {"params": params, "batch_stats": state.batch_stats}
                out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
                return jnp.mean((out - y) ** 2), new["batch_stats"]

            (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
            return state.apply_gradients(grads=gradients, batch_stats=stats), value

        return (lambda state, x, y: run(state, *jax.device_put((x, y), rows))), state

    return verify(make_step)


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


def nnx_jit(rate: float) -> Any:
    """As in Flax's guide to SPMD: nnx.jit on global arrays."""

    def make_step(optimizer: Any, n: int) -> Any:
        model = NnxNet(nnx.Rngs(0), rate)
        opt = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        rows = NamedSharding(mesh_of(n), P("s"))

        @nnx.jit
        def run(model: Any, opt: Any, x: Any, y: Any) -> Any:
            loss, gradients = nnx.value_and_grad(nnx_loss)(model, x, y)
            opt.update(model, gradients)
            return loss

        step = lambda model, opt, x, y: run(model, opt, *jax.device_put((x, y), rows))
        return step, model, opt

    return verify(make_step)


@right
def nnx_optimizer_in_nnx_jit() -> Any:
    return nnx_jit(0.0)


@right
def nnx_dropout_in_nnx_jit() -> Any:
    return nnx_jit(0.2)


@right
def nnx_batch_norm_in_nnx_shard_map() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        model = NnxNet(nnx.Rngs(0), axis="s")
        opt = nnx.Optimizer(model, optimizer, wrt=nnx.Param)

        @nnx.jit
        @nnx.shard_map(
            mesh=mesh_of(n), in_specs=(P(), P(), P("s"), P("s")), out_specs=P(), check_vma=False
        )
        def step(model: Any, opt: Any, x: Any, y: Any) -> Any:
            loss, gradients = nnx.value_and_grad(nnx_loss)(model, x, y)
            opt.update(model, lax.pmean(gradients, "s"))
            return lax.pmean(loss, "s")

        return step, model, opt

    return verify(make_step)


@right
def nnx_functional_in_shard_map() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        graph, params, rest = nnx.split(NnxNet(nnx.Rngs(0), axis="s"), nnx.Param, ...)

        def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
            model = nnx.merge(graph, params, rest, copy=True)
            return nnx_loss(model, x, y), nnx.state(model, nnx.Not(nnx.Param))

        @jax.jit
        @jax.shard_map(
            mesh=mesh_of(n), in_specs=(P(), P(), P(), P("s"), P("s")), out_specs=P(),
            check_vma=False,
        )  # fmt: skip
        def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
            gradients, rest = jax.grad(loss, has_aux=True)(params, rest, x, y)
            return *apply(optimizer, lax.pmean(gradients, "s"), state, params), rest

        return step, params, optimizer.init(params), rest

    return verify(make_step)


# Equinox.


def eqx_loss(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


def eqx_model() -> Any:
    return eqx.nn.MLP(4, 1, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))


@right
def equinox_filter_shard() -> Any:
    """As in Equinox's example of data parallelism."""

    def make_step(optimizer: Any, n: int) -> Any:
        mesh = mesh_of(n)
        rows, whole = NamedSharding(mesh, P("s")), NamedSharding(mesh, P())
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

    return verify(make_step)


@right
def equinox_in_shard_map() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        params, static = eqx.partition(eqx_model(), eqx.is_array)

        @jax.jit
        @jax.shard_map(
            mesh=mesh_of(n), in_specs=(P(), P(), P("s"), P("s")), out_specs=P(), check_vma=False
        )
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            loss = lambda p: eqx_loss(eqx.combine(p, static), x, y)
            value, gradients = jax.value_and_grad(loss)(params)
            after, state = apply(optimizer, lax.pmean(gradients, "s"), state, params)
            return after, state, lax.pmean(value, "s")

        return step, params, optimizer.init(params)

    return verify(make_step)


# crossshard's own idioms, and its examples.


@right
def crossshard_optax_idiom() -> Any:
    def how(optimizer: Any, n: int, params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = crossshard.value_and_grad(mse)(params, x, y)
        return *apply(optimizer, gradients, state, params), lax.pmean(loss, "s")

    return verify(over_shards(how, vma=True, chain=crossshard.CrossShardOptimizer))


@right
def crossshard_stateful_idiom() -> Any:
    def make_step(optimizer: Any, n: int) -> Any:
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        opt = crossshard.CrossShardOptimizer(optimizer)

        @crossshard.shard(num_shards=n)
        def run(model: Any, opt: Any, x: Any, y: Any) -> Any:
            loss = lambda: ((model(x)[:, 0] - y) ** 2).mean()
            opt.apply_gradients(opt.compute_gradients(loss, var_list=model))

        return run, model, opt

    return verify(make_step)


def mse_of(params: Any, batch: Any) -> Any:
    return mse(params, batch["x"], batch["y"])


def of_step(loss: Any = mse_of, optimizer: Any = None, **options: Any) -> Any:
    options.setdefault("num_shards", 8)
    step = crossshard.make_train_step(loss, optimizer or optax.adam(1e-3), **options)
    return crossshard.verify(step, first_params(), BATCH)


@right
def train_step_sharded_in_microbatches() -> Any:
    return of_step(weight_update="sharded", accumulate_steps=2, metrics=["grad_norm"])


@right
def train_step_in_16_bits_with_master_weights() -> Any:
    return of_step(loss_scale="dynamic", master_dtype="float32", ema=0.9, nonfinite="skip")


@right
def train_step_with_groups() -> Any:
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    return of_step(
        optimizer=crossshard.CrossShardOptimizer(optax.sgd(1.0), group_assignment=groups)
    )


@right
def train_step_that_sums() -> Any:
    return of_step(optimizer=crossshard.CrossShardOptimizer(optax.sgd(1.0), reduction="sum"))


@right
def train_step_with_dropout() -> Any:
    def loss(params: Any, batch: Any, rng: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["a"])
        kept = jax.random.bernoulli(rng, 0.8, h.shape)
        return jnp.mean((jnp.where(kept, h / 0.8, 0) @ params["b"] - batch["y"]) ** 2)

    return of_step(loss)


def of_example(name: str, model: Any, batch: Any = None, **options: Any) -> None:
    def run() -> Any:
        module = load(name)
        step = crossshard.make_train_step(module.loss_fn, module.OPTIMIZER, num_shards=8, **options)
        found = batch(module) if batch else module.data()
        return crossshard.verify(step, *model(module, found), found)

    RIGHT[f"example {name}"] = run


def linen(module: Any, batch: Any) -> list[Any]:
    return [module.network.init(jax.random.key(0), batch["x"])["params"]]


def linen_norm(module: Any, batch: Any) -> list[Any]:
    stats = module.network.init(jax.random.key(0), batch["x"], train=False)
    return [stats.pop("params"), stats]


first = lambda module: {name: rows[:116] for name, rows in module.data().items()}
of_example("linen_model", linen)
of_example("linen_batch_norm", linen_norm, model_state="mean", loss_scale="dynamic")
of_example("equinox_model", lambda module, batch: [module.initial_model()])
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
of_example("lora", lambda module, batch: [module.Network(nnx.Rngs(0))], wrt=nnx.LoRAParam)
of_example(
    "whole_step",
    lambda module, batch: [module.Network(nnx.Rngs(0))],
    first,
    weight_update="sharded",
    weight="mask",
)
