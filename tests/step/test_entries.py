"""replicated_entries: entries of a batch that every shard gets whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError
from tests.quick import deep
from tests.step.common import on_one_device, sgd_step, train

RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(5, 3)).astype(np.float32)
W = np.ones(3, np.float32)
NAMES = ("temperature", "table")


def batch_of(rows: int, temperature: Any) -> dict[str, Any]:
    index = RNG.integers(0, 5, size=rows)
    mask = np.arange(rows) % 3 != 1
    return {"index": index, "mask": mask, "table": TABLE, "temperature": temperature}


def loss_fn(w: Any, batch: Any) -> jax.Array:
    rows = jnp.tanh(batch["table"][batch["index"]] @ w / batch["temperature"])
    return (rows * batch["mask"]).sum() / batch["mask"].sum()


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1), deep(optax.adamw(0.1))], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize(
    "weight", ["mask", lambda batch: batch["mask"].sum() * batch["table"].shape[0]]
)
def test_a_table_and_a_number_that_changes(weight: Any, optimizer: Any):
    step = make_train_step(
        loss_fn, optimizer, num_shards=4, weight=weight, replicated_entries=NAMES
    )
    batches = [batch_of(*each) for each in ((13, 2.0), (13, 0.5), (16, np.float32(1)))]
    state = train(step, step.init(W), batches)
    params, _ = on_one_device(loss_fn, optimizer, W, batches)
    np.testing.assert_allclose(step.model(state), params, rtol=1e-5, atol=1e-6)
    # Twice 16 rows, since 13 are padded, and a number is an argument.
    assert step._program._compiled._cache_size() == 1


def test_the_table_is_whole_on_every_shard():
    step = sgd_step(loss_fn, 0.1, 4, weight="mask", replicated_entries=NAMES)
    batch = {**batch_of(12, jnp.float32(1)), "table": jax.device_put(TABLE)}
    abstract = step._program._place.abstract(batch)
    shards = {name: entry.sharding.shard_shape(entry.shape) for name, entry in abstract.items()}
    assert shards == {"index": (3,), "mask": (3,), "table": (5, 3), "temperature": ()}
    step.lower(step.abstract_init(W), batch)
    # In a jit of one's own.
    _, metrics = jax.jit(lambda state, batch: step(state, batch))(step.init(W), batch)
    np.testing.assert_allclose(metrics["loss"], loss_fn(W, batch), rtol=1e-5)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_microbatches_and_noise_are_of_the_rows_alone(accumulate_steps: int):
    # The table comes first in the batch, and its five rows do not divide.
    batch = {"a table": TABLE, "index": RNG.integers(0, 5, size=16), "temperature": 2.0}
    loss = lambda w, batch: jnp.tanh(
        batch["a table"][batch["index"]] @ w / batch["temperature"]
    ).mean()
    step = sgd_step(
        loss,
        0.1,
        4,
        accumulate_steps=accumulate_steps,
        metrics=("noise_variance",),
        replicated_entries=("a table", "temperature"),
    )
    state, metrics = step(step.init(W), batch)
    of_rows = lambda rows: np.float64(jax.grad(loss)(W, {**batch, "index": batch["index"][rows]}))
    gradient = of_rows(slice(None))
    np.testing.assert_allclose(step.model(state), W - 0.1 * gradient, rtol=1e-5)
    of_shards = np.mean([(of_rows(slice(s, s + 4)) ** 2).sum() for s in range(0, 16, 4)])
    variance = (of_shards - (gradient**2).sum()) / (1 / 4 - 1 / 16)
    np.testing.assert_allclose(metrics["noise_variance"], variance, rtol=1e-4)


@pytest.mark.parametrize(
    ("names", "table", "error", "said"),
    [
        ("table", TABLE, ArgumentTypeError, r"tuple of names.*'table'"),
        (("mask",), TABLE, ArgumentError, "'mask' is the weight"),
        (("other",), TABLE, ArgumentError, r"\('other',\).*the batch has \['index'"),
        (("table",), "words", ArgumentTypeError, r"batch\['table'\] must be an array or a number"),
        (("table",), TABLE, ArgumentError, r"temperature.*is a scalar.*replicated_entries"),
    ],
)
def test_what_is_not_an_entry(names: Any, table: Any, error: type, said: str):
    def run() -> None:
        options = {"weight": "mask", "replicated_entries": names}
        step = sgd_step(loss_fn, 0.1, 2, **options)
        step(step.init(W), {**batch_of(4, 1.0), "table": table})

    with pytest.raises(error, match=said):
        run()
