"""Manifest: what a checkpoint holds, as JSON: checked before anything else of it is read."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from crossshard.errors import ArgumentError, ArgumentTypeError, CheckpointMismatchError

VERSION = 2
# Of the first, the fingerprint knows less.
_READ = (1, VERSION)
FILE = "manifest.json"
# A thousand times what a large model needs. Files of which Orbax reads all are held to it too.
MOST_BYTES = 64 << 20
# So that a number on disk cannot ask for all memory: an array of each shard has this many rows.
_MOST_SHARDS = 1 << 16


class Damaged(Exception):
    """A checkpoint is not what was written; the text says what is wrong with it."""


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
      optimizer: the fingerprint of the optimizer.
      leaves: the arrays.
      data: what the user saved beside the state.
    """

    number: int
    step: int
    shards: int
    groups: list[list[int]] | None
    rng: str
    optimizer: dict[str, Any]
    leaves: list[WrittenLeaf]
    data: Any

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        body = {"version": VERSION, **dataclasses.asdict(self)}
        return {**body, "sha256": _sha256(body)}


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
    body = _parsed(file)
    checksum = body.pop("sha256", None)
    if checksum != _sha256(body):
        raise Damaged("the manifest does not have the checksum that it was written with")
    version = body.pop("version", None)
    if version not in _READ:
        raise CheckpointMismatchError(
            f"{file} has version {version!r:.20}, and this crossshard reads versions up to "
            f"{VERSION}. Install the crossshard that wrote it, or choose another folder."
        )
    known = {field.name for field in dataclasses.fields(Manifest)}
    for key in sorted(set(body) ^ known):
        what = "an unknown key" if key in body else "no key"
        raise CheckpointMismatchError(
            f"{file} has {what} {key!r:.60}, so something else wrote it. Choose another folder."
        )
    manifest = _checked(body, version)
    if manifest.number != number:
        raise Damaged(f"its manifest is that of checkpoint {manifest.number}")
    return manifest


def _parsed(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise Damaged(f"the manifest is larger than {MOST_BYTES:,} bytes")
        body = json.loads(text)
    except FileNotFoundError:
        raise Damaged("it has no manifest") from None
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"the manifest cannot be read ({error!s:.100})") from None
    if not isinstance(body, dict):
        raise Damaged("the manifest is no JSON object")
    return body


def _sha256(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _checked(body: dict[str, Any], version: int) -> Manifest:
    """The manifest of a parsed body, all of whose parts have the right types."""
    optimizer, groups = body["optimizer"], body["groups"]
    right = (
        all(_is_count(body[key]) for key in ("number", "step"))
        and _is_count(body["shards"], _MOST_SHARDS)
        and isinstance(body["rng"], str)
        and _is_fingerprint(optimizer, version)
        and (groups is None or _is_list(groups, lambda group: _is_list(group, _is_count)))
        and _is_list(body["leaves"], _is_leaf)
        and len({leaf["path"] for leaf in body["leaves"]}) == len(body["leaves"])
    )
    if not right:
        raise Damaged("the manifest has values of a wrong type")
    leaves = [WrittenLeaf(**{**leaf, "shape": tuple(leaf["shape"])}) for leaf in body["leaves"]]
    return Manifest(**{**body, "leaves": leaves})


def _is_fingerprint(found: Any, version: int) -> bool:
    if not isinstance(found, dict):
        return False
    more = () if version == 1 else (*_OF_VERSION_2, "preprocess", "options")
    stage, options = found.get("preprocess"), found.get("options", {})
    return (
        _is_update(found, (*_OF_VERSION_1, "jax", "optax", *more))
        and (stage is None or _is_update(stage, (*_OF_VERSION_1, *_OF_VERSION_2)))
        and isinstance(options, dict)
        and all(value is None or _is_text(value) for value in options.values())
    )


_OF_VERSION_1, _OF_VERSION_2 = ("states", "operations"), ("words", "equations")


def _is_update(found: Any, keys: tuple[str, ...]) -> bool:
    texts = {"operations", "equations", "jax", "optax"}.intersection(keys)
    lists = {"states", "words"}.intersection(keys)
    return (
        isinstance(found, dict)
        and set(found) == set(keys)
        and all(_is_text(found[key]) for key in texts)
        and all(_is_list(found[key], _is_text) for key in lists)
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_leaf(leaf: Any) -> bool:
    return (
        isinstance(leaf, dict)
        and set(leaf) == {"path", "shape", "dtype", "hash"}
        and all(isinstance(leaf[key], str) for key in ("path", "dtype", "hash"))
        and _is_list(leaf["shape"], _is_count)
    )


def _is_list(value: Any, of: Any) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _is_count(value: Any, most: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most
