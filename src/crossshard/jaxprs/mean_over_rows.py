"""Whether a loss is a mean over the rows of its batch.

The loss is traced twice, the second time with twice as many rows, and the two jaxprs are walked
side by side. What differs between them shows where rows are: an array whose shape grows along an
axis has rows there, and a literal that doubles counts them.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from crossshard import _jax
from crossshard.jaxprs.along import axes_after
from crossshard.jaxprs.elementwise import ELEMENTWISE, Along, Slicing
from crossshard.jaxprs.walk import Analysis, Equations, Mismatch, follow

SAME_NOISE = "noise from a key that is the same on every shard"


class OverRows(enum.Enum):
    """What a loss is in the rows of its batch."""

    MEAN = "a mean over the rows"
    SUM = "a sum over the rows"
    RATIO = "a ratio of two sums over the rows"
    COMPARED = "a comparison of rows"
    OVER_SHARDS = "a sum over the shards by itself"
    UNDECIDED = "not decided"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a loss is in the rows of its batch, and why.

    Attributes:
      kind: what it is.
      reason: the operation that decides; empty for a mean.
      source: its source line; empty if unknown.
      entry: of a ratio, the place among the leaves of the batch of the one whose sum divides;
        ``None`` if it is none of them.
    """

    kind: OverRows
    reason: str = ""
    source: str = ""
    entry: int | None = None

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.kind.value}{reason}{f' ({self.source})' if self.source else ''}"


def over_rows(loss: Callable[..., Any], batch: Any, *others: Any, own: Any = ()) -> Finding:
    """What ``loss(batch, *others, own)`` is in the rows of the batch, which are along axis 0.

    Args:
      loss: returns a scalar.
      batch: a pytree of arrays or types, each with rows.
      *others: what has no rows.
      own: what has none either, and differs from shard to shard, such as PRNG keys.

    >>> import jax.numpy as jnp
    >>> over_rows(lambda x, w, own: ((x @ w) ** 2).mean(), jnp.ones((4, 3)), jnp.ones(3)).kind
    <OverRows.MEAN: 'a mean over the rows'>
    >>> over_rows(lambda x, w, own: (x @ w).std(), jnp.ones((4, 3)), jnp.ones(3)).kind
    <OverRows.COMPARED: 'rows are compared'>
    """
    rows = max(2, jax.tree.leaves(batch)[0].shape[0])
    traces = []
    for number in (rows, 2 * rows):
        of_number = jax.tree.map(
            lambda x, number=number: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype), batch
        )
        try:
            traces.append(jax.make_jaxpr(loss)(of_number, *others, own))
        except Exception as error:  # a loss may raise anything on other shapes
            if not traces:
                raise
            return Finding(OverRows.UNDECIDED, _FAILS, _jax.source_of_error(error))
    leaves = range(len(jax.tree.leaves(batch)))
    inputs: list[Fact] = [Rows(0, entry=place) for place in leaves]
    inputs += [Free()] * len(jax.tree.leaves(others))
    inputs += [Free(own=True)] * len(jax.tree.leaves(own))
    try:
        (fact,) = follow(_OverRows(rows), traces, inputs)
    except Mismatch as mismatch:
        source = "" if mismatch.equation is None else _jax.source_of(mismatch.equation)
        return Finding(OverRows.UNDECIDED, _DIFFERS, source)
    return _found(fact)


_FAILS = "it cannot be traced with twice as many rows"
_DIFFERS = "it computes something different with twice as many rows"


class Free(NamedTuple):
    """A value that does not depend on the batch.

    Attributes:
      power: of the number of rows, which it grows with.
      own: whether it differs from shard to shard.
      zero: whether all of it is 0.
    """

    power: int = 0
    own: bool = False
    zero: bool = False


class Rows(NamedTuple):
    """An array with rows along an axis, each computed from one row of the batch.

    Attributes:
      axis: the axis; its length is ``outer`` · rows · ``inner``, in this order.
      outer, inner: how many slices along the axis are before a row's, and of it.
      power: of the number of rows, which it grows with.
      constant: whether all rows are equal.
      entry: the place of the batch's leaf that it is, but for its shape and dtype.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    power: int = 0
    constant: bool = False
    entry: int | None = None


class Index(NamedTuple):
    """Indices, of which each row has its own number: in some columns of the last axis, or all."""

    axis: int
    columns: tuple[int, ...] | None = None


class Never(NamedTuple):
    """False everywhere."""


class OneRow(NamedTuple):
    """A value of one row, in a scan over the rows."""


class Total(NamedTuple):
    """A sum over rows.

    Attributes:
      power: of the number of rows, which it grows with: 1 for a sum, 0 for a mean.
      entry: the place of the batch's leaf of which it is the sum.
      moved: whether something was added, or it is a bound: it may only divide then.
    """

    power: int
    entry: int | None = None
    moved: bool = False


class Inverse(NamedTuple):
    """One by a sum over rows."""

    power: int
    entry: int | None


class Ratio(NamedTuple):
    """A sum over rows, divided by another one.

    Attributes:
      entry: the place of the batch's leaf whose sum divides.
      source: the line that divides.
    """

    entry: int | None
    source: str


class Obstacle(NamedTuple):
    """A value that is none of these."""

    kind: OverRows
    reason: str
    source: str = ""


Fact = Free | Rows | Index | Never | OneRow | Total | Inverse | Ratio | Obstacle


def _found(fact: Fact) -> Finding:
    match fact:
        case Obstacle(kind, reason, source):
            return Finding(kind, reason, source)
        case Ratio(entry, source):
            return Finding(OverRows.RATIO, "", source, entry)
        case Free(power=0) | Total(power=0, moved=False) | Never():
            return Finding(OverRows.MEAN)
        case Total(power=1, moved=False):
            return Finding(OverRows.SUM)
        case Total() | Inverse():
            return Finding(OverRows.COMPARED, "something of a sum over rows that is not linear")
        case _:
            return Finding(OverRows.UNDECIDED, "it grows with the number of rows")


# What keeps a sum a sum, if all else that it takes is free of the batch.
_LINEAR = frozenset(
    "broadcast_in_dim concatenate conj convert_element_type copy copy_p cumsum dynamic_slice "
    "gather imag neg pad real reduce_precision reduce_sum reshape rev slice split squeeze "
    "stop_gradient transpose".split()
)
_ADDS = frozenset({"add", "add_any", "sub"})
_KEEPS_ZERO = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape"})
_RANDOM = frozenset({"random_bits", "random_split", "rng_bit_generator"})
# Whose outcome is the same if what they take grows with the number of rows.
_KEEPS_POWER = _LINEAR | _ADDS | {"max", "min", "select_n", "abs", "reduce_max", "reduce_min"}


class _OverRows(Analysis[Fact]):
    """The facts of two traces, the second with twice as many rows as the first."""

    def __init__(self, rows: int):
        self._rows = rows

    def constant(self, values: Sequence[Any]) -> Fact:
        # What is being traced around the loss is another value on each shard.
        if any(isinstance(value, jax.core.Tracer) for value in values):
            return Free(own=True) if values[0] is values[1] else _undecided(_DIFFERS, None)
        return self.literal(values, None)

    def literal(self, values: Sequence[Any], equation: Any) -> Fact:
        one, other = values
        if one is other:
            return Free(zero=np.ndim(one) == 0 and _is_zero(one))
        try:
            one, other = np.asarray(one), np.asarray(other)
        except TypeError:
            return _undecided(_DIFFERS, equation)
        if one.shape == other.shape and np.array_equal(one, other):
            return Free(zero=bool(np.all(one == 0)) if one.size else False)
        if one.shape == other.shape == ():
            for power in (1, -1, 2, -2):
                if np.isclose(other, one * 2.0**power, rtol=1e-5):
                    return Free(power)
        counts = one.ndim == 1 and np.array_equal(other, np.arange(2 * self._rows))
        if counts and np.array_equal(one, np.arange(self._rows)):
            return Index(0)
        return _undecided("it computes with the number of rows", equation)

    def join(self, facts: Sequence[Fact]) -> Fact:
        found = facts[0]
        for fact in facts[1:]:
            found = _joined(found, fact)
        return found

    def control(self, equations: Equations, decides: Fact) -> Fact | None:
        name = equations[0].primitive.name
        match decides:
            case Free(power=0) | Never():
                return None
            case Obstacle():
                return decides
            case Total() | Ratio() | Inverse():
                return _compared(f"a sum over rows decides a {name}", equations[0])
            case _:
                return _undecided(f"rows decide a {name}", equations[0])

    def enters(self, equations: Equations) -> bool:
        kinds = [_jax.control_flow(each) for each in equations]
        loops = [each for each in kinds if isinstance(each, _jax.Scan)]
        return len({each.steps for each in loops}) < 2

    def element(self, equations: Equations, fact: Fact) -> Fact:
        if isinstance(fact, Rows | Index):
            if fact.axis == 0:
                return _compared("a scan over the rows", equations[0])
            return fact._replace(axis=fact.axis - 1, **_forgotten(fact))
        return fact

    def stacked(self, equations: Equations, fact: Fact) -> Fact:
        if isinstance(fact, Rows | Index):
            return fact._replace(axis=fact.axis + 1, **_forgotten(fact))
        return fact

    def returned(self, equations: Equations, fact: Fact) -> Fact:
        # A value without a source line, as in a jit that JAX has traced before, takes the call's.
        if isinstance(fact, Obstacle | Ratio) and not fact.source:
            return fact._replace(source=_jax.source_of(equations[0]))
        return fact

    def transfer(self, equations: Equations, inputs: Sequence[Fact]) -> Sequence[Fact]:
        one, other = equations
        if one.primitive.name == "optimization_barrier":
            return inputs
        if one.primitive.name == "select_n" and inputs[0] == Never():
            # As where an index is negative, which the number of a row is not.
            return [inputs[1]]
        if any(isinstance(name, str) for name in jax.tree.leaves(_jax.named_axes(one))):
            found: Any = Obstacle(OverRows.OVER_SHARDS, one.primitive.name, _jax.source_of(one))
            return [found] * len(one.outvars)
        obstacles = [fact for fact in inputs if isinstance(fact, Obstacle)]
        if obstacles:
            return [min(obstacles, key=_rank)] * len(one.outvars)
        outputs = self._transferred(one, other, inputs)
        if isinstance(outputs, Obstacle):
            return [outputs] * len(one.outvars)
        return [
            fact if self._fits(fact, *pair) else _compared(f"{one.primitive.name} of rows", one)
            for fact, *pair in zip(outputs, one.outvars, other.outvars, strict=True)
        ]

    def _fits(self, fact: Fact, one: Any, other: Any) -> bool:
        """Whether the shape of a value grows only along the axis of its rows."""
        shapes = getattr(one.aval, "shape", ()), getattr(other.aval, "shape", ())
        if not isinstance(fact, Rows | Index):
            return isinstance(fact, Obstacle | Never) or shapes[0] == shapes[1]
        slices = 1 if isinstance(fact, Index) else fact.outer * fact.inner
        if fact.axis >= len(shapes[0]) or shapes[0][fact.axis] != slices * self._rows:
            return False
        doubled = list(shapes[0])
        doubled[fact.axis] *= 2
        return tuple(doubled) == shapes[1]

    def _transferred(
        self, one: Any, other: Any, inputs: Sequence[Fact]
    ) -> Sequence[Fact] | Obstacle:
        number = len(one.outvars)
        if one.primitive.name == "scan":
            return self._scan_over_rows(one, other, inputs)
        if all(isinstance(fact, Free | Never) for fact in inputs):
            return self._of_free(one, other, inputs)
        if any(isinstance(fact, OneRow) for fact in inputs):
            alone = all(isinstance(fact, OneRow | Free | Never) for fact in inputs)
            return [OneRow()] * number if alone else _compared("a row meets others", one)
        if any(isinstance(fact, Index) for fact in inputs):
            return self._of_index(one, other, inputs)
        if any(isinstance(fact, Total | Ratio | Inverse) for fact in inputs):
            found = self._of_sums(one, inputs)
            return found if isinstance(found, Obstacle) else [found] * number
        return self._of_rows(one, other, inputs)

    # Free of the batch.

    def _of_free(self, one: Any, other: Any, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        name, number = one.primitive.name, len(one.outvars)
        if name == "lt" and all(isinstance(fact, Free) and fact.zero for fact in inputs):
            return [Never()]
        free = [fact for fact in inputs if isinstance(fact, Free)]
        own = any(fact.own for fact in free)
        if name in _ADDS:
            free = [fact for fact in free if not fact.zero] or free
        if all(map(_same_shape, one.outvars, other.outvars)):
            if not _jax.same_but_for_shapes(one, other):
                return _undecided(f"{name} with the number of rows", one)
            power = _power(name, [fact.power for fact in free], one)
            if power is None:
                return _undecided(f"{name} of the number of rows", one)
            zero = name in _KEEPS_ZERO and all(fact.zero for fact in free)
            return [Free(power, own, zero)] * number
        axes = {
            _axis_that_grows(pair[0].aval.shape, pair[1].aval.shape)
            for pair in zip(one.outvars, other.outvars, strict=True)
        }
        (axis,) = axes if len(axes) == 1 else (None,)
        if axis is None:
            return _compared(f"{name} makes an array of rows by rows", one)
        inner, odd = divmod(one.outvars[0].aval.shape[axis], self._rows)
        if odd:
            return _undecided(f"{name} with the number of rows", one)
        if name == "iota" and one.params["dimension"] == axis:
            return [Index(axis)] if inner == 1 else _undecided("iota over rows", one)
        if name in ("iota", "broadcast_in_dim"):
            powers = [fact.power for fact in free] or [0]
            return [Rows(axis, 1, inner, powers[0], constant=True)]
        if name in _RANDOM:
            if not own:
                return _compared(SAME_NOISE, one)
            return [Rows(axis, 1, inner)] * number
        return _undecided(f"{name} with the number of rows", one)

    # Numbers of rows.

    def _of_index(self, one: Any, other: Any, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        name = one.primitive.name
        position = _compared("the position of a row", one)
        if name == "lt" and isinstance(inputs[0], Index) and inputs[1] == Free(zero=True):
            return [Never()]
        if name in ("gather", "scatter", "scatter-add", "scatter_add", "scatter_mul"):
            return self._gathered(one, other, inputs)
        if name == "concatenate":
            columns: list[int] = []
            before = 0
            axes = {fact.axis for fact in inputs if isinstance(fact, Index | Rows)}
            last = one.params["dimension"] == one.outvars[0].aval.ndim - 1
            if len(axes) != 1 or not last or not all(isinstance(x, Index | Rows) for x in inputs):
                return position
            for atom, fact in zip(one.invars, inputs, strict=True):
                width = atom.aval.shape[-1]
                columns += range(before, before + width) if isinstance(fact, Index) else ()
                before += width
            return [Index(axes.pop(), tuple(columns))]
        if len(inputs) == 1 and name in ("broadcast_in_dim", "convert_element_type", "reshape"):
            (index,) = inputs
            assert isinstance(index, Index)
            moved = self._moved(one, other, [Rows(index.axis)])
            if index.columns is None and isinstance(moved, list):
                # Rows of one number each.
                return [Index(moved[0].axis)]
        return position

    # Sums over rows.

    def _of_sums(self, one: Any, inputs: Sequence[Fact]) -> Fact | Obstacle:
        name, sums = one.primitive.name, [fact for fact in inputs if not isinstance(fact, Free)]
        if any(isinstance(fact, Rows | Index) for fact in inputs):
            return _compared(f"{name} of a row and of a sum over rows", one)
        mixed = _compared(f"{name} of a sum over rows", one)
        if name == "div":
            return self._divided(one, inputs, mixed)
        if name == "mul" and len(sums) == 2:
            pair = sorted(sums, key=lambda fact: isinstance(fact, Inverse))
            match pair:
                case [Total(power, moved=False), Inverse(by, entry)] if power + by == 0:
                    return Ratio(entry, _jax.source_of(one))
            return mixed
        if name == "mul" or (name == "dot_general" and len(sums) == 1):
            power = sum(fact.power for fact in inputs if isinstance(fact, Free))
            match sums[0]:
                case Total(own, _, moved=False):
                    return Total(own + power)
                case Ratio() if power == 0:
                    return sums[0]
            return mixed
        if name in ("max", "min") and len(sums) == 1 and isinstance(sums[0], Total):
            return sums[0]._replace(moved=True)
        if name in _ADDS:
            return _added(inputs, mixed)
        if name == "select_n" and isinstance(inputs[0], Free):
            return self.join(inputs[1:])
        if name in _LINEAR:
            if len(sums) == len(inputs) or name in ("pad", "gather", "dynamic_slice"):
                found = self.join(sums)
                if isinstance(found, Total) and name not in _KEEPS_ZERO:
                    return found._replace(entry=None)
                return found
            return self.join(inputs)
        return mixed

    def _divided(self, one: Any, inputs: Sequence[Fact], mixed: Obstacle) -> Fact:
        match inputs:
            case [Total(power, _, False), Free(by)]:
                return Total(power - by)
            case [Ratio() as ratio, Free(0)]:
                return ratio
            case [Total(power, _, False), Total(by, entry)] if power == by:
                return Ratio(entry, _jax.source_of(one))
            case [Free(power), Total(by, entry)]:
                return Inverse(power - by, entry)
        return mixed

    # Rows.

    def _of_rows(self, one: Any, other: Any, inputs: Sequence[Fact]) -> Sequence[Fact] | Obstacle:
        name, number = one.primitive.name, len(one.outvars)
        rows = [fact for fact in inputs if isinstance(fact, Rows)]
        constant = all(fact.constant for fact in rows)
        special = {
            "conv_general_dilated": self._convolved,
            "dynamic_update_slice": self._updated,
            "gather": self._gathered,
            "reduce_window_max": self._in_windows,
            "reduce_window_sum": self._in_windows,
            "reduce_window_min": self._in_windows,
            "reduce_window": self._in_windows,
            "select_and_gather_add": self._in_windows,
            "select_and_scatter_add": self._in_windows,
        }
        found: Sequence[Fact] | Obstacle
        if name.startswith("scatter"):
            found = self._gathered(one, other, inputs)
        elif name in special:
            found = special[name](one, other, inputs)
        elif name == "dot_general":
            found = self._multiplied(one, other, inputs)
        elif name == "reduce_sum" and rows[0].axis in one.params["axes"]:
            if constant:
                return [Free(rows[0].power + 1)]
            whole = len(one.params["axes"]) == one.invars[0].aval.ndim
            return [Total(rows[0].power + 1, rows[0].entry if whole else None)]
        elif name == "reshape":
            found = self._reshaped(one, other, rows[0])
        elif name in _RANDOM:
            found = [Rows(rows[0].axis)]
        elif name.startswith("random_") and len({fact.axis for fact in rows}) == 1:
            found = [Rows(rows[0].axis)] * number
        else:
            found = self._moved(one, other, inputs)
        if isinstance(found, Obstacle):
            return found
        if all(not isinstance(fact, Rows) for fact in found):
            return found
        powers = [fact.power for fact in inputs if isinstance(fact, Rows | Free)]
        power = _power(name, powers, one)
        if power is None:
            return _undecided(f"{name} of the number of rows", one)
        kept = _KEEPS_ZERO - {"neg"}
        entry = rows[0].entry if name in kept and len(rows) == 1 else None
        return [
            fact._replace(power=power, constant=constant, entry=entry)
            if isinstance(fact, Rows)
            else fact
            for fact in found
        ]

    def _moved(self, one: Any, other: Any, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
        """What is computed along other axes, or of elements in one place."""
        name = one.primitive.name
        layout = _layout(inputs)
        if layout is None:
            return _compared(f"{name} of rows and other rows", one)
        kinds = [Along(x.axis) if isinstance(x, Rows) else Slicing.SAME for x in inputs]
        try:
            axes = axes_after(other, one, kinds)
        except (KeyError, TypeError, ValueError):
            axes = None
        if axes is None:
            known = name in ELEMENTWISE or name in _MIXES
            return (_compared if known else _undecided)(f"{name} over the rows", one)
        return [layout._replace(axis=axis) for axis in axes]

    def _reshaped(self, one: Any, other: Any, rows: Rows) -> list[Rows] | Obstacle:
        mixed = _compared("reshape of the rows", one)
        if one.params.get("dimensions") is not None:
            return mixed
        before, after = one.invars[0].aval.shape, one.outvars[0].aval.shape
        outer = math.prod(before[: rows.axis]) * rows.outer
        inner = math.prod(before[rows.axis + 1 :]) * rows.inner
        for axis, size in enumerate(after):
            left, right = math.prod(after[:axis]), math.prod(after[axis + 1 :])
            if outer % left or inner % right:
                continue
            if outer // left * self._rows * (inner // right) == size:
                return [Rows(axis, outer // left, inner // right)]
        return mixed

    def _multiplied(self, one: Any, other: Any, inputs: Sequence[Fact]) -> list[Fact] | Obstacle:
        contracted, _ = one.params["dimension_numbers"]
        left, right = inputs
        if isinstance(left, Rows) and isinstance(right, Rows):
            pairs = list(zip(*contracted, strict=True))
            alike = (left.outer, left.inner) == (right.outer, right.inner)
            if (left.axis, right.axis) in pairs:
                if not (alike or left.constant or right.constant):
                    return _compared("dot_general of rows and other rows", one)
                power = left.power + right.power + 1
                return [Free(power) if left.constant and right.constant else Total(power)]
        found = self._moved(one, other, inputs)
        return found if isinstance(found, Obstacle) else [*found]

    def _convolved(self, one: Any, other: Any, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
        numbers, (left, right) = one.params["dimension_numbers"], inputs
        out, groups = numbers.out_spec, one.params["feature_group_count"]
        batches = one.params["batch_group_count"]
        mixed = _compared("a convolution over the rows", one)
        if isinstance(left, Rows) and isinstance(right, Free):
            same = left.axis == numbers.lhs_spec[0] and batches == 1
            return [left._replace(axis=out[0])] if same else mixed
        size = one.outvars[0].aval.shape[out[1]] // self._rows
        if isinstance(left, Free) and isinstance(right, Rows):
            of_kernels = right.axis == numbers.rhs_spec[0] and groups == batches == 1
            return [right._replace(axis=out[1])] if of_kernels else mixed
        assert isinstance(left, Rows)
        assert isinstance(right, Rows)
        if left.outer != 1 or right.outer != 1 or right.axis != numbers.rhs_spec[0]:
            return mixed
        # As vmap makes of them: a group for each row.
        grouped = groups % self._rows == 0 and left.axis == numbers.lhs_spec[1] and batches == 1
        batched = batches % self._rows == 0 and left.axis == numbers.lhs_spec[0] and groups == 1
        return [Rows(out[1], 1, size)] if grouped or batched else mixed

    def _in_windows(self, one: Any, other: Any, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
        params, layout = one.params, _layout(inputs)
        if layout is None:
            return _compared("windows over the rows", one)
        axis = layout.axis
        alone = params["window_dimensions"][axis] == 1 and params["window_strides"][axis] == 1
        padding = params.get("padding", ())
        alone = alone and (not padding or tuple(padding[axis]) == (0, 0))
        for name in ("base_dilation", "window_dilation"):
            alone = alone and params.get(name, {axis: 1})[axis] == 1
        return [layout] * len(one.outvars) if alone else _compared("windows over the rows", one)

    def _updated(self, one: Any, other: Any, inputs: Sequence[Fact]) -> list[Rows] | Obstacle:
        mixed = _compared("dynamic_update_slice of the rows", one)
        layout = _layout(inputs[:2])
        if layout is None or not all(isinstance(fact, Rows) for fact in inputs[:2]):
            return mixed
        if any(not isinstance(fact, Free) for fact in inputs[2:]):
            return mixed
        shapes = [atom.aval.shape[layout.axis] for atom in one.invars[:2]]
        return [layout] if shapes[0] == shapes[1] else mixed

    def _gathered(self, one: Any, other: Any, inputs: Sequence[Fact]) -> list[Fact] | Obstacle:
        """A gather, or a scatter: operand, indices, and of a scatter updates."""
        numbers, name = one.params["dimension_numbers"], one.primitive.name
        mixed = _compared(f"{name} from other rows", one)
        operand, indices, *updates = inputs
        gathers = name == "gather"
        windows = numbers.offset_dims if gathers else numbers.update_window_dims
        target = one.outvars[0].aval if gathers else one.invars[2].aval
        batch = [axis for axis in range(target.ndim) if axis not in windows]
        operand_batch = tuple(numbers.operand_batching_dims)
        of_indices = "start_indices" if gathers else "scatter_indices"
        indices_batch = tuple(getattr(numbers, f"{of_indices}_batching_dims"))
        gone = numbers.collapsed_slice_dims if gathers else numbers.inserted_window_dims
        to_operand = numbers.start_index_map if gathers else numbers.scatter_dims_to_operand_dims
        kept = [
            axis
            for axis in range(one.invars[0].aval.ndim)
            if axis not in gone and axis not in operand_batch
        ]

        def place_of(axis: int) -> int | None:
            """Where an axis of the indices is in the output, or in the updates."""
            return batch[axis] if axis < len(batch) else None

        def axis_of(index: Rows | Index, of: Rows) -> int | None:
            """Where rows are that indices with their own numbers choose, or batches of them."""
            if of.axis in operand_batch:
                same = indices_batch[operand_batch.index(of.axis)] == index.axis
                return place_of(index.axis) if same and isinstance(index, Rows) else None
            if isinstance(index, Index) and of.axis in gone and of.axis in to_operand:
                width = one.invars[1].aval.shape[-1]
                columns = range(width) if index.columns is None else index.columns
                if to_operand.index(of.axis) in columns and (of.outer, of.inner) == (1, 1):
                    return place_of(index.axis)
            return None

        if gathers:
            found: int | None = None
            layout: Rows | None = None
            if isinstance(operand, Rows):
                layout = operand
                if isinstance(indices, Rows | Index):
                    found = axis_of(indices, operand)
                elif operand.axis in kept:
                    full = one.params["slice_sizes"][operand.axis]
                    if full == one.invars[0].aval.shape[operand.axis]:
                        found = windows[kept.index(operand.axis)]
            elif isinstance(indices, Rows):
                layout, found = indices, place_of(indices.axis)
            if found is None or layout is None:
                return mixed
            return [layout._replace(axis=found)]
        (update,) = updates
        if isinstance(operand, Rows):
            if isinstance(indices, Rows | Index):
                place = axis_of(indices, operand)
            else:
                place = windows[kept.index(operand.axis)] if operand.axis in kept else None
                sizes = [one.invars[0].aval.shape[operand.axis]]
                if place is not None and [target.shape[place]] != sizes:
                    place = None
            fits = isinstance(update, Rows) and update.axis == place
            return [operand._replace(constant=False)] if fits else mixed
        adds = name in ("scatter-add", "scatter_add")
        if adds and isinstance(operand, Free) and isinstance(update, Rows):
            # Rows are added up, each where its own index says.
            alike = not isinstance(indices, Rows) or place_of(indices.axis) == update.axis
            if alike and not isinstance(indices, Index) and operand.zero:
                return [Total(update.power + 1)]
        return mixed

    def _scan_over_rows(
        self, one: Any, other: Any, inputs: Sequence[Fact]
    ) -> Sequence[Fact] | Obstacle:
        """A loop over the rows, as ``lax.map`` makes: each turn may read its own row alone."""
        loops: Any = [_jax.control_flow(each) for each in (one, other)]
        first = loops[0].constants + loops[0].carried
        steps = [each.steps for each in loops]
        mixed = _compared("a scan over the rows", one)
        if steps[0][0] != self._rows or steps[1][0] != 2 * self._rows or steps[0][1] != steps[1][1]:
            return _undecided("a scan with the number of rows", one)
        if not all(isinstance(fact, Free) and fact.power == 0 for fact in inputs[:first]):
            return mixed
        rows: list[Fact] = []
        for fact in inputs[first:]:
            if not isinstance(fact, Rows) or fact.axis or (fact.outer, fact.inner) != (1, 1):
                return mixed
            rows.append(Free(fact.power) if fact.constant else OneRow())
        outputs = follow(self, [each.body for each in loops], [*inputs[:first], *rows])
        carried, stacked = outputs[: loops[0].carried], outputs[loops[0].carried :]
        obstacles = [fact for fact in outputs if isinstance(fact, Obstacle)]
        if obstacles:
            return min(obstacles, key=_rank)
        before = inputs[loops[0].constants : first]
        if any(now != was for now, was in zip(carried, before, strict=True)):
            return mixed
        return [*carried, *[Rows(0, constant=isinstance(fact, Free)) for fact in stacked]]


# Primitives that are known to mix the rows, where they work along their axis.
_MIXES = frozenset(
    "argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum dot_general dynamic_slice "
    "pad reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor rev slice "
    "sort split squeeze top_k transpose".split()
)


def _rank(fact: Obstacle) -> int:
    order = OverRows.OVER_SHARDS, OverRows.COMPARED, OverRows.UNDECIDED
    return order.index(fact.kind)


def _compared(reason: str, equation: Any) -> Obstacle:
    return Obstacle(OverRows.COMPARED, reason, _jax.source_of(equation))


def _undecided(reason: str, equation: Any) -> Obstacle:
    source = "" if equation is None else _jax.source_of(equation)
    return Obstacle(OverRows.UNDECIDED, reason, source)


def _is_zero(value: Any) -> bool:
    try:
        return bool(value == 0)
    except TypeError:
        return False


def _same_shape(one: Any, other: Any) -> bool:
    return bool(getattr(one.aval, "shape", ()) == getattr(other.aval, "shape", ()))


def _axis_that_grows(one: Sequence[int], other: Sequence[int]) -> int | None:
    if len(one) != len(other):
        return None
    differ = [axis for axis, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1]
    doubles = len(differ) == 1 and other[differ[0]] == 2 * one[differ[0]]
    return differ[0] if doubles else None


def _forgotten(fact: Rows | Index) -> dict[str, Any]:
    return {"entry": None} if isinstance(fact, Rows) else {}


def _layout(inputs: Sequence[Fact]) -> Rows | None:
    """How the rows lie in all of them; ``None`` if they lie in another way in some."""
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    varying = [fact for fact in rows if not fact.constant] or rows
    return varying[0] if len({(fact.outer, fact.inner) for fact in varying}) == 1 else None


def _power(name: str, powers: Sequence[int], equation: Any) -> int | None:
    """The power of the number of rows that an output grows with; ``None`` if unknown."""
    if not any(powers):
        return 0
    if name in ("mul", "dot_general"):
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    if name == "integer_pow":
        return int(powers[0] * equation.params["y"])
    return powers[0] if name in _KEEPS_POWER and len(set(powers)) == 1 else None


def _added(facts: Sequence[Fact], mixed: Obstacle) -> Fact:
    one, other = facts
    if isinstance(one, Free):
        one, other = other, one
    match one, other:
        case (_, Free(zero=True)):
            return one
        case Total(power, _, moved), Free(by):
            return Total(power, moved=moved) if power == by else one._replace(moved=True)
        case Ratio(), Free(0):
            return one
        case Total(power, _, False), Total(by, _, False) if power == by:
            return Total(power)
        case Ratio(entry), Ratio(by) if entry == by is not None:
            return one
    return mixed


def _joined(one: Fact, other: Fact) -> Fact:
    if one == other:
        return one
    obstacles = [fact for fact in (one, other) if isinstance(fact, Obstacle)]
    if obstacles:
        return min(obstacles, key=_rank)
    if isinstance(other, Free) and not isinstance(one, Free):
        one, other = other, one
    match one, other:
        case Free(power), Free(by) if power == by or one.zero or other.zero:
            return Free(by if one.zero else power, one.own or other.own)
        case Free(zero=True), Total() | Ratio() | Rows():
            return other
        case Free(power), Total(by, _, False) if power == by:
            return Total(power)
        case Free(0), Ratio():
            return other
        case Free(0), OneRow():
            return other
        case Total(power, _, moved), Total(by, _, too) if power == by:
            return Total(power, moved=moved or too)
        case Ratio(entry), Ratio(by) if entry == by is not None:
            return one
        case Rows(), Rows():
            layout = _layout((one, other))
            if layout is not None and (one.axis, one.power) == (other.axis, other.power):
                return layout._replace(constant=one.constant and other.constant, entry=None)
    return Obstacle(OverRows.UNDECIDED, "one path treats rows in another way than the next")
