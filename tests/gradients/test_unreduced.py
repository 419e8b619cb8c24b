"""Gradients that arrive unreduced under plain ``jit`` are summed once, as their type says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import crossshard
from tests.quick import deep
from tests.step.common import on_one_device

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = RNG.normal(size=(16, 8)).astype(np.float32)
W = RNG.normal(size=(4, 8)).astype(np.float32)
STEPS = 3
OPTIMIZERS = {
    "sgd": optax.sgd(0.3),
    "adamw": optax.adamw(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.3)),
}
# The mesh, how the rows and the parameter lie on it, and the axes that are left to be summed.
MESHES = {
    "one axis": ({"data": 8}, P("data"), P(), {"data"}),
    "beside a model": ({"data": 2, "model": 4}, P("data"), P(None, "model"), {"data"}),
    "two axes": ({"data": 2, "model": 4}, P(("data", "model")), P(), {"data", "model"}),
}


def loss_fn(w: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((x @ w - y) ** 2)


def expected(optimizer: Any) -> Any:
    return on_one_device(loss_fn, optimizer, W, [(X, Y)] * STEPS)[0]


CASES: list[Any] = [
    ("sgd", "one axis", "mean", "one program"),
    ("sgd", "one axis", "sum", "two programs"),
    ("sgd", "one axis", "mean", "reduced parameters"),
    ("sgd", "beside a model", "mean", "two programs"),
    ("sgd", "two axes", "sum", "one program"),
    deep(("clipped", "beside a model", "sum", "reduced parameters")),
    deep(("adamw", "two axes", "mean", "two programs")),
]


@pytest.mark.parametrize(("optimizer", "mesh", "reduction", "how"), CASES)
def test_they_are_summed_once(optimizer: str, mesh: str, reduction: str, how: str):
    sizes, of_rows, of_weight, axes = MESHES[mesh]
    opt = crossshard.CrossShardOptimizer(OPTIMIZERS[optimizer], reduction=reduction)

    def gradient(w: Any, x: Any, y: Any) -> Any:
        reduced = jax.sharding.reshard(w, P(*of_weight, reduced=axes))
        found = jax.grad(loss_fn)(reduced, (x, y))
        assert jax.typeof(found).sharding.spec.unreduced == axes
        return found, reduced

    def update(w: Any, state: Any, found: Any, params: Any) -> Any:
        updates, state = opt.update(found, state, params)
        return optax.apply_updates(w, updates), state

    @jax.jit
    def together(w: Any, state: Any, x: Any, y: Any) -> Any:
        found, reduced = gradient(w, x, y)
        return update(w, state, found, reduced if how == "reduced parameters" else w)

    alone = jax.jit(lambda w, x, y: gradient(w, x, y)[0]), jax.jit(update)
    with jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes))):
        x, y = jax.device_put((X, Y), of_rows)
        w = jax.device_put(W, of_weight)
        state = jax.jit(opt.init)(w)
        for _ in range(STEPS):
            if how == "two programs":
                w, state = alone[1](w, state, alone[0](w, x, y), w)
            else:
                w, state = together(w, state, x, y)
    np.testing.assert_allclose(w, expected(OPTIMIZERS[optimizer]), atol=1e-6)


def stepped(opt: Any, w: Any, state: Any, x: Any, y: Any) -> Any:
    found = jax.grad(loss_fn)(jax.sharding.reshard(w, P(reduced={"data"})), (x, y))
    updates, state = opt.update(found, state, w)
    return optax.apply_updates(w, updates), state


@pytest.mark.parametrize(
    "options",
    [{"accumulate_steps": 3}, {"preprocess": optax.clip(1e9)}, {"nonfinite": "skip"}, {"ema": 0.9}],
    ids=lambda options: next(iter(options)),
)
def test_stages_see_their_sum(options: Any):
    opt = crossshard.CrossShardOptimizer(optax.sgd(0.3), **options)
    step = jax.jit(lambda *given: stepped(opt, *given))
    with jax.set_mesh(jax.make_mesh((8,), ("data",))), crossshard.shard_context(1):
        x, y = jax.device_put((X, Y), P("data"))
        w = jax.device_put(W, P())
        state = opt.init(w)
        for _ in range(STEPS * options.get("accumulate_steps", 1)):
            w, state = step(w, state, x, y)
    np.testing.assert_allclose(w, expected(optax.sgd(0.3)), atol=1e-6)


def test_the_sum_is_one_all_reduce():
    opt = crossshard.CrossShardOptimizer(optax.sgd(0.3))
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        x, y = jax.device_put((X, Y), P("data"))
        w = jax.device_put(W, P())
        run = jax.jit(lambda *given: stepped(opt, *given)[0])
        text = run.lower(w, opt.init(w), x, y).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert "reduce-scatter(" not in text
    assert "all-gather(" not in text
