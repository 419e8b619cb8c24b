"""Follows facts about values through jaxprs: calls, branches and loops, to a fixed point.

This is abstract interpretation. An analysis says which facts there are, what an equation makes of
them and how they join where paths meet; the walk does the rest. Several jaxprs that are expected
to do the same, such as two traces of one function, are walked side by side.
"""

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from crossshard import _jax

Fact = TypeVar("Fact")
# One of each jaxpr.
Equations = tuple[Any, ...]


class Mismatch(Exception):
    """Jaxprs that are walked side by side do not do the same.

    Attributes:
      equation: the first equation that differs; ``None`` if that cannot be told.
    """

    def __init__(self, equation: Any = None):
        super().__init__(equation)
        self.equation = equation


class Analysis(abc.ABC, Generic[Fact]):
    """What is followed: facts with an order, finitely many above each, and what becomes of them."""

    @abc.abstractmethod
    def constant(self, values: Sequence[Any]) -> Fact:
        """What is known of a constant, given its value in each jaxpr."""

    def literal(self, values: Sequence[Any], equation: Any) -> Fact:
        """The same of a literal, and the equation that it stands in; ``None`` for an output."""
        del equation
        return self.constant(values)

    @abc.abstractmethod
    def transfer(self, equations: Equations, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """What an equation that is neither a call nor control flow makes of its inputs' facts."""

    @abc.abstractmethod
    def join(self, facts: Sequence[Fact]) -> Fact:
        """What is known of a value that comes from any of several places."""

    @abc.abstractmethod
    def control(self, equations: Equations, decides: Fact) -> Fact | None:
        """What a branch or a loop adds to the facts of its outputs; ``None`` for nothing.

        Args:
          equations: the branch or loop.
          decides: what is known of the value that chooses the branch or ends the loop.
        """

    def is_top(self, fact: Fact) -> bool:
        """Whether joining this fact with any other gives it again."""
        del fact
        return False

    def element(self, equations: Equations, fact: Fact) -> Fact:
        """What is known of the slices of an array that a scan takes apart or stacks up."""
        del equations
        return fact

    def returned(self, equations: Equations, fact: Fact) -> Fact:
        """What is known of a value after the call that returns it."""
        del equations
        return fact


def follow(
    analysis: Analysis[Fact], jaxprs: Sequence[Any], inputs: Sequence[Fact]
) -> Sequence[Fact]:
    """The facts of the outputs of jaxprs side by side, given those of their inputs.

    Raises:
      Mismatch: the jaxprs do not do the same.
    """
    opened = [_jax.opened(jaxpr) for jaxpr in jaxprs]
    constants = [analysis.constant(values) for values in _aligned(map(_jax.constants, jaxprs))]
    known = dict(zip(_aligned(jaxpr.constvars for jaxpr in opened), constants, strict=True))
    known.update(zip(_aligned(jaxpr.invars for jaxpr in opened), inputs, strict=True))

    def fact_of(atoms: tuple[Any, ...], equation: Any = None) -> Fact:
        literals = [atom for atom in atoms if _jax.is_literal(atom)]
        if len(literals) == len(atoms):
            return analysis.literal([literal.val for literal in literals], equation)
        # Variables that never stood side by side are different values.
        if literals or atoms not in known:
            raise Mismatch(equation)
        return known[atoms]

    for equations in _aligned(jaxpr.eqns for jaxpr in opened):
        first = equations[0]
        if any(each.primitive is not first.primitive for each in equations):
            raise Mismatch(first)
        facts = [fact_of(atoms, first) for atoms in _aligned(each.invars for each in equations)]
        outputs = _through(analysis, equations, facts)
        known.update(zip(_aligned(each.outvars for each in equations), outputs, strict=True))
    return [fact_of(atoms) for atoms in _aligned(jaxpr.outvars for jaxpr in opened)]


def _aligned(sequences: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    sequences = list(sequences)
    if len({len(each) for each in sequences}) > 1:
        raise Mismatch
    return list(zip(*sequences, strict=True))


def _through(
    analysis: Analysis[Fact], equations: Equations, inputs: Sequence[Fact]
) -> Sequence[Fact]:
    """The facts of the outputs of an equation of any kind."""
    kinds: Any = [_jax.control_flow(each) for each in equations]
    if None in kinds:
        return analysis.transfer(equations, inputs)
    match kinds[0]:
        case _jax.Call():
            outputs = follow(analysis, [each.jaxpr for each in kinds], inputs)
            return [analysis.returned(equations, fact) for fact in outputs]
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
    if added is not None and analysis.is_top(added):
        return [added] * len(equations[0].outvars)
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
        (goes_on,) = follow(analysis, conds, [*of_cond, *carry])
        added = analysis.control(equations, goes_on)
        if added is not None and analysis.is_top(added):
            return [added] * len(carry)
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
    if added is not None and analysis.is_top(added):
        return [added] * len(equations[0].outvars)
    bodies = [each.body for each in loops]
    constants, carry, arrays = _split(inputs, loops[0].constants, loops[0].carried)
    rows = [analysis.element(equations, fact) for fact in arrays]
    while True:
        outputs = follow(analysis, bodies, [*constants, *carry, *rows])
        after = _joined(analysis, [carry, outputs[: len(carry)]], added)
        if after == carry:
            stacked = [analysis.element(equations, fact) for fact in outputs[len(carry) :]]
            return [*carry, *_joined(analysis, [stacked], added)]
        carry = after


def _split(inputs: Sequence[Fact], first: int, second: int) -> tuple[Sequence[Fact], ...]:
    """So many, so many, and the rest."""
    return inputs[:first], inputs[first : first + second], list(inputs[first + second :])


def _joined(
    analysis: Analysis[Fact], alternatives: Sequence[Sequence[Fact]], added: Fact | None
) -> list[Fact]:
    """Per value, what is known if it may come from any of the alternatives."""
    more = [] if added is None else [added]
    return [analysis.join([*facts, *more]) for facts in zip(*alternatives, strict=True)]
