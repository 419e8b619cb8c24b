"""A state is saved on some shards and restored on others, with the same bits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointWarning,
)
from tests.checkpoints.common import PARAMS, XS, arrays, check_same_bits, loss_fn, step_on, trained

WAYS = [(1, "replicated"), *((n, how) for n in (2, 4, 8) for how in ("replicated", "sharded"))]


def saved(folder: Path, step: Any, state: Any, data: Any = None) -> None:
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.restore_latest(state)
        checkpoints.save(state, data)


def restored(folder: Path, step: Any, params: Any = PARAMS) -> Any:
    found = Checkpoints(folder, step).restore_latest(step.abstract_init(params))
    assert found is not None
    return found[0]


# From any number of shards to any other.


@pytest.mark.parametrize("written", WAYS, ids=str)
def test_all_pairs_of_shards_and_placements_have_the_same_bits_and_train_on(
    written: tuple[int, str], tmp_path: Path
):
    step = step_on(*written)
    state = trained(step)
    saved(tmp_path, step, state)
    before = arrays(step, state)
    # What one device does with Optax alone.
    plain = optax.sgd(0.1, momentum=0.9)
    params, momentum = before_on_one_device(step.unshard(state))
    updates, _ = plain.update(jax.grad(loss_fn)(params, XS[2]), momentum, params)
    expected = optax.apply_updates(params, updates)
    for read in WAYS:
        other = step_on(*read)
        found = restored(tmp_path, other)
        for x, like in zip(
            *map(jax.tree.leaves, (found, other.abstract_init(PARAMS))), strict=True
        ):
            assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
        check_same_bits(arrays(other, found), before)
        after, _ = other(found, XS[2])
        for key in PARAMS:
            np.testing.assert_allclose(after.params[key], expected[key], rtol=0, atol=1e-6)


def before_on_one_device(state: Any) -> tuple[Any, Any]:
    one = lambda tree: jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), tree)
    return one(state.params), one(state.opt_state.inner_state)


def test_on_as_many_shards_a_run_goes_on_bit_for_bit(tmp_path: Path):
    step = step_on(8, "sharded", "adamw")
    undisturbed = arrays(step, trained(step, 6))
    state = trained(step, 3)
    saved(tmp_path, step, state, {"next": 3})
    state, data = Checkpoints(tmp_path, step).restore_latest(step.abstract_init(PARAMS))
    for x in XS[data["next"] :]:
        state, _ = step(state, x)
    check_same_bits(arrays(step, state), undisturbed)


def test_what_is_on_disk_has_the_shapes_of_the_model(tmp_path: Path):
    step = step_on(8)
    state = trained(step)
    assert state.opt_state.inner_state[0].trace["odd"].shape != PARAMS["odd"].shape  # padded
    saved(tmp_path, step, state)
    (folder,) = tmp_path.iterdir()
    manifest = json.loads((folder / "manifest" / "manifest.json").read_text())
    found = ocp.PyTreeCheckpointHandler().restore(folder / "state")
    for place, leaf in enumerate(manifest["leaves"]):
        assert list(found[str(place)].shape) == leaf["shape"]
    by_path = {leaf["path"]: found[str(i)] for i, leaf in enumerate(manifest["leaves"])}
    trace = by_path[".opt_state.inner_state[0].trace['odd']"]
    np.testing.assert_array_equal(trace, step.unshard(state).opt_state.inner_state[0].trace["odd"])


# Other placements.


def mesh_of(*sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def split_step(sizes: tuple[int, int], optimizer: Any, update: str) -> tuple[Any, Any]:
    mesh = mesh_of(*sizes)
    specs = {"up": P(None, "model"), "down": P("model"), "bias": P()}
    rng = np.random.default_rng(1)
    values = {
        "up": rng.normal(size=(64, 96)),
        "down": rng.normal(size=(96, 32)),
        "bias": np.ones(5),
    }
    params = {
        key: jax.device_put(np.float32(values[key] / 8), NamedSharding(mesh, spec))
        for key, spec in specs.items()
    }
    loss = lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"]) ** 2).mean() + (p["bias"] ** 2).sum()
    return make_train_step(
        loss, optimizer, mesh=mesh, axis_name="data", weight_update=update
    ), params


# lamb's update is computed on global arrays, sgd's in parts.
@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_a_model_axis_restores_on_other_meshes(name: str, tmp_path: Path):
    optimizer = {"sgd": optax.sgd(0.1, momentum=0.9), "lamb": optax.lamb(0.01)}[name]
    step, params = split_step((4, 2), optimizer, "sharded")
    state, _ = step(step.init(params), XS[0])
    saved(tmp_path, step, state)
    before = arrays(step, state)
    meshes = [((2, 4), "sharded")]
    if name == "sgd":
        meshes += [((4, 2), "sharded"), ((8, 1), "replicated")]
        after, _ = step(state, XS[1])
    for sizes, update in meshes:
        other, like = split_step(sizes, optimizer, update)
        found = restored(tmp_path, other, like)
        check_same_bits(arrays(other, found), before)
        for key, x in found.params.items():
            assert x.sharding.is_equivalent_to(like[key].sharding, x.ndim)
        if name == "sgd" and sizes != (8, 1):
            found, _ = other(found, XS[1])
            for key in like:
                np.testing.assert_allclose(found.params[key], after.params[key], rtol=0, atol=1e-6)


def test_groups_come_back_and_other_groups_are_refused(tmp_path: Path):
    def step_with(groups: Any, update: str) -> Any:
        optimizer = CrossShardOptimizer(optax.sgd(0.1, momentum=0.9), group_assignment=groups)
        return make_train_step(loss_fn, optimizer, num_shards=4, weight_update=update)

    step = step_with([[0, 1], [2, 3]], "sharded")
    state = trained(step)
    saved(tmp_path, step, state)
    for update in ("sharded", "replicated"):
        other = step_with([[0, 1], [2, 3]], update)
        check_same_bits(arrays(other, restored(tmp_path, other)), arrays(step, state))
    other = step_with([[0, 2], [1, 3]], "sharded")
    with pytest.raises(CheckpointMismatchError, match=r"its groups are \[\[0, 1\], \[2, 3\]\]"):
        restored(tmp_path, other)
    with pytest.raises(CheckpointMismatchError, match="groups are"):
        restored(tmp_path, step_on(4))


class Noisy(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 24, rngs=rngs)
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.dropout(self.norm(self.first(x)))


def test_a_module_with_statistics_and_random_streams(tmp_path: Path):
    loss = lambda model, x: (model(x) ** 2).mean()
    make = lambda n: make_train_step(loss, optax.sgd(0.1), num_shards=n, loss_over="shard")
    steps = {n: make(n) for n in (2, 4)}
    model = Noisy(nnx.Rngs(0))
    state, _ = steps[4](steps[4].init(model), XS[0])
    saved(tmp_path, steps[4], state)
    found = restored(tmp_path, steps[4], model)
    check_same_bits(arrays(steps[4], found), arrays(steps[4], state))
    whole = steps[4].unshard(state)
    # On another number of shards as `reshard` does it: statistics are averaged.
    check_same_bits(
        arrays(steps[2], restored(tmp_path, steps[2], model)),
        arrays(steps[2], steps[2].reshard(whole)),
    )


def test_what_else_a_state_holds(tmp_path: Path):
    options = {"ema": 0.9, "master_dtype": "float32", "loss_scale": "dynamic"}
    options |= {"metrics": ("grad_norm",), "preprocess": optax.trace(0.5)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    preprocess = options.pop("preprocess")
    optimizer = lambda: CrossShardOptimizer(optax.adam(0.01), preprocess=preprocess)
    make = lambda n: make_train_step(loss_fn, optimizer(), num_shards=n, **options)
    step = make(8)
    state = trained(step, params=params)
    saved(tmp_path, step, state)
    check_same_bits(arrays(step, restored(tmp_path, step, params)), arrays(step, state))
    assert restored(tmp_path, make(2), params).params["odd"].dtype == jnp.bfloat16


# Saving.


def test_another_runs_checkpoints_are_not_overwritten(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    saved(tmp_path, step, state)
    checkpoints = Checkpoints(tmp_path, step)
    with pytest.raises(ArgumentError, match="has not restored"):
        checkpoints.save(state)
    assert checkpoints.restore_latest(state) is not None
    checkpoints.save(state)
    checkpoints.close()


def test_the_users_mesh_does_not_matter(tmp_path: Path):
    step = step_on(4)
    state = trained(step, 1)
    with jax.set_mesh(jax.make_mesh((8,), ("other",))):
        saved(tmp_path, step, state)
        check_same_bits(arrays(step, restored(tmp_path, step)), arrays(step, state))


# Refusals.


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({"at": np.int64(3)}, ArgumentTypeError),
        ({"at": float("nan")}, ArgumentTypeError),
        ({"at": (1, 2)}, ArgumentError),
        ({1: 2}, ArgumentError),
        (b"bytes", ArgumentTypeError),
    ],
)
def test_data_that_json_would_change_is_refused(data: Any, error: Any, tmp_path: Path):
    with pytest.raises(error, match="data"):
        Checkpoints(tmp_path, step_on(2)).save(step_on(2).init(PARAMS), data)


def test_bad_arguments(tmp_path: Path):
    step = step_on(2)
    with pytest.raises(ArgumentTypeError, match="make_train_step"):
        Checkpoints(tmp_path, lambda state: state)
    with pytest.raises(ArgumentTypeError, match="path"):
        Checkpoints(3, step)
    with pytest.raises(ArgumentError, match="mounted"):
        Checkpoints("s3://bucket/run", step)
    with pytest.raises(ArgumentTypeError, match="keep"):
        Checkpoints(tmp_path, step, keep=2.0)
    with pytest.raises(ArgumentError, match="keep"):
        Checkpoints(tmp_path, step, keep=0)
    with pytest.raises(ArgumentTypeError, match="state"):
        Checkpoints(tmp_path, step).save(PARAMS)
    with pytest.raises(ArgumentError, match="another step"):
        Checkpoints(tmp_path, step).save(step_on(8).init(PARAMS))
    for folder in ("a\0b", "~nobody-of-this-name/run", "\ud800"):
        with pytest.raises(ArgumentError, match="folder must be a path; got"):
            Checkpoints(folder, step)
    for score in (True, "3", 1j):
        with pytest.raises(ArgumentTypeError, match="score must be a number"):
            Checkpoints(tmp_path, step).save(step.init(PARAMS), score=score)
    assert repr(tmp_path.name)[1:-1] in repr(Checkpoints(tmp_path, step))
    assert crossshard.Checkpoints is Checkpoints


def without_a_leaf(state: Any) -> Any:
    state.params["odd"].delete()
    return state


def used(state: Any) -> Any:
    jax.jit(lambda state: state.params, donate_argnums=0)(state)
    return state


BAD_STATES: dict[str, tuple[Any, Any, str]] = {
    "types": (
        lambda state: step_on(2).abstract_init(PARAMS),
        ArgumentTypeError,
        "ShapeDtypeStruct",
    ),
    "deleted": (
        without_a_leaf,
        ArgumentError,
        r"state\.params\['odd'\] is an array that was deleted",
    ),
    "donated": (used, ArgumentError, "donated"),
    "numpy": (lambda s: dataclasses.replace(s, params=PARAMS), ArgumentTypeError, "got ndarray"),
    "a number": (
        lambda s: dataclasses.replace(s, step=3),
        ArgumentTypeError,
        r"state\.step .* got int",
    ),
    "parameters": (lambda state: state.params, ArgumentTypeError, "got dict"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_state_that_cannot_be_saved_is_refused_by_name(name: str, tmp_path: Path):
    (spoil, error, says), step = BAD_STATES[name], step_on(2)
    with (
        Checkpoints(tmp_path, step) as checkpoints,
        pytest.raises(error, match=says) as refused,
    ):
        checkpoints.save(spoil(step.init(PARAMS)))
    # From our own check, and not from a write that failed.
    assert type(refused.value) is error
    assert list(tmp_path.iterdir()) == []


def test_calls_in_a_function_that_jax_traces_are_refused(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    saved(tmp_path, step, state)
    checkpoints = Checkpoints(tmp_path, step)
    for name in ("save", "save_if_preempted", "restore_latest", "restore_params"):
        call = getattr(checkpoints, name)
        with pytest.raises(ArgumentError, match=r"Call it outside of jax\.jit"):
            jax.jit(lambda state, call=call: call(state) and None)(state)


def test_a_step_to_restore_is_a_number(tmp_path: Path):
    step = step_on(2)
    state = trained(step, 1)
    saved(tmp_path, step, state)
    checkpoints = Checkpoints(tmp_path, step)
    assert int(checkpoints.restore(state, np.int64(1))[0].step) == 1
    for number in (True, 1.0, "1", None, np.ones(2)):
        with pytest.raises(ArgumentTypeError, match="step must be an int"):
            checkpoints.restore(state, number)
    with pytest.raises(ArgumentTypeError, match="step must be an int"):
        checkpoints.restore_params(state, True)
    with pytest.raises(ArgumentTypeError, match=r"state\.step .* got int"):
        checkpoints.restore_latest(dataclasses.replace(state, step=1))


def test_a_folder_with_an_absurd_number_is_not_one_of_ours(tmp_path: Path):
    step = step_on(2)
    absurd = tmp_path / "999999999999999999"
    absurd.mkdir()
    with Checkpoints(tmp_path, step, keep=2) as checkpoints:
        state = step.init(PARAMS)
        for x in XS[:3]:
            state, _ = step(state, x)
            checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3]
    assert int(Checkpoints(tmp_path, step).restore_latest(state)[0].step) == 3
    assert absurd.is_dir()
    # The largest that counts: what comes after it would not be found again.
    (tmp_path / "9999999999").mkdir()
    with Checkpoints(tmp_path, step, keep=2) as checkpoints:
        with pytest.warns(CheckpointWarning, match="checkpoint 9999999999: it was not committed"):
            checkpoints.restore_latest(state)
        with pytest.raises(CheckpointError, match=r"9999999999, since no .* move that folder"):
            checkpoints.save(state)
        assert checkpoints.steps() == [2, 3, 9999999999]
