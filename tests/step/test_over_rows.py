"""loss_over="rows": a step whose loss is a mean over rows runs, and all others are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import CrossShardOptimizer, make_train_step
from crossshard.errors import ArgumentError, LossError

SHARDS = 4
W = np.float32(np.random.default_rng(0).normal(size=(3, 2)))
BATCH = {
    "x": np.float32(np.random.default_rng(1).normal(size=(16, 3))),
    "mask": np.float32(np.arange(16) % 3 > 0),
    "other": np.ones(16, np.float32),
}


def made(loss: Any, **options: Any) -> Any:
    return make_train_step(loss, optax.sgd(0.1), num_shards=SHARDS, loss_over="rows", **options)


def refused(loss: Any, **options: Any) -> str:
    step = made(loss, **options)
    with pytest.raises(LossError) as error:
        step.lower(step.abstract_init(W), BATCH)
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
        (mean, {}),
        (mean, {"accumulate_steps": 2}),
        (mean, {"params": "sharded"}),
        (with_noise, {}),
        (masked, {"weight": "mask"}),
        (masked, {"weight": lambda batch: batch["mask"].sum()}),
        (lambda w, batch: jax.lax.pmean((batch["x"] @ w).std(), "shards"), {}),
    ],
)
def test_what_is_right_on_every_number_of_shards_runs(loss: Any, options: dict[str, Any]):
    step = made(loss, **options)
    _, metrics = step(step.init(W), BATCH)
    assert np.isfinite(metrics["loss"])


def test_a_mean_is_that_of_one_device():
    step = made(mean)
    state, _ = step(step.init(W), BATCH)
    want = W - 0.1 * jax.grad(mean)(W, BATCH)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)


def test_what_compares_rows_is_refused_with_its_line():
    text = refused(lambda w, batch: (batch["x"] @ w).std())
    assert text.startswith("The loss compares rows of the batch: sub of a row and of a sum")
    assert "step/test_over_rows.py:" in text
    assert "loss_over='batch'" in text
    assert "loss_over='shard'" in text


def test_a_ratio_is_refused_with_the_weight_to_write():
    assert "Pass weight='mask'" in refused(masked)
    assert "weight=lambda batch" in refused(
        lambda w, batch: (batch["x"] @ w).sum() / (batch["x"] > 0).sum()
    )


def test_a_weight_that_counts_another_entry_is_refused():
    assert "Pass weight='mask'" in refused(
        lambda w, batch: masked(w, {**batch, "x": batch["x"] * batch["other"][:, None]}),
        weight="other",
    )


def test_a_sum_is_refused():
    assert "reduction='sum'" in refused(lambda w, batch: (batch["x"] @ w).sum())


def test_what_is_not_decided_is_refused():
    def loss(w: Any, batch: Any) -> Any:
        return (batch["x"] @ w if len(batch["x"]) < 5 else batch["x"] @ (2 * w)).mean()

    assert "Nothing proves" in refused(loss)


def test_an_unknown_word_is_refused():
    with pytest.raises(ArgumentError, match="loss_over"):
        make_train_step(mean, CrossShardOptimizer(optax.sgd(0.1)), loss_over="examples")


def test_by_default_each_shard_has_its_own():
    step = make_train_step(
        lambda w, batch: (batch["x"] @ w).std(), optax.sgd(0.1), num_shards=SHARDS
    )
    _, metrics = step(step.init(jnp.asarray(W)), BATCH)
    assert np.isfinite(metrics["loss"])
