"""Fingerprint: tells an optimizer from others, by its state and its update's operations."""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _jax
from crossshard.gradients.nesting import inside_optimizer
from crossshard.pipeline.optimize import takes_value
from crossshard.train_step.layout import StateLayout


def fingerprint(layout: StateLayout, params: Any) -> dict[str, Any]:
    """What tells an optimizer from another one.

    Numbers are no part of it: a run may go on with another learning rate.

    Args:
      layout: the layout of the state, with the pipeline.
      params: the types of one set of parameters.

    Returns:
      The ``"states"`` of which its own consists, and a hash of the ``"operations"`` of its update,
      which only the same ``"jax"`` and ``"optax"`` trace alike.
    """
    optimizer = layout.pipeline.optimizer

    def update(gradients: Any, state: Any, params: Any, value: Any) -> Any:
        extra_args = {"value": value} if takes_value(optimizer) else {}
        return optimizer.update(gradients, state, params, **extra_args)

    with inside_optimizer():
        state = jax.eval_shape(optimizer.init, params)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        jaxpr = jax.make_jaxpr(update)(params, state, params, loss)
    text = "\n".join(_operations(jaxpr))
    return {
        "states": list(_types(state)),
        "operations": hashlib.sha256(text.encode()).hexdigest(),
        "jax": jax.__version__,
        "optax": version("optax"),
    }


def different_states(written: dict[str, Any], own: dict[str, Any]) -> str | None:
    """How the optimizers' states differ in kind; ``None`` if they do not."""
    if written["states"] == own["states"]:
        return None
    of_written, of_own = (", ".join(each["states"]) or "no state" for each in (written, own))
    return f"its optimizer's state is {of_written}, and this one's {of_own}"


def different_operations(written: dict[str, Any], own: dict[str, Any]) -> str | None:
    """That the optimizers' updates differ; ``None`` if they do not, or it cannot be told."""
    if any(written[library] != own[library] for library in ("jax", "optax")):
        return None
    if written["operations"] == own["operations"]:
        return None
    return (
        "its optimizer has a state of the same kind, but the operations of its update differ from "
        "those of this one"
    )


def _operations(jaxpr: Any) -> Iterator[str]:
    for equation in _jax.opened(jaxpr).eqns:
        yield f"{equation.primitive.name} {[str(out.aval) for out in equation.outvars]}"
        for inner in _jax.jaxprs_within(equation):
            yield from _operations(inner)


def _types(node: Any) -> Iterator[str]:
    """The names of the types of a pytree's nodes, without Python's own containers."""
    found = jax.tree_util.default_registry.flatten_one_level(node)
    if found is None or node is None:
        return
    if type(node).__module__ != "builtins":
        yield type(node).__name__
    for child in found[0]:
        yield from _types(child)
