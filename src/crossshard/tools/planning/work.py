"""What is planned: a step, by its loss, optimizer and shapes, and the ways that are compared."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.optimizer.transformation import transformation_of
from crossshard.pipeline.update.plan import Rest, WeightUpdate
from crossshard.step.make_train_step import make_train_step
from crossshard.step.train_step import TrainStep
from crossshard.tools.planning.topology import Topology

DATA, MODEL = "data", "model"
# Chosen by the plan itself.
_OURS = {"mesh", "num_shards", "axis_name", "weight_update"}
# Options of a step whose parameters rest in parts, and of no other.
_OF_PARTS = {"gather_dtype"}
# How many devices share a model, which are near: NVLink, or a part of a torus.
_OF_A_MODEL = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Work:
    """A step to plan.

    Attributes:
      loss_fn: as ``make_train_step`` takes it.
      params: arrays or types, or an NNX module of them.
      batch: the global batch by the number of devices.
      optimizer: an Optax transformation.
      model_specs: how parameters are split over the axis ``model``; ``None`` if they are not split.
      options: further arguments of ``make_train_step``.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Callable[[int], Any]
    optimizer: optax.GradientTransformation
    model_specs: Any
    options: Mapping[str, Any]

    def choices(self, topology: Topology) -> list[tuple[dict[str, int], str, str]]:
        """Meshes, each with the ``weight_update`` and ``params`` of a step: what is compared.

        Each device is a shard, or 2, 4 … of them share a model.

        Raises:
          ArgumentError: the model cannot be split as model_specs say over any number of devices.
        """
        meshes = [{DATA: topology.size}]
        problem = None
        for size in () if self.model_specs is None else _OF_A_MODEL:
            if topology.size % size:
                break
            mesh = {DATA: topology.size // size, MODEL: size}
            try:
                self._types_on(topology.mesh(mesh))
                meshes.append(mesh)
            except ArgumentError as error:
                problem = problem or error
        if problem is not None and len(meshes) == 1:
            raise problem
        whole = Rest.REPLICATED.value
        ways = [(WeightUpdate.REPLICATED.value, whole), (WeightUpdate.SHARDED.value, whole)]
        # Groups of shards differ in their parameters, which cannot rest in parts.
        groups = transformation_of(self.optimizer).pipeline.groups
        if groups is None or len(groups.groups) == 1:
            ways.append((WeightUpdate.SHARDED.value, Rest.SHARDED.value))
        # One shard has nothing to split.
        of_mesh = lambda mesh: ways[:1] if mesh[DATA] == 1 else ways
        return [(mesh, *way) for mesh in meshes for way in of_mesh(mesh)]

    def step(self, mesh: Mesh, weight_update: str, params: str) -> tuple[TrainStep, Any]:
        """The step, and the types of its state."""
        axis = DATA if MODEL in mesh.axis_names else None
        left_out = _OF_PARTS if params == Rest.REPLICATED else ()
        step = make_train_step(
            self.loss_fn,
            self.optimizer,
            mesh=mesh,
            axis_name=axis,
            weight_update=weight_update,
            params=params,
            **{name: each for name, each in self.options.items() if name not in left_out},
        )
        return step, step.abstract_init(self._types_on(mesh))

    def _types_on(self, mesh: Mesh) -> Any:
        """The types of the parameters, split over the axis ``model`` if the mesh has it."""
        if MODEL not in mesh.axis_names:
            return self.params
        specs = self.model_specs
        if not callable(specs):
            flat = _flat_specs(specs, self.params)
            specs = lambda path, leaf: flat[jax.tree_util.keystr(path)]

        def lay(path: Any, leaf: Any) -> Any:
            spec = specs(path, leaf)
            if not isinstance(spec, PartitionSpec):
                raise ArgumentTypeError(
                    f"model_specs must be a function of path and leaf that returns "
                    f"a PartitionSpec, or a pytree of these like params; got "
                    f"{_check.described(spec)}."
                )
            try:
                sharding = NamedSharding(mesh, spec)
                sharding.shard_shape(leaf.shape)
            except ValueError as error:
                raise ArgumentError(
                    f"params{jax.tree_util.keystr(path)}, of shape {leaf.shape}, cannot be split "
                    f"as {spec} over {dict(mesh.shape)}."
                ) from error
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        if isinstance(self.params, nnx.Pytree):
            graph, state = nnx.split(self.params)
            return nnx.merge(graph, jax.tree_util.tree_map_with_path(lay, state))
        return jax.tree_util.tree_map_with_path(lay, self.params)


def make_work(
    loss_fn: Any,
    params: Any,
    batch: Any,
    optimizer: Any,
    model_specs: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Work:
    """The step that ``crossshard.plan``'s arguments describe.

    Raises:
      ArgumentError: an option that the plan chooses itself, among them ``params`` of a step.
      ArgumentTypeError: model_specs are neither specs nor a function.
    """
    options = dict(options or {})
    chosen = sorted(_OURS & set(options))
    if chosen:
        raise ArgumentError(f"plan compares meshes and updates itself; leave out {chosen[0]}.")
    if isinstance(params, str):
        raise ArgumentError(
            f"plan compares parameters that rest whole and in parts itself; params is the model "
            f"here, and not {params!r}."
        )
    is_model = isinstance(params, nnx.Pytree) or not callable(params)
    types = params if is_model else nnx.eval_shape(params)
    of_devices = batch if callable(batch) else lambda devices: batch
    return Work(loss_fn, types, of_devices, optimizer, model_specs, options)


def _flat_specs(specs: Any, params: Any) -> dict[str, PartitionSpec]:
    is_spec = lambda x: x is None or isinstance(x, PartitionSpec)
    try:
        whole = jax.tree.broadcast(specs, params, is_leaf=is_spec)
    except ValueError as error:
        raise ArgumentTypeError(
            "model_specs must be a function of path and leaf, or a pytree of PartitionSpec like "
            f"params: {str(error).splitlines()[0]}"
        ) from error
    return {
        jax.tree_util.keystr(path): PartitionSpec() if spec is None else spec
        for path, spec in jax.tree_util.tree_leaves_with_path(whole, is_leaf=is_spec)
    }
