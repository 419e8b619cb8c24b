"""Processes restore the same checkpoint, and snapshots say the same of the data."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossshard import Checkpoints, make_train_step
from tests.two import told_by_two

W = np.float32([1, 2, 3])
ROWS = np.float32([[1, 2, 3], [4, 5, 6]])


def loss_fn(w: Any, x: Any) -> jax.Array:
    return jnp.mean((x @ w - 1) ** 2)


STEP = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders with checkpoints of the same numbers, of other weights."""
    folders = [tmp_path_factory.mktemp(f"host{host}") for host in range(2)]
    for host, folder in enumerate(folders):
        with Checkpoints(folder, STEP) as checkpoints:
            state = STEP.init(W + host)
            for _ in range(2):
                state, _ = STEP(state, ROWS)
                checkpoints.save(state)
    return folders


@pytest.mark.parametrize("call", ["restore", "restore_params"])
@pytest.mark.parametrize("what", ["number", "folder"])
def test_processes_read_the_same_checkpoint(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, call: str, what: str
):
    def read(process: int) -> Any:
        folder, number = folders[0], 2
        if process and what == "number":
            number = 1
        elif process:
            folder = folders[1]
        return getattr(Checkpoints(folder, STEP), call)(STEP.init(W), number)

    told = told_by_two(monkeypatch, read)
    assert told[0] == told[1]
    number = 1 if what == "number" else 2
    assert told[0].startswith(
        f"ArgumentError: To restore, process 1 passed checkpoint {number} of hash "
    )
    assert "and process 0 2 of hash " in told[0]
    assert "from a folder that all of them see." in told[0]
    assert told_by_two(monkeypatch, lambda _: read(0)) == ["taken"] * 2


def test_data_of_snapshots_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    state = STEP.init(W)
    of_all = [
        Checkpoints(tmp_path / f"{each}", STEP, memory=tmp_path / f"{each}-memory", memory_every=1)
        for each in range(2)
    ]
    told = told_by_two(
        monkeypatch, lambda process: of_all[process].snapshot(state, {"at": process})
    )
    assert told[0] == told[1]
    assert told[0].startswith("ArgumentError: To snapshot, process 1 passed data checksum ")
    assert "where all of them stand is one dict" in told[0]
    same = lambda process: of_all[process].snapshot(state, {"at": 3})
    assert told_by_two(monkeypatch, same) == ["taken"] * 2
    for each in of_all:
        each.close()
