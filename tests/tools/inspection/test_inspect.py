"""Programs that JAX compiles here: what they send, against the least, and memory."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools import Communication, inspect
from tests.tools import steps
from tests.tools.steps import (
    LINE,
    SPLIT,
    WHOLE,
    check,
    gather,
    mean,
    mesh_of,
    over,
    read,
    scatter,
    summed,
    updated,
)

PARAMS = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8)), "c": jnp.ones(32)}
BYTES = 4 * (16 * 32 + 32 * 8 + 32)
BATCH = (jnp.ones((64, 16)), jnp.ones((64, 8)))
RULE = optax.adamw(0.1)
STATE = RULE.init(PARAMS)
ARGS = PARAMS, STATE, *BATCH
SPECS = WHOLE, WHOLE, SPLIT, SPLIT
each = jax.tree.map


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"] + params["c"]) @ params["b"] - y) ** 2)


def replicated(params: Any, state: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return *updated(RULE, params, state, mean(grads)), mean(value)


@pytest.fixture(scope="module")
def traced() -> Any:
    return over(replicated, SPECS, WHOLE).trace(*ARGS)


@pytest.fixture(scope="module")
def compiled(traced: Any) -> Any:
    return traced.lower().compile()


@pytest.fixture(scope="module")
def report(compiled: Any) -> Communication:
    return inspect(compiled, PARAMS)


def test_a_replicated_step_sends_the_lower_bound(report: Communication):
    assert {each.kind for each in report.collectives} == {"all-reduce"}
    check(report, 8, BYTES, ratio=1, sent=summed(8, BYTES))
    assert (report.devices, report.lower_bound) == (8, report.bytes_sent)
    assert report.scalar_bytes_sent == 7


IN_PARTS = each(lambda s: SPLIT if s.ndim else WHOLE, STATE)


def test_parameters_stored_in_parts_are_counted_whole():
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(each(gather, params), x, y)
        return updated(RULE, params, state, each(lambda g: scatter(g) / 8, grads))

    specs = SPLIT, IN_PARTS
    check(read(step, (*specs, SPLIT, SPLIT), specs, *ARGS), 8, BYTES, ratio=1)


def test_groups_that_stay_apart_have_a_bound_of_their_own():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        params, state = each(lambda v: v[0], (params, state))
        grads = jax.grad(loss)(params, x, y)
        grads = each(lambda g: lax.psum(g, "s", axis_index_groups=groups) / 4, grads)
        return each(lambda v: v[None], updated(RULE, params, state, grads))

    stacked = each(lambda v: jnp.stack([v] * 8), (PARAMS, STATE))
    report = inspect(over(step, SPLIT, SPLIT).lower(*stacked, *BATCH), PARAMS)
    assert [only.groups for only in report.collectives] == [((0, 1, 2, 3), (4, 5, 6, 7))]
    check(report, 4, BYTES, ratio=1)


def test_two_axes_one_after_the_other_send_more_than_at_once():
    def step(params: Any, x: Any, y: Any) -> Any:
        grads = lax.pmean(lax.pmean(jax.grad(loss)(params, x, y), "a"), "b")
        return each(jnp.subtract, params, grads)

    both, mesh = P(("a", "b")), mesh_of(a=2, b=4)
    report = read(step, (WHOLE, both, both), WHOLE, PARAMS, *BATCH, mesh=mesh)
    assert [each.group_size for each in report.collectives] == [2, 4]
    check(report, 8, BYTES, ratio=pytest.approx((1 + 1.5) / 1.75))


def test_one_shard_sends_nothing():
    report = read(replicated, SPECS, WHOLE, *ARGS, mesh=mesh_of(s=1))
    assert (report.devices, report.bytes_sent, report.scalar_bytes_sent) == (1, 0, 0)
    assert (report.lower_bound, report.ratio) == (0, None)
    assert "the lower bound is 0 B" in report.table()


def test_every_stage_of_a_step_is_read(traced: Any, report: Communication):
    assert inspect(traced, PARAMS) == inspect(traced.lower(), PARAMS) == report


def test_memory_is_the_compilers(compiled: Any, report: Communication):
    stats, memory = compiled.memory_analysis(), report.memory
    assert memory is not None
    assert memory.argument == stats.argument_size_in_bytes > BYTES
    assert memory.output == stats.output_size_in_bytes
    assert memory.temp == stats.temp_size_in_bytes
    assert memory.alias == stats.alias_size_in_bytes
    assert memory.peak == stats.peak_memory_in_bytes


def test_json_has_all_of_it_and_the_table_names_the_line(report: Communication):
    read = json.loads(report.to_json(indent=2))
    assert (read["ratio"], read["bytes_sent"]) == (report.ratio, report.bytes_sent)
    assert read["memory"]["argument"] == report.memory.argument
    assert read["parameters"] == {"f32": BYTES}
    for one, each in zip(read["collectives"], report.collectives, strict=True):
        assert (one["kind"], one["source"]) == (each.kind, each.source)
        assert one["groups"] == [list(group) for group in each.groups]
        assert one["operands"][0]["dtype"] == each.operands[0].dtype
    table = str(report)
    assert table == report.table()
    for part in ("all-reduce", "1 of 8", "ratio 1.000", "5,600 B", "memory per device", "peak"):
        assert part in table
    # The line of `mean`.
    assert f"{steps.__file__}:" in table


@pytest.mark.parametrize(
    ("args", "error", "said"),
    [
        ([replicated], ArgumentTypeError, r"jax\.jit\(replicated\)\.lower\(\*args\)"),
        ([{}], ArgumentTypeError, "got dict"),
        ([None, {"a": "b"}], ArgumentTypeError, r"got str at \['a'\]"),
        ([None, -1], ArgumentError, "got -1"),
    ],
)
def test_what_are_no_program_and_no_parameters(args: Any, error: Any, said: str, compiled: Any):
    with pytest.raises(error, match=said):
        inspect(*[compiled if each is None else each for each in args])


def test_parameters_of_one_element_stand_aside():
    params = {**PARAMS, "scale": jnp.ones(()), "bias": np.ones(1, np.float32)}

    def step(params: Any, x: Any, y: Any) -> Any:
        grads = mean(jax.grad(lambda p: p["scale"] * loss(p, x, y) + p["bias"][0])(params))
        return each(jnp.subtract, params, grads)

    lowered = over(step, (WHOLE, SPLIT, SPLIT), WHOLE).lower(params, *BATCH)
    report = inspect(lowered, params)
    check(report, 8, BYTES, ratio=1)
    assert report.scalar_bytes_sent > 0


W, X = jnp.ones((16, 16)), jnp.ones((64, 16))


def of_one(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_parameters_in_fewer_bits_than_their_master_copy():
    def step(w: Any, master: Any, x: Any) -> Any:
        master -= mean(jax.grad(of_one)(w, x).astype(jnp.float32))
        return master.astype(w.dtype), master

    args = (W.astype(jnp.float16), W, X.astype(jnp.float16))
    report = read(step, (WHOLE, WHOLE, SPLIT), WHOLE, *args)
    check(report, 8, W.nbytes // 2, ratio=2)
    assert report.parameter_dtypes == ("f16",)
    assert [each.dtypes for each in report.collectives] == [("f32",)]


def test_a_step_of_nnx_jit():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean(jnp.tanh(model(x)) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))

    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(LINE, WHOLE)))
    low = step.lower(model, jax.device_put(X, NamedSharding(LINE, SPLIT)))
    for stage in (low, low.compile()):
        check(inspect(stage, nnx.state(model)), 8, 4 * (16 * 16 + 16), ratio=1)


@pytest.mark.parametrize("both", [True, False])
def test_branches_are_marked(both: bool):
    def step(w: Any, x: Any, now: Any) -> Any:
        g = jax.grad(of_one)(w, x)
        return lax.cond(now, lambda g: w - mean(g), lambda g: w - mean(2 * g) if both else w, g)

    report = read(step, (WHOLE, SPLIT, WHOLE), WHOLE, W, X, jnp.array(True))
    assert all(each.in_branch for each in report.collectives)
    # Only one is taken.
    check(report, 8, W.nbytes, ratio=1, sent=report.bytes_in_branches)
    table = report.table()
    assert "in a branch" in table
    assert "sends at most 1,792 B" in table
    assert "the branch that sends most is counted: 1,792 B of these" in table
