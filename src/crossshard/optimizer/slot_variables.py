"""The slots of an optimizer: an Optax state with a variable at every leaf."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossshard.errors import ArgumentError, VariableError
from crossshard.optimizer import slots
from crossshard.optimizer.slots import Slots
from crossshard.variables.describe import describe_variable
from crossshard.variables.per_shard import (
    PerShardArray,
    is_per_shard,
    is_per_shard_array,
    number_of_shards,
    per_shard,
    set_per_shard,
    set_shared,
    stacked,
)


class SlotVariables:
    """The Optax state of an optimizer over the variables that it steps, each known by a key.

    A copy keeps the keys and meets its own variables later.
    """

    def __init__(
        self,
        variables: Mapping[str, nnx.Variable | None] | None = None,
        built: Iterable[str] = (),
        state: Any = None,
    ):
        self._variables = dict(variables or {})
        # The keys whose variable is to be met again, by its name or place.
        self._waiting = set(self._variables)
        # What a variable would be called, by its id; kept with its name, so ids stay their own.
        self._names: dict[int, tuple[nnx.Variable, str]] = {}
        # The keys that have slots.
        self._built = set(built)
        self._state = state

    # Keys.

    def learn_names(self, found: dict[int, tuple[nnx.Variable, str]]) -> None:
        """Note what ``named_variables`` calls these variables."""
        self._names.update(found)

    def keys(self, variables: Sequence[nnx.Variable], order: Sequence[nnx.Variable]) -> list[str]:
        """The keys of variables; one without a name is called by its place in ``order``."""
        return [self._key(variable, order) for variable in variables]

    def _key(self, variable: nnx.Variable, order: Sequence[nnx.Variable]) -> str:
        known = self._known_key(variable)
        if known is not None:
            self._waiting.discard(known)
            return known
        place = next(i for i, other in enumerate(order) if other is variable)
        _, name = self._names.get(id(variable), (variable, str(place)))
        key, count = name, 0
        while key in self._variables and key not in self._waiting:
            count += 1
            key = f"{name}#{count}"
        self._waiting.discard(key)
        self._variables[key] = variable
        return key

    def _known_key(self, variable: Any) -> str | None:
        return next((key for key, known in self._variables.items() if known is variable), None)

    def known_keys(self) -> tuple[str, ...]:
        """The keys of these variables."""
        return tuple(self._variables)

    @property
    def built(self) -> frozenset[str]:
        """The keys that have slots."""
        return frozenset(self._built)

    @property
    def tree(self) -> Any:
        """The state with a variable at every leaf; ``None`` before there is one."""
        return self._state

    def known_variables(self) -> list[nnx.Variable | None]:
        """The variables that have a key, in the order in which they were met."""
        return list(self._variables.values())

    # Making.

    def missing(
        self, keys: Sequence[str], variables: Sequence[nnx.Variable]
    ) -> dict[str, nnx.Variable]:
        """Those of the variables that have no slots yet."""
        pairs = zip(keys, variables, strict=True)
        return {key: variable for key, variable in pairs if key not in self._built}

    def check_all_met(self, missing: Mapping[str, nnx.Variable]) -> None:
        """Raise if the variables without slots may be those of slots that wait for theirs.

        Raises:
          VariableError: they may; a loop or branch made them anew, and none was told by its name.
        """
        if self._waiting:
            which = [describe_variable(variable) for variable in missing.values()]
            raise VariableError(
                f"Which slots belong to {', '.join(which)} is not known here: there are slots of "
                f"{', '.join(sorted(self._waiting))}, and inside of nnx.cond, nnx.scan or the like "
                f"variables are made anew. Write optimizer.build(model) first, in there: it makes "
                f"nothing, and tells which variable is which."
            )

    @staticmethod
    def initial(init: Callable[[Any], Any], missing: Mapping[str, nnx.Variable]) -> Any:
        """The Optax state over these variables, ``[shards, …]`` where they differ."""
        params = Slots({key: stacked(v.get_value()) for key, v in missing.items()})
        if not any(map(is_per_shard, missing.values())):
            return init(params)
        axes = Slots({key: 0 if is_per_shard(v) else None for key, v in missing.items()})
        return per_shard(jax.vmap(init, in_axes=(axes,))(params))

    def add(self, missing: Mapping[str, nnx.Variable], made: Any) -> None:
        """Take up an initial state of variables that had none."""
        new = jax.tree.map(_as_variable, made, is_leaf=is_per_shard_array)
        self._state = new if not self._built else slots.merge(self._state, new, keep_common=True)
        self._built |= missing.keys()

    # Reading and writing.

    def all(self) -> list[nnx.Variable]:
        """Every variable of the state."""
        return list(jax.tree.leaves(self._state, is_leaf=_is_variable))

    def find(self, variable: Any, name: str) -> Any:
        """The slot of this name of a variable; ``None`` if there is none."""
        key = self._known_key(variable)
        return None if key is None or key not in self._built else slots.find(self._state, key, name)

    def names(self) -> list[str]:
        """The names of the slots, in Optax's words."""
        return list(slots.by_name(self._state))

    def values(self) -> Any:
        """The state as a pytree of arrays; ``None`` before there is one."""
        return jax.tree.map(lambda v: stacked(v.get_value()), self._state, is_leaf=_is_variable)

    def write(self, state: Any) -> None:
        """Write what a step made of the state."""
        for variable, value in zip(self.all(), jax.tree.leaves(state), strict=True):
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)

    def restore(self, state: Any, may_differ: Callable[[Any], bool]) -> None:
        """Write a saved state, shared or per shard as it was saved.

        Args:
          state: the state, of this structure.
          may_differ: whether what lies at a path may differ between shards whose parameters do not.

        Raises:
          ArgumentError: it has another structure, or a leaf another shape.
        """
        have = self.values()
        if jax.tree.structure(have) != jax.tree.structure(state):
            made = "" if self._built else " It has none yet: call build(model) first."
            raise ArgumentError(
                f"The state must have the structure of this optimizer's own.{made} Expected "
                f"{jax.tree.structure(have)}; got {jax.tree.structure(state)}."
            )
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(have)[0]]
        variables, values = self.all(), [jnp.asarray(x) for x in jax.tree.leaves(state)]
        sizes = _numbers_of_shards([*self._variables.values(), *variables])
        # Every leaf is checked before the first is written.
        writes = [
            _how_it_lies(path, variable, value, sizes, may_differ(path))
            for path, variable, value in zip(paths, variables, values, strict=True)
        ]
        for write, variable, value in zip(writes, variables, values, strict=True):
            write(variable, value.astype(variable.get_raw_value().dtype))

    # Copies.

    def copied(self, memo: Mapping[int, Any]) -> "SlotVariables":
        """Slots of their own for the copies of the variables, where ``memo`` has them."""
        known = {key: memo.get(id(v), v) for key, v in self._variables.items()}
        # copy.deepcopy of an nnx.Variable gives its array.
        state = jax.tree.map(lambda v: v.copy(), self._state, is_leaf=_is_variable)
        return SlotVariables(known, self._built, state)

    def __reduce__(self) -> Any:
        return SlotVariables, (dict.fromkeys(self._variables), self._built, self._state)


def _numbers_of_shards(variables: Iterable[nnx.Variable | None]) -> set[int]:
    numbers = (number_of_shards(v) for v in variables if v is not None)
    return {number for number in numbers if number is not None}


def _how_it_lies(
    path: Any, variable: nnx.Variable, value: jax.Array, sizes: set[int], may_differ: bool
) -> Callable[[nnx.Variable, Any], None]:
    """How to write a saved value: what no shard has come to own is saved once for all."""
    shape = jnp.shape(variable.get_raw_value())
    shape = shape[1:] if is_per_shard(variable) else shape
    if value.shape == shape:
        return set_shared
    one_each = value.shape[1:] == shape and value.ndim == len(shape) + 1
    if one_each and (may_differ or value.shape[0] in sizes):
        return set_per_shard
    where = f"The state's {jax.tree_util.keystr(path)}"
    if one_each:
        raise ArgumentError(
            f"{where} is of parameters that differ between {value.shape[0]} shards, and this "
            f"optimizer's do not yet. Restore them before it, with "
            f"crossshard.set_per_shard(variable, values)."
        )
    raise ArgumentError(
        f"{where} must have shape {shape}, or [shards, …] of that where the variables differ "
        f"between shards; got {value.shape}."
    )


def _as_variable(value: Any) -> nnx.Variable:
    return nnx.OptState(value if isinstance(value, PerShardArray) else jnp.asarray(value))


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
