"""make_train_step: from a loss and an optimizer to the compiled step of all shards."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import jax
import optax
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike

from crossshard import _check, _mesh
from crossshard._annotations import Filter, Loss, PyTree
from crossshard.collectives.few_bits import Codec, Quantized
from crossshard.errors import ArgumentError
from crossshard.gradients.status import GradientStatus, Reduction
from crossshard.guards import check_divergence_options
from crossshard.model.model_state import ModelState, check_model_state, with_rng
from crossshard.model.models import check_wrt
from crossshard.optimizer.transformation import pipeline_of, transformation_of
from crossshard.pipeline.pipeline import Options, Pipeline, check_names, names_of_options
from crossshard.pipeline.stages.aggregate import check_weighable
from crossshard.pipeline.stages.few_bits import FewBits
from crossshard.pipeline.stages.metrics import need_local
from crossshard.pipeline.update.plan import ParamsPlacement, WeightUpdate
from crossshard.shards.devices import mesh_and_axes, number_of_shards
from crossshard.step.batches import check_entries
from crossshard.step.function import StepConfig
from crossshard.step.gather import check_gather_dtype
from crossshard.step.losses import check_virtual_shards
from crossshard.step.losses import loss_over as loss_of
from crossshard.step.losses.loss import LossOver, RngPer, check_rng_per
from crossshard.step.losses.virtual import InOrder
from crossshard.step.microbatches import AuxReduction, check_aux_reduction, check_weight
from crossshard.step.train_step import TrainStep


class StepOptions(Options, total=False):
    """The options of ``make_train_step``: those of the pipeline, and these.

    Keys:
      gather_dtype: with ``params="sharded"``, the dtype in which parameters are gathered. By
        default that in which the loss first uses them: a parameter that it converts to ``bfloat16``
        is sent in 16 bits. Another one rounds what the loss sees; ``int8``, ``int4`` and
        ``float8_e4m3fn`` are sent in blocks that share a scale.
      aux_reduction: how ``metrics["aux"]`` is reduced over the shards, or the group: ``"mean"``,
        weighted by ``weight=``, ``"sum"``, ``"per_shard"`` as for ``None``, or a pytree prefix of
        ``aux`` with these. Nobody checks that what is averaged is a mean over rows.
      rng_per: ``"shard"``: ``rng`` is one key, a different one on each shard, or with
        ``loss_over="batch"`` the same for all. ``"row"``: it is keys ``[rows]``, one for each row,
        folded from the step's number and the row's place in the global batch, so that noise does
        not depend on the number of shards, nor on ``accumulate_steps``.
      sync_every: every shard, or every group of the optimizer's ``group_assignment``, is a worker
        with parameters of its own, and trains alone for this many steps. Then the pseudogradient,
        the mean over the workers of how far they have moved, updates the parameters from which all
        continue (local SGD, arXiv 1805.09767). ``model(state)`` returns those.
      outer_optimizer: any Optax optimizer for that update, such as ``optax.sgd(0.7, momentum=0.9,
        nesterov=True)`` (DiLoCo, arXiv 2311.08105). By default the mean of the parameters is taken.
      outer_reduce_dtype: the dtype in which pseudogradients are sent; as ``reduce_dtype``.
      sync_streaming: send the next ``1/sync_every`` of the pseudogradient in every step, beside the
        loss and its gradient, so that each number is synchronised once in ``sync_every`` steps and
        no step waits (after Streaming DiLoCo, arXiv 2501.18512). ``outer_optimizer`` must be
        elementwise.
      check_divergence: compare the shards' copies of parameters and state, bit by bit, before every
        step whose number is a multiple of this one; never if ``None``. ``metrics["divergence"]`` is
        a ``Divergence``.
      on_divergence: ``"raise"``: a later call raises a DivergenceError, which names the shard and
        the array. ``"repair"``: all get the copy that more than half of the shards have, with a
        DivergenceWarning; without such a majority it is an error.
      virtual_shards: split the batch into this number V of parts, each with a loss and a random key
        of its own. There are at most V shards. Each computes its parts, V/N of them or one more,
        one after the other, and their gradients are added in one fixed order: the parameters have
        the same bits for every N. See the guide, "The same bits at any number of shards".

    >>> StepOptions(check_divergence=100, on_divergence="repair")
    {'check_divergence': 100, 'on_divergence': 'repair'}
    """

    gather_dtype: DTypeLike | None
    rng_per: Literal["shard", "row"]
    aux_reduction: PyTree
    sync_every: int | None
    outer_optimizer: optax.GradientTransformation | None
    outer_reduce_dtype: DTypeLike | Quantized | None
    sync_streaming: bool
    check_divergence: int | None
    on_divergence: Literal["raise", "repair"]
    virtual_shards: int | None


def make_train_step(
    loss_fn: Callable[..., Loss],
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh | None = None,
    num_shards: int | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    weight_update: str = WeightUpdate.AUTO,
    params: str = ParamsPlacement.REPLICATED,
    loss_over: str = LossOver.ROWS,
    weight: str | Callable[[PyTree], ArrayLike] | None = None,
    has_aux: bool = False,
    wrt: Filter | None = None,
    model_state: str | None = None,
    batch_axis: PyTree = 0,
    replicated_entries: Sequence[str] = (),
    donate: bool = True,
    **options: Unpack[StepOptions],
) -> TrainStep:
    """Build the whole training step of all shards: loss, gradients, reduction, weight update.

    ``state = step.init(params)`` returns the state, ``state, metrics = step(state, batch)`` takes
    a step and donates the state. The parameters equal those of one device with the whole batch,
    however the update is sharded.

    Args:
      loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rng)``, the mean loss of one
        shard's rows of the batch, float[]; or a ``crossshard.Mean`` of their sum and their count,
        where shards count differently. ``params`` is the model that ``init`` got: a pytree,
        an Equinox module, or an NNX module, which the loss may write to. ``rng`` is a key of this
        step and shard: the third parameter must be named like one, such as ``rng``, ``key`` or
        ``seed``; it is also passed to an optional parameter (``rng=None``, or a name that ends in
        ``rng`` or ``key``).
      optimizer: an Optax transformation, whose gradients are averaged over the shards; or a
        CrossShardOptimizer with its own reduction and groups.
      mesh: the mesh to run on, whose axes may be explicit: states and metrics lie on it, and the
        loss is traced with automatic axes. If ``None``, the mesh that ``jax.set_mesh`` has set, if
        it has ``num_shards`` shards, or else a mesh of ``num_shards`` devices.
      num_shards: the number of shards; all devices if ``None``.
      axis_name: the shard axes of the mesh; all if ``None``. Parameters that are split
        over other axes, as arrays with a ``NamedSharding``, stay so: the loss is given global
        arrays, whose work XLA splits, and may run its own ``shard_map`` over these axes.
      weight_update: ``"sharded"``: each shard updates its slice of the parameters and keeps its
        slice of the optimizer state (ZeRO-1, Xu et al. 2020, arXiv 2004.13336).
        ``"replicated"``: each updates all. ``"auto"``: sharded if the optimizer is proven to
        update each parameter from its own arrays and from scalars, and it pays.
      params: ``"sharded"``: parameters are sharded, too (FSDP): a device has 1/N of parameters,
        masters, moving average and optimizer state. A layer is gathered where the loss uses it,
        in the loop that runs over stacked layers and again in the backward pass where
        ``jax.checkpoint`` recomputes it, and its gradient is summed where the backward pass makes
        it. ``state.params`` are global arrays in their own shapes. Large parameters that ``wrt``
        leaves out are sharded too, and are gathered without a gradient.
      loss_over: ``"rows"``: the loss is given one shard's rows, and it is proven from its trace to
        be a mean over rows, sums over them and their counts in a ``Mean``, or with ``weight`` a
        ratio of two sums, so that the shards' losses make that of the whole batch; else it is a
        LossError that names the line. What the trace does not decide, such as a kernel, the first
        call checks by numbers. ``"batch"``: the loss is given the
        whole batch, as global arrays whose work XLA splits, as under ``jax.jit``. It may compare
        rows (batch norm, a contrastive loss), and its numbers, and those of its ``rng``, one key
        for the step, are one device's. ``aux`` and model state are kept as it returns them, one
        microbatch after the other. What needs a shard's own gradient is refused. ``"shard"``: each
        shard's own loss of its rows is meant, and nothing is proven.
      weight: the number of examples or tokens of a shard: the name of the batch entry to sum,
        such as a mask, or a function from a shard's batch to float[]. The mean is then
        sum(w · g) / sum(w), and a batch whose rows do not divide is padded with zeros. It is
        compared with the sum by which the loss divides. Not beside a ``Mean``.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      wrt: what is trained: an NNX filter, such as ``nnx.LoRAParam``, for a module, or a function
        of path and leaf, ``(path, leaf) -> bool``, for a pytree; all parameters if ``None``. What
        is not trained is not differentiated, its gradient is not sent, and it has no optimizer
        state.
      model_state: for functional code whose state changes besides its parameters, such as Linen's
        ``batch_stats``: the loss is ``loss_fn(params, model_state, batch)`` and returns ``(loss,
        model_state)``, or ``(loss, (model_state, aux))`` with ``has_aux``. ``"mean"``: floating
        arrays are averaged over the shards after each step; ``"per_shard"``: each shard keeps its
        own.
      batch_axis: the axis of the rows in the arrays of the batch, as ``in_axes`` of ``jax.vmap``:
        an int, 1 for time-major ones; or a pytree prefix of the batch with ints, and ``None``
        where every shard gets the whole entry, such as a temperature or a table: scalars or arrays,
        neither split nor padded. Several processes must pass the same ones.
      replicated_entries: the names of the entries of a dict batch that every shard gets whole: a
        short way to write ``None`` for these, where ``batch_axis`` is an int.
      donate: whether a call overwrites the state that it is given. ``False`` keeps it valid, which
        takes memory for a second one.
      **options: ``aux_reduction``, ``gather_dtype``, ``rng_per``, ``check_divergence``,
        ``on_divergence``, ``sync_every``, ``sync_streaming``, ``outer_optimizer``,
        ``outer_reduce_dtype`` and ``virtual_shards``, see ``crossshard.step.StepOptions``; and
        stages: ``accumulate_steps``, ``metrics``, ``reduce_dtype``, ``aggregator``, ``ema``,
        ``loss_scale``, ``master_dtype``, ``nonfinite``, see ``crossshard.pipeline.Options``.

    Returns:
      A TrainStep.

    Raises:
      ArgumentError: an unknown ``weight_update`` or ``loss_over``, an impossible number of shards,
        weight with SUM, an option that ``loss_over="batch"`` or ``virtual_shards`` rules out, or a
        ``batch_axis`` that has no axis, or that contradicts ``replicated_entries``.
      AxisError: ``axis_name`` names no axis of the mesh.
      ArgumentTypeError: not a function, not an optimizer, or not a mesh; or the loss takes arrays
        beside the batch.
      LossError: when a step of several shards is first called, with ``loss_over="rows"``: the loss
        is no such mean, or ``weight`` is not what it divides by.
      VariableError: the optimizer closes over an NNX variable, as a schedule may.

    >>> import jax.numpy as jnp, optax
    >>> loss_fn = lambda w, batch: ((batch["x"] * w - batch["y"]) ** 2).mean()
    >>> train_step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
    >>> state = train_step.init(jnp.float32(0))
    >>> state, metrics = train_step(state, {"x": jnp.ones(4), "y": jnp.ones(4)})
    >>> float(state.params), float(metrics["loss"])
    (0.20000000298023224, 1.0)
    """
    _check.function("loss_fn", loss_fn)
    wrapped = transformation_of(optimizer)
    check_names(make_train_step, options, StepOptions, of_steps=True)
    _check.flag("has_aux", has_aux)
    accumulate_steps = _check.whole_number("accumulate_steps", options.get("accumulate_steps", 1))
    pipeline = pipeline_of(wrapped, {x: y for x, y in options.items() if x in names_of_options()})
    where, axes = mesh_and_axes(num_shards, mesh, axis_name, pipeline.axis_name)
    kind = check_model_state(model_state)
    takes = ("params", "batch") if kind is None else ("params", "model_state", "batch")
    loss_fn, takes_rng = with_rng(loss_fn, takes)
    weigh, over = check_weight(weight), _check.choice("loss_over", loss_over, LossOver)
    rng_per = check_rng_per(options.get("rng_per", RngPer.SHARD), takes_rng=takes_rng)
    # What the caller passed: by default aux is per shard too, if each shard has a loss.
    aux = options.get("aux_reduction")
    reduced = check_aux_reduction(aux, has_aux)
    batch_axes = check_entries(batch_axis, replicated_entries, weigh)
    number = number_of_shards(where, axes)
    if pipeline.joins_groups:
        pipeline = pipeline.with_workers(number)
    pipeline = _check_pipeline(pipeline, number, weight)
    virtual = check_virtual_shards(options.get("virtual_shards"), number)
    sharding = _check.choice("weight_update", weight_update, WeightUpdate)
    placement = _check.choice("params", params, ParamsPlacement)
    if sharding is WeightUpdate.AUTO and wrapped.weight_update is WeightUpdate.SHARDED:
        sharding = WeightUpdate.SHARDED
    gather_dtype = check_gather_dtype(options.get("gather_dtype"))
    of_options, own = pipeline.options, pipeline.of_own_gradient
    is_coded = isinstance(gather_dtype, Codec)
    _check_together(
        {
            "sync_every": pipeline.joins_groups and options.get("sync_every"),
            "params": placement is ParamsPlacement.SHARDED and str(placement),
            "group_assignment": pipeline.groups and pipeline.groups.groups,
            "virtual_shards": virtual,
            "loss_over": over is LossOver.BATCH and str(over),
            "weight_update": sharding is WeightUpdate.REPLICATED and str(sharding),
            "master_dtype": of_options.get("master_dtype"),
            "ema": of_options.get("ema"),
            "weight": weight,
            "nonfinite": pipeline.excludes_shards and of_options["nonfinite"],
            "metrics": [x for x in pipeline.metrics if need_local((x,))] or None,
            "model_state": kind is ModelState.PER_SHARD and str(kind),
            "aux_reduction": AuxReduction.PER_SHARD in jax.tree.leaves(aux) and str(aux),
            "reduction": pipeline.reduction is Reduction.SUM and "sum",
            "aggregator": of_options.get("aggregator"),
            "reduce_dtype": of_options.get("reduce_dtype"),
            "gather_dtype": (virtual or is_coded) and gather_dtype and str(gather_dtype),
            "mesh": len(where.axis_names) > len(axes) and where.axis_names,
        }
        | {name: of_options[name] for name in own},
        own,
    )
    loss = loss_of(
        over,
        function=loss_fn,
        takes_rng=takes_rng,
        has_aux=has_aux,
        weight_fn=weigh,
        accumulate_steps=accumulate_steps,
        model_state=kind,
        aux_reduction=reduced,
        batch_axes=batch_axes,
        key_per_row=rng_per is RngPer.ROW,
        is_summed=pipeline.reduction is Reduction.SUM,
        virtual_shards=virtual,
    )
    if virtual is not None:
        pipeline = pipeline.with_options(aggregator=InOrder(virtual))
    if isinstance(pipeline.aggregator, FewBits):
        pipeline.aggregator.check_axes(axes, pipeline.groups)
    sentinel = None
    if options.keys() & {"check_divergence", "on_divergence"}:
        sentinel = check_divergence_options(
            options.get("check_divergence"), options.get("on_divergence", "raise")
        )
    params_sharded = placement is ParamsPlacement.SHARDED
    if gather_dtype is not None and not params_sharded:
        raise ArgumentError(
            f"gather_dtype={str(gather_dtype)!r} rounds sharded parameters as they are gathered, "
            f"and replicated ones never are. Pass params='sharded'."
        )
    config = StepConfig(
        loss,
        pipeline,
        wrapped.name,
        sentinel,
        gather_dtype,
        _mesh.with_automatic_axes(where),
        where,
        axes,
        WeightUpdate.SHARDED if params_sharded else sharding,
        params_sharded,
        donate=_check.flag("donate", donate),
        wrt=check_wrt(wrt),
    )
    return TrainStep(config)


def _check_pipeline(pipeline: Pipeline, number: int, weight: Any) -> Pipeline:
    """Return the optimizer's pipeline for a step of ``number`` shards; raise if it does not fit."""
    if weight is not None:
        check_weighable(pipeline.reduction)
    if pipeline.accumulate is not None:
        raise ArgumentError(
            "The optimizer accumulates over calls, but a step accumulates in one program. Pass "
            "accumulate_steps to make_train_step instead."
        )
    if pipeline.groups is not None:
        pipeline.groups.check_covers(number)
    if pipeline.incoming not in (None, GradientStatus.LOCAL):
        raise ArgumentError(
            f"The optimizer declares incoming={str(pipeline.incoming)!r}, but a step computes the "
            f"gradients itself, and they are local. Leave incoming out."
        )
    # One group of all shards, in any order, is the same as no groups.
    return dataclasses.replace(pipeline, groups=None) if pipeline.over_all_shards else pipeline


# Which options rule each other out: what each needs or does, and what each way to step lacks.


class Needs(enum.Flag):
    """What an option needs or does, and a way to step may lack or not allow."""

    LOSS = enum.auto()  # each shard has a loss of its own
    GRADIENT = enum.auto()  # each shard's own gradient, before any sum
    STATE = enum.auto()  # each shard, or group, keeps something of its own
    SENT = enum.auto()  # the step itself sends gradients, or slices of parameters
    ROUNDED = enum.auto()  # what a shard sends is rounded
    SPLIT = enum.auto()  # XLA splits work over devices
    WHOLE = enum.auto()  # each shard has all parameters
    COMMON = enum.auto()  # all shards have the same parameters
    UNTOUCHED = enum.auto()  # nothing but an update of the optimizer changes parameters


# For each option what it needs, what it does, and what to write where it is ruled out.
_OPTIONS = {
    "sync_every": (Needs.STATE, "lets each worker train alone", "Leave one of them out."),
    "params": (
        Needs.COMMON,
        "splits one set of parameters over all shards",
        "Leave params out; weight_update='sharded' splits the update over the shards that have the "
        "same parameters.",
    ),
    "group_assignment": (
        Needs.STATE,
        "gives each group of shards a loss and parameters",
        "Leave it out.",
    ),
    "loss_over": (
        Needs.SPLIT,
        "is one loss, whose work XLA splits over devices",
        "Write loss_over='rows'.",
    ),
    "weight_update": (
        Needs.WHOLE,
        "lets each shard update all parameters",
        "Leave weight_update out.",
    ),
    "master_dtype": (
        Needs.UNTOUCHED,
        "keeps parameters that a synchronisation would not reach",
        "Pass parameters of 32 bits that the loss converts.",
    ),
    "ema": (
        Needs.UNTOUCHED,
        "averages the parameters of one worker",
        "Leave it out, and evaluate model(state), which is of all workers.",
    ),
    "weight": (
        Needs.LOSS,
        "weighs the shards' means",
        "Weigh the rows in the loss: return crossshard.Mean((w * losses).sum(), w.sum()).",
    ),
    "nonfinite": (
        Needs.GRADIENT,
        "leaves out shards by their own gradient",
        "Write nonfinite='skip'.",
    ),
    "metrics": (Needs.GRADIENT, "is of each shard's own gradient", "Leave it out."),
    "model_state": (
        Needs.STATE,
        "keeps one state for each shard",
        "Write model_state='mean', which keeps one for all.",
    ),
    "aux_reduction": (
        Needs.LOSS,
        "keeps what each shard's loss returns",
        "Leave it out: aux is kept as the loss returns it.",
    ),
    "reduction": (Needs.LOSS, "adds up the shards' losses", "Use reduction='mean'."),
    "aggregator": (Needs.SENT, "sums gradients from each shard's own", "Leave it out."),
    "reduce_dtype": (
        Needs.SENT,
        "rounds the gradients that each shard sends",
        "Leave it out; a loss that computes in bfloat16 is differentiated in it.",
    ),
    "gather_dtype": (
        Needs.SENT | Needs.ROUNDED,
        "rounds the parameters that shards send",
        "Leave it out; the loss may convert them to 16 bits itself.",
    ),
    "mesh": (
        Needs.SPLIT,
        "has axes beside the shards', over which XLA splits the work of each",
        "Pass a mesh of the shards alone.",
    ),
}
# For each way to step what it lacks or does not allow, and why.
_WAYS = {
    "sync_every": (
        Needs.COMMON | Needs.UNTOUCHED,
        "each worker has its own parameters and trains alone",
    ),
    "params": (Needs.WHOLE, "each shard has its slice of the parameters alone"),
    "group_assignment": (Needs.COMMON, "each group has its own parameters"),
    "virtual_shards": (
        Needs.GRADIENT | Needs.STATE | Needs.SENT | Needs.ROUNDED | Needs.SPLIT,
        "the parameters are not to depend on the number of shards",
    ),
    "loss_over": (
        Needs.LOSS | Needs.GRADIENT | Needs.STATE | Needs.SENT,
        "there is one loss, of the whole batch",
    ),
}


def _check_together(given: dict[str, Any], own: dict[str, str]) -> None:
    """Raise if an option needs what a way to step lacks; an option not given is ``None`` or false.

    ``own`` are the options whose stages say themselves that they need each shard's own gradient.
    """
    instead = "Leave it out, or put a transformation before the optimizer, with optax.chain."
    row = lambda does: (Needs.GRADIENT, f"{does} each shard's own gradient", instead)
    options = {name: row(does) for name, does in own.items()} | _OPTIONS
    asked = [name for name, value in given.items() if value is not None and value is not False]
    shown = lambda name: f"{name}={_check.shown(given[name])}"
    for way in filter(_WAYS.__contains__, asked):
        lacks, why = _WAYS[way]
        for option in filter(options.__contains__, asked):
            needs, does, instead = options[option]
            if needs & lacks:
                raise ArgumentError(f"{shown(option)} {does}; with {shown(way)} {why}. {instead}")
