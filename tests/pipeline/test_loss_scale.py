"""loss_scale: what float16 loses without it, its bounds, and what says nothing about it.

That an overflow skips the step on all shards, and how the scale moves, hold the combinations, by
their factor `scale`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, DynamicLossScale
from crossshard.errors import ArgumentError, ArgumentTypeError
from tests.step.common import sgd_step

N = 4


def test_small_gradients_are_kept_and_large_ones_found_in_float16():
    # Of 2e-8, float16 makes 0; scaled by 1024 it is a number. Scaled by 2 ** 18, 1 is infinite.
    loss = lambda w, x: (w.astype(jnp.float32) * x).sum() / len(x)
    small, one = np.full((N, 2), 2e-8, np.float32), np.ones((N, 2), np.float32)

    def moved(loss_scale: Any, x: np.ndarray) -> Any:
        step = sgd_step(loss, 1e6, N, loss_scale=loss_scale, master_dtype="float32")
        state, metrics = step(step.init(np.ones(2, np.float16)), x)
        return np.asarray(optax.tree.get(state.opt_state, "masters")) - 1, metrics

    assert np.all(moved(None, small)[0] == 0)
    np.testing.assert_allclose(moved(DynamicLossScale(1024.0), small)[0], -0.02, rtol=1e-2)
    change, metrics = moved(DynamicLossScale(2.0**18), one)
    assert np.all(change == 0)
    assert metrics["skipped"]


def test_the_scale_stays_finite_and_above_zero():
    scale = DynamicLossScale(2.0**119, growth_interval=1)
    step = sgd_step(lambda w, x: (w * x).mean(), 0.0, 2, loss_scale=scale)
    state = step.init(np.float32(1e-30))
    for _ in range(4):
        state, metrics = step(state, np.full(2, 1e-30, np.float32))
    assert float(metrics["loss_scale"]) == 2.0**120
    assert not metrics["skipped"]


@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}], ids=str)
def test_an_overflow_is_found_that_a_stage_before_the_sum_hides(options: dict[str, Any]):
    scale = DynamicLossScale(2.0**120)
    opt = CrossShardOptimizer(
        optax.sgd(0.1), preprocess=optax.clip(1.0), loss_scale=scale, **options
    )
    step = crossshard.make_train_step(lambda w, x: (1e6 * w * x).mean(), opt, num_shards=N)
    state, metrics = step(step.init(jnp.float32(1)), np.ones(2 * N, np.float32))
    assert metrics["skipped"]
    assert (state.params, state.opt_state.loss_scale.scale) == (1, 2.0**119)


def test_value_and_gradient_are_those_of_the_loss_without_its_scale():
    # The state of a scale that is off scales nothing.
    off = CrossShardOptimizer(optax.sgd(1.0)).init(np.ones(2)).loss_scale
    assert off == ()
    for scale in (8.0, off):
        value, gradient = crossshard.value_and_grad(jnp.square, loss_scale=scale)(3.0)
        assert (float(value), float(gradient)) == (9.0, 6.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_scale_that_16_bits_do_not_hold_is_the_same_in_both_directions(dtype: str):
    def loss(w: Any, x: Any) -> jax.Array:
        return (w * x).mean().astype(dtype)

    x, scale = np.full(N, 0.75, np.float32), DynamicLossScale(777.7)
    step = sgd_step(loss, 1.0, N, loss_scale=scale)
    state, _ = step(step.init(np.float32(2)), x)
    np.testing.assert_allclose(state.params, 1.25, rtol=1e-6)
    of_shard = crossshard.value_and_grad(loss, loss_scale=scale.init(None))
    np.testing.assert_allclose(of_shard(np.float32(2), x)[1], 0.75, rtol=1e-6)


# The square of the larger one is infinite in float32.
@pytest.mark.parametrize("initial", [1024.0, 2.0**64])
def test_gradients_that_are_summed_in_a_loop_are_scaled_in_every_microbatch(initial: float):
    rng = np.random.default_rng(0)
    layers = np.float32(rng.normal(size=(2, 192, 192)) / 16)
    rows = np.float32(rng.normal(size=(16, 192)))

    def loss(w: Any, x: Any) -> jax.Array:
        return (jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0] ** 2).mean()

    options = {"loss_scale": DynamicLossScale(initial), "metrics": "local_grad_norm"}
    step = sgd_step(loss, 1.0, 4, accumulate_steps=2, **options)
    state, metrics = step(step.init(layers), rows)
    own = jax.vmap(jax.grad(loss), (None, 0))(layers, rows.reshape(4, 4, 192))
    norm = np.sqrt((np.asarray(own, np.float64) ** 2).sum((1, 2, 3)).mean())
    np.testing.assert_allclose(metrics["local_grad_norm"], norm, rtol=1e-4)
    want = layers - jax.jit(jax.grad(loss))(layers, rows)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)


NO_SCALES = {
    "initial": [0.0, float("inf"), float("nan"), 1e39, 1e-46],
    "growth_interval": [0, 1.5, float("inf"), 2**31],
    "growth_factor": [0.5],
    "backoff_factor": [1.0, 0.0],
}


@pytest.mark.parametrize("name", NO_SCALES)
def test_numbers_that_make_no_scale_are_refused(name: str):
    for bad in NO_SCALES[name]:
        with pytest.raises(ArgumentError, match=name):
            DynamicLossScale(**{name: bad})
    for bad in ("8", None, True, [8.0], np.ones(2)):
        with pytest.raises(ArgumentTypeError, match=f"{name} of DynamicLossScale must be a number"):
            DynamicLossScale(**{name: bad})
    scale = DynamicLossScale(np.float32(8), growth_interval=np.int64(2))
    assert float(scale.init(None).scale) == 8.0
