"""A step traced and compiled for the mesh, with its variables as inputs and outputs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
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
from crossshard.jaxprs.walk import varying_axes_of_outputs
from crossshard.nnx.arrays import Arguments, Outputs, as_output, is_numeric
from crossshard.nnx.binding import Bound
from crossshard.nnx.graph import Reached, reached_in, same_arrays
from crossshard.nnx.keys import ByValue
from crossshard.nnx.per_shard import is_per_shard, number_of_shards, per_shard, stacked
from crossshard.shards.axes import shard_context
from crossshard.shards.cut import PER_SHARD as PER_SHARD_PLACEMENT
from crossshard.shards.cut import REPLICATED, Placement
from crossshard.shards.devices import put_whole
from crossshard.shards.random_streams import own_stream


def program_key(reached: Reached, arguments: Arguments) -> Any:
    """The cache key of a program: the structure of everything reachable, and the arguments."""
    places = {id(variable): place for place, variable in enumerate(reached.variables)}
    # An optimizer's slots belong to certain variables, perhaps those of another model.
    slots_of = tuple(
        tuple(places.get(id(v)) for v in optimizer.slots.variables.values())
        for optimizer in reached.optimizers
    )
    types = tuple(_type_of(variable.get_raw_value()) for variable in reached.variables)
    constants = tuple(map(ByValue, reached.constants))
    return _flax.graph_of(reached.roots, ByValue), types, slots_of, constants, arguments.key()


def _type_of(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value.shape, value.dtype
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class _Held:
    """A variable, and its placement in the program."""

    variable: AnyVariable
    placement: Placement

    def abstract(self, size: int) -> Any:
        """The shapes and dtypes of its input value, ``[shards, …]`` if it is per shard."""
        lead = (size,) if self.placement.per_shard and not is_per_shard(self.variable) else ()
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lead, *jnp.shape(x)), jnp.asarray(x).dtype),
            self.raw_value,
        )

    @property
    def raw_value(self) -> Any:
        """What it holds, with ``[shards, …]`` arrays where it is per shard."""
        return stacked(self.variable.get_raw_value())

    def value(self, sharding: NamedSharding) -> Any:
        """Its input value, on the devices."""

        def placed(x: Any) -> Any:
            own = getattr(x, "sharding", None)
            # Types write P() as P(None).
            is_there = own == sharding or (
                isinstance(own, NamedSharding)
                and own.mesh == sharding.mesh
                and own.is_equivalent_to(sharding, x.ndim)
            )
            return x if is_there else put_whole(x, sharding)

        value = self.raw_value
        return placed(value) if isinstance(value, jax.Array) else jax.tree.map(placed, value)

    def local(self, value: Any, names: tuple[str, ...]) -> Any:
        """One shard's part of the input value; random streams become distinct."""
        several = math.prod(map(lax.axis_size, names)) > 1
        if isinstance(self.variable, nnx.RngKey) and not self.placement.per_shard and several:
            return own_stream(value, lax.axis_index(names))
        return jax.tree.map(self.placement.local, value)

    def write(self, value: Any) -> None:
        """Write the output value."""
        self.variable.set_raw_value(per_shard(value) if self.placement.per_shard else value)


@dataclasses.dataclass(frozen=True)
class _Found:
    """The findings of one trace of the step.

    Attributes:
      changed: for each variable whether the step writes it.
      specs: the specs of the outputs.
      from_all: for each output whether it is joined over the shards, or the first shard's.
      tree: the structure of the outputs.
      lacking: functions that make the slots that the step lacks.
    """

    changed: list[bool]
    specs: list[PartitionSpec]
    from_all: list[bool]
    tree: Any
    lacking: list[Callable[[], None]]


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of a program: what it reaches, its arguments and its variables."""

    reached: Reached
    arguments: Arguments
    held: list[_Held]


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
        self._computation = computation
        # It computes with automatic axes, and arrays lie on the mesh as the user made it.
        self._mesh = _mesh.with_automatic_axes(mesh)
        self._outputs = outputs
        self._has_processes = len(processes_of(mesh)) > 1
        self._is_compared = False
        call, self._found, differs = self._settle(
            _Call(reached, arguments, _hold(reached, mesh.size))
        )
        self._entering = [each.placement for each in call.held]
        self._leaving = [
            PER_SHARD_PLACEMENT if stays else REPLICATED
            for stays in itertools.compress(differs, self._found.changed)
        ]
        names = mesh.axis_names
        self._shardings = [NamedSharding(mesh, each.spec(names)) for each in self._entering]
        # Set while it runs, since it may be traced then, and dropped after: it holds the model.
        self._call: _Call | None = None
        self._compiled = jax.jit(_mesh.under_automatic_axes(self._run, mesh, self._specs))

    def spread(self, reached: Reached) -> bool:
        """Store variables that will differ as ``[shards, …]``; returns whether there were any."""
        return self._spread(_hold(reached, self._mesh.size, self._entering))

    def _spread(self, held: Sequence[_Held]) -> bool:
        is_new = lambda each: each.placement.per_shard and not is_per_shard(each.variable)
        new = list(filter(is_new, held))
        on_each = lambda x: jnp.broadcast_to(x, (self._mesh.size, *jnp.shape(x)))
        for each in new:
            each.write(jax.tree.map(on_each, each.variable.get_raw_value()))
        return bool(new)

    def __call__(self, reached: Reached, arguments: Arguments) -> Any:
        """Run the step on these arrays and write its variables."""
        held = _hold(reached, self._mesh.size, self._entering)
        self._spread(held)
        values = [each.value(how) for each, how in zip(held, self._shardings, strict=True)]
        self._call = _Call(reached, arguments, held)
        try:
            if self._has_processes:
                PROGRESS.take(arguments.own_rows())
                self._compare(held, values, arguments)
            outputs, after = self._compiled(values, arguments.leaves)
        finally:
            self._call = None
        written = itertools.compress(held, self._found.changed)
        for each, placement, value in zip(written, self._leaving, after, strict=True):
            dataclasses.replace(each, placement=placement).write(value)
        return self._found.tree.unflatten(outputs)

    def _compare(self, held: Sequence[_Held], values: Sequence[Any], arguments: Arguments) -> None:
        """Raise unless every process brings the same new variables, whole inputs and program.

        What is on the mesh already comes from a step, and is not compared again.
        """
        is_local = lambda x: getattr(x, "is_fully_addressable", True)
        is_new = lambda each: any(map(is_local, jax.tree.leaves(each.raw_value)))
        new = [(place, each) for place, each in enumerate(held) if is_new(each)]
        given = {
            f"{describe_variable(each.variable)}, variable {place} of the step,": each.raw_value
            for place, each in new
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
        for place, each in new:
            if isinstance(each.raw_value, jax.Array):
                each.write(values[place])
        if not self._is_compared:
            check_same_program(self._compiled.lower(values, arguments.leaves), self._mesh)
            self._is_compared = True

    def _settle(self, call: _Call) -> tuple[_Call, _Found, list[bool]]:
        """Trace until no slots are missing, and all that differs after the step is per shard.

        Returns the call as it is then, the findings, and which variables may differ after the step.
        """
        while True:
            found, differs = self._trace(call)
            if found.lacking:
                for make in found.lacking:
                    make()
                reached = reached_in(call.reached.roots)
                call = _Call(reached, call.arguments, _hold(reached, self._mesh.size))
                continue
            settled = [
                PER_SHARD_PLACEMENT if changed and may_differ else each.placement
                for each, changed, may_differ in zip(call.held, found.changed, differs, strict=True)
            ]
            if settled == [each.placement for each in call.held]:
                return call, found, differs
            held = _hold(call.reached, self._mesh.size, settled)
            call = dataclasses.replace(call, held=held)

    def _trace(self, call: _Call) -> tuple[_Found, list[bool]]:
        """Trace the step; returns the findings, and which variables may differ after it."""
        found: list[_Found] = []

        def of_one_shard(values: Any, leaves: Any) -> Any:
            _, after, finding = self._step(call, values, leaves)
            found.append(finding)
            return jax.tree.map(lambda x: x[None], after)

        run = self._over_mesh(call, of_one_shard, PartitionSpec(self._mesh.axis_names))
        abstract = [held.abstract(self._mesh.size) for held in call.held]
        leaves = [_mesh.on_mesh(leaf, self._mesh) for leaf in call.arguments.leaves]
        with _mesh.in_place_of_the_users_mesh(self._mesh):
            traced, after = jax.make_jaxpr(run, return_shape=True)(abstract, tuple(leaves))
        axes = jax.tree.structure(after).unflatten(varying_axes_of_outputs(traced))
        return found[-1], [any(jax.tree.leaves(value)) for value in axes]

    def _step(self, call: _Call, values: Any, leaves: Any) -> tuple[list[Any], list[Any], _Found]:
        """One shard's step; returns its outputs, its variables after it, and the findings."""
        names = self._mesh.axis_names
        variables = [each.variable for each in call.held]
        before = [each.local(value, names) for each, value in zip(call.held, values, strict=True)]
        bound, modules = Bound(variables, call.reached), call.reached.modules
        args, kwargs = call.arguments.rebuild(leaves)
        with _kept_attributes(modules), _flax.rebound(variables, before, modules):
            with shard_context(self._mesh.size, axis_name=names), bound.current():
                outputs = as_output(self._computation(*args, **kwargs))
                after = [variable.get_raw_value() for variable in variables]
            self._check_none_was_created(call)
        changed = [not same_arrays(a, b) for a, b in zip(after, before, strict=True)]
        out = self._outputs.lay_out(outputs, names)
        found = _Found(
            changed,
            [each.spec for each in out],
            [each.from_all for each in out],
            jax.tree.structure(outputs),
            bound.lacking,
        )
        return [each.local for each in out], after, found

    def _check_none_was_created(self, call: _Call) -> None:
        known = {id(held.variable) for held in call.held}
        for variable in _numeric(reached_in(call.reached.roots), self._mesh.size):
            if id(variable) not in known:
                raise VariableError(
                    f"The step created {describe_variable(variable)} in a module that was passed "
                    f"to it, and cannot return it. Create it before the step, or pop it in the "
                    f"step."
                )

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        """The whole step: its outputs, and the variables that it writes."""
        call = self._call
        assert call is not None

        def of_one_shard(values: Any, leaves: Any) -> Any:
            outputs, after, _ = self._step(call, values, leaves)
            written = zip(
                self._leaving, itertools.compress(after, self._found.changed), strict=True
            )
            return outputs, [jax.tree.map(placement.stored, value) for placement, value in written]

        specs = [placement.spec(self._mesh.axis_names) for placement in self._leaving]
        run = self._over_mesh(call, of_one_shard, (self._found.specs, specs))
        outputs, after = run(values, leaves)
        joined = [
            x if from_all else self._of_first(x)
            for x, from_all in zip(outputs, self._found.from_all, strict=True)
        ]
        return joined, after

    def _specs(self, found: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        """How the outputs and the variables lie on the mesh."""
        _, after = found
        pairs = zip(self._found.specs, self._found.from_all, strict=True)
        of_outputs = [spec if from_all else PartitionSpec() for spec, from_all in pairs]
        names = self._mesh.axis_names
        each = zip(self._leaving, after, strict=True)
        spread = lambda spec, value: jax.tree.map(lambda _: spec, value)
        return of_outputs, [spread(placement.spec(names), value) for placement, value in each]

    def _of_first(self, x: jax.Array) -> jax.Array:
        """The first shard's output, which each of several processes can read."""
        if not self._has_processes:
            return x[0]
        return lax.with_sharding_constraint(x[0], NamedSharding(self._mesh, PartitionSpec()))

    def _over_mesh(
        self, call: _Call, function: Callable[..., Any], out_specs: Any
    ) -> Callable[..., Any]:
        variables = [held.placement.spec(self._mesh.axis_names) for held in call.held]
        # Read from the jaxpr which variables differ: JAX's types reject some correct steps.
        return _jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(variables, call.arguments.specs),
            out_specs=out_specs,
        )


def _hold(
    reached: Reached, size: int, placements: Sequence[Placement] | None = None
) -> list[_Held]:
    """The reached variables, with these placements, or with their current ones."""
    variables = _numeric(reached, size)
    if placements is None:
        placements = [PER_SHARD_PLACEMENT if is_per_shard(v) else REPLICATED for v in variables]
    return [_Held(*pair) for pair in zip(variables, placements, strict=True)]


def _numeric(reached: Reached, size: int) -> list[AnyVariable]:
    """The variables with arrays; raises if one is stored for another number of shards."""
    numeric = [v for v in reached.variables if _holds_arrays(v.get_raw_value())]
    for variable in numeric:
        shards = number_of_shards(variable)
        if shards not in (None, size):
            raise VariableError(
                f"{describe_variable(variable)} differs between {shards} shards, and this step "
                f"runs on {size}. Use crossshard.merge_shards(model), which has one value for all "
                f"shards, or write one with crossshard.nnx.set_shared(variable, value)."
            )
    return numeric


def _holds_arrays(value: Any) -> bool:
    return isinstance(value, jax.Array) or all(map(is_numeric, jax.tree.leaves(value)))
