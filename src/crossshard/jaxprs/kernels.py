"""Kernels: what an operation whose code cannot be walked says of rows, and what is assumed of it.

A kernel that says that each row is computed alone is believed: by its grid, its sharding rule, or
by name. Of others it is assumed, and written down, so that numbers can try the operation alone.
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
# Whose jaxpr says what they compute, whatever runs in its place.
SAID_BY_JAXPR = {"composite": "jaxpr", "custom_vmap_call": "call"}
# How a function is named of which the user says that it computes each row alone.
ROWWISE = "crossshard_rowwise"


def is_rowwise(equation: Any) -> bool:
    """Whether an equation calls a function of which ``crossshard.rowwise`` was said."""
    return str(equation.params.get("name", "")).startswith(ROWWISE)


def _is_kernel(equation: Any) -> bool:
    """Whether the code of an equation cannot be walked: a kernel, a callback, a user's own."""
    return equation.primitive.name not in KNOWN or is_rowwise(equation)


def says(equation: Any) -> str:
    """All that the parameters of an equation say, but for the values of constants."""
    grid = equation.params.get("grid_mapping")
    blocks = () if grid is None else grid.block_mappings
    told = [str((each.block_shape, each.index_map_jaxpr)) for each in blocks]
    consts = [list(map(id, getattr(x, "consts", ()))) for x in jaxprs_within(equation)]
    return f"{equation.primitive.name} {equation.params} {told} {consts}"


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation that is assumed to compute each row alone."""

    pair: Pair  # its equations, with some rows and with more
    inputs: tuple[Fact, ...]  # what is known of its inputs: rows, or free of the batch
    # Where the rows are in its outputs, or that they are sums over them; with powers of their
    # number in its inputs, it is also assumed to multiply its outputs as these are.
    outputs: tuple[Rows | Total, ...]

    def __str__(self) -> str:
        source = _jax.sources_of(self.pair.one)
        return f"{_name_of(self.pair.one)}{f' ({source})' if source else ''}"


def _name_of(equation: Any) -> str:
    """What an equation runs, with the name of the kernel if it has one."""
    name, params = equation.primitive.name, equation.params
    own = params.get("name") or params.get("target_name")
    if is_rowwise(equation):
        return f"rowwise({str(own).removeprefix(ROWWISE).strip('_')})"
    return f"{name} {own}" if own else str(name)


@dataclass
class Assumptions:
    """The operations that a walk assumes to compute each row alone."""

    # These, by the number of the second of their equations.
    operations: dict[int, list[Operation]] = field(default_factory=dict)
    # The jaxprs of derivatives, with more rows, and what is known of the slopes that they take, by
    # the number of the calls' equations.
    rules: dict[int, tuple[Any, Sequence[Fact]]] = field(default_factory=dict)

    def add(self, operation: Operation) -> None:
        """Write an operation down."""
        known = self.operations.setdefault(id(operation.pair.other), [])
        if all(each.inputs != operation.inputs for each in known):
            known.append(operation)

    def __iter__(self) -> Iterator[Operation]:
        return (each for known in self.operations.values() for each in known)

    def names(self) -> tuple[str, ...]:
        """What and where the operations are."""
        return tuple(dict.fromkeys(map(str, self)))

    def are_in(self, equation: Any) -> bool:
        """Whether any is what an equation runs, or what a derivative of it runs."""
        return any(
            id(each) in self.operations or self.are_in_rule(each)
            for each in (equation, *equations_within(equation))
        )

    def are_in_rule(self, equation: Any) -> bool:
        """Whether any is what the derivative of an equation runs."""
        rule = self.rules.get(id(equation))
        return rule is not None and any(map(self.are_in, opened(rule[0]).eqns))


def of_kernel(
    analysis: Analysis[Fact], pair: Pair, inputs: Sequence[Fact], assumed: Assumptions
) -> Sequence[Fact] | Obstacle | None:
    """The facts of the outputs of a kernel; ``None`` for what is none."""
    if not _is_kernel(pair.one):
        return None
    if pair.name in SAID_BY_JAXPR:
        within = [each.params[SAID_BY_JAXPR[pair.name]] for each in (pair.one, pair.other)]
        return follow(analysis, within, inputs)
    unknown = pair.undecided(f"{_name_of(pair.one)} of what is no row")
    powers = any(getattr(fact, "power", 0) for fact in inputs)
    if not all(isinstance(fact, Free | Rows) for fact in inputs):
        one_row = all(isinstance(fact, Free | OneRow) for fact in inputs) and not powers
        alike = one_row and says(pair.one) == says(pair.other)
        return [OneRow()] * len(pair.one.outvars) if alike else unknown
    rows = [fact for fact in inputs if isinstance(fact, Rows)]
    if not rows:
        same = [shape_of(x) for x in pair.one.outvars] == [shape_of(x) for x in pair.other.outvars]
        alike = same and says(pair.one) == says(pair.other)
        own = any(fact.own for fact in inputs if isinstance(fact, Free))
        return [Free(own=own)] * len(pair.one.outvars) if alike and not powers else unknown
    outputs = _outputs(pair, inputs)
    if outputs is None:
        return unknown
    if not _is_proven(pair, inputs, outputs):
        assumed.add(Operation(pair, tuple(inputs), tuple(outputs)))
    return outputs


def _outputs(pair: Pair, inputs: Sequence[Fact]) -> list[Rows | Total] | None:
    """Where the rows are in the outputs, if they are along the axis that grows in each.

    In a gradient, an output that does not grow is that of a parameter, a sum over the rows.
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
    """Whether a kernel says that it computes each row alone."""
    facts = [*inputs, *outputs]
    if pair.name.startswith("dot_product_attention"):
        return pair.name in _ATTENTION and _is_attention(pair, facts)
    # Nothing says that it is linear.
    if outputs[0].power or any(fact.power for fact in inputs if isinstance(fact, Free)):
        return False
    if pair.name == "custom_partitioning":
        return _is_in_rule(pair, facts)
    return pair.name == "pallas_call" and _is_in_grid(pair, facts)


def _is_attention(pair: Pair, facts: Sequence[Fact]) -> bool:
    """cuDNN's attention: axis 0 of all is the batch; backwards it is linear in its last input."""
    number = len(pair.one.invars)
    powers = [getattr(fact, "power", 0) for fact in facts[:number]]
    linear = powers[:-1] if pair.name == _ATTENTION[1] else powers
    # Those of packed rows and of pages, which are not axes of a batch.
    packed = any(0 not in shape_of(x) for x in pair.one.invars[6:10])
    rows = [fact for fact in facts if isinstance(fact, Rows)]
    return (
        not (any(linear) or packed or pair.one.params["dropout_rate"])
        and pair.is_alike()
        and all((fact.axis, fact.outer) == (0, 1) for fact in rows)
        # But for the gradient of a bias.
        and all(isinstance(fact, Rows) for fact in facts[number : number + 3])
    )


def _is_in_rule(pair: Pair, facts: Sequence[Fact]) -> bool:
    """A sharding rule that passes one factor through, which is the rows of all arrays."""
    rule, atoms = pair.one.params["sharding_rule"], [*pair.one.invars, *pair.one.outvars]
    if not hasattr(rule, "operand_mappings") or layout(facts) is None:
        return False
    mappings, factors = [*rule.operand_mappings, *rule.result_mappings], set()
    for fact, mapping, atom in zip(facts, mappings, atoms, strict=True):
        names = list(mapping)
        if names and isinstance(names[0], str) and names[0].startswith("…"):
            # Any number of axes in front.
            several = range(len(shape_of(atom)) - len(names) + 1)
            names[:1] = [f"{names[0]}{place}" for place in several]
        if isinstance(fact, Rows):
            factors.add(names.pop(fact.axis))
        factors |= {None for name in names if name in factors or not isinstance(name, str)}
    special = rule.reduction_factors, rule.need_replication_factors, rule.permutation_factors
    return len(factors) == 1 and not factors & {None, *itertools.chain(*special)}


def _is_in_grid(pair: Pair, facts: Sequence[Fact]) -> bool:
    """A grid, of which one dimension walks over the rows, and over nothing else.

    Its blocks are slices of one row, and nothing is kept from one step of it to the next.
    """
    try:
        one, other = map(_grid_of, pair[:2])
    except (AttributeError, KeyError):  # another grid than is known here
        return False
    if one is None or other is None or one.code != other.code:
        return False
    both = list(zip(one.lengths, other.lengths, strict=True))
    grown = [place for place, lengths in enumerate(both) if lengths[0] != lengths[1]]
    chooses, blocked = facts[: one.before], facts[one.before :]
    if len(grown) != 1 or not all(isinstance(fact, Free) for fact in chooses):
        return False
    (at,), (steps, more) = grown, both[grown[0]]
    if more != pair.times * steps or at not in one.alone:
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
    # Of an axis whose block is that of a step's own number, the dimension of the grid.
    walks: dict[int, int]
    # For each axis, the dimensions of the grid that choose the block.
    depends: tuple[frozenset[int], ...]


class _Grid(NamedTuple):
    """The grid of a ``pallas_call``."""

    lengths: tuple[Any, ...]  # of its dimensions
    before: int  # how many inputs choose blocks, and have none
    blocks: tuple[_Block, ...]  # of the other inputs, and of the outputs
    # The dimensions whose steps are programs of their own, so that nothing is kept between them,
    # and which do not read their number, either.
    alone: frozenset[int]
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
    # By number or by name; what vmap adds has neither, and is no step that anything sees.
    said = dict(zip(own, map(str, parallel), strict=False))
    alone = {
        place
        for number, place in enumerate(own)
        if number not in reads and (not keeps or "parallel" in said.get(place, "").lower())
    }
    code = str((body, params["compiler_params"], grid.scratch_avals, grid.num_index_operands))
    blocks = tuple(map(_block, grid.block_mappings))
    return _Grid(lengths, grid.num_index_operands, blocks, frozenset({*alone, *vmapped}), code)


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
