"""Fingerprint: tells a step from others, by its options and by its optimizer's state and update."""

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _jax
from crossshard._hash import sha256
from crossshard.checkpoints.manifest import Fingerprint, Update
from crossshard.gradients.nesting import inside_optimizer
from crossshard.model.layout import StateLayout
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import Stage
from crossshard.pipeline.stages.preprocess import Preprocess
from crossshard.pipeline.stages.streaming import Streaming
from crossshard.pipeline.update.moving_average import describe_decay
from crossshard.pipeline.update.optimize import takes_value
from crossshard.step.shard_loss import ShardLoss


def fingerprint(layout: StateLayout, loss: ShardLoss, params: Any) -> Fingerprint:
    """What tells a step from another one.

    Args:
      layout: the layout of the state, with the pipeline.
      loss: the loss of the step.
      params: the types of one set of parameters.
    """
    pipeline = layout.pipeline
    return Fingerprint(
        update=_of_update(pipeline.inner, params),
        preprocess=_of_stage(pipeline.preprocess, params),
        options=_options(pipeline, loss),
        jax=jax.__version__,
        optax=version("optax"),
    )


def _of_update(optimizer: Any, params: Any) -> Update:
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
    return Update(
        states=list(_types(state)),
        operations=sha256([operation for operation, _, _ in found]),
        equations=sha256([words for _, words, _ in found]),
        words=[words + _maker(kinds[words]) for words in dict.fromkeys(each[1] for each in found)],
    )


def _of_stage(stage: Stage | None, params: Any) -> Update | None:
    if stage is None:
        return None
    if isinstance(stage, Preprocess):
        return _of_update(stage.transformation, params)
    # What a stage of the user's own computes cannot be traced outside of a step.
    numbers = [f"{k}={v}" for k, v in sorted(vars(stage).items()) if type(v) in _NUMBERS]
    return Update([type(stage).__qualname__], "", sha256(numbers), numbers)


def _options(pipeline: Pipeline, loss: ShardLoss) -> dict[str, str | None]:
    """The options, in words, that change what a step does; ``None`` for those that are off."""
    outer = pipeline.outer
    options: dict[str, Any] = {
        "reduction": pipeline.reduction.name,
        "preprocess": None if pipeline.preprocess is None else "on",
        "accumulate_steps": loss.accumulate_steps,
        "loss_over='batch'": "on" if loss.is_over_batch else None,
        "weight": None if loss.weight is None else "on",
        "reduce_dtype": pipeline.reduce_dtype,
        "aggregator": None if pipeline.aggregator is None else pipeline.aggregator.describe(),
        "virtual_shards": loss.virtual_shards,
        "loss_scale": pipeline.loss_scale,
        "nonfinite": None if pipeline.nonfinite is None else pipeline.nonfinite.action,
        "master_dtype": pipeline.master_dtype,
        "sync_every": None if outer is None else outer.every,
        "sync_streaming": f"{outer.every} pieces" if isinstance(outer, Streaming) else None,
        "ema": None if pipeline.ema is None else describe_decay(pipeline.ema),
    }
    return {name: None if value is None else str(value) for name, value in options.items()}


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
