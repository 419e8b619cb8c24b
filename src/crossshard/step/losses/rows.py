"""The loss and the gradients of a shard's rows, microbatch by microbatch."""

import dataclasses
from collections.abc import Callable
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.errors import ArgumentError
from crossshard.gradients.mean import Mean, counts_of, sums_of
from crossshard.model import model_state as model_states
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import ModelState
from crossshard.model.models import check_not_written
from crossshard.model.state import TrainState
from crossshard.pipeline.stages.accumulate import Sums, add, mean, zeros
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import VirtualShards, join
from crossshard.step.gather import AtUse
from crossshard.step.losses.loss import StepLoss, scale_of
from crossshard.step.losses.proven import carried, prepared
from crossshard.step.microbatches import (
    Counting,
    LocalResult,
    as_stored,
    aux_of_microbatches,
    chosen,
    pieces_of,
)


def compute_shard(
    loss: StepLoss, state: TrainState, batch: Any, at_use: AtUse, counts_in: Any = None
) -> LocalResult:
    """Compute the loss and gradients of the given rows, or of their microbatches."""
    counting = begin_trace(loss, state, batch, at_use, counts_in)
    return compute_part(loss, state, batch, at_use, at_use.shards.index(), counting)


def begin_trace(
    loss: StepLoss, state: TrainState, batch: Any, at_use: AtUse, counts_in: Any
) -> Counting:
    """Forget old traces, and find how a ``Mean`` is counted in the step that is traced now."""
    loss.record.traces.clear()
    pieces = loss.parts(at_use.shards.group_size) * loss.accumulate_steps
    counting = Counting(at_use.shards, pieces, counts_in)
    if pieces == at_use.shards.group_size and loss.virtual_shards is None:
        return counting
    return dataclasses.replace(counting, counts=_counts(loss, state, batch, at_use, counting))


def _counts(
    loss: StepLoss, state: TrainState, batch: Any, at_use: AtUse, counting: Counting
) -> tuple[Any, ...] | None:
    """Return the counts of a ``Mean`` over the whole batch; ``None`` if it is a number."""
    shard, (rows, whole) = at_use.shards.index(), loss.split(batch)
    number, shards = loss.accumulate_steps, at_use.shards.num_shards
    virtual = VirtualShards(loss.parts(shards), shards)

    def of_piece(rows: Any, model_state: Any, shard: Any, index: Any) -> tuple[Any, Any]:
        here, batch = dataclasses.replace(state, model_state=model_state), join(rows, whole)
        run, _ = prepared(loss, here, batch, loss.keys(here, batch, shard, index), at_use)

        def of_both(both: tuple[Any, Any]) -> tuple[Any, Any]:
            out = run(both)
            return counts_of(out.loss) if isinstance(out.loss, Mean) else (), out.model_state

        found: tuple[Any, Any] = at_use.call_on_both(of_both, state.params, state.frozen)
        return found

    def of_shard(rows: Any, shard: Any) -> Any:
        pieces = pieces_of(rows, loss.batch_axes, number, interleaved=loss.over_batch)

        first, was = jax.tree.map(lambda x: x[0], pieces), state.model_state
        carried_over = _carried(loss, state, join(first, whole), shard, at_use)

        def one(before: Any, piece: Any) -> tuple[Any, Any]:
            counts, after = of_piece(piece[1], chosen(carried_over, before, was), shard, piece[0])
            return as_stored(after, before), jnp.stack(counts)

        return lax.scan(one, was, (jnp.arange(number), pieces))[1].sum(0)

    def of_parts(rows: Any) -> Any:
        count = virtual.most
        of_one = lambda given: of_shard(given[1], virtual.first(shard) + given[0])
        return lax.map(of_one, (jnp.arange(count), pieces_of(rows, loss.batch_axes, count)))

    with shard_context(shards, axis_name=at_use.shards.axes):
        pieces = pieces_of(rows, loss.batch_axes, loss.pieces(shards))
        of_one = jax.tree.map(lambda x: x[0], pieces)
        types, _ = jax.eval_shape(of_piece, of_one, state.model_state, shard, jnp.int32(0))
        if not types:
            return None
        if loss.virtual_shards is None:
            return counting.over_shards(_pruned(of_shard, rows, shard))
        return counting.in_order(_pruned(of_parts, rows), virtual)


def _carried(
    loss: StepLoss, state: TrainState, batch: Any, shard: Any, at_use: AtUse
) -> list[bool]:
    """Return, for each array of the model state, whether a microbatch goes on from the last one."""
    return carried(loss, state, batch, loss.keys(state, batch, shard, jnp.int32(0)), at_use)


def compute_part(
    loss: StepLoss, state: TrainState, batch: Any, at_use: AtUse, shard: Any, counting: Counting
) -> LocalResult:
    """Compute the loss and gradients of the shard, or the virtual one, with this index."""
    number, (rows, whole) = loss.accumulate_steps, loss.split(batch)

    def compute(at_use: AtUse, rows: Any, model_state: Any, index: Any) -> LocalResult:
        here = dataclasses.replace(state, model_state=model_state)
        return _compute_rows(loss, here, join(rows, whole), at_use, shard, index, counting)

    if number == 1:
        return compute(at_use, rows, state.model_state, 0)

    # The rows divide evenly: this was checked when the batch was placed.
    pieces = pieces_of(rows, loss.batch_axes, number, interleaved=loss.over_batch)
    first, was = jax.tree.map(lambda x: x[0], pieces), state.model_state
    with shard_context(at_use.shards.num_shards, axis_name=at_use.shards.axes):
        carried_over = _carried(loss, state, join(first, whole), shard, at_use)
    # A state that is averaged over the shards is averaged over microbatches, too.
    kind = loss.model_state
    averages = kind is ModelState.MEAN and not any(carried_over)

    def after_one(before: Any, found: LocalResult) -> Any:
        after = as_stored(found.model_state, was)
        if not averages:
            return after
        own = loss.weight_of_aux_and_state(found.weight, found.terms)
        return model_states.add(before, after, own)

    # With replicated parameters each shard adds up full gradients. Only the last microbatch may
    # sum them over the shards, in the backward pass of a loop; a trace shows whether it does.
    at_use_in_scan, sums_in_loops = at_use, False
    if not at_use.params_sharded:
        at_use_in_scan = dataclasses.replace(
            at_use, sums_later=True, residuals=None, measures=False
        )
        seen = list[bool]()
        look = lambda *args: seen.append(any(compute(at_use, *args).early))
        jax.eval_shape(look, first, state.model_state, jnp.int32(0))
        sums_in_loops = seen[0]
    in_scan = at_use_in_scan.types_of_gradients(state.params)
    zero, early = zeros(in_scan), at_use_in_scan.always_early

    def one(carry: Any, piece: Any) -> tuple[Any, Any]:
        sums, model_state = carry
        index, rows = piece
        found = compute(at_use_in_scan, rows, chosen(carried_over, model_state, was), index)
        sums = add(sums, found.values, found.loss, found.weight, early)
        others = found.aux, found.terms, found.weight
        return (sums, after_one(model_state, found)), others

    numbered = jnp.arange(number), pieces
    before = zero, model_states.no_sum(was) if averages else was
    residuals = norm = None
    if not sums_in_loops:
        (sums, model_state), (aux, terms, weights) = lax.scan(one, before, numbered)
        values, value = mean(sums, early, weighted=weights is not None)
    else:
        but_last = jax.tree.map(lambda x: x[:-1], numbered)
        (sums, model_state), others = lax.scan(one, before, but_last)
        index, rows = jax.tree.map(lambda x: x[-1], numbered)
        # The backward pass adds gradients of the scaled loss to them, and returns the mean.
        last = dataclasses.replace(at_use, before=_scaled(sums, scale_of(state)))
        end = compute(last, rows, chosen(carried_over, model_state, was), index)
        early, residuals, norm = end.early, end.residuals, end.squared_norm
        own = chosen(early, jax.tree.map(jnp.zeros_like, sums[0]), end.values)
        sums = add(sums, own, end.loss, end.weight)
        values, value = mean(sums)
        values = chosen(early, end.values, values)
        model_state = after_one(model_state, end)
        append = lambda first, end: jnp.concatenate([first, jnp.asarray(end)[None]])
        of_end = end.aux, end.terms, end.weight
        aux, terms, weights = jax.tree.map(append, others, of_end)
    total = None if weights is None else sums[2]
    own = loss.weight_of_aux_and_state(weights, terms)
    aux = aux_of_microbatches(loss.aux_reduction, aux, own)
    if averages:
        total_of_state = None if own is None else own.sum(0)
        model_state = model_states.mean(model_state, was, total_of_state, number)
    terms = jax.tree.map(lambda x: x.sum(0), terms)
    return LocalResult(value, values, total, model_state, aux, terms, early, residuals, norm)


def _compute_rows(
    loss: StepLoss,
    state: TrainState,
    batch: Any,
    at_use: AtUse,
    shard: Any,
    index: Any,
    counting: Counting,
) -> LocalResult:
    """Compute the loss and gradients of one microbatch of a shard, which has the ``index``."""
    shards, keys = at_use.shards, loss.keys(state, batch, shard, index)

    def loss_of(params: Any, *overwritten: Any) -> tuple[Any, Any]:
        given = model_states.overwrite(state.model_state, overwritten)
        here = dataclasses.replace(state, model_state=given)
        of_both = lambda frozen: loss_of_both((params, frozen), here)
        found: tuple[Any, Any] = at_use.call_on_frozen(of_both, state.frozen)
        return found

    def loss_of_both(both: tuple[Any, Any], here: TrainState) -> tuple[Any, Any]:
        out = run(both, state=here)
        check_not_written(out.params_after, both, lambda both: run(both, state=here).params_after)
        loss.record.returns_mean = isinstance(out.loss, Mean)
        if not isinstance(out.loss, Mean):
            return out.loss, (out.model_state, out.aux, None)
        # A ratio that ``prepared`` makes a Mean of has its weight in the last count, and none here.
        if weight is not None:
            raise ArgumentError(
                "The loss returns a Mean, which says what its rows count, and weight= says it "
                "again. Leave weight out."
            )
        if loss.is_summed:
            raise ArgumentError(
                "The loss returns a Mean, which is a mean over the whole batch, and the "
                "optimizer's reduction is SUM, which adds up the losses of shards. Use "
                "reduction='mean'."
            )
        return counting.of_piece(out.loss), (out.model_state, out.aux, sums_of(out.loss))

    with shard_context(shards.num_shards, axis_name=shards.axes):
        run, weight = prepared(loss, state, batch, keys, at_use)
        if loss.model_state is ModelState.MEAN and not loss.over_batch:
            types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)
            rows, whole = loss.split(batch)
            of_own = lambda own, both: run(both, join(own[0], whole), own[1]).model_state
            model_states.check_same_on_shards(state.model_state, of_own, (rows, keys), types)
        with jax.named_scope("loss"):
            overwritten = model_states.overwritten(state.model_state)
            scale = scale_of(state)
            out, gradients, early, of_others, residuals_and_norm = at_use.value_and_grad(
                loss_of, state.params, weight, scale, overwritten
            )
    value, (after, aux, terms) = out
    if overwritten:
        # The backward pass returned their next values divided by the loss scale; undo that.
        unscaled = [x if scale is None else x * scale for x in of_others]
        after = model_states.overwrite(after, unscaled)
    own = loss.weight_of_aux_and_state(weight, terms)
    if own is not None:
        changed = loss.record.changed_by_rows
        after = model_states.unless_weightless(own, after, state.model_state, changed)
    return LocalResult(
        jnp.asarray(value), gradients, weight, after, aux, terms, early, *residuals_and_norm
    )


@final
@dataclasses.dataclass(frozen=True)
class RowsLoss(StepLoss):
    """The loss of each shard's rows."""

    can_rerun = True

    def enter(
        self, layout: StateLayout, state: TrainState, batch: Any, at_use: AtUse
    ) -> tuple[Any, Any, Any]:
        """Return the batch, of which each shard gets its rows, and its specs."""
        return batch, self.batch_axes.specs(batch, layout.axes), None

    def local(
        self, before: TrainState, given: Any, at_use: AtUse, counts_in: Any = None
    ) -> tuple[LocalResult, Any]:
        """Compute the loss and gradients of the shard's rows."""
        before, at_use, like = self.prepare_params(before, at_use)
        return compute_shard(self, before, given, at_use, counts_in), like


def _pruned(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, without the parts of its jaxpr that its results do not need."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*args)
    run = jaxpr_as_fun(_jax.without_unread(jaxpr))
    return jax.tree.unflatten(jax.tree.structure(types), run(*jax.tree.leaves(args)))


def _scaled(sums: Sums, scale: Any) -> Sums:
    """Multiply the summed gradients of microbatches by the loss scale."""
    values, loss, weight = sums
    one = lambda x: x * scale.astype(x.dtype) if is_inexact(x) else x
    return sums if scale is None else (jax.tree.map(one, values), loss, weight)
