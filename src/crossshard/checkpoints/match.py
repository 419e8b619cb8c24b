"""Match: which array of a checkpoint is which of a step's state, and what differs between them."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from crossshard.checkpoints.leaves import Leaf
from crossshard.checkpoints.manifest import Manifest
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.options import AVERAGE, MASTERS, OPTIMIZER, PREPROCESS, key_of, said
from crossshard.train_step.state import TrainState


@dataclasses.dataclass(frozen=True)
class Match:
    """How a checkpoint becomes a state of a step.

    Attributes:
      places: for each array of the state its place in the checkpoint; ``None`` if it is new.
      read: the leaves to read, as they were written, by their places.
      notes: what differs, in words.
    """

    places: list[int | None]
    read: dict[int, Leaf]
    notes: list[str]


class Different(Exception):
    """A checkpoint is not of a step; the text says what differs first, and what to do."""


def match(
    manifest: Manifest,
    leaves: list[Leaf],
    layout: StateLayout,
    state: TrainState,
    own: dict[str, Any],
    *,
    strict: bool,
) -> Match:
    """Match the arrays of a checkpoint with those of a step.

    Args:
      manifest: that of the checkpoint.
      leaves: those of the step, if as many shards as the checkpoint's had written them.
      layout: the layout of the step's state.
      state: a state of the step, or its types.
      own: the fingerprint of the step.
      strict: whether to refuse what changes the meaning of a step, and not only what does not fit.

    Raises:
      Different: something differs that must not.
    """
    found = _Found(strict)
    compared = list(_compared(manifest.optimizer, own))
    for name, written, here in compared:
        found.add(_of_states(name, written, here))
    found.refuse(_of_the_step(manifest, layout, state))
    options, here = manifest.optimizer.get("options"), own["options"]
    if options is not None:
        found.add(_of_option("reduction", options, here))
    found.match(manifest, leaves, own)
    found.notes += said(*({*each} - {OPTIMIZER} for each in (found.new, found.gone)))
    if all(manifest.optimizer[library] == own[library] for library in ("jax", "optax")):
        for each in compared:
            found.add(_of_operations(*each))
            found.note(_of_numbers(*each))
    if options is not None:
        told = {"reduction", *found.new, *found.gone}
        is_on = lambda fingerprint: {PREPROCESS: fingerprint[PREPROCESS] and "on"}
        before, now = options | is_on(manifest.optimizer), here | is_on(own)
        for name in sorted(now.keys() - told):
            found.note(_of_option(name, before, now))
    return Match(found.places, found.read, found.notes)


def groups_of(layout: StateLayout) -> list[list[int]] | None:
    """The groups whose parameters differ, as a manifest has them."""
    return None if layout.groups is None else [list(group) for group in layout.groups.groups]


class _Found:
    """What a match has found so far."""

    def __init__(self, strict: bool):
        self._strict = strict
        self.places: list[int | None] = []
        self.read: dict[int, Leaf] = {}
        self.notes: list[str] = []
        # The options with a state that is made, and dropped.
        self.new: list[str] = []
        self.gone: list[str] = []

    def refuse(self, what: str | None) -> None:
        """Raise if anything differs."""
        if what is not None:
            raise Different(f"{what}. {_ADVICE}, or choose another folder.")

    def add(self, what: str | None) -> None:
        """Raise if anything differs, unless differences are let pass."""
        if what is not None and self._strict:
            raise Different(f"{what}. {_ADVICE}, or go on with {_ANYWAY}.")
        self.note(what)

    def note(self, what: str | None) -> None:
        """Remember what differs."""
        self.notes += [] if what is None else [what]

    def match(self, manifest: Manifest, leaves: list[Leaf], own: dict[str, Any]) -> None:
        """Find the arrays of a state in a checkpoint."""
        was, now = _wrapped(manifest.optimizer), _wrapped(own)
        written = {key_of(leaf.path, **was): at for at, leaf in enumerate(manifest.leaves)}
        other_masters = _masters(manifest.optimizer) != _masters(own)
        for leaf in leaves:
            option, where = key_of(leaf.path, **now)
            at = written.pop((option, where), None)
            self.places.append(at)
            if at is None:
                self._lacks(option, f"it has no {leaf.path}", self.new)
                continue
            each = manifest.leaves[at]
            if each.shape != leaf.on_disk.shape:
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


_ADVICE = "Build the step as it was when it was saved"
_ANYWAY = "restore_latest(state, strict=False), which keeps what fits"


def _compared(written: dict[str, Any], own: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The fingerprints of updates that both have, by the name of what updates."""
    # The first version told the wrapped optimizer from others together with what wraps it.
    if "options" in written or not any(_wrapped(written).values()):
        yield OPTIMIZER, written, own
    if written.get(PREPROCESS) and own[PREPROCESS]:
        yield PREPROCESS, written[PREPROCESS], own[PREPROCESS]


def _masters(fingerprint: dict[str, Any]) -> Any:
    if "options" in fingerprint:
        return fingerprint["options"].get(MASTERS)
    return "float32" if "MastersState" in fingerprint["states"] else None


def _wrapped(fingerprint: dict[str, Any]) -> dict[str, bool]:
    """Whether there are master weights, and a moving average."""
    if "options" in fingerprint:
        average = fingerprint["options"].get(AVERAGE) is not None
    else:
        average = "MovingAverageState" in fingerprint["states"]
    return {"masters": _masters(fingerprint) is not None, "average": average}


def _of_states(name: str, written: dict[str, Any], own: dict[str, Any]) -> str | None:
    if written["states"] == own["states"]:
        return None
    of_written, of_own = (", ".join(each["states"]) or "no state" for each in (written, own))
    return f"its {name}'s state is {of_written}, and this one's {of_own}"


def _of_operations(name: str, written: dict[str, Any], own: dict[str, Any]) -> str | None:
    if written["operations"] == own["operations"] or written["states"] != own["states"]:
        return None
    return (
        f"its {name} has a state of the same kind, but the operations of its update differ from "
        f"those of this one{_first(written, own)}"
    )


def _of_numbers(name: str, written: dict[str, Any], own: dict[str, Any]) -> str | None:
    same = written.get("equations", own["equations"]) == own["equations"]
    if same or written["operations"] != own["operations"]:
        return None
    return f"numbers in the update of its {name} differ{_first(written, own)}"


def _first(written: dict[str, Any], own: dict[str, Any]) -> str:
    """The first operation, with its numbers, that only one of two updates has."""
    if "words" not in written:
        return ""
    both = written["words"], own["words"]
    only = [[each for each in one if each not in set(other)] for one, other in (both, both[::-1])]
    if not any(only):
        return ": the same ones are in another order, or in another number"
    was, now = (each[0] if each else "nothing that the other has not" for each in only)
    return f": it has {was}, and this one {now}"


def _of_option(name: str, written: dict[str, Any], own: dict[str, Any]) -> str | None:
    was, now = written.get(name), own[name]
    return None if was == now else f"{name} is {was or 'off'} in it, and {now or 'off'} here"


def _of_the_step(manifest: Manifest, layout: StateLayout, state: TrainState) -> str | None:
    if manifest.groups != groups_of(layout):
        return f"its groups are {manifest.groups}, and here {groups_of(layout)}"
    if manifest.rng != str(state.rng_impl):
        return f"its random key is of {manifest.rng}, and here of {state.rng_impl}"
    return None


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
