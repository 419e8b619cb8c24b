"""By numbers: whether a loss of several shards is the mean of theirs, and what it divides by."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from crossshard import _jax, _mesh
from crossshard._check import is_inexact
from crossshard.errors import LossError
from crossshard.gradients.mean import Mean, per_row
from crossshard.jaxprs.kernels import Assumptions
from crossshard.jaxprs.mean_over_rows import Finding, facts_of_inputs, followed
from crossshard.jaxprs.row_facts import OverRows
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.stages.accumulate import zeros
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import join, take_rows
from crossshard.shards.random_streams import is_key, quiet_keys
from crossshard.step.function import StepConfig, to_read
from crossshard.step.gather import AtUse
from crossshard.step.losses.batch import on_all_rows
from crossshard.step.losses.rows import Keys, StepLoss, value_and_grad, with_frozen
from crossshard.step.microbatches import LocalResult, pieces_of, weight_of
from crossshard.step.operations import Trial, precision_of
from crossshard.step.over_rows import (
    WAYS_ON,
    Arguments,
    Divisor,
    Doubt,
    another_sum,
    are_equal,
    finding_of,
)

# Sums over rows in another order differ by less, in float32; in coarser floats at least by a unit
# of their precision, and at most by so many.
_TOLERANCE, _COARSEST = 1e-4, 16


# The bytes that the loss of the whole batch may take beyond twice those of a shard's rows: XLA
# cannot split all that it does.
_SPARE = 1 << 26


def check_by_numbers(
    config: StepConfig, layout: StateLayout, state: TrainState, batch: Any, doubt: Doubt
) -> None:
    """Raise unless numbers show that the loss is a mean over rows, which its trace does not.

    If only some operations are in doubt, these are tried alone. Else the loss of the whole batch,
    whose work XLA splits, and its gradient are compared with the mean of all shards' and
    microbatches'. Where there is none, as it names the axis of the shards or takes too much memory,
    each shard computes the loss, and its gradient, of half of its rows, of half of the next
    shard's, and of both together. Noise is switched off. If there are several processes, all of
    them make this call.

    Args:
      config: the step.
      layout: the layout of the state.
      state: the state, which stays valid.
      batch: the batch, on the devices.
      doubt: what its trace does not decide.
    """
    given = jax.tree.map(lambda x: _mesh.on_mesh(x, layout.mesh), (state, batch))
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        only_operations = doubt.finding.kind is not OverRows.UNDECIDED
        if not (only_operations and _check_operations(config, layout, given, doubt)):
            _check_loss(config, layout, _widened(config, layout, given), doubt)


def _widened(config: StepConfig, layout: StateLayout, given: Any) -> Any:
    """The same with floats of 32 bits, in which numbers show more, if the loss takes them."""
    is_coarse = lambda x: is_inexact(x) and jnp.finfo(x.dtype).bits < 32
    if not any(map(is_coarse, jax.tree.leaves(given))):
        return given
    widen = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32) if is_coarse(x) else x, tree)
    placed = jax.tree.map(lambda x: x.sharding, given)
    try:
        of_shards, *_ = _of_shards_and_batch(config, layout, *jax.eval_shape(widen, given))
        jax.eval_shape(of_shards, *jax.eval_shape(widen, given))
    except Exception:  # a loss may raise anything on other dtypes
        return given
    return jax.jit(widen, out_shardings=placed)(given)


def _check_operations(
    config: StepConfig, layout: StateLayout, given: tuple[TrainState, Any], doubt: Doubt
) -> bool:
    """Try the operations alone of which nothing is known; whether nothing else is in doubt."""
    loss, shards = config.loss, layout.shards
    at_use, trials = to_read(layout, given[0]), []

    def on_shard(state: TrainState, batch: Any) -> Any:
        before, (rows, whole) = layout.local(state), loss.split(batch)
        # A kernel may take no half of a shard's rows.
        one, other = _of_two_shards(config, layout, rows, parts=1)
        if loss.number_of_rows(one) == 1:
            # Where two axes are one row long, a trace does not tell which is that of the rows.
            one, other = _behind(loss, one, other), _behind(loss, other, one)
        number, all_rows = loss.number_of_rows(one), _behind(loss, one, other)

        def of_params(both: Any) -> Any:
            of = [_quiet_of_rows(loss, before, join(x, whole), both) for x in (one, all_rows)]
            traces = [jax.make_jaxpr(run, return_shape=True)(*given) for run, given in of]
            (_, tree), arguments = traces[1], of[1][1]
            jaxprs, leaves = [jaxpr for jaxpr, _ in traces], jax.tree.leaves(arguments.given)
            axes = loss.batch_axes.of_rows(arguments.given[0])
            axes = [*axes, *[0] * (len(leaves) - len(axes))]
            others = arguments.whole, arguments.both, arguments.of_all
            inputs = facts_of_inputs(leaves, axes, others, arguments.own)
            trial = Trial(Assumptions())
            facts = followed(jaxprs, inputs, number, 2, shards.axes, trial.assumed)
            of_loss = jax.tree.unflatten(jax.tree.structure(tree), facts)
            if finding_of(of_loss).kind is OverRows.UNDECIDED:
                raise _NotDecidedError
            trial.evaluate(jaxprs[1], jax.tree.leaves(arguments))
            if trial.reached != set(trial.assumed.names()) or not trial.apart:
                raise _NotDecidedError
            trials.append(trial.tried)
            return jnp.stack(trial.apart)[None]

        def of_trained(trained: Any) -> Any:
            return with_frozen(at_use, lambda frozen: of_params((trained, frozen)), before.frozen)

        with shard_context(shards.number, axis_name=shards.axes):
            return at_use.call(of_trained, before.params)

    try:
        found, _ = _run(_on_shards(layout, loss, on_shard, given), layout, given, doubt)
    except _NotDecidedError:
        return False
    apart = found[np.argmax(np.nan_to_num(found[..., 1], nan=np.inf), 0), np.arange(found.shape[1])]
    for tried, (distance, allowed) in zip(trials[-1], apart, strict=True):
        # Which is so of numbers that are not finite, too.
        if not allowed <= 1:
            if not math.isfinite(distance):
                raise _not_finite(doubt, f" of {tried.operation}")
            raise LossError(
                f"{doubt.sentence} And by numbers it is not so: of the same rows {tried.change}, "
                f"the results of {tried.operation} are {distance:.2g} of their size apart. "
                f"{WAYS_ON}"
            )
    return True


def _not_finite(doubt: Doubt, of: str) -> LossError:
    return LossError(
        f"{doubt.sentence} And numbers that are not finite cannot show it{of}. Make them finite in "
        f"the first call. Or: {WAYS_ON}"
    )


class _NotDecidedError(Exception):
    """With so few rows, there is more in doubt than some operations, or some are not reached."""


def _on_shards(layout: StateLayout, loss: StepLoss, on_shard: Any, given: Any) -> Any:
    """A function of one shard's state and rows on all shards, whose results are stacked."""
    state, batch = given
    return _jax.shard_map(
        on_shard,
        mesh=layout.mesh,
        axis_names=frozenset(layout.axes),
        in_specs=(layout.specs(state), loss.batch_axes.specs(batch, layout.axes)),
        out_specs=PartitionSpec(layout.axes),
    )


def _compiled(function: Callable[..., Any], given: Any, out: Any = None) -> tuple[Any, float]:
    """A function, compiled, and the precision of its floats."""
    traced = jax.jit(function, out_shardings=out).trace(*given)
    precision = max(map(precision_of, equations_of(traced.jaxpr)), default=0.0)
    return traced.lower().compile(), precision


def _run(
    function: Callable[..., Any], layout: StateLayout, given: Any, doubt: Doubt
) -> tuple[Any, float]:
    """What a function of the state and the batch returns, and the precision of its floats."""
    everywhere = jax.NamedSharding(layout.mesh, PartitionSpec())
    try:
        compiled, precision = _compiled(function, given, everywhere)
    except _NotDecidedError:
        raise
    except Exception as error:  # a loss may raise anything on other shapes
        said = str(error).partition("\n")[0]
        raise LossError(
            f"{doubt.sentence} And it cannot be computed of half of a shard's rows, to compare "
            f"numbers: {type(error).__name__}: {said:.200} {WAYS_ON}"
        ) from error
    return jax.device_get(compiled(*given)), precision


def _of_two_shards(
    config: StepConfig, layout: StateLayout, rows: Any, parts: int = 2
) -> tuple[Any, Any]:
    """Half of the rows of a piece, or all, and of the next shard's; or of its own next piece."""
    loss, shards, groups = config.loss, layout.shards, layout.groups
    together = [list(range(shards.number))] if groups is None else groups.groups
    half = max(1, loss.number_of_rows(rows) // loss.pieces(shards.number) // parts)
    axes = loss.batch_axes.tree_of(rows)
    of = lambda part: jax.tree.map(lambda x, axis: take_rows(x, axis, part), rows, axes)
    one = of(slice(half))
    if len(together[0]) == 1:
        return one, of(slice(half, 2 * half))
    pairs = (zip(each, [*each[1:], each[0]], strict=True) for each in together)
    to_next = list(itertools.chain.from_iterable(pairs))
    return one, jax.tree.map(lambda x: lax.ppermute(x, shards.axes, to_next), one)


def _behind(loss: StepLoss, one: Any, other: Any) -> Any:
    """The rows of one batch, and behind them those of another one."""
    concatenated = lambda axis, *x: jnp.concatenate(x, axis)
    return jax.tree.map(concatenated, loss.batch_axes.tree_of(one), one, other)


def _check_loss(
    config: StepConfig, layout: StateLayout, given: tuple[TrainState, Any], doubt: Doubt
) -> None:
    """Compare the loss of all rows with that of some, and its gradient."""
    loss, at_use = config.loss, to_read(layout, given[0])
    if layout.groups is None and _check_whole(config, layout, given, doubt):
        return

    def rows_of(batch: Any) -> tuple[Any, Any, Any, Callable[..., LocalResult]]:
        rows, whole = loss.split(batch)
        one, other = _of_two_shards(config, layout, rows)
        of = lambda state, rows: _quiet_gradient(
            loss, layout.local(state), join(rows, whole), at_use
        )
        return one, other, _behind(loss, one, other), of

    def compared(state: TrainState, batch: Any) -> Any:
        *each, of = rows_of(batch)
        return jnp.stack(_compared([of(state, rows) for rows in each]))[None]

    def noise(state: TrainState, batch: Any) -> Any:
        _, _, both, of = rows_of(batch)
        rounded = dataclasses.replace(state, params=_rounded(state.params))
        every = of(state, both), of(state, _moved(loss, both)), of(rounded, _rounded(both))
        first, *others = [(jnp.float32(x.loss), jax.tree.leaves(x.values)) for x in every]
        return jnp.stack([jnp.stack(_apart(first, each)) for each in others])[None]

    on_shards = lambda function: _on_shards(layout, loss, function, given)
    found, precision = _run(on_shards(compared), layout, given, doubt)
    worst = found[np.argmax(np.nan_to_num(found[:, :2], nan=np.inf).max(1))]
    of_rounding = lambda: _run(on_shards(noise), layout, given, doubt)[0].max(0).min(0)
    _check_apart(doubt, "two shards", worst, _least(given, precision), precision, of_rounding)


def _check_whole(
    config: StepConfig, layout: StateLayout, given: tuple[TrainState, Any], doubt: Doubt
) -> bool:
    """Compare the loss of the whole batch with the shards'; whether that was possible."""
    loss, (state, batch) = config.loss, given
    of_shards, of_batch, specs = _of_shards_and_batch(config, layout, state, batch)
    placed = lambda spec: jax.NamedSharding(layout.mesh, spec)
    out = jax.tree.map(placed, (*[PartitionSpec()] * 3, specs))
    try:
        mean, precision = _compiled(of_shards, given, out)
        as_placed = lambda x, placed: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed)
        types = jax.tree.map(as_placed, jax.eval_shape(of_shards, *given), out)
        whole, _ = _compiled(of_batch, (*given, types), (out[0], *out))
    except Exception:  # a loss may raise anything on other shapes, and a kernel may not be split
        return False
    needs: Any = [each.memory_analysis() for each in (mean, whole)]
    sizes = [int(getattr(each, "temp_size_in_bytes", 0)) for each in needs]
    if sizes[1] > 2 * sizes[0] + _SPARE:
        return False
    *apart, gradients = whole(*given, mean(*given))
    found: Any = np.float32(jax.device_get(apart))

    def of_rounding() -> Any:
        def changed(state: TrainState, batch: Any) -> Any:
            rows, rest = loss.split(batch)
            moved, rounded = (
                join(f(rows), rest) for f in (functools.partial(_moved, loss), _rounded)
            )
            return moved, dataclasses.replace(state, params=_rounded(state.params)), rounded

        keep, of_batch = (jax.tree.map(lambda x: x.sharding, each) for each in given)
        moved, near, rounded = jax.jit(changed, out_shardings=(of_batch, keep, of_batch))(*given)
        first = (*jax.device_put((found[2], np.float32(1), np.abs(found[2])), out[:3]), gradients)
        by = [whole(*each, first)[:2] for each in ((state, moved), (near, rounded))]
        return np.float32(jax.device_get(by)).min(0)

    least = _least(given, precision)
    _check_apart(doubt, "the whole batch", found, least, precision, of_rounding)
    return True


def _check_apart(
    doubt: Doubt, rows: str, found: Any, least: float, precision: float, of_rounding: Any
) -> None:
    """Raise if losses or gradients are further apart than rounding makes them.

    In coarse floats the same rows in another order give other numbers; but so they do where rows
    are compared in order. So also another rounding of the parameters and of the rows is looked at.

    Args:
      doubt: what the trace of the loss does not decide.
      rows: whose rows were taken together.
      found: how far the losses and the gradients are apart; and both losses.
      least: how far they may be.
      precision: of the coarsest floats of the loss.
      of_rounding: returns how far they are apart of the same rows, the lesser of the two.
    """
    values, gradients, both, mean = map(float, found)
    if values <= least and gradients <= least:
        return
    allowed = [least, least]
    if precision > np.finfo(np.float32).eps and np.isfinite(found[:2]).all():
        allowed = np.clip(
            2 * np.nan_to_num(of_rounding()), least, max(least, _COARSEST * precision)
        )
    # Which is so of numbers that are not finite, too: they show nothing.
    if not (values <= allowed[0] and gradients <= allowed[1]):
        numbers = f"of rows of {rows} the loss is {both:.6g}, and the mean of the shards' losses "
        numbers += f"is {mean:.6g}"
        if gradients:
            numbers += f"; the gradients are {gradients:.2g} of the largest apart"
        if not all(map(math.isfinite, (both, mean, gradients))):
            raise _not_finite(doubt, f": {numbers}")
        raise LossError(f"{doubt.sentence} And by numbers it is not so: {numbers}. {WAYS_ON}")


def _moved(loss: StepLoss, rows: Any) -> Any:
    """The same rows in another order."""
    order = np.random.default_rng(0).permutation(loss.number_of_rows(rows))
    moved = lambda x, axis: jnp.take(x, order, axis)
    return jax.tree.map(moved, rows, loss.batch_axes.tree_of(rows))


def _rounded(tree: Any) -> Any:
    """The same numbers, each of which may be the next one to a bfloat16."""
    by = float(jnp.finfo(jnp.bfloat16).eps) / 2

    def one(x: Any) -> Any:
        signs = jax.random.rademacher(jax.random.key(0), x.shape, jnp.float32)
        return (x * (1 + by * signs)).astype(x.dtype) if is_inexact(x) else x

    return jax.tree.map(one, tree)


def _of_shards_and_batch(
    config: StepConfig, layout: StateLayout, state: TrainState, batch: Any
) -> Any:
    """The mean of the shards' losses, and how far the loss of all rows is from that.

    Two functions. Of the state and the batch, the first returns the mean, the weight, the largest
    loss and the gradient; given these, too, the second returns how far the losses and the gradients
    are apart, both losses, and the gradient of all rows. And the specs of a gradient.
    """
    loss, shards, axes = config.loss, layout.shards, layout.axes
    # Each shard's own gradient, but for those that the backward pass sums where it makes them.
    at_use = dataclasses.replace(to_read(layout, state), waits=True)
    early = at_use.early
    # Of all shards the same state, as the whole batch has one.
    first = (lambda x: x[0]) if state.per_shard else lambda x: x
    of_first = lambda state: jax.tree.map(first, state.model_state)

    def on_shard(state: TrainState, batch: Any, of_first: Any) -> Any:
        before = dataclasses.replace(layout.local(state), model_state=of_first)
        rows, whole = loss.split(batch)

        def one(sums: Any, piece: Any) -> tuple[Any, Any]:
            found = _quiet_gradient(loss, before, join(piece, whole), at_use)
            weight = 1 if found.weight is None else found.weight
            by_weight = lambda x: jnp.where(weight == 0, 0, weight * x)
            leaves = jax.tree.leaves(found.values)
            counted = [
                x if is_early else by_weight(x) for x, is_early in zip(leaves, early, strict=True)
            ]
            sums = [x + y.astype(x.dtype) for x, y in zip(sums, counted, strict=True)]
            return sums, (jnp.float32(found.loss), jnp.float32(weight))

        pieces = pieces_of(rows, loss.batch_axes, loss.pieces(shards.number))
        none = jax.tree.leaves(zeros(at_use.types_of_gradients(before.params))[0])
        summed, (losses, weights) = lax.scan(one, none, pieces)
        weighted = jnp.where(weights == 0, 0, losses * weights).sum()
        largest = jnp.where(weights == 0, 0, jnp.abs(losses)).max()
        own = [x for x, is_early in zip(summed, early, strict=True) if not is_early]
        own, weighted, weight = lax.psum((own, weighted, weights.sum()), shards.axes)
        over = iter(own)
        summed = [x if is_early else next(over) for x, is_early in zip(summed, early, strict=True)]
        return weighted, weight, lax.pmax(largest, shards.axes), summed

    specs = [
        PartitionSpec(*[None] * (each.axis or 0), axes) if is_early else PartitionSpec()
        for each, is_early in zip(at_use.partitions, early, strict=True)
    ]
    run = _jax.shard_map(
        on_shard,
        mesh=layout.mesh,
        axis_names=frozenset(axes),
        in_specs=(layout.specs(state), loss.batch_axes.specs(batch, axes), PartitionSpec()),
        out_specs=(*[PartitionSpec()] * 3, specs),
    )

    def of_shards(state: TrainState, batch: Any) -> Any:
        total, weight, largest, summed = run(state, batch, of_first(state))
        divided = lambda x: x / jnp.where(weight == 0, 1, weight)
        return divided(total), weight, largest, list(map(divided, summed))

    def of_batch(state: TrainState, batch: Any, of_shards: Any) -> Any:
        mean, weight, largest, gradients = of_shards
        over = on_all_rows(at_use, layout)
        here = dataclasses.replace(state, model_state=of_first(state))
        found = _quiet_gradient(loss, here, batch, over)
        unless_none = lambda x, like: jnp.where(weight == 0, 0, x).astype(like.dtype)
        together = unless_none(found.loss, mean)
        of_all = list(map(unless_none, jax.tree.leaves(found.values), gradients))
        norms = map(optax.tree.norm, (_minus(of_all, gradients), of_all, gradients))
        off = _relative(together - mean, together, mean, largest)
        return off, _relative(*norms), together, mean, of_all

    return of_shards, of_batch, specs


def _compared(found: Sequence[LocalResult]) -> list[jax.Array]:
    """How far the loss and the gradient of rows together are from the means; and both losses."""
    of = [jnp.float32(1) if each.weight is None else each.weight for each in found]
    total = of[0] + of[1]
    divided = lambda x: x / jnp.where(total == 0, 1, total)
    losses = [jnp.asarray(each.loss, jnp.float32) for each in found]
    # What is weightless may be 0/0.
    by_weight = lambda weight, x: jnp.where(weight == 0, 0, weight * x)
    summed = lambda one, other: by_weight(of[0], one) + by_weight(of[1], other)
    mean = divided(summed(*losses[:2]))
    losses[2] = jnp.where(total == 0, 0, losses[2])
    off = _relative(losses[2] - mean, losses[2], mean)
    early = found[2].early or (False,) * len(jax.tree.leaves(found[2].values))
    weighted = found[2].weight is not None
    pieces = []
    leaves = zip(early, *(jax.tree.leaves(each.values) for each in found), strict=True)
    for is_early, one, other, both in leaves:
        if is_early and weighted:
            # The sums of all shards, which have their weights already.
            pieces.append((both - one - other, one, other, both))
        else:
            apart = jnp.where(total == 0, 0, both - divided(summed(one, other)))
            counted = (jnp.where(of[0] == 0, 0, one), jnp.where(of[1] == 0, 0, other))
            pieces.append((apart, *counted, both))
    norms = [optax.tree.norm(list(each)) for each in zip(*pieces, strict=True)]
    return [off, _relative(*norms), losses[2], mean]


def _apart(one: tuple[Any, Any], other: tuple[Any, Any]) -> list[jax.Array]:
    """How far two losses and their gradients are apart."""
    norms = map(optax.tree.norm, (_minus(one[1], other[1]), one[1], other[1]))
    return [_relative(one[0] - other[0], one[0], other[0]), _relative(*norms)]


def _minus(some: Sequence[Any], others: Sequence[Any]) -> list[jax.Array]:
    return [x - y for x, y in zip(some, others, strict=True)]


def _relative(difference: Any, *values: Any) -> jax.Array:
    largest = functools.reduce(jnp.maximum, map(jnp.abs, values))
    return jnp.where(difference == 0, 0, jnp.abs(difference) / largest).astype(jnp.float32)


def _least(given: Any, precision: float) -> float:
    """Up to which relative difference two losses are equal."""
    dtypes = [x.dtype for x in jax.tree.leaves(given) if is_inexact(x)]
    coarsest = min(precision, float(jnp.finfo(jnp.bfloat16).eps))
    return max(_TOLERANCE, coarsest, *(4 * float(jnp.finfo(dtype).eps) for dtype in dtypes))


def check_weight_by_numbers(
    config: StepConfig, batch: Any, finding: Finding, divisor: Divisor
) -> None:
    """Raise unless weight and divisor are equal in each piece of a batch, two numbers of each."""
    loss, shards = config.loss, config.number_of_shards
    weight = loss.weight
    assert weight is not None

    def both(batch: Any) -> jax.Array:
        return jnp.stack([weight_of(weight, batch), divisor.of_batch(batch)])

    def of_shard(batch: Any) -> jax.Array:
        rows, whole = loss.split(batch)
        pieces = pieces_of(rows, loss.batch_axes, loss.pieces(shards))
        return lax.map(lambda piece: both(join(piece, whole)), pieces)

    run = lambda batch: both(batch)[None]
    if divisor.is_of_piece:
        run = jax.shard_map(
            of_shard,
            mesh=config.mesh,
            axis_names=frozenset(config.axes),
            in_specs=(loss.batch_axes.specs(batch, config.axes),),
            out_specs=PartitionSpec(config.axes),
            check_vma=False,
        )
    given = jax.tree.map(lambda x: _mesh.on_mesh(x, config.mesh), batch)
    everywhere = jax.NamedSharding(config.mesh, PartitionSpec())
    with _mesh.in_place_of_the_users_mesh(config.mesh):
        found = jax.device_get(jax.jit(run, out_shardings=everywhere)(given))
    for place, (of_weight, divides) in enumerate(found):
        if not are_equal(of_weight, divides):
            of = f"In part {place} of {len(found)} of this batch" if len(found) > 1 else "Here"
            numbers = f"{of} the loss divides by {divides:.7g}, and weight= is {of_weight:.7g}.\n"
            raise another_sum(weight, finding, numbers)


# Noise is switched off.


def _quiet(loss: StepLoss, state: TrainState, batch: Any) -> tuple[TrainState, Keys]:
    """The state, and the keys, with which the noise of the loss is switched off."""
    shape = (loss.number_of_rows(batch),) if loss.keys_of_rows else ()
    keys = (quiet_keys(shape),) if loss.takes_rng else ()
    quiet = lambda x: quiet_keys(x.shape) if is_key(x) else x
    model_state = jax.tree.map(quiet, state.model_state)
    return dataclasses.replace(state, model_state=model_state), keys


def _quiet_of_rows(
    loss: StepLoss, state: TrainState, batch: Any, both: Any
) -> tuple[Callable[..., Any], Arguments]:
    """The loss with its noise switched off, and what it is computed from."""
    here, keys = _quiet(loss, state, batch)
    arguments = loss.arguments(here, both, batch, keys)
    return lambda *arguments: loss.of_arguments(here, *arguments).loss, arguments


def _quiet_gradient(loss: StepLoss, state: TrainState, batch: Any, at_use: AtUse) -> LocalResult:
    """The loss of some rows of one shard with its noise switched off, and its gradient."""
    here, keys = _quiet(loss, state, batch)

    def loss_of(trained: Any) -> tuple[Any, None]:
        of_both = lambda frozen: loss.run(here, (trained, frozen), batch, keys).loss
        found = with_frozen(at_use, of_both, state.frozen)
        rows = loss.number_of_rows(batch)
        return (per_row(found, rows) if isinstance(found, Mean) else found), None

    weight = None if loss.weight is None else weight_of(loss.weight, batch)
    with shard_context(at_use.shards.number, axis_name=at_use.shards.axes):
        found = value_and_grad(at_use, loss_of, state.params, weight)
    return LocalResult(found.out[0], found.gradients, weight, None, None, None, found.early)
