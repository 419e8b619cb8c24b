"""By numbers: whether a loss of several shards is the mean of theirs, and what it divides by."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import fields
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
from crossshard.gradients.status import Reduction
from crossshard.jaxprs.kernels import Assumptions
from crossshard.jaxprs.mean_over_rows import Finding, followed
from crossshard.jaxprs.row_facts import OverRows
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import CrossShardState
from crossshard.pipeline.update.arrays import Parts, Whole
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import join, take_rows
from crossshard.shards.cut import Partition
from crossshard.shards.random_streams import is_key, quiet_keys
from crossshard.step.function import StepConfig, to_read
from crossshard.step.losses import loss_over
from crossshard.step.losses.rows import LossOver, StepLoss
from crossshard.step.microbatches import pieces_of, weight_of
from crossshard.step.operations import Trial, precision_of
from crossshard.step.over_rows import (
    WAYS_ON,
    Divisor,
    Doubt,
    OverRowsRecord,
    another_sum,
    are_equal,
    finding_of,
)

# Sums over rows in another order differ by less, in float32; in coarser floats by less than twice
# their precision, or that of bfloat16.
_TOLERANCE, _COARSEST = 1e-4, float(jnp.finfo(jnp.bfloat16).eps)


class _NotDecidedError(Exception):
    """More is in doubt than some operations, or some cannot be tried."""


def check_by_numbers(
    config: StepConfig, layout: StateLayout, state: TrainState, batch: Any, doubt: Doubt
) -> None:
    """Raise unless numbers show that the loss is a mean over rows, which its trace does not.

    If only some operations are in doubt, these are tried alone. Else the step's loss and gradient
    are compared with those of all rows. Noise is switched off. If there are several processes, all
    of them make this call.

    Args:
      config: the step.
      layout: the layout of the state.
      state: the state, which stays valid.
      batch: the batch, on the devices.
      doubt: what its trace does not decide.
    """
    given = jax.tree.map(lambda x: _mesh.on_mesh(x, layout.mesh), (state, batch))
    check = _Check(config, layout, doubt)
    with _mesh.in_place_of_the_users_mesh(layout.mesh):
        if doubt.finding.kind is not OverRows.UNDECIDED:
            try:
                return check.operations(*given)
            except _NotDecidedError:
                pass
        check.loss(*given)


class _Check:
    """A check of a loss, with the parameters and the model state of the first shard, or group.

    Without what stages do to its gradient, and with its noise switched off.
    """

    def __init__(self, config: StepConfig, layout: StateLayout, doubt: Doubt):
        self._doubt, self._stored, arrays = doubt, layout, layout.arrays
        pipeline = Pipeline(
            config.pipeline.inner, Reduction.MEAN, axis_name=config.pipeline.axis_name
        )
        self._config = dataclasses.replace(config, pipeline=pipeline, gather_dtype=None)
        shards = layout.shards.all
        wholes = tuple(Partition(x.shape, other_axes=x.other_axes) for x in arrays.params)
        self._layout = dataclasses.replace(
            layout,
            shards=shards,
            arrays=Parts(arrays.params, shards, in_parts=True)
            if arrays.in_parts
            else Whole(wholes, shards=shards),
            pipeline=pipeline,
            has_one_state=True,
        )
        loss = config.loss
        self._fields: dict[str, Any] = {x.name: getattr(loss, x.name) for x in fields(loss)} | {
            "function": _quiet(loss),
            "over": LossOver.SHARD,
            "is_summed": False,
            "accumulate_steps": 1,
            "same_bits": None,
            "record": OverRowsRecord(),
        }

    def _of_one_group(self, state: TrainState) -> TrainState:
        own = self._stored.local(state)
        quiet = lambda x: quiet_keys(x.shape) if is_key(x) else x
        return dataclasses.replace(
            own,
            opt_state=CrossShardState(),
            model_state=jax.tree.map(quiet, own.model_state),
            grouped=False,
            per_shard=False,
        )

    def _run(self, function: Callable[..., Any], *given: Any) -> tuple[Any, float]:
        """What a function returns, on all processes, and the precision of its floats."""
        everywhere = jax.NamedSharding(self._layout.mesh, PartitionSpec())
        traced = jax.jit(function, out_shardings=everywhere).trace(*given)
        precision = max(map(precision_of, equations_of(traced.jaxpr)), default=0.0)
        return jax.device_get(traced.lower().compile()(*given)), precision

    def _not_finite(self, of: str) -> LossError:
        return LossError(
            f"{self._doubt.sentence} And numbers that are not finite cannot show it{of}. Make them "
            f"finite in the first call. Or: {WAYS_ON}"
        )

    # The whole loss.

    def loss(self, state: TrainState, batch: Any) -> None:
        """Compare the loss of all rows, and its gradient, with the mean of the pieces'.

        XLA splits the work of all rows; or each shard does all of it, if the loss names the axis of
        the shards, or has a kernel that XLA cannot split. Floats get 32 bits, if the loss takes
        them.
        """
        loss, shards = self._config.loss, self._layout.number_of_shards

        def repeated(batch: Any) -> Any:
            rows, whole = loss.split(batch)
            again = lambda x, axis: jnp.concatenate([x] * shards, axis)
            return join(jax.tree.map(again, rows, loss.batch_axes.tree_of(rows)), whole)

        same = lambda x: x
        of_batch = loss_over(**self._fields | {"over": LossOver.BATCH, "weight": None})
        ways = [(of_batch, same), (loss_over(**self._fields), repeated)]
        failure = None
        for of_all, all_rows in ways:
            for widen in (_widened, same):
                run = functools.partial(self._compared, of_all, all_rows, widen)
                try:
                    found = self._run(run, state, batch)
                except Exception as error:  # a loss may raise anything on other shapes
                    failure = error
                else:
                    return self._check_apart(*found)
        said = str(failure).partition("\n")[0]
        raise LossError(
            f"{self._doubt.sentence} And it cannot be computed of all rows at once, to compare "
            f"numbers: {type(failure).__name__}: {said:.200} {WAYS_ON}"
        ) from failure

    def _compared(
        self,
        of_all: StepLoss,
        all_rows: Callable[[Any], Any],
        widen: Callable[[Any], Any],
        state: TrainState,
        batch: Any,
    ) -> Any:
        """How far two losses and their gradients are apart; and both losses."""
        state, batch = widen((self._of_one_group(state), batch))
        pieces = self._config.loss.pieces(self._layout.number_of_shards)
        of_pieces = loss_over(**self._fields | {"accumulate_steps": pieces})
        found = []
        for loss, rows in ((of_all, all_rows(batch)), (of_pieces, batch)):
            config = dataclasses.replace(self._config, loss=loss)
            reduced = config.reduced(self._layout, state, rows)
            found.append((reduced.extra["value"], jax.tree.leaves(reduced.values)))
        (whole, slopes), (mean, others) = found
        apart = [x - y for x, y in zip(slopes, others, strict=True)]
        norms = map(optax.tree.norm, (apart, slopes, others))
        return jnp.stack([_relative(whole - mean, whole, mean), _relative(*norms), whole, mean])

    def _check_apart(self, found: Any, precision: float) -> None:
        """Raise if losses or gradients are further apart than rounding makes them."""
        values, gradients, both, mean = map(float, found)
        allowed = max(_TOLERANCE, 2 * min(precision, _COARSEST))
        # Which is so of numbers that are not finite, too: they show nothing.
        if values <= allowed and gradients <= allowed:
            return
        numbers = f"of rows of the whole batch the loss is {both:.6g}, and the mean of the shards' "
        numbers += f"losses is {mean:.6g}"
        if gradients:
            numbers += f"; the gradients are {gradients:.2g} of the largest apart"
        if not all(map(math.isfinite, (both, mean, gradients))):
            raise self._not_finite(f": {numbers}")
        raise LossError(f"{self._doubt.sentence} And by numbers it is not so: {numbers}. {WAYS_ON}")

    # Single operations.

    def operations(self, state: TrainState, batch: Any) -> None:
        """Try the operations alone of which nothing is known.

        Raises:
          _NotDecidedError: more is in doubt, or some cannot be tried.
        """
        layout, loss = self._layout, loss_over(**self._fields)
        shards, axes, trials = layout.shards, loss.batch_axes, list[Any]()

        def on_shard(state: TrainState, batch: Any) -> Any:
            before, (rows, whole) = layout.local(state), loss.split(batch)
            of_rows = axes.tree_of(rows)
            behind = lambda one, other: jax.tree.map(
                lambda axis, *x: jnp.concatenate(x, axis), of_rows, one, other
            )
            one, other = self._two_pieces(rows, of_rows)
            if loss.number_of_rows(one) == 1:
                # Where two axes are one row long, a trace does not tell which is that of the rows.
                one, other = behind(one, other), behind(other, one)
            keys = (quiet_keys((loss.number_of_rows(batch),) * loss.keys_of_rows),) * loss.takes_rng

            def of_params(both: Any) -> Any:
                of_loss = lambda *arguments: loss.of_arguments(before, *arguments).loss
                each = [
                    loss.arguments(before, both, join(x, whole), keys)
                    for x in (one, behind(one, other))
                ]
                traces = [jax.make_jaxpr(of_loss, return_shape=True)(*x) for x in each]
                arguments, jaxprs = each[1], [jaxpr for jaxpr, _ in traces]
                _, inputs = loss.facts(arguments)
                trial, number = Trial(Assumptions()), loss.number_of_rows(one)
                facts = followed(jaxprs, inputs, number, 2, shards.axes, trial.assumed)
                returned = jax.tree.unflatten(jax.tree.structure(traces[1][1]), facts)
                if finding_of(returned).kind is OverRows.UNDECIDED:
                    raise _NotDecidedError
                trial.evaluate(jaxprs[1], jax.tree.leaves(arguments))
                if trial.reached != set(trial.assumed.names()) or not trial.apart:
                    raise _NotDecidedError
                trials.append(trial.tried)
                return jnp.stack(trial.apart)[None]

            with shard_context(shards.number, axis_name=shards.axes):
                return to_read(layout, before).of_both(of_params, before.params, before.frozen)

        def on_shards(state: TrainState, batch: Any) -> Any:
            own = self._of_one_group(state)
            return _jax.shard_map(
                on_shard,
                mesh=layout.mesh,
                axis_names=frozenset(layout.axes),
                in_specs=(layout.specs(own), axes.specs(batch, layout.axes)),
                out_specs=PartitionSpec(layout.axes),
            )(own, batch)

        try:
            found, _ = self._run(on_shards, state, batch)
        except Exception as error:  # a loss may raise anything on other shapes
            raise _NotDecidedError from error
        worst = np.argmax(np.nan_to_num(found[..., 1], nan=np.inf), 0)
        apart = found[worst, np.arange(found.shape[1])]
        for (operation, change), (distance, allowed) in zip(trials[-1], apart, strict=True):
            # Which is so of numbers that are not finite, too.
            if not allowed <= 1:
                if not math.isfinite(distance):
                    raise self._not_finite(f" of {operation}")
                raise LossError(
                    f"{self._doubt.sentence} And by numbers it is not so: of the same rows "
                    f"{change}, the results of {operation} are {distance:.2g} of their "
                    f"size apart. {WAYS_ON}"
                )

    def _two_pieces(self, rows: Any, of_rows: Any) -> tuple[Any, Any]:
        """The rows of a piece, and of the next shard's; or of its own next piece."""
        loss, shards = self._config.loss, self._layout.shards
        number = loss.batch_axes.lengths(rows)[0] // loss.pieces(shards.number)
        of = lambda part: jax.tree.map(lambda x, axis: take_rows(x, axis, part), rows, of_rows)
        one = of(slice(number))
        if shards.number == 1:
            return one, of(slice(number, 2 * number))
        to_next = [(place, (place + 1) % shards.number) for place in range(shards.number)]
        return one, jax.tree.map(lambda x: lax.ppermute(x, shards.axes, to_next), one)


def _quiet(loss: StepLoss) -> Callable[..., Any]:
    """The function of a loss, with keys that switch its noise off."""
    if not loss.takes_rng:
        return loss.function
    return lambda *args: loss.function(*args[:-1], quiet_keys(args[-1].shape))


def _widened(tree: Any) -> Any:
    """The same with floats of at least 32 bits, in which numbers show more."""
    is_coarse = lambda x: is_inexact(x) and jnp.finfo(x.dtype).bits < 32
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_coarse(x) else x, tree)


def _relative(difference: Any, *values: Any) -> jax.Array:
    largest = jnp.maximum(*map(jnp.abs, values))
    return jnp.where(difference == 0, 0, jnp.abs(difference) / largest).astype(jnp.float32)


def check_weight_by_numbers(
    config: StepConfig, batch: Any, finding: Finding, divisor: Divisor
) -> None:
    """Raise unless weight and divisor are equal in each piece of a batch, two numbers of each."""
    loss, axes = config.loss, config.axes
    weight, pieces = loss.weight, loss.pieces(config.number_of_shards)
    assert weight is not None

    def both(batch: Any) -> jax.Array:
        return jnp.stack([weight_of(weight, batch), divisor.of_batch(batch)])

    def of_shard(batch: Any) -> jax.Array:
        rows, whole = loss.split(batch)
        of_pieces = pieces_of(rows, loss.batch_axes, pieces)
        return lax.map(lambda piece: both(join(piece, whole)), of_pieces)

    run = jax.shard_map(
        of_shard,
        mesh=config.mesh,
        axis_names=frozenset(axes),
        in_specs=(loss.batch_axes.specs(batch, axes),),
        out_specs=PartitionSpec(axes),
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
