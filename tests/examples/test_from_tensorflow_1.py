"""The way in from TensorFlow 1: the port has the numbers that TensorFlow printed."""

import json
from typing import Any

import numpy as np
import optax
import pytest

from examples.ways_in import record, tf1_port
from tests.quick import deep_but
from tests.test_docs import ROOT, blocks, run

PAGE = ROOT / "docs" / "ways-in" / "from-tensorflow-1.md"
FOLDER = ROOT / "examples" / "ways_in"
RECORDED = json.loads(record.RECORDED.read_text())["tf1_optimization"]
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


def test_the_page_shows_the_programs():
    texts = [(FOLDER / f"{name}.py").read_text() for name in ("tf1_optimization", "tf1_port")]
    shown = [blocks(PAGE, language)[0].lstrip("\n") for language in ("py", "python")]
    assert shown == texts


def test_the_page_has_the_recorded_losses():
    text = PAGE.read_text()
    for where in ("one device", "eight shards"):
        last = [f"{RECORDED[f'{kind}, {where}']['losses'][-1]:.4f}" for kind in KINDS]
        assert f"| {where} | {' | '.join(last)} |\n" in text
