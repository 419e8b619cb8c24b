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

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
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
    params = jax.tree.map(jnp.asarray, params)
    own = optimizer.init(params)

    @jax.jit
    def step(params: Any, own: Any, batch: Any) -> Any:
        updates, own = optimizer.update(gradient(params, batch), own, params)
        return optax.apply_updates(params, updates), own

    for batch in batches:
        params, own = step(params, own, batch)
    return params


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


# Of each idiom; programs of other libraries are held against one device in test_programs.py.
REFERENCES = {
    reference.__name__: reference
    for reference in (
        optax_idiom,
        stateful_idiom,
        whole_step,
    )
}
# What each prints at the end, besides a loss that falls.
LAST_LINES = {
    "optax_idiom": r"trained on 8 shards with 64 rows each",
    "stateful_idiom": r"global_step is 100; the optimizer's slots are \['mu', 'nu'\]",
    "whole_step": r"accuracy 99\.\d%, also where the label was missing",
    "linen_batch_norm": r"accuracy 9\d\.\d%",
    "equinox_state": r"step 99   loss 0\.00\d+",
    "notebook": r"after step 100, the same next step from the checkpoint: True",
}


# Of the largest parameter: 17 times what float32 rounds.
TOLERANCE = 2e-6

# A stage and an aggregator of one's own, which tests/pipeline/test_own_*.py train with.
STAGES = {"gradient_noise", "top_k"}


def test_every_example_is_tested_and_in_the_index():
    names = {path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_")}
    assert names - STAGES == set(LAST_LINES)
    index = (FOLDER / "README.md").read_text()
    for name in names:
        text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        first_line = (text or "").splitlines()[0]
        assert f"- [{name}.py]({name}.py): {first_line}\n" in index
    folders = {path.parent.name for path in FOLDER.glob("*/__main__.py")}
    for folder in folders:
        assert f"({folder})" in index


@pytest.mark.deep
@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_runs(name: str, tmp_path: Path):
    ran = run([str(FOLDER / f"{name}.py")], tmp_path)
    assert re.fullmatch(LAST_LINES[name], ran.splitlines()[-1])
    assert falls(ran)
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
    names = sorted(LAST_LINES)
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
    losses = [float(loss) for loss in re.findall(r"loss +(\d\S*)", printed)]
    return losses[-1] < losses[0] / 2


@pytest.mark.parametrize("name", deep_but(["optax_idiom", "stateful_idiom"], REFERENCES))
def test_an_example_trains_as_one_device_does(name: str):
    got, expected = REFERENCES[name](load(name), SGD)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    scale = max(abs(np.asarray(leaf)).max() for leaf in jax.tree.leaves(expected))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * scale)


def test_an_example_needs_only_what_it_shows():
    more = {}
    for name in LAST_LINES:
        imported = {
            (each.name if isinstance(node, ast.Import) else node.module or "").split(".")[0]
            for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for each in node.names
        }
        library = name.split("_")[0]
        own = library if library == "equinox" else "flax"
        more[name] = (
            imported - sys.stdlib_module_names - {*"crossshard jax numpy optax".split(), own}
        )
    assert not {name: modules for name, modules in more.items() if modules}
