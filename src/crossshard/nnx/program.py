"""A step traced and compiled for the mesh, with its variables as inputs and outputs.

Flax's transforms hand a function copies, fold no shard into random streams, and want to know before
the trace which variables differ between shards. Here a step sees the objects that it was given:
while it is traced they hold what its trace computes with, and the trace says which will differ.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _flax, _jax, _mesh
from crossshard._flax import AnyVariable, describe_variable, nnx
from crossshard._hash import checksum
from crossshard.distributed.agreement import check_agreement, check_same_program, processes_of
from crossshard.distributed.progress import PROGRESS
from crossshard.errors import VariableError
from crossshard.gradients.nesting import watching_constants
from crossshard.jaxprs.walk import varying_axes_of_outputs
from crossshard.nnx.arrays import (
    Arguments,
    ByValue,
    Outputs,
    as_output,
    is_numeric,
    is_stateful,
)
from crossshard.nnx.per_shard import is_per_shard, number_of_shards, per_shard, stacked
from crossshard.nnx.slots import HasSlots, SlotStore, is_variable
from crossshard.shards.axes import shard_context
from crossshard.shards.cut import PER_SHARD, REPLICATED, Placement
from crossshard.shards.devices import put_whole
from crossshard.shards.random_streams import own_stream

# What a step is given.


_thread = threading.local()


class Reached:
    """What is below the modules, variables and optimizers in some values.

    Attributes:
      roots: these themselves, each once.
      variables: every variable below them, in a fixed order.
      optimizers: every optimizer below them.
      held: the variables with arrays, while a step is traced that was given these.
      lacking: functions that make the slots that the step lacks, to be called after its trace.
    """

    def __init__(self, values: Iterable[Any]):
        given = (leaf for value in values for leaf in jax.tree.leaves(value, is_leaf=is_stateful))
        self.roots = list({id(leaf): leaf for leaf in given if is_stateful(leaf)}.values())
        optimizers = {id(root): root for root in self.roots if isinstance(root, HasSlots)}
        self._nodes = [root for root in self.roots if id(root) not in optimizers]
        self._graph, of_nodes = _flax.flatten(self._nodes)
        if _flax.has_pytree_of(HasSlots, self._graph):
            for _, node in nnx.iter_graph(self._nodes):
                if isinstance(node, HasSlots):
                    optimizers.setdefault(id(node), node)
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
        self.held: list[AnyVariable] = []
        self.lacking: list[Callable[[], None]] = []
        self._slots: dict[int, tuple[HasSlots, SlotStore]] = {}

    @property
    def modules(self) -> list[nnx.Pytree]:
        """Every NNX module below the roots."""
        nodes = (node for _, node in nnx.iter_graph(self._nodes))
        return list({id(node): node for node in nodes if isinstance(node, nnx.Pytree)}.values())

    def numeric(self, shards: int) -> list[AnyVariable]:
        """The variables with arrays."""
        found = []
        for variable in self.variables:
            value = variable.get_raw_value()
            if not isinstance(value, jax.Array):
                if not all(map(is_numeric, jax.tree.leaves(value))):
                    continue
                number = number_of_shards(variable)
                if number not in (None, shards):
                    raise VariableError(
                        f"{describe_variable(variable)} differs between {number} shards, and this "
                        f"step runs on {shards}. Use crossshard.merge_shards(model), which has one "
                        f"value for all shards, or write one with "
                        f"crossshard.nnx.set_shared(variable, value)."
                    )
            found.append(variable)
        return found

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
        self.lacking.append(make)
        self._slots.setdefault(id(optimizer), (optimizer, optimizer.slots))
        optimizer.slots = SlotStore(optimizer.slots.variables, optimizer.slots.tree)

    @contextmanager
    def bound(self, held: list[AnyVariable]) -> Iterator[None]:
        """Trace a step that was given these; what it reads besides is refused."""
        _thread.bound, self.held = self, held
        try:
            with watching_constants(_refuse):
                yield
        finally:
            _thread.bound = None
            # What belongs to the trace ends with it.
            for optimizer in self.optimizers:
                optimizer.computed.clear()
            for optimizer, slots in self._slots.values():
                optimizer.slots = slots
            self._slots = {}


def _type_of(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value.shape, value.dtype
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def same_arrays(a: Any, b: Any) -> bool:
    """Whether two values consist of identical array objects."""
    if a is b:
        return True
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x is y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def bound() -> Reached | None:
    """What the step that is traced was given; ``None`` outside of a runner."""
    return getattr(_thread, "bound", None)


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
            f"jax.lax.cond, jax.lax.scan, jax.jit or the like, which do not support NNX. Use "
            f"nnx.cond, nnx.scan, nnx.fori_loop or nnx.jit, and pass them the module and the "
            f"optimizer as arguments."
        )
    raise VariableError(
        f"The step writes {describe_variable(variable)}, which it was not given. Pass its module "
        f"to the step function as an argument, and run the step with crossshard.shard."
    )


# The program.


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
        reached: Reached,
        arguments: Arguments,
    ):
        for variable in reached.variables:
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
        self._call: tuple[Reached, Arguments] | None = None
        self._settle(reached, arguments)
        self._shardings = [NamedSharding(mesh, x.spec(self._names)) for x in self._entering]
        self._compiled = jax.jit(_mesh.under_automatic_axes(self._run, mesh, self._specs))

    def spread(self, reached: Reached) -> bool:
        """Store variables that will differ as ``[shards, …]``; returns whether there were any."""
        pairs = zip(reached.numeric(self._mesh.size), self._entering, strict=True)
        new = [v for v, placement in pairs if placement.per_shard and not is_per_shard(v)]
        on_each = lambda x: jnp.broadcast_to(x, (self._mesh.size, *jnp.shape(x)))
        for variable in new:
            value = jax.tree.map(on_each, variable.get_raw_value())
            variable.set_raw_value(per_shard(value))
        return bool(new)

    def __call__(self, reached: Reached, arguments: Arguments) -> Any:
        """Run the step on these arrays and write its variables."""
        self.spread(reached)
        variables = reached.numeric(self._mesh.size)
        values = [
            _placed(stacked(variable.get_raw_value()), sharding)
            for variable, sharding in zip(variables, self._shardings, strict=True)
        ]
        self._call = reached, arguments
        try:
            if self._has_processes:
                PROGRESS.take(arguments.own_rows())
                self._compare(variables, values, arguments)
            outputs, after = self._compiled(values, arguments.leaves)
        finally:
            self._call = None
        written = itertools.compress(variables, self._changed)
        for variable, placement, value in zip(written, self._leaving, after, strict=True):
            variable.set_raw_value(per_shard(value) if placement.per_shard else value)
        return self._tree.unflatten(outputs)

    def _compare(
        self, variables: Sequence[AnyVariable], values: Sequence[Any], arguments: Arguments
    ) -> None:
        """Raise unless every process brings the same new variables, whole inputs and program.

        What is on the mesh already comes from a step, and is not compared again.
        """
        is_local = lambda x: getattr(x, "is_fully_addressable", True)
        held = [stacked(variable.get_raw_value()) for variable in variables]
        new = [place for place, x in enumerate(held) if any(map(is_local, jax.tree.leaves(x)))]
        given = {
            f"{describe_variable(variables[place])}, variable {place} of the step,": held[place]
            for place in new
        }
        if not self._is_compared:
            pairs = zip(arguments.leaves, arguments.specs, strict=True)
            whole = [x for x, spec in pairs if spec == PartitionSpec()]
            given |= {f"whole input {place}": x for place, x in enumerate(whole)}
        if given:
            check_agreement(
                "step",
                lambda: {
                    name: checksum(jax.tree.map(jnp.asarray, value))
                    for name, value in given.items()
                },
                self._mesh,
                "Every process must pass the same models, optimizers, and arrays that are not "
                "split: create them with the same seeds, and restore them in every process.",
            )
        for place in new:
            if isinstance(held[place], jax.Array):
                variables[place].set_raw_value(
                    per_shard(values[place]) if self._entering[place].per_shard else values[place]
                )
        if not self._is_compared:
            check_same_program(self._compiled.lower(values, arguments.leaves), self._mesh)
            self._is_compared = True

    def _settle(self, reached: Reached, arguments: Arguments) -> None:
        """Trace until no slots are missing, and all that differs after the step is per shard."""
        variables = reached.numeric(self._mesh.size)
        self._entering = [PER_SHARD if is_per_shard(v) else REPLICATED for v in variables]
        while True:
            differs = self._trace(reached, arguments)
            if reached.lacking:
                for make in reached.lacking:
                    make()
                return self._settle(Reached(reached.roots), arguments)
            settled = [
                PER_SHARD if changed and may_differ else placement
                for placement, changed, may_differ in zip(
                    self._entering, self._changed, differs, strict=True
                )
            ]
            if settled == self._entering:
                of_changed = itertools.compress(differs, self._changed)
                self._leaving = [PER_SHARD if stays else REPLICATED for stays in of_changed]
                return None
            self._entering = settled

    def _trace(self, reached: Reached, arguments: Arguments) -> list[bool]:
        """Trace the step; returns which variables may differ after it."""

        def of_one_shard(values: Any, leaves: Any) -> Any:
            _, after = self._step(reached, arguments, values, leaves)
            return jax.tree.map(lambda x: x[None], after)

        run = self._over_mesh(arguments, of_one_shard, PartitionSpec(self._names))
        abstract = []
        for variable, placement in zip(
            reached.numeric(self._mesh.size), self._entering, strict=True
        ):
            lead = (self._mesh.size,) if placement.per_shard and not is_per_shard(variable) else ()
            type_of = lambda x, lead=lead: jax.ShapeDtypeStruct(
                (*lead, *jnp.shape(x)), jnp.asarray(x).dtype
            )
            abstract.append(jax.tree.map(type_of, stacked(variable.get_raw_value())))
        leaves = [_mesh.on_mesh(leaf, self._mesh) for leaf in arguments.leaves]
        with _mesh.in_place_of_the_users_mesh(self._mesh):
            traced, after = jax.make_jaxpr(run, return_shape=True)(abstract, tuple(leaves))
        axes = jax.tree.structure(after).unflatten(varying_axes_of_outputs(traced))
        return [any(jax.tree.leaves(value)) for value in axes]

    def _local(self, variable: AnyVariable, placement: Placement, value: Any) -> Any:
        """One shard's part of the input value; random streams become distinct."""
        several = math.prod(map(lax.axis_size, self._names)) > 1
        if isinstance(variable, nnx.RngKey) and not placement.per_shard and several:
            return own_stream(value, lax.axis_index(self._names))
        return jax.tree.map(placement.local, value)

    def _step(
        self,
        reached: Reached,
        arguments: Arguments,
        values: Any,
        leaves: Any,
    ) -> tuple[list[jax.Array], list[Any]]:
        """One shard's step; returns its outputs and its variables after it, and notes the rest."""
        variables = reached.numeric(self._mesh.size)
        before = [
            self._local(*each) for each in zip(variables, self._entering, values, strict=True)
        ]
        modules = reached.modules
        args, kwargs = arguments.rebuild(leaves)
        with _kept_attributes(modules), _flax.rebound(variables, before, modules):
            with shard_context(self._mesh.size, axis_name=self._names), reached.bound(variables):
                outputs = as_output(self._computation(*args, **kwargs))
                after = [variable.get_raw_value() for variable in variables]
            _check_none_was_created(reached, variables, self._mesh.size)
        out = self._outputs.lay_out(outputs, self._names)
        self._changed = [not same_arrays(a, b) for a, b in zip(after, before, strict=True)]
        self._specs_of_outputs = [spec for _, spec, _ in out]
        self._from_all = [from_all for _, _, from_all in out]
        self._tree = jax.tree.structure(outputs)
        return [x for x, _, _ in out], after

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        """The whole step: its outputs, and the variables that it writes."""
        assert self._call is not None
        reached, arguments = self._call

        def of_one_shard(values: Any, leaves: Any) -> Any:
            outputs, after = self._step(reached, arguments, values, leaves)
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

    def one(x: Any) -> Any:
        own = getattr(x, "sharding", None)
        # Types write P() as P(None).
        is_there = own == sharding or (
            isinstance(own, NamedSharding)
            and own.mesh == sharding.mesh
            and own.is_equivalent_to(sharding, x.ndim)
        )
        return x if is_there else put_whole(x, sharding)

    return one(value) if isinstance(value, jax.Array) else jax.tree.map(one, value)


@contextmanager
def _kept_attributes(modules: Sequence[nnx.Pytree]) -> Iterator[None]:
    """Restore the attributes of modules afterwards, so that no tracer stays in them."""
    before = [dict(vars(module)) for module in modules]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)


def _check_none_was_created(
    reached: Reached, variables: Sequence[AnyVariable], shards: int
) -> None:
    known = set(map(id, variables))
    for variable in Reached(reached.roots).numeric(shards):
        if id(variable) not in known:
            raise VariableError(
                f"The step created {describe_variable(variable)} in a module that was passed "
                f"to it, and cannot return it. Create it before the step, or pop it in the "
                f"step."
            )
