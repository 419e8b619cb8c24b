"""fp8 of Flax: scales and histories, whose gradients are their next values, as on one device."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp, fm32
from flax.training.train_state import TrainState

from crossshard import make_train_step
from crossshard.errors import ArgumentError
from tests.step.common import assert_close, assert_same

SGD = optax.sgd(0.1)
OWG = "_overwrite_with_gradient"
STEPS, ROWS = 4, 24
RNG = np.random.default_rng(0)
# The largest rows stand at the end, on the last shard.
X = np.float32(RNG.normal(size=(STEPS, ROWS, 16)) * np.linspace(0.5, 4, ROWS)[:, None])
Y = np.float32(RNG.normal(size=(STEPS, ROWS, 8)))
BATCHES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]


class Model(nn.Module):
    """Two layers in fp8, with a batch norm between them."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        dense = lambda width: nn.Dense(width, dot_general_cls=Fp8DirectDotGeneralOp)
        x = dense(16)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return dense(8)(jax.nn.relu(x))


def of() -> tuple[Any, Any]:
    """A loss as Flax's guide writes it, of all variables; and these."""
    model = Model()

    def loss_fn(variables: Any, batch: Any) -> Any:
        out, after = model.apply(variables, batch["x"], mutable=["batch_stats"])
        return ((out - batch["y"]) ** 2).mean(), after

    return loss_fn, model.init(jax.random.key(0), X[0])


def on_one_device(loss_fn: Any, variables: Any, optimizer: Any) -> tuple[Any, Any]:
    """The variables, and the losses, that Flax's own TrainState reaches on whole batches."""
    rest = {"batch_stats": variables["batch_stats"]}
    given = {name: variables[name] for name in ("params", OWG)}
    state = TrainState.create(apply_fn=None, params=given, tx=optimizer)

    @jax.jit
    def step(state: Any, rest: Any, batch: Any) -> Any:
        of_params = lambda given: loss_fn({**given, **rest}, batch)
        (loss, rest), grads = jax.value_and_grad(of_params, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), rest, loss

    losses = []
    for batch in BATCHES:
        state, rest, loss = step(state, rest, batch)
        losses.append(loss)
    return {**state.params, **rest}, losses


def moved(loss_fn: Any) -> Any:
    """The same loss for a step: the variables come in two parts, and the rest is returned."""

    def with_rest(params: Any, rest: Any, batch: Any) -> Any:
        loss, after = loss_fn({"params": params, **rest}, batch)
        return loss, {**rest, **after}

    return with_rest


def made(loss_fn: Any, optimizer: Any = SGD, **options: Any) -> Any:
    options = {"num_shards": 8, "loss_over": "batch", "model_state": "mean"} | options
    return make_train_step(moved(loss_fn), optimizer, **options)


def train(loss_fn: Any, variables: Any, optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """The variables and the losses."""
    rest = dict(variables)
    params = rest.pop("params")
    step = made(loss_fn, optimizer, **options)
    state, losses = step.init(params, model_state=rest), []
    for batch in BATCHES:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    params, rest = step.model(state)
    return {"params": params, **rest}, losses


@pytest.mark.deep
def test_scales_and_histories_are_one_devices():
    optimizer = optax.sgd(0.05)
    loss_fn, variables = of()
    expected, losses = on_one_device(loss_fn, variables, optimizer)
    got, found = train(loss_fn, variables, optimizer, params="sharded")
    assert_close(found, losses, rtol=1e-5)
    assert_close(got, expected, atol=1e-5, rtol=1e-4)
    # The largest input, over all shards, of the last step.
    (history,) = (
        x
        for path, x in jax.tree_util.tree_leaves_with_path(got[OWG])
        if "Dense_0" in str(path) and "input_amax_history" in str(path)
    )
    assert float(history[0]) == np.abs(X[-1]).max()


def test_a_step_that_is_skipped_leaves_scales_and_histories():
    loss_fn, variables = of()
    rest = dict(variables)
    params = rest.pop("params")
    step = made(loss_fn, num_shards=4, nonfinite="skip", donate=False)
    before, _ = step(step.init(params, model_state=rest), BATCHES[0])
    after, metrics = step(before, {**BATCHES[1], "y": np.full_like(Y[1], np.nan)})
    assert metrics["skipped"]
    assert_same(after.model_state, before.model_state)


def test_a_layer_that_is_used_twice_takes_the_maximum():
    """By fp8's own dtype, whose values JAX adds up by their maximum."""
    dense = nn.Dense(16, dot_general_cls=Fp8DirectDotGeneralOp)
    variables = dense.init(jax.random.key(0), X[0])

    def loss_fn(variables: Any, batch: Any) -> Any:
        as_maximum = lambda x: jax.lax.convert_element_type(x, fm32)
        given = {**variables, OWG: jax.tree.map(as_maximum, variables[OWG])}
        out = dense.apply(given, 3 * dense.apply(given, batch["x"]))
        return (out**2).mean(), {}

    grads = jax.jit(jax.grad(lambda v: loss_fn(v, BATCHES[0])[0]))(variables)
    step = made(loss_fn)
    state = step.init(variables["params"], model_state={OWG: variables[OWG]})
    state, _ = step(state, BATCHES[0])
    assert_close(step.model(state)[1][OWG], grads[OWG], rtol=1e-6)


@pytest.mark.parametrize("over", ["rows", "shard"])
def test_values_of_a_shards_own_rows_are_refused(over: str):
    loss_fn, variables = of()
    step = made(loss_fn, num_shards=2, loss_over=over)
    rest = {name: value for name, value in variables.items() if name != "params"}
    with pytest.raises(ArgumentError, match="loss_over='batch'"):
        step.init(variables["params"], model_state=rest)


def test_as_parameters_they_are_refused_with_what_to_write():
    loss_fn, variables = of()
    step = make_train_step(lambda v, b: loss_fn(v, b)[0], optax.sgd(0.1), num_shards=2)
    words = r"model_state='mean', loss_over='batch'\)"
    with pytest.raises(ArgumentError, match=words):
        step.init(variables)
