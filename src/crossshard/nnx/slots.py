"""The variables of an optimizer by name, their slots, and the origin of their gradients."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
import jax.numpy as jnp

from crossshard import _check, _flax
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard.errors import (
    ArgumentError,
    ArgumentTypeError,
    IncomingError,
    ShardContextError,
    VariableError,
    VariableTypeError,
)
from crossshard.gradients.status import GradientStatus, check_gradient_dtype
from crossshard.nnx.per_shard import (
    is_per_shard,
    is_per_shard_array,
    per_shard,
    stacked,
)

# By the id of the variable; keeping the variable keeps its id unique.
Named: TypeAlias = "dict[int, tuple[AnyVariable, str]]"


def is_variable(leaf: Any) -> bool:
    """Return whether a leaf is an NNX variable."""
    return isinstance(leaf, nnx.Variable)


# The variables.


def named_variables(var_list: Any, roots: Iterable[Any]) -> Named:
    """Name the variables of a module, of a variable, or of a list of both; return them by id.

    The variables of a module are its ``nnx.Param``s, named by their paths. A variable in a list is
    named by its metadata, else by its path in a module among the roots of the step, else by
    its index: ``#0``.
    """
    items = list(var_list) if isinstance(var_list, list | tuple) else [var_list]
    found: Named = {}
    for index, item in enumerate(items):
        if isinstance(item, nnx.Pytree):
            prefix = f"{index}/" if len(items) > 1 else ""
            named = {prefix + name: variable for name, variable in _paths(item, nnx.Param)}
        elif not is_variable(item):
            raise VariableTypeError(
                f"var_list must be an nnx.Module or a list of nnx variables; item {index} is "
                f"{type(item).__name__} ({_check.shown(item)})."
            )
        elif id(item) in found:
            raise VariableError(f"{describe_variable(item)} is in var_list twice.")
        else:
            named = {f"#{index}": item}
        for name, variable in named.items():
            dtype = getattr(variable.get_raw_value(), "dtype", None)
            if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                raise VariableError(
                    f"{describe_variable(variable)} cannot be optimized: its dtype must be "
                    f"floating."
                )
            found[id(variable)] = (variable, name)
    if not found:
        raise ArgumentError("No variables to optimize.")
    return found | known_names(filter(is_variable, items), roots)


def known_names(variables: Iterable[AnyVariable], roots: Iterable[Any]) -> Named:
    """Name those variables that have a name of their own, or a path in a module among the roots."""
    own = [(variable, variable.get_metadata("name", None)) for variable in variables]
    unnamed = {id(variable) for variable, name in own if not name}
    found: Named = {id(variable): (variable, str(name)) for variable, name in own if name}
    in_roots: list[list[tuple[str, AnyVariable]]] = []
    for root in roots:
        if unnamed and isinstance(root, nnx.Pytree):
            named = [(name, v) for name, v in _paths(root, nnx.Variable) if id(v) in unnamed]
            unnamed -= {id(variable) for _, variable in named}
            in_roots += [named] if named else []
    for index, named in enumerate(in_roots):
        prefix = f"{index}/" if len(in_roots) > 1 else ""
        found |= {id(variable): (variable, prefix + name) for name, variable in named}
    return found


def _by_path(roots: Iterable[Any]) -> dict[str, AnyVariable]:
    """Return variables by path, of those modules among the roots whose type is that of no other."""
    modules = [root for root in roots if isinstance(root, nnx.Pytree)]
    number = collections.Counter(type(module).__qualname__ for module in modules)
    return {
        f"{type(module).__qualname__}/{path}": variable
        for module in modules
        if number[type(module).__qualname__] == 1
        for path, variable in _paths(module, nnx.Variable)
    }


def _paths(module: nnx.Pytree, kind: type[AnyVariable]) -> list[tuple[str, AnyVariable]]:
    paths = nnx.iter_graph(module)
    return [("/".join(map(str, path)), leaf) for path, leaf in paths if isinstance(leaf, kind)]


def check_pairs(grads_and_vars: Any) -> list[tuple[jax.Array | None, AnyVariable]]:
    """Check all pairs, and return them as a list."""
    if not isinstance(grads_and_vars, Iterable) or hasattr(grads_and_vars, "dtype"):
        raise ArgumentTypeError(
            f"grads_and_vars must be a list of (gradient, variable) pairs; got "
            f"{type(grads_and_vars).__name__}."
        )
    pairs: dict[int, tuple[jax.Array | None, AnyVariable]] = {}
    for item in grads_and_vars:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise ArgumentError(
                f"Each item must be a (gradient, variable) pair; got {_check.shown(item, 120)}."
            )
        gradient, variable = item
        _check_pair(gradient, variable)
        if id(variable) in pairs:
            raise VariableError(f"{describe_variable(variable)} is in grads_and_vars twice.")
        pairs[id(variable)] = gradient, variable
    if not pairs:
        raise ArgumentError("No variables provided.")
    if all(gradient is None for gradient, _ in pairs.values()):
        names = [describe_variable(variable) for _, variable in pairs.values()]
        raise ArgumentError(f"No gradients provided for any variable: {names}.")
    return list(pairs.values())


def _check_pair(gradient: Any, variable: Any) -> None:
    if not is_variable(variable):
        swapped = is_variable(gradient)
        raise VariableError(
            f"Each pair must end with an nnx variable; got {type(variable).__name__}."
            + " Gradient and variable are swapped." * swapped
        )
    if gradient is None:
        return
    name = f"The gradient of {describe_variable(variable)}"
    if is_variable(gradient):
        raise ArgumentTypeError(f"{name} must be an array; got {type(gradient).__name__}.")
    check_gradient_dtype(name, gradient)
    _check.array(name, gradient)
    dtype = jnp.result_type(gradient)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ArgumentTypeError(f"{name} has dtype {dtype}, not a floating one.")
    # Inside a step, a per-shard variable holds one shard's value.
    if jnp.shape(gradient) != jnp.shape(variable.get_raw_value()):
        raise VariableError(f"{name} has shape {jnp.shape(gradient)}.")


def check_global_step(global_step: Any) -> None:
    """Raise ArgumentTypeError unless it is ``None`` or a scalar integer variable."""
    value = global_step.get_raw_value() if is_variable(global_step) else None
    dtype, shape = getattr(value, "dtype", bool), getattr(value, "shape", None)
    if global_step is None or (jnp.issubdtype(dtype, jnp.integer) and shape == ()):
        return
    got = describe_variable(global_step) if is_variable(global_step) else _check.shown(global_step)
    raise ArgumentTypeError(
        f"global_step must be a scalar integer variable, because it is incremented in place; got "
        f"{got}. Write nnx.Variable(jnp.array(0))."
    )


# Slots.


# TensorFlow's names of slots, and the fields of Optax's states that they stand for.
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
    """The key of a variable. A dict in a state with such keys mirrors the parameters.

    The type tells it from other dicts with equal keys, such as the labels of ``optax.partition``.
    """

    __slots__ = ()


def _is_slots(node: Any) -> bool:
    return type(node) is dict and bool(node) and all(isinstance(key, _Key) for key in node)


def as_params(keyed: Mapping[str, AnyVariable]) -> dict[str, Any]:
    """Return the parameters of an optimizer: a dict from names to the variables' values."""
    return {_Key(key): variable.get_value() for key, variable in keyed.items()}


def _read(slot: Any) -> Any:
    """Return the array of a slot, or of a shared variable of the state."""
    if not is_variable(slot):
        raise VariableError(
            f"The optimizer's state has {_check.described(slot)} where it had a variable: it was "
            f"assigned. Write to the variable, as in opt.state.inner_state.hyperparams["
            f"'learning_rate'][...] = value."
        )
    return stacked(slot.get_value())


def _type_of(leaf: Any) -> Any:
    """Return the shape and dtype of a variable, of one shard; anything else as it is."""
    if not is_variable(leaf):
        return leaf
    x = stacked(leaf.get_value())
    return jax.ShapeDtypeStruct(x.shape[is_per_shard(leaf) :], x.dtype)


class _NoName:
    """A dict key that raises if it is read as text, but sorts, as JAX requires."""

    def __init__(self, place: int):
        self._place = place

    def __lt__(self, other: _NoName) -> bool:
        return self._place < other._place

    def __eq__(self, other: object) -> bool:
        return self._refuse() if type(other) is str else self is other

    def _refuse(self) -> NoReturn:
        raise TypeError("no name")

    __hash__, __repr__ = object.__hash__, _refuse


def _check_names_unread(init: Callable[[Any], Any], params: Mapping[str, Any]) -> None:
    """Raise if an optimizer reads the names of variables, as a mask may, and one has no name.

    A mask that looks for ``"bias"`` would silently match nothing.
    """
    lacking = [key for key in params if key.startswith("#")]
    nameless = {_NoName(place): x for place, x in enumerate(params.values())}
    try:
        if lacking:
            jax.eval_shape(lambda: (init(nameless), None)[1])
    except Exception as error:  # any exception: with text as keys, ``init`` has just worked
        raise VariableError(
            f"The optimizer reads the names of its variables, as in a mask, and "
            f"{', '.join(lacking)} of the list have none. Pass the module, var_list=model; or name "
            f"the variables, nnx.Param(value, name='kernel')."
        ) from error


class SlotStore:
    """The Optax state of an optimizer over the variables that it updates, each with a key.

    A dict in the state that mirrors the variables holds the slots of one name. All else is shared,
    such as a step count. A copy keeps the keys and binds its own variables on first use: by name,
    unless the step shows that a variable has another path than those with slots of its name.
    """

    def __init__(
        self,
        variables: Mapping[str, AnyVariable | None] | None = None,
        paths: Mapping[str, str] | None = None,
        tree: Any = None,
    ):
        # The variables by key, in order of first use; None in a copy.
        self.variables: dict[str, AnyVariable | None] = dict(variables or {})
        # By key, the path of a variable in a module of the step that made its slots.
        self.paths: dict[str, str] = dict(paths or {})
        # The state with a variable at every leaf; None before the first step.
        self.tree: Any = tree
        # In a copy, the keys that have slots.
        nodes = filter(_is_slots, jax.tree.leaves(tree, is_leaf=_is_slots))
        self._of_copy = {key for node in nodes for key in node}
        self._unchecked = set(self._of_copy)
        self._twins: dict[str, list[str]] = {}
        for key in sorted(self._of_copy):
            self._twins.setdefault(key.partition("#")[0], []).append(key)

    # Keys.

    def keyed(
        self, variables: Sequence[AnyVariable], names: Named, roots: Sequence[Any]
    ) -> dict[str, AnyVariable]:
        """Return variables by key; a new one gets its name, with a number if that is taken.

        ``roots`` are those of the step.

        Raises:
          VariableError: in a copy, where the order of first use may be another one, several
            variables have a name, and not all of them are given.
        """
        places = _by_path(roots) if self._of_copy else {}
        path_of = {id(variable): path for path, variable in places.items()}
        given = [names[id(variable)][1] for variable in variables if id(variable) in names]
        known = [key.partition("#")[0] for key in self.variables]
        # Keys without a variable are those of a copy: its variables get them by name or index.
        taken = {key for key, variable in self.variables.items() if variable is not None}
        keyed = {}
        for variable in variables:
            key = self.key_of(variable)
            if key is None:
                _, name = names[id(variable)]
                key = self._key_by_path(name, path_of.get(id(variable)), places)
            if key is None:
                numbered = (f"{name}#{count}" for count in itertools.count(1))
                key = next(key for key in itertools.chain([name], numbered) if key not in taken)
                has_twin = key != name or f"{name}#1" in self.variables
                are_all = 1 < given.count(name) == known.count(name)
                if name in self._of_copy and has_twin and not are_all:
                    raise VariableError(
                        f"Several variables of one optimizer are named {name}, and in a copy, as "
                        f"of nnx.clone, nnx.merge, nnx.jit, nnx.cond or nnx.scan, their slots "
                        f"cannot be told apart. Write one optimizer for each set of variables. To "
                        f"keep this one, create it anew, build each set in the order of before, "
                        f"and call nnx.update(new, nnx.state(old))."
                    )
            taken.add(key)
            keyed[key] = variable
        return keyed

    def _key_by_path(
        self, name: str, path: str | None, places: Mapping[str, AnyVariable]
    ) -> str | None:
        """Return the key of a variable of a copy by its path; ``None`` if paths do not tell.

        They do if the step shows it beside all variables that had slots of its name.
        """
        twins = self._twins.get(name, [])
        at = [self.paths.get(key, "") for key in twins]
        if path is None or not twins or len({*at}) < len(at) or not places.keys() >= {*at}:
            return None
        bound = [(self.variables[key], places[each]) for key, each in zip(twins, at, strict=True)]
        if any(was is not None and was is not now for was, now in bound):
            return None
        self.variables.update(zip(twins, (now for _, now in bound), strict=True))
        if path in at:
            return twins[at.index(path)]
        numbered = (f"{name}#{count}" for count in itertools.count(1))
        return next(key for key in numbered if key not in self.variables)

    def key_of(self, variable: Any) -> str | None:
        """Return the key of a variable; ``None`` if it has none."""
        return next((key for key, known in self.variables.items() if known is variable), None)

    def bind(self, variables: Mapping[str, AnyVariable]) -> dict[str, AnyVariable]:
        """Bind variables to the keys that have slots; return the variables without slots.

        Raises:
          VariableError: some variables have no slots, and some slots no variable: a copy, a loop or
            a branch has created variables again, and their names do not match. New slots would
            start the moments anew.
        """
        missing = {key: v for key, v in variables.items() if key not in self.variables}
        self.variables.update({key: v for key, v in variables.items() if key not in missing})
        unbound = [key for key, variable in self.variables.items() if variable is None]
        if missing and unbound:
            which = [describe_variable(variable) for variable in missing.values()]
            raise VariableError(
                f"The slots of {', '.join(which)} cannot be found here: there are slots of "
                f"{', '.join(sorted(unbound))}, and copies, nnx.cond, nnx.scan and the like create "
                f"variables again. Call optimizer.build(model) first, inside a branch or loop."
            )
        return missing

    # Creating.

    def make(
        self,
        init: Callable[[Any], Any],
        missing: Mapping[str, AnyVariable],
        roots: Sequence[Any],
    ) -> None:
        """Add the initial state of variables that have none; shared state stays as it is.

        There is one state per shard if any of the variables differ between shards. ``roots`` are
        those of the step.
        """
        if self.variables:
            self.check_shared(init, {**self.variables, **missing})
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
        as_array = lambda x: x if is_per_shard_array(x) else jnp.asarray(x)
        as_variable = lambda x: nnx.OptState(as_array(x))
        new = jax.tree.map(as_variable, made, is_leaf=is_per_shard_array)
        both = lambda old, new: {**old, **new} if _is_slots(old) else old
        self.tree = self._map(both, new) if self.variables else new
        self.variables.update(missing)
        paths = {id(variable): path for path, variable in _by_path(roots).items()}
        self.paths |= {key: paths[id(v)] for key, v in missing.items() if id(v) in paths}

    def check_shared(self, init: Callable[[Any], Any], variables: Mapping[str, Any]) -> None:
        """Raise unless the initial state of these variables has the shared leaves of the state."""

        def shared(tree: Any) -> set[tuple[str, Any]]:
            is_leaf = lambda node: is_variable(node) or _is_slots(node)
            leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
            name = lambda path: jax.tree_util.keystr(path).lstrip(".")
            return {(name(path), _type_of(x).shape) for path, x in leaves if not _is_slots(x)}

        of_these = jax.eval_shape(init, {_Key(key): _type_of(v) for key, v in variables.items()})
        if other := sorted(shared(self.tree) ^ shared(of_these)):
            raise ArgumentError(
                f"The optimizer has {other[0][0]} in its state for all of its variables together, "
                f"not for each by its name, so it cannot update some of them, and then others. "
                f"Write one optimizer for each set of variables, or make this state with "
                f"jax.tree.map over the parameters."
            )

    def check_shapes(self, init: Callable[[Any], Any], variables: Mapping[str, Any]) -> None:
        """Raise VariableError in a copy where slots of a name have other shapes than its variable.

        They are of a variable that had the name before.
        """
        new: dict[str, Any] = {key: variables[key] for key in variables if key in self._unchecked}
        self._unchecked -= new.keys()
        if not new:
            return

        def shapes(tree: Any) -> dict[tuple[str, str], Any]:
            nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_slots)
            return {
                (jax.tree_util.keystr(path), key): [
                    _type_of(x).shape for x in jax.tree.leaves(node[key], is_leaf=is_variable)
                ]
                for path, node in nodes
                if _is_slots(node)
                for key in new.keys() & node.keys()
            }

        made = shapes(jax.eval_shape(init, {_Key(key): _type_of(v) for key, v in new.items()}))
        for (path, key), shape in shapes(self.tree).items():
            if made.get((path, key), shape) != shape:
                raise VariableError(
                    f"The optimizer is a copy, and its slots of {key}, of shape {shape[0]}, are of "
                    f"another variable than {describe_variable(new[key])}. Create a new optimizer "
                    f"where a model gets other layers; or write one optimizer for each set of "
                    f"variables."
                )

    # Reading and writing.

    def _map(self, function: Callable[..., Any], *others: Any) -> Any:
        is_leaf = lambda node: is_variable(node) or _is_slots(node)
        return jax.tree.map(function, self.tree, *others, is_leaf=is_leaf)

    def _of(self, keys: Iterable[str] | None) -> Any:
        """Return the state as a tree of variables, with the slots of all keys or of these."""
        chosen = self.variables if keys is None else set(keys)

        def some(node: Any) -> Any:
            if not _is_slots(node):
                return node
            unknown = sorted(node.keys() - self.variables.keys())
            if unknown:  # nnx.update adds what it does not find
                raise VariableError(
                    f"The state has slots of {', '.join(unknown)}, of which this optimizer has "
                    f"{', '.join(sorted(self.variables))}: it was restored under other names, and "
                    f"would start anew. Call build with a model of the names that were saved."
                )
            return {key: node[key] for key in node if key in chosen}

        return self._map(some)

    def all(self, keys: Iterable[str] | None = None) -> list[AnyVariable]:
        """Return every variable of the state, or the shared ones and the slots of these keys."""
        return list(jax.tree.leaves(self._of(keys), is_leaf=is_variable))

    def values(self, keys: Iterable[str] | None = None) -> Any:
        """Return the state that an optimizer takes: the tree of the arrays of ``all``."""
        return jax.tree.map(_read, self._of(keys), is_leaf=is_variable)

    def write(self, keys: Iterable[str], state: Any) -> None:
        """Write the state after a step of these variables, with the structure of ``values``."""
        for variable, value in zip(self.all(keys), jax.tree.leaves(state), strict=True):
            if variable.get_raw_value() is not value:
                variable.set_raw_value(value)

    def find(self, variable: Any, name: str) -> Any:
        """Return a slot of a variable; ``None`` if there is none."""
        key = self.key_of(variable)
        for field in (name, _TENSORFLOW_NAMES.get(name, name)):
            slot = self.named().get(field, {}).get(key)
            if slot is not None:
                return slot
        return None

    def named(self) -> dict[str, dict[Any, AnyVariable]]:
        """Return the slots by field name: for each variable, the first that is not masked."""
        found: dict[str, dict[Any, AnyVariable]] = {}
        leaves = jax.tree_util.tree_leaves_with_path(self.tree, is_leaf=_is_slots)
        for path, node in leaves:
            fields = [getattr(key, "name", getattr(key, "key", None)) for key in path]
            names = [field for field in fields if isinstance(field, str) and field]
            if _is_slots(node) and names:
                of_variables = found.setdefault(names[-1], {})
                for key, slot in node.items():
                    if is_variable(slot):
                        of_variables.setdefault(key, slot)
        return found


@dataclasses.dataclass
class Computed:
    """The variables whose gradients ``compute_gradients`` returned in a trace.

    Attributes:
      names: these variables, with their names.
      shards: for the id of each, the number of shards, and whether its gradient was applied.
      value: float[], the latest loss of this shard.
      weights: for the id of each, what its gradients count; see ``weight_of``.
      are_means: of each loss, whether it was a ``Mean``.
      trace: the trace.
    """

    names: Named = dataclasses.field(default_factory=dict)
    shards: dict[int, tuple[int, bool]] = dataclasses.field(default_factory=dict)
    value: Any = None
    weights: dict[int, list[jax.Array | None]] = dataclasses.field(default_factory=dict)
    are_means: list[bool] = dataclasses.field(default_factory=list)
    trace: Any = dataclasses.field(default_factory=_flax.current_trace)

    def note(self, found: Named, number: int, value: Any, weight: jax.Array | None) -> None:
        """Record that the gradients of these variables were computed, on this many shards."""
        for known in found:
            _, is_applied = self.shards.get(known, (number, True))
            self.weights[known] = [weight] if is_applied else [*self.weights[known], weight]
            self.shards[known] = number, False
        self.names.update(found)
        self.value = value

    def weight_of(self, variables: Sequence[AnyVariable]) -> jax.Array | None:
        """Return 0 if no row counts in any loss of these; ``None`` if some row always does.

        float[]. These are the losses since the gradients were applied last, of which one may be
        empty: the gradients that are applied may be a sum of all.
        """
        weights = {id(w): w for v in variables for w in self.weights[id(v)]}.values()
        given = [weight for weight in weights if weight is not None]
        return functools.reduce(jnp.maximum, given) if len(given) == len(weights) else None

    def note_applied(self, variables: Sequence[AnyVariable]) -> None:
        """Record that the gradients of these variables were applied."""
        for known in {id(variable) for variable in variables} & self.shards.keys():
            self.shards[known] = self.shards[known][0], True

    def origin(
        self, variables: Sequence[AnyVariable], number: int, divisor: int, *, declared: bool
    ) -> GradientStatus | None:
        """Return the status of gradients that are about to be applied; ``None`` if unknown.

        Args:
          variables: the variables of the gradients.
          number: the number of shards of this step.
          divisor: what a mean over the shards divides by; 1 for a sum.
          declared: whether the optimizer was given the status of gradients from elsewhere.

        Raises:
          IncomingError: gradients that were applied before, or come from elsewhere undeclared.
          ShardContextError: gradients that were computed under another number of shards.
        """
        for variable in variables:
            computed, is_applied = self.shards.get(id(variable), (number, False))
            if is_applied and divisor > 1:
                raise IncomingError(
                    f"The gradient of {describe_variable(variable)} has been applied already in "
                    f"this step. Pass incoming='scaled' to apply it again."
                )
            if computed != number:
                raise ShardContextError(
                    f"The gradient of {describe_variable(variable)} was computed under {computed} "
                    f"shards and is applied under {number}. Do both in the same step."
                )
        elsewhere = [variable for variable in variables if id(variable) not in self.names]
        if not elsewhere:
            return GradientStatus.SCALED
        if declared or divisor == 1:
            return None
        raise IncomingError(
            f"The gradient of {describe_variable(elsewhere[0])} does not come from this "
            f"optimizer's compute_gradients in this step, so it may or may not be divided by "
            f"{divisor} already, or summed. Pass incoming='local' to average local gradients; "
            f"incoming='scaled' to sum them alone, divided or not, which is what TensorFlow's "
            f"apply_gradients does; or incoming='reduced' if you have summed them over the shards "
            f"yourself, as with cross_replica_sum, and they are to be applied as they are."
        )


class HasSlots:
    """The parts of an optimizer that the runners use: its state and its computed gradients."""

    slots: SlotStore
    _computed: Computed

    # Gives what an aggregator holds back on other shards to so many; returns whether there was any.
    _share_out: Callable[[int], bool]

    def _held_back(self) -> list[AnyVariable]:
        """Return the variables of what an aggregator holds back on each shard."""
        tree = () if self.slots.tree is None else self.slots.tree.aggregate
        return list(filter(is_per_shard, jax.tree.leaves(tree, is_leaf=is_variable)))

    @property
    def computed(self) -> Computed:
        """What ``compute_gradients`` has returned in the current trace."""
        if self._computed.trace != _flax.current_trace():
            self.forget()
        return self._computed

    def forget(self) -> None:
        """Forget these gradients, and their trace."""
        self._computed = Computed()
