"""`crossshard verify` in an interpreter of its own: its words, its JSON and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossshard.cli import main

TRAIN = """
import crossshard, jax, jax.numpy as jnp, numpy as np, optax

print("from the user's file")
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def loss(w, x):
    return jnp.mean((x @ w - x[:, 0] ** 2) ** 2)


def make_step(factor):
    def make(optimizer, n):
        @jax.jit
        def step(w, state, x):
            gradients = jax.tree.map(lambda g: n**factor * g, jax.grad(loss)(w, x))
            updates, state = optimizer.update(gradients, state, w)
            return optax.apply_updates(w, updates), state

        return step, jnp.ones(3), optimizer.init(jnp.ones(3))

    return make


def wrong():
    return make_step(1), X


def train_step():
    return crossshard.make_train_step(loss, optax.adam(0.1), num_shards=2), jnp.ones(3), X


def nothing():
    return 3


def fails():
    return (lambda optimizer, n: 1 / 0), X
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    (folder / "verified_train.py").write_text(TRAIN)
    return folder


def test_a_wrong_step_as_json_in_a_process_of_its_own(folder: Path):
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "NPROC"))}
    ran = subprocess.run(
        [sys.executable, "-m", "crossshard.cli", "verify", "verified_train:wrong", "--json",
         "--devices", "2"],
        cwd=folder, env={**ours, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["ok"], found["num_shards"], found["rows"]) == (False, 2, 16)
    assert found["faults"][0]["kind"] == "summed"
    assert found["leaves"][0]["ratio"] == pytest.approx(2)
    assert "from the user's file" in ran.stderr


def test_a_right_step(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert main(["verify", "verified_train:train_step"]) == 0
    assert capsys.readouterr().out.startswith("fine: on 2 shards and 16 rows")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verified_train:nothing"], "must return (make_step, batch…)"),
        (["verified_train:fails", "--shards", "2"], "ZeroDivisionError"),
        (["verified_train:wrong", "--groups", "0,1"], "--groups takes lists of shards"),
        (["verified_train:train_step", "--shards", "2"], "has its own number of shards"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys, words: list[str], said: str
):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    assert main(["verify", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len([line for line in err.splitlines() if line.startswith("crossshard:")]) == 1
