"""Checks whether an update computes each leaf from its own arrays and from shared scalars.

Such an update can be divided among the shards, as if each leaf were alone: one shard updates a
leaf, or each shard a slice of it where the update is elementwise. Leaves share only scalars, such
as a global norm: these become outputs of the update, are computed where their leaf is, and go to
all shards.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from crossshard import _jax
from crossshard.jaxprs.rewrite import Writer, inlined
from crossshard.jaxprs.slices import (
    DIFFERS,
    FAILS,
    Along,
    Kind,
    Mixed,
    Slices,
    Slicing,
    same_but_for_shapes,
)
from crossshard.jaxprs.walk import control_flow, inputs_read, through

Shape = tuple[int, ...]


class NotLeafwise(Exception):
    """An update computes a leaf from arrays of others, or cannot be cut."""


class Scalar(NamedTuple):
    """A scalar that is computed from one leaf, and read by all."""

    leaf: int  # the leaf
    level: int  # how many rounds of scalars come before it
    # If the leaf is cut, what reduces the values of all shards to the scalar: ``reduce_sum``,
    # ``reduce_and`` or ``reduce_or``. Otherwise empty.
    reduced: str = ""


@dataclasses.dataclass(frozen=True)
class Leafwise:
    """An update that can be run leaf by leaf."""

    # From ``(params, state, gradients, *extra, *scalars, *masks)`` to ``(updates, state,
    # *scalars)``, on slices of those leaves that are cut.
    jaxpr: Any
    # For each array of the state, the leaf that it belongs to; ``None`` if there is none.
    of_state: tuple[int | None, ...]
    scalars: tuple[Scalar, ...]  # the scalars that leaves have in common
    # The leaf of each mask, bool[…], which is true where a slice has elements, not padding.
    masks: tuple[int, ...]
    whole: Mapping[int, str]  # the leaves that are not cut, and why
    # The leaves that are cut along their first axis; all others are elementwise.
    stacked: frozenset[int]


def find_leafwise(
    update: Callable[..., tuple[Any, Any]],
    params: Any,
    state: Any,
    extra: Sequence[Any],
    slices: Mapping[int, Shape],
    stacks: Mapping[int, Shape],
    padded: Collection[int] = (),
    stay: Mapping[int, str] | None = None,
) -> Leafwise:
    """Find how an update can run leaf by leaf.

    Args:
      update: from ``(params, state, gradients, *extra)`` to ``(updates, state)``.
      params: its parameters, a pytree with shapes and dtypes.
      state: its state.
      extra: further arguments, which belong to no leaf.
      slices: the shape of one shard's slice of each leaf that may be split; every shard updates
        the other leaves.
      stacks: for some of these leaves, the shape of a slice along the first axis.
      padded: the leaves whose slices end with padding on some shards.
      stay: the leaves that are not cut, whatever the update does, and why.

    Raises:
      NotLeafwise: the update cannot run leaf by leaf.
    """
    return _Finder(update, params, state, extra, slices, stacks, padded).find(stay or {})


class _Value(NamedTuple):
    """What is known of a value."""

    # The leaf from which it is computed; ``None`` if every shard has the value, and ``_OF_ALL`` if
    # it is computed from leaves that every shard updates.
    leaf: int | None
    kind: Kind  # how it relates to the value on full arrays
    level: int = 0  # how many rounds of scalars come before it
    fixed: int | None = None  # the array of the state that it is, if that is never updated


_SHARED = _Value(None, Slicing.SAME)
_OF_ALL = -1


class _Finder:
    """Finds how an update runs leaf by leaf, dropping each assumption that turns out wrong."""

    def __init__(
        self,
        update: Callable[..., tuple[Any, Any]],
        params: Any,
        state: Any,
        extra: Sequence[Any],
        slices: Mapping[int, Shape],
        stacks: Mapping[int, Shape],
        padded: Collection[int],
    ):
        self._update, self._extra = update, tuple(extra)
        self._params, self._params_tree = jax.tree.flatten(params)
        self._state, self._state_tree = jax.tree.flatten(state)
        self._slices, self._stacks, self._padded = slices, stacks, padded
        # Shared by all walks, since most equations are the same in each.
        self.analysis, self._read_by = Slices(of_leaves=True), dict[int, Any]()
        self.analysis.memory = {}
        self._whole: dict[int, str] = {}
        self._stacked: set[int] = set()
        self._of_state: list[int | None] = [None] * len(self._state)
        # The walks on full arrays that corrected nothing, by their assumptions.
        self._known: dict[Any, _Walk] = {}
        self._jaxpr = self._trace(lambda leaf, x: x.shape)
        effects = [str(each) for each in self._jaxpr.effects]
        if effects:
            raise NotLeafwise(f"it has effects: {', '.join(effects)}")
        first, number = len(self._params), len(self._state)
        unchanged = zip(
            self._jaxpr.jaxpr.invars[first:], self._jaxpr.jaxpr.outvars[first:], strict=False
        )
        self._fixed = [before is after for before, after in list(unchanged)[:number]]

    def find(self, stay: Mapping[int, str]) -> Leafwise:
        """Correct the assumptions until all of them hold, and return what follows."""
        self._whole = dict.fromkeys(self._slices, "")
        # First, with all leaves whole: which leaf each array of the state belongs to.
        self._settle()
        self._whole = dict(stay)
        self._check_state_is_cut()
        self._settle()
        # Then on slices. A leaf whose update is not elementwise may be a stack.
        self._stacked = {leaf for leaf in self._whole if leaf in self._stacks}
        refused = {leaf: self._whole.pop(leaf) for leaf in self._stacked}
        while True:
            self._check_state_is_cut()
            walk = self._on_slices()
            for leaf in self._stacked.intersection(self._whole):
                self._whole[leaf] = f"{refused[leaf]}; nor between layers: {self._whole[leaf]}"
            self._stacked.difference_update(self._whole)
            if walk is not None:
                return Leafwise(
                    walk.jaxpr(),
                    tuple(self._of_state),
                    tuple(walk.scalars),
                    tuple(leaf for leaf, _ in walk.masks),
                    dict(self._whole),
                    frozenset(self._stacked),
                )

    def _settle(self) -> None:
        """Correct the assumptions until they hold for full arrays."""
        while self._walk(self._jaxpr) is None:
            pass

    def _on_slices(self) -> "_Walk | None":
        """Return the walk on slices; ``None`` if an assumption had to be corrected."""
        if not any(map(self.is_cut, self._slices)):
            return self._walk(self._jaxpr)
        try:
            part = self._trace(self._shape)
        except Exception as error:  # an optimizer may raise anything on slices
            why = str(Mixed(FAILS, _jax.source_of_error(error)))
            if not self._stacked:
                raise NotLeafwise(why) from error
            self._whole |= dict.fromkeys(self._stacked, why)
            return None
        return self._walk(part)

    def _walk(self, part: Any) -> "_Walk | None":
        """Return the walk over the update on full arrays and on ``part``.

        ``None`` if it corrected an assumption. If it learns which leaf an array of the state
        belongs to, its other findings do not count.
        """
        before = list(self._of_state)
        key = frozenset(self._whole), frozenset(self._stacked), tuple(before), id(part)
        if key in self._known:
            return self._known[key]
        walk = _Walk(self, self._jaxpr, part)
        walk.run()
        if before != self._of_state:
            return None
        if walk.failed:
            raise NotLeafwise(walk.failed)
        self._whole |= walk.refused
        if walk.refused:
            return None
        if part is self._jaxpr:
            self._known[key] = walk
        return walk

    def _check_state_is_cut(self) -> None:
        """Keep leaves whole whose state cannot be split as they are."""
        for x, leaf in zip(self._state, self._of_state, strict=True):
            if leaf is None or leaf in self._whole:
                continue
            own = self._params[leaf].shape
            fits = x.shape[:1] == own[:1] if leaf in self._stacked else x.shape == own
            if not fits:
                self._whole[leaf] = "its state has an array of another shape"
                self._stacked.discard(leaf)

    def is_cut(self, leaf: int) -> bool:
        """Return whether each shard has a slice of a leaf."""
        return leaf in self._slices and leaf not in self._whole

    def kind(self, leaf: int) -> Kind:
        """Return how a shard's array of a leaf relates to the full one."""
        if not self.is_cut(leaf):
            return Slicing.SAME
        return Along(0) if leaf in self._stacked else Slicing.SLICE

    def is_padded(self, leaf: int) -> bool:
        """Return whether a slice of a leaf may end with padding."""
        return leaf in self._padded and leaf not in self._stacked

    def _shape(self, leaf: int, x: Any) -> Shape:
        if not self.is_cut(leaf):
            return tuple(x.shape)
        if leaf in self._stacked:
            return (self._stacks[leaf][0], *x.shape[1:])
        return self._slices[leaf]

    def _trace(self, shape: Callable[[int, Any], Shape]) -> Any:
        """Trace the update on arrays whose shapes depend on their leaf."""

        def typed(leaf: int | None, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape if leaf is None else shape(leaf, x), x.dtype)

        params = self._params_tree.unflatten([typed(i, x) for i, x in enumerate(self._params)])
        of_state = zip(self._of_state, self._state, strict=True)
        state = self._state_tree.unflatten([typed(leaf, x) for leaf, x in of_state])
        return inlined(jax.make_jaxpr(self._update)(params, state, params, *self._extra))

    def inputs_read(self, equation: Any) -> list[list[int]]:
        """Return, for each output of an equation, the places of the inputs that it reads."""
        if id(equation) not in self._read_by:
            self._read_by[id(equation)] = inputs_read(equation)
        return self._read_by[id(equation)]

    def inputs(self) -> list[_Value]:
        """Return what is known of the update's inputs."""
        of_params = [self._input(leaf, x) for leaf, x in enumerate(self._params)]
        of_state = [
            _Value(None, Slicing.SAME, fixed=place if self._fixed[place] and x.size > 1 else None)
            if leaf is None
            else self._input(leaf, x)
            for place, (leaf, x) in enumerate(zip(self._of_state, self._state, strict=True))
        ]
        others = [_SHARED] * len(jax.tree.leaves(self._extra))
        return [*of_params, *of_state, *of_params, *others]

    def _input(self, leaf: int, x: Any) -> _Value:
        return _Value(leaf if leaf in self._slices else _OF_ALL, self.kind(leaf))

    def assign(self, place: int, leaf: int) -> None:
        """Assign an array of the state that is never updated to the leaf that it is used with."""
        if self._state[place].shape == self._params[leaf].shape:
            self._of_state[place] = leaf

    def of_output(self, place: int) -> int | None:
        """Return the leaf to which a new array belongs; ``None`` if every shard has it."""
        number = len(self._params)
        leaf = place if place < number else self._of_state[place - number]
        return leaf if leaf in self._slices else None

    def check_output(self, place: int, value: _Value, walk: "_Walk") -> None:
        """Check that a new array is computed from its own leaf, and split like it."""
        own, in_state = self.of_output(place), place >= len(self._params)
        of_leaf = value.leaf not in (None, _OF_ALL, own)
        if of_leaf and own is None and in_state:
            self._of_state[place - len(self._params)] = value.leaf
        elif of_leaf:
            walk.fail(_SEVERAL)
        elif isinstance(value.kind, Mixed):
            walk.fail(str(value.kind))
        elif not walk.is_alike(value.kind, own):
            walk.refuse(own, "a new array of it is split differently from the old one")


_SEVERAL = "a leaf is computed from the arrays of another one"


class _Walk:
    """One pass over the equations of the update, on full arrays and on slices."""

    def __init__(self, finder: _Finder, whole: Any, part: Any):
        self._finder, self._whole, self._part = finder, whole, part
        self._analysis = finder.analysis
        self._known: dict[tuple[Any, Any], _Value] = {}
        # Inputs that stand for scalars, by the scalar's variable; and those among them that all
        # equations read in place of the variable.
        self._given: dict[Any, Any] = {}
        self._sums: dict[Any, Any] = {}
        self._equations: list[Any] = []
        self._outputs: list[Any] = []
        self.scalars: list[Scalar] = []  # what leaves have in common
        # The inputs that mask padding, by their leaf and shape.
        self.masks: dict[tuple[int, Shape], Any] = {}
        self.refused: dict[int, str] = {}  # the leaves that cannot be cut as assumed, and why
        self.failed = ""  # why the update does not run leaf by leaf

    def run(self) -> None:
        """Follow every equation, and check the outputs."""
        whole, part = self._whole.jaxpr, self._part.jaxpr
        for constants in zip(
            zip(whole.constvars, part.constvars, strict=False),
            zip(self._whole.consts, self._part.consts, strict=False),
            strict=True,
        ):
            self._known[constants[0]] = _Value(None, self._analysis.constant(constants[1]))
        pairs = zip(whole.invars, part.invars, strict=True)
        self._known |= dict(zip(pairs, self._finder.inputs(), strict=True))
        for equations in zip(whole.eqns, part.eqns, strict=False):
            if not self._follow(*equations):
                return
        if len(whole.eqns) != len(part.eqns):
            self.fail(DIFFERS)
            return
        for place, pair in enumerate(zip(whole.outvars, part.outvars, strict=True)):
            value, out = self._read(pair, None), self._read_from(pair[1])
            shared = self._finder.of_output(place) is None and pair[0].aval.size == 1
            if shared and value.leaf not in (None, _OF_ALL):
                out, value = self._give_out(out, value), _SHARED
            self._outputs.append(out)
            self._finder.check_output(place, value, self)

    def is_alike(self, kind: Kind, leaf: int | None) -> bool:
        """Return whether a value is split as its leaf is."""
        return kind is Slicing.UNIFORM or leaf is None or kind == self._finder.kind(leaf)

    def refuse(self, leaf: int | None, why: str) -> None:
        """Record that a leaf cannot be cut as assumed."""
        if leaf is None or not self._finder.is_cut(leaf):
            self.fail(why)
        else:
            self.refused.setdefault(leaf, why)

    def fail(self, why: str) -> None:
        """Record that the update does not run leaf by leaf."""
        self.failed = self.failed or why

    def jaxpr(self) -> Any:
        """Return the update on slices, with the scalars as inputs and outputs."""
        part = self._part
        inputs = [*part.jaxpr.invars, *self._given.values(), *self.masks.values()]
        constants = dict(zip(part.jaxpr.constvars, part.consts, strict=True))
        outputs = [*self._outputs, *self._given]
        return _jax.with_equations(part, constants, inputs, outputs, self._equations)

    def _read_from(self, atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else self._sums.get(atom, atom)

    def _read(self, pair: tuple[Any, Any], equation: Any) -> _Value:
        literals = [atom for atom in pair if isinstance(atom, Literal)]
        if len(literals) == 2:
            values = [atom.val for atom in pair]
            return _Value(None, self._analysis.literal(values, equation))
        if literals or pair not in self._known:
            return _Value(None, Mixed(DIFFERS, _jax.source_of(equation) if equation else ""))
        return self._known[pair]

    def _follow(self, whole: Any, part: Any) -> bool:
        """Follow two equations that should correspond; return whether they do."""
        pairs = list(zip(whole.invars, part.invars, strict=False))
        values = [self._read(pair, whole) for pair in pairs]
        if whole.primitive is not part.primitive or len(whole.invars) != len(part.invars):
            leaf = next((each.leaf for each in values if each.leaf is not None), None)
            self.refuse(leaf, str(Mixed(DIFFERS, _jax.source_of(whole))))
            return False
        if self._reduces_slices(whole, part, values):
            return True
        reads = self._finder.inputs_read(whole)
        inputs, leaves = list(map(self._read_from, part.invars)), []
        for read in reads:
            leaf, others = self._leaf_of(whole, {place: values[place] for place in read})
            leaves.append(leaf)
            for place in others:
                inputs[place] = self._give_out(pairs[place][1], values[place])
                values[place] = _Value(None, Slicing.SAME, values[place].level + 1)
        kinds = self._kinds(whole, part, [each.kind for each in values])
        found = zip(whole.outvars, part.outvars, kinds, leaves, reads, strict=True)
        for one, other, kind, leaf, read in found:
            if isinstance(kind, Mixed) and leaf is not None and self._finder.is_cut(leaf):
                self.refused.setdefault(leaf, str(kind))
                kind = Slicing.SAME  # as on the whole leaf
            level = max((values[place].level for place in read), default=0)
            self._known[one, other] = _Value(leaf, kind, level)
        self._equations.append(part.replace(invars=inputs))
        return True

    def _kinds(self, whole: Any, part: Any, kinds: Sequence[Kind]) -> Sequence[Kind]:
        alike = {Slicing.SAME, Slicing.UNIFORM}
        if control_flow(whole) is not None and alike.issuperset(kinds):
            shapes = [
                [atom.aval.shape for atom in (*each.invars, *each.outvars)]
                for each in (whole, part)
            ]
            if shapes[0] == shapes[1]:
                # ``UNIFORM`` is also the same on all shards here, since all shapes are equal; and
                # stacked rows of one number each need not be uniform.
                kinds = [Slicing.SAME] * len(kinds)
        return through(self._analysis, (whole, part), kinds)

    def _leaf_of(
        self, equation: Any, read: Mapping[int, _Value]
    ) -> tuple[int | None, Sequence[int]]:
        """Return the leaf of what is computed from these inputs, and which inputs are given out."""
        of_all = [place for place, value in read.items() if value.leaf == _OF_ALL]
        leaves = {value.leaf for value in read.values()} - {None, _OF_ALL}
        is_array = lambda place: equation.invars[place].aval.size > 1
        arrays = {value.leaf for place, value in read.items() if is_array(place)} & leaves
        if len(arrays) > 1:
            self.fail(self.failed or str(Mixed(_SEVERAL, _jax.source_of(equation))))
            arrays = set(list(arrays)[:1])
        shared = max((each.level for each in read.values() if each.leaf is None), default=0)
        # Whether it joins scalars that other leaves have given out already, as a term of a sum.
        joins = all(each.level < shared for each in read.values() if each.leaf in leaves)
        if not leaves:
            own = _OF_ALL if of_all else None
        elif arrays or (len(leaves) == 1 and not joins and not any(map(is_array, of_all))):
            own = next(iter(arrays or leaves))
        else:
            own = _OF_ALL if any(map(is_array, of_all)) else None
        for value in read.values():
            if own is not None and own in leaves and value.fixed is not None:
                self._finder.assign(value.fixed, own)
        return own, [place for place in read if read[place].leaf in leaves - {own}]

    def _reduces_slices(self, whole: Any, part: Any, values: Sequence[_Value]) -> bool:
        """Return whether an equation reduces a cut leaf to a scalar; if so, give the scalar out."""
        leaf, kind = values[0][:2] if values else (None, None)
        if leaf is None or not self._finder.is_cut(leaf) or leaf in self.refused:
            return False
        if any(each.leaf != leaf or each.kind != kind for each in values):
            return False
        if kind is not Slicing.SLICE and not isinstance(kind, Along):
            return False
        ndim, params = whole.invars[0].aval.ndim, whole.params
        match reduced := whole.primitive.name:
            case "reduce_sum" | "reduce_and" | "reduce_or":
                flags = reduced == "reduce_sum" or whole.invars[0].aval.dtype == bool
                is_complete = flags and len(params["axes"]) == ndim
            case "dot_general":
                (left, right), _ = params["dimension_numbers"]
                is_complete, reduced = len(left) == ndim and left == right, "reduce_sum"
            case _:
                is_complete = False
        if not is_complete or not same_but_for_shapes(whole, part):
            return False
        level = max(each.level for each in values)
        (one,), (other,) = whole.outvars, part.outvars
        inputs = list(map(self._read_from, part.invars))
        if self._finder.is_padded(leaf):
            inputs = [self._masked(leaf, x, reduced == "reduce_and") for x in inputs]
        self._equations.append(part.replace(invars=inputs))
        self.scalars.append(Scalar(leaf, level, reduced))
        self._given[other] = self._sums[other] = Var(other.aval)
        self._known[one, other] = _Value(None, Slicing.SAME, level + 1)
        return True

    def _masked(self, leaf: int, x: Any, fill: bool) -> Any:
        """Write zero, or true, in place of the padding of a slice."""
        types = (jax.ShapeDtypeStruct(x.aval.shape, t) for t in (bool, x.aval.dtype))
        select = jax.make_jaxpr(lambda mask, x: jnp.where(mask, x, jnp.full_like(x, fill)))(*types)
        mask = self.masks.setdefault((leaf, x.aval.shape), select.jaxpr.invars[0])
        writer = Writer()
        (found,) = writer.write(select, [mask, x])
        self._equations += writer.equations
        return found

    def _give_out(self, variable: Any, value: _Value) -> Any:
        """Return the input that stands for a scalar of a leaf."""
        if variable not in self._given:
            assert value.leaf is not None
            self._given[variable] = Var(variable.aval)
            self.scalars.append(Scalar(value.leaf, value.level))
        return self._given[variable]
