"""The state of a step with sharded parameters: made, moved, read, compared."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import DynamicLossScale, make_train_step
from crossshard.errors import ArgumentError, CheckpointWarning
from crossshard.step import state as step_state
from tests.step.common import assert_close, assert_same, on_one_device, train

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return np.float32(RNG.normal(size=shape) / 16)


# Stacked layers, a matrix that is gathered by itself, one that shares a bucket, and tiny ones.
PARAMS = {
    "layers": normal(3, 192, 192),
    "out": normal(192, 256),
    "few": normal(64, 32),
    "odd": normal(7, 5),
    "bias": np.zeros(3, np.float32),
}
BATCHES = 4 * normal(3, 48, 192)


def loss_fn(params: Any, x: Any) -> jax.Array:
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)
    x, _ = jax.lax.scan(layer, x, params["layers"])
    of_others = ((params["few"] - 1) ** 2).mean() + (params["odd"] ** 2).sum()
    return ((x @ params["out"] - 1) ** 2).mean() + of_others + (params["bias"] - 1).sum() ** 2


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, 0.9),
    "adamw": lambda: optax.adamw(1e-2, eps=1e-4),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-4),
    # Each matrix has an owner.
    "muon": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.contrib.muon(1e-2, eps=1e-3)),
}


def step_of(number: int = 4, optimizer: str = "sgd", **options: Any) -> Any:
    how = {"num_shards": number, "params": "sharded", **options}
    return make_train_step(loss_fn, OPTIMIZERS[optimizer](), **how)


# Made.


def largest_piece(besides: list[jax.Array]) -> int:
    """The bytes of the largest buffer on any device, of the arrays that are new."""
    old = set(map(id, besides))
    new = [x for x in jax.live_arrays() if id(x) not in old]
    pieces = [shard.data.nbytes for x in new for shard in x.addressable_shards]
    return max(pieces, default=0)


def specs_of(params: Any) -> dict[str, Any]:
    return {name: x.sharding.spec for name, x in params.items()}


RESTS = {
    "layers": P(None, "shards"),
    "out": P("shards"),
    "few": P("shards"),
    "odd": P(),
    "bias": P(),
}


@pytest.mark.parametrize(("optimizer", "masters"), [("adamw", None), ("lamb", "float32")])
def test_no_device_ever_holds_a_whole_leaf(optimizer: str, masters: str | None):
    step = step_of(4, optimizer, master_dtype=masters, ema=0.9)
    params = PARAMS if masters is None else jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    prepared = step._states.prepare(params, 0, None)
    memory = prepared.make.lower(*prepared.given).compile().memory_analysis()
    state = step.init(params)
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    # What is tiny has a copy on each.
    assert memory.output_size_in_bytes < 0.26 * whole
    assert memory.temp_size_in_bytes < 0.01 * whole
    assert specs_of(state.params) == RESTS
    kept = [state.opt_state.inner_state.inner_state] if masters else [state.opt_state.inner_state]
    assert specs_of(kept[0].ema) == RESTS
    before = jax.live_arrays()
    again = step.init(PARAMS)
    assert largest_piece(before) == again.params["layers"].nbytes // 4


def made(mesh: Any, specs: Any) -> Any:
    """The parameters as a large model comes: each device makes its own slices."""
    shardings = {name: NamedSharding(mesh, specs.get(name, P())) for name in PARAMS}
    return jax.jit(lambda: jax.tree.map(jnp.asarray, PARAMS), out_shardings=shardings)()


def mesh_of(number: int, *names: str) -> Any:
    names = names or ("shards",)
    sizes = (number, *[2] * (len(names) - 1))
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


@pytest.mark.deep
@pytest.mark.parametrize(
    "specs", [RESTS, {"layers": P(None, None, "shards"), "out": P(None, "shards")}]
)
def test_parameters_that_are_split_already_are_taken(specs: Any):
    params, step = made(mesh_of(4), specs), step_of()
    state = train(step, step.init(params), BATCHES)
    assert specs_of(state.params) == RESTS
    assert_close(
        state.params, on_one_device(loss_fn, OPTIMIZERS["sgd"](), PARAMS, BATCHES)[0], 2e-6
    )
    # The model that was passed stays valid.
    assert_same(params, PARAMS)
    types = step.abstract_init(params)
    assert specs_of(types.params) == RESTS


def test_parameters_of_another_mesh_are_moved():
    step = step_of(2)
    state = step.init(made(mesh_of(8, "data"), {"out": P("data"), "layers": P(None, "data")}))
    assert specs_of(state.params) == RESTS
    assert_same(state.params, PARAMS)


# Moved.

EVERY = {"ema": 0.9, "loss_scale": DynamicLossScale(initial=1024.0), "accumulate_steps": 2}


def bits(step: Any, state: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(step.unshard(state))]


def test_parts_go_to_another_number_of_shards_without_whole_copies():
    step, other = step_of(4, "adamw", ema=0.9), step_of(2, "adamw", ema=0.9)
    state = train(step, step.init(PARAMS), BATCHES[:2])
    want = bits(step, state)
    before = jax.live_arrays()
    moved = other.reshard(state)
    # A piece of the old state is an array, too.
    assert largest_piece(before) == PARAMS["layers"].nbytes // 2
    assert bits(other, moved) == want
    # And so do arrays of the host.
    on_host = jax.tree.map(np.asarray, step.unshard(state))
    before = jax.live_arrays()
    moved = step.reshard(on_host)
    assert largest_piece(before) == PARAMS["layers"].nbytes // 4
    assert bits(step, moved) == want


def test_what_an_option_adds_to_the_state_is_sharded():
    step, other = step_of(4), step_of(2, master_dtype="float32", ema=0.9)
    state = step.init(PARAMS)
    with pytest.warns(CheckpointWarning, match="ema is new.*from the parameters"):
        moved = other.reshard(state)
    assert specs_of(moved.opt_state.inner_state.inner_state.ema) == RESTS
    assert_same(moved.opt_state.inner_state.masters, PARAMS)


def test_a_padded_state_is_refused_until_it_is_unsharded():
    odd = {"w": normal(37, 29)}
    loss = lambda p, x: (p["w"] ** 2).sum() + x.mean()
    other = make_train_step(loss, optax.adam(0.1), num_shards=4, weight_update="sharded")
    step = make_train_step(loss, optax.adam(0.1), num_shards=4, params="sharded")
    state = other.init(odd)
    with pytest.raises(ArgumentError, match=r"reshard\(other\.unshard\(state\)\)"):
        step.reshard(state)
    assert_same(step.reshard(other.unshard(state)).params, odd)


@pytest.mark.deep
def test_parts_go_between_splits_of_a_model():
    specs = {"layers": P(None, "data", "model"), "out": P("model", "data")}
    meshes = [mesh_of(4, "data", "model"), mesh_of(2, "data", "model"), mesh_of(8, "data")]
    build = lambda mesh: make_train_step(
        loss_fn, OPTIMIZERS["adamw"](), mesh=mesh, axis_name="data", params="sharded"
    )
    step = build(meshes[0])
    state = train(step, step.init(made(meshes[0], specs)), BATCHES[:2])
    assert {name: specs_of(state.params)[name] for name in specs} == specs
    want = bits(step, state)
    for mesh in meshes[1:]:
        step = build(mesh)
        state = step.reshard(state)
        assert bits(step, state) == want
    state = train(step, state, BATCHES[2:])
    want, _ = on_one_device(loss_fn, OPTIMIZERS["adamw"](), PARAMS, BATCHES)
    assert_close(state.params, want, 2e-6)


# Read.


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_metric_gathers_one_layer_at_a_time(call: str):
    layers = normal(24, 192, 192)
    loss = lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].mean()
    rows = lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].mean(1)
    step = make_train_step(loss, optax.sgd(0.1), num_shards=4, params="sharded")
    state, runner = step.init(layers), step._over_data
    name, used = {"evaluate": "_sums", "predict": "_rows"}[call], []
    compiled = getattr(runner, name)

    def spy(*args: Any) -> Any:
        used.append(compiled.lower(*args).compile().memory_analysis())
        return compiled(*args)

    setattr(runner, name, spy)
    getattr(step, call)(state, [BATCHES[0]], rows)
    assert used[0].argument_size_in_bytes < layers.nbytes / 4 + BATCHES[0].nbytes
    assert used[0].temp_size_in_bytes < 4 * layers[0].nbytes


# Compared.


def test_a_state_of_many_arrays_is_made_by_several_programs(monkeypatch: pytest.MonkeyPatch):
    step = step_of(4, "adamw", **EVERY)
    want = step.init(PARAMS, 3)
    monkeypatch.setattr(step_state, "_MOST_OUTPUTS", 4)
    state = step.init(PARAMS, 3)
    assert_same(state, want)
    placed = [[x.sharding for x in jax.tree.leaves(each)] for each in (state, want)]
    assert placed[0] == placed[1]
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert_same(jax.jit(lambda: step.init(PARAMS, 3).params)(), want.params)
