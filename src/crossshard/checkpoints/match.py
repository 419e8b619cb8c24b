"""Match: which array of a checkpoint is which of a step's state, and what differs between them."""

import dataclasses

import jax
import jax.numpy as jnp

from crossshard.checkpoints.leaves import Leaf
from crossshard.checkpoints.manifest import NOT_BATCH, ON, Fingerprint, Manifest, Update, groups_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import STAGES
from crossshard.step.options import AVERAGE, MASTERS, OPTIMIZER, key_of, said

_ADVICE = "Build the step as it was when it was saved"
_ANYWAY = "restore_latest(state, strict=False), which keeps what fits"
_PARAMS = ".params"


class Different(Exception):
    """A checkpoint is not of a step; the text says what differs first, and what to do."""


@dataclasses.dataclass
class Match:
    """How a checkpoint becomes a state of a step.

    Attributes:
      strict: whether to refuse what changes the meaning of a step, and not only what does not fit.
      places: for each array of the state its place in the checkpoint; ``None`` if it is new.
      read: the leaves to read, as they were written, by their places.
      notes: what differs, in words.
      new: the options with a state that is made.
      gone: the options with a state that is dropped.
      kept: the options with a state that is read.
    """

    strict: bool
    places: list[int | None] = dataclasses.field(default_factory=list)
    read: dict[int, Leaf] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    new: list[str] = dataclasses.field(default_factory=list)
    gone: list[str] = dataclasses.field(default_factory=list)
    kept: set[str] = dataclasses.field(default_factory=set)

    def refuse(self, what: str | None) -> None:
        """Raise if anything differs."""
        if what is not None:
            raise Different(f"{what}. {_ADVICE}, or choose another folder.")

    def add(self, what: str | None) -> None:
        """Raise if anything differs, unless differences are let pass."""
        if what is not None and self.strict:
            raise Different(f"{what}. {_ADVICE}, or go on with {_ANYWAY}.")
        self.note(what)

    def note(self, what: str | None) -> None:
        """Remember what differs."""
        self.notes += [] if what is None else [what]

    def find(self, manifest: Manifest, leaves: list[Leaf], here: Fingerprint) -> None:
        """Find the arrays of a state in a checkpoint."""
        was, now = _wrapped(manifest.fingerprint), _wrapped(here)
        written = {key_of(leaf.path, **was): at for at, leaf in enumerate(manifest.leaves)}
        other_masters = manifest.fingerprint.options.get(MASTERS) != here.options[MASTERS]
        for leaf in leaves:
            option, where = key_of(leaf.path, **now)
            at = written.pop((option, where), None)
            self.places.append(at)
            if at is None:
                self._lacks(option, f"it has no {leaf.path}", self.new)
                continue
            self.kept.add(option)
            each = manifest.leaves[at]
            if each.shape != leaf.on_disk.shape:
                for kind in STAGES:
                    if kind.state_field == option and kind.shaped_by:
                        self.refuse(_of_option(kind.shaped_by, manifest.fingerprint, here))
                self.refuse(
                    f"{leaf.path} has the shape {each.shape} in it, and {leaf.on_disk.shape} here"
                )
            if each.dtype != leaf.dtype:
                # Adam's moments have the dtype of the masters, for example.
                what = f"{leaf.path} is {each.dtype} in it, and {leaf.dtype} here"
                if not _converts(each.dtype, leaf.dtype):
                    self.refuse(what)
                elif not (other_masters and option in (OPTIMIZER, MASTERS, AVERAGE)):
                    self.add(what)
                leaf = dataclasses.replace(
                    leaf, on_disk=leaf.on_disk.update(dtype=jnp.dtype(each.dtype))
                )
            self.read[at] = leaf
        for (option, _), at in written.items():
            self._lacks(option, f"it also has {manifest.leaves[at].path}", self.gone)

    def _lacks(self, option: str, what: str, others: list[str]) -> None:
        """Note that one side has an array that the other has not, if it is the first of them."""
        if not option:
            self.refuse(what)
        elif option == OPTIMIZER and option not in others:
            self.add(what)
        others.append(option)


def match(
    manifest: Manifest,
    leaves: list[Leaf],
    layout: StateLayout,
    state: TrainState,
    here: Fingerprint,
    *,
    strict: bool,
) -> Match:
    """Match the arrays of a checkpoint with those of a step.

    Args:
      manifest: that of the checkpoint.
      leaves: those of the step, if as many shards as the checkpoint's had written them.
      layout: the layout of the step's state.
      state: a state of the step, or its types.
      here: the fingerprint of the step.
      strict: whether to refuse what changes the meaning of a step, and not only what does not fit.

    Raises:
      Different: something differs that must not.
    """
    found, written = Match(strict), manifest.fingerprint
    compared = [
        (name, written.updates[name], update)
        for name, update in here.updates.items()
        if name in written.updates
    ]
    for each in compared:
        found.add(_of_states(*each))
    if (manifest.groups is None) != (layout.groups is None):
        for kind in STAGES:
            if kind.joins_groups:
                found.refuse(_of_option(kind.options[0], written, here))
    found.refuse(_of_groups(manifest, layout))
    if manifest.rng != str(state.rng_impl):
        found.refuse(f"its random key is of {manifest.rng}, and here of {state.rng_impl}")
    found.add(_of_option("reduction", written, here))
    found.find(manifest, leaves, here)
    new, gone = ({*each} - {OPTIMIZER} for each in (found.new, found.gone))
    found.notes += said(new, gone, found.kept)
    if (written.jax, written.optax) == (here.jax, here.optax):
        for each in compared:
            found.add(_of_operations(*each))
            found.note(_of_numbers(*each))
    for name in sorted(here.options.keys() - {"reduction", *found.new, *found.gone}):
        found.note(_of_option(name, written, here))
    return found


def match_params(manifest: Manifest, leaves: list[Leaf], layout: StateLayout) -> Match:
    """Match the parameters alone, whatever optimizer has trained them; as for ``match``."""
    found = Match(strict=True)
    found.refuse(_of_groups(manifest, layout))
    if manifest.groups is not None and manifest.shards != layout.number_of_shards:
        found.refuse(
            f"its groups are over {manifest.shards} shards, and here {layout.number_of_shards}"
        )
    at = {leaf.path: place for place, leaf in enumerate(manifest.leaves)}
    for leaf in leaves:
        if leaf.path != _PARAMS and not leaf.path.startswith((f"{_PARAMS}[", f"{_PARAMS}.")):
            continue
        if leaf.path not in at:
            found.refuse(f"it has no {leaf.path}")
        written = manifest.leaves[at[leaf.path]]
        was = f"{written.dtype}{list(written.shape)}"
        now = f"{leaf.dtype}{list(leaf.on_disk.shape)}"
        found.refuse(f"{leaf.path} is {was} in it, and {now} here" if was != now else None)
        found.read[at[leaf.path]] = leaf
    return found


def _wrapped(fingerprint: Fingerprint) -> dict[str, bool]:
    """Whether there are master weights, and a moving average."""
    has = lambda option: fingerprint.options.get(option) is not None
    return {"masters": has(MASTERS), "average": has(AVERAGE)}


def _of_states(name: str, written: Update, here: Update) -> str | None:
    if written.states == here.states:
        return None
    of_written, of_here = (", ".join(each.states) or "no state" for each in (written, here))
    return f"its {name}'s state is {of_written}, and this one's {of_here}"


def _of_operations(name: str, written: Update, here: Update) -> str | None:
    if written.operations == here.operations or written.states != here.states:
        return None
    return (
        f"its {name} has a state of the same kind, but the operations of its update differ from "
        f"those of this one{_first(written, here)}"
    )


def _of_numbers(name: str, written: Update, here: Update) -> str | None:
    if written.equations == here.equations or written.operations != here.operations:
        return None
    return f"numbers in the update of its {name} differ{_first(written, here)}"


def _first(written: Update, here: Update) -> str:
    """The first operation, with its numbers, that only one of two updates has."""
    both = written.words, here.words
    only = [[each for each in one if each not in set(other)] for one, other in (both, both[::-1])]
    if not any(only):
        return ": the same ones are in another order, or in another number"
    was, now = (each[0] if each else "nothing that the other has not" for each in only)
    return f": it has {was}, and this one {now}"


def _of_option(name: str, written: Fingerprint, here: Fingerprint) -> str | None:
    if name not in written.options:
        return None
    was, now = written.options[name], here.options.get(name)
    is_alike = (
        was == now or (was == ON and now is not None) or (was == NOT_BATCH and now != "batch")
    )
    return None if is_alike else f"{name} is {was or 'off'} in it, and {now or 'off'} here"


def _of_groups(manifest: Manifest, layout: StateLayout) -> str | None:
    # Workers that synchronise rarely may be others.
    if manifest.groups == groups_of(layout) or layout.pipeline.joins_groups:
        return None
    return f"its groups are {manifest.groups}, and here {groups_of(layout)}"


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
