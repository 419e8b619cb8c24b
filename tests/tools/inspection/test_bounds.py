"""P and N, told by a step or by the caller, against bytes counted by hand from shapes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard.errors import ArgumentError
from crossshard.testing import assert_communication
from crossshard.tools.inspection.inspect import joined_shards
from tests.tools.steps import (
    FLOAT,
    GRID,
    SPLIT,
    WHOLE,
    check,
    each_rule,
    gather,
    mean,
    mesh_of,
    over,
    placed,
    read,
    scatter,
    summed,
    updated,
)


def lies_of(rule: Any, params: Any, specs: Any) -> Any:
    """Of parameters and their state, each moment's layout being that of its parameter."""
    of_state = optax.tree.map_params(
        rule, lambda _, spec: spec, rule.init(params), specs, transform_non_params=lambda _: WHOLE
    )
    return specs, of_state


# Data × tensor parallel: two matrices split over the model axis, one scale whole.
LAYERS = {"scale": jnp.ones(64), "w1": jnp.ones((64, 512)), "w2": jnp.ones((512, 64))}
LIES = {"scale": P(), "w1": P(None, "model"), "w2": P("model", None)}
ROWS = jnp.ones((32, 64))
DATA = P("data")
ONE_SHARDS = FLOAT * (64 + 64 * 512 // 2 + 512 * 64 // 2)
# What goes forward and backward over the two devices of a shard, of its eight rows.
SENT = summed(4, ONE_SHARDS) + 2 * summed(2, FLOAT * 8 * 64)


def model(params: Any, x: Any) -> Any:
    return jnp.tanh((x * params["scale"]) @ params["w1"]) @ params["w2"]


def tensor_loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((lax.psum(model(params, x), "model") - y) ** 2)


def by_hand(params: Any, x: Any, y: Any) -> Any:
    grads = lax.pmean(jax.grad(tensor_loss)(params, x, y), "data")
    return grads | {"scale": lax.psum(grads["scale"], "model")}


def by_types(params: Any, x: Any, y: Any) -> Any:
    return jax.grad(lambda params: lax.pmean(tensor_loss(params, x, y), "data"))(params)


@each_rule
@pytest.mark.parametrize("way", ["by hand", "devices in another order", "by types"])
def test_data_and_tensor_parallel(rule: Any, way: str):
    typed, mesh = way == "by types", GRID
    if way == "devices in another order":
        shuffled = np.random.default_rng(0).permutation(jax.devices())
        mesh = Mesh(shuffled.reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    gradients = by_types if typed else by_hand

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        return updated(rule, params, state, gradients(params, x, y))

    lies = lies_of(rule, LAYERS, LIES)
    args = *placed((LAYERS, rule.init(LAYERS)), lies, mesh), ROWS, ROWS
    how = {"mesh": mesh, "vma": typed}
    report = read(step, (*lies, DATA, DATA), lies, *args, axis_name="data", **how)
    # By hand, the scale's gradient is summed over the devices of a shard, too.
    check(report, 4, ONE_SHARDS, sent=SENT + (0 if typed else summed(2, FLOAT * 64)))
    assert report.devices == 8
    assert report.lower_bound == summed(4, ONE_SHARDS)
    assert report.ratio == 1
    assert {each.within_shard for each in report.collectives} == {True, False}
    # Without a word each device is a shard, which holds all layers.
    report = read(step, (*lies, DATA, DATA), lies, *args, **how)
    check(report, 8, FLOAT * (64 + 2 * 64 * 512))


@each_rule
def test_data_and_tensor_parallel_by_the_compiler(rule: Any):
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss = lambda params: jnp.mean((model(params, x) - y) ** 2)
        return updated(rule, params, state, jax.grad(loss)(params))

    lies = lies_of(rule, LAYERS, LIES)
    out = jax.tree.map(lambda spec: NamedSharding(GRID, spec), lies)
    rows = placed(ROWS, DATA, GRID)
    args = *placed((LAYERS, rule.init(LAYERS)), lies, GRID), rows, rows
    report = assert_communication(
        jax.jit(step, out_shardings=out),
        *args,
        max_bytes_ratio=1.03,
        parameters=args[0],
        axis_name=["data"],
    )
    check(report, 4, ONE_SHARDS, sent=SENT)


def test_parameters_are_arrays_or_bytes():
    step = lambda params, x, y: jax.tree.map(jnp.subtract, params, by_hand(params, x, y))
    lies = placed(LAYERS, LIES, GRID), *placed((ROWS, ROWS), DATA, GRID)
    lowered = over(step, (LIES, DATA, DATA), LIES, GRID).lower(*lies)
    for parameters in (ONE_SHARDS, jax.ShapeDtypeStruct((ONE_SHARDS // 2,), jnp.float16)):
        report = crossshard.inspect(lowered, parameters, axis_name="data")
        assert (report.shards, report.lower_bound) == (4, summed(4, ONE_SHARDS))
    assert report.parameter_dtypes == ("f16",)
    report = crossshard.inspect(lowered, axis_name="data")
    assert (report.shards, report.lower_bound, report.ratio) == (4, None, None)
    assert report.bytes_between_shards == summed(4, ONE_SHARDS)
    assert "there is no lower bound" in report.table()
    for name in ("rows", [], ("data", "rows"), 3):
        with pytest.raises(ArgumentError, match="axes of the program's mesh, data, model; got"):
            crossshard.inspect(lowered, axis_name=name)


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
    args = *placed((w, v), lies, mesh), placed(ROWS, P(rows), mesh)
    lowered = over(step, (*lies, P(rows)), lies, mesh).lower(*args)
    report = crossshard.inspect(lowered, args[:2], axis_name=rows)
    check(report, 4, (w.nbytes + v.nbytes) // 2)


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


# Several steps in one program: of a rule, the program, how many batches it takes, how often the
# parameter is updated, and how much more than the least is sent each time.
W, X = jnp.ones((16, 16)), jnp.ones((64, 16))
STEPS = 5


def step_of(rule: Any) -> Callable:
    def one(carry: Any, x: Any) -> Any:
        w, state = carry
        loss, grad = jax.value_and_grad(loss_of)(w, x)
        return updated(rule, w, state, mean(grad)), mean(loss)

    return one


def scanned(rule: Any, of: Callable = step_of, **options: Any) -> Callable:
    return lambda w, state, xs: lax.scan(of(rule), (w, state), xs, **options)


def written_out(rule: Any) -> Callable:
    def run(w: Any, state: Any, xs: Any) -> Any:
        carry = (w, state)
        for x in xs:
            carry, _ = step_of(rule)(carry, x)
        return carry

    return run


def in_epochs(rule: Any) -> Callable:
    epoch = lambda xs: lambda carry, _: lax.scan(step_of(rule), carry, xs)
    return lambda w, state, xs: lax.scan(epoch(xs), (w, state), length=3)


def in_microbatches(rule: Any, inside: bool) -> Callable:
    def one(carry: Any, xs: Any) -> Any:
        w, state = carry

        def microbatch(total: Any, x: Any) -> Any:
            grad = jax.grad(loss_of)(w, x)
            return total + (mean(grad) if inside else grad), None

        total = lax.scan(microbatch, jnp.zeros_like(w), xs)[0]
        return updated(rule, w, state, total if inside else mean(total)), None

    return one


def averaging(rule: Any) -> Callable:
    def one(carry: Any, x: Any) -> Any:
        w, state = updated(rule, *carry, jax.grad(loss_of)(carry[0], x))
        return (mean(w), state), None

    return one


def with_state_in_parts(rule: Any) -> Callable:
    def one(carry: Any, x: Any) -> Any:
        w, state = carry
        own = lax.dynamic_slice_in_dim(w, 2 * lax.axis_index("s"), 2)
        part, state = updated(rule, own, state, scatter(jax.grad(loss_of)(w, x)) / 8)
        return (gather(part), state), None

    return lambda w, state, xs: lax.scan(one, (w, state), xs)[0]


SEVERAL = {
    "one": (scanned, (1,), 1, 1),
    "two": (scanned, (2,), 2, 1),
    "five": (scanned, (STEPS,), STEPS, 1),
    "written out": (written_out, (3,), 3, 1),
    "two in each round": (lambda rule: scanned(rule, unroll=2), (6,), 6, 1),
    "epochs": (in_epochs, (STEPS,), 3 * STEPS, 1),
    "reduced once for all microbatches": (
        lambda rule: scanned(rule, lambda rule: in_microbatches(rule, False)),
        (STEPS, 4),
        STEPS,
        1,
    ),
    "reduced at each microbatch": (
        lambda rule: scanned(rule, lambda rule: in_microbatches(rule, True)),
        (STEPS, 4),
        STEPS,
        4,
    ),
    "parameters are averaged": (lambda rule: scanned(rule, averaging), (STEPS,), STEPS, 1),
    "state in parts": (with_state_in_parts, (STEPS,), STEPS, 1),
}


@each_rule
@pytest.mark.parametrize("name", SEVERAL)
def test_several_steps(rule: Any, name: str):
    run, leading, updates, ratio = SEVERAL[name]
    state = rule.init(W)
    lies = jax.tree.map(lambda s: SPLIT if s.ndim else WHOLE, state)
    lies = (WHOLE, lies if name == "state in parts" else WHOLE)
    specs = (*lies, P(*[None for _ in leading], "s"))
    out = lies if name == "state in parts" else WHOLE
    report = read(run(rule), specs, out, W, state, jnp.ones((*leading, *X.shape)))
    check(report, 8, W.nbytes, ratio=updates * ratio)
    assert report.lower_bound == summed(8, W.nbytes)


def of_train_step(loss: Any, params: Any, rule: Any, batch: Any, **options: Any) -> Any:
    step = crossshard.make_train_step(loss, rule, num_shards=8, **options)
    return step, step.abstract_init(params), batch


def test_copies_that_are_made_equal_before_a_step_are_no_step():
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["a"] + params["b"]) ** 2)

    params = {"a": jnp.ones((64, 128)), "b": jnp.ones(128)}
    options = {"check_divergence": 10, "on_divergence": "repair"}
    args = of_train_step(loss, params, optax.adam(1e-3), ROWS, **options)
    report = assert_communication(*args, max_bytes_ratio=4.2)
    assert report.lower_bound == summed(8, FLOAT * (64 * 128 + 128))
    # Of parameters and both moments, if copies differ.
    assert report.bytes_in_branches == pytest.approx(3 * report.lower_bound, rel=0.2)
    assert report.bytes_sent - report.bytes_in_branches == pytest.approx(report.lower_bound, abs=9)
    said = r"at most 4\.\d+ times the lower bound \(1\.000 without what is in branches\)"
    with pytest.raises(crossshard.errors.CommunicationError, match=said):
        assert_communication(*args)


@each_rule
def test_a_scan_over_layers_is_one_step(rule: Any):
    layers = jnp.ones((6, 64, 64))

    def step(layers: Any, state: Any, x: Any) -> Any:
        def loss(layers: Any) -> Any:
            return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, layers)[0] ** 2)

        return updated(rule, layers, state, mean(jax.grad(loss)(layers)))

    report = read(step, (WHOLE, WHOLE, SPLIT), WHOLE, layers, rule.init(layers), ROWS)
    check(report, 8, layers.nbytes, ratio=1)
    assert report.lower_bound == summed(8, layers.nbytes)


# A frozen partition.
PARTS = {
    "body": {"bias": jnp.ones(256), "kernel": jnp.ones((64, 256))},
    "head": {"bias": jnp.ones(4), "kernel": jnp.ones((256, 4))},
}
TRAINED = FLOAT * (256 * 4 + 4)
BATCH = {"x": jnp.ones((64, 64)), "y": jnp.ones((64, 4))}


def two_layers(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["body"]["kernel"] + params["body"]["bias"])
    out = hidden @ params["head"]["kernel"] + params["head"]["bias"]
    return jnp.mean((out - batch["y"]) ** 2)


@pytest.mark.parametrize("update", ["replicated", "sharded"])
def test_a_step_tells_what_it_trains(update: Any):
    head = lambda path, leaf: path[0].key == "head"
    step, *args = of_train_step(
        two_layers, PARTS, optax.adam(1e-3), BATCH, weight_update=update, wrt=head
    )
    lowered = step.lower(*args)
    for program in (lowered, lowered.compile(), jax.jit(lambda *args: step(*args)).lower(*args)):
        report = crossshard.inspect(program)
        check(report, 8, TRAINED, ratio=pytest.approx(1, abs=0.01))
    # The caller's word goes first.
    assert crossshard.inspect(lowered, PARTS).parameter_bytes == sum(
        leaf.nbytes for leaf in jax.tree.leaves(PARTS)
    )


def test_groups_tell_their_own_shards():
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    rule = crossshard.CrossShardOptimizer(optax.sgd(0.1), group_assignment=halves)
    step, *args = of_train_step(two_layers, PARTS, rule, BATCH)
    report = crossshard.inspect(step.lower(*args))
    check(report, 4, sum(leaf.nbytes for leaf in jax.tree.leaves(PARTS)))
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
