"""What becomes of rows: where they are after an equation, and whether each is still its own."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from crossshard.jaxprs.primitives import ELEMENTWISE, MIXES, MOVES
from crossshard.jaxprs.row_draws import drawn, is_random
from crossshard.jaxprs.row_facts import (
    Chunks,
    Fact,
    Free,
    Obstacle,
    Pair,
    Rows,
    Total,
    are_counts,
    is_zero,
    layout,
    power_of,
)
from crossshard.jaxprs.row_gathers import gathered, scattered
from crossshard.jaxprs.slices import Along, Slicing, axes_after


def of_rows(pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
    """The facts of the outputs, of inputs that are rows or free of the batch."""
    name = pair.name
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    if is_random(name):
        return drawn(pair, inputs)
    power = power_of(pair, inputs)
    if power is None:
        return pair.undecided(f"{name} of the number of rows")
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
    same = name in MOVES and not pair.converts()
    return [
        replace(
            fact,
            power=power,
            constant=constant and fact.constant,
            zero=same and rows[0].zero,
            entry=rows[0].entry if same else None,
            counts=counts,
        )
        for fact in moved
    ]


def batches_of(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | None:
    """Of several batches behind each other, some of them; ``None`` if it takes anything else."""
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
    """Several batches behind each other, or what is computed along another axis."""
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    axis = pair.one.params["dimension"]
    if any(fact.axis != axis for fact in rows):
        return _moved(pair, inputs)
    if len(rows) < len(inputs) or any(x.inner != 1 and not x.constant for x in rows):
        return pair.undecided("concatenate over the rows")
    return [Rows(axis, sum(x.outer * x.inner for x in rows))]


def _moved(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """What is computed along other axes, or of elements in one place."""
    name, found = pair.name, layout(inputs)
    if found is None:
        return pair.compared(f"{name} of rows and other rows")
    kinds = [Along(x.axis) if isinstance(x, Rows) else Slicing.SAME for x in inputs]
    try:
        axes = axes_after(pair.other, pair.one, kinds)
    except (KeyError, TypeError, ValueError):
        axes = None
    if axes is None:
        # A sort may be undone; by random numbers, which numbers cannot tell, it is a permutation.
        by_noise = name == "sort" and pair.one.invars[0].aval.dtype == np.uint32
        known = name in ELEMENTWISE or name in MIXES or by_noise
        return (pair.compared if known else pair.undecided)(f"{name} over the rows")
    constant = all(fact.constant for fact in inputs if isinstance(fact, Rows))
    return [replace(found, axis=axis, constant=constant) for axis in axes]


def _contracted(pair: Pair, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle | None:
    """A product that adds up rows; ``None`` if it does not."""
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


def merged(pair: Pair, chunks: Chunks) -> list[Rows] | Obstacle:
    """Chunks behind each other, as the rows were before they were cut."""
    after, of_other = (x.outvars[0].aval.shape for x in pair[:2])
    for axis, size in enumerate(after):
        inner, odd = divmod(size, pair.rows)
        behind = math.prod(after[axis + 1 :])
        of_slice = math.prod(pair.one.invars[0].aval.shape) // (chunks.number * chunks.size)
        whole = size * behind == chunks.number * chunks.size * of_slice and not odd
        if whole and of_slice % behind == 0 and of_other[axis] == pair.times * size:
            return [Rows(axis, 1, inner, chunks.power, counts=chunks.counts)]
    return pair.undecided("reshape of chunks of rows")


def _stacked(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    found, new = layout(inputs), pair.one.params["axis"]
    axes = {fact.axis if isinstance(fact, Rows) else None for fact in inputs}
    if found is None or len(axes) > 1:
        return pair.undecided("stack over the rows")
    return [replace(found, axis=found.axis + (new <= found.axis), constant=False)]


def _unstacked(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    (rows,), gone = inputs, pair.one.params["axis"]
    assert isinstance(rows, Rows)
    if gone == rows.axis:
        return pair.compared("unstack of the rows")
    return [replace(rows, axis=rows.axis - (gone < rows.axis))] * len(pair.one.outvars)


def _tiled(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    (rows,) = inputs
    assert isinstance(rows, Rows)
    once = pair.one.params["reps"][rows.axis] == 1
    return [rows] if once else pair.undecided("tile of the rows")


def _solved(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Of one matrix, each column or row of the right side is solved alone."""
    matrix, right = inputs
    last = pair.one.invars[1].aval.ndim - 1
    alone = last if pair.one.params["left_side"] else last - 1
    if isinstance(matrix, Free) and isinstance(right, Rows) and right.axis == alone:
        return [replace(right, constant=False)]
    return _moved(pair, inputs)


def _transformed(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """A Fourier transform, of the last axes."""
    (rows,), of = inputs, len(pair.one.params["fft_lengths"])
    assert isinstance(rows, Rows)
    alone = rows.axis < pair.one.invars[0].aval.ndim - of
    return [rows] if alone else pair.compared("fft over the rows")


def _convolved(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    params, (left, right) = pair.one.params, inputs
    numbers, mixed = params["dimension_numbers"], pair.compared("a convolution over the rows")
    out, groups = numbers.out_spec, params["feature_group_count"]
    batches = params["batch_group_count"]
    if isinstance(left, Rows) and isinstance(right, Free):
        same = left.axis == numbers.lhs_spec[0] and batches == 1
        same = same and pair.other.params["feature_group_count"] == groups
        return [replace(left, axis=out[0])] if same else mixed
    if isinstance(left, Free) and isinstance(right, Rows):
        of_kernels = right.axis == numbers.rhs_spec[0] and groups == batches == 1
        return [replace(right, axis=out[1])] if of_kernels else mixed
    assert isinstance(left, Rows)
    assert isinstance(right, Rows)
    if left.outer != 1 or right.outer != 1 or right.axis != numbers.rhs_spec[0]:
        return mixed
    # As vmap makes of them: a group for each row, or several.
    grown = [
        name
        for name in ("feature_group_count", "batch_group_count")
        if params[name] % pair.rows == 0 and pair.other.params[name] == pair.times * params[name]
    ]
    size = pair.one.outvars[0].aval.shape[out[1]] // pair.rows
    grouped = grown == ["feature_group_count"] and left.axis == numbers.lhs_spec[1] and batches == 1
    batched = grown == ["batch_group_count"] and left.axis == numbers.lhs_spec[0] and groups == 1
    return [Rows(out[1], 1, size)] if grouped or batched else mixed


def _in_windows(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    params, found = pair.one.params, layout(inputs)
    axes = {fact.axis for fact in inputs if isinstance(fact, Rows)}
    if found is None or len(axes) > 1:
        return pair.compared("windows over the rows")
    axis = axes.pop()
    padding = params.get("padding", ())
    lengths = [params["window_dimensions"][axis], params["window_strides"][axis]]
    for name in ("base_dilation", "window_dilation"):
        lengths += [params[name][axis]] if name in params else []
    alone = set(lengths) == {1} and (not padding or tuple(padding[axis]) == (0, 0))
    number = len(pair.one.outvars)
    return [found] * number if alone else pair.compared("windows over the rows")


def _updated(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """A slice of each row is written, in the same place."""
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
    """A sum of rows, each of which says where it is added."""
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


_SPECIAL: dict[str, Callable[[Pair, Sequence[Fact]], list[Rows] | Chunks | Obstacle]] = {
    "concatenate": _concatenated,
    "conv_general_dilated": _convolved,
    "dynamic_update_slice": _updated,
    "fft": _transformed,
    "gather": gathered,
    "reduce_window": _in_windows,
    "reduce_window_max": _in_windows,
    "reduce_window_min": _in_windows,
    "reduce_window_sum": _in_windows,
    "reshape": _reshaped,
    "select_and_gather_add": _in_windows,
    "select_and_scatter_add": _in_windows,
    "stack": _stacked,
    "tile": _tiled,
    "triangular_solve": _solved,
    "unstack": _unstacked,
}
