"""make_train_step: from a loss and an optimizer to the compiled step of all shards."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optax
from jax.sharding import Mesh

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.incoming import Incoming
from crossshard.optimizer.cross_shard_optimizer import (
    CrossShardOptimizer,
    pipeline_of,
    refuse_variables_behind,
)
from crossshard.pipeline.accumulate import check_accumulate_steps
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.plan import WeightUpdate, check_weight_update
from crossshard.pipeline.weigh import check_reduction
from crossshard.train_step.aux_reduction import check_aux_reduction
from crossshard.train_step.batches import check_weight
from crossshard.train_step.divergence import check_divergence_options
from crossshard.train_step.entries import check_entries
from crossshard.train_step.local import Loss
from crossshard.train_step.loss import with_rng
from crossshard.train_step.mesh import mesh_and_axes, number_of_shards
from crossshard.train_step.model_state import check_model_state
from crossshard.train_step.step_function import StepFunction
from crossshard.train_step.train_step import TrainStep
from crossshard.train_step.trained import check_wrt


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    num_shards: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    weight_update: str = WeightUpdate.AUTO,
    weight: str | Callable[[Any], Any] | None = None,
    has_aux: bool = False,
    accumulate_steps: int = 1,
    metrics: str | Iterable[str] = (),
    reduce_dtype: Any = None,
    loss_scale: Any = None,
    master_dtype: Any = None,
    ema: float | Callable[[Any], Any] | None = None,
    nonfinite: Any = None,
    wrt: Any = None,
    model_state: str | None = None,
    aux_reduction: Any = None,
    replicated_entries: Sequence[str] = (),
    check_divergence: int | None = None,
    on_divergence: str = "raise",
    donate: bool = True,
) -> TrainStep:
    """Build the whole training step of all shards: loss, gradients, reduction, weight update.

    ``state = step.init(params)`` returns the state, ``state, metrics = step(state, batch)`` takes
    a step and donates the state. The parameters equal those of one device with the whole batch,
    however the update is sharded.

    Args:
      loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rng)``, the mean loss of one
        shard's rows of the batch, float[]. ``params`` is the model that ``init`` got: a pytree,
        an Equinox module, or an NNX module, which the loss may write to. ``rng`` is a key of this
        step and shard: the third parameter must be named like one, such as ``rng``, ``key`` or
        ``seed``; it is also passed to an optional parameter (``rng=None``, or a name that ends in
        ``rng`` or ``key``).
      optimizer: an Optax transformation, whose gradients are averaged over the shards; or a
        CrossShardOptimizer with its own reduction and groups.
      mesh: the mesh to run on. If ``None``, a mesh of ``num_shards`` devices.
      num_shards: the number of shards; all devices if ``None``.
      axis_name: the axes of the mesh that count shards; all if ``None``. Parameters that lie split
        over other axes, as arrays with a ``NamedSharding``, stay so: the loss is given global
        arrays, whose work XLA splits, and may run its own ``shard_map`` over these axes.
      weight_update: ``"sharded"``: each shard updates its slice of the parameters and keeps its
        slice of the optimizer state (ZeRO-1, Xu et al. 2020, arXiv 2004.13336).
        ``"replicated"``: each updates all. ``"auto"``: sharded if the optimizer is proven
        elementwise and it pays.
      weight: the number of examples or tokens of a shard: the name of the batch entry to sum,
        such as a mask, or a function from a shard's batch to float[]. The mean is then
        sum(w · g) / sum(w), and a batch whose rows do not divide is padded with zeros.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      accumulate_steps: the number of microbatches into which each shard's rows are split. They are
        computed one after the other, with random keys and statistics as in as many small steps,
        and their mean gradient is reduced once.
      metrics: names of further metrics: ``"grad_norm"``, ``"local_grad_norm"``, ``"update_norm"``,
        ``"param_norm"``, ``"learning_rate"``, ``"noise_scale"``, ``"noise_variance"``,
        ``"noise_signal"``.
      reduce_dtype: as for a CrossShardOptimizer, like the four below.
      loss_scale: ``"dynamic"``, or a ``DynamicLossScale``.
      master_dtype: the dtype of master weights.
      ema: the decay of a moving average of the parameters, or a schedule, a function of the number
        of updates so far: ``step.model(state, ema=True)``.
      nonfinite: ``"quarantine"``, ``"skip"``, ``"raise"`` or a ``Nonfinite``. What was found is in
        ``metrics["nonfinite"]``; after ``limit`` steps in a row the next call but one raises
        ``NonfiniteError``, and the state that it was given is as it was.
      wrt: what is trained: an NNX filter, such as ``nnx.LoRAParam``, for a module, or a function
        of path and leaf, ``(path, leaf) -> bool``, for a pytree; all parameters if ``None``. What
        is not trained is neither differentiated nor sent, and has no optimizer state.
      model_state: for functional code whose state changes besides its parameters, such as Linen's
        ``batch_stats``: the loss is ``loss_fn(params, model_state, batch)`` and returns ``(loss,
        model_state)``, or ``(loss, (model_state, aux))`` with ``has_aux``. ``"mean"``: floating
        arrays are averaged over the shards after each step; ``"per_shard"``: each shard keeps its
        own.
      aux_reduction: how ``metrics["aux"]`` is reduced over the shards, or the group: ``"mean"``,
        weighted as the loss is, ``"sum"``, ``"per_shard"`` as for ``None``, or a pytree prefix of
        ``aux`` with these.
      replicated_entries: the names of the entries of a dict batch that every shard gets whole,
        such as a temperature or a table: scalars or arrays, neither split nor padded. Several
        processes must pass the same ones.
      check_divergence: compare the shards' copies of parameters and state, bit by bit, before every
        step whose number divides by this one; never if ``None``. ``metrics["divergence"]`` is a
        ``Divergence``.
      on_divergence: ``"raise"``: a later call raises a DivergenceError, which names the shard and
        the array. ``"repair"``: the copy that more than half of the shards have is given to all,
        with a DivergenceWarning; without such a majority it is an error.
      donate: whether a call overwrites the state that it is given. ``False`` keeps it valid, which
        takes memory for a second one.

    Returns:
      A TrainStep.

    Raises:
      ArgumentError: an unknown ``weight_update``, an impossible number of shards, weight with SUM.
      AxisError: ``axis_name`` names no axis of the mesh.
      ArgumentTypeError: not a function, not an optimizer, or not a mesh; or the loss takes arrays
        beside the batch.
      VariableError: the optimizer closes over an NNX variable, as a schedule may.

    >>> import jax.numpy as jnp, optax
    >>> loss_fn = lambda w, batch: ((batch["x"] * w - batch["y"]) ** 2).mean()
    >>> train_step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
    >>> state = train_step.init(jnp.float32(0))
    >>> state, metrics = train_step(state, {"x": jnp.ones(4), "y": jnp.ones(4)})
    >>> float(state.params), float(metrics["loss"])
    (0.20000000298023224, 1.0)
    """
    if not callable(loss_fn):
        raise ArgumentTypeError(f"loss_fn must be a function; got {loss_fn!r:.60}.")
    if not isinstance(optimizer, CrossShardOptimizer):
        optimizer = CrossShardOptimizer(optimizer)
    options = {
        "metrics": metrics,
        "reduce_dtype": reduce_dtype,
        "loss_scale": loss_scale,
        "master_dtype": master_dtype,
        "ema": ema,
        "nonfinite": nonfinite,
    }
    refuse_variables_behind(optimizer)
    pipeline = pipeline_of(optimizer, **options)
    where, axes = mesh_and_axes(num_shards, mesh, axis_name, pipeline.axis_name)
    kind = check_model_state(model_state)
    takes = ("params", "batch") if kind is None else ("params", "model_state", "batch")
    loss_fn, takes_rng = with_rng(loss_fn, takes)
    weigh = check_weight(weight)
    loss = Loss(
        loss_fn,
        takes_rng,
        has_aux,
        weigh,
        check_accumulate_steps(accumulate_steps),
        kind,
        check_aux_reduction(aux_reduction, has_aux),
        check_entries(replicated_entries, weigh),
    )
    pipeline = _check_pipeline(pipeline, number_of_shards(where, axes), weight)
    sentinel = check_divergence_options(check_divergence, on_divergence)
    function = StepFunction(loss, pipeline, optimizer.get_name(), sentinel)
    sharding = check_weight_update(weight_update)
    if sharding is WeightUpdate.AUTO and optimizer.weight_update is WeightUpdate.SHARDED:
        sharding = WeightUpdate.SHARDED
    return TrainStep(function, where, axes, sharding, check_wrt(wrt), donate=_check_donate(donate))


def _check_donate(donate: Any) -> bool:
    if not isinstance(donate, bool):
        raise ArgumentTypeError(f"donate must be True or False; got {donate!r:.60}.")
    return donate


def _check_pipeline(pipeline: Pipeline, number: int, weight: Any) -> Pipeline:
    """The optimizer's pipeline for a step of so many shards, or an error if it does not fit."""
    if weight is not None:
        check_reduction(pipeline.reduction)
    if pipeline.accumulate is not None:
        raise ArgumentError(
            "The optimizer accumulates over calls, but a step accumulates in one program. Pass "
            "accumulate_steps to make_train_step instead."
        )
    if pipeline.groups is not None:
        pipeline.groups.check_covers(number)
    if pipeline.over_all_shards:
        # One group of all shards, in any order, is the same as no groups.
        pipeline = dataclasses.replace(pipeline, groups=None)
    if pipeline.incoming not in (None, Incoming.LOCAL):
        raise ArgumentError(
            f"The optimizer declares incoming={str(pipeline.incoming)!r}, but a step computes the "
            f"gradients itself, and they are local. Leave incoming out."
        )
    return pipeline
