"""Programs that JAX compiles here: their bytes by hand, the least that they must send, and N."""

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import CrossShardOptimizer, inspect, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.tools import Communication
from crossshard.tools.inspection.inspect import joined_shards
from tests.quick import deep_but
from tests.tools import steps
from tests.tools.steps import (
    LINE,
    SPLIT,
    WHOLE,
    gather,
    mean,
    mesh_of,
    moved,
    over,
    placed,
    scatter,
    summed,
    updated,
)

N, SGD, ADAM = 8, optax.sgd(0.1), optax.adam(0.1)
GRID, PAIR = mesh_of(data=4, model=2), mesh_of(data=2, model=2)
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
EIGHTHS = P(("data", "model"))
each = jax.tree.map


def a(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


# w and v are split by a sharded update; b, of fewer than 1,024 numbers, is not.
PARAMS = {"w": a(64, 512), "b": a(512), "v": a(512, 64)}
W, B, V = 64 * 512, 512, 512 * 64
BATCH = a(64, 64)


def loss_fn(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]) ** 2)


def step_of(rule: Any, params: Any = PARAMS, batch: Any = BATCH, **options: Any) -> Any:
    step = make_train_step(options.pop("loss", loss_fn), rule, **{"num_shards": N} | options)
    return step.lower(step.abstract_init(params), batch)


# A program, the bytes of its arrays, and those of its scalars.

# Gradients of w and v are scattered, and parameters gathered; those of b and the loss summed.
SPLIT_UP = 2 * moved(N, 4 * (W + V)) + summed(N, 4 * (B + 1))
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
GROUPED = CrossShardOptimizer(SGD, group_assignment=HALVES)
WIRE = {"reduce_dtype": "bfloat16"}
HALF = {
    "params": each(lambda x: a(*x.shape, dtype=jnp.bfloat16), PARAMS),
    "batch": a(64, 64, dtype=jnp.bfloat16),
    "master_dtype": "float32",
}
# Over the model axis.
MODEL = {
    "params": placed(PARAMS, {"w": P(None, "model"), "b": P("model"), "v": P("model")}, PAIR),
    "num_shards": None,
    "mesh": PAIR,
    "axis_name": "data",
}
STEPS: dict[str, tuple[str, Any, dict[str, Any], float, float]] = {
    # The loss is in one bucket with b.
    "a replicated step": ("replicated", SGD, {}, summed(N, 4 * (W + V + B + 1)), 0),
    "a sharded step": ("sharded", optax.adamw(0.1), {"accumulate_steps": 4}, SPLIT_UP, 0),
    # Squares of the slices of w and of v, summed over the shards with the loss and b.
    "a clip by the global norm": ("sharded", CLIPPED, {}, SPLIT_UP + summed(N, 8), 0),
    # CPUs exchange 16 bits and add by themselves, and gather what they rounded; b alike, in a
    # bucket of its own, and the loss in 32.
    "16 bits": (
        *("sharded", ADAM, WIRE),
        *(moved(N, 2 * (W + V)) + moved(N, 4 * (W + V)) + 2 * moved(N, 2 * B), 7),
    ),
    # Summed in 32 bits, gathered in 16.
    "masters of parameters in 16 bits": (
        *("sharded", ADAM, HALF),
        *(moved(N, 4 * (W + V)) + moved(N, 2 * (W + V)) + summed(N, 4 * (B + 1)), 0),
    ),
    # The bucket of b and the loss is padded to a multiple of four.
    "groups of four": ("replicated", GROUPED, {}, summed(4, 4 * (W + V + B + 1 + 3)), 0),
    # 32 rows of the product with v are summed over the model axis.
    "a model over two by two devices": (
        *("sharded", ADAM, MODEL),
        2 * moved(2, 4 * (W + V) / 2) + summed(2, 4 * (B / 2 + 1)) + summed(2, 4 * 32 * 64),
        0,
    ),
    # The loss is in one bucket with b; then whether all is finite. What is sent where it is not,
    # the number of shards that count among it, does not count.
    "quarantine": (
        *("replicated", SGD, {"nonfinite": "quarantine"}),
        *(summed(N, 4 * (W + V + B + 1)), summed(N, 4)),
    ),
}
# Each returns a program, the bytes of its arrays, and those of its scalars.
Counted = tuple[Any, float, float]
PROGRAMS: dict[str, Callable[[], Counted]] = {
    name: lambda row=row: (step_of(row[1], weight_update=row[0], **row[2]), *row[3:])
    for name, row in STEPS.items()
}


def program(function: Callable[[], Counted]) -> Callable[[], Counted]:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


@program
def sums_and_scatters() -> Counted:
    def step(x: Any, y: Any) -> Any:
        return lax.psum(x, "s"), scatter(y), lax.pmax(x[0, 0], "s")

    lowered = over(step, (WHOLE, WHOLE), (WHOLE, SPLIT, WHOLE)).lower(a(24, 5), a(16, 3))
    return lowered, summed(8, 4 * 24 * 5) + moved(8, 4 * 16 * 3), summed(8, 4)


@program
def a_gather_over_one_axis_of_two() -> Counted:
    step = functools.partial(gather, axis="model")
    # A device holds an eighth of x, and afterwards a quarter.
    lowered = over(step, EIGHTHS, P("data"), GRID).lower(a(48, 10, dtype=jnp.int16))
    return lowered, moved(2, 2 * 48 * 10 / 4), 0


@program
def an_exchange() -> Counted:
    step = lambda x: lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True)
    # Between four, of a device's own eighth.
    return over(step, EIGHTHS, EIGHTHS, GRID).lower(a(32, 12)), moved(4, 4 * 32 * 12 / 8), 0


@program
def a_ring() -> Counted:
    step = lambda x: lax.ppermute(x, "s", [(i, (i + 1) % 8) for i in range(8)])
    return over(step, SPLIT, SPLIT).lower(a(8 * 6, 5, dtype=jnp.int8)), 6 * 5, 0


@program
def pmap() -> Counted:
    step = jax.pmap(lambda x: lax.pmean(x, "i") + lax.psum(1.0, "i"), axis_name="i")
    return step.lower(a(8, 20, 3)), summed(8, 4 * 20 * 3), 0


@program
def the_branch_that_sends_most() -> Counted:
    def step(x: Any, which: Any) -> Any:
        small, large = (lambda x: lax.psum(x[:2], "s")), (lambda x: 2 * lax.psum(x, "s")[:2])
        again = lambda x: lax.cond(x[0, 0] > 0, large, lambda x: x[:2] + large(x), x) + small(x)
        return lax.switch(which, [small, again, lambda x: x[:2]], x)

    # Of three branches the second one, of whose two branches each sends as much.
    lowered = over(step, (WHOLE, WHOLE), WHOLE).lower(a(6, 4), a(dtype=jnp.int32))
    return lowered, summed(8, 4 * 6 * 4) + summed(8, 4 * 2 * 4), 0


# Whole steps, which differ in an option; other tests compare what it sends.
SLOW = ["16 bits", "a clip by the global norm", "groups of four", "quarantine"]


@pytest.mark.parametrize("name", deep_but(lambda name: name not in SLOW, PROGRAMS))
def test_the_bytes_are_those_counted_by_hand(name: str):
    lowered, arrays, scalars = PROGRAMS[name]()
    report = inspect(lowered)
    assert report.bytes_sent == pytest.approx(arrays, rel=1e-12), str(report)
    assert report.scalar_bytes_sent == pytest.approx(scalars, rel=1e-12), str(report)


# N, P and the ratio, of steps that train what the caller passes.

HAND = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8)), "c": jnp.ones(32)}
BYTES = 4 * (16 * 32 + 32 * 8 + 32)
ROWS = jnp.ones((64, 16)), jnp.ones((64, 8))
# A matrix, and rows for it.
M, X = jnp.ones((16, 16)), jnp.ones((64, 16))


def hand_loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"] + params["c"]) @ params["b"] - y) ** 2)


def of_one(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def replicated(params: Any, state: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(hand_loss)(params, x, y)
    return *updated(ADAM, params, state, mean(grads)), mean(value)


def params_sharded(params: Any, state: Any, x: Any, y: Any) -> Any:
    grads = jax.grad(hand_loss)(each(gather, params), x, y)
    return updated(ADAM, params, state, each(lambda g: scatter(g) / 8, grads))


def in_groups(params: Any, x: Any, y: Any) -> Any:
    params = each(lambda v: v[0], params)
    grads = jax.grad(hand_loss)(params, x, y)
    grads = each(lambda g: lax.psum(g, "s", axis_index_groups=HALVES) / 4, grads)
    return each(lambda p, g: (p - g)[None], params, grads)


def one_after_the_other(params: Any, x: Any, y: Any) -> Any:
    grads = lax.pmean(lax.pmean(jax.grad(hand_loss)(params, x, y), "a"), "b")
    return each(jnp.subtract, params, grads)


def with_scalars(params: Any, x: Any, y: Any) -> Any:
    scaled = lambda p: p["scale"] * hand_loss(p, x, y) + p["bias"][0]
    return each(jnp.subtract, params, mean(jax.grad(scaled)(params)))


def with_a_master_copy(w: Any, master: Any, x: Any) -> Any:
    master -= mean(jax.grad(of_one)(w, x).astype(jnp.float32))
    return master.astype(w.dtype), master


STATE = ADAM.init(HAND)
LIES = SPLIT, each(lambda s: SPLIT if s.ndim else WHOLE, STATE)
BOTH = P(("a", "b"))
STACKED = each(lambda v: jnp.stack([v] * 8), HAND)
SCALARS = {**HAND, "scale": jnp.ones(()), "bias": np.ones(1, np.float32)}


# Several steps in one program.


def step_on(carry: Any, x: Any) -> Any:
    w, state = carry
    loss, grad = jax.value_and_grad(of_one)(w, x)
    return updated(ADAM, w, state, mean(grad)), mean(loss)


def in_epochs(carry: Any, xs: Any) -> Any:
    return lax.scan(lambda carry, _: lax.scan(step_on, carry, xs), carry, length=3)


def of_layers(layers: Any, x: Any) -> Any:
    run = lambda layers: lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0]
    return layers - mean(jax.grad(lambda layers: jnp.mean(run(layers) ** 2))(layers))


FIVE = (WHOLE, P(None, "s")), WHOLE, ((M, ADAM.init(M)), jnp.ones((5, *X.shape)))


# What is run, how its arguments and results lie, and they; then N, P and the ratio.
LINES: dict[str, tuple[Any, Any, Any, tuple[Any, ...], int, int, float]] = {
    "replicated": (
        *(replicated, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, (HAND, STATE, *ROWS)),
        *(8, BYTES, 1),
    ),
    # Though sharded, they are counted in full.
    "params sharded": (
        params_sharded,
        (*LIES, SPLIT, SPLIT),
        LIES,
        (HAND, STATE, *ROWS),
        8,
        BYTES,
        1,
    ),
    "scalars stand aside": (
        *(with_scalars, (WHOLE, SPLIT, SPLIT), WHOLE, (SCALARS, *ROWS)),
        *(8, BYTES, 1),
    ),
    "fewer bits than the master copy": (
        *(with_a_master_copy, (WHOLE, WHOLE, SPLIT), WHOLE),
        *((M.astype(jnp.float16), M, X.astype(jnp.float16)), 8, M.nbytes // 2, 2),
    ),
    "epochs": (in_epochs, *FIVE, 8, M.nbytes, 15),
    "a scan over layers is one step": (
        *(of_layers, (WHOLE, SPLIT), WHOLE, (jnp.ones((6, 16, 16)), X), 8, 6 * M.nbytes, 1),
    ),
}


def check(report: Communication, shards: int, parameters: int, ratio: float) -> None:
    assert (report.shards, report.parameter_bytes) == (shards, parameters), str(report)
    assert report.ratio == pytest.approx(ratio), str(report)
    assert report.lower_bound == summed(shards, parameters)


@pytest.mark.parametrize("name", LINES)
def test_the_least_that_a_step_sends(name: str):
    step, specs, out, args, *expected = LINES[name]
    trained = args[0][0] if isinstance(args[0], tuple) else args[0]
    lies = specs[0] if name == "params sharded" else WHOLE
    check(inspect(over(step, specs, out).lower(*args), placed(trained, lies)), *expected)


def test_groups_that_stay_apart_and_axes_one_after_the_other():
    report = inspect(over(in_groups, SPLIT, SPLIT).lower(STACKED, *ROWS), HAND)
    assert [only.groups for only in report.collectives] == [((0, 1, 2, 3), (4, 5, 6, 7))]
    check(report, 4, BYTES, 1)
    step = over(one_after_the_other, (WHOLE, BOTH, BOTH), WHOLE, mesh_of(a=2, b=4))
    report = inspect(step.lower(HAND, *ROWS), HAND)
    assert [each.group_size for each in report.collectives] == [2, 4]
    check(report, 8, BYTES, (1 + 1.5) / 1.75)


def test_one_shard_sends_nothing():
    specs = (WHOLE, WHOLE, SPLIT, SPLIT)
    report = inspect(over(replicated, specs, WHOLE, mesh_of(s=1)).lower(HAND, STATE, *ROWS), HAND)
    assert (report.devices, report.bytes_sent, report.scalar_bytes_sent) == (1, 0, 0)
    assert (report.lower_bound, report.ratio) == (0, None)
    assert "the lower bound is 0 B" in report.table()


def test_every_stage_its_memory_its_json_and_its_table():
    specs = (WHOLE, WHOLE, SPLIT, SPLIT)
    traced = over(replicated, specs, WHOLE).trace(HAND, STATE, *ROWS)
    compiled = traced.lower().compile()
    report = inspect(compiled, HAND)
    assert inspect(traced, HAND) == inspect(traced.lower(), HAND) == report
    assert {each.kind for each in report.collectives} == {"all-reduce"}
    assert (report.devices, report.scalar_bytes_sent) == (8, 7)
    stats, memory = compiled.memory_analysis(), report.memory
    for name in ("argument", "output", "temp", "alias"):
        assert getattr(memory, name) == getattr(stats, f"{name}_size_in_bytes")
    assert (memory.argument > BYTES, memory.peak) == (True, stats.peak_memory_in_bytes)
    read = json.loads(report.to_json(indent=2))
    assert (read["ratio"], read["bytes_sent"]) == (report.ratio, report.bytes_sent)
    assert read["memory"]["argument"] == memory.argument
    assert read["parameter_bytes"] == BYTES
    for one, each in zip(read["collectives"], report.collectives, strict=True):
        assert (one["kind"], one["source"]) == (each.kind, each.source)
        assert one["groups"] == [list(group) for group in each.groups]
        assert one["operands"][0]["dtype"] == each.operands[0].dtype
    table = str(report)
    # The line of `mean`, too.
    for part in ("all-reduce", "1 of 8", "ratio 1.000", "5,600 B", "memory per device", "peak"):
        assert part in table
    assert f"{steps.__file__}:" in table
    for args, error, said in (
        ([replicated], ArgumentTypeError, r"jax\.jit\(replicated\)\.lower\(\*args\)"),
        ([{}], ArgumentTypeError, "got dict"),
        ([compiled, {"a": "b"}], ArgumentTypeError, r"got str at \['a'\]"),
        ([compiled, -1], ArgumentError, "got -1"),
        ([compiled, {}], ArgumentError, "must be arrays, not only"),
        ([compiled, jnp.ones(1)], ArgumentError, "must be arrays, not only"),
    ):
        with pytest.raises(error, match=said):
            inspect(*args)


def test_a_step_of_nnx_jit():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean(jnp.tanh(model(x)) ** 2))(model)
        nnx.update(model, each(lambda p, g: p - g, nnx.state(model), grads))

    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(LINE, WHOLE)))
    low = step.lower(model, jax.device_put(X, NamedSharding(LINE, SPLIT)))
    for stage in (low, low.compile()):
        check(inspect(stage, nnx.state(model)), 8, 4 * (16 * 16 + 16), 1)


@pytest.mark.parametrize("both", [True, False])
def test_branches_are_marked(both: bool):
    def step(w: Any, x: Any, now: Any) -> Any:
        g = jax.grad(of_one)(w, x)
        return lax.cond(now, lambda g: w - mean(g), lambda g: w - mean(2 * g) if both else w, g)

    report = inspect(over(step, (WHOLE, SPLIT, WHOLE), WHOLE).lower(M, X, jnp.array(True)), M)
    assert all(each.in_branch for each in report.collectives)
    # Only one is taken.
    check(report, 8, M.nbytes, 1)
    assert report.bytes_sent == report.bytes_in_branches
    table = report.table()
    assert "in a branch" in table
    assert "sends at most 1,792 B" in table
    assert "the branch that sends most is counted: 1,792 B of these" in table


# Data × tensor parallel: two matrices split over the model axis, one scale whole.
LAYERS = {"scale": jnp.ones(64), "w1": jnp.ones((64, 512)), "w2": jnp.ones((512, 64))}
OVER_MODEL = {"scale": P(), "w1": P(None, "model"), "w2": P("model", None)}
TENSOR_ROWS, DATA = jnp.ones((32, 64)), P("data")
ONE_SHARDS = 4 * (64 + 64 * 512 // 2 + 512 * 64 // 2)
# What goes forward and backward over the two devices of a shard, of its eight rows.
SENT = summed(4, ONE_SHARDS) + 2 * summed(2, 4 * 8 * 64)


def model(params: Any, x: Any) -> Any:
    return jnp.tanh((x * params["scale"]) @ params["w1"]) @ params["w2"]


def tensor_loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((lax.psum(model(params, x), "model") - y) ** 2)


def by_hand(params: Any, x: Any, y: Any) -> Any:
    grads = lax.pmean(jax.grad(tensor_loss)(params, x, y), "data")
    return grads | {"scale": lax.psum(grads["scale"], "model")}


def by_types(params: Any, x: Any, y: Any) -> Any:
    return jax.grad(lambda params: lax.pmean(tensor_loss(params, x, y), "data"))(params)


SHUFFLED = Mesh(
    np.random.default_rng(0).permutation(jax.devices()).reshape(4, 2),
    ("data", "model"),
    axis_types=(AxisType.Auto,) * 2,
)


@pytest.mark.parametrize(
    ("gradients", "mesh"),
    [(by_hand, GRID), (by_hand, SHUFFLED), (by_types, GRID)],
    ids=["by hand", "devices in another order", "by types"],
)
def test_data_and_tensor_parallel(gradients: Callable, mesh: Mesh):
    step = lambda params, x, y: each(jnp.subtract, params, gradients(params, x, y))
    typed, lies = gradients is by_types, (OVER_MODEL, DATA, DATA)
    params = placed(LAYERS, OVER_MODEL, mesh)
    lowered = over(step, lies, OVER_MODEL, mesh, typed).lower(params, TENSOR_ROWS, TENSOR_ROWS)
    report = inspect(lowered, params, axis_name="data")
    check(report, 4, ONE_SHARDS, 1)
    # By hand, the scale's gradient is summed over the devices of a shard, too.
    assert report.bytes_sent == SENT + (0 if typed else summed(2, 4 * 64))
    assert report.bytes_between_shards == summed(4, ONE_SHARDS)
    assert {each.within_shard for each in report.collectives} == {True, False}
    # Without a word each device is a shard, which holds all layers.
    report = inspect(lowered, params)
    assert (report.shards, report.parameter_bytes) == (8, 4 * (64 + 2 * 64 * 512))
    # Parameters are arrays or bytes.
    for parameters in (ONE_SHARDS, a(ONE_SHARDS // 2, dtype=jnp.float16)):
        report = inspect(lowered, parameters, axis_name="data")
        assert (report.shards, report.lower_bound) == (4, summed(4, ONE_SHARDS))
    report = inspect(lowered, axis_name="data")
    assert (report.shards, report.lower_bound, report.ratio) == (4, None, None)
    assert "there is no lower bound" in report.table()
    for name in ("rows", [], ("data", "rows"), 3):
        with pytest.raises(ArgumentError, match="axes of the program's mesh, data, model; got"):
            inspect(lowered, axis_name=name)


def test_data_and_tensor_parallel_by_the_compiler():
    def step(params: Any, x: Any, y: Any) -> Any:
        loss = lambda params: jnp.mean((model(params, x) - y) ** 2)
        return each(jnp.subtract, params, jax.grad(loss)(params))

    params, rows = placed(LAYERS, OVER_MODEL, GRID), placed(TENSOR_ROWS, DATA, GRID)
    out = each(lambda spec: NamedSharding(GRID, spec), OVER_MODEL)
    lowered = jax.jit(step, out_shardings=out).lower(params, rows, rows)
    report = inspect(lowered, params, axis_name=["data"])
    assert (report.shards, report.parameter_bytes) == (4, ONE_SHARDS)
    assert report.bytes_sent == SENT


# Stored in eight parts: gathered over four shards, or over two and averaged over the other two,
# and the columns stay apart.
@pytest.mark.parametrize(
    ("mesh", "gathered", "averaged"),
    [(GRID, "data", ()), (mesh_of(a=2, b=2, model=2), "b", ("a",))],
    ids=["gathered over all shards", "over one axis of two"],
)
def test_layers_split_over_devices_and_gathered(mesh: Any, gathered: str, averaged: Any):
    rows = (*averaged, gathered)

    def step(w: Any, v: Any, x: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            return jnp.mean(lax.psum(jnp.tanh(x @ gather(w, gathered)) @ v, "model") ** 2)

        w_grad, v_grad = jax.grad(loss, (0, 1))(w, v)
        w_grad = lax.pmean(w_grad, averaged) if averaged else w_grad / 4
        return w - w_grad, v - lax.pmean(v_grad, rows)

    w, v = jnp.ones((64, 512)), jnp.ones((512, 8))
    lies = (P(gathered, "model"), P("model"))
    args = *placed((w, v), lies, mesh), placed(TENSOR_ROWS, P(rows), mesh)
    report = inspect(
        over(step, (*lies, P(rows)), lies, mesh).lower(*args), args[:2], axis_name=rows
    )
    assert (report.shards, report.parameter_bytes) == (4, (w.nbytes + v.nbytes) // 2)


def test_a_train_step_tells_what_it_trains():
    trained = 4 * W
    step = make_train_step(loss_fn, ADAM, num_shards=8, wrt=lambda path, leaf: path[0].key == "w")
    args = step.abstract_init(PARAMS), BATCH
    lowered = step.lower(*args)
    for program in (lowered, lowered.compile(), jax.jit(lambda *args: step(*args)).lower(*args)):
        report = inspect(program)
        assert (report.shards, report.parameter_bytes) == (8, trained)
        assert report.ratio == pytest.approx(1, abs=0.01)
    # The caller's word goes first.
    assert inspect(lowered, PARAMS).parameter_bytes == 4 * (W + B + V)
    # Each group has its own.
    report = inspect(step_of(GROUPED))
    assert (report.shards, report.parameter_bytes) == (4, 4 * (W + B + V))
    assert report.ratio == pytest.approx(1, abs=0.01)


ALL = ((0, 1, 2, 3, 4, 5, 6, 7),)
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))
FOURS = ((0, 2, 4, 6), (1, 3, 5, 7))
AXES = (("data", 4), ("model", 2))


def test_joined_shards_by_hand():
    joined = [joined_shards(each, 8, (), ()) for each in ([], [PAIRS], [PAIRS] * 2, [FOURS], [ALL])]
    assert [*joined, joined_shards([FOURS, PAIRS], 8, (), ())] == [1, 2, 2, 4, 8, 8]
    for along, counts in (("data", [1, 4, 4]), ("model", [2, 1, 2])):
        found = [joined_shards([each], 8, AXES, [along]) for each in (PAIRS, FOURS, ALL)]
        assert found == counts
    assert joined_shards([FOURS, PAIRS], 8, AXES, ["model", "data"]) == 8
