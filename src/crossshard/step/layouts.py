"""Layouts: the placement of a step's states, decided once for each kind of model."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from crossshard import _mesh
from crossshard.model.layout import StateLayout, shards_of
from crossshard.model.state import TrainState
from crossshard.pipeline.update.plan import Planner
from crossshard.shards.model_axes import check_fits, only
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
        planner = Planner(
            pipeline.optimizer,
            params,
            shards_of(mesh, config.axes),
            groups,
            mesh,
            config.weight_update,
            config.in_parts,
            # A preprocessor may read them all.
            leave_unread=pipeline.preprocess is None,
            other_axes=split[: len(jax.tree.leaves(params))],
            virtual_shards=config.loss.virtual_shards,
        )
        model_state = config.loss.model_state
        return StateLayout(
            mesh,
            config.axes,
            *planner.plan(),
            groups,
            pipeline,
            types,
            model_state,
            split,
            has_one_state=config.loss.is_over_batch,
        )
