"""NNX variables as the inputs and outputs of a traced function: found, rebound, restored."""

import collections
import functools
import itertools
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.tracers import TraceState

from crossshard.errors import VariableError

_thread = threading.local()

_PATHS = sysconfig.get_paths()
_LIBRARY_FOLDERS = tuple({_PATHS[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def _is_librarys(package: str) -> bool:
    """Whether a top-level package is Python's, installed, or ours: no user's variable is in it."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if package == "crossshard" or (file is None and package in sys.stdlib_module_names):
        return True
    return file is not None and file.startswith(_LIBRARY_FOLDERS)


class Holder:
    """An object, not itself an NNX node, whose variables a runner carries in and out."""

    __slots__ = ()

    def held_variables(self) -> list[nnx.Variable]:
        """The variables that it holds now."""
        raise NotImplementedError

    def known_variables(self) -> list[nnx.Variable | None]:
        """Variables of others that what it holds belongs to, in a fixed order."""
        raise NotImplementedError


def variables_in(roots: Iterable[Any]) -> list[nnx.Variable]:
    """Every variable below the roots, each once, in a fixed order."""
    found: dict[int, nnx.Variable] = {}
    for root in roots:
        held = isinstance(root, Holder)
        leaves = root.held_variables() if held else (leaf for _, leaf in nnx.iter_graph(root))
        for leaf in leaves:
            if isinstance(leaf, nnx.Variable):
                found.setdefault(id(leaf), leaf)
    for variable in found.values():
        if variable.hijax or variable.ref:
            raise VariableError(
                f"{describe_variable(variable)} is of NNX's experimental "
                f"{'hijax' if variable.hijax else 'ref'} kind; use an ordinary variable."
            )
    return list(found.values())


def is_stateful(value: Any) -> bool:
    """Whether a runner hands this object in and out rather than splitting it over the shards."""
    return isinstance(value, nnx.Pytree | nnx.Variable | Holder)


def _package(thing: Any) -> str:
    name = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return (name or "").split(".")[0]


# A longer container holds data; looking at each item of it at every call would cost too much.
_MANY = 1024


def reachable_roots(values: Sequence[Any]) -> list[Any]:
    """The modules, variables and optimizers that functions, containers and objects lead to.

    Functions are followed into their closures, defaults, what they are bound to and the globals
    they name; modules of Python into what the function may name of them; containers into their
    items, up to a thousand or so; objects of the user's own classes into their attributes and
    methods. What belongs to installed packages is passed over, unless it is given here.
    """
    return _Walk(values).roots()


class _Walk:
    """A walk from some values to the modules, variables and optimizers below them."""

    def __init__(self, values: Sequence[Any]):
        self._queue = collections.deque(values)
        # A step that comes from an installed package makes that package the user's own.
        self._home = {_package(_owner(value)) for value in values}

    def roots(self) -> list[Any]:
        """All of them, each once, the nearest first."""
        roots: list[Any] = []
        seen: dict[int, Any] = {}
        while self._queue:
            value = self._queue.popleft()
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if is_stateful(value):
                roots.append(value)
            else:
                self._queue.extend(self._below(value))
        return roots

    def _below(self, value: Any) -> Iterable[Any]:
        if isinstance(value, functools.partial):
            return (value.func, value.args, value.keywords)
        if isinstance(value, types.MethodType):
            return (value.__func__, value.__self__)
        if isinstance(value, dict | types.MappingProxyType):
            return itertools.islice(value.values(), _MANY)
        if isinstance(value, list | tuple | set | frozenset):
            return itertools.islice(value, _MANY)
        if isinstance(value, property | classmethod | staticmethod):
            return (getattr(value, "fget", None), getattr(value, "__func__", None))
        # A decorator of any library may stand around a function of the user's.
        wrapped = _own(value, "__wrapped__")
        if wrapped is not None and not isinstance(value, types.FunctionType):
            return (wrapped,)
        if isinstance(value, types.ModuleType) or self._is_librarys(_owner(value)):
            return ()
        named = isinstance(value, types.FunctionType)
        return self._named_by(value) if named else _attributes(value)

    def _is_librarys(self, thing: Any) -> bool:
        package = _package(thing)
        return package not in self._home and _is_librarys(package)

    def _named_by(self, function: types.FunctionType) -> Iterator[Any]:
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # a cell that its function has not filled yet
                continue
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield getattr(function, "__wrapped__", None)
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


def _owner(value: Any) -> Any:
    """What says in its ``__module__`` whose a value is: itself, or its class."""
    return value if isinstance(value, type | types.FunctionType) else type(value)


def _own(value: Any, name: str) -> Any:
    # Asked of the object itself, for a class may answer any attribute with whatever it likes.
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


def _attributes(value: Any) -> Iterator[Any]:
    yield from list((_own(value, "__dict__") or {}).values())
    if isinstance(value, type):
        return
    for owner in type(value).__mro__:
        yield owner
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(value, name, None)


def modules_in(roots: Iterable[Any]) -> list[nnx.Pytree]:
    """Every NNX module below the roots, each once."""
    nodes = (
        node for root in roots if not isinstance(root, Holder) for _, node in nnx.iter_graph(root)
    )
    return list({id(node): node for node in nodes if isinstance(node, nnx.Pytree)}.values())


@contextmanager
def rebound(
    variables: Sequence[nnx.Variable], values: Sequence[Any], modules: Sequence[nnx.Pytree] = ()
) -> Iterator[None]:
    """Let the variables hold other values, of the trace in force, and restore them after.

    The modules belong to that trace too, so that ``nnx.grad`` and its like can take them.
    """
    before = [(v.get_raw_value(), v._trace_state) for v in variables]
    states = [(m._pytree__state, m._pytree__state._trace_state) for m in modules]
    trace = TraceState()
    try:
        for variable, value in zip(variables, values, strict=True):
            _rebind(variable, value, trace)
        for state, _ in states:
            state._trace_state = trace
        yield
    finally:
        for variable, (value, outer) in zip(variables, before, strict=True):
            _rebind(variable, value, outer)
        for state, outer in states:
            state._trace_state = outer


def _rebind(variable: nnx.Variable, value: Any, trace: TraceState) -> None:
    # NNX lets nobody but the owner of a trace write a variable; the one who hands it in is that.
    object.__setattr__(variable, "_raw_value", value)
    object.__setattr__(variable, "_trace_state", trace)


@contextmanager
def kept_attributes(modules: Sequence[nnx.Pytree]) -> Iterator[None]:
    """Give the modules back the attributes that they had: a trace's own would outlive it."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)


def bring_out(variable: nnx.Variable, value: Any) -> None:
    """Write to a variable, which may have been made in a trace that has ended, in this one."""
    _rebind(variable, value, TraceState())


class HandedIn:
    """What a runner hands in to one trace of its step.

    Attributes:
      variables: the variables that hold values of this trace.
      modules: the modules that belong to it.
      holders: the objects that hold variables without being NNX nodes.
    """

    def __init__(self, variables: Sequence[nnx.Variable], roots: Sequence[Any]):
        self.variables = list(variables)
        self.modules = modules_in(roots)
        self.holders = [root for root in roots if isinstance(root, Holder)]

    def __contains__(self, variable: nnx.Variable) -> bool:
        return any(variable is known for known in self.variables)


class VariablesWanted(BaseException):
    """Raised inside a step by a holder that needs variables which must be made outside of it.

    No ``Exception``, so that a step's own handlers let it through to the runner, which calls
    ``make`` and traces the step again.
    """

    def __init__(self, make: Callable[[], None]):
        super().__init__()
        self.make = make


@contextmanager
def handing_in(handed: HandedIn) -> Iterator[None]:
    """Let the code inside see what the runner around it hands in."""
    _thread.handed = handed
    try:
        yield
    finally:
        _thread.handed = None


def handed_in() -> HandedIn | None:
    """What the runner around this line hands in; ``None`` outside of any."""
    return getattr(_thread, "handed", None)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values are made of the very same arrays, not merely of equal ones."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def current_trace() -> TraceState:
    """The trace in force; equal to another of itself alone."""
    return TraceState()


def check_writable(variable: nnx.Variable) -> None:
    """Raise unless a value of the trace in force may be written to the variable."""
    if not variable._can_update:
        raise VariableError(
            f"{describe_variable(variable)} was made outside of the step that writes it and was "
            f"not handed to it. Pass its module to the step function as an argument, and run that "
            f"with crossshard.shard."
        )


PER_SHARD = "per_shard"


def is_per_shard(variable: nnx.Variable) -> bool:
    """Whether the variable differs between shards, its value being ``[shards, …]``.

    A runner makes it so when a step leaves the shards with different values: parameters under
    groups, statistics that each shard keeps of its own batch.

    >>> from flax import nnx
    >>> is_per_shard(nnx.Param(0.0))
    False
    """
    if not isinstance(variable, nnx.Variable):
        raise VariableError(f"An nnx variable is wanted; got {type(variable).__name__}.")
    return bool(variable.get_metadata(PER_SHARD, None))


def set_shared(variable: nnx.Variable, value: Any) -> None:
    """Write one value for all shards to a variable, also where they differed until now.

    Raises:
      VariableError: not a variable, or a value that is no array.

    >>> from flax import nnx
    >>> variable = nnx.Param(0.0)
    >>> set_shared(variable, 1.0)
    >>> variable.get_value()
    Array(1., dtype=float32, weak_type=True)
    """
    value = _check_value(variable, value)
    if is_per_shard(variable) and not is_in_step(variable):
        variable.del_metadata(PER_SHARD)
    variable.set_value(value)


def set_per_shard(variable: nnx.Variable, values: Any) -> None:
    """Write one value per shard to a variable, ``[shards, …]``, to restore what was saved so.

    Raises:
      VariableError: not a variable, values that have no axis of shards, or called inside a step,
        where a variable holds one shard's value.

    >>> from flax import nnx
    >>> variable = nnx.Param(0.0)
    >>> set_per_shard(variable, [1.0, 2.0])
    >>> is_per_shard(variable)
    True
    """
    values = _check_value(variable, values)
    if values.ndim == 0:
        raise VariableError(
            f"One value per shard of {describe_variable(variable)} has shape [shards, …]; got a "
            f"scalar. Write it with crossshard.set_shared."
        )
    if is_in_step(variable):
        raise VariableError(
            f"Inside a step {describe_variable(variable)} holds one shard's value; write that to "
            f"it, or call set_per_shard outside."
        )
    variable.set_metadata(PER_SHARD, values.shape[0])
    variable.set_value(values)


def is_in_step(variable: nnx.Variable) -> bool:
    """Whether a runner has handed the variable in, so that it holds this shard's value alone."""
    handed = handed_in()
    return handed is not None and variable in handed


def _check_value(variable: Any, value: Any) -> jax.Array:
    if not isinstance(variable, nnx.Variable):
        raise VariableError(f"An nnx variable is wanted; got {type(variable).__name__}.")
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise VariableError(
            f"{describe_variable(variable)} takes an array; got {value!r:.60}."
        ) from None


def describe_variable(variable: nnx.Variable) -> str:
    """``Param float32[3,4]``, with its name where it has one."""
    value = variable.get_raw_value()
    name = variable.get_metadata("name", None)
    kind = type(variable).__name__ + (f" {name!r}" if name else "")
    if not hasattr(value, "dtype"):
        return f"{kind} ({type(value).__name__})"
    return f"{kind} {value.dtype}[{','.join(map(str, value.shape))}]"
