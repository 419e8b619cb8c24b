"""Finds the modules, variables and optimizers that are reachable from functions and objects."""

import abc
import collections
import dataclasses
import functools
import itertools
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from flax import nnx

from crossshard.errors import VariableError
from crossshard.variables.describe import describe_variable


class VariableContainer:
    """An optimizer: a node of NNX's graph whose variables belong to other variables."""

    __slots__ = ()

    @abc.abstractmethod
    def known_variables(self) -> list[nnx.Variable | None]:
        """The variables that its own variables belong to, in a fixed order."""

    @abc.abstractmethod
    def computes_with(self) -> Iterable[Any]:
        """The functions that it runs, which may close over variables, as schedules do."""

    @abc.abstractmethod
    def forget_trace(self) -> None:
        """Drop references to a trace that ends."""


@dataclasses.dataclass(frozen=True)
class Reached:
    """What values lead to, each once, in a fixed order.

    Attributes:
      roots: the modules, variables and optimizers that are come by first.
      variables: every variable below these.
      containers: every optimizer below these.
    """

    roots: list[Any]
    variables: list[nnx.Variable]
    containers: list[VariableContainer]


def reached_in(roots: Iterable[Any]) -> Reached:
    """What lies below some roots."""
    walk = _Walk(())
    for root in roots:
        walk.add(root)
    return walk.reached()


def variables_in(roots: Iterable[Any]) -> list[nnx.Variable]:
    """Every variable below the roots, each once, in a fixed order."""
    return reached_in(roots).variables


def modules_in(roots: Iterable[Any]) -> list[nnx.Pytree]:
    """Every NNX module below the roots, each once."""
    nodes = (node for root in roots for _, node in nnx.iter_graph(root))
    return list({id(node): node for node in nodes if isinstance(node, nnx.Pytree)}.values())


def is_stateful(value: Any) -> bool:
    """Whether a runner binds this object to the step rather than splitting it over the shards."""
    return isinstance(value, nnx.Pytree | nnx.Variable | VariableContainer)


_PATHS = sysconfig.get_paths()
_LIBRARY_FOLDERS = tuple({_PATHS[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def _is_librarys(name: str) -> bool:
    """Whether a top-level package is Python's, installed, or ours: it has no user variables."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "crossshard" or (file is None and name in sys.stdlib_module_names):
        return True
    return file is not None and file.startswith(_LIBRARY_FOLDERS)


def package(thing: Any) -> str:
    """The top-level package of a module, function or class."""
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return (name or "").split(".")[0]


# Longer containers hold data; searching them at every call would be slow.
_MAX_ITEMS = 1024


def reached_from(values: Sequence[Any]) -> Reached:
    """The modules, variables and optimizers reachable from functions, containers and objects.

    A function leads to its closure, defaults, bound object and the globals that it uses; a Python
    module to the names that the function may use; a container to its items, up to about a thousand;
    an object of a user's class to its attributes and methods. Installed packages are skipped,
    unless passed here or used by an optimizer: a schedule is found through Optax's functions.
    """
    walk = _Walk(values)
    walk.go()
    return walk.reached()


def reachable_roots(values: Sequence[Any]) -> list[Any]:
    """The roots of everything reachable from values."""
    return reached_from(values).roots


def variables_behind(container: VariableContainer) -> list[nnx.Variable]:
    """Every variable that an optimizer's functions close over."""
    walk = _Walk(())
    walk.follow(container.computes_with())
    walk.go()
    return walk.reached().variables


def functions_behind(container: VariableContainer) -> list[types.FunctionType]:
    """Every function that an optimizer computes with, as far as they can be followed."""
    return functions_reached_by(container.computes_with())


def functions_reached_by(values: Iterable[Any]) -> list[types.FunctionType]:
    """Every function that is reached from what an optimizer computes with."""
    walk = _Walk(())
    walk.follow(values)
    walk.go()
    return [value for value in walk.seen if isinstance(value, types.FunctionType)]


class _Walk:
    """A traversal from values to the modules, variables and optimizers below them."""

    def __init__(self, values: Sequence[Any]):
        # Values of an optimizer are marked, because there libraries are searched too.
        self._queue = collections.deque((value, False) for value in values)
        # If a step comes from an installed package, that package is searched.
        self._home = {package(_owner(value)) for value in values if not is_stateful(value)}
        self._seen: dict[tuple[int, bool], Any] = {}
        self._roots: dict[int, Any] = {}
        self._variables: dict[int, nnx.Variable] = {}
        self._containers: dict[int, VariableContainer] = {}

    @property
    def seen(self) -> list[Any]:
        """All visited values."""
        return list(self._seen.values())

    def reached(self) -> Reached:
        """What was found."""
        found = self._roots, self._variables, self._containers
        return Reached(*(list(each.values()) for each in found))

    def follow(self, values: Iterable[Any]) -> None:
        """Go on, at the end, with what an optimizer computes with."""
        self._queue.extend((value, True) for value in values)

    def go(self) -> None:
        """Find all that there is, the nearest first, and what optimizers compute with last."""
        followed = 0
        while self._queue:
            value, of_optimizer = self._queue.popleft()
            if type(value) not in _LEAVES and (id(value), of_optimizer) not in self._seen:
                self._seen[id(value), of_optimizer] = value
                if is_stateful(value):
                    self.add(value)
                else:
                    below = self._below(value, of_optimizer)
                    self._queue.extend((each, of_optimizer) for each in below)
            if not self._queue:
                for container in list(self._containers.values())[followed:]:
                    self.follow(container.computes_with())
                followed = len(self._containers)

    def add(self, root: Any) -> None:
        """Take up a root, with the variables and optimizers below it."""
        if id(root) in self._roots:
            return
        self._roots[id(root)] = root
        for _, node in nnx.iter_graph(root):
            if isinstance(node, nnx.Variable):
                if node.hijax or node.ref:
                    raise VariableError(
                        f"{describe_variable(node)} is of NNX's experimental "
                        f"{'hijax' if node.hijax else 'ref'} kind; use an ordinary variable."
                    )
                self._variables.setdefault(id(node), node)
            elif isinstance(node, VariableContainer):
                self._containers.setdefault(id(node), node)

    def _below(self, value: Any, of_optimizer: bool) -> Iterable[Any]:
        if isinstance(value, functools.partial):
            return (value.func, value.args, value.keywords)
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__)
        if isinstance(value, dict | types.MappingProxyType):
            return itertools.islice(value.values(), _MAX_ITEMS)
        if isinstance(value, list | tuple | set | frozenset):
            return itertools.islice(value, _MAX_ITEMS)
        if isinstance(value, property | classmethod | staticmethod):
            return (getattr(value, "fget", None), getattr(value, "__func__", None))
        # Look through the decorators of other libraries.
        wrapped = _own(value, "__wrapped__")
        if wrapped is not None and not isinstance(value, types.FunctionType):
            return (wrapped,)
        is_function = isinstance(value, types.FunctionType)
        if isinstance(value, types.ModuleType) or self._is_librarys(_owner(value)):
            if not of_optimizer or isinstance(value, type | types.ModuleType):
                return ()
            if package(_owner(value)) in _WITHOUT_VARIABLES:
                return ()
            return _closed_over(value) if is_function else _attributes_of_one(value)
        return self._named_by(value) if is_function else _attributes(value)

    def _is_librarys(self, thing: Any) -> bool:
        owner = package(thing)
        return owner not in self._home and _is_librarys(owner)

    def _named_by(self, function: types.FunctionType) -> Iterator[Any]:
        yield from _closed_over(function)
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            for name in code.co_names:
                named = function.__globals__.get(name)
                yield named
                if isinstance(named, types.ModuleType) and not self._is_librarys(named):
                    inside = vars(named)
                    yield from (inside[other] for other in code.co_names if other in inside)
            codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))


# Types of values that lead nowhere; most values of a walk are such.
_LEAVES = frozenset(
    {bool, bytes, complex, float, int, str, type(None), types.BuiltinFunctionType, types.CodeType}
)
# Packages whose objects hold no variables, but may hold much else.
_WITHOUT_VARIABLES = frozenset({"builtins", "jax", "jaxlib", "numpy"})


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that its function has not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield getattr(function, "__wrapped__", None)


def _owner(value: Any) -> Any:
    """The object whose ``__module__`` names the package of a value: itself, or its class."""
    return value if isinstance(value, type | types.FunctionType) else type(value)


def _own(value: Any, name: str) -> Any:
    # Without ``__getattr__``, which may return anything.
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _attributes(value: Any) -> Iterator[Any]:
    yield from _attributes_of_one(value)
    if not isinstance(value, type):
        yield from type(value).__mro__


def _attributes_of_one(value: Any) -> Iterator[Any]:
    yield from list((_own(value, "__dict__") or {}).values())
    if isinstance(value, type):
        return
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)
