"""`find_nonfinite` names the line, the shard and the rows of planted faults."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import crossshard
from crossshard.errors import ArgumentError
from tests.processes import DEVICES, PROCESSES, join, run_processes
from tests.quick import deep_but
from tests.step.planted import (
    FAULTS,
    LENGTH,
    ROWS,
    SHARDS,
    WIDTH,
    batch,
    divide,
    line_of,
    mse,
    normal,
    planted,
    where_log,
)

PARAMS = {"first": normal(LENGTH * WIDTH, WIDTH), "second": normal(WIDTH, WIDTH)}


def hidden(params: Any, batch: Any, fault: Any = where_log) -> Any:
    h = jax.nn.relu(batch["x"].reshape(len(batch["x"]), -1) @ params["first"])
    return planted(fault, h, batch) @ params["second"]


@pytest.mark.parametrize("kind", deep_but(["norm"], FAULTS))
def test_each_fault_is_named_in_a_batch_and_in_the_state_that_a_skipped_step_returns(kind: str):
    loss = lambda params, batch: mse(hidden(params, batch, FAULTS[kind]), batch)
    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=SHARDS, nonfinite="skip")
    state, given = step.init(PARAMS), batch()
    assert step.find_nonfinite(state, given) is None
    given["bad"][21] = 1
    state, metrics = step(state, given)
    assert metrics["skipped"]
    found = step.find_nonfinite(state, given)
    assert (found.line, found.shard, found.rows) == (line_of(FAULTS[kind]), 5, (21,))
    assert found.file.endswith("planted.py")
    assert "# here" in found.text
    assert found.shard == int(metrics["nonfinite"].shard)


# The neighbours: each is a loss, and the options of its step.


def mean(params: Any, batch: Any) -> Any:
    return mse(hidden(params, batch), batch)


def ratio(params: Any, batch: Any) -> Any:
    each = ((hidden(params, batch) - batch["y"]) ** 2).mean(-1)
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def counted(params: Any, batch: Any) -> Any:
    each = ((hidden(params, batch) - batch["y"]) ** 2).mean(-1)
    return crossshard.Mean((each * batch["mask"]).sum(), batch["mask"].sum())


def with_noise(params: Any, batch: Any, rng: Any) -> Any:
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (WIDTH,)))(rng)
    return mse(hidden(params, batch) * kept, batch)


def synchronised(params: Any, batch: Any) -> Any:
    out = hidden(params, batch)
    return mse(out - lax.pmean(out.mean(0), "shards"), batch)


def over_model_axis(params: Any, batch: Any) -> Any:
    h = jax.nn.relu(batch["x"].reshape(len(batch["x"]), -1) @ params["first"])
    h = lax.with_sharding_constraint(planted(where_log, h, batch), jax.P(None, "b"))
    product = jax.shard_map(
        lambda h, kernel: lax.psum(h @ kernel, "b"),
        in_specs=(jax.P(None, "b"), jax.P("b", None)),
        out_specs=jax.P(None, None),
        axis_names={"b"},
    )
    return mse(product(h, params["second"]), batch)


NEIGHBOURS: dict[str, tuple[Any, dict[str, Any]]] = {
    "weight": (ratio, {"weight": "mask"}),
    "Mean": (counted, {"accumulate_steps": 2}),
    "virtual shards": (mean, {"virtual_shards": 16}),
    "batch": (mean, {"loss_over": "batch", "accumulate_steps": 2}),
    "sharded": (mean, {"params": "sharded", "gather_dtype": "int8"}),
    "keys": (with_noise, {"rng_per": "row"}),
    "a named axis": (synchronised, {"loss_over": "shard"}),
    "a model axis": (over_model_axis, {"mesh": (4, 2), "axis_name": "a"}),
}


@pytest.mark.parametrize("name", deep_but({"weight"}, NEIGHBOURS))
def test_beside_other_options(name: str):
    loss, options = NEIGHBOURS[name]
    if "mesh" in options:
        options = {**options, "mesh": jax.make_mesh(options["mesh"], ("a", "b"))}
    else:
        options = {"num_shards": SHARDS, **options}
    step = crossshard.make_train_step(loss, optax.sgd(0.1), donate=False, **options)
    state, given = step.init(PARAMS), batch()
    # The first two shards count nothing, which is no fault.
    given["mask"] = np.float32((np.arange(ROWS) >= 8) & (np.arange(ROWS) % 3 != 0))
    assert step.find_nonfinite(state, given) is None
    given["bad"][13] = 1
    found = step.find_nonfinite(state, given)
    assert (found.line, found.rows) == (line_of(where_log), (13,))
    of_rows = {"batch": None, "a model axis": 1, "uneven virtual shards": 2}
    assert found.shard == of_rows.get(name, 3)


# What came in, and what is meant.


def _with_nan(x: Any) -> Any:
    return x.at[3, 4].set(jnp.nan)


def test_an_array_that_came_in_is_named():
    step = crossshard.make_train_step(mean, optax.sgd(0.1), num_shards=SHARDS, donate=False)
    state, given = step.init(PARAMS), batch()
    params = {**state.params, "second": _with_nan(state.params["second"])}
    found = step.find_nonfinite(dataclasses.replace(state, params=params), given)
    assert (found.array, found.index, found.shard) == ("the parameter `second`", (3, 4), None)
    given["x"][21, 1, 2] = np.nan
    found = step.find_nonfinite(state, given)
    assert (found.array, found.index, found.rows) == ("batch['x']", (21, 1, 2), (21,))
    assert str(found).endswith("it came in with batch['x'][21, 1, 2], which is nan")


@pytest.mark.deep
@pytest.mark.parametrize("params", ["replicated", "sharded"])
def test_an_array_of_the_optimizer_is_named(params: str):
    adam = optax.adam(0.1)
    step = crossshard.make_train_step(mean, adam, num_shards=SHARDS, donate=False, params=params)
    whole = step.unshard(step.init(PARAMS))
    first, *others = whole.opt_state.inner_state
    first = first._replace(mu=jax.tree.map(_with_nan, first.mu))
    opt_state = whole.opt_state._replace(inner_state=(first, *others))
    damaged = step.reshard(dataclasses.replace(whole, opt_state=opt_state))
    found = step.find_nonfinite(damaged, batch())
    assert (found.array, found.index) == ("the optimizer's state `0/mu/first`", (3, 4))


def test_an_update_that_divides_by_zero():
    divides = lambda updates, params: jax.tree.map(lambda g: g / (g.max() - g.max()), updates)
    optimizer = optax.chain(optax.stateless(divides), optax.sgd(0.1))
    step = crossshard.make_train_step(mean, optimizer, num_shards=SHARDS)
    found = step.find_nonfinite(step.init(PARAMS), batch())
    assert (found.phase, found.primitive, found.shard) == ("update", "div", None)
    assert found.text.startswith("divides = lambda")
    # Of the gradient of the whole batch, as one device computes it.
    gradients = jax.jit(jax.grad(mean))(PARAMS, batch())
    np.testing.assert_allclose(found.operands[0], gradients["first"][found.index], rtol=1e-4)
    assert found.operands[1] == 0
    # A library's line, and not that of the call below.
    step = crossshard.make_train_step(mean, optax.sgd(jnp.inf), num_shards=SHARDS)
    assert "optax" in step.find_nonfinite(step.init(PARAMS), batch()).file


def test_your_line_is_named_and_not_that_of_the_library_that_it_calls():
    def loss(params: Any, batch: Any) -> Any:
        decay = optax.tree.norm(params["second"])
        return mse(batch["x"][:, 0] @ params["second"], batch) + decay

    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=SHARDS)
    found = step.find_nonfinite(step.init({"second": 0 * PARAMS["second"]}), batch())
    assert (found.phase, found.operands[1]) == ("backward pass", 0)
    assert found.text == 'decay = optax.tree.norm(params["second"])'


@pytest.mark.deep
def test_infinities_that_are_meant_are_not_the_fault():
    def loss(params: Any, batch: Any) -> Any:
        h = hidden(params, {**batch, "bad": 0 * batch["bad"]})
        h = h + jax.nn.softmax(jnp.where(h > 0, h, -jnp.inf).at[:, 0].set(0.0))
        # Masked, and no path of a gradient leads through it.
        h = h + jnp.where(batch["bad"][:, None] > 2, lax.stop_gradient(jnp.log(0 * h)), 0)
        return mse(planted(divide, h, batch), {**batch, "y": batch["y"] + batch["mask"].max()})

    axes = {"x": 0, "y": 0, "bad": 0, "mask": None}
    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=SHARDS, batch_axis=axes)
    state, given = step.init(PARAMS), batch()
    given["mask"] = np.array([-np.inf, 0], np.float32)
    assert step.find_nonfinite(state, given) is None
    given["bad"][30] = 1
    found = step.find_nonfinite(state, given)
    assert (found.line, found.rows, found.phase) == (line_of(divide), (30,), "forward pass")


def test_the_turns_of_loops():
    def layers(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, given: Any) -> Any:
            kernel, place = given
            return planted(where_log, h @ kernel, {"bad": batch["bad"] * (place == 1)}), None

        return mse(lax.scan(layer, batch["x"][:, 0], (params["layers"], jnp.arange(3)))[0], batch)

    step = crossshard.make_train_step(layers, optax.sgd(0.1), num_shards=SHARDS)
    given = batch()
    given["bad"][5] = 1
    found = step.find_nonfinite(step.init({"layers": normal(3, WIDTH, WIDTH)}), given)
    assert (found.loops, found.rows, found.phase) == (((1, 3),), (5,), "backward pass")
    assert "backward pass, turn 1 of 3 of a loop: " in str(found)

    def loss(params: Any, batch: Any) -> Any:
        def turn(carry: Any) -> Any:
            count, h = carry
            scale = jnp.where(count == 2, 1 / (1 - batch["bad"]), 1.0)
            return count + 1, h * scale[:, None]

        h = lax.while_loop(lambda x: x[0] < 4, turn, (0, batch["x"][:, 0]))[1]
        return mse(h @ params["second"], batch)

    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=SHARDS)
    found = step.find_nonfinite(step.init({"second": PARAMS["second"]}), given)
    assert (found.loops, found.rows, found.operands) == (((2, 4),), (5,), (1.0, 0.0))
    assert found.phase == "forward pass"
    assert found.text.startswith("scale =")


def test_refusals():
    step = crossshard.make_train_step(mean, optax.sgd(0.1), num_shards=SHARDS)
    before = step.init(PARAMS)
    after, _ = step(before, batch())
    with pytest.raises(ArgumentError, match=r"gone: it was donated.*Restore.*nonfinite='skip'"):
        step.find_nonfinite(before, batch())
    with pytest.raises(ArgumentError, match=r"outside of jax\.jit"):
        jax.jit(lambda state: step.find_nonfinite(state, batch()))(after)
    with pytest.raises(ArgumentError, match="do not divide evenly"):
        step.find_nonfinite(after, jax.tree.map(lambda x: x[1:], batch()))


# Several processes.


def main(process: int, port: int, out: str) -> None:
    """One process: look at its own rows of the batch."""
    join(process, port)
    rows = slice(process * ROWS // PROCESSES, (process + 1) * ROWS // PROCESSES)
    given = batch()
    given["bad"][20] = 1
    given = {name: x[rows] for name, x in given.items()}
    found = []
    for options in ({}, {"params": "sharded"}, {"sync_every": 2}):
        step = crossshard.make_train_step(
            mean, optax.adam(0.1), num_shards=PROCESSES * DEVICES, donate=False, **options
        )
        state = step.init(PARAMS)
        if process == 0 and not options:
            # Alone, and before any step: it waits for nobody.
            found.append(str(step.find_nonfinite(state, given)))
        origin = step.find_nonfinite(state, given)
        found.append(origin and (origin.line, origin.shard, origin.rows))
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.mark.deep
def test_each_process_looks_at_its_own_shards(tmp_path: Path):
    first, second = run_processes("step.test_find_nonfinite", tmp_path)
    assert first == ["None", None, None, None]
    assert second == [[line_of(where_log), 2, [4]]] * 3
