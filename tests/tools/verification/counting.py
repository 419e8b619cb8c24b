"""Right steps that count or draw random numbers: schedules, and keys in all their forms."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import keras
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

import crossshard
from tests.tools.steps import SPLIT, WHOLE, first_params, mean, mesh_of, over, updated
from tests.tools.verification.right import (
    BATCH,
    RIGHT,
    NnxNet,
    X,
    dropped,
    eqx_model,
    linen_state,
    mse,
    nnx_loss,
    on_rows,
    right,
    step_factory,
)


def counted(loss: Any, schedule: Any = None) -> Any:
    """``make_step`` with a counter in the state, which ``loss(params, count, x, y)`` reads."""

    def make_step(optimizer: Any, n: int) -> Any:
        def step(params: Any, state: Any, count: Any, x: Any, y: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, count, x, y)
            gradients = mean(gradients)
            if schedule is not None:
                gradients = jax.tree.map(lambda g: schedule(count) * g, gradients)
            return *updated(optimizer, params, state, gradients), count + 1, mean(value)

        run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, params, optimizer.init(params), jnp.int32(0)

    return make_step


def penalty(params: Any) -> Any:
    return sum(jnp.sum(p**2) for p in jax.tree.leaves(params))


right(
    "annealing by a step counter",
    counted(lambda p, count, x, y: mse(p, x, y) + count / 10 * penalty(p)),
)
right(
    "a temperature by a step counter",
    counted(lambda p, count, x, y: mse(p, x * 0.9**count, y) / (1.0 + count)),
)
right(
    "a learning rate schedule of its own",
    counted(lambda p, _, x, y: mse(p, x, y), optax.warmup_cosine_decay_schedule(0.1, 1.0, 3, 9)),
)


def from_count(count: Any, *more: Any) -> Any:
    key = jax.random.fold_in(jax.random.key(3), count)
    for each in more:
        key = jax.random.fold_in(key, each)
    return key


right(
    "dropout with keys from the count and the shard",
    counted(lambda p, count, x, y: dropped(p, x, y, from_count(count, lax.axis_index("s")))),
)
right(
    "dropout with legacy keys from the count and the shard",
    counted(
        lambda p, count, x, y: dropped(
            p, x, y, jax.random.fold_in(jax.random.PRNGKey(count), lax.axis_index("s"))
        )
    ),
)


def noise_of_rows(key: Any, x: Any) -> Any:
    """The same for a row on any number of shards."""
    first = lax.axis_index("s") * len(x)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(first + jnp.arange(len(x)))
    return jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)


right(
    "noise with a key for each row",
    counted(lambda p, count, x, y: mse(p, x + noise_of_rows(from_count(count), x), y)),
)
right(
    "input noise that all rows share",
    counted(lambda p, count, x, y: mse(p, x + jax.random.normal(from_count(count), (4,)), y)),
)


def with_a_layer_that_may_drop(params: Any, count: Any, x: Any, y: Any) -> Any:
    """Stochastic depth: the rows of a shard that drops the layer tell nothing of it."""
    kept = jax.random.bernoulli(from_count(count, lax.axis_index("s")), 0.5)
    out = jnp.where(kept, jnp.tanh(x @ params["a"]) @ params["b"] / 0.5, 0)
    return jnp.mean((out + x.sum(1) - y) ** 2)


right("stochastic depth by shard", counted(with_a_layer_that_may_drop))
right(
    "noise on weights with keys from the count and the shard",
    counted(
        lambda p, count, x, y: mse(
            {"a": p["a"] + 0.3 * jax.random.normal(from_count(count, lax.axis_index("s")), (4, 6))}
            | {"b": p["b"]},
            x,
            y,
        )
    ),
)


# Keys as an argument, and in the state.


@step_factory(key=jax.random.PRNGKey(1))
def dropout_with_a_legacy_key_as_argument(optimizer, n):
    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index("s"))
        value, gradients = jax.value_and_grad(dropped)(params, x, y, key)
        return *updated(optimizer, params, state, mean(gradients)), mean(value)

    params = first_params()
    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT, WHOLE), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params)


def keyed(make_key: Any, *, advances: bool = True) -> Any:
    """``make_step`` with a key in the state, which is split at each step and folded by shard."""

    def make_step(optimizer: Any, n: int) -> Any:
        def step(state: Any, x: Any, y: Any) -> Any:
            key, now = jax.random.split(state["key"])
            now = jax.random.fold_in(now, lax.axis_index("s"))
            gradients = mean(jax.grad(dropped)(state["params"], x, y, now))
            params, opt = updated(optimizer, state["params"], state["opt"], gradients)
            return {"params": params, "opt": opt, "key": key if advances else state["key"]}

        run = over(step, (WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, {"params": params, "opt": optimizer.init(params), "key": make_key(5)}

    return make_step


right("dropout with a typed key in the state", keyed(jax.random.key))
right("dropout with a legacy key in the state", keyed(jax.random.PRNGKey))
right("dropout with a typed key that stays", keyed(jax.random.key, advances=False))
right("dropout with a legacy key that stays", keyed(jax.random.PRNGKey, advances=False))


@step_factory()
def dropout_with_a_legacy_key_in_the_state_in_jit(optimizer, n):
    @jax.jit
    def run(params: Any, rest: Any, x: Any, y: Any) -> Any:
        state, key = rest
        key, now = jax.random.split(key)
        value, gradients = jax.value_and_grad(dropped)(params, x, y, now)
        params, state = updated(optimizer, params, state, gradients)
        return params, (state, key), value

    params = first_params()
    return on_rows(run, n), params, (optimizer.init(params), jax.random.PRNGKey(0))


def stacked(make_key: Any) -> Any:
    """``make_step`` for pmap, where each shard has a key of its own in the state."""

    def make_step(optimizer: Any, n: int) -> Any:
        def one(params: Any, state: Any, key: Any, x: Any, y: Any) -> Any:
            key, now = jax.random.split(key)
            value, gradients = jax.value_and_grad(dropped)(params, x, y, now)
            return *updated(optimizer, params, state, mean(gradients)), key, mean(value)

        run = jax.pmap(one, "s", devices=jax.devices()[:n])
        step = lambda *args: run(*args[:3], args[3].reshape(n, -1, 4), args[4].reshape(n, -1))
        params = first_params()
        copy = lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x)))
        state = jax.tree.map(copy, (params, optimizer.init(params)))
        return step, *state, jax.random.split(make_key(0), n)

    return make_step


right("dropout with typed keys of shards in pmap", stacked(jax.random.key))
right("dropout with legacy keys of shards in pmap", stacked(jax.random.PRNGKey))


@step_factory()
def flax_train_state_with_a_key_folded_from_its_step(optimizer, n):
    """As in Flax's examples: the key is constant, and the step is folded in."""
    key = jax.random.key(1)

    def of_shard(state: Any, x: Any, y: Any) -> Any:
        now = jax.random.fold_in(jax.random.fold_in(key, state.step), lax.axis_index("s"))

        def loss(params: Any) -> Any:
            kept = jax.random.bernoulli(now, 0.8, x.shape)
            variables = {"params": params, "batch_stats": state.batch_stats}
            noisy = jnp.where(kept, x / 0.8, 0)
            out, new = state.apply_fn(variables, noisy, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=mean(gradients), batch_stats=mean(stats))
        return state, {"loss": mean(value)}

    step = over(of_shard, (WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return step, linen_state("s", optimizer)


@step_factory()
def statistics_of_noisy_activations(optimizer, n):
    def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
        stats, key = rest
        key, now = jax.random.split(key)
        now = jax.random.fold_in(now, lax.axis_index("s"))

        def loss(params: Any) -> Any:
            h = jnp.tanh((x + 0.3 * jax.random.normal(now, x.shape)) @ params["a"])
            center = mean(h.mean(0))
            seen = 0.9 * stats + 0.1 * lax.stop_gradient(center)
            return jnp.mean(((h - center) @ params["b"] - y) ** 2), seen

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        params, state = updated(optimizer, params, state, mean(gradients))
        return params, state, (stats, key), mean(value)

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    params = first_params()
    return run, params, optimizer.init(params), (jnp.zeros(6), jax.random.PRNGKey(0))


@step_factory()
def a_moving_average_of_a_noisy_loss(optimizer, n):
    def step(params: Any, state: Any, rest: Any, x: Any, y: Any) -> Any:
        average, count = rest
        now = from_count(count, lax.axis_index("s"))
        value, gradients = jax.value_and_grad(dropped)(params, x, y, now)
        params, state = updated(optimizer, params, state, mean(gradients))
        return params, state, (0.98 * average + 0.02 * mean(value), count + 1)

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    params = first_params()
    return run, params, optimizer.init(params), (jnp.float32(0), jnp.int32(0))


# Keras, NNX, Haiku, Equinox.


def keras_model() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=1),
            keras.layers.Dense(1),
        ]
    )


@step_factory()
def keras_stateless_with_dropout_in_jit(optimizer, n):
    model = keras_model()
    variables = lambda of: [each.value for each in of]

    def loss(trainable: Any, rest: Any, x: Any, y: Any) -> Any:
        out, rest = model.stateless_call(trainable, rest, x, training=True)
        return jnp.mean((out[:, 0] - y) ** 2), rest

    @jax.jit
    def run(trainable: Any, rest: Any, x: Any, y: Any) -> Any:
        stats, state = rest
        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, stats, x, y)
        trainable, state = updated(optimizer, trainable, state, gradients)
        return trainable, (stats, state), value

    trainable = variables(model.trainable_variables)
    rest = variables(model.non_trainable_variables)
    return on_rows(run, n), trainable, (rest, optimizer.init(trainable))


@step_factory()
def keras_stateless_with_seeds_of_shards(optimizer, n):
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(16), keras.layers.GaussianNoise(0.3, seed=2)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    variables = lambda of: [each.value for each in of]

    def loss(trainable: Any, rest: Any, x: Any, y: Any) -> Any:
        out, rest = model.stateless_call(trainable, rest, x, training=True)
        return jnp.mean((out[:, 0] - y) ** 2), rest

    def step(trainable: Any, state: Any, seeds: Any, x: Any, y: Any) -> Any:
        own = [seed[0] for seed in seeds]
        (value, own), gradients = jax.value_and_grad(loss, has_aux=True)(trainable, own, x, y)
        trainable, state = updated(optimizer, trainable, state, mean(gradients))
        return trainable, state, [seed[None] for seed in own], mean(value)

    specs = (WHOLE, WHOLE, SPLIT, SPLIT, SPLIT)
    run = over(step, specs, (WHOLE, WHOLE, SPLIT, WHOLE), mesh_of(s=n))
    trainable = variables(model.trainable_variables)
    own = lambda seed: jnp.stack([seed + jnp.uint32(i) * 77 for i in range(n)])
    seeds = [own(seed) for seed in variables(model.non_trainable_variables)]
    return run, trainable, optimizer.init(trainable), seeds


@step_factory()
def nnx_dropout_with_keys_of_shards(optimizer, n):
    model = NnxNet(nnx.Rngs(0), rate=0.3, axis="s")
    graph, params, keys, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)

    def own(keys: Any) -> Any:
        fold = lambda x: jax.random.fold_in(x, lax.axis_index("s"))
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.tree.map(lambda x: fold(x) if is_key(x) else x, keys)

    def loss(params: Any, keys: Any, rest: Any, x: Any, y: Any) -> Any:
        model = nnx.merge(graph, params, own(keys), rest, copy=True)
        value = nnx_loss(model, x, y)
        counts = nnx.state(model, nnx.RngCount)
        return value, (counts, nnx.state(model, nnx.BatchStat))

    def step(params: Any, state: Any, keys: Any, rest: Any, x: Any, y: Any) -> Any:
        gradients, (counts, rest) = jax.grad(loss, has_aux=True)(params, keys, rest, x, y)
        keys = nnx.merge_state(keys, counts)
        return *updated(optimizer, params, state, mean(gradients)), keys, rest

    run = over(step, (WHOLE, WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, params, optimizer.init(params), keys, rest


def haiku_net() -> Any:
    def forward(x: Any) -> Any:
        h = jnp.tanh(hk.Linear(16)(x))
        return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.3, h))[:, 0]

    return hk.transform(forward)


@step_factory()
def haiku_with_a_key_sequence_of_the_host(optimizer, n):
    """As in Haiku's examples: the sequence is no part of the state."""
    net, keys = haiku_net(), hk.PRNGSequence(42)

    def of_shard(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        key = jax.random.fold_in(key, lax.axis_index("s"))
        loss = lambda p: jnp.mean((net.apply(p, key, x) - y) ** 2)
        value, gradients = jax.value_and_grad(loss)(params)
        return *updated(optimizer, params, state, mean(gradients)), mean(value)

    run = over(of_shard, (WHOLE, WHOLE, SPLIT, SPLIT, WHOLE), WHOLE, mesh_of(s=n))
    params = net.init(jax.random.key(0), X)
    step = lambda params, state, x, y: run(params, state, x, y, next(keys))
    return step, params, optimizer.init(params)


@step_factory()
def equinox_dropout_in_filter_jit(optimizer, n):
    """The key is split for rows, as Equinox's layers want it."""
    dropout = eqx.nn.Dropout(0.3)
    mesh = mesh_of(s=n)
    rows = NamedSharding(mesh, SPLIT)

    def loss(model: Any, x: Any, y: Any, key: Any) -> Any:
        each = lambda x, key: model(dropout(x, key=key))[0]
        out = jax.vmap(each)(x, jax.random.split(key, len(x)))
        return jnp.mean((out - y) ** 2)

    @eqx.filter_jit
    def run(model: Any, state: Any, key: Any, x: Any, y: Any) -> Any:
        key, now = jax.random.split(key)
        gradients = eqx.filter_grad(loss)(model, x, y, now)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, key

    step = lambda *args: run(*args[:3], *jax.device_put(args[3:], rows))
    model = eqx_model()
    return step, model, optimizer.init(eqx.filter(model, eqx.is_array)), jax.random.key(2)


# crossshard's steps.


def counted_loss(params: Any, count: Any, batch: Any) -> Any:
    return mse(params, batch["x"], batch["y"]) / (1.0 + count), count + 1


def raw_key_loss(params: Any, rng: Any, batch: Any) -> Any:
    key, now = jax.random.split(rng["rng"])
    return dropped(params, batch["x"], batch["y"], now), {"rng": key}


def of_train_step(name: str, loss: Any, given: Any, **options: Any) -> None:
    def run() -> Any:
        step = crossshard.make_train_step(loss, optax.adam(1e-3), num_shards=8, **options)
        return crossshard.verify(step, first_params(), *given, BATCH)

    RIGHT[f"train step {name}"] = run


key_loss = lambda params, batch, rng: dropped(params, batch["x"], batch["y"], rng)
of_train_step("with a counter", counted_loss, [jnp.int32(0)], model_state="mean")
of_train_step(
    "with a legacy key of each shard",
    raw_key_loss,
    [{"rng": jax.random.PRNGKey(0)}],
    model_state="per_shard",
)
of_train_step("over the batch with dropout", key_loss, [], loss_over="batch")
