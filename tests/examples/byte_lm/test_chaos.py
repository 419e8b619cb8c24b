"""Runs that are killed at random moments end where those end that nobody has disturbed."""

import hashlib
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from tests.examples.byte_lm.chaos import Chaos, Run
from tests.examples.byte_lm.test_resume import values

# Processes, virtual devices of each, and how the weights are updated.
SETTINGS = [
    (2, 1, "sharded"),
    (1, 4, "replicated"),
    (2, 2, "sharded"),
    (1, 1, "replicated"),
    (3, 1, "sharded"),
    (2, 1, "replicated"),
    (1, 3, "sharded"),
]


# The stages that keep a state for themselves, and the processes and devices of each run.
STAGES = {
    "sharded": ("--weight-update sharded", [(2, 1)]),
    "few bits": ("--params sharded --reduce-dtype int8 --gather-dtype int8", [(2, 2)]),
    "quarantine": ("--params sharded --nonfinite quarantine --ema 0.9", [(2, 2)]),
    "workers": ("--sync-every 4 --workers 2 --outer-momentum 0.9", [(2, 2)]),
    "streaming": ("--sync-every 4 --sync-streaming --outer-reduce-dtype int8", [(2, 2)]),
    "virtual shards": ("--virtual-shards 4 --weight-update sharded", [(2, 2), (1, 4), (2, 1)]),
}


def arrays(out: Path, number: int) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by their paths, read by Orbax alone."""
    import orbax.checkpoint as ocp

    folder = out.resolve() / "checkpoints" / f"{number:08}"
    leaves = json.loads((folder / "manifest" / "manifest.json").read_text())["leaves"]
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
        restore_args={str(place): as_numpy for place in range(len(leaves))}
    )
    found = ocp.PyTreeCheckpointHandler().restore(folder / "state", args=args)
    return {leaf["path"]: np.asarray(found[str(place)]) for place, leaf in enumerate(leaves)}


def sha256(of: dict[str, np.ndarray]) -> str:
    """A hash of the bits of all arrays."""
    found = hashlib.sha256()
    for path, x in sorted(of.items()):
        found.update(f"{path} {x.dtype} {x.shape}\n".encode() + x.tobytes())
    return found.hexdigest()


def undisturbed(folder: Path, steps: int, processes: int, devices: int, *words: str) -> Path:
    ends = ["--steps", str(steps), "--save-every", str(steps)]
    run = Run(folder, "whole", processes, devices, *ends, *words, launched=True)
    try:
        run.wait()
    finally:
        run.kill()
    assert run.started[0].returncode == 0, run.printed()
    return folder / "whole"


def losses(out: Path) -> list[float]:
    return [step["loss"] for step in values(out)]


def check_seconds(chaos: Chaos) -> None:
    # Five seconds are promised. Only the median is held to them: on a busy machine a process may
    # get no time for as long.
    found = chaos.seconds[False]
    assert not found or statistics.median(found) <= 5


@pytest.mark.soak
@pytest.mark.multiprocess
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_with_each_stage_ends_with_the_same_bits(
    stage: str, tmp_path: Path, tell, soak_steps
):
    (words, shapes), seed = STAGES[stage], 29 + list(STAGES).index(stage)
    chaos = Chaos(tmp_path, seed, tell)
    tell(f"{stage}: {words}")
    for number in range(max(1, soak_steps // 400 // len(STAGES))):
        chaos.cycle(*shapes[number % len(shapes)], *words.split())
    steps = chaos.finish(*shapes[-1], *words.split())
    tell(chaos.summary())
    whole = undisturbed(tmp_path, steps, *shapes[0], *words.split())
    assert losses(chaos.out) == losses(whole)
    hashes = [sha256(arrays(out, steps)) for out in (chaos.out, whole)]
    tell(f"sha256 of the state after {steps} steps, killed and undisturbed:\n  {hashes}")
    assert hashes[0] == hashes[1]
    check_seconds(chaos)


@pytest.mark.soak
@pytest.mark.multiprocess
def test_changing_numbers_of_processes_and_shards_agree(tmp_path: Path, tell, soak_steps):
    chaos = Chaos(tmp_path, 1, tell)
    for number in range(max(1, soak_steps // 400)):
        processes, devices, update = SETTINGS[number % len(SETTINGS)]
        chaos.cycle(processes, devices, "--weight-update", update)
    steps = chaos.finish(1, 2, "--weight-update", "sharded")
    tell(chaos.summary())
    whole = undisturbed(tmp_path, steps, 2, 1, "--weight-update", "replicated")
    ours, theirs = arrays(chaos.out, steps), arrays(whole, steps)
    params = [path for path in ours if path.startswith(".params")]
    apart = max(np.abs(ours[path] - theirs[path]).max() for path in params)
    tell(f"{len(params)} parameters after {steps} steps are at most {apart:.1e} apart")
    assert apart <= 1e-5
    np.testing.assert_allclose(losses(chaos.out), losses(whole), rtol=1e-5)
    check_seconds(chaos)
