"""Updates under shard_map(check_vma=True): optimizers that branch, and states from elsewhere."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, shard_context
from crossshard.errors import ArgumentError
from tests.quick import deep_but

RNG = np.random.default_rng(0)
W = RNG.normal(size=(64, 33)).astype(np.float32)
X = RNG.normal(size=(8, 64)).astype(np.float32)
GROUPS = [[0, 2, 5, 7], [1, 3, 4, 6]]


def on_shards(function: Any, **kwargs: Any) -> Any:
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(function, mesh=mesh, **kwargs))


def loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


BRANCHING = {
    "MultiSteps of sgd": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
    "MultiSteps of adam": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "MultiSteps that skips": lambda: optax.MultiSteps(
        optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "apply_if_finite of sgd": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "apply_if_finite of adam": lambda: optax.apply_if_finite(optax.adam(0.1, eps=1e-3), 3),
}


def transformation(name: str) -> Any:
    made = BRANCHING[name]()
    return optax.GradientTransformation(made.init, made.update)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "name", deep_but(["MultiSteps of sgd", "apply_if_finite of adam"], BRANCHING)
)
def test_each_group_steps_as_it_would_alone(name: str, check_vma: bool):
    opt = CrossShardOptimizer(transformation(name), group_assignment=GROUPS)

    def steps(w: Any, x: Any) -> Any:
        state = opt.init(w)
        for _ in range(4):
            updates, state = opt.update(crossshard.grad(loss)(w, x), state, w)
            w = optax.apply_updates(w, updates)
        return w[None]

    specs = {"in_specs": (P(), P("shards")), "out_specs": P("shards"), "check_vma": check_vma}
    got = on_shards(steps, **specs)(W, X)
    for group in GROUPS:
        alone, w = transformation(name), W
        state = alone.init(w)
        for _ in range(4):
            updates, state = alone.update(jax.grad(loss)(w, X[group]), state, w)
            w = optax.apply_updates(w, updates)
        for shard in group:
            np.testing.assert_allclose(got[shard], w, rtol=1e-4, atol=1e-5)


def sharded_step(opt: CrossShardOptimizer) -> Any:
    def step(w: Any, state: Any, x: Any) -> Any:
        updates, state = opt.update(crossshard.grad(loss)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    return step


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_whole_state_is_not_taken_for_a_part(check_vma: bool):
    opt = CrossShardOptimizer(optax.adam(0.1), weight_update="sharded")
    with shard_context(1):
        state = opt.init(W)
    specs = {"in_specs": (P(), P(), P("shards")), "out_specs": P(), "check_vma": check_vma}
    with pytest.raises(ArgumentError, match=r"\(64, 33\).*init inside jax\.shard_map.*state_specs"):
        on_shards(sharded_step(opt), **specs)(W, state, X)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1, eps=1e-3)])
def test_a_state_as_the_error_says_it(optimizer: Any):
    opt = CrossShardOptimizer(optimizer, weight_update="sharded")
    specs = opt.state_specs(W, 8)
    state = on_shards(opt.init, in_specs=P(), out_specs=specs)(W)
    run = on_shards(sharded_step(opt), in_specs=(P(), specs, P("shards")), out_specs=(P(), specs))
    w, alone, plain = W, W, optimizer.init(W)
    for _ in range(3):
        w, state = run(w, state, X)
        updates, plain = optimizer.update(jax.grad(loss)(alone, X), plain, alone)
        alone = optax.apply_updates(alone, updates)
    np.testing.assert_allclose(w, alone, rtol=1e-4, atol=1e-5)
