"""Manifest: what a checkpoint holds, as JSON: checked before anything else of it is read."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossshard._check import typed
from crossshard._hash import sha256
from crossshard.checkpoints.folder import MOST_BYTES, Damaged, read_json
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointMismatchError
from crossshard.model.layout import StateLayout

VERSION = 4
# What is known of an option of version 3: that it was on, and that the loss was not over the batch.
ON, NOT_BATCH = "on", "not batch"
FILE = "manifest.json"
# So that a number on disk cannot ask for all memory: an array of each shard has this many rows.
_MOST_SHARDS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Update:
    """What tells the update of an optimizer or a preprocessor from others."""

    # The types of the states of which its own consists.
    states: list[str]
    # A hash of its operations, and of these with their numbers, of which each is once in words.
    operations: str
    equations: str
    words: list[str]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a step from others, as far as the meaning of its state depends on it."""

    # Of the wrapped optimizer, without master weights and moving average, and of other options that
    # are optimizers or stages.
    updates: dict[str, Update]
    # What changes what a step does, in words; ``None`` if it is off. Of others nothing is known.
    options: dict[str, str | None]
    # Only the same two versions trace an update alike.
    jax: str
    optax: str


@dataclasses.dataclass(frozen=True)
class WrittenLeaf:
    """What the manifest says of one array: where it is in the state, and what is on disk."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    hash: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    # The name of its folder, and the number of steps taken.
    number: int
    step: int
    # How many wrote it, and the groups of them whose parameters differ.
    shards: int
    groups: list[list[int]] | None
    # The implementation of the random key.
    rng: str
    fingerprint: Fingerprint
    leaves: list[WrittenLeaf]
    # What the user saved beside the state.
    data: Any

    def to_json(self, hashes: Sequence[str] = ()) -> dict[str, Any]:
        """As it is written, with the hashes of its arrays once these are known."""
        body = {"version": VERSION, **dataclasses.asdict(self)}
        for leaf, found in zip(body["leaves"], hashes, strict=False):
            leaf["hash"] = found
        return {**body, "sha256": sha256(body)}


def groups_of(layout: StateLayout) -> list[list[int]] | None:
    """The groups whose parameters differ, as a manifest has them."""
    return None if layout.groups is None else [list(group) for group in layout.groups.groups]


def check_data(data: Any) -> None:
    """Raise unless JSON returns the data as it was given.

    Raises:
      ArgumentError: it would come back as something else, or it is too large.
      ArgumentTypeError: it has values that JSON does not know.
    """
    advice = "Write numbers, strings, lists and dicts with strings as keys, as in {'epoch': 3}."
    try:
        text = json.dumps(data, allow_nan=False)
        is_same = json.loads(text) == data
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"data cannot be written as JSON: {error}. {advice}") from error
    if not is_same or len(text) > MOST_BYTES // 2:
        raise ArgumentError(
            f"data would not come back from JSON as it is, or is larger than {MOST_BYTES // 2:,} "
            f"bytes; got {data!r:.80}. {advice}"
        )


def read_manifest(file: Path, number: int) -> Manifest:
    """Read the manifest of a checkpoint, which nobody vouches for.

    Raises:
      CheckpointMismatchError: it is whole, and another version of crossshard wrote it.
      Damaged: it is not whole.
    """
    try:
        body = read_json(file, MOST_BYTES)
    except FileNotFoundError:
        raise Damaged("it has no manifest") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"the manifest cannot be read ({error!s:.100})") from None
    checksum = body.pop("sha256", None)
    if checksum != sha256(body):
        raise Damaged("the manifest does not have the checksum that it was written with")
    version = body.pop("version", None)
    if version not in (3, VERSION):
        raise CheckpointMismatchError(
            f"{file} has version {version!r:.20}, and this crossshard reads versions 3 and "
            f"{VERSION}. Install the crossshard that wrote it, or choose another folder."
        )
    for key in sorted(body.keys() ^ {field.name for field in dataclasses.fields(Manifest)}):
        what = "an unknown key" if key in body else "no key"
        raise CheckpointMismatchError(
            f"{file} has {what} {key!r:.60}, so something else wrote it. Choose another folder."
        )
    try:
        if version == 3:
            body["fingerprint"] = _of_version_3(**body["fingerprint"])
        manifest: Manifest = typed(Manifest, body)
        paths = [leaf.path for leaf in manifest.leaves]
        if manifest.shards > _MOST_SHARDS or len({*paths}) < len(paths):
            raise ValueError("It has too many shards, or a path twice.")
    except (ValueError, TypeError):
        raise Damaged("the manifest has values of a wrong type") from None
    if manifest.number != number:
        raise Damaged(f"its manifest is that of checkpoint {manifest.number}")
    return manifest


def _of_version_3(update: Any, preprocess: Any, options: Any, **others: Any) -> dict[str, Any]:
    """A fingerprint as crossshard 0.2.0 wrote it, as it is written now."""
    updates = {"optimizer": update, "preprocess": preprocess}
    # Of these it said more.
    options = {**options}
    options |= {name: ON for name in ("loss_scale", "weight") if options.get(name) is not None}
    of_batch = "loss_over='batch'"
    if of_batch in options:
        options["loss_over"] = NOT_BATCH if options.pop(of_batch) is None else "batch"
    updates = {name: each for name, each in updates.items() if each is not None}
    return {"updates": updates, "options": options, **others}
