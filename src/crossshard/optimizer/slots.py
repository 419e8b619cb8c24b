"""Slots: an Optax state over named variables, indexed by variable and by slot name."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import optax
from flax import nnx, serialization

from crossshard.errors import ArgumentError
from crossshard.optimizer.names import Name, Unnamed

T = TypeVar("T")

# TensorFlow's names, and the fields of Optax's states that they mean.
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

    In a stored state it replaces each dict that mirrors the parameters, so that the state of one
    variable is distinct from shared state (a step count). Optimizers, masks and labels see a plain
    dict there.
    """

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """The values with their keys, in insertion order."""
        return [(jax.tree_util.DictKey(k), v) for k, v in self.items()], tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[str, ...], values: Iterable[Any]) -> "Slots":
        """The inverse."""
        return cls(zip(keys, values, strict=True))


def _is_slots(node: Any) -> bool:
    return isinstance(node, Slots)


def _map(function: Callable[..., Any], *states: Any) -> Any:
    return jax.tree.map(function, *states, is_leaf=_is_slots)


def restrict(state: T, keys: Iterable[str]) -> T:
    """The state of these variables, with the shared state."""
    keys = list(keys)
    return _map(lambda x: Slots({k: x[k] for k in keys if k in x}) if _is_slots(x) else x, state)


def merge(old: T, new: T, *, keep_common: bool = False) -> T:
    """``old`` with the variables of ``new``; shared state is the new one, or is kept."""
    return _map(
        lambda x, y: Slots({**x, **y}) if _is_slots(x) else (x if keep_common else y), old, new
    )


# What an optimizer sees, and what is stored.

Names = Mapping[str, Name | Unnamed]


def as_seen(state: Any, names: Names) -> Any:
    """A stored state as an optimizer sees it, with plain dicts for slots."""
    return _map(lambda x: {names[k]: v for k, v in x.items()} if _is_slots(x) else x, state)


def as_stored(seen: Any, like: Any, names: Names) -> Any:
    """The inverse of ``as_seen``, for a state with the structure of the stored ``like``."""
    return _map(lambda x, y: Slots({k: y[names[k]] for k in x}) if _is_slots(x) else y, like, seen)


def as_first_stored(seen: Any, names: Names) -> Any:
    """The inverse of ``as_seen``, for an initial state: dicts with the parameters' keys."""

    def mirrors(node: Any) -> bool:
        return type(node) is dict and bool(node) and all(isinstance(k, _SEEN) for k in node)

    def one(node: Any) -> Any:
        if not mirrors(node):
            return node
        return Slots({k: node[name] for k, name in names.items() if name in node})

    return jax.tree.map(one, seen, is_leaf=mirrors)


_SEEN = (Name, Unnamed)


def in_order_of(have: Any, given: Any) -> Any:
    """A state with its variables in the order of ``have``, if they are the same."""

    def one(x: Any, y: Any) -> Any:
        same = _is_slots(x) and isinstance(y, dict) and x.keys() == y.keys()
        return Slots({k: y[k] for k in x}) if same else y

    try:
        return _map(one, have, given)
    except (TypeError, ValueError):  # another structure
        return given


# Finding.


def by_name(state: Any) -> dict[str, Slots]:
    """The slots by the name of their field; the first one of a name that occurs twice."""
    found: dict[str, Slots] = {}
    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=_is_slots)[0]:
        names = [_field(key) for key in path if _field(key)]
        if _is_slots(node) and names:
            found.setdefault(names[-1], node)
    return found


def _field(key: Any) -> str:
    """The name of a field of a tuple, or of an entry of a dict; empty for an index."""
    name = getattr(key, "name", getattr(key, "key", None))
    return name if isinstance(name, str) else ""


def find(state: Any, key: str, name: str) -> Any:
    """A slot of one variable, by its Optax or TensorFlow name; ``None`` if there is none."""
    slots = by_name(state)
    for candidate in (name, *_TENSORFLOW_NAMES.get(name, ())):
        slot = slots.get(candidate, Slots()).get(key)
        if slot is not None and not isinstance(slot, optax.MaskedNode):
            return slot
    return None


# Reading and writing through.


class StateDict(dict[str, Any]):
    """A dict in an optimizer's state, such as ``hyperparams``, that writes to the optimizer.

    JAX rebuilds it as a plain dict.
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
        """Write several entries."""
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> "StateDict":  # type: ignore[override,misc]
        self.update(other)
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentError(
            f"An optimizer's state keeps its structure: the entries here are {', '.join(self)}, "
            f"and none can be added or removed."
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
    """The values of a stored state, with a ``StateDict`` for every plain dict."""

    def one(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return read(node)
        if type(node) is not dict:
            return node

        def write_entry(key: str, value: Any) -> None:
            if not isinstance(node[key], nnx.Variable):
                raise ArgumentError(
                    f"The entry {key!r} of the state is a tree of arrays and cannot be assigned "
                    f"alone. Assign the full state: optimizer.state = state."
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
