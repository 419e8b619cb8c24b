"""The worked example of CONTRIBUTING.md: a stage written outside of the package."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.pipeline.pipeline import Pipeline
from examples.gradient_noise import GradientNoise
from tests.quick import deep

ETA, GAMMA, STEPS, N = 0.3, 0.55, 4, 8
RNG = np.random.default_rng(0)
KERNEL = RNG.normal(size=(40, 32)).astype(np.float32)
BATCHES = RNG.normal(size=(STEPS, 16, 40)).astype(np.float32)
RATE = 0.1


def optimizer(inner=None):
    return CrossShardOptimizer(
        inner or optax.sgd(RATE), preprocess=GradientNoise(ETA, GAMMA, seed=3)
    )


def loss_fn(params, x):
    return ((x @ params["kernel"]) ** 2).mean()


def in_numpy(shards):
    """Plain SGD in float64 with the same noise."""
    kernel = KERNEL.astype(np.float64)
    for count, batch in enumerate(BATCHES):
        parts = np.split(batch.astype(np.float64), shards)
        gradients = []
        for shard, x in enumerate(parts):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), count), shard)
            noise = jax.random.normal(jax.random.split(key, 1)[0], kernel.shape)
            scale = np.sqrt(ETA / (1 + count) ** GAMMA)
            own = 2 * x.T @ (x @ kernel) / (len(x) * kernel.shape[1])
            gradients.append(own + scale * np.asarray(noise, np.float64))
        kernel = kernel - RATE * np.mean(gradients, 0)
    return kernel


def by_train_step(weight_update):
    step = make_train_step(loss_fn, optimizer(), num_shards=N, weight_update=weight_update)
    state = step.init({"kernel": KERNEL})
    for x in BATCHES:
        state, _ = step(state, x)
    return state.params["kernel"]


def by_shard_map(check_vma):
    opt = optimizer()
    mesh = jax.make_mesh((N,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"kernel": jnp.asarray(KERNEL)}
    specs = opt.state_specs(params, N)

    def update(params, state, x):
        gradients = crossshard.grad(loss_fn)(params, x)
        updates, state = opt.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    how = {"mesh": mesh, "check_vma": check_vma}
    state = jax.jit(jax.shard_map(opt.init, in_specs=P(), out_specs=specs, **how))(params)
    step = jax.jit(
        jax.shard_map(update, in_specs=(P(), specs, P("shards")), out_specs=(P(), specs), **how)
    )
    for x in BATCHES:
        params, state = step(params, state, x)
    return params["kernel"]


def by_variables():
    model, opt = nnx.Param(jnp.asarray(KERNEL)), optimizer()

    @crossshard.shard(num_shards=N)
    def step(model, opt, x):
        opt.minimize(lambda: loss_fn({"kernel": model[...]}, x), var_list=[model])

    for x in BATCHES:
        step(model, opt, x)
    return model[...]


WAYS = {
    "whole step, replicated": lambda: by_train_step("replicated"),
    "whole step, in parts": lambda: by_train_step("sharded"),
    "shard_map, with types": lambda: by_shard_map(True),
    "shard_map, without types": lambda: by_shard_map(False),
    "variables": by_variables,
}


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_in_follow_numpy(way):
    np.testing.assert_allclose(WAYS[way](), in_numpy(N), rtol=0, atol=2e-6)


def test_the_noise_differs_between_shards():
    assert np.abs(in_numpy(1) - in_numpy(N)).max() > 0.01


@pytest.mark.parametrize("after", [deep(8), 2])
@pytest.mark.parametrize("inner", [optax.sgd(RATE), optax.adam(RATE)], ids=["sgd", "adam"])
def test_its_state_is_checkpointed_and_resharded(tmp_path, inner, after):
    eight = make_train_step(loss_fn, optimizer(inner), num_shards=8)
    state = eight.init({"kernel": KERNEL})
    for x in BATCHES[:2]:
        state, _ = eight(state, x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", eight.unshard(state))
    step = make_train_step(loss_fn, optimizer(inner), num_shards=after)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "state", eight.unshard(state))
    restored = step.reshard(saved)
    noise = restored.opt_state.preprocess
    assert noise.key.shape == (after, 2)
    np.testing.assert_array_equal(noise.count, np.full(after, 2))
    goes_on, _ = step(restored, BATCHES[2])
    assert int(goes_on.opt_state.preprocess.count[0]) == 3
    if after == 8:
        expected, _ = eight(state, BATCHES[2])
        for one, other in zip(jax.tree.leaves(goes_on), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)


def test_it_is_one_short_file():
    source = Path(__file__).parents[2] / "examples" / "gradient_noise.py"
    lines = source.read_text().splitlines()
    assert len(lines) <= 40
    assert len(list(filter(None, lines))) <= 30


def test_inside_the_package_it_is_one_line(monkeypatch):
    """That in the tuple of the stages, and not even a ``preprocess=``."""
    own = GradientNoise(ETA, GAMMA, seed=3)
    stages = Pipeline.stages.func
    with_line = property(lambda self: (*stages(self)[:1], own, *stages(self)[1:]))
    monkeypatch.setattr(Pipeline, "stages", with_line)
    step = make_train_step(loss_fn, optax.sgd(RATE), num_shards=N)
    state = step.init({"kernel": KERNEL})
    for x in BATCHES:
        state, _ = step(state, x)
    np.testing.assert_allclose(state.params["kernel"], in_numpy(N), rtol=0, atol=2e-6)
    np.testing.assert_array_equal(state.opt_state.preprocess.count, np.full(N, STEPS))
    assert "local gradient → GradientNoise → mean" in step.describe()


def test_describe_names_it():
    assert "GradientNoise" in optimizer().describe()
