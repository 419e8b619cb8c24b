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

from crossshard.errors import VariableError
from crossshard.jaxprs.invariance import varying_axes_of_outputs
from crossshard.runners.split import Arguments, Outputs, as_output, is_numeric
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
from crossshard.variables.discovery import containers_in, variables_in
from crossshard.variables.per_shard import PER_SHARD, is_per_shard


def program_key(roots: Sequence[Any], arguments: Arguments) -> Any:
    """What a program depends on: the structure of what it reaches, and its arguments."""
    places = {id(variable): place for place, variable in enumerate(variables_in(roots))}
    # An optimizer's slots belong to certain variables, which may be those of another model.
    slots_of = tuple(
        tuple(places.get(id(v)) for v in container.known_variables())
        for container in containers_in(roots)
    )
    types = tuple(
        (jnp.shape(leaf), getattr(leaf, "dtype", type(leaf)))
        for variable in variables_in(roots)
        for leaf in jax.tree.leaves(variable.get_raw_value())
    )
    return nnx.graphdef(list(roots)), types, slots_of, arguments.key()


@dataclasses.dataclass(frozen=True)
class _Held:
    """A variable, and how its value lies while the program runs."""

    variable: nnx.Variable
    placement: Placement

    def abstract(self, size: int) -> Any:
        """The types of its value as it enters, ``[shards, …]`` where there is one per shard."""
        lead = (size,) if self.placement.per_shard and not is_per_shard(self.variable) else ()
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*lead, *jnp.shape(x)), jnp.asarray(x).dtype),
            self.variable.get_raw_value(),
        )

    def local(self, value: Any, names: tuple[str, ...]) -> Any:
        """What one shard sees of the value that enters; of a random stream, one of its own."""
        several = math.prod(map(lax.axis_size, names)) > 1
        if isinstance(self.variable, nnx.RngKey) and not self.placement.per_shard and several:
            return own_stream(value, lax.axis_index(names))
        return jax.tree.map(self.placement.local, value)

    def stored(self, value: Any) -> Any:
        """The inverse: one shard's part of the value that leaves."""
        return jax.tree.map(self.placement.stored, value)

    def spread(self, size: int) -> None:
        """Store one value per shard, so far all alike, if that is how the program has it."""
        if self.placement.per_shard and not is_per_shard(self.variable):
            on_each = lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x)))
            value = jax.tree.map(on_each, self.variable.get_raw_value())
            self.variable.set_raw_value(value)
            self.variable.set_metadata(PER_SHARD, size)


@dataclasses.dataclass(frozen=True)
class _Found:
    """What one trace of the step tells of it: of each variable, and of its outputs."""

    changed: list[bool]
    outputs: list[tuple[bool, int]]
    output_specs: list[PartitionSpec]
    output_tree: Any


@dataclasses.dataclass
class _Call:
    """What one call of a program reaches: its roots, arguments, variables and arrays."""

    roots: Sequence[Any]
    arguments: Arguments
    held: list[_Held]
    leaves: tuple[jax.Array, ...]


class Program:
    """One compiled step.

    It is traced once to see which variables the step leaves equal on all shards: these are stored
    once, the others as ``[shards, …]``. Its jaxpr tells, see ``varying_axes_of_outputs``.

    Attributes:
      grew: whether tracing it changed what the step reaches: slots were made, or variables that
        were equal on all shards came to differ.
    """

    def __init__(
        self,
        computation: Callable[..., Any],
        mesh: Mesh,
        outputs: Outputs,
        roots: Sequence[Any],
        arguments: Arguments,
    ):
        self.grew = False
        self._computation = computation
        self._mesh = mesh
        self._outputs = outputs
        self._call: _Call | None = None
        with self._calling(roots, arguments, _placements(roots, mesh.size)):
            self._found = self._settle()
            held = self._now.held
            for each in held:
                each.spread(mesh.size)
        self._placements = [each.placement for each in held]
        names = mesh.axis_names
        self._shardings = [NamedSharding(mesh, each.spec(names)) for each in self._placements]
        self._compiled = jax.jit(self._run)

    def __call__(self, roots: Sequence[Any], arguments: Arguments) -> Any:
        """Run the step on these arrays and hand its variables in and out."""
        with self._calling(roots, arguments, self._placements):
            variables = [held.variable for held in self._now.held]
            values = [
                jax.tree.map(lambda x, sharding=sharding: _placed(x, sharding), v.get_raw_value())
                for v, sharding in zip(variables, self._shardings, strict=True)
            ]
            outputs, after = self._compiled(values, arguments.leaves)
        written = itertools.compress(variables, self._found.changed)
        for variable, value in zip(written, after, strict=True):
            variable.set_raw_value(value)
        return self._found.output_tree.unflatten(outputs)

    @contextmanager
    def _calling(
        self, roots: Sequence[Any], arguments: Arguments, placements: Sequence[Placement]
    ) -> Iterator[None]:
        """Know what a call reaches for as long as it runs, so that no model outlives its owner."""
        self._call = _Call(roots, dataclasses.replace(arguments, leaves=()), [], arguments.leaves)
        self._hold(placements)
        try:
            yield
        finally:
            self._call = None

    @property
    def _now(self) -> "_Call":
        assert self._call is not None
        return self._call

    # What follows settles how the variables lie.

    def _hold(self, placements: Sequence[Placement]) -> None:
        numeric = _numeric(variables_in(self._now.roots), self._mesh.size)
        self._now.held = [_Held(*pair) for pair in zip(numeric, placements, strict=True)]

    def _settle(self) -> _Found:
        """Trace until every variable that leaves with differing values also enters with them."""
        while True:
            try:
                found, differs = self._look(self._now.leaves)
            except RetraceNeeded as needed:
                needed.make()
                self.grew = True
                self._hold(_placements(self._now.roots, self._mesh.size))
                continue
            held = self._now.held
            settled = [
                PER_SHARD_PLACEMENT if changed and comes_to_differ else each.placement
                for each, changed, comes_to_differ in zip(held, found.changed, differs, strict=True)
            ]
            if settled == [each.placement for each in held]:
                return found
            self.grew = True
            self._hold(settled)

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
        axes = jax.tree.structure(after).unflatten(varying_axes_of_outputs(traced))
        return found[-1], [any(jax.tree.leaves(value)) for value in axes]

    def _step(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any], _Found]:
        """One shard's step: its outputs, its variables after it, and what was found out."""
        names = self._mesh.axis_names
        held = self._now.held
        variables = [each.variable for each in held]
        before = [each.local(value, names) for each, value in zip(held, values, strict=True)]
        bound = Bound(variables, self._now.roots)
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
        for variable in _numeric(variables_in(self._now.roots), self._mesh.size):
            if id(variable) not in known:
                raise VariableError(
                    f"The step made {describe_variable(variable)} in a module that was handed to "
                    f"it, where it cannot be handed out. Make it before, or pop it in the step."
                )

    # What follows runs the step.

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        written = list(itertools.compress(self._now.held, self._found.changed))

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


def _placements(roots: Sequence[Any], size: int) -> list[Placement]:
    """How the variables below some roots lie now."""
    return [
        PER_SHARD_PLACEMENT if is_per_shard(variable) else REPLICATED
        for variable in _numeric(variables_in(roots), size)
    ]


def _numeric(variables: Sequence[nnx.Variable], size: int) -> list[nnx.Variable]:
    """Those that hold arrays; raises if one holds a value per shard for other shards than ours."""
    numeric = [v for v in variables if all(map(is_numeric, jax.tree.leaves(v.get_raw_value())))]
    for variable in numeric:
        shards = variable.get_metadata(PER_SHARD, None)
        if shards and shards != size:
            raise VariableError(
                f"{describe_variable(variable)} differs between {shards} shards, and this step "
                f"runs on {size}. Choose one shard's value, or a mean, and write it with "
                f"crossshard.set_shared(variable, value)."
            )
    return numeric


def _placed(x: Any, sharding: NamedSharding) -> Any:
    return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)
