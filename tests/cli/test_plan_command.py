"""`crossshard plan`: tables, JSON, a picture, one line for what is wrong, and as a process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import PATIENCE, Command, Ended, bare_environment
from tests.plans.test_plan import MACHINE

ROOT = Path(__file__).parents[2]

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


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch):
    """Figures that nobody has to measure, but in a process of its own."""
    for module in ("compile", "planning"):
        monkeypatch.setattr(f"crossshard.plans.{module}.measured", lambda number: MACHINE)


@pytest.fixture
def run(command: Command, folder: Path) -> Command:
    """The command in the user's folder, in this interpreter."""
    return command.inside(folder)


@pytest.mark.deep
def test_tables_and_a_picture_from_a_process_with_nothing_set(folder):
    words = ["planned_train:of_arrays", "--topology", "cpu:2", "--picture", "plan.png"]
    done = subprocess.run(
        [sys.executable, "-m", "crossshard.cli", "plan", *words],
        cwd=folder,
        env=bare_environment(),
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "this is not part of the report\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "4,096 parameters on cpu:2, 2 devices"
    assert [line.split("  ")[0] for line in lines if line.startswith("data 2, ")] == [
        "data 2, replicated",
        "data 2, sharded",
    ] * 3
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_json_of_what_does_not_fit(run):
    done = run("plan", "planned_train:too_large", "--topology", "cpu:1", "--json")
    assert done.returncode == 1, done.stderr
    read: Any = json.loads(done.stdout)
    assert read["recommended"] is None
    assert read["candidates"][0]["fits"] is False
    assert read["candidates"][0]["memory"]["parameters"] == 4 * 2**40


def check_refused(done: Ended, why: str) -> None:
    said = [line for line in done.stderr.splitlines() if "not part of the report" not in line]
    assert (done.returncode, done.stdout, len(said)) == (2, "", 1), done.stderr
    assert why in said[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ("planned_train:make", "--topology", "v9:4x4"),
            "There is no topology 'v9:4x4'. Known are v5e:4x4",
        ),
        (
            ("planned_train:tuple_of", "--topology", "cpu:1"),
            "must return a dict with batch, loss_fn",
        ),
        (("planned_train:fails", "--topology", "cpu:1"), "has no attribute nothing"),
        (
            ("planned_train:make", "--topology", "cpu:1", "--layers", "3"),
            "--layers is for the demo's",
        ),
        (("planned_train:make", "--topology", "cpu:1", "--picture", "x.txt"), ".png, .svg or .pdf"),
    ],
)
def test_one_line_for_what_is_wrong(run, words, why):
    check_refused(run("plan", *words), why)


def test_without_a_factory_and_out_of_a_clone_one_is_asked_for(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "examples.byte_lm.planned", None)
    check_refused(run("plan", "--topology", "cpu:1"), "Name a factory as package.module:factory")


def test_the_model_of_the_demo_in_a_clone(command):
    words = ["--topology", "cpu:1", "--json", "--layers", "1", "--width", "32"]
    done = command.inside(ROOT)("plan", *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    # Embedding, head, and one layer of 12 matrices; three norms.
    assert json.loads(done.stdout)["parameters"] == 2 * 256 * 32 + 12 * 32 * 32 + 3 * 32
