"""model_state: state that a loss returns, averaged over the shards or one for each."""

import contextlib
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, LossError
from crossshard.step import by_numbers
from tests.quick import deep
from tests.step import common
from tests.step.common import sgd_step, train

SHARDS = 8
RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(3, 24, 4)) + 1)
GROUPS = [[0, 2, 4, 6], [1, 3, 5, 7]]


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.BatchNorm(use_running_average=False, momentum=0.9)(nn.Dense(40, use_bias=False)(x))
        return nn.Dense(40)(jnp.tanh(x))


VARIABLES = Normed().init(jax.random.key(0), X[0])
PARAMS, STATS = VARIABLES["params"], {"batch_stats": VARIABLES["batch_stats"]}


def loss_fn(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, Any]:
    out, after = Normed().apply({"params": params, **stats}, batch, mutable=["batch_stats"])
    return ((out - 1) ** 2).mean(), after


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "clip": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
}


def of_one_device(kind: str, optimizer: Any, shards: int) -> tuple[Any, Any]:
    """The parameters, and the state of each shard, by vmap."""
    params, own = PARAMS, optimizer.init(PARAMS)
    each = jax.jit(jax.vmap(jax.value_and_grad(loss_fn, has_aux=True), (None, 0, 0)))
    stats = jax.tree.map(lambda x: jnp.stack([x] * shards), STATS)
    for batch in X:
        rows = batch.reshape(shards, -1, batch.shape[-1])
        (_, stats), gradients = each(params, stats, rows)
        if kind == "mean":
            stats = jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), stats)
        gradient = jax.tree.map(lambda g: g.mean(0), gradients)
        updates, own = optimizer.update(gradient, own, params)
        params = optax.apply_updates(params, updates)
    return params, stats


assert_close = functools.partial(common.assert_close, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mean", deep("per_shard")])
@pytest.mark.parametrize(
    ("name", "weight_update"),
    [("sgd", "replicated"), deep(("clip", "sharded"))],
)
def test_batch_statistics_of_linen(name: str, kind: str, weight_update: str):
    step = make_train_step(
        loss_fn,
        OPTIMIZERS[name],
        num_shards=8,
        model_state=kind,
        weight_update=weight_update,
        loss_over="shard",
    )
    state = train(step, step.init(PARAMS, model_state=STATS), X)
    params, stats = of_one_device(kind, OPTIMIZERS[name], SHARDS)
    merged = jax.tree.map(lambda x: x.mean(0), stats)
    assert_close(step.model(state), (params, merged))
    assert_close(state.model_state, merged if kind == "mean" else stats)
    other = make_train_step(loss_fn, OPTIMIZERS[name], num_shards=4, model_state=kind)
    assert_close(other.model(other.reshard(step.unshard(state))), (params, merged))
    if kind == "per_shard":
        assert_close(step.model(state, shard=3)[1], jax.tree.map(lambda x: x[3], stats))


def test_each_group_averages_its_own():
    opt = CrossShardOptimizer(optax.sgd(0.1), group_assignment=GROUPS)
    step = make_train_step(loss_fn, opt, num_shards=8, model_state="mean", loss_over="shard")
    state, _ = step(step.init(PARAMS, model_state=STATS), X[0])
    for shard, group in ((0, GROUPS[0]), (5, GROUPS[1])):
        rows = X[0].reshape(8, 3, 4)[np.array(group)]
        each = jax.vmap(jax.value_and_grad(loss_fn, has_aux=True), (None, None, 0))
        (_, stats), gradients = jax.jit(each)(PARAMS, STATS, rows)
        params = jax.tree.map(lambda p, g: p - 0.1 * g.mean(0), PARAMS, gradients)
        merged = jax.tree.map(lambda x: x.mean(0), stats)
        assert_close(step.model(state, shard=shard), (params, merged))


def test_means_travel_with_the_loss():
    step = make_train_step(
        loss_fn, OPTIMIZERS["sgd"], num_shards=8, model_state="mean", loss_over="shard"
    )
    state = step.abstract_init(PARAMS, model_state=STATS)
    report = crossshard.inspect(step.lower(state, X[0]))
    assert [each.kind for each in report.collectives] == ["all-reduce"]
    numbers = sum(leaf.size for leaf in jax.tree.leaves((PARAMS, STATS))) + 1
    assert report.bytes_sent == pytest.approx(2 * 7 / 8 * 4 * numbers)
    assert "model state: " in step.describe()


# Weights.


def counting(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """A mean that is NaN without rows, and a count of steps."""
    return counted(batch["mask"].sum(), params, state, batch)


def bounded(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    """A mean that is 0 without rows."""
    return counted(jnp.maximum(batch["mask"].sum(), 1), params, state, batch)


def counted(by: jax.Array, params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    mean = (batch["x"].sum(1) * batch["mask"]).sum() / by
    return params * mean, {"mean": 0.5 * (state["mean"] + mean), "count": state["count"] + 1}


START = {"mean": np.float32(2), "count": 3}


@pytest.mark.parametrize(
    ("loss", "kind", "shards", "microbatches"),
    [
        (counting, "mean", 4, 1),
        (counting, "mean", 2, 2),
        (counting, "per_shard", 2, 2),
        deep((counting, "per_shard", 4, 1)),
        (bounded, "mean", 4, 1),
        deep((bounded, "mean", 2, 2)),
        (bounded, "per_shard", 2, 2),
    ],
)
def test_what_has_no_weight_does_not_count(loss: Any, kind: str, shards: int, microbatches: int):
    options = {"model_state": kind, "weight": "mask", "accumulate_steps": microbatches}
    step = sgd_step(loss, 0.1, shards, **options)
    state = step.init(np.float32(1), model_state=START)
    state, _ = step(state, {"x": X[0][:8], "mask": np.zeros(8, bool)})
    assert_close(step.model(state), (1.0, START))
    # Without rows: shards 1 and 2 of 4, or the second microbatch of 0, and the first of 1.
    mask = np.array([1, 1, 0, 0, 0, 0, 1, 0], bool)
    state, metrics = step(state, {"x": X[0][:8], "mask": mask})
    rows = X[0][:8].sum(1)
    own = 0.5 * (2 + np.array([rows[:2].mean(), rows[6]]))
    params, merged = step.model(state)
    np.testing.assert_allclose(metrics["loss"], rows[mask > 0].mean(), rtol=1e-5)
    np.testing.assert_allclose(params, 1 - 0.1 * rows[mask > 0].mean(), rtol=1e-5)
    if kind == "mean":
        np.testing.assert_allclose(merged["mean"], (2 * own[0] + own[1]) / 3, rtol=1e-6)
        assert merged["count"] == 4
    else:
        means = {4: [own[0], 2, 2, own[1]], 2: own}[shards]
        np.testing.assert_allclose(state.model_state["mean"], means, rtol=1e-6)
        # No row changes a count of steps.
        np.testing.assert_array_equal(state.model_state["count"], [4] * shards)


# Microbatches.


def follow(w: Any, state: Any, x: Any) -> tuple[Any, Any]:
    """Compare with a teacher that follows; warm up; keep a mean of the rows."""
    apart = ((x @ w - x[:, ::-1] @ state["teacher"]) ** 2).mean()
    after = {
        "teacher": 0.9 * state["teacher"] + 0.1 * w,
        "step": state["step"] + 1,
        "seen": 0.9 * state["seen"] + 0.1 * x.mean(0),
    }
    return apart * jnp.minimum(1, (state["step"] + 1) / 10), after


FOLLOWED = {"teacher": np.ones(4, np.float32), "step": 0, "seen": np.zeros(4, np.float32)}


class Follower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.zeros(4))
        self.teacher, self.step = nnx.BatchStat(jnp.ones(4)), nnx.BatchStat(jnp.zeros((), int))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def follow_in_module(model: Follower, x: Any) -> Any:
    state = {"teacher": model.teacher[...], "step": model.step[...], "seen": jnp.zeros(4)}
    apart, after = follow(model.w[...], state, x)
    model.teacher[...] = jax.lax.stop_gradient(after["teacher"])
    model.step[...] = after["step"]
    return apart


@pytest.mark.parametrize("kind", ["mean", "per_shard"])
@pytest.mark.parametrize("shards", [1, 2])
def test_microbatches_see_the_state_before_the_step(kind: str, shards: int) -> None:
    step = sgd_step(follow, 0.1, shards, model_state=kind, accumulate_steps=3)
    state = step.init(jnp.zeros(4), model_state=FOLLOWED)
    w, of_one = jnp.zeros(4), FOLLOWED
    for x in X:
        state, metrics = step(state, x)
        (value, of_one), slope = jax.value_and_grad(follow, has_aux=True)(w, of_one, x)
        w = w - 0.1 * slope
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    got, after = step.model(state)
    # What a state of each shard keeps of rows is that of three small steps.
    kept = lambda tree: {k: x for k, x in tree.items() if kind == "mean" or k != "seen"}
    assert_close((got, kept(after)), (w, kept(of_one)))


def test_microbatches_of_a_module_see_the_state_before_the_step() -> None:
    def noisy(model: Follower, x: Any) -> Any:
        noise = model.dropout(jnp.ones(64))
        return follow_in_module(model, x), noise

    step = sgd_step(noisy, 0.1, 2, has_aux=True, accumulate_steps=3)
    state = step.init(Follower(nnx.Rngs(0)))
    w, of_one = jnp.zeros(4), FOLLOWED
    for x in X:
        state, metrics = step(state, x)
        (_, of_one), slope = jax.value_and_grad(follow, has_aux=True)(w, of_one, x)
        w = w - 0.1 * slope
    model = step.model(state)
    got = model.w[...], model.teacher[...], model.step[...]
    assert_close(got, (w, of_one["teacher"], of_one["step"]))
    # Each microbatch of each shard draws its own noise.
    assert len(np.unique(np.reshape(metrics["aux"], (6, 64)), axis=0)) == 6


def test_microbatches_of_a_module_count_their_rows_and_the_step_once() -> None:
    class Counted(nnx.Module):
        def __init__(self) -> None:
            self.w, self.average = nnx.Param(jnp.ones(4)), nnx.metrics.Average()
            self.step, self.settings = nnx.Variable(jnp.int32(0)), [1, {"not": "hashable"}]

    def loss(model: Counted, x: Any) -> Any:
        losses = (x @ model.w[...]) ** 2
        model.average.update(values=jax.lax.stop_gradient(losses))
        model.step[...] += 1
        return losses.mean()

    step = sgd_step(loss, 0.01, 2, accumulate_steps=3)
    state, w, seen = step.init(Counted()), jnp.ones(4), []
    for x in X:
        state, _ = step(state, x)
        seen.append((x @ w) ** 2)
        w = w - 0.01 * jax.grad(lambda w, x: ((x @ w) ** 2).mean())(w, x)
    model = step.model(state)
    assert_close((model.w[...], model.average.compute()), (w, jnp.concatenate(seen).mean()))
    assert model.step[...] == len(X)
    # Its settings have no hash.
    assert step.predict(state, [X[0]], lambda model, x: x @ model.w[...]).shape == (len(X[0]),)


@pytest.mark.parametrize("is_mean", [True, False])
def test_numbers_see_the_state_before_the_step_too(is_mean: bool) -> None:
    """Microbatches of one shard, of whose loss and state no trace shows that they are means."""

    def in_order(w: Any, state: Any, x: Any) -> tuple[Any, Any]:
        in_order = jnp.sort(x, 0) if is_mean else jnp.sort(x, 0)[-4:]
        after = {"step": state["step"] + 1, "seen": 0.9 * state["seen"] + 0.1 * in_order.mean(0)}
        return jnp.sort((x @ w) ** 2).mean() * (state["step"] + 1), after

    step = sgd_step(in_order, 0.01, 1, model_state="mean", accumulate_steps=3)
    w, of_one = jnp.ones(4), {"step": 0, "seen": np.zeros(4, np.float32)}
    state = step.init(w, model_state=of_one)
    if not is_mean:
        with pytest.raises(LossError, match=r"is a mean over rows: sort.*it is not so"):
            step(state, X[0])
        return
    for x in X:
        state, _ = step(state, x)
        slope, of_one = jax.grad(in_order, has_aux=True)(w, of_one, x)
        w = w - 0.01 * slope
    assert_close(step.model(state), (w, of_one))
    assert "by numbers its model state is that of the whole batch" in step.describe()


# Equinox, aux.


BATCH = {"x": X[0], "mask": np.ones(24)}


def test_a_count_of_rows_cannot_be_averaged():
    def loss(w: Any, state: Any, batch: Any) -> Any:
        count = state["count"] + batch["mask"].sum().astype(int)
        return w * batch["x"].mean(), {"mean": state["mean"], "count": count}

    step = sgd_step(loss, 0.1, 2, model_state="mean")
    with pytest.raises(ArgumentError, match=r"model_state\['count'\] \(int32\).*'per_shard'"):
        step(step.init(np.float32(1), model_state=START), BATCH)
    step = sgd_step(loss, 0.1, 2, model_state="per_shard")
    state, _ = step(step.init(np.float32(1), model_state=START), BATCH)
    np.testing.assert_array_equal(state.model_state["count"], [15, 15])


@pytest.mark.parametrize("number", [len, lambda x: jnp.ones(len(x), int).sum()])
def test_a_number_of_rows_is_not_that_of_the_batch(number: Any):
    loss = lambda w, state, x: (w * x.mean(), {"seen": state["seen"] + number(x)})
    start = {"seen": np.int32(0)}
    step = sgd_step(loss, 0.1, 2, model_state="mean")
    with pytest.raises(LossError, match=r"model_state\['seen'\] \(int32\).*the number of rows"):
        step(step.init(np.float32(1), model_state=start), X[0])
    step = sgd_step(loss, 0.1, 2, model_state="mean", loss_over="batch")
    state, _ = step(step.init(np.float32(1), model_state=start), X[0])
    assert state.model_state["seen"] == len(X[0])


# What is averaged has to be a mean over rows.

W = np.float32(RNG.normal(size=(4, 5)))
OF_ROWS = {
    "mean": lambda old, h: 0.9 * old + 0.1 * h.mean(0),
    "squares": lambda old, h: 0.9 * old + 0.1 * (h**2).mean(0),
    "share of each": lambda old, h: jax.nn.one_hot(h.argmax(1), 5).mean(0),
    "of parameters": lambda old, h: old + (W**2).sum(0),
    "variance of all": lambda old, h: (
        jax.lax.pmean((h**2).mean(0), "shards") - jax.lax.pmean(h.mean(0), "shards") ** 2
    ),
}
OF_ALL_ROWS = {
    "variance": (lambda old, h: 0.9 * old + 0.1 * h.var(0), "a comparison of rows"),
    "largest": (lambda old, h: jnp.maximum(old, h.max(0)), "a comparison of rows"),
    "sign": (lambda old, h: old + jnp.sign(h.mean(0) - 0.1), "sign of a sum over rows"),
    "projected": (
        lambda old, h: jax.nn.relu(old + h.mean(0) + 9),
        "a comparison of rows: a bound of a sum over rows",
    ),
    "sum": (lambda old, h: h.sum(0), "a sum over the rows"),
    "codes": (
        lambda old, h: old + jax.ops.segment_sum(h.sum(1), h.argmax(1), 5),
        "terms that depend differently on the number of rows",
    ),
    "ratio": (lambda old, h: (h > 0).sum(0) / (h > 0).sum(), "a ratio of two sums"),
}


def step_with(after: Any, shards: int, **options: Any) -> Any:
    loss = lambda w, old, x: (((x @ w) ** 2).mean(), after(old, x @ w))
    return sgd_step(loss, 0.1, shards, model_state="mean", axis_name="shards", **options)


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_mean_over_rows_is_that_of_the_batch(name: str):
    found = []
    for shards in (1, 8):
        step = step_with(OF_ROWS[name], shards)
        state, _ = step(step.init(W, model_state=np.ones(5, np.float32)), X[0])
        found.append(jax.device_get(step.model(state)))
    assert_close(*found)


OF_WEIGHTED = {
    "what counts": lambda old, h, mask: (h * mask).sum(0) / mask.sum(),
    "what counts, or 0": lambda old, h, mask: (h * mask).sum(0) / jnp.maximum(mask.sum(), 1),
    "all of all": lambda old, h, mask: old + jax.lax.pmean(h.mean(0), "shards"),
    "sum of all": lambda old, h, mask: old + jax.lax.psum((h * mask).sum(0), "shards"),
}
OF_OTHER_WEIGHTS = {
    "all": (lambda old, h, mask: h.mean(0), "weight= lets shards differ"),
    "others": (lambda old, h, mask: (h * (1 - mask)).sum(0) / (1 - mask).sum(), "is not what it"),
}
MASKED = {"x": X[0], "mask": np.float32(np.arange(24) % 4 < 1 + np.arange(24) // 12)}


def step_with_weights(after: Any, shards: int, **options: Any) -> Any:
    def loss(w: Any, old: Any, batch: Any) -> Any:
        h, mask = batch["x"] @ w, batch["mask"][:, None]
        return (h**2 * mask).sum() / mask.sum(), after(old, h, mask)

    weight = "mask" if shards > 1 else None
    options = {"model_state": "mean", "axis_name": "shards", "weight": weight, **options}
    return sgd_step(loss, 0.1, shards, **options)


@pytest.mark.parametrize("name", OF_WEIGHTED)
def test_a_mean_over_what_the_weight_counts_is_that_of_the_batch(name: str):
    found = []
    for shards in (1, 4):
        step = step_with_weights(OF_WEIGHTED[name], shards)
        state, _ = step(step.init(W, model_state=np.ones(5, np.float32)), MASKED)
        found.append(jax.device_get(step.model(state)))
    assert_close(*found)


@pytest.mark.parametrize("name", OF_OTHER_WEIGHTS)
def test_a_mean_over_what_another_weight_counts_is_not_averaged(name: str):
    after, reason = OF_OTHER_WEIGHTS[name]
    step = step_with_weights(after, 4)
    with pytest.raises(LossError, match=f"model_state is .*{reason}.* jax.lax.pmean"):
        step.lower(step.abstract_init(W, model_state=np.ones(5, np.float32)), MASKED)


NOT_SO = "weight= is what model_state divides by.*it is not so"
OF_CHANGED_WEIGHTS = {
    "more than one": (lambda old, h, mask: (h * mask).sum(0) / (mask.sum() + 1), "is not what it"),
    "at least two": (
        lambda old, h, mask: (h * mask).sum(0) / jnp.maximum(mask.sum(), 2),
        "is not what it",
    ),
    "unmasked": (lambda old, h, mask: h.sum(0) / jnp.maximum(mask.sum(), 1), NOT_SO),
    "by parameters": (
        lambda old, h, mask: (h * gate(h, mask)).sum(0) / gate(h, mask).sum(),
        NOT_SO,
    ),
}


def gate(h: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(h[:, :1]) * mask


@pytest.mark.parametrize("name", OF_CHANGED_WEIGHTS)
def test_a_mean_that_divides_by_more_than_the_weight_is_not_averaged(name: str):
    after, reason = OF_CHANGED_WEIGHTS[name]
    step = step_with_weights(after, 4)
    state = step.init(W, model_state=np.ones(5, np.float32))
    with pytest.raises(LossError, match=reason):
        step(state, MASKED)


def test_a_batch_in_which_nothing_counts_shows_nothing():
    step = step_with_weights(OF_WEIGHTED["what counts, or 0"], 4)
    state = step.init(W, model_state=np.ones(5, np.float32))
    with pytest.raises(LossError, match=r"no row of this batch counts, .* another batch"):
        step(state, {**MASKED, "mask": np.zeros(24, np.float32)})
    state, _ = step(state, MASKED)
    assert "by numbers" in step.describe()


@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_a_state_of_all_rows_is_not_averaged(name: str):
    after, reason = OF_ALL_ROWS[name]

    def lower(shards: int, **options: Any) -> None:
        step = step_with(after, shards, **options)
        step.lower(step.abstract_init(W, model_state=np.ones(5, np.float32)), X[0])

    with pytest.raises(LossError, match=f"model_state is .*{reason}.* loss_over='batch'"):
        lower(2)
    # Where each shard's own is meant, where all rows are given, and where there is one shard.
    lower(2, loss_over="shard")
    lower(2, loss_over="batch")
    lower(1)


# The state of a module is each shard's own.


class Codebook(nnx.Module):
    """Losses around a running mean, and a count of steps."""

    def __init__(self, axis: str | None = None, reads: bool = True):
        self.w, self.mean = nnx.Param(jnp.float32(W)), nnx.BatchStat(jnp.zeros(5))
        self.steps, self.axis, self.reads = nnx.BatchStat(jnp.int32(0)), axis, reads

    def __call__(self, x: Any) -> Any:
        hidden = x @ self.w[...]
        mean = hidden.mean(0) if self.axis is None else jax.lax.pmean(hidden.mean(0), self.axis)
        around, self.steps[...] = self.mean[...] if self.reads else 0.0, self.steps[...] + 1
        self.mean[...] = jax.lax.stop_gradient(0.5 * self.mean[...] + 0.5 * mean)
        return ((hidden - around) ** 2).mean() * (1 + self.steps[...])


def test_a_loss_that_reads_a_state_of_each_shards_rows_is_refused():
    step_of = lambda **options: sgd_step(lambda model, x: model(x), 0.1, 4, **options)
    step = step_of()
    with pytest.raises(LossError, match=r"reads the state model\['mean'\], which each shard"):
        step(step.init(Codebook()), X[0])
    # What is the same on all shards, and what the loss does not read, may be made of rows.
    found = [
        train(step, step.init(model), [X[0]] * 3)
        for step, model in (
            (step_of(), Codebook("shards")),
            (step_of(loss_over="batch"), Codebook()),
        )
    ]
    common.assert_close(*(jax.device_get(state.params) for state in found), atol=1e-5)
    step = step_of()
    train(step, step.init(Codebook(reads=False)), [X[0]] * 2)


def test_so_is_one_that_reads_it_by_way_of_another_state_or_of_each_shard():
    def around_old(w: Any, state: Any, x: Any) -> Any:
        hidden, (mean, old) = x @ w, state
        return ((hidden - old) ** 2).mean(), (0.5 * mean + 0.5 * hidden.mean(0), mean)

    def around_mean(w: Any, mean: Any, x: Any) -> Any:
        return ((x @ w - mean) ** 2).mean(), 0.5 * mean + 0.5 * (x @ w).mean(0)

    zeros = np.zeros(5, np.float32)
    for loss, start in ((around_old, (zeros, zeros)), (around_mean, zeros)):
        step = sgd_step(loss, 0.1, 4, model_state="per_shard")
        with pytest.raises(LossError, match=r"reads the state model_state.* model_state='mean'"):
            step.lower(step.abstract_init(W, model_state=start), X[0])
    # As the error says.
    step, (w, mean) = sgd_step(around_mean, 0.1, 4, model_state="mean"), (W, zeros)
    state = step.init(W, model_state=zeros)
    for x in X:
        state, _ = step(state, x)
        slope, mean = jax.grad(around_mean, has_aux=True)(w, mean, x)
        w = w - 0.1 * slope
    common.assert_close(step.model(state), (w, mean), atol=1e-5)


def test_a_state_with_an_entry_for_each_row():
    def carried(w: Any, state: Any, x: Any) -> Any:
        state = jnp.tanh(x @ w + state)
        return (state**2).mean(), state

    step, start = sgd_step(carried, 0.1, 4, model_state="per_shard"), np.zeros((24, 5), np.float32)
    with pytest.raises(TypeError) as caught:
        step.lower(step.abstract_init(W, model_state=start), X[0])
    assert "loss_over='batch'" in "".join(caught.value.__notes__)
    step = sgd_step(carried, 0.1, 4, model_state="mean", loss_over="batch")
    state, of_one, w = step.init(W, model_state=start), start, W
    for x in X:
        state, _ = step(state, x)
        slope, of_one = jax.grad(carried, has_aux=True)(w, of_one, x)
        w = w - 0.1 * slope
    common.assert_close(step.model(state), (w, of_one), atol=1e-5)


def around_common(combine: Any) -> Any:
    """A loss around a state that ``combine`` makes the same on all shards, if there are several."""

    def loss(w: Any, state: Any, x: Any) -> Any:
        hidden = x @ w
        after = 0.5 * state + 0.5 * combine(jax.lax.stop_gradient(hidden))
        return ((hidden - state) ** 2).mean(), after

    return loss


over_all = lambda reduce, of: lambda x: reduce(of(x), "shards")
# What a state gets that is the same on all shards, and what one device would give it.
COMBINED: dict[str, tuple[Any, Any]] = {
    "sums": (over_all(jax.lax.psum, lambda x: x.sum(0)), lambda x: x.sum(0)),
    "the largest": (over_all(jax.lax.pmax, lambda x: x.max(0)), lambda x: x.max(0)),
    "sums of means": (over_all(jax.lax.psum, lambda x: x.mean(0)), None),
    "means of deviations": (over_all(jax.lax.pmean, lambda x: x.std(0)), None),
    "rows of one shard": (lambda x: jax.lax.all_gather(x, "shards")[0].mean(0), None),
    "the number of shards": (lambda x: jnp.ones(5) * jax.lax.axis_size("shards"), None),
    "the index of a shard": (lambda x: jnp.ones(5) * jax.lax.axis_index("shards"), None),
}


@pytest.mark.parametrize("name", COMBINED)
def test_a_state_that_the_loss_reads_is_that_of_the_whole_batch(name: str):
    combine, of_one = COMBINED[name]
    step = sgd_step(around_common(combine), 0.1, 4, model_state="per_shard", axis_name="shards")
    state = step.init(W, model_state=np.zeros(5, np.float32))
    if of_one is None:
        with pytest.raises(
            LossError, match=r"The loss reads the state model_state.* by jax.lax.psum of sums"
        ):
            step(state, X[0])
        return
    w, mean = W, np.zeros(5, np.float32)
    for x in X:
        state, _ = step(state, x)
        slope, mean = jax.grad(around_common(of_one), has_aux=True)(w, mean, x)
        w = w - 0.1 * slope
    common.assert_close(step.model(state)[0], w, atol=1e-5)


def test_so_is_one_that_another_is_made_of():
    """The mean of shares of all rows, which are as many times smaller as there are shards."""

    def loss(w: Any, state: Any, x: Any) -> Any:
        hidden, (_, old) = x @ w, state
        shares = jnp.exp(hidden) / jax.lax.psum(jnp.exp(hidden).sum(0), "shards")
        return ((hidden - old) ** 2).mean(), (jax.lax.pmean(shares.sum(0), "shards"), state[0])

    zeros = np.zeros(5, np.float32)
    step = sgd_step(loss, 0.1, 4, model_state="per_shard", axis_name="shards")
    with pytest.raises(LossError, match=r"reads the state model_state\[0\], which is a comparison"):
        step.lower(step.abstract_init(W, model_state=(zeros, zeros)), X[0])


@jax.custom_vjp
def scaled_backward(x: Any, by: Any) -> Any:
    del by
    return x


scaled_backward.defvjp(lambda x, by: (x, by), lambda by, g: (g / (1 + by), jnp.zeros_like(by)))


def test_a_gradient_reads_a_state_too():
    def loss(w: Any, state: Any, x: Any) -> Any:
        hidden = x @ w
        return (scaled_backward(hidden, state) ** 2).mean(), 0.5 * state + abs(hidden).mean(0)

    step = sgd_step(loss, 0.1, 4, model_state="per_shard")
    with pytest.raises(LossError, match=r"reads the state model_state, which each shard"):
        step.lower(step.abstract_init(W, model_state=np.zeros(5, np.float32)), X[0])


def test_the_state_that_is_wrong_is_named_and_a_lowered_step_has_no_first_call():
    """Of maxima, where nothing was seen, and of counts of a part of the rows, which are many."""

    def loss(w: Any, state: Any, x: Any) -> Any:
        hidden, (most, count) = x @ w, state
        seen = jax.lax.stop_gradient(hidden)
        bound = jnp.where(jnp.isfinite(most), most, 0)
        most = jnp.maximum(
            most, jax.lax.pmax(jnp.where(seen > 1e9, seen, -jnp.inf).max(0), "shards")
        )
        count += jax.lax.pmax((seen > 0).sum(0), "shards").astype(jnp.float32)
        return ((hidden - bound) ** 2).mean() * (1 + 0 * count).mean(), (most, count)

    step = sgd_step(loss, 0.1, 4, model_state="per_shard", axis_name="shards")
    start = np.full(5, -np.inf, np.float32), np.full(5, 1e6, np.float32)
    state = step.init(W, model_state=start)
    for call in (step, step.lower, step.trace):
        with pytest.raises(LossError, match=r"it is not so: .*model_state\[1\] is .* apart"):
            call(state, X[0])
    step.lower(*jax.eval_shape(lambda *given: given, state, X[0]))
    assert "its first call compares its model state" in step.describe()


@pytest.mark.parametrize(
    ("dtype", "whole", "is_same"),
    [
        (jnp.float32, 10.5, False),
        (jnp.float32, 11 - 1e-5, True),
        (jnp.bfloat16, 10.5, False),
        (jnp.bfloat16, 10.9375, True),
        (jnp.int32, 10, False),
    ],
)
def test_changes_of_a_state_differ_by_more_than_rounding(dtype: Any, whole: float, is_same: bool):
    given = [jnp.full(3, x, dtype) for x in (10, whole, 11)]
    assert (by_numbers._apart(*given) <= 1e-4) == is_same


@pytest.mark.parametrize(("reduce", "is_of_batch"), [(jax.lax.pmax, True), (jax.lax.psum, False)])
def test_so_is_an_integer(reduce: Any, is_of_batch: bool):
    def loss(w: Any, seen: Any, x: Any) -> Any:
        found = reduce((x > 2).any().astype(jnp.int32), "shards")
        return ((x @ w) ** 2).mean() * (1 + 0.1 * seen), seen + found

    step = sgd_step(loss, 0.1, 4, model_state="per_shard", axis_name="shards")
    state = step.init(W, model_state=np.int32(0))
    raises = pytest.raises(LossError, match=r"model_state, and nothing proves.*it is not so")
    with contextlib.nullcontext() if is_of_batch else raises:
        step(state, X[0])


def test_no_microbatch_reads_what_another_has_made_of_its_rows():
    mean_of_all = around_common(lambda x: jax.lax.pmean(x.mean(0), "shards"))
    largest_of_all = around_common(lambda x: jax.lax.pmax(abs(x).max(0), "shards"))
    zeros, options = np.zeros(5, np.float32), {"accumulate_steps": 2, "axis_name": "shards"}
    for loss, shards in ((mean_of_all, 4), (mean_of_all, 1), (largest_of_all, 4)):
        step = sgd_step(loss, 0.1, shards, model_state="per_shard", **options)
        with pytest.raises(LossError, match=r"each microbatch changes.*accumulate_steps.*'mean'"):
            step.lower(step.abstract_init(W, model_state=zeros), X[0])
    step = sgd_step(lambda model, x: model(x), 0.1, 4, **options)
    with pytest.raises(LossError, match=r"reads the state model\['mean'\], which each microbatch"):
        step.lower(step.abstract_init(Codebook("shards")), X[0])
    step = sgd_step(largest_of_all, 0.1, 4, model_state="mean", **options)
    with pytest.raises(LossError, match=r"each of its 2 microbatches.*leave out accumulate_steps"):
        step(step.init(W, model_state=zeros), X[0])
    # As the errors say: averaged, on one device; or one microbatch after the other.
    one_device = around_common(lambda x: x.mean(0))
    averaged = sgd_step(mean_of_all, 0.1, 4, model_state="mean", **options)
    in_turn = sgd_step(one_device, 0.1, 1, model_state="per_shard", loss_over="shard", **options)
    slope_of = jax.jit(jax.grad(one_device, has_aux=True))
    for step, pieces in ((averaged, 1), (in_turn, 2)):
        state, w, mean = train(step, step.init(W, model_state=zeros), X[:2]), W, zeros
        for x in X[:2]:
            slopes = []
            for piece in np.split(x, pieces):
                slope, mean = slope_of(w, mean, piece)
                slopes.append(slope)
            w = w - 0.1 * sum(slopes) / pieces
        common.assert_close(step.model(state), (w, mean), atol=1e-5)


@pytest.mark.parametrize("dtype", [float, int])
@pytest.mark.parametrize("kind", ["module", "per_shard"])
def test_what_no_row_changes_goes_on_on_a_shard_that_does_not_count(kind: str, dtype: Any):
    """A count of steps anneals the loss; on one shard no row counts in the first batch."""

    def annealed(w: Any, count: Any, batch: Any) -> Any:
        rows = ((batch["x"] @ w) ** 2).sum(1) * (1 + count)
        return (rows * batch["mask"]).sum() / batch["mask"].sum(), count + 1

    class Counting(nnx.Module):
        def __init__(self):
            self.w, self.count = nnx.Param(jnp.float32(W)), nnx.BatchStat(jnp.zeros((), dtype))

        def __call__(self, batch: Any) -> Any:
            loss, self.count[...] = annealed(self.w[...], self.count[...], batch)
            return loss

    if kind == "module":
        step = sgd_step(lambda model, batch: model(batch), 0.01, 4, weight="mask")
        state = step.init(Counting())
    else:
        step = sgd_step(annealed, 0.01, 4, weight="mask", model_state="per_shard")
        state = step.init(W, model_state=np.zeros((), dtype))
    w, masks = W, np.ones((3, 24), np.float32)
    masks[0, :6], masks[1, 20:] = 0, 0
    for count, (x, mask) in enumerate(zip(X, masks, strict=True)):
        batch = {"x": x, "mask": mask}
        state, _ = step(state, batch)
        w = w - 0.01 * jax.grad(annealed, has_aux=True)(w, count, batch)[0]
    common.assert_close(jax.tree.leaves(state.params)[0], w, atol=1e-5)
    np.testing.assert_array_equal(jax.tree.leaves(state.model_state)[0], [3] * 4)
