"""Sharded parameters: what is gathered, in which dtype, and leaves of every kind."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer
from tests.quick import deep
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
ONE_PART = f"f32[{PART},{WIDTH}]"
GATHER, SCATTER = ("all-gather", ONE_PART), ("reduce-scatter", f"f32[{WIDTH},{WIDTH}]")
SGD = optax.sgd(0.01)


def params_sharded(loss: Any = scan_loss, optimizer: Any = None, **options: Any) -> Any:
    return step_of("parts", loss, optimizer, **options)


def after(step: Any, params: Any = PARAMS, batches: Any = BATCHES, **init: Any) -> Any:
    """The state after a step on each batch."""
    return train(step, step.init(params, **init), batches)


def gathered(step: Any, params: Any = PARAMS) -> list[Any]:
    """What is gathered, and how often."""
    return [(arrays, times) for kind, arrays, times in sent(step, params) if kind == "all-gather"]


def test_a_device_has_a_part_of_the_bytes():
    memory = {}
    for mode in ("sharded", "parts"):
        step = step_of(mode, CASES["remat"].loss, optax.adam(1e-3))
        program = step.lower(step.abstract_init(PARAMS), BATCHES[0])
        memory[mode] = crossshard.inspect(program).memory
    split = PARAMS["embed"].nbytes + PARAMS["layers"]["w"].nbytes
    saved = split * (SHARDS - 1) // SHARDS
    assert memory["sharded"].argument - memory["parts"].argument == saved
    assert memory["sharded"].peak - memory["parts"].peak >= saved


# Dtypes.


@pytest.mark.parametrize("mode", ["replicated", "parts"])
def test_gradients_travel_in_16_bits_in_loops(mode: str):
    found = sent(step_of(mode, scan_loss, reduce_dtype="bfloat16"))
    in_loop = [arrays for _, arrays, times in found if times == LAYERS]
    # XLA for CPUs adds in 32 bits, so that bits are exchanged.
    assert [arrays for arrays in in_loop if "u16" in arrays]
    assert mode == "parts" or not [arrays for arrays in in_loop if "f32" in arrays]


def rounded(params: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16).astype(x.dtype), params)


def test_parameters_may_be_gathered_in_16_bits():
    step = params_sharded(gather_dtype="bfloat16")

    @jax.jit
    def plain(params: Any, batch: Any) -> Any:
        # Only what travels is rounded.
        seen = {**params, "embed": rounded(params["embed"])}
        seen["layers"] = {"w": rounded(params["layers"]["w"]), "b": params["layers"]["b"]}
        gradients = jax.jit(jax.grad(scan_loss))(seen, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients)

    state, params = step.init(PARAMS), PARAMS
    for batch in BATCHES:
        state, _ = step(state, batch)
        params = plain(params, batch)
        assert_close(state.params, params, 5e-6)
    assert [arrays for arrays, _ in gathered(step)] == [f"u16[{PART},{WIDTH}]"] * 2


def _in_16_bits(h: Any, layers: Any) -> Any:
    """A loop over weights that were converted before."""
    w = layers["w"].astype(jnp.bfloat16)
    body = lambda h, p: h + 0.5 * jnp.tanh((h.astype(w.dtype) @ p["w"]).astype(h.dtype) + p["b"])
    return scanned(h, {"w": w, "b": layers["b"]}, body)


def test_what_is_used_in_16_bits_is_gathered_in_16_bits():
    loss = through(_in_16_bits)
    step = params_sharded(loss)
    want, _ = on_one_device(loss, SGD, PARAMS, BATCHES)
    state = after(step)
    got, expected = np.asarray(state.params["layers"]["w"]), want["layers"]["w"]
    far = np.linalg.norm(expected - PARAMS["layers"]["w"])
    assert np.linalg.norm(got - expected) <= 1e-2 * far
    assert state.params["layers"]["w"].dtype == jnp.float32
    found = gathered(step)
    assert (f"u16[{PART},{WIDTH}]", LAYERS) in found
    assert all(arrays != ONE_PART or times == 1 for arrays, times in found)


def _in_32_bits(h: Any, layers: Any) -> Any:
    return scanned(h, jax.tree.map(lambda x: x.astype(jnp.float32), layers))


def test_parameters_of_16_bits_that_are_used_in_32_are_gathered_in_16():
    loss = through(_in_32_bits)
    halves = {**PARAMS, "layers": jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS["layers"])}
    step = params_sharded(loss)
    want, _ = on_one_device(loss, SGD, halves, BATCHES[:1])
    got = after(step, halves, BATCHES[:1]).params
    assert_close(jax.tree.map(lambda x: x.astype(jnp.float32), got), want, 4e-3)
    # Such a loop is over weights that are converted before it.
    assert (f"u16[{LAYERS},{PART},{WIDTH}]", 1) in gathered(step, halves)


def test_what_is_converted_twice_is_rounded_twice():
    def loss(params: Any, batch: Any) -> Any:
        # 1e5 is infinite in float16 and finite in bfloat16; 1 + 2**-8 + 2**-12 is rounded up once.
        seen = params.astype(jnp.float16).astype(jnp.bfloat16).astype(jnp.float32)
        return (seen * batch["x"].mean()).sum(), seen[:2, 0]

    params = np.full((WIDTH, WIDTH), 1 + 2**-8 + 2**-12, np.float32)
    params[1] = 1e5
    step = params_sharded(loss, has_aux=True)
    _, metrics = step(step.init(params), BATCHES[0])
    assert_same(metrics["aux"][0], loss(jnp.asarray(params), BATCHES[0])[1])
    assert [arrays for arrays, _ in gathered(step, params)] == [f"u16[{PART},{WIDTH}]"]


@pytest.mark.parametrize("options", [{}, {"gather_dtype": "bfloat16"}])
def test_gradients_of_many_uses_in_16_bits_add_up_in_32(options: dict[str, Any]):
    def loss(w: Any, x: Any) -> Any:
        outputs = [
            (x * (1 + i / 64)).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16) for i in range(64)
        ]
        return sum(out.astype(jnp.float32).mean() for out in outputs)

    params = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
    x = np.float32(np.random.default_rng(1).normal(1.5, 0.3, size=(2 * SHARDS, WIDTH)))
    step = params_sharded(loss, **options)
    (got,) = jax.tree.leaves(after(step, params, [x]).params)
    want, _ = on_one_device(loss, SGD, params, [x])
    moved, wanted = np.float64(got) - params, np.float64(want) - params
    assert np.linalg.norm(moved - wanted) < 2e-3 * np.linalg.norm(wanted)
    assert "gathered where it is used, in bfloat16" in step.describe()


# Options.


LOCAL = ["local_grad_norm", "noise_scale", "noise_variance", "noise_signal"]


def test_metrics_are_those_of_whole_arrays():
    found = []
    for mode in ("replicated", "parts"):
        step = step_of(mode, scan_loss, metrics=LOCAL)
        _, metrics = step(step.init(PARAMS), BATCHES[0])
        found.append({name: np.asarray(metrics[name]) for name in LOCAL})
    assert_close(*found, 1e-6, 1e-4)


def test_a_preprocessor_sees_whole_gradients_of_its_shard():
    clip = optax.clip_by_global_norm(0.5)
    optimizer = CrossShardOptimizer(optax.sgd(0.1), preprocess=clip)
    state = after(params_sharded(optimizer=optimizer))

    @jax.jit
    def plain(params: Any, batch: Any) -> Any:
        split = jax.tree.map(lambda x: x.reshape(SHARDS, -1, *x.shape[1:]), batch)
        of_one = lambda rows: clip.update(jax.grad(scan_loss)(params, rows), clip.init(params))[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g.mean(0), params, jax.lax.map(of_one, split))

    params = PARAMS
    for batch in BATCHES:
        params = plain(params, batch)
    assert_close(state.params, params)


@pytest.mark.parametrize(
    ("is_trained", "scatters"),
    [
        deep((lambda path: path == "['layers']['w']", [(*SCATTER, LAYERS)])),
        # All that is trained is tiny.
        (lambda path: path == "['out']", []),
    ],
    ids=["large", "tiny"],
)
def test_frozen_sharded_parameters_stay_as_they_are(is_trained: Any, scatters: list[Any]):
    named = lambda path, leaf=None: is_trained(jax.tree_util.keystr(path))
    step = params_sharded(wrt=named)
    state = after(step)

    def of_trained(trained: Any, batch: Any) -> Any:
        pick = lambda path, one, other: one if named(path) else other
        return scan_loss(jax.tree_util.tree_map_with_path(pick, trained, PARAMS), batch)

    want, _ = on_one_device(of_trained, SGD, PARAMS, BATCHES)
    assert_close(step.model(state), want)
    frozen = [leaf for leaf in jax.tree.leaves(state.frozen) if leaf.size >= WIDTH * WIDTH]
    assert [leaf.addressable_data(0).size * SHARDS for leaf in frozen] == [x.size for x in frozen]
    # The frozen embedding is gathered.
    assert sent(step) == sorted([(*GATHER, 1), (*GATHER, LAYERS), *scatters])
    other = params_sharded(wrt=named, num_shards=2)
    moved = other.unshard(other.reshard(step.unshard(state)))
    assert_same((moved.params, moved.frozen), (state.params, state.frozen))
    h = lambda params, batch: scanned(layered.embedded(params, batch), params["layers"])
    errors = lambda params, batch: layered.error(params, h(params, batch), batch)
    means = step.evaluate(state, BATCHES[:1], errors)
    np.testing.assert_allclose(means, scan_loss(step.model(state), BATCHES[0]), rtol=1e-5)


# Leaves of every kind.


def test_small_parameters_are_known_to_be_gathered_at_the_start():
    step = params_sharded(lambda p, x: ((x @ p["w"]) ** 2).mean())
    step.abstract_init({"w": jax.ShapeDtypeStruct((64, 32), np.float32)})
    assert "gathered at the start of the step" in step.describe()


def test_a_parameter_that_the_loss_leaves_out_is_said_to_be_so():
    step = params_sharded(layered.CASES["unused"].loss)
    after(step, batches=BATCHES[:1])
    assert "not gathered, since the loss does not use it: `layers/w`" in step.describe()


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
TABLE = np.arange(4096).reshape(64, 64)


def test_complex_empty_odd_and_integer_leaves():
    step = params_sharded(lambda p, x: _mixed(p, x + p["table"][0] / 64), gather_dtype="float32")
    rows_of_64 = [layered.normal(24, 64) for _ in range(3)]
    of_rest = lambda p, x: _mixed(p, x + TABLE[0] / 64)
    want, _ = on_one_device(of_rest, SGD, MIXED, rows_of_64)
    state = after(step, {**MIXED, "table": TABLE, "flags": np.arange(3)}, rows_of_64)
    model = step.model(state)
    assert_close({name: model[name] for name in MIXED}, want)
    assert_same(model["table"], TABLE)
    assert state.params["complex"].addressable_shards[0].data.shape == (16, 576)
