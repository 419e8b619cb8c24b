"""Fingerprint: tells a step from others, by its options and by its optimizer's state and update."""

import dataclasses
import enum
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Literal

from crossshard import _jax
from crossshard._hash import sha256
from crossshard.checkpoints.manifest import Fingerprint, Update
from crossshard.gradients.nesting import inside_optimizer
from crossshard.gradients.status import Reduction
from crossshard.jaxprs.walk import constants, jaxprs_within, opened
from crossshard.pipeline.stage import Stage
from crossshard.pipeline.stages.aggregate import Aggregator
from crossshard.pipeline.stages.preprocess import Preprocess
from crossshard.pipeline.update.optimize import takes_value
from crossshard.step.function import StepConfig
from crossshard.step.losses import written
from crossshard.step.state import OPTIMIZER, PREPROCESS


def fingerprint(config: StepConfig, params: Any) -> Fingerprint:
    """What tells a step from another one, given the types of one set of parameters."""
    options = compared(config).items()
    told = [each for name, value in options for each in _told(name, value, params)]
    updates = {name: each for name, each in told if isinstance(each, Update)}
    words = {name: each for name, each in told if not isinstance(each, Update)}
    return Fingerprint(updates, words, jax.__version__, version("optax"))


def compared(config: StepConfig) -> dict[str, Any]:
    """The options that a restore compares, by what the user calls them.

    The others change nothing of what a state becomes: where arrays are, which a restore changes,
    what only looks, and names. Or they are the user's code, with what it takes and returns. Or the
    manifest or the arrays tell, such as the groups, and what is trained.
    """
    pipeline = config.pipeline
    return {
        **written(config.loss),
        **pipeline.written(),
        OPTIMIZER: pipeline.inner,
        "reduction": pipeline.reduction,
        "gather_dtype": config.gather_dtype,
    }


def _told(name: str, value: Any, params: Any) -> Iterator[tuple[str, str | Update | None]]:
    """An option in words, and what it consists of, by their names; ``None`` if it is off."""
    if isinstance(value, optax.GradientTransformation):
        yield name, _of_update(value, params)
    elif name == PREPROCESS and value is not None:
        yield name, "on"
        yield name, _of_stage(value, params)
    elif name == "weight" and callable(value) and not _is_ours(value):
        # One function may be made in several places, and so have several names.
        yield name, "a function"
    elif isinstance(value, Aggregator):
        told, kind = str(value.describe()), type(value).__name__
        is_told = _is_ours(value) or kind in told
        yield name, (told if is_told else f"{told} of {kind}") or None
        # Attributes that are no fields may count calls, or tell a process from others.
        for field in () if _is_ours(value) else _fields(value):
            if field.compare:
                yield f"{name}.{field.name}", _in_words(getattr(value, field.name))
    elif (_is_ours(value) or isinstance(value, Stage)) and _fields(value):
        # One says nonfinite="skip", and Nonfinite("skip", max_consecutive=5).
        first, *others = _fields(value)
        yield from _told(name, getattr(value, first.name), params)
        for field in others:
            yield from _told(f"{name}.{field.name}", getattr(value, field.name), params)
    else:
        yield name, _in_words(value)


def _fields(value: Any) -> tuple[Any, ...]:
    return dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "crossshard"


def _in_words(value: Any) -> str | None:
    if value is None or isinstance(value, bool):
        return "on" if value else None
    if isinstance(value, Reduction):
        return value.name
    if isinstance(value, dict):
        return ", ".join(
            sorted(f"{_in_words(key)}: {_in_words(each)}" for key, each in value.items())
        )
    if isinstance(value, tuple | list):
        return ", ".join(str(_in_words(each)) for each in value)
    if isinstance(value, _PLAIN):
        return str(value)
    # An address, which the text of an object may have, differs between processes.
    return f"by {getattr(value, '__qualname__', type(value).__name__)}"


def _of_update(optimizer: Any, params: Any) -> Update:
    loss = {"value": jax.ShapeDtypeStruct((), jnp.float32)} if takes_value(optimizer) else {}
    with inside_optimizer():
        state = jax.eval_shape(optimizer.init, params)
        jaxpr = jax.make_jaxpr(optimizer.update)(params, state, params, **loss)
    found = list(_equations(jaxpr))
    # Where it comes from is asked once for each, since it takes longer than all else.
    kinds = {words: equation for _, words, equation in found}
    return Update(
        states=list(_types(state)),
        operations=sha256([operation for operation, _, _ in found]),
        equations=sha256([words for _, words, _ in found]),
        words=[words + _maker(equation) for words, equation in kinds.items()],
    )


def _of_stage(stage: Stage, params: Any) -> Update:
    if isinstance(stage, Preprocess):
        return _of_update(stage.transformation, params)
    # What a stage of the user's own computes cannot be traced outside of a step.
    numbers = [f"{k}={v}" for k, v in sorted(vars(stage).items()) if type(v) in _NUMBERS]
    return Update([type(stage).__qualname__], "", sha256(numbers), numbers)


_NUMBERS = (int, float)
# A bool is an int.
_PLAIN = (*_NUMBERS, complex, str, enum.Enum, np.generic, np.dtype)


def _equations(jaxpr: Any) -> Iterator[tuple[str, str, Any]]:
    """Each equation without its numbers, in words, with them, and itself."""
    body = opened(jaxpr)
    values = dict(zip(body.constvars, constants(jaxpr), strict=True))
    for equation in body.eqns:
        name, types = equation.primitive.name, [str(out.aval) for out in equation.outvars]
        given = [
            _number(atom.val if isinstance(atom, Literal) else values.get(atom))
            for atom in equation.invars
        ]
        told = [f"{k}={v}" for k, v in equation.params.items() if type(v) in _NUMBERS]
        if any(given):
            told = [each or "x" for each in given] + told
        numbers = f"({', '.join(told)})" if told else ""
        dtypes = "/".join(dict.fromkeys(each.split("[")[0] for each in types))
        yield f"{name} {types}", f"{name}{numbers} of {dtypes}", equation
        for inner in jaxprs_within(equation):
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
