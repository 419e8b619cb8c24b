"""Estimated times of steps on this machine's CPU devices, against the clock: five models."""

import statistics
import time

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import crossshard
from crossshard.plans import machine
from examples.byte_lm.model import ByteTransformer
from examples.byte_lm.model import loss as byte_loss

SHARDS = 8
FACTOR = 1.5
# What else runs on the machine comes and goes between the test of the machine and the steps.
TRIES = 3


def mlp(width, layers, rows):
    params = [{"w": jnp.ones((width, width)) / width, "b": jnp.zeros(width)} for _ in range(layers)]

    def loss_fn(params, x):
        for each in params:
            x = jax.nn.gelu(x @ each["w"] + each["b"])
        return jnp.mean(x**2)

    return loss_fn, params, jnp.ones((rows, width)), optax.adamw(1e-3), {}


def scanned():
    def loss_fn(params, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0] ** 2)

    return loss_fn, jnp.ones((8, 512, 512)) / 512, jnp.ones((512, 512)), optax.sgd(1e-3), {}


def convolution():
    kernels = [jnp.ones((3, 3, 3, 32)) / 30, *[jnp.ones((3, 3, 32, 32)) / 300] * 2]

    def loss_fn(kernels, x):
        for each in kernels:
            x = jax.lax.conv_general_dilated(
                x, each, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    return loss_fn, kernels, jnp.ones((64, 32, 32, 3)), optax.adam(1e-3), {}


def transformer():
    model = ByteTransformer(layers=3, width=160, rngs=nnx.Rngs(0))
    batch = {name: jnp.ones((16, 64), jnp.uint8) for name in ("read", "wanted")}
    return byte_loss, model, batch, optax.adamw(1e-3), {"has_aux": True}


MODELS = {
    "deep": lambda: mlp(256, 4, 1024),
    "wide": lambda: mlp(1024, 6, 256),
    "scanned": scanned,
    "convolution": convolution,
    "transformer": transformer,
}


def clocked(loss_fn, params, batch, optimizer, options, weight_update):
    step = crossshard.make_train_step(
        loss_fn, optimizer, num_shards=SHARDS, weight_update=weight_update, **options
    )
    state, taken = step.init(params), []
    for _ in range(12):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state.params, metrics))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_within_a_factor_of_the_clock(name):
    given = loss_fn, params, batch, optimizer, options = MODELS[name]()
    ratios = []
    for _ in range(TRIES):
        machine.measured.cache_clear()
        plan = crossshard.plan(
            loss_fn, params, batch, optimizer, topology=f"cpu:{SHARDS}", **options
        )
        ratios.append(
            {
                each.weight_update: each.seconds.step / clocked(*given, each.weight_update)
                for each in plan.candidates
            }
        )
        print(name, ratios[-1])
        if all(1 / FACTOR < ratio < FACTOR for ratio in ratios[-1].values()):
            return
    raise AssertionError(f"{name}: estimate ÷ clock {ratios}")
