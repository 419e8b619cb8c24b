"""All private Flax NNX API; no other file uses it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flax import nnx
from flax.nnx.tracers import TraceState


def current_trace() -> TraceState:
    """The current trace, comparable by identity."""
    return TraceState()


def variable_state(variable: nnx.Variable) -> tuple[Any, TraceState]:
    """The value of a variable, and the trace that it belongs to."""
    return variable.get_raw_value(), variable._trace_state


def set_variable_state(variable: nnx.Variable, value: Any, trace: TraceState) -> None:
    """Set the value of a variable and the trace that it belongs to."""
    # NNX allows writes only in a variable's own trace, so this bypasses its check.
    object.__setattr__(variable, "_raw_value", value)
    object.__setattr__(variable, "_trace_state", trace)


def is_writable(variable: nnx.Variable) -> bool:
    """Whether the variable belongs to the current trace."""
    return bool(variable._can_update)


def module_trace(module: nnx.Pytree) -> TraceState:
    """The trace that a module belongs to."""
    return module._pytree__state._trace_state


def set_module_trace(module: nnx.Pytree, trace: TraceState) -> None:
    """Set the trace that a module belongs to."""
    module._pytree__state._trace_state = trace


def graph_of(roots: Sequence[Any], as_hashable: Callable[[Any], Hashable]) -> Hashable:
    """The structure of some roots, as a key; ``as_hashable`` makes one of what has no hash."""
    graph = nnx.graphdef(list(roots))
    try:
        hash(graph)
    except TypeError:  # an attribute that is no node, such as a configuration
        nodes = tuple(map(as_hashable, graph.nodes))
        attributes = tuple(
            (name, as_hashable(getattr(kind, "value", kind))) for name, kind in graph.attributes
        )
        return nodes, attributes
    return graph
