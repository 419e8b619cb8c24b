"""Reading: a state or parameters of one checkpoint, if it fits the step and no array is damaged."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard import _mesh
from crossshard._hash import hash_of
from crossshard.checkpoints.folder import Damaged, Folder, printable
from crossshard.checkpoints.leaves import Leaf, from_disk, leaves_of
from crossshard.checkpoints.manifest import (
    FILE,
    NOT_BATCH,
    ON,
    Fingerprint,
    Manifest,
    Update,
    WrittenLeaf,
    groups_of,
    read_manifest,
)
from crossshard.distributed.agreement import exchange
from crossshard.errors import CheckpointMismatchError
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import STAGES
from crossshard.step.state import (
    AVERAGE,
    MASTERS,
    NEW,
    OPTIMIZER,
    Key,
    completed,
    key_of,
    said,
)

# What becomes of a difference: it is refused in any case, or if the caller is strict, or only said.
# The words are what the user may do about it.
_REFUSED = "or choose another folder"
_STRICT = "or go on with restore_latest(state, strict=False), which keeps what fits"
_SAID = ""
# Each with what differs; ``None`` if nothing does.
_Differences = Iterator[tuple[str, str | None]]
_PARAMS = re.compile(r"\.params\b")


class Found(NamedTuple):
    """What a checkpoint has for a step: the state, unsharded, and what the user saved beside it."""

    state: TrainState
    data: Any
    # What differs between the two steps, in words.
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

    Args:
      folder: the folder.
      number: which one of it.
      layout: that of the step's states.
      state: such a state, or its types.
      here: the fingerprint of the step.
      strict: whether to refuse what changes the meaning of a step, and not only what does not fit.

    Raises:
      CheckpointMismatchError: it is not of this step.
      Damaged: it is, in every process if one finds it so.
    """
    manifest, state, match, read = _read(folder, number, layout, state, here, strict=strict)
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        arrays = [NEW if place is None else read[place] for place in match.places]
        shardings = [leaf.on_disk.sharding for leaf in match.leaves]
        whole = completed(layout, from_disk(state, arrays), shardings)
    return Found(whole, manifest.data, list(map(printable, match.notes)), number)


def read_params(folder: Folder, number: int, layout: StateLayout, state: TrainState) -> Any:
    """The parameters alone, placed as in a state, whatever has trained them; as ``read_state``."""
    *_, read = _read(folder, number, layout, state, None, strict=True)
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        # In the order of the leaves, which is that of the dict.
        params = jax.tree.structure(state.params).unflatten(read.values())
        return jax.jit(lambda x: x, out_shardings=layout.shardings(state).params)(params)


class _Match(NamedTuple):
    """How a checkpoint becomes a state of a step, or its parameters; what differs, in words."""

    # With the dtypes that they were written with; and for each its place, ``None`` if it is new.
    leaves: list[Leaf]
    places: list[int | None]
    notes: list[str]


def _read(
    folder: Folder,
    number: int,
    layout: StateLayout,
    state: TrainState,
    here: Fingerprint | None,
    *,
    strict: bool,
) -> tuple[Manifest, TrainState, _Match, dict[int, jax.Array]]:
    # Here and not above: it imports Orbax.
    from crossshard.checkpoints import storage

    refused: Exception | None = None
    try:
        folder.check(number)
        manifest = read_manifest(folder.note(number, FILE), number)
        leaves, state = _as_written(manifest, layout, state)
        match = _matched(manifest, leaves, layout, state, here, strict=strict)
        pairs = zip(match.places, match.leaves, strict=True)
        wanted = {place: leaf for place, leaf in pairs if place is not None}
        read = storage.read(folder.of(number), wanted, len(manifest.leaves))
    except _Different as error:
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
    return manifest, state, match, read


def _agree(refused: Exception | None, layout: StateLayout) -> None:
    """Raise, in every process, what the first one that cannot read a checkpoint has found."""
    kind = "" if refused is None else type(refused).__name__
    # It may quote what is on disk.
    told = exchange("restore", json.dumps([kind, printable(str(refused))]), layout.mesh)
    found = dict(reversed([json.loads(each) for each in told]))
    for error in (Damaged, CheckpointMismatchError):
        if error.__name__ in found:
            raise error(found[error.__name__])


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


# Which array is which, and what differs.


class _Different(Exception):
    """A checkpoint is not of a step; the text says what differs first, and what to do."""


def _matched(
    manifest: Manifest,
    leaves: list[Leaf],
    layout: StateLayout,
    state: TrainState,
    here: Fingerprint | None,
    *,
    strict: bool,
) -> _Match:
    # Of the parameters alone those that the step has not are left out.
    taken = [leaf for leaf in leaves if here is not None or _PARAMS.match(leaf.path)]
    own = _by_option(taken, here or manifest.fingerprint)
    written = _by_option(manifest.leaves, manifest.fingerprint)
    if here is None:
        written = {key: leaf for key, leaf in written.items() if key in own}
    both = _Both(manifest, layout, here or manifest.fingerprint, written, own)
    notes = []
    for becomes, what in both.state(state) if here is not None else both.params():
        if what is not None and (becomes is _REFUSED or (becomes is _STRICT and strict)):
            raise _Different(f"{what}. Build the step as it was when it was saved, {becomes}.")
        notes += [] if what is None else [what]
    at = {leaf.path: place for place, leaf in enumerate(manifest.leaves)}
    as_written = [leaf.of(written.get(key, leaf).dtype) for key, leaf in own.items()]
    places = [at[written[key].path] if key in written else None for key in own]
    return _Match(as_written, places, notes)


def _by_option(leaves: list[Any], fingerprint: Fingerprint) -> dict[Key, Any]:
    has = lambda option: fingerprint.options.get(option) is not None
    masters, average = has(MASTERS), has(AVERAGE)
    return {key_of(leaf.path, masters=masters, average=average): leaf for leaf in leaves}


@dataclasses.dataclass(frozen=True)
class _Both:
    """A checkpoint and a step: what differs between them, the gravest first."""

    manifest: Manifest
    layout: StateLayout
    here: Fingerprint
    # The arrays, by the options that they are of.
    written: dict[Key, WrittenLeaf]
    own: dict[Key, Leaf]

    def params(self) -> _Differences:
        """Of the parameters alone, where all is refused."""
        yield _REFUSED, self._groups()
        was, now = self.manifest.shards, self.layout.number_of_shards
        if self.manifest.groups is not None and was != now:
            yield _REFUSED, f"its groups are over {was} shards, and here {now}"
        for _, what in self._arrays():
            yield _REFUSED, what

    def state(self, state: TrainState) -> _Differences:
        """Of a whole state, and of what the step does with it."""
        before, here, rng = self.manifest.fingerprint, self.here, str(state.rng_impl)
        updates = [
            (name, before.updates[name], update)
            for name, update in here.updates.items()
            if name in before.updates
        ]
        for name, *both in updates:
            was, now = (", ".join(each.states) or "no state" for each in both)
            if was != now:
                yield _STRICT, f"its {name}'s state is {was}, and this one's {now}"
        if (self.manifest.groups is None) != (self.layout.groups is None):
            for kind in STAGES:
                if kind.joins_groups:
                    yield _REFUSED, self._option(kind.options[0])
        yield _REFUSED, self._groups()
        if self.manifest.rng != rng:
            yield _REFUSED, f"its random key is of {self.manifest.rng}, and here of {rng}"
        yield _STRICT, self._option("reduction")
        yield from self._arrays()
        new = {option for option, _ in self.own.keys() - self.written.keys()}
        gone = {option for option, _ in self.written.keys() - self.own.keys()}
        kept = {option for option, _ in self.own.keys() & self.written.keys()}
        for what in said(new - {OPTIMIZER}, gone - {OPTIMIZER}, kept):
            yield _SAID, what
        # Other versions trace an update otherwise.
        if (before.jax, before.optax) == (here.jax, here.optax):
            for name, *both in updates:
                yield _of_update(name, *both)
        for name in sorted(here.options.keys() - {"reduction", *new, *gone}):
            yield _SAID, self._option(name)

    def _arrays(self) -> _Differences:
        # Of the optimizer's the first one is named. Those of other options are made, or dropped.
        sides: Any = (
            (self.own, self.written, "it has no"),
            (self.written, self.own, "it also has"),
        )
        for (one, other, has), (option, becomes) in itertools.product(
            sides, (("", _REFUSED), (OPTIMIZER, _STRICT))
        ):
            lacking = (key for key in one if key[0] == option and key not in other)
            for key in itertools.islice(lacking, 1):
                yield becomes, f"{has} {one[key].path}"
        # Adam's moments have the dtype of the masters, for example.
        was, now = (each.options.get(MASTERS) for each in (self.manifest.fingerprint, self.here))
        following = (OPTIMIZER, MASTERS, AVERAGE) if was != now else ()
        for (option, where), own in self.own.items():
            written = self.written.get((option, where))
            if written is None:
                continue
            if written.shape != own.on_disk.shape:
                for kind in STAGES:
                    if kind.state_field == option and kind.shaped_by:
                        yield _REFUSED, self._option(kind.shaped_by)
                shapes = f"{written.shape} in it, and {own.on_disk.shape} here"
                yield _REFUSED, f"{own.path} has the shape {shapes}"
            is_possible = _converts(written.dtype, own.dtype)
            if written.dtype != own.dtype and not (is_possible and option in following):
                what = f"{own.path} is {written.dtype} in it, and {own.dtype} here"
                yield _STRICT if is_possible else _REFUSED, what

    def _option(self, name: str) -> str | None:
        now = self.here.options.get(name)
        was = self.manifest.fingerprint.options.get(name, now)
        if was == now or (was == ON and now is not None) or (was == NOT_BATCH and now != "batch"):
            return None
        return f"{name} is {was or 'off'} in it, and {now or 'off'} here"

    def _groups(self) -> str | None:
        was, now = self.manifest.groups, groups_of(self.layout)
        # Workers that synchronise rarely may be others.
        if was == now or self.layout.pipeline.joins_groups:
            return None
        return f"its groups are {was}, and here {now}"


def _of_update(name: str, was: Update, now: Update) -> tuple[str, str | None]:
    both = was.words, now.words
    only = [[each for each in one if each not in set(other)] for one, other in (both, both[::-1])]
    first = ": the same ones are in another order, or in another number"
    if any(only):
        told = (each[0] if each else "nothing that the other has not" for each in only)
        first = f": it has {next(told)}, and this one {next(told)}"
    if was.operations == now.operations:
        what = f"numbers in the update of its {name} differ{first}"
        return _SAID, what if was.equations != now.equations else None
    what = (
        f"its {name} has a state of the same kind, but the operations of its update differ from "
        f"those of this one{first}"
    )
    return _STRICT, what if was.states == now.states else None


def _converts(was: str, now: str) -> bool:
    """Whether numbers of a dtype can be read and become those of another."""
    try:
        before, after = jnp.dtype(was), jnp.dtype(now)
    except TypeError:
        return False
    alike = any(
        all(jnp.issubdtype(each, kind) for each in (before, after))
        for kind in (jnp.floating, jnp.complexfloating, jnp.integer)
    )
    return alike and jax.dtypes.canonicalize_dtype(before) == before
