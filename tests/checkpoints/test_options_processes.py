"""Several processes restore what was saved without an option, together."""

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from crossshard import Checkpoints
from crossshard.errors import CheckpointWarning
from tests.checkpoints.test_options import XS, params, saved, step_with
from tests.processes import join, run_processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.deep]


def main(process: int, port: int, out: str, folder: str) -> None:
    """One process: save, restore with new options, do the same in memory, and take a step."""
    join(process, port)
    plain = step_with(shards=4)
    more = step_with(shards=4, ema=0.5, nonfinite="skip", master_dtype="float32")
    rows = slice(process * 8, (process + 1) * 8)
    state, _ = plain(plain.init(params()), XS[0][rows])
    saved(Path(folder), plain, state)
    like = more.abstract_init(params())
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", CheckpointWarning)
        found, _ = Checkpoints(folder, more).restore_latest(like)
        resharded = more.reshard(plain.unshard(state))
    said: dict[str, Any] = {"warned": [str(each.message) for each in warned]}
    losses = []
    for each in (found, resharded):
        after, metrics = more(each, XS[1][rows])
        losses.append(float(metrics["loss"]))
        average = more.unshard(after).opt_state.inner_state.inner_state.ema["w"]
        said["average"] = np.asarray(average).tolist()
    _, metrics = plain(state, XS[1][rows])
    said["losses"] = [*losses, float(metrics["loss"])]
    Path(out).write_text(json.dumps(said))
    jax.distributed.shutdown()


def test_options_are_added_in_every_process(tmp_path: Path):
    found = run_processes("checkpoints.test_options_processes", tmp_path, tmp_path / "run")
    assert found[0] == found[1]
    assert len(set(found[0]["losses"])) == 1
    for text in found[0]["warned"]:
        assert "ema is new" in text
        assert "nonfinite is new" in text
