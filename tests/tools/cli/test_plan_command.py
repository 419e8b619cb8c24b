"""`crossshard plan`: tables, JSON, one line for what is wrong, and as a process."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.byte_lm.options import TrainOptions
from tests.tools.cli.command import Command, process

ROOT = Path(__file__).parents[3]

TRAIN = """
import jax, jax.numpy as jnp, optax

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def make():
    print("this is not part of the report")
    return {
        "loss_fn": lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
        "params": W,
        "batch": lambda devices: jax.ShapeDtypeStruct((2 * devices, 64), jnp.float32),
        "optimizer": optax.sgd(0.1),
    }


def of_arrays():
    # They start JAX, which must have two devices by then.
    return {**make(), "params": jnp.zeros((64, 64))}


def too_large():
    large = jax.ShapeDtypeStruct((2**20, 2**20), jnp.float32)
    return {**make(), "params": large, "loss_fn": lambda w, x: jnp.sum(w**2) + jnp.sum(x)}


def tuple_of():
    return 1, 2


def fails():
    return {**make(), "loss_fn": lambda w, x: w.nothing}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "planned_train.py").write_text(TRAIN)
    return folder


@pytest.fixture
def run(command: Command, folder: Path) -> Command:
    """The command in the user's folder, in this interpreter."""
    return command.inside(folder)


@pytest.mark.deep
def test_tables_from_a_process_with_nothing_set(folder):
    words = ["planned_train:of_arrays", "--topology", "cpu:2"]
    done = process(folder, "plan", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "this is not part of the report\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "4,096 parameters on cpu:2, 2 devices"
    rows = [line.split("  ")[0] for line in lines if line.startswith("data 2, ")]
    assert rows == ["data 2, replicated", "data 2, sharded", "data 2, in parts"] * 2


def test_json_of_what_does_not_fit(run):
    done = run("plan", "planned_train:too_large", "--topology", "cpu:1", "--json")
    assert done.returncode == 1, done.stderr
    read: Any = json.loads(done.stdout)
    assert read["candidates"][0]["fits"] is False
    assert read["candidates"][0]["memory"]["parameters"] == 4 * 2**40


REFUSED = {
    "planned_train:make --topology v9:4x4": "no topology 'v9:4x4'. Known are v5e:4x4",
    "planned_train:tuple_of --topology cpu:1": "must return a dict with loss_fn",
    "planned_train:fails --topology cpu:1": "has no attribute nothing",
    "--topology cpu:1": "package.module:factory",
}


def test_one_line_for_what_is_wrong(run):
    for words, why in REFUSED.items():
        done = run("plan", *words.split())
        lines = [line for line in done.stderr.splitlines() if "not part of the" not in line]
        assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done.stderr
        assert why in lines[0]


def test_the_model_of_the_demo_in_a_clone(command):
    words = ["examples.byte_lm.planned:planned", "--topology", "cpu:1", "--json"]
    done = command.inside(ROOT)("plan", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    layers, width = TrainOptions.layers, TrainOptions.width
    # Embedding, head, and layers of 12 matrices with two norms each; a last norm.
    expected = 2 * 256 * width + layers * (12 * width + 2) * width + width
    assert json.loads(done.stdout)["parameters"] == expected
