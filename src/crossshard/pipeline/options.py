"""Options: the stages that a user may ask for, declared once for all ways to use the package."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypedDict

import jax
from jax.typing import ArrayLike, DTypeLike

from crossshard.collectives.few_bits import Quantized
from crossshard.pipeline.aggregators import Aggregator
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
