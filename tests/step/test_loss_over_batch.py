"""A loss over the batch: one device's numbers on any number of shards, with the loss unchanged."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import make_train_step
from crossshard.errors import (
    ArgumentError,
    AxisError,
    CheckpointWarning,
    LossError,
)
from tests.step.common import assert_close, follows_one_device, on_one_device, train

ROWS, FEATURES, WIDTH = 16, 24, 32


def array(seed: int, *shape: int) -> Any:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {
    "first": array(1, FEATURES, WIDTH) / 5,
    "scale": jnp.ones(WIDTH),
    "second": array(2, WIDTH, WIDTH) / 5,
}
_rng = np.random.default_rng(0)
_seen = np.linspace(0.1, 1, ROWS)[:, None]
BATCHES = [
    {
        "x": np.float32(_rng.normal(size=(ROWS, FEATURES))),
        "y": np.float32(_rng.normal(size=(ROWS, WIDTH))),
        "mask": np.float32(_rng.random((ROWS, WIDTH)) < _seen),
    }
    for _ in range(3)
]
SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-3)
PLACES = {"sorted": {"weight_update": "sharded"}, "tokens": {"params": "sharded"}}


# Losses as their owners write them for one device.


def _hidden(params: Any, batch: Any) -> Any:
    return jnp.tanh(batch["x"] @ params["first"] * params["scale"])


def _out(params: Any, batch: Any) -> Any:
    return _hidden(params, batch) @ params["second"]


def _unit(x: Any) -> Any:
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


def contrastive(params: Any, batch: Any) -> Any:
    images = _unit(batch["x"] @ params["first"] * params["scale"])
    logits = images @ _unit(batch["y"] @ params["second"]).T / 0.2
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -jnp.diag(both).mean() / 2


def cox_partial_likelihood(params: Any, batch: Any) -> Any:
    risk = _out(params, batch).mean(1)[jnp.argsort(-batch["y"][:, 0])]
    return (jnp.log(jnp.cumsum(jnp.exp(risk))) - risk).mean()


def token_mean(params: Any, batch: Any) -> Any:
    errors = (_out(params, batch) - batch["y"]) ** 2
    return (errors * batch["mask"]).sum() / batch["mask"].sum()


def _step(loss: Any = contrastive, optimizer: Any = SGD, number: int = 4, **options: Any) -> Any:
    return make_train_step(loss, optimizer, num_shards=number, loss_over="batch", **options)


# Losses that compare rows in pairs are in tests/harness.py.
CASES: dict[str, Any] = {"sorted": cox_partial_likelihood, "tokens": token_mean}


# Each loss in one of the places.
@pytest.mark.parametrize("name", CASES)
def test_the_step_is_that_of_one_device(name: str) -> None:
    options = {"num_shards": 4, "loss_over": "batch"} | PLACES[name]
    follows_one_device(CASES[name], SGD, PARAMS, BATCHES, **options)


class _Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # Its bias has no gradient but for rounding, of which Adam would make steps.
        self.first = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _of_module(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def test_the_gradient_of_the_whole_batch_has_no_shard_at_fault() -> None:
    step = _step(params="sharded", nonfinite="skip")
    bad = BATCHES[0] | {"y": np.full_like(BATCHES[0]["y"], np.nan)}
    state, metrics = step(step.init(PARAMS), bad)
    assert metrics["skipped"]
    assert int(metrics["nonfinite"].shard) == -1
    assert "the gradient of `first` is not finite" in metrics["nonfinite"].describe(state.params)
    assert_close(step.model(state), PARAMS, atol=0)


def _moved(how: str, one: Any, other: Any, state: Any, folder: Any) -> Any:
    """The state as the other step has it, by a checkpoint or without one."""
    other.init(_Module(nnx.Rngs(1)))
    if how == "reshard":
        return other.reshard(one.unshard(state))
    with crossshard.Checkpoints(folder, one) as checkpoints:
        checkpoints.save(state)
    with (
        crossshard.Checkpoints(folder, other) as checkpoints,
        pytest.warns(CheckpointWarning, match="loss_over is (shard|batch) in it, and"),
    ):
        return checkpoints.restore_latest(other.init(_Module(nnx.Rngs(1))))[0]


@pytest.mark.deep
@pytest.mark.parametrize(("how", "number"), [("reshard", 4), ("checkpoint", 2)])
def test_a_module_goes_from_shards_and_back(how: str, number: int, tmp_path: Any) -> None:
    of_shards = make_train_step(_of_module, SGD, num_shards=4, loss_over="shard", ema=0.9)
    of_batch = _step(_of_module, SGD, number, params="sharded", ema=0.9)
    state, _ = of_shards(of_shards.init(_Module(nnx.Rngs(0))), BATCHES[0])
    statistics = np.asarray(state.model_state["norm"]["mean"][...])
    assert statistics.shape == (4, WIDTH)
    assert np.abs(statistics - statistics.mean(0)).max() > 1e-2
    if number == 4:
        with pytest.raises(ArgumentError, match="one for each shard, and this step keeps one for"):
            of_batch(state, BATCHES[1])
    there = _moved(how, of_shards, of_batch, state, tmp_path / "there")
    found = of_batch.model(there)
    np.testing.assert_allclose(found.norm.mean[...], statistics.mean(0), atol=1e-6)
    assert_close(found.first.kernel[...], of_shards.model(state).first.kernel[...], atol=0)
    there, _ = of_batch(there, BATCHES[1])
    back = _moved(how, of_batch, of_shards, there, tmp_path / "back")
    every = back.model_state["norm"]["mean"][...]
    assert_close(every, np.broadcast_to(of_batch.model(there).norm.mean[...], (4, WIDTH)), atol=0)
    keys = jax.random.key_data(back.model_state["dropout"]["rngs"]["key"][...])
    assert len(np.unique(keys, axis=0)) == 4
    _, metrics = of_shards(back, BATCHES[2])
    assert np.isfinite(metrics["loss"])


def test_it_says_what_it_does() -> None:
    step = _step(contrastive, ADAMW, params="sharded", accumulate_steps=2)
    step.abstract_init(PARAMS)
    said = "gather → gradient of one loss over the batch, summed by XLA → accumulate 2 microbatches"
    assert step.describe().startswith(said)
    assert "loss: the mean of those of 2 microbatches" in step.describe()


LAYERS, WIDE = 3, 256


def test_stacked_layers_are_gathered_in_their_loop() -> None:
    """Of sharded parameters no device has more than a layer, and no gradient is whole."""
    part, steps = "up", 2
    stack = {name: array(i, LAYERS, WIDE, WIDE) / 16 for i, name in enumerate(("up", "down"))}
    rows = [{"x": array(seed, ROWS, WIDE)} for seed in (5, 6)]

    def loss(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, each: Any) -> Any:
            x = x + jnp.tanh(x @ each["up"]) @ each["down"]
            return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3), None

        return (jax.lax.scan(layer, batch["x"], params)[0] ** 4).mean()

    step = _step(
        loss, params="sharded", wrt=lambda path, _: part in str(path), accumulate_steps=steps
    )
    state = step.init(stack)
    compiled = step.lower(state, rows[0]).compile()
    found = crossshard.inspect(compiled)
    gathers = [each for each in found.collectives if each.kind == "all-gather"]
    sent = {(str(x), each.in_loop) for each in gathers for x in each.operands}
    assert sent == {(f"f32[{WIDE // 4},{WIDE}]", True)}, sent
    assert not re.search(rf"f32\[{LAYERS},{WIDE},{WIDE}\]", compiled.as_text())
    text = f"gathered row by row in a loop of {LAYERS} turns, in float32, and again in the backward"
    assert text in step.describe()
    trained = {name: x for name, x in stack.items() if part in name}

    def plain(trained: Any, batch: Any) -> Any:
        of = lambda i: loss({**stack, **trained}, {"x": batch["x"][i::steps]})
        return sum(of(i) / steps for i in range(steps))

    expected, _ = on_one_device(plain, SGD, trained, rows)
    assert_close(step.model(train(step, state, rows)), {**stack, **expected})


def _mesh(axis: str) -> Any:
    return jax.make_mesh((4,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def test_the_shard_axis_is_not_bound() -> None:
    for axis, error, said in (
        ("data", AxisError, r"names the shard axis 'data' \(.*batch.py:\d+\)"),
        ("other", NameError, "other"),
    ):
        named = lambda params, batch, axis=axis: jax.lax.pmean(contrastive(params, batch), axis)
        step = make_train_step(named, SGD, mesh=_mesh("data"), loss_over="batch")
        with pytest.raises(error, match=said):
            step(step.init(PARAMS), BATCHES[0])


def test_the_mesh_may_be_named() -> None:
    mesh = _mesh("shards")

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P("shards"), out_specs=P(), check_vma=False
    )
    def gathered(x: Any) -> Any:
        return jax.lax.all_gather(x, "shards", tiled=True)

    def loss(params: Any, batch: Any) -> Any:
        whole = jax.lax.with_sharding_constraint(gathered(batch["x"]), NamedSharding(mesh, P()))
        return contrastive(params, {**batch, "x": whole})

    expected, _ = on_one_device(contrastive, SGD, PARAMS, BATCHES)
    step = make_train_step(loss, SGD, mesh=mesh, params="sharded", loss_over="batch")
    assert_close(step.model(train(step, step.init(PARAMS), BATCHES)), expected)


def _adapted(kernel: Any, batch: Any) -> Any:
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    convolved = lambda k, x: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", **numbers)

    def of_task(x: Any) -> Any:
        of_kernel = lambda kernel: (convolved(kernel, x) ** 2).mean()
        return of_kernel(kernel - 0.1 * jax.grad(of_kernel)(kernel))

    return jax.vmap(of_task)(batch).mean()


@pytest.mark.parametrize("rows_of_task", [1, 2])
def test_a_gradient_of_a_kernel_for_each_row(rows_of_task: int) -> None:
    rng = np.random.default_rng(0)
    kernel = np.float32(rng.normal(size=(3, 3, 2, 4))) / 5
    batch = np.float32(rng.normal(size=(16, rows_of_task, 6, 6, 2)))
    if rows_of_task == 1:
        # XLA computes something else.
        step = _step(_adapted)
        with pytest.raises(LossError, match=r"kernel for each row .*test_loss_over_batch.py"):
            step(step.init(kernel), batch)
        return
    follows_one_device(_adapted, SGD, kernel, [batch], num_shards=4, loss_over="batch")
