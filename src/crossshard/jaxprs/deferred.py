"""Deferred: evaluates a jaxpr, some of whose inputs become arrays only where they are used."""

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
    """What an equation stands inside of."""

    turns: int = 1  # how often it runs: the product of the lengths of the scans around it
    loops: int = 0  # the number of these scans
    # Whether a ``jax.checkpoint`` is around it, so that it may run again in the backward pass.
    checkpointed: bool = False


class Deferred(abc.ABC):
    """An input of a jaxpr that becomes an array where the jaxpr uses it."""

    name: Any  # which it is, for those who want to know where it is used
    arrays: Any  # a pytree of the arrays that it is made of

    @property
    @abc.abstractmethod
    def kind(self) -> Hashable:
        """What it is but for its arrays and its name; equal for those that may share a trace."""

    @abc.abstractmethod
    def of(self, arrays: Any) -> Self:
        """The same, made of other arrays of these shapes."""

    @abc.abstractmethod
    def used(self) -> jax.Array:
        """The array, where it is used."""

    def multiplied(self, x: jax.Array, how: Mapping[str, Any]) -> tuple[Self, jax.Array] | None:
        """How it was used in a product, and that; ``None`` if it must be used for it.

        Args:
          x: what it is multiplied with, which stands before it.
          how: the parameters of ``dot_general``.
        """
        del x, how
        return None

    @abc.abstractmethod
    def in_dtype(self, dtype: Any) -> Self | None:
        """The same in another dtype; ``None`` if it must be used to be converted."""

    @abc.abstractmethod
    def row(self) -> Self | None:
        """What a turn of a scan gets of it, to be made of slices of its arrays along axis 0.

        ``None`` if it must be used before the scan.
        """

    @abc.abstractmethod
    def rows(self, number: int) -> Self:
        """So many rows of it, where it has a ``row``; to be made of slices of its arrays."""


# Is told of each use: the name, what was used, and what the use stands inside of.
Note = Callable[[Any, Deferred, Inside], None]


def evaluate(
    jaxpr: Any, inputs: Sequence[Any], note: Note = lambda name, used, inside: None
) -> list[Any]:
    """The outputs of a closed jaxpr, for inputs that are arrays or ``Deferred``.

    What is used once is used in the place where it is: in the body of a scan that runs over it,
    inside of a ``jax.checkpoint``, in a function that is called, and after it was converted; and
    each row of what is only sliced, no row twice, in its own place. What is used more often, or in
    another way, becomes an array before its first use.
    """
    return _Evaluation(note).of(jaxpr, inputs, Inside())


class _Waiting:
    """A variable that is deferred until something uses it."""

    def __init__(self, deferred: Deferred, readers: Sequence[Any], inside: Inside, note: Note):
        taken = [None if each is None else _rows(each) for each in readers]
        rows = sorted(each for each in taken if each is not None)
        apart = all(end <= start for (_, end), (start, _) in itertools.pairwise(rows))
        # Whether one equation reads it, once, or each of several takes other rows of it.
        self.may_wait = len(readers) == 1 or (len(rows) == len(readers) and apart)
        dtypes = {
            None
            if each is None or each.primitive.name != "convert_element_type"
            else jnp.dtype(each.params["new_dtype"])
            for each in readers
        }
        common = dtypes.pop() if len(readers) > 1 and len(dtypes) == 1 else None
        narrow = None if common is None else deferred.in_dtype(common)
        # Whether all of several readers convert it to one dtype, which it has already.
        self.is_converted = narrow is not None
        self._deferred, self._inside, self._note = narrow or deferred, inside, note
        self._array: Any = None

    def read(self) -> Any:
        """The array, or what is deferred if that may still wait."""
        return self._deferred if self.may_wait else self.whole()

    def whole(self) -> Any:
        """The array, which it is from now on."""
        if self._array is None:
            self._note(self._deferred.name, self._deferred, self._inside)
            self._array = self._deferred.used()
        return self._array


def _whole(x: Any) -> Any:
    return x.whole() if isinstance(x, _Waiting) else x


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """One evaluation of a jaxpr, with all that it calls."""

    note: Note  # is told of each use
    # The functions under ``jax.checkpoint``, each with the types of its inputs and the uses in it.
    # Equal layers share one, as they do without us.
    checkpoints: dict[Any, tuple[Callable[..., Any], Sequence[Any], list[Any]]] = dataclasses.field(
        default_factory=dict
    )
    # Whether it is of what is under a ``jax.checkpoint`` with a policy, which chooses products to
    # be stored.
    of_policy: bool = False

    def of(self, jaxpr: Any, inputs: Sequence[Any], inside: Inside) -> list[Any]:
        """The outputs of a closed jaxpr."""
        readers: dict[Any, list[Any]] = collections.defaultdict(list)
        ends = [(None, jaxpr.jaxpr.outvars)]
        for reader, atoms in [(each, each.invars) for each in jaxpr.jaxpr.eqns] + ends:
            for atom in atoms:
                if not isinstance(atom, Literal):
                    readers[atom].append(reader)

        def waiting(variable: Any, x: Any) -> Any:
            is_deferred = isinstance(x, Deferred)
            return _Waiting(x, readers[variable], inside, self.note) if is_deferred else x

        def on(equation: Any, given: list[Any]) -> list[Any]:
            if any(isinstance(x, _Waiting) and x.is_converted for x in given[:1]):
                return [_whole(given[0])]
            read = [x.read() if isinstance(x, _Waiting) else x for x in given]
            found: Sequence[Any] | None = None
            if any(isinstance(x, Deferred) for x in read):
                with _jax.at_source_of(equation), equation.ctx.manager:
                    found = self._with_deferred(equation, read, inside)
            if found is None:
                found = _jax.bound(equation, list(map(_whole, given)))
            return list(map(waiting, equation.outvars, found))

        inputs = list(map(waiting, jaxpr.jaxpr.invars, inputs))
        return list(map(_whole, rewrite.evaluate(jaxpr, inputs, on)))

    def _with_deferred(
        self, equation: Any, given: Sequence[Any], inside: Inside
    ) -> Sequence[Any] | None:
        """The outputs of an equation that hands a deferred input on; ``None`` if it uses it."""
        name, params = equation.primitive.name, equation.params
        of_first = {"convert_element_type": _converted, "slice": _sliced, "squeeze": _squeezed}
        if name in of_first:
            deferred = of_first[name](equation, given[0])
            return None if deferred is None else [deferred]
        if name == "dot_general":
            x, w = given
            found = None
            if not (self.of_policy or isinstance(x, Deferred)):
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
            placed = [*params["in_shardings"], *params["out_shardings"]]
            if all(type(each).__name__ == "UnspecifiedValue" for each in placed):
                return self.of(flow.jaxpr, given, inside)
        return None

    def _checkpointed(self, equation: Any, given: Sequence[Any], inside: Inside) -> Sequence[Any]:
        jaxpr, params = equation.params["jaxpr"], equation.params
        kinds = tuple(x.kind if isinstance(x, Deferred) else None for x in given)
        # Several inputs may be rows of one.
        names = [x.name for x in given if isinstance(x, Deferred)]
        together = tuple(map(names.index, names))
        kept = {name: params[name] for name in ("policy", "prevent_cse")}
        # JAX traces a function once for all policies.
        key = jaxpr, kinds, together, inside, *kept.values()
        if key not in self.checkpoints:
            uses: list[Any] = []
            within = dataclasses.replace(inside, checkpointed=True)
            like = [_typed(x) if isinstance(x, Deferred) else None for x in given]

            def note(name: Any, used: Deferred, where: Inside) -> None:
                uses.append((name, _typed(used), where))

            of_policy = self.of_policy or params["policy"] is not None
            alone = dataclasses.replace(self, note=note, of_policy=of_policy)

            def run(*arrays: Any) -> list[Any]:
                uses.clear()
                return alone.of(_jax.closed(jaxpr), _made_of(like, arrays), within)

            self.checkpoints[key] = jax.checkpoint(run, **kept), like, uses
        function, first, uses = self.checkpoints[key]
        out: Sequence[Any] = function(*map(_arrays, given))
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
            out = self.of(scan.body, [*constants, *carry, *_made_of(rows, arrays)], within)
            return out[: scan.carried], out[scan.carried :]

        names = ("unroll", "_split_transpose")
        how = {name: equation.params[name] for name in names if name in equation.params}
        carry, stacked = lax.scan(turn, carry, over, length, reverse=reverse, **how)
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
    return given.rows(end - start).of(jax.tree.map(take, given.arrays))


def _rows(equation: Any) -> tuple[int, int] | None:
    """The first row that a slice takes, and the one after the last; ``None`` if it takes less."""
    params = equation.params
    if equation.primitive.name != "slice" or any(step != 1 for step in params["strides"] or ()):
        return None
    starts, ends = params["start_indices"], params["limit_indices"]
    is_whole = not any(starts[1:]) and ends[1:] == equation.invars[0].aval.shape[1:]
    return (starts[0], ends[0]) if starts and is_whole else None


def _squeezed(equation: Any, given: Deferred) -> Deferred | None:
    row = given.row() if tuple(equation.params["dimensions"]) == (0,) else None
    return row and row.of(jax.tree.map(lambda x: x[0], given.arrays))


def _arrays(x: Any) -> Any:
    return x.arrays if isinstance(x, Deferred) else x


def _typed(x: Deferred) -> Deferred:
    """The same of types, since its arrays are of one trace alone."""
    return x.of(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x.arrays))


def _made_of(like: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """The arrays, of which those in the place of a ``Deferred`` make one."""
    pairs = zip(like, arrays, strict=True)
    return [x.of(own) if isinstance(x, Deferred) else own for x, own in pairs]
