"""Sharded parameters: where they are gathered, and that the step stays right."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import Checkpoints, CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, NonfiniteError
from tests.optimizers.table import ROWS
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
    scan_loss,
    scanned,
    sent,
    step_of,
    through,
)

PART = WIDTH // SHARDS
ONE, ONE_PART = f"f32[{WIDTH},{WIDTH}]", f"f32[{PART},{WIDTH}]"
SGD = optax.sgd(0.01)


def in_parts(loss: Any = scan_loss, optimizer: Any = None, **options: Any) -> Any:
    return step_of("parts", loss, optimizer, **options)


def after(step: Any, params: Any = PARAMS, batches: Any = BATCHES, **init: Any) -> Any:
    """The state after a step on each batch."""
    return train(step, step.init(params, **init), batches)


def moved(params: Any, start: Any = PARAMS) -> float:
    far = lambda x, y: np.abs(np.asarray(x) - np.asarray(y)).max(initial=0)
    return max(jax.tree.leaves(jax.tree.map(far, params, start)))


# What a loss may do.


@pytest.mark.parametrize("name", deep_but(["scan", "remat", "cond", "penalty"], CASES))
def test_each_loss_trains_as_one_device_does(name: str):
    case = CASES[name]
    step = in_parts(case.loss, loss_over=case.over)
    want, _ = on_one_device(case.loss, SGD, PARAMS, BATCHES[:2])
    assert_close(after(step, batches=BATCHES[:2]).params, want)
    whole = f"f32[{LAYERS},"
    assert case.by_layer != any(whole in arrays for _, arrays, _ in sent(step))


GATHER, SCATTER = ("all-gather", ONE_PART), ("reduce-scatter", ONE)
OF_EMBEDDING = [(*GATHER, 1), (*SCATTER, 1)]


@pytest.mark.parametrize(
    ("name", "gathers"),
    [
        ("scan", 1),
        ("remat", 2),
        deep(("remat around", 2)),
        deep(("remat, everything", 1)),
        deep(("remat, dots", 2)),
        deep(("remat, weights", 1)),
        deep(("nested", 1)),
        deep(("cond", 1)),
    ],
)
def test_a_layer_is_gathered_again_only_where_the_loss_recomputes_it(name: str, gathers: int):
    of_layers = [(*GATHER, LAYERS)] * gathers + [(*SCATTER, LAYERS)]
    step = in_parts(CASES[name].loss, loss_over=CASES[name].over)
    assert sent(step) == sorted(OF_EMBEDDING + of_layers)


def test_a_leaf_that_is_used_twice_is_gathered_once_before():
    step = in_parts(CASES["penalty"].loss)
    (gather,) = (each for each in sent(step) if each[0] == "all-gather" and "[3," in each[1])
    assert gather == ("all-gather", f"f32[{LAYERS},{PART},{WIDTH}]", 1)


def test_what_no_one_reads_is_not_gathered():
    step = in_parts(CASES["unused"].loss)
    assert sent(step) == OF_EMBEDDING


# Where they rest.


def test_parameters_and_state_rest_in_parts_and_look_whole():
    step = in_parts(optimizer=optax.adam(1e-3))
    for state in (step.init(PARAMS), after(step)):
        assert jax.tree.map(jnp.shape, state.params) == jax.tree.map(jnp.shape, PARAMS)
        moments = state.opt_state.inner_state[0]
        for tree in (state.params, moments.mu, moments.nu):
            for leaf in (tree["layers"]["w"], tree["embed"]):
                blocks = [shard.data.size for shard in leaf.addressable_shards]
                assert blocks == [leaf.size // SHARDS] * SHARDS
                whole = np.asarray(leaf)
                for shard in leaf.addressable_shards:
                    np.testing.assert_array_equal(shard.data, whole[shard.index])
    assert_same(step.init(PARAMS).params, PARAMS)


def test_a_device_has_a_part_of_the_bytes():
    memory = {}
    for mode in ("sharded", "parts"):
        step = step_of(mode, CASES["remat"].loss, optax.adam(1e-3))
        program = step.lower(step.abstract_init(PARAMS), BATCHES[0])
        memory[mode] = crossshard.inspect(program).memory
    split = sum(PARAMS[name].nbytes for name in ("embed",)) + PARAMS["layers"]["w"].nbytes
    saved = split * (SHARDS - 1) // SHARDS
    assert memory["sharded"].argument - memory["parts"].argument == saved
    assert memory["sharded"].peak - memory["parts"].peak >= saved


def test_a_donated_state_is_gone_and_a_kept_one_stays():
    for donate in (True, False):
        step = in_parts(donate=donate)
        state = step.init(PARAMS)
        step(state, BATCHES[0])
        assert state.params["embed"].is_deleted() == donate


def test_steps_compile_once():
    step = in_parts(optimizer=optax.adam(1e-3))
    after(step)
    assert step._program._compiled._cache_size() == 1


# Optimizers.

QUICK = ["sgd", "adamw", "adafactor", "clip_by_global_norm", "contrib.muon"]
RULES = [
    *QUICK,
    *("adam", "adabelief", "adamax", "amsgrad", "nadam", "rmsprop", "yogi", "adagrad", "adadelta"),
    *("lamb", "lars", "novograd", "radam", "fromage", "noisy_sgd", "polyak_sgd", "chain"),
    *("adamw (matrices decay)", "sgd (schedule, Nesterov)", "apply_if_finite", "flatten"),
    *("contrib.schedule_free", "contrib.prodigy", "contrib.mechanize", "contrib.dog"),
    *("MultiSteps", "contrib.reduce_on_plateau", "contrib.galore", "lbfgs (no line search)"),
]


@pytest.mark.parametrize("name", deep_but(QUICK, RULES))
def test_each_optimizer_trains_as_one_device_does(name: str):
    row = ROWS[name]
    step = in_parts(optimizer=row.make())
    state = after(step)
    expected = on_one_device(scan_loss, row.make(), PARAMS, BATCHES, needs_value=row.value)
    # Where a gradient is next to zero, what is divided by its size tells what rounding left.
    assert moved(expected[0]) > 1e-3
    for got, want, start in zip(
        *map(jax.tree.leaves, (state.params, expected[0], PARAMS)), strict=True
    ):
        error = np.linalg.norm(np.asarray(got) - want)
        assert error <= 1e-4 * np.linalg.norm(want - start) + 1e-6
    for leaf in (state.params["layers"]["w"], state.params["embed"]):
        assert leaf.addressable_shards[0].data.size == leaf.size // SHARDS
    whole = step.unshard(state)
    assert jax.tree.structure(whole.opt_state.inner_state) == jax.tree.structure(expected[1])


# Options.


@pytest.mark.parametrize("clips", [False, deep(True)])
def test_an_overflow_skips_the_step_and_halves_the_scale(clips: bool):
    optimizer = optax.adam(0.1)
    if clips:
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    step = in_parts(optimizer=optimizer, loss_scale=crossshard.DynamicLossScale(8.0))
    state = after(step, batches=BATCHES[:1])
    before = jax.device_get((state.params, state.opt_state.inner_state))
    bad = {**BATCHES[0], "y": np.where(np.arange(24) == 3, np.inf, BATCHES[0]["y"])}
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    assert_same((state.params, state.opt_state.inner_state), before)
    assert float(state.opt_state.loss_scale.scale) == 4
    state, metrics = step(state, BATCHES[1])
    assert not metrics["skipped"]
    assert moved(state.params, before[0]) > 1e-3


@pytest.mark.parametrize("mode", ["replicated", "sharded", "parts"])
def test_gradients_may_travel_in_16_bits(mode: str):
    step = step_of(mode, scan_loss, reduce_dtype="bfloat16")
    want, _ = on_one_device(scan_loss, SGD, PARAMS, BATCHES)
    state = after(step)
    for got, expected, start in zip(
        *map(jax.tree.leaves, (state.params, want, PARAMS)), strict=True
    ):
        error = np.linalg.norm(np.asarray(got) - expected)
        assert error <= 2e-2 * np.linalg.norm(expected - start)
    in_loop = [arrays for kind, arrays, times in sent(step) if times == LAYERS]
    # XLA for CPUs adds in 32 bits, so that bits are exchanged.
    assert [arrays for arrays in in_loop if "u16" in arrays]
    assert mode == "parts" or not [arrays for arrays in in_loop if "f32" in arrays]


def rounded(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(x.dtype), params)


def test_parameters_may_be_gathered_in_16_bits():
    step = in_parts(gather_dtype="bfloat16")

    @jax.jit
    def plain(params: Any, batch: Any) -> Any:
        # Only what travels is rounded.
        seen = {**params, "embed": rounded(params["embed"])}
        seen["layers"] = {"w": rounded(params["layers"]["w"]), "b": params["layers"]["b"]}
        gradients = jax.grad(scan_loss)(seen, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)

    state, params = step.init(PARAMS), PARAMS
    for batch in BATCHES:
        state, _ = step(state, batch)
        params = plain(params, batch)
        assert_close(state.params, params, 5e-6)
    gathered = [arrays for kind, arrays, _ in sent(step) if kind == "all-gather"]
    assert gathered == [f"u16[{PART},{WIDTH}]"] * 2


def _in_16_bits(h: Any, layers: Any) -> Any:
    """A loop over weights that were converted before."""
    w = layers["w"].astype(jnp.bfloat16)
    body = lambda h, p: h + 0.5 * jnp.tanh((h.astype(w.dtype) @ p["w"]).astype(h.dtype) + p["b"])
    return scanned(h, {"w": w, "b": layers["b"]}, body)


def _converted_twice(h: Any, layers: Any) -> Any:
    """Converts the weights in each of two places of a turn, and nothing else."""

    def body(h: Any, p: Any) -> Any:
        once = h.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)
        twice = jnp.tanh(once) @ p["w"].astype(jnp.bfloat16)
        return h + 0.5 * jnp.tanh(twice.astype(h.dtype) + p["b"])

    return scanned(h, layers, body)


def _converted_in_turn(h: Any, layers: Any) -> Any:
    """Converts the weights of each turn."""
    w = jnp.bfloat16
    body = lambda h, p: (
        h + 0.5 * jnp.tanh((h.astype(w) @ p["w"].astype(w)).astype(h.dtype) + p["b"])
    )
    return scanned(h, layers, body)


@pytest.mark.parametrize("mode", [deep("replicated"), deep("sharded"), "parts"])
@pytest.mark.parametrize("run", [_in_16_bits, _converted_twice, _converted_in_turn])
def test_what_is_used_in_16_bits_is_gathered_in_16_bits(run: Any, mode: str):
    loss = through(run)
    step = step_of(mode, loss)
    want, _ = on_one_device(loss, SGD, PARAMS, BATCHES)
    state = after(step)
    got, expected = np.asarray(state.params["layers"]["w"]), want["layers"]["w"]
    far = np.linalg.norm(expected - PARAMS["layers"]["w"])
    assert np.linalg.norm(got - expected) <= 1e-2 * far
    assert state.params["layers"]["w"].dtype == jnp.float32
    if mode == "parts":
        gathered = [each for each in sent(step) if each[0] == "all-gather"]
        assert ("all-gather", f"u16[{PART},{WIDTH}]", LAYERS) in gathered
        assert all(arrays != ONE_PART or times == 1 for _, arrays, times in gathered)


def _in_32_bits(h: Any, layers: Any) -> Any:
    return scanned(h, jax.tree.map(lambda x: x.astype(jnp.float32), layers))


def test_parameters_of_16_bits_that_are_used_in_32_are_gathered_in_16():
    loss = through(_in_32_bits)
    halves = {**PARAMS, "layers": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS["layers"])}
    step = in_parts(loss)
    want, _ = on_one_device(loss, SGD, halves, BATCHES[:1])
    got = after(step, halves, BATCHES[:1]).params
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), got), want, 4e-3)
    gathered = [each for each in sent(step, halves) if each[0] == "all-gather"]
    # Such a loop is over weights that are converted before it.
    assert ("all-gather", f"u16[{LAYERS},{PART},{WIDTH}]", 1) in gathered


def test_what_is_converted_twice_is_rounded_twice():
    def loss(params: Any, batch: Any) -> Any:
        # 1e5 is infinite in float16 and finite in bfloat16; 1 + 2**-8 + 2**-12 is rounded up once.
        seen = params.astype(jnp.float16).astype(jnp.bfloat16).astype(jnp.float32)
        return (seen * batch["x"].mean()).sum(), seen[:2, 0]

    params = np.full((WIDTH, WIDTH), 1 + 2**-8 + 2**-12, np.float32)
    params[1] = 1e5
    step = in_parts(loss, has_aux=True)
    _, metrics = step(step.init(params), BATCHES[0])
    assert_same(metrics["aux"][0], loss(jnp.asarray(params), BATCHES[0])[1])
    gathered = [arrays for kind, arrays, _ in sent(step, params) if kind == "all-gather"]
    assert gathered == [f"u16[{PART},{WIDTH}]"]


METRICS = ["grad_norm", "param_norm", "update_norm", "learning_rate"]
LOCAL = ["local_grad_norm", "noise_scale", "noise_variance", "noise_signal"]


@pytest.mark.parametrize("names", [METRICS, LOCAL], ids=["reduced", "local"])
@pytest.mark.parametrize("rule", ["sgd", deep("clip_by_global_norm")])
def test_metrics_are_those_of_whole_arrays(rule: str, names: list[str]):
    found = []
    for mode in ("replicated", "parts"):
        optimizer = optax.inject_hyperparams(optax.sgd)(0.01) if rule == "sgd" else None
        optimizer = optimizer or ROWS[rule].make()
        wanted = [name for name in names if rule == "sgd" or name != "learning_rate"]
        step = step_of(mode, scan_loss, optimizer, metrics=wanted)
        state, metrics = step(step.init(PARAMS), BATCHES[0])
        found.append({name: np.asarray(metrics[name]) for name in wanted})
    assert_close(*found, 1e-6, 1e-4)
    if names is METRICS:
        gradients = jax.grad(scan_loss)(jax.tree.map(jnp.asarray, PARAMS), BATCHES[0])
        np.testing.assert_allclose(found[1]["grad_norm"], optax.tree.norm(gradients), rtol=1e-5)
        norm = np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(state.params)))
        np.testing.assert_allclose(found[1]["param_norm"], norm, rtol=1e-5)


BAD = {**BATCHES[0], "y": np.where(np.arange(24) == 3, np.nan, BATCHES[0]["y"])}


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_a_shard_that_is_not_finite_is_quarantined_or_its_step_skipped(mode: str):
    step = step_of(mode, scan_loss, nonfinite="skip")
    state, metrics = step(step.init(PARAMS), BAD)
    assert metrics["skipped"]
    assert_same(state.params, PARAMS)

    step = step_of(mode, scan_loss, nonfinite="quarantine")
    state, _ = step(step.init(PARAMS), BAD)
    rest = jax.tree.map(lambda x: x[6:], BAD)
    want, _ = on_one_device(scan_loss, SGD, PARAMS, [rest])
    assert_close(state.params, want)


def test_a_shard_that_is_not_finite_ends_the_run():
    step = in_parts(nonfinite="raise")
    state, _ = step(step.init(PARAMS), BAD)
    assert_same(state.params, PARAMS)
    with pytest.raises(NonfiniteError, match="shard 0"):
        train(step, state, BATCHES[:2])


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_a_preprocessor_sees_whole_gradients_of_its_shard(mode: str):
    clip = optax.clip_by_global_norm(0.5)
    optimizer = CrossShardOptimizer(optax.sgd(0.1), preprocess=clip)
    state = after(step_of(mode, scan_loss, optimizer))

    @jax.jit
    def plain(params: Any, batch: Any) -> Any:
        split = jax.tree.map(lambda x: x.reshape(SHARDS, -1, *x.shape[1:]), batch)
        of_one = lambda rows: clip.update(jax.grad(scan_loss)(params, rows), clip.init(params))[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g.mean(0), params, jax.lax.map(of_one, split))

    params = PARAMS
    for batch in BATCHES:
        params = plain(params, batch)
    assert_close(state.params, params)


def test_masters_and_averages_rest_in_parts_too():
    halves = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    found = []
    for mode in ("replicated", "parts"):
        step = step_of(mode, scan_loss, optax.sgd(0.05), master_dtype="float32", ema=0.5)
        state = after(step, halves)
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
        found.append(jax.device_get(step.unshard(state)))
        average = step.model(state, ema=True)
        masters = state.opt_state.inner_state.masters
        assert jax.tree.map(jnp.shape, average) == jax.tree.map(jnp.shape, PARAMS)
    assert masters["embed"].addressable_shards[0].data.size == masters["embed"].size // SHARDS
    ours, theirs = (each.opt_state.inner_state for each in found)
    # In 16 bits each shard's gradient is rounded by itself, in whatever order.
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)
    rounded_masters = jax.tree.map(lambda x: x.astype(jnp.bfloat16), theirs.masters)
    assert_same(found[1].params, rounded_masters)


@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_frozen_parameters_stay_as_they_are(mode: str):
    trains = lambda path, leaf: path[0].key == "layers" and path[1].key == "w"
    step = step_of(mode, scan_loss, wrt=trains)
    state = after(step)

    def of_weights(w: Any, batch: Any) -> Any:
        layers = {**PARAMS["layers"], "w": w}
        return scan_loss({**PARAMS, "layers": layers}, batch)

    want, _ = on_one_device(of_weights, SGD, PARAMS["layers"]["w"], BATCHES)
    model = step.model(state)
    assert_close(model["layers"]["w"], want)
    assert_same(
        {**model, "layers": model["layers"]["b"]}, {**PARAMS, "layers": PARAMS["layers"]["b"]}
    )
    if mode == "parts":
        scatters = [each for each in sent(step) if each[0] == "reduce-scatter"]
        assert scatters == [(*SCATTER, LAYERS)]
        # The frozen embedding is gathered.
        assert sent(step) == sorted([(*GATHER, 1), (*GATHER, LAYERS), *scatters])


def test_large_frozen_parameters_beside_tiny_ones_rest_in_parts(tmp_path: Path):
    step = in_parts(CASES["remat"].loss, wrt=lambda path, leaf: path[0].key == "out")
    state = train(step, step.init(PARAMS), BATCHES[:1])
    with Checkpoints(tmp_path, step) as checkpoints:
        checkpoints.save(state)
        state, _ = checkpoints.restore_latest(step.abstract_init(PARAMS))
    state = train(step, step.reshard(step.unshard(state)), BATCHES[1:])
    of_out = lambda out, batch: scan_loss({**PARAMS, "out": out}, batch)
    want, _ = on_one_device(of_out, SGD, PARAMS["out"], BATCHES)
    model = step.model(state)
    assert_close(model["out"], want)
    assert_same({**model, "out": 0}, {**PARAMS, "out": 0})
    parts = [leaf for leaf in jax.tree.leaves(state.frozen) if leaf.size >= WIDTH * WIDTH]
    assert [leaf.addressable_data(0).size * SHARDS for leaf in parts] == [x.size for x in parts]
    assert sent(step) == sorted([(*GATHER, 1), (*GATHER, LAYERS)])
    assert "known once" not in step.describe()
    errors = lambda params, batch: layered.error(
        params, scanned(layered.embedded(params, batch), params["layers"]), batch
    )
    np.testing.assert_allclose(
        step.evaluate(state, BATCHES[:1], errors), scan_loss(model, BATCHES[0]), rtol=1e-5
    )


def test_copies_are_compared_and_agree():
    step = in_parts(check_divergence=1)
    state, metrics = step(step.init(PARAMS), BATCHES[0])
    state, metrics = step(state, BATCHES[1])
    assert not metrics["divergence"].diverged
    names = step.compared(state)
    assert not any("embed" in name or "'w'" in name for name in names)
    assert any("scale" in name for name in names)


def test_a_loss_may_return_a_parameter():
    def loss(params: Any, batch: Any) -> Any:
        return scan_loss(params, batch), {"w": params["layers"]["w"], "rows": len(batch["y"])}

    step = in_parts(loss, has_aux=True)
    state, metrics = step(step.init(PARAMS), BATCHES[0])
    assert metrics["aux"]["w"].shape == (SHARDS, *PARAMS["layers"]["w"].shape)
    assert_same(metrics["aux"]["w"][2], PARAMS["layers"]["w"])
    assert metrics["aux"]["rows"].tolist() == [6] * SHARDS
    want, _ = on_one_device(scan_loss, SGD, PARAMS, BATCHES[:1])
    assert_close(state.params, want)


@pytest.mark.parametrize("steps", [deep(1), deep(3)])
def test_aux_has_the_types_of_a_replicated_step(steps: int):
    def loss(params: Any, batch: Any) -> Any:
        return scan_loss(params, batch), {"n": 5, "x": 0.5, "none": None, "up": np.arange(3) > 1}

    found = []
    for mode in layered.MODES:
        step = step_of(mode, loss, has_aux=True, accumulate_steps=steps)
        _, metrics = step(step.init(PARAMS), BATCHES[0])
        found.append(jax.tree.map(lambda x: (x.aval, x.tolist()), metrics["aux"]))
    assert found[0] == found[1] == found[2]


def test_keys_and_model_state_are_those_of_a_replicated_step():
    def loss(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        noise = jax.random.normal(rng, batch["x"].shape)
        value = scan_loss(params, {**batch, "x": batch["x"] + noise})
        return value, ({"mean": batch["x"].mean() + noise.mean()}, noise[0, 0])

    found = []
    for mode in ("replicated", "parts"):
        step = step_of(mode, loss, has_aux=True, model_state="mean")
        state = step.init(PARAMS, rng=5, model_state={"mean": jnp.float32(0)})
        for batch in BATCHES:
            state, metrics = step(state, batch)
        found.append(jax.device_get((state.params, state.model_state, metrics["aux"])))
    assert_close(*found)


# Other numbers of shards, other ways to rest.


OF_MOMENTUM = optax.sgd(0.01, momentum=0.9)


@pytest.mark.parametrize("clips", [deep(False), True])
def test_a_state_goes_on_in_another_way(clips: bool):
    optimizer = lambda: (
        optax.chain(optax.clip_by_global_norm(1.0), OF_MOMENTUM) if clips else OF_MOMENTUM
    )
    first = in_parts(optimizer=optimizer())
    whole = first.unshard(after(first, batches=BATCHES[:1]))
    for mode, number in (("replicated", 2), ("parts", 3)):
        step = step_of(mode, scan_loss, optimizer(), num_shards=number)
        whole = step.unshard(train(step, step.reshard(whole), BATCHES[1:2]))
    want, _ = on_one_device(scan_loss, optimizer(), PARAMS, [BATCHES[0], BATCHES[1], BATCHES[1]])
    assert_close(whole.params, want)


def test_a_checkpoint_goes_on_whole_and_in_parts(tmp_path: Path):
    state = None
    for mode, batch in zip(("parts", "replicated", "parts"), BATCHES, strict=True):
        step = step_of(mode, scan_loss, OF_MOMENTUM)
        with Checkpoints(tmp_path, step) as checkpoints:
            if state is None:
                state = step.init(PARAMS)
            else:
                state, _ = checkpoints.restore_latest(step.abstract_init(PARAMS))
            state, _ = step(state, batch)
            checkpoints.save(state)
    want, _ = on_one_device(scan_loss, OF_MOMENTUM, PARAMS, BATCHES)
    assert_close(state.params, want)


def test_a_step_may_run_in_a_jit_and_in_a_loop():
    step = in_parts()
    stacked = jax.tree.map(lambda *each: np.stack(each), *BATCHES)
    run = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches)[0])
    want, _ = on_one_device(scan_loss, SGD, PARAMS, BATCHES)
    assert_close(run(step.init(PARAMS), stacked).params, want)


def test_a_model_in_parts_can_be_evaluated_and_predicts():
    step = in_parts()
    state = after(step)
    params = jax.device_get(state.params)
    errors = lambda params, batch: layered.error(
        params, scanned(layered.embedded(params, batch), params["layers"]), batch
    )
    got = step.evaluate(state, BATCHES, errors)
    want = np.mean([scan_loss(params, batch) for batch in BATCHES])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    rows = step.predict(state, BATCHES, errors)
    np.testing.assert_allclose(rows.mean(), want, rtol=1e-5)
    assert_close(step.model(state), params)


@pytest.mark.parametrize("rule", ["sgd", "clip_by_global_norm"])
def test_parameters_too_small_to_split_train_as_well(rule: str):
    params = {"w": np.full((3, 4), 0.5, np.float32), "b": np.float32(0)}
    loss = lambda p, x: ((x @ p["w"] + p["b"]) ** 2).mean()
    batches = [layered.normal(8, 3) for _ in range(3)]
    step = in_parts(loss, ROWS[rule].make())
    want, _ = on_one_device(loss, ROWS[rule].make(), params, batches)
    assert_close(after(step, params, batches).params, want)
    assert "tiny" in step.describe()


def test_small_parameters_are_known_to_be_gathered_at_the_start():
    step = in_parts(lambda p, x: ((x @ p["w"]) ** 2).mean())
    step.abstract_init({"w": jax.ShapeDtypeStruct((64, 32), np.float32)})
    assert "gathered at the start of the step" in step.describe()


# Other leaves.


def _mixed(params: Any, batch: Any) -> Any:
    rotated = (batch @ params["complex"]).real + (batch @ params["complex"]).imag ** 2
    h = jnp.tanh(rotated + params["scalar"] + params["empty"].sum())
    return ((h * params["vector"][:576]) ** 2).mean() + (params["vector"][576:] ** 2).mean()


MIXED = {
    "complex": (layered.normal(64, 576) + 1j * layered.normal(64, 576)).astype(np.complex64) / 8,
    "scalar": np.float32(0.25),
    "empty": np.zeros((0, 5), np.float32),
    "vector": layered.normal(2049),
    "unread": layered.normal(128, 16),
}
ROWS_OF_64 = [layered.normal(24, 64) for _ in range(3)]


@pytest.mark.parametrize("gather_dtype", [deep(None), "float32"])
def test_complex_empty_and_odd_leaves(gather_dtype: Any):
    step = in_parts(_mixed, gather_dtype=gather_dtype)
    want, _ = on_one_device(_mixed, SGD, MIXED, ROWS_OF_64)
    state = after(step, MIXED, ROWS_OF_64)
    assert_close(state.params, want)
    assert state.params["complex"].addressable_shards[0].data.shape == (16, 576)


def _of_waves(params: Any, batch: Any) -> Any:
    turn = lambda h, w: (h + 0.5 * h @ w / (1 + jnp.abs(h) ** 2), None)
    return (jnp.abs(jax.lax.scan(turn, batch["x"] * (1 + 0j), params)[0]) ** 2).sum(-1).mean()


@pytest.mark.parametrize("mode", [deep("replicated"), deep("sharded"), "parts"])
@pytest.mark.parametrize("options", [{}, {"reduce_dtype": "bfloat16"}], ids=str)
def test_complex_layers(options: Any, mode: str):
    w = PARAMS["layers"]["w"]
    waves = (w + 1j * w[::-1]).astype(np.complex64)
    more = {"gather_dtype": "bfloat16"} if options and mode == "parts" else {}
    step = step_of(mode, _of_waves, **options, **more)
    want, _ = on_one_device(_of_waves, SGD, waves, BATCHES)
    assert moved(want, waves) > 1e-3
    assert_close(after(step, waves).params, want)
    assert LAYERS in {times for *_, times in sent(step, waves)}


def test_integer_leaves_are_kept():
    params = {**MIXED, "table": np.arange(4096).reshape(64, 64), "flags": np.arange(3)}
    loss = lambda p, x: _mixed(p, x + p["table"][0] / 64)
    step = in_parts(loss)
    state = after(step, params, ROWS_OF_64)
    rest = {name: params[name] for name in MIXED}
    of_rest = lambda p, x: _mixed(p, x + params["table"][0] / 64)
    want, _ = on_one_device(of_rest, SGD, rest, ROWS_OF_64)
    model = step.model(state)
    assert_close({name: model[name] for name in MIXED}, want)
    assert_same(model["table"], params["table"])


@pytest.mark.parametrize("reduce_dtype", [None, "float32"])
@pytest.mark.parametrize("mode", ["replicated", deep("sharded"), "parts"])
def test_64_bits_stay_64_bits(mode: str, reduce_dtype: Any):
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
        params, batches = wide(PARAMS), wide(BATCHES)
        step = step_of(mode, scan_loss, reduce_dtype=reduce_dtype)
        state = after(step, params, batches)
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float64"}
        want, _ = on_one_device(scan_loss, SGD, params, batches)
        assert_close(state.params, want, 1e-13 if reduce_dtype is None else 1e-6)


@pytest.mark.parametrize("name", ["remat", deep("remat of remat")])
def test_a_checkpoint_leaves_no_tracer_behind(name: str):
    with jax.checking_leaks():
        after(in_parts(CASES[name].loss), batches=BATCHES[:1])


@pytest.mark.parametrize("mode", ["replicated", "parts"])
def test_64_bits_may_be_used_in_32(mode: str):
    def narrow(h: Any, layers: Any) -> Any:
        layers = jax.tree.map(lambda x: x.astype(jnp.float32), layers)
        return scanned(h.astype(jnp.float32), layers)

    with jax.enable_x64(True):
        loss = through(narrow)
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), PARAMS)
        step = step_of(mode, loss)
        want, _ = on_one_device(loss, SGD, params, BATCHES)
        assert_close(after(step, params).params, want)


# What is said, and what is refused.


def test_a_step_says_that_parameters_are_sharded():
    step = in_parts(optimizer=optax.adam(1e-3))
    step.init(PARAMS)
    said = step.describe()
    assert "replicated" not in said
    assert "weight update sharded" in said


def refusal(**options: Any) -> str:
    with pytest.raises(ArgumentError) as found:
        make_train_step(scan_loss, options.pop("optimizer", SGD), num_shards=SHARDS, **options)
    return str(found.value)


def test_what_cannot_be_is_refused():
    assert "weight_update='replicated'" in refusal(params="sharded", weight_update="replicated")
    assert "params='sharded'" in refusal(gather_dtype="bfloat16")
    assert "gather_dtype must be bfloat16" in refusal(params="sharded", gather_dtype="int16")
    said = refusal(params="split")
    assert "params" in said
    assert "'sharded'" in said
    grouped = CrossShardOptimizer(SGD, group_assignment=[[0, 1], [2, 3]])
    assert "group_assignment" in refusal(params="sharded", optimizer=grouped)
