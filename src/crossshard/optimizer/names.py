"""The names of the variables that an optimizer updates."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax.numpy as jnp
from flax import nnx

from crossshard import _jax
from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.gradients.nesting import is_inside_optimizer
from crossshard.variables.binding import bound
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import reachable_roots

# By the id of the variable; keeping the variable keeps its id unique.
Named = dict[int, tuple[nnx.Variable, str]]


def named_variables(var_list: Any, loss: Callable[[], Any] | None = None) -> Named:
    """The variables of a module, a variable or a list of both, with a name for each, by id.

    The variables of a module are its ``nnx.Param``s, named by their paths. A variable in a list is
    named by its metadata, else by its path in a module that the loss reaches or that was passed to
    the step, else by its index: ``#0``.

    Raises:
      ArgumentError: there are no variables.
      ArgumentTypeError: an item is not a variable.
      VariableError: a variable that is not floating, or a duplicate.
    """
    items = list(var_list) if isinstance(var_list, list | tuple) else [var_list]
    found: Named = {}
    alone: dict[int, nnx.Variable] = {}
    for index, item in enumerate(items):
        if isinstance(item, nnx.Variable):
            if id(item) in found:
                raise VariableError(f"{describe_variable(item)} is in var_list twice.")
            alone[id(item)] = item
            named = [(f"#{index}", item)]
        elif isinstance(item, nnx.Pytree):
            prefix = f"{index}/" if len(items) > 1 else ""
            named = [(prefix + name, variable) for name, variable in _paths(item, nnx.Param)]
        else:
            raise ArgumentTypeError(
                f"var_list must be an nnx.Module or a list of nnx variables; item {index} is "
                f"{type(item).__name__} ({item!r:.60})."
            )
        for name, variable in named:
            _check_floating(variable)
            found[id(variable)] = (variable, name)
    if not found:
        raise ArgumentError("No variables to optimize.")
    return found | names_in_reach(alone.values(), [] if loss is None else [loss])


def names_in_reach(variables: Iterable[nnx.Variable], reach: Sequence[Any] = ()) -> Named:
    """Names of those variables that have one: their own, or a path in a module in reach.

    In reach are the modules that ``reach`` leads to, and those passed to the step.
    """
    found: Named = {}
    unnamed: dict[int, nnx.Variable] = {}
    for variable in variables:
        own = variable.get_metadata("name", None)
        if own:
            found[id(variable)] = (variable, str(own))
        else:
            unnamed[id(variable)] = variable
    around = bound()
    in_roots: list[list[tuple[str, nnx.Variable]]] = []
    for root in [*reachable_roots(reach), *(() if around is None else around.roots)]:
        if unnamed and isinstance(root, nnx.Pytree):
            named = [(name, v) for name, v in _paths(root, nnx.Variable) if id(v) in unnamed]
            for _, variable in named:
                del unnamed[id(variable)]
            in_roots += [named] if named else []
    for index, named in enumerate(in_roots):
        prefix = f"{index}/" if len(in_roots) > 1 else ""
        found |= {id(variable): (variable, prefix + name) for name, variable in named}
    return found


def _paths(module: nnx.Pytree, kind: type[nnx.Variable]) -> list[tuple[str, nnx.Variable]]:
    return [
        ("/".join(map(str, path)), leaf)
        for path, leaf in nnx.iter_graph(module)
        if isinstance(leaf, kind)
    ]


def _check_floating(variable: nnx.Variable) -> None:
    dtype = getattr(variable.get_raw_value(), "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise VariableError(
            f"{describe_variable(variable)} cannot be optimized: its dtype must be floating."
        )


class Name(str):
    """A parameter's name, as an optimizer sees it: a dict with such keys mirrors the parameters."""

    __slots__ = ()


_thread = threading.local()


@contextmanager
def seen_by_optimizer() -> Iterator[None]:
    """Mark the code inside as an optimizer's, which must not read indices as names."""
    _thread.seen = True
    try:
        yield
    finally:
        _thread.seen = False


class Unnamed:
    """A placeholder for a parameter's name, which raises if an optimizer reads it.

    With a number in its place, a mask or label function that looks for names would silently match
    nothing.
    """

    def __init__(self, key: str, description: str):
        self._key = key
        self._description = description

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        # JAX compares the keys of two trees, for example to look up a compiled function.
        if isinstance(other, Unnamed):
            return self._key == other._key
        return not isinstance(other, Name) and self._read() == other

    # JAX sorts the keys of a dict.
    def __lt__(self, other: Any) -> bool:
        return self._key < (other._key if isinstance(other, Unnamed) else str(other))

    def __gt__(self, other: Any) -> bool:
        return not self < other

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._read(), name)

    def _read(self) -> str:
        in_optimizer = getattr(_thread, "seen", False) or is_inside_optimizer()
        if not in_optimizer or _jax.asked_by_jax():
            return self._key
        raise VariableError(
            f"The optimizer reads the names of its parameters, as a mask by name does, and "
            f"{self._description} does not have one: it was passed in a list, and its module is "
            f"not in reach. Pass the module, var_list=model; or name the variable, "
            f"nnx.Param(value, name='kernel')."
        )


def _read_first(method: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self._read(), method)(*args)


for _name in "add contains format getitem iter len mod mul repr str".split():
    setattr(Unnamed, f"__{_name}__", _read_first(f"__{_name}__"))


def is_unnamed(key: str) -> bool:
    """Whether a variable's key is only its index in a list."""
    return key.startswith("#")


def public_name(key: str, variable: nnx.Variable | None) -> Name | Unnamed:
    """A variable's key as an optimizer sees it."""
    if not is_unnamed(key):
        return Name(key)
    return Unnamed(key, "a variable" if variable is None else describe_variable(variable))
