"""Options: the stages that a user may ask for, declared once for all ways to use the package."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from crossshard import _check
from crossshard.collectives.codec import DTYPES, Codec
from crossshard.errors import ArgumentError
from crossshard.pipeline.aggregators.aggregator import Aggregator
from crossshard.pipeline.aggregators.few_bits import FewBits, Quantized
from crossshard.pipeline.stages.loss_scale import DynamicLossScale
from crossshard.pipeline.stages.nonfinite import Nonfinite


class Options(TypedDict, total=False):
    """The options that ``CrossShardOptimizer`` and ``make_train_step`` share.

    Keys:
      accumulate_steps: the number of microbatches whose mean gradient is reduced once, for one
        update. In ``make_train_step`` each shard's rows are split into them and computed one after
        the other, with random keys and statistics as in as many small steps. In an optimizer they
        are calls of ``update``, of which all but the last send a count alone, and return zeros.
      metrics: names of further metrics of each update: ``"grad_norm"``, ``"local_grad_norm"``,
        ``"update_norm"``, ``"param_norm"``, ``"learning_rate"``, ``"noise_scale"``,
        ``"noise_variance"``, ``"noise_signal"``. A step returns them; an optimizer's state holds
        them in ``state.metrics``.
      reduce_dtype: the dtype in which gradients are sent: ``bfloat16`` halves the bytes, ``int8``
        and ``float8_e4m3fn`` take a quarter of them, ``int4`` an eighth, with error feedback; see
        ``Quantized`` for other ways. They are added in float32. With several shard axes it may be
        a dict from axis to dtype, ``{"host": "int8"}``: the sum is taken along the last axis
        first, and axes that are left out have float32.
      aggregator: what sums the gradients over the shards, in place of XLA: an ``Aggregator`` of
        your own.
      loss_scale: ``"dynamic"``, or a ``DynamicLossScale``: updates that are not finite are skipped.
        ``make_train_step`` and ``compute_gradients`` scale the loss themselves; for ``update``
        pass ``loss_scale=state.loss_scale`` to ``crossshard.value_and_grad``.
      master_dtype: ``float32``: the state holds the parameters in this dtype too, and those of 16
        bits are rounded from them; a parameter that is set in between becomes its master.
      ema: the decay of a moving average of the parameters, such as 0.999, or a schedule, a
        function of the number of updates so far. ``step.model(state, ema=True)``, or
        ``optax.tree.get(state, "ema")``.
      nonfinite: what to do about a gradient that is NaN or infinite: ``"quarantine"`` leaves the
        shard out of the mean, ``"skip"`` leaves parameters and state as they were, on all shards,
        and ``"raise"``, in ``make_train_step`` alone, ends the run. ``metrics["nonfinite"]``, or
        ``state.nonfinite``, names the shard and the leaf. See ``Nonfinite``.

    >>> from crossshard import CrossShardOptimizer
    >>> import optax
    >>> options = Options(reduce_dtype="bfloat16", nonfinite="skip")
    >>> CrossShardOptimizer(optax.sgd(0.1), **options).describe()
    'local gradient → mean over all shards in bfloat16 → skip if not finite → update'
    """

    accumulate_steps: int
    metrics: str | Iterable[str]
    reduce_dtype: DTypeLike | Quantized | Mapping[str, DTypeLike | Quantized | None] | None
    aggregator: Aggregator | None
    loss_scale: str | DynamicLossScale | None
    master_dtype: DTypeLike | None
    ema: float | Callable[[jax.Array], ArrayLike] | None
    nonfinite: str | Nonfinite | None


# The dtypes that an option takes, and in words.
_DTYPES = {
    "gather_dtype": (
        ("bfloat16", "float16", "float32", "float64"),
        "bfloat16, float16, float32 or float64, the dtype in which parameters are sent, or int8, "
        "int4 or float8_e4m3fn, in blocks that share a scale",
    ),
    "reduce_dtype": (
        ("bfloat16", "float32"),
        "bfloat16, float32 for gradients of 64 bits, int8, int4, float8_e4m3fn, a Quantized, or a "
        "dict of these by axis; float16 would make gradients below 6e-8 zero",
    ),
    "master_dtype": (
        ("float32", "float64"),
        "float32 or float64, the dtype in which weights of 16 bits are also kept",
    ),
}


def check_dtype(name: str, given: Any) -> Any:
    """The dtype that an option gives; ``None`` without one."""
    among, words = _DTYPES[name.removeprefix("outer_")]
    if given is None or _name_of(given) in among:
        return None if given is None else jnp.dtype(given)
    raise ArgumentError(f"{name} must be {words}; got {_check.shown(given)}.")


def check_reduce_dtype(
    given: Any, name: str = "reduce_dtype", *, by_axis: bool = True
) -> FewBits | Any:
    """The dtype in which gradients are sent, or what sends them in few bits.

    Args:
      given: the argument.
      name: its name.
      by_axis: whether each axis may have one of its own.

    Raises:
      ArgumentError: it is none.
    """
    if not isinstance(given, Mapping):
        wire = _wire_of(given, name)
        return FewBits(((None, wire),)) if isinstance(wire, Quantized) else wire
    if not by_axis:
        raise ArgumentError(f"{name} is one for all axes; got {_check.shown(given)}.")
    if not given or not all(isinstance(axis, str) for axis in given):
        raise ArgumentError(
            f"{name} as a dict has the names of shard axes, such as {{'host': 'int8'}}; got "
            f"{_check.shown(given)}."
        )
    return FewBits(tuple((axis, _wire_of(wire, name)) for axis, wire in given.items()))


def _wire_of(given: Any, name: str) -> Any:
    if isinstance(given, Quantized):
        return given
    dtype = _name_of(given)
    return Quantized(dtype) if dtype in DTYPES else check_dtype(name, given)


def _name_of(dtype: Any) -> str | None:
    # Nothing else that has a dtype: the array may have been meant for something else.
    if not isinstance(dtype, str | type | np.dtype):
        return None
    try:
        return str(jnp.dtype(dtype).name)
    except (TypeError, ValueError):  # of a word that is none, or that cannot be encoded
        return None


def check_gather_dtype(given: Any) -> Any:
    """The dtype in which parameters are sent, or the codec; ``None`` for their own.

    Raises:
      ArgumentError: it is none.
    """
    name = _name_of(given)
    return Codec(name) if name in DTYPES else check_dtype("gather_dtype", given)
