"""Abstract interpretation of jaxprs, through calls, branches and loops, to a fixed point.

An analysis defines the facts, how an equation transforms them, and how they join where paths meet.
Several jaxprs that should match, such as two traces of one function, are walked side by side. Three
small analyses are here: which inputs an output depends on, which input it equals, and along which
mesh axes it varies.
"""

import abc
import functools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from crossshard.jaxprs.primitives import ADDS, EQUALIZES, OF_ZEROS

Fact = TypeVar("Fact")
# The corresponding equations, one of each jaxpr.
Equations = tuple[Any, ...]


# The parts of a jaxpr.


def opened(jaxpr: Any) -> Any:
    """Return the open jaxpr of an open or closed jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> list[Any]:
    """Return the constants of a closed jaxpr; unique placeholders for those of an open one."""
    return list(getattr(jaxpr, "consts", ())) or [object() for _ in opened(jaxpr).constvars]


def jaxprs_within(equation: Any) -> list[Any]:
    """Return the jaxprs among the parameters of an equation: of a call, branches, a loop's body."""
    values = equation.params.values()
    each = [x for value in values for x in (value if isinstance(value, tuple | list) else [value])]
    return [x for x in each if hasattr(opened(x), "eqns")]


def equations_of(jaxpr: Any, but: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield every equation of a jaxpr, however deep, without those ``but`` takes and within."""
    for each in opened(jaxpr).eqns:
        if but is None or not but(each):
            yield each
            yield from equations_within(each, but)


def equations_within(equation: Any, but: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """Yield every equation that an equation runs, however deep, but not the equation itself."""
    for jaxpr in jaxprs_within(equation):
        yield from equations_of(jaxpr, but)


def has_ref(equation: Any) -> bool:
    """Return whether an equation takes or makes a mutable array."""
    return any("Ref" in type(x.aval).__name__ for x in (*equation.invars, *equation.outvars))


def has_effect(equation: Any) -> bool:
    """Return whether outputs may depend on more than inputs and named axes: a Ref or a callback."""
    effects = (type(each).__name__ for each in equation.effects)
    return has_ref(equation) or any(name != "NamedAxisEffect" for name in effects)


def has_own_derivative(equation: Any) -> bool:
    """Return whether autodiff takes a rule of the user's for an equation, and not its jaxpr."""
    return equation.primitive.name.startswith(("custom_jvp_call", "custom_vjp_call"))


def named_axes(equation: Any) -> frozenset[str]:
    """Return the named axes of a collective, without those of vmap, which are positions."""
    return _names_in((equation.params.get("axes", ()), equation.params.get("axis_name", ())))


def are_alike(one: Any, other: Any, but: Container[str] = ()) -> bool:
    """Return whether two equations of one primitive have equal parameters, but for those named."""
    left, right = one.params, other.params
    return all(
        key in but or value is right[key] or bool(value == right[key])
        for key, value in left.items()
    )


class Call(NamedTuple):
    """An equation that only calls a jaxpr on its inputs."""

    jaxpr: Any


class Cond(NamedTuple):
    """A branch: the first input chooses the jaxpr that is called on the rest."""

    branches: Sequence[Any]


class While(NamedTuple):
    """A while loop.

    Its inputs are the constants of the condition, those of the body, and the carry of both.
    """

    cond: Any
    cond_constants: int
    body: Any
    body_constants: int


class Scan(NamedTuple):
    """A scan: its inputs are constants, the carry, and the arrays that it iterates over.

    ``steps`` is its length, and whether it runs in reverse.
    """

    body: Any
    constants: int
    carried: int
    steps: tuple[int, bool]


CHECKPOINTS = frozenset("checkpoint remat remat2".split())
CALLS = CHECKPOINTS | frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)


def control_flow(equation: Any) -> Call | Cond | While | Scan | None:
    """Return the jaxprs that an equation runs, and how; ``None`` if it has none or is unknown."""
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return Cond(params["branches"])
    if name == "while":
        cond, body = params["cond_jaxpr"], params["body_jaxpr"]
        return While(cond, params["cond_nconsts"], body, params["body_nconsts"])
    if name == "scan":
        steps = params["length"], params["reverse"]
        if "ft_in" in params:  # since JAX 0.11: trees of the constants, carry and arrays
            constant, carry, _ = params["ft_in"].unpack()
            return Scan(params["jaxpr"], len(list(constant)), len(list(carry)), steps)
        return Scan(params["jaxpr"], params["num_consts"], params["num_carry"], steps)
    if name in CALLS:
        inner = [params[key] for key in ("jaxpr", "call_jaxpr") if key in params]
        if len(inner) == 1 and len(opened(inner[0]).invars) == len(equation.invars):
            return Call(inner[0])
    return None


# The walk.


class Mismatch(Exception):
    """Jaxprs that are walked side by side do not match."""

    def __init__(self, equation: Any = None):
        super().__init__(equation)
        self.equation = equation  # the first equation that differs; ``None`` if unknown


class Analysis(abc.ABC, Generic[Fact]):
    """The facts of an analysis, a join-semilattice of finite height, and their transfer."""

    # What calls, branches and loops return, if each is to be walked only once.
    memory: dict[Any, Any] | None = None

    @abc.abstractmethod
    def constant(self, values: Sequence[Any]) -> Fact:
        """Return the fact of a constant, given its value in each jaxpr."""

    def literal(self, values: Sequence[Any], equation: Any) -> Fact:
        """Return the fact of a literal in an equation, or in an output if that is ``None``."""
        del equation
        return self.constant(values)

    @abc.abstractmethod
    def transfer(self, equations: Equations, inputs: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the outputs of an equation that is no call and no control flow."""

    @abc.abstractmethod
    def join(self, facts: Sequence[Fact]) -> Fact:
        """Return the fact of a value that may come from any of several paths.

        If a branch or a loop adds a fact to its outputs, that is the first of them.
        """

    @abc.abstractmethod
    def control(self, equations: Equations, decides: Fact) -> Fact | None:
        """Return the fact that a branch or loop adds to its outputs.

        Args:
          equations: the branch or loop, in each jaxpr.
          decides: the fact of what chooses the branch, or ends the loop.
        """

    def enters(self, equations: Equations, inputs: Sequence[Fact]) -> bool:
        """Return whether to walk into a call, branch or loop, rather than ``transfer`` it."""
        del equations, inputs
        return True

    def element(self, equations: Equations, fact: Fact) -> Fact:
        """Return the fact of one slice of an array that a scan iterates over."""
        del equations
        return fact

    def stacked(self, equations: Equations, fact: Fact) -> Fact:
        """Return the fact of an array that a scan stacks from such slices."""
        return self.element(equations, fact)

    def returned(
        self, equations: Equations, inputs: Sequence[Fact], outputs: Sequence[Fact]
    ) -> Sequence[Fact]:
        """Return the facts of the outputs of a call, given those of what it calls."""
        del equations, inputs
        return outputs

    def left(self, equations: Equations, outputs: Sequence[Fact]) -> Sequence[Fact]:
        """Return the facts of the outputs of a branch or a loop, given those within."""
        del equations
        return outputs


def follow(
    analysis: Analysis[Fact], jaxprs: Sequence[Any], inputs: Sequence[Fact]
) -> Sequence[Fact]:
    """Return the facts of the outputs of corresponding jaxprs, given those of their inputs.

    Raises:
      Mismatch: the jaxprs do not match.
    """
    each = [opened(jaxpr) for jaxpr in jaxprs]
    own = [analysis.constant(values) for values in _aligned(map(constants, jaxprs))]
    known = dict(zip(_aligned(jaxpr.constvars for jaxpr in each), own, strict=True))
    known.update(zip(_aligned(jaxpr.invars for jaxpr in each), inputs, strict=True))

    def fact_of(atoms: tuple[Any, ...], equation: Any = None) -> Fact:
        literals = [atom for atom in atoms if isinstance(atom, Literal)]
        if len(literals) == len(atoms):
            return analysis.literal([literal.val for literal in literals], equation)
        # Variables that were never paired are different values.
        if literals or atoms not in known:
            raise Mismatch(equation)
        return known[atoms]

    for equations in _aligned(jaxpr.eqns for jaxpr in each):
        first = equations[0]
        if any(one.primitive is not first.primitive for one in equations):
            raise Mismatch(first)
        facts = [fact_of(atoms, first) for atoms in _aligned(one.invars for one in equations)]
        outputs = through(analysis, equations, facts)
        known.update(zip(_aligned(one.outvars for one in equations), outputs, strict=True))
    return [fact_of(atoms) for atoms in _aligned(jaxpr.outvars for jaxpr in each)]


def _aligned(sequences: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    sequences = list(sequences)
    if len({len(each) for each in sequences}) > 1:
        raise Mismatch
    return list(zip(*sequences, strict=True))


def through(
    analysis: Analysis[Fact], equations: Equations, inputs: Sequence[Fact]
) -> Sequence[Fact]:
    """Return the facts of the outputs of an equation of any kind."""
    kinds: Any = [control_flow(each) for each in equations]
    if None in kinds or not analysis.enters(equations, inputs):
        return analysis.transfer(equations, inputs)
    is_call = isinstance(kinds[0], Call)
    if analysis.memory is None:
        outputs = _entered(analysis, equations, kinds, inputs)
    else:
        # Calls of one jaxpr return the same.
        same = [each.jaxpr for each in kinds] if is_call else equations
        key = *map(id, same), *inputs
        if key not in analysis.memory:
            # Keeps the jaxprs, so that no other object gets their ``id``.
            analysis.memory[key] = same, _entered(analysis, equations, kinds, inputs)
        outputs = analysis.memory[key][1]
    if is_call:
        return analysis.returned(equations, inputs, outputs)
    return analysis.left(equations, outputs)


def _entered(
    analysis: Analysis[Fact], equations: Equations, kinds: Sequence[Any], inputs: Sequence[Fact]
) -> Sequence[Fact]:
    first = kinds[0]

    def joined(alternatives: Sequence[Sequence[Fact]], added: Fact | None) -> list[Fact]:
        """Join each value over the alternatives, and with what the control flow adds."""
        more = [] if added is None else [added]
        return [analysis.join([*more, *facts]) for facts in zip(*alternatives, strict=True)]

    if isinstance(first, Call):
        return follow(analysis, [each.jaxpr for each in kinds], inputs)
    if isinstance(first, Cond):
        added = analysis.control(equations, inputs[0])
        branches = _aligned(each.branches for each in kinds)
        return joined([follow(analysis, each, inputs[1:]) for each in branches], added)
    bodies = [each.body for each in kinds]
    if isinstance(first, While):
        of_body = first.cond_constants
        start = of_body + first.body_constants
        carry = list(inputs[start:])
        while True:
            of_cond = [*inputs[:of_body], *carry]
            (continues,) = follow(analysis, [each.cond for each in kinds], of_cond)
            added = analysis.control(equations, continues)
            after = follow(analysis, bodies, [*inputs[of_body:start], *carry])
            after = joined([carry, after], added)
            if after == carry:
                return carry
            carry = after
    added = analysis.control(equations, analysis.constant([each.steps for each in kinds]))
    start = first.constants + first.carried
    carry = list(inputs[first.constants : start])
    rows = [analysis.element(equations, fact) for fact in inputs[start:]]
    while True:
        outputs = follow(analysis, bodies, [*inputs[: first.constants], *carry, *rows])
        after = joined([carry, outputs[: first.carried]], added)
        if after == carry:
            stacked = [analysis.stacked(equations, fact) for fact in outputs[first.carried :]]
            return [*carry, *joined([stacked], added)]
        carry = after


# Which inputs the outputs of a function depend on.


def depends(function: Callable[..., Any], read: Any, *others: Any) -> bool:
    """Return whether any output of ``function(read, *others)`` depends on a value in ``read``.

    Shapes and dtypes are not values. An output read through a Ref counts as dependent.

    >>> import jax.numpy as jnp
    >>> depends(lambda x, y: x.size * y, jnp.ones(2), jnp.ones(2))
    False
    """
    number = len(jax.tree.leaves(read))
    return any(bits & (1 << number) - 1 for bits in sources(function, read, *others))


def sources(function: Callable[..., Any], *args: Any) -> list[int]:
    """Return, for each output of ``function(*args)``, the inputs on which it depends, as bits.

    >>> import jax.numpy as jnp
    >>> sources(lambda x, y, z: (x + z, jnp.zeros_like(y)), 1.0, 2.0, 3.0)
    [5, 0]
    """
    return sources_of(jax.make_jaxpr(function)(*args))


def sources_of(jaxpr: Any, shards: Iterable[str] = (), *, derived: bool = False) -> list[int]:
    """Return, for each output of a jaxpr, the inputs on which it depends, as bits.

    What is the same on all shards, along these axes, such as a sum over them, depends on none. If
    ``derived``, its derivative may depend on them, too, by a rule of the user's.
    """
    inputs = [1 << i for i in range(len(opened(jaxpr).invars))]
    # What is summed over one axis after the other is the same along each of them.
    axes: list[str | None] = [*shards]
    along = [follow(_Reads(axis, derived), [jaxpr], inputs) for axis in axes or [None]]
    return [functools.reduce(operator.or_, bits) for bits in zip(*along, strict=True)]


def inputs_read(equation: Any) -> list[list[int]]:
    """Return, for each output of an equation, the places of the inputs on which it depends."""
    places = range(len(equation.invars))
    if len(equation.outvars) == 1 or control_flow(equation) is None:
        return [list(places)] * len(equation.outvars)
    found = bits_through(equation, [1 << place for place in places])
    return [[place for place in places if bits >> place & 1] for bits in found]


def bits_through(equation: Any, inputs: Sequence[int]) -> Sequence[int]:
    """Return the bits of the outputs of an equation, of what they depend on, given its inputs'."""
    return through(_Reads(), (equation,), inputs)


class _Reads(Analysis[int]):
    """The inputs on which a value may depend, as bits."""

    def __init__(self, axis: str | None = None, derived: bool = False):
        self._axis, self._derived = axis, derived

    def constant(self, values: Sequence[Any]) -> int:
        del values
        return 0

    def join(self, facts: Sequence[int]) -> int:
        return functools.reduce(operator.or_, facts, 0)

    def control(self, equations: Equations, decides: int) -> int:
        del equations
        return decides

    def transfer(self, equations: Equations, inputs: Sequence[int]) -> Sequence[int]:
        (equation,) = equations
        ungrouped = equation.params.get("axis_index_groups") is None
        is_over = self._axis in named_axes(equation)
        if equation.primitive.name in EQUALIZES and ungrouped and is_over:
            return [0] * len(equation.outvars)
        # Of all inputs: the index of a shard differs as its rows do.
        if equation.primitive.name == "axis_index" and is_over:
            return [-1]
        # All inputs, since what a Ref holds, or what a callback returns, is not tracked.
        read = -1 if has_effect(equation) else self.join(inputs)
        return [read] * len(equation.outvars)

    def returned(
        self, equations: Equations, inputs: Sequence[int], outputs: Sequence[int]
    ) -> Sequence[int]:
        by_rule = self._derived and has_own_derivative(equations[0])
        return [self.join(inputs)] * len(outputs) if by_rule else outputs


# Which of its inputs a function returns.


def returned_inputs(function: Callable[..., Any], *args: Any) -> list[int | None]:
    """Return, for each output of ``function(*args)``, the input that it equals, or ``None``.

    >>> import jax.numpy as jnp
    >>> returned_inputs(lambda x, y: (y, x + jnp.zeros_like(x), x + y), 1.0, 2.0)
    [1, 0, None]
    """
    jaxpr = jax.make_jaxpr(function)(*args)
    facts = follow(_Origin(), [jaxpr], list(range(len(jaxpr.in_avals))))

    def input_of(fact: int | None, out: Any) -> int | None:
        # A scan stacks what its body returns unchanged, so the shapes must be equal too.
        is_input = fact not in (None, _ZERO) and _alike(jaxpr.in_avals[fact], out)
        return fact if is_input else None

    return list(map(input_of, facts, jaxpr.out_avals))


def is_identity(function: Callable[[Any], Any], given: Any) -> bool:
    """Return whether ``function(given)`` returns ``given`` unchanged, through calls and loops.

    >>> import jax, jax.numpy as jnp
    >>> is_identity(jax.checkpoint(lambda xs: xs), [jnp.ones(2), jnp.ones(2)])
    True
    >>> is_identity(lambda xs: xs[::-1], [jnp.ones(2), jnp.ones(2)])
    False
    """
    return returned_inputs(function, given) == list(range(len(jax.tree.leaves(given))))


_ZERO = -1


class _Origin(Analysis[int | None]):
    """The index of the input that a value equals, ``_ZERO`` for zeros, or ``None``."""

    def constant(self, values: Sequence[Any]) -> None:
        del values

    def literal(self, values: Sequence[Any], equation: Any) -> int | None:
        del equation
        return _ZERO if np.ndim(values[0]) == 0 and values[0] == 0 else None

    def join(self, facts: Sequence[int | None]) -> int | None:
        return facts[0] if all(fact == facts[0] for fact in facts) else None

    def control(self, equations: Equations, decides: int | None) -> None:
        """Add nothing: both branches may return the same input."""
        del equations, decides

    def transfer(self, equations: Equations, inputs: Sequence[int | None]) -> Sequence[int | None]:
        (equation,) = equations
        name = equation.primitive.name
        if name in ("optimization_barrier", "copy", "copy_p"):
            return inputs
        if name in OF_ZEROS and all(fact == _ZERO for fact in inputs):
            return [_ZERO] * len(equation.outvars)
        if name in ADDS and inputs[1] == _ZERO:
            alike = _alike(equation.invars[0].aval, equation.outvars[0].aval)
            return [inputs[0] if alike else None]
        return [None] * len(equation.outvars)


def _alike(one: Any, other: Any) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


# Along which mesh axes a value may vary.

Axes = frozenset[str]


def varying_axes_of_outputs(sharded: ClosedJaxpr) -> Sequence[Axes]:
    """Return, for each output of a traced ``shard_map``, the mesh axes over which it may vary.

    JAX's types (``check_vma=True``) also show them, but reject correct steps: a loop whose carry
    starts invariant and ends varying, a sum over groups. Here a step is traced without these types,
    and the axes over which a value may vary are propagated from the inputs to the outputs.

    Args:
      sharded: the jaxpr of a function that is a single ``shard_map``.
    """
    (equation,) = sharded.jaxpr.eqns
    mesh_axes = frozenset(equation.params["mesh"].axis_names)
    inputs = [_names_in(spec) & mesh_axes for spec in equation.params["in_specs"]]
    return follow(Variance(mesh_axes), [equation.params["jaxpr"]], inputs)


class Variance(Analysis[Axes]):
    """The mesh axes over which a value may vary."""

    def __init__(self, mesh_axes: Axes):
        self.mesh_axes = mesh_axes

    def constant(self, values: Sequence[Any]) -> Axes:
        del values
        return frozenset()

    def join(self, facts: Sequence[Axes]) -> Axes:
        return frozenset[str]().union(*facts)

    def control(self, equations: Equations, decides: Axes) -> Axes:
        # Shards that take different branches or leave a loop at different times diverge.
        del equations
        return decides

    def transfer(self, equations: Equations, inputs: Sequence[Axes]) -> Sequence[Axes]:
        (equation,) = equations
        if has_effect(equation):
            return [self.mesh_axes] * len(equation.outvars)
        varies = self.join([*inputs, *map(named_axes, equations_within(equation))])
        over = named_axes(equation)
        # A collective makes its output equal on all shards along its axes, but not in groups.
        ungrouped = equation.params.get("axis_index_groups") is None
        equalizes = equation.primitive.name in EQUALIZES and ungrouped
        out = varies - over if equalizes else varies | over
        return [out & self.mesh_axes] * len(equation.outvars)


def _names_in(names: Any) -> Axes:
    """Return the axis names in a nested spec or parameter; positions are not names."""
    if isinstance(names, str):
        return frozenset([names])
    within = names if isinstance(names, Iterable) else ()
    return frozenset[str]().union(*map(_names_in, within))
