"""By numbers: test whether a loss is a mean over rows, and what it divides by.

It decides what a trace does not show: the loss of all rows, and its gradient, are compared with the
means of those of the pieces; or only some operations, such as kernels, are tried.
"""

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
from crossshard.gradients.status import Reduction
from crossshard.jaxprs.kernels import Assumptions
from crossshard.jaxprs.mean_over_rows import Finding, facts_of_outputs
from crossshard.jaxprs.row_facts import ENDS_LOOP, OverRows
from crossshard.jaxprs.walk import While, control_flow, equations_of, opened
from crossshard.jaxprs.widen import (
    OF_PARAMS,
    OF_ROWS,
    OF_WHOLE,
    Gates,
    in_32_bits,
    wide,
    with_gates_turned,
)
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.stage import CrossShardState
from crossshard.pipeline.update.arrays import Replicated, Sharded
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import join, take_rows
from crossshard.shards.cut import Partition
from crossshard.shards.random_streams import alike_keys, is_key
from crossshard.step.divisor import (
    Divisor,
    are_equal,
    wrong_weight_error,
)
from crossshard.step.function import StepConfig, to_read
from crossshard.step.losses import changed
from crossshard.step.losses.loss import LossOver, StepLoss
from crossshard.step.losses.proven import facts_of
from crossshard.step.microbatches import pieces_of, weight_of
from crossshard.step.over_rows import (
    LEAVE_OUT,
    REMEDIES,
    Doubt,
    OverRowsRecord,
    finding_of,
)
from crossshard.step.trial import Trial, precision_of
from crossshard.step.varied import VARIED, Turn, compared_with, varied

# In float32, sums over rows in another order differ by less than this; in coarser floats by less
# than twice their precision, or that of bfloat16; and by less than a part of it, if only kernels
# and functions with derivatives of their own round to these.
_TOLERANCE, _COARSEST, _ROUNDED = 1e-4, float(jnp.finfo(jnp.bfloat16).eps), 1 / 32
# Of one leaf, gradients differ by less than so many times that, or by less than so much of all.
_OF_LEAF, _LEAST, _LEAST_WIDE = 32, 2e-4, 2e-6
# What divides may be computed in a loop, where a trace does not tell one sum from several.
_COUNTS = "If it divides by what counts in the batch, return crossshard.Mean(total, count)."
_OF_SHARDS = (
    "There are jax.lax.axis_size(axis) shards, one in this comparison, and a shard numbers its "
    "rows from jax.lax.axis_index(axis) * rows."
)
_REORDERED, _COPIED = "with the rows in another order", "with copies of one row in each part"
_SAME, _LARGER = "with the same rows in each part", "with larger parameters or other signs"
_TRAINED = "with parameters that steps along its gradient have moved"
# So many steps, each of this part of a leaf's size, or of 1 if that is less.
_STEPS, _OF_SIZE = 16, 0.05


class _NotDecidedError(Exception):
    """More is in doubt than single operations, or some of these cannot be tried."""


def check_by_numbers(
    config: StepConfig, layout: StateLayout, state: TrainState, batch: Any, doubt: Doubt
) -> None:
    """Raise unless numbers show what the trace of a loss does not.

    For a ratio, that the weight is what it divides by; otherwise, that it is a mean over rows. If
    only some operations are in doubt, these are tried alone. Otherwise the step's loss and gradient
    are compared with those of all rows. All rows have the same noise, and the state stays valid.
    If there are several processes, all of them make this call.
    """
    given = jax.tree.map(lambda x: _mesh.on_mesh(x, layout.mesh), (state, batch))
    check = _Check(config, layout, doubt, *given)
    # Other numbers than the user's may give NaN, which shows nothing, and at which JAX would stop.
    quiet = jax.debug_nans(False), jax.debug_infs(False)
    with _mesh.in_place_of_the_users_mesh(layout.mesh), quiet[0], quiet[1]:
        if doubt.divisor is not None:
            return _check_weight(config, given[1], doubt.finding, doubt.divisor)
        if doubt.of_state:
            return check.loss()
        if doubt.finding.compares:
            check.comparison()
        elif doubt.finding.kind not in (OverRows.UNDECIDED, OverRows.OVER_SHARDS):
            try:
                return check.operations()
            except _NotDecidedError:
                pass
        check.loss()


class _Check:
    """A check of a loss, with the parameters and the model state of the first shard, or group.

    No stages change its gradient, and its noise is the same in all rows: another in each run.
    """

    def __init__(
        self, config: StepConfig, layout: StateLayout, doubt: Doubt, state: TrainState, batch: Any
    ):
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
            arrays=Sharded(arrays.params, shards, params_sharded=True)
            if arrays.params_sharded
            else Replicated(wholes, shards=shards),
            pipeline=pipeline,
            has_one_state=True,
        )
        self._everywhere = jax.NamedSharding(layout.mesh, PartitionSpec())
        self._given = state, batch
        self._paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.params)]
        pieces = layout.number_of_shards * config.loss.pieces(layout.number_of_shards)
        self._rows = config.loss.number_of_rows(batch) // pieces  # of a piece
        self._seed: Any = None  # of the noise
        self._loss = changed(
            config.loss,
            function=self._function,
            is_summed=False,
            accumulate_steps=1,
            virtual_shards=None,
            record=OverRowsRecord(proves=False),
        )

    def _keys(self, shape: tuple[int, ...]) -> jax.Array:
        return alike_keys(shape, self._rows, self._seed)

    def _function(self, *args: Any) -> Any:
        """Call the loss with such keys; those of rows are the rows' own in the whole batch, too."""
        loss = self._config.loss
        draws = loss.takes_rng and not loss.key_per_row
        keys = [self._keys(args[-1].shape)] if draws else args[-1:]
        return loss.function(*args[:-1], *keys)

    def _of_one_group(self, state: TrainState) -> TrainState:
        own = self._stored.local(state)
        alike = lambda x: self._keys(x.shape) if is_key(x) else x
        return dataclasses.replace(
            own,
            opt_state=CrossShardState(),
            model_state=jax.tree.map(alike, own.model_state),
            grouped=False,
            per_shard=False,
        )

    def _with_noise(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes the seed of its noise first."""

        def run(seed: Any, *given: Any) -> Any:
            self._seed = seed
            return function(*given)

        return run

    def _run(
        self,
        function: Callable[..., Any],
        given: list[Any],
        turns: Sequence[Turn] = (),
        passing: Sequence[Turn] = (),
        steps: int | None = None,
    ) -> tuple[list[Any], float]:
        """Run a function on all processes; return its results, and the precision of its floats.

        ``given`` are pairs of a state and a batch. Each run has other noise. After them come those
        of each turn, the first of which the result is finite, if any; they are added to ``given``.
        A turn is given the whole numbers that the function compares others with. Those that are
        passing come behind them, and are not added. With ``steps`` the function returns parameters,
        too, and the results of so many come last, each of which starts from those of the last.
        """
        wheres = jax.tree.map(lambda x: x.sharding, given[0][0].params)
        jitted = jax.jit(
            self._with_noise(function),
            out_shardings=self._everywhere if steps is None else (self._everywhere, wheres),
        )
        traced = jitted.trace(np.uint32(0), *given[0])
        precision = max(map(precision_of, equations_of(traced.jaxpr)), default=0.0)
        run, results = traced.lower().compile(), list[Any]()
        first, numbers = [[pair] for pair in given], compared_with(traced.jaxpr)
        others = (turn(numbers) for turn in (*turns, *passing))
        for seed, pairs in enumerate(itertools.chain(first, others)):
            for pair in pairs:
                found = run(np.uint32(seed), *pair)
                found = jax.device_get(found if steps is None else found[0])
                if np.isfinite(found).all():
                    break
            results.append(found)
            given += [pair] if len(given) <= seed < len(first) + len(turns) else []
        state, batch, *_ = given[0]
        # A loop that numbers end, as at a fixed point, may not end for other parameters.
        ends = not any(map(is_ended_by_numbers, equations_of(traced.jaxpr)))
        for _ in range(steps or 0 if ends else 0):
            found, params = run(np.uint32(0), state, batch)
            state = dataclasses.replace(state, params=params)
            results.append(jax.device_get(found))
        return results, precision

    def _not_finite(self, of: str) -> LossError:
        return LossError(
            f"{self._doubt.sentence} And numbers that are not finite cannot show it{of}. Make them "
            f"finite in the first call. {_COUNTS} Or: {REMEDIES}"
        )

    def _varied(self) -> tuple[Sequence[Turn], Sequence[Turn], list[str]]:
        """Return what ``varied`` does, of the first call."""
        loss, smaller = self._config.loss, self._doubt.finding.reason.endswith(ENDS_LOOP)
        shards, where = self._layout.number_of_shards, self._everywhere
        return varied(loss, shards, *self._given, smaller=smaller, where=where)

    # The whole loss.

    def loss(self) -> None:
        """Compare the loss of all rows, and its gradient, with the mean of the pieces'.

        So it is done with other batches and parameters, too, since these may hide what later ones
        show: a mask of ones, rewards that are all alike, or a layer that starts at 0.

        XLA splits the work of all rows; or each device does all of it, if XLA cannot split a kernel
        in it. A loss that names the axis of the shards runs as on a single one. Floats have 32 bits
        in it, unless it cannot be traced so.
        """
        (state, batch), (turns, larger, names) = self._given, self._varied()
        by_hand = [functools.partial(self._by_hand, of_each=of_each) for of_each in (False, True)]
        arounds = None, self._under_vmap, *by_hand
        both = state.params, state.frozen
        in_32 = functools.partial(_in_32_bits, (state.model_state, both, batch))
        failure = None
        for around, inner in itertools.product(arounds, (in_32, None)):
            given = [self._given]
            try:
                comparing = self._comparing(around, inner)
                (found, *more), precision = self._run(comparing, given, turns, larger, _STEPS)
            except Exception as error:  # a loss may raise anything on other shapes
                failure = error
                continue
            allowed = (2.0 if inner is None else _ROUNDED) * min(precision, _COARSEST)
            if self._doubt.of_state and not found[4]:
                raise LossError(
                    f"{self._doubt.sentence} And no row of this batch counts, which cannot show "
                    f"it. Let the first call have another batch."
                )
            self._check_apart(found, allowed)
            of_others = f" and other numbers in {', '.join(names)}" * bool(names)
            passing, more = more[len(turns) :], more[: len(turns)]
            of_larger, of_steps = passing[: len(larger)], passing[len(larger) :]
            for kind, rows in enumerate((_REORDERED, _COPIED, _SAME)):
                of_kind = more[kind * VARIED : (kind + 1) * VARIED]
                some = [each for each in of_kind if np.isfinite(each).all()]
                for each in some:
                    self._check_apart(_less_rounding(each), allowed, f"{rows}{of_others}, ")
                # With a weight, a row that does not count may be all that a piece has.
                if not some and self._config.loss.weight_fn is None:
                    raise self._not_finite(f" {rows}")
            for each in of_larger:
                if np.isfinite(each).all():
                    # All of a gradient may be rounding, as through a saturated softmax, or all of a
                    # loss, if its rows cancel out: what is another loss differs in both.
                    values, gradients, whole, mean, norm, *_ = each
                    both_apart = min(values, gradients), 0, whole, mean, norm, 0, 0
                    self._check_apart(both_apart, allowed, f"{_LARGER}{of_others}, ")
            for each in of_steps:
                if np.isfinite(each).all():
                    self._check_apart(_of_first(each, found), allowed, f"{_TRAINED}, ")
            if not any(each[4] for each in (found, *more)):
                raise LossError(
                    f"{self._doubt.sentence} And the gradient of this batch is 0, which cannot "
                    f"show it. Let the first call have another batch. {REMEDIES}"
                )
            if inner is not None:
                self._with_gates_turned(around, given, allowed)
            return
        raise self._not_computed("of all rows at once", failure) from failure

    def _not_computed(self, how: str, failure: Exception | None) -> LossError:
        said, of = str(failure).partition("\n")[0], ""
        if self._doubt.finding.kind is OverRows.OVER_SHARDS:
            of = f" {_OF_SHARDS}"
        return LossError(
            f"{self._doubt.sentence} And it cannot be computed {how}, to compare numbers: "
            f"{type(failure).__name__}: {said:.200}{of} {REMEDIES}"
        )

    def _comparing(self, around: Any, inner: Any) -> Callable[..., Any]:
        """Return ``_compared`` for a loss in two transformations, the outer one of all rows."""
        whole, outer = LossOver.BATCH, _composed(around, inner)
        of_all = changed(self._loss, over=whole, weight_fn=None, around=outer)
        of_each = changed(self._loss, around=inner)
        return functools.partial(self._compared, of_all, of_each, widen=inner is not None)

    def _with_gates_turned(
        self, around: Any, given: Sequence[tuple[Any, Any]], allowed: float
    ) -> None:
        """Compare the loss with another value of each condition and number that no row decides.

        So a term is compared that starts after a number of steps, whatever that is.
        """
        state, batch = given[0]
        rows, whole = self._config.loss.split(batch)
        of = lambda tree, bits: jax.tree.map(lambda _: bits, tree)
        both = state.params, state.frozen
        of_batch = join(of(rows, OF_ROWS), of(whole, OF_WHOLE))
        reads = of(state.model_state, OF_WHOLE), of(both, OF_PARAMS), of_batch
        like, gates = (state.model_state, both, batch), Gates()
        inner = functools.partial(_in_32_bits, like, reads=jax.tree.leaves(reads), gates=gates)
        compared, other = self._comparing(around, inner), "with another value where no row decides"

        def run(state: TrainState, batch: Any, numbers: Any) -> Any:
            gates.numbers = numbers
            return compared(state, batch)[0]

        try:
            jax.eval_shape(self._with_noise(run), np.uint32(0), state, batch, gates.numbers)
            tries = gates.tries() if gates.equations else []
            turns = range(max(len(given), len(tries)) if tries else 0)
            of_turn = [(*given[n % len(given)], tries[n % len(tries)]) for n in turns]
            found, _ = self._run(run, of_turn) if tries else ([], None)
        except Exception as error:  # a loss may raise anything with other values
            raise self._not_computed(other, error) from error
        lines = [_jax.source_of(each) for each in gates.equations]
        for (*_, numbers), each in zip(of_turn, found, strict=True):
            if np.isfinite(each).all():
                turned = [line for line, x in zip(lines, numbers, strict=False) if x and line]
                where = f" ({', '.join([*dict.fromkeys(turned)][:3])})" if turned else ""
                self._check_apart(_less_rounding(each), allowed, f"{other}{where}, ")

    # A loss of all rows that names the axes of the shards, which have the size 1.

    def _under_vmap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return it with axes of ``vmap``, which refuses some collectives over several."""

        def along(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            run = jax.vmap(function, None, axis_name=name, axis_size=1)
            return lambda *args: jax.tree.map(lambda x: x[0], run(*args))

        for name in self._layout.axes:
            function = along(name, function)
        return function

    def _by_hand(self, function: Callable[..., Any], *, of_each: bool) -> Callable[..., Any]:
        """Return it with axes of another mesh, which XLA refuses beside a callback to Python.

        XLA splits its work, or each device does all of it, if ``of_each``.
        """
        mesh, axes, sizes = self._layout.mesh, self._layout.axes, list[tuple[str, int]]()
        for name, size in mesh.shape.items():
            sizes += [(name, 1), (f"{name} of rows", size)] if name in axes else [(name, size)]
        names = [name for name, _ in sizes]
        types = (jax.sharding.AxisType.Auto,) * len(sizes)
        one = jax.sharding.Mesh(
            mesh.devices.reshape([size for _, size in sizes]), names, axis_types=types
        )
        by_hand = {name for name in names if name in axes or (of_each and name not in mesh.shape)}

        def run(*args: Any) -> Any:
            with _mesh.in_place_of_the_users_mesh(one):
                return _jax.shard_map(
                    lambda *args: jax.tree.map(jnp.asarray, function(*args)),
                    mesh=one,
                    axis_names=frozenset(by_hand),
                    in_specs=PartitionSpec(),
                    out_specs=PartitionSpec(),
                )(*args)

        return run

    def _compared(
        self,
        of_all: StepLoss,
        of_each: StepLoss,
        state: TrainState,
        batch: Any,
        *,
        widen: bool,
    ) -> Any:
        """Return how far two losses and their gradients are apart, both, and a gradient's norm.

        And how far apart the gradients of one leaf are at most, and which: beside a leaf with a
        large gradient nothing counts that the others are off.

        If the model state is in doubt: how far two of these are apart, in the place of losses.
        With that it returns the parameters after a step along the gradient.
        """
        params, state = state.params, self._of_one_group(state)
        if widen:
            state, batch = jax.tree.map(wide, (state, batch))
        pieces = self._config.loss.pieces(self._layout.number_of_shards)
        of_pieces = changed(of_each, accumulate_steps=pieces)
        found, states = [], [jax.tree.leaves(state.model_state)]
        for loss in (of_all, of_pieces):
            config = dataclasses.replace(self._config, loss=loss)
            reduced, after = config.reduced(self._layout, state, batch)
            found.append((reduced.extra["value"], jax.tree.leaves(reduced.values)))
            states.append(jax.tree.leaves(after))
        params = jax.tree.unflatten(
            jax.tree.structure(params), list(map(_moved, jax.tree.leaves(params), found[0][1]))
        )
        if self._doubt.of_state:
            of = ([tree[place] for tree in states] for place, _ in self._doubt.of_state)
            each = jnp.stack([_apart(*arrays) for arrays in of])
            largest, weight = jnp.max(each), self._config.loss.weight_fn
            # A step in which nothing counts leaves the state as it was, whatever the loss returns.
            counts = 1.0 if weight is None else 1.0 * (weight_of(weight, batch) != 0)
            largest = jnp.where(counts, largest, 0)
            return jnp.stack([*[largest] * 4, counts, 0.0, jnp.argmax(each)]), params
        (whole, slopes), (mean, others) = found
        if self._config.loss.is_summed:
            # Each shard may have its part of a sum.
            parts = self._layout.number_of_shards
            is_part = jnp.abs(whole - parts * mean) < jnp.abs(whole - mean)
            times = lambda x: jnp.where(is_part, parts * x, x)
            mean, others = times(mean), list(map(times, others))
        apart = [x - y for x, y in zip(slopes, others, strict=True)]
        norms = list(map(optax.tree.norm, (apart, slopes, others)))
        values = _relative(whole - mean, whole, mean)
        sizes = [jnp.stack(list(map(optax.tree.norm, tree))) for tree in (apart, slopes, others)]
        # Of a leaf whose gradient is 0 all is rounding, and where all gradients are.
        largest = jnp.maximum(*norms[1:])
        counts = sizes[0] > (_LEAST_WIDE if widen else _LEAST) * largest
        counts &= largest > _LEAST * jnp.abs(whole) / 10
        of_leaves = jnp.where(counts, _relative(*sizes), 0)
        worst = jnp.max(of_leaves), jnp.argmax(of_leaves)
        return jnp.stack([values, _relative(*norms), whole, mean, norms[1], *worst]), params

    def _check_apart(self, found: Any, allowed: float, numbers: str = "") -> None:
        """Raise if losses or gradients are further apart than is allowed, or float32 rounds.

        ``numbers`` says how the first batch was varied, if it was.
        """
        values, gradients, both, mean, _, of_leaf, leaf = map(float, found)
        allowed = max(_TOLERANCE, allowed)
        # False also of numbers that are not finite: they show nothing.
        if values <= allowed and gradients <= allowed and of_leaf <= _OF_LEAF * allowed:
            return
        if self._doubt.of_state:
            name = self._doubt.of_state[int(leaf)][1]
            numbers += f"{name} is {values:.2g} of the largest apart from that of the whole batch"
            if not math.isfinite(values):
                raise self._not_finite(f": {numbers}")
            raise LossError(f"{self._doubt.sentence} And by numbers it is not so: {numbers}.")
        numbers += (
            f"of rows of the whole batch the loss is {both:.6g}, and the mean of the shards' "
        )
        numbers += f"losses is {mean:.6g}"
        if gradients > allowed or not of_leaf > _OF_LEAF * allowed:
            numbers += f"; the gradients are {gradients:.2g} of the largest apart" * bool(gradients)
        else:
            name = jax.tree_util.keystr(self._paths[int(leaf)])
            numbers += f"; the gradients of params{name} are {of_leaf:.2g} of the largest apart"
        if not all(map(math.isfinite, (both, mean, gradients))):
            raise self._not_finite(f": {numbers}")
        by_itself = self._doubt.finding.kind is OverRows.OVER_SHARDS
        pieces = self._config.loss.accumulate_steps
        alone = "A microbatch sees only its own rows: leave accumulate_steps out. "
        told = f"{_OF_SHARDS} {alone * (pieces > 1)}" if by_itself else f"{_COUNTS} "
        raise LossError(
            f"{self._doubt.sentence} And by numbers it is not so: {numbers}. {told}{REMEDIES}"
            + LEAVE_OUT * (pieces > 1 and not by_itself)
        )

    # Single operations.

    def comparison(self) -> None:
        """Raise if the operations compute each row alone, so that what follows compares rows.

        The numbers of one batch may hide that, such as rewards that are all 0, or an addend that
        is smaller than what bfloat16 rounds off.
        """
        try:
            self.operations()
        except (_NotDecidedError, LossError):
            return
        alone = ", ".join(self._doubt.finding.assumes)
        raise LossError(
            f"{self._doubt.sentence} And by numbers it is not so: each row is computed alone by "
            f"{alone}, and then rows are compared. {REMEDIES}"
        )

    def operations(self) -> None:
        """Try, one by one, the operations of which nothing is known.

        Raises:
          _NotDecidedError: more is in doubt, or some cannot be tried.
        """
        layout, loss = self._layout, self._loss
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
            keys = (self._keys((loss.number_of_rows(batch),) * loss.key_per_row),) * loss.takes_rng

            def of_params(both: Any) -> Any:
                of_loss = lambda *arguments: loss.of_arguments(before, *arguments).loss
                of_rows = lambda rows: loss.arguments(before, both, join(rows, whole), keys)
                given, trial = [of_rows(one), of_rows(behind(one, other))], Trial(Assumptions())
                traces = [jax.make_jaxpr(of_loss, return_shape=True)(*x) for x in given]
                jaxprs, (_, inputs) = [jaxpr for jaxpr, _ in traces], facts_of(loss, given[1])
                number = loss.number_of_rows(one)
                facts = facts_of_outputs(jaxprs, inputs, number, 2, shards.axes, trial.assumed)
                returned = jax.tree.unflatten(jax.tree.structure(traces[1][1]), facts)
                if finding_of(returned).kind is OverRows.UNDECIDED:
                    raise _NotDecidedError
                trial.evaluate(jaxprs[1], jax.tree.leaves(given[1]))
                if trial.reached != set(trial.assumed.names()) or not trial.apart:
                    raise _NotDecidedError
                trials.append(trial.tried)
                return jnp.stack(trial.apart)[None]

            with shard_context(shards.num_shards, axis_name=shards.axes):
                return to_read(layout, before).call_on_both(of_params, before.params, before.frozen)

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
            (first, *more), _ = self._run(on_shards, [self._given], self._varied()[0])
        except Exception as error:  # a loss may raise anything on other shapes
            raise _NotDecidedError from error
        # Not of numbers that only the variation made not finite.
        found = np.concatenate([first, *(each for each in more if np.isfinite(each).all())])
        worst = np.argmax(np.nan_to_num(found[..., 1], nan=np.inf), 0)
        apart = found[worst, np.arange(found.shape[1])]
        for (operation, change), (distance, allowed) in zip(trials[-1], apart, strict=True):
            # True also of numbers that are not finite.
            if not allowed <= 1:
                if not math.isfinite(distance):
                    raise self._not_finite(f" of {operation}")
                raise LossError(
                    f"{self._doubt.sentence} And by numbers it is not so: of the same rows "
                    f"{change}, the results of {operation} are {distance:.2g} of their "
                    f"size apart. {REMEDIES}"
                )

    def _two_pieces(self, rows: Any, of_rows: Any) -> tuple[Any, Any]:
        """Return the rows of two pieces: of this shard and another, or two of the only shard."""
        loss, shards = self._config.loss, self._layout.shards
        number = loss.batch_axes.lengths(rows)[0] // loss.pieces(shards.num_shards)
        of = lambda part: jax.tree.map(lambda x, axis: take_rows(x, axis, part), rows, of_rows)
        one = of(slice(number))
        if shards.num_shards == 1:
            return one, of(slice(number, 2 * number))
        to_next = [(place, (place + 1) % shards.num_shards) for place in range(shards.num_shards)]
        return one, jax.tree.map(lambda x: lax.ppermute(x, shards.axes, to_next), one)


def _composed(*arounds: Any) -> Any:
    """Return transformations of a function as one, the first outermost; ``None`` without any."""
    some = [each for each in arounds if each is not None]
    return functools.reduce(lambda one, other: lambda x: one(other(x)), some) if some else None


def _in_32_bits(
    like: Any,
    function: Callable[..., Any],
    *,
    reads: Sequence[int] = (),
    gates: Gates | None = None,
) -> Callable[..., Any]:
    """Return a function in which floats of 16 bits have 32, in which numbers show more.

    It is traced with the dtypes of ``like``, its first arguments; ``reads`` and ``gates`` are those
    of ``with_gates_turned``, of these arguments, if gates are to be turned.
    """
    dtypes = [x.dtype for x in jax.tree.leaves(like)]

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        types = [jax.typeof(x) for x in leaves]
        types[: len(dtypes)] = [x.update(dtype=of) for x, of in zip(types, dtypes, strict=False)]
        jaxpr, returned = jax.make_jaxpr(function, return_shape=True)(*tree.unflatten(types))
        if gates is None:
            found = in_32_bits(jaxpr, leaves)
        else:
            # The keys come last, and count as rows.
            of_keys = [OF_ROWS] * (len(leaves) - len(reads))
            found = with_gates_turned(jaxpr, leaves, [*reads, *of_keys], gates)
        return jax.tree.unflatten(jax.tree.structure(returned), found)

    return run


def _less_rounding(found: Any) -> Any:
    """Return what ``_compared`` did, with the gradients' distance relative to the loss at least.

    Where outliers saturate units, rounding is most of what is left of a gradient.
    """
    values, gradients, both, mean, norm, *of_leaf = found
    share = norm / max(norm, abs(both) / 10) if norm else 1.0
    return values, gradients * share, both, mean, norm, *of_leaf


def is_ended_by_numbers(equation: Any) -> bool:
    """Return whether it is a loop that anything but a count of its turns may end."""
    call = control_flow(equation)
    if not isinstance(call, While):
        return False
    compared = [x.aval.dtype for each in opened(call.cond).eqns for x in each.invars]
    return not compared or not all(jnp.issubdtype(dtype, jnp.integer) for dtype in compared)


def _of_first(found: Any, first: Any) -> Any:
    """Return what ``_compared`` did of trained parameters, relative to the first ones.

    Of what is left of a loss, or of a gradient, most may be rounding; another loss differs in both.
    """
    values, gradients, whole, mean, norm, _, leaf = found
    share = lambda x, of: abs(x) / max(abs(x), abs(of)) if x else 0.0
    apart = values * share(whole, first[2]), gradients * share(norm, first[4])
    return min(apart), 0, whole, mean, norm, 0, leaf


def _moved(x: Any, slope: Any) -> Any:
    """Return a parameter after a step along its gradient."""
    size = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(x))), 1)
    return (x - _OF_SIZE * size * jnp.sign(slope)).astype(x.dtype)


def _apart(before: Any, whole: Any, mean: Any) -> jax.Array:
    """Return how far two changes of a state are apart, relative to these, but for rounding."""
    # Sums in another order are less exact, and coarser floats are rounded once more.
    eps = float(jnp.finfo(whole.dtype).eps) if is_inexact(whole) else 0.0
    rounding = max(16 * float(jnp.finfo(jnp.float32).eps), 2 * eps) if eps else 0.0
    was, one, other = (jnp.asarray(x, jnp.float32) for x in (before, whole, mean))
    was = jnp.where(jnp.isfinite(was), was, 0)
    # What is infinite in both, or in NaN, is the same.
    same = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    norm = lambda x: optax.tree.norm(jnp.where(same & ~jnp.isfinite(one), 0, x))
    apart = norm(one - other)
    found = _relative(apart, norm(one - was), norm(other - was))
    return jnp.where(apart <= rounding * norm(one), 0, found)


def _relative(difference: Any, *values: Any) -> jax.Array:
    largest = jnp.maximum(*map(jnp.abs, values))
    return jnp.where(difference == 0, 0, jnp.abs(difference) / largest).astype(jnp.float32)


def _check_weight(config: StepConfig, batch: Any, finding: Finding, divisor: Divisor) -> None:
    """Raise unless the weight and the divisor are equal in each piece of a batch."""
    loss, axes = config.loss, config.axes
    weight, pieces = loss.weight_fn, loss.pieces(config.number_of_shards)
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
    everywhere = jax.NamedSharding(config.mesh, PartitionSpec())
    found = jax.device_get(jax.jit(run, out_shardings=everywhere)(batch))
    for place, (of_weight, divides) in enumerate(found):
        if not are_equal(of_weight, divides):
            of = f"In part {place} of {len(found)} of this batch" if len(found) > 1 else "Here"
            numbers = f"{of} the loss divides by {divides:.7g}, and weight= is {of_weight:.7g}.\n"
            raise wrong_weight_error(weight, finding, numbers)
