"""nonfinite: what is named, spread to nobody, raised and sent, beside what the combinations hold.

Those hold, by their factor of this name, that a bad shard, or a step, does not count.
"""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard import CrossShardOptimizer, Nonfinite, make_train_step
from crossshard.errors import ArgumentError, NonfiniteError
from tests.quick import deep
from tests.step.common import sgd_step

N, RATE = 4, 0.1
RNG = np.random.default_rng(0)
PARAMS = {
    "bias": RNG.normal(size=(40,)).astype(np.float32),
    "kernel": RNG.normal(size=(32, 40)).astype(np.float32),
}
# The shards that are bad in a step, with the first bad leaf of each.
BAD: list[dict[int, int]] = [{}, {2: 1}, {0: 0, 3: 1}]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """A shard's loss, whose gradient is multiplied by its scales, one for each leaf."""
    bias, kernel = (params[k] * batch["scale"][0, i] for i, k in enumerate(("bias", "kernel")))
    return (((batch["x"] @ kernel.T - 1) ** 2).sum(-1) + (batch["x"] * bias).sum(-1)).mean()


def batch_of(t: int) -> dict[str, np.ndarray]:
    scale = np.ones((N, 4, 2), np.float32)
    for shard, leaf in BAD[t].items():
        scale[shard, :, leaf] = [np.nan, np.inf][shard % 2]
    return {"x": X[t].reshape(-1, 40), "scale": scale.reshape(-1, 2)}


X = RNG.normal(size=(len(BAD), N, 4, 40)).astype(np.float32) / 6


def own(w: Any, x: Any) -> jax.Array:
    """A loss whose gradient is the mean of the rows."""
    return (w * x).sum() / len(x)


# What a reduction makes of finite gradients.


@pytest.mark.parametrize(
    ("action", "weight_update"), [("quarantine", "sharded"), ("skip", "replicated")]
)
def test_a_reduction_that_overflows_is_told_from_a_bad_shard(action: str, weight_update: str):
    step = sgd_step(own, 1.0, N, nonfinite=action, weight_update=weight_update)
    w = np.zeros((64, 64), np.float32)
    x = np.ones((N, 64, 64), np.float32)
    # Each is finite, and their sum is not, in the slice that the last shard updates.
    x[:, 60, 5] = 2e38
    state, metrics = step(step.init(w), x)
    assert [int(v) for v in metrics["nonfinite"]] == [-1, -1, 0, 1, 1]
    assert "overflows" in metrics["nonfinite"].describe(w)
    assert metrics["skipped"]
    np.testing.assert_array_equal(state.params, w)


@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]]])
def test_the_update_of_a_skipped_step_has_the_norm_0(groups: Any):
    opt = crossshard.CrossShardOptimizer(optax.sgd(1.0), group_assignment=groups)
    options: Any = {"num_shards": N, "nonfinite": "skip", "metrics": "update_norm"}
    step = crossshard.make_train_step(own, opt, **options)
    x = np.ones((N, 64, 64), np.float32)
    state, metrics = step(step.init(np.zeros((64, 64), np.float32)), x)
    np.testing.assert_allclose(metrics["update_norm"], 64)
    x[2, 0, 0] = np.nan
    _, metrics = step(state, x)
    assert np.all(metrics["skipped"])
    assert np.all(metrics["update_norm"] == 0)


def test_infinities_that_cancel_are_named():
    x = np.ones((N, 64, 64), np.float32)
    x[1, 3, 5], x[3, 3, 5] = np.inf, -np.inf
    step = sgd_step(own, 1.0, N, nonfinite="quarantine", weight_update="sharded")
    state, metrics = step(step.init(np.zeros((64, 64), np.float32)), x)
    assert [int(v) for v in metrics["nonfinite"]] == [1, 0, 2, 0, 1]
    np.testing.assert_array_equal(state.params, -np.ones((64, 64)))


@pytest.mark.parametrize("shape", [(3, 40), ()])
def test_it_is_found_wherever_it_is(shape: tuple[int, ...]):
    # Each shard looks through a part of what all have: the last ones are short, or overlap.
    step = sgd_step(own, 1.0, 3, nonfinite="skip")
    for place in range(0, 40, 13):
        x = np.ones((3, *shape), np.float32)
        x[2].reshape(-1)[place % max(1, x[2].size)] = np.nan
        x[2] = np.nan if shape == () else x[2]
        _, metrics = step(step.init(np.zeros(shape, np.float32)), x)
        assert metrics["skipped"]
        assert int(metrics["nonfinite"].shard) == 2


# With other stages, and what a shard keeps beside its gradient.


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False, momentum=0.5)(x)


@pytest.mark.parametrize("kind", [deep("mean"), "per_shard"])
def test_statistics_of_a_bad_shard_do_not_count(kind: str):
    variables = Normed().init(jax.random.key(0), np.zeros((2, 3)))

    def loss(params: Any, stats: Any, x: Any) -> Any:
        out, after = Normed().apply({"params": params, **stats}, x, mutable=["batch_stats"])
        return (out**2).sum(), (after, {"mean": x.mean()})

    step = sgd_step(
        loss,
        0.1,
        N,
        model_state=kind,
        nonfinite="quarantine",
        has_aux=True,
        aux_reduction="mean",
        loss_over="shard",
    )
    stats = {"batch_stats": variables["batch_stats"]}
    x = RNG.normal(size=(N, 5, 3)).astype(np.float32)
    x[1, 0] = np.nan
    state, metrics = step(step.init(variables["params"], model_state=stats), x.reshape(-1, 3))
    good = np.delete(x, 1, 0)
    np.testing.assert_allclose(metrics["aux"]["mean"], good.mean(), rtol=1e-5)
    each = np.where(np.arange(N)[:, None] == 1, 0, 0.5 * x.mean(1))
    want = 0.5 * good.mean((0, 1)) if kind == "mean" else each
    got = state.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(("action", "kind"), [("quarantine", "per_shard"), ("skip", "mean")])
def test_what_is_not_finite_beside_finite_gradients_is_named_and_spread_to_nobody(
    action: str, kind: str
):
    """NaN in a running mean would be on all shards, in every step to come."""
    x = RNG.normal(size=(N, 5)).astype(np.float32)
    good, bad = np.zeros((2, N, 5), np.float32)
    bad[1, 2] = np.nan

    def loss(w: Any, seen: Any, batch: Any) -> Any:
        in_loss, in_state = (jax.lax.stop_gradient(batch[k].sum()) for k in ("loss", "state"))
        return (w * batch["x"]).mean() + in_loss, {"mean": batch["x"].mean() + in_state}

    step = sgd_step(loss, 1.0, N, model_state=kind, nonfinite=action, loss_over="shard")
    others = np.delete(x, 1, 0)
    batch = {"x": x, "loss": good, "state": good}
    rows = lambda **changed: {k: v.ravel() for k, v in (batch | changed).items()}
    for what, named in (("loss", "the loss"), ("state", "the model state `mean`")):
        state = step.init(np.float32(3), model_state={"mean": jnp.float32(7)})
        state, metrics = step(state, rows(**{what: bad}))
        text = metrics["nonfinite"].describe(state.params, state.model_state)
        assert text == f"{named}, but no gradient, is not finite on shard 1"
        assert bool(metrics["skipped"]) == (action == "skip")
        if action == "skip":
            assert float(state.params) == 3
            assert np.all(np.asarray(state.model_state["mean"]) == 7)
            continue
        np.testing.assert_allclose(state.params, 3 - others.mean(), rtol=1e-6)
        each = np.where(np.arange(N) == 1, 7, x.mean(1))
        want = others.mean() if kind == "mean" else each
        np.testing.assert_allclose(np.squeeze(state.model_state["mean"]), want, rtol=1e-5)
        # And in the next step nothing is left of it.
        state, metrics = step(state, rows())
        assert int(metrics["nonfinite"].shards) == 0


@pytest.mark.parametrize("action", ["quarantine", "raise"])
def test_infinities_in_a_model_state_may_be_meant(action: str):
    def loss(w: Any, seen: Any, x: Any) -> Any:
        own = (w * x).mean()
        return own, {"best": jnp.minimum(seen["best"], own), "mask": seen["mask"]}

    step = sgd_step(loss, 1.0, N, model_state="mean", loss_over="shard", nonfinite=action)
    before = {"best": jnp.float32(np.inf), "mask": jnp.float32([0, -np.inf, np.nan])}
    state = step.init(np.float32(1), model_state=before)
    for _ in range(3):
        state, _ = step(state, np.ones(N, np.float32))
    step.finish(jax.device_get(state))
    assert (int(state.step), float(state.params)) == (3, -2)


def test_virtual_shards_have_a_weight_each():
    loss = lambda w, batch: (w * batch["x"] * batch["n"]).sum() / batch["n"].sum()
    batch = {"x": np.arange(16, dtype=np.float32), "n": np.float32(np.arange(16) % 4 > 0)}
    step = sgd_step(loss, 1.0, 2, weight="n", virtual_shards=8, nonfinite="skip")
    state, metrics = step(step.init(np.float32(3)), batch)
    assert int(metrics["nonfinite"].shards) == 0
    want = 3 - (batch["x"] * batch["n"]).sum() / batch["n"].sum()
    np.testing.assert_allclose(state.params, want, rtol=1e-6)


# What it costs.


@pytest.mark.parametrize(
    ("action", "preprocess"),
    [("quarantine", None), ("skip", None), ("quarantine", optax.identity())],
)
def test_a_step_sends_more_only_if_something_is_not_finite(action: str, preprocess: Any):
    opt = CrossShardOptimizer(optax.sgd(RATE), nonfinite=action, preprocess=preprocess)
    step = make_train_step(
        loss_fn, opt, num_shards=N, weight_update="replicated", loss_over="shard"
    )
    found = crossshard.inspect(step.lower(step.abstract_init(PARAMS), batch_of(0)))
    # The gradients, and one number that says whether they are finite.
    assert [bool(each.bytes_sent) for each in found.counted] == [True, False]
    rare = [each for each in found.collectives if not each.counted]
    assert all(each.in_branch and not each.in_loop for each in rare)
    # Gradients again, or the report alone. What preprocess reads is looked through before it.
    sent = sum(each.bytes_sent for each in rare) / found.bytes_sent
    assert sent == 0 if preprocess else sent > 1 if action == "quarantine" else 0 < sent < 0.01
    assert "at most" not in str(found)


@pytest.mark.parametrize(
    ("action", "weight_update"), [("quarantine", "sharded"), ("skip", "replicated")]
)
def test_xla_copies_no_array_that_a_skipped_step_keeps(action: str, weight_update: str):
    kernel = np.zeros((64, 512), np.float32)
    opt = CrossShardOptimizer(optax.adamw(RATE), nonfinite=action)
    loss = lambda kernel, x: ((x @ kernel) ** 2).mean()
    step = make_train_step(loss, opt, num_shards=2, weight_update=weight_update)
    lowered = step.lower(step.init(kernel), np.ones((4, 64), np.float32))
    assert not re.findall(r"= f32\[\d+,512\]\S* copy\(.*", lowered.compile().as_text())


# Raising.


def make(action: Any, number: int = N, **options: Any) -> Any:
    return sgd_step(loss_fn, RATE, number, nonfinite=action, loss_over="shard", **options)


@pytest.mark.parametrize(
    ("action", "calls", "match"),
    [
        ("raise", [0, 1, 2, 0], "The gradient of `kernel` is not finite on shard 2. "),
        (Nonfinite("skip", 2), [1, 0, 1, 2, 0, 0], "in 2 steps in a row; .*`bias` .* shard 0, and"),
        (Nonfinite("quarantine", 1), [1, 0, 0], "shard 2"),
    ],
)
def test_too_many_in_a_row_raise_and_leave_a_state_that_is_good(
    action: Any, calls: list[int], match: str
):
    step = make(action)
    state = step.init(PARAMS)
    for t in calls[:-1]:
        state, _ = step(state, batch_of(t))
    with pytest.raises(NonfiniteError, match=match):
        step(state, batch_of(calls[-1]))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    # It is told once, also of the step after it; who goes on may do so.
    for _ in range(3):
        state, _ = step(state, batch_of(0))
    step.finish(state)


# What is refused, and what is said.


def test_what_contradicts_it_is_refused():
    for number in (0, -1, 1.5, True, "3"):
        with pytest.raises(crossshard.CrossshardError, match="max_consecutive must be"):
            Nonfinite("skip", number)
    opt = CrossShardOptimizer(optax.sgd(0.1), nonfinite="raise")
    with pytest.raises(ArgumentError, match=r"read state\.nonfinite"):
        opt.update(1.0, opt.init(1.0))


def test_it_is_described():
    assert make("quarantine")._config.describe() == (
        "local gradient → quarantine → weigh → mean over all shards → skip if not finite → update"
    )
    found = crossshard.pipeline.NonfiniteState(3, 1, 2, False, 1)
    assert (
        found.describe(PARAMS) == "the gradient of `kernel` is not finite on shard 3, and on 1 more"
    )
    # A model, or its state, may be a single array, which has no name.
    bare = lambda leaf: found._replace(leaf=leaf).describe(np.ones(3), np.ones(3))
    assert bare(0) == "the gradient is not finite on shard 3, and on 1 more"
    assert bare(2) == "the model state, but no gradient, is not finite on shard 3, and on 1 more"
    assert dataclasses.replace(Nonfinite("raise"), max_consecutive=9).max_consecutive == 1
