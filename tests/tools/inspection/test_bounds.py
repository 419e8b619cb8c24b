"""P and N of steps that could mislead the reader, against bytes counted by hand from shapes."""

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
from crossshard.testing import assert_communication
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

SGD = optax.sgd(0.1)


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
    args = LAYERS, rule.init(LAYERS), ROWS, ROWS
    report = read(step, (*lies, DATA, DATA), lies, *args, mesh=mesh, vma=typed)
    # By hand, the scale's gradient is summed over the devices of a shard, too.
    check(report, 4, ONE_SHARDS, sent=SENT + (0 if typed else summed(2, FLOAT * 64)))
    assert report.devices == 8
    assert report.lower_bound == summed(4, ONE_SHARDS)


def test_rows_with_the_shape_of_a_layer_tell_the_shards_all_the_same():
    # On a device both are [256, 64].
    rows = jnp.ones((1024, 64))
    step = lambda params, x, y: jax.tree.map(jnp.subtract, params, by_types(params, x, y))
    report = read(step, (LIES, DATA, DATA), LIES, LAYERS, rows, rows, mesh=GRID, vma=True)
    check(report, 4, ONE_SHARDS, ratio=1)
    assert any(each.within_shard for each in report.collectives)


@each_rule
def test_data_and_tensor_parallel_by_the_compiler(rule: Any):
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss = lambda params: jnp.mean((model(params, x) - y) ** 2)
        return updated(rule, params, state, jax.grad(loss)(params))

    lies = lies_of(rule, LAYERS, LIES)
    out = jax.tree.map(lambda spec: NamedSharding(GRID, spec), lies)
    rows = placed(ROWS, DATA, GRID)
    args = *placed((LAYERS, rule.init(LAYERS)), lies, GRID), rows, rows
    report = assert_communication(jax.jit(step, out_shardings=out), *args, max_bytes_ratio=1.03)
    check(report, 4, ONE_SHARDS, sent=SENT)


def test_the_callers_parameters_take_the_shards_that_the_program_tells():
    step = lambda params, x, y: jax.tree.map(jnp.subtract, params, by_hand(params, x, y))
    lowered = over(step, (LIES, DATA, DATA), LIES, GRID).lower(LAYERS, ROWS, ROWS)
    for parameters in (ONE_SHARDS, jax.ShapeDtypeStruct((ONE_SHARDS // 2,), jnp.float16)):
        report = crossshard.inspect(lowered, parameters)
        assert (report.shards, report.lower_bound) == (4, summed(4, ONE_SHARDS))
    assert report.parameter_dtypes == ("f16",)


def test_a_layer_that_is_whole_on_all_devices_of_a_shard_counts_shards():
    # Its gradient is the same on both devices of a shard, and is averaged over the four shards.
    def step(params: Any, head: Any, x: Any, y: Any) -> Any:
        def loss(params: Any, head: Any) -> Any:
            return jnp.mean((jnp.tanh(lax.psum(model(params, x), "model")) @ head - y) ** 2)

        grads = lax.pmean(jax.grad(loss, (0, 1))(params, head), "data")
        return jax.tree.map(jnp.subtract, (params, head), grads)

    head, lies = jnp.ones((64, 64)), (LIES, WHOLE)
    report = read(step, (*lies, DATA, DATA), lies, LAYERS, head, ROWS, ROWS, mesh=GRID)
    check(report, 4, ONE_SHARDS + head.nbytes)


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
    report = read(step, (*lies, P(rows)), lies, w, v, ROWS, mesh=mesh)
    check(report, 4, (w.nbytes + v.nbytes) // 2)


def exchanged(dense: Any, expert: Any, x: Any, axis: str, experts: int) -> Any:
    sent = lax.all_to_all(jnp.tanh(x @ dense).reshape(experts, -1, 64), axis, 0, 0)
    return jnp.mean(lax.all_to_all(jnp.tanh(sent @ expert[0]), axis, 0, 0) ** 2)


def test_experts_lie_on_fewer_devices_than_the_layers_around_them():
    # Four experts, each on two of the eight devices, all of which see different rows.
    def step(dense: Any, expert: Any, x: Any) -> Any:
        dense_grad, expert_grad = jax.grad(exchanged, (0, 1))(dense, expert, x, "experts", 4)
        return (
            dense - lax.pmean(dense_grad, ("copies", "experts")),
            expert - lax.pmean(expert_grad, "copies") / 4,
        )

    dense, expert, x = jnp.ones((64, 64)), jnp.ones((4, 64, 32 * 2)), jnp.ones((64, 64))
    lies, mesh = (WHOLE, P("experts")), mesh_of(copies=2, experts=4)
    report = read(step, (*lies, P(("copies", "experts"))), lies, dense, expert, x, mesh=mesh)
    of_one = expert.nbytes // 4
    found = {(each.shards, each.bytes) for each in report.parameters}
    assert found == {(8, dense.nbytes), (2, of_one)}
    assert report.lower_bound == summed(8, dense.nbytes) + summed(2, of_one)
    table = report.table()
    assert f"8 shards need 2(N−1)/N · P = {summed(8, dense.nbytes):,.0f} B" in table
    assert f"2 shards need 2(N−1)/N · P = {summed(2, of_one):,.0f} B" in table
    assert f"together {report.lower_bound:,.0f} B" in table


def test_experts_of_which_each_device_has_one():
    def step(dense: Any, expert: Any, x: Any) -> Any:
        dense_grad, expert_grad = jax.grad(exchanged, (0, 1))(dense, expert, x, "s", 8)
        return dense - mean(dense_grad), expert - expert_grad / 8

    dense, expert, x = jnp.ones((64, 64)), jnp.ones((8, 64, 64)), jnp.ones((64, 64))
    lies = (WHOLE, SPLIT)
    # What is on one device alone is averaged with nobody.
    check(read(step, (*lies, SPLIT), lies, dense, expert, x), 8, dense.nbytes)


def test_layers_over_all_devices_have_no_bound():
    def step(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((lax.psum(jnp.tanh(x @ params["w1"]) @ params["w2"], "s") - y) ** 2)

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    params = {name: LAYERS[name] for name in ("w1", "w2")}
    lies = {"w1": P(None, "s"), "w2": P("s", None)}
    report = read(step, (lies, WHOLE, WHOLE), lies, params, ROWS, ROWS)
    assert report.bytes_sent > 0
    assert (report.parameter_bytes, report.lower_bound, report.ratio) == (None, None, None)
    assert "there is no lower bound" in report.table()


@each_rule
def test_adapters_beside_frozen_layers_that_are_split(rule: Any):
    frozen = {name: LAYERS[name] for name in ("w1", "w2")}
    adapter = {"down": jnp.ones((64, 16)), "up": jnp.ones((16, 512))}

    def step(adapter: Any, state: Any, frozen: Any, x: Any, y: Any) -> Any:
        def loss(adapter: Any) -> Any:
            hidden = jnp.tanh(x @ frozen["w1"] + jnp.tanh(x @ adapter["down"]) @ adapter["up"])
            return jnp.mean((lax.psum(hidden @ frozen["w2"], "model") - y) ** 2)

        grads = lax.pmean(jax.grad(loss)(adapter), "data")
        grads["down"] = lax.psum(grads["down"], "model")
        return updated(rule, adapter, state, grads)

    trained = lies_of(rule, adapter, {"down": WHOLE, "up": P(None, "model")})
    specs = (*trained, {name: LIES[name] for name in frozen}, DATA, DATA)
    args = adapter, rule.init(adapter), frozen, ROWS, ROWS
    check(read(step, specs, trained, *args, mesh=GRID), 4, FLOAT * (64 * 16 + 16 * 512 // 2))


def loss_of(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def test_rows_that_each_device_takes_or_makes_by_itself():
    def sliced(w: Any, x: Any) -> Any:
        own = lax.dynamic_slice_in_dim(x, 8 * lax.axis_index("s"), 8)
        return w - mean(jax.grad(loss_of)(w, own))

    def drawn(w: Any, key: Any) -> Any:
        own = jax.random.normal(jax.random.fold_in(key, lax.axis_index("s")), (8, 64))
        return w - mean(jax.grad(loss_of)(w, own))

    w, x = jnp.ones((64, 32)), jnp.ones((64, 64))
    for step, beside in ((sliced, x), (drawn, jax.random.key(0))):
        check(read(step, (WHOLE, WHOLE), WHOLE, w, beside), 8, w.nbytes, ratio=1)


# Several steps in one program: of a rule, the program, how many batches it takes, how often the
# parameter is updated, and how much more than the least is sent.
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
    (parameters,) = report.parameters
    assert (parameters.bytes, parameters.updates) == (W.nbytes, updates)
    assert report.lower_bound == updates * summed(8, W.nbytes)
    assert report.bytes_sent == ratio * report.lower_bound
    assert (f"· {updates} updates" in report.table()) == (updates > 1)


# What looks like several steps, and is one.


def side_by_side(w: Any, x: Any) -> Any:
    one, other = jax.grad(loss_of)(w, x), jax.grad(loss_of)(w, 2 * x)
    return w - mean(one) - mean(jnp.tanh(other))


def of_a_reduced_gradient(w: Any, x: Any) -> Any:
    # As in an orthogonalisation on parts: no sum but the first is of what the parameter has become.
    update = mean(jax.grad(loss_of)(w, x))
    for _ in range(3):
        own = update * (lax.axis_index("s") + 1)
        update = 1.5 * update - mean(own @ update.T @ own)
    return w - update


def projected(w: Any, x: Any) -> Any:
    # Nothing is reduced in the loop that makes the columns orthogonal.
    new = w - mean(jax.grad(loss_of)(w, x))
    return lax.fori_loop(0, 5, lambda _, w: 1.5 * w - 0.5 * w @ w.T @ w, new)


@pytest.mark.parametrize(
    ("step", "ratio"), [(side_by_side, 2), (of_a_reduced_gradient, 4), (projected, 1)]
)
def test_several_reductions_are_one_step(step: Callable, ratio: float):
    check(read(step, (WHOLE, SPLIT), WHOLE, W, X), 8, W.nbytes, ratio=ratio)


def of_train_step(loss: Any, params: Any, rule: Any, batch: Any, **options: Any) -> Any:
    step = crossshard.make_train_step(loss, rule, num_shards=8, **options)
    return step, step.abstract_init(params), batch


def test_sums_within_the_update_of_a_whole_step_are_one_step():
    # Muon on parts sums while it orthogonalises; XLA combines that with the bias's gradient.
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["a"] + params["b"]) @ params["c"]) ** 2)

    params = {"a": jnp.ones((64, 128)), "b": jnp.ones(128), "c": jnp.ones((128, 16))}
    rule = optax.contrib.muon(1e-3)
    step, *args = of_train_step(loss, params, rule, ROWS, weight_update="sharded")
    report = crossshard.inspect(step.lower(*args))
    assert {each.updates for each in report.parameters} == {1}
    assert report.lower_bound == summed(8, FLOAT * (64 * 128 + 128 + 128 * 16))


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


def test_two_towers_under_one_norm_are_both_trained():
    rule = optax.chain(optax.clip_by_global_norm(1.0), SGD)

    def step(towers: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda towers: sum(loss_of(w, x) for w in towers))(towers)
        return updated(rule, towers, state, [mean(grad) for grad in grads])

    args = [W, W], rule.init([W, W]), X
    check(read(step, (WHOLE, WHOLE, SPLIT), WHOLE, *args), 8, 2 * W.nbytes, ratio=1)


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


@each_rule
def test_a_scan_over_layers_that_are_split(rule: Any):
    ones = {"in": (64, 64), "w1": (6, 64, 512), "w2": (6, 512, 64)}
    params = {name: jnp.ones(shape) for name, shape in ones.items()}

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            def layer(h: Any, ws: Any) -> Any:
                return h + lax.psum(jnp.tanh(h @ ws[0]) @ ws[1], "model"), None

            start = jnp.tanh(x @ params["in"])
            return jnp.mean(lax.scan(layer, start, (params["w1"], params["w2"]))[0] ** 2)

        return updated(rule, params, state, lax.pmean(jax.grad(loss)(params), "data"))

    lies = {"in": WHOLE, "w1": P(None, None, "model"), "w2": P(None, "model")}
    trained = lies_of(rule, params, lies)
    report = read(step, (*trained, DATA), trained, params, rule.init(params), ROWS, mesh=GRID)
    of_one_shard = FLOAT * (64 * 64 + 6 * 64 * 512)
    check(report, 4, of_one_shard)
    assert report.lower_bound == summed(4, of_one_shard)


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


@each_rule
@pytest.mark.parametrize("update", ["of one's own", "replicated", "sharded"])
def test_frozen_weights_are_not_parameters(rule: Any, update: Any):
    rules = {"train": rule, "freeze": optax.set_to_zero()}
    rule = optax.partition(rules, {"body": "freeze", "head": "train"})

    def step(params: Any, state: Any, batch: Any) -> Any:
        return updated(rule, params, state, mean(jax.grad(two_layers)(params, batch)))

    if update != "of one's own":
        step, *args = of_train_step(two_layers, PARTS, rule, BATCH, weight_update=update)
        check(crossshard.inspect(step.lower(*args)), 8, TRAINED)
        return
    report = read(step, (WHOLE, WHOLE, SPLIT), WHOLE, PARTS, rule.init(PARTS), BATCH)
    # XLA leaves out the gradients that nothing reads.
    check(report, 8, TRAINED, ratio=1)
    assert report.lower_bound == summed(8, TRAINED)


def test_frozen_weights_that_travel_in_a_bucket_are_not_parameters():
    rows = lambda tree: [leaf.reshape(8, -1) for leaf in jax.tree.leaves(tree)]
    kernels = {name: PARTS[name]["kernel"] for name in PARTS}
    widths = [row.shape[1] for row in rows(kernels)]

    def apart(bucket: Any) -> Any:
        pieces = jnp.split(bucket, np.cumsum(widths)[:-1], axis=1)
        leaves = zip(pieces, jax.tree.leaves(kernels), strict=True)
        return jax.tree.unflatten(
            jax.tree.structure(kernels), [piece.reshape(like.shape) for piece, like in leaves]
        )

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"]) ** 2)

        grads = jnp.concatenate(rows(jax.grad(loss)(params)), axis=1)
        own = lax.psum_scatter(grads, "s") / 8
        body, head = (row[lax.axis_index("s")] for row in rows(params))
        new = jnp.concatenate([body, head - own[widths[0] :]])
        return apart(lax.all_gather(new, "s"))

    # The frozen ones are sent all the same, and show.
    sent = summed(8, FLOAT * (64 * 256 + 256 * 4))
    report = read(step, (WHOLE, SPLIT), WHOLE, kernels, ROWS)
    check(report, 8, FLOAT * 256 * 4, sent=sent)


def test_all_that_travels_in_a_bucket_is_trained_where_nothing_is_frozen():
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)

        flat = jnp.concatenate([leaf.ravel() for leaf in params])
        grads = jnp.concatenate([leaf.ravel() for leaf in jax.grad(loss)(params)])
        size = len(flat) // 8
        part = lax.dynamic_slice_in_dim(flat, size * lax.axis_index("s"), size)
        new = gather(part - scatter(grads) / 8)
        cut = params[0].size
        return [new[:cut].reshape(params[0].shape), new[cut:].reshape(params[1].shape)]

    params = [jnp.ones((64, 32)), jnp.ones((32, 64))]
    report = read(step, (WHOLE, SPLIT), WHOLE, params, ROWS)
    check(report, 8, 2 * FLOAT * 64 * 32, ratio=1)
