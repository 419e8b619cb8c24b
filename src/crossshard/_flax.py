"""All that Flax NNX does not export; nothing else touches it."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from flax import nnx
from flax.nnx.tracers import TraceState


def current_trace() -> TraceState:
    """The trace in force; equal to another of itself alone."""
    return TraceState()


def variable_state(variable: nnx.Variable) -> tuple[Any, TraceState]:
    """What a variable holds, and the trace that it belongs to."""
    return variable.get_raw_value(), variable._trace_state


def set_variable_state(variable: nnx.Variable, value: Any, trace: TraceState) -> None:
    """Let a variable hold a value, and belong to a trace, whichever trace is in force."""
    # NNX lets nobody but the owner of a trace write a variable; the one who hands it in is that.
    object.__setattr__(variable, "_raw_value", value)
    object.__setattr__(variable, "_trace_state", trace)


def is_writable(variable: nnx.Variable) -> bool:
    """Whether the variable belongs to the trace in force."""
    return bool(variable._can_update)


def module_trace(module: nnx.Pytree) -> TraceState:
    """The trace that a module belongs to."""
    return module._pytree__state._trace_state


def set_module_trace(module: nnx.Pytree, trace: TraceState) -> None:
    """Let a module belong to a trace."""
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
