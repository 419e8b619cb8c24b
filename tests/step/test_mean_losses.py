"""A loss that returns sums and counts: with everything beside it, it steps as one device does."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, Mean, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from tests.quick import deep
from tests.step.common import assert_close, assert_same, on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
ROWS, RATE = 24, 0.5
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


def hard_examples(params: Any, batch: Any) -> Mean:
    """What counts depends on the parameters."""
    errors = errors_of(params, batch)
    counts = errors > 0.5
    return Mean((errors * counts).sum(), counts.sum())


def of_means(params: Any, batch: Any) -> Mean:
    """A mean over rows, as a mean with the count of one."""
    return Mean(errors_of(params, batch).mean(), 1)


LOSSES = {loss.__name__: loss for loss in (shifted, several, hard_examples, of_means)}


def value_of(loss: Any) -> Any:
    """The same loss for one device."""
    return functools.partial(_value, loss)


def _value(loss: Any, params: Any, batch: Any) -> jax.Array:
    return loss(params, batch).value()


@functools.cache
def expected(name: str) -> Any:
    return on_one_device(value_of(LOSSES[name]), optax.sgd(RATE), W, BATCHES)[0]


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"accumulate_steps": 3},
    "sharded update": {"weight_update": "sharded"},
    "sharded parameters": {"params": "sharded"},
    "sharded parameters, microbatches": {"params": "sharded", "accumulate_steps": 3},
    "over the batch": {"loss_over": "batch"},
    "over the batch, microbatches": {"loss_over": "batch", "accumulate_steps": 3},
    "over the batch, sharded": {"loss_over": "batch", "params": "sharded"},
    "virtual shards": {"virtual_shards": 8},
    "virtual shards, microbatches": {"virtual_shards": 8, "accumulate_steps": 3},
    "quarantine": {"nonfinite": "quarantine"},
    "skip": {"nonfinite": "skip", "params": "sharded"},
    "loss scale": {"loss_scale": crossshard.DynamicLossScale(2.0**10)},
    "of a shard": {"loss_over": "shard"},
    "masters and average": {"master_dtype": "float32", "ema": 0.9},
    "sentinel": {"check_divergence": 1},
}
QUICK = {("several", "plain"), ("several", "sharded parameters, microbatches")}
QUICK |= {("hard_examples", "microbatches"), ("several", "virtual shards, microbatches")}
QUICK |= {("shifted", "over the batch, microbatches"), ("of_means", "microbatches")}
QUICK |= {("shifted", "quarantine"), ("several", "skip")}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) if (name, way) in QUICK else deep((name, way)) for name in LOSSES for way in WAYS],
)
@pytest.mark.parametrize("number", [2, deep(1), deep(4), deep(8)])
def test_steps_as_one_device(name: str, way: str, number: int) -> None:
    step = sgd_step(LOSSES[name], RATE, number, **WAYS[way])
    assert_close(step.model(train(step, step.init(W), BATCHES)), expected(name), atol=2e-6)


@pytest.mark.parametrize("number", [2, deep(3), deep(6)])
def test_metrics_have_the_loss_each_term_and_the_counts(number: int) -> None:
    batch, rows = BATCHES[0], BATCHES[0]["mask"][:, 1:]
    step = sgd_step(several, RATE, number, accumulate_steps=2)
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


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_in_functions_of_jax(wrap: Any) -> None:
    step = sgd_step(wrap(several), RATE, 4, accumulate_steps=2)
    got = step.model(train(step, step.init(W), BATCHES))
    assert_close(got, expected("several"), atol=2e-6)


# Beside its neighbours.


@pytest.mark.parametrize("options", [{}, deep({"accumulate_steps": 3}), {"params": "sharded"}])
@pytest.mark.parametrize("number", [4, deep(2), deep(8)])
def test_a_shard_that_is_left_out_leaves_its_counts_out(
    number: int, options: dict[str, Any]
) -> None:
    batch = {name: x.copy() for name, x in BATCHES[0].items()}
    batch["x"][3, 0, 0] = np.nan
    of_shard = ROWS // number
    bad = 3 // of_shard
    left = np.r_[: bad * of_shard, (bad + 1) * of_shard : ROWS]
    rest = jax.tree.map(lambda x: x[left], batch)
    step = sgd_step(several, RATE, number, nonfinite="quarantine", **options)
    state, metrics = step(step.init(W), batch)
    want, _ = on_one_device(value_of(several), optax.sgd(RATE), W, [rest])
    assert_close(step.model(state), want)
    assert int(metrics["nonfinite"].shard) == bad
    np.testing.assert_allclose(metrics["counts"]["tokens"], rest["mask"][:, 1:].sum())
    np.testing.assert_allclose(metrics["loss"], several(W, rest).value(), rtol=1e-5)


WITHOUT = {name: np.zeros_like(x) if name == "mask" else x for name, x in BATCHES[0].items()}


def tokens_and_decay(params: Any, batch: Any) -> Mean:
    return shifted(params, batch) + 1e-2 * (params["kernel"] ** 2).sum()


@pytest.mark.parametrize(
    "way",
    [
        *("plain", "microbatches", "over the batch", "virtual shards"),
        *map(deep, ("sharded parameters", "sharded update", "quarantine", "skip")),
    ],
)
def test_a_batch_of_which_nothing_counts_changes_nothing(way: str) -> None:
    step = make_train_step(tokens_and_decay, optax.adamw(RATE), num_shards=4, **WAYS[way])
    state, metrics = step(step.init(W), WITHOUT)
    assert_same(step.model(state), W)
    assert bool(metrics["skipped"])
    assert int(state.step) == 0
    state, metrics = step(state, BATCHES[0])
    assert not bool(metrics["skipped"])
    assert int(state.step) == 1


def test_a_term_of_which_nothing_counts_is_0() -> None:
    step = sgd_step(several, RATE, 4)
    state, metrics = step(step.init(W), WITHOUT)
    want, _ = on_one_device(value_of(several), optax.sgd(RATE), W, [WITHOUT])
    assert_close(step.model(state), want)
    assert float(metrics["terms"]["tokens"]) == 0


def test_few_bits_send_what_is_left() -> None:
    """In few bits a step is off by a rounding, which the next ones make up for."""
    step = sgd_step(several, 0.05, 4, reduce_dtype="int8")
    got = step.model(train(step, step.init(W), BATCHES * 10))
    want, _ = on_one_device(value_of(several), optax.sgd(0.05), W, BATCHES * 10)
    assert_close(got, want, atol=2e-3)


@pytest.mark.parametrize("number", [deep(2), 4])
def test_workers_count_their_own_rows(number: int) -> None:
    step = sgd_step(several, RATE, number, sync_every=2)
    got = step.model(train(step, step.init(W), BATCHES))
    workers = []
    for worker in range(number):
        rows = slice(worker * ROWS // number, (worker + 1) * ROWS // number)
        own = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for batch in BATCHES]
        workers.append(on_one_device(value_of(several), optax.sgd(RATE), W, own)[0])
    assert_close(got, jax.tree.map(lambda *each: np.mean(each, 0), *workers), atol=2e-6)


def test_groups_count_their_own_rows() -> None:
    opt = CrossShardOptimizer(optax.sgd(RATE), group_assignment=[[0, 1], [2, 3]])
    step = make_train_step(several, opt, num_shards=4)
    state = train(step, step.init(W), BATCHES)
    for shard, rows in ((0, slice(12)), (3, slice(12, 24))):
        own = [jax.tree.map(lambda x, rows=rows: x[rows], batch) for batch in BATCHES]
        want, _ = on_one_device(value_of(several), optax.sgd(RATE), W, own)
        assert_close(step.model(state, shard=shard), want)


def test_the_bits_do_not_depend_on_the_number_of_shards() -> None:
    found = []
    for number in (1, 2, 8):
        step = make_train_step(several, optax.adamw(1e-2), num_shards=number, virtual_shards=8)
        found.append(step.model(train(step, step.init(W), BATCHES * 3)))
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_aux_and_model_state_are_as_beside_a_number() -> None:
    def loss(params: Any, state: Any, batch: Any) -> Any:
        mean = jnp.mean(batch["x"])
        return several(params, batch), ({"seen": 0.9 * state["seen"] + mean}, batch["mask"].sum())

    step = sgd_step(
        loss, RATE, 4, model_state="mean", has_aux=True, aux_reduction="sum", accumulate_steps=2
    )
    state = step.init(W, model_state={"seen": jnp.float32(0)})
    state, metrics = step(state, BATCHES[0])
    want, _ = on_one_device(value_of(several), optax.sgd(RATE), W, BATCHES[:1])
    assert_close(step.model(state)[0], want)
    np.testing.assert_allclose(metrics["aux"], BATCHES[0]["mask"].sum())


def test_keys_of_rows_are_those_of_one_device() -> None:
    def noisy(params: Any, batch: Any, rng: Any) -> Mean:
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(rng)
        return Mean((errors_of(params, batch) * keep).sum(), keep.sum())

    found = []
    for number, steps in ((1, 1), (4, 1), (4, 3)):
        step = sgd_step(noisy, RATE, number, rng_per="row", accumulate_steps=steps)
        found.append(step.model(train(step, step.init(W), BATCHES)))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.parametrize("axis_name", [None, "host"])
def test_several_axes_of_a_mesh(axis_name: str | None) -> None:
    mesh = jax.make_mesh((2, 4), ("host", "chip"), axis_types=(AxisType.Auto,) * 2)
    step = make_train_step(several, optax.sgd(RATE), mesh=mesh, axis_name=axis_name)
    got = step.model(train(step, step.init(W), BATCHES))
    assert_close(got, expected("several"), atol=2e-6)


def stacked(params: Any, batch: Any) -> Mean:
    def layer(x: Any, kernel: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ kernel), None

    x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], params["layers"])
    mask = batch["mask"][:, 1:]
    return Mean((((x - 1) ** 2).mean(-1)[:, 1:] * mask).sum(), mask.sum())


@pytest.mark.parametrize("options", [{"weight_update": "sharded"}, {"params": "sharded"}])
def test_sums_in_the_loop_over_layers(options: dict[str, Any]) -> None:
    layers = {"layers": RNG.normal(size=(3, 4, 4)).astype(np.float32)}
    step = sgd_step(stacked, RATE, 4, accumulate_steps=2, **options)
    got = step.model(train(step, step.init(layers), BATCHES))
    assert_close(got, on_one_device(value_of(stacked), optax.sgd(RATE), layers, BATCHES)[0])


# The other two ways in.


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_optax_idiom(check_vma: bool) -> None:
    opt = CrossShardOptimizer(optax.sgd(RATE))
    mesh = jax.make_mesh((4,), ("shards",), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("shards")),
        out_specs=P(),
        check_vma=check_vma,
    )
    def step(params: Any, batch: Any) -> Any:
        loss, gradients = crossshard.value_and_grad(several, optimizer=opt)(params, batch)
        updates, _ = opt.update(gradients, opt.init(params), params)
        return optax.apply_updates(params, updates), jax.lax.pmean(loss, "shards")

    params = jax.tree.map(jnp.asarray, W)
    losses = []
    for batch in BATCHES:
        params, loss = step(params, batch)
        losses.append(float(loss))
    assert_close(params, expected("several"), atol=2e-6)
    np.testing.assert_allclose(losses[0], several(W, BATCHES[0]).value(), rtol=1e-5)


def test_vmap_over_groups() -> None:
    opt = CrossShardOptimizer(optax.sgd(RATE), group_assignment=[[0, 2], [1, 3]])

    def step(batch: Any) -> Any:
        gradients = crossshard.grad(several, optimizer=opt)(W, batch)
        return opt.update(gradients, opt.init(W), W)[0]

    each = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), BATCHES[0])
    updates = jax.vmap(step, axis_name="shards")(each)
    own = jax.tree.map(lambda x: np.concatenate([x[1], x[3]]), each)
    want, _ = on_one_device(value_of(several), optax.sgd(RATE), W, [own])
    assert_close(jax.tree.map(lambda w, u: w + u[3], W, updates), want)


class Model(nnx.Module):
    def __init__(self) -> None:
        self.kernel, self.bias = nnx.Param(jnp.asarray(W["kernel"])), nnx.Param(W["bias"])

    @property
    def arrays(self) -> dict[str, jax.Array]:
        return {"kernel": self.kernel[...], "bias": self.bias[...]}


@pytest.mark.parametrize("minimize", [False, True])
def test_the_stateful_idiom(minimize: bool) -> None:
    model, opt = Model(), CrossShardOptimizer(optax.adamw(0.1))

    @crossshard.shard(num_shards=4)
    def step(model: Model, opt: CrossShardOptimizer, batch: Any) -> None:
        loss = lambda: tokens_and_decay(model.arrays, batch)
        if minimize:
            opt.minimize(loss, var_list=model)
        else:
            opt.apply_gradients(opt.compute_gradients(loss, model))

    step(model, opt, WITHOUT)
    assert_same(model.arrays, W)
    for batch in BATCHES:
        step(model, opt, batch)
    want, _ = on_one_device(value_of(tokens_and_decay), optax.adamw(0.1), W, BATCHES)
    assert_close(model.arrays, want, atol=2e-5)


# What is refused.


def _mean(total: Any, count: Any) -> Any:
    return lambda params, batch: Mean(
        total(errors_of(params, batch), batch), count(errors_of(params, batch), batch)
    )


NO_SUMS = {
    "a mean": (_mean(lambda e, b: e.mean(), lambda e, b: b["mask"].sum()), "the total of the Mean"),
    "a fixed count": (_mean(lambda e, b: e.sum(), lambda e, b: 100), "the count of the Mean"),
    "a ratio": (
        _mean(lambda e, b: (e * b["mask"]).sum() / b["mask"].sum(), lambda e, b: 1),
        "the total of the Mean",
    ),
    "a largest": (_mean(lambda e, b: e.max(0).sum(), lambda e, b: e.size), "compare|the total"),
    "compared rows": (
        _mean(lambda e, b: ((e - e.mean(0)) ** 2).sum(), lambda e, b: e.size),
        "the total of the Mean",
    ),
    "a count that is a root": (
        _mean(lambda e, b: e.sum(), lambda e, b: jnp.sqrt(b["mask"].sum())),
        "the count of the Mean",
    ),
    "a count that is at least 1": (
        _mean(lambda e, b: e.sum(), lambda e, b: jnp.maximum(b["mask"].sum(), 1)),
        "the count of the Mean",
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


def test_a_count_with_a_gradient_is_refused() -> None:
    loss = _mean(lambda e, b: e.sum(), lambda e, b: jax.nn.sigmoid(e).sum())
    step = sgd_step(loss, RATE, 4)
    with pytest.raises(LossError, match=r"stop_gradient\(count\)"):
        step(step.init(W), BATCHES[0])

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
    assert_close(got, on_one_device(value_of(loss), optax.sgd(RATE), W, BATCHES)[0], atol=2e-6)


def test_what_contradicts_it_is_refused() -> None:
    for options, word in (
        ({"weight": "mask"}, "Leave weight out"),
        ({"nonfinite": "quarantine"}, "preprocess="),
    ):
        opt = CrossShardOptimizer(optax.sgd(RATE), preprocess=optax.clip(1.0))
        step = make_train_step(shifted, opt, num_shards=4, **options)
        with pytest.raises(ArgumentError, match=word):
            step(step.init(W), BATCHES[0])
    step = make_train_step(shifted, CrossShardOptimizer(optax.sgd(RATE), "sum"), num_shards=4)
    with pytest.raises(ArgumentError, match="reduction is SUM"):
        step(step.init(W), BATCHES[0])
    with pytest.raises(ArgumentTypeError, match="CrossShardOptimizer that reduces the gradients"):
        crossshard.grad(shifted, optimizer=optax.sgd(0.1))
    each = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), BATCHES[0])
    for opt, word in (
        (None, "optimizer=opt"),
        (CrossShardOptimizer(optax.sgd(0.1), "sum"), "reduction is SUM"),
        (CrossShardOptimizer(optax.sgd(0.1), accumulate_steps=2), "accumulates over 2 calls"),
        (CrossShardOptimizer(optax.sgd(0.1), nonfinite="quarantine"), "nonfinite='skip'"),
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


def test_in_16_bits_the_quotient_is_taken_in_32() -> None:
    def loss(params: Any, batch: Any) -> Mean:
        predicted = batch["x"].astype(jnp.bfloat16) @ params["kernel"].astype(jnp.bfloat16)
        return Mean((predicted.mean(-1) ** 2 * batch["mask"]).sum(), batch["mask"].sum())

    step = sgd_step(loss, RATE, 4)
    state, metrics = step(step.init(W), BATCHES[0])
    assert metrics["loss"].dtype == jnp.float32
    want, _ = on_one_device(value_of(loss), optax.sgd(RATE), W, BATCHES[:1])
    assert_close(step.model(state), want, atol=2e-4)
