"""Diverged: the error, or the warning, that says which shards have other copies, and of what."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from crossshard._text import listed
from crossshard.errors import DivergenceError, DivergenceWarning
from crossshard.guards.divergence import Divergence, Sentinel
from crossshard.shards.devices import number_of_shards

# A fault may be in every array of a shard.
_MOST = 3


def report(
    found: Divergence, sentinel: Sentinel, names: Sequence[str], mesh: Mesh, axes: tuple[str, ...]
) -> None:
    """Raise an error for copies that differ, or warn of those that have been repaired.

    Args:
      found: what a step has found.
      sentinel: what looked for it.
      names: the names of the leaves that were compared.
      mesh: the mesh of the step.
      axes: the axes of it that the shards are on.

    Raises:
      DivergenceError: they still differ.
    """
    step, every = int(found.step), sentinel.every
    what = listed([names[index] for index in _places(found.leaves)], _MOST)
    who = listed([_shard(index, mesh, axes) for index in _places(found.shards)], _MOST)
    mend = (
        f"Memory or arithmetic of a device is at fault. Go on without it, from a checkpoint of "
        f"step {max(0, step - every)} or before: checkpoints.restore(state, step) reads one."
    )
    if found.undecided:
        raise DivergenceError(
            f"Before step {step} the copies of {what} differ between {who}. No majority of the "
            f"shards has the same, so nobody can tell which copy is right, and nothing has been "
            f"changed{' there' * sentinel.repairs}. {mend}"
        )
    differs = f"Before step {step} another copy of {what} than on most shards was on {who}."
    if not sentinel.repairs:
        raise DivergenceError(
            f"{differs} Nothing has been changed. {mend} on_divergence='repair' gives all shards "
            f"the copy of the majority."
        )
    warnings.warn(
        f"{differs} All shards were given the copy of the majority. Memory or arithmetic of a "
        f"device is at fault: replace it if this comes again.",
        DivergenceWarning,
        stacklevel=5,
    )


def _places(flags: Any) -> list[int]:
    return np.flatnonzero(flags).tolist()


def _shard(index: int, mesh: Mesh, axes: tuple[str, ...]) -> str:
    """``shard 3 (device 3 of process 0)``."""
    ranks = [mesh.axis_names.index(axis) for axis in axes]
    by_shard = np.moveaxis(mesh.devices, ranks, range(len(ranks)))
    devices = by_shard.reshape(number_of_shards(mesh, axes), -1)[index]
    processes = sorted({device.process_index for device in devices})
    device = f"device{'s' * (len(devices) > 1)} {listed([str(each.id) for each in devices], _MOST)}"
    process = f"process{'es' * (len(processes) > 1)} {listed(list(map(str, processes)), _MOST)}"
    return f"shard {index} ({device} of {process})"
