"""A parameter that is split over other axes keeps that split, and its state does too."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer
from crossshard.errors import ArgumentError, WeightUpdateError
from tests.step.common import assert_close, on_one_device

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": 0.1 * RNG.normal(size=(40, 32)).astype(np.float32),
    "bias": RNG.normal(size=32).astype(np.float32),
    "scale": np.ones((), np.float32),
}
SPLIT = {"kernel": P(None, "model"), "bias": P("model"), "scale": P()}
X = RNG.normal(size=(5, 16, 40)).astype(np.float32)
Y = RNG.normal(size=(5, 16, 32)).astype(np.float32)


def mesh_of(data, model):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed(mesh):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, PARAMS, SPLIT)


def squares(params, x, y):
    return ((x @ params["kernel"] * params["scale"] + params["bias"] - y) ** 2).sum()


def test_data_and_tensor_parallelism_follow_one_device():
    mesh = mesh_of(4, 2)
    params = placed(mesh)
    make = lambda: optax.adamw(0.01, eps=1e-3)
    opt = CrossShardOptimizer(make(), axis_name="data", preprocess=optax.trace(0.0))
    specs = opt.state_specs(params, 4)

    def update(params, state, x, y):
        # Each column's part of the loss; those of other columns do not depend on this one's.
        loss = lambda p: squares(p, x, y) / (2 * y.size)
        gradients = crossshard.grad(loss, axis_name="data")(params)
        # The scale is the same for all columns, so its gradient is the sum of theirs.
        gradients["scale"] = jax.lax.psum(gradients["scale"], "model")
        updates, state = opt.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    how = {"mesh": mesh, "check_vma": False}
    init = jax.jit(jax.shard_map(opt.init, in_specs=(SPLIT,), out_specs=specs, **how))
    batch = P("data"), P("data", "model")
    step = jax.jit(
        jax.shard_map(update, in_specs=(SPLIT, specs, *batch), out_specs=(SPLIT, specs), **how)
    )
    state = init(params)
    for x, y in zip(X, Y, strict=True):
        params, state = step(params, state, x, y)
    loss = lambda p, batch: squares(p, *batch) / batch[1].size
    expected, _ = on_one_device(loss, make(), PARAMS, zip(X, Y, strict=True))
    assert_close(params, expected, atol=5e-6)
    want = NamedSharding(mesh, P(None, "model"))
    assert params["kernel"].sharding.is_equivalent_to(want, 2)
    assert state.preprocess.trace["kernel"].shape == (4, 40, 32)


def test_the_specs_keep_the_split():
    opt = CrossShardOptimizer(optax.adam(0.1), preprocess=optax.trace(0.9))
    specs = opt.state_specs(placed(mesh_of(4, 2)), 4, "data")
    assert specs.inner_state[0].mu == SPLIT
    assert specs.inner_state[0].count == P()
    assert specs.preprocess.trace["kernel"] == P(("data",), None, "model")


def test_what_is_split_otherwise_is_refused():
    opt = CrossShardOptimizer(optax.adam(0.1), weight_update="sharded", axis_name="data")
    with pytest.raises(WeightUpdateError, match="replicated"):
        opt.state_specs(placed(mesh_of(4, 2)), 4)
    params = {"w": jax.device_put(np.zeros((8, 8)), NamedSharding(mesh_of(4, 2), P("data")))}
    opt = CrossShardOptimizer(optax.adam(0.1), axis_name="data")
    with pytest.raises(ArgumentError, match="Every shard"):
        opt.state_specs(params, 4)


def updated(optimizer, check_vma, model=2, split=SPLIT, **options):
    """One update of parameters of ones, in shard_map over both axes."""
    opt = CrossShardOptimizer(optimizer, axis_name="data", **options)

    def update(params):
        # Each shard's own, by its type.
        local = jax.tree.map(lambda g: g + 0.0 * jax.lax.axis_index("data"), params)
        return opt.update(local, opt.init(params), params)[0]

    how = {"mesh": mesh_of(8 // model, model), "check_vma": check_vma}
    return jax.jit(jax.shard_map(update, in_specs=(split,), out_specs=split, **how))(ONES)


ONES = jax.tree.map(jnp.ones_like, PARAMS)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
WHOLE = {
    "clip_by_global_norm": {"optimizer": CLIPPED},
    "scale_by_trust_ratio": {"optimizer": optax.lamb(0.1)},
    "adafactor": {"optimizer": optax.adafactor(0.1)},
    "apply_if_finite": {"optimizer": optax.apply_if_finite(optax.sgd(0.1), 2)},
    "preprocess": {"optimizer": optax.sgd(0.1), "preprocess": optax.clip_by_global_norm(1.0)},
    "nonfinite": {"optimizer": optax.sgd(0.1), "nonfinite": "skip"},
    "loss_scale": {"optimizer": optax.sgd(0.1), "loss_scale": "dynamic"},
    "metrics": {"optimizer": optax.sgd(0.1), "metrics": "grad_norm"},
}


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [*((name, False) for name in ("clip_by_global_norm", "nonfinite", "loss_scale", "metrics"))]
    + [(name, True) for name in WHOLE],
)
def test_what_needs_whole_tensors_is_refused_on_blocks_of_them(name, check_vma):
    with pytest.raises(WeightUpdateError, match=r"split over 'model'.*axis_names=") as e:
        updated(check_vma=check_vma, **WHOLE[name])
    assert ("check_vma=True" in str(e.value)) is not check_vma


# Without types, whole parameters may be blocks; with them, an axis of one splits like others.
TAKEN = {
    "an elementwise optimizer runs on blocks": (optax.adamw(0.01), True, {}),
    "without types": (optax.sgd(0.02, 0.9), False, {}),
    "an axis of one device splits nothing": (CLIPPED, False, {"model": 1}),
    "whole parameters may have any optimizer": (optax.lamb(0.1), True, {"split": P()}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_right(name):
    optimizer, check_vma, how = TAKEN[name]
    want, _ = optimizer.update(ONES, optimizer.init(ONES), ONES)
    assert_close(updated(optimizer, check_vma, **how), want, atol=1e-7)
