"""The way in from TensorFlow 1: the port has the numbers that TensorFlow printed."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.ways_in import record, tf1_port
from tests.quick import deep_but
from tests.test_docs import ROOT, blocks, run

PAGE = ROOT / "docs" / "ways-in" / "from-tensorflow-1.md"
FOLDER = ROOT / "examples" / "ways_in"
EVERY_PROGRAM = json.loads(record.RECORDED.read_text())
RECORDED, OPTIMIZERS = EVERY_PROGRAM["tf1_optimization"], EVERY_PROGRAM["tf1_optimizers"]
KINDS = {"adam": tf1_port.adam_weight_decay, "sgd": optax.sgd}
TOLERANCE = 1e-5


def assert_same(losses: Any, parameters: Any, expected: Any) -> None:
    np.testing.assert_allclose(losses, expected["losses"], rtol=TOLERANCE)
    for name, value in expected["parameters"].items():
        tolerance = TOLERANCE * np.abs(value).max()
        np.testing.assert_allclose(parameters[name], value, rtol=0, atol=tolerance)


def parameters_of(model: tf1_port.Network) -> dict[str, np.ndarray]:
    """By the names of TensorFlow."""
    names = RECORDED["adam, one device"]["parameters"]
    value = lambda layer, name: np.asarray(getattr(getattr(model, layer), name)[...])
    return {name: value(*name.split("/")) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_eight_shards_train_as_tensorflow_on_one_device(kind: str):
    losses, model = tf1_port.train(tf1_port.create_optimizer(0.05, 20, 5, KINDS[kind]))
    assert_same(losses, parameters_of(model), RECORDED[f"{kind}, one device"])
    with pytest.raises(AssertionError):
        assert_same(losses, parameters_of(model), RECORDED[f"{kind}, eight shards"])


@pytest.mark.parametrize("kind", deep_but(["sgd"], KINDS))
def test_with_incoming_scaled_it_is_as_it_was(kind: str):
    names: dict[str, Any] = {**vars(tf1_port), "__name__": "page"}
    (code,) = [code for code in blocks(PAGE, "python") if "def as_it_was" in code]
    run(PAGE, code, names)
    opt = names["without_clip"](KINDS[kind])
    losses, model = tf1_port.train(opt, names["as_it_was"]("scaled"))
    assert_same(losses, parameters_of(model), RECORDED[f"{kind}, eight shards"])


def after_each(of_optax: Any) -> np.ndarray:
    """What a rate is in each of twelve steps, or what numbers are after each, as in the program."""
    if callable(of_optax):
        return np.array([of_optax(number) for number in range(12)])
    sizes = [1.0, 0.1, 1e-3, 1e-6]
    gradients = np.float32(np.random.default_rng(0).normal(size=(12, 4)) * sizes)
    w, found = jnp.zeros(4), []
    state = of_optax.init(w)
    for gradient in gradients:
        updates, state = of_optax.update(gradient, state, w)
        w = w + updates
        found.append(w)
    return np.stack(found)


def test_optimizers_and_rates_of_the_page_are_those_of_tensorflow():
    names: dict[str, Any] = {**vars(tf1_port), "__name__": "page"}
    (code,) = [code for code in blocks(PAGE, "python") if "def tf_adam" in code]
    run(PAGE, code, names)
    tf_adam, rate = names["tf_adam"], 0.1
    written = {
        "sgd": optax.sgd(rate),
        "momentum": optax.sgd(rate, 0.9),
        "nesterov": optax.sgd(rate, 0.9, nesterov=True),
        "adam": tf_adam(rate),
        "adam, epsilon 1e-3": tf_adam(rate, eps=1e-3),
        "rmsprop": optax.rmsprop(rate, eps=1e-10, initial_scale=1.0),
        "rmsprop, momentum": optax.rmsprop(rate, 0.9, momentum=0.9, eps=1.0, initial_scale=1.0),
        "adagrad": optax.adagrad(rate, eps=0.0),
        "piecewise": optax.piecewise_constant_schedule(1.0, {4: 0.1, 7: 0.1}),
        "exponential": optax.exponential_decay(1.0, 4, 0.5, staircase=True),
        "polynomial": optax.polynomial_schedule(1.0, 0.1, 2.0, 8),
        "cosine": optax.cosine_decay_schedule(1.0, 8, 0.1),
    }
    assert written.keys() == OPTIMIZERS.keys()
    for name, expected in OPTIMIZERS.items():
        scale = np.abs(expected).max(0)
        found = after_each(written[name]) / scale
        np.testing.assert_allclose(found, expected / scale, rtol=0, atol=1e-4, err_msg=name)
    # As one would write it: by the end a gradient of 1e-6 has moved elsewhere by a whole rate.
    assert abs(after_each(optax.adam(rate))[-1] - OPTIMIZERS["adam"][-1])[3] > rate


def test_both_programs_start_from_the_same_parameters():
    first = RECORDED["sgd, one device"]["losses"][0]
    assert {each["losses"][0] for each in RECORDED.values()} == {first}


@pytest.mark.deep
def test_tensorflow_prints_what_was_recorded():
    if not record.interpreter("tf1_optimization").exists():
        pytest.skip("TensorFlow is not there: make bench-peers installs it")
    found = record.run("tf1_optimization")
    assert found.keys() == RECORDED.keys()
    for name, expected in RECORDED.items():
        assert_same(found[name]["losses"], found[name]["parameters"], expected)
    found = record.run("tf1_optimizers")
    assert found.keys() == OPTIMIZERS.keys()
    for name, expected in OPTIMIZERS.items():
        np.testing.assert_allclose(found[name], expected, rtol=TOLERANCE)


def test_the_page_shows_the_programs():
    texts = [(FOLDER / f"{name}.py").read_text() for name in ("tf1_optimization", "tf1_port")]
    shown = [blocks(PAGE, language)[0].lstrip("\n") for language in ("py", "python")]
    assert shown == texts


def test_the_page_has_the_recorded_losses():
    text = PAGE.read_text()
    for where in ("one device", "eight shards"):
        last = [f"{RECORDED[f'{kind}, {where}']['losses'][-1]:.4f}" for kind in KINDS]
        assert f"| {where} | {' | '.join(last)} |\n" in text
