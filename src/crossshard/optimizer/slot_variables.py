"""The slots of an optimizer: an Optax state with a variable at every leaf."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from crossshard.errors import ArgumentError, VariableError
from crossshard.optimizer import slots
from crossshard.optimizer.names import Name, Named, Unnamed, is_unnamed, public_name
from crossshard.variables.binding import check_writable
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
        # The keys that have slots.
        self._built = set(built)
        self._state = state

    # Keys.

    def knows(self, variable: nnx.Variable) -> bool:
        """Whether the variable has a key."""
        return self._known_key(variable) is not None

    def keys(
        self, variables: Sequence[nnx.Variable], order: Sequence[nnx.Variable], names: Named
    ) -> list[str]:
        """The keys of variables; one without a name is called by its place in ``order``."""
        taken = self._variables.keys() - self._waiting
        keys = []
        for variable in variables:
            key = self._known_key(variable)
            if key is None:
                place = next(i for i, other in enumerate(order) if other is variable)
                _, name = names.get(id(variable), (variable, f"#{place}"))
                key, count = name, 0
                while key in taken:
                    count += 1
                    key = f"{name}#{count}"
            taken.add(key)
            keys.append(key)
        return keys

    def meet(self, variables: Mapping[str, nnx.Variable]) -> None:
        """Know these variables by their keys from now on."""
        self._variables.update(variables)
        self._waiting -= variables.keys()

    def _known_key(self, variable: Any) -> str | None:
        return next((key for key, known in self._variables.items() if known is variable), None)

    @property
    def names(self) -> dict[str, Name | Unnamed]:
        """The keys as an optimizer sees them."""
        return {key: public_name(key, variable) for key, variable in self._variables.items()}

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

    def missing(self, variables: Mapping[str, nnx.Variable]) -> dict[str, nnx.Variable]:
        """Those of the variables that have no slots yet."""
        return {key: variable for key, variable in variables.items() if key not in self._built}

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

    def initial(self, init: Callable[[Any], Any], missing: Mapping[str, nnx.Variable]) -> Any:
        """The Optax state over these variables, one per shard where they differ."""
        names = {key: public_name(key, variable) for key, variable in missing.items()}
        params = {names[key]: stacked(v.get_value()) for key, v in missing.items()}
        if not any(map(is_per_shard, missing.values())):
            return slots.as_first_stored(init(params), names)
        axes = {names[key]: 0 if is_per_shard(v) else None for key, v in missing.items()}
        return slots.as_first_stored(per_shard(jax.vmap(init, in_axes=(axes,))(params)), names)

    def add(self, missing: Mapping[str, nnx.Variable], made: Any) -> None:
        """Take up an initial state of variables that had none."""
        self.meet(missing)
        new = jax.tree.map(_as_variable, made, is_leaf=is_per_shard_array)
        self._state = new if not self._built else slots.merge(self._state, new, keep_common=True)
        self._built |= missing.keys()

    # Reading and writing.

    def all(self) -> list[nnx.Variable]:
        """Every variable of the state."""
        return list(jax.tree.leaves(self._state, is_leaf=_is_variable))

    def find(self, variable: Any, name: str) -> Any:
        """The slot of this name of a variable, or of its name; ``None`` if there is none."""
        key = variable if isinstance(variable, str) else self._known_key(variable)
        return None if key is None or key not in self._built else slots.find(self._state, key, name)

    def slot_names(self) -> list[str]:
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

    def written_through(self, may_differ: Callable[[Any], bool]) -> Any:
        """The state as arrays, with dicts that write to it; see ``restore``."""

        def write(key: str, variable: nnx.Variable, value: Any) -> None:
            check_writable(variable)
            value = jnp.asarray(value)
            path = (jax.tree_util.DictKey(key),)
            self._writer(path, variable, value, may_differ(path))(variable, value)

        return slots.written_through(self._state, lambda v: stacked(v.get_value()), write)

    def restore(self, state: Any, may_differ: Callable[[Any], bool]) -> None:
        """Write a saved state, shared or per shard as it was saved.

        Args:
          state: the state, of this structure; the order of its variables does not matter.
          may_differ: whether what lies at a path may differ between shards whose parameters do not.

        Raises:
          ArgumentError: it has another structure, or a leaf another shape.
          VariableError: two of its variables are known by their places alone.
        """
        have = self.values()
        state = slots.in_order_of(have, state)
        if jax.tree.structure(have) != jax.tree.structure(state):
            made = "" if self._built else " It has none yet: call build(model) first."
            raise ArgumentError(
                f"The state must have the structure of this optimizer's own.{made} Expected "
                f"{jax.tree.structure(have)}; got {jax.tree.structure(state)}."
            )
        self._check_told_apart()
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(have)[0]]
        variables, values = self.all(), [jnp.asarray(x) for x in jax.tree.leaves(state)]
        # Every leaf is checked before the first is written.
        writers = [
            self._writer(path, variable, value, may_differ(path))
            for path, variable, value in zip(paths, variables, values, strict=True)
        ]
        for write, variable, value in zip(writers, variables, values, strict=True):
            write(variable, value)

    def _check_told_apart(self) -> None:
        shapes: dict[Any, nnx.Variable] = {}
        for key in filter(is_unnamed, self._built):
            variable = self._variables[key]
            if variable is None:
                continue
            shape = jnp.shape(variable.get_raw_value())
            if shape in shapes:
                raise VariableError(
                    f"{describe_variable(variable)} and {describe_variable(shapes[shape])} have no "
                    f"names, and a state that was saved with them in another order would be taken "
                    f"for the other's. Give the module, var_list=model; or name the variables, "
                    f"nnx.Param(value, name='kernel')."
                )
            shapes[shape] = variable

    def _writer(
        self, path: Any, variable: nnx.Variable, value: jax.Array, may_differ: bool
    ) -> Callable[[nnx.Variable, jax.Array], None]:
        """How to write a saved value: what no shard has come to own is saved once for all."""
        shape, dtype = jnp.shape(variable.get_raw_value()), variable.get_raw_value().dtype
        shape = shape[1:] if is_per_shard(variable) else shape
        if value.shape == shape:
            return lambda variable, value: set_shared(variable, value.astype(dtype))
        one_each = value.shape[1:] == shape and value.ndim == len(shape) + 1
        held = [*self._variables.values(), *self.all()]
        sizes = [number_of_shards(v) for v in held if v is not None]
        if one_each and (may_differ or value.shape[0] in sizes):
            return lambda variable, value: set_per_shard(variable, value.astype(dtype))
        where = f"The state's {jax.tree_util.keystr(path)}"
        if one_each:
            raise ArgumentError(
                f"{where} has shape {value.shape}, one for each of {value.shape[0]} shards, as of "
                f"parameters that differ between them, and this optimizer's parameters do not. "
                f"Restore them first, with crossshard.set_per_shard(variable, values)."
            )
        raise ArgumentError(
            f"{where} must have shape {shape}, or [shards, …] of that where the variables differ "
            f"between shards; got {value.shape}."
        )

    # Copies.

    def copied(self, memo: Mapping[int, Any]) -> "SlotVariables":
        """Slots of their own for the copies of the variables, where ``memo`` has them."""
        known = {key: memo.get(id(v), v) for key, v in self._variables.items()}
        # copy.deepcopy of an nnx.Variable gives its array.
        state = jax.tree.map(lambda v: v.copy(), self._state, is_leaf=_is_variable)
        return SlotVariables(known, self._built, state)

    def __reduce__(self) -> Any:
        return SlotVariables, (dict.fromkeys(self._variables), self._built, self._state)


def _as_variable(value: Any) -> nnx.Variable:
    return nnx.OptState(value if isinstance(value, PerShardArray) else jnp.asarray(value))


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
