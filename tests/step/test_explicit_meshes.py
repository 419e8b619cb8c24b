"""Steps on meshes with explicit axes, with ``jax.set_mesh`` in force, against one device."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import LossError, NonfiniteError
from tests.step.common import assert_close, on_one_device, train

STEPS, ROWS = 3, 32
RNG = np.random.default_rng(0)
PARAMS = {
    "first": RNG.normal(size=(64, 32)).astype(np.float32) / 8,
    "second": RNG.normal(size=(32, 16)).astype(np.float32) / 8,
    "bias": np.zeros(16, np.float32),
}
X = RNG.normal(size=(STEPS, ROWS, 64)).astype(np.float32)
Y = RNG.normal(size=(STEPS, ROWS, 16)).astype(np.float32)


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(names))


MESHES = {
    "one axis": mesh_of((8,), ("data",)),
    "two axes": mesh_of((2, 4), ("slice", "chip")),
}


def rows_of(params: Any, batch: Any) -> Any:
    out = jnp.tanh(batch["x"] @ params["first"]) @ params["second"] + params["bias"]
    return ((out - batch["y"]) ** 2).mean(1)


def loss_fn(params: Any, batch: Any) -> Any:
    return rows_of(params, batch).mean()


def weighted(params: Any, batch: Any) -> Any:
    return (rows_of(params, batch) * batch["mask"]).sum() / batch["mask"].sum()


BATCHES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
SGD = optax.sgd(0.3)


def close_to_one_device(got: Any) -> None:
    expected, _ = on_one_device(loss_fn, SGD, PARAMS, BATCHES)
    assert_close(jax.device_get(got), expected, 1e-5)


# What a step is made with, on which mesh, and how its batches lie. tests/harness.py has more of
# them on a mesh that is passed, and not set.
CASES: dict[str, tuple[Any, str, Any]] = {
    "params sharded": ({"params": "sharded"}, "one axis", P("data")),
    "over the batch": ({"loss_over": "batch"}, "two axes", None),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_that_of_one_device_and_its_arrays_lie_on_the_mesh(name: str):
    given, on, spec = CASES[name]
    where = MESHES[on]
    with jax.set_mesh(where):
        step = crossshard.make_train_step(loss_fn, SGD, **given)
        assert step.mesh == where
        state = step.init(PARAMS)
        for number, batch in enumerate(BATCHES):
            if spec is not None:
                batch = jax.device_put(batch, NamedSharding(where, spec))
            state, metrics = step(state, batch)
            if number == 1:
                state = step.reshard(step.unshard(state))
        model = step.model(state)
        # JAX takes no array of another mesh beside one that is set.
        jax.tree.map(lambda x: x == x, (state.params, state.opt_state, metrics, model))
        assert metrics["loss"] < 100
        values = step.predict(state, [batch], rows_of)
        mean = step.evaluate(state, [batch], rows_of)
    for x in jax.tree.leaves((state, metrics, model)):
        assert x.sharding.mesh == where
    close_to_one_device(model)
    own = rows_of(jax.device_get(model), BATCHES[-1])
    np.testing.assert_allclose(values, own, rtol=1e-4)
    np.testing.assert_allclose(mean, own.mean(), rtol=1e-4)


def test_a_step_is_compiled_once_and_its_state_is_donated():
    traces = []

    def counted(params: Any, batch: Any) -> Any:
        traces.append(1)
        return loss_fn(params, batch)

    with jax.set_mesh(MESHES["one axis"]):
        step = crossshard.make_train_step(counted, optax.adam(0.1), loss_over="shard")
        state, _ = step(step.init(PARAMS), BATCHES[0])
        first, before = len(traces), state
        step(state, BATCHES[0])
        assert len(traces) == first
        assert all(x.is_deleted() for x in jax.tree.leaves(before.params))


def test_the_model_stays_split_over_a_further_axis():
    mesh = mesh_of((4, 2), ("data", "model"))
    specs = {"first": P(None, "model"), "second": P("model", None), "bias": P()}
    with jax.set_mesh(mesh):
        params = {name: jax.device_put(PARAMS[name], spec) for name, spec in specs.items()}
        step = crossshard.make_train_step(loss_fn, SGD, axis_name="data")
        state = train(step, step.init(params), BATCHES)
        assert state.params["first"].sharding.spec == P(None, "model")
        assert jax.typeof(state.params["first"]).sharding.spec == P(None, "model")
    close_to_one_device(state.params)


def test_within_the_users_jit_and_loop():
    with jax.set_mesh(MESHES["one axis"]):
        step = crossshard.make_train_step(loss_fn, SGD, donate=False)
        batches = jax.device_put({"x": X, "y": Y}, P(None, "data"))

        @jax.jit
        def run(state: Any, batches: Any) -> Any:
            one = lambda state, batch: (lambda after, found: (after, found["loss"]))(
                *step(state, batch)
            )
            return jax.lax.scan(one, state, batches)

        state, losses = run(step.init(PARAMS), batches)
        assert losses.shape == (STEPS,)
    close_to_one_device(state.params)


def test_a_guard_raises_its_own_error():
    with jax.set_mesh(MESHES["one axis"]):
        skip = crossshard.Nonfinite("skip", max_consecutive=1)
        step = crossshard.make_train_step(loss_fn, SGD, nonfinite=skip, donate=False)
        state = step.init(PARAMS)
        after, _ = step(state, {"x": np.full_like(X[0], np.nan), "y": Y[0]})
        with pytest.raises(NonfiniteError, match="Parameters and state hold nothing of it"):
            step.finish(after)
        state = step.init(PARAMS | {"bias": np.full(16, np.nan, np.float32)})
        after, _ = step(state, BATCHES[0])
        with pytest.raises(NonfiniteError, match=r"bias.* of the state is NaN"):
            step.finish(after)


def test_a_weight_is_compared_with_what_the_loss_divides_by():
    """On drawn numbers, which must not lie on the mesh that is set."""
    batch = BATCHES[0] | {"mask": np.float32(np.arange(ROWS) % 3 > 0)}
    for weight, is_it in (
        (lambda batch: (batch["mask"] > 0).sum(), True),
        (lambda batch: batch["mask"][1:].sum(), False),
    ):
        with jax.set_mesh(MESHES["two axes"]):
            step = crossshard.make_train_step(weighted, SGD, weight=weight)
            state = step.init(PARAMS)
            if not is_it:
                with pytest.raises(LossError, match="is another"):
                    step(state, batch)
                continue
            _, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], weighted(PARAMS, batch), rtol=1e-5)


def test_beside_a_mesh_that_is_set_a_step_keeps_the_one_that_it_was_given():
    with jax.set_mesh(MESHES["two axes"]):
        for how in ({"mesh": MESHES["one axis"]}, {"num_shards": 4}):
            step = crossshard.make_train_step(loss_fn, SGD, **how)
            assert step.mesh != MESHES["two axes"]
            close_to_one_device(step.model(train(step, step.init(PARAMS), BATCHES)))


def _as_it_lies(mesh: Any, args: Any, out: Any) -> Any:
    return mesh, jnp.tanh, args[0].sharding, (args[0].sharding,)


_tanh = custom_partitioning(jnp.tanh)
_tanh.def_partition(partition=_as_it_lies, sharding_rule="i j -> i j")
own_tanh = jax.custom_vjp(lambda x: _tanh(x))
own_tanh.defvjp(lambda x: (own_tanh(x), x), lambda x, c: (c / jnp.cosh(x) ** 2,))


@pytest.mark.parametrize(("over", "is_set"), [("rows", True), ("batch", False)])
def test_a_program_that_needs_to_know_its_devices(over: str, is_set: bool):
    """One with cuDNN's attention, which JAX refuses with two kinds of axes."""
    mesh = MESHES["one axis"]

    def loss_of(params: Any, batch: Any) -> Any:
        out = own_tanh(batch["x"] @ params["first"]) @ params["second"] + params["bias"]
        return ((out - batch["y"]) ** 2).mean()

    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        step = crossshard.make_train_step(loss_of, SGD, mesh=mesh, loss_over=over)
        state = step.init(PARAMS)
        for batch in BATCHES:
            before, (state, metrics) = state, step(state, batch)
    close_to_one_device(state.params)
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves((state, metrics)))
    assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
    assert step.lower(state, BATCHES[0]).as_text()
