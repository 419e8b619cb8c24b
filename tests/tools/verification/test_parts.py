"""Scanned losses and parameters in parts: right steps pass, and planted faults are named."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard.step import gather as leaves

LAYERS, WIDTH, HIDDEN, SHARDS = 2, 64, 1024, 8


def params() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    of = lambda *shape: (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)
    layers = {"up": of(LAYERS, WIDTH, HIDDEN), "down": of(LAYERS, HIDDEN, WIDTH)}
    return {"first": of(WIDTH, WIDTH), "layers": layers, "scale": np.ones(WIDTH, np.float32)}


def batch() -> dict[str, np.ndarray]:
    """The mask has another number of ones on each shard."""
    rng = np.random.default_rng(1)
    rows = np.arange(32)
    x = rng.normal(size=(32, WIDTH)).astype(np.float32)
    y = (x[:, 0] + rows / 10).astype(np.float32)
    return {"x": x, "y": y, "mask": (rows % 4 <= rows // 4 % 4).astype(np.float32)}


@jax.checkpoint
def block(x: Any, layer: Any) -> Any:
    return x + jnp.tanh(x @ layer["up"]) @ layer["down"], None


def errors(params: Any, batch: Any) -> Any:
    """float[rows]."""
    x, _ = jax.lax.scan(block, batch["x"] @ params["first"], params["layers"])
    return (jnp.mean(x * params["scale"], axis=-1) - batch["y"]) ** 2


def mean(params: Any, batch: Any) -> Any:
    return errors(params, batch).mean()


def sharded(loss: Any = mean, **options: Any) -> Any:
    given = {"num_shards": SHARDS, "params": "sharded"} | options
    return crossshard.make_train_step(loss, optax.adam(1e-3), **given)


RIGHT: dict[str, dict[str, Any]] = {
    "in parts": {},
    "in parts, microbatches": {"accumulate_steps": 2},
    "in parts, not finite": {"nonfinite": "skip"},
    "whole, updated in parts": {"params": "replicated", "weight_update": "sharded"},
    "whole": {"params": "replicated", "weight_update": "replicated"},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x in ("in parts", "whole") else pytest.mark.deep) for x in RIGHT],
)
def test_a_right_step_is_not_accused(name: str):
    found = crossshard.verify(sharded(**RIGHT[name]), params(), batch())
    assert found.ok, found
    assert {leaf.verdict for leaf in found.leaves} == {"fine"}


def test_a_factory_of_steps_in_parts():
    def make_step(optimizer: Any, number: int) -> Any:
        step = crossshard.make_train_step(mean, optimizer, num_shards=number, params="sharded")
        return step, step.init(params())

    found = crossshard.verify(make_step, batch(), num_shards=SHARDS)
    assert found.ok, found


# What the backward pass does to a gradient that it sums, and what is said of it.
Change = Callable[[Any, Any], Any]
FAULTS: dict[str, tuple[str, str, Change]] = {
    "summed, not averaged": ("update", "N", lambda g, shards: shards.number * g),
    "summed twice": ("update", "", lambda g, shards: shards.number**2 * g),
    "averaged twice": ("update", "1/N", lambda g, shards: g / shards.number),
    "rows of a shard left out": (
        "update",
        "",
        lambda g, shards: jnp.where(shards.index() == 6, 0, g),
    ),
    "a shard's own": (
        "update",
        "",
        lambda g, shards: jnp.where(shards.index() == 0, shards.number * g, 0),
    ),
    "rounded": (
        "update",
        "",
        lambda g, shards: jax.lax.reduce_precision(g, 8, 7) if shards.number > 1 else g,
    ),
    "the other way": ("update", "", lambda g, shards: -g if shards.number > 1 else g),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if n < 2 else pytest.mark.deep) for n, x in enumerate(FAULTS)],
)
@pytest.mark.parametrize("rest", ["sharded", "replicated"])
def test_a_fault_of_sums_in_the_backward_pass_is_named(
    name: str, rest: str, monkeypatch: pytest.MonkeyPatch
):
    kind, factor, change = FAULTS[name]
    plain = leaves.bucketed_sum

    def wrong(arrays: Any, partitions: Any, shards: Any) -> Any:
        return plain([change(x, shards) for x in arrays], partitions, shards)

    monkeypatch.setattr(leaves, "bucketed_sum", wrong)
    found = crossshard.verify(sharded(params=rest), params(), batch())
    # The others are small, and summed together after it.
    wanted = {"layers/up", "layers/down"}
    assert {(fault.kind, fault.factor) for fault in found.faults} == {(kind, factor)}, found
    named = {leaf.name.removeprefix("params/") for leaf in found.leaves if leaf.verdict != "fine"}
    assert named == wanted, found


LOSSES = {
    "1/N": lambda params, batch: errors(params, batch).sum(),
    "": lambda params, batch: (errors(params, batch) * batch["mask"]).sum() / batch["mask"].sum(),
}


@pytest.mark.parametrize("factor", LOSSES)
def test_a_fault_of_the_loss_is_named(factor: str):
    found = crossshard.verify(sharded(LOSSES[factor], loss_over="shard"), params(), batch())
    assert {(fault.kind, fault.factor) for fault in found.faults} == {("update", factor)}, found
