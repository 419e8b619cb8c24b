"""A loss over the batch: one device's numbers on any number of shards, with the loss unchanged."""

import functools
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard
from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError
from tests.step.common import assert_close, on_one_device, train

ROWS, FEATURES, WIDTH = 16, 24, 32
SGD, ADAMW = optax.sgd(0.1), optax.adamw(1e-3)
PLACES = (
    {"weight_update": "replicated"},
    {"weight_update": "sharded"},
    {"params": "sharded"},
)


def _array(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def _params() -> Any:
    return {
        "first": _array(1, FEATURES, WIDTH) / 5,
        "scale": jnp.ones(WIDTH),
        "second": _array(2, WIDTH, WIDTH) / 5,
    }


def _batches() -> list[Any]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(ROWS, FEATURES)).astype(np.float32),
            "y": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
            "mask": (rng.random((ROWS, WIDTH)) < np.linspace(0.1, 1, ROWS)[:, None]).astype(
                np.float32
            ),
        }
        for _ in range(3)
    ]


def batch_norm(params: Any, batch: Any) -> Any:
    hidden = batch["x"] @ params["first"]
    hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3) * params["scale"]
    return ((jax.nn.relu(hidden) @ params["second"] - batch["y"]) ** 2).mean()


def contrastive(params: Any, batch: Any) -> Any:
    unit = lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True)
    images = unit(batch["x"] @ params["first"] * params["scale"])
    logits = images @ unit(batch["y"] @ params["second"]).T / 0.2
    both = jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)
    return -jnp.diag(both).mean() / 2


def load_balance(params: Any, batch: Any) -> Any:
    routed = jax.nn.softmax(batch["x"] @ params["first"] * params["scale"])
    chosen = jax.nn.one_hot(routed.argmax(1), WIDTH).mean(0)
    loss = ((routed @ params["second"] - batch["y"]) ** 2).mean()
    return loss + 0.1 * WIDTH * (chosen * routed.mean(0)).sum()


def token_mean(params: Any, batch: Any) -> Any:
    found = jnp.tanh(batch["x"] @ params["first"] * params["scale"]) @ params["second"]
    return ((found - batch["y"]) ** 2 * batch["mask"]).sum() / batch["mask"].sum()


def advantages(params: Any, batch: Any) -> Any:
    logits = batch["x"] @ params["first"] * params["scale"] @ params["second"]
    reward = batch["y"].sum(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    return -(jax.nn.log_softmax(logits)[:, 0] * advantage).mean()


def noisy(params: Any, batch: Any, rng: Any) -> Any:
    one, other = jax.random.split(rng)
    hidden = batch["x"] @ params["first"] * params["scale"]
    hidden = hidden * jax.random.bernoulli(one, 0.8, hidden.shape) / 0.8
    found = hidden @ params["second"] + jax.random.normal(other, batch["y"].shape)
    return ((found - batch["y"]) ** 2).mean()


LOSSES = (batch_norm, contrastive, load_balance, token_mean, advantages)


def _step(loss: Any, optimizer: Any = SGD, number: int = 4, **options: Any) -> Any:
    return make_train_step(loss, optimizer, num_shards=number, loss_over="batch", **options)


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("number", [1, 2, 4, 8])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_step_is_that_of_one_device(loss: Any, number: int, where: Any) -> None:
    for optimizer in (SGD, ADAMW) if number in (1, 4) else (ADAMW,):
        expected, _ = on_one_device(loss, optimizer, _params(), _batches())
        step = _step(loss, optimizer, number, **where)
        state = train(step, step.init(_params()), _batches())
        assert_close(step.model(state), expected)


@pytest.mark.parametrize("optimizer", [optax.contrib.muon(1e-3), optax.lamb(1e-3)])
@pytest.mark.parametrize("where", PLACES[1:], ids=str)
def test_of_any_optimizer(optimizer: Any, where: Any) -> None:
    expected, _ = on_one_device(contrastive, optimizer, _params(), _batches())
    step = _step(contrastive, optimizer, 4, **where)
    assert_close(step.model(train(step, step.init(_params()), _batches())), expected, atol=3e-6)


def test_shards_alone_would_compute_something_else() -> None:
    expected, _ = on_one_device(contrastive, SGD, _params(), _batches())
    step = make_train_step(contrastive, SGD, num_shards=4, loss_over="shard")
    found = step.model(train(step, step.init(_params()), _batches()))
    assert np.abs(found["first"] - expected["first"]).max() > 1e-3


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("number", [1, 2, 8])
def test_noise_is_of_one_key(number: int, where: Any) -> None:
    expected = _params()
    for count, batch in enumerate(_batches()):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), count), 0)
        gradients = jax.grad(noisy)(expected, batch, key)
        expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, gradients)
    of_rows = make_train_step(noisy, SGD, num_shards=1)
    assert_close(of_rows.model(train(of_rows, of_rows.init(_params(), 5), _batches())), expected)
    step = _step(noisy, SGD, number, **where)
    assert_close(step.model(train(step, step.init(_params(), 5), _batches())), expected)


class _Module(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # Its bias has no gradient but for rounding, of which Adam would make steps.
        self.first = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


def _arrays_of(module: Any) -> list[Any]:
    """The arrays of a module, of its keys their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    leaves = jax.tree.leaves(nnx.state(module))
    return [jax.random.key_data(x) if is_key(x) else x for x in leaves]


def _of_module(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("number", [1, 4])
def test_a_module_has_one_state(number: int, where: Any) -> None:
    module = _Module(nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, ADAMW, wrt=nnx.Param)

    @nnx.jit
    def plain(model: Any, optimizer: Any, batch: Any) -> None:
        optimizer.update(model, nnx.grad(_of_module)(model, batch))

    for batch in _batches():
        plain(module, optimizer, batch)
    step = _step(_of_module, ADAMW, number, **where)
    state = train(step, step.init(_Module(nnx.Rngs(0))), _batches())
    found = step.model(state)
    assert_close(_arrays_of(found), _arrays_of(module))
    assert found.norm.mean[...].shape == (WIDTH,)
    values = lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(1)
    module.eval()

    def evaluated(model: Any, batch: Any) -> Any:
        model.eval()
        return values(model, batch)

    expected = values(module, _batches()[0]).mean()
    np.testing.assert_allclose(step.evaluate(state, _batches()[:1], evaluated), expected, rtol=1e-5)


class _Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden = linen.BatchNorm(use_running_average=False, momentum=0.5)(linen.Dense(WIDTH)(x))
        return linen.Dense(WIDTH)(linen.relu(hidden))


def _of_linen(params: Any, model_state: Any, batch: Any) -> Any:
    variables = {"params": params, **model_state["flax"]}
    out, after = _Linen().apply(variables, batch["x"], mutable=["batch_stats"])
    seen = model_state["seen"] + (batch["x"][:, 0] > 0).sum()
    return ((out - batch["y"]) ** 2).mean(), {"flax": after, "seen": seen}


@pytest.mark.parametrize("steps", [1, 2])
def test_model_state_is_kept_as_it_is_returned(steps: int) -> None:
    variables = _Linen().init(jax.random.key(0), jnp.zeros((1, FEATURES)))
    before = {"flax": {"batch_stats": variables["batch_stats"]}, "seen": jnp.int32(0)}
    params, model_state = variables["params"], before
    for batch in _batches():
        gradients = jax.tree.map(jnp.zeros_like, params)
        for i in range(steps):
            rows = jax.tree.map(lambda x, i=i: x[i::steps], batch)
            found, model_state = jax.grad(_of_linen, has_aux=True)(params, model_state, rows)
            gradients = jax.tree.map(lambda a, b: a + b / steps, gradients, found)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    # Integers that depend on the batch are the same on all shards here.
    step = _step(_of_linen, model_state="mean", accumulate_steps=steps, weight_update="sharded")
    state = step.init(variables["params"], model_state=before)
    assert_close(step.model(train(step, state, _batches())), (params, model_state))
    assert "one, as the loss returns it" in step.describe()


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_options_behind_the_gradient(where: Any) -> None:
    def with_aux(params: Any, batch: Any) -> Any:
        return contrastive(params, batch), {"each": batch["x"].sum(1), "mean": batch["x"].mean()}

    of_all = {
        "accumulate_steps": 2,
        "loss_scale": "dynamic",
        "nonfinite": "skip",
        "ema": 0.9,
        "metrics": ("grad_norm", "param_norm"),
        "check_divergence": 1,
        "has_aux": True,
    }
    found = []
    for number in (1, 4):
        step = _step(with_aux, ADAMW, number, **where, **of_all)
        state = step.init(_params())
        for batch in _batches():
            state, metrics = step(state, batch)
        step.finish(state)
        assert not metrics["skipped"]
        names = ("loss", "aux", "grad_norm", "param_norm", "loss_scale")
        chosen = {name: metrics[name] for name in names}
        found.append((step.model(state), step.model(state, ema=True), chosen))
    assert_close(*found, atol=2e-6)
    assert found[0][2]["aux"]["each"].shape == (2, ROWS // 2)
    of_half = lambda params, batch, i: contrastive(params, jax.tree.map(lambda x: x[i::2], batch))
    of_halves = lambda params, batch: sum(of_half(params, batch, i) / 2 for i in range(2))
    expected, _ = on_one_device(of_halves, ADAMW, _params(), _batches())
    assert_close(found[1][0], expected)


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_parameters_of_16_bits(where: Any) -> None:
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params())
    found = []
    for number in (1, 4):
        step = _step(token_mean, SGD, number, master_dtype="float32", **where)
        found.append(step.model(train(step, step.init(params), _batches())))
    as_wide = [jax.tree.map(lambda x: np.asarray(x, np.float32), each) for each in found]
    assert_close(*as_wide, atol=1e-2)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_a_step_that_is_not_finite_is_skipped(where: Any) -> None:
    step = _step(contrastive, ADAMW, nonfinite="skip", **where)
    state, bad = step.init(_params()), _batches()[0]
    bad["y"][3] = np.nan
    before = jax.device_get(step.model(state))
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    assert int(metrics["nonfinite"].shard) == -1
    text = metrics["nonfinite"].describe(state.params)
    assert text == "the gradient of `first` is not finite"
    assert_close(step.model(state), before, atol=0)


def test_frozen_parameters_and_whole_entries() -> None:
    def loss(params: Any, batch: Any) -> Any:
        return contrastive(params, {**batch, "x": batch["x"] * batch["factor"]})

    chosen = lambda path, _: "first" in str(path)
    found = []
    for number in (1, 4):
        step = _step(
            loss, SGD, number, wrt=chosen, params="sharded", replicated_entries=("factor",)
        )
        batches = [{**batch, "factor": np.float32(0.5)} for batch in _batches()]
        found.append(step.model(train(step, step.init(_params()), batches)))
    assert_close(*found)


def test_the_state_goes_to_other_shards() -> None:
    module = lambda: _Module(nnx.Rngs(0))
    steps = {n: _step(_of_module, ADAMW, n, weight_update="sharded") for n in (2, 4)}
    state = steps[4].init(module())
    state, _ = steps[4](state, _batches()[0])
    steps[2].init(module())
    moved = steps[2].reshard(steps[4].unshard(state))
    for batch in _batches()[1:]:
        state, _ = steps[4](state, batch)
        moved, _ = steps[2](moved, batch)
    assert_close(*map(_arrays_of, (steps[2].model(moved), steps[4].model(state))))


def test_it_says_what_it_does() -> None:
    step = _step(batch_norm, ADAMW, params="sharded", accumulate_steps=2)
    state = step.init(_params())
    said = step.describe()
    assert said.startswith(
        "gather → gradient of one loss over the batch, summed by XLA → accumulate 2 microbatches"
    )
    assert "gathered at once, at the start of the step, for the loss over the batch" in said
    report = crossshard.inspect(step.lower(state, _batches()[0]).compile())
    assert "all-gather" in {each.kind for each in report.collectives}


MEAN = functools.partial(CrossShardOptimizer, SGD)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "weight=": (SGD, {"weight": "mask"}, "Weigh the rows in the loss"),
    "preprocess=": (MEAN(preprocess=optax.clip(1.0)), {}, "optax.chain"),
    "nonfinite='quarantine'": (SGD, {"nonfinite": "quarantine"}, "nonfinite='skip'"),
    "group_assignment": (MEAN(group_assignment=[[0, 1], [2, 3]]), {}, "loss_over='shard'"),
    "model_state='per_shard'": (SGD, {"model_state": "per_shard"}, "model_state='mean'"),
    "aux_reduction='per_shard'": (
        SGD,
        {"has_aux": True, "aux_reduction": "per_shard"},
        "as the loss returns it",
    ),
    "reduction='sum'": (MEAN(reduction="sum"), {}, "reduction='mean'"),
    "metrics has 'noise_scale'": (SGD, {"metrics": ("noise_scale",)}, "Leave it out"),
    "reduce_dtype='bfloat16'": (SGD, {"reduce_dtype": "bfloat16"}, "Leave it out"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_needs_a_shards_own_gradient_is_refused(what: str) -> None:
    optimizer, options, instead = REFUSED[what]
    loss = (lambda p, s, batch: (0.0, s)) if "model_state" in options else contrastive
    with pytest.raises(ArgumentError, match="one loss, of the whole batch") as error:
        _step(loss, optimizer, **options)
    assert str(error.value).startswith(what)
    assert instead in str(error.value)


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ArgumentError, match="loss_over must be 'rows', 'batch' or 'shard'"):
        make_train_step(contrastive, SGD, num_shards=2, loss_over="global")


def test_rows_that_do_not_divide_are_refused_without_a_weight() -> None:
    step = _step(contrastive)
    batch = jax.tree.map(lambda x: x[:10], _batches()[0])
    with pytest.raises(ArgumentError, match=r"Pass 8 or 12\.$"):
        step(step.init(_params()), batch)


def test_a_checkpoint_goes_to_other_shards(tmp_path: Any) -> None:
    steps = [_step(_of_module, ADAMW, n, params="sharded") for n in (4, 2)]
    state = steps[0].init(_Module(nnx.Rngs(0)))
    state, _ = steps[0](state, _batches()[0])
    with crossshard.Checkpoints(tmp_path, steps[0]) as checkpoints:
        checkpoints.save(state)
    with crossshard.Checkpoints(tmp_path, steps[1]) as checkpoints:
        found, _ = checkpoints.restore(steps[1].init(_Module(nnx.Rngs(1))), 1)
    found, _ = steps[1](found, _batches()[1])
    state, _ = steps[0](state, _batches()[1])
    assert_close(*map(_arrays_of, (steps[1].model(found), steps[0].model(state))))


def test_under_a_plain_jit_there_is_nothing_to_reduce() -> None:
    expected, _ = on_one_device(contrastive, ADAMW, _params(), _batches())
    mesh = jax.make_mesh((4,), ("shards",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    rows = jax.device_put(_batches(), NamedSharding(mesh, P("shards")))
    params = jax.device_put(_params(), NamedSharding(mesh, P()))
    found, _ = on_one_device(contrastive, CrossShardOptimizer(ADAMW), params, rows)
    assert_close(found, expected)
