"""What becomes of rows that are looked up or written by indices, and of rows as indices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from crossshard.jaxprs.row_draws import SAME_NOISE
from crossshard.jaxprs.row_facts import Fact, Free, Index, Obstacle, Pair, Rows, layout


class _Numbers(NamedTuple):
    """The dimension numbers of a gather, or of a scatter, whose updates are what a gather returns.

    Attributes:
      windows: the axes of the output, or updates, that are axes of the operand.
      batch: its other axes, which are those of the indices but the last.
      gone: the axes of the operand that indices choose one of.
      to_operand: the axis of the operand that each column of the indices counts.
      paired: the axes of the operand that go with axes of the indices, and these.
      kept: the other axes of the operand.
    """

    windows: Sequence[int]
    batch: Sequence[int]
    gone: Sequence[int]
    to_operand: Sequence[int]
    paired: dict[int, int]
    kept: Sequence[int]

    def of_rows(self, rows: Rows, size: int, full: int) -> int | None:
        """Where rows of the operand are, if indices choose the same in all of them."""
        if rows.axis not in self.kept or size != full:
            return None
        return self.windows[self.kept.index(rows.axis)]

    def of_indices(self, axis: int) -> int | None:
        """Where an axis of the indices is."""
        return self.batch[axis] if axis < len(self.batch) else None

    def of_both(self, rows: Rows, indices: Rows | Index, columns: int) -> int | None:
        """Where rows are, each with the indices of its own."""
        if isinstance(indices, Rows):
            paired = self.paired.get(rows.axis) == indices.axis
            alike = layout([rows, indices]) is not None
            return self.of_indices(indices.axis) if paired and alike else None
        # A number of a row chooses that row, and nothing else.
        column = 0 if columns == 1 else indices.column
        if column is None or self.to_operand[column] != rows.axis or rows.axis not in self.gone:
            return None
        return self.of_indices(indices.axis) if rows.is_plain else None


def _numbers(of: Any, operand: Any, out: Any, names: Sequence[str]) -> _Numbers:
    windows, gone, to_operand, batched = (getattr(of, name) for name in names)
    paired = dict(zip(of.operand_batching_dims, batched, strict=True))
    return _Numbers(
        windows,
        [axis for axis in range(out.ndim) if axis not in windows],
        gone,
        to_operand,
        paired,
        [axis for axis in range(operand.ndim) if axis not in gone and axis not in paired],
    )


_OF_GATHER = (
    "offset_dims",
    "collapsed_slice_dims",
    "start_index_map",
    "start_indices_batching_dims",
)
_OF_SCATTER = (
    "update_window_dims",
    "inserted_window_dims",
    "scatter_dims_to_operand_dims",
    "scatter_indices_batching_dims",
)


def gathered(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """A gather from an operand, by indices."""
    (operand, indices), params = inputs, pair.one.params
    shapes = [atom.aval for atom in pair.one.invars]
    of = _numbers(params["dimension_numbers"], shapes[0], pair.one.outvars[0].aval, _OF_GATHER)
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
    """A scatter of updates to an operand, each of which has rows, by indices."""
    operand, indices, update = inputs
    shapes = [atom.aval for atom in pair.one.invars]
    of = _numbers(pair.one.params["dimension_numbers"], shapes[0], shapes[2], _OF_SCATTER)
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
    """What is still the number of a row; ``None`` if nothing is."""
    name, out = pair.name, pair.one.outvars[0].aval
    if name == "concatenate":
        # Beside what else is an index of the row's.
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


def of_own_numbers(pair: Pair, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
    """Keys that are made of one key and of each row's number."""
    match inputs:
        case [Free(own=True), Index(axis, None)]:
            return [Rows(axis)]
        case [Free(), Index()]:
            return pair.compared(SAME_NOISE)
    return pair.undecided("keys of the position of a row")
