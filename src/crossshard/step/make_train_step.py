"""make_train_step: from a loss and an optimizer to the compiled step of all shards."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack

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
from crossshard.pipeline.stages.aggregate import FewBits, check_gather_dtype, check_weighable
from crossshard.pipeline.stages.metrics import need_local
from crossshard.pipeline.update.plan import Rest, WeightUpdate, check_weight_update
from crossshard.shards.devices import mesh_and_axes, number_of_shards
from crossshard.step.batches import check_entries
from crossshard.step.function import StepConfig
from crossshard.step.losses import loss_over as loss_of
from crossshard.step.losses.rows import LossOver, RngPer, check_rng_per
from crossshard.step.losses.virtual import InOrder, check_virtual_shards
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
        weighted as the loss is, ``"sum"``, ``"per_shard"`` as for ``None``, or a pytree prefix of
        ``aux`` with these.
      rng_per: ``"shard"``: ``rng`` is one key, another on each shard, or with
        ``loss_over="batch"`` the same for all. ``"row"``: it is keys ``[rows]``, one for each row,
        folded from the step's number and the row's place in the global batch, so that noise does
        not depend on the number of shards, nor on ``accumulate_steps``.
      sync_every: every shard, or every group of the optimizer's ``group_assignment``, is a worker
        with parameters of its own, and trains alone for so many steps. Then the mean over the
        workers of what they have moved, the pseudogradient, updates the parameters that all go on
        from (local SGD, arXiv 1805.09767). ``model(state)`` returns those.
      outer_optimizer: any Optax optimizer for that update, such as ``optax.sgd(0.7, momentum=0.9,
        nesterov=True)`` (DiLoCo, arXiv 2311.08105). By default the mean of the parameters is taken.
      outer_reduce_dtype: how pseudogradients are sent; as ``reduce_dtype``.
      sync_streaming: send the next ``1/sync_every`` of the pseudogradient in every step, beside the
        loss and its gradient, so that each number is synchronised once in ``sync_every`` steps and
        no step waits (after Streaming DiLoCo, arXiv 2501.18512). ``outer_optimizer`` must be
        elementwise.
      check_divergence: compare the shards' copies of parameters and state, bit by bit, before every
        step whose number divides by this one; never if ``None``. ``metrics["divergence"]`` is a
        ``Divergence``.
      on_divergence: ``"raise"``: a later call raises a DivergenceError, which names the shard and
        the array. ``"repair"``: the copy that more than half of the shards have is given to all,
        with a DivergenceWarning; without such a majority it is an error.
      virtual_shards: the number V of parts of the batch that have losses and random keys of their
        own, whatever the number N of shards, which divides V. Each shard computes V/N of them, one
        after the other, and their gradients are added in one fixed order: the parameters have the
        same bits for every N. See the guide, "The same bits at any number of shards".

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
    params: str = Rest.REPLICATED,
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
        it counts ``num_shards``, or else a mesh of ``num_shards`` devices.
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
        for the step, are one device's. ``aux`` and model state are kept as it returns them. What
        needs a shard's own gradient is refused. ``"shard"``: each shard's own loss of its rows is
        meant, and nothing is proven.
      weight: the number of examples or tokens of a shard: the name of the batch entry to sum,
        such as a mask, or a function from a shard's batch to float[]. The mean is then
        sum(w · g) / sum(w), and a batch whose rows do not divide is padded with zeros. It is
        compared with the sum by which the loss divides. Not beside a ``Mean``.
      has_aux: whether ``loss_fn`` returns ``(loss, aux)``.
      wrt: what is trained: an NNX filter, such as ``nnx.LoRAParam``, for a module, or a function
        of path and leaf, ``(path, leaf) -> bool``, for a pytree; all parameters if ``None``. What
        is not trained is neither differentiated nor sent, and has no optimizer state.
      model_state: for functional code whose state changes besides its parameters, such as Linen's
        ``batch_stats``: the loss is ``loss_fn(params, model_state, batch)`` and returns ``(loss,
        model_state)``, or ``(loss, (model_state, aux))`` with ``has_aux``. ``"mean"``: floating
        arrays are averaged over the shards after each step; ``"per_shard"``: each shard keeps its
        own.
      batch_axis: the axis of the rows in the arrays of the batch, as ``in_axes`` of ``jax.vmap``:
        an int, 1 for time-major ones; or a pytree prefix of the batch with ints, and ``None``
        where every shard gets what is there whole, such as a temperature or a table: scalars or
        arrays, neither split nor padded. Several processes must pass the same ones.
      replicated_entries: the names of the entries of a dict batch that are whole: a short way to
        write ``None`` for these, where ``batch_axis`` is an int.
      donate: whether a call overwrites the state that it is given. ``False`` keeps it valid, which
        takes memory for a second one.
      **options: ``aux_reduction``, ``check_divergence``, ``on_divergence``, ``rng_per``,
        ``sync_every``, ``sync_streaming``, ``outer_optimizer`` and ``virtual_shards``, see
        ``crossshard.step.StepOptions``; and stages to add: ``accumulate_steps``, ``metrics``,
        ``reduce_dtype``, ``aggregator``, ``loss_scale``, ``master_dtype``, ``ema``,
        ``nonfinite``, see ``crossshard.pipeline.Options``.

    Returns:
      A TrainStep.

    Raises:
      ArgumentError: an unknown ``weight_update`` or ``loss_over``, an impossible number of shards,
        weight with SUM, an option that ``loss_over="batch"`` or ``virtual_shards`` rules out, or a
        ``batch_axis`` without an axis, or beside ``replicated_entries`` that it contradicts.
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
    of_stages = names_of_options()
    pipeline = pipeline_of(wrapped, {x: y for x, y in options.items() if x in of_stages})
    where, axes = mesh_and_axes(num_shards, mesh, axis_name, pipeline.axis_name)
    kind = check_model_state(model_state)
    takes = ("params", "batch") if kind is None else ("params", "model_state", "batch")
    loss_fn, takes_rng = with_rng(loss_fn, takes)
    weigh, over = check_weight(weight), _check.choice("loss_over", loss_over, LossOver)
    rng_per = check_rng_per(options.get("rng_per", RngPer.SHARD), takes_rng=takes_rng)
    of_loss: dict[str, Any] = {
        "function": loss_fn,
        "takes_rng": takes_rng,
        "has_aux": has_aux,
        "weight": weigh,
        "accumulate_steps": accumulate_steps,
        "model_state": kind,
        "aux_reduction": check_aux_reduction(options.get("aux_reduction"), has_aux),
        "batch_axes": check_entries(batch_axis, replicated_entries, weigh),
        "keys_of_rows": rng_per is RngPer.ROW,
        "is_summed": pipeline.reduction is Reduction.SUM,
    }
    number = number_of_shards(where, axes)
    if pipeline.joins_groups:
        pipeline = pipeline.with_workers(number)
    pipeline = _check_pipeline(pipeline, number, weight)
    virtual = check_virtual_shards(options.get("virtual_shards"), number)
    sharding, rest = check_weight_update(weight_update), _check.choice("params", params, Rest)
    if sharding is WeightUpdate.AUTO and wrapped.weight_update is WeightUpdate.SHARDED:
        sharding = WeightUpdate.SHARDED
    gather_dtype = check_gather_dtype(options.get("gather_dtype"))
    _check_together(
        pipeline,
        other_axes=[axis for axis in where.axis_names if axis not in axes],
        params=rest,
        update=sharding,
        gather_dtype=gather_dtype,
        loss_over=over,
        virtual_shards=virtual,
        weight=weight,
        model_state=kind,
        # As it was passed: without it aux is per shard too, where there is a loss of each.
        aux_reduction=options.get("aux_reduction"),
    )
    loss = loss_of(over, same_bits=virtual, **of_loss)
    if virtual is not None:
        pipeline = pipeline.with_options(aggregator=InOrder(virtual))
    if isinstance(pipeline.aggregator, FewBits):
        pipeline.aggregator.check_axes(axes, pipeline.groups)
    sentinel = check_divergence_options(
        options.get("check_divergence"), options.get("on_divergence", "raise")
    )
    in_parts = rest is Rest.SHARDED
    if gather_dtype is not None and not in_parts:
        raise ArgumentError(
            f"gather_dtype={str(gather_dtype)!r} rounds sharded parameters as they are gathered. "
            f"Replicated ones are never gathered, so it would round the stored values. Pass "
            f"params='sharded', or, for weights of 16 bits, master_dtype='float32'."
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
        WeightUpdate.SHARDED if in_parts else sharding,
        in_parts,
        donate=_check.flag("donate", donate),
        wrt=check_wrt(wrt),
    )
    return TrainStep(config)


def _check_pipeline(pipeline: Pipeline, number: int, weight: Any) -> Pipeline:
    """The optimizer's pipeline for a step of so many shards, or an error if it does not fit."""
    if weight is not None:
        check_weighable(pipeline.reduction)
    if pipeline.accumulate is not None:
        raise ArgumentError(
            "The optimizer accumulates over calls, but a step accumulates in one program. Pass "
            "accumulate_steps to make_train_step instead."
        )
    if pipeline.groups is not None:
        pipeline.groups.check_covers(number)
    if pipeline.groups is not None and pipeline.over_all_shards:
        # One group of all shards, in any order, is the same as no groups.
        pipeline = dataclasses.replace(pipeline, groups=None)
    if pipeline.incoming not in (None, GradientStatus.LOCAL):
        raise ArgumentError(
            f"The optimizer declares incoming={str(pipeline.incoming)!r}, but a step computes the "
            f"gradients itself, and they are local. Leave incoming out."
        )
    return pipeline


# Which options rule each other out: what each needs, and what each way to step lacks.


class Needs(enum.Flag):
    """What an option needs or does, and a way to step may lack or not allow.

    LOSS: each shard has a loss of its own.
    GRADIENT: each shard's own gradient, before any sum.
    STATE: each shard, or group, keeps something of its own.
    SENT: the step itself sends gradients, or slices of parameters.
    ROUNDED: what a shard sends is rounded.
    SPLIT: XLA splits work over devices.
    WHOLE: each shard has all parameters.
    COMMON: all shards have the same parameters.
    UNTOUCHED: nothing but an update of the optimizer changes parameters.
    """

    LOSS = enum.auto()
    GRADIENT = enum.auto()
    STATE = enum.auto()
    SENT = enum.auto()
    ROUNDED = enum.auto()
    SPLIT = enum.auto()
    WHOLE = enum.auto()
    COMMON = enum.auto()
    UNTOUCHED = enum.auto()


class Option(NamedTuple):
    """An option: whether it is asked for, what it needs or does, that in words, what to write."""

    is_asked: bool
    needs: Needs
    what: str
    instead: str | None = None


class Way(NamedTuple):
    """A way to step: whether it is asked for, what it lacks or does not allow, why, what to write.

    The last is said where an option does not say it.
    """

    is_asked: bool
    lacks: Needs
    why: str
    instead: str = "Leave one of them out."


def _check_together(
    pipeline: Pipeline,
    *,
    other_axes: Sequence[str],
    params: Rest,
    update: WeightUpdate,
    gather_dtype: Any,
    loss_over: LossOver,
    virtual_shards: int | None,
    weight: Any,
    model_state: ModelState | None,
    aux_reduction: Any,
) -> None:
    """Raise if a step has an option that needs what its way to step lacks.

    The error says of both what they do, and what to write instead.
    """
    local = [name for name in pipeline.metrics if need_local((name,))]
    groups, nonfinite, dtype = pipeline.groups, pipeline.nonfinite, pipeline.reduce_dtype
    workers = pipeline.joins_groups
    ways = (
        Way(
            workers,
            Needs.COMMON | Needs.UNTOUCHED,
            "with sync_every each worker has its own parameters and trains alone",
        ),
        Way(
            params is Rest.SHARDED,
            Needs.WHOLE,
            "with params='sharded' each shard has its slice of them alone",
        ),
        Way(
            groups is not None,
            Needs.COMMON,
            f"with group_assignment {groups} each group has its own parameters",
        ),
        Way(
            virtual_shards is not None,
            Needs.GRADIENT | Needs.STATE | Needs.SENT | Needs.ROUNDED | Needs.SPLIT,
            f"with virtual_shards={virtual_shards} the parameters are not to depend on the number "
            f"of shards",
        ),
        Way(
            loss_over is LossOver.BATCH,
            Needs.LOSS | Needs.GRADIENT | Needs.STATE | Needs.SENT,
            "with loss_over='batch' there is one loss, of the whole batch",
            "Leave it out, or write loss_over='shard'.",
        ),
    )
    options = (
        Option(
            loss_over is LossOver.BATCH,
            Needs.SPLIT,
            "loss_over='batch' is one loss of all rows, whose work XLA splits in another way for "
            "each number of shards",
            "Write loss_over='rows'.",
        ),
        Option(
            workers,
            Needs.STATE,
            "sync_every lets each worker train alone, and there are as many as shards or groups",
        ),
        Option(
            params is Rest.SHARDED,
            Needs.COMMON,
            "params='sharded' splits one set of parameters over all shards",
            "Leave it out; weight_update='sharded' splits the update over the shards that have the "
            "same parameters.",
        ),
        Option(
            update is WeightUpdate.REPLICATED,
            Needs.WHOLE,
            "weight_update='replicated' lets each shard update all parameters",
            "Leave weight_update out.",
        ),
        Option(
            pipeline.optimize.master_dtype is not None,
            Needs.UNTOUCHED,
            f"master_dtype={pipeline.optimize.master_dtype} keeps parameters that a "
            f"synchronisation would not reach",
            "Pass parameters of 32 bits that the loss converts.",
        ),
        Option(
            pipeline.optimize.ema is not None,
            Needs.UNTOUCHED,
            "ema averages the parameters of one worker, which a synchronisation replaces",
            "Leave it out, and evaluate model(state), which is of all workers.",
        ),
        Option(
            weight is not None,
            Needs.LOSS,
            f"weight={_check.shown(weight)} weighs the shards' means",
            "Weigh the rows in the loss: (w * losses).sum() / w.sum() is that of all rows.",
        ),
        Option(
            pipeline.preprocess is not None,
            Needs.GRADIENT,
            "preprocess= runs on each shard's own gradient",
            "Put it before the optimizer: optax.chain(preprocess, optimizer) gets the gradient of "
            "the batch.",
        ),
        Option(
            nonfinite is not None and nonfinite.excludes_shards,
            Needs.GRADIENT,
            "nonfinite='quarantine' leaves out shards whose own gradient is not finite",
            "Write nonfinite='skip'.",
        ),
        Option(
            bool(local),
            Needs.GRADIENT,
            f"metrics has {', '.join(map(repr, local))}, of each shard's own gradient",
            "Leave it out.",
        ),
        Option(
            groups is not None,
            Needs.STATE,
            f"group_assignment {groups} gives each group of shards a loss and parameters of its "
            f"own",
        ),
        Option(
            model_state is ModelState.PER_SHARD,
            Needs.STATE,
            "model_state='per_shard' keeps one state for each shard",
            "Write model_state='mean', which keeps one for all.",
        ),
        Option(
            AuxReduction.PER_SHARD in jax.tree.leaves(aux_reduction),
            Needs.LOSS,
            "aux_reduction='per_shard' keeps what each shard's loss returns",
            "Leave it out: aux is kept as the loss returns it.",
        ),
        Option(
            pipeline.reduction is Reduction.SUM,
            Needs.LOSS,
            "reduction='sum' adds up the shards' losses",
            "Use reduction='mean', and a loss that is a sum where you want one.",
        ),
        Option(
            pipeline.aggregator is not None,
            Needs.SENT,
            f"The gradients would be summed {pipeline.sums_by.describe()}, from each shard's own",
            "Leave aggregator and reduce_dtype out.",
        ),
        Option(
            dtype is not None,
            Needs.SENT,
            f"reduce_dtype={str(dtype)!r} rounds the gradients that each shard sends",
            "Leave it out; a loss that computes in bfloat16 is differentiated in it.",
        ),
        Option(
            gather_dtype is not None,
            Needs.ROUNDED,
            f"gather_dtype={str(gather_dtype)!r} rounds the parameters that several shards send",
            "Leave one of them out; the loss may convert them to 16 bits itself.",
        ),
        Option(
            isinstance(gather_dtype, Codec),
            Needs.SENT,
            f"gather_dtype={str(gather_dtype)!r} is written in blocks by each shard",
            "Pass a dtype such as bfloat16, or loss_over='shard'.",
        ),
        Option(
            bool(other_axes),
            Needs.SPLIT,
            f"The mesh has other axes, {', '.join(other_axes)}, over which XLA splits the work of "
            f"each shard, and adds what it likes",
            "Pass a mesh of the shards alone.",
        ),
    )
    for way in filter(lambda way: way.is_asked, ways):
        for option in filter(lambda option: option.is_asked, options):
            if option.needs & way.lacks:
                raise ArgumentError(f"{option.what}; {way.why}. {option.instead or way.instead}")
