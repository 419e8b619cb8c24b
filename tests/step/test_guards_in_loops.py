"""Guards beside sums in loops: no more is sent, and what is not finite is left out and named."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

import crossshard
from crossshard.pipeline import Quantized
from tests.quick import deep, deep_but
from tests.step import layered
from tests.step.common import assert_close, on_one_device
from tests.step.layered import BATCHES, PARAMS, ROWS, SHARDS, scan_loss, step_of

RATE = 0.125
SGD = optax.sgd(RATE)
EACH = ROWS // SHARDS
REMAT = layered.CASES["remat"].loss


def assert_near(found: Any, want: Any) -> None:
    """All arrays are equal but for the rounding of sums of their largest number."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * max(1, abs(np.asarray(b)).max()))


def poisoned(*shards: int, value: float = np.nan, batch: int = 0) -> dict[str, Any]:
    """A batch in which one row of each of these shards has a target that is not finite."""
    bad = np.isin(np.arange(ROWS), [EACH * shard + 2 for shard in shards])
    return {**BATCHES[batch], "y": np.where(bad, value, BATCHES[batch]["y"]).astype(np.float32)}


def of_others(batch: Any, *shards: int) -> Any:
    """The rows of the other shards."""
    kept = ~np.isin(np.arange(ROWS) // EACH, shards)
    return jax.tree.map(lambda x: x[kept], batch)


def large(step: Any) -> tuple[list[Any], float]:
    """The large collectives of a step in which all is finite, and the bytes of all of them."""
    report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCHES[0]))
    always = [each for each in report.collectives if not each.in_branch]
    kinds = [(each.kind, each.times) for each in always if each.bytes_sent > 1 << 14]
    return sorted(kinds), sum(each.bytes_sent for each in always)


@pytest.mark.parametrize(
    ("mode", "nonfinite"),
    [deep(("sharded", "skip")), deep(("replicated", "quarantine")), ("parts", "quarantine")],
)
def test_guards_send_what_a_step_without_them_sends(mode: str, nonfinite: str):
    plain = large(step_of(mode, REMAT, optax.adam(0.1)))
    norms = ("local_grad_norm", "noise_scale", "grad_norm", "update_norm")
    guards: Any = {"nonfinite": nonfinite, "metrics": norms, "check_divergence": 1}
    guarded = large(step_of(mode, REMAT, optax.adam(0.1), **guards))
    assert guarded[0] == plain[0]
    assert guarded[1] <= 1.01 * plain[1]


def test_what_is_computed_again_does_not_read_the_state_of_the_optimizer():
    def carried(optimizer: Any) -> list[int]:
        step = step_of("parts", REMAT, optimizer, nonfinite="quarantine")
        lowered = step.lower(step.abstract_init(PARAMS), BATCHES[0]).as_text()
        return [
            line.count("%iterArg") for line in lowered.splitlines() if "stablehlo.while(" in line
        ]

    # XLA for TPUs makes copies of what a loop is given, in every step. The last is the update's.
    assert carried(optax.adam(0.1))[:-1] == carried(SGD)[:-1]


@pytest.mark.parametrize(
    ("mode", "value", "shards"),
    [
        deep(("replicated", np.nan, [1])),
        ("parts", np.nan, [1]),
        deep(("sharded", np.inf, [0, 3])),
        deep(("parts", np.inf, [3])),
    ],
    ids=str,
)
def test_the_others_train_as_one_device_on_their_rows(mode: str, value: float, shards: Any):
    step = step_of(mode, REMAT, SGD, nonfinite="quarantine")
    bad = poisoned(*shards, value=value)
    state, metrics = step(step.init(PARAMS), bad)
    state, after = step(state, BATCHES[1])
    found = metrics["nonfinite"]
    assert (int(found.shard), int(found.shards)) == (min(shards), len(shards))
    assert "embed" in found.describe(PARAMS)
    assert not bool(metrics["skipped"])
    assert int(after["nonfinite"].shard) == -1
    want, losses = on_one_device(REMAT, SGD, PARAMS, [of_others(bad, *shards), BATCHES[1]])
    assert_near(state.params, want)
    np.testing.assert_allclose(float(metrics["loss"]), losses[0], rtol=1e-5)


def test_a_skipped_step_names_the_shard_and_changes_nothing():
    step = step_of("sharded", REMAT, SGD, nonfinite="skip")
    first = step.init(PARAMS)
    state, metrics = step(first, poisoned(2))
    assert (int(metrics["nonfinite"].shard), bool(metrics["skipped"])) == (2, True)
    assert_close(state.params, PARAMS, 0)
    state, metrics = step(state, BATCHES[0])
    assert_close(state.params, on_one_device(REMAT, SGD, PARAMS, BATCHES[:1])[0])
    assert int(metrics["nonfinite"].shard) == -1


@pytest.mark.parametrize(
    ("mode", "steps"), [("replicated", 2), deep(("parts", 2)), deep(("sharded", 1))]
)
def test_the_leaf_of_one_layer_is_named(mode: str, steps: int):
    """A layer of which only the gradient of its weights is not finite, in the first microbatch."""

    @jax.custom_vjp
    def explode(w: Any, flag: Any) -> Any:
        return w

    explode.defvjp(
        lambda w, flag: (w, flag), lambda flag, g: (jax.numpy.where(flag, np.nan, g), None)
    )

    def loss(params: Any, batch: Any) -> Any:
        flag = batch["tag"].max() > 0
        turn = lambda h, p: layered.layer(h, {**p, "w": explode(p["w"], flag)})
        h = layered.scanned(layered.embedded(params, batch), params["layers"], turn)
        return layered.error(params, h, batch).mean()

    tag = (np.arange(ROWS) == 2 * EACH).astype(np.float32)
    options: Any = {"nonfinite": "quarantine", "loss_over": "shard", "accumulate_steps": steps}
    step = step_of(mode, loss, SGD, **options)
    state, metrics = step(step.init(PARAMS), {**BATCHES[0], "tag": tag})
    found = metrics["nonfinite"]
    assert (int(found.shards), bool(metrics["skipped"])) == (1, False)
    assert found.describe(PARAMS) == "the gradient of `layers/w` is not finite on shard 2"
    clean = [{**of_others(BATCHES[0], 2), "tag": 0 * of_others(tag, 2)}]
    assert_near(state.params, on_one_device(loss, SGD, PARAMS, clean)[0])


def test_all_shards_that_are_not_finite_skip_the_step():
    step = step_of("parts", scan_loss, SGD, nonfinite="quarantine")
    state, metrics = step(step.init(PARAMS), poisoned(0, 1, 2, 3))
    assert bool(metrics["skipped"])
    assert int(metrics["nonfinite"].shards) == SHARDS
    assert_close(state.params, PARAMS, 0)


def test_a_sum_that_overflows_is_told_from_summands_that_do():
    """Every shard's gradient is finite, and their sum is not."""

    def turn(h: Any, p: Any) -> Any:
        return h + 2e38 * p["w"][0, 0]

    def loss(params: Any, batch: Any) -> Any:
        return layered.scanned(0.0 * batch["y"], params["layers"], turn).mean()

    params = jax.tree.map(np.zeros_like, PARAMS)
    step = step_of("sharded", loss, SGD, nonfinite="quarantine")
    _, metrics = step(step.init(params), BATCHES[0])
    found = metrics["nonfinite"]
    assert bool(found.overflow)
    assert int(found.shard) == -1
    assert bool(metrics["skipped"])


def held_back(state: Any) -> Any:
    """What all shards together have not sent yet of the mean, by parameter."""
    return jax.tree.map(lambda x: np.asarray(x).sum(0), state.opt_state.aggregate.residual)


def some_layers(params: Any, batch: Any) -> Any:
    """A loss that uses two of the three layers."""
    h = layered.embedded(params, batch)
    for place in (0, 2):
        h = layered.layer(h, jax.tree.map(lambda x, place=place: x[place], params["layers"]))
    return layered.error(params, h, batch).mean()


def of_one_layer(params: Any, batch: Any) -> Any:
    """A loss that uses no other layer than the first."""
    first = jax.tree.map(lambda x: x[:1], params["layers"])
    return layered.error(
        params, layered.scanned(layered.embedded(params, batch), first), batch
    ).mean()


# What the rows of a batch weigh: of shards, and of batches, as unlike amounts as there are.
WEIGHTS = np.float32([np.arange(ROWS) % 5, np.arange(ROWS) == 20])


def weighted(params: Any, batch: Any) -> Any:
    """A loss of layers in a loop that divides by what its rows weigh."""
    h = layered.scanned(layered.embedded(params, batch), params["layers"])
    return (layered.error(params, h, batch) * batch["k"]).sum() / batch["k"].sum()


FEW: dict[str, tuple[Any, dict[str, Any]]] = {
    "checkpoint": (REMAT, {}),
    "a guard": (REMAT, {"nonfinite": "quarantine"}),
    "microbatches": (scan_loss, {"accumulate_steps": 2}),
    "some layers": (some_layers, {}),
    "one layer": (of_one_layer, {"nonfinite": "skip"}),
    "four bits": (REMAT, {"reduce_dtype": "int4"}),
    "weights": (weighted, {"weight": "k"}),
    "weights and microbatches": (weighted, {"weight": "k", "accumulate_steps": 2}),
    "weights and a guard": (weighted, {"weight": "k", "nonfinite": "quarantine"}),
}
QUICK_FEW = [("parts", "checkpoint"), ("replicated", "weights and microbatches")]
ALL_FEW = [*QUICK_FEW, ("replicated", "a guard"), ("parts", "microbatches")]
ALL_FEW += [("parts", "weights"), ("sharded", "weights and a guard")]
ALL_FEW += [("sharded", "some layers"), ("replicated", "some layers"), ("sharded", "one layer")]
ALL_FEW += [("parts", "four bits")]


def check_sent(mode: str, loss: Any, params: Any, rate: float, **options: Any) -> Any:
    """Check after each of two steps that what was sent and what is held back are the mean.

    Returns what is held back at the end.
    """
    step = step_of(mode, loss, optax.sgd(rate), **{"reduce_dtype": "int8", **options})
    state, sum_of_all = step.init(params), jax.tree.map(np.zeros_like, params)
    for batch, weights in zip(BATCHES, WEIGHTS, strict=False):
        batch = batch | {"k": weights} if "weight" in options else batch
        gradient = jax.jit(jax.grad(loss))(jax.tree.map(np.asarray, state.params), batch)
        sum_of_all = jax.tree.map(lambda a, b: a + np.asarray(b), sum_of_all, gradient)
        state, _ = step(state, batch)
        sent = jax.tree.map(lambda a, b: (a - np.asarray(b)) / rate, params, state.params)
        assert_near(jax.tree.map(np.add, sent, held_back(state)), sum_of_all)
    return held_back(state)


@pytest.mark.parametrize(("mode", "name"), deep_but(QUICK_FEW, ALL_FEW))
def test_what_is_sent_in_few_bits_and_what_is_held_back_are_the_mean(mode: str, name: str):
    loss, options = FEW[name]
    held = check_sent(mode, loss, PARAMS, RATE, **options)
    assert max(float(abs(x).max()) for x in jax.tree.leaves(held)) > 0


@pytest.mark.deep
def test_gradients_of_64_bits_have_norms_too():
    with jax.enable_x64(True):
        params, batch = jax.tree.map(np.float64, (PARAMS, BATCHES[0]))
        step = step_of("parts", REMAT, SGD, metrics=("local_grad_norm",))
        _, metrics = step(step.init(params), batch)
        each = [
            jax.tree.map(lambda x, i=i: x[i * EACH : (i + 1) * EACH], batch) for i in range(SHARDS)
        ]
        want = [float(optax.tree.norm(jax.grad(REMAT)(params, rows))) for rows in each]
        np.testing.assert_allclose(
            float(metrics["local_grad_norm"]), np.sqrt(np.mean(np.square(want))), rtol=1e-6
        )


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["parts", "replicated"])
def test_a_layer_in_a_group_of_layers_holds_back_its_own(mode: str):
    """Groups of layers are stacked; the loss does not use the first layer of the last group."""
    shapes = {"w": (2, 3, 192, 192), "b": (2, 3, 192)}
    # Small ones: what was sent is read from parameters, which are rounded.
    of_groups = {name: layered.normal(*shape, scale=0.05) for name, shape in shapes.items()}
    params = {**PARAMS, "layers": of_groups}

    def loss(params: Any, batch: Any) -> Any:
        groups = jax.tree.map(lambda x: x[:1], params["layers"])
        rest = jax.tree.map(lambda x: x[1][1:], params["layers"])
        of_group = lambda h, group: layered.scanned(h, group, jax.checkpoint(layered.layer))
        h = layered.scanned(layered.embedded(params, batch), groups, of_group)
        return layered.error(params, layered.scanned(h, rest), batch).mean()

    held = check_sent(mode, loss, params, 1 / 64, metrics=("local_grad_norm",))
    used = abs(held["layers"]["w"]).max((2, 3)) > 0
    np.testing.assert_array_equal(used, [[True, True, True], [False, True, True]])


def test_what_a_layer_holds_back_stays_while_a_loss_does_not_use_it():
    of_all, of_some = (
        step_of("sharded", f, SGD, reduce_dtype="int8") for f in (REMAT, some_layers)
    )
    state, _ = of_all(of_all.init(PARAMS), BATCHES[0])
    before = held_back(state)["layers"]["w"]
    state, _ = of_some(state, BATCHES[1])
    after = held_back(state)["layers"]["w"]
    assert abs(before[1]).max() > 0
    np.testing.assert_array_equal(after[1], before[1])
    assert (after[0] != before[0]).any()


@pytest.mark.parametrize("mode", ["parts", deep("replicated")])
def test_what_is_held_back_of_layers_is_overwritten(mode: str):
    """A step needs no more temporary memory to keep it than to drop it."""

    def temporary(**kept: Any) -> int:
        step = step_of(mode, scan_loss, SGD, reduce_dtype=Quantized("int8", **kept))
        large = jax.tree.map(lambda x: np.tile(x, (8,) + (1,) * (x.ndim - 1)), PARAMS["layers"])
        lowered = step.lower(step.abstract_init({**PARAMS, "layers": large}), BATCHES[0])
        return int(lowered.compile().memory_analysis().temp_size_in_bytes)

    without = temporary(error_feedback=False)
    for kind in (True, "bfloat16"):
        assert temporary(error_feedback=kind) <= 1.05 * without


@pytest.mark.deep
def test_a_shard_that_is_left_out_still_sends_what_it_held_back():
    step = step_of("parts", REMAT, SGD, nonfinite="quarantine", reduce_dtype="int8")
    first, _ = step(step.init(PARAMS), BATCHES[0])
    held, params = held_back(first), jax.tree.map(np.asarray, first.params)
    bad = poisoned(1)
    state, metrics = step(first, bad)
    assert int(metrics["nonfinite"].shard) == 1
    of_others_alone = jax.tree.map(np.asarray, jax.jit(jax.grad(REMAT))(params, of_others(bad, 1)))
    sent = jax.tree.map(lambda a, b: (a - np.asarray(b)) / RATE, params, state.params)
    want = jax.tree.map(np.add, of_others_alone, held)
    assert_near(jax.tree.map(np.add, sent, held_back(state)), want)


@pytest.mark.deep
def test_few_bits_are_sent_layer_by_layer():
    plain, few = (
        large(step_of("parts", REMAT, SGD, **options))
        for options in ({}, {"reduce_dtype": "int8", "nonfinite": "quarantine"})
    )
    sums = {"all-reduce", "reduce-scatter"}
    exchanges = [(kind, times) for kind, times in few[0] if kind == "all-to-all"]
    assert sorted(times for _, times in exchanges) == sorted(t for k, t in plain[0] if k in sums)
    assert not sums & {kind for kind, _ in few[0]}


WHOLE: dict[str, dict[str, Any]] = {
    "rounding at random": {"reduce_dtype": Quantized("int8", rounding="stochastic")},
    "a dynamic loss scale, beside few bits,": {"reduce_dtype": "int8", "loss_scale": "dynamic"},
    "the mean of 2 microbatches": {"metrics": "local_grad_norm", "accumulate_steps": 2},
}


@pytest.mark.parametrize("why", deep_but(["the mean of 2 microbatches"], WHOLE))
def test_a_step_says_what_needs_whole_gradients(why: str):
    step = step_of("parts", REMAT, SGD, **WHOLE[why])
    step.lower(step.abstract_init(PARAMS), BATCHES[0])
    assert f"since {why} needs each shard's own gradient" in step.describe()
