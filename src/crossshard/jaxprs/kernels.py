"""Whether operations whose code cannot be walked, such as kernels, compute each row alone.

It is taken as proven where the grid of a kernel, its sharding rule or its name says so. Of all
other kernels it is assumed, and the assumption is recorded: ``step/trial.py`` can then test
that operation by itself with numbers.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Literal

from crossshard import _jax
from crossshard.jaxprs.primitives import KNOWN
from crossshard.jaxprs.row_facts import (
    Fact,
    Free,
    Obstacle,
    OneRow,
    Pair,
    Rows,
    Total,
    is_inexact,
    layout,
    shape_of,
)
from crossshard.jaxprs.walk import (
    Analysis,
    equations_of,
    equations_within,
    follow,
    jaxprs_within,
    opened,
)

_ATTENTION = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"
# Primitives whose jaxpr defines what they compute, whatever runs in its place.
DEFINED_BY_JAXPR = frozenset(("composite", "custom_vmap_call"))
# How the name of a function begins that the user has marked with ``crossshard.rowwise``.
ROWWISE = "crossshard_rowwise"


def is_rowwise(equation: Any) -> bool:
    """Return whether an equation calls a function marked with ``crossshard.rowwise``."""
    return str(equation.params.get("name", "")).startswith(ROWWISE)


def _is_kernel(equation: Any) -> bool:
    """Return whether an equation's code cannot be walked, as that of a kernel or a callback."""
    return equation.primitive.name not in KNOWN or is_rowwise(equation)


def text_of(equation: Any) -> str:
    """Return the primitive and parameters of an equation as text, to compare two equations.

    Constants are compared by identity, not by value.
    """
    grid = equation.params.get("grid_mapping")
    mappings = () if grid is None else grid.block_mappings
    blocks = [str((each.block_shape, each.index_map_jaxpr)) for each in mappings]
    consts = [list(map(id, getattr(x, "consts", ()))) for x in jaxprs_within(equation)]
    return f"{equation.primitive.name} {equation.params} {blocks} {consts}"


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation that is assumed to compute each row alone."""

    pair: Pair  # its equations, with some rows and with more
    inputs: tuple[Fact, ...]  # what is known of its inputs: rows, or free of the batch
    # Where its outputs have rows, or that they are sums over rows. If inputs grow with a power of
    # the number of rows, the outputs are also assumed to grow so, linearly in these inputs.
    outputs: tuple[Rows | Total, ...]

    def __str__(self) -> str:
        source = _jax.sources_of(self.pair.one)
        return f"{_name_of(self.pair.one)}{f' ({source})' if source else ''}"


def _name_of(equation: Any) -> str:
    """Return the name of the primitive, with that of the kernel if it has one."""
    name, params = equation.primitive.name, equation.params
    kernel = params.get("name") or params.get("target_name")
    if is_rowwise(equation):
        return f"rowwise({str(kernel).removeprefix(ROWWISE).strip('_')})"
    return f"{name} {kernel}" if kernel else str(name)


@dataclass
class Assumptions:
    """The operations that a walk assumes to compute each row alone."""

    allowed: bool = True  # if not, nothing is known of these operations
    # The operations, by the ``id`` of the second of their equations.
    operations: dict[int, list[Operation]] = field(default_factory=dict)
    # By the ``id`` of a call's equation: the jaxpr of its derivative, with more rows, and the facts
    # of the tangents or cotangents that this takes.
    rules: dict[int, tuple[Any, Sequence[Fact]]] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        """Record an operation."""
        known = self.operations.setdefault(id(operation.pair.other), [])
        if all(each.inputs != operation.inputs for each in known):
            known.append(operation)

    def __iter__(self) -> Iterator[Operation]:
        return (each for known in self.operations.values() for each in known)

    def names(self) -> tuple[str, ...]:
        """Return the names of the operations, with their source lines."""
        return tuple(dict.fromkeys(map(str, self)))

    def are_in(self, equation: Any) -> bool:
        """Return whether an equation, or a derivative of it, runs any of the operations."""
        return any(
            id(each) in self.operations or self.are_in_rule(each)
            for each in (equation, *equations_within(equation))
        )

    def are_in_rule(self, equation: Any) -> bool:
        """Return whether the derivative of an equation runs any of the operations."""
        rule = self.rules.get(id(equation))
        return rule is not None and any(map(self.are_in, opened(rule[0]).eqns))


def of_kernel(
    analysis: Analysis[Fact], pair: Pair, inputs: Sequence[Fact], assumed: Assumptions
) -> Sequence[Fact] | Obstacle | None:
    """Return the facts of the outputs of a kernel; ``None`` if the equation is not a kernel."""
    if not _is_kernel(pair.one):
        return None
    if pair.name in DEFINED_BY_JAXPR:
        return follow(analysis, [jaxprs_within(each)[0] for each in pair[:2]], inputs)
    unknown = pair.undecided(f"{_name_of(pair.one)} of what is no row")
    powers = any(getattr(fact, "power", 0) for fact in inputs)
    if not all(isinstance(fact, Free | Rows) for fact in inputs):
        one_row = all(isinstance(fact, Free | OneRow) for fact in inputs) and not powers
        alike = one_row and text_of(pair.one) == text_of(pair.other)
        return [OneRow()] * len(pair.one.outvars) if alike else unknown
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    if not rows:
        same = [shape_of(x) for x in pair.one.outvars] == [shape_of(x) for x in pair.other.outvars]
        alike = same and text_of(pair.one) == text_of(pair.other)
        own = any(fact.own for fact in inputs if isinstance(fact, Free))
        return [Free(own=own)] * len(pair.one.outvars) if alike and not powers else unknown
    outputs = _outputs(pair, inputs)
    if outputs is None:
        return unknown
    if not _is_proven(pair, inputs, outputs):
        if not assumed.allowed:
            return unknown
        assumed.add(Operation(pair, tuple(inputs), tuple(outputs)))
    return outputs


def _outputs(pair: Pair, inputs: Sequence[Fact]) -> list[Rows | Total] | None:
    """Return where the outputs have rows: along the one axis that grows in each.

    In a gradient, an output that does not grow is taken for that of a parameter, which is a sum
    over the rows. ``None`` if an output fits neither.
    """
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    powers = {fact.power for fact in inputs if isinstance(fact, Free | Rows)} - {0}
    outers = {fact.outer for fact in rows}
    if len(powers) > 1 or len(outers) > 1:
        return None
    ((outer,), both), power = (outers, layout(rows)), max(powers, default=0)
    found: list[Rows | Total] = []
    for one, other in zip(pair.one.outvars, pair.other.outvars, strict=True):
        sizes = zip(shape_of(one), shape_of(other), strict=True)
        grown = [axis for axis, (few, more) in enumerate(sizes) if few != more]
        if power and not is_inexact(one):
            return None
        if power and not grown:
            found.append(Total(power + 1))
            continue
        slices, odd = divmod(shape_of(one)[grown[0]], pair.rows) if len(grown) == 1 else (0, 1)
        inner = slices // outer
        if odd or inner * outer != slices:
            return None
        if outer > 1 and (both is None or both.inner != inner):
            return None
        found.append(Rows(grown[0], outer, inner, power))
    return found


def _is_proven(pair: Pair, inputs: Sequence[Fact], outputs: Sequence[Rows | Total]) -> bool:
    """Return whether what is known of a kernel proves that it computes each row alone."""
    facts = [*inputs, *outputs]
    if pair.name.startswith("dot_product_attention"):
        return pair.name in _ATTENTION and _is_attention(pair, facts)
    # If inputs grow with the number of rows, the kernel has to be linear, which nothing proves.
    if outputs[0].power or any(fact.power for fact in inputs if isinstance(fact, Free)):
        return False
    if pair.name == "custom_partitioning":
        return _is_in_rule(pair, facts)
    return pair.name == "pallas_call" and _is_in_grid(pair, facts)


def _is_attention(pair: Pair, facts: Sequence[Fact]) -> bool:
    """Return whether cuDNN's attention is proven to compute each row alone.

    Axis 0 of all arrays is the batch. The backward pass is linear in its last input.
    """
    number = len(pair.one.invars)
    powers = [getattr(fact, "power", 0) for fact in facts[:number]]
    linear = powers[:-1] if pair.name == _ATTENTION[1] else powers
    # Of sequences that are packed or in pages, axis 0 is not the batch.
    packed = any(0 not in shape_of(x) for x in pair.one.invars[6:10])
    rows = [fact for fact in facts if isinstance(fact, Rows)]
    return (
        not (any(linear) or packed or pair.one.params["dropout_rate"])
        and pair.is_alike()
        and all((fact.axis, fact.outer) == (0, 1) for fact in rows)
        # All outputs but the gradient of a bias.
        and all(isinstance(fact, Rows) for fact in facts[number : number + 3])
    )


def _is_in_rule(pair: Pair, facts: Sequence[Fact]) -> bool:
    """Return whether a sharding rule has one factor that is the rows of all arrays.

    No operation of the rule works along that factor.
    """
    rule, atoms = pair.one.params["sharding_rule"], [*pair.one.invars, *pair.one.outvars]
    if not hasattr(rule, "operand_mappings") or layout(facts) is None:
        return False
    mappings, factors = [*rule.operand_mappings, *rule.result_mappings], set()
    for fact, mapping, atom in zip(facts, mappings, atoms, strict=True):
        names = list(mapping)
        if names and isinstance(names[0], str) and names[0].startswith("…"):
            # An ellipsis stands for any number of axes in front.
            several = range(len(shape_of(atom)) - len(names) + 1)
            names[:1] = [f"{names[0]}{place}" for place in several]
        if isinstance(fact, Rows):
            factors.add(names.pop(fact.axis))
        factors |= {None for name in names if name in factors or not isinstance(name, str)}
    special = rule.reduction_factors, rule.need_replication_factors, rule.permutation_factors
    return len(factors) == 1 and not factors & {None, *itertools.chain(*special)}


def _is_in_grid(pair: Pair, facts: Sequence[Fact]) -> bool:
    """Return whether one dimension of a kernel's grid runs over the rows, and over nothing else.

    The blocks along it must be slices of one row, and nothing may be kept from step to step.
    """
    try:
        one, other = map(_grid_of, pair[:2])
    except (AttributeError, KeyError):  # a grid of another kind
        return False
    if one is None or other is None or one.code != other.code:
        return False
    both = list(zip(one.lengths, other.lengths, strict=True))
    grown = [place for place, lengths in enumerate(both) if lengths[0] != lengths[1]]
    indices, blocked = facts[: one.indices], facts[one.indices :]
    if len(grown) != 1 or not all(isinstance(fact, Free) for fact in indices):
        return False
    (at,), (steps, more) = grown, both[grown[0]]
    if more != pair.times * steps or at not in one.independent:
        return False
    of_a_row = set()
    for fact, block, same in zip(blocked, one.blocks, other.blocks, strict=True):
        axes = [axis for axis, places in enumerate(block.depends) if at in places]
        if block != same or axes != ([fact.axis] if isinstance(fact, Rows) else []):
            return False
        if isinstance(fact, Rows):
            size, slices = block.sizes[fact.axis], fact.outer * pair.rows * fact.inner
            if block.walks.get(fact.axis) != at or not size or fact.inner % size:
                return False
            if steps * size != slices:
                return False
            of_a_row.add((fact.outer, fact.inner // size))
    return len(of_a_row) == 1


class _Block(NamedTuple):
    """How the steps of a grid choose the blocks of an array."""

    # How many slices a block has along each axis; ``None`` if that is not fixed.
    sizes: tuple[int | None, ...]
    # For each axis whose block has the number of the grid's step: the dimension of the grid.
    walks: dict[int, int]
    # For each axis, the dimensions of the grid that choose the block.
    depends: tuple[frozenset[int], ...]


class _Grid(NamedTuple):
    """The grid of a ``pallas_call``."""

    lengths: tuple[Any, ...]  # of its dimensions
    indices: int  # how many inputs come first that only choose blocks, and have no blocks
    blocks: tuple[_Block, ...]  # of the other inputs, and of the outputs
    # The dimensions whose steps are independent: nothing is kept between them, and none reads its
    # number.
    independent: frozenset[int]
    code: str  # what a step runs, as text


def _grid_of(equation: Any) -> _Grid | None:
    params, grid = equation.params, equation.params["grid_mapping"]
    if grid.num_dynamic_grid_bounds:
        return None
    body, lengths, vmapped = opened(params["jaxpr"]), tuple(grid.grid), list(grid.vmapped_dims)
    parallel = getattr(params["compiler_params"], "dimension_semantics", None) or ()
    own = [place for place in range(len(lengths)) if place not in vmapped]
    keeps = bool(grid.scratch_avals or params["input_output_aliases"])
    asks = ("program_id", "num_programs")
    reads = {x.params["axis"] for x in equations_of(body) if x.primitive.name in asks}
    # Dimensions that vmap adds have no semantics, and the kernel cannot see them.
    semantics = dict(zip(own, map(str, parallel), strict=False))
    independent = {
        place
        for number, place in enumerate(own)
        if number not in reads and (not keeps or "parallel" in semantics.get(place, "").lower())
    }
    code = str((body, params["compiler_params"], grid.scratch_avals, grid.num_index_operands))
    blocks = tuple(map(_block, grid.block_mappings))
    return _Grid(
        lengths, grid.num_index_operands, blocks, frozenset({*independent, *vmapped}), code
    )


def _block(block: Any) -> _Block:
    kinds = [type(each).__name__ for each in block.block_shape]
    known = all(kind in ("Blocked", "Squeezed") for kind in kinds)
    sizes = [getattr(each, "block_size", 1) if known else None for each in block.block_shape]
    maps = opened(block.index_map_jaxpr)
    numbers = {variable: place for place, variable in enumerate(maps.invars)}
    of = {x: frozenset(() if np.ndim(x.aval) else {place}) for x, place in numbers.items()}
    read = lambda atom: frozenset() if isinstance(atom, Literal) else of.get(atom, frozenset())
    for equation in maps.eqns:
        of |= dict.fromkeys(equation.outvars, frozenset().union(*map(read, equation.invars)))
    chosen = [None if isinstance(atom, Literal) else numbers.get(atom) for atom in maps.outvars]
    walks = {axis: place for axis, place in enumerate(chosen) if place is not None}
    return _Block(tuple(sizes), walks, tuple(map(read, maps.outvars)))
