"""A step traced and compiled for the mesh, with its variables as inputs and outputs."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _flax
from crossshard.errors import VariableError
from crossshard.runners.equality import differing_axes
from crossshard.runners.split import Arguments, Hashable, Outputs, as_output, is_numeric
from crossshard.shards.context import shard_context
from crossshard.shards.placement import PER_SHARD as PER_SHARD_PLACEMENT
from crossshard.shards.placement import REPLICATED, Placement
from crossshard.shards.random_streams import own_stream
from crossshard.variables.binding import (
    Bound,
    RetraceNeeded,
    binding,
    kept_attributes,
    rebound,
    same_arrays,
)
from crossshard.variables.describe import describe_variable
from crossshard.variables.discovery import Reached, reached_in
from crossshard.variables.per_shard import is_per_shard, number_of_shards, per_shard, stacked


def program_key(reached: Reached, arguments: Arguments) -> Any:
    """What a program depends on: the structure of what it reaches, and its arguments."""
    places = {id(variable): place for place, variable in enumerate(reached.variables)}
    # An optimizer's slots belong to certain variables, which may be those of another model.
    slots_of = tuple(
        tuple(places.get(id(v)) for v in container.known_variables())
        for container in reached.containers
    )
    types = tuple(_type_of(variable.get_raw_value()) for variable in reached.variables)
    return _flax.graph_of(reached.roots, Hashable), types, slots_of, arguments.key()


def _type_of(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value.shape, value.dtype
    leaves, tree = jax.tree.flatten(value)
    return tree, tuple((jnp.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


@dataclasses.dataclass(frozen=True)
class _Held:
    """A variable, and how its value lies as the program has it."""

    variable: nnx.Variable
    placement: Placement

    def abstract(self, size: int) -> Any:
        """The types of its value as it enters, ``[shards, …]`` where there is one per shard."""
        lead = (size,) if self.placement.per_shard and not is_per_shard(self.variable) else ()
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lead, *jnp.shape(x)), jnp.asarray(x).dtype),
            stacked(self.variable.get_raw_value()),
        )

    def value(self, sharding: NamedSharding) -> Any:
        """Its value as it enters, on the devices."""
        value = stacked(self.variable.get_raw_value())
        if isinstance(value, jax.Array):
            return _placed(value, sharding)
        return jax.tree.map(lambda x: _placed(x, sharding), value)

    def local(self, value: Any, names: tuple[str, ...]) -> Any:
        """What one shard sees of the value that enters; of a random stream, one of its own."""
        several = math.prod(map(lax.axis_size, names)) > 1
        if isinstance(self.variable, nnx.RngKey) and not self.placement.per_shard and several:
            return own_stream(value, lax.axis_index(names))
        return jax.tree.map(self.placement.local, value)

    def stored(self, value: Any) -> Any:
        """The inverse: one shard's part of the value that leaves."""
        return jax.tree.map(self.placement.stored, value)

    def write(self, value: Any) -> None:
        """Take up the value that left."""
        self.variable.set_raw_value(per_shard(value) if self.placement.per_shard else value)

    def spread(self, size: int) -> bool:
        """Hold one value per shard, so far all alike, if that is how the program has it."""
        if not self.placement.per_shard or is_per_shard(self.variable):
            return False
        on_each = lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x)))
        self.write(jax.tree.map(on_each, self.variable.get_raw_value()))
        return True


@dataclasses.dataclass(frozen=True)
class _Found:
    """What one trace of the step tells of it: of each variable, and of its outputs."""

    changed: list[bool]
    outputs: list[tuple[bool, int]]
    output_specs: list[PartitionSpec]
    output_tree: Any


@dataclasses.dataclass
class _Call:
    """What one call of a program reaches: its variables and how they lie, arguments and arrays."""

    reached: Reached
    arguments: Arguments
    held: list[_Held]
    leaves: tuple[jax.Array, ...]


class Program:
    """One compiled step.

    It is traced once to see which variables the step leaves equal on all shards: these are stored
    once, the others as ``[shards, …]``. Its jaxpr tells, see ``differing_axes``.

    Attributes:
      made_slots: whether tracing it made slots, so that the step now reaches more.
    """

    def __init__(
        self,
        computation: Callable[..., Any],
        mesh: Mesh,
        outputs: Outputs,
        reached: Reached,
        arguments: Arguments,
    ):
        self.made_slots = False
        self._computation = computation
        self._mesh = mesh
        self._outputs = outputs
        self._call: _Call | None = None
        with self._calling(reached, arguments, _placements(reached, mesh.size)):
            self._found, differs = self._settle()
            self._entering = [each.placement for each in self._now.held]
        self._leaving = [
            PER_SHARD_PLACEMENT if stays else REPLICATED
            for stays in itertools.compress(differs, self._found.changed)
        ]
        names = mesh.axis_names
        self._shardings = [NamedSharding(mesh, each.spec(names)) for each in self._entering]
        self._compiled = jax.jit(self._run)

    def spread(self, reached: Reached) -> bool:
        """Give each shard a value of what comes to differ; whether there was any such variable."""
        held = _hold(reached, self._entering, self._mesh.size)
        return bool(sum(each.spread(self._mesh.size) for each in held))

    def __call__(self, reached: Reached, arguments: Arguments) -> Any:
        """Run the step on these arrays and hand its variables in and out."""
        with self._calling(reached, arguments, self._entering):
            held = self._now.held
            for each in held:
                each.spread(self._mesh.size)
            values = [each.value(how) for each, how in zip(held, self._shardings, strict=True)]
            outputs, after = self._compiled(values, arguments.leaves)
            written = self._written()
        for each, value in zip(written, after, strict=True):
            each.write(value)
        return self._found.output_tree.unflatten(outputs)

    def _written(self) -> list[_Held]:
        """The variables that the step writes, as they lie when they leave."""
        written = itertools.compress(self._now.held, self._found.changed)
        return [
            dataclasses.replace(each, placement=placement)
            for each, placement in zip(written, self._leaving, strict=True)
        ]

    @contextmanager
    def _calling(
        self, reached: Reached, arguments: Arguments, placements: Sequence[Placement]
    ) -> Iterator[None]:
        """Know what a call reaches for as long as it runs, so that no model outlives its owner."""
        self._call = _Call(
            reached,
            dataclasses.replace(arguments, leaves=()),
            _hold(reached, placements, self._mesh.size),
            arguments.leaves,
        )
        try:
            yield
        finally:
            self._call = None

    @property
    def _now(self) -> "_Call":
        assert self._call is not None
        return self._call

    # What follows settles how the variables lie.

    def _settle(self) -> tuple[_Found, list[bool]]:
        """Trace until every variable that leaves with differing values also enters with them.

        Returns what was found, and which variables may differ after the step.
        """
        while True:
            size = self._mesh.size
            try:
                found, differs = self._look(self._now.leaves)
            except RetraceNeeded as needed:
                needed.make()
                self.made_slots = True
                self._now.reached = reached = reached_in(self._now.reached.roots)
                self._now.held = _hold(reached, _placements(reached, size), size)
                continue
            held = self._now.held
            settled = [
                PER_SHARD_PLACEMENT if changed and comes_to_differ else each.placement
                for each, changed, comes_to_differ in zip(held, found.changed, differs, strict=True)
            ]
            if settled == [each.placement for each in held]:
                return found, differs
            self._now.held = _hold(self._now.reached, settled, size)

    def _look(self, leaves: tuple[jax.Array, ...]) -> tuple[_Found, list[bool]]:
        """Trace the step: what is found, and which variables may differ after it."""
        found: list[_Found] = []

        def of_one_shard(values: Any, leaves: Any) -> Any:
            _, after, finding = self._step(values, leaves)
            found.append(finding)
            return jax.tree.map(lambda x: x[None], after)

        everywhere = PartitionSpec(self._mesh.axis_names)
        abstract = [held.abstract(self._mesh.size) for held in self._now.held]
        traced, after = jax.make_jaxpr(
            self._over_mesh(of_one_shard, everywhere), return_shape=True
        )(abstract, leaves)
        axes = jax.tree.structure(after).unflatten(differing_axes(traced))
        return found[-1], [any(jax.tree.leaves(value)) for value in axes]

    def _step(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any], _Found]:
        """One shard's step: its outputs, its variables after it, and what was found out."""
        names = self._mesh.axis_names
        held = self._now.held
        variables = [each.variable for each in held]
        before = [each.local(value, names) for each, value in zip(held, values, strict=True)]
        bound = Bound(variables, self._now.reached)
        args, kwargs = self._now.arguments.rebuild(leaves)
        with (
            shard_context(self._mesh.size, axis_name=names),
            kept_attributes(bound.modules),
            rebound(variables, before, bound.modules),
            binding(bound),
        ):
            outputs = as_output(self._computation(*args, **kwargs))
            after = [variable.get_raw_value() for variable in variables]
            self._check_none_was_made()
        changed = [not same_arrays(a, b) for a, b in zip(after, before, strict=True)]
        how, tree = self._outputs.plan(outputs)
        flat = list(zip(jax.tree.leaves(outputs), how, strict=True))
        specs = [self._outputs.spec(x, *each, names) for x, each in flat]
        laid = [self._outputs.lay_out(x, *each) for x, each in flat]
        return laid, after, _Found(changed, how, specs, tree)

    def _check_none_was_made(self) -> None:
        known = {id(held.variable) for held in self._now.held}
        for variable in _numeric(reached_in(self._now.reached.roots), self._mesh.size):
            if id(variable) not in known:
                raise VariableError(
                    f"The step made {describe_variable(variable)} in a module that was handed to "
                    f"it, where it cannot be handed out. Make it before, or pop it in the step."
                )

    # What follows runs the step.

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        written = self._written()

        def of_one_shard(values: Any, leaves: Any) -> Any:
            outputs, after, found = self._step(values, leaves)
            kept = itertools.compress(after, found.changed)
            return outputs, [held.stored(x) for held, x in zip(written, kept, strict=True)]

        specs = [held.placement.spec(self._mesh.axis_names) for held in written]
        run = self._over_mesh(of_one_shard, (self._found.output_specs, specs))
        outputs, after = run(values, leaves)
        joined = [
            x if from_all else x[0]
            for x, (from_all, _) in zip(outputs, self._found.outputs, strict=True)
        ]
        return joined, after

    def _over_mesh(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        names = self._mesh.axis_names
        variables = [held.placement.spec(names) for held in self._now.held]
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(variables, self._now.arguments.specs),
            out_specs=out_specs,
            # What differs is read from the jaxpr: JAX's types refuse steps that are right.
            check_vma=False,
        )


def _hold(reached: Reached, placements: Sequence[Placement], size: int) -> list[_Held]:
    """The variables that are reached, as a program has them."""
    return [_Held(*pair) for pair in zip(_numeric(reached, size), placements, strict=True)]


def _placements(reached: Reached, size: int) -> list[Placement]:
    """How the variables that are reached lie now."""
    return [
        PER_SHARD_PLACEMENT if is_per_shard(variable) else REPLICATED
        for variable in _numeric(reached, size)
    ]


def _numeric(reached: Reached, size: int) -> list[nnx.Variable]:
    """Those that hold arrays; raises if one holds a value per shard for other shards than ours."""
    numeric = [v for v in reached.variables if _holds_arrays(v.get_raw_value())]
    for variable in numeric:
        shards = number_of_shards(variable)
        if shards not in (None, size):
            raise VariableError(
                f"{describe_variable(variable)} differs between {shards} shards, and this step "
                f"runs on {size}. Go on with crossshard.merge_shards(model), where all shards' "
                f"values are one, or write one with crossshard.set_shared(variable, value)."
            )
    return numeric


def _placed(x: Any, sharding: NamedSharding) -> Any:
    return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)


def _holds_arrays(value: Any) -> bool:
    return isinstance(value, jax.Array) or all(map(is_numeric, jax.tree.leaves(value)))
