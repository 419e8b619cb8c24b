"""A loss that returns sums and counts: with everything beside it, it steps as one device does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, Mean, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from tests.quick import deep
from tests.step.common import Parameters, assert_close, assert_same, on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
ROWS, RATE = 24, 0.5
SGD = optax.sgd(RATE)
W = {
    "kernel": RNG.normal(size=(4, 40)).astype(np.float32) / 4,
    "bias": RNG.normal(size=40).astype(np.float32),
}


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Rows that count more and more, so that no two shards count the same."""
    rng = np.random.default_rng(seed)
    counts = rng.random((ROWS, 5)) < np.linspace(0.1, 0.9, ROWS)[:, None]
    return {
        "x": rng.normal(size=(ROWS, 5, 4)).astype(np.float32),
        "y": rng.normal(size=(ROWS, 5)).astype(np.float32),
        "mask": counts.astype(np.float32),
        "noise": rng.random((ROWS, 5)).astype(np.float32),
    }


BATCHES = [batch_of(seed) for seed in (1, 2)]


def errors_of(params: Any, batch: Any) -> jax.Array:
    predicted = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"]).mean(-1)
    return (predicted - batch["y"]) ** 2


def shifted(params: Any, batch: Any) -> Mean:
    """The most ordinary loss of a language model: its mask is shifted."""
    mask = batch["mask"][:, 1:]
    return Mean((errors_of(params, batch)[:, :-1] * mask).sum(), mask.sum(), "tokens")


def several(params: Any, batch: Any) -> Mean:
    """Terms that count differently, and a regulariser."""
    errors = errors_of(params, batch)
    weights = batch["noise"] * 0.05
    return (
        shifted(params, batch)
        + 0.3 * Mean(jnp.tanh(errors).sum(), errors.size, "rows")
        - Mean((jnp.sin(errors) * weights).sum(), weights.sum(), "fractions") / 4
        + 1e-2 * (params["kernel"] ** 2).sum()
    )


def of_means(params: Any, batch: Any) -> Mean:
    """A mean over rows, as a mean with the count of one."""
    return Mean(errors_of(params, batch).mean(), 1)


def on_one(loss: Any, batches: Any = BATCHES, optimizer: Any = SGD) -> Any:
    """What one device trains with the value of the loss."""
    value = functools.partial(lambda loss, params, batch: loss(params, batch).value(), loss)
    return on_one_device(value, optimizer, W, batches)[0]


MICROBATCHES = {"accumulate_steps": 3}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mean": (of_means, MICROBATCHES),
    "quarantine": (shifted, {"nonfinite": "quarantine"}),
    "over the batch": (shifted, {"loss_over": "batch", **MICROBATCHES}),
    "virtual": (several, {"virtual_shards": 8, **MICROBATCHES}),
    "sharded": (several, {"params": "sharded", **MICROBATCHES}),
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_as_one_device(way: str) -> None:
    """In ways that the harness, which has a loss of one term, does not go."""
    loss, options = WAYS[way]
    step = sgd_step(loss, RATE, 2, **options)
    assert_close(step.model(train(step, step.init(W), BATCHES)), on_one(loss), atol=2e-6)


def test_metrics_have_the_loss_each_term_and_the_counts() -> None:
    batch, rows = BATCHES[0], BATCHES[0]["mask"][:, 1:]
    step = sgd_step(several, RATE, 2, accumulate_steps=2)
    _, metrics = step(step.init(W), batch)
    errors = np.asarray(errors_of(W, batch), np.float64)
    weights = batch["noise"] * 0.05
    terms = {
        "tokens": (errors[:, :-1] * rows).sum() / rows.sum(),
        "rows": np.tanh(errors).mean(),
        "fractions": (np.sin(errors) * weights).sum() / weights.sum(),
    }
    loss = terms["tokens"] + 0.3 * terms["rows"] - terms["fractions"] / 4
    loss += 1e-2 * (W["kernel"].astype(np.float64) ** 2).sum()
    assert_close(metrics["terms"], terms, rtol=1e-5)
    counts = {"tokens": rows.sum(), "rows": errors.size, "fractions": weights.sum()}
    assert_close(metrics["counts"], counts, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)


# Beside its neighbours.


def test_a_shard_that_is_left_out_leaves_its_counts_out() -> None:
    batch = {name: x.copy() for name, x in BATCHES[0].items()}
    batch["x"][3, 0, 0] = np.nan
    rest = jax.tree.map(lambda x: x[ROWS // 4 :], batch)
    step = sgd_step(several, RATE, 4, nonfinite="quarantine")
    state, metrics = step(step.init(W), batch)
    assert_close(step.model(state), on_one(several, [rest]))
    assert int(metrics["nonfinite"].shard) == 0
    np.testing.assert_allclose(metrics["counts"]["tokens"], rest["mask"][:, 1:].sum())
    np.testing.assert_allclose(metrics["loss"], several(W, rest).value(), rtol=1e-5)


WITHOUT = {name: np.zeros_like(x) if name == "mask" else x for name, x in BATCHES[0].items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"virtual_shards": 8}, deep({"loss_over": "batch"})],
    ids=str,
)
def test_a_batch_of_which_nothing_counts_changes_nothing(options: dict[str, Any]) -> None:
    step = make_train_step(shifted, optax.adamw(RATE), num_shards=4, **options)
    state, metrics = step(step.init(W), WITHOUT)
    assert_same(step.model(state), W)
    assert bool(metrics["skipped"])
    assert int(state.step) == 0
    state, metrics = step(state, BATCHES[0])
    assert not bool(metrics["skipped"])
    assert int(state.step) == 1
    # Where other terms count, that of which nothing counts is 0.
    if not options:
        step = sgd_step(several, RATE, 4)
        state, metrics = step(step.init(W), WITHOUT)
        assert_close(step.model(state), on_one(several, [WITHOUT]))
        assert float(metrics["terms"]["tokens"]) == 0


def test_aux_and_model_state_are_as_beside_a_number() -> None:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        mean = jnp.mean(batch["x"])
        return several(params, batch), ({"seen": 0.9 * state["seen"] + mean}, batch["mask"].sum())

    step = sgd_step(
        loss, RATE, 4, model_state="mean", has_aux=True, aux_reduction="sum", accumulate_steps=2
    )
    state = step.init(W, model_state={"seen": jnp.float32(0)})
    state, metrics = step(state, BATCHES[0])
    assert_close(step.model(state)[0], on_one(several, BATCHES[:1]))
    np.testing.assert_allclose(metrics["aux"], BATCHES[0]["mask"].sum())


# The other two ways in.


def test_the_optax_idiom() -> None:
    opt = CrossShardOptimizer(optax.sgd(RATE))
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("shards")), out_specs=P())
    def step(params: Any, batch: Any) -> Any:
        loss, gradients = crossshard.value_and_grad(several, optimizer=opt)(params, batch)
        updates, _ = opt.update(gradients, opt.init(params), params)
        return optax.apply_updates(params, updates), jax.lax.pmean(loss, "shards")

    params = jax.tree.map(jnp.asarray, W)
    losses = []
    for batch in BATCHES:
        params, loss = step(params, batch)
        losses.append(float(loss))
    assert_close(params, on_one(several), atol=2e-6)
    np.testing.assert_allclose(losses[0], several(W, BATCHES[0]).value(), rtol=1e-5)


def test_vmap_over_groups() -> None:
    opt = CrossShardOptimizer(optax.sgd(RATE), group_assignment=[[0, 2], [1, 3]])

    def step(batch: Any) -> Any:
        gradients = crossshard.grad(several, optimizer=opt)(W, batch)
        return opt.update(gradients, opt.init(W), W)[0]

    each = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), BATCHES[0])
    updates = jax.jit(jax.vmap(step, axis_name="shards"))(each)
    own = jax.tree.map(lambda x: np.concatenate([x[1], x[3]]), each)
    assert_close(jax.tree.map(lambda w, u: w + u[3], W, updates), on_one(several, [own]))


@pytest.mark.parametrize("minimize", [deep(False), True])
def test_the_stateful_idiom(minimize: bool) -> None:
    model, opt = Parameters(W), CrossShardOptimizer(optax.sgd(RATE))

    @crossshard.shard(num_shards=4)
    def step(model: Any, opt: CrossShardOptimizer, batch: Any) -> None:
        loss = lambda: shifted(model.values(), batch)
        if minimize:
            opt.minimize(loss, var_list=model)
        else:
            opt.apply_gradients(opt.compute_gradients(loss, model))

    step(model, opt, WITHOUT)
    assert_same(model.values(), W)
    for batch in BATCHES:
        step(model, opt, batch)
    assert_close(model.values(), on_one(shifted), atol=2e-6)


# What is refused.


def _mean(total: Any, count: Any) -> Any:
    return lambda params, batch: Mean(
        total(errors_of(params, batch), batch["mask"]),
        count(errors_of(params, batch), batch["mask"]),
    )


TOTAL, COUNT = "the total of the Mean", "the count of the Mean"
NO_SUMS = {
    "a mean": (_mean(lambda e, m: e.mean(), lambda e, m: m.sum()), TOTAL),
    "a fixed count": (_mean(lambda e, m: e.sum(), lambda e, m: 100), COUNT),
    "a ratio": (_mean(lambda e, m: (e * m).sum() / m.sum(), lambda e, m: 1), TOTAL),
    "at least 1": (_mean(lambda e, m: e.sum(), lambda e, m: jnp.maximum(m.sum(), 1)), COUNT),
    "a gradient": (
        _mean(lambda e, m: e.sum(), lambda e, m: jax.nn.sigmoid(e).sum()),
        r"stop_gradient\(count\)",
    ),
    "a product": (lambda p, b: shifted(p, b) * b["mask"].sum(), "what multiplies"),
    "a sum beside it": (lambda p, b: shifted(p, b) + b["mask"].sum(), "what is added"),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_is_no_sum_over_rows_is_refused(name: str) -> None:
    loss, part = NO_SUMS[name]
    step = sgd_step(loss, RATE, 4)
    with pytest.raises(LossError, match=part):
        step(step.init(W), BATCHES[0])


def test_a_count_of_a_fused_function_is_refused_unless_its_gradient_is_stopped() -> None:
    @jax.custom_vjp
    def fused(errors: Any, mask: Any) -> Any:
        return (errors * mask).sum(), mask.sum()

    forward = lambda errors, mask: (fused(errors, mask), mask)
    fused.defvjp(forward, lambda mask, g: (mask * g[0], jnp.zeros_like(mask)))

    def of_fused(stop: Any) -> Any:
        def loss(params: Any, batch: Any) -> Mean:
            total, count = fused(errors_of(params, batch), batch["mask"])
            return Mean(total, stop(count))

        return loss

    step = sgd_step(of_fused(lambda x: x), RATE, 4)
    with pytest.raises(LossError, match="a function with a gradient of its own"):
        step(step.init(W), BATCHES[0])
    loss = of_fused(jax.lax.stop_gradient)
    step = sgd_step(loss, RATE, 4)
    got = step.model(train(step, step.init(W), BATCHES))
    assert_close(got, on_one(loss), atol=2e-6)


def test_what_contradicts_it_is_refused() -> None:
    clipped = CrossShardOptimizer(SGD, preprocess=optax.clip(1.0))
    summed = CrossShardOptimizer(SGD, "sum")
    for opt, options, word in (
        (clipped, {"weight": "mask"}, "Leave weight out"),
        (clipped, {"nonfinite": "quarantine"}, "preprocess="),
        (summed, {}, "reduction is SUM"),
    ):
        step = make_train_step(shifted, opt, num_shards=4, **options)
        with pytest.raises(ArgumentError, match=word):
            step(step.init(W), BATCHES[0])
    with pytest.raises(ArgumentTypeError, match="CrossShardOptimizer that reduces the gradients"):
        crossshard.grad(shifted, optimizer=SGD)
    each = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), BATCHES[0])
    for opt, word in (
        (None, "optimizer=opt"),
        (summed, "reduction is SUM"),
        (CrossShardOptimizer(SGD, accumulate_steps=2), "accumulates over 2 calls"),
        (CrossShardOptimizer(SGD, nonfinite="quarantine"), "nonfinite='skip'"),
    ):
        grad = crossshard.grad(shifted, optimizer=opt)
        with pytest.raises(ArgumentError, match=word):
            jax.vmap(lambda batch, grad=grad: grad(W, batch), axis_name="shards")(each)


def test_each_term_of_a_sum_is_scaled():
    assert float((0.5 * (Mean(6.0, 3) + Mean(4.0, 1) - 2)).value()) == 2.0


def test_arithmetic() -> None:
    mean = 2 * Mean(6.0, 3) + np.float32(0.5) * Mean(jnp.float32(4), 2) / 2 - 1 + 3 - Mean(0.0, 0)
    np.testing.assert_allclose(mean.value(), 6.5)
    np.testing.assert_allclose(sum([Mean(1.0, 2), Mean(1.0, 4)]).value(), 0.75)
    np.testing.assert_allclose((1 - Mean(1.0, 2)).value(), 0.5)
    np.testing.assert_allclose((jnp.float32(3) + -Mean(1.0, 2)).value(), 2.5)
    for wrong in (
        lambda: Mean(1.0, 2) * Mean(1.0, 2),
        lambda: Mean(1.0, 2) / Mean(1.0, 2),
        lambda: 1 / Mean(1.0, 2),
        lambda: Mean(1.0, 2) ** 2,
        lambda: Mean(1.0, 2) + "x",
        lambda: float(Mean(1.0, 2)),
        lambda: Mean(1, 2),
        lambda: Mean(1.0, "tokens"),
        lambda: Mean(1.0, 2, 3),
    ):
        with pytest.raises(ArgumentTypeError):
            wrong()
    for wrong in (lambda: Mean(np.ones(3), 3), lambda: Mean(1.0, np.ones(3))):
        with pytest.raises(ArgumentError):
            wrong()
    two = lambda params, batch: shifted(params, batch) + shifted(params, batch)
    step = sgd_step(two, RATE, 2)
    with pytest.raises(ArgumentError, match="named 'tokens'"):
        step(step.init(W), BATCHES[0])


@pytest.mark.filterwarnings("error")
def test_means_that_vmap_makes_are_added_up() -> None:
    def members(params: Any, batch: Any) -> Any:
        one = lambda bias, x: (((x - bias) ** 2).sum(), jnp.where(x > 0, 1, 0).sum())
        return jax.vmap(one)(params["bias"][:4], batch["x"].T)

    step = sgd_step(lambda p, b: jax.vmap(Mean)(*members(p, b)), RATE, 4)
    with pytest.raises(ArgumentError, match=r"of shape \(4,\).*sum\(Mean"):
        step(step.init(W), BATCHES[0])
    added = lambda p, b: sum(
        Mean(total, count) for total, count in zip(*members(p, b), strict=True)
    )
    step = sgd_step(added, RATE, 4)
    state, _ = step(step.init(W), BATCHES[0])
    assert_close(step.model(state), on_one(added, BATCHES[:1]))


def test_in_16_bits_the_quotient_is_taken_in_32() -> None:
    def loss(params: Any, batch: Any) -> Mean:
        predicted = batch["x"].astype(jnp.bfloat16) @ params["kernel"].astype(jnp.bfloat16)
        return Mean((predicted.mean(-1) ** 2 * batch["mask"]).sum(), batch["mask"].sum())

    step = sgd_step(loss, RATE, 4)
    state, metrics = step(step.init(W), BATCHES[0])
    assert metrics["loss"].dtype == jnp.float32
    assert_close(step.model(state), on_one(loss, BATCHES[:1]), atol=2e-4)
