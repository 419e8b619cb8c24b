"""Copies that differ between real processes of jax.distributed: named and repaired in both."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

import crossshard
from crossshard import make_train_step
from tests.processes import DEVICES, PROCESSES, join, run_processes
from tests.step.faults import Snapshot, many_bits

START = {"kernel": np.ones((64, 33), np.float32), "bias": np.ones(5, np.float32)}
ROWS = np.ones((2, 64), np.float32)
FAULTY = 3  # the second device of process 1


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return ((batch @ params["kernel"]) ** 2).mean() + (params["bias"] ** 2).sum()


def disturbed(on_divergence: str, weight_update: str) -> dict[str, Any]:
    """What a process finds after a fault on a device of process 1, and what it says of it."""
    step = make_train_step(
        loss_fn,
        optax.adamw(0.1),
        weight_update=weight_update,
        check_divergence=2,
        on_divergence=on_divergence,
    )
    state = step.init(START)
    for _ in range(3):
        state, metrics = step(state, ROWS)
    place = step.compared(state).index("params['bias']")
    leaf = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)].index(
        ".params['bias']"
    )
    faulty = jax.devices()[FAULTY]
    if faulty.process_index == jax.process_index():
        fault = lambda x: many_bits(x, np.random.default_rng(0))
        state = Snapshot.of(state).restored(leaf, faulty, fault)
    seen, said = [], ""
    try:
        for _ in range(4):
            state, metrics = step(state, ROWS)
            found = metrics["divergence"]
            shards, leaves = (np.flatnonzero(x).tolist() for x in (found.shards, found.leaves))
            seen.append([int(found.step), shards, leaves])
    except crossshard.errors.DivergenceError as error:
        said = str(error)
    copies = [np.array(s.data).tobytes().hex() for s in state.params["bias"].addressable_shards]
    return {"place": place, "seen": seen, "said": said, "copies": copies}


def main(process: int, port: int, out: str) -> None:
    """One process: find a fault in one of the others, or in this one."""
    import warnings

    warnings.simplefilter("ignore", crossshard.errors.DivergenceWarning)
    join(process, port)
    found = {
        f"{action} {how}": disturbed(action, how)
        for action, how in (("raise", "sharded"), ("repair", "replicated"))
    }
    Path(out).write_text(json.dumps(found))
    jax.distributed.shutdown()


@pytest.mark.deep
@pytest.mark.multiprocess
def test_a_fault_in_one_process_is_named_and_repaired_in_all(tmp_path: Path):
    told = run_processes("step.test_divergence_processes", tmp_path)
    for case in told[0]:
        both = [each[case] for each in told]
        assert both[0]["seen"] == both[1]["seen"]
        found = [4, [FAULTY], [both[0]["place"]]]
        clean = lambda step: [step, [], []]
        for each in both:
            if case.startswith("raise"):
                assert each["seen"] == [clean(-1), found, clean(-1)]
                assert f"shard {FAULTY} (device" in each["said"]
                assert "of process 1)" in each["said"]
            else:
                assert each["seen"] == [clean(-1), found, clean(-1), clean(6)]
                assert len(set(both[0]["copies"] + both[1]["copies"])) == 1
    assert len(told[0]["raise sharded"]["copies"]) == DEVICES
    assert len(told) == PROCESSES
