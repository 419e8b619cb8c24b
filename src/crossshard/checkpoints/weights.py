"""Weights: reads the parameters of a checkpoint alone, whatever optimizer has trained them."""

from typing import Any

import jax

from crossshard import _jax
from crossshard.checkpoints import storage
from crossshard.checkpoints.folder import Folder
from crossshard.checkpoints.hashes import hash_of
from crossshard.checkpoints.leaves import Leaf, leaves_of
from crossshard.checkpoints.manifest import FILE, Damaged, Manifest, read_manifest
from crossshard.checkpoints.match import groups_of
from crossshard.checkpoints.together import agree_to_read
from crossshard.errors import CheckpointMismatchError
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.state import TrainState

_PARAMS = ".params"


def read_params(folder: Folder, number: int, layout: StateLayout, state: TrainState) -> Any:
    """The parameters of a checkpoint, as they lie in a state.

    Raises:
      CheckpointMismatchError: they have other names, shapes or dtypes, or other groups.
      Damaged: the checkpoint is, in every process if one finds it so.
    """
    refused: Exception | None = None
    try:
        folder.check(number)
        path = folder.of(number)
        manifest = read_manifest(path / storage.MANIFEST / FILE, number)
        leaves = [each for each in leaves_of(layout, state, manifest.shards) if _is_param(each)]
        differs = _difference(manifest, leaves, layout)
        if differs is not None:
            raise CheckpointMismatchError(
                f"The parameters of checkpoint {number} in {folder.path} are not this model's: "
                f"{differs}. Build the model as it was when it was saved."
            )
        at = {written.path: place for place, written in enumerate(manifest.leaves)}
        read = storage.read(path, {at[leaf.path]: leaf for leaf in leaves}, len(manifest.leaves))
    except (Damaged, CheckpointMismatchError) as error:
        refused = error
    agree_to_read(refused, layout.mesh)
    with _jax.in_place_of_the_users_mesh(layout.mesh):
        for place, x in read.items():
            written = manifest.leaves[place]
            if hash_of(x) != written.hash:
                refused = refused or Damaged(f"{written.path} has not the values that were written")
        agree_to_read(refused, layout.mesh)
        # In the order of the leaves, which is that of the dict.
        params = jax.tree.structure(state.params).unflatten(read.values())
        return jax.jit(lambda x: x, out_shardings=layout.shardings(state).params)(params)


def _is_param(leaf: Leaf) -> bool:
    return leaf.path == _PARAMS or leaf.path.startswith((f"{_PARAMS}[", f"{_PARAMS}."))


def _difference(manifest: Manifest, leaves: list[Leaf], layout: StateLayout) -> str | None:
    if manifest.groups != groups_of(layout):
        return f"its groups are {manifest.groups}, and here {groups_of(layout)}"
    if manifest.groups is not None and manifest.shards != layout.number_of_shards:
        return f"its groups are over {manifest.shards} shards, and here {layout.number_of_shards}"
    written = {leaf.path: (leaf.dtype, leaf.shape) for leaf in manifest.leaves}
    for leaf in leaves:
        own = leaf.dtype, leaf.on_disk.shape
        if leaf.path not in written:
            return f"it has no {leaf.path}"
        if written[leaf.path] != own:
            was = "{}{}".format(*(written[leaf.path][0], list(written[leaf.path][1])))
            return f"{leaf.path} is {was} in it, and {own[0]}{list(own[1])} here"
    return None
