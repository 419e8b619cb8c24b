"""A step that is traced and compiled for the mesh, with its variables as inputs and outputs.

Flax's transforms pass copies to a function, give all shards the same random streams, and need to
know before the trace which variables differ between shards. Here a step sees the very objects that
it was given, which hold tracers meanwhile, and the trace shows which variables will differ.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _flax, _jax, _mesh
from crossshard._check import is_number
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement, check_same_program, processes_of
from crossshard.distributed.watch import PROGRESS
from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.jaxprs.walk import varying_axes_of_outputs
from crossshard.nnx.per_shard import is_per_shard, number_of_shards, per_shard, stacked
from crossshard.nnx.slots import HasSlots, is_variable
from crossshard.shards.axes import shard_context
from crossshard.shards.batch_axes import spec_along
from crossshard.shards.cut import PER_SHARD, REPLICATED, Placement
from crossshard.shards.devices import are_of_all_processes, put_whole
from crossshard.shards.random_streams import own_stream

# The arguments of a step.

_thread = threading.local()
# Arrays of all processes that a step has written, or that were compared, by their ids.
_COMPARED: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


class MissingSlots(BaseException):
    """Ends the trace of a step that lacks slots; ``make`` makes them, for the next trace."""

    def __init__(self, make: Callable[[], None]):
        self.make = make


def is_stateful(value: Any) -> bool:
    """Return whether a runner binds an object to the step instead of splitting it."""
    return isinstance(value, nnx.Pytree | nnx.Variable | HasSlots)


def is_numeric(leaf: Any) -> bool:
    """Return whether a leaf is an array or number to be split; a Python bool is a setting."""
    return is_number(leaf) and not isinstance(leaf, bool)


def is_unsplit(value: Any) -> bool:
    """Return whether an argument is passed to every shard unchanged, instead of split."""
    leaves = jax.tree.leaves(value, is_leaf=is_stateful)
    stateful = [leaf for leaf in leaves if is_stateful(leaf)]
    arrays = [leaf for leaf in leaves if not is_stateful(leaf) and is_numeric(leaf)]
    if stateful and arrays:
        raise ArgumentError(
            f"One argument holds arrays and a {type(stateful[0]).__name__}; arrays are split over "
            f"the shards and a {type(stateful[0]).__name__} is not. Pass them as two arguments."
        )
    return not arrays


class Given:
    """The modules, variables and optimizers in some values, and all that are below them.

    Attributes:
      roots: the modules, variables and optimizers themselves.
      variables: every variable below them that holds arrays, in a fixed order.
      optimizers: every optimizer below them.
      modules: every NNX module below them.
      written_by_loss: variables of one model for all shards, to which a loss of the traced step
        has written.
    """

    def __init__(self, values: Any, shards: int | None = None):
        found = jax.tree.leaves(values, is_leaf=is_stateful)
        self.roots = list(filter(is_stateful, found))
        self.written_by_loss: list[AnyVariable] = []
        leaves, nodes, self._tree = _flatten(found)
        self.optimizers = [node for node in nodes if isinstance(node, HasSlots)]
        self.modules = [node for node in nodes if not isinstance(node, HasSlots)]
        # The place where each leaf is first; for a module that occurs again, its negative number.
        first = {id(node): -place for place, node in enumerate(nodes, 1)}
        self._places = tuple(first.setdefault(id(leaf), place) for place, leaf in enumerate(leaves))
        each_once = [leaf for n, leaf in enumerate(leaves) if self._places[n] == n]
        # What an aggregator holds back is shared out among any number of shards.
        held = {id(x) for optimizer in self.optimizers for x in optimizer._held_back()}
        self.variables: list[AnyVariable] = [
            x
            for x in each_once
            if _has_arrays(x, None if id(x) in held else shards, self.optimizers)
        ]
        # Other values, arrays that are attributes themselves, and variables without arrays.
        known = set(map(id, self.variables))
        self._constants = [x for x in each_once if id(x) not in known]

    def key(self, *, lasting: bool = False) -> Any:
        """Return the key of a program; if it is ``lasting``, no later write changes it."""
        places = {id(variable): place for place, variable in enumerate(self.variables)}
        # The slots of an optimizer may belong to variables of another model.
        owners = (v for optimizer in self.optimizers for v in optimizer.slots.variables.values())
        types = tuple(type_of(variable.get_raw_value()) for variable in self.variables)
        of_slots = tuple(places.get(id(owner)) for owner in owners)
        tree = self._lasting() if lasting else self._tree
        return tree, self._places, types, of_slots, tuple(map(_as_key, self._constants))

    def _lasting(self) -> Any:
        """Return the structure, with copies of attributes that are mutable, such as lists."""
        roots = self._tree.unflatten([object() for _ in self._places])
        for node in _flatten(roots)[1]:
            for name, value in {} if isinstance(node, HasSlots) else {**vars(node)}.items():
                kind = type(value)
                if kind.__hash__ is None and kind.__eq__ is not object.__eq__:
                    with contextlib.suppress(Exception):  # a user's class may raise anything
                        vars(node)[name] = copy.deepcopy(value)
        return _flatten(roots)[2]

    def has(self, given: AnyVariable | HasSlots) -> bool:
        """Return whether a variable or an optimizer was given to the step."""
        return any(given is each for each in (*self.variables, *self.optimizers))

    def check_nothing_new(self) -> None:
        """Raise if the modules have a new variable, which would be lost."""
        known = set(map(id, self.variables))
        for variable in Given(self.roots).variables:
            if id(variable) not in known:
                raise VariableError(
                    f"A step or a loss created {describe_variable(variable)} in a module that was "
                    f"passed to it. Create it before the step, or pop it where it is created."
                )

    def is_own(self, variable: AnyVariable) -> bool:
        """Return whether each shard has its own value of a variable before the traced step."""
        return id(variable) in self._own

    def still_is_own(self, variable: AnyVariable) -> bool:
        """Return whether ``is_own`` holds, and the step has not written to the variable yet."""
        return self._own.get(id(variable)) is variable.get_raw_value()

    @contextlib.contextmanager
    def bound(self, own: Iterable[AnyVariable]) -> Iterator[None]:
        """Trace a step that was given these objects; raise if it reads any other variable.

        Of the variables in ``own`` each shard has its own value before the step.
        """
        self._own = {id(variable): variable.get_raw_value() for variable in own}
        _thread.bound = self
        try:
            with _flax.watching_reads(_refuse):
                yield
        finally:
            _thread.bound = None
            # These values and gradients belong to the trace.
            self._own = {}
            for optimizer in self.optimizers:
                optimizer.forget()


def _flatten(values: list[Any]) -> tuple[list[Any], list[Any], Any]:
    """Return the leaves of some values, the modules and optimizers in them, and the structure."""
    nodes: dict[int, Any] = {}

    def is_leaf(node: Any) -> bool:
        if isinstance(node, nnx.Pytree | HasSlots):
            # An object that occurs again is shared, or contains itself.
            is_known = id(node) in nodes
            nodes[id(node)] = node
            return is_known
        return isinstance(node, nnx.Variable)

    leaves, tree = jax.tree.flatten(values, is_leaf=is_leaf)
    return leaves, list(nodes.values()), tree


class _Constant:
    """An array of JAX's as a cache key, by its values."""

    def __init__(self, array: jax.Array):
        self._array = array

    def __hash__(self) -> int:
        return hash((self._array.shape, self._array.dtype))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant) or hash(self) != hash(other):
            return False
        ours, theirs = self._array, other._array
        # An array of several processes is only compared by identity: others have parts of it.
        return ours is theirs or (ours.is_fully_addressable and bool((ours == theirs).all()))


def _as_key(value: Any) -> Any:
    """Return the cache key of a value that is a constant of the program."""
    if isinstance(value, nnx.Variable):
        value = value.get_raw_value()
    if isinstance(value, jax.Array):
        return _Constant(value)
    if isinstance(value, np.ndarray):  # NumPy arrays are mutable
        return value.shape, value.dtype, value.tobytes()
    return type(value), value


def _has_arrays(variable: Any, shards: int | None, optimizers: Sequence[HasSlots]) -> bool:
    """Return whether this is a variable with arrays; raise if it is of another number of shards."""
    if not isinstance(variable, nnx.Variable):
        return False
    value = variable.get_raw_value()
    if isinstance(value, jax.Array):
        return True
    number = number_of_shards(variable)
    if None not in (number, shards) and number != shards:
        trees = [optimizer.slots.tree for optimizer in optimizers]
        is_state = any(variable is x for x in jax.tree.leaves(trees, is_leaf=is_variable))
        whose = " of the optimizer's state" if is_state else ""
        raise VariableError(
            f"{describe_variable(variable)}{whose} differs between {number} shards, and this step "
            f"runs on {shards}. Write model, opt = crossshard.merge_shards((model, opt)), of both, "
            f"or the optimizer would start anew; or write one value for all shards with "
            f"variable.set_value(value)."
        )
    return all(map(is_numeric, jax.tree.leaves(value)))


def type_of(value: Any) -> Any:
    """Return the structure, shapes and dtypes of a variable's value."""
    if isinstance(value, jax.Array):
        return value.shape, value.dtype
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def written(before: Sequence[Any], after: Sequence[Any]) -> list[list[Any]]:
    """Return for each value a list of its new value, or an empty one if its arrays are the same."""

    def is_same(a: Any, b: Any) -> bool:
        (ours, tree), (others, other_tree) = jax.tree.flatten(a), jax.tree.flatten(b)
        return tree == other_tree and all(map(operator.is_, ours, others))

    return [[] if is_same(a, b) else [b] for a, b in zip(before, after, strict=True)]


def bound() -> Given | None:
    """Return what the traced step was given; ``None`` outside of a runner."""
    return getattr(_thread, "bound", None)


def roots_of_step() -> list[Any]:
    """Return the modules, variables and optimizers of the step; empty outside of a runner."""
    around = bound()
    return [] if around is None else around.roots


def _refuse(variable: AnyVariable) -> None:
    raise VariableError(
        f"The step reads {describe_variable(variable)}, which it was not given: the compiled step "
        f"would keep its current value. Pass its module to the step function as an argument."
    )


# The program.


@dataclasses.dataclass(frozen=True)
class Call:
    """The flattened arguments of one call: the arrays, which are on the mesh, and all others."""

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    unsplit: dict[int, Any]  # modules, optimizers and Python values, by place among all leaves
    tree: Any  # the structure of the positional and the keyword arguments
    given: Given  # what is unsplit

    def key(self, *, lasting: bool = False) -> Any:
        """Return the cache key of a call with these arguments."""
        types = tuple((leaf.shape, leaf.dtype) for leaf in self.leaves)
        return self.given.key(lasting=lasting), self.tree, tuple(self.unsplit), self.specs, types

    def arguments(self, leaves: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments, with these arrays."""
        arrays = iter(leaves)
        places = range(self.tree.num_leaves)
        args, kwargs = self.tree.unflatten(
            [self.unsplit[place] if place in self.unsplit else next(arrays) for place in places]
        )
        return args, kwargs

    def own_rows(self, number: str | int) -> str:
        """Return, as text, the types of a process's parts of the arrays that are split.

        ``number`` is how many shards it has, or a word in place of the number of rows.
        """
        words = []
        for leaf, spec in zip(self.leaves, self.specs, strict=True):
            if spec != PartitionSpec():
                shape: list[Any] = list(leaf.sharding.shard_shape(leaf.shape))
                rows = shape[len(spec) - 1]
                shape[len(spec) - 1] = number if isinstance(number, str) else rows * number
                words.append(f"{leaf.dtype}[{','.join(map(str, shape))}]")
        return ",".join(words)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the outputs of the shards are joined."""

    # Whether to join an output over all shards, or take the first shard's: one value for all
    # outputs, or one for each.
    from_all: tuple[bool, ...] = (True,)
    axes: tuple[int, ...] | None = None  # for each output; axis 0 of all if None

    def lay_out(
        self, out: Any, names: tuple[str, ...]
    ) -> list[tuple[jax.Array, PartitionSpec, bool]]:
        """Return, for each array of one shard's outputs: it, its spec, and whether it is joined."""
        several = isinstance(out, list | tuple) and not hasattr(out, "_fields")
        tops = list(out) if several else [out]
        flags = self.from_all * len(tops) if len(self.from_all) == 1 else self.from_all
        axes = (0,) * len(tops) if self.axes is None else self.axes
        for name, given in (("outputs_from_all_shards", flags), ("output_shard_axes", axes)):
            if len(given) != len(tops):
                raise ArgumentError(
                    f"{name} has {len(given)} entries for {len(tops)} outputs; pass one per output."
                )
        found = []
        for top, from_all, axis in zip(tops, flags, axes, strict=True):
            for x in jax.tree.leaves(top):
                is_stacked = not from_all or x.ndim == 0
                if not is_stacked and not -x.ndim <= axis < x.ndim:
                    raise ArgumentError(
                        f"output_shard_axes names axis {axis} of an output of shape {x.shape}."
                    )
                spec = spec_along(0 if is_stacked else axis % x.ndim, names)
                found.append((x[None] if is_stacked else x, spec, from_all))
        return found


def as_output(value: Any) -> Any:
    """Return the outputs of a computation as arrays; a variable becomes its value."""

    def one(leaf: Any) -> Any:
        leaf = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        if is_stateful(leaf) or not is_number(leaf):
            raise ArgumentTypeError(
                f"A step returned a {type(leaf).__name__}; outputs are arrays, numbers and pytrees "
                f"of them. Do not return modules and variables: the runner updates them in place."
            )
        return jnp.asarray(leaf)

    return jax.tree.map(one, value, is_leaf=is_stateful)


class Program:
    """One compiled step.

    A first trace finds slots that are missing, and the variables that are equal on all shards after
    the step (see ``varying_axes_of_outputs``). These stay replicated; all others are stored as
    ``[shards, …]``.

    Raises:
      MissingSlots: an optimizer has no slots yet for some variables.
    """

    def __init__(self, computation: Callable[..., Any], mesh: Mesh, outputs: Outputs, call: Call):
        self._computation = computation
        # The step computes with automatic axes; arrays are placed on the user's own mesh.
        self._mesh = _mesh.with_automatic_axes(mesh)
        self._names = mesh.axis_names
        self._outputs = outputs
        processes = len(processes_of(mesh))
        self._has_processes, self._is_watched = processes > 1, are_of_all_processes(mesh)
        self._of_process = mesh.size // processes
        self._is_compared = False
        # The call that it is traced for, only while it runs, since it keeps the model alive.
        self._call: Call | None = None
        variables = call.given.variables
        self._entering = [PER_SHARD if is_per_shard(v) else REPLICATED for v in variables]
        self._shardings = [NamedSharding(mesh, x.spec(self._names)) for x in self._entering]
        differs = self._differing(call)
        self._leaving = [PER_SHARD if own else REPLICATED for own in differs]
        # The places of the variables that have to be stored as ``[shards, …]`` before it can run.
        each = enumerate(zip(self._entering, differs, strict=True))
        self._to_spread = [place for place, (was, own) in each if own and not was.per_shard]
        self._compiled = jax.jit(_mesh.under_automatic_axes(self._run, mesh, self._specs))

    def spread(self, call: Call) -> list[tuple[AnyVariable, Any]]:
        """Store variables that will differ as ``[shards, …]``; return them with what they were."""
        on_each = lambda x: jnp.broadcast_to(x, (self._mesh.size, *jnp.shape(x)))
        variables = [call.given.variables[place] for place in self._to_spread]
        before = [(variable, variable.get_raw_value()) for variable in variables]
        for variable, value in before:
            variable.set_raw_value(per_shard(jax.tree.map(on_each, value)))
        return before

    def __call__(self, call: Call) -> Any:
        """Run the step on the arrays of a call, and write its variables."""
        variables, values = call.given.variables, self._placed(call)
        self._call = call
        try:
            if self._has_processes:
                self._compare(values, call)
            outputs, after = self._compiled(values, call.leaves)
        finally:
            self._call = None
        for variable, placement, new in zip(variables, self._leaving, after, strict=True):
            for value in new:
                variable.set_raw_value(per_shard(value) if placement.per_shard else value)
                if self._has_processes and isinstance(value, jax.Array):
                    _COMPARED[id(value)] = value
        return self._tree.unflatten(outputs)

    def _placed(self, call: Call) -> list[Any]:
        """Put the values of the variables on the devices."""
        lies = lambda x, where: getattr(x, "sharding", None) == where

        def one(value: Any, where: NamedSharding) -> Any:
            if isinstance(value, jax.Array) and lies(value, where):
                return value
            return jax.tree.map(lambda x: x if lies(x, where) else put_whole(x, where), value)

        values = (stacked(variable.get_raw_value()) for variable in call.given.variables)
        return list(map(one, values, self._shardings))

    def _compare(self, values: Sequence[Any], call: Call) -> None:
        """Raise unless every process has the same new variables, unsplit inputs and program.

        Arrays that a step has written, or that were compared, are not compared again.
        """
        variables = call.given.variables
        given: dict[str, Any] = {}
        new: list[tuple[AnyVariable, Any]] = []
        for place, (variable, value) in enumerate(zip(variables, values, strict=True)):
            held = stacked(variable.get_raw_value())
            if _COMPARED.get(id(held)) is held:
                continue
            is_array = isinstance(held, jax.Array)
            if is_array or any(
                getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(held)
            ):
                given[f"{describe_variable(variable)}, variable {place} of the step,"] = held
            if is_array:
                is_own = self._entering[place].per_shard
                new.append((variable, per_shard(value) if is_own else value))
        if self._is_watched:
            rows = call.own_rows("any" if self._has_counts else self._of_process)
            PROGRESS.take(rows, given)
        if not self._is_compared:
            pairs = zip(call.leaves, call.specs, strict=True)
            unsplit = [x for x, spec in pairs if spec == PartitionSpec()]
            given |= {f"whole input {place}": x for place, x in enumerate(unsplit)}
        if given:
            check_agreement(
                "step",
                lambda: {k: checksum(jax.tree.map(jnp.asarray, x)) for k, x in given.items()},
                self._mesh,
                "Every process must pass the same models, optimizers, and arrays that are not "
                "split: create them with the same seeds, and restore them in every process.",
            )
        for variable, value in new:
            variable.set_raw_value(value)
            _COMPARED[id(stacked(value))] = stacked(value)
        if not self._is_compared:
            check_same_program(self._compiled.lower(values, call.leaves), self._mesh)
            self._is_compared = True

    def _differing(self, call: Call) -> list[bool]:
        """Trace the step; return which variables it may leave different between shards."""
        stored = lambda _, after: jax.tree.map(lambda x: x[None], after)
        run = self._over_mesh(call, stored, PartitionSpec(self._names))
        on_mesh = lambda x: _mesh.on_mesh(x, self._mesh)
        given = jax.tree.map(on_mesh, (self._placed(call), call.leaves))
        with _mesh.in_place_of_the_users_mesh(self._mesh):
            traced, after = jax.make_jaxpr(run, return_shape=True)(*given)
        axes = jax.tree.structure(after).unflatten(varying_axes_of_outputs(traced))
        differs = [any(jax.tree.leaves(value)) for value in axes]
        for variable, is_own in zip(call.given.variables, differs, strict=True):
            if (
                is_own
                and self._mesh.size > 1
                and any(variable is each for each in call.given.written_by_loss)
            ):
                raise VariableError(
                    f"The loss writes values that differ between shards to "
                    f"{describe_variable(variable)}, which its optimizer trains as one model on "
                    f"all {self._mesh.size}. Write the same on all shards, such as "
                    f"crossshard.cross_replica_sum(x) / {self._mesh.size}; or write to a variable "
                    f"that is no nnx.Param, such as nnx.BatchStat."
                )
        return differs

    def _local(self, variable: AnyVariable, placement: Placement, value: Any) -> Any:
        """Return one shard's part of a variable's value; random streams become distinct."""
        several = math.prod(map(lax.axis_size, self._names)) > 1
        if isinstance(variable, nnx.RngKey) and not placement.per_shard and several:
            return own_stream(value, lax.axis_index(self._names))
        return jax.tree.map(placement.local, value)

    def _step(self, call: Call, values: Any, leaves: Any) -> tuple[list[jax.Array], list[Any]]:
        """Run one shard's step; return its outputs, and for each variable a list of what it wrote.

        It records how to join the outputs.
        """
        given = call.given
        variables = given.variables
        before = list(map(self._local, variables, self._entering, values))
        args, kwargs = call.arguments(leaves)
        with _flax.rebound(variables, before, given.modules):
            own = [v for v, x in zip(variables, self._entering, strict=True) if x.per_shard]
            with shard_context(self._mesh.size, axis_name=self._names), given.bound(own):
                outputs = as_output(self._computation(*args, **kwargs))
                # Each shard may have any number of rows if each loss is a ``Mean``.
                are_means = [is_one for x in given.optimizers for is_one in x.computed.are_means]
                self._has_counts = bool(are_means) and all(are_means)
                after = [variable.get_raw_value() for variable in variables]
            given.check_nothing_new()
        self._tree = jax.tree.structure(outputs)
        laid_out = self._outputs.lay_out(outputs, self._names)
        self._joins = [(spec, from_all) for _, spec, from_all in laid_out]
        return [x for x, _, _ in laid_out], written(before, after)

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        """Run the step on all shards; return its outputs, and what it writes to each variable."""
        assert self._call is not None

        def stored(outputs: Any, after: Any) -> Any:
            pairs = zip(self._leaving, after, strict=True)
            return outputs, [jax.tree.map(placement.stored, value) for placement, value in pairs]

        of_outputs = [spec for spec, _ in self._joins]
        of_variables = [placement.spec(self._names) for placement in self._leaving]
        run = self._over_mesh(self._call, stored, (of_outputs, of_variables))
        outputs, after = run(values, leaves)
        whole = NamedSharding(self._mesh, PartitionSpec())
        # Every process has to be able to read the first shard's output.
        readable = lambda x: lax.with_sharding_constraint(x, whole) if self._has_processes else x
        pairs = zip(outputs, self._joins, strict=True)
        return [x if from_all else readable(x[0]) for x, (_, from_all) in pairs], after

    def _specs(self, found: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        """Return the specs of what ``_run`` returns."""
        of_outputs = [spec if from_all else PartitionSpec() for spec, from_all in self._joins]
        spread = lambda own, value: jax.tree.map(lambda _: own.spec(self._names), value)
        return of_outputs, list(map(spread, self._leaving, found[1]))

    def _over_mesh(self, call: Call, stored: Callable[..., Any], out_specs: Any) -> Any:
        """Return the step mapped over the mesh; ``stored`` makes its results arrays to store."""
        variables = [placement.spec(self._names) for placement in self._entering]
        # Without JAX's types, which reject some correct steps: the jaxpr shows what differs.
        return _jax.shard_map(
            lambda values, leaves: stored(*self._step(call, values, leaves)),
            mesh=self._mesh,
            in_specs=(variables, call.specs),
            out_specs=out_specs,
        )
