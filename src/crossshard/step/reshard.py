"""Reshard: a state in the optimizer's own shapes, and on another number of shards."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _jax, _mesh
from crossshard.distributed.progress import waiting
from crossshard.errors import ArgumentError, CheckpointWarning
from crossshard.model.layout import StateLayout
from crossshard.model.state import TrainState
from crossshard.shards.cut import only
from crossshard.shards.devices import are_of_all_processes, put_whole_unless_on
from crossshard.step.config import Layouts, StepConfig, check_equal_everywhere
from crossshard.step.options import NEW, adopted, completed, completed_types


class Resharder:
    """Moves states between the layout of a step and the optimizer's own shapes."""

    def __init__(self, config: StepConfig, layouts: Layouts):
        self._config = config
        self._layouts = layouts
        self._compiled: dict[Any, Callable[[TrainState], TrainState]] = {}

    def unshard(self, state: TrainState) -> TrainState:
        """See ``TrainStep.unshard``."""
        layout = self._layouts.of_state(state)
        return self._run(layout.unpack, state, layout.unsharded(state))

    def collected(self, state: TrainState) -> TrainState:
        """The state without rows of owners; arrays stay split over the shards."""
        layout = self._layouts.of_state(state)
        if layout.own is layout:
            return state
        types = layout.collected_types(state)
        return self._run(layout.collected, state, layout.own.shardings(types))

    def reshard(self, state: TrainState) -> TrainState:
        """See ``TrainStep.reshard``."""
        config = self._config
        others = [axis for axis in config.mesh.axis_names if axis not in config.axes]
        kept = tuple(only(each, others) for each in state.other_axes)
        state = dataclasses.replace(state, other_axes=kept if any(kept) else ())
        layout = self._layouts.of_state(state)
        state, what = adopted(layout, state)
        if what:
            text = f"The state is of a step with other options: {'; '.join(what)}."
            # At the user's line, behind TrainStep.reshard.
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        layout.check_optimizer(state)
        given = jax.tree.map(lambda x: None if x is NEW else x, state)
        check_equal_everywhere(config, "reshard", {"a state": given})
        types = completed_types(layout, state)
        layout.check_unsharded(types)
        where = layout.incoming(types)
        place = lambda x, to: x if x is NEW else put_whole_unless_on(x, to)
        state = jax.tree.map(place, state, where)
        with _mesh.in_place_of_the_users_mesh(config.mesh):
            state = completed(layout, state, jax.tree.leaves(where))
        if not (layout.is_of_these_shards(state) and self._is_of_these_workers(layout, state)):
            if config.is_grouped and not config.pipeline.joins_groups:
                raise ArgumentError(
                    f"The state has groups over another number of shards than "
                    f"{layout.number_of_shards}. Choose one shard's parameters with "
                    f"other.model(state, shard=0) and init with them."
                )
            types = jax.eval_shape(layout.on_other_shards, state)
            return self._run(layout.on_other_shards, state, layout.shardings(types))
        return self._run(layout.pack, state, layout.shardings(state))

    def _is_of_these_workers(self, layout: StateLayout, state: TrainState) -> bool:
        """Whether all shards of each worker have the same, if there are workers."""
        if layout.groups is None or not layout.pipeline.joins_groups:
            return True
        members = layout.groups.members

        def look(arrays: Any) -> jax.Array:
            equal = [(x[members] == x[members[:, :1]]).all() for x in jax.tree.leaves(arrays)]
            return jnp.stack(equal).all()

        # Right after a synchronisation all have the same parameters.
        of_worker = state.params, state.opt_state.inner_state

        with _mesh.in_place_of_the_users_mesh(self._config.mesh):
            return bool(jax.jit(look)(of_worker))

    def _run(self, how: Callable[[Any], Any], state: TrainState, to: TrainState) -> TrainState:
        # A loop that saves would compile it each time. Layouts live as long.
        key = how, jax.tree.structure(state)
        if key not in self._compiled:
            run = lambda state: how(jax.tree.map(jnp.copy, state))
            self._compiled[key] = jax.jit(run, out_shardings=to)
        # All processes of the job send each other their parts.
        together = (
            are_of_all_processes(self._config.mesh)
            and _jax.at_top_level()
            and not all(getattr(x, "is_fully_replicated", True) for x in jax.tree.leaves(state))
        )
        with (
            waiting("unshard") if together else contextlib.nullcontext(),
            _mesh.in_place_of_the_users_mesh(self._config.mesh),
        ):
            return self._compiled[key](state)
