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

import crossshard
from examples.ways_in import ddp_port, record
from tests.quick import deep_but
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "ways-in" / "from-pytorch.md"
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
    texts = {name: record.text(name) for name in [*OPTIONS, "ddp_port"]}
    assert blocks(PAGE, "py")[0].lstrip("\n") == texts["torch_ddp"]
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


# With PyTorch itself, where it is installed.


def test_a_state_dict_of_pytorch_is_the_same_model_in_nnx():
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(32, 8)
            self.conv = torch.nn.Conv2d(8, 16, 3, padding=1)
            self.norm = torch.nn.LayerNorm(16)
            self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
            self.head = torch.nn.Linear(16, 4)

        def forward(self, grid):
            x = self.conv(self.words(grid).permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            x = self.norm(x).mean((1, 2))
            for layer in self.layers:
                x = torch.nn.functional.gelu(layer(x))
            return self.head(x)

    torch.manual_seed(0)
    theirs, grid = Net(), np.random.default_rng(0).integers(0, 32, (4, 5, 6))
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx}
    for code in blocks(PAGE, "python"):
        if "class Net(" in code or "def state_dict(" in code:
            exec(code, names)
    ours = names["Net"](nnx.Rngs(0))
    names["load_state_dict"](ours, {name: x.numpy() for name, x in theirs.state_dict().items()})
    ours.eval()
    expected = theirs(torch.from_numpy(grid)).detach().numpy()
    np.testing.assert_allclose(ours(grid), expected, atol=1e-6)

    # And back, into another one.
    again = Net()
    back = {name: torch.from_numpy(x.copy()) for name, x in names["state_dict"](ours).items()}
    again.load_state_dict(back)
    np.testing.assert_array_equal(again(torch.from_numpy(grid)).detach().numpy(), expected)


@pytest.mark.deep
def test_the_data_loader_of_the_page_trains():
    torch = pytest.importorskip("torch")
    x, y = ddp_port.data()
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    step = crossshard.make_train_step(ddp_port.loss_fn, ddp_port.OPTIMIZERS["sgd"], num_shards=4)
    names = {"dataset": dataset, "torch": torch, "DataLoader": torch.utils.data.DataLoader}
    names |= {"step": step, "state": step.init(ddp_port.Network())}
    _, loop = blocks(PAGE, "py")
    exec(loop, names)
    state = step.init(ddp_port.Network())
    # The order that PyTorch draws of this seed.
    order = torch.randperm(512, generator=of_the_loader(torch)).numpy()
    for rows in np.split(order, 8):
        state, _ = step(state, {"x": x[rows], "y": y[rows]})
    for one, other in zip(
        jax.tree.leaves(names["state"].params), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(one, other)

    with pytest.raises(crossshard.errors.ArgumentTypeError, match="must be an array or a number"):
        step(state, {"x": torch.from_numpy(x), "y": y})


def of_the_loader(torch: Any) -> Any:
    """A generator that has drawn what a DataLoader draws before it shuffles."""
    generator = torch.Generator().manual_seed(0)
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return generator
