"""Evaluates a jaxpr some of whose inputs become arrays only where the jaxpr uses them."""

import abc
import collections
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from crossshard import _jax
from crossshard.jaxprs import rewrite
from crossshard.jaxprs.walk import CHECKPOINTS, Call, Scan, control_flow


@dataclasses.dataclass(frozen=True)
class Inside:
    """The loops and checkpoints around an equation."""

    turns: int = 1  # how often the equation runs: the product of the lengths of the scans around it
    loops: int = 0  # the number of these scans
    # Whether a ``jax.checkpoint`` is around it, so that it may run again in the backward pass.
    checkpointed: bool = False


class Deferred(abc.ABC):
    """An input of a jaxpr that becomes an array where the jaxpr uses it."""

    name: Any  # identifies the input in reports of where it is used
    arrays: Any  # a pytree of the arrays that it is made of
    refs: Any  # a pytree of references to mutable arrays, which all of its rows share

    @property
    @abc.abstractmethod
    def kind(self) -> Hashable:
        """Everything but arrays, refs and name; equal for inputs that may share a trace."""

    @abc.abstractmethod
    def of(self, arrays: Any, refs: Any) -> Self:
        """Return this input made of other arrays and references of the same shapes."""

    @abc.abstractmethod
    def used(self) -> jax.Array:
        """Return the array, at the place where it is used."""

    def multiplied(self, x: jax.Array, how: Mapping[str, Any]) -> tuple[Self, jax.Array] | None:
        """Multiply an array by this input without making the whole array, if that is possible.

        Args:
          x: the left operand; this input is the right one.
          how: the parameters of ``dot_general``.

        Returns:
          The input as it was used, and the product; ``None`` if it must become an array first.
        """
        del x, how
        return None

    @abc.abstractmethod
    def in_dtype(self, dtype: Any, *, back: bool = False) -> Self | None:
        """Return this input in another dtype; ``None`` if it must become an array first.

        With ``back`` its array gets the dtype that it has now, in which gradients of several uses
        add up.
        """

    @abc.abstractmethod
    def row(self) -> Self | None:
        """Return what one iteration of a scan over this input gets; ``None`` if it cannot wait.

        Its arrays are to be slices of this input's arrays along axis 0.
        """

    @abc.abstractmethod
    def rows(self, number: int) -> Self:
        """Return ``number`` rows of this input, if it has a ``row``.

        Their arrays are to be slices of this input's arrays along axis 0.
        """


# Called at each use with the name, the input that was used, and the loops around the use.
Note = Callable[[Any, Deferred, Inside], None]


def evaluate(
    jaxpr: Any, inputs: Sequence[Any], note: Note = lambda name, used, inside: None
) -> list[Any]:
    """Return the outputs of a closed jaxpr, for inputs that are arrays or ``Deferred``.

    A deferred input with a single use becomes an array at that use: in the body of a scan over it,
    inside a ``jax.checkpoint`` or a function that is called, or after a conversion. If an input is
    only sliced into rows, and no row is taken twice, each row becomes an array where it is used.
    All other deferred inputs become arrays before their first use.
    """
    return _Evaluation(note).run(jaxpr, inputs, Inside())


class _Waiting:
    """A variable that is deferred until something uses it."""

    def __init__(self, deferred: Deferred, readers: Sequence[Any], inside: Inside, note: Note):
        slices = [None if each is None else _rows(each) for each in readers]
        rows = sorted(each for each in slices if each is not None)
        disjoint = all(end <= start for (_, end), (start, _) in itertools.pairwise(rows))
        # Whether it is read only once, or each reader takes other rows of it.
        self.may_wait = len(readers) == 1 or (len(rows) == len(readers) and disjoint)
        dtypes = {
            None
            if each is None or each.primitive.name != "convert_element_type"
            else jnp.dtype(each.params["new_dtype"])
            for each in readers
        }
        common = dtypes.pop() if len(readers) > 1 and len(dtypes) == 1 else None
        # Two gradients are rounded once more as they are added; of many, in few bits, the sum would
        # lose what is small beside it. XLA leaves out the way to the other dtype and back.
        back = len(readers) > 2
        narrow = None if common is None else deferred.in_dtype(common, back=back)
        self._deferred, self._inside, self._note = narrow or deferred, inside, note
        self._array: Any = None

    def read(self) -> Any:
        """Return the deferred input if it may still wait, and the array if not."""
        return self._deferred if self.may_wait else self.array()

    def array(self) -> Any:
        """Return the array, which is made only once."""
        if self._array is None:
            self._note(self._deferred.name, self._deferred, self._inside)
            self._array = self._deferred.used()
        return self._array


def _array(x: Any) -> Any:
    return x.array() if isinstance(x, _Waiting) else x


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """One evaluation of a jaxpr and of all that it calls."""

    note: Note  # called at each use
    # The functions under ``jax.checkpoint``, each with the types of its inputs and the uses in it.
    # Equal layers share one function, as they do in JAX.
    checkpoints: dict[Any, tuple[Callable[..., Any], Sequence[Any], list[Any]]] = dataclasses.field(
        default_factory=dict
    )
    # Whether a ``jax.checkpoint`` with a policy is around it. The policy chooses products to store,
    # so these have to stay as they are.
    has_policy: bool = False

    def run(self, jaxpr: Any, inputs: Sequence[Any], inside: Inside) -> list[Any]:
        """Return the outputs of a closed jaxpr."""
        readers: dict[Any, list[Any]] = collections.defaultdict(list)
        ends = [(None, jaxpr.jaxpr.outvars)]
        for reader, atoms in [(each, each.invars) for each in jaxpr.jaxpr.eqns] + ends:
            for atom in atoms:
                if not isinstance(atom, Literal):
                    readers[atom].append(reader)

        def waiting(variable: Any, x: Any) -> Any:
            is_deferred = isinstance(x, Deferred)
            return _Waiting(x, readers[variable], inside, self.note) if is_deferred else x

        def apply(equation: Any, given: list[Any]) -> list[Any]:
            read = [x.read() if isinstance(x, _Waiting) else x for x in given]
            found: Sequence[Any] | None = None
            if any(isinstance(x, Deferred) for x in read):
                with _jax.at_source_of(equation), equation.ctx.manager:
                    found = self._with_deferred(equation, read, inside)
            if found is None:
                found = _jax.bound(equation, list(map(_array, given)))
            return list(map(waiting, equation.outvars, found))

        inputs = list(map(waiting, jaxpr.jaxpr.invars, inputs))
        return list(map(_array, rewrite.evaluate(jaxpr, inputs, apply)))

    def _with_deferred(
        self, equation: Any, given: Sequence[Any], inside: Inside
    ) -> Sequence[Any] | None:
        """Return the outputs of an equation that takes a deferred input; ``None`` if it cannot."""
        name, params = equation.primitive.name, equation.params
        unary = {"convert_element_type": _converted, "slice": _sliced, "squeeze": _squeezed}
        if name in unary:
            deferred = unary[name](equation, given[0])
            return None if deferred is None else [deferred]
        if name == "dot_general":
            x, w = given
            found = None
            if not (self.has_policy or isinstance(x, Deferred)):
                found = w.multiplied(x, params)
            if found is None:
                return None
            used, product = found
            self.note(w.name, used, inside)
            return [product]
        if name in CHECKPOINTS:
            return self._checkpointed(equation, given, inside)
        flow = control_flow(equation)
        if isinstance(flow, Scan):
            return self._scanned(equation, flow, given, inside)
        if isinstance(flow, Call) and name in ("jit", "pjit"):
            shardings = [*params["in_shardings"], *params["out_shardings"]]
            if all(type(each).__name__ == "UnspecifiedValue" for each in shardings):
                return self.run(flow.jaxpr, given, inside)
        return None

    def _checkpointed(self, equation: Any, given: Sequence[Any], inside: Inside) -> Sequence[Any]:
        jaxpr, params = equation.params["jaxpr"], equation.params
        kinds = tuple(x.kind if isinstance(x, Deferred) else None for x in given)
        # Several inputs may be rows of the same array, and share its references.
        deferred = [x for x in given if isinstance(x, Deferred)]
        names = [x.name for x in deferred]
        together = tuple(map(names.index, names))
        refs = {place: deferred[place].refs for place in together}
        kept = {name: params[name] for name in ("policy", "prevent_cse")}
        # The policy is a part of the key: JAX would trace one function once for all policies.
        key = jaxpr, kinds, together, inside, *kept.values()
        if key not in self.checkpoints:
            uses: list[Any] = []
            within = dataclasses.replace(inside, checkpointed=True)
            like = [_typed(x) if isinstance(x, Deferred) else None for x in given]

            def note(name: Any, used: Deferred, where: Inside) -> None:
                uses.append((name, _typed(used), where))

            has_policy = self.has_policy or params["policy"] is not None
            nested = dataclasses.replace(self, note=note, has_policy=has_policy)

            def run(refs: Any, *arrays: Any) -> list[Any]:
                uses.clear()
                inputs = _with_arrays(like, arrays, [refs[place] for place in together])
                return nested.run(_jax.closed(jaxpr), inputs, within)

            self.checkpoints[key] = jax.checkpoint(run, **kept), like, uses
        function, first, uses = self.checkpoints[key]
        arrays = [x.arrays if isinstance(x, Deferred) else x for x in given]
        out: Sequence[Any] = function(refs, *arrays)
        pairs = zip(first, given, strict=True)
        name_of = {one.name: own.name for one, own in pairs if isinstance(one, Deferred)}
        for name, used, where in uses:
            self.note(name_of[name], used, where)
        return out

    def _scanned(
        self, equation: Any, scan: Scan, given: Sequence[Any], inside: Inside
    ) -> Sequence[Any]:
        length, reverse = scan.steps
        first = scan.constants + scan.carried
        within = dataclasses.replace(inside, turns=inside.turns * length, loops=inside.loops + 1)

        def used(x: Any) -> Any:
            if not isinstance(x, Deferred):
                return x
            self.note(x.name, x, inside)
            return x.used()

        before = list(map(used, given[:first]))
        rows = [x.row() if isinstance(x, Deferred) else None for x in given[first:]]
        over = [
            used(x) if row is None else x.arrays for x, row in zip(given[first:], rows, strict=True)
        ]
        constants, carry = before[: scan.constants], before[scan.constants :]

        def turn(carry: Any, arrays: Any) -> tuple[Any, Any]:
            each = _with_arrays(rows, arrays, [x.refs for x in rows if x is not None])
            out = self.run(scan.body, [*constants, *carry, *each], within)
            return out[: scan.carried], out[scan.carried :]

        names = ("unroll", "_split_transpose")
        options = {name: equation.params[name] for name in names if name in equation.params}
        carry, stacked = lax.scan(turn, carry, over, length, reverse=reverse, **options)
        return [*carry, *stacked]


def _converted(equation: Any, given: Deferred) -> Deferred | None:
    params = equation.params
    if params["weak_type"] or params["sharding"] is not None:
        return None
    return given.in_dtype(params["new_dtype"])


def _sliced(equation: Any, given: Deferred) -> Deferred | None:
    rows = _rows(equation)
    if rows is None or given.row() is None:
        return None
    start, end = rows
    take = lambda x: lax.slice_in_dim(x, start, end)
    return given.rows(end - start).of(jax.tree.map(take, given.arrays), given.refs)


def _rows(equation: Any) -> tuple[int, int] | None:
    """Return the range of rows that a slice takes; ``None`` if it does not take whole rows."""
    params = equation.params
    if equation.primitive.name != "slice" or any(step != 1 for step in params["strides"] or ()):
        return None
    starts, ends = params["start_indices"], params["limit_indices"]
    is_whole = not any(starts[1:]) and ends[1:] == equation.invars[0].aval.shape[1:]
    return (starts[0], ends[0]) if starts and is_whole else None


def _squeezed(equation: Any, given: Deferred) -> Deferred | None:
    row = given.row() if tuple(equation.params["dimensions"]) == (0,) else None
    return row and row.of(jax.tree.map(lambda x: x[0], given.arrays), given.refs)


def _typed(x: Deferred) -> Deferred:
    """Replace the arrays, which belong to one trace, by their types."""
    return x.of(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x.arrays), None)


def _with_arrays(
    like: Sequence[Deferred | None], arrays: Sequence[Any], refs: Sequence[Any]
) -> list[Any]:
    """Return the arrays; where ``like`` has a ``Deferred``, one of them and of the next refs."""
    of_next = iter(refs)
    pairs = zip(like, arrays, strict=True)
    return [own if x is None else x.of(own, next(of_next)) for x, own in pairs]
