"""--nonfinite and --check-divergence: a fault is named, and the run goes on, or ends with 3."""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossshard.errors import CheckpointWarning
from examples.byte_lm import job
from examples.byte_lm.training import Training
from tests.examples.byte_lm.small import numbers, own_loss, read_metrics, run, saved_hashes
from tests.step.faults import Snapshot, one_bit

# A byte that the text does not have.
MARK = 255
LEAF = "`[a-z0-9_/]+`"


def break_shard(monkeypatch: pytest.MonkeyPatch, shard: int, steps: range, of: int = 2) -> None:
    """The loss of a shard of so many is NaN in these steps, and its gradient with it."""
    drawn, loss = job.batches, job.loss

    def batches(*given: Any) -> Iterator[dict[str, np.ndarray]]:
        for step, batch in enumerate(drawn(*given), 1):
            if step in steps:
                rows = np.array_split(batch["read"], of)
                rows[shard][0, 0] = MARK
            yield batch

    def broken(model: Any, batch: Any) -> Any:
        value, aux = loss(model, batch)
        factor = jnp.where((batch["read"] == MARK).any(), jnp.nan, 1)
        return value * factor, {**aux, "nats": aux["nats"] * factor}

    monkeypatch.setattr(job, "batches", batches)
    monkeypatch.setattr(job, "loss", broken)
    own_loss(monkeypatch, job)


@pytest.mark.deep
def test_a_shard_in_quarantine_is_named_and_the_others_train_on(tmp_path, monkeypatch, capsys):
    break_shard(monkeypatch, 1, range(3, 4))
    assert run(tmp_path, "out", "--shards", 2, "--nonfinite", "quarantine", "--steps", 6) == 0
    said = capsys.readouterr().out
    (line,) = re.findall(r"step 3: (.*finite on shard .*)", said)
    assert re.fullmatch(rf"the gradient of {LEAF} is .* shard 1; the others make the step", line)
    assert "not run, since a shard was left out of one of the first steps" in said
    steps = read_metrics(tmp_path / "out")
    assert [step.get("faults", []) for step in steps] == [[], [], [line], [], [], []]
    assert steps[2]["loss_per_shard"] == [steps[2]["loss"], None]
    assert all(np.isfinite(step["loss"]) and not step["skipped"] for step in steps)


@pytest.mark.deep
def test_too_many_in_a_row_end_the_run_with_a_checkpoint_to_go_on_from(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    words = ["--shards", 2, "--nonfinite", "skip", "--save-every", 2]
    with monkeypatch.context() as patch:
        break_shard(patch, 0, range(3, 99))
        assert run(tmp_path, "out", *words, "--steps", 50) == 3
        said = capsys.readouterr()
        # It is raised two calls after the 25th.
        assert len(read_metrics(out)) == 28
        assert re.search(rf"25 steps in a row; .* {LEAF} is not finite on shard 0\.", said.err)
        assert said.err.endswith("Saved after step 28: --resume goes on from there.\n")
        assert said.err.count("\n") == 1
        assert re.search("stopped +after 28 steps, by a fault", said.out)
        assert len(re.findall("; the step is skipped", said.out)) == 26
        summary = json.loads((out / "summary.json").read_text())
        assert summary["ended"] == "fault"
        assert said.err == f"byte_lm: {summary['fault']}\n"
    # Good batches do not raise for what was found before. The broken loss was each shard's own.
    with pytest.warns(CheckpointWarning, match="loss_over is shard in it, and rows here"):
        assert run(tmp_path, "out", *words, "--steps", 30, "--resume") == 0
    steps = read_metrics(out)
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert [step["skipped"] for step in steps] == [0] * 2 + [1] * 26 + [0] * 2
    # Nothing of what was skipped is left: the optimizer has taken four steps.
    saved = [saved_hashes(out, number, ".params") for number in numbers(out)[-3:]]
    assert saved[0] == saved[1] != saved[2]


def flip_before(monkeypatch: pytest.MonkeyPatch, call: int, shard: int) -> None:
    """A bit of a shard's copy of the head flips before this step."""
    take, calls = Training.__call__, itertools.count(1)

    def faulty(self: Training, batch: Any) -> Any:
        if next(calls) == call:
            paths = jax.tree_util.tree_leaves_with_path(self.state)
            leaf = next(i for i, (path, _) in enumerate(paths) if "head" in str(path))
            device = jax.devices()[shard]
            fault = lambda x: one_bit(x, np.random.default_rng(0))
            self.state = Snapshot.of(self.state).restored(leaf, device, fault)
        return take(self, batch)

    monkeypatch.setattr(Training, "__call__", faulty)


HEAD = "params['head']['kernel']"
SENTINEL = ["--shards", 3, "--batch", 6, "--weight-update", "replicated"]


@pytest.mark.deep
def test_copies_that_differ_end_the_run_and_doubtful_checkpoints_are_put_aside(
    tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    words = [*SENTINEL, "--check-divergence", 2, "--save-every", 1]
    with monkeypatch.context() as patch:
        flip_before(patch, 4, shard=2)
        assert run(tmp_path, "out", *words, "--steps", 50) == 3
    said = capsys.readouterr()
    # Compared at the fifth step, and raised two calls later.
    assert len(read_metrics(out)) == 6
    (line,) = read_metrics(out)[4]["faults"]
    assert line == f"another copy of {HEAD} than on most shards is on shard 2"
    assert f"step 5: {line}\n" in said.out
    assert "shard 2 (device 2 of process 0)" in said.err
    assert "and checkpoints 3, 4 renamed: --resume goes on from checkpoint 2." in said.err
    assert numbers(out) == [1, 2]
    assert run(tmp_path, "out", *words, "--steps", 8, "--resume") == 0
    # With a repair before the step that would have been another.
    with monkeypatch.context() as patch:
        flip_before(patch, 3, shard=0)
        repairing = [*words, "--on-divergence", "repair", "--steps", 8]
        assert run(tmp_path, "repaired", *repairing) == 0
    steps, repaired = read_metrics(out), read_metrics(tmp_path / "repaired")
    assert [step["loss"] for step in repaired] == [step["loss"] for step in steps]
    assert saved_hashes(tmp_path / "repaired", 8, ".params") == saved_hashes(out, 8, ".params")
    (line,) = repaired[2]["faults"]
    assert line.endswith(f"{HEAD} than on most shards is on shard 0; it has been repaired")
