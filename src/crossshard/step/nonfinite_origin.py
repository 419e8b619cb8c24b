"""Where a NaN comes from: the step's loss, gradient and update, one equation at a time."""

import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _jax, _mesh
from crossshard._check import is_inexact
from crossshard._text import listed
from crossshard.errors import ArgumentError
from crossshard.gradients.status import Reduction, leaf_name
from crossshard.jaxprs.nonfinite import Loop, Origin, evaluate, find_origin, first_nonfinite
from crossshard.jaxprs.primitives import ELEMENTWISE
from crossshard.jaxprs.walk import equations_of
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.stage import CrossShardState
from crossshard.pipeline.update.optimize import takes
from crossshard.shards.axes import Shards
from crossshard.shards.batch_axes import join, take_rows
from crossshard.shards.cut import Partition
from crossshard.shards.random_streams import is_key
from crossshard.step.batches import padded
from crossshard.step.function import StepConfig
from crossshard.step.gather import AtUse
from crossshard.step.losses import changed
from crossshard.step.losses.rows import LossOver, StepLoss
from crossshard.step.over_rows import OverRowsRecord, UndecidedError

# After so many bad rows no more are looked for. Of a loss that compares rows each row is left out
# once, so there must not be many.
_MOST_ROWS, _MOST_COMPARED = 16, 256
_FORWARD, _BACKWARD, _UPDATE = "the forward pass", "the backward pass", "the optimizer's update"


@dataclasses.dataclass(frozen=True)
class NonfiniteOrigin:
    """Where the first NaN or infinity of a step comes from; ``str`` of it is a text to read.

    Attributes:
      result: what was not finite in the end, such as ``"the loss"`` or ``"the gradient of `w`"``.
      phase: ``"the forward pass"``, ``"the backward pass"`` or ``"the optimizer's update"``; empty
        if it was in an array that went in.
      array: the array that went in with it, such as ``"batch['x']"``; empty if it was made.
      primitive: the name of JAX's primitive that made it, such as ``"log"``.
      file, line, function, text: the line of your code that called it; of a library's, if none did.
      library: where that line called a library, as in ``flax/nnx/nn/linear.py:94``; or empty.
      value: what was made: NaN, or an infinity.
      index: which element of the array that was made, or that went in.
      operands: what went in at this element, numpy: a number of each operand that has its shape,
        and of the others the whole array.
      loops: the turns of the loops around it, outermost first, as ``(index, length)``. In a scan the
        index is the place in its arrays, in the backward pass too.
      shard: the shard whose rows it was; ``None`` if it was of all of them.
      microbatch: the microbatch of that shard, with ``accumulate_steps``; or ``None``.
      rows: the rows of the batch that each make it alone, at most 16; empty if none does, or if the
        loss is not known to be a mean over rows.
    """

    result: str
    value: Any
    index: tuple[int, ...]
    phase: str = ""
    array: str = ""
    primitive: str = ""
    file: str = ""
    line: int = 0
    function: str = ""
    text: str = ""
    library: str = ""
    operands: tuple[Any, ...] = ()
    loops: tuple[Loop, ...] = ()
    shard: int | None = None
    microbatch: int | None = None
    rows: tuple[int, ...] = ()

    def __str__(self) -> str:
        on = "" if self.shard is None else f" on shard {self.shard}"
        on += "" if self.microbatch is None else f", in microbatch {self.microbatch}"
        rows = listed([str(row) for row in self.rows], 8)
        of_rows = f", from row{'s' * (len(self.rows) > 1)} {rows} of the batch" if rows else ""
        first = f"{self.result} is not finite{on}{of_rows}."
        at = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        if self.array:
            return f"{first}\n{self.array}{at} is {self.value} before the step."
        turns = "".join(f", turn {index} of {length} of a loop" for index, length in self.loops)
        where = f"{self.file}:{self.line}, in {self.function}" if self.file else "an unknown line"
        through = f" (through {self.library})" if self.library else ""
        into = ", ".join(map(_shown, self.operands)) or "nothing"
        return (
            f"{first}\nIt comes from {self.phase}{turns}, {where}{through}:\n    {self.text}\n"
            f"{self.primitive} makes {self.value} of {into}{f', at {at}' if at else ''}."
        )


def find(
    config: StepConfig,
    layout: StateLayout,
    state: TrainState,
    batch: Any,
    unshard: Callable[[], TrainState],
) -> NonfiniteOrigin | None:
    """Return where the first non-finite value of a step comes from; ``None`` if all is finite.

    Args:
      config: the step.
      layout: the layout of the state.
      state: the state before the step, whose parameters this process has in full.
      batch: the rows of this process.
      unshard: returns the state with the optimizer's state in its own shapes.
    """
    own = jax.process_index()
    device = next(each for each in layout.mesh.devices.flat if each.process_index == own)
    with jax.default_device(device), jax.transfer_guard("allow"), _mesh.without_mesh():
        return _Search(config, layout, state, batch).run(unshard)


class _Search:
    """A search in the loss and the gradient of each shard of this process, and in the update."""

    def __init__(self, config: StepConfig, layout: StateLayout, state: TrainState, batch: Any):
        loss, number = config.loss, config.number_of_shards
        self._config, self._layout, self._state = config, layout, state
        self._loss = changed(loss, same_bits=None, record=OverRowsRecord())
        rows, self._whole = jax.tree.map(_here, loss.split(batch))
        own = NamedSharding(layout.mesh, PartitionSpec(layout.axes))
        places: Any = own.addressable_devices_indices_map((number,)).values()
        # The shards whose rows this process has, and the numbers that their parts have for keys.
        self._own = sorted({range(number)[place[0]][0] for place in places})
        each = loss.parts(number) // number
        self._parts = [(s, s * each + i) for s in self._own for i in range(each)]
        if loss.has_one_state:
            self._parts = [(None, 0)]
        multiple = len(self._parts) * loss.accumulate_steps
        more = lambda x, axis: padded(
            x, axis, x.shape[axis] + -x.shape[axis] % multiple, zeros=True
        )
        self._axes = loss.batch_axes.tree_of(rows)
        self._rows = jax.tree.map(more, rows, self._axes)
        self._size = loss.batch_axes.lengths(self._rows)[0] // len(self._parts)

    def run(self, unshard: Callable[[], TrainState]) -> NonfiniteOrigin | None:
        """Return where the first non-finite value comes from; ``None`` if there is none."""
        number, program = self._config.number_of_shards, None
        if self._loss.has_one_state and len(self._own) < number:
            raise ArgumentError(
                "With loss_over='batch' the loss is given the rows of all processes, and "
                "find_nonfinite looks at those of one. Call it in a single process, with the whole "
                "batch and a state that it has restored."
            )
        losses, gradients, weights = [], [], []
        first: Any = None  # what was found
        for place, (shard, key) in enumerate(self._parts):
            rows = np.arange(place * self._size, (place + 1) * self._size)
            args = self._arguments(shard, key, rows)
            if program is None:
                program = self._of_loss(args)
            found = evaluate(program.jaxpr, jax.tree.leaves(args))
            loss, _, gradient, weight = program.results(found)
            if weight is not None and not weight:
                continue  # it may hold NaN
            bad = program.first_bad(found, jax.tree.leaves(args))
            # The forward pass of another shard came before a backward pass.
            if bad is not None and (first is None or (bad[0] == 0 < first[1][0])):
                first = args, bad, shard, rows
            losses.append(loss)
            gradients.append(gradient)
            weights.append(1.0 if weight is None else weight)
        if first is not None:
            return self._described(program, *first)
        if not weights or len(self._own) < number or self._layout.groups is not None:
            return None
        return self._in_update(losses, gradients, weights, unshard())

    # The loss and the gradient of a shard.

    def _arguments(self, shard: int | None, key: int, rows: Any) -> tuple[Any, ...]:
        """Return the arguments of ``_of_loss``, for some rows of this process."""
        state, placements = self._state, self._layout.placements(self._state)
        own = lambda placement, x: _here(x, shard or 0 if placement.per_shard else None)
        taken = jax.tree.map(lambda x, axis: take_rows(x, axis, rows), self._rows, self._axes)
        of = lambda get: jax.tree.map(own, get(placements), get(state))
        args = (
            of(lambda state: state.params),
            of(lambda state: state.frozen),
            of(lambda state: state.model_state),
            of(lambda state: state.opt_state.loss_scale),
            join(taken, self._whole),
            np.int32(key),
        )
        return jax.tree.map(jnp.asarray, args)

    def _of_loss(self, args: tuple[Any, ...]) -> "_Program":
        """Trace what a shard computes of its rows alone, without communication."""
        config, unread = self._config, self._layout.arrays.unread
        wholes = tuple(Partition(x.shape) for x in jax.tree.leaves(args[0]))
        at_use = AtUse(wholes, Shards(1), unread=unread, sums_later=True)
        step, rng = _here(self._state.step), _here(self._state.rng)

        def of(loss: StepLoss, *given: Any) -> Any:
            params, frozen, model_state, scale, batch, shard = given
            here = dataclasses.replace(
                self._state,
                step=step,
                params=params,
                opt_state=CrossShardState(loss_scale=scale),
                frozen=frozen,
                model_state=model_state,
                rng=rng,
                grouped=False,
                per_shard=False,
            )
            counting = loss.start_counting(here, batch, at_use, None)
            found = loss.compute_part(here, batch, at_use, shard, counting)
            weight = found.weight if found.terms is None else found.terms.counts[-1]
            return found.loss, found.model_state, found.values, weight

        def over_one(loss: StepLoss, *given: Any) -> Any:
            """Bind the axes that the loss names: as on one shard, of its own rows alone."""
            *others, batch, shard = given
            run = lambda batch: of(loss, *others, batch, shard)
            for axis in config.axes:
                run, batch = jax.vmap(run, axis_name=axis), jax.tree.map(lambda x: x[None], batch)
            return jax.tree.map(lambda x: x[(0,) * len(config.axes)], run(batch))

        names = "parameter", "frozen array", "model state", "loss scale", "batch", "shard"
        results = (
            ("the loss", None),
            ("the model state {}", "model state"),
            ("the gradient of {}", None),
            ("the weight", None),
        )
        trace = lambda run, loss: _traced(functools.partial(run, loss), args, names, results)
        try:
            return trace(of, self._loss)
        except UndecidedError:  # of microbatches; the step has checked it by numbers
            return trace(of, changed(self._loss, over=LossOver.SHARD))
        except NameError as error:
            if _jax.unbound_axis(error, config.axes) is None:
                raise
            return trace(over_one, self._loss)

    def _described(
        self, program: "_Program", args: tuple[Any, ...], bad: "_Bad", shard: int | None, rows: Any
    ) -> NonfiniteOrigin:
        origin = find_origin(program.jaxpr, jax.tree.leaves(args), *bad)
        found = program.described(origin, bad)
        loops, microbatch = found.loops, None
        if self._loss.accumulate_steps > 1 and loops:
            microbatch, loops = loops[0].index, loops[1:]
        index, guilty = found.index, ()
        if found.array.startswith("batch"):
            axes = self._loss.batch_axes.of(args[-2])
            first = program.inputs.index(next(x for x in program.inputs if x.startswith("batch")))
            axis = axes[origin.place - first]
            if axis is not None:
                row = int(rows[index[axis]])
                index, guilty = (*index[:axis], row, *index[axis + 1 :]), (row,)
        elif not found.array:
            is_bad = lambda rows: self._is_bad(program, shard, int(args[-1]), rows)
            if self._config.loss.over is LossOver.ROWS:
                guilty = tuple(itertools.islice(_bad_alone(is_bad, rows), _MOST_ROWS))
            else:
                guilty = _only_bad(is_bad, rows)
        changes = {"index": index, "loops": loops, "microbatch": microbatch}
        return dataclasses.replace(found, shard=shard, rows=guilty, **changes)

    def _is_bad(self, program: "_Program", shard: int | None, key: int, rows: Any) -> bool:
        """Return whether something is not finite where a shard has copies of these rows alone."""
        inputs = jax.tree.leaves(self._arguments(shard, key, np.resize(rows, self._size)))
        return program.first_bad(evaluate(program.jaxpr, inputs), inputs) is not None

    # The update.

    def _in_update(
        self, losses: Sequence[Any], gradients: Sequence[Any], weights: Any, state: TrainState
    ) -> NonfiniteOrigin | None:
        """Look into the optimizer's update with the reduced gradient."""
        pipeline = self._config.pipeline
        optimizer, whole = pipeline.optimizer, sum(weights)
        by = 1.0 if pipeline.reduction is Reduction.SUM else whole

        def reduced(*each: Any) -> Any:
            wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in each]
            total = sum(x * w for x, w in zip(wide, weights, strict=True))
            return (total / by).astype(each[0].dtype)

        mean = lambda *trees: jax.tree.map(
            lambda *x: reduced(*x) if is_inexact(x[0]) else x[0], *trees
        )
        loss = mean(*losses)
        more = {"value": loss} if takes(optimizer) else {}
        before = jax.tree.map(_here, (state.params, state.opt_state.inner_state))
        args = jax.tree.map(jnp.asarray, (*before, mean(*gradients)))

        def run(params: Any, inner: Any, gradients: Any) -> Any:
            updates, after = optimizer.update(gradients, inner, params, **more)
            return optax.apply_updates(params, updates), after

        inner = "optimizer's state"
        names, after = ("parameter", inner, "reduced gradient of"), (f"the {inner} {{}}", inner)
        program = _traced(run, args, names, (("the updated parameter {}", None), after))
        inputs = jax.tree.leaves(args)
        bad = program.first_bad(evaluate(program.jaxpr, inputs), inputs)
        if bad is None:
            return None
        found = program.described(find_origin(program.jaxpr, inputs, *bad), bad)
        return dataclasses.replace(found, phase=_UPDATE if found.phase else "")


def _bad_alone(is_bad: Callable[[Any], bool], rows: Any) -> Iterator[int]:
    """Yield the rows that are bad alone, given whether some rows are."""
    if not is_bad(rows):
        return
    if len(rows) == 1:
        yield int(rows[0])
        return
    for half in np.array_split(rows, 2):
        yield from _bad_alone(is_bad, half)


def _only_bad(is_bad: Callable[[Any], bool], rows: Any) -> tuple[int, ...]:
    """Return the row without which the others are not bad, if there is only one, in a tuple.

    A loss that compares rows may be at fault where all of them are the same.
    """
    if not 1 < len(rows) <= _MOST_COMPARED:
        return ()
    found = [int(row) for row in rows if not is_bad(rows[rows != row])]
    return tuple(found) if len(found) == 1 else ()


def _here(x: Any, shard: int | None = None) -> Any:
    """Return what this process has of an array, in numpy: all of it, or one row for a shard."""
    if is_key(x):
        data = _here(jax.random.key_data(x), shard)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return np.asarray(x) if shard is None else np.asarray(x)[shard]
    if x.is_fully_replicated:
        found = np.asarray(x.addressable_data(0))
        return found if shard is None else found[shard]
    # Of several processes: the rows of this one, or one for each shard.
    pieces = {str(piece.index): piece for piece in x.addressable_shards}.values()
    shape = x.sharding.shard_shape(x.shape)
    axis = next(i for i, size in enumerate(x.shape) if size != shape[i])
    in_order = sorted(pieces, key=lambda piece: piece.index[axis].start or 0)
    if shard is not None:
        in_order = [piece for piece in in_order if (piece.index[axis].start or 0) == shard]
    found = np.concatenate([np.asarray(piece.data) for piece in in_order], axis)
    return found if shard is None else found[0]


_Bad = tuple[int, tuple[int, ...]]


class _Program(NamedTuple):
    """A traced part of a step, with names for what goes in and what comes out."""

    jaxpr: Any
    inputs: list[str]
    # For each output its name, and for a state the input that it replaces: NaN counts only where
    # that has none, and infinities may be meant, such as the best loss so far.
    outputs: list[tuple[str, int | None]]
    results: Callable[[Sequence[Any]], Any]  # returns the outputs as the function did
    caller: list[_jax.Frame]  # the frames of the code that asked

    def first_bad(self, found: Sequence[Any], inputs: Sequence[Any]) -> _Bad | None:
        """Return the first of the outputs that is not finite, and an element of it."""
        for place, ((_, before), x) in enumerate(zip(self.outputs, found, strict=True)):
            if before is not None and is_inexact(x):
                is_new = np.isnan(np.asarray(x)) & ~np.isnan(np.asarray(inputs[before]))
                x = np.where(is_new, np.nan, np.float32(0))
            index = first_nonfinite(x)
            if index is not None:
                return place, index
        return None

    def described(self, origin: Origin, bad: _Bad) -> NonfiniteOrigin:
        """Return an origin in words and lines."""
        result, value = self.outputs[bad[0]][0], origin.value.item()
        nothing = NonfiniteOrigin(result=result, value=value, index=origin.index)
        if origin.place is not None:
            return dataclasses.replace(nothing, array=self.inputs[origin.place])
        if not origin.equations:
            return dataclasses.replace(nothing, array="a constant")
        equation = origin.equations[0]
        frames = _jax.frames_of(origin.equations, self.caller)
        own = [frame for frame in frames if not _jax.is_of_library(frame)]
        file, line, function = (own or frames or [("", 0, "")])[0]
        through = frames[0] if frames and own and frames[0] != own[0] else None
        forward = sum(name == "the loss" or before is not None for name, before in self.outputs)
        needed = equations_of(_jax.without_unread(self.jaxpr, forward))
        is_forward = any(equation.outvars[0] in each.outvars for each in needed)
        shape = equation.outvars[0].aval.shape
        aligned = equation.primitive.name in ELEMENTWISE
        operands = [np.asarray(x) for x in origin.given if not is_key(x)]
        return dataclasses.replace(
            nothing,
            phase=_FORWARD if is_forward else _BACKWARD,
            primitive=equation.primitive.name,
            file=file,
            line=line,
            function=function,
            text=linecache.getline(file, line).strip(),
            library=f"{'/'.join(through[0].split('/')[-3:])}:{through[1]}" if through else "",
            operands=tuple(
                x[origin.index] if aligned and x.shape == shape else x for x in operands
            ),
            loops=origin.loops,
        )


def _traced(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    names: Sequence[str],
    results: Sequence[tuple[str, str | None]],
) -> _Program:
    """Trace a function, given the names of its arguments and of its results.

    The name of a state comes with that of the argument which it replaces.
    """
    caller, leaves = _jax.frames_here(), jax.tree_util.tree_leaves_with_path
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*args)
    named = [(name, path) for name, tree in zip(names, args, strict=True) for path, _ in leaves(tree)]
    inputs = [
        f"batch{jax.tree_util.keystr(path)}" if name == "batch" else f"the {name} {leaf_name(path)}"
        for name, path in named
    ]
    outputs = list[tuple[str, int | None]]()
    for (name, replaces), tree in zip(results, types, strict=True):
        first = [each for each, _ in named].index(replaces) if replaces and leaves(tree) else None
        for number, (path, _) in enumerate(leaves(tree)):
            before = None if first is None else first + number
            outputs.append((name.format(leaf_name(path)), before))
    unflatten = jax.tree.structure(types).unflatten
    return _Program(_jax.without_unread(jaxpr), inputs, outputs, unflatten, caller)


def _shown(x: Any) -> str:
    """Describe an operand: a number as it is, an array by its type and its range."""
    if not x.ndim:
        return str(x)
    kind = f"{x.dtype}[{','.join(map(str, x.shape))}]"
    if not is_inexact(x) or not np.isfinite(x).any():
        return kind
    finite = x[np.isfinite(x)].astype(np.float64)
    return f"{kind} from {finite.min():.3g} to {finite.max():.3g}"
