"""Kernels: what is assumed of an operation whose code cannot be walked.

It is assumed that each row is computed alone, and written down, so that numbers can try the
operation alone. cuDNN's attention, products of groups and approximate maxima are known by name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from crossshard import _jax
from crossshard.jaxprs.primitives import KINDS, OpKind
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
    name = equation.primitive.name
    opaque = KINDS.get(name) in (None, OpKind.KERNEL, OpKind.CALL, OpKind.UNKNOWN)
    return opaque or name in ("approx_top_k", "ragged_dot_general") or is_rowwise(equation)


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
    """Whether a kernel is known to compute each row alone."""
    facts = [*inputs, *outputs]
    if pair.name.startswith("dot_product_attention"):
        return pair.name in _ATTENTION and _is_attention(pair, facts)
    # Nothing says that it is linear.
    if outputs[0].power or any(fact.power for fact in inputs if isinstance(fact, Free)):
        return False
    match pair.name:
        case "approx_top_k":
            (given,), ndim = inputs, len(shape_of(pair.one.invars[0]))
            axis = pair.one.params["reduction_dimension"] % ndim
            rows = [x.axis for x in (given, *outputs) if isinstance(x, Rows)]
            return len(rows) == 3 and len({*rows, axis}) == 2 and axis not in rows
        case "ragged_dot_general":
            return _is_batched_product(pair, facts)
    return False


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


def _is_batched_product(pair: Pair, facts: Sequence[Fact]) -> bool:
    """A product of groups, along whose batch axes each has groups of its own."""
    numbers = pair.one.params["ragged_dot_dimension_numbers"]
    left, right = map(list, numbers.dot_dimension_numbers[1])
    batches = [left, right, *[list(range(len(left)))] * 2]
    at = {
        of.index(fact.axis) if fact.axis in of else None
        for fact, of in zip(facts, batches, strict=True)
        if isinstance(fact, Rows)
    }
    return len(at) == 1 and None not in at and layout(facts) is not None
