"""Slots: an Optax state over named variables, and where the gradients of these are from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import optax

from crossshard import _flax
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    IncomingError,
    ShardContextError,
    VariableError,
)
from crossshard.gradients.status import GradientStatus
from crossshard.nnx.per_shard import (
    PerShardArray,
    is_per_shard,
    is_per_shard_array,
    number_of_shards,
    per_shard,
    set_per_shard,
    set_shared,
    stacked,
)

# By the id of the variable; keeping the variable keeps its id unique.
Named: TypeAlias = "dict[int, tuple[AnyVariable, str]]"

# TensorFlow's names, and the fields of Optax's states that they mean.
_TENSORFLOW_NAMES = {
    "accum": "e_g",
    "accum_update": "e_x",
    "accumulator": "sum_of_squares",
    "m": "mu",
    "mg": "mu",
    "momentum": "trace",
    "rms": "nu",
    "v": "nu",
    "vhat": "nu_max",
}


class _Key(str):
    """A parameter's name: a dict in a new state whose keys are such mirrors the parameters."""

    __slots__ = ()


class Slots(dict[str, Any]):
    """One value per variable, by the variable's key.

    In a stored state it replaces each dict that mirrors the parameters, so that the state of one
    variable is distinct from shared state (a step count). Optimizers, masks and labels see a plain
    dict there.
    """


class ReadOnly(dict[Any, Any]):
    """Hyperparameters in what ``opt.state`` returns, which is a copy: to write there is refused.

    ``jax.tree.map`` makes a plain dict of it.
    """

    def __reduce__(self) -> tuple[type, tuple[dict[Any, Any]]]:
        return dict, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentTypeError(
            "opt.state is a copy, and to write to it changes nothing. Assign it: opt.state = "
            "optax.tree.set(opt.state, learning_rate=0.01), or make dicts of it that can be "
            "written to: state = jax.tree.map(lambda x: x, opt.state)."
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def _flatten(node: dict[Any, Any]) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    keys = tuple(sorted(node))
    return [(jax.tree_util.DictKey(key), node[key]) for key in keys], keys


def _unflatten_as(kind: type) -> Callable[[Any, Any], Any]:
    return lambda keys, values: kind(zip(keys, values, strict=True))


jax.tree_util.register_pytree_with_keys(Slots, _flatten, _unflatten_as(Slots))
jax.tree_util.register_pytree_with_keys(ReadOnly, _flatten, _unflatten_as(dict))


def _register() -> None:
    from flax import serialization as flax

    to_save = lambda node: flax.to_state_dict(dict(node))
    from_saved = lambda node, saved: flax.from_state_dict(dict(node), saved)
    flax.register_serialization_state(ReadOnly, to_save, from_saved)


_flax.when_loaded(_register)


def _map(function: Callable[..., Any], *states: Any) -> Any:
    return jax.tree.map(function, *states, is_leaf=lambda x: isinstance(x, Slots | nnx.Variable))


def as_params(keyed: Mapping[str, AnyVariable]) -> dict[str, Any]:
    """What an optimizer sees as parameters: a dict from names to the variables' values."""
    return {_Key(key): variable.get_value() for key, variable in keyed.items()}


class _NoName:
    """A key whose text cannot be read; JAX sorts the keys of a dict."""

    def __init__(self, place: int):
        self._place = place

    def __lt__(self, other: _NoName) -> bool:
        return self._place < other._place

    def __eq__(self, other: object) -> bool:
        if type(other) is str:
            raise TypeError("no name")
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        raise TypeError("no name")


def _check_names_unread(init: Callable[[Any], Any], params: Mapping[str, Any]) -> None:
    """Raise if an optimizer reads the names of variables, as a mask may, and one has none.

    A mask that looks for ``"bias"`` would match nothing, and nobody would see it.
    """
    lacking = [key for key in params if key.startswith("#")]
    if not lacking:
        return
    nameless = {_NoName(place): x for place, x in enumerate(params.values())}
    try:
        jax.eval_shape(lambda: (init(nameless), None)[1])
    except Exception as error:  # of any kind: with the keys as text it has just worked
        raise VariableError(
            f"The optimizer reads the names of its variables, as in a mask, and "
            f"{', '.join(lacking)} of the list have none. Pass the module, var_list=model; or name "
            f"the variables, nnx.Param(value, name='kernel')."
        ) from error


def _with_slots(made: Any) -> Any:
    """An initial state with ``Slots`` for the dicts that mirror the parameters."""

    def mirrors(node: Any) -> bool:
        return type(node) is dict and bool(node) and all(isinstance(k, _Key) for k in node)

    as_slots = lambda x: Slots({str(key): value for key, value in x.items()})
    return jax.tree.map(lambda x: as_slots(x) if mirrors(x) else x, made, is_leaf=mirrors)


class SlotStore:
    """The Optax state of an optimizer over the variables that it updates, each with a key.

    A copy keeps the keys and binds its own variables on first use.
    """

    def __init__(self, variables: Mapping[str, AnyVariable | None] | None = None, tree: Any = None):
        # By their keys, in order of first use; None in a copy.
        self.variables: dict[str, AnyVariable | None] = dict(variables or {})
        # The state with a variable at every leaf; None before the first step.
        self.tree: Any = tree

    # Keys.

    def keyed(
        self, variables: Sequence[AnyVariable], order: Sequence[AnyVariable], names: Named
    ) -> dict[str, AnyVariable]:
        """Variables by their keys; the key of one without a name is its index in ``order``."""
        # Keys without a variable are those of a copy: its variables are found by name or index.
        taken = {key for key, variable in self.variables.items() if variable is not None}
        keyed = {}
        for variable in variables:
            key = self.key_of(variable)
            if key is None:
                index = next(i for i, other in enumerate(order) if other is variable)
                _, name = names.get(id(variable), (variable, f"#{index}"))
                key, count = name, 0
                while key in taken:
                    count += 1
                    key = f"{name}#{count}"
            taken.add(key)
            keyed[key] = variable
        return keyed

    def key_of(self, variable: Any) -> str | None:
        """The key of a variable; ``None`` if it has none."""
        return next((key for key, known in self.variables.items() if known is variable), None)

    def bind(self, variables: Mapping[str, AnyVariable]) -> dict[str, AnyVariable]:
        """Bind variables to the keys that have slots; returns those without slots.

        Raises:
          VariableError: there are both, and a copy, a loop or a branch has created the variables
            again, so that names do not match them. New slots would start the moments anew.
        """
        missing = {key: v for key, v in variables.items() if key not in self.variables}
        self.variables.update({key: v for key, v in variables.items() if key not in missing})
        unbound = [key for key, variable in self.variables.items() if variable is None]
        if missing and unbound:
            which = [describe_variable(variable) for variable in missing.values()]
            raise VariableError(
                f"The slots of {', '.join(which)} cannot be found here: there are slots of "
                f"{', '.join(sorted(unbound))}, and copies of an optimizer, nnx.cond, nnx.scan and "
                f"the like create their variables again. Call optimizer.build(model) first, with "
                f"the model or list from which these names are; in a branch or loop, inside it. It "
                f"matches the slots to the variables."
            )
        return missing

    # Creating.

    def make(self, init: Callable[[Any], Any], missing: Mapping[str, AnyVariable]) -> None:
        """Add the initial state of variables that had none; what is shared stays as it is.

        It is one per shard if the variables differ between shards.
        """
        params = {key: stacked(value) for key, value in as_params(missing).items()}

        def checked(params: Any) -> Any:
            made = init(params)
            _check_names_unread(init, params)
            return made

        if any(map(is_per_shard, missing.values())):
            axes = {key: 0 if is_per_shard(missing[key]) else None for key in params}
            made = per_shard(jax.vmap(checked, in_axes=(axes,))(params))
        else:
            made = checked(params)
        new = jax.tree.map(_as_variable, _with_slots(made), is_leaf=is_per_shard_array)
        both = lambda old, new: Slots({**old, **new}) if isinstance(old, Slots) else old
        self.tree = _map(both, self.tree, new) if self.variables else new
        self.variables.update(missing)

    # Reading and writing.

    def _seen(self, keys: Iterable[str] | None) -> Any:
        """The state's variables, with plain dicts for slots, of all variables or of these."""
        chosen = self.variables if keys is None else set(keys)
        as_dict = lambda x: {k: x[k] for k in x if k in chosen} if isinstance(x, Slots) else x
        return _map(as_dict, self.tree)

    def all(self, keys: Iterable[str] | None = None) -> list[AnyVariable]:
        """Every variable of the state, or what is shared and the slots of these variables."""
        return list(jax.tree.leaves(self._seen(keys), is_leaf=is_variable))

    def values(self, keys: Iterable[str] | None = None) -> Any:
        """The arrays of ``all`` as an optimizer sees its state: slots are plain dicts."""
        read = lambda variable: stacked(variable.get_value())
        return jax.tree.map(read, self._seen(keys), is_leaf=is_variable)

    def copy(self) -> Any:
        """``values``, whose hyperparameters, as of ``optax.inject_hyperparams``, are ``ReadOnly``.

        All other dicts stay what they are, since a pytree of another type fits no tree of dicts.
        """

        def frozen(path: Any, node: Any) -> Any:
            if type(node) is not dict:
                return node
            if path and getattr(path[-1], "name", "") == "hyperparams":
                return ReadOnly(node)
            return {key: read_only(value) for key, value in node.items()}

        is_dict = lambda node: type(node) is dict
        read_only = lambda x: jax.tree_util.tree_map_with_path(frozen, x, is_leaf=is_dict)
        return read_only(self.values())

    def write(self, keys: Iterable[str], state: Any) -> None:
        """Write the state after a step of these variables, as ``values`` returned it before."""
        for variable, value in zip(self.all(keys), jax.tree.leaves(state), strict=True):
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)

    def find(self, variable: Any, name: str) -> Any:
        """A slot of a variable, or of the variable of a name; ``None`` if there is none."""
        key = variable if isinstance(variable, str) else self.key_of(variable)
        named = self.named()
        for field in (name, _TENSORFLOW_NAMES.get(name, name)):
            slot = named.get(field, Slots()).get(key or "")
            if slot is not None and not isinstance(slot, optax.MaskedNode):
                return slot
        return None

    def named(self) -> dict[str, Slots]:
        """The slots by the name of their field; the first one of a name that occurs twice."""
        found: dict[str, Slots] = {}
        is_slots = lambda node: isinstance(node, Slots)
        for path, node in jax.tree_util.tree_flatten_with_path(self.tree, is_leaf=is_slots)[0]:
            fields = [getattr(key, "name", getattr(key, "key", None)) for key in path]
            names = [field for field in fields if isinstance(field, str) and field]
            if isinstance(node, Slots) and names:
                found.setdefault(names[-1], node)
        return found

    def restore(self, state: Any, may_differ: Callable[[Any], bool]) -> None:
        """Write a saved state, shared or per shard as it was saved.

        Args:
          state: the state, of this structure.
          may_differ: whether the state at a path may differ between shards with equal parameters.
        """
        have, state = self.values(), jax.tree.map(lambda x: x, state)
        if jax.tree.structure(have) != jax.tree.structure(state):
            first = "" if self.variables else " It has no state yet: call build(model) first."
            raise ArgumentError(
                f"The state must have the structure of this optimizer's own.{first} Expected "
                f"{jax.tree.structure(have)}; got {jax.tree.structure(state)}."
            )
        self._check_told_apart()
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(have)[0]]
        variables, values = self.all(), [jnp.asarray(x) for x in jax.tree.leaves(state)]
        # Every leaf is checked before the first is written.
        writers = [
            set_per_shard if self._differs(path, variable, value, may_differ(path)) else set_shared
            for path, variable, value in zip(paths, variables, values, strict=True)
        ]
        for write, variable, value in zip(writers, variables, values, strict=True):
            write(variable, value.astype(variable.get_raw_value().dtype))

    def _check_told_apart(self) -> None:
        shapes: dict[Any, AnyVariable] = {}
        for key, variable in self.variables.items():
            if variable is None or not key.startswith("#"):
                continue
            other = shapes.setdefault(jnp.shape(variable.get_raw_value()), variable)
            if other is not variable:
                raise VariableError(
                    f"{describe_variable(variable)} and {describe_variable(other)} have no "
                    f"names, so a state that was saved with them in another order would be "
                    f"swapped. Pass the module, var_list=model; or name the variables, "
                    f"nnx.Param(value, name='kernel')."
                )

    def _differs(
        self, path: Any, variable: AnyVariable, value: jax.Array, may_differ: bool
    ) -> bool:
        """Whether a saved value is one per shard, as its shape shows."""
        shape = jnp.shape(variable.get_raw_value())
        shape = shape[1:] if is_per_shard(variable) else shape
        if value.shape == shape:
            return False
        differs = value.ndim == len(shape) + 1 and value.shape[1:] == shape
        held = [*self.variables.values(), *self.all()]
        sizes = [number_of_shards(v) for v in held if v is not None]
        if differs and (may_differ or value.shape[0] in sizes):
            return True
        where = f"The state's {jax.tree_util.keystr(path)}"
        if differs:
            raise ArgumentError(
                f"{where} has shape {value.shape}, one value for each of {value.shape[0]} shards, "
                f"but this optimizer's parameters do not differ between shards. Restore them "
                f"first, with crossshard.nnx.set_per_shard(variable, values)."
            )
        raise ArgumentError(
            f"{where} must have shape {shape}, or [shards, …] of that if the variables differ "
            f"between shards; got {value.shape}."
        )


def _as_variable(value: Any) -> AnyVariable:
    return nnx.OptState(value if isinstance(value, PerShardArray) else jnp.asarray(value))


def is_variable(leaf: Any) -> bool:
    """Whether it is a variable of NNX."""
    return isinstance(leaf, nnx.Variable)


class Computed:
    """The variables whose gradients ``compute_gradients`` returned in the current trace."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._trace = _flax.current_trace()
        self._names: Named = {}
        # By the id of the variable: the number of shards, and whether it has been applied.
        self._shards: dict[int, tuple[int, bool]] = {}
        # float[], 0 if a Mean counted no row; None if some always count.
        self.weight: jax.Array | None = None

    @property
    def names(self) -> Named:
        """The names that variables were given in this trace."""
        if self._trace != _flax.current_trace():
            self.clear()
        return self._names

    def add(self, found: Named, number_of_shards: int, empty: jax.Array | None) -> None:
        """Note that their gradients were returned on this many shards, and if no row counts."""
        self.names.update(found)
        self.weight = None if empty is None else jnp.where(empty, 0.0, 1.0)
        self._shards.update(dict.fromkeys(found, (number_of_shards, False)))

    def note_applied(self, variables: Sequence[AnyVariable]) -> None:
        """Note that their gradients have been applied."""
        for known in {id(variable) for variable in variables} & self._shards.keys():
            self._shards[known] = self._shards[known][0], True

    def origin(
        self, variables: Sequence[AnyVariable], number: int, divisor: int, *, declared: bool
    ) -> GradientStatus | None:
        """What the gradients of variables are that are applied on this many shards.

        Args:
          variables: the variables.
          number: the number of shards.
          divisor: what a mean over them divides by; 1 for a sum.
          declared: whether the optimizer says what gradients from elsewhere are.
        """
        elsewhere: AnyVariable | None = None
        known = self.names and self._shards
        for variable in variables:
            computed, is_applied = known.get(id(variable), (None, False))
            if computed is None:
                elsewhere = variable if elsewhere is None else elsewhere
            elif is_applied and divisor > 1:
                raise IncomingError(
                    f"The gradient of {describe_variable(variable)} has been applied already in "
                    f"this step. Call compute_gradients again, or pass incoming='scaled' to apply "
                    f"the same gradients twice."
                )
            elif computed != number:
                raise ShardContextError(
                    f"The gradient of {describe_variable(variable)} was computed under {computed} "
                    f"shards and is applied under {number}. Call compute_gradients and "
                    f"apply_gradients in the same step."
                )
        if elsewhere is None:
            return GradientStatus.SCALED
        if declared or divisor == 1:
            return None
        raise IncomingError(
            f"The gradient of {describe_variable(elsewhere)} does not come "
            f"from this optimizer's compute_gradients in this step, so it may or may not be "
            f"divided by {divisor} already. Pass incoming='local' to average local gradients, or "
            f"incoming='scaled' if they are divided already, or only to be summed, which is what "
            f"TensorFlow's apply_gradients does."
        )


class HasSlots:
    """An optimizer, as the runners see it: its state, and the gradients that it has computed."""

    slots: SlotStore
    computed: Computed
