"""Match: whether a checkpoint is of a step's model and optimizer, and what differs first if not."""

from typing import Any

from crossshard.checkpoints.fingerprint import different_operations, different_states
from crossshard.checkpoints.leaves import Leaf
from crossshard.checkpoints.manifest import Manifest
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.state import TrainState


def first_difference(
    manifest: Manifest,
    leaves: list[Leaf],
    layout: StateLayout,
    state: TrainState,
    optimizer: dict[str, Any],
) -> str | None:
    """What differs first between a checkpoint and a step; ``None`` if it can be restored.

    Args:
      manifest: that of the checkpoint.
      leaves: those of the step, if as many shards as the checkpoint's had written them.
      layout: the layout of the step's state.
      state: a state of the step, or its types.
      optimizer: the fingerprint of the step's optimizer.
    """
    return (
        different_states(manifest.optimizer, optimizer)
        or _of_the_step(manifest, layout, state)
        or _of_leaves(manifest, leaves)
        or different_operations(manifest.optimizer, optimizer)
    )


def groups_of(layout: StateLayout) -> list[list[int]] | None:
    """The groups whose parameters differ, as a manifest has them."""
    return None if layout.groups is None else [list(group) for group in layout.groups.groups]


def _of_leaves(manifest: Manifest, leaves: list[Leaf]) -> str | None:
    written = {leaf.path: leaf for leaf in manifest.leaves}
    for leaf in leaves:
        if leaf.path not in written:
            return f"it has no {leaf.path}"
        was = written[leaf.path]
        if was.dtype != leaf.dtype:
            return f"{leaf.path} is {was.dtype} in it, and {leaf.dtype} here"
        if was.shape != leaf.on_disk.shape:
            return f"{leaf.path} has the shape {was.shape} in it, and {leaf.on_disk.shape} here"
    own = [leaf.path for leaf in leaves]
    extra = next((path for path in written if path not in own), None)
    if extra is not None:
        return f"it also has {extra}"
    same = own == [leaf.path for leaf in manifest.leaves]
    return None if same else "its arrays are in another order"


def _of_the_step(manifest: Manifest, layout: StateLayout, state: TrainState) -> str | None:
    if manifest.groups != groups_of(layout):
        return f"its groups are {manifest.groups}, and here {groups_of(layout)}"
    if manifest.rng != str(state.rng_impl):
        return f"its random key is of {manifest.rng}, and here of {state.rng_impl}"
    return None
