"""Slots: an Optax state over named variables, which can be taken apart by variable and by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import optax
from flax import nnx, serialization

from crossshard.errors import ArgumentError
from crossshard.optimizer.names import Name, Unnamed

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

    Wherever an optimizer's state mirrors the parameters it stands in a stored state, so that what
    belongs to a variable can be told from what belongs to all (a step count). An optimizer itself
    sees a plain dict there, as its masks and labels do.
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


# What an optimizer sees, and what is stored.

Names = Mapping[str, Name | Unnamed]


def as_seen(state: Any, names: Names) -> Any:
    """A stored state as an optimizer sees it, with a plain dict in the place of slots."""
    return _map(lambda x: {names[k]: v for k, v in x.items()} if _is_slots(x) else x, state)


def as_stored(seen: Any, like: Any, names: Names) -> Any:
    """The reverse, of a state whose structure is that of the stored one that ``like`` is."""
    return _map(lambda x, y: Slots({k: y[names[k]] for k in x}) if _is_slots(x) else y, like, seen)


def as_first_stored(seen: Any, names: Names) -> Any:
    """The reverse, of a state that was just made: what has the parameters' keys mirrors them."""

    def mirrors(node: Any) -> bool:
        return type(node) is dict and bool(node) and all(isinstance(k, _SEEN) for k in node)

    def one(node: Any) -> Any:
        if not mirrors(node):
            return node
        return Slots({k: node[name] for k, name in names.items() if name in node})

    return jax.tree.map(one, seen, is_leaf=mirrors)


_SEEN = (Name, Unnamed)


def in_order_of(have: Any, given: Any) -> Any:
    """A state with its variables in the order of another, where it has the same ones."""

    def one(x: Any, y: Any) -> Any:
        same = _is_slots(x) and isinstance(y, dict) and x.keys() == y.keys()
        return Slots({k: y[k] for k in x}) if same else y

    try:
        return _map(one, have, given)
    except (TypeError, ValueError):  # it has another structure
        return given


# Finding.


def by_name(state: Any) -> dict[str, Slots]:
    """The slots by the name of the field that holds them; the first where a name comes twice."""
    found: dict[str, Slots] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_slots)[0]:
        names = [_field(key) for key in path if _field(key)]
        if _is_slots(node) and names:
            found.setdefault(names[-1], node)
    return found


def _field(key: Any) -> str:
    """The name of a field of a tuple, or of an entry of a dict; nothing for a place in a list."""
    name = getattr(key, "name", getattr(key, "key", None))
    return name if isinstance(name, str) else ""


def find(state: Any, key: str, name: str) -> Any:
    """The slot of this name, in Optax's or TensorFlow's words, of one variable; else ``None``."""
    slots = by_name(state)
    for candidate in (name, *_TENSORFLOW_NAMES.get(name, ())):
        slot = slots.get(candidate, Slots()).get(key)
        if slot is not None and not isinstance(slot, optax.MaskedNode):
            return slot
    return None


# Reading and writing through.


class StateDict(dict[str, Any]):
    """A dict in an optimizer's state, such as ``hyperparams``: what is written to it takes effect.

    JAX makes a plain dict of it wherever it makes a tree anew.
    """

    def __init__(self, values: Mapping[str, Any], write: Callable[[str, Any], None]):
        super().__init__(values)
        self._write = write

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self:
            self._refuse()
        self._write(key, value)
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Write several."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> "StateDict":  # type: ignore[override,misc]
        self.update(other)
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            f"An optimizer's state keeps its structure: the entries here are {', '.join(self)}, "
            f"and none can be added or taken away."
        )

    __delitem__ = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


jax.tree_util.register_pytree_with_keys(
    StateDict,
    lambda x: ([(jax.tree_util.DictKey(k), x[k]) for k in sorted(x)], tuple(sorted(x))),
    lambda keys, values: dict(zip(keys, values, strict=True)),
)


def written_through(
    state: Any, read: Callable[[nnx.Variable], Any], write: Callable[[str, nnx.Variable, Any], None]
) -> Any:
    """The values of a stored state, with a ``StateDict`` in the place of every plain dict."""

    def one(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return read(node)
        if type(node) is not dict:
            return node

        def write_entry(key: str, value: Any) -> None:
            if not isinstance(node[key], nnx.Variable):
                raise ArgumentError(
                    f"The entry {key!r} of the state is a tree of arrays, which is written whole: "
                    f"optimizer.state = state."
                )
            write(key, node[key], value)

        return StateDict({k: below(v) for k, v in node.items()}, write_entry)

    def below(node: Any) -> Any:
        stop = lambda x: isinstance(x, nnx.Variable) or type(x) is dict
        return jax.tree.map(one, node, is_leaf=stop)

    return below(state)


def _to_state_dict(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: serialization.to_state_dict(value) for key, value in mapping.items()}


def _from_state_dict(mapping: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    if mapping.keys() != saved.keys():
        raise ArgumentError(f"The saved state has {list(saved)}, and this one {list(mapping)}.")
    return {key: serialization.from_state_dict(mapping[key], saved[key]) for key in mapping}


serialization.register_serialization_state(
    Slots, _to_state_dict, lambda target, saved: Slots(_from_state_dict(target, saved))
)
serialization.register_serialization_state(StateDict, _to_state_dict, _from_state_dict)
