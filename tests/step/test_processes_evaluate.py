"""Processes that pass unequal numbers of batches to evaluate are told so, and how many each."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import _jax, make_train_step
from crossshard.errors import ArgumentError
from tests.processes import join, run_processes


def error(params: Any, batch: Any) -> Any:
    return (batch[:, :3] @ params - 1) ** 2


# The shapes of the batches of process 0 and of process 1, and what both are told.
KINDS = {
    "equal": ([(4, 3)] * 20, [(4, 3)] * 20, "a mean, 4"),
    "none": (
        [],
        [(4, 3)],
        "To evaluate, process 1 passed batches: 0 and a further one of float32[4, 3], and process "
        "0 0. Pass as many batches in every process",
    ),
    "other rows": (
        [(8, 3)],
        [(4, 3)],
        "process 1 passed batches: 0 and a further one of float32[4, 3], and process 0 0 and a "
        "further one of float32[8, 3].",
    ),
    "more": (
        [(4, 3)] * 3,
        [(4, 3)] * 4,
        "process 1 passed batches: 3 and a further one of float32[4, 3], and process 0 3.",
    ),
    "known rows in another order": (
        [(8, 3), (4, 5), (8, 3)],
        [(8, 3), (4, 5), (4, 5)],
        "process 1 passed batches: 2 and a further one of float32[8, 5], and process 0 2 and a "
        "further one of float32[8, 3].",
    ),
    "equal again": ([(4, 3), (1, 3)], [(4, 3), (2, 3)], "a mean, 4"),
}


def main(process: int, port: int, out: str) -> None:
    """One process: what it is told of each kind."""
    join(process, port, devices=1)
    step = make_train_step(lambda w, x: error(w, x).mean(), optax.sgd(0.1))
    state = step.init(np.ones(3, np.float32))
    found = {}
    for name, kind in KINDS.items():
        batches = (np.ones(shape, np.float32) for shape in kind[process])
        try:
            found[name] = f"a mean, {float(step.evaluate(state, batches, error)):g}"
        except ArgumentError as refused:
            found[name] = str(refused)
    Path(out).write_text(json.dumps(found))
    # Of each comparison, only the next one is kept.
    assert len(_jax._coordinator().key_value_dir_get("crossshard/")) < 30
    jax.distributed.shutdown()


@pytest.mark.multiprocess
def test_unequal_numbers_of_batches_are_refused_in_every_process(tmp_path: Path):
    for found in run_processes("step.test_processes_evaluate", tmp_path, patience=120):
        for name, (_, _, told) in KINDS.items():
            assert told in found[name], (name, found)
