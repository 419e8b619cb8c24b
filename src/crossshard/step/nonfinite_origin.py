"""Where a NaN comes from: the step's loss, gradient and update, one equation at a time."""

import contextlib
import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard._text import listed
from crossshard.collectives.sums import widen
from crossshard.errors import ArgumentError
from crossshard.gradients.status import Reduction, leaf_name
from crossshard.jaxprs.nonfinite import evaluate, find_origin, first_nonfinite
from crossshard.jaxprs.primitives import ELEMENTWISE
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import CrossShardState
from crossshard.pipeline.update.optimize import takes_loss
from crossshard.shards.axes import Shards
from crossshard.shards.batch_axes import VirtualShards, join, take_rows
from crossshard.shards.cut import Partition
from crossshard.shards.devices import own_shards
from crossshard.shards.random_streams import is_key
from crossshard.step.batches import check_same_rows, is_uneven, padded, zeros_in_padding
from crossshard.step.function import StepConfig
from crossshard.step.gather import AtUse
from crossshard.step.losses import changed
from crossshard.step.losses.loss import LossOver, StepLoss
from crossshard.step.losses.rows import begin_trace, compute_part
from crossshard.step.over_rows import OverRowsRecord, UndecidedError

# After so many bad rows no more are looked for. Of a loss that compares rows each row is left out
# once, so there must not be many.
_MOST_ROWS, _MOST_COMPARED = 16, 64


@dataclasses.dataclass(frozen=True)
class NonfiniteOrigin:
    """Where the first NaN or infinity of a step comes from; it prints as a text to read.

    Attributes:
      result: what was not finite in the end, such as ``"the loss"`` or ``"the gradient of `w`"``.
      value: the first NaN or infinity.
      index: which element it is of the array that was made, or that came in.
      array: the array that it came in with, such as ``"batch['x']"``; empty if an operation made
        it. The fields below are then empty, but for ``shard`` and ``rows``.
      phase: ``"forward pass"``, ``"backward pass"`` or ``"update"`` of the optimizer.
      primitive: the name of JAX's primitive that made it, such as ``"log"``.
      file, line, function, text: the line of your code that called it; of a library's, if none did.
      operands: what went in, numpy: of an elementwise operation the numbers at this element, else
        the whole arrays.
      loops: for each loop around it, outermost first, the turn and the number of turns: of a scan
        the place in its arrays, in the backward pass, too. Microbatches are such a loop.
      shard: the shard whose rows it was; ``None`` if it was of all of them.
      rows: the rows of the batch, as this process passes it, that make it, at most 16; empty if it
        is not of single rows.

    >>> print(NonfiniteOrigin("the loss", np.nan, (5,), array="batch['x']", shard=1, rows=(5,)))
    the loss is not finite on shard 1, from row 5 of the batch
    it came in with batch['x'][5], which is nan
    """

    result: str
    value: complex
    index: tuple[int, ...]
    array: str = ""
    phase: str = ""
    primitive: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    operands: tuple[np.ndarray | np.generic, ...] = ()
    loops: tuple[tuple[int, int], ...] = ()
    shard: int | None = None
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        on = "" if self.shard is None else f" on shard {self.shard}"
        rows = f"row{'s' * (len(self.rows) > 1)} {listed([str(row) for row in self.rows], 8)}"
        first = f"{self.result} is not finite{on}{f', from {rows} of the batch' * bool(self.rows)}"
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        if self.array:
            return f"{first}\nit came in with {self.array}{at}, which is {self.value}"
        turns = "".join(f", turn {turn} of {number} of a loop" for turn, number in self.loops)
        where = f"{self.file}:{self.line}, in {self.function}" if self.file else "unknown line"
        given = ", ".join(map(_shown, self.operands)) or "nothing"
        return (
            f"{first}\n{self.phase}{turns}: {where}\n    {self.text}\n"
            f"{self.primitive} makes {self.value} of {given}{f', at element {at}' if at else ''}"
        )


def _shown(x: Any) -> str:
    """Describe an operand: a number as it is, an array by its type and its range."""
    finite = x[np.isfinite(x)].astype(np.float64) if is_inexact(x) else np.zeros(0)
    within = f" from {finite.min():.3g} to {finite.max():.3g}" if finite.size else ""
    return f"{x.dtype}[{','.join(map(str, x.shape))}]{within}" if x.ndim else str(x)


class _Program:
    """A traced function with its arguments, and names for these and for the results.

    Results are a tuple of trees, each with its name. The first ``forward`` of them are made before
    the backward pass. If the function names ``axes``, it is run as if there were no other shards.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        args: Any,
        names: Sequence[str],
        results: Sequence[str],
        forward: int,
        axes: Sequence[str],
    ):
        def alone(*args: Any) -> Any:
            one: Callable[..., Any] = lambda _: run(*args)
            for axis in axes:
                one = jax.vmap(one, axis_name=axis)
            found = one(np.zeros([1] * len(axes)))
            return jax.tree.map(lambda x: x[(0,) * len(axes)], found)

        try:
            jaxpr, types = jax.make_jaxpr(run, return_shape=True)(*args)
        except NameError as error:
            if _jax.unbound_axis(error, axes) is None:
                raise
            jaxpr, types = jax.make_jaxpr(alone, return_shape=True)(*args)
        self.jaxpr = _jax.without_unread(jaxpr)
        self.inputs, self.outputs = _named(names, args), _named(results, types)
        self._forward = len(jax.tree.leaves(types[:forward]))

    def __call__(self, args: Any) -> list[Any]:
        """Return the leaves of the results."""
        return evaluate(self.jaxpr, jax.tree.leaves(args))

    def origin(self, args: Any, place: int) -> tuple[NonfiniteOrigin, int | None]:
        """Return where the first bad element of an output comes from, and which input it is."""
        leaves = jax.tree.leaves(args)
        index = first_nonfinite(self(args)[place])
        assert index is not None
        found = find_origin(self.jaxpr, leaves, place, index)
        described = NonfiniteOrigin(self.outputs[place], found.value.item(), found.index)
        equation = found.equation
        if equation is None:
            array = "a constant" if found.number is None else self.inputs[found.number]
            return dataclasses.replace(described, array=array), found.number
        frames = _jax.frames_of((equation, *found.scope.around))
        own = [frame for frame in frames if not _jax.is_of_library(frame[0])]
        file, line, function = next(iter(own or frames), ("", 0, ""))
        forward = equations_of(_jax.without_unread(self.jaxpr, range(self._forward)))
        is_forward = any(equation.outvars[0] in each.outvars for each in forward)
        arrays = [np.asarray(x) for x in found.given if not is_key(x)]
        is_same = equation.primitive.name in ELEMENTWISE
        shape = equation.outvars[0].aval.shape
        described = dataclasses.replace(
            described,
            phase="forward pass" if is_forward else "backward pass",
            primitive=equation.primitive.name,
            file=file,
            line=line,
            function=function,
            text=linecache.getline(file, line).strip(),
            operands=tuple(x[found.index] if is_same and x.shape == shape else x for x in arrays),
            loops=found.scope.loops,
        )
        return described, None


def _named(names: Sequence[str], trees: Any) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path
    pairs = [(name, path) for name, x in zip(names, trees, strict=True) for path, _ in paths(x)]
    # A model may be a single array, which has no name.
    bare = lambda name: name.replace(" of {}", "").replace(" {}", "")
    return [
        (name if path else bare(name)).format(leaf_name(path), jax.tree_util.keystr(path))
        for name, path in pairs
    ]


def _bad(found: Sequence[Any]) -> int | None:
    """Return the number of the first array that is not finite."""
    return next((i for i, x in enumerate(found) if first_nonfinite(x) is not None), None)


def _nans(new: Any, *old: Any) -> Any:
    """Return a state with its new NaN alone: infinities may be meant, as the best loss so far."""
    one = lambda x, y=0: jnp.where(jnp.isnan(x) & ~jnp.isnan(y), x, 0) if is_inexact(x) else x
    return jax.tree.map(one, new, *old)


def find(
    config: StepConfig,
    layout: StateLayout,
    state: TrainState,
    batch: Any,
    unshard: Callable[[], TrainState],
) -> NonfiniteOrigin | None:
    """Return where the first non-finite value of a step comes from; ``None`` if all is finite.

    This process has all of the parameters in ``state``, the one before the step, and the rows in
    ``batch``. ``unshard`` returns the state with the optimizer's state in its own shapes.
    """
    mesh, own = layout.mesh, jax.process_index()
    device = next(x for x in mesh.devices.flat if x.process_index == own)
    # A loss may name its axes, as for the shardings of a model that is split over some of them.
    alone = Mesh(np.reshape(device, [1] * len(mesh.axis_names)), mesh.axis_names)
    # JAX's own checks would stop at the first NaN, which may be masked.
    quiet = jax.debug_nans(False), jax.debug_infs(False), jax.transfer_guard("allow")
    with contextlib.ExitStack() as stack:
        for context in (*quiet, jax.default_device(device), jax.set_mesh(alone)):
            stack.enter_context(context)
        return _Search(config, layout, state, batch).run(unshard)


class _Search:
    """A search in the loss and the gradient of each shard of this process, and in the update."""

    def __init__(self, config: StepConfig, layout: StateLayout, state: TrainState, batch: Any):
        loss, number = config.loss, config.number_of_shards
        self._config, self._layout, self._state = config, layout, state
        self._loss = changed(loss, virtual_shards=None, record=OverRowsRecord())
        self._own = own_shards(NamedSharding(layout.mesh, PartitionSpec(layout.axes)), number)
        # The shards, and the numbers that their parts have for random keys.
        virtual = VirtualShards(loss.parts(number), number)
        numbers = [(s, virtual.first(s), virtual.count(s)) for s in self._own]
        parts: Any = [(s, first + i) for s, first, count in numbers for i in range(count)]
        self._parts = [(None, 0)] if loss.over_batch else parts
        self._arrays = functools.lru_cache(1)(self._arrays_of)
        rows, self._whole = loss.split(batch)
        check_same_rows(rows, loss.batch_axes)
        if any(map(is_uneven, jax.tree.leaves(rows))):
            raise ArgumentError(
                "The rows of this batch were put on the devices for virtual shards that do not "
                "divide over the shards, with room between them. Pass the batch of the host."
            )
        self._axes = loss.batch_axes.tree_of(rows)
        multiple = len(self._parts) * loss.accumulate_steps

        def filled(x: Any, axis: int, zeros: bool) -> Any:
            here = _here(x, axis)
            number = here.shape[axis] + -here.shape[axis] % multiple
            return padded(here, axis, number, zeros=zeros)

        zeros = zeros_in_padding(config.loss, rows, self._whole)
        self._rows = jax.tree.map(filled, rows, self._axes, zeros)
        self._size = loss.batch_axes.lengths(self._rows)[0] // len(self._parts)

    def run(self, unshard: Callable[[], TrainState]) -> NonfiniteOrigin | None:
        """Return where the first non-finite value comes from; ``None`` if there is none."""
        is_whole = len(self._own) == self._config.number_of_shards
        if self._loss.over_batch and not is_whole:
            raise ArgumentError(
                "With loss_over='batch' the loss is given the rows of all processes, and "
                "find_nonfinite looks at those of one. Call it in a single process, with the whole "
                "batch and a state that it has restored."
            )
        first, program, total, weights = None, None, None, 0.0
        for number, (shard, key) in enumerate(self._parts):
            rows = np.arange(number * self._size, (number + 1) * self._size)
            args = self._arguments(shard, key, rows)
            program = program or self._of_loss(args)
            loss, weight, *others = found = program(args)
            if not weight:
                continue  # it may hold NaN
            place = _bad(found)
            # The forward pass of another shard comes before a backward pass.
            if place is not None and (first is None or place == 0 < first[0]):
                first = place, args, shard, rows
            if place == 0:
                break
            gradients = others[len(others) - len(jax.tree.leaves(args[0])) :]
            weighted = [widen(x) * weight if is_inexact(x) else x for x in (loss, *gradients)]
            total = weighted if total is None else list(map(jnp.add, total, weighted))
            weights += weight
        if program is not None and first is not None:
            return self._in_rows(program, *first)
        if total is None or not is_whole or self._layout.groups is not None:
            return None
        return self._in_update(total, weights, unshard())

    def _arguments(self, shard: int | None, key: int, rows: Any) -> tuple[Any, ...]:
        """Return the arguments of ``_of_loss``, for some rows of this process."""
        of_each = self._state.per_shard or self._layout.groups is not None
        arrays = self._arrays(shard if of_each else None)
        taken = jax.tree.map(lambda x, axis: take_rows(x, axis, rows), self._rows, self._axes)
        batch = join(taken, jax.tree.map(_here, self._whole))
        return *arrays, *jax.tree.map(jnp.asarray, (batch, np.int32(key)))

    def _arrays_of(self, shard: int | None) -> tuple[Any, ...]:
        """Return the parameters, frozen arrays, model state and loss scale, of one shard or all."""
        state, number = self._state, self._config.number_of_shards

        def own(placement: Any, x: Any) -> Any:
            x = _here(x)
            if placement.per_shard and shard is not None:
                x = x[shard if len(x) == number else self._own.index(shard)]
            return jnp.asarray(x)

        get = lambda s: (s.params, s.frozen, s.model_state, s.opt_state.loss_scale)
        found: tuple[Any, ...] = jax.tree.map(own, get(self._layout.placements(state)), get(state))
        return found

    def _of_loss(self, args: tuple[Any, ...]) -> _Program:
        """Trace what a shard computes of its rows alone, without communication."""
        axes, unread = self._config.axes, self._layout.arrays.unread
        wholes = tuple(Partition(x.shape) for x in jax.tree.leaves(args[0]))
        at_use = AtUse(wholes, Shards(1), unread=unread, sums_later=True)
        step, rng = _here(self._state.step), _here(self._state.rng)
        own = dataclasses.replace(self._state, step=step, rng=rng, grouped=False, per_shard=False)

        def run(loss: StepLoss, *given: Any) -> Any:
            params, frozen, model_state, scale, batch, shard = given
            arrays: Any = {"params": params, "frozen": frozen, "model_state": model_state}
            here = dataclasses.replace(own, opt_state=CrossShardState(loss_scale=scale), **arrays)
            counting = begin_trace(loss, here, batch, at_use, None)
            found = compute_part(loss, here, batch, at_use, shard, counting)
            weight = 1.0 if found.weight is None else found.weight
            weight = weight if found.terms is None else found.terms.counts[-1]
            return found.loss, weight, _nans(found.model_state, model_state), found.values

        arrays = "parameter", "frozen array", "model state", "loss scale"
        names = *(f"the {name} {{}}" for name in arrays), "batch{1}", "shard"
        results = "the loss", "the weight", "the model state {}", "the gradient of {}"
        of = lambda loss: _Program(functools.partial(run, loss), args, names, results, 3, axes)
        try:
            return of(self._loss)
        except UndecidedError:  # of microbatches; the step has checked it by numbers
            return of(changed(self._loss, record=OverRowsRecord(proves=False)))

    def _in_rows(
        self, program: _Program, place: int, args: tuple[Any, ...], shard: int | None, rows: Any
    ) -> NonfiniteOrigin:
        """Return where a bad output comes from, with the rows that make it."""
        origin, came_in = program.origin(args, place)

        def is_bad(chosen: Any) -> bool:
            """Return whether the output is bad if a shard has copies of these rows alone."""
            repeated = np.resize(chosen, self._size)
            found = program(self._arguments(shard, int(args[-1]), repeated))
            return bool(found[1]) and _bad(found) is not None

        bad: tuple[int, ...] = ()
        index = origin.index
        if came_in is None:
            if self._config.loss.over is LossOver.ROWS:
                bad = tuple(itertools.islice(_bad_alone(is_bad, rows), _MOST_ROWS))
            # A row that weighs nothing, or is compared with others, may be bad only beside these.
            bad = bad or _only_bad(is_bad, rows)
        elif not origin.array.startswith("batch"):
            shard = shard if self._state.per_shard else None
        else:
            first = len(jax.tree.leaves(args[:-2]))
            axis = self._loss.batch_axes.of(args[-2])[came_in - first]
            if axis is not None:
                bad = (int(rows[index[axis]]),)
                index = *index[:axis], *bad, *index[axis + 1 :]
        return dataclasses.replace(origin, shard=shard, rows=bad, index=index)

    def _in_update(self, total: Any, weight: Any, state: TrainState) -> NonfiniteOrigin | None:
        """Look into the optimizer's update, given the sum of the losses and gradients."""
        pipeline = self._config.pipeline
        by = 1.0 if pipeline.reduction is Reduction.SUM else weight
        params, inner = jax.tree.map(_here, (state.params, state.opt_state.inner_state))
        leaves, tree = jax.tree.flatten(params)
        pairs = zip(total[1:], leaves, strict=True)
        gradients = tree.unflatten([(x / by).astype(like.dtype) for x, like in pairs])
        more = {"value": total[0] / by} if takes_loss(pipeline.optimizer) else {}
        args = jax.tree.map(jnp.asarray, (params, inner, gradients))

        def run(params: Any, inner: Any, gradients: Any) -> Any:
            updates, after = pipeline.optimizer.update(gradients, inner, params, **more)
            return optax.apply_updates(params, updates), _nans(after)

        names = "the parameter {}", "the optimizer's state {}", "the reduced gradient of {}"
        program = _Program(
            run, args, names, ("the next parameter {}", names[1]), 2, self._config.axes
        )
        place = _bad(program(args))
        if place is None:
            return None
        found, _ = program.origin(args, place)
        return dataclasses.replace(found, phase="update" if found.phase else "")


def _bad_alone(is_bad: Callable[[Any], bool], rows: Any) -> Iterator[int]:
    """Yield the rows that are bad alone."""
    if is_bad(rows):
        if len(rows) == 1:
            yield int(rows[0])
            return
        for half in np.array_split(rows, 2):
            yield from _bad_alone(is_bad, half)


def _only_bad(is_bad: Callable[[Any], bool], rows: Any) -> tuple[int, ...]:
    """Return the only row without which the others are not bad; empty if there is none."""
    if not 1 < len(rows) <= _MOST_COMPARED:
        return ()
    found = [int(row) for row in rows if not is_bad(rows[rows != row])]
    return tuple(found) if len(found) == 1 else ()


def _here(x: Any, axis: int = 0) -> Any:
    """Return what this process has of an array, in numpy; of one that is split, along an axis."""
    if is_key(x):
        data = _here(jax.random.key_data(x), axis)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x)
    if x.is_fully_replicated:
        return np.asarray(x.addressable_data(0))
    pieces = {piece.index[axis].start or 0: piece.data for piece in x.addressable_shards}
    return np.concatenate([np.asarray(pieces[start]) for start in sorted(pieces)], axis)
