"""Manifest: what a checkpoint holds, as JSON: checked before anything else of it is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from crossshard._check import typed
from crossshard._hash import sha256
from crossshard.checkpoints.files import read_json
from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointMismatchError
from crossshard.pipeline.pipeline import STAGES

VERSION = 4
# What is known of an option of version 3: that it was on, and that the loss was not over the batch.
ON, NOT_BATCH = "on", "not batch"
# Where it is, in the folder of a checkpoint.
FOLDER, FILE = "manifest", "manifest.json"
# A thousand times what a large model needs. Files of which Orbax reads all are held to it too.
MOST_BYTES = 64 << 20
# So that a number on disk cannot ask for all memory: an array of each shard has this many rows.
_MOST_SHARDS = 1 << 16


class Damaged(Exception):
    """A checkpoint is not what was written; the text says what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Update:
    """What tells the update of an optimizer or a preprocessor from others.

    Attributes:
      states: the states of which its own consists.
      operations: a hash of its operations.
      equations: a hash of its equations, which are the operations with their numbers.
      words: each kind of equation once, in words.
    """

    states: list[str]
    operations: str
    equations: str
    words: list[str]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What tells a step from others, as far as the meaning of its state depends on it.

    Attributes:
      updates: that of the wrapped optimizer, without master weights and moving average, and those
        of other options that are optimizers or stages, by their names.
      options: the options that change what a step does, in words; ``None`` for one that is off.
        Of one that is missing nothing is known.
      jax: the version of JAX. Only the same two versions trace an update alike.
      optax: the version of Optax.
    """

    updates: dict[str, Update]
    options: dict[str, str | None]
    jax: str
    optax: str


@dataclasses.dataclass(frozen=True)
class WrittenLeaf:
    """What the manifest says of one array.

    Attributes:
      path: where it is in the state.
      shape: its shape on disk.
      dtype: the name of its dtype.
      hash: the hash of its values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    hash: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
      number: the number of the checkpoint, which is the name of its folder.
      step: the number of steps taken.
      shards: the number of shards that wrote it.
      groups: the groups whose parameters differ; ``None`` if there are none.
      rng: the implementation of the random key.
      fingerprint: that of the step.
      leaves: the arrays.
      data: what the user saved beside the state.
    """

    number: int
    step: int
    shards: int
    groups: list[list[int]] | None
    rng: str
    fingerprint: Fingerprint
    leaves: list[WrittenLeaf]
    data: Any

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        body = {"version": VERSION, **dataclasses.asdict(self)}
        return {**body, "sha256": sha256(body)}


def check_data(data: Any) -> None:
    """Raise unless JSON returns the data as it was given.

    Raises:
      ArgumentError: it would come back as something else, or it is too large.
      ArgumentTypeError: it has values that JSON does not know.
    """
    advice = "Write numbers, strings, lists and dicts with strings as keys, as in {'epoch': 3}."
    try:
        text = json.dumps(data, allow_nan=False)
        again = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"data cannot be written as JSON: {error}. {advice}") from error
    if again != data:
        raise ArgumentError(
            f"data would not come back from JSON as it is: {data!r:.80} becomes {again!r:.80}. "
            f"{advice}"
        )
    if len(text) > MOST_BYTES // 2:
        raise ArgumentError(
            f"data takes {len(text):,} bytes as JSON, and at most {MOST_BYTES // 2:,} are kept. "
            f"Save a position from which the data can be read again, not the data."
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
    known = {field.name for field in dataclasses.fields(Manifest)}
    for key in sorted(set(body) ^ known):
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
    # It did not have these, and of others it said more or less.
    later = (name for kind in STAGES if kind.of_steps for name in kind.options)
    off = dict.fromkeys(("aggregator", "virtual_shards", *later))
    options = {**off, **options}
    options |= {name: ON for name in ("loss_scale", "weight") if options.get(name) is not None}
    of_batch = "loss_over='batch'"
    if of_batch in options:
        options["loss_over"] = NOT_BATCH if options.pop(of_batch) is None else "batch"
    return {
        "updates": {name: each for name, each in updates.items() if each is not None},
        "options": options,
        **others,
    }
