"""A step traced and compiled for the mesh, with its variables as inputs and outputs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _jax
from crossshard.errors import CrossshardError, VariableError
from crossshard.shards.context import shard_context
from crossshard.shards.split import Arguments, Identity, Outputs, as_output, is_numeric
from crossshard.shards.variables import (
    PER_SHARD,
    HandedIn,
    Holder,
    VariablesWanted,
    describe_variable,
    handing_in,
    is_per_shard,
    modules_in,
    rebound,
    variables_in,
)


def program_key(roots: Sequence[Any], arguments: Arguments) -> Any:
    """What a program depends on: the structure of what it reaches, and its arguments."""
    holders = tuple(Identity(root) for root in roots if isinstance(root, Holder))
    nodes = [root.held_variables() if isinstance(root, Holder) else root for root in roots]
    types = tuple(
        (jnp.shape(leaf), getattr(leaf, "dtype", type(leaf)))
        for variable in variables_in(roots)
        for leaf in jax.tree.leaves(variable.get_raw_value())
    )
    return nnx.graphdef(nodes), types, holders, arguments.key()


@dataclasses.dataclass
class _Found:
    """What one trace of the step tells of it."""

    changed: list[bool]
    differs: list[bool]
    outputs: list[tuple[bool, int]]
    output_specs: list[PartitionSpec]
    output_tree: Any


class Program:
    """One compiled step.

    It is traced once to see which variables the step leaves equal on all shards: these are stored
    once, the others as ``[shards, …]``. Types tell (``check_vma=True``), or, for a step that JAX
    cannot type, what the optimizer says that it wrote.

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
        self._roots = roots
        # The first call's arrays need not be kept for as long as the program is.
        self._arguments = dataclasses.replace(arguments, leaves=())
        self._check_vma = True
        self._variables = self._numeric_variables(variables_in(roots))
        self._per_shard = [is_per_shard(variable) for variable in self._variables]
        self._found = self._settle(arguments.leaves)
        for variable, per_shard in zip(self._variables, self._per_shard, strict=True):
            if per_shard and not is_per_shard(variable):
                self._spread(variable)
        self._compiled = jax.jit(self._run)

    def __call__(self, variables: Sequence[nnx.Variable], leaves: tuple[jax.Array, ...]) -> Any:
        """Run the step on these arrays and hand its variables in and out."""
        variables = self._numeric_variables(variables)
        values = [
            jax.tree.map(lambda x, sharding=sharding: _placed(x, sharding), v.get_raw_value())
            for v, sharding in zip(variables, self._shardings(), strict=True)
        ]
        outputs, after = self._compiled(values, leaves)
        written = [v for v, c in zip(variables, self._found.changed, strict=True) if c]
        for variable, value in zip(written, after, strict=True):
            variable.set_raw_value(value)
        return self._found.output_tree.unflatten(outputs)

    # What follows settles how the variables lie.

    def _settle(self, leaves: tuple[jax.Array, ...]) -> _Found:
        """Trace until every variable that leaves with differing values also enters with them."""
        while True:
            try:
                found = self._look(leaves)
            except VariablesWanted as wanted:
                self._make(wanted)
                continue
            except (TypeError, ValueError) as error:
                if isinstance(error, CrossshardError) or not self._check_vma:
                    raise
                # A loop whose carry starts equal on all shards and ends different is right, and
                # JAX refuses its types; without types, equality has to come from provenance.
                self._check_vma = False
                continue
            if found.differs == self._per_shard:
                return found
            self.grew = True
            self._per_shard = found.differs

    def _make(self, wanted: VariablesWanted) -> None:
        if not any(wanted.holder is root for root in self._roots):
            raise VariableError(
                f"The step uses {wanted.holder!r} on variables that were handed to it, but the "
                f"optimizer itself was not. Pass it to the step function as an argument."
            )
        wanted.make()
        self.grew = True
        self._variables = self._numeric_variables(variables_in(self._roots))
        self._per_shard = [is_per_shard(variable) for variable in self._variables]

    def _look(self, leaves: tuple[jax.Array, ...]) -> _Found:
        found: list[_Found] = []

        def of_one_shard(values: Any, leaves: Any) -> Any:
            outputs, after, finding = self._step(values, leaves)
            found.append(finding)
            return jax.tree.map(lambda x: x[None], (outputs, after))

        abstract = [
            jax.tree.map(
                lambda x, spread=spread: jax.ShapeDtypeStruct(
                    (self._mesh.size, *x.shape) if spread else x.shape, x.dtype
                ),
                jax.tree.map(jnp.asarray, variable.get_raw_value()),
            )
            for variable, spread in zip(
                self._variables,
                (
                    p and not is_per_shard(v)
                    for v, p in zip(self._variables, self._per_shard, strict=True)
                ),
                strict=True,
            )
        ]
        everywhere = PartitionSpec(self._mesh.axis_names)
        jax.eval_shape(self._over_mesh(of_one_shard, everywhere), abstract, leaves)
        return found[-1]

    def _step(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any], _Found]:
        """One shard's step: its outputs, its variables after it, and what was found out."""
        before = [
            jax.tree.map(lambda x: x[0], value) if per_shard else value
            for value, per_shard in zip(values, self._per_shard, strict=True)
        ]
        handed = HandedIn(
            self._variables,
            modules_in(self._roots),
            (id(v) for v, p in zip(self._variables, self._per_shard, strict=True) if p),
        )
        args, kwargs = self._arguments.rebuild(leaves)
        with (
            shard_context(self._mesh.size, axis_name=self._mesh.axis_names),
            rebound(self._variables, before, handed.modules),
            handing_in(handed),
        ):
            outputs = as_output(self._computation(*args, **kwargs))
            after = [variable.get_raw_value() for variable in self._variables]
            self._check_none_was_made()
        changed = [
            jax.tree.structure(a) != jax.tree.structure(b)
            or any(x is not y for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
            for a, b in zip(after, before, strict=True)
        ]
        differs = [
            per_shard or (is_changed and self._comes_to_differ(variable, value, handed))
            for variable, value, per_shard, is_changed in zip(
                self._variables, after, self._per_shard, changed, strict=True
            )
        ]
        plan, tree = self._outputs.plan(outputs)
        flat = jax.tree.leaves(outputs)
        specs = [
            self._outputs.spec(x, *how, self._mesh.axis_names)
            for x, how in zip(flat, plan, strict=True)
        ]
        laid = [self._outputs.lay_out(x, *how) for x, how in zip(flat, plan, strict=True)]
        return laid, after, _Found(changed, differs, plan, specs, tree)

    def _comes_to_differ(self, variable: nnx.Variable, value: Any, handed: HandedIn) -> bool:
        if self._check_vma:
            return any(_jax.varying_axes(leaf) for leaf in jax.tree.leaves(value))
        # Counters of random streams advance by what the code does, never by what the data says.
        return id(variable) not in handed.equal and not isinstance(variable, nnx.RngState)

    def _check_none_was_made(self) -> None:
        known = {id(variable) for variable in self._variables}
        for variable in self._numeric_variables(variables_in(self._roots)):
            if id(variable) not in known:
                raise VariableError(
                    f"The step made {describe_variable(variable)} in a module that was handed to "
                    f"it, where it cannot be handed out. Make it before, or pop it in the step."
                )

    # What follows runs the step.

    def _run(self, values: Any, leaves: Any) -> tuple[list[Any], list[Any]]:
        def of_one_shard(values: Any, leaves: Any) -> Any:
            outputs, after, found = self._step(values, leaves)
            kept = [
                jax.tree.map(lambda x: x[None], value) if per_shard else value
                for value, per_shard, changed in zip(
                    after, self._per_shard, found.changed, strict=True
                )
                if changed
            ]
            return outputs, kept

        kept_specs = [
            spec
            for spec, changed in zip(self._variable_specs(), self._found.changed, strict=True)
            if changed
        ]
        specs = (self._found.output_specs, kept_specs)
        outputs, after = self._over_mesh(of_one_shard, specs)(values, leaves)
        joined = [
            x if from_all else x[0]
            for x, (from_all, _) in zip(outputs, self._found.outputs, strict=True)
        ]
        return joined, after

    def _over_mesh(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self._mesh,
            in_specs=(self._variable_specs(), self._arguments.specs),
            out_specs=out_specs,
            check_vma=self._check_vma,
        )

    def _variable_specs(self) -> list[PartitionSpec]:
        own = PartitionSpec(self._mesh.axis_names)
        return [own if per_shard else PartitionSpec() for per_shard in self._per_shard]

    def _shardings(self) -> list[NamedSharding]:
        return [NamedSharding(self._mesh, spec) for spec in self._variable_specs()]

    def _spread(self, variable: nnx.Variable) -> None:
        """Store one value per shard, so far all alike."""
        size = self._mesh.size
        variable.set_raw_value(
            jax.tree.map(
                lambda x: jnp.broadcast_to(x, (size, *jnp.shape(x))), variable.get_raw_value()
            )
        )
        variable.set_metadata(PER_SHARD, size)

    def _numeric_variables(self, variables: Sequence[nnx.Variable]) -> list[nnx.Variable]:
        numeric = [v for v in variables if all(map(is_numeric, jax.tree.leaves(v.get_raw_value())))]
        for variable in numeric:
            shards = variable.get_metadata(PER_SHARD, None)
            if shards and shards != self._mesh.size:
                raise VariableError(
                    f"{describe_variable(variable)} differs between {shards} shards, and this "
                    f"step runs on {self._mesh.size}. Choose one shard's value, or a mean, and "
                    f"write it with crossshard.set_shared(variable, value)."
                )
        return numeric


def _placed(x: Any, sharding: NamedSharding) -> Any:
    return x if getattr(x, "sharding", None) == sharding else jax.device_put(x, sharding)
