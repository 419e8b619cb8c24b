"""Steps on meshes with other axes than the shard axes, over which the model is split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, AxisError
from tests.step.common import assert_close, on_one_device, train

RNG = np.random.default_rng(0)
NAMES = {2: ("data", "model"), 3: ("slice", "data", "model")}


def normal(*shape: int) -> np.ndarray:
    return 0.1 * RNG.normal(size=shape).astype(np.float32)


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, NAMES[len(sizes)], axis_types=(AxisType.Auto,) * len(sizes))


def placed(mesh: jax.sharding.Mesh, params: Any, split: Any) -> Any:
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    return jax.tree.map(put, params, split)


def step_of(loss: Any, optimizer: Any, mesh: Any, update: str = "sharded", **kwargs: Any) -> Any:
    axes = mesh.axis_names[:-1]
    options = {"mesh": mesh, "axis_name": axes, "weight_update": update}
    return make_train_step(loss, optimizer, **options, **kwargs)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adamw": lambda: optax.adamw(1e-3, eps=1e-4),
}


# A network of two matrices, whose blocks are too large to share a bucket with the loss.

PARAMS = {"up": normal(64, 1024), "down": normal(1024, 64)}
SPLIT = {"up": P(None, "model"), "down": P("model")}
BATCHES = normal(4, 32, 64) * 10


def network(params: Any, x: Any) -> jax.Array:
    return ((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2).mean()


def blockwise(params: Any, x: Any) -> jax.Array:
    """The same, which names the blocks itself."""

    @jax.shard_map(
        axis_names={"model"}, in_specs=(P(), P(None, "model"), P("model")), out_specs=P()
    )
    def run(x: Any, up: Any, down: Any) -> Any:
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "model")

    return ((run(x, params["up"], params["down"]) - x) ** 2).mean()


def constrained(params: Any, x: Any) -> jax.Array:
    """The same, with a constraint on the hidden layer."""
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["up"]), P(None, "model"))
    return ((hidden @ params["down"] - x) ** 2).mean()


@pytest.mark.parametrize(
    ("name", "update", "sizes"),
    [
        ("sgd", "replicated", (4, 2)),
        ("sgd", "sharded", (2, 2, 2)),
        ("adamw", "sharded", (4, 2)),
    ],
)
def test_the_data_axes_carry_exactly_the_bound(name: str, update: str, sizes: tuple[int, ...]):
    mesh = mesh_of(*sizes)
    types = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
        PARAMS,
        SPLIT,
    )
    step = step_of(network, OPTIMIZERS[name](), mesh, update)
    state = step.abstract_init(types)
    report = crossshard.inspect(step.lower(state, BATCHES[0]))
    local = sum(x.nbytes for x in PARAMS.values()) // 2
    over_model = report.bytes_by_axes["model"]
    assert report.bytes_sent - over_model == 2 * 3 / 4 * local == report.lower_bound
    assert (report.shards, report.parameter_bytes, report.ratio) == (4, local, 1)
    # The loss's own: what the rows of down give is summed over the model axis.
    assert over_model == 2 * 1 / 2 * BATCHES[0].nbytes / 4
    assert [each.within_shard for each in report.collectives if "model" in each.axes] == [True]
    axes = "data" if len(sizes) == 2 else ("slice", "data")
    if (name, update) == ("adamw", "sharded"):
        mu = state.opt_state.inner_state[0].mu
        assert mu["up"].sharding.spec == P(axes, "model")
        assert mu["down"].sharding.spec == P("model", axes)


@pytest.mark.parametrize("loss", [blockwise, constrained])
def test_a_loss_may_split_its_work_itself(loss: Any):
    mesh, optimizer = mesh_of(4, 2), OPTIMIZERS["sgd"]()
    step = step_of(loss, optimizer, mesh)
    state = train(step, step.init(placed(mesh, PARAMS, SPLIT)), BATCHES)
    assert_close(state.params, on_one_device(network, optimizer, PARAMS, BATCHES)[0], 1e-6)
    for key, spec in SPLIT.items():
        whole = NamedSharding(mesh, spec)
        for kept in (state.params[key], step.model(state)[key]):
            assert kept.sharding.is_equivalent_to(whole, kept.ndim), key


def test_groups_on_the_data_axis():
    mesh, inner, groups = mesh_of(4, 2), OPTIMIZERS["sgd"](), [[0, 3], [1, 2]]
    step = step_of(network, CrossShardOptimizer(inner, group_assignment=groups), mesh)
    state = train(step, step.init(placed(mesh, PARAMS, SPLIT)), BATCHES)
    saved = step.unshard(state)
    assert_close(step.reshard(saved), state, 0)
    for group in groups:
        rows = BATCHES.reshape(4, 4, 8, 64)[:, group].reshape(4, 16, 64)
        params, inner_state = on_one_device(network, inner, PARAMS, rows)
        assert_close(step.model(state, group[0]), params, 1e-6)
        of_group = jax.tree.map(lambda x, i=group[1]: x[i] if x.ndim else x, saved.opt_state)
        assert_close(of_group.inner_state, inner_state, 1e-6)


# Of other sizes, of the same with other names, and of the same with the devices in another order.
AUTO = jax.devices(), (4, 2), ("data", "model")
NOT_THE_MESH = r"params\['down'\].*not the mesh of the step"
OTHERS = {
    "shards": (
        *AUTO,
        P("data", "model"),
        r"params\['down'\].*data is a shard axis.*over model only.*params='sharded'",
    ),
    "sizes": (jax.devices(), (2, 4), ("data", "model"), SPLIT["down"], NOT_THE_MESH),
    "names": (jax.devices(), (4, 2), ("rows", "model"), SPLIT["down"], NOT_THE_MESH),
    "order": (jax.devices()[::-1], (4, 2), ("data", "model"), SPLIT["down"], NOT_THE_MESH),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_parameter_that_does_not_fit_the_mesh_is_refused_by_name(other: str):
    devices, sizes, names, down, said = OTHERS[other]
    mesh = jax.sharding.Mesh(np.reshape(devices, sizes), names)
    params = placed(mesh, PARAMS, {**SPLIT, "down": down})
    with pytest.raises(ArgumentError, match=said):
        step_of(network, optax.sgd(0.1), mesh_of(4, 2)).init(params)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"axis_name": "date"}, AxisError, "'date'.*'data': 4"),
        ({"axis_name": 3}, ArgumentTypeError, "3"),
        ({"axis_name": "data", "num_shards": 8}, ArgumentError, "4 shards"),
        ({"axis_name": "data", "mesh": None}, AxisError, "Pass mesh="),
        ({"axis_name": "data", "own": "model"}, ArgumentError, "one of the two places"),
    ],
)
def test_axes_that_do_not_fit_are_refused(options: Any, error: type, words: str):
    options = {"mesh": mesh_of(4, 2), **options}
    opt = CrossShardOptimizer(optax.sgd(0.1), axis_name=options.pop("own", None))
    with pytest.raises(error, match=words):
        make_train_step(network, opt, **options)


def test_a_state_of_a_mesh_without_the_axis_is_refused_until_it_is_resharded():
    mesh = mesh_of(4, 2)
    state = step_of(network, optax.sgd(0.1), mesh).init(placed(mesh, PARAMS, SPLIT))
    step = make_train_step(network, optax.sgd(0.1), num_shards=8)
    with pytest.raises(ArgumentError, match=r"params\['down'\].*reshard\("):
        step(state, BATCHES[0])
    state, _ = step(step.reshard(state), BATCHES[0])
    assert_close(state.params, on_one_device(network, optax.sgd(0.1), PARAMS, BATCHES[:1])[0], 1e-6)


def test_a_loss_that_constrains_the_data_axis_is_refused():
    mesh = mesh_of(4, 2)
    loss = lambda p, x: network(p, jax.lax.with_sharding_constraint(x, P("data")))
    step = step_of(loss, optax.sgd(0.1), mesh)
    with pytest.raises(ArgumentError, match="data are the shard axes"):
        step(step.init(placed(mesh, PARAMS, SPLIT)), BATCHES[0])


@pytest.mark.parametrize("over", ["shard", "batch"])
def test_a_loss_that_names_the_model_axis_is_refused(over: Any):
    mesh = mesh_of(4, 2)
    loss = lambda p, x: jax.lax.psum(network(p, x), "model")
    step = step_of(loss, optax.sgd(0.1), mesh, loss_over=over)
    state = step.init(placed(mesh, PARAMS, SPLIT))
    with pytest.raises(AxisError, match=r"names the axis 'model' of the mesh .*test_model_axes"):
        step(state, BATCHES[0])
