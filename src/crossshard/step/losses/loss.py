"""StepLoss, the base class of all losses of a step: what it takes, returns and keeps."""

import abc
import contextlib
import dataclasses
import enum
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from crossshard import _check, _jax
from crossshard.collectives.sums import average, to_sum
from crossshard.errors import ArgumentError, AxisError
from crossshard.gradients.local import as_scale, split_loss
from crossshard.gradients.mean import MeanSums
from crossshard.gradients.status import GradientStatus
from crossshard.jaxprs.rewrite import opaque_false
from crossshard.model import model_state as model_states
from crossshard.model.layout import StateLayout
from crossshard.model.model_state import ModelState
from crossshard.model.models import after_loss, combine
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import Gradients
from crossshard.shards.batch_axes import FIRST, BatchAxes, join
from crossshard.shards.random_streams import keys_of_rows
from crossshard.step.gather import AtUse
from crossshard.step.microbatches import (
    AuxReduction,
    LocalResult,
    Weight,
    aux_to_reduce,
    check_aux,
    pairs_of_aux,
)
from crossshard.step.over_rows import (
    OverRowsRecord,
)

Keys = tuple[jax.Array, ...]  # the random key of a loss, or its keys; empty if it takes none
Both = tuple[Any, Any]  # the trained and the frozen parameters


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
    params_after: Any
    model_state: Any


class Arguments(NamedTuple):
    """The inputs of a loss."""

    given: Any  # the rows of the batch, and their keys
    whole: Any  # the entries of the batch that have no rows
    both: Both
    of_all: Any  # the model state, if all shards have the same
    own: Any  # the key of the shard, and its model state


def types_of(tree: Any) -> tuple[Any, ...]:
    """Return the structure of a pytree, and the types of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((jnp.shape(x), jnp.result_type(x)) for x in leaves)


@dataclasses.dataclass(frozen=True)
class StepLoss(abc.ABC):
    """The loss of a step, as a function of a state and rows, and what these rows are."""

    function: Callable[..., Any]  # the loss of some rows of the batch
    takes_rng: bool = False  # whether it takes a PRNG key
    has_aux: bool = False  # whether it returns ``(loss, aux)``
    # The weight function of the mean; ``None`` if all shards count the same.
    weight_fn: Weight | None = None
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
    virtual_shards: int | None = None
    # A transformation of the call, such as ``vmap``, with which ``by_numbers`` runs it; ``None``
    # for a plain call.
    around: Callable[[Callable[..., Returned]], Callable[..., Returned]] | None = None
    # Caches its traces, and what they prove: whether it is a mean or a ratio over the rows.
    record: OverRowsRecord = dataclasses.field(
        default_factory=OverRowsRecord, compare=False, repr=False
    )

    status: ClassVar[GradientStatus] = GradientStatus.LOCAL  # the status of its gradients
    # Whether it is one loss, with one model state, over the rows of all shards. A microbatch then
    # has some rows of each shard.
    over_batch: ClassVar[bool] = False
    # Its gradient in words; empty if it is each shard's local one.
    gradient_in_words: ClassVar[str] = ""
    # Whether a step computes it again if a gradient is not finite, to find whose it was.
    can_rerun: ClassVar[bool] = False
    # Why no shard may have a model state of its own; empty if each may.
    why_no_own_state: ClassVar[str] = ""

    # What it is over. Subclasses differ in this.

    @abc.abstractmethod
    def enter(
        self, layout: StateLayout, state: TrainState, batch: Any, at_use: AtUse
    ) -> tuple[Any, Any, Any]:
        """Return the input of ``shard_map`` besides the state, its specs, and ``aux`` if known.

        A loss over the batch is computed here, with its gradient; ``local`` then takes its slices.
        """

    @abc.abstractmethod
    def local(
        self, before: TrainState, given: Any, at_use: AtUse, counts_in: Any = None
    ) -> tuple[LocalResult, Any]:
        """Return one shard's loss and gradients, and an array or a type for each gradient.

        The latter has the parameter's dtype, and its full shape unless the gradient is early.
        ``given`` is the shard's part of what ``enter`` returned. ``counts_in``, float[], is 0 if
        the shard is left out of a ``Mean``; ``None`` if no shard is.
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
        weight = self.weight_of_aux_and_state(local.weight, local.terms)
        of_state = model_states.to_reduce(self.model_state, local.model_state, weight)
        of_aux = aux_to_reduce(self.aux_reduction, local.aux, weight)
        counted = lambda x: to_sum(x, local.weight)
        terms = {} if local.terms is None else {"terms": jax.tree.map(counted, local.terms)}
        return of_state | of_aux | terms

    def weight_of_aux_and_state(self, weight: Any, terms: MeanSums | None) -> Any:
        """Return the shard's weight in the means of ``aux`` and of the model state.

        A ratio that is a ``Mean`` weighs its own gradients, so its last count is the weight.
        """
        if self.weight_fn is None or terms is None:
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
                return jnp.asarray(leaf) if local.is_weighted else jnp.asarray(leaf)[None]
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
        if self.over_batch or self.parts(shards) % shards:
            return reduced
        is_each = lambda x: x is AuxReduction.PER_SHARD
        return jax.tree.map(lambda x: each if is_each(x) else reduced, self.aux_reduction)

    # The rows that it has. A part of the batch has a loss of its own: it is a shard's, or a virtual
    # shard's. A piece is one microbatch of a part.

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
        return self.virtual_shards or shards

    def opaque_false(self, state: TrainState) -> jax.Array | None:
        """Return ``StageContext.opaque_false``, if bits must not depend on the number of shards."""
        return None if self.virtual_shards is None else opaque_false(state.step)

    def pieces(self, shards: int) -> int:
        """Return how many pieces a shard's rows are cut into, at most."""
        return math.ceil(self.parts(shards) / shards) * self.accumulate_steps

    def is_of_pieces(self, shards: int) -> bool:
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

    def keys(self, state: TrainState, batch: Any, shard: Any, index: Any) -> Keys:
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
        places = each * number + index if self.over_batch else index * len(each) + each
        places += shard * number * len(each)
        return (keys_of_rows(jax.random.fold_in(key, state.step), places),)

    def run(self, state: TrainState, params: Any, batch: Any, keys: Keys) -> Returned:
        """Call the loss on some rows, given its trained and its frozen parameters."""
        if self.around is None:
            return self._called(state, params, batch, keys)

        def call(model_state: Any, *given: Any) -> Returned:
            here = dataclasses.replace(state, model_state=model_state)
            return self._called(here, *given)._replace(params_after=None)

        found = self.around(call)(state.model_state, params, batch, keys)
        return found._replace(params_after=params)

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

    # Its inputs, sorted for the proof.

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

    def with_weight(self, local: LocalResult, weight: Any, before: TrainState) -> LocalResult:
        """Set the weight of a shard's result; with weight 0 its model state is the one before."""
        after = model_states.unless_weightless(
            weight, local.model_state, before.model_state, self.record.changed_by_rows
        )
        return local._replace(weight=weight, model_state=after)


@contextlib.contextmanager
def _named_axes_are_bound() -> Iterator[None]:
    """Raise AxisError where the loss of a shard names an axis that no shards are along."""
    try:
        yield
    except NameError as error:
        # Without manual axes nothing is bound, and the caller handles the error.
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes:
            check_model_axes(error, mesh)
        raise


def check_model_axes(error: NameError, mesh: Mesh | AbstractMesh) -> None:
    """Raise AxisError if this NameError is about an axis of the mesh."""
    axis = _jax.unbound_axis(error, mesh.axis_names)
    if axis is None:
        return
    where = _jax.source_of_error(error)
    raise AxisError(
        f"The loss names the axis {axis!r} of the mesh{f' ({where})' if where else ''}, over "
        f"which XLA splits its work: the result already includes the sum over that axis. Leave "
        f"the collective out; or run this part in jax.shard_map(..., axis_names={{{axis!r}}}), "
        f"without a mesh."
    ) from error


def scale_of(state: TrainState) -> Any:
    """Return the loss scale of a state, float[]; ``None`` without one."""
    scale = getattr(state.opt_state.loss_scale, "scale", None)
    return None if scale is None else as_scale(scale)
