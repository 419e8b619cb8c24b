"""A step traced and compiled for the mesh, with its variables as inputs and outputs.

Flax's transforms hand a function copies, fold no shard into random streams, and want to know before
the trace which variables differ between shards. Here a step sees the objects that it was given:
while it is traced they hold what its trace computes with, and the trace says which will differ.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import math
import operator
import threading
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
from crossshard.distributed.progress import PROGRESS
from crossshard.errors import ArgumentError, ArgumentTypeError, VariableError
from crossshard.gradients.nesting import watching_constants
from crossshard.jaxprs.walk import varying_axes_of_outputs
from crossshard.nnx.per_shard import is_per_shard, number_of_shards, per_shard, stacked
from crossshard.nnx.slots import HasSlots, SlotStore, is_variable
from crossshard.shards.axes import shard_context
from crossshard.shards.cut import PER_SHARD, REPLICATED, Placement
from crossshard.shards.devices import put_whole
from crossshard.shards.random_streams import own_stream

# What a step is given.


class ByValue:
    """A value as a cache key: compares by type and value, and arrays by their bytes."""

    def __init__(self, value: Any):
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = hash(type(value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or type(self.value) is not type(other.value):
            return False
        ours, theirs = self.value, other.value
        if isinstance(ours, jax.Array | np.ndarray):
            return ours is theirs or _bytes_of(ours) == _bytes_of(theirs)
        with contextlib.suppress(ValueError):  # of a list of arrays
            return bool(ours == theirs)
        return ours is theirs


def _bytes_of(array: Any) -> Any:
    if not getattr(array, "is_fully_addressable", True):
        return object()  # other processes have the rest
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return array.shape, array.dtype, np.asarray(array).tobytes()


def kept(key: Any) -> Any:
    """A copy of a key that stays the same when a mutable value in it changes."""
    if isinstance(key, tuple):
        return tuple(map(kept, key))
    kind = type(getattr(key, "value", None))
    # What has a hash is not written to, and a copy of what compares by identity is another.
    by_value = kind.__hash__ is None and kind.__eq__ is not object.__eq__
    if isinstance(key, ByValue) and by_value and not isinstance(key.value, jax.Array):
        with contextlib.suppress(Exception):  # a user's class may raise anything
            return ByValue(copy.deepcopy(key.value))
    return key


def is_stateful(value: Any) -> bool:
    """Whether a runner binds this object to the step rather than splitting it over the shards."""
    return isinstance(value, nnx.Pytree | nnx.Variable | HasSlots)


def is_whole(value: Any) -> bool:
    """Whether an argument is passed to every shard unchanged, rather than split."""
    leaves = jax.tree.leaves(value, is_leaf=is_stateful)
    stateful = [leaf for leaf in leaves if is_stateful(leaf)]
    arrays = [leaf for leaf in leaves if not is_stateful(leaf) and is_numeric(leaf)]
    if stateful and arrays:
        raise ArgumentError(
            f"One argument holds arrays and a {type(stateful[0]).__name__}; arrays are split over "
            f"the shards and a {type(stateful[0]).__name__} is not. Pass them as two arguments."
        )
    return not arrays


def is_numeric(leaf: Any) -> bool:
    """Whether a leaf is split over the shards: a Python bool is a setting."""
    return is_number(leaf) and not isinstance(leaf, bool)


_thread = threading.local()


class Reached:
    """What is below the modules, variables and optimizers in some values.

    Attributes:
      roots: these themselves, each once.
      variables: every variable below them, in a fixed order.
      held: those of them that have arrays.
      optimizers: every optimizer below them.
      lacking: optimizers whose slots the step lacks, with their stores, and functions that make
        the slots, to be called after its trace.
    """

    def __init__(self, values: Iterable[Any], shards: int | None = None):
        given = (leaf for value in values for leaf in jax.tree.leaves(value, is_leaf=is_stateful))
        self.roots = list({id(leaf): leaf for leaf in given if is_stateful(leaf)}.values())
        optimizers = {id(root): root for root in self.roots if isinstance(root, HasSlots)}
        self._nodes = [root for root in self.roots if id(root) not in optimizers]
        # Without optimizers, whose slots JAX walks in a fraction of the time.
        self._graph, of_nodes = _flax.flatten(self._nodes)
        if _flax.has_pytree_of(HasSlots, self._graph):
            nodes = (node for _, node in nnx.iter_graph(self._nodes))
            optimizers |= {id(node): node for node in nodes if isinstance(node, HasSlots)}
        self.optimizers: list[HasSlots] = list(optimizers.values())
        self._states = [jax.tree.flatten(each, is_leaf=is_variable) for each in self.optimizers]
        of_optimizers, below = iter(self._states), iter(of_nodes)
        leaves = [
            leaf
            for root in self.roots
            for leaf in (next(of_optimizers)[0] if isinstance(root, HasSlots) else next(below))
        ]
        found = {id(leaf): leaf for leaf in leaves if is_variable(leaf)}
        self.variables: list[AnyVariable] = list(found.values())
        # Arrays that are attributes themselves, and no variable's value.
        self._constants = [leaf for leaf in leaves if id(leaf) not in found]
        self.held = [variable for variable in self.variables if _has_arrays(variable, shards)]
        self.lacking: list[tuple[HasSlots, SlotStore, Callable[[], None]]] = []

    @property
    def modules(self) -> list[nnx.Pytree]:
        """Every NNX module below the roots."""
        nodes = (node for _, node in nnx.iter_graph(self._nodes))
        return list({id(node): node for node in nodes if isinstance(node, nnx.Pytree)}.values())

    def key(self) -> Any:
        """The structure of all that is reached, as a cache key."""
        places = {id(variable): place for place, variable in enumerate(self.variables)}
        # An optimizer's slots belong to certain variables, perhaps those of another model.
        of_optimizers = tuple(
            (tree, *(places.get(id(v)) for v in (*slots, *optimizer.slots.variables.values())))
            for optimizer, (slots, tree) in zip(self.optimizers, self._states, strict=True)
        )
        types = tuple(_type_of(variable.get_raw_value()) for variable in self.variables)
        constants = tuple(map(ByValue, self._constants))
        return _flax.hashable(self._graph, ByValue), types, of_optimizers, constants

    # While a step that was given these is traced.

    def has(self, given: AnyVariable | HasSlots) -> bool:
        """Whether a variable or an optimizer was given to the step."""
        return any(given is each for each in (*self.held, *self.optimizers))

    def lacks(self, optimizer: HasSlots, make: Callable[[], None]) -> None:
        """Note how to make slots, and give the optimizer a store of its own for this trace."""
        self.lacking.append((optimizer, optimizer.slots, make))
        optimizer.slots = SlotStore(optimizer.slots.variables, optimizer.slots.tree)

    @contextlib.contextmanager
    def bound(self) -> Iterator[None]:
        """Trace a step that was given these; what it reads besides is refused."""
        _thread.bound = self
        try:
            with watching_constants(_refuse):
                yield
        finally:
            _thread.bound = None
            # What belongs to the trace ends with it.
            for optimizer in self.optimizers:
                optimizer.computed.clear()
            for optimizer, slots, _ in reversed(self.lacking):
                optimizer.slots = slots


def _has_arrays(variable: AnyVariable, shards: int | None) -> bool:
    """Whether a variable has arrays, which are not those of another number of shards."""
    value = variable.get_raw_value()
    if isinstance(value, jax.Array):
        return True
    number = number_of_shards(variable)
    if None not in (number, shards) and number != shards:
        raise VariableError(
            f"{describe_variable(variable)} differs between {number} shards, and this step runs on "
            f"{shards}. Use crossshard.merge_shards(model), or write one value for all shards with "
            f"crossshard.nnx.set_shared(variable, value)."
        )
    return all(map(is_numeric, jax.tree.leaves(value)))


def _type_of(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value.shape, value.dtype
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values consist of identical array objects."""
    return a is b or (
        jax.tree.structure(a) == jax.tree.structure(b)
        and all(map(operator.is_, jax.tree.leaves(a), jax.tree.leaves(b)))
    )


def bound() -> Reached | None:
    """What the step that is traced was given; ``None`` outside of a runner."""
    return getattr(_thread, "bound", None)


def roots_of_step() -> list[Any]:
    """The modules, variables and optimizers that the step was given; none outside of a runner."""
    around = bound()
    return [] if around is None else around.roots


def _refuse(variable: AnyVariable) -> None:
    raise VariableError(
        f"The step reads {describe_variable(variable)}, which it was not given: the compiled step "
        f"would keep its current value. Pass its module to the step function as an argument."
    )


def check_writable(variable: AnyVariable) -> None:
    """Raise unless the variable can be written in the current trace."""
    if _flax.is_writable(variable):
        return
    around = bound()
    if around is not None and around.has(variable):
        raise VariableError(
            f"{describe_variable(variable)} belongs to the step, and would be written inside of "
            f"jax.lax.cond or the like. Use nnx.cond, nnx.scan or nnx.jit, and pass the module and "
            f"the optimizer as arguments."
        )
    raise VariableError(
        f"The step writes {describe_variable(variable)}, which it was not given. Pass its module "
        f"to the step function as an argument, and run the step with crossshard.shard."
    )


# The program.


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The flattened arguments of one call: the arrays, which are on the mesh, and all others."""

    leaves: tuple[jax.Array, ...]
    specs: tuple[PartitionSpec, ...]
    # By its place among all leaves: a module, an optimizer, a Python value.
    whole: dict[int, Any]
    # The structure of the positional and the keyword arguments.
    tree: Any
    reached: Reached

    def own_rows(self) -> str:
        """The types of what this process has of the arrays that are split, for the others."""
        words = []
        for leaf, spec in zip(self.leaves, self.specs, strict=True):
            if spec != PartitionSpec():
                shape, axis = list(leaf.sharding.shard_shape(leaf.shape)), len(spec) - 1
                shape[axis] *= len(leaf.addressable_shards)
                words.append(f"{leaf.dtype}[{','.join(map(str, shape))}]")
        return ",".join(words)

    def key(self) -> Any:
        """The cache key of a call with these arguments."""
        first: dict[int, int] = {}
        whole = tuple(
            # Of a module, which of the modules it is: one may be given twice.
            (place, first.setdefault(id(x), place) if is_stateful(x) else ByValue(x))
            for place, x in self.whole.items()
        )
        types = tuple((leaf.shape, leaf.dtype) for leaf in self.leaves)
        return self.reached.key(), self.tree, whole, self.specs, types

    def rebuild(self, leaves: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments, with these arrays."""
        arrays = iter(leaves)
        places = range(self.tree.num_leaves)
        args, kwargs = self.tree.unflatten(
            [self.whole[place] if place in self.whole else next(arrays) for place in places]
        )
        return args, kwargs

    def again(self, shards: int) -> Arguments:
        """The same arguments, after slots have been made."""
        return dataclasses.replace(self, reached=Reached(self.reached.roots, shards))


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How the outputs of the shards are joined."""

    # For each output whether to join all shards' or take the first's; one value for all.
    from_all: tuple[bool, ...] = (True,)
    axes: tuple[int, ...] | None = None  # for each output; axis 0 of all if None

    def lay_out(
        self, out: Any, names: tuple[str, ...]
    ) -> list[tuple[jax.Array, PartitionSpec, bool]]:
        """The arrays of one shard's outputs, the specs of the joined ones, and which are joined."""
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
                if not from_all or x.ndim == 0:
                    found.append((x[None], PartitionSpec(names), from_all))
                elif -x.ndim <= axis < x.ndim:
                    spec = PartitionSpec(*[None] * (axis % x.ndim), names)
                    found.append((x, spec, from_all))
                else:
                    raise ArgumentError(
                        f"output_shard_axes names axis {axis} of an output of shape {x.shape}."
                    )
        return found


def as_output(value: Any) -> Any:
    """A computation's outputs as arrays; a variable becomes its value."""

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

    It is traced first to find the slots that are missing, and the variables that are equal on all
    shards after the step (see ``varying_axes_of_outputs``): these are replicated, the others stored
    as ``[shards, …]``.
    """

    def __init__(
        self,
        computation: Callable[..., Any],
        mesh: Mesh,
        outputs: Outputs,
        arguments: Arguments,
    ):
        for variable in arguments.reached.variables:
            if variable.hijax or variable.ref:
                raise VariableError(
                    f"{describe_variable(variable)} is of NNX's experimental "
                    f"{'hijax' if variable.hijax else 'ref'} kind; use an ordinary variable."
                )
        self._computation = computation
        # It computes with automatic axes, and arrays lie on the mesh as the user made it.
        self._mesh = _mesh.with_automatic_axes(mesh)
        self._names = mesh.axis_names
        self._outputs = outputs
        self._has_processes = len(processes_of(mesh)) > 1
        self._is_compared = False
        # What it is traced for; set while it runs, and dropped after, since it holds the model.
        self._call: Arguments | None = None
        self._settle(arguments)
        self._shardings = [NamedSharding(mesh, x.spec(self._names)) for x in self._entering]
        self._compiled = jax.jit(_mesh.under_automatic_axes(self._run, mesh, self._specs))

    def spread(self, variables: Sequence[AnyVariable]) -> bool:
        """Store those that will differ as ``[shards, …]``; returns whether there were any."""
        pairs = zip(variables, self._entering, strict=True)
        new = [v for v, placement in pairs if placement.per_shard and not is_per_shard(v)]
        on_each = lambda x: jnp.broadcast_to(x, (self._mesh.size, *jnp.shape(x)))
        for variable in new:
            variable.set_raw_value(per_shard(jax.tree.map(on_each, variable.get_raw_value())))
        return bool(new)

    def __call__(self, arguments: Arguments) -> Any:
        """Run the step on these arrays and write its variables."""
        variables = arguments.reached.held
        pairs = zip(variables, self._shardings, strict=True)
        values = [_placed(stacked(held.get_raw_value()), sharding) for held, sharding in pairs]
        self._call = arguments
        try:
            if self._has_processes:
                PROGRESS.take(arguments.own_rows())
                self._compare(values, arguments)
            outputs, after = self._compiled(values, arguments.leaves)
        finally:
            self._call = None
        written = itertools.compress(variables, self._changed)
        for variable, placement, value in zip(written, self._leaving, after, strict=True):
            variable.set_raw_value(per_shard(value) if placement.per_shard else value)
        return self._tree.unflatten(outputs)

    def _compare(self, values: Sequence[Any], arguments: Arguments) -> None:
        """Raise unless every process brings the same new variables, whole inputs and program.

        What is on the mesh already comes from a step, and is not compared again.
        """
        variables = arguments.reached.held
        is_local = lambda x: getattr(x, "is_fully_addressable", True)
        new = {
            place: held
            for place, variable in enumerate(variables)
            if any(map(is_local, jax.tree.leaves(held := stacked(variable.get_raw_value()))))
        }
        given = {
            f"{describe_variable(variables[place])}, variable {place} of the step,": held
            for place, held in new.items()
        }
        if not self._is_compared:
            pairs = zip(arguments.leaves, arguments.specs, strict=True)
            whole = [x for x, spec in pairs if spec == PartitionSpec()]
            given |= {f"whole input {place}": x for place, x in enumerate(whole)}
        if given:
            as_arrays = lambda held: jax.tree.map(jnp.asarray, held)
            check_agreement(
                "step",
                lambda: {name: checksum(as_arrays(held)) for name, held in given.items()},
                self._mesh,
                "Every process must pass the same models, optimizers, and arrays that are not "
                "split: create them with the same seeds, and restore them in every process.",
            )
        for place, held in new.items():
            if isinstance(held, jax.Array):
                value = values[place]
                is_own = self._entering[place].per_shard
                variables[place].set_raw_value(per_shard(value) if is_own else value)
        if not self._is_compared:
            check_same_program(self._compiled.lower(values, arguments.leaves), self._mesh)
            self._is_compared = True

    def _settle(self, arguments: Arguments) -> None:
        """Trace until no slots are missing, and all that differs after the step is per shard."""
        reached = arguments.reached
        self._entering = [PER_SHARD if is_per_shard(v) else REPLICATED for v in reached.held]
        while True:
            differs = self._trace(arguments)
            if reached.lacking:
                for *_, make in reached.lacking:
                    make()
                return self._settle(arguments.again(self._mesh.size))
            of_each = zip(self._entering, self._changed, differs, strict=True)
            settled = [PER_SHARD if new and own else before for before, new, own in of_each]
            if settled == self._entering:
                of_changed = itertools.compress(differs, self._changed)
                self._leaving = [PER_SHARD if own else REPLICATED for own in of_changed]
                return None
            self._entering = settled

    def _trace(self, arguments: Arguments) -> list[bool]:
        """Trace the step; returns which variables may differ after it."""

        def of_one_shard(values: Any, leaves: Any) -> Any:
            _, after = self._step(arguments, values, leaves)
            return jax.tree.map(lambda x: x[None], after)

        def types(variable: AnyVariable, placement: Placement) -> Any:
            lead = (self._mesh.size,) if placement.per_shard and not is_per_shard(variable) else ()
            of = lambda x: jax.ShapeDtypeStruct((*lead, *jnp.shape(x)), jnp.asarray(x).dtype)
            return jax.tree.map(of, stacked(variable.get_raw_value()))

        run = self._over_mesh(arguments, of_one_shard, PartitionSpec(self._names))
        leaves = tuple(_mesh.on_mesh(leaf, self._mesh) for leaf in arguments.leaves)
        abstract = list(map(types, arguments.reached.held, self._entering))
        with _mesh.in_place_of_the_users_mesh(self._mesh):
            traced, after = jax.make_jaxpr(run, return_shape=True)(abstract, leaves)
        axes = jax.tree.structure(after).unflatten(varying_axes_of_outputs(traced))
        return [any(jax.tree.leaves(value)) for value in axes]

    def _local(self, variable: AnyVariable, placement: Placement, value: Any) -> Any:
        """One shard's part of the input value; random streams become distinct."""
        several = math.prod(map(lax.axis_size, self._names)) > 1
        if isinstance(variable, nnx.RngKey) and not placement.per_shard and several:
            return own_stream(value, lax.axis_index(self._names))
        return jax.tree.map(placement.local, value)

    def _step(
        self, arguments: Arguments, values: Any, leaves: Any
    ) -> tuple[list[jax.Array], list[Any]]:
        """One shard's step; returns its outputs and its variables after it, and notes the rest."""
        reached = arguments.reached
        variables, modules = reached.held, reached.modules
        before = list(map(self._local, variables, self._entering, values))
        args, kwargs = arguments.rebuild(leaves)
        with _kept_attributes(modules), _flax.rebound(variables, before, modules):
            with shard_context(self._mesh.size, axis_name=self._names), reached.bound():
                outputs = as_output(self._computation(*args, **kwargs))
                after = [variable.get_raw_value() for variable in variables]
            known = set(map(id, variables))
            for variable in Reached(reached.roots).held:
                if id(variable) not in known:
                    raise VariableError(
                        f"The step created {describe_variable(variable)} in a module that was "
                        f"passed to it. Create it before the step, or pop it in the step."
                    )
        out = self._outputs.lay_out(outputs, self._names)
        self._changed = [not same_arrays(a, b) for a, b in zip(after, before, strict=True)]
        self._specs_of_outputs = [spec for _, spec, _ in out]
        self._from_all = [from_all for _, _, from_all in out]
        self._tree = jax.tree.structure(outputs)
        return [x for x, _, _ in out], after

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        """The whole step: its outputs, and the variables that it writes."""
        assert self._call is not None
        arguments = self._call

        def of_one_shard(values: Any, leaves: Any) -> Any:
            outputs, after = self._step(arguments, values, leaves)
            written = zip(self._leaving, itertools.compress(after, self._changed), strict=True)
            return outputs, [jax.tree.map(placement.stored, value) for placement, value in written]

        specs = [placement.spec(self._names) for placement in self._leaving]
        run = self._over_mesh(arguments, of_one_shard, (self._specs_of_outputs, specs))
        outputs, after = run(values, leaves)
        whole = NamedSharding(self._mesh, PartitionSpec())
        # The first shard's output, which each of several processes can read.
        readable = lambda x: lax.with_sharding_constraint(x, whole) if self._has_processes else x
        pairs = zip(outputs, self._from_all, strict=True)
        return [x if from_all else readable(x[0]) for x, from_all in pairs], after

    def _specs(self, found: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        """How the outputs and the variables lie on the mesh."""
        pairs = zip(self._specs_of_outputs, self._from_all, strict=True)
        of_outputs = [spec if from_all else PartitionSpec() for spec, from_all in pairs]
        each = zip(self._leaving, found[1], strict=True)
        spread = lambda spec, value: jax.tree.map(lambda _: spec, value)
        return of_outputs, [spread(placement.spec(self._names), value) for placement, value in each]

    def _over_mesh(
        self, arguments: Arguments, function: Callable[..., Any], out_specs: Any
    ) -> Callable[..., Any]:
        variables = [placement.spec(self._names) for placement in self._entering]
        # Read from the jaxpr which variables differ: JAX's types reject some correct steps.
        return _jax.shard_map(
            function, mesh=self._mesh, in_specs=(variables, arguments.specs), out_specs=out_specs
        )


def _placed(value: Any, sharding: NamedSharding) -> Any:
    """A variable's value, on the devices."""
    is_there = lambda x: getattr(x, "sharding", None) == sharding
    if isinstance(value, jax.Array) and is_there(value):
        return value
    return jax.tree.map(lambda x: x if is_there(x) else put_whole(x, sharding), value)


@contextlib.contextmanager
def _kept_attributes(modules: Sequence[nnx.Pytree]) -> Iterator[None]:
    """Restore the attributes of modules afterwards, so that no tracer stays in them."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
