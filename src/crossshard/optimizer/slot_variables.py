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
    """The Optax state of an optimizer over the variables that it updates, each with a key.

    A copy keeps the keys and binds its own variables on first use.
    """

    def __init__(
        self,
        variables: Mapping[str, nnx.Variable | None] | None = None,
        built: Iterable[str] = (),
        state: Any = None,
    ):
        self._variables = dict(variables or {})
        # The keys of a copy, whose variables are found again by name or index.
        self._unbound = set(self._variables)
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
        """The keys of variables; the key of one without a name is its index in ``order``."""
        taken = self._variables.keys() - self._unbound
        keys = []
        for variable in variables:
            key = self._known_key(variable)
            if key is None:
                index = next(i for i, other in enumerate(order) if other is variable)
                _, name = names.get(id(variable), (variable, f"#{index}"))
                key, count = name, 0
                while key in taken:
                    count += 1
                    key = f"{name}#{count}"
            taken.add(key)
            keys.append(key)
        return keys

    def bind(self, variables: Mapping[str, nnx.Variable]) -> None:
        """Bind these variables to their keys."""
        self._variables.update(variables)
        self._unbound -= variables.keys()

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
        """The state with a variable at every leaf; ``None`` before the first step."""
        return self._state

    def known_variables(self) -> list[nnx.Variable | None]:
        """The variables that have a key, in order of first use."""
        return list(self._variables.values())

    # Creating.

    def missing(self, variables: Mapping[str, nnx.Variable]) -> dict[str, nnx.Variable]:
        """The variables without slots."""
        return {key: variable for key, variable in variables.items() if key not in self._built}

    def check_all_bound(self, missing: Mapping[str, nnx.Variable]) -> None:
        """Raise if slots without variables may belong to the variables without slots.

        Raises:
          VariableError: a loop or branch created the variables again, and names do not match them.
        """
        if self._unbound:
            which = [describe_variable(variable) for variable in missing.values()]
            raise VariableError(
                f"The slots of {', '.join(which)} cannot be found here: there are slots of "
                f"{', '.join(sorted(self._unbound))}, and nnx.cond, nnx.scan and the like create "
                f"their variables again. Call optimizer.build(model) first, inside: it does not "
                f"create slots there, but matches them to the variables."
            )

    def initial(self, init: Callable[[Any], Any], missing: Mapping[str, nnx.Variable]) -> Any:
        """The Optax state over these variables, one per shard if they differ between shards."""
        names = {key: public_name(key, variable) for key, variable in missing.items()}
        params = {names[key]: stacked(v.get_value()) for key, v in missing.items()}
        if not any(map(is_per_shard, missing.values())):
            return slots.as_first_stored(init(params), names)
        axes = {names[key]: 0 if is_per_shard(v) else None for key, v in missing.items()}
        return slots.as_first_stored(per_shard(jax.vmap(init, in_axes=(axes,))(params)), names)

    def add(self, missing: Mapping[str, nnx.Variable], made: Any) -> None:
        """Add the initial state of variables that had none."""
        self.bind(missing)
        new = jax.tree.map(_as_variable, made, is_leaf=is_per_shard_array)
        self._state = new if not self._built else slots.merge(self._state, new, keep_common=True)
        self._built |= missing.keys()

    # Reading and writing.

    def all(self) -> list[nnx.Variable]:
        """Every variable of the state."""
        return list(jax.tree.leaves(self._state, is_leaf=_is_variable))

    def find(self, variable: Any, name: str) -> Any:
        """A slot of a variable, or of the variable of a name; ``None`` if there is none."""
        key = variable if isinstance(variable, str) else self._known_key(variable)
        return None if key is None or key not in self._built else slots.find(self._state, key, name)

    def slot_names(self) -> list[str]:
        """The names of the slots, as Optax names them."""
        return list(slots.by_name(self._state))

    def values(self) -> Any:
        """The state as a pytree of arrays; ``None`` before the first step."""
        return jax.tree.map(lambda v: stacked(v.get_value()), self._state, is_leaf=_is_variable)

    def write(self, state: Any) -> None:
        """Write the state after a step."""
        for variable, value in zip(self.all(), jax.tree.leaves(state), strict=True):
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)

    def written_through(self, may_differ: Callable[[Any], bool]) -> Any:
        """The state as arrays, with dicts that write to it."""

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
          may_differ: whether the state at a path may differ between shards with equal parameters.

        Raises:
          ArgumentError: another structure, or a leaf of another shape.
          VariableError: two variables of one shape have no names.
        """
        have = self.values()
        # JAX rebuilds the dicts that write to this optimizer as plain ones.
        state = slots.in_order_of(have, jax.tree.map(lambda leaf: leaf, state))
        if jax.tree.structure(have) != jax.tree.structure(state):
            first = "" if self._built else " It has no state yet: call build(model) first."
            raise ArgumentError(
                f"The state must have the structure of this optimizer's own.{first} Expected "
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
                    f"names, so a state that was saved with them in another order would be "
                    f"swapped. Pass the module, var_list=model; or name the variables, "
                    f"nnx.Param(value, name='kernel')."
                )
            shapes[shape] = variable

    def _writer(
        self, path: Any, variable: nnx.Variable, value: jax.Array, may_differ: bool
    ) -> Callable[[nnx.Variable, jax.Array], None]:
        """The function that writes a saved value, shared or per shard as its shape shows."""
        shape, dtype = jnp.shape(variable.get_raw_value()), variable.get_raw_value().dtype
        shape = shape[1:] if is_per_shard(variable) else shape
        if value.shape == shape:
            return lambda variable, value: set_shared(variable, value.astype(dtype))
        differs = value.shape[1:] == shape and value.ndim == len(shape) + 1
        held = [*self._variables.values(), *self.all()]
        sizes = [number_of_shards(v) for v in held if v is not None]
        if differs and (may_differ or value.shape[0] in sizes):
            return lambda variable, value: set_per_shard(variable, value.astype(dtype))
        where = f"The state's {jax.tree_util.keystr(path)}"
        if differs:
            raise ArgumentError(
                f"{where} has shape {value.shape}, one value for each of {value.shape[0]} shards, "
                f"but this optimizer's parameters do not differ between shards. Restore them "
                f"first, with crossshard.set_per_shard(variable, values)."
            )
        raise ArgumentError(
            f"{where} must have shape {shape}, or [shards, …] of that if the variables differ "
            f"between shards; got {value.shape}."
        )

    # Copies.

    def copied(self, memo: Mapping[int, Any]) -> "SlotVariables":
        """Copied slots, for the copies of the variables in ``memo``."""
        known = {key: memo.get(id(v), v) for key, v in self._variables.items()}
        # copy.deepcopy of an nnx.Variable returns its array.
        state = jax.tree.map(lambda v: v.copy(), self._state, is_leaf=_is_variable)
        return SlotVariables(known, self._built, state)

    def __reduce__(self) -> Any:
        return SlotVariables, (dict.fromkeys(self._variables), self._built, self._state)


def _as_variable(value: Any) -> nnx.Variable:
    return nnx.OptState(value if isinstance(value, PerShardArray) else jnp.asarray(value))


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
