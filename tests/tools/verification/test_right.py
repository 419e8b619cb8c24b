"""Steps of Optax, Flax, Equinox, Haiku and crossshard, as users write them, are fine."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import ArgumentError
from crossshard.step import gather
from tests.examples.test_examples import load
from tests.quick import deep_but
from tests.tools.steps import SPLIT, WHOLE, first_params, mean, mesh_of, over, updated

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = (X[:, 0] * X[:, 1]).astype(np.float32)
BATCH = {"x": X, "y": Y}
RIGHT: dict[str, Callable[[], crossshard.tools.Verification]] = {}


def right(*batch: Any, num_shards: int = 8, name: str = "", **options: Any) -> Callable:
    """Keeps ``make_step(optimizer, n)``."""

    def keep(make_step: Callable) -> None:
        given = batch or (X, Y)
        run = lambda: crossshard.verify(make_step, *given, num_shards=num_shards, **options)
        RIGHT[name or make_step.__name__.replace("_", " ")] = run

    return keep


def mse(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


def dropped(params: Any, x: Any, y: Any, key: Any) -> Any:
    h = jnp.tanh(x @ params["a"])
    kept = jax.random.bernoulli(key, 0.8, h.shape)
    return jnp.mean((jnp.where(kept, h / 0.8, 0) @ params["b"] - y) ** 2)


def on_rows(run: Callable, n: int) -> Callable:
    """A step that splits the two arrays of its batch; what comes before and after stays."""
    rows = NamedSharding(mesh_of(s=n), SPLIT)
    return lambda first, second, x, y, *rest: run(
        first, second, *jax.device_put((x, y), rows), *rest
    )


@right()
def what_is_given_away_and_summed_by_autodiff(optimizer, n):
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: mse(p, x, y) / n)(params)
        return *updated(optimizer, params, state, gradients), lax.psum(loss, "s")

    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n), vma=True)
    params = first_params()
    return jax.jit(run, donate_argnums=(0, 1)), params, optimizer.init(params)


@right()
def a_state_in_one_tuple_with_a_moving_average_and_a_count(optimizer, n):
    def step(state: Any, x: Any, y: Any) -> Any:
        params, opt_state, ema, count = state
        gradients = mean(jax.grad(mse)(params, x, y))
        params, opt_state = updated(optimizer, params, opt_state, gradients)
        ema = optax.incremental_update(params, ema, 0.1)
        return (params, opt_state, ema, count + n * len(x))

    params = first_params()
    run = over(step, (WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    return run, (params, optimizer.init(params), params, jnp.int32(0))


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
right(name="jit with split parameters")(on_global_arrays(mse, WIDE, COLUMNS))
right(name="jit with global dropout", key=jax.random.PRNGKey(0))(
    on_global_arrays(dropped, first_params())
)


@right(np.random.default_rng(1).normal(size=(32, 5, 4)).astype(np.float32), Y)
def recurrent_with_a_carried_state(optimizer, n):
    """Each row's state goes on to the next batch, as in truncated backpropagation."""
    params = {**first_params(), "again": 0.5 * jnp.eye(6)}

    def step(params: Any, state: Any, carry: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            cell = lambda h, x: (jnp.tanh(x @ params["a"] + h @ params["again"]), None)
            last, _ = lax.scan(cell, carry, x.swapaxes(0, 1))
            return jnp.mean((last @ params["b"] - y) ** 2), last

        (value, last), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        params, state = updated(optimizer, params, state, mean(gradients))
        return params, state, lax.stop_gradient(last), mean(value)

    specs = (WHOLE, WHOLE, SPLIT, SPLIT, SPLIT)
    run = over(step, specs, (WHOLE, WHOLE, SPLIT, WHOLE), mesh_of(s=n))
    return run, params, optimizer.init(params), jnp.zeros((32, 6))


@right()
def advantages_normalised_over_all_rows_in_two_epochs(optimizer, n):
    """Two updates in a step, as of PPO."""

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        center = mean(y.mean())
        advantage = (y - center) / jnp.sqrt(mean(((y - center) ** 2).mean()))
        score = lambda p: jax.nn.log_sigmoid(jnp.tanh(x @ p["a"]) @ p["b"])
        loss = lambda p: -jnp.mean(score(p) * advantage)
        for _ in range(2):
            params, state = updated(optimizer, params, state, mean(jax.grad(loss)(params)))
        return params, state

    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    params = first_params()
    return run, params, optimizer.init(params)


@right()
def lora_beside_frozen_weights(optimizer, n):
    def step(adapter: Any, state: Any, frozen: Any, x: Any, y: Any) -> Any:
        full = lambda lora: {"a": frozen["a"] + lora["down"] @ lora["up"], "b": frozen["b"]}
        gradients = jax.grad(lambda lora: mse(full(lora), x, y))(adapter)
        return *updated(optimizer, adapter, state, mean(gradients)), frozen

    run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
    # The gradient of one half is 0 at first.
    adapter = {"down": jnp.arange(8.0).reshape(4, 2), "up": jnp.zeros((2, 6))}
    return run, adapter, optimizer.init(adapter), first_params()


# Flax, Haiku, Equinox.


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        # With a bias before the norm, whose gradient is nothing but rounding.
        x = nn.BatchNorm(False, momentum=0.9, axis_name="s")(nn.Dense(16)(x))
        return nn.Dense(1)(nn.tanh(x))[:, 0]


class StatsState(TrainState):
    batch_stats: Any = None


@right()
def linen_batch_norm_over_all_shards_in_pmap(optimizer, n):
    """As in Flax's ImageNet example, with replicated state and statistics of all rows."""

    def one(state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
            return jnp.mean((out - y) ** 2), new["batch_stats"]

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        after = state.apply_gradients(grads=mean(gradients))
        return after.replace(batch_stats=stats), {"loss": mean(value)}

    variables = LinenNet().init(jax.random.key(0), X)
    state = StatsState.create(
        apply_fn=LinenNet().apply,
        params=variables["params"],
        tx=optimizer,
        batch_stats=variables["batch_stats"],
    )
    run = jax.pmap(one, "s", devices=jax.devices()[:n])
    step = lambda state, x, y: run(state, x.reshape(n, -1, 4), y.reshape(n, -1))
    return step, jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), state)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))[:, 0]


@right()
def nnx_dropout_in_nnx_jit(optimizer, n):
    """As in Flax's guide to SPMD: nnx.jit on global arrays."""

    @nnx.jit
    def run(model: Any, opt: Any, x: Any, y: Any) -> Any:
        of = lambda model: jnp.mean((model(x) - y) ** 2)
        loss, gradients = nnx.value_and_grad(of)(model)
        opt.update(model, gradients)
        return loss

    model = NnxNet(nnx.Rngs(0))
    return on_rows(run, n), model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


@pytest.mark.deep
def test_haikus_key_sequence_of_the_host_is_refused_as_noise():
    """As in Haiku's examples: the sequence is no part of the state."""

    def forward(x: Any) -> Any:
        h = jnp.tanh(hk.Linear(16)(x))
        return hk.Linear(1)(hk.dropout(hk.next_rng_key(), 0.3, h))[:, 0]

    net, keys = hk.transform(forward), hk.PRNGSequence(42)

    def make_step(optimizer: Any, n: int) -> Any:
        def of_shard(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
            key = jax.random.fold_in(key, lax.axis_index("s"))
            loss = lambda p: jnp.mean((net.apply(p, key, x) - y) ** 2)
            value, gradients = jax.value_and_grad(loss)(params)
            return *updated(optimizer, params, state, mean(gradients)), mean(value)

        run = over(of_shard, (WHOLE, WHOLE, SPLIT, SPLIT, WHOLE), WHOLE, mesh_of(s=n))
        params = net.init(jax.random.key(0), X)
        step = lambda params, state, x, y: run(params, state, x, y, next(keys))
        return step, params, optimizer.init(params)

    with pytest.raises(ArgumentError, match="draws random numbers"):
        crossshard.verify(make_step, X, Y, num_shards=8)


@right()
def equinox_dropout_in_filter_jit(optimizer, n):
    """The key is split for rows, as Equinox's layers want it."""
    rows, dropout = NamedSharding(mesh_of(s=n), SPLIT), eqx.nn.Dropout(0.3)

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
    model = eqx.nn.MLP(4, 1, 16, 2, activation=jax.nn.gelu, key=jax.random.key(0))
    return step, model, optimizer.init(eqx.filter(model, eqx.is_array)), jax.random.key(2)


# crossshard's own idioms, its steps, and its examples.


@right()
def crossshard_optax_idiom(optimizer, n):
    optimizer = crossshard.CrossShardOptimizer(optimizer)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = crossshard.value_and_grad(mse)(params, x, y)
        return *updated(optimizer, params, state, gradients), mean(loss)

    params = first_params()
    run = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n), vma=True)
    return run, params, optimizer.init(params)


@right()
def crossshard_stateful_idiom(optimizer, n):
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    opt = crossshard.CrossShardOptimizer(optimizer)

    @crossshard.shard(num_shards=n)
    def run(model: Any, opt: Any, x: Any, y: Any) -> Any:
        loss = lambda: ((model(x)[:, 0] - y) ** 2).mean()
        opt.apply_gradients(opt.compute_gradients(loss, var_list=model))

    return run, model, opt


@right(BATCH)
def a_factory_of_sharded_steps(optimizer, n):
    step = crossshard.make_train_step(mse_of, optimizer, num_shards=n, params="sharded")
    return step, step.init(first_params())


def mse_of(params: Any, batch: Any) -> Any:
    return mse(params, batch["x"], batch["y"])


def part_of_mse(params: Any, batch: Any) -> Any:
    return mse_of(params, batch) / jax.lax.axis_size("shards")


def counted_loss(params: Any, count: Any, batch: Any) -> Any:
    return mse_of(params, batch) / (1.0 + count), count + 1


def key_loss(params: Any, batch: Any, rng: Any) -> Any:
    return dropped(params, batch["x"], batch["y"], rng)


def wrapped(**options: Any) -> Any:
    return crossshard.CrossShardOptimizer(optax.sgd(1.0), **options)


# Of each its loss, its model state if there is any, its optimizer and options.
ADAM = optax.adam(1e-3)
STEPS: dict[str, tuple[Any, list[Any], Any, dict[str, Any]]] = {
    "sharded in microbatches": (
        *(mse_of, [], ADAM),
        {"weight_update": "sharded", "accumulate_steps": 2, "metrics": ["grad_norm"]},
    ),
    "in 16 bits with master weights": (
        *(mse_of, [], ADAM),
        {"loss_scale": "dynamic", "master_dtype": "float32", "ema": 0.9, "nonfinite": "skip"},
    ),
    "with groups": (mse_of, [], wrapped(group_assignment=[[0, 2, 4, 6], [1, 3, 5, 7]]), {}),
    "that sums": (part_of_mse, [], wrapped(reduction="sum"), {}),
    "over the batch with dropout": (key_loss, [], ADAM, {"loss_over": "batch"}),
    "with a counter": (counted_loss, [jnp.int32(0)], ADAM, {"model_state": "mean"}),
}


def of_step(loss: Any, given: Any, optimizer: Any, options: Any) -> Any:
    step = crossshard.make_train_step(loss, optimizer, num_shards=8, **options)
    return crossshard.verify(step, first_params(), *given, BATCH)


RIGHT |= {f"train step {name}": lambda row=row: of_step(*row) for name, row in STEPS.items()}


def of_example(name: str, model: Any, rows: int | None = None, **options: Any) -> None:
    def run() -> Any:
        module = load(name)
        step = crossshard.make_train_step(module.loss_fn, module.OPTIMIZER, num_shards=8, **options)
        batch = {name: array[:rows] for name, array in module.data().items()}
        return crossshard.verify(step, *model(module, batch), batch)

    RIGHT[f"example {name}"] = run


def linen_norm(module: Any, batch: Any) -> list[Any]:
    stats = module.network.init(jax.random.key(0), batch["x"], train=False)
    return [stats.pop("params"), stats]


network = lambda module, batch: [module.Network(nnx.Rngs(0))]
of_example("linen_batch_norm", linen_norm, model_state="mean", loss_scale="dynamic")
of_example("gallery/lora", network, wrt=nnx.LoRAParam)
# These rows do not divide over the shards.
of_example("whole_step", network, 116, weight_update="sharded", weight="mask")

# One of each kind; the others are deep.
QUICK = {
    "what is given away and summed by autodiff",
    "a factory of sharded steps",
    "train step with groups",
    "train step with a counter",
}


@pytest.mark.parametrize("name", deep_but(QUICK, RIGHT))
def test_no_right_step_is_accused(name: str):
    found = RIGHT[name]()
    assert found.ok, found
    assert {leaf.verdict for leaf in found.leaves} <= {"fine", "too small"}
    assert any(leaf.verdict == "fine" for leaf in found.leaves)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reduce_dtype": "int8"}, "it was verified in float32: it sends gradients in int8"),
        ({"sync_every": 4}, "it was verified as a step in which all shards reduce: workers"),
        (
            {"loss_over": "batch", "accumulate_steps": 2},
            "one device took the same 2 microbatches",
        ),
    ],
    ids=["few bits", "workers", "microbatches of the batch"],
)
def test_what_no_device_does_alone_is_left_out_and_said(options: dict[str, Any], said: str):
    found = of_step(mse_of, [], ADAM, options)
    assert found.ok, found
    assert said in found.notes[-1]


def test_a_mean_over_rows_that_is_summed_is_n_times_too_large():
    found = of_step(mse_of, [], wrapped(reduction="sum"), {})
    assert {(fault.kind, fault.factor) for fault in found.faults} == {
        ("update", "N"),
        ("metric", "N"),
    }


# Scanned layers with sharded parameters, whose gradients are summed in the backward pass.

LAYERS, WIDTH, HIDDEN, SHARDS = 2, 64, 1024, 8


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    of = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)
    layers = {"up": of(LAYERS, WIDTH, HIDDEN), "down": of(LAYERS, HIDDEN, WIDTH)}
    return {"first": of(WIDTH, WIDTH), "layers": layers, "scale": np.ones(WIDTH, np.float32)}


def batch() -> dict[str, np.ndarray]:
    """The mask has another number of ones on each shard."""
    rows = np.arange(32)
    x = np.random.default_rng(1).normal(size=(32, WIDTH)).astype(np.float32)
    y = (x[:, 0] + rows / 10).astype(np.float32)
    return {"x": x, "y": y, "mask": (rows % 4 <= rows // 4 % 4).astype(np.float32)}


@jax.checkpoint
def block(x: Any, layer: Any) -> Any:
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None


def errors(params: Any, batch: Any) -> Any:
    """float[rows]."""
    x, _ = jax.lax.scan(block, batch["x"] @ params["first"], params["layers"])
    return (jnp.mean(x * params["scale"], axis=-1) - batch["y"]) ** 2


LOSSES: dict[str, Any] = {
    "mean": lambda params, batch: errors(params, batch).mean(),
    "sum": lambda params, batch: errors(params, batch).sum(),
    "masked": lambda params, batch: (
        (errors(params, batch) * batch["mask"]).sum() / batch["mask"].sum()
    ),
}


def sharded(loss: str = "mean", **options: Any) -> crossshard.tools.Verification:
    given = {"num_shards": SHARDS, "params": "sharded"} | options
    step = crossshard.make_train_step(LOSSES[loss], optax.adam(1e-3), **given)
    return crossshard.verify(step, params(), batch())


@pytest.mark.deep
def test_a_right_sharded_step_is_fine():
    found = sharded(accumulate_steps=2, nonfinite="skip")
    assert found.ok, found


# What the backward pass does to a gradient that it sums, and the factor that is told.
FAULTS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "summed, not averaged": ("N", lambda g, shards: shards.num_shards * g),
    "averaged twice": ("1/N", lambda g, shards: g / shards.num_shards),
    "rows of a shard left out": ("", lambda g, shards: jnp.where(shards.index() == 6, 0, g)),
    "rounded": (
        "",
        lambda g, shards: jax.lax.reduce_precision(g, 8, 7) if shards.num_shards > 1 else g,
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_sums_in_the_backward_pass_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    factor, change = FAULTS[name]
    plain = gather.bucketed_sum

    def wrong(arrays: Any, partitions: Any, shards: Any) -> Any:
        return plain([change(x, shards) for x in arrays], partitions, shards)

    monkeypatch.setattr(gather, "bucketed_sum", wrong)
    found = sharded()
    assert {(fault.kind, fault.factor) for fault in found.faults} == {("update", factor)}, found
    named = {leaf.name.removeprefix("params/") for leaf in found.leaves if leaf.verdict != "fine"}
    # The others are small, and summed together after it.
    assert named == {"layers/up", "layers/down"}, found


@pytest.mark.deep
@pytest.mark.parametrize(("loss", "factor"), [("sum", "1/N"), ("masked", "")])
def test_a_fault_of_the_loss_is_named(loss: str, factor: str):
    found = sharded(loss, loss_over="shard")
    assert {(fault.kind, fault.factor) for fault in found.faults} == {("update", factor)}, found
