"""Rules: what an equation makes of rows, of sums over rows, and of what such sums divide.

For rows: where they are after the equation, and whether each is still computed alone. For sums:
whether they are still linear in the rows, and what they divide.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from crossshard.jaxprs.primitives import (
    ADDS,
    CHOOSES,
    ELEMENTWISE,
    KEYS,
    KNOWN,
    LINEAR,
    MIXES,
    MOVES,
    PASSES,
)
from crossshard.jaxprs.row_facts import (
    ADDS_UNLIKE,
    BOUNDS,
    DECIDED,
    DIVIDES,
    MEETS_EARLIER,
    SAME_NOISE,
    Chunks,
    Divided,
    Fact,
    Free,
    Index,
    NonZero,
    Obstacle,
    OverRows,
    Pair,
    Rows,
    SoFar,
    Total,
    are_counts,
    chosen,
    is_inexact,
    is_zero,
    joined,
    layout,
    of_unlike_powers,
    power_of,
    shape_of,
    worst,
)
from crossshard.jaxprs.slices import Along, Slicing, axes_after

# The largest number that may be added to a sum before it divides. A sum plus more than that is
# taken for two terms of a loss.
_SMALL = 1.0
# They draw numbers or further keys from a key.
_DRAWS = frozenset({"random_bits", "random_gamma", "random_split"})
# Operations whose output is known: if it is not linear in a sum over rows, the rows are compared.
_KNOWN = (
    ELEMENTWISE | set(CHOOSES) | LINEAR | set("dot_general reduce_max reduce_min top_k".split())
)


def of_rows(pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
    """Return the facts of the outputs, for inputs that are rows or free of the batch."""
    name = pair.name
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    if name in KEYS:
        return drawn(pair, inputs)
    power = power_of(pair, inputs)
    if power is None:
        return of_unlike_powers(pair, inputs)
    if name == "dot_general" and (found := _contracted(pair, inputs)) is not None:
        return found
    if name == "reduce_sum" and rows[0].axis in pair.one.params["axes"]:
        if rows[0].constant:
            return [Free(power + 1)]
        summed = pair.one.invars[0]
        of = summed if rows[0].entry is None else rows[0].entry
        whole = len(pair.one.params["axes"]) == summed.aval.ndim
        return [Total(power + 1, of if whole else None, counts=are_counts(pair, inputs))]
    if name in ("scatter-add", "scatter_add") and isinstance(inputs[0], Free):
        return _added_up(pair, inputs, power)
    moved: list[Rows] | Chunks | Obstacle
    if name.startswith("scatter"):
        moved = scattered(pair, inputs)
    else:
        moved = _SPECIAL.get(name, _moved)(pair, inputs)
    if isinstance(moved, Obstacle):
        return moved
    if isinstance(moved, Chunks):
        return [replace(moved, power=power, counts=are_counts(pair, inputs))]
    constant, counts = all(fact.constant for fact in rows), are_counts(pair, inputs)
    noise = not constant and all(fact.noise or fact.constant for fact in rows)
    same = name in MOVES and not pair.converts()
    return [
        replace(
            fact,
            power=power,
            constant=constant and fact.constant,
            zero=same and rows[0].zero,
            entry=rows[0].entry if same else None,
            counts=counts,
            noise=noise,
        )
        for fact in moved
    ]


def sliced_batches(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | None:
    """Return the facts if a slice or split takes some of several batches along an axis.

    ``None`` if it takes anything else.
    """
    rows = inputs[0] if pair.name in ("slice", "split") else None
    if not isinstance(rows, Rows):
        return None
    axis = rows.axis
    if pair.name == "split":
        edges = [[0, *itertools.accumulate(each.params["sizes"])] for each in pair[:2]]
        along = pair.one.params["axis"] == axis
    else:
        names = ("start_indices", "limit_indices")
        edges = [[each.params[name][axis] for name in names] for each in pair[:2]]
        given, out = (x.aval.shape for x in (pair.one.invars[0], pair.one.outvars[0]))
        lengths = edges[0][1] - edges[0][0]
        along = out == (*given[:axis], lengths, *given[axis + 1 :])
    whole = all(edge % pair.rows == 0 for edge in edges[0])
    if (
        not along
        or not whole
        or edges[1] != [pair.times * edge for edge in edges[0]]
        or rows.inner != 1
    ):
        return None
    return [
        replace(rows, outer=(end - start) // pair.rows, entry=None)
        for start, end in itertools.pairwise(edges[0])
    ]


def _concatenated(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Join several batches along the axis of their rows, or arrays along another axis."""
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    axis = pair.one.params["dimension"]
    if any(fact.axis != axis for fact in rows):
        return _moved(pair, inputs)
    if len(rows) < len(inputs) or any(x.inner != 1 and not x.constant for x in rows):
        return pair.undecided("concatenate over the rows")
    return [Rows(axis, sum(x.outer * x.inner for x in rows))]


def _moved(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Return the facts after an equation that works along other axes, or element by element."""
    name, found = pair.name, layout(inputs)
    if found is None:
        return pair.compared(f"{name} of rows and other rows")
    kinds = [Along(x.axis) if isinstance(x, Rows) else Slicing.SAME for x in inputs]
    try:
        axes = axes_after(pair.other, pair.one, kinds)
    except (KeyError, TypeError, ValueError):
        axes = None
    if axes is None:
        # A sort may be undone later.
        known = name in ELEMENTWISE or name in MIXES or sorts_by_noise(pair, inputs)
        return (pair.compared if known else pair.undecided)(f"{name} over the rows")
    constant = all(fact.constant for fact in inputs if isinstance(fact, Rows))
    return [replace(found, axis=axis, constant=constant) for axis in axes]


def sorts_by_noise(pair: Pair, inputs: Sequence[Fact]) -> bool:
    """Return whether it permutes rows at random, which numbers without noise cannot find."""
    first = inputs[0]
    noise = pair.one.invars[0].aval.dtype == np.uint32 or (isinstance(first, Rows) and first.noise)
    return pair.name == "sort" and noise


def _contracted(pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle | None:
    """Return the facts of a product that adds up rows; ``None`` if it does not."""
    (left, right), power = inputs, power_of(pair, inputs)
    pairs = list(zip(*pair.one.params["dimension_numbers"][0], strict=True))
    if not (isinstance(left, Rows) and isinstance(right, Rows)):
        return None
    if power is None or (left.axis, right.axis) not in pairs:
        return None
    if layout(inputs) is None:
        return pair.compared("dot_general of rows and other rows")
    both = left.constant and right.constant
    counts = are_counts(pair, inputs)
    return [Free(power + 1) if both else Total(power + 1, counts=counts)]


def _reshaped(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Chunks | Obstacle:
    (rows,) = inputs
    assert isinstance(rows, Rows)
    before, after = (x.aval.shape for x in (pair.one.invars[0], pair.one.outvars[0]))
    of_other = pair.other.outvars[0].aval.shape
    order = pair.one.params.get("dimensions") or range(len(before))
    before, at = [before[axis] for axis in order], order.index(rows.axis)
    outer = math.prod(before[:at]) * rows.outer
    inner = math.prod(before[at + 1 :]) * rows.inner
    for axis, size in enumerate(after):
        left, right = math.prod(after[:axis]), math.prod(after[axis + 1 :])
        if outer % left or inner % right or of_other[axis] != pair.times * size:
            continue
        if outer // left * pair.rows * (inner // right) == size:
            alone = (left, size) == (math.prod(before[:at]), before[at])
            constant = rows.constant and (alone or rows.zero)
            return [Rows(axis, outer // left, inner // right, constant=constant)]
    for axis, size in enumerate(after[1:], 1):
        alone = outer == math.prod(after[1:axis]) == 1 and after[0] == of_other[0]
        inside = inner % math.prod(after[axis + 1 :]) == 0
        if alone and inside and of_other[axis] == pair.times * size:
            return Chunks(after[0], size, axis)
    return pair.undecided("reshape that splits the rows")


def _convolved(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    params, (left, right) = pair.one.params, inputs
    numbers, mixed = params["dimension_numbers"], pair.compared("a convolution over the rows")
    if isinstance(left, Rows) and isinstance(right, Free):
        same = left.axis == numbers.lhs_spec[0] and params["batch_group_count"] == 1
        return [replace(left, axis=numbers.out_spec[0])] if same else mixed
    # Such as a kernel that is made of rows.
    return pair.undecided(mixed.reason)


def _in_windows(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    params, found = pair.one.params, layout(inputs)
    axes = {fact.axis for fact in inputs if isinstance(fact, Rows)}
    if found is None or len(axes) > 1:
        return pair.compared("windows over the rows")
    axis = axes.pop()
    padding = params.get("padding", ())
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = {params[name][axis] for name in names if name in params} == {1}
    alone = alone and (not padding or tuple(padding[axis]) == (0, 0))
    number = len(pair.one.outvars)
    return [found] * number if alone else pair.compared("windows over the rows")


def _updated(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Write a slice of each row, at the same place in all rows."""
    mixed, (operand, update, *starts) = pair.compared("dynamic_update_slice of the rows"), inputs
    if not (isinstance(operand, Rows) and isinstance(update, Rows)):
        return mixed
    if any(not isinstance(fact, Free) for fact in starts):
        return pair.undecided("dynamic_update_slice of the rows")
    shapes = [atom.aval.shape for atom in pair.one.invars[:2]]
    found = layout([operand, update])
    whole = shapes[0][operand.axis] == shapes[1][operand.axis] and operand.axis == update.axis
    return [replace(found, constant=False)] if whole and found is not None else mixed


def _added_up(pair: Pair, inputs: Sequence[Fact], power: int) -> list[Total] | Obstacle:
    """Sum rows, each at the place that its own index gives."""
    operand, indices, update = inputs
    mixed = pair.compared("scatter-add of rows to other rows")
    if not (isinstance(indices, Rows) and isinstance(update, Rows)):
        return mixed
    windows = pair.one.params["dimension_numbers"].update_window_dims
    batch = [axis for axis in range(pair.one.invars[2].aval.ndim) if axis not in windows]
    own = update.axis in batch and batch.index(update.axis) == indices.axis
    if not own or layout([indices, update]) is None:
        return mixed
    if not is_zero(operand):
        return pair.undecided("scatter-add to a sum")
    return [Total(power + 1, counts=are_counts(pair, inputs))]


# Gathers and scatters, whose indices may be rows, too.


class _DimensionNumbers(NamedTuple):
    """The dimension numbers of a gather, or of a scatter.

    The updates of a scatter have the axes that the output of a gather has.
    """

    windows: Sequence[int]  # the axes of the output, or updates, that are axes of the operand
    batch: Sequence[int]  # its other axes, which are all axes of the indices but the last
    gone: Sequence[int]  # the axes of the operand along which an index chooses one element
    to_operand: Sequence[int]  # for each column of the indices, the axis of the operand it indexes
    paired: dict[int, int]  # batching axes: from those of the operand to those of the indices
    kept: Sequence[int]  # the other axes of the operand

    def of_rows(self, rows: Rows, size: int, full: int) -> int | None:
        """Return the axis of the operand's rows, if the indices choose the same in all rows."""
        if rows.axis not in self.kept or size != full:
            return None
        return self.windows[self.kept.index(rows.axis)]

    def of_indices(self, axis: int) -> int | None:
        """Return where an axis of the indices is in the output; ``None`` if it is the last."""
        return self.batch[axis] if axis < len(self.batch) else None

    def of_both(self, rows: Rows, indices: Rows | Index, columns: int) -> int | None:
        """Return the axis of the operand's rows, if each row is indexed by its own indices."""
        if isinstance(indices, Rows):
            paired = self.paired.get(rows.axis) == indices.axis
            alike = layout([rows, indices]) is not None
            return self.of_indices(indices.axis) if paired and alike else None
        # A row's number has to choose that row, and nothing else.
        column = 0 if columns == 1 else indices.column
        if column is None or self.to_operand[column] != rows.axis or rows.axis not in self.gone:
            return None
        return self.of_indices(indices.axis) if rows.is_plain else None


def _dimension_numbers(of: Any, operand: Any, out: Any, names: Sequence[str]) -> _DimensionNumbers:
    windows, gone, to_operand, batched = (getattr(of, name) for name in names)
    paired = dict(zip(of.operand_batching_dims, batched, strict=True))
    return _DimensionNumbers(
        windows,
        [axis for axis in range(out.ndim) if axis not in windows],
        gone,
        to_operand,
        paired,
        [axis for axis in range(operand.ndim) if axis not in gone and axis not in paired],
    )


# JAX's names of the dimension numbers, in the order of the arguments below.
_OF_GATHER = "offset_dims collapsed_slice_dims start_index_map start_indices_batching_dims".split()
_OF_SCATTER = (
    "update_window_dims inserted_window_dims scatter_dims_to_operand_dims "
    "scatter_indices_batching_dims".split()
)


def gathered(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Return the facts of a gather from an operand, by indices."""
    (operand, indices), params = inputs, pair.one.params
    shapes = [atom.aval for atom in pair.one.invars]
    of = _dimension_numbers(
        params["dimension_numbers"], shapes[0], pair.one.outvars[0].aval, _OF_GATHER
    )
    found: Fact | None = operand
    axis: int | None = None
    if isinstance(operand, Rows):
        full = shapes[0].shape[operand.axis]
        if isinstance(indices, Rows | Index):
            axis = of.of_both(operand, indices, shapes[1].shape[-1])
            found = layout([operand, indices]) if isinstance(indices, Rows) else operand
        else:
            axis = of.of_rows(operand, params["slice_sizes"][operand.axis], full)
    elif isinstance(indices, Rows):
        found, axis = indices, of.of_indices(indices.axis)
    if axis is None or not isinstance(found, Rows):
        return pair.compared("gather from other rows")
    return [replace(found, axis=axis)]


def scattered(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Return the facts of a scatter of updates to an operand, both of which have rows."""
    operand, indices, update = inputs
    shapes = [atom.aval for atom in pair.one.invars]
    of = _dimension_numbers(pair.one.params["dimension_numbers"], shapes[0], shapes[2], _OF_SCATTER)
    mixed = pair.compared(f"{pair.name} to other rows")
    if not (isinstance(operand, Rows) and isinstance(update, Rows)):
        return mixed
    found = layout([operand, update])
    if isinstance(indices, Rows | Index):
        axis = of.of_both(operand, indices, shapes[1].shape[-1])
        if isinstance(indices, Rows):
            found = layout([operand, indices, update])
    else:
        full = shapes[0].shape[operand.axis]
        axis = of.of_rows(operand, shapes[2].shape[update.axis], full)
    if axis is None or axis != update.axis or found is None:
        return mixed
    return [replace(found, axis=operand.axis, constant=False)]


def of_index(pair: Pair, inputs: Sequence[Fact]) -> Fact | None:
    """Return the fact of an output that still holds the number of each row; ``None`` if not."""
    name, out = pair.name, pair.one.outvars[0].aval
    if name == "concatenate":
        # Joined along the last axis with other indices of each row.
        places = [place for place, fact in enumerate(inputs) if isinstance(fact, Index)]
        axes = {fact.axis if isinstance(fact, Index | Rows) else None for fact in inputs}
        if len(places) != 1 or len(axes) != 1 or pair.one.params["dimension"] != out.ndim - 1:
            return None
        columns = sum(atom.aval.shape[-1] for atom in pair.one.invars[: places[0]])
        (axis,) = axes
        width = pair.one.invars[places[0]].aval.shape[-1]
        plain = axis != out.ndim - 1 and width == 1
        return Index(axis, columns) if axis is not None and plain else None
    (index, *others) = inputs
    if others or not isinstance(index, Index) or index.column is not None:
        return None
    shape = pair.one.invars[0].aval.shape
    if name == "convert_element_type" and out.dtype.kind in "iu":
        return index
    if name == "broadcast_in_dim":
        return Index(pair.one.params["broadcast_dimensions"][index.axis])
    if name == "reshape" and sorted({1, *out.shape}) == sorted({1, pair.rows}) == sorted(
        {1, *shape}
    ):
        return Index(out.shape.index(pair.rows))
    return None


def keys_of_rows(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Return the facts of keys that are made from one key and each row's number."""
    match inputs:
        case [Free(own=True), Index(axis, None)]:
            return [Rows(axis)]
        case [Free(), Index()]:
            return pair.compared(SAME_NOISE)
    return pair.undecided("keys of the position of a row")


# Random numbers: each row needs a key of its own.


def drawn(pair: Pair, inputs: Sequence[Fact], axis: int | None = None) -> list[Fact] | Obstacle:
    """Return the facts of the outputs of a primitive that is random.

    Args:
      pair: the equations.
      inputs: the facts of their inputs, rows or free of the batch.
      axis: the axis along which the outputs grow, if no input has rows.
    """
    number, place = len(pair.one.outvars), KEYS.get(pair.name)
    if place is None or not all(isinstance(fact, Free | Rows) for fact in inputs):
        return pair.undecided(f"{pair.name}, of which nothing is known")
    if power_of(pair, inputs) != 0:
        return pair.undecided(f"{pair.name} of the number of rows")
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    axes = {fact.axis for fact in rows} if axis is None else {axis}
    if len(axes) > 1 or not all(fact.is_plain for fact in rows):
        return pair.undecided(f"{pair.name} of keys in two orders")
    (axis,) = axes
    key = inputs[place]
    if isinstance(key, Free) and pair.name in _DRAWS and not key.own:
        return pair.compared(SAME_NOISE)
    # One key draws different numbers for the rows; equal keys of the rows draw the same.
    constant = bool(rows) and all(fact.constant for fact in rows)
    constant = constant and (isinstance(key, Rows) or pair.name not in _DRAWS)
    noise = pair.name in _DRAWS and not constant
    return [Rows(axis, constant=constant, noise=noise)] * number


_SPECIAL: dict[str, Callable[[Pair, Sequence[Fact]], list[Rows] | Chunks | Obstacle]] = {
    "concatenate": _concatenated,
    "conv_general_dilated": _convolved,
    "dynamic_update_slice": _updated,
    "gather": gathered,
    "reduce_window": _in_windows,
    "reduce_window_max": _in_windows,
    "reduce_window_min": _in_windows,
    "reduce_window_sum": _in_windows,
    "reshape": _reshaped,
    "select_and_gather_add": _in_windows,
    "select_and_scatter_add": _in_windows,
}


# Sums over rows, their ratios, and other values that such sums divide.


def of_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    """Return the fact of the output, if some of the inputs are sums over rows."""
    found = _of_sums(pair, inputs)
    if isinstance(found, Total) and pair.name not in MOVES and not found.moved:
        found = replace(found, single=False, of=None, counts=are_counts(pair, inputs))
        if pair.name not in ADDS and any(x.bound for x in inputs if isinstance(x, Total)):
            found = replace(found, bound=math.inf)
    return found


def _of_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    name, sums = pair.name, [fact for fact in inputs if not isinstance(fact, Free)]
    mixed = _mixed(pair, inputs, f"{name} of a sum over rows")
    bounded = [fact for fact in sums if isinstance(fact, Total) and fact.moved == "max"]
    if bounded and (name in LINEAR or name in ADDS):
        # The bound is what is not linear.
        mixed = replace(mixed, reason="max of a sum over rows", equation=bounded[0].equation)
    if any(isinstance(fact, NonZero) for fact in inputs):
        return _guarded(pair, inputs)
    if not all(isinstance(fact, Free | Total) for fact in inputs):
        return _of_rows_and_sums(pair, inputs)
    match inputs:
        # A sum that was moved is accepted, too: a guard of it does nothing, or the same.
        case [Total(of=of, single=True), Free(number=0)] if name in ("gt", "ne", "eq"):
            return NonZero(of, name == "eq", pair.one)
        case [Free(number=0), Total(of=of, single=True)] if name in ("lt", "ne", "eq"):
            return NonZero(of, name == "eq", pair.one)
    if pair.converts():
        return mixed
    if name == "div":
        return _divided(pair, inputs, mixed)
    if (name == "mul" or name == "dot_general") and len(sums) == 1:
        power = sum(fact.power for fact in inputs if isinstance(fact, Free))
        match sums[0]:
            case Total(own, moved=""):
                return replace(sums[0], power=own + power)
        return mixed
    if name == "max":
        return _at_least(inputs, mixed)
    if name in ADDS:
        mixed = mixed if len(sums) == len(inputs) else pair.compared(ADDS_UNLIKE)
        first, other = inputs
        if name == "sub" and isinstance(other, Free) and other.number is not None:
            other = replace(other, number=-other.number)
        found = added([first, other], mixed)
        # A number minus a sum is not the sum plus a number.
        turned = name == "sub" and isinstance(first, Free)
        return mixed if turned and isinstance(found, Total) and found.moved else found
    if name in CHOOSES:
        chooses, rest = chosen(name, inputs)
        if any(not isinstance(fact, Free) or fact.power for fact in chooses):
            return mixed
        filled = pair.one.params.get("fill_value") is not None
        return pair.undecided(f"{name} that fills") if filled else _combined(pair, rest)
    return _combined(pair, inputs) if name in LINEAR else mixed


def _mixed(pair: Pair, inputs: Sequence[Fact], reason: str) -> Obstacle:
    """Return the obstacle that rows are compared, or that nothing is known of the operation.

    Counts in an array may only determine where rows go, so nothing is known of them, either.
    """
    counts = any(
        isinstance(fact, Total) and not fact.single and not is_inexact(atom)
        for fact, atom in zip(inputs, pair.one.invars, strict=True)
    )
    known = pair.name in _KNOWN and not counts
    return (pair.compared if known else pair.undecided)(reason)


def _of_rows_and_sums(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    reason = f"{pair.name} of a row and of a sum over rows"
    match inputs:
        case [Rows(power=power) as rows, Total(by, single=True) as total] if pair.name == "div":
            rows = replace(rows, power=power - by, entry=None, counts=False)
            return Divided(rows, total, pair.one, at=frozenset(pair.one.outvars))
        case [Rows(), Total()] if pair.name == "div":
            return pair.undecided(reason)
    # If the result is averaged over the rows, what is added to each row is added to the mean.
    if pair.name in ("add", "add_any"):
        return replace(pair.undecided(reason), of_all=True)
    return _mixed(pair, inputs, reason)


def of_divided(
    pair: Pair,
    inputs: Sequence[Fact],
    transferred: Callable[[Pair, Sequence[Fact]], Sequence[Fact] | Obstacle],
) -> Sequence[Fact] | Obstacle:
    """Return the facts of the outputs, if some of the inputs are divided by a sum over rows.

    An output that is linear in these inputs is divided by the same sum.

    Args:
      pair: the equations.
      inputs: the facts of their inputs.
      transferred: returns the facts of the outputs, for inputs that are not divided.
    """
    name, divided = pair.name, [fact for fact in inputs if isinstance(fact, Divided)]
    within = [fact.fact if isinstance(fact, Divided) else fact for fact in inputs]
    kinds, (first, *_) = set(map(type, within)), divided
    by, was_ratio = first.by, any(isinstance(fact.fact, Total) for fact in divided)
    if SoFar in kinds:
        return pair.compared(MEETS_EARLIER)
    if NonZero in kinds and Rows not in kinds:
        return [_guarded(pair, inputs)]
    if name in ADDS and Rows not in kinds:
        others = [type(fact) for fact in inputs if not isinstance(fact, Divided)]
        of_one_loss = others == [Total] or (others == [Free] and was_ratio)
        return [added(inputs, (pair.compared if of_one_loss else pair.undecided)(ADDS_UNLIKE))]
    if {Rows, Total} <= kinds:
        reason = f"{name} of a row and of a sum over rows"
        unsure = name in ("add", "add_any") or any(isinstance(x.fact, Rows) for x in divided)
        return pair.undecided(reason) if unsure else _mixed(pair, inputs, reason)
    of = "rows that a sum over rows divides" if Rows in kinds else "a sum over rows"
    mixed = _mixed(pair, inputs, f"{name} of {of}")
    unknown = pair.undecided(mixed.reason)
    if not kinds <= {Free, Rows, Total} or (Rows in kinds and pair.converts()):
        return unknown
    linear = len(divided) == 1
    if name == "div":
        linear = linear and first is inputs[0]
    elif name in LINEAR or name in ADDS or name in CHOOSES:
        chooses, rest = chosen(name, inputs)
        same = all(fact.by == by or by.is_same(fact.by) for fact in divided)
        apart = [fact for fact in rest if not isinstance(fact, Divided) and not is_zero(fact)]
        linear = same and not apart and not any(isinstance(fact, Divided) for fact in chooses)
    elif name not in ("mul", "dot_general"):
        linear = False
    if not linear or pair.converts():
        return mixed
    outputs = transferred(pair, within)
    if isinstance(outputs, Obstacle):
        return outputs

    def again(fact: Fact) -> Fact:
        match fact:
            case Total(power, moved=""):
                fact = Total(power)
            case Free(power, own=False):
                fact = Free(power)
            case Divided():
                return mixed
            case Rows() | Obstacle():
                pass
            case _:
                return unknown
        equation = first.equation if was_ratio else pair.one
        return replace(first.together(*divided), equation=equation).with_fact(fact)

    return list(map(again, outputs))


def _guarded(pair: Pair, inputs: Sequence[Fact]) -> Fact:
    """Return the fact of a value that is replaced where a sum over rows is 0."""
    name, reason = pair.name, "a sum over rows decides"
    # The sum that is compared with 0 may be the one that divides, computed once more.
    again = any(isinstance(fact, Total | Divided) for fact in inputs)
    mixed = (pair.undecided if again else pair.compared)(reason)
    if name in MOVES and len(inputs) == 1:
        return inputs[0]
    guard, *cases = inputs
    if name == "select_n" and isinstance(guard, NonZero):
        match cases[::-1] if guard.negated else cases:
            case [Free(0, number=number), Total(single=True) as total] if guard.tests(total):
                if total.moved:
                    return total
                return replace(total, moved="guard", bound=number or 0.0, equation=pair.one)
            case [Free(0, number=number), Divided(Total(), by) as ratio] if guard.tests(by):
                return ratio.together(guard, adds=number != 0)
            case [Free(number=0), Divided(Free(), by) as inverse] if guard.tests(by):
                return inverse.together(guard)
    return mixed


def _combined(pair: Pair, facts: Sequence[Fact]) -> Fact:
    """Return the fact of an output whose elements are copied or added up from all inputs."""
    found = facts[0]
    for fact in facts[1:]:
        found = joined(found, fact)
    if isinstance(found, Obstacle) and found.equation is None:
        return replace(found, equation=pair.one)
    return found


def _divided(pair: Pair, inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
    at = frozenset(pair.one.outvars)
    match inputs:
        case [Total(power, moved=""), Free(by)]:
            return Total(power - by)
        case [Total(moved="") | Free(), Total(single=False)]:
            return pair.undecided(DIVIDES)
        case [Total(power, moved=""), Total(by) as divisor]:
            return Divided(Total(power - by), divisor, pair.one, at=at)
        case [Free(power), Total(by) as divisor]:
            return Divided(Free(power - by), divisor, pair.one, at=at)
        # As in the Dice loss: a sum plus a number, which each shard would add once more.
        case [Total(moved="plus"), _]:
            return pair.compared("div of a sum over rows plus a number")
    return mixed


def _at_least(inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
    match sorted(inputs, key=lambda fact: isinstance(fact, Free)):
        case [Total(power, moved="" | "guard") as total, Free(0, _, float(bound))]:
            if power in (0, 1):
                return replace(total, moved="max", bound=bound, equation=mixed.equation)
    return mixed


def added(facts: Sequence[Fact], mixed: Obstacle) -> Fact:
    """Return the fact of a sum, or a difference, of two values."""
    one, other = facts
    if isinstance(one, Free):
        one, other = other, one
    match one, other:
        case (_, Free(number=0)):
            return one
        case Total(power, moved=""), Free(by, number=number) if power == by:
            return Total(power, bound=math.inf if number is None or one.bound else number)
        case Total(1, moved="" | "guard"), Free(0, _, float(number)) if abs(number) <= _SMALL:
            return replace(one, moved="plus", bound=number, equation=mixed.equation)
        case Divided(Total(power)), Free(by) if power == by:
            return replace(one, adds=True)
        case Total(power, moved=""), Total(by, moved="") if power == by:
            return Total(power, bound=math.inf if one.bound or other.bound else 0.0)
        case Divided(Total(power), by), Divided(Total(other_power), also) if by.is_same(also):
            return one.together(other) if power == other_power else mixed
    return mixed


# What is not decided, and sums over it: numbers decide, unless it is not linear in a sum.


def of_undecided(pair: Pair, inputs: Sequence[Fact], obstacle: Obstacle) -> Obstacle:
    """Return the fact of the outputs, given the worst of the obstacles among the inputs."""
    if obstacle.kind is not OverRows.UNDECIDED:
        return obstacle
    name, atoms = pair.name, pair.one.invars
    is_all = [_is_of_all(fact) for fact in inputs]
    exact = [each and is_inexact(atom) for each, atom in zip(is_all, atoms, strict=True)]
    if name not in KNOWN:
        # Integers, such as the numbers of rows of experts, say where rows go.
        return obstacle if any(exact) else replace(obstacle, of_all=False)
    fixed = [shape_of(one) == shape_of(other) for one, other in zip(*_ends(pair)[0], strict=True)]
    if name == "div" and fixed[1] and is_all[1]:
        by = inputs[1] if isinstance(inputs[1], Total) else None
        return replace(obstacle, reason=DIVIDES, equation=pair.one, of_all=True, by=by)
    if is_all[0] and _is_undecided(inputs[0]) and not may_guard(inputs[1:]):
        # A condition, such as whether any row has a flag.
        is_flag = atoms[0].aval.dtype == bool and is_inexact(pair.one.outvars[0])
        if is_flag and name in ("select_n", "convert_element_type"):
            return pair.compared(DECIDED)
        if name == "broadcast_in_dim":
            return obstacle
    if not any(exact):
        return replace(obstacle, of_all=False)
    rest = [
        x
        for x, is_fixed in zip(inputs, fixed, strict=True)
        if not (isinstance(x, Free) or getattr(x, "constant", False))
        and not (is_fixed and _is_undecided(x) and not _is_of_all(x))
    ]
    if any(map(_is_bounded, inputs)):
        # It may only divide, as a count that may be 0 does, also plus something small.
        small = [x.number for x in inputs if isinstance(x, Free) and x.number is not None]
        adds = name in ADDS and bool(small) and abs(small[0]) <= _SMALL
        moved = (name in MOVES or name in PASSES or adds) and not pair.converts()
        return obstacle if moved else pair.compared(f"{name} of a bound of a sum over rows")
    linear = name in LINEAR or name in ADDS
    if name in ("mul", "dot_general", "gather", "dynamic_slice") or (name == "div" and exact[0]):
        linear = len(rest) == 1
    elif name == "select_n":
        linear = fixed[0]
    elif name == "max" and all(fixed):
        bounded = any(isinstance(x, Free) and (x.number or 0) >= 1 for x in inputs)
        if bounded:
            return replace(obstacle, reason=BOUNDS, equation=pair.one, of_all=True)
    if linear and not pair.converts():
        return replace(obstacle, of_all=True)
    if name == "mul" and obstacle.reason == DIVIDES and any(isinstance(x, Total) for x in inputs):
        return obstacle  # its inverse is multiplied with
    return pair.compared(f"{name} of a sum over rows, of some of them, or of rows in other places")


def may_guard(values: Sequence[Fact]) -> bool:
    """Return whether a choice of these may only guard what counts nothing: a sum, or a ratio."""
    match [x for x in values if not isinstance(x, Free)]:
        case [Divided() | Total(power=1)]:
            return True
        case [Obstacle(reason=reason)]:
            return reason == DIVIDES
    return False


def with_own_derivative(fact: Fact, obstacle: Obstacle) -> Obstacle:
    """Return the fact of an output whose own gradient is an obstacle.

    It keeps what divides it, and what was done to a sum, which may only divide: ``jax.nn.relu`` of
    a mean is a bound as ``jnp.maximum`` is.
    """
    if isinstance(fact, Divided) and obstacle.kind is OverRows.UNDECIDED:
        by = fact.by
        return replace(obstacle, reason=DIVIDES, equation=fact.equation, of_all=True, by=by)
    if isinstance(fact, Total) and fact.moved and obstacle.kind is OverRows.UNDECIDED:
        return replace(obstacle, reason=BOUNDS, of_all=True)
    return worst([fact, replace(obstacle, of_all=obstacle.of_all or _is_of_all(fact))]) or obstacle


def of_all_rows(pair: Pair, inputs: Sequence[Fact], outputs: Sequence[Fact]) -> Sequence[Fact]:
    """Note which outputs that are not decided hold something of all rows: those without rows."""
    given, made = _ends(pair)
    from_all = any(map(_is_of_all, inputs)) or any(
        shape_of(one) != shape_of(other) for one, other in zip(*given, strict=True)
    )
    return [
        replace(fact, of_all=True)
        if from_all and _is_undecided(fact) and shape_of(one) == shape_of(other)
        else fact
        for fact, one, other in zip(outputs, *made, strict=True)
    ]


def _ends(pair: Pair) -> tuple[Any, Any]:
    """Return the inputs of both equations, and their outputs."""
    return (pair.one.invars, pair.other.invars), (pair.one.outvars, pair.other.outvars)


def _is_undecided(fact: Fact) -> bool:
    return isinstance(fact, Obstacle) and fact.kind is OverRows.UNDECIDED


def _is_bounded(fact: Fact) -> bool:
    return isinstance(fact, Obstacle) and fact.reason == BOUNDS


def _is_of_all(fact: Fact) -> bool:
    return isinstance(fact, Total | Divided | NonZero) or getattr(fact, "of_all", False)
