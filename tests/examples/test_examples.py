"""The examples: each runs as a reader would run it, and trains as one device does without us."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
import crossshard.testing
from tests.quick import deep_but

FOLDER = Path(__file__).parents[2] / "examples"
SHARDS = 8
# What tests/conftest.py says of devices.
OF_TESTS = ("XLA_FLAGS", "NPROC")
SGD = optax.sgd(0.1)


def load(name: str) -> ModuleType:
    """An example as a module, with `main` and what it trains on."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What each example computes, written again with JAX and Optax alone. Each function returns the
# parameters of the example and those it should have.


def train(
    gradient: Callable[[Any, Any], Any],
    params: Any,
    optimizer: optax.GradientTransformation,
    batches: Iterable[Any],
) -> Any:
    """The parameters after one step per batch, on one device."""
    without = lambda params, stats, batch: (gradient(params, batch), stats)
    return train_with_state(without, params, (), optimizer, batches)[0]


def train_with_state(
    gradient: Callable[[Any, Any, Any], Any],
    params: Any,
    stats: Any,
    optimizer: optax.GradientTransformation,
    batches: Iterable[Any],
) -> Any:
    """The same with statistics: ``gradient`` returns a gradient and the new ones."""
    params = jax.tree.map(jnp.asarray, params)
    own = optimizer.init(params)

    @jax.jit
    def step(params: Any, stats: Any, own: Any, batch: Any) -> Any:
        slope, stats = gradient(params, stats, batch)
        updates, own = optimizer.update(slope, own, params)
        return optax.apply_updates(params, updates), stats, own

    for batch in batches:
        params, stats, own = step(params, stats, own, batch)
    return params, stats


def dense(params: Any, x: Any) -> Any:
    return x @ params["kernel"] + params["bias"]


def params_of(module: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def optax_idiom(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, batch: Any) -> Any:
        out = jnp.tanh(batch[0] @ p["first"] + p["bias"]) @ p["second"]
        return ((out - batch[1]) ** 2).mean()

    expected = train(jax.grad(loss), module.initial_params(), optimizer, [module.data()] * 100)
    return module.main(optimizer), expected


def stateful_idiom(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, x: Any, y: Any) -> Any:
        logits = dense(p["out"], jnp.tanh(dense(p["hidden"], x)))[:, 0]
        return (jnp.logaddexp(0, logits) - y * logits).mean()

    def clipped(p: Any, x: Any, y: Any) -> Any:
        grads = jax.tree.map(lambda g: g / SHARDS, jax.grad(loss)(p, x, y))
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda g: g * jnp.minimum(1, module.MAX_NORM / norm), grads)

    def gradient(p: Any, batch: Any) -> Any:
        parts = zip(*(jnp.split(rows, SHARDS) for rows in batch), strict=True)
        return jax.tree.map(lambda *grads: sum(grads), *(clipped(p, *part) for part in parts))

    start = params_of(module.Network(rngs=nnx.Rngs(0)))
    expected = train(gradient, start, optimizer, [module.data()] * 100)
    model, global_step = module.main(optimizer)
    assert global_step == 100
    return params_of(model), expected


def whole_step(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, batch: Any) -> Any:
        hidden = jnp.tanh(dense(p["second"], jnp.tanh(dense(p["first"], batch["x"]))))
        scores = jax.nn.log_softmax(dense(p["out"], hidden))
        losses = -jnp.take_along_axis(scores, batch["label"][:, None], 1)[:, 0]
        return jnp.where(batch["mask"], losses, 0).sum() / batch["mask"].sum()

    rows = [slice(start, start + 128) for start in range(0, 500, 128)] * 10
    batches = [{name: a[each] for name, a in module.data().items()} for each in rows]
    start = params_of(module.Network(rngs=nnx.Rngs(0)))
    expected = train(jax.grad(loss), start, optimizer, batches)
    return params_of(module.main(optimizer)), expected


def equinox_model(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(layers: Any, batch: Any) -> Any:
        x = batch["x"]
        for weight, bias in layers[:-1]:
            x = jnp.tanh(x @ weight.T + bias)
        return ((x @ layers[-1][0].T + layers[-1][1] - batch["y"]) ** 2).mean()

    layers_of = lambda model: [(layer.weight, layer.bias) for layer in model.layers]
    start = layers_of(module.initial_model())
    expected = train(jax.grad(loss), start, optimizer, [module.data()] * 100)
    model = module.main(optimizer)
    assert isinstance(model, eqx.nn.MLP)
    return layers_of(model), expected


def linen_model(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, batch: Any) -> Any:
        x = dense(p["Dense_0"], batch["x"])
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
        x = x * p["LayerNorm_0"]["scale"] + p["LayerNorm_0"]["bias"]
        scores = jax.nn.log_softmax(dense(p["Dense_1"], jnp.tanh(x)))
        return -jnp.take_along_axis(scores, batch["label"][:, None], 1).mean()

    start = module.network.init(jax.random.key(0), np.zeros((1, 2)))["params"]
    expected = train(jax.grad(loss), start, optimizer, [module.data()] * 60)
    return module.main(optimizer), expected


def linen_batch_norm(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    half = lambda x: jnp.asarray(x, jnp.float16)

    def loss(p: Any, stats: Any, batch: Any) -> Any:
        x = jnp.float32(half(batch["x"]) @ half(p["Dense_0"]["kernel"]))
        mean, var = x.mean(0), (x**2).mean(0) - x.mean(0) ** 2
        x = (x - mean) * jax.lax.rsqrt(var + 1e-5)
        x = half(x * p["BatchNorm_0"]["scale"] + p["BatchNorm_0"]["bias"])
        scores = jax.nn.log_softmax(dense(p["Dense_1"], jnp.float32(jnp.tanh(x))))
        after = {"mean": 0.9 * stats["mean"] + 0.1 * mean, "var": 0.9 * stats["var"] + 0.1 * var}
        return -jnp.take_along_axis(scores, batch["label"][:, None], 1).mean(), after

    batch = module.data()
    start = module.network.init(jax.random.key(0), batch["x"], train=False)
    stats = {"mean": jnp.zeros(32), "var": jnp.ones(32)}
    gradient = jax.grad(loss, has_aux=True)
    params, stats = train_with_state(gradient, start["params"], stats, optimizer, [batch] * 60)
    return module.main(optimizer), (params, {"batch_stats": {"BatchNorm_0": stats}})


def haiku_state(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, stats: Any, batch: Any) -> Any:
        x, y = batch["x"], batch["y"]
        mean, square = stats["mean"], stats["square"]
        hidden = (x - mean) / jnp.sqrt(square - mean**2) @ p["linear"]["w"] + p["linear"]["b"]
        out = jnp.tanh(hidden) @ p["linear_1"]["w"] + p["linear_1"]["b"]
        after = {
            "mean": 0.9 * mean + 0.1 * x.mean(0),
            "square": 0.9 * square + 0.1 * (x**2).mean(0),
        }
        return ((out - y) ** 2).mean(), after

    batch = module.data()
    start, _ = module.network.init(jax.random.key(0), batch["x"])
    stats = {"mean": jnp.zeros(1), "square": jnp.ones(1)}
    gradient = jax.grad(loss, has_aux=True)
    params, stats = train_with_state(gradient, start, stats, optimizer, [batch] * 100)
    return module.main(optimizer), (params, {"~": stats})


def equinox_state(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, stats: Any, batch: Any) -> Any:
        x, y = batch["x"], batch["y"]
        first, scale, shift, weight, bias = p
        hidden = x @ first.T
        mean = hidden.mean(0)
        var = ((hidden - mean) ** 2).mean(0)
        hidden = (hidden - mean) / jnp.sqrt(var + 1e-5) * scale + shift
        out = jnp.tanh(hidden) @ weight.T + bias
        before_mean, before_var = stats
        after = 0.99 * before_mean + 0.01 * mean, 0.99 * before_var + 0.01 * var
        return ((out[:, 0] - y) ** 2).mean(), after

    def arrays_of(model: Any, state: Any) -> Any:
        norm, second = model.norm, model.second
        params = (model.first.weight, norm.weight, norm.bias, second.weight, second.bias)
        return params, state.get(norm.batch_state_index)

    start, stats = arrays_of(*eqx.nn.make_with_state(module.Network)(jax.random.key(0)))
    gradient = jax.grad(loss, has_aux=True)
    expected = train_with_state(gradient, start, stats, optimizer, [module.data()] * 100)
    return arrays_of(*module.main(optimizer)), expected


def two_processes(module: ModuleType, optimizer: Any) -> tuple[Any, Any]:
    def loss(p: Any, batch: Any) -> Any:
        return ((dense(p, batch["x"]) - batch["y"]) ** 2).mean()

    start = {"kernel": np.zeros(3), "bias": np.zeros(1)}
    expected = train(jax.grad(loss), start, optimizer, [module.data()] * 40)
    # An optimizer cannot be sent to another process, so this example takes its name.
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("XLA_FLAGS")
        first, second = module.main("sgd")
    assert first == second
    assert first["shards"] == SHARDS
    return {name: np.array(first[name]) for name in start}, expected


REFERENCES = {
    reference.__name__: reference
    for reference in (
        optax_idiom,
        stateful_idiom,
        whole_step,
        equinox_model,
        linen_model,
        linen_batch_norm,
        haiku_state,
        equinox_state,
        two_processes,
    )
}
# What each prints at the end, besides a loss that falls.
LAST_LINES = {
    "optax_idiom": r"trained on 8 shards with 64 rows each",
    "stateful_idiom": r"global_step is 100; the optimizer's slots are \['mu', 'nu'\]",
    "whole_step": r"accuracy 99\.\d%, also where the label was missing",
    "equinox_model": r"sin\(1\) = 0\.841; the model returns 0\.8\d+",
    "linen_model": r"accuracy 9\d\.\d%",
    "linen_batch_norm": r"accuracy 9\d\.\d%",
    "haiku_state": r"the running mean is 1\.\d\d, and the mean 1\.\d\d",
    "equinox_state": r"step 99   loss 0\.00\d+",
    "two_processes": r"both have the same loss and parameters: True",
}


# Of the largest parameter: 17 times what float32 rounds, and once what float16 does.
TOLERANCES = {"linen_batch_norm": 1e-3}
TOLERANCE = 2e-6

# A stage and an aggregator of one's own, which tests/pipeline/test_own_*.py train with.
STAGES = {"gradient_noise", "top_k"}


def test_every_example_is_tested_and_in_the_index():
    names = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert names - STAGES == set(REFERENCES) == set(LAST_LINES)
    index = (FOLDER / "README.md").read_text()
    for name in names:
        first_line = (load(name).__doc__ or "").splitlines()[0]
        assert f"- [{name}.py]({name}.py): {first_line}\n" in index
    folders = {path.parent.name for path in FOLDER.glob("*/__main__.py")}
    for folder in folders:
        assert f"({folder})" in index


@pytest.mark.deep
@pytest.mark.parametrize("name", REFERENCES)
def test_an_example_runs(name: str, tmp_path: Path):
    ran = run([str(FOLDER / f"{name}.py")], tmp_path)
    assert re.fullmatch(LAST_LINES[name], ran.splitlines()[-1])
    assert name == "two_processes" or falls(ran)
    assert ("sharded update, leaf by leaf" in ran) == (name == "whole_step")


@pytest.mark.deep
def test_the_examples_run_on_a_single_accelerator(tmp_path: Path):
    # As there, cpu_devices makes nothing that counts.
    script = """
import runpy, sys
import crossshard
crossshard.cpu_devices(1)
crossshard.cpu_devices = lambda count: None
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
    print("next")
"""
    names = sorted(REFERENCES.keys() - {"two_processes"})
    ran = run(["-c", script, *(str(FOLDER / f"{name}.py") for name in names)], tmp_path)
    parts = ran.removesuffix("next\n").split("next\n")
    assert len(parts) == len(names)
    assert all(falls(part) for part in parts)
    assert "trained on 1 shards with 512 rows each" in ran


def run(arguments: list[str], folder: Path, timeout: int = 300) -> str:
    """What a process prints that must end well, and without a warning."""
    # Nothing is set that a reader would not have set.
    environment = {name: value for name, value in os.environ.items() if name not in OF_TESTS}
    environment["PYTHONPATH"] = str(Path(crossshard.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "Warning" not in ran.stderr
    return ran.stdout


def falls(printed: str) -> bool:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    return losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", deep_but(["optax_idiom", "stateful_idiom"], REFERENCES))
def test_an_example_trains_as_one_device_does(name: str):
    got, expected = REFERENCES[name](load(name), SGD)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    tolerance = TOLERANCES.get(name, TOLERANCE)
    scale = max(abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


def test_an_example_needs_only_what_it_shows():
    more = {}
    for name in REFERENCES:
        imported = {
            (each.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
            for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in node.names
        }
        library = name.split("_")[0]
        own = library if library in ("equinox", "haiku") else "flax"
        more[name] = (
            imported - sys.stdlib_module_names - {*"crossshard jax numpy optax".split(), own}
        )
    assert not {name: modules for name, modules in more.items() if modules}
