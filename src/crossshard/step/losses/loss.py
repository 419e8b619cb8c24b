"""StepLoss: the loss of a step and its gradient, in one piece or in microbatches."""

import abc
import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun

from crossshard import _check, _jax
from crossshard._check import is_inexact
from crossshard.errors import ArgumentError
from crossshard.gradients.autodiff import split_loss
from crossshard.gradients.mean import Mean, counts_of, per_row, sums_of
from crossshard.gradients.status import GradientStatus
from crossshard.jaxprs.mean_over_rows import Finding, facts_of_inputs, prove, types_with
from crossshard.jaxprs.rewrite import opaque_false
from crossshard.jaxprs.row_facts import OverRows
from crossshard.model import model_state as model_states
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import ModelState
from crossshard.model.models import after_loss, check_not_written, combine
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import Gradients, StageContext
from crossshard.pipeline.stages.accumulate import Sums, zeros
from crossshard.shards.axes import get_shard_context, shard_context
from crossshard.shards.batch_axes import FIRST, BatchAxes, join
from crossshard.shards.random_streams import is_key, keys_of_rows, quiet_keys
from crossshard.step.gather import AtUse
from crossshard.step.microbatches import (
    AuxReduction,
    Compute,
    LocalResult,
    aux_of_microbatches,
    check_aux,
    over_microbatches,
    pieces_of,
)
from crossshard.step.over_rows import OverRowsRecord, check_over_rows, finding_of
from crossshard.step.weight import (
    Counting,
    Divisor,
    Weight,
    as_mean,
    check_takes_mean,
    check_weight_is_read,
    check_weight_of_mean,
    counts_of_pieces,
    divisor_of,
    is_exact,
    pruned,
    weight_of,
)

# The random key of a loss, or its keys; empty if it takes none.
Keys = tuple[jax.Array, ...]


class LossOver(enum.StrEnum):
    """What the loss is given, and so what it is a loss of.

    ROWS: each shard's rows; it is proven to be a mean over rows, so that the mean over the shards
      is that of the batch.
    BATCH: all rows of the batch, as global arrays, whose work XLA splits.
    SHARD: each shard's rows; each shard's own loss is meant, whatever it does with its rows.

    >>> LossOver("batch")
    <LossOver.BATCH: 'batch'>
    """

    ROWS = "rows"
    BATCH = "batch"
    SHARD = "shard"


class RngPer(enum.StrEnum):
    """What has a random key of its own in a step.

    SHARD: each shard, so that noise depends on the number of shards; with a loss over the batch
      there is one key.
    ROW: each row, by its place in the global batch, so that noise depends on nothing else.

    >>> RngPer("row")
    <RngPer.ROW: 'row'>
    """

    SHARD = "shard"
    ROW = "row"


def check_rng_per(rng_per: object, *, takes_rng: bool) -> RngPer:
    """The checked ``rng_per`` option.

    Raises:
      ArgumentError: it is unknown, or the loss takes no key.
    """
    found = _check.choice("rng_per", rng_per, RngPer)
    if found is RngPer.ROW and not takes_rng:
        raise ArgumentError(
            "rng_per='row' passes the loss a key for each row, and this one takes none. Write "
            "loss_fn(params, batch, rng), whose rng has the shape [rows]; or leave rng_per out."
        )
    return found


class Returned(NamedTuple):
    """What a loss returned, and what it left behind.

    Attributes:
      loss: the loss, a number or a ``Mean``.
      aux: what it returned besides.
      written: the parameters after it.
      model_state: the model state after it.
    """

    loss: Any
    aux: Any
    written: Any
    model_state: Any


class Arguments(NamedTuple):
    """What a loss is computed from.

    Attributes:
      given: the rows of the batch, and their keys.
      whole: the entries of the batch that have no rows.
      both: the parameters, trained and frozen.
      of_all: the model state, if all shards have the same.
      own: the key of the shard, and its model state.
    """

    given: Any
    whole: Any
    both: Any
    of_all: Any
    own: Any


class Work(NamedTuple):
    """What each shard has to do with a batch.

    Attributes:
      given: what it is given, which enters ``shard_map``.
      specs: how that is split over the shards.
      of_shard: from a shard's state, what it is given, and its weight if it may be left out, to its
        loss and gradients; and to the types of these.
      aux: what the loss of the whole batch returned besides; ``None`` if each shard has its own.
    """

    given: Any
    specs: Any
    of_shard: Callable[[TrainState, Any, Any], tuple[LocalResult, Any]]
    aux: Any = None


@dataclasses.dataclass(frozen=True)
class StepLoss(abc.ABC):
    """The loss of a step, as a function of a state and rows.

    What it is over its finals say: the rows of each shard, those of the batch, or those of each
    virtual shard.

    Attributes:
      function: the loss of some rows of the batch.
      takes_rng: whether it takes a PRNG key.
      has_aux: whether it returns ``(loss, aux)``.
      weight: the weight function of the mean; ``None`` if all shards count the same.
      accumulate_steps: the number of microbatches of a shard's rows.
      model_state: how the state that it returns is kept; ``None`` if it returns none.
      aux_reduction: how ``aux`` is reduced over the shards, a pytree prefix of it.
      batch_axes: along which axes the arrays of the batch are split.
      over: what the user says that it is over.
      keys_of_rows: whether it takes a key for each row.
      is_summed: whether the shards' losses are added up.
      same_bits: of how many parts it is, if no bit may depend on the number of shards that have
        them; ``None`` if some may.
      record: what its trace has shown it to be in the rows of its batch.
      status: the status of its gradients.
      has_one_state: whether there is one state of all rows, and so no weight of some.
      is_interleaved: whether its rows are those of all shards, of which a microbatch has some.
      gradient: its gradient in words; empty if it is each shard's local one.
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
    same_bits: int | None = None
    record: OverRowsRecord = dataclasses.field(
        default_factory=OverRowsRecord, compare=False, repr=False
    )

    status: ClassVar[GradientStatus] = GradientStatus.LOCAL
    has_one_state: ClassVar[bool] = False
    is_interleaved: ClassVar[bool] = False
    gradient: ClassVar[str] = ""

    # What it is over.

    @abc.abstractmethod
    def work(
        self,
        layout: StateLayout,
        state: TrainState,
        batch: Any,
        at_use: AtUse,
        scale: Callable[[TrainState], Any],
    ) -> Work:
        """What each shard has to do with a batch.

        Args:
          layout: the layout of the state.
          state: the state, of global arrays.
          batch: the batch, its rows split over the shards.
          at_use: how a shard gets its parameters.
          scale: the loss scale of a state, float[]; ``None`` without one.
        """

    @abc.abstractmethod
    def in_context(self, context: StageContext) -> StageContext:
        """The context of the stages for gradients of this loss."""

    @abc.abstractmethod
    def alone(self) -> "StepLoss":
        """The same of all rows in one piece, if it is a mean of pieces."""

    @abc.abstractmethod
    def check_state(self, state: TrainState) -> None:
        """Raise ArgumentError unless it can keep the model state of this state."""

    @abc.abstractmethod
    def sums(self, local: LocalResult) -> dict[str, Any]:
        """What the aggregate must sum, by name, besides the gradients and the loss."""

    @abc.abstractmethod
    def settled_state(self, local: LocalResult, gradients: Gradients, number: int) -> Any:
        """The model state for the next step, given the reduced gradients of ``number`` parts."""

    @abc.abstractmethod
    def reduced_aux(
        self, local: LocalResult, gradients: Gradients, number: int, grouped: bool
    ) -> Any:
        """One shard's ``aux`` as the metrics store it, given the reduced gradients."""

    @abc.abstractmethod
    def aux_specs(self, each: Any, reduced: Any) -> Any:
        """The specs of ``aux``, given that of per-shard and that of reduced values."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """A batch without its whole arrays, and with these alone; see ``BatchAxes.split``."""
        return self.batch_axes.split(batch)

    def number_of_rows(self, batch: Any) -> int:
        """The number of rows of a batch."""
        return int(self.batch_axes.lengths(self.split(batch)[0])[0])

    def parts(self, shards: int) -> int:
        """How many parts of the batch have a loss of their own."""
        return self.same_bits or shards

    def apart(self, state: TrainState) -> jax.Array | None:
        """An ``opaque_false`` for the update, if its bits must not depend on the shards."""
        return None if self.same_bits is None else opaque_false(state.step)

    def pieces(self, shards: int) -> int:
        """How many pieces a shard's rows are cut into."""
        return self.parts(shards) // shards * self.accumulate_steps

    def is_of_parts(self, shards: int) -> bool:
        """Whether what it is in its rows matters, as it is computed of several pieces of them."""
        return self.over is not LossOver.BATCH and shards * self.pieces(shards) > 1

    def of_shard(
        self, state: TrainState, batch: Any, at_use: AtUse, scale: Any, weight: Any = None
    ) -> LocalResult:
        """The loss and gradients of one shard's rows.

        Args:
          state: this shard's state.
          batch: its rows of the batch.
          at_use: how it gets its parameters.
          scale: float[], the loss scale; ``None`` without one.
          weight: float[], 0 if this shard is left out of a ``Mean``, else 1; ``None`` if none is.
        """
        shard = at_use.shards.index()
        in_pieces = self.pieces(at_use.shards.number) > 1
        counting = self._begin(state, batch, at_use, weight, in_pieces=in_pieces)
        return self._of_shard(state, batch, at_use, scale, shard, counting)

    def _begin(
        self, state: TrainState, batch: Any, at_use: AtUse, weight: Any, *, in_pieces: bool
    ) -> Counting:
        """How a ``Mean`` is counted in the step that is traced from here on."""
        self.record.traces.clear()
        # Unknown for a step that is traced anew, whose batch may have other entries.
        self.record.returns_mean = None
        counting = Counting(at_use.shards, self.pieces(at_use.shards.number), weight)
        if in_pieces:
            counting = counting.with_counts(self._counts(state, batch, at_use, counting))
        return counting

    def _counts(
        self, state: TrainState, batch: Any, at_use: AtUse, counting: Counting
    ) -> tuple[Any, ...] | None:
        """What all pieces of the batch count, if the loss returns a ``Mean``; else ``None``."""
        shard, (rows, whole) = at_use.shards.index(), self.split(batch)
        number = self.accumulate_steps

        def of_piece(rows: Any, model_state: Any, shard: Any, index: Any) -> tuple[Any, Any]:
            here, batch = dataclasses.replace(state, model_state=model_state), join(rows, whole)
            keys = self._keys(here, batch, shard, index)
            run = self._once_traced(here, batch, keys, at_use)
            run, _ = self._weighed(run, here, batch, keys, at_use)

            def of_both(both: tuple[Any, Any]) -> tuple[Any, Any]:
                out = run(both)
                self.record.returns_mean = isinstance(out.loss, Mean)
                counts = counts_of(out.loss) if isinstance(out.loss, Mean) else ()
                return counts, out.model_state

            of_params = lambda params: at_use.with_frozen(
                lambda frozen: of_both((params, frozen)), state.frozen
            )
            found: tuple[Any, Any] = at_use.call(of_params, state.params)
            return found

        def of_shard(rows: Any, shard: Any) -> Any:
            pieces = pieces_of(rows, self.batch_axes, number, interleaved=self.is_interleaved)
            count = lambda rows, model_state, index: of_piece(rows, model_state, shard, index)
            return counts_of_pieces(count, number, pieces, state.model_state)

        def of_parts(rows: Any) -> Any:
            count = counting.pieces // number
            of_one = lambda given: of_shard(given[1], shard * count + given[0])
            return lax.map(of_one, (jnp.arange(count), pieces_of(rows, self.batch_axes, count)))

        with shard_context(at_use.shards.number, axis_name=at_use.shards.axes):
            if self.record.returns_mean is None:
                pieces = pieces_of(rows, self.batch_axes, counting.pieces)
                of_one = jax.tree.map(lambda x: x[0], pieces)
                jax.eval_shape(of_piece, of_one, state.model_state, shard, jnp.int32(0))
            if not self.record.returns_mean:
                return None
            if self.same_bits is None:
                return counting.over_shards(pruned(of_shard, rows, shard))
            return counting.in_order(pruned(of_parts, rows))

    def _of_shard(
        self,
        state: TrainState,
        batch: Any,
        at_use: AtUse,
        scale: Any,
        shard: Any,
        counting: Counting,
    ) -> LocalResult:
        """The loss and gradients of the shard, or the virtual one, with this index."""
        number, (rows, whole) = self.accumulate_steps, self.split(batch)

        def compute(rows: Any, model_state: Any, index: Any, at_use: AtUse) -> LocalResult:
            here = dataclasses.replace(state, model_state=model_state)
            return self._of_rows(here, join(rows, whole), at_use, scale, shard, index, counting)

        if number == 1:
            return compute(rows, state.model_state, 0, at_use)

        # The rows divide, or they would not have been placed.
        pieces = pieces_of(rows, self.batch_axes, number, interleaved=self.is_interleaved)

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
        return local._replace(aux=aux_of_microbatches(self.aux_reduction, aux, weights))

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
        counting: Counting,
    ) -> LocalResult:
        """The loss and gradients of some rows, those of this microbatch of a shard."""
        shards, keys = at_use.shards, self._keys(state, batch, shard, index)

        def loss_of(params: Any, *overwritten: Any) -> tuple[Any, Any]:
            given = model_states.overwrite(state.model_state, overwritten)
            here = dataclasses.replace(state, model_state=given)
            found: tuple[Any, Any] = at_use.with_frozen(
                lambda frozen: loss_of_both((params, frozen), here), state.frozen
            )
            return found

        def loss_of_both(both: tuple[Any, Any], here: TrainState) -> tuple[Any, Any]:
            out = run(both, state=here)
            check_not_written(out.written, both, lambda both: run(both, state=here).written)
            self.record.returns_mean = isinstance(out.loss, Mean)
            if not isinstance(out.loss, Mean):
                return out.loss, (out.model_state, out.aux, None)
            check_takes_mean(weight=weight, is_summed=self.is_summed)
            terms = sums_of(out.loss)
            return counting.part(out.loss), (out.model_state, out.aux, terms)

        with shard_context(shards.number, axis_name=shards.axes):
            types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)
            run = self._once_traced(state, batch, keys, at_use)
            if self.weight is not None:
                of_batch = lambda batch, both: run(both, batch).loss
                check_weight_is_read(self.weight, batch, of_batch, types)
            run, weight = self._weighed(run, state, batch, keys, at_use)
            if self.model_state is ModelState.MEAN and not self.has_one_state:
                self._check_equal(state, types, batch, run, keys)
            with jax.named_scope("loss"):
                overwritten = model_states.overwritten(state.model_state)
                found = at_use.value_and_grad(loss_of, state.params, weight, scale, overwritten)
        loss, (after, aux, terms) = found.out
        if overwritten:
            # They are what the backward pass returns, and were divided by the loss scale.
            whole = [x if scale is None else x * scale for x in found.of_others]
            after = model_states.overwrite(after, whole)
        if weight is not None:
            after = model_states.unless_weightless(
                self.model_state, weight, after, state.model_state
            )
        loss = jnp.asarray(loss)
        return LocalResult(loss, found.gradients, weight, after, aux, terms, found.early)

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
        places = each * number + index if self.is_interleaved else index * len(each) + each
        places += shard * number * len(each)
        return (keys_of_rows(jax.random.fold_in(key, state.step), places),)

    def _run(self, state: TrainState, params: Any, batch: Any, keys: Keys) -> Returned:
        """What the loss returns of some rows, given its trained and its frozen parameters."""
        trained, frozen = params
        model = combine(state.skeleton, trained, frozen, state.model_state)
        if self.model_state is None:
            loss, aux = split_loss(self.function(model, batch, *keys), self.has_aux)
            check_aux(aux)
            return Returned(
                loss, aux, *after_loss(state.skeleton, model, params, state.model_state)
            )
        # A copy, since Equinox's State may be used once.
        before = jax.tree.map(lambda x: x, state.model_state)
        after, out = model_states.split_state(
            self.function(model, before, batch, *keys), self.has_aux
        )
        after = model_states.check_returned(state.model_state, after)
        loss, aux = split_loss(out, self.has_aux)
        check_aux(aux)
        return Returned(loss, aux, params, after)

    # Tracing it once, for the proof and for the step.

    def _is_proven(self, shards: int) -> bool:
        """Whether the loss has to be proven a mean over rows."""
        return self.over is LossOver.ROWS and self.parts(shards) * self.accumulate_steps > 1

    def _arguments(self, state: TrainState, both: Any, batch: Any, keys: Keys) -> Arguments:
        """What the loss is computed from, by what rows and shards have to do with it."""
        rows, whole = self.split(batch)
        of_rows, of_shard = (keys, ()) if self.keys_of_rows else ((), keys)
        # All shards have the same state, keys in it too, if it is averaged.
        equal = self.model_state is ModelState.MEAN
        of_all, of_one = (state.model_state, None) if equal else (None, state.model_state)
        return Arguments((rows, of_rows), whole, both, of_all, (of_shard, of_one))

    def _of_arguments(self, state: TrainState, *arguments: Any) -> Returned:
        """What the loss returns of these ``Arguments``."""
        (rows, of_rows), whole, both, of_all, (of_shard, of_one) = arguments
        equal = self.model_state is ModelState.MEAN
        here = dataclasses.replace(state, model_state=of_all if equal else of_one)
        return self._run(here, both, join(rows, whole), (*of_rows, *of_shard))

    def _trace(self, state: TrainState, arguments: Arguments) -> tuple[Any, Any]:
        """The jaxpr of the loss, and the tree of what it returns."""
        key = state.skeleton, *_types(arguments)
        if key not in self.record.traces:
            of = functools.partial(self._of_arguments, state)
            jaxpr, types = jax.make_jaxpr(of, return_shape=True)(*arguments)
            found = jaxpr, jax.tree.structure(types)
            if any(isinstance(x, jax.core.Tracer) for x in jaxpr.consts):
                return found
            # With microbatches a step computes its loss several times.
            self.record.traces[key] = found
        return self.record.traces[key]

    def _once_traced(
        self, state: TrainState, batch: Any, keys: Keys, at_use: AtUse
    ) -> Callable[..., Returned]:
        """The loss as a function of the parameters, and of other rows, keys or states."""

        def run(
            both: Any, batch: Any = batch, keys: Keys = keys, state: TrainState = state
        ) -> Returned:
            if not self._is_proven(at_use.shards.number):
                return self._run(state, both, batch, keys)
            arguments = self._arguments(state, both, batch, keys)
            jaxpr, tree = self._trace(state, arguments)
            found = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments))
            returned: Returned = jax.tree.unflatten(tree, found)
            return returned

        return run

    def _weighed(
        self,
        run: Callable[..., Returned],
        state: TrainState,
        batch: Any,
        keys: Keys,
        at_use: AtUse,
    ) -> tuple[Callable[..., Returned], Any]:
        """The loss as it is divided, and the weight of its rows; ``None`` if a ``Mean`` has it."""
        weight = None if self.weight is None else weight_of(self.weight, batch)
        if not self._is_proven(at_use.shards.number):
            return run, weight
        finding, divisor = self._check_over_rows(state, batch, keys, at_use)
        if divisor is None or not divisor.is_of_piece:
            return run, weight
        if is_exact(finding):
            # In the first batch another sum may be equal to what divides.
            return run, weight if divisor.is_weight else divisor.of_batch(batch)

        def as_sums(*given: Any, **others: Any) -> Returned:
            found = run(*given, **others)
            return found._replace(loss=as_mean(found.loss, divisor, finding, batch, weight))

        return as_sums, None

    def _check_over_rows(
        self, state: TrainState, batch: Any, keys: Keys, at_use: AtUse
    ) -> tuple[Finding, Divisor | None]:
        """What the loss is in its rows, and what divides it; see ``check_over_rows`` for errors."""
        types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)
        number = self.parts(at_use.shards.number) * self.accumulate_steps
        (rows, whole), context = self.split(batch), get_shard_context()
        axes_of_shards = None if context is None else context.axis_name
        arguments = self._arguments(state, types, batch, keys)
        key = state.skeleton, number, *_types(arguments)
        axes = self.batch_axes.of_rows(rows)
        if key not in self.record.known:
            given, *others, own = arguments
            first, tree = self._trace(state, arguments)
            # Its outputs are the first of them.
            outputs, of_loss = jax.tree.flatten(
                jax.tree.unflatten(tree, range(tree.num_leaves)).loss
            )
            of_rows = [*axes, *[0] * len(jax.tree.leaves(given[1]))]
            inputs = facts_of_inputs(jax.tree.leaves(given), of_rows, others, own)
            traces, proof = [_jax.without_unread(first, len(outputs))], None
            each = self.number_of_rows(rows)
            while proof is None:
                more = types_with(given, of_rows, len(traces) * number * each)
                try:
                    of = functools.partial(self._of_arguments, state)
                    jaxpr = jax.make_jaxpr(of)(*arguments._replace(given=more))
                    traces.append(_jax.without_unread(jaxpr, len(outputs)))
                except Exception as error:  # a loss may raise anything on other shapes
                    traces.append(error)
                proof = prove(traces, inputs, each, number, axes_of_shards)
            finding = proof.concluded(finding_of(jax.tree.unflatten(of_loss, proof.facts)))
            self.record.known[key] = finding
            if finding.kind is OverRows.RATIO and self.weight is not None:
                self.record.divisors[key] = divisor_of(
                    finding, proof.jaxpr, arguments, self.split, join, self.weight
                )
            if finding.kind is OverRows.MEAN and self.weight is not None:
                check_weight_of_mean(self.weight, rows, whole, join, axes=axes, times=number)
        divisor = self.record.divisors.get(key)
        finding = self.record.latest = self.record.known[key]
        check_over_rows(
            finding,
            rows,
            weight=self.weight,
            summed=self.is_summed,
            microbatches=self.accumulate_steps,
            record=self.record,
            divisor=divisor,
        )
        return finding, divisor

    def quiet(self, state: TrainState, batch: Any) -> tuple[TrainState, Keys]:
        """The state, and the keys, with which the noise of the loss is switched off."""
        shape = (self.number_of_rows(batch),) if self.keys_of_rows else ()
        keys = (quiet_keys(shape),) if self.takes_rng else ()
        quiet = lambda x: quiet_keys(x.shape) if is_key(x) else x
        model_state = jax.tree.map(quiet, state.model_state)
        return dataclasses.replace(state, model_state=model_state), keys

    def quiet_of_rows(
        self, state: TrainState, batch: Any, both: Any
    ) -> tuple[Callable[..., Any], Arguments]:
        """The loss with its noise switched off, and what it is computed from."""
        here, keys = self.quiet(state, batch)
        arguments = self._arguments(here, both, batch, keys)
        return lambda *arguments: self._of_arguments(here, *arguments).loss, arguments

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
            found = at_use.with_frozen(of_both, state.frozen)
            rows = self.number_of_rows(batch)
            return (per_row(found, rows) if isinstance(found, Mean) else found), None

        weight = None if self.weight is None else weight_of(self.weight, batch)
        with shard_context(at_use.shards.number, axis_name=at_use.shards.axes):
            found = at_use.value_and_grad(loss_of, state.params, weight, None)
        return LocalResult(found.out[0], found.gradients, weight, None, None, None, found.early)

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


def _types(tree: Any) -> tuple[Any, ...]:
    """The structure of a pytree, and the types of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _scaled(sums: Sums, scale: Any) -> Sums:
    """The sums of microbatches as those of the scaled loss."""
    values, loss, weight = sums
    one = lambda x: x * scale.astype(x.dtype) if is_inexact(x) else x
    return sums if scale is None else (jax.tree.map(one, values), loss, weight)
