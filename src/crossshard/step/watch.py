"""Watch: raises what earlier steps have found, without waiting for the latest one."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from crossshard.errors import NonfiniteError
from crossshard.gradients.scalars import is_inexact
from crossshard.gradients.status import leaf_name
from crossshard.guards.diverged import report
from crossshard.model.state import TrainState
from crossshard.pipeline.stages.nonfinite import NonfiniteState
from crossshard.step.step_function import StepFunction

# Steps that may still run while the host goes on. All processes look at the same step, so that all
# of them raise in the same call.
_BEHIND = 2


class Watch:
    """Looks at what each step has found, two calls later.

    Args:
      function: the step, with what it looks for.
      mesh: the mesh of the step.
      axes: its shard axes.
    """

    def __init__(self, function: StepFunction, mesh: Mesh, axes: tuple[str, ...]):
        self._sentinel = function.sentinel
        self._nonfinite = function.pipeline.nonfinite
        self._mesh = mesh
        self._axes = axes
        self._metrics: collections.deque[dict[str, Any]] = collections.deque()

    @property
    def is_on(self) -> bool:
        """Whether steps look for anything."""
        return self._sentinel is not None or self._nonfinite is not None

    def add(self, metrics: dict[str, Any]) -> None:
        """Remember what a step has found."""
        names = metrics.keys() & {"divergence", "nonfinite"}
        self._metrics.append({name: metrics[name] for name in names})

    def look(
        self, state: TrainState, compared: Callable[[], Sequence[str]], running: int = _BEHIND - 1
    ) -> None:
        """Raise for what the call before the last has found, while the last may still run.

        Args:
          state: the latest state, after whose parameters leaves are named.
          compared: returns the names of the leaves that the sentinel compares.
          running: the number of the last calls that are not looked at yet.

        Raises:
          DivergenceError: shards had different copies of an array.
          NonfiniteError: at ``max_consecutive`` steps in a row something was not finite.
        """
        while len(self._metrics) > running:
            metrics = self._metrics.popleft()
            if self._sentinel is not None and metrics["divergence"].diverged:
                report(metrics["divergence"], self._sentinel, compared(), self._mesh, self._axes)
            if self._nonfinite is not None:
                self._check_finite(metrics["nonfinite"], state)

    def _check_finite(self, found: NonfiniteState, state: TrainState) -> None:
        assert self._nonfinite is not None
        number = _value(found.in_a_row)
        if number < self._nonfinite.max_consecutive:
            return
        # Whoever goes on is not told of the same steps again.
        self._metrics.clear()
        what, of_state = found.describe(state.params, state.model_state), _first_nan(state)
        then = (
            "Parameters and state hold nothing of it: save them, and look at the batch of that "
            "step."
        )
        if of_state:
            then = f"{of_state} of the state is NaN, whatever the batch is: restore a checkpoint."
        many = f"Something was not finite in {number} steps in a row; in the last of them "
        raise NonfiniteError(f"{many + what if number > 1 else what[0].upper() + what[1:]}. {then}")


def _first_nan(state: TrainState) -> str:
    """The first array of a state of which a part that this process has is NaN; empty if none is."""
    # Metrics are of the last step, and infinities may be meant, such as the best loss so far.
    opt_state = state.opt_state._replace(metrics=())
    # What is not trained is as it was given.
    state = dataclasses.replace(state, opt_state=opt_state, frozen=())
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if not is_inexact(x):
            continue
        # With numpy: JAX refuses an array on one device while a mesh of several is set.
        parts = [part.data for part in x.addressable_shards] if isinstance(x, jax.Array) else [x]
        if any(np.isnan(np.asarray(part)).any() for part in parts):
            return leaf_name(path)
    return ""


def _value(x: jax.Array) -> int:
    """A number of which each device, or shard, has the same copy."""
    return int(np.ravel(jax.device_get(x.addressable_data(0)))[0])
