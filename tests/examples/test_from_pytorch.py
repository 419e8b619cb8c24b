"""The way in from PyTorch: the same loops end with the numbers that PyTorch printed."""

import ast
import difflib
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples.ways_in import ddp_port, record
from tests.quick import deep_but
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "ways-in" / "from-pytorch.md"
FOLDER = ROOT / "examples" / "ways_in"
RECORDED = json.loads(record.RECORDED.read_text())
DIFFERENCES = RECORDED["torch_differences"]
OPTIONS: dict[str, dict[str, Any]] = {
    "torch_ddp": {},
    "torch_zero1": {"weight_update": "sharded"},
    "torch_fsdp2": {"params": "sharded"},
}
TOLERANCE = 1e-5


def assert_same(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=TOLERANCE)
    for one, other in zip(found["parameters"], expected["parameters"], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * np.abs(other).max())


@pytest.mark.parametrize(
    ("name", "optimizer"),
    deep_but(
        lambda case: case == ("torch_ddp", "sgd"),
        [(name, optimizer) for name in OPTIONS for optimizer in ddp_port.OPTIMIZERS],
    ),
)
def test_the_loop_has_the_numbers_of_pytorch(name: str, optimizer: str):
    found = ddp_port.train(ddp_port.OPTIMIZERS[optimizer], **OPTIONS[name])
    assert_same(found, RECORDED[name][optimizer])


def test_another_learning_rate_would_be_seen():
    found = ddp_port.train(optax.sgd(0.1001))
    with pytest.raises(AssertionError):
        assert_same(found, RECORDED["torch_ddp"]["sgd"])


@pytest.mark.deep
@pytest.mark.parametrize("name", [*OPTIONS, "torch_differences"])
def test_pytorch_prints_what_was_recorded(name: str):
    if not record.interpreter(name).exists():
        pytest.skip("PyTorch is not there: make bench-peers installs it")
    found, expected = record.run(name), RECORDED[name]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if name in OPTIONS:
            assert_same(found[key], value)
        else:
            np.testing.assert_allclose(found[key], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_page_shows_the_programs():
    texts = {name: (FOLDER / f"{name}.py").read_text() for name in [*OPTIONS, "ddp_port"]}
    assert [block.lstrip("\n") for block in blocks(PAGE, "py")] == [texts["torch_ddp"]]
    assert blocks(PAGE, "python")[0].lstrip("\n") == texts["ddp_port"]
    shown = [block.lstrip("\n") for block in blocks(PAGE, "diff")]
    before = texts["torch_ddp"].splitlines(keepends=True)
    for name, block in zip(["torch_zero1", "torch_fsdp2"], shown, strict=True):
        changes = difflib.unified_diff(before, texts[name].splitlines(keepends=True), n=0)
        lines = [line for line in changes if not line.startswith(("---", "+++", "@@"))]
        assert "".join(lines[2:]) == block
        assert all('"""PyTorch\'s' in line for line in lines[:2])


def test_the_page_has_the_recorded_losses():
    rows = re.findall(r"^\| (DDP|ZeRO-1|FSDP2) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    expected = [
        [f"{RECORDED[name][each]['losses'][i]:.5f}" for each in ("sgd", "adamw") for i in (0, -1)]
        for name in OPTIONS
    ]
    assert [numbers.split(" | ") for _, numbers in rows] == expected


# What differs.


def test_what_the_page_says_of_ddp_was_printed():
    assert DIFFERENCES["masked"] == pytest.approx(2.5)
    assert DIFFERENCES["accumulated"] == pytest.approx(2)
    assert DIFFERENCES["averages"] == pytest.approx([1, 1.1, 1.29])


def test_the_pairs_of_optimizers_take_the_same_steps():
    rows = re.findall(
        r"^\| `(\w+\(0\.1.*?\))` \| `(optax\..*)` \|$", PAGE.read_text(), re.MULTILINE
    )
    assert {name for name, _ in rows} == {name for name in DIFFERENCES if "(" in name}
    for name, code in rows:
        optimizer = eval(compile(ast.parse(code, mode="eval"), name, "eval"), {"optax": optax})
        assert stepped(optimizer) == pytest.approx(DIFFERENCES[name], abs=TOLERANCE), name
    # The defaults of Optax are others.
    for name, other in {"AdamW(0.1)": optax.adamw(0.1), "RMSprop(0.1)": optax.rmsprop(0.1)}.items():
        assert stepped(other) != pytest.approx(DIFFERENCES[name], rel=1e-4)


def stepped(optimizer: optax.GradientTransformation) -> list[float]:
    """As in torch_differences.py."""
    weight = jnp.array([1.0, -2.0, 0.5])
    state = optimizer.init(weight)
    for number in range(5):
        gradient = jnp.array([1e-4, -3.0, 0.5]) * (1 + number)
        updates, state = optimizer.update(gradient, state, weight)
        weight = optax.apply_updates(weight, updates)
    return weight.tolist()


def test_the_first_step_of_adam_is_smaller_by_what_the_page_says():
    found, expected = stepped(optax.adam(0.1)), DIFFERENCES["Adam(0.1)"]
    assert 1 - (1 - found[0]) / (1 - expected[0]) == pytest.approx(6.5e-6, rel=0.3)


def test_layers_differ_as_the_page_says():
    x = jnp.array([[0.0, 1.0, 3.0], [2.0, 5.0, -1.0]])
    rngs = nnx.Rngs(0)
    norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
    norm(x)
    assert nnx.BatchNorm(3, rngs=rngs).momentum == 0.99
    unbiased = 0.9 + 0.1 * jnp.var(x, axis=0, ddof=1)
    np.testing.assert_allclose(unbiased, DIFFERENCES["running_var"], rtol=1e-6)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * jnp.var(x, axis=0), rtol=1e-6)
    layer = nnx.LayerNorm(3, epsilon=1e-5, rngs=rngs)
    np.testing.assert_allclose(layer(x / 100), DIFFERENCES["layer_norm"], atol=1e-5)
    assert nnx.LayerNorm(3, rngs=rngs).epsilon == 1e-6
    exact = jax.nn.gelu(x, approximate=False)
    np.testing.assert_allclose(exact, DIFFERENCES["gelu"], atol=1e-6)
    assert abs(jax.nn.gelu(x) - exact).max() > 1e-4
