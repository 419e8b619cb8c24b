"""`crossshard verify`: its words, its JSON and its exit codes, and as a process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.cli.command import Command, process

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


def check_wrong(ran: Any) -> None:
    assert ran.returncode == 1, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["ok"], found["num_shards"], found["rows"]) == (False, 2, 16)
    assert (found["faults"][0]["kind"], found["faults"][0]["factor"]) == ("update", "N")
    assert found["leaves"][0]["ratio"] == pytest.approx(2)


def test_a_wrong_step_as_json(folder: Path, command: Command):
    words = ["verified_train:wrong", "--json", "--shards", "2"]
    check_wrong(command.inside(folder)("verify", *words))


@pytest.mark.deep
def test_a_wrong_step_as_json_in_a_process_of_its_own(folder: Path):
    words = ["verified_train:wrong", "--json", "--devices", "2"]
    ran = process(folder, "verify", *words)
    check_wrong(ran)
    assert "from the user's file" in ran.stderr


REFUSED = {
    "nothing": "must return (make_step, batch…)",
    "fails --shards 2": "ZeroDivisionError",
    "wrong --groups 0,1": "--groups: takes lists of shards, such as [[0, 1], [2, 3]]; got '0,1'",
    "train_step --shards 2": "has its own number of shards",
}


def test_a_right_step_and_one_line_for_what_cannot_be_done(folder: Path, command: Command):
    run = command.inside(folder)
    done = run("verify", "verified_train:train_step")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fine: on 2 shards and 16 rows")
    for words, said in REFUSED.items():
        done = run("verify", *f"verified_train:{words}".split())
        (line,) = [x for x in done.stderr.splitlines() if x.startswith("crossshard:")]
        assert (done.returncode, said in line) == (2, True), line
