"""StepLoss: a loss, the rows it is over, and its gradient. RowsLoss: over each shard's rows."""

import abc
import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AbstractMesh, Mesh

from crossshard import _check, _jax
from crossshard._check import is_inexact
from crossshard.collectives.sums import average, to_sum
from crossshard.errors import ArgumentError, AxisError
from crossshard.gradients.local import as_scale, split_loss
from crossshard.gradients.mean import Mean, MeanSums, counts_of, sums_of
from crossshard.gradients.status import GradientStatus
from crossshard.jaxprs.mean_over_rows import Finding, is_mean
from crossshard.jaxprs.padding import counts_nothing
from crossshard.jaxprs.proof import Proof, collectives_of, facts_of_inputs, prove, types_with
from crossshard.jaxprs.rewrite import opaque_false
from crossshard.jaxprs.row_facts import OverRows, Total
from crossshard.jaxprs.walk import depends, equations_of, named_axes
from crossshard.model import model_state as model_states
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import ModelState
from crossshard.model.models import after_loss, check_not_written, combine
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import Gradients
from crossshard.pipeline.stages.accumulate import Sums, add, mean, zeros
from crossshard.shards.axes import as_one_shard, get_shard_context, shard_context
from crossshard.shards.batch_axes import FIRST, BatchAxes, VirtualShards, join
from crossshard.shards.random_streams import keys_of_rows
from crossshard.step.gather import AtUse
from crossshard.step.microbatches import (
    AuxReduction,
    Counting,
    LocalResult,
    Weight,
    as_stored,
    aux_of_microbatches,
    aux_to_reduce,
    check_aux,
    check_weight_is_read,
    chosen,
    pairs_of_aux,
    pieces_of,
    weight_of,
)
from crossshard.step.over_rows import (
    Arguments,
    OverRowsRecord,
    as_mean,
    check_groups,
    check_state_is_mean,
    check_weight_of_mean,
    divisor_of,
    finding_of,
    types_of,
)

# The random key of a loss, or its keys; empty if it takes none. What is called ``both`` below is a
# pair: the trained and the frozen parameters.
Keys = tuple[jax.Array, ...]


class LossOver(enum.StrEnum):
    """Which rows the loss is given, and so what it is a loss of; see ``make_train_step``."""

    ROWS = "rows"  # each shard's rows; it is proven to be a mean over these
    BATCH = "batch"  # all rows of the batch, as global arrays, whose work XLA splits
    SHARD = "shard"  # each shard's rows, whatever it does with them


class RngPer(enum.StrEnum):
    """Whether each shard or each row has a random key of its own; see ``StepOptions``."""

    SHARD = "shard"
    ROW = "row"


def check_rng_per(rng_per: object, *, takes_rng: bool) -> RngPer:
    """Return the checked ``rng_per`` option."""
    found = _check.choice("rng_per", rng_per, RngPer)
    if found is RngPer.ROW and not takes_rng:
        raise ArgumentError(
            "rng_per='row' passes the loss a key for each row, and this one takes none. Write "
            "loss_fn(params, batch, rng), whose rng has the shape [rows]; or leave rng_per out."
        )
    return found


class Returned(NamedTuple):
    """The results of a loss, a number or a ``Mean``, and the parameters and state after it."""

    loss: Any
    aux: Any
    written: Any
    model_state: Any


@dataclasses.dataclass(frozen=True)
class StepLoss(abc.ABC):
    """The loss of a step, as a function of a state and rows, and what these rows are."""

    function: Callable[..., Any]  # the loss of some rows of the batch
    takes_rng: bool = False  # whether it takes a PRNG key
    has_aux: bool = False  # whether it returns ``(loss, aux)``
    # The weight function of the mean; ``None`` if all shards count the same.
    weight: Weight | None = None
    accumulate_steps: int = 1  # the number of microbatches of a shard's rows
    # How the state that it returns is kept; ``None`` if it returns none.
    model_state: ModelState | None = None
    # How ``aux`` is reduced over the shards, a pytree prefix of it.
    aux_reduction: Any = AuxReduction.PER_SHARD
    batch_axes: BatchAxes = FIRST  # along which axes the arrays of the batch are split
    over: LossOver = LossOver.SHARD  # what it is over, as the user declared
    key_per_row: bool = False  # whether it takes a key for each row
    is_summed: bool = False  # whether the shards' losses are added up
    # The loss is computed in this many parts, so that its bits do not depend on the number of
    # shards. ``None`` if they may.
    same_bits: int | None = None
    # What runs it, as a function of arrays, if it is not called by itself.
    around: Callable[[Callable[..., Returned]], Callable[..., Returned]] | None = None
    # Caches its traces, and what they prove: whether it is a mean or a ratio over the rows.
    record: OverRowsRecord = dataclasses.field(
        default_factory=OverRowsRecord, compare=False, repr=False
    )

    status: ClassVar[GradientStatus] = GradientStatus.LOCAL  # the status of its gradients
    # Whether it is one loss, with one model state, over the rows of all shards. A microbatch then
    # has some rows of each shard.
    has_one_state: ClassVar[bool] = False
    gradient: ClassVar[str] = ""  # its gradient in words; empty if it is each shard's local one
    # The fields of ``StageContext`` that this kind of loss sets.
    context_fields: ClassVar[Mapping[str, Any]] = {}
    # Whether a step computes it again if a gradient is not finite, to find whose it was.
    can_rerun: ClassVar[bool] = False
    # Why no shard may have a model state of its own; empty if each may.
    why_no_own_state: ClassVar[str] = ""

    # What it is over. Subclasses differ in this.

    @abc.abstractmethod
    def enter(
        self, layout: StateLayout, state: TrainState, batch: Any, at_use: AtUse
    ) -> tuple[Any, Any, Any]:
        """Return the input of ``shard_map`` besides the state, its specs, and ``aux`` if known."""

    @abc.abstractmethod
    def local(
        self, before: TrainState, given: Any, at_use: AtUse, weight: Any = None
    ) -> tuple[LocalResult, Any]:
        """Return one shard's loss and gradients, and parameters or types in the gradients' shapes.

        ``given`` is the shard's part of what ``enter`` returned. ``weight``, float[], is 0 if the
        shard is left out of a ``Mean``; ``None`` if no shard is.
        """

    def check_state(self, state: TrainState) -> None:
        """Raise ArgumentError unless it can keep the model state of this state."""
        if state.per_shard and self.why_no_own_state:
            raise ArgumentError(self.why_no_own_state)

    # What is reduced besides its gradients.

    def sums(self, local: LocalResult) -> dict[str, Any]:
        """Return the arrays, by name, that the aggregate sums besides gradients and loss."""
        if local.sums is not None:
            return local.sums
        weight = self.weight_beside(local.weight, local.terms)
        of_state = model_states.to_reduce(self.model_state, local.model_state, weight)
        of_aux = aux_to_reduce(self.aux_reduction, local.aux, weight)
        counted = lambda x: to_sum(x, local.weight)
        terms = {} if local.terms is None else {"terms": jax.tree.map(counted, local.terms)}
        return of_state | of_aux | terms

    def weight_beside(self, weight: Any, terms: MeanSums | None) -> Any:
        """Return the weight of a shard in means of what is beside its gradient.

        A ratio that is a ``Mean`` weighs its gradients itself; its last count is the weight.
        """
        if self.weight is None or terms is None:
            return weight
        own = terms.counts[-1]
        return own if weight is None else own * weight

    def reduced_aux(
        self, local: LocalResult, gradients: Gradients, number: int, grouped: bool
    ) -> Any:
        """Return one shard's ``aux`` as the metrics store it, given the reduced gradients."""
        if local.aux is None:
            return None
        totals = iter(gradients.sums.get("aux", ()))

        def one(leaf: Any, each: AuxReduction) -> jax.Array:
            if each is AuxReduction.PER_SHARD:
                # Stored as one of [shards, …]; that of virtual shards is already.
                return jnp.asarray(leaf) if local.is_weighed else jnp.asarray(leaf)[None]
            total, dtype = next(totals), jnp.result_type(leaf)
            if each is AuxReduction.MEAN:
                total = average(total, gradients.weight, number)
            return total.astype(dtype)[None] if grouped else total.astype(dtype)

        pairs = pairs_of_aux(self.aux_reduction, local.aux)
        leaves = [one(leaf, each) for (_, leaf), each in pairs]
        return jax.tree.structure(local.aux).unflatten(leaves)

    def aux_specs(self, each: Any, reduced: Any, shards: int) -> Any:
        """Return the specs of ``aux``, given that of per-shard and that of reduced values."""
        # Parts that the shards do not have in equal numbers are gathered.
        if self.has_one_state or self.parts(shards) % shards:
            return reduced
        is_each = lambda x: x is AuxReduction.PER_SHARD
        return jax.tree.map(lambda x: each if is_each(x) else reduced, self.aux_reduction)

    # The rows that it has.

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__qualname__", type(self.function).__name__))

    def split(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into arrays with rows and whole arrays; see ``BatchAxes.split``."""
        return self.batch_axes.split(batch)

    def number_of_rows(self, batch: Any) -> int:
        """Return the number of rows of a batch."""
        return int(self.batch_axes.lengths(self.split(batch)[0])[0])

    def parts(self, shards: int) -> int:
        """Return how many parts of the batch have a loss of their own."""
        return self.same_bits or shards

    def opaque_false(self, state: TrainState) -> jax.Array | None:
        """Return ``StageContext.opaque_false``, if bits must not depend on the number of shards."""
        return None if self.same_bits is None else opaque_false(state.step)

    def pieces(self, shards: int) -> int:
        """Return how many pieces a shard's rows are cut into, at most."""
        return math.ceil(self.parts(shards) / shards) * self.accumulate_steps

    def is_of_parts(self, shards: int) -> bool:
        """Return whether it is computed in pieces, so that it matters if it is a mean over rows."""
        return self.over is not LossOver.BATCH and shards * self.pieces(shards) > 1

    def prepare_params(self, before: TrainState, at_use: AtUse) -> tuple[TrainState, AtUse, Any]:
        """Gather sharded parameters now if a stage needs each shard's own full gradient.

        Returns the state, how the loss gets its parameters, and the types of the gradients.
        """
        params = before.params
        if at_use.sums_later:
            params, at_use = at_use.whole(params), dataclasses.replace(at_use, params_sharded=False)
        like = at_use.types_of_gradients(params) if at_use.params_sharded else params
        return dataclasses.replace(before, params=params), at_use, like

    def compute_shard(
        self, state: TrainState, batch: Any, at_use: AtUse, weight: Any = None
    ) -> LocalResult:
        """Compute the loss and gradients of the given rows, or of their microbatches."""
        counting = self.start_counting(state, batch, at_use, weight)
        return self.compute_part(state, batch, at_use, at_use.shards.index(), counting)

    def start_counting(self, state: TrainState, batch: Any, at_use: AtUse, weight: Any) -> Counting:
        """Forget old traces, and find how a ``Mean`` is counted in the step that is traced now."""
        self.record.traces.clear()
        parts = self.parts(at_use.shards.size) * self.accumulate_steps
        counting = Counting(at_use.shards, parts, weight)
        if parts == at_use.shards.size and self.same_bits is None:
            return counting
        return dataclasses.replace(counting, counts=self._counts(state, batch, at_use, counting))

    def _counts(
        self, state: TrainState, batch: Any, at_use: AtUse, counting: Counting
    ) -> tuple[Any, ...] | None:
        """Return the counts of a ``Mean`` over the whole batch; ``None`` if it is a number."""
        shard, (rows, whole) = at_use.shards.index(), self.split(batch)
        number, shards = self.accumulate_steps, at_use.shards.number
        virtual = VirtualShards(self.parts(shards), shards)

        def of_piece(rows: Any, model_state: Any, shard: Any, index: Any) -> tuple[Any, Any]:
            here, batch = dataclasses.replace(state, model_state=model_state), join(rows, whole)
            run, _ = self._prepared(here, batch, self._keys(here, batch, shard, index), at_use)

            def of_both(both: tuple[Any, Any]) -> tuple[Any, Any]:
                out = run(both)
                return counts_of(out.loss) if isinstance(out.loss, Mean) else (), out.model_state

            found: tuple[Any, Any] = at_use.call_on_both(of_both, state.params, state.frozen)
            return found

        def of_shard(rows: Any, shard: Any) -> Any:
            pieces = pieces_of(rows, self.batch_axes, number, interleaved=self.has_one_state)

            def one(before: Any, piece: Any) -> tuple[Any, Any]:
                counts, after = of_piece(piece[1], before, shard, piece[0])
                return as_stored(after, before), jnp.stack(counts)

            return lax.scan(one, state.model_state, (jnp.arange(number), pieces))[1].sum(0)

        def of_parts(rows: Any) -> Any:
            count = virtual.most
            of_one = lambda given: of_shard(given[1], virtual.first(shard) + given[0])
            return lax.map(of_one, (jnp.arange(count), pieces_of(rows, self.batch_axes, count)))

        with shard_context(shards, axis_name=at_use.shards.axes):
            pieces = pieces_of(rows, self.batch_axes, self.pieces(shards))
            of_one = jax.tree.map(lambda x: x[0], pieces)
            types, _ = jax.eval_shape(of_piece, of_one, state.model_state, shard, jnp.int32(0))
            if not types:
                return None
            if self.same_bits is None:
                return counting.over_shards(_pruned(of_shard, rows, shard))
            return counting.in_order(_pruned(of_parts, rows), virtual)

    def compute_part(
        self, state: TrainState, batch: Any, at_use: AtUse, shard: Any, counting: Counting
    ) -> LocalResult:
        """Compute the loss and gradients of the shard, or the virtual one, with this index."""
        number, (rows, whole) = self.accumulate_steps, self.split(batch)

        def compute(at_use: AtUse, rows: Any, model_state: Any, index: Any) -> LocalResult:
            here = dataclasses.replace(state, model_state=model_state)
            return self._compute_rows(here, join(rows, whole), at_use, shard, index, counting)

        if number == 1:
            return compute(at_use, rows, state.model_state, 0)

        # The rows divide, or they would not have been placed.
        pieces = pieces_of(rows, self.batch_axes, number, interleaved=self.has_one_state)

        # With replicated parameters each shard adds up full gradients. Only the last microbatch may
        # sum them over the shards, in the backward pass of a loop; a trace shows whether it does.
        at_use_in_scan, sums_in_loops = at_use, False
        if not at_use.params_sharded:
            at_use_in_scan = dataclasses.replace(at_use, sums_later=True, held=None, measures=False)
            first, seen = jax.tree.map(lambda x: x[0], pieces), list[bool]()
            look = lambda *args: seen.append(any(compute(at_use, *args).early))
            jax.eval_shape(look, first, state.model_state, jnp.int32(0))
            sums_in_loops = seen[0]
        in_scan = at_use_in_scan.types_of_gradients(state.params)
        zero, early = zeros(in_scan), at_use_in_scan.early

        def one(carry: Any, piece: Any) -> tuple[Any, Any]:
            sums, model_state = carry
            index, rows = piece
            found = compute(at_use_in_scan, rows, model_state, index)
            sums = add(sums, found.values, found.loss, found.weight, early)
            others = found.aux, found.terms, found.weight
            return (sums, as_stored(found.model_state, model_state)), others

        numbered, before = (jnp.arange(number), pieces), (zero, state.model_state)
        beside: Any = (None, None)
        if not sums_in_loops:
            (sums, model_state), (aux, terms, weights) = lax.scan(one, before, numbered)
            values, loss = mean(sums, early, weighted=weights is not None)
        else:
            but_last = jax.tree.map(lambda x: x[:-1], numbered)
            (sums, model_state), others = lax.scan(one, before, but_last)
            index, rows = jax.tree.map(lambda x: x[-1], numbered)
            # The backward pass adds gradients of the scaled loss to them, and returns the mean.
            last = dataclasses.replace(at_use, before=_scaled(sums, scale_of(state)))
            end = compute(last, rows, model_state, index)
            early, beside = end.early, (end.held, end.squared_norm)
            own = chosen(early, jax.tree.map(jnp.zeros_like, sums[0]), end.values)
            sums = add(sums, own, end.loss, end.weight)
            values, loss = mean(sums)
            values = chosen(early, end.values, values)
            model_state = as_stored(end.model_state, model_state)
            append = lambda first, end: jnp.concatenate([first, jnp.asarray(end)[None]])
            of_end = end.aux, end.terms, end.weight
            aux, terms, weights = jax.tree.map(append, others, of_end)
        total = None if weights is None else sums[2]
        aux = aux_of_microbatches(self.aux_reduction, aux, self.weight_beside(weights, terms))
        terms = jax.tree.map(lambda x: x.sum(0), terms)
        return LocalResult(loss, values, total, model_state, aux, terms, early, *beside)

    def _compute_rows(
        self,
        state: TrainState,
        batch: Any,
        at_use: AtUse,
        shard: Any,
        index: Any,
        counting: Counting,
    ) -> LocalResult:
        """Compute the loss and gradients of one microbatch of a shard, which has the ``index``."""
        shards, keys = at_use.shards, self._keys(state, batch, shard, index)

        def loss_of(params: Any, *overwritten: Any) -> tuple[Any, Any]:
            given = model_states.overwrite(state.model_state, overwritten)
            here = dataclasses.replace(state, model_state=given)
            of_both = lambda frozen: loss_of_both((params, frozen), here)
            found: tuple[Any, Any] = at_use.call_on_frozen(of_both, state.frozen)
            return found

        def loss_of_both(both: tuple[Any, Any], here: TrainState) -> tuple[Any, Any]:
            out = run(both, state=here)
            check_not_written(out.written, both, lambda both: run(both, state=here).written)
            if not isinstance(out.loss, Mean):
                return out.loss, (out.model_state, out.aux, None)
            if weight is not None:
                raise ArgumentError(
                    "The loss returns a Mean, which says what its rows count, and weight= says it "
                    "again. Leave weight out."
                )
            if self.is_summed:
                raise ArgumentError(
                    "The loss returns a Mean, which is a mean over the whole batch, and the "
                    "optimizer's reduction is SUM, which adds up the losses of shards. Use "
                    "reduction='mean'."
                )
            return counting.part(out.loss), (out.model_state, out.aux, sums_of(out.loss))

        with shard_context(shards.number, axis_name=shards.axes):
            types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)
            run, weight = self._prepared(state, batch, keys, at_use)
            if self.model_state is ModelState.MEAN and not self.has_one_state:
                rows, whole = self.split(batch)
                of_own = lambda own, both: run(both, join(own[0], whole), own[1]).model_state
                model_states.check_same_on_shards(state.model_state, of_own, (rows, keys), types)
            with jax.named_scope("loss"):
                overwritten = model_states.overwritten(state.model_state)
                scale = scale_of(state)
                out, gradients, early, of_others, beside = at_use.value_and_grad(
                    loss_of, state.params, weight, scale, overwritten
                )
        loss, (after, aux, terms) = out
        if overwritten:
            # Their next values are what the backward pass returns, and were divided by the scale.
            whole = [x if scale is None else x * scale for x in of_others]
            after = model_states.overwrite(after, whole)
        own = self.weight_beside(weight, terms)
        if own is not None:
            after = model_states.unless_weightless(self.model_state, own, after, state.model_state)
        return LocalResult(jnp.asarray(loss), gradients, weight, after, aux, terms, early, *beside)

    def _keys(self, state: TrainState, batch: Any, shard: Any, index: Any) -> Keys:
        """Return the key of a microbatch, or one for each row; empty if the loss takes none."""
        if not self.takes_rng:
            return ()
        key = jax.random.wrap_key_data(state.rng, impl=state.rng_impl)
        number = self.accumulate_steps
        if not self.key_per_row:
            count = state.step if number == 1 else state.step * number + index
            of_step = jax.random.fold_in(key, count)
            return (jax.random.fold_in(of_step, shard),)
        each = jnp.arange(self.number_of_rows(batch))
        # Number the rows in the same way in which ``pieces_of`` cuts microbatches.
        places = each * number + index if self.has_one_state else index * len(each) + each
        places += shard * number * len(each)
        return (keys_of_rows(jax.random.fold_in(key, state.step), places),)

    def run(self, state: TrainState, params: Any, batch: Any, keys: Keys) -> Returned:
        """Call the loss on some rows, given its trained and its frozen parameters."""
        if self.around is None:
            return self._called(state, params, batch, keys)

        def call(model_state: Any, *given: Any) -> Returned:
            here = dataclasses.replace(state, model_state=model_state)
            return self._called(here, *given)._replace(written=None)

        found = self.around(call)(state.model_state, params, batch, keys)
        return found._replace(written=params)

    def _called(self, state: TrainState, params: Any, batch: Any, keys: Keys) -> Returned:
        trained, frozen = params
        model = combine(state.skeleton, trained, frozen, state.model_state)
        if self.model_state is None:
            with _named_axes_are_bound():
                out = self.function(model, batch, *keys)
            loss, aux = split_loss(out, self.has_aux)
            check_aux(aux)
            return Returned(
                loss, aux, *after_loss(state.skeleton, model, params, state.model_state)
            )
        # A copy, since Equinox's State may be used once.
        before = jax.tree.map(lambda x: x, state.model_state)
        with _named_axes_are_bound():
            out = self.function(model, before, batch, *keys)
        after, out = model_states.split_state(out, self.has_aux)
        after = model_states.check_returned(state.model_state, after)
        loss, aux = split_loss(out, self.has_aux)
        check_aux(aux)
        return Returned(loss, aux, params, after)

    # Traced once, for the proof and for the step.

    def arguments(self, state: TrainState, both: Any, batch: Any, keys: Keys) -> Arguments:
        """Return the inputs of the loss, sorted by whether rows, or shards, have their own."""
        rows, whole = self.split(batch)
        of_rows, of_shard = (keys, ()) if self.key_per_row else ((), keys)
        # All shards have the same state, keys in it too, if it is averaged.
        equal = self.model_state is ModelState.MEAN
        of_all, of_one = (state.model_state, None) if equal else (None, state.model_state)
        return Arguments((rows, of_rows), whole, both, of_all, (of_shard, of_one))

    def of_arguments(self, state: TrainState, *arguments: Any) -> Returned:
        """Call the loss on these ``Arguments``."""
        (rows, of_rows), whole, both, of_all, (of_shard, of_one) = arguments
        equal = self.model_state is ModelState.MEAN
        here = dataclasses.replace(state, model_state=of_all if equal else of_one)
        return self.run(here, both, join(rows, whole), (*of_rows, *of_shard))

    def _trace(self, state: TrainState, arguments: Arguments) -> tuple[Any, Any]:
        """Trace the loss; return its jaxpr, and the tree of its results."""
        key = state.skeleton, *types_of(arguments)
        if key not in self.record.traces:
            of = functools.partial(self.of_arguments, state)
            jaxpr, types = jax.make_jaxpr(of, return_shape=True)(*arguments)
            found, context = (jaxpr, jax.tree.structure(types)), get_shard_context()
            if self.same_bits is not None and context is not None:
                # Before the proof, which would say of a sum over shards what to divide it by.
                check_alone(jaxpr, context.axis_name)
            if any(isinstance(x, jax.core.Tracer) for x in jaxpr.consts):
                return found
            # With microbatches a step computes its loss several times.
            self.record.traces[key] = found
        return self.record.traces[key]

    def _prepared(
        self, state: TrainState, batch: Any, keys: Keys, at_use: AtUse
    ) -> tuple[Callable[..., Returned], Any]:
        """Return the loss as a function of the parameters, and the weight of its rows.

        The function also takes other rows, keys or states. With ``LossOver.ROWS`` this raises
        unless the loss is proven to be a mean over the rows. A ratio is returned as a ``Mean``,
        which counts its rows itself, so that there is no weight.
        """
        times = self.parts(at_use.shards.number) * self.accumulate_steps
        is_proven = self.over is LossOver.ROWS and times > 1
        types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)

        def run(
            both: Any, batch: Any = batch, keys: Keys = keys, state: TrainState = state
        ) -> Returned:
            if not is_proven:
                return self.run(state, both, batch, keys)
            arguments = self.arguments(state, both, batch, keys)
            jaxpr, tree = self._trace(state, arguments)
            found = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments))
            returned: Returned = jax.tree.unflatten(tree, found)
            return returned

        weight = None
        if self.weight is not None:
            of_batch = lambda batch, both: run(both, batch).loss
            check_weight_is_read(self.weight, batch, of_batch, types)
            weight = weight_of(self.weight, batch)
        arguments = self.arguments(state, types, batch, keys)
        if not is_proven:
            return self._weighed(run, state, arguments, weight, at_use)
        key = state.skeleton, times, *types_of(arguments)
        if key not in self.record.known:
            groups = at_use.shards.groups if at_use.shards.is_grouped else None
            sent = [] if groups is None else self._sent(state, arguments, at_use)[1]
            check_groups(sent, groups)
            self._conclude(key, state, arguments, times, in_groups=bool(sent))
        finding, divisor = self.record.checked(
            key, arguments.given[0], self.weight, self.is_summed, self.accumulate_steps
        )
        self.record.check_padding()
        if divisor is None or not divisor.is_of_piece:
            return self._weighed(run, state, arguments, weight, at_use)
        if not finding.moved:
            # Another sum may equal the divisor in the first batch alone.
            weight = weight if divisor.is_weight else divisor.of_batch(batch)
            return self._weighed(run, state, arguments, weight, at_use)

        def as_sums(*given: Any, **others: Any) -> Returned:
            found = run(*given, **others)
            return found._replace(loss=as_mean(found.loss, divisor, finding, batch, weight))

        return as_sums, None

    def _weighed(
        self,
        run: Callable[..., Returned],
        state: TrainState,
        arguments: Arguments,
        weight: Any,
        at_use: AtUse,
    ) -> tuple[Callable[..., Returned], Any]:
        """Return the loss and its weight; as a ``Mean`` if shards send each other what it reads.

        The gradient of what a shard sends holds the losses of others, which have other weights.
        """
        if weight is None or at_use.shards.number == 1:
            return run, weight
        is_mean, sent = self._sent(state, arguments, at_use)
        if is_mean or not sent:
            return run, weight

        def as_sums(*given: Any, **others: Any) -> Returned:
            found = run(*given, **others)
            return found._replace(loss=Mean(found.loss * weight, weight))

        return as_sums, None

    def _sent(
        self, state: TrainState, arguments: Arguments, at_use: AtUse
    ) -> tuple[bool, list[Any]]:
        """Return whether the loss is a ``Mean``, and the collectives over the shards in it."""
        jaxpr, tree = self._trace(state, arguments)
        places: Returned = jax.tree.unflatten(tree, range(tree.num_leaves))
        read = _jax.without_unread(jaxpr, frozenset(jax.tree.leaves(places.loss)))
        return isinstance(places.loss, Mean), collectives_of(read, at_use.shards.axes)

    def facts(self, arguments: Arguments) -> tuple[list[int], Any]:
        """Return the axes of the rows, and what is known of each input of the loss."""
        given, *others, own = arguments
        axes = [*self.batch_axes.of_rows(given[0]), *[0] * len(jax.tree.leaves(given[1]))]
        return axes, facts_of_inputs(jax.tree.leaves(given), axes, others, own)

    def _conclude(
        self, key: Any, state: TrainState, arguments: Arguments, times: int, *, in_groups: bool
    ) -> None:
        """Prove what the loss is over the rows, and record this and its divisor under ``key``.

        ``arguments`` are the types of one of the ``times`` pieces of the batch. If it sums over a
        group of shards that trains alone (``in_groups``), no comparison with one shard is of it.
        """
        given, (first, tree) = arguments.given, self._trace(state, arguments)
        places: Returned = jax.tree.unflatten(tree, range(tree.num_leaves))
        (axes, inputs), context = self.facts(arguments), get_shard_context()
        each = jax.tree.leaves(given)[0].shape[axes[0]]
        shards = None if context is None else context.axis_name

        @functools.cache
        def trace(rows: int, alone: Sequence[str]) -> Any:
            if rows == each and not alone:
                return first
            more = arguments._replace(given=types_with(given, axes, rows))
            with as_one_shard(alone) if alone else contextlib.nullcontext():
                return jax.make_jaxpr(functools.partial(self.of_arguments, state))(*more)

        def proof_of(outputs: Any, times: int) -> Proof:
            read = frozenset(jax.tree.leaves(outputs))
            of = lambda rows, alone: _jax.without_unread(trace(rows, alone), read)
            return prove(of, inputs, each, times, shards)

        proof = proof_of(places.loss, times)
        structure = jax.tree.structure(places.loss)
        finding = proof.concluded(finding_of(jax.tree.unflatten(structure, proof.facts)))
        finding = dataclasses.replace(finding, is_whole=finding.is_whole or in_groups)
        averages = self.model_state is ModelState.MEAN and times > self.accumulate_steps
        if averages and finding.kind is not OverRows.COMPARED:
            of_state = proof_of(places.model_state, times // self.accumulate_steps)

            def is_weight(of: Finding) -> bool:
                found = divisor_of(of, of_state.jaxpr, arguments, self.split, weight)
                return found is None or found.is_weight

            weight: Any = self.weight
            whole = arguments.whole
            unequal = weight is not None and depends(lambda x: weight(join(x, whole)), given[0])
            compared = None if weight is None else is_weight
            doubt = check_state_is_mean(state.model_state, of_state, compared, unequal, key)
            if doubt is not None:
                self.record.states[key] = doubt
        divisor = None
        if self.weight is not None:
            read = frozenset(jax.tree.leaves(places.loss))
            of_loss = [_jax.without_unread(first, read)]
            if collectives_of(of_loss[0]):
                of_loss += [_jax.without_unread(trace(2 * each, ()), read)]
            self.record.counts_padding = not counts_nothing(
                of_loss, range(len(jax.tree.leaves(given[0]))), each
            )
        if self.weight is not None and finding.kind is OverRows.RATIO:
            # The sum of an entry is known for any number of rows, and so for those of a piece.
            jaxpr = first if isinstance(finding.by, int) else proof.jaxpr
            divisor = divisor_of(finding, jaxpr, arguments, self.split, self.weight)
        self.record.known[key] = finding, divisor
        # What is the same on all shards is so with any weights.
        own = [fact for fact in proof.facts if isinstance(fact, Total) and is_mean(fact)]
        is_own = finding.kind is OverRows.OVER_SHARDS and len(own) == len(proof.facts)
        if self.weight is not None and (finding.kind is OverRows.MEAN or is_own):
            check_weight_of_mean(self.weight, given[0], arguments.whole)

    def with_weight(self, local: LocalResult, weight: Any, before: TrainState) -> LocalResult:
        """Set the weight of a shard's result; with weight 0 its model state is the one before."""
        after = model_states.unless_weightless(
            self.model_state, weight, local.model_state, before.model_state
        )
        return local._replace(weight=weight, model_state=after)


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
        self, before: TrainState, given: Any, at_use: AtUse, weight: Any = None
    ) -> tuple[LocalResult, Any]:
        """Compute the loss and gradients of the shard's rows."""
        before, at_use, like = self.prepare_params(before, at_use)
        return self.compute_shard(before, given, at_use, weight), like


@contextlib.contextmanager
def _named_axes_are_bound() -> Iterator[None]:
    """Raise AxisError where the loss of a shard names an axis that no shards are along."""
    try:
        yield
    except NameError as error:
        # Without manual axes nothing is bound: who traces it so knows which axes shards are along.
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes:
            check_model_axes(error, mesh)
        raise


def check_model_axes(error: NameError, mesh: Mesh | AbstractMesh) -> None:
    """Raise AxisError if a loss named an axis of the mesh, and so had this error."""
    axis = _jax.unbound_axis(error, mesh.axis_names)
    if axis is None:
        return
    where = _jax.source_of_error(error)
    raise AxisError(
        f"The loss names the axis {axis!r} of the mesh{f' ({where})' if where else ''}, over "
        f"which XLA splits its work: a sum over that axis is in the product already. Leave "
        f"the collective out; or run this part in jax.shard_map(..., axis_names={{{axis!r}}}), "
        f"without a mesh."
    ) from error


def _pruned(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, without the parts of its jaxpr that its results do not need."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*args)
    run = jaxpr_as_fun(_jax.without_unread(jaxpr))
    return jax.tree.unflatten(jax.tree.structure(types), run(*jax.tree.leaves(args)))


def scale_of(state: TrainState) -> Any:
    """Return the loss scale of a state, float[]; ``None`` without one."""
    scale = getattr(state.opt_state.loss_scale, "scale", None)
    return None if scale is None else as_scale(scale)


def _scaled(sums: Sums, scale: Any) -> Sums:
    """Multiply the summed gradients of microbatches by the loss scale."""
    values, loss, weight = sums
    one = lambda x: x * scale.astype(x.dtype) if is_inexact(x) else x
    return sums if scale is None else (jax.tree.map(one, values), loss, weight)


def check_alone(jaxpr: Any, axes: Sequence[str]) -> None:
    """Raise if the loss of a virtual shard communicates with other shards."""
    for equation in equations_of(jaxpr):
        named = set(named_axes(equation).intersection(axes))
        if named:
            where = _jax.source_of(equation)
            raise AxisError(
                f"The loss names the shard axis {named.pop()!r}{f' ({where})' if where else ''}; "
                f"with virtual_shards its value is not to depend on the number of shards. Leave "
                f"pmean, all_gather and axis_index out."
            )
