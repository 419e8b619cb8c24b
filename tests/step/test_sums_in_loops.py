"""Stacked layers, summed and gathered in their loops: what is sent, and that the step is right."""

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

PART = WIDTH // SHARDS
ONE, ALL = f"f32[{WIDTH},{WIDTH}]", f"f32[{LAYERS},{WIDTH},{WIDTH}]"
ONE_PART, ALL_PARTS = f"f32[{PART},{WIDTH}]", f"f32[{LAYERS},{PART},{WIDTH}]"
GATHER, SCATTER = ("all-gather", ONE_PART), ("reduce-scatter", ONE)
OF_EMBEDDING = [(*GATHER, 1), (*SCATTER, 1)]
SGD = optax.sgd(0.01)


def same_as_one_device(step: Any, loss: Any, optimizer: Any = SGD, **given: Any) -> None:
    """The parameters after a few steps are those of plain Optax on the whole batch."""
    params, batches = given.get("params", PARAMS), given.get("batches", BATCHES)
    state = train(step, step.init(given.get("placed", params)), batches)
    want, _ = on_one_device(loss, optimizer, params, batches)
    assert_close(state.params, want, given.get("atol", 1e-6))


@pytest.fixture
def torus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices count as a torus of 2 x 2, on which products go round in rings."""
    monkeypatch.setattr("crossshard.shards.devices.torus_factors", lambda mesh: (2, 2))
    monkeypatch.setattr("crossshard.shards.devices.sends_beside_products", lambda mesh: True)


# Each loss.


def by_layer(gathers: int) -> list[Any]:
    """A layer is gathered again only where the loss recomputes it."""
    return sorted(OF_EMBEDDING + [(*GATHER, LAYERS)] * gathers + [(*SCATTER, LAYERS)])


AGAIN = {
    1: ("scan", "remat, weights", "nested", "cond"),
    2: ("remat", "remat around", "remat, dots"),
}
SENT: dict[tuple[str, str], list[Any]] = {
    ("replicated", "scan"): [("all-reduce", ONE, LAYERS), ("all-reduce", f"{ONE} f32[770]", 1)],
    ("sharded", "scan"): [
        ("all-gather", ALL_PARTS, 1),
        ("all-gather", ONE_PART, 1),
        ("reduce-scatter", ONE, 1),
        ("reduce-scatter", ONE, LAYERS),
    ],
    **{("parts", name): by_layer(gathers) for gathers, names in AGAIN.items() for name in names},
    # What no one reads is not gathered, and what is used twice is gathered once.
    ("parts", "unused"): OF_EMBEDDING,
    ("parts", "penalty"): [
        ("all-gather", ALL_PARTS, 1),
        (*GATHER, 1),
        (*SCATTER, 1),
        ("reduce-scatter", ALL, 1),
    ],
}
QUICK = [("replicated", "scan"), ("sharded", "scan"), ("rings", "remat")]
QUICK += [("parts", name) for name in ("scan", "remat", "cond", "penalty")]
# Each with sharded parameters, and some in other ways.
EACH = [("parts", name) for name in CASES]
EACH += [("rings", "remat, dots"), ("rings", "tied"), ("replicated", "both"), ("sharded", "nested")]


@pytest.mark.parametrize(("mode", "name"), deep_but(QUICK, dict.fromkeys(QUICK + EACH)))
def test_each_loss_trains_as_one_device_does(mode: str, name: str, request: pytest.FixtureRequest):
    if mode == "rings":
        request.getfixturevalue("torus")
    case = CASES[name]
    step = step_of("parts" if mode == "rings" else mode, case.loss, loss_over=case.over)
    same_as_one_device(step, case.loss, batches=BATCHES[:2])
    found = sent(step)
    if (mode, name) in SENT:
        assert found == SENT[mode, name]
    elif mode == "parts":
        assert case.by_layer != any(f"f32[{LAYERS}," in arrays for _, arrays, _ in found)
    elif mode != "rings":
        reduced = [arrays for kind, arrays, _ in found if kind != "all-gather"]
        assert any(ALL in arrays for arrays in reduced) != case.by_layer
    elif name == "remat":
        # A layer goes round as often as it was gathered, and its gradient once.
        state = step.abstract_init(PARAMS)
        collectives = crossshard.inspect(step.lower(state, BATCHES[0])).collectives
        permutes = [each for each in collectives if each.kind == "collective-permute"]
        layers = sum(each.bytes_sent for each in permutes if each.times == LAYERS)
        assert layers == (2 + 1) * 4 * LAYERS * WIDTH * WIDTH * (SHARDS - 1) / SHARDS
        assert not any(f"{WIDTH}]" in arrays for kind, arrays, _ in found if "all-" in kind)
    elif name == "remat, dots":
        # What products do not meet is gathered.
        assert ("all-gather", LAYERS) in {(kind, times) for kind, _, times in found}


# Rings.


@pytest.mark.usefixtures("torus")
def test_a_step_says_what_goes_round():
    step = step_of("parts", scan_loss)
    step.lower(step.abstract_init(PARAMS), BATCHES[0])
    text = f"gathered row by row in a loop of {LAYERS} turns, slice by slice beside their product"
    assert f"{text}, in float32: `layers/w`" in step.describe()
    # Without a gradient there is nothing to send back.
    step = step_of("parts", scan_loss, wrt=lambda path, _: "layers" not in str(path))
    assert "all-reduce" not in {kind for kind, _, _ in sent(step)}


# The numbers.


def test_a_replicated_step_is_a_psum_of_the_gradients_bit_for_bit():
    mesh = jax.make_mesh((SHARDS,), ("i",), (AxisType.Auto,), devices=jax.devices()[:SHARDS])

    @jax.jit
    def plain(params: Any, batch: Any) -> Any:
        def on_one(params: Any, batch: Any) -> Any:
            gradients = jax.jit(jax.grad(scan_loss))(params, batch)
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


def _turn(h: Any, w: Any) -> Any:
    return h + 0.5 * jnp.tanh(h @ w), None


def test_three_shards_train_as_one_device_does():
    same_as_one_device(step_of("parts", scan_loss, num_shards=3), scan_loss)


def _of_stack(params: Any, batch: Any) -> Any:
    h = lax.scan(_turn, batch["x"][:, :183], params["w"])[0]
    return ((h @ params["out"] - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("layers", [deep(1), 4])
def test_layers_that_do_not_divide_are_split_otherwise(layers: int):
    # Of 4 layers the first axis divides, of 3 none; one layer is as many as another number.
    params = {"w": normal(layers, 183, 183, scale=0.05), "out": normal(183, scale=0.1)}
    step = step_of("parts", _of_stack, accumulate_steps=2)
    same_as_one_device(step, _of_stack, params=params)


def test_two_data_axes_count_the_shards_together():
    mesh = jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    same_as_one_device(step_of("parts", scan_loss, mesh=mesh), scan_loss)


def _beside_a_model_axis(params: Any, mode: str, **split: Any) -> tuple[Any, Any]:
    """A step beside a model axis, and the parameters on its mesh."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    specs = {**jax.tree.map(lambda _: P(), params), **split}
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    step = step_of(mode, scan_loss, mesh=mesh, axis_name="data")
    return step, jax.tree.map(put, params, specs)


@pytest.mark.deep
def test_layers_that_are_dealt_out_over_another_axis():
    """As in a pipeline: the axis of the layers is split over ``model``."""
    layers = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), PARAMS["layers"])
    params = {**PARAMS, "layers": layers}
    step, placed = _beside_a_model_axis(params, "parts", layers={"w": P("model"), "b": P()})
    same_as_one_device(step, scan_loss, params=params, placed=placed, atol=2e-6)


@pytest.mark.parametrize(("axis", "mode"), [(1, "parts"), deep((2, "replicated"))])
def test_layers_may_be_split_over_another_axis_too(axis: int, mode: str):
    over = P(*("model" if place == axis else None for place in range(3)))
    split = {"layers": {"w": over, "b": P()}, "embed": P(None, "model")}
    step, placed = _beside_a_model_axis(PARAMS, mode, **split)
    same_as_one_device(step, scan_loss, placed=placed)
    # A device sends its block of a layer, and nothing between those that have one shard's rows.
    block = "f32[96,192]" if axis == 1 else "f32[192,96]"
    part = "f32[96,48]" if axis == 1 else "f32[48,96]"
    reduces = [("all-reduce" if mode == "replicated" else "reduce-scatter", block)]
    gathers = [("all-gather", part)] if mode == "parts" else []
    in_loop = [(kind, arrays) for kind, arrays, times in sent(step, placed) if times == LAYERS]
    assert in_loop == gathers + reduces


# Weights and microbatches.


def weighted(params: Any, batch: Any) -> Any:
    h = scanned(layered.embedded(params, batch), params["layers"])
    return (batch["mask"] * layered.error(params, h, batch)).sum() / batch["mask"].sum()


@pytest.mark.parametrize(("mode", "steps"), [("replicated", 1), ("replicated", 2), ("parts", 2)])
def test_weights_count_in_loops(mode: str, steps: int):
    """The batches do not divide, and one shard has nothing that counts, and is NaN."""
    masks = np.float32(normal(3, 22) > 0.5)
    masks[:, 6:12] = 0
    batches = [
        {**jax.tree.map(lambda x: x[:22], batch), "mask": mask}
        for batch, mask in zip(BATCHES, masks, strict=True)
    ]
    own = (np.arange(22) // 6 == 1)[:, None]
    poisoned = [{**batch, "x": np.where(own, np.nan, batch["x"])} for batch in batches]
    step = step_of(mode, weighted, weight="mask", accumulate_steps=steps)
    state = train(step, step.init(PARAMS), poisoned)
    assert_close(state.params, on_one_device(weighted, SGD, PARAMS, batches)[0])


def test_microbatches_are_added_up_before_the_one_sum():
    step = step_of("replicated", scan_loss, accumulate_steps=3)
    same_as_one_device(step, scan_loss)
    report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCHES[0]))
    assert report.ratio == pytest.approx(1, abs=0.01)


def test_an_overflow_skips_the_step_and_a_scaled_loss_trains():
    scale = crossshard.DynamicLossScale(2.0**10)
    step = step_of("replicated", scan_loss, accumulate_steps=3, loss_scale=scale)
    bad = {**BATCHES[0], "y": np.where(np.arange(24) == 3, np.inf, BATCHES[0]["y"])}
    state, metrics = step(step.init(PARAMS), bad)
    assert metrics["skipped"]
    assert_same(state.params, PARAMS)
    assert float(state.opt_state.loss_scale.scale) == 2.0**9
    state = train(step, state, BATCHES)
    assert_close(state.params, on_one_device(scan_loss, SGD, PARAMS, BATCHES)[0])


def _shares_a_layer(h: Any, layers: Any) -> Any:
    """The first layer runs again after the second."""
    for place in (0, 1, 0):
        h = layered.layer(h, jax.tree.map(lambda x, place=place: x[place], layers))
    return h


def test_rows_that_are_used_twice_count_microbatches_once():
    loss = layered.through(_shares_a_layer)
    step = step_of("parts", loss, accumulate_steps=2)
    same_as_one_device(step, loss)
    # What is used twice is sent once.
    assert ALL in " ".join(arrays for kind, arrays, _ in sent(step) if kind != "all-gather")


WHOLE = {
    "leaf by leaf": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, momentum=0.9)),
    "global arrays": across_leaves(0.01),
}


@pytest.mark.parametrize("how", deep_but(["leaf by leaf"], WHOLE))
def test_an_optimizer_that_needs_whole_arrays_gets_the_same_gradients(how: str):
    options = {"accumulate_steps": 2, "loss_scale": crossshard.DynamicLossScale(64.0)}
    step = step_of("parts", scan_loss, WHOLE[how], **options)
    same_as_one_device(step, scan_loss, WHOLE[how])
    assert how in step.describe()


DECAYS = optax.chain(optax.set_to_zero(), optax.add_decayed_weights(-0.01))


@pytest.mark.parametrize(
    ("mode", "rest"), [("sharded", DECAYS), deep(("parts", optax.set_to_zero()))]
)
def test_a_gradient_that_no_one_reads_is_neither_computed_nor_sent(mode: str, rest: Any):
    labels = {"layers": {"w": "off", "b": "on"}, "embed": "on", "out": "on", "scale": "off"}
    optimizer = optax.partition({"on": SGD, "off": rest}, labels)
    step = step_of(mode, scan_loss, optimizer, accumulate_steps=2)
    same_as_one_device(step, scan_loss, optimizer)
    reduced = [each for each in sent(step) if each[0] != "all-gather"]
    assert not [each for each in reduced if each[2] == LAYERS or ALL in each[1]]


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
        np.testing.assert_allclose(state.model_state["n"], 3, rtol=1e-6)
        np.testing.assert_allclose(state.model_state["mean"], BATCHES[-1]["x"].mean(), rtol=1e-5)
    assert_close(found[0], found[1])
    assert_same(found[0][2], found[1][2])
    assert len(np.unique([aux["u"] for aux in found[0][2]])) == 3 * 3 * SHARDS
