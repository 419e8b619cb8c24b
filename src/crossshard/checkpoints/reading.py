"""Reading: takes a state out of one checkpoint, if it fits the step and no array is damaged."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from crossshard import _mesh
from crossshard._hash import hash_of
from crossshard.checkpoints import storage
from crossshard.checkpoints.data import Data
from crossshard.checkpoints.folder import Damaged, Folder, printable
from crossshard.checkpoints.manifest import (
    FILE,
    NOT_BATCH,
    ON,
    Fingerprint,
    Manifest,
    Update,
    groups_of,
    read_manifest,
)
from crossshard.distributed.agreement import check_agreement, exchange
from crossshard.errors import CheckpointMismatchError
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.random_streams import is_key
from crossshard.step.state import (
    AVERAGE,
    MASTERS,
    NEW,
    OPTIMIZER,
    Key,
    completed,
    describe_changes,
    key_of,
)

# What follows from a difference: it is refused in any case, or if the caller is strict, or it is
# only said. The words tell the user what else to do.
_REFUSED = "or choose another folder"
_PARAMS = "or take the parameters alone: restore_params(state), or step.init(other.model(state))"
_OF_SHARD = "or begin with one shard's parameters: step.init(other.model(state, shard=0))"
_STRICT = "or go on with restore_latest(state, strict=False), which keeps what fits"
# Instead of that, for parameters alone.
_CONVERT = "or restore into a state with its dtypes, and convert the model for step.init"
_SAID = ""
# Where the arrays of a model are in a state, and those of workers after the last synchronisation.
_TRAINED, _FROZEN, _ANCHOR = ".params", ".frozen", ".opt_state.outer.anchor"
# What follows, and what differs, or ``None`` if nothing does.
_Differences = Iterator[tuple[str, str | None]]


class Found(NamedTuple):
    """What a checkpoint has for a step: the unsharded state, and what the user saved beside it."""

    state: TrainState
    data: Data
    # What differs between the two steps, in words.
    notes: list[str]
    source: "Source"
    score: float = 0.0


class Source(Protocol):
    """What a state is read from: a checkpoint, or a snapshot."""

    number: int
    name: str
    has_hashes: bool

    def manifest(self) -> Manifest:
        """Return its manifest; raise as ``read_manifest`` does."""

    def read(self, leaves: Mapping[int, storage.Leaf], number: int) -> dict[int, jax.Array]:
        """Read arrays onto the mesh, by their places among so many, or raise ``Damaged``."""


class OnDisk:
    """A checkpoint of a folder."""

    has_hashes = True

    def __init__(self, folder: Folder, number: int):
        self.number = number
        self.name = f"Checkpoint {number} in {folder.path}"
        self._folder = folder

    def manifest(self) -> Manifest:
        """Return the manifest of a checkpoint of which nothing is a link, a device or too large."""
        self._folder.check(self.number)
        return read_manifest(self._folder.note(self.number, FILE), self.number)

    def read(self, leaves: Mapping[int, storage.Leaf], number: int) -> dict[int, jax.Array]:
        """Read arrays, as ``storage.read`` does."""
        return storage.read(self._folder.of(self.number), leaves, number)


def read_state(
    source: Source,
    layout: StateLayout,
    state: TrainState,
    here: Fingerprint | None,
    *,
    strict: bool,
) -> Found:
    """Read the state of a checkpoint, for a step that may have other options, or parameters alone.

    Args:
      source: the checkpoint, or the snapshot.
      layout: the layout of the step's states.
      state: such a state, or its types.
      here: the fingerprint of the step; ``None`` reads the parameters, whatever has trained them.
      strict: whether to refuse what changes the meaning of a step, and not only what does not fit.

    Raises:
      CheckpointMismatchError: the checkpoint is not of this step.
      Damaged: it is damaged; in every process, if one finds it so.
    """
    with _in_all(layout):
        manifest = source.manifest()
        known = here or manifest.fingerprint
        types = _as_written(manifest, state)
        own = _by_option(storage.leaves_of(layout, types, manifest.shards), known)
        written = _by_option(manifest.leaves, manifest.fingerprint)
        at = {leaf.path: place for place, leaf in enumerate(manifest.leaves)}
        if here is None:
            own, written = _of_model(manifest, layout, own.values())
        all_of = _differences(manifest, layout, str(state.rng_impl), here, written, own)
        differences = [(becomes, what) for becomes, what in all_of if what is not None]
        others = [what for becomes, what in differences if becomes is _SAID]
        for becomes, what in differences:
            if becomes is not _SAID and (strict or becomes is not _STRICT):
                # An option may be the reason.
                also = f" ({'; '.join(others)})" if others else ""
                becomes = _CONVERT if here is None and becomes is _STRICT else becomes
                raise CheckpointMismatchError(
                    f"{source.name} is not of this step: {what}{also}. "
                    f"Build the step as it was when it was saved, {becomes}."
                )
        notes = [printable(what) for _, what in differences]
        places = {key: at[written[key].path] for key in own if key in written}
        for key, place in places.items():
            if (was := manifest.leaves[place].dtype) != own[key].dtype:
                on_disk = own[key].on_disk.update(dtype=jnp.dtype(was))
                own[key] = dataclasses.replace(own[key], on_disk=on_disk)
        wanted = {place: own[key] for key, place in places.items()}
    check_agreement(
        "restore",
        lambda: {"checkpoint": f"{source.number} of hash {manifest.to_json()['sha256'][:8]}"},
        layout.mesh,
        "Every process must restore the same one, from a folder that all of them see.",
    )
    # Hosts read a snapshot together, so none may have been refused before.
    with _in_all(layout):
        read = source.read(wanted, len(manifest.leaves))
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        # The processes compute the hashes together, so none may have been refused before.
        with _in_all(layout):
            hashed = read if source.has_hashes else {}
            hashes = {manifest.leaves[place]: hash_of(x) for place, x in hashed.items()}
            wrong = [leaf.path for leaf, found in hashes.items() if found != leaf.hash]
            if wrong:
                more = f", as do {len(wrong) - 1} more arrays" if len(wrong) > 1 else ""
                raise Damaged(f"{wrong[0]} has not the values that were written{more}")
        like, tree = jax.tree.flatten((state.params, state.frozen) if here is None else types)
        from_of = {key: _read_for(key, places) for key in own}
        arrays = [
            storage.from_disk(x, read[places[from_of[key]]]) if from_of[key] in places else NEW
            for key, x in zip(own, like, strict=True)
        ]
        if here is None:
            params, frozen = tree.unflatten(arrays)
            found = dataclasses.replace(state, params=params, frozen=frozen)
            return Found(found, Data(None), [], source)
        shardings = [leaf.on_disk.sharding for leaf in own.values()]
        whole = completed(layout, tree.unflatten(arrays), shardings)
    return Found(whole, manifest.data, notes, source)


@contextlib.contextmanager
def _in_all(layout: StateLayout) -> Iterator[None]:
    """Raise, in every process, what the first one that cannot read a checkpoint has found."""
    kind, refused = "", ""
    try:
        yield
    except (Damaged, CheckpointMismatchError) as error:
        kind, refused = type(error).__name__, str(error)
    # It may quote what is on disk.
    told = exchange("restore", json.dumps([kind, printable(refused)]), layout.mesh)
    found = dict(reversed([json.loads(each) for each in told]))
    for each in (Damaged, CheckpointMismatchError):
        if each.__name__ in found:
            raise each(found[each.__name__])


def _as_written(manifest: Manifest, state: TrainState) -> TrainState:
    """Return the types of a state, with one model state for each shard if a checkpoint has so."""
    own = jax.tree.leaves(state.model_state)
    written = [leaf for leaf in manifest.leaves if leaf.path.startswith(".model_state")]
    # Then its arrays have one dimension more, or less. Keys are written as their words.
    pairs = zip(written, own, strict=False)
    more = [len(leaf.shape) - (x.ndim + is_key(x)) for leaf, x in pairs]
    if state.grouped or {*more} != {-1 if state.per_shard else 1}:
        return state
    shape = lambda x: x.shape[1:] if state.per_shard else (manifest.shards, *x.shape)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype), state.model_state)
    return dataclasses.replace(state, model_state=types, per_shard=not state.per_shard)


# Which array is which, and what differs.


def _in_model(path: str, *places: str) -> Key | None:
    """Return where in the model an array is that is in one of these places; else ``None``."""
    found = [path.removeprefix(place) for place in places if path.startswith(place)]
    return ("", found[0]) if found else None


def _of_model(
    manifest: Manifest, layout: StateLayout, leaves: Iterable[storage.Leaf]
) -> tuple[dict[Key, storage.Leaf], dict[Key, Any]]:
    """Return the arrays of the model, of a step and as written, by their paths in the model.

    What is trained in one of them may be frozen in the other. The parameters of workers are those
    that ``model(state)`` returns.
    """
    of_own = ((_in_model(leaf.path, _TRAINED, _FROZEN), leaf) for leaf in leaves)
    here = {key: leaf for key, leaf in of_own if key is not None}
    there: dict[Key, Any] = {}
    for leaf in manifest.leaves:
        key = _in_model(leaf.path, _TRAINED, _FROZEN, _ANCHOR)
        if key is not None and key in here:
            # An anchor, which comes last, may have more bits than the parameter.
            there[key] = dataclasses.replace(leaf, dtype=there.get(key, leaf).dtype)
    for key, own in here.items():
        of_groups = manifest.groups and key in there and there[key].path.startswith(_TRAINED)
        if own.placement.per_shard and not of_groups:
            here[key] = storage.as_one(layout, own)
    return here, there


def _by_option(leaves: list[Any], fingerprint: Fingerprint) -> dict[Key, Any]:
    masters, average = (fingerprint.options.get(each) is not None for each in (MASTERS, AVERAGE))
    return {key_of(leaf.path, masters=masters, average=average): leaf for leaf in leaves}


def _read_for(key: Key, places: Container[Key]) -> Key:
    """Return which array is read: for new master weights, the parameter before it is rounded."""
    option, path = key
    is_new = option == MASTERS and key not in places
    return ("", path.replace(".masters", _TRAINED, 1)) if is_new else key


def _differences(
    manifest: Manifest,
    layout: StateLayout,
    rng: str,
    here: Fingerprint | None,
    written: dict[Key, Any],
    own: dict[Key, Any],
) -> _Differences:
    """Yield what differs between a checkpoint and a step, the gravest first."""
    # For the parameters alone, only arrays and groups count.
    before, now = manifest.fingerprint, here or manifest.fingerprint
    option = lambda name: _options_differ(name, before, now)
    names = [name for name in now.updates if name in before.updates]
    updates = {name: (before.updates[name], now.updates[name]) for name in names}
    for name, pair in updates.items():
        states = (", ".join(each.states) or "no state" for each in pair)
        yield _STRICT, _differ(f"its {name}'s state is", *states)
    groups, are_workers = groups_of(layout), layout.pipeline.joins_groups
    were_workers = any(leaf.path.startswith(_ANCHOR) for leaf in manifest.leaves)
    if here is None:
        if manifest.groups and not were_workers and (manifest.groups != groups or are_workers):
            yield _OF_SHARD, f"its groups {manifest.groups} have parameters of their own"
    elif None in (manifest.groups, groups) and (were_workers or are_workers):
        both = ["train together", "are workers that synchronise rarely"]
        yield _PARAMS, _differ("its shards", both[were_workers], both[are_workers])
    # Workers that synchronise rarely may be others.
    elif not are_workers:
        yield _REFUSED, _differ("its groups are", manifest.groups, groups)
    if here is not None and manifest.rng != rng:
        same = f"pass rng=jax.random.key(0, impl={manifest.rng!r}) to init or abstract_init"
        yield _REFUSED, f"its random key is of {manifest.rng}, and here of {rng} ({same})"
    if here is not None:
        yield _STRICT, manifest.data.misfit(layout.mesh)
    yield _STRICT, option("reduction")
    yield from _of_arrays(before, now, written, own)
    new, gone, kept = (
        {option for option, _ in keys}
        for keys in (own.keys() - written.keys(), written.keys() - own.keys(), own.keys() & written)
    )
    # What is refused in any case, or the optimizer's, is told above.
    told = {"", OPTIMIZER}
    for what in describe_changes(new - told, gone - told, kept):
        yield _SAID, what
    # Other versions trace an update otherwise.
    if (before.jax, before.optax) == (now.jax, now.optax):
        for name, pair in updates.items():
            yield _of_update(name, *pair)
    for name in sorted(now.options.keys() - {"reduction", *new, *gone}):
        yield _SAID, option(name)


def _of_arrays(
    before: Fingerprint, now: Fingerprint, written: dict[Key, Any], own: dict[Key, Any]
) -> _Differences:
    kinds = {_TRAINED: "trained", _FROZEN: "frozen"}
    dtypes = {leaf.path: leaf.dtype for leaf in written.values()}
    for here, there in itertools.permutations(kinds):
        for leaf in (leaf for key, leaf in own.items() if key not in written):
            path = leaf.path.removeprefix(here)
            if path != leaf.path and dtypes.get(there + path) == leaf.dtype:
                yield _PARAMS, _differ(f"wrt= differs, params{path} is", kinds[there], kinds[here])
    # The first missing array of the optimizer is named. Those of other options are made or dropped.
    for one, other, has in ((own, written, "it has no"), (written, own, "it also has")):
        for option, becomes in (("", _REFUSED), (OPTIMIZER, _STRICT)):
            lacking = [key for key in one if key[0] == option and key not in other]
            for key in lacking[:1]:
                yield becomes, f"{has} {one[key].path}"
    # Adam's moments have the dtype of the masters, for example.
    is_same = before.options.get(MASTERS) == now.options.get(MASTERS)
    following = () if is_same else (OPTIMIZER, MASTERS, AVERAGE)
    for key in (key for key in own if key in written):
        was, leaf = written[key], own[key]
        yield _REFUSED, _differ(f"{leaf.path} has the shape", was.shape, leaf.on_disk.shape)
        is_possible = was.dtype == leaf.dtype or _converts(was.dtype, leaf.dtype)
        if not (is_possible and key[0] in following):
            becomes = _STRICT if is_possible else _REFUSED
            yield becomes, _differ(f"{leaf.path} is", was.dtype, leaf.dtype)


def _differ(what: str, was: object, now: object) -> str | None:
    return None if was == now else f"{what} {was} in it, and {now} here"


def _options_differ(name: str, before: Fingerprint, here: Fingerprint) -> str | None:
    now = here.options.get(name)
    was = before.options.get(name, now)
    # Version 3 tells no more of an option.
    is_alike = (was == ON and now is not None) or (was == NOT_BATCH and now != "batch")
    return None if is_alike else _differ(f"{name} is", was or "off", now or "off")


def _of_update(name: str, was: Update, now: Update) -> tuple[str, str | None]:
    both = was.words, now.words
    only = [[each for each in one if each not in set(other)] for one, other in (both, both[::-1])]
    # A checkpoint of crossshard 0.3.0 tells less.
    differ = lambda field: "" != getattr(was, field) != getattr(now, field) != ""
    first = ": the same ones are in another order, or in another number"
    if was.equations == now.equations:
        first = ": the same ones take other arrays, or other parts of them"
    if any(only):
        told = (each[0] if each else "nothing that the other has not" for each in only)
        first = f": it has {next(told)}, and this one {next(told)}"
    if was.operations == now.operations and not differ("operands"):
        what = f"numbers in the update of its {name} differ{first}"
        return _SAID, what if was.equations != now.equations or differ("arrays") else None
    what = (
        f"its {name} has a state of the same kind, but the operations of its update differ from "
        f"those of this one{first}"
    )
    return _STRICT, what if was.states == now.states else None


def _converts(was: str, now: str) -> bool:
    """Return whether numbers of one dtype can be read and converted to another."""
    try:
        before, after = jnp.dtype(was), jnp.dtype(now)
    except TypeError:
        return False
    kinds = jnp.floating, jnp.complexfloating, jnp.integer
    alike = any(jnp.issubdtype(before, kind) and jnp.issubdtype(after, kind) for kind in kinds)
    return alike and jax.dtypes.canonicalize_dtype(before) == before
