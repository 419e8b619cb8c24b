"""NNX variables as the inputs and outputs of a traced function: found, rebound, restored."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from flax.nnx.tracers import TraceState

from crossshard.errors import VariableError

_thread = threading.local()

# Functions of these are never walked: no user's variable hangs below a library's function.
_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "numpy", "equinox", "chex", "crossshard"}
_LIBRARIES |= sys.stdlib_module_names


@runtime_checkable
class Holder(Protocol):
    """An object, not itself an NNX node, whose variables a runner carries in and out."""

    def held_variables(self) -> list[nnx.Variable]:
        """The variables that it holds now."""


def variables_in(roots: Iterable[Any]) -> list[nnx.Variable]:
    """Every variable below the roots, each once, in a fixed order."""
    found: dict[int, nnx.Variable] = {}
    for root in roots:
        if isinstance(root, Holder):
            leaves: Iterable[Any] = root.held_variables()
        else:
            leaves = (leaf for _, leaf in nnx.iter_graph(root))
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
    if isinstance(value, type):
        return False
    return isinstance(value, nnx.Pytree | nnx.Variable | Holder)


def reachable_roots(values: Iterable[Any]) -> list[Any]:
    """The modules, variables and optimizers that functions and containers lead to.

    Functions are followed into their closures, defaults, the globals they name, what they are
    bound to and the functions they name in turn; containers into their items; an object that a
    function closes over or is bound to, into its attributes.
    """
    roots: dict[int, Any] = {}
    seen: dict[int, Any] = {}
    queue = [(value, True) for value in values]
    while queue:
        value, look_inside = queue.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if is_stateful(value):
            roots[id(value)] = value
        else:
            queue.extend(_below(value, look_inside))
    return list(roots.values())


def _below(value: Any, look_inside: bool) -> Iterator[tuple[Any, bool]]:
    if isinstance(value, functools.partial):
        yield from ((part, True) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from ((part, True) for part in (value.__func__, value.__self__))
    elif isinstance(value, types.FunctionType):
        if (value.__module__ or "").split(".")[0] not in _LIBRARIES:
            yield from ((part, True) for part in _named_by(value))
    elif isinstance(value, dict):
        yield from ((part, look_inside) for part in value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((part, look_inside) for part in value)
    elif callable(getattr(value, "__wrapped__", None)):
        yield (value.__wrapped__, True)
    elif look_inside and not isinstance(value, type | types.ModuleType):
        yield from ((part, False) for part in getattr(value, "__dict__", {}).values())


def _named_by(function: types.FunctionType) -> Iterator[Any]:
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
        yield from (function.__globals__[n] for n in code.co_names if n in function.__globals__)
        codes.extend(const for const in code.co_consts if isinstance(const, types.CodeType))


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


class HandedIn:
    """What a runner hands in to one trace of its step, and what it is told there.

    Attributes:
      variables: the variables that hold values of this trace.
      modules: the modules that belong to it.
      holders: the objects that hold variables without being NNX nodes.
      equal: ids of the variables that were written with a value that is the same on all shards.
    """

    def __init__(
        self,
        variables: Sequence[nnx.Variable],
        roots: Sequence[Any],
        differing: Iterable[nnx.Variable],
    ):
        self.variables = list(variables)
        self.modules = modules_in(roots)
        self.holders = [root for root in roots if isinstance(root, Holder)]
        self.equal: set[int] = set()
        self._differing = {id(variable) for variable in differing}

    def __contains__(self, variable: nnx.Variable) -> bool:
        return any(variable is known for known in self.variables)

    def note_equal(
        self, written: Iterable[nnx.Variable], computed_from: Iterable[nnx.Variable]
    ) -> None:
        """Say that variables were written alike on all shards, if what they came from was alike."""
        if not self._differing & {id(variable) for variable in computed_from}:
            self.equal |= {id(variable) for variable in written}


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
    return bool(variable.get_metadata(PER_SHARD, None))


def set_shared(variable: nnx.Variable, value: Any) -> None:
    """Write one value for all shards to a variable, also where they differed until now.

    >>> from flax import nnx
    >>> variable = nnx.Param(0.0)
    >>> set_shared(variable, 1.0)
    >>> variable.get_value()
    1.0
    """
    if is_per_shard(variable):
        variable.del_metadata(PER_SHARD)
    variable.set_raw_value(value)


def describe_variable(variable: nnx.Variable) -> str:
    """``Param float32[3,4]``, with its name where it has one."""
    value = variable.get_raw_value()
    name = variable.get_metadata("name", None)
    kind = type(variable).__name__ + (f" {name!r}" if name else "")
    if not hasattr(value, "dtype"):
        return f"{kind} ({type(value).__name__})"
    return f"{kind} {value.dtype}[{','.join(map(str, value.shape))}]"
