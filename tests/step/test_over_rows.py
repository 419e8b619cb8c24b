"""loss_over="rows", the default: a mean over rows runs, and every other loss is refused."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import LossError
from crossshard.step.losses.loss import StepLoss

SHARDS = 4
W = np.float32(np.random.default_rng(0).normal(size=(3, 2)))
BATCH = {
    "x": np.float32(np.random.default_rng(1).normal(size=(16, 3))),
    "mask": np.float32(np.arange(16) % 3 > 0),
    "other": np.ones(16, np.float32),
}


def made(loss: Any, **options: Any) -> Any:
    return make_train_step(loss, optax.sgd(0.1), num_shards=SHARDS, **options)


def refused(loss: Any, initial: Any = None, **options: Any) -> str:
    step = made(loss, **options)
    with pytest.raises(LossError) as error:
        step.lower(step.abstract_init(W, model_state=initial), BATCH)
    return str(error.value)


def mean(w: Any, batch: Any) -> Any:
    return ((batch["x"] @ w) ** 2).mean()


def masked(w: Any, batch: Any) -> Any:
    return ((batch["x"] @ w).sum(1) * batch["mask"]).sum() / batch["mask"].sum()


def with_noise(w: Any, batch: Any, rng: Any) -> Any:
    return mean(w, {"x": batch["x"] + jax.random.normal(rng, batch["x"].shape)})


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (with_noise, {}),
        (masked, {"weight": lambda batch: batch["mask"].sum()}),
        (lambda w, batch: jax.lax.pmean((batch["x"] @ w).std(), "shards"), {}),
        (lambda w, batch: (batch["x"] @ w).std(), {"loss_over": "shard"}),
    ],
)
def test_what_is_right_on_every_number_of_shards_runs(loss: Any, options: dict[str, Any]):
    step = made(loss, **options)
    step.lower(step.abstract_init(W), BATCH)


def dice(w: Any, batch: Any) -> Any:
    guess = jax.nn.sigmoid(batch["x"] @ w)[:, 0]
    both = (guess * batch["mask"]).sum()
    return 1 - (2 * both + 1) / (guess.sum() + batch["mask"].sum() + 1)


def of_few_rows(w: Any, batch: Any) -> Any:
    return (batch["x"] @ w if len(batch["x"]) < 5 else batch["x"] @ (2 * w)).mean()


def decayed(factor: float) -> Any:
    return lambda w, batch: mean(w, batch) + factor * (w**2).sum() / len(batch["x"])


other = lambda w, batch: masked(w, {**batch, "x": batch["x"] * batch["other"][:, None]})
positive = lambda w, batch: (batch["x"] @ w).sum() / (batch["x"] > 0).sum()
TERMS = "terms that depend differently on the number of rows"
OF_DECAY = (TERMS, "Leave the number of rows out of the regulariser")
REFUSED: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "rows compared": (
        lambda w, batch: (batch["x"] @ w).std(),
        {},
        (
            "The loss compares rows of the batch: sub of a row and of a sum",
            *("step/test_over_rows.py:", "loss_over='batch'", "loss_over='shard'"),
        ),
    ),
    "a number beside a sum": (dice, {}, ("div of a sum over rows plus a number (",)),
    "a bound of means": (
        lambda w, batch: jnp.maximum((batch["x"] @ w).mean(0), 0.5).sum(),
        {},
        ("max of a sum over rows (", "test_over_rows.py:", "as max is not"),
    ),
    # What is at fault is the bound, and not what comes after it.
    "a bound of means, added": (
        lambda w, batch: mean(w, batch) + jnp.maximum((batch["x"] @ w).mean(0), 0.5).sum(),
        {},
        ("max of a sum over rows (", "as max is not"),
    ),
    "a number that is added to a sum": (
        lambda w, batch: (batch["x"] @ w).sum() + 1e-6,
        {},
        ("a number that is added to a sum over rows (", "test_over_rows.py:"),
    ),
    "what a sum divides": (
        lambda w, batch: (w**2).sum() / (batch["x"] @ w).sum(),
        {},
        ("div of a sum over rows (", "as div is not"),
    ),
    # However small, so that numbers would not show it.
    "decay by rows": (decayed(1e-9), {}, OF_DECAY),
    "a mask": (masked, {}, ("Pass weight='mask'",)),
    "another mask": (other, {"weight": "other"}, ("Pass weight='mask'",)),
    "no entry": (positive, {}, ("return crossshard.Mean(total, count)",)),
    "a sum": (lambda w, batch: (batch["x"] @ w).sum(), {}, ("reduction='sum'",)),
    # As models of words and of graphs choose from all rows, laid end to end.
    "the position of a row": (
        lambda w, batch: batch["x"].reshape(-1)[jnp.arange(len(batch["x"])) * 3].mean() * w.sum(),
        {},
        ("computes with the position of a row", "jnp.take_along_axis", "crossshard.rowwise"),
    ),
    "a root of the mean": (
        lambda w, batch: jnp.sqrt(((batch["x"] @ w) ** 2).mean()),
        {},
        ("as sqrt is not, needs the mean over all rows", "loss_over='batch'"),
    ),
    "a guard": (
        lambda w, batch: jnp.nan_to_num((batch["x"] @ w).mean()),
        {},
        ("Instead of a condition on what is finite, write nonfinite='skip'",),
    ),
    "undecided": (of_few_rows, {}, ("Nothing proves",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_over_rows_is_refused_with_what_to_write(name: str):
    loss, options, words = REFUSED[name]
    text = refused(loss, **options)
    for each in words:
        assert each in text
    assert name != "no entry" or "Pass weight=" not in text


@pytest.mark.parametrize("total", [lambda x: x, lambda x: jax.lax.pmean(x, "shards")])
@pytest.mark.parametrize("shards", [1, SHARDS])
def test_a_count_that_is_summed_over_the_shards_is_not_that_of_other_microbatches(
    total: Any, shards: int
):
    def loss(w: Any, batch: Any) -> Any:
        losses = ((batch["x"] @ w).sum(1) * batch["mask"]).sum()
        return total(losses) / jax.lax.pmean(batch["mask"].sum(), "shards")

    options = {"num_shards": shards, "axis_name": "shards"}
    step = make_train_step(loss, optax.sgd(0.1), **options)
    state, _ = step(step.init(W), BATCH)
    want = W - 0.1 * jax.jit(jax.grad(masked))(W, BATCH)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)
    step = make_train_step(loss, optax.sgd(0.1), accumulate_steps=2, **options)
    with pytest.raises(LossError, match="divides a sum over the rows of the batch by another"):
        step(step.init(W), BATCH)


def test_one_shard_has_nothing_to_prove_but_for_its_microbatches():
    loss = lambda w, batch: (batch["x"] @ w).std()
    step = make_train_step(loss, optax.sgd(0.1), num_shards=1)
    step.lower(step.abstract_init(W), BATCH)
    step = make_train_step(loss, optax.sgd(0.1), num_shards=1, accumulate_steps=2)
    said = "compares rows.*meant. And leave out accumulate_steps, with which"
    with pytest.raises(LossError, match=said):
        step.lower(step.abstract_init(W), BATCH)


def test_a_sum_runs_where_shards_are_added_up():
    loss = lambda w, batch: ((batch["x"] @ w) ** 2).sum()
    summed = CrossShardOptimizer(optax.sgd(0.01), reduction="sum")
    step = make_train_step(loss, summed, num_shards=SHARDS)
    state, _ = step(step.init(W), BATCH)
    want = W - 0.01 * jax.jit(jax.grad(loss))(W, BATCH)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_a_sum_is_refused_where_microbatches_are_averaged(shards: int):
    loss = lambda w, batch: ((batch["x"] @ w) ** 2).sum()
    summed = CrossShardOptimizer(optax.sgd(0.01), reduction="sum")
    step = make_train_step(loss, summed, num_shards=shards, accumulate_steps=2)
    with pytest.raises(LossError, match="accumulate_steps=2 takes the mean of the microbatches"):
        step(step.init(W), BATCH)


def with_keys(params: Any, state: Any, batch: Any) -> Any:
    noise = jax.random.normal(state["key"], batch["x"].shape)
    return (((batch["x"] + noise) @ params) ** 2).mean(), {"key": jax.random.split(state["key"])[0]}


def test_keys_in_a_state_that_all_shards_share_are_no_noise_of_rows():
    state = {"key": jax.random.key(0)}
    text = refused(with_keys, model_state="mean", initial=state)
    assert text.startswith("The loss draws noise from a key that is the same on every shard")
    assert "rng" in text
    assert "model_state='per_shard'" in text
    assert "test_over_rows.py:" in text
    for options in ({"model_state": "per_shard"}, {"model_state": "mean", "loss_over": "batch"}):
        step = made(with_keys, **options)
        step.lower(step.abstract_init(W, model_state=state), BATCH)


def test_what_microbatches_trace_again_is_proven_once(monkeypatch: pytest.MonkeyPatch):
    from crossshard.step.losses import proven as step_loss

    seen = []
    look = step_loss.facts_of_inputs
    monkeypatch.setattr(step_loss, "facts_of_inputs", lambda *a: seen.append(1) or look(*a))
    step = made(mean, accumulate_steps=2)
    step.lower(step.abstract_init(W), BATCH)
    step.lower(step.abstract_init(W), {name: x[:8] for name, x in BATCH.items()})
    assert len(seen) == 2


def test_what_a_loss_is_over_is_one_of_three_finals() -> None:
    finals = StepLoss.__subclasses__()
    assert {each.__name__ for each in finals} == {"RowsLoss", "BatchLoss", "VirtualLoss"}
    methods = lambda kind: {name for name, x in vars(kind).items() if inspect.isfunction(x)}
    shared = methods(StepLoss) - StepLoss.__abstractmethods__
    for each in finals:
        assert each.__final__
        own = {name for name in methods(each) if not name.startswith("__")}
        assert own >= StepLoss.__abstractmethods__
        assert not own & shared
