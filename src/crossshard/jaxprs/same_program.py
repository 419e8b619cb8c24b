"""Checks whether traces with different numbers of rows are the same program.

With a single row, JAX leaves out operations that would repeat it; these do not count.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from crossshard import _jax
from crossshard.jaxprs.row_facts import is_inexact, shape_of
from crossshard.jaxprs.walk import constants, has_own_derivative, jaxprs_within, opened

# Operations that only give an array another shape; JAX leaves them out if it has that already.
_SHAPES = frozenset("broadcast_in_dim reshape squeeze".split())
# Parameters that need no comparison: lengths of axes, which are compared with the shapes; and the
# functions that make a derivative, whose jaxpr is compared instead.
_COMPARED_ELSEWHERE = frozenset(
    "bwd bwd_batches call_jaxpr_thunk fwd_jaxpr_thunk jvp_jaxpr_fun jvp_jaxpr_thunk limit_indices "
    "new_sizes num_consts out_sharding out_trees reps shape sharding sizes slice_sizes "
    "update_jaxpr".split()
)
# Of a kernel: the grid that it runs on with its blocks, the types of what it returns, and how it
# takes blocks of an array.
_OF_KERNELS = frozenset("args_tree grid_mapping out_avals result_avals tree".split())


def is_same_program(jaxprs: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether three traces do the same, with these three numbers of rows.

    They must have the same equations, apart from those that only give an array another shape. The
    equations must take the same values, with shapes and literals that are fixed or grow with the
    rows.

    >>> import jax
    >>> trace = lambda f: [jax.make_jaxpr(f)(jnp.ones((n, 3))) for n in (1, 2, 4)]
    >>> is_same_program(trace(lambda x: x.sum() / len(x)), (1, 2, 4))
    True
    >>> is_same_program(trace(lambda x: x.sum() / max(len(x), 2)), (1, 2, 4))
    False
    """
    try:
        return _same(jaxprs, rows)
    except (AttributeError, KeyError, TypeError, ValueError):  # parameters of any kind
        return False


def traces_do_the_same(one: Any, other: Any) -> bool:
    """Return whether two traces compute the same of the inputs that they read.

    >>> import jax
    >>> trace = lambda f, n: jax.make_jaxpr(f)(jnp.ones(n), 1.0)
    >>> traces_do_the_same(*(trace(lambda x, count: count + 1, n) for n in (2, 4)))
    True
    >>> traces_do_the_same(*(trace(lambda x, count: count + x.size, n) for n in (2, 4)))
    False
    """
    try:
        # Nothing is 1, 2 and 2 times as large with 1, 2 and 4 times the rows.
        return _same((one, other, other), (1, 2, 4))
    except (AttributeError, KeyError, TypeError, ValueError):  # parameters of any kind
        return False


def do_the_same(one: Any, other: Any) -> bool:
    """Return whether two equations of equal shapes do the same, including the jaxprs they run."""
    try:
        return one.params.keys() == other.params.keys() and all(
            _equal_parameters(value, other.params[key]) for key, value in one.params.items()
        )
    except (AttributeError, KeyError, TypeError, ValueError):  # parameters of any kind
        return False


def _equal_parameters(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if _is_jaxpr(one) and not isinstance(one, tuple | list):
        # Both have the same number of rows, so nothing may grow.
        return _same((one, other, other), (1, 2, 4))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal_parameters, one, other))
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        return all(_equal_parameters(getattr(one, x), getattr(other, x)) for x in fields)
    return bool(one == other)


def scales(one: Any, other: Any, times: int, power: int) -> bool:
    """Return whether ``other`` is ``times ** power`` times ``one``, but for rounding."""
    one, other = np.asarray(one), np.asarray(other)
    if one.dtype.kind == "b" or one.shape != other.shape:
        return False
    if one.dtype.kind in "iu":
        if power < 0:
            one, other, power = other, one, -power
        return np.array_equal(other, one.astype(object) * times**power)
    if not jnp.issubdtype(one.dtype, jnp.floating):
        return False
    eps = max(float(jnp.finfo(x.dtype).eps) for x in (one, other, np.float32(0)))
    one, other = one.astype(np.float64), other.astype(np.float64)
    return np.allclose(other, one * float(times) ** power, rtol=2 * eps, atol=0)


def _same(jaxprs: Sequence[Any], rows: Sequence[int], *, derives: bool = True) -> bool:
    """Return whether jaxprs do the same; if ``derives``, custom derivatives are compared, too.

    Not within such a derivative, which may call its own function, as that of ``logaddexp`` does.
    """
    traces = [_Trace(each) for each in jaxprs]
    bodies = [each.jaxpr for each in traces]
    if len({(len(x.jaxpr.invars), len(x.jaxpr.constvars), len(x.kept)) for x in traces}) > 1:
        return False
    own = zip(*map(constants, jaxprs if hasattr(jaxprs[0], "consts") else ()), strict=True)
    if not all(_values_match(each, rows) for each in own):
        return False

    def fits(atoms: Sequence[Any], left_out: int | None) -> bool:
        shapes = [list(shape_of(atom)) for atom in atoms]
        if left_out is not None:
            shapes[0].insert(left_out, 1)
        return _fit(shapes, rows)

    def atoms_match(atoms: Sequence[Any], left_out: int | None = None) -> bool:
        if not fits(atoms, left_out):
            return False
        values = [of.value(atom) for of, atom in zip(traces, atoms, strict=True)]
        if all(isinstance(value, Literal) for value in values):
            return _values_match([value.val for value in values], rows)
        return not any(value != values[0] for value in values)

    for equations in zip(*(each.kept for each in traces), strict=True):
        one = equations[0]
        if any(each.primitive is not one.primitive for each in equations):
            return False
        if len({len(each.invars) for each in equations}) > 1:
            return False
        left_out = _LEFT_OUT.get(one.primitive.name, lambda _: None)(equations)
        if left_out is None and not _parameters_match([each.params for each in equations], rows):
            return False
        inputs = list(zip(*(each.invars for each in equations), strict=True))
        outputs = list(zip(*(each.outvars for each in equations), strict=True))
        places = left_out or [None] * len(inputs + outputs)
        if not all(map(atoms_match, inputs, places)):
            return False
        if not all(map(fits, outputs, places[len(inputs) :])):
            return False
        within = map(jaxprs_within, equations)
        if not all(_same(each, rows, derives=derives) for each in zip(*within, strict=True)):
            return False
        own_rule = derives and has_own_derivative(one)
        if own_rule and not _same(list(map(rule_of_derivative, equations)), rows, derives=False):
            return False
    return all(map(atoms_match, zip(*(each.outvars for each in bodies), strict=True)))


def takes_cotangents(equation: Any) -> bool:
    """Return whether the custom derivative of a function is a backward pass."""
    return equation.primitive.name.startswith("custom_vjp")


def rule_of_derivative(equation: Any) -> Any:
    """Trace the custom derivative of a called function, by its inexact inputs.

    After the inputs, the jaxpr takes the cotangents of the outputs, and returns those of the
    inputs; or it takes the tangents of the inputs, and returns those of the outputs. It also
    returns the outputs, which such a function may compute in another way than without a derivative.
    """
    backward = takes_cotangents(equation)
    type_of = lambda atom: jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)
    varied = [place for place, atom in enumerate(equation.invars) if is_inexact(atom)]
    number = len(equation.invars)

    def rule(*args: Any) -> Any:
        given, slopes = list(args[:number]), list(args[number:])

        def call(*values: Any) -> list[Any]:
            replaced = dict(zip(varied, values, strict=True))
            found = _jax.bound(equation, [replaced.get(at, x) for at, x in enumerate(given)])
            return [x for x, atom in zip(found, equation.outvars, strict=True) if is_inexact(atom)]

        primals = [given[place] for place in varied]
        if not backward:
            outputs, found = jax.jvp(call, primals, slopes)
            return *found, *outputs
        outputs, pull = jax.vjp(call, *primals)
        return *pull(slopes), *outputs

    sloped = equation.outvars if backward else equation.invars
    atoms = [*equation.invars, *filter(is_inexact, sloped)]
    return jax.make_jaxpr(rule)(*map(type_of, atoms))


# For each input and output: the axis of the rows, if the first trace leaves that axis out.
_Places = list[int | None]


def _left_out_by_gather(equations: Sequence[Any]) -> _Places | None:
    """Return the axes that a gather from an operand with one row leaves out; ``None`` if none.

    JAX takes the whole axis of the rows then, not one element for each row of the indices.
    """
    few, more, also = (each.params["dimension_numbers"] for each in equations)
    axes = [axis for axis in more.operand_batching_dims if axis not in few.operand_batching_dims]
    operand, out = equations[0].invars[0].aval, equations[0].outvars[0].aval
    if len(axes) != 1 or also != more or operand.shape[axes[0]] != 1:
        return None
    (axis,) = axes
    pairs = list(zip(more.operand_batching_dims, more.start_indices_batching_dims, strict=True))
    place = dict(pairs)[axis]
    at = [x for x in range(out.ndim) if x not in more.offset_dims][place]
    gone = {*few.collapsed_slice_dims, *few.operand_batching_dims}
    kept = [x for x in range(operand.ndim) if x not in gone]
    given = [(x, y - (y > place)) for x, y in pairs if x != axis]
    same = (
        few.offset_dims[kept.index(axis)] == at
        and tuple(sorted((*more.offset_dims, at))) == tuple(few.offset_dims)
        and few.collapsed_slice_dims == more.collapsed_slice_dims
        and few.start_index_map == more.start_index_map
        and given
        == list(zip(few.operand_batching_dims, few.start_indices_batching_dims, strict=True))
    )
    return [None, place, None] if same and _match_but_for(equations, "dimension_numbers") else None


def _left_out_by_product(equations: Sequence[Any]) -> _Places | None:
    """Return the axes that a batched product with one row leaves out; ``None`` if none."""
    few, more, also = (each.params["dimension_numbers"] for each in equations)
    (left, right), (lefts, rights) = more
    if more != also or len(few[1][0]) != len(lefts) - 1:
        return None
    for at, (one, other) in enumerate(zip(lefts, rights, strict=True)):
        without = [
            tuple(axis - (axis > gone) for axis in axes if axis != gone)
            for axes, gone in ((left, one), (right, other), (lefts, one), (rights, other))
        ]
        if [tuple(x) for both in few for x in both] == without:
            return [one, other, at] if _match_but_for(equations, "dimension_numbers") else None
    return None


def _left_out_by_reduction(equations: Sequence[Any]) -> _Places | None:
    """Return the axes that a reduction leaves out, which includes that of the only row, or none.

    Such is the gradient of what JAX repeats along other axes: one row has no axis to keep.
    """
    few, more, also = ({*each.params["axes"]} for each in equations)
    shape = equations[0].invars[0].aval.shape
    if more != also or len(few - more) != 1 or not more <= few:
        return None
    (axis,) = few - more
    if shape[axis] != 1 or not _match_but_for(equations, "axes"):
        return None
    return [None, axis - sum(gone < axis for gone in more)]


def _left_out_by_kernel(equations: Sequence[Any]) -> _Places | None:
    """Return the axes that a kernel under ``vmap`` leaves out, with one row; ``None`` if none.

    JAX gives its grid a dimension that takes the rows one by one, unless there is only one.
    """
    few, *several = (each.params["grid_mapping"] for each in equations)
    indices = [None] * few.num_index_operands
    for dimension in several[0].vmapped_dims:
        grids = [tuple(np.delete(each.grid, dimension)) for each in several]
        if any(grid != few.grid for grid in grids):
            continue
        blocks = zip(*(each.block_mappings for each in (few, *several)), strict=True)
        places = [_place_of_row(each, dimension) for each in blocks]
        kept = "grid_mapping", "out_avals"
        if -1 not in places and _match_but_for(equations, *kept):
            return [*indices, *places]
    return None


def _place_of_row(blocks: Sequence[Any], dimension: int) -> int | None:
    """Return the axis of an array that a dimension of the grid takes slice by slice.

    It is ``None`` if there is no such axis, and -1 if the blocks do not match without it.
    """
    few, more, _ = blocks
    choices = [jaxpr_as_fun(each.index_map_jaxpr) for each in blocks]
    given = few.index_map_jaxpr.in_avals
    for place in [None, *range(len(more.block_shape))]:
        others = [[x for i, x in enumerate(each.block_shape) if i != place] for each in blocks[1:]]
        if any(other != [*few.block_shape] for other in others):
            continue

        def without(choice: Any, *at: Any, place: int | None = place) -> list[Any]:
            found = choice(*at[:dimension], np.int32(0), *at[dimension:])
            return [x for i, x in enumerate(found) if i != place]

        each = [choices[0], *(functools.partial(without, choice) for choice in choices[1:])]
        if _same([jax.make_jaxpr(choice)(*given) for choice in each], (1, 2, 4)):
            return place
    return -1


def _match_but_for(equations: Sequence[Any], *names: str) -> bool:
    each = [{**equation.params, **dict.fromkeys(names)} for equation in equations]
    return _parameters_match(each, (1, 2, 4))


_LEFT_OUT: dict[str, Any] = {
    "dot_general": _left_out_by_product,
    "gather": _left_out_by_gather,
    "pallas_call": _left_out_by_kernel,
    "reduce_sum": _left_out_by_reduction,
}


class _Trace:
    """A jaxpr, in which a value keeps its name if it only gets another shape."""

    def __init__(self, jaxpr: Any):
        self.jaxpr = opened(jaxpr)
        self.kept: list[Any] = []  # the equations that do more than that
        self._values: dict[Any, Any] = {}
        for kind in ("invars", "constvars"):
            variables = getattr(self.jaxpr, kind)
            self._values.update({x: (kind, place) for place, x in enumerate(variables)})
        for equation in self.jaxpr.eqns:
            if equation.primitive.name in _SHAPES and len(equation.invars) == 1:
                self._values[equation.outvars[0]] = self.value(equation.invars[0])
                continue
            outputs = enumerate(equation.outvars)
            self._values.update({x: (len(self.kept), place) for place, x in outputs})
            self.kept.append(equation)

    def value(self, atom: Any) -> Any:
        """Return the name of a value, or the literal that it is."""
        return atom if isinstance(atom, Literal) else self._values[atom]


def _fit(shapes: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether each axis has a fixed length, or one that grows with the rows."""
    if len(set(map(len, shapes))) > 1:
        return False
    (one, some, many) = rows
    return all(
        (b - a) * (many - some) == (c - b) * (some - one) for a, b, c in zip(*shapes, strict=True)
    )


def _values_match(values: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether values are equal, or grow with the same power of the number of rows."""
    if values[0] is values[1] is values[2]:
        return True
    one, some, many = map(np.asarray, values)
    if np.array_equal(one, some) and np.array_equal(some, many):
        return True
    return any(
        scales(one, some, rows[1] // rows[0], power)
        and scales(some, many, rows[2] // rows[1], power)
        for power in (1, -1, 2, -2)
    )


def _parameters_match(params: Sequence[dict[str, Any]], rows: Sequence[int]) -> bool:
    """Return whether parameters are equal, but for those that shapes or inner jaxprs show."""
    first, *others = params
    if any(each.keys() != first.keys() for each in others):
        return False
    for key, value in first.items():
        each = [value, *(other[key] for other in others)]
        if key == "length" and _fit([(x,) for x in each], rows):
            continue
        if key in _COMPARED_ELSEWHERE or all(map(_is_jaxpr, each)):
            continue
        alike = key in _OF_KERNELS and _fields_match(each, rows)
        if not alike and not all(other is value or bool(other == value) for other in each[1:]):
            return False
    return True


def _fields_match(values: Sequence[Any], rows: Sequence[int]) -> bool:
    """Return whether what a kernel runs on is equal, but for lengths that grow with the rows."""
    one = values[0]
    if any(type(each) is not type(one) for each in values):
        return False
    if isinstance(one, jax.tree_util.PyTreeDef):
        values = [each.unflatten(range(each.num_leaves)) for each in values]
        return _fields_match(values, rows)
    if isinstance(one, tuple | list):
        matches = (_fields_match(each, rows) for each in zip(*values, strict=True))
        return len({*map(len, values)}) == 1 and all(matches)
    if isinstance(one, int):
        return _fit([(x,) for x in values], rows)
    if _is_jaxpr(one):
        return _same(values, rows)
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        return all(_fields_match([getattr(x, name) for x in values], rows) for name in fields)
    if hasattr(one, "shape") and hasattr(one, "dtype"):
        return len({str(x.dtype) for x in values}) == 1 and _fit([x.shape for x in values], rows)
    return all(other is one or bool(other == one) for other in values)


def _is_jaxpr(value: Any) -> bool:
    """Return whether a parameter is a jaxpr, or several."""
    each = value if isinstance(value, tuple | list) else [value]
    return bool(each) and all(hasattr(opened(x), "eqns") for x in each)
