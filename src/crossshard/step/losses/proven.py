"""Proven: traces the loss of some rows once, and proves from that what it is over them."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from crossshard import _jax
from crossshard.errors import AxisError, CrossshardError, LossError
from crossshard.gradients.mean import Mean
from crossshard.jaxprs.mean_over_rows import Finding, is_mean
from crossshard.jaxprs.padding import counts_nothing, vanishes_with
from crossshard.jaxprs.proof import Proof, collectives_of, facts_of_inputs, prove, types_with
from crossshard.jaxprs.quotient import Place, places_of, split
from crossshard.jaxprs.row_facts import DIVIDES, OverRows, Total
from crossshard.jaxprs.same_program import traces_do_the_same
from crossshard.jaxprs.walk import depends, equations_of, named_axes, sources_of
from crossshard.model.merged import together
from crossshard.model.model_state import ModelState, draws, streams
from crossshard.model.state import TrainState
from crossshard.shards.axes import as_one_shard, get_shard_context
from crossshard.shards.batch_axes import join
from crossshard.step.divisor import (
    Divisor,
    as_mean,
    check_weight_of_mean,
    divisor_of,
    is_exact,
    wrong_weight_error,
)
from crossshard.step.gather import AtUse
from crossshard.step.losses.loss import Arguments, Keys, LossOver, Returned, StepLoss, types_of
from crossshard.step.microbatches import check_weight_is_read, entries_read, weight_of
from crossshard.step.over_rows import (
    Doubt,
    check_groups,
    check_own_state,
    check_state_is_mean,
    finding_of,
)


def _trace(loss: StepLoss, state: TrainState, arguments: Arguments) -> tuple[Any, Any]:
    """Trace the loss; return its jaxpr, and the tree of its results."""
    key = state.skeleton, *types_of(arguments)
    if key not in loss.record.traces:
        of = functools.partial(loss.of_arguments, state)
        try:
            jaxpr, types = jax.make_jaxpr(of, return_shape=True)(*arguments)
        except (TypeError, ValueError, IndexError) as error:
            if not isinstance(error, CrossshardError):
                rows = loss.number_of_rows(join(arguments.given[0], arguments.whole))
                note = f"The loss was given {rows} rows: a shard's, or a microbatch of them."
                if jax.tree.leaves(state.model_state):
                    note += (
                        " The model state is not split over rows; with loss_over='batch' it may "
                        "have an entry for each row of the batch."
                    )
                error.add_note(note)
            raise
        found, context = (jaxpr, jax.tree.structure(types)), get_shard_context()
        if loss.virtual_shards is not None and context is not None:
            # Before the proof, which would say of a sum over shards what to divide it by.
            check_alone(jaxpr, context.axis_name)
        if any(isinstance(x, jax.core.Tracer) for x in jaxpr.consts):
            return found
        # With microbatches a step computes its loss several times.
        loss.record.traces[key] = found
    return loss.record.traces[key]


def _places(tree: Any) -> Returned:
    """Return the places of what the loss returns among the outputs of its trace."""
    places: Returned = jax.tree.unflatten(tree, range(tree.num_leaves))
    return places


def prepared(
    loss: StepLoss, state: TrainState, batch: Any, keys: Keys, at_use: AtUse
) -> tuple[Callable[..., Returned], Any]:
    """Return the loss as a function of the parameters, and the weight of its rows.

    The function also takes other rows, keys or states, and where to ``split`` the loss. With
    ``LossOver.ROWS`` this raises unless the loss is proven to be a mean over the rows. A ratio is
    returned as a ``Mean``, which counts its rows itself, so that there is no weight.
    """
    times = loss.parts(at_use.shards.num_shards) * loss.accumulate_steps
    is_proven = loss.over is LossOver.ROWS and loss.record.proves and times > 1
    types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)

    def run(
        both: Any,
        batch: Any = batch,
        keys: Keys = keys,
        state: TrainState = state,
        at: Collection[Place] = (),
    ) -> Returned:
        if not is_proven:
            return loss.run(state, both, batch, keys)
        arguments = loss.arguments(state, both, batch, keys)
        jaxpr, tree = _trace(loss, state, arguments)
        leaves = jax.tree.leaves(arguments)
        found = split(jaxpr, leaves, _places(tree).loss, at) if at else jaxpr_as_fun(jaxpr)(*leaves)
        returned: Returned = jax.tree.unflatten(tree, found)
        return returned

    if (is_proven or loss.weight_fn is not None) and jax.tree.leaves(state.model_state):
        changed = changed_by_rows(loss, state, batch, keys, at_use, at_use.shards.axes)
        loss.record.changed_by_rows = changed
    weight = None
    if loss.weight_fn is not None:
        of_batch = lambda batch, both: run(both, batch).loss
        check_weight_is_read(loss.weight_fn, batch, of_batch, types)
        weight = weight_of(loss.weight_fn, batch)
    arguments = loss.arguments(state, types, batch, keys)
    if not is_proven:
        if loss.over is LossOver.SHARD and times > 1 and weight is not None:
            traces = _Traces(loss, state, arguments)
            traces.note_padding()
            # A shard's statistics of its rows hold the padding, too.
            compares = traces.proven(times)[0].kind is OverRows.COMPARED
            loss.record.counts_padding |= compares
            loss.record.counts_copies |= compares
            loss.record.check_padding()
        return _weighted(loss, run, state, arguments, weight, at_use)
    key = state.skeleton, times, *types_of(arguments)
    if key not in loss.record.known:
        groups = at_use.shards.groups if at_use.shards.is_grouped else None
        sent = [] if groups is None else _sent(loss, state, arguments, at_use)[1]
        check_groups(sent, groups)
        _conclude(loss, key, state, arguments, times, in_groups=bool(sent))
    finding, divisor = loss.record.checked(
        key, arguments.given[0], loss.weight_fn, loss.is_summed, loss.accumulate_steps
    )
    loss.record.check_padding()
    if divisor is None or not divisor.is_of_piece:
        return _weighted(loss, run, state, arguments, weight, at_use)
    splits = divisor.splits(finding)
    if not (finding.moved or splits):
        # Another sum may equal the divisor in the first batch alone.
        weight = weight if divisor.divides_by_weight else divisor.of_batch(batch)
        return _weighted(loss, run, state, arguments, weight, at_use)

    in_parts = functools.partial(run, at=divisor.at if splits else ())

    def as_sums(*given: Any, **others: Any) -> Returned:
        found = in_parts(*given, **others)
        return found._replace(loss=as_mean(found.loss, divisor, finding, batch, weight))

    return as_sums, None


def _weighted(
    loss: StepLoss,
    run: Callable[..., Returned],
    state: TrainState,
    arguments: Arguments,
    weight: Any,
    at_use: AtUse,
) -> tuple[Callable[..., Returned], Any]:
    """Return the loss and its weight; as a ``Mean`` if shards send each other what it reads.

    The gradient of what a shard sends holds the losses of others, which have other weights.
    """
    if weight is None or at_use.shards.num_shards == 1:
        return run, weight
    is_mean, sent = _sent(loss, state, arguments, at_use)
    if is_mean or not sent:
        return run, weight

    def as_sums(*given: Any, **others: Any) -> Returned:
        found = run(*given, **others)
        return found._replace(loss=Mean(found.loss * weight, weight))

    return as_sums, None


def _sent(
    loss: StepLoss, state: TrainState, arguments: Arguments, at_use: AtUse
) -> tuple[bool, list[Any]]:
    """Return whether the loss is a ``Mean``, and the collectives over the shards in it."""
    jaxpr, tree = _trace(loss, state, arguments)
    places = _places(tree)
    read = _jax.without_unread(jaxpr, frozenset(jax.tree.leaves(places.loss)))
    return isinstance(places.loss, Mean), collectives_of(read, at_use.shards.axes)


def carried(loss: StepLoss, state: TrainState, batch: Any, keys: Keys, at_use: AtUse) -> list[bool]:
    """Return of each array of the model state whether a microbatch takes it from the one before.

    So it is with what the rows change, or their number. Else it is that before the step: one device
    that has all rows computes it once.
    """
    number = len(jax.tree.leaves(state.model_state))
    if not number or loss.over is not LossOver.ROWS or loss.model_state is ModelState.MEAN:
        return [loss.over is not LossOver.ROWS] * number
    changed = changed_by_rows(loss, state, batch, keys, at_use)
    traces = _Traces(loss, state, _arguments(loss, state, batch, keys, at_use))
    times = loss.parts(at_use.shards.num_shards) * loss.accumulate_steps
    after = jax.tree.leaves(traces.places.model_state)
    pairs = list(zip(changed, after, strict=True))
    if traces.count_rows([place for is_changed, place in pairs if not is_changed], times):
        changed = [is_changed or traces.count_rows([place], times) for is_changed, place in pairs]
    return list(map(operator.or_, draws(state.model_state), changed))


def changed_by_rows(
    loss: StepLoss, state: TrainState, batch: Any, keys: Keys, at_use: AtUse, shards: Any = ()
) -> list[bool]:
    """Return of each array of the model state whether the rows, or their keys, change it.

    What is the same on all shards, along the axes ``shards``, counts as changed by none.
    """
    arguments = _arguments(loss, state, batch, keys, at_use)
    jaxpr, tree = _trace(loss, state, arguments)
    of_rows, found = (1 << len(jax.tree.leaves(arguments.given))) - 1, sources_of(jaxpr, shards)
    after = jax.tree.leaves(_places(tree).model_state)
    return together(state, [bool(found[place] & of_rows) for place in after])


def _arguments(
    loss: StepLoss, state: TrainState, batch: Any, keys: Keys, at_use: AtUse
) -> Arguments:
    types = at_use.types(state.params), at_use.types_of_frozen(state.frozen)
    return loss.arguments(state, types, batch, keys)


def facts_of(loss: StepLoss, arguments: Arguments) -> tuple[list[int], Any]:
    """Return the axes of the rows, and what is known of each input of the loss."""
    given, *others, own = arguments
    axes = [*loss.batch_axes.of_rows(given[0]), *[0] * len(jax.tree.leaves(given[1]))]
    return axes, facts_of_inputs(jax.tree.leaves(given), axes, others, own)


class _Traces:
    """Traces of a loss, of as many rows as ``arguments`` have, and of others."""

    def __init__(self, loss: StepLoss, state: TrainState, arguments: Arguments):
        self._loss, self._state, self._arguments = loss, state, arguments
        self.first, tree = _trace(loss, state, arguments)
        # The places of what the loss returns among the outputs of a trace.
        self.places = _places(tree)
        self._axes, self._inputs = facts_of(loss, arguments)
        self._each = jax.tree.leaves(arguments.given)[0].shape[self._axes[0]]
        self._of_rows = functools.cache(self._trace)

    def _trace(self, rows: int, alone: Sequence[str]) -> Any:
        if rows == self._each and not alone:
            return self.first
        given = types_with(self._arguments.given, self._axes, rows)
        with as_one_shard(alone) if alone else contextlib.nullcontext():
            of = functools.partial(self._loss.of_arguments, self._state)
            return jax.make_jaxpr(of)(*self._arguments._replace(given=given))

    def count_rows(self, outputs: Sequence[int], times: int) -> bool:
        """Return whether outputs are others for so many times the rows, as ``seen + len(x)``."""
        if not outputs:
            return False
        try:
            whole = self._of_rows(times * self._each, ())
        except Exception:  # of any kind; the proof needs this trace as well, and refuses the loss
            return False
        of_both = (_jax.without_unread(each, outputs) for each in (self.first, whole))
        return not traces_do_the_same(*of_both)

    def proof_of(self, outputs: Any, times: int) -> Proof:
        """Return what is proven of some outputs, if there are so many pieces of the batch."""
        read, context = frozenset(jax.tree.leaves(outputs)), get_shard_context()
        of = lambda rows, alone: _jax.without_unread(self._of_rows(rows, alone), read)
        shards = None if context is None else context.axis_name
        return prove(of, self._inputs, self._each, times, shards)

    def proven(self, times: int) -> tuple[Finding, Proof]:
        """Return what the loss is over the rows, and what proves it."""
        returned = self.places.loss
        proof = self.proof_of(returned, times)
        facts = jax.tree.unflatten(jax.tree.structure(returned), proof.facts)
        return proof.concluded(finding_of(facts)), proof

    def placed(self, divisor: Divisor, finding: Finding, jaxpr: Any) -> Divisor:
        """Return a divisor with where it divides, and whether what it divides vanishes with it.

        ``jaxpr`` is the one that the finding is of.
        """
        inputs = len(jax.tree.leaves(self._arguments.given[0]))
        rows = jaxpr.in_avals[0].shape[self._axes[0]]
        vanishes = vanishes_with(jaxpr, finding.by, inputs, rows)
        at = places_of(self.first, finding.at)
        known = frozenset(at) if finding.at == {*at.values()} else frozenset()
        return divisor._replace(vanishes=vanishes, at=known)

    def note_padding(self) -> None:
        """Note in the record of the loss whether rows of padding may count in it."""
        read = frozenset(jax.tree.leaves(self.places.loss))
        of_loss = [_jax.without_unread(self.first, read)]
        if collectives_of(of_loss[0]):
            of_loss += [_jax.without_unread(self._of_rows(2 * self._each, ()), read)]
        record, (rows, _) = self._loss.record, self._arguments.given
        is_read = entries_read(self._loss.weight_fn, rows, self._arguments.whole)
        every = [True] * len(is_read)
        record.counts_padding |= not counts_nothing(of_loss, every, self._each)
        record.counts_copies |= not counts_nothing(of_loss, is_read, self._each)


def _conclude(
    loss: StepLoss,
    key: Any,
    state: TrainState,
    arguments: Arguments,
    times: int,
    *,
    in_groups: bool,
) -> None:
    """Prove what the loss is over the rows, and record this and its divisor under ``key``.

    ``arguments`` are the types of one of the ``times`` pieces of the batch. If it sums over a
    group of shards that trains alone (``in_groups``), no comparison with one shard is of it.
    """
    traces, rows, weight = _Traces(loss, state, arguments), arguments.given[0], loss.weight_fn
    finding, proof = traces.proven(times)
    finding = dataclasses.replace(finding, is_whole=finding.is_whole or in_groups)
    doubt, after = None, traces.places.model_state
    if loss.model_state is not ModelState.MEAN:
        names = _own_states_read(traces, loss, state, arguments)
        if names:
            of_state = traces.proof_of([jax.tree.leaves(after)[place] for place in names], times)
            doubt = check_own_state(names, of_state, key)
    elif finding.kind is not OverRows.COMPARED:
        of_state = traces.proof_of(after, times)
        doubt = _doubt_of_state(traces, loss, key, state, arguments, of_state)
    if doubt is not None:
        loss.record.states[key] = doubt
    divisor = None
    if weight is not None:
        traces.note_padding()
        if finding.kind is OverRows.RATIO:
            # The sum of an entry is known for any number of rows, and so for those of a piece.
            jaxpr = traces.first if isinstance(finding.by, int) else proof.jaxpr
            divisor = divisor_of(finding, jaxpr, arguments, loss.split, weight)
            divisor = divisor and traces.placed(divisor, finding, proof.jaxpr)
        elif finding.reason == DIVIDES:
            found = divisor_of(finding, proof.jaxpr, arguments, loss.split, weight)
            # Numbers of the first batch would only show that they are equal there.
            if found is not None and not found.divides_by_weight:
                raise wrong_weight_error(weight, finding, "")
        # What is the same on all shards is so with any weights.
        own = [fact for fact in proof.facts if isinstance(fact, Total) and is_mean(fact)]
        is_own = finding.kind is OverRows.OVER_SHARDS and len(own) == len(proof.facts)
        if finding.kind is OverRows.MEAN or is_own:
            check_weight_of_mean(weight, rows, arguments.whole)
    loss.record.known[key] = finding, divisor


def _own_states_read(
    traces: _Traces, loss: StepLoss, state: TrainState, arguments: Arguments
) -> dict[int, str]:
    """Return the names of the states that the loss reads, or that such ones are made of.

    Keys and random streams are left out.

    Raises:
      LossError: a shard makes one of its own rows; or a microbatch does, whose rows are not those
        of the others on any shard.
    """
    paths = jax.tree_util.tree_leaves_with_path(state.model_state)
    context = get_shard_context()
    if not paths or context is None:
        return {}
    microbatches = loss.accumulate_steps > 1
    shards = () if microbatches else context.axis_name
    bits, of_gradient = (sources_of(traces.first, shards, derived=is_) for is_ in (False, True))
    places = jax.tree.leaves(traces.places.loss)
    of_loss = functools.reduce(operator.or_, (of_gradient[place] for place in places))
    of_rows = (1 << len(jax.tree.leaves(arguments.given))) - 1
    start = len(traces.first.in_avals) - len(paths)
    after = [bits[place] for place in jax.tree.leaves(traces.places.model_state)]
    own, read, known = of_rows, of_loss, (0, 0)
    while (own, read) != known:
        known = own, read
        for number, of_state in enumerate(after):
            own |= bool(of_state & own) << (start + number)
            read |= of_state * (read >> (start + number) & 1)
    is_module, names = loss.model_state is None, dict[int, str]()
    for number, ((path, _), is_key) in enumerate(
        zip(paths, streams(state.model_state), strict=True)
    ):
        name = jax.tree_util.keystr(path).removesuffix(".value")
        name = f"{'model' if is_module else 'model_state'}{name}"
        if read & 1 << (start + number) and not is_key:
            names[number] = name
        if of_loss & own & 1 << (start + number):
            raise _own_state_error(name, of_module=is_module, of_microbatch=microbatches)
    return names


def _own_state_error(name: str, *, of_module: bool, of_microbatch: bool) -> LossError:
    """Return the error for a loss that reads a state of the rows of a shard, or a microbatch."""
    reads = f"The loss reads the state {name}, which"
    mean = "" if of_module else " or write model_state='mean', if it is a mean over rows;"
    if of_microbatch:
        return LossError(
            f"{reads} each microbatch changes by its own rows, so that the next one computes "
            f"another loss than the whole batch has. Leave out accumulate_steps;{mean} or write "
            f"loss_over='shard', if each microbatch is meant to read what those before it on its "
            f"shard have made of it."
        )
    return LossError(
        f"{reads} each shard changes by its own rows or index, so that in later steps the mean of "
        f"the shards' losses is not that of the whole batch. Return on all shards what one device "
        f"makes of all rows, such as by jax.lax.psum of sums over their axis or pmean of means;"
        f"{mean} or write loss_over='batch', with which there is one state; or loss_over='shard', "
        f"if each shard's own is meant."
    )


def _doubt_of_state(
    traces: _Traces,
    loss: StepLoss,
    key: Any,
    state: TrainState,
    arguments: Arguments,
    proof: Proof,
) -> Doubt | None:
    """Return what is in doubt of a model state that is averaged, if anything is."""
    weight: Any = loss.weight_fn
    if weight is None:
        return check_state_is_mean(
            state.model_state, proof, None, False, loss.accumulate_steps, key
        )

    def is_weight(of: Finding, place: int) -> bool | None:
        divisor = divisor_of(of, proof.jaxpr, arguments, loss.split, weight)
        if divisor is None or not divisor.divides_by_weight or not of.moved:
            return None if divisor is None else divisor.divides_by_weight
        # A bound of 1 is right for whole counts, which a trace may not show: numbers decide.
        if of.moved != "guard" and not is_exact(dataclasses.replace(of, counts=True)):
            return False
        alone = _jax.without_unread(proof.jaxpr, [place])
        shown = is_exact(of) and traces.placed(divisor, of, alone).vanishes
        return True if shown else None

    of_rows = lambda rows: weight(join(rows, arguments.whole))
    unequal = depends(of_rows, arguments.given[0])
    microbatches = loss.accumulate_steps
    return check_state_is_mean(state.model_state, proof, is_weight, unequal, microbatches, key)


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
