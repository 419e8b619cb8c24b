"""Abstract interpretation of jaxprs, through calls, branches and loops, to a fixed point.

An analysis defines the facts, how an equation transforms them, and how they join where paths meet.
Several jaxprs that should match, such as two traces of one function, are walked side by side.
"""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Literal

from crossshard import _jax

Fact = TypeVar("Fact")
# The corresponding equations, one of each jaxpr.
Equations = tuple[Any, ...]


class Mismatch(Exception):
    """Jaxprs that are walked side by side do not match.

    Attributes:
      equation: the first equation that differs; ``None`` if unknown.
    """

    def __init__(self, equation: Any = None):
        super().__init__(equation)
        self.equation = equation


class Analysis(abc.ABC, Generic[Fact]):
    """The facts of an analysis, a join-semilattice of finite height, and their transfer.

    Attributes:
      memory: what calls, branches and loops were found to return, if each is to be walked once.
    """

    memory: dict[Any, Any] | None = None

    @abc.abstractmethod
    def constant(self, values: Sequence[Any]) -> Fact:
        """The fact of a constant, given its value in each jaxpr."""

    def literal(self, values: Sequence[Any], equation: Any) -> Fact:
        """The fact of a literal in an equation, or in an output if ``equation`` is ``None``."""
        del equation
        return self.constant(values)

    @abc.abstractmethod
    def transfer(self, equations: Equations, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """The facts of the outputs of an equation that is neither a call nor control flow."""

    @abc.abstractmethod
    def join(self, facts: Sequence[Fact]) -> Fact:
        """The fact of a value that may come from any of several paths.

        What a branch or a loop adds to its outputs is the first of them.
        """

    @abc.abstractmethod
    def control(self, equations: Equations, decides: Fact) -> Fact | None:
        """The fact that a branch or a loop adds to its outputs, or ``None``.

        Args:
          equations: the branch or loop.
          decides: the fact of the value that chooses the branch or ends the loop.
        """

    def enters(self, equations: Equations) -> bool:
        """Whether to walk what a call, branch or loop runs, rather than to transfer it whole."""
        del equations
        return True

    def enters_with(self, equations: Equations, inputs: Sequence[Fact]) -> bool:
        """As ``enters``, with the facts of what is given to it."""
        del inputs
        return self.enters(equations)

    def element(self, equations: Equations, fact: Fact) -> Fact:
        """The fact of one slice of an array that a scan iterates over."""
        del equations
        return fact

    def stacked(self, equations: Equations, fact: Fact) -> Fact:
        """The fact of an array that a scan stacks of such slices."""
        return self.element(equations, fact)

    def returned(
        self, equations: Equations, inputs: Sequence[Fact], outputs: Sequence[Fact]
    ) -> Sequence[Fact]:
        """The facts of the outputs of a call, given those of what it calls."""
        del equations, inputs
        return outputs


def follow(
    analysis: Analysis[Fact], jaxprs: Sequence[Any], inputs: Sequence[Fact]
) -> Sequence[Fact]:
    """The facts of the outputs of corresponding jaxprs, given those of their inputs.

    Raises:
      Mismatch: the jaxprs do not match.
    """
    opened = [_jax.opened(jaxpr) for jaxpr in jaxprs]
    constants = [analysis.constant(values) for values in _aligned(map(_jax.constants, jaxprs))]
    known = dict(zip(_aligned(jaxpr.constvars for jaxpr in opened), constants, strict=True))
    known.update(zip(_aligned(jaxpr.invars for jaxpr in opened), inputs, strict=True))

    def fact_of(atoms: tuple[Any, ...], equation: Any = None) -> Fact:
        literals = [atom for atom in atoms if isinstance(atom, Literal)]
        if len(literals) == len(atoms):
            return analysis.literal([literal.val for literal in literals], equation)
        # Variables that were never paired are different values.
        if literals or atoms not in known:
            raise Mismatch(equation)
        return known[atoms]

    for equations in _aligned(jaxpr.eqns for jaxpr in opened):
        first = equations[0]
        if any(each.primitive is not first.primitive for each in equations):
            raise Mismatch(first)
        facts = [fact_of(atoms, first) for atoms in _aligned(each.invars for each in equations)]
        outputs = through(analysis, equations, facts)
        known.update(zip(_aligned(each.outvars for each in equations), outputs, strict=True))
    return [fact_of(atoms) for atoms in _aligned(jaxpr.outvars for jaxpr in opened)]


def equations_of(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr, however deep."""
    for each in _jax.opened(jaxpr).eqns:
        yield each
        yield from equations_within(each)


def equations_within(equation: Any) -> Iterator[Any]:
    """Every equation that an equation of any kind runs, however deep; not itself."""
    for jaxpr in _jax.jaxprs_within(equation):
        yield from equations_of(jaxpr)


def _aligned(sequences: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    sequences = list(sequences)
    if len({len(each) for each in sequences}) > 1:
        raise Mismatch
    return list(zip(*sequences, strict=True))


def through(
    analysis: Analysis[Fact], equations: Equations, inputs: Sequence[Fact]
) -> Sequence[Fact]:
    """The facts of the outputs of an equation of any kind."""
    kinds: Any = [_jax.control_flow(each) for each in equations]
    if None in kinds or not analysis.enters_with(equations, inputs):
        return analysis.transfer(equations, inputs)
    is_call = isinstance(kinds[0], _jax.Call)
    if analysis.memory is None:
        outputs = _entered(analysis, equations, kinds, inputs)
    else:
        # Calls of one jaxpr return the same.
        same = [each.jaxpr for each in kinds] if is_call else equations
        key = *map(id, same), *inputs
        if key not in analysis.memory:
            # With the jaxprs, since another one may get the number of one that is gone.
            analysis.memory[key] = same, _entered(analysis, equations, kinds, inputs)
        outputs = analysis.memory[key][1]
    return analysis.returned(equations, inputs, outputs) if is_call else outputs


def _entered(
    analysis: Analysis[Fact], equations: Equations, kinds: Sequence[Any], inputs: Sequence[Fact]
) -> Sequence[Fact]:
    match kinds[0]:
        case _jax.Call():
            return follow(analysis, [each.jaxpr for each in kinds], inputs)
        case _jax.Cond():
            return _through_cond(analysis, equations, kinds, inputs)
        case _jax.While():
            return _through_while(analysis, equations, kinds, inputs)
        case _:
            return _through_scan(analysis, equations, kinds, inputs)


def _through_cond(
    analysis: Analysis[Fact],
    equations: Equations,
    conds: Sequence[_jax.Cond],
    inputs: Sequence[Fact],
) -> Sequence[Fact]:
    added = analysis.control(equations, inputs[0])
    branches = _aligned(each.branches for each in conds)
    return _joined(analysis, [follow(analysis, each, inputs[1:]) for each in branches], added)


def _through_while(
    analysis: Analysis[Fact],
    equations: Equations,
    loops: Sequence[_jax.While],
    inputs: Sequence[Fact],
) -> Sequence[Fact]:
    conds, bodies = [each.cond for each in loops], [each.body for each in loops]
    of_cond, of_body, carry = _split(inputs, loops[0].cond_constants, loops[0].body_constants)
    while True:
        (continues,) = follow(analysis, conds, [*of_cond, *carry])
        added = analysis.control(equations, continues)
        after = follow(analysis, bodies, [*of_body, *carry])
        after = _joined(analysis, [carry, after], added)
        if after == carry:
            return carry
        carry = after


def _through_scan(
    analysis: Analysis[Fact],
    equations: Equations,
    loops: Sequence[_jax.Scan],
    inputs: Sequence[Fact],
) -> Sequence[Fact]:
    added = analysis.control(equations, analysis.constant([each.steps for each in loops]))
    bodies = [each.body for each in loops]
    constants, carry, arrays = _split(inputs, loops[0].constants, loops[0].carried)
    rows = [analysis.element(equations, fact) for fact in arrays]
    while True:
        outputs = follow(analysis, bodies, [*constants, *carry, *rows])
        after = _joined(analysis, [carry, outputs[: len(carry)]], added)
        if after == carry:
            stacked = [analysis.stacked(equations, fact) for fact in outputs[len(carry) :]]
            return [*carry, *_joined(analysis, [stacked], added)]
        carry = after


def _split(inputs: Sequence[Fact], first: int, second: int) -> tuple[Sequence[Fact], ...]:
    """The first inputs, the second ones, and the rest."""
    return inputs[:first], inputs[first : first + second], list(inputs[first + second :])


def _joined(
    analysis: Analysis[Fact], alternatives: Sequence[Sequence[Fact]], added: Fact | None
) -> list[Fact]:
    """For each value, the join over the alternatives and what the control flow adds."""
    more = [] if added is None else [added]
    return [analysis.join([*more, *facts]) for facts in zip(*alternatives, strict=True)]
