"""Layouts: the placement of a step's states, decided once for each kind of model."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from crossshard import _mesh
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.pipeline.update.plan import plan_update
from crossshard.shards.model_axes import check_fits, only
from crossshard.shards.partition import tile_for
from crossshard.step.config import StepConfig


class Layouts:
    """The layout of each kind of state that a step has met."""

    def __init__(self, config: StepConfig):
        self._config = config
        self._known: dict[Any, StateLayout] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of_state(self, state: TrainState) -> StateLayout:
        """The layout of a state, or of its types."""
        params = state.params
        if self._config.is_grouped:
            params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)
        return self.of_params(params, state.other_axes)

    def of_params(self, params: Any, other_axes: tuple[PartitionSpec, ...]) -> StateLayout:
        """The layout of a state with such parameters.

        Args:
          params: one set of parameters.
          other_axes: how arrays are split over the other axes.
        """
        leaves, tree = jax.tree.flatten(params)
        shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        key = tree, shapes, other_axes
        if key not in self._known:
            types = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*each) for each in shapes])
            # What is traced here runs under another mesh than the user may have set.
            with _mesh.without_mesh():
                self._known[key] = self._plan(params, types, other_axes)
        return self._known[key]

    def _plan(self, params: Any, types: Any, other_axes: tuple[PartitionSpec, ...]) -> StateLayout:
        config = self._config
        mesh, pipeline = config.mesh, config.pipeline
        groups = pipeline.groups if config.is_grouped else None
        check_fits(params, other_axes, mesh)
        # JAX drops axes of size 1 from the shardings of its results.
        several = [axis for axis, size in mesh.shape.items() if size > 1]
        split = tuple(only(each, several) for each in other_axes)
        plan = plan_update(
            pipeline.optimizer,
            params,
            config.number_of_shards if groups is None else groups.size,
            config.weight_update,
            only_parts=groups is not None,
            # A preprocessor may read them all.
            leave_unread=pipeline.preprocess is None,
            tile=tile_for(mesh, config.in_parts),
            other_axes=split[: len(jax.tree.leaves(params))],
            in_parts=config.in_parts,
            # XLA for CPUs does nothing beside a sum.
            sums_in_loops=mesh.devices.flat[0].platform != "cpu",
            virtual_shards=config.loss.same_bits,
        )
        model_state = config.loss.model_state
        return StateLayout(
            mesh,
            config.axes,
            plan,
            groups,
            pipeline,
            types,
            model_state,
            split,
            has_one_state=config.loss.has_one_state,
        )
