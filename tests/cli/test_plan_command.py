"""`crossshard plan` as a process: tables, JSON, a picture, one line for what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 240

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
    (folder / "train.py").write_text(TRAIN)
    return folder


def run(folder: Path, *words: str, **changed: str) -> subprocess.CompletedProcess[str]:
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    return subprocess.run(
        [sys.executable, "-m", "crossshard.cli", "plan", *words],
        cwd=folder,
        env={**ours, **changed},
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )


def refused(folder: Path, *words: str) -> str:
    done = run(folder, *words)
    said = [line for line in done.stderr.splitlines() if "not part of the report" not in line]
    assert (done.returncode, done.stdout, len(said)) == (2, "", 1), done.stderr
    return said[0]


def test_tables_and_a_picture(folder):
    done = run(folder, "train:of_arrays", "--topology", "cpu:2", "--picture", "plan.png")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "this is not part of the report\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "4,096 parameters on cpu:2, 2 devices"
    assert [line.split("  ")[0] for line in lines if line.startswith("data 2, ")] == [
        "data 2, replicated",
        "data 2, sharded",
    ] * 3
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_json_of_what_does_not_fit(folder):
    done = run(folder, "train:too_large", "--topology", "cpu:1", "--json")
    assert done.returncode == 1, done.stderr
    read: Any = json.loads(done.stdout)
    assert read["recommended"] is None
    assert read["candidates"][0]["fits"] is False
    assert read["candidates"][0]["memory"]["parameters"] == 4 * 2**40


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("train:make", "--topology", "v9:4x4"),
            "There is no topology 'v9:4x4'. Known are v5e:4x4",
        ),
        (("train:tuple_of", "--topology", "cpu:1"), "must return a dict with batch, loss_fn"),
        (("train:fails", "--topology", "cpu:1"), "has no attribute nothing"),
        (("train:make", "--topology", "cpu:1", "--layers", "3"), "--layers is for the demo's"),
        (("--topology", "cpu:1"), "Name a factory as package.module:factory"),
        (("train:make", "--topology", "cpu:1", "--picture", "x.txt"), ".png, .svg or .pdf"),
    ],
)
def test_one_line_for_what_is_wrong(folder, words, why):
    assert why in refused(folder, *words)


def test_the_model_of_the_demo_in_a_clone():
    done = run(ROOT, "--topology", "cpu:1", "--json", "--layers", "1", "--width", "32")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # Embedding, head, and one layer of 12 matrices; three norms.
    assert json.loads(done.stdout)["parameters"] == 2 * 256 * 32 + 12 * 32 * 32 + 3 * 32
