"""Reading: a state or parameters of one checkpoint, if no process finds anything wrong with it."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax

from crossshard import _mesh
from crossshard._hash import hash_of
from crossshard.checkpoints.folder import Damaged, Folder, printable
from crossshard.checkpoints.leaves import Leaf, from_disk, leaves_of
from crossshard.checkpoints.manifest import FILE, Fingerprint, Manifest, read_manifest
from crossshard.checkpoints.match import Different, Match, match, match_params
from crossshard.distributed.agreement import exchange
from crossshard.errors import CheckpointMismatchError
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.step.options import NEW, completed


@dataclasses.dataclass(frozen=True)
class Found:
    """What a checkpoint has for a step.

    Attributes:
      state: the state, unsharded.
      data: what the user saved beside it.
      notes: what differs between the two steps, in words.
      number: the number of the checkpoint.
    """

    state: TrainState
    data: Any
    notes: list[str]
    number: int


def read_state(
    folder: Folder,
    number: int,
    layout: StateLayout,
    state: TrainState,
    here: Fingerprint,
    *,
    strict: bool,
) -> Found:
    """The state of a checkpoint, for a step that may have other options.

    Raises:
      CheckpointMismatchError: it is not of this step.
      Damaged: it is, in every process if one finds it so.
    """

    def matches(manifest: Manifest, leaves: list[Leaf]) -> Match:
        return match(manifest, leaves, layout, state, here, strict=strict)

    manifest, leaves, state, matched, read = _read(folder, number, layout, state, matches)
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        arrays = [NEW if place is None else read[place] for place in matched.places]
        shardings = [leaf.on_disk.sharding for leaf in leaves]
        whole = completed(layout, from_disk(state, arrays), shardings)
    return Found(whole, manifest.data, list(map(printable, matched.notes)), number)


def read_params(folder: Folder, number: int, layout: StateLayout, state: TrainState) -> Any:
    """The parameters of a checkpoint, placed as in a state; raises as ``read_state``."""
    matches = lambda manifest, leaves: match_params(manifest, leaves, layout)
    *_, read = _read(folder, number, layout, state, matches)
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        # In the order of the leaves, which is that of the dict.
        params = jax.tree.structure(state.params).unflatten(read.values())
        return jax.jit(lambda x: x, out_shardings=layout.shardings(state).params)(params)


def _read(
    folder: Folder,
    number: int,
    layout: StateLayout,
    state: TrainState,
    matches: Callable[[Manifest, list[Leaf]], Match],
) -> tuple[Manifest, list[Leaf], TrainState, Match, dict[int, jax.Array]]:
    # Here and not above: it imports Orbax.
    from crossshard.checkpoints import storage

    refused: Exception | None = None
    try:
        folder.check(number)
        manifest = read_manifest(folder.note(number, FILE), number)
        leaves, state = _as_written(manifest, layout, state)
        matched = matches(manifest, leaves)
        read = storage.read(folder.of(number), matched.read, len(manifest.leaves))
    except Different as error:
        refused = CheckpointMismatchError(
            f"Checkpoint {number} in {folder.path} is not of this step: {error}"
        )
    except (Damaged, CheckpointMismatchError) as error:
        refused = error
    _agree(refused, layout)
    # The processes compute the hashes together, so all of them must have come this far.
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        written = [(manifest.leaves[place], x) for place, x in read.items()]
        wrong = [leaf.path for leaf, x in written if hash_of(x) != leaf.hash]
    if wrong:
        more = f", as do {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
        refused = Damaged(f"{wrong[0]} has not the values that were written{more}")
    _agree(refused, layout)
    return manifest, leaves, state, matched, read


def _as_written(
    manifest: Manifest, layout: StateLayout, state: TrainState
) -> tuple[list[Leaf], TrainState]:
    """The leaves of a state, with a model state for each shard if that of a checkpoint is so."""
    leaves = leaves_of(layout, state, manifest.shards)
    dimensions = {leaf.path: len(leaf.shape) for leaf in manifest.leaves}
    more = {
        dimensions.get(leaf.path, leaf.on_disk.ndim) - leaf.on_disk.ndim
        for leaf in leaves
        if leaf.path.startswith(".model_state")
    }
    # One dimension more in all of them, or less.
    if state.grouped or more != {-1 if state.per_shard else 1}:
        return leaves, state

    def one(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape[1:] if state.per_shard else (manifest.shards, *x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    model_state = jax.tree.map(one, state.model_state)
    state = dataclasses.replace(state, model_state=model_state, per_shard=not state.per_shard)
    return leaves_of(layout, state, manifest.shards), state


def _agree(refused: Exception | None, layout: StateLayout) -> None:
    """Raise, in every process, what the first one that cannot read a checkpoint has found."""
    kind = "" if refused is None else type(refused).__name__
    # It may quote what is on disk.
    told = exchange("restore", json.dumps([kind, printable(str(refused))]), layout.mesh)
    found = dict(reversed([json.loads(each) for each in told]))
    for error in (Damaged, CheckpointMismatchError):
        if error.__name__ in found:
            raise error(found[error.__name__])
