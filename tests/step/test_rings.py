"""Parameters in parts on what looks like a torus: products in rings, and that the step stays."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from tests.quick import deep_but
from tests.step.common import assert_close, on_one_device, train
from tests.step.layered import (
    BATCHES,
    CASES,
    LAYERS,
    PARAMS,
    SHARDS,
    WIDTH,
    scan_loss,
    sent,
    step_of,
)

PART = WIDTH // SHARDS
SGD = optax.sgd(0.01)


@pytest.fixture(autouse=True)
def torus(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU devices count as a torus of 2 x 2."""
    monkeypatch.setattr("crossshard.shards.devices.torus_factors", lambda mesh: (2, 2))
    monkeypatch.setattr("crossshard.shards.devices.sends_beside_products", lambda mesh: True)


def trained(loss: Any, batches: Any = BATCHES, **options: Any) -> Any:
    step = step_of("parts", loss, **options)
    return train(step, step.init(PARAMS), batches).params


@pytest.mark.parametrize("name", deep_but(["scan", "remat", "remat, dots", "cond"], CASES))
def test_each_loss_trains_as_one_device_does(name: str):
    case = CASES[name]
    want, _ = on_one_device(case.loss, SGD, PARAMS, BATCHES[:2])
    assert_close(trained(case.loss, BATCHES[:2], loss_over=case.over), want)


@pytest.mark.parametrize(("name", "gathers"), [("scan", 1), ("remat", 2)])
def test_a_layer_goes_round_as_often_as_it_was_gathered(name: str, gathers: int):
    step = step_of("parts", CASES[name].loss)
    report = crossshard.inspect(step.lower(step.abstract_init(PARAMS), BATCHES[0]))
    permutes = [each for each in report.collectives if each.kind == "collective-permute"]
    layers = sum(each.bytes_sent for each in permutes if each.times == LAYERS)
    moved = 4 * LAYERS * WIDTH * WIDTH * (SHARDS - 1) / SHARDS
    assert layers == (gathers + 1) * moved
    assert not any(f"{WIDTH}]" in arrays for kind, arrays, _ in sent(step) if "all-" in kind)


def test_what_products_do_not_meet_is_gathered():
    step = step_of("parts", CASES["remat, dots"].loss)
    kinds = {(kind, times) for kind, _, times in sent(step)}
    assert ("all-gather", LAYERS) in kinds
    step = step_of("parts", scan_loss, wrt=lambda path, _: "layers" not in str(path))
    assert "all-reduce" not in {kind for kind, _, _ in sent(step)}


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_where_nothing_goes_beside_computation(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crossshard.shards.devices.sends_beside_products", lambda mesh: False)
    wide = 512
    shapes = {"up": (WIDTH, wide), "down": (wide, WIDTH)}
    random = np.random.default_rng(0)
    params = {name: np.float32(0.05 * random.normal(size=each)) for name, each in shapes.items()}
    params["back"] = params["up"].copy()

    def loss(params: Any, batch: Any) -> Any:
        h = jnp.tanh(batch["x"] @ params["up"])
        h = jnp.einsum("rw,vw->rv", h, params["back"]) if transposed else h @ params["down"]
        return ((h.mean(-1) - batch["y"]) ** 2).mean()

    want, _ = on_one_device(loss, SGD, params, BATCHES[:2])
    step = step_of("parts", loss)
    state = train(step, step.init(params), BATCHES[:2])
    assert_close(state.params, want, 1e-5)
    assert "slice by slice beside their product, in float32: " in step.describe()
    kinds = [kind for kind, _, _ in sent(step, params)]
    assert kinds.count("all-gather") >= 4
    assert "collective-permute" not in kinds


def test_describe_says_it():
    step = step_of("parts", scan_loss)
    step(step.init(PARAMS), BATCHES[0])
    text = step.describe()
    assert (
        f"gathered row by row in a loop of {LAYERS} turns, slice by slice beside their product, in "
        f"float32: `layers/w`" in text
    ), text


@pytest.mark.parametrize(
    "options",
    [{"reduce_dtype": "bfloat16"}, {"gather_dtype": "bfloat16"}, {"accumulate_steps": 2}],
    ids=str,
)
def test_options_do_what_they_did(options: Any, monkeypatch: pytest.MonkeyPatch):
    in_rings = trained(scan_loss, **options)
    monkeypatch.setattr("crossshard.shards.devices.sends_beside_products", lambda mesh: False)
    close = 3e-4 if "accumulate_steps" not in options else 1e-6
    assert_close(in_rings, trained(scan_loss, **options), close)


def test_weighted_shards():
    weight = lambda batch: batch["w"].sum()

    batches = [dict(each, w=np.repeat(np.float32([1, 0, 2, 1]), 6)) for each in BATCHES]
    runs = []
    for in_rings in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            name = "crossshard.shards.devices.sends_beside_products"
            patch.setattr(name, lambda mesh, is_so=in_rings: is_so)
            runs.append(trained(scan_loss, batches, weight=weight, loss_over="shard"))
    assert_close(*runs)


def test_sixteen_bits_of_computation(monkeypatch: pytest.MonkeyPatch):
    def loss(params: Any, batch: Any) -> Any:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch))
        return CASES["remat"].loss(*half).astype(jnp.float32)

    in_rings = trained(loss)
    monkeypatch.setattr("crossshard.shards.devices.sends_beside_products", lambda mesh: False)
    assert_close(in_rings, trained(loss), 2e-3)
