"""Fingerprint: tells a step from others, by its options and by its optimizer's state and update."""

import hashlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _jax
from crossshard.gradients.nesting import inside_optimizer
from crossshard.pipeline.moving_average import describe_decay
from crossshard.pipeline.optimize import takes_value
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.preprocess import Preprocess
from crossshard.pipeline.stage import Stage
from crossshard.train_step.layout import StateLayout
from crossshard.train_step.local import Loss


def fingerprint(layout: StateLayout, loss: Loss, params: Any) -> dict[str, Any]:
    """What tells a step from another one, as far as the meaning of its state depends on it.

    Args:
      layout: the layout of the state, with the pipeline.
      loss: the loss of the step.
      params: the types of one set of parameters.

    Returns:
      Of the wrapped optimizer, without master weights and moving average: the ``"states"`` of which
      its own consists; a hash of the ``"operations"`` of its update, and one of its
      ``"equations"``, which are these with their numbers; and each kind of equation once, as
      ``"words"``. Only the same ``"jax"`` and ``"optax"`` trace it alike. The same of
      ``"preprocess"``, and what other ``"options"`` are.
    """
    pipeline = layout.pipeline
    return {
        **_of_update(pipeline.inner, params),
        "jax": jax.__version__,
        "optax": version("optax"),
        "preprocess": _of_stage(pipeline.preprocess, params),
        "options": _options(pipeline, loss),
    }


def _of_update(optimizer: Any, params: Any) -> dict[str, Any]:
    def update(gradients: Any, state: Any, params: Any, value: Any) -> Any:
        extra_args = {"value": value} if takes_value(optimizer) else {}
        return optimizer.update(gradients, state, params, **extra_args)

    with inside_optimizer():
        state = jax.eval_shape(optimizer.init, params)
        loss = jax.ShapeDtypeStruct((), jnp.float32)
        jaxpr = jax.make_jaxpr(update)(params, state, params, loss)
    found = list(_equations(jaxpr))
    # Where it comes from is asked once for each, since it takes longer than all else.
    kinds = {words: equation for _, words, equation in found}
    return {
        "states": list(_types(state)),
        "operations": _sha256([operation for operation, _, _ in found]),
        "equations": _sha256([words for _, words, _ in found]),
        "words": [
            words + _maker(kinds[words]) for words in dict.fromkeys(each[1] for each in found)
        ],
    }


def _of_stage(stage: Stage | None, params: Any) -> dict[str, Any] | None:
    if stage is None:
        return None
    if isinstance(stage, Preprocess):
        return _of_update(stage.transformation, params)
    # What a stage of the user's own computes cannot be traced outside of a step.
    numbers = [f"{k}={v}" for k, v in sorted(vars(stage).items()) if type(v) in _NUMBERS]
    return {
        "states": [type(stage).__qualname__],
        "operations": "",
        "equations": _sha256(numbers),
        "words": numbers,
    }


def _options(pipeline: Pipeline, loss: Loss) -> dict[str, str | None]:
    """The options, in words, that change what a step does; ``None`` for those that are off."""
    options: dict[str, Any] = {
        "reduction": pipeline.reduction.name,
        "accumulate_steps": loss.accumulate_steps,
        "weight": None if loss.weight is None else "on",
        "reduce_dtype": pipeline.reduce_dtype,
        "loss_scale": pipeline.loss_scale,
        "nonfinite": None if pipeline.nonfinite is None else pipeline.nonfinite.action,
        "master_dtype": pipeline.master_dtype,
        "ema": None if pipeline.ema is None else describe_decay(pipeline.ema),
    }
    return {name: None if value is None else str(value) for name, value in options.items()}


def _sha256(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


_NUMBERS = (int, float)


def _equations(jaxpr: Any) -> Iterator[tuple[str, str, Any]]:
    """Each equation without its numbers, in words, with them, and itself."""
    opened = _jax.opened(jaxpr)
    constants = dict(zip(opened.constvars, _jax.constants(jaxpr), strict=True))
    for equation in opened.eqns:
        name, types = equation.primitive.name, [str(out.aval) for out in equation.outvars]
        given = [
            _number(atom.val if _jax.is_literal(atom) else constants.get(atom))
            for atom in equation.invars
        ]
        told = [f"{k}={v}" for k, v in equation.params.items() if type(v) in _NUMBERS]
        if any(given):
            told = [each or "x" for each in given] + told
        numbers = f"({', '.join(told)})" if told else ""
        dtypes = "/".join(dict.fromkeys(each.split("[")[0] for each in types))
        yield f"{name} {types}", f"{name}{numbers} of {dtypes}", equation
        for inner in _jax.jaxprs_within(equation):
            yield from _equations(inner)


def _maker(equation: Any) -> str:
    maker = _jax.source_of(equation).rpartition(", ")[0]
    return f" in {maker}" if maker else ""


def _number(value: Any) -> str:
    """A number in words; empty if it is none."""
    dtype = getattr(value, "dtype", None)
    if value is None or (dtype is None and type(value) not in (*_NUMBERS, bool)):
        return ""
    if np.shape(value) or (dtype is not None and jnp.issubdtype(dtype, jax.dtypes.extended)):
        return ""
    found = np.asarray(value).item()
    # As many digits as 32 bits have, so that 0.9 is written as such.
    return f"{found:.7g}" if isinstance(found, float) else str(found)


def _types(node: Any) -> Iterator[str]:
    """The names of the types of a pytree's nodes, without Python's own containers."""
    found = jax.tree_util.default_registry.flatten_one_level(node)
    if found is None or node is None:
        return
    if type(node).__module__ != "builtins":
        yield type(node).__name__
    for child in found[0]:
        yield from _types(child)
