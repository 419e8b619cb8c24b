"""Slots: an Optax state over named variables, which can be taken apart by variable and by name."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import optax

T = TypeVar("T")

# TensorFlow's names for what Optax's states call otherwise.
_TENSORFLOW_NAMES = {
    "accum": ("e_g",),
    "accum_update": ("e_x",),
    "accumulator": ("sum_of_squares",),
    "m": ("mu",),
    "mg": ("mu",),
    "momentum": ("trace",),
    "rms": ("nu",),
    "v": ("nu",),
    "vhat": ("nu_max",),
}


@jax.tree_util.register_pytree_with_keys_class
class Slots(dict[str, Any]):
    """One value per variable, by the variable's key.

    Parameters go to Optax in it, so wherever its state mirrors the parameters the type comes back,
    and what belongs to a variable can be told from what belongs to all (a step count).
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The values with their keys, in the order in which they were put in."""
        return [(jax.tree_util.DictKey(k), v) for k, v in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], values: Iterable[Any]) -> "Slots":
        """The reverse."""
        return cls(zip(keys, values, strict=True))


def _is_slots(node: Any) -> bool:
    return isinstance(node, Slots)


def _map(function: Callable[..., Any], *states: Any) -> Any:
    return jax.tree.map(function, *states, is_leaf=_is_slots)


def restrict(state: T, keys: Iterable[str]) -> T:
    """The state of these variables alone, with what belongs to all."""
    keys = list(keys)
    return _map(lambda x: Slots({k: x[k] for k in keys if k in x}) if _is_slots(x) else x, state)


def merge(old: T, new: T, *, keep_common: bool = False) -> T:
    """``old`` with the variables of ``new``; what belongs to all is the new one's, or is kept."""
    return _map(
        lambda x, y: Slots({**x, **y}) if _is_slots(x) else (x if keep_common else y), old, new
    )


def by_name(state: Any) -> dict[str, Slots]:
    """The slots by the name of the field that holds them; the first where a name comes twice."""
    found: dict[str, Slots] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_slots)[0]:
        names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        if _is_slots(node) and names:
            found.setdefault(names[-1], node)
    return found


def find(state: Any, key: str, name: str) -> Any:
    """The slot of this name, in Optax's or TensorFlow's words, of one variable; else ``None``."""
    slots = by_name(state)
    for candidate in (name, *_TENSORFLOW_NAMES.get(name, ())):
        slot = slots.get(candidate, Slots()).get(key)
        if slot is not None and not isinstance(slot, optax.MaskedNode):
            return slot
    return None
