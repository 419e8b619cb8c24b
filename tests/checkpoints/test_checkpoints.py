"""A state is saved on some shards and restored on others, with the same bits."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
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

from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import (
    ArgumentError,
    CheckpointError,
    CheckpointMismatchError,
    CrossshardError,
)
from tests.checkpoints.common import PARAMS, XS, arrays, check_same_bits, loss_fn, step_on, trained
from tests.quick import deep, deep_but

HOW = ("replicated", "sharded", "parts")
WAYS = [(1, "replicated"), *((n, how) for n in (2, 4, 8) for how in HOW)]
QUICK = [(2, "sharded"), (8, "sharded"), (4, "parts")]


def saved(folder: Path, step: Any, state: Any, data: Any = None) -> None:
    with Checkpoints(folder, step) as checkpoints:
        checkpoints.restore_latest(state)
        checkpoints.save(state, data)


def restored(folder: Path, step: Any, params: Any = PARAMS) -> Any:
    found = Checkpoints(folder, step).restore_latest(step.abstract_init(params))
    assert found is not None
    check_placed(found[0], step.abstract_init(params))
    return found[0]


def check_placed(state: Any, like: Any) -> None:
    for x, own in zip(*map(jax.tree.leaves, (state, like)), strict=True):
        assert x.sharding.is_equivalent_to(own.sharding, x.ndim)


# From any number of shards to any other.


@pytest.mark.parametrize(("shards", "how"), deep_but(QUICK, WAYS))
def test_all_pairs_of_shards_and_placements_have_the_same_bits_and_train_on(
    shards: int, how: str, tmp_path: Path
):
    step = step_on(shards, how)
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
    how = {"params": "sharded"} if update == "parts" else {"weight_update": update}
    return make_train_step(loss, optimizer, mesh=mesh, axis_name="data", **how), params


# lamb's update is computed on global arrays, sgd's on slices.
@pytest.mark.parametrize("name", [deep("sgd"), "lamb"])
def test_a_model_axis_restores_on_other_meshes(name: str, tmp_path: Path):
    optimizer = {"sgd": optax.sgd(0.1, momentum=0.9), "lamb": optax.lamb(0.01)}[name]
    step, params = split_step((4, 2), optimizer, "sharded")
    state, _ = step(step.init(params), XS[0])
    saved(tmp_path, step, state)
    before = arrays(step, state)
    meshes = [((2, 4), "sharded")]
    if name == "sgd":
        meshes += [((4, 2), "sharded"), ((8, 1), "replicated"), ((2, 4), "parts")]
        after, _ = step(state, XS[1])
    for sizes, update in meshes:
        other, like = split_step(sizes, optimizer, update)
        found = restored(tmp_path, other, like)
        check_same_bits(arrays(other, found), before)
        if name == "sgd" and sizes != (8, 1):
            found, _ = other(found, XS[1])
            for key in like:
                np.testing.assert_allclose(found.params[key], after.params[key], rtol=0, atol=1e-6)


def pieces_of(arrays: Any) -> dict[int, int]:
    """The bytes of each large buffer on any device, by its address."""
    pieces = [piece.data for x in arrays for piece in x.addressable_shards]
    return {piece.unsafe_buffer_pointer(): piece.nbytes for piece in pieces if piece.nbytes > 1024}


def test_a_restore_makes_no_whole_copies_and_what_it_makes_is_donated(tmp_path: Path):
    rng = np.random.default_rng(2)
    params = {name: np.float32(rng.normal(size=(192, 256)) / 16) for name in ("up", "down")}
    loss = lambda p, x: ((jnp.tanh(x @ p["up"]) @ p["down"].T - 1) ** 2).mean()
    adamw, x = optax.adamw(1e-2, eps=1e-4), np.float32(rng.normal(size=(16, 192)))
    step = make_train_step(loss, adamw, num_shards=4, params="sharded", ema=0.9)
    state, _ = step(step.init(params), x)
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state)
        old = set(map(id, jax.live_arrays()))
        found = checkpoints.restore_latest(step.abstract_init(params))[0]
        new = [x for x in jax.live_arrays() if id(x) not in old]
        assert max(pieces_of(new).values()) == params["up"].nbytes // 4
    # Arrays that share memory with a reader would be copied instead (jax#18617).
    buffers = pieces_of(jax.tree.leaves(found)).keys()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after, _ = step(found, x)
    large = [x for x in jax.tree.leaves(found) if x.nbytes > 4096]
    assert len(large) == 8
    assert all(x.is_deleted() for x in large)
    assert pieces_of(jax.tree.leaves(after)).keys() == buffers
    check_same_bits(arrays(step, after), arrays(step, step(state, x)[0]))


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
    make = lambda n, **more: make_train_step(loss_fn, optimizer(), num_shards=n, **(options | more))
    step = make(8)
    state = trained(step, params=params)
    saved(tmp_path, step, state)
    check_same_bits(arrays(step, restored(tmp_path, step, params)), arrays(step, state))
    of_params = lambda state: [np.asarray(x) for x in jax.tree.leaves(state.params)]
    for other in (make(2), make(4, params="sharded")):
        found = restored(tmp_path, other, params)
        assert found.params["odd"].dtype == jnp.bfloat16
        check_same_bits(of_params(found), of_params(state))


def test_a_key_of_another_kind_comes_back(tmp_path: Path):
    step, key = step_on(2), jax.random.key(1, impl="rbg")
    state, _ = step(step.init(PARAMS, rng=key), XS[0])
    saved(tmp_path, step, state)
    with pytest.raises(CheckpointMismatchError, match=r"of rbg, .*key\(0, impl='rbg'\) to init"):
        Checkpoints(tmp_path, step).restore_latest(step.abstract_init(PARAMS))
    found = Checkpoints(tmp_path, step).restore_latest(step.abstract_init(PARAMS, rng=key))
    check_same_bits(arrays(step, found[0]), arrays(step, state))
    assert (found[0].rng == state.rng).all()


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

Call = Callable[[Any, Any], Any]


def without_a_leaf(state: Any) -> Any:
    state.params["odd"].delete()
    return state


def used(state: Any) -> Any:
    jax.jit(lambda state: state.params, donate_argnums=0)(state)
    return state


def made(*args: Any, **options: Any) -> Call:
    return lambda c, state: Checkpoints(*args, step_on(2), **options)


def save(*args: Any, **options: Any) -> Call:
    return lambda c, state: c.save(state, *args, **options)


def save_other(change: Callable[[Any], Any]) -> Call:
    return lambda c, state: c.save(change(state))


def under_jit(name: str) -> Call:
    return lambda c, state: jax.jit(lambda x: getattr(c, name)(x) and None)(state)


NO_PATH = "folder must be a path; got .* or one at gs://"
# What is refused, with which words.
MISTAKES: list[tuple[Any, str, list[Call]]] = [
    (TypeError, "make_train_step", [lambda c, state: Checkpoints(".", lambda state: state)]),
    (TypeError, NO_PATH, [made(3)]),
    (
        ArgumentError,
        NO_PATH,
        [*map(made, ("s3://bucket/run", "", "a\0b", "~nobody-so/run", "\ud800"))],
    ),
    (TypeError, "keep", [made(".", keep=2.0), made(".", keep_best=True)]),
    (ArgumentError, "keep", [made(".", keep=0), made(".", keep_best=-1)]),
    (TypeError, "data", [save({"at": np.int64(3)}), save({"at": float("nan")}), save(b"bytes")]),
    (ArgumentError, "data", [save({"at": (1, 2)}), save({1: 2})]),
    (TypeError, "score must be a number", [save(score=each) for each in (True, "3", 1j, [1])]),
    (TypeError, "pin", [save(pin=1)]),
    (ArgumentError, "another step", [save_other(lambda state: step_on(8).init(PARAMS))]),
    (TypeError, "ShapeDtypeStruct", [save_other(lambda state: step_on(2).abstract_init(PARAMS))]),
    (
        ArgumentError,
        r"state\.params\['odd'\] is an array that was deleted",
        [save_other(without_a_leaf)],
    ),
    (ArgumentError, "donated", [save_other(used)]),
    (TypeError, "got ndarray", [save_other(lambda state: replace(state, params=PARAMS))]),
    (TypeError, r"state\.step .* got int", [save_other(lambda state: replace(state, step=3))]),
    (TypeError, "got dict", [save_other(lambda state: state.params)]),
    (
        ArgumentError,
        r"is on devices \[2\], and the mesh .* \[0, 1\]",
        [save_other(lambda state: jax.device_put(state, jax.devices()[2]))],
    ),
    (
        TypeError,
        "step must be an int",
        [
            *(
                lambda c, state, number=each: c.restore(state, number)
                for each in (True, 1.0, "1", None)
            ),
            lambda c, state: c.restore(state, np.ones(2)),
            lambda c, state: c.restore_params(state, True),
        ],
    ),
    (ArgumentError, "no checkpoint 7; it has none", [lambda c, state: c.restore(state, 7)]),
    (CheckpointError, "no checkpoint to take param", [lambda c, state: c.restore_params(state)]),
    (TypeError, "strict must be True", [lambda c, state: c.restore_latest(state, strict=0)]),
    (
        ArgumentError,
        r"Call it outside of jax\.jit",
        [*map(under_jit, ("save", "save_if_preempted", "restore_latest", "restore_params"))],
    ),
]


@pytest.mark.parametrize(
    ("error", "says", "calls"),
    MISTAKES,
    ids=lambda given: given[:40] if isinstance(given, str) else None,
)
def test_a_mistake_is_refused_in_words_and_nothing_is_written(
    error: Any, says: str, calls: list[Call], tmp_path: Path
):
    step = step_on(2)
    for call in calls:
        checkpoints, state = Checkpoints(tmp_path, step), step.init(PARAMS)
        with pytest.raises(error, match=says) as refused:
            call(checkpoints, state)
        # From our own check, and not from a write that failed.
        assert isinstance(refused.value, CrossshardError)
    assert list(tmp_path.iterdir()) == []
    assert repr(tmp_path.name)[1:-1] in repr(checkpoints)


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
