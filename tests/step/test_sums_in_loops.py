"""Gradients summed in the loop of the backward pass: what is sent, and that the step is right."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer
from tests.optimizers.table import across_leaves
from tests.quick import deep, deep_but
from tests.step import layered
from tests.step.common import assert_close, assert_same, on_one_device, train
from tests.step.layered import (
    BATCHES,
    CASES,
    LAYERS,
    PARAMS,
    SHARDS,
    WIDTH,
    normal,
    scan_loss,
    scanned,
    sent,
    step_of,
)

ONE, ALL = f"f32[{WIDTH},{WIDTH}]", f"f32[{LAYERS},{WIDTH},{WIDTH}]"
SGD = optax.sgd(0.01)


def same_as_one_device(step: Any, loss: Any, optimizer: Any = SGD, **given: Any) -> None:
    """The parameters after a few steps are those of plain Optax on the whole batch."""
    params, batches = given.get("params", PARAMS), given.get("batches", BATCHES)
    state = train(step, step.init(params), batches)
    want, _ = on_one_device(loss, optimizer, params, given.get("whole", batches))
    assert_close(state.params, want)


# What is sent.

QUICK = ["scan", "remat", "both"]


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
@pytest.mark.parametrize("name", deep_but(QUICK, CASES))
def test_each_loss_trains_as_one_device_does(name: str, mode: str):
    case = CASES[name]
    step = step_of(mode, case.loss, loss_over=case.over)
    same_as_one_device(step, case.loss, batches=BATCHES[:2])
    reduced = [arrays for kind, arrays, _ in sent(step) if kind != "all-gather"]
    assert any(ALL in arrays for arrays in reduced) != case.by_layer or name == "stopped"


def test_a_replicated_step_sums_each_layer_once_in_the_loop():
    found = sent(step_of("replicated", scan_loss))
    assert found == [("all-reduce", ONE, LAYERS), ("all-reduce", f"{ONE} f32[770]", 1)]


def test_a_sharded_update_scatters_each_layer_once_in_the_loop():
    part = WIDTH // SHARDS
    assert sent(step_of("sharded", scan_loss)) == [
        ("all-gather", f"f32[{LAYERS},{part},{WIDTH}]", 1),
        ("all-gather", f"f32[{part},{WIDTH}]", 1),
        ("reduce-scatter", ONE, 1),
        ("reduce-scatter", ONE, LAYERS),
    ]


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_a_step_sends_the_lower_bound_with_loops_too(mode: str):
    step = step_of(mode, scan_loss)
    report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCHES[0]))
    assert report.ratio == pytest.approx(1, abs=0.01)


def test_a_layer_too_small_for_a_collective_waits_for_the_others():
    cut = lambda x: x[..., :64, :64] if np.ndim(x) > 1 and x.shape[-2] == WIDTH else x[..., :64]
    params = {
        "layers": jax.tree.map(cut, PARAMS["layers"]),
        "embed": PARAMS["embed"][:, :64],
        "out": PARAMS["out"][:64],
        "scale": PARAMS["scale"],
    }
    found = sent(step_of("replicated", scan_loss), params)
    assert [times for *_, times in found] == [1] * len(found)


def _nested(params: Any, batch: Any) -> Any:
    turn = lambda h, w: (h + 0.5 * jnp.tanh(h @ w), None)
    outer = lambda h, ws: (lax.scan(turn, h, ws)[0], None)
    return (lax.scan(outer, batch["x"], params["w"])[0] ** 2).mean()


@pytest.mark.parametrize("mode", [deep("replicated"), deep("sharded"), "parts"])
def test_stacks_of_stacks_are_summed_one_layer_at_a_time(mode: str):
    params = {"w": normal(2, 3, WIDTH, WIDTH, scale=0.05)}
    step = step_of(mode, _nested)
    same_as_one_device(step, _nested, params=params)
    assert [times for kind, *_, times in sent(step, params) if kind != "all-gather"] == [6]


# The numbers.


def test_a_replicated_step_is_a_psum_of_the_gradients_bit_for_bit():
    mesh = jax.make_mesh((SHARDS,), ("i",), (AxisType.Auto,), devices=jax.devices()[:SHARDS])

    @jax.jit
    def plain(params: Any, batch: Any) -> Any:
        def on_one(params: Any, batch: Any) -> Any:
            gradients = jax.grad(scan_loss)(params, batch)
            return jax.tree.map(lambda g: lax.psum(g, "i") / SHARDS, gradients)

        over = {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P(), "check_vma": False}
        gradients = jax.shard_map(on_one, **over)(params, batch)
        return jax.tree.map(lambda p, g: p + -0.01 * g, params, gradients)

    step = step_of("replicated", scan_loss)
    state, want = step.init(PARAMS), PARAMS
    for batch in BATCHES:
        state, _ = step(state, batch)
        want = plain(want, batch)
    assert_same(state.params, want)


@pytest.mark.parametrize("mode", ["replicated", "sharded", "parts"])
@pytest.mark.parametrize("number", [deep(1), 3, deep(8)])
def test_any_number_of_shards_trains_as_one_device_does(number: int, mode: str):
    same_as_one_device(step_of(mode, scan_loss, num_shards=number), scan_loss)


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
@pytest.mark.parametrize("layers", [deep(1), deep(3), 4])
def test_layers_that_do_not_divide_are_split_otherwise(layers: int, mode: str):
    # Of 4 layers the first axis divides, of 3 none; one layer is as many as another number.
    params = {"w": normal(layers, 183, 183, scale=0.05), "out": normal(183, scale=0.1)}
    batches = [{"x": batch["x"][:, :183], "y": batch["y"]} for batch in BATCHES]

    def loss(params: Any, batch: Any) -> Any:
        turn = lambda h, w: (h + 0.5 * jnp.tanh(h @ w), None)
        h = lax.scan(turn, batch["x"], params["w"])[0]
        return ((h @ params["out"] - batch["y"]) ** 2).mean()

    for options in ({}, {"accumulate_steps": 2}):
        step = step_of(mode, loss, **options)
        same_as_one_device(step, loss, params=params, batches=batches)


@pytest.mark.parametrize("mode", [deep("replicated"), deep("sharded"), "parts"])
def test_layers_that_are_dealt_out_over_another_axis(mode: str):
    """As in a pipeline: the axis of the layers is split over ``model``."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    layers = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), PARAMS["layers"])
    params = {**PARAMS, "layers": layers}
    split = {**jax.tree.map(lambda _: P(), params), "layers": {"w": P("model"), "b": P()}}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    step = step_of(mode, scan_loss, mesh=mesh, axis_name="data")
    state = train(step, step.init(jax.tree.map(put, params, split)), BATCHES)
    assert_close(state.params, on_one_device(scan_loss, SGD, params, BATCHES)[0], 2e-6)


def test_two_data_axes_count_the_shards_together():
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    for mode in ("replicated", "parts"):
        same_as_one_device(step_of(mode, scan_loss, mesh=mesh), scan_loss)


@pytest.mark.parametrize("mode", ["replicated", "sharded", "parts"])
@pytest.mark.parametrize("axis", [1, deep(2)])
def test_layers_may_be_split_over_another_axis_too(mode: str, axis: int):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    over = [None] * 3
    over[axis] = "model"
    split = {**jax.tree.map(lambda _: P(), PARAMS), "embed": P(None, "model")}
    split["layers"] = {"w": P(*over), "b": P()}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    params = jax.tree.map(put, PARAMS, split)
    step = step_of(mode, scan_loss, mesh=mesh, axis_name="data")
    state = train(step, step.init(params), BATCHES)
    want, _ = on_one_device(scan_loss, SGD, PARAMS, BATCHES)
    assert_close(state.params, want)
    kept = step.unshard(state).params["layers"]["w"].sharding
    assert kept.is_equivalent_to(NamedSharding(mesh, P(*over)), 3)
    # A device sends its block of a layer, and nothing between those that have one shard's rows.
    block = "f32[96,192]" if axis == 1 else "f32[192,96]"
    part = "f32[96,48]" if axis == 1 else "f32[48,96]"
    reduces = [("all-reduce" if mode == "replicated" else "reduce-scatter", block)]
    gathers = [("all-gather", part)] if mode == "parts" else []
    in_loop = [(kind, arrays) for kind, arrays, times in sent(step, params) if times == LAYERS]
    assert in_loop == gathers + reduces


@pytest.mark.parametrize("mode", ["replicated", "sharded", "parts"])
def test_a_sum_of_gradients_is_the_mean_times_the_shards(mode: str):
    optimizer = CrossShardOptimizer(optax.sgd(0.01 / SHARDS), reduction="sum")
    same_as_one_device(step_of(mode, scan_loss, optimizer), scan_loss)


def test_groups_sum_in_loops_for_themselves():
    groups = [[0, 1], [2, 3]]
    for mode in ("replicated", "sharded"):
        optimizer = CrossShardOptimizer(SGD, group_assignment=groups)
        step = step_of(mode, scan_loss, optimizer)
        state = train(step, step.init(PARAMS), BATCHES)
        for shard, rows in ((0, slice(0, 12)), (3, slice(12, 24))):
            own = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for batch in BATCHES]
            want, _ = on_one_device(scan_loss, SGD, PARAMS, own)
            assert_close(jax.tree.map(lambda x, shard=shard: x[shard], state.params), want)
        assert LAYERS in {times for *_, times in sent(step)}


# Weights.


def weighted(params: Any, batch: Any) -> Any:
    errors = layered.error(
        params, scanned(layered.embedded(params, batch), params["layers"]), batch
    )
    return (batch["mask"] * errors).sum() / batch["mask"].sum()


def masked(batch: Any, mask: Any) -> Any:
    return {**batch, "mask": np.float32(mask)}


MASKS = normal(3, 24) > 0.5
WEIGHED = [masked(*pair) for pair in zip(BATCHES, MASKS, strict=True)]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_weights_count_in_loops(mode: str, steps: int):
    step = step_of(mode, weighted, weight="mask", accumulate_steps=steps)
    same_as_one_device(step, weighted, batches=WEIGHED)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_a_shard_without_weight_does_not_count_even_if_its_gradient_is_nan(mode: str, steps: int):
    mask = np.ones(24)
    mask[6:12] = 0
    mask[18:20] = steps == 1  # else a microbatch
    batches = [masked(batch, mask) for batch in BATCHES]
    poisoned = [{**batch, "x": np.where(mask[:, None], batch["x"], np.nan)} for batch in batches]
    step = step_of(mode, weighted, weight="mask", accumulate_steps=steps)
    state = train(step, step.init(PARAMS), poisoned)
    want, _ = on_one_device(weighted, SGD, PARAMS, batches)
    assert_close(state.params, want)


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_a_batch_that_does_not_divide_is_padded(mode: str):
    batches = [jax.tree.map(lambda x: x[:22], batch) for batch in WEIGHED]
    step = step_of(mode, weighted, weight="mask")
    same_as_one_device(step, weighted, batches=batches)


@pytest.mark.parametrize("mode", ["replicated", "parts"])
def test_without_any_weight_nothing_changes(mode: str):
    step = step_of(mode, weighted, optax.adamw(0.1), weight="mask", accumulate_steps=2)
    state, metrics = step(step.init(PARAMS), masked(BATCHES[0], np.zeros(24)))
    assert metrics["skipped"]
    assert_same(state.params, PARAMS)


# Microbatches.


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_microbatches_are_added_up_before_the_one_sum(mode: str):
    step = step_of(mode, scan_loss, accumulate_steps=3)
    same_as_one_device(step, scan_loss)
    state = step.abstract_init(PARAMS)
    report = crossshard.inspect(step.lower(state, BATCHES[0]))
    if mode != "parts":
        assert report.ratio == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_microbatches_of_a_scaled_loss(mode: str):
    scale = crossshard.DynamicLossScale(2.0**10)
    step = step_of(mode, scan_loss, accumulate_steps=3, loss_scale=scale)
    same_as_one_device(step, scan_loss)


def _shares_a_layer(h: Any, layers: Any) -> Any:
    """The first layer runs again after the second."""
    for place in (0, 1, 0):
        h = layered.layer(h, jax.tree.map(lambda x, place=place: x[place], layers))
    return h


def _shares_rows(h: Any, layers: Any) -> Any:
    """Two loops, over the first two layers and over the last two."""
    first, last = (jax.tree.map(lambda x, rows=rows: x[rows], layers) for rows in (_FIRST, _LAST))
    return scanned(scanned(h, first), last)


_FIRST, _LAST = slice(0, 2), slice(1, 3)


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
@pytest.mark.parametrize("run", [_shares_a_layer, _shares_rows])
def test_rows_that_are_used_twice_count_microbatches_once(run: Any, mode: str):
    loss = layered.through(run)
    step = step_of(mode, loss, accumulate_steps=2)
    same_as_one_device(step, loss)
    # What is used twice is sent once.
    arrays = " ".join(arrays for kind, arrays, _ in sent(step) if kind != "all-gather")
    assert ALL in arrays


WHOLE = {
    "leaf by leaf": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9)),
    "global arrays": across_leaves(0.01),
}
OPTIONS: list[dict[str, Any]] = [
    {"accumulate_steps": 3},
    {"accumulate_steps": 2, "loss_scale": crossshard.DynamicLossScale(64.0)},
    {"nonfinite": "skip", "metrics": ["noise_scale", "grad_norm"], "accumulate_steps": 2},
    {"nonfinite": "quarantine", "accumulate_steps": 2},
    {"ema": 0.9, "check_divergence": 1},
]


@pytest.mark.parametrize("mode", [deep("replicated"), deep("sharded"), "parts"])
@pytest.mark.parametrize("options", deep_but(OPTIONS[:2], OPTIONS), ids=str)
@pytest.mark.parametrize("how", WHOLE)
def test_an_optimizer_that_needs_whole_arrays_gets_the_same_gradients(
    how: str, options: Any, mode: str
):
    step = step_of(mode, scan_loss, WHOLE[how], **options)
    same_as_one_device(step, scan_loss, WHOLE[how])
    assert mode == "replicated" or how in step.describe()


DECAYS = optax.chain(optax.set_to_zero(), optax.add_decayed_weights(-0.01))


@pytest.mark.parametrize("mode", [deep("replicated"), "sharded", "parts"])
@pytest.mark.parametrize("rest", [optax.set_to_zero(), DECAYS], ids=["still", "decays"])
@pytest.mark.parametrize("steps", [deep(1), 2])
def test_a_gradient_that_no_one_reads_is_neither_computed_nor_sent(
    steps: int, rest: Any, mode: str
):
    labels = {"layers": {"w": "off", "b": "on"}, "embed": "on", "out": "on", "scale": "off"}
    optimizer = optax.partition({"on": SGD, "off": rest}, labels)
    step = step_of(mode, scan_loss, optimizer, accumulate_steps=steps)
    same_as_one_device(step, scan_loss, optimizer)
    reduced = [each for each in sent(step) if each[0] != "all-gather"]
    assert not [each for each in reduced if each[2] == LAYERS or ALL in each[1]]


@pytest.mark.parametrize("mode", ["replicated", "sharded"])
def test_an_overflow_in_a_loop_skips_the_step(mode: str):
    step = step_of(mode, scan_loss, optax.adam(0.1), loss_scale=crossshard.DynamicLossScale(8.0))
    bad = {**BATCHES[0], "y": np.where(np.arange(24) == 3, np.inf, BATCHES[0]["y"])}
    state, metrics = step(step.init(PARAMS), bad)
    assert metrics["skipped"]
    assert_same(state.params, PARAMS)
    assert float(state.opt_state.loss_scale.scale) == 4


def test_a_microbatch_has_its_own_key_state_and_aux():
    def loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        value = scan_loss(params, batch) + jax.random.uniform(rng, ()) * params["scale"]
        mean = batch["x"].mean()
        return value, ({"n": model_state["n"] + 1, "mean": mean}, {"u": jax.random.bits(rng)})

    options = {"has_aux": True, "model_state": "mean", "accumulate_steps": 3}
    start = {"n": jnp.float32(0), "mean": jnp.float32(0)}
    found = []
    for waits in (False, True):
        # A metric of local gradients makes all sums wait.
        metrics = {"metrics": ["local_grad_norm"]} if waits else {}
        step = step_of("replicated", loss, **options, **metrics)
        state = step.init(PARAMS, rng=3, model_state=start)
        auxes = []
        for batch in BATCHES:
            state, out = step(state, batch)
            auxes.append(jax.device_get(out["aux"]))
        found.append((jax.device_get(state.params), jax.device_get(state.model_state), auxes))
        assert float(state.model_state["n"]) == 9
    assert_close(found[0], found[1])
    assert_same(found[0][2], found[1][2])
    assert len(np.unique([aux["u"] for aux in found[0][2]])) == 3 * 3 * SHARDS
