"""ShardLoss: the loss and gradient of one shard's rows, in one piece or in microbatches."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from crossshard.gradients.local import split_loss
from crossshard.gradients.scalars import is_inexact
from crossshard.jaxprs.mean_over_rows import over_rows
from crossshard.model import model_state as model_states
from crossshard.model.model_state import ModelState
from crossshard.model.models import after_loss, check_not_written, combine
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import Gradients
from crossshard.pipeline.stages.accumulate import Sums, zeros
from crossshard.shards.batch_axes import FIRST, BatchAxes, join
from crossshard.shards.context import shard_context
from crossshard.shards.random_streams import is_key, keys_of_rows, quiet_keys
from crossshard.step import aux_reduction
from crossshard.step.at_use import AtUse
from crossshard.step.aux_reduction import AuxReduction
from crossshard.step.loss_over import LossOver
from crossshard.step.microbatches import Compute, LocalResult, over_microbatches, pieces_of
from crossshard.step.over_rows import OverRowsRecord, check_over_rows
from crossshard.step.virtual_shards import check_rows_divide, over_virtual_shards
from crossshard.step.weight import Weight, check_weight_is_read, weight_of

# The random key of a loss, or its keys; empty if it takes none.
Keys = tuple[jax.Array, ...]


class Returned(NamedTuple):
    """What a loss returned, and what it left behind.

    Attributes:
      loss: the loss.
      aux: what it returned besides.
      written: the parameters after it.
      model_state: the model state after it.
    """

    loss: Any
    aux: Any
    written: Any
    model_state: Any


class OfRows(NamedTuple):
    """A loss as a function of rows.

    Attributes:
      loss: takes the rows, what has no rows, and what differs from shard to shard.
      rows: the rows, and their keys.
      others: what has no rows: the parameters, the trained and the frozen ones, are the second.
      own: what differs from shard to shard.
      axes: for each array of the rows the axis along which they lie.
    """

    loss: Callable[..., Any]
    rows: Any
    others: tuple[Any, Any, Any]
    own: Any
    axes: list[int]


@dataclasses.dataclass(frozen=True)
class ShardLoss:
    """The loss of a step, as a function of one shard's state and rows.

    Attributes:
      function: the loss of some rows of the batch.
      takes_rng: whether it takes a PRNG key.
      has_aux: whether it returns ``(loss, aux)``.
      weight: the weight function of the mean; ``None`` if all shards count the same.
      accumulate_steps: the number of microbatches of a shard's rows.
      model_state: how the state that it returns is kept; ``None`` if it returns none.
      aux_reduction: how ``aux`` is reduced over the shards, a pytree prefix of it.
      batch_axes: along which axes the arrays of the batch are split.
      over: what it is given: a shard's rows, or those of the whole batch.
      keys_of_rows: whether it takes a key for each row.
      is_summed: whether the shards' losses are added up.
      virtual_shards: how many virtual shards all shards compute; ``None`` without them.
      record: what its trace has shown it to be in the rows of its batch.
    """

    function: Callable[..., Any]
    takes_rng: bool = False
    has_aux: bool = False
    weight: Weight | None = None
    accumulate_steps: int = 1
    model_state: ModelState | None = None
    aux_reduction: Any = AuxReduction.PER_SHARD
    batch_axes: BatchAxes = FIRST
    over: LossOver = LossOver.SHARD
    keys_of_rows: bool = False
    is_summed: bool = False
    virtual_shards: int | None = None
    record: OverRowsRecord = dataclasses.field(
        default_factory=OverRowsRecord, compare=False, repr=False
    )

    @property
    def is_over_batch(self) -> bool:
        """Whether it is given all rows of the batch, so that nothing of it is to be reduced."""
        return self.over is LossOver.BATCH

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """A batch without its whole arrays, and with these alone; see ``BatchAxes.split``."""
        return self.batch_axes.split(batch)

    def number_of_rows(self, batch: Any) -> int:
        """The number of rows of a batch."""
        lengths = self.batch_axes.map(lambda x, axis: x.shape[axis], self.split(batch)[0])
        return int(jax.tree.leaves(lengths)[0])

    def parts(self, shards: int) -> int:
        """How many virtual shards, or else shards, have a loss of their own."""
        return self.virtual_shards or shards

    def pieces(self, shards: int) -> int:
        """How many pieces a shard's rows are cut into."""
        return self.parts(shards) // shards * self.accumulate_steps

    def local_gradient(
        self, state: TrainState, batch: Any, at_use: AtUse, scale: Any
    ) -> LocalResult:
        """One shard's loss and gradients, or the sums over its virtual shards.

        Args:
          state: this shard's state.
          batch: its rows of the batch.
          at_use: how it gets its parameters.
          scale: float[], the loss scale; ``None`` without one.
        """
        shard = at_use.shards.index()
        if self.virtual_shards is None:
            return self._of_shard(state, batch, at_use, scale, shard)
        count = self.virtual_shards // at_use.shards.number
        rows, whole = self.split(batch)
        check_rows_divide(self.number_of_rows(batch), count, self.accumulate_steps)

        def compute(index: Any, rows: Any, given: Any) -> tuple[LocalResult, dict[str, Any]]:
            params, frozen, model_state, whole = given
            here = dataclasses.replace(state, params=params, frozen=frozen, model_state=model_state)
            index = shard * count + index
            local = self._of_shard(here, join(rows, whole), at_use, scale, index)
            return local, self.sums(local)

        given = state.params, state.frozen, state.model_state, whole
        pieces = pieces_of(rows, self.batch_axes, count)
        return over_virtual_shards(count, compute, pieces, given, state, at_use)

    def _of_shard(
        self, state: TrainState, batch: Any, at_use: AtUse, scale: Any, shard: Any
    ) -> LocalResult:
        """The loss and gradients of the shard, or the virtual one, with this index."""
        number, (rows, whole) = self.accumulate_steps, self.split(batch)

        def compute(rows: Any, model_state: Any, index: Any, at_use: AtUse) -> LocalResult:
            here = dataclasses.replace(state, model_state=model_state)
            return self._of_rows(here, join(rows, whole), at_use, scale, shard, index)

        if number == 1:
            return compute(rows, state.model_state, 0, at_use)

        # The rows divide, or they would not have been placed.
        pieces = pieces_of(rows, self.batch_axes, number, interleaved=self.is_over_batch)

        def with_(at_use: AtUse) -> Compute:
            return lambda rows, model_state, index: compute(rows, model_state, index, at_use)

        # Whole gradients are added up, and the last microbatch sums them over the shards.
        every, last = at_use, None
        if not at_use.in_parts:
            every = dataclasses.replace(at_use, waits=True)
            of_one = jax.tree.map(lambda x: x[0], pieces)
            if self._sums_in_loops(with_(at_use), of_one, state):
                # The backward pass adds gradients of the scaled loss to them.
                last = lambda sums: with_(dataclasses.replace(at_use, before=_scaled(sums, scale)))
        local, aux, weights = over_microbatches(
            number,
            with_(every),
            zeros(every.types_of_gradients(state.params)),
            every.early,
            state.model_state,
            pieces,
            last,
        )
        return local._replace(aux=aux_reduction.of_microbatches(self.aux_reduction, aux, weights))

    @staticmethod
    def _sums_in_loops(compute: Compute, rows: Any, state: TrainState) -> bool:
        """Whether the loss has loops in whose backward pass gradients are summed."""
        found: list[bool] = []
        look = lambda *args: found.append(any(compute(*args).early))
        jax.eval_shape(look, rows, state.model_state, jnp.int32(0))
        return found[0]

    def _of_rows(
        self,
        state: TrainState,
        batch: Any,
        at_use: AtUse,
        scale: Any,
        shard: Any,
        index: Any,
    ) -> LocalResult:
        """The loss and gradients of some rows, those of this microbatch of a shard."""
        shards, keys = at_use.shards, self._keys(state, batch, shard, index)

        def run(params: Any, batch: Any = batch, keys: Any = keys) -> Returned:
            return self._run(state, params, batch, keys)

        def loss_of(params: Any) -> tuple[Any, Any]:
            found: tuple[Any, Any] = at_use.with_frozen(
                lambda frozen: loss_of_both((params, frozen)), state.frozen
            )
            return found

        def loss_of_both(both: tuple[Any, Any]) -> tuple[Any, Any]:
            out = run(both)
            aux_reduction.check_aux(out.aux)
            check_not_written(out.written, both, lambda both: run(both).written)
            return out.loss, (out.model_state, out.aux)

        weight = None if self.weight is None else weight_of(self.weight, batch)
        with shard_context(shards.number, axis_name=shards.axes):
            types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)
            if self.weight is not None:
                of_batch = lambda batch, both: run(both, batch).loss
                check_weight_is_read(self.weight, batch, of_batch, types)
            number = self.parts(shards.number) * self.accumulate_steps
            if self.over is LossOver.ROWS and number > 1:
                self._check_over_rows(state, batch, keys, types, number)
            if self.model_state is ModelState.MEAN and not self.is_over_batch:
                self._check_equal(state, types, batch, run, keys)
            with jax.named_scope("loss"):
                found = at_use.value_and_grad(loss_of, state.params, weight, scale)
        loss, (after, aux) = found.out
        if weight is not None:
            after = model_states.unless_weightless(
                self.model_state, weight, after, state.model_state
            )
        return LocalResult(jnp.asarray(loss), found.gradients, weight, after, aux, found.early)

    def _keys(self, state: TrainState, batch: Any, shard: Any, index: Any) -> Keys:
        """The key of some rows, or their keys; none if the loss takes none."""
        if not self.takes_rng:
            return ()
        key = jax.random.wrap_key_data(state.rng, impl=state.rng_impl)
        number = self.accumulate_steps
        if not self.keys_of_rows:
            count = state.step if number == 1 else state.step * number + index
            of_step = jax.random.fold_in(key, count)
            return (jax.random.fold_in(of_step, shard),)
        each = jnp.arange(self.number_of_rows(batch))
        # As the microbatches are cut.
        places = each * number + index if self.is_over_batch else index * len(each) + each
        places += shard * number * len(each)
        return (keys_of_rows(jax.random.fold_in(key, state.step), places),)

    def _run(self, state: TrainState, params: Any, batch: Any, keys: Keys) -> Returned:
        """What the loss returns of some rows, given its trained and its frozen parameters."""
        trained, frozen = params
        model = combine(state.skeleton, trained, frozen, state.model_state)
        if self.model_state is None:
            loss, aux = split_loss(self.function(model, batch, *keys), self.has_aux)
            return Returned(
                loss, aux, *after_loss(state.skeleton, model, params, state.model_state)
            )
        # A copy, since Equinox's State may be used once.
        before = jax.tree.map(lambda x: x, state.model_state)
        after, out = model_states.split_state(
            self.function(model, before, batch, *keys), self.has_aux
        )
        after = model_states.check_returned(state.model_state, after)
        return Returned(*split_loss(out, self.has_aux), params, after)

    def _check_over_rows(
        self, state: TrainState, batch: Any, keys: Keys, types: Any, number: int
    ) -> None:
        """Raise if the loss is no mean over rows, of ``number`` pieces; see ``check_over_rows``."""
        rows, _ = self.split(batch)
        loss, given, others, own, axes = self._as_of_rows(state, batch, keys, types)
        # The second trace has the rows of the batch, or as many more as a power of 2.
        times = 1 << (number - 1).bit_length()
        leaves, tree = jax.tree.flatten((given, others, own))
        key = state.skeleton, tree, times, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)
        # With microbatches a step traces its loss several times.
        if key not in self.record.known:
            self.record.known[key] = over_rows(
                loss, given, *others, own=own, axes=axes, times=times
            )
        finding = self.record.latest = self.record.known[key]
        check_over_rows(
            finding,
            rows,
            weight=self.weight,
            summed=self.is_summed,
            microbatches=self.accumulate_steps,
            record=self.record,
        )

    def _as_of_rows(self, state: TrainState, batch: Any, keys: Keys, both: Any) -> OfRows:
        """The loss as ``over_rows`` takes it, given its trained and its frozen parameters."""
        rows, whole = self.split(batch)
        of_rows, of_shard = (keys, ()) if self.keys_of_rows else ((), keys)
        # All shards have the same state, keys in it too, if it is averaged.
        equal = self.model_state is ModelState.MEAN
        of_all, of_one = (state.model_state, None) if equal else (None, state.model_state)

        def loss(given: Any, whole: Any, both: Any, of_all: Any, own: Any) -> Any:
            (rows, of_rows), (of_shard, of_one) = given, own
            here = of_all if equal else of_one
            return self._run(
                dataclasses.replace(state, model_state=here),
                both,
                join(rows, whole),
                (*of_rows, *of_shard),
            ).loss

        axes = [*self.batch_axes.of_rows(rows), *[0] * len(of_rows)]
        return OfRows(loss, (rows, of_rows), (whole, both, of_all), (of_shard, of_one), axes)

    def quiet(self, state: TrainState, batch: Any) -> tuple[TrainState, Keys]:
        """The state, and the keys, with which the noise of the loss is switched off."""
        shape = (self.number_of_rows(batch),) if self.keys_of_rows else ()
        keys = (quiet_keys(shape),) if self.takes_rng else ()
        quiet = lambda x: quiet_keys(x.shape) if is_key(x) else x
        model_state = jax.tree.map(quiet, state.model_state)
        return dataclasses.replace(state, model_state=model_state), keys

    def quiet_of_rows(self, state: TrainState, batch: Any, both: Any) -> OfRows:
        """The loss with its noise switched off, as a function of rows; see ``_as_of_rows``."""
        here, keys = self.quiet(state, batch)
        return self._as_of_rows(here, batch, keys, both)

    def quiet_gradient(self, state: TrainState, batch: Any, at_use: AtUse) -> LocalResult:
        """The loss of some rows with its noise switched off, and its gradient.

        Args:
          state: one shard's state.
          batch: some rows of the batch.
          at_use: how the shard gets its parameters.
        """
        here, keys = self.quiet(state, batch)

        def loss_of(trained: Any) -> tuple[Any, None]:
            of_both = lambda frozen: self._run(here, (trained, frozen), batch, keys).loss
            return at_use.with_frozen(of_both, state.frozen), None

        weight = None if self.weight is None else weight_of(self.weight, batch)
        with shard_context(at_use.shards.number, axis_name=at_use.shards.axes):
            found = at_use.value_and_grad(loss_of, state.params, weight, None)
        return LocalResult(found.out[0], found.gradients, weight, None, None, found.early)

    def _check_equal(
        self,
        state: TrainState,
        both: tuple[Any, Any],
        batch: Any,
        run: Callable[..., Returned],
        keys: Keys,
    ) -> None:
        """Raise if model state that is not averaged would differ between shards."""
        rows, whole = self.split(batch)

        def of_own(own: tuple[Any, Any], both: tuple[Any, Any]) -> Any:
            rows, keys = own
            return run(both, join(rows, whole), keys).model_state

        model_states.check_equal(state.model_state, of_own, (rows, keys), both)

    def with_weight(self, local: LocalResult, weight: Any, before: TrainState) -> LocalResult:
        """What one shard computes, with another weight: with 0 its model state stays as before."""
        after = model_states.unless_weightless(
            self.model_state, weight, local.model_state, before.model_state
        )
        return local._replace(weight=weight, model_state=after)

    # What is reduced with the gradients.

    def sums(self, local: LocalResult) -> dict[str, Any]:
        """What the aggregate must sum, by name, besides the gradients and the loss."""
        if self.is_over_batch:
            return {}
        if local.sums is not None:
            return local.sums
        of_state = model_states.to_reduce(self.model_state, local.model_state, local.weight)
        return of_state | aux_reduction.to_reduce(self.aux_reduction, local.aux, local.weight)

    def settled_state(self, local: LocalResult, gradients: Gradients, number: int) -> Any:
        """The model state for the next step, given the reduced gradients of ``number`` shards."""
        if self.is_over_batch:
            return local.model_state
        return model_states.settled(self.model_state, local.model_state, gradients, number)

    def reduced_aux(
        self, local: LocalResult, gradients: Gradients, number: int, grouped: bool
    ) -> Any:
        """One shard's ``aux`` as the metrics store it, given the reduced gradients."""
        return aux_reduction.reduced(
            self.aux_reduction,
            local.aux,
            gradients,
            number,
            grouped=grouped,
            stacked=self.virtual_shards is not None,
        )

    def aux_specs(self, each: Any, reduced: Any) -> Any:
        """The specs of ``aux``, given that of per-shard and that of reduced values."""
        is_per_shard = lambda reduction: reduction is AuxReduction.PER_SHARD
        return jax.tree.map(lambda x: each if is_per_shard(x) else reduced, self.aux_reduction)


def _scaled(sums: Sums, scale: Any) -> Sums:
    """The sums of microbatches as those of the scaled loss."""
    values, loss, weight = sums
    one = lambda x: x * scale.astype(x.dtype) if is_inexact(x) else x
    return sums if scale is None else (jax.tree.map(one, values), loss, weight)
