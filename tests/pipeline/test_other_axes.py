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
from tests.quick import deep

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": 0.1 * RNG.normal(size=(40, 32)).astype(np.float32),
    "bias": RNG.normal(size=32).astype(np.float32),
    "scale": np.ones((), np.float32),
}
SPLIT = {"kernel": P(None, "model"), "bias": P("model"), "scale": P()}
X = RNG.normal(size=(5, 16, 40)).astype(np.float32)
Y = RNG.normal(size=(5, 16, 32)).astype(np.float32)
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.02),
    "momentum": lambda: optax.sgd(0.02, 0.9),
    "adamw": lambda: optax.adamw(0.01, eps=1e-3),
}


def mesh_of(data, model):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def placed(mesh):
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, PARAMS, SPLIT)


def squares(params, x, y):
    return ((x @ params["kernel"] * params["scale"] + params["bias"] - y) ** 2).sum()


def on_one_device(optimizer, preprocess, shards):
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = optimizer.init(params)
    own = [preprocess.init(params) for _ in range(shards)]
    for x, y in zip(X, Y, strict=True):
        gradients = []
        for shard in range(shards):
            rows = slice(shard * len(x) // shards, (shard + 1) * len(x) // shards)
            own_x, own_y = x[rows], y[rows]
            g = jax.grad(squares)(params, own_x, own_y)
            g, own[shard] = preprocess.update(
                jax.tree.map(lambda leaf, size=own_y.size: leaf / size, g), own[shard], params
            )
            gradients.append(g)
        mean = jax.tree.map(lambda *g: sum(g) / shards, *gradients)
        updates, state = optimizer.update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize(("data", "model"), [(4, 2), deep((2, 4)), deep((8, 1))])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_data_and_tensor_parallelism_follow_one_device(name, data, model):
    mesh = mesh_of(data, model)
    params = placed(mesh)
    opt = CrossShardOptimizer(OPTIMIZERS[name](), axis_name="data", preprocess=optax.trace(0.5))
    specs = opt.state_specs(params, data)

    def update(params, state, x, y):
        # Each column's part of the loss; those of other columns do not depend on this one's.
        total = y.size * model
        loss = lambda p: squares(p, x, y) / total
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
    expected = on_one_device(OPTIMIZERS[name](), optax.trace(0.5), data)
    for key in PARAMS:
        np.testing.assert_allclose(params[key], expected[key], rtol=0, atol=5e-6)
    want = NamedSharding(mesh, P(None, "model"))
    assert params["kernel"].sharding.is_equivalent_to(want, 2)
    assert state.preprocess.trace["kernel"].shape == (data, 40, 32)


def test_the_specs_keep_the_split():
    opt = CrossShardOptimizer(optax.adam(0.1), preprocess=optax.trace(0.9))
    specs = opt.state_specs(placed(mesh_of(4, 2)), 4, "data")
    assert specs.inner_state[0].mu == SPLIT
    assert specs.inner_state[0].count == P()
    assert specs.preprocess.trace["kernel"] == P(("data",), None, "model")


def test_a_sharded_weight_update_of_split_parameters_is_refused():
    opt = CrossShardOptimizer(optax.adam(0.1), weight_update="sharded", axis_name="data")
    with pytest.raises(crossshard.errors.WeightUpdateError, match="replicated"):
        opt.state_specs(placed(mesh_of(4, 2)), 4)


def test_parameters_split_over_the_shards_are_refused():
    mesh = mesh_of(4, 2)
    params = {"w": jax.device_put(np.zeros((8, 8)), NamedSharding(mesh, P("data")))}
    opt = CrossShardOptimizer(optax.adam(0.1), axis_name="data")
    with pytest.raises(crossshard.errors.ArgumentError, match="Every shard"):
        opt.state_specs(params, 4)


def updated(optimizer, check_vma, model=2, preprocess=None):
    """One update of the split parameters, in shard_map over both axes."""
    mesh = mesh_of(8 // model, model)
    opt = CrossShardOptimizer(optimizer, axis_name="data", preprocess=preprocess)
    gradients = jax.tree.map(jnp.ones_like, placed(mesh))

    def update(params, gradients):
        # Each shard's own, by its type.
        local = jax.tree.map(lambda g: g + 0.0 * jax.lax.axis_index("data"), gradients)
        return opt.update(local, opt.init(params), params)[0]

    run = jax.shard_map(
        update, mesh=mesh, in_specs=(SPLIT, SPLIT), out_specs=SPLIT, check_vma=check_vma
    )
    return jax.jit(run)(placed(mesh), gradients)


WHOLE = {
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "scale_by_trust_ratio": lambda: optax.lamb(0.1),
    "adafactor": lambda: optax.adafactor(0.1),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 2),
}


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("name", WHOLE)
def test_an_optimizer_that_needs_whole_tensors_is_refused_on_blocks_of_them(name, check_vma):
    with pytest.raises(
        crossshard.errors.WeightUpdateError, match=r"split over 'model'.*axis_names="
    ) as e:
        updated(WHOLE[name](), check_vma)
    assert ("check_vma=True" in str(e.value)) is not check_vma


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_so_is_a_preprocessor_that_needs_them(check_vma):
    with pytest.raises(crossshard.errors.WeightUpdateError, match="clip_by_global_norm"):
        updated(optax.sgd(0.1), check_vma, preprocess=optax.clip_by_global_norm(1.0))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_elementwise_optimizer_runs_on_blocks(name, check_vma):
    got = updated(OPTIMIZERS[name](), check_vma)
    optimizer, params = OPTIMIZERS[name](), jax.tree.map(jnp.asarray, PARAMS)
    ones = jax.tree.map(jnp.ones_like, params)
    want, _ = optimizer.update(ones, optimizer.init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), got, want)


def test_an_axis_of_one_device_splits_nothing():
    got = updated(WHOLE["clip_by_global_norm"](), check_vma=False, model=1)
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    want = jax.tree.map(lambda g: -0.1 * g / optax.tree.norm(ones), ones)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_whole_parameters_under_vma_may_have_any_optimizer():
    mesh = mesh_of(4, 2)
    opt = CrossShardOptimizer(optax.lamb(0.1), axis_name="data")

    def update(params):
        gradients = jax.tree.map(lambda x: x + 0.0 * jax.lax.axis_index("data"), params)
        return opt.update(gradients, opt.init(params), params)[0]

    got = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P()))(PARAMS)
    params = jax.tree.map(jnp.asarray, PARAMS)
    want, _ = optax.lamb(0.1).update(params, optax.lamb(0.1).init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
