"""Metrics: norms, learning rate and gradient noise scale, from the collectives of the step."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.pipeline.arrays import squared_norm
from crossshard.pipeline.means import to_average
from crossshard.pipeline.optimize import Updated
from crossshard.pipeline.stage import Environment, Gradients
from crossshard.variables.discovery import functions_reached_by

NAMES = {
    "grad_norm": "the norm of the reduced gradient",
    "local_grad_norm": "the root of the mean over the shards of the squared norms of their own",
    "update_norm": "the norm of the update",
    "param_norm": "the norm of the parameters after the update",
    "learning_rate": "the learning rate, from inject_hyperparams or a schedule",
    "noise_scale": "the gradient noise scale: noise_variance / noise_signal",
    "noise_variance": "an estimate of the trace of the covariance of one example's gradient",
    "noise_signal": "an estimate of the squared norm of the true gradient",
}
_OF_NOISE = frozenset({"noise_scale", "noise_variance", "noise_signal"})
_OF_LOCAL = _OF_NOISE | {"local_grad_norm"}


@dataclasses.dataclass(frozen=True)
class Metrics:
    """The metrics of a step, which are kept in the state.

    The noise is estimated as in McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1).

    Attributes:
      names: the names of the metrics.
    """

    names: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names)

    @property
    def needs_local(self) -> bool:
        """Whether they need the gradient of each shard."""
        return not _OF_LOCAL.isdisjoint(self.names)

    def init(self, optimizer: optax.GradientTransformation, state: Any) -> Any:
        """Zeros, before the first update.

        Raises:
          ArgumentError: ``learning_rate``, of an optimizer whose state does not tell it.
        """
        if "learning_rate" in self.names:
            learning_rate(optimizer, state, state)
        return {name: jnp.float32(0) for name in self.names} or ()

    def sums(self, gradients: Gradients) -> Mapping[str, Any]:
        """What the aggregate is to sum for them, from a shard's local gradient."""
        if not self.needs_local:
            return {}
        squared, weight = squared_norm(gradients.values), gradients.weight
        if weight is None:
            return {"squared_norm": squared}
        counts = (weight != 0).astype(jnp.float32)
        return {"squared_norm": to_average(squared, weight), "shards_with_weight": counts}

    def measure(
        self,
        gradients: Gradients,
        environment: Environment,
        updated: Updated,
        optimizer: optax.GradientTransformation,
        before: Any,
    ) -> Any:
        """Their values, given the reduced gradients, the update and the optimizer's old state."""
        if "param_norm" in self.names and updated.params is None:
            raise ArgumentError(
                "metrics has 'param_norm', which needs the parameters: opt.update(grads, state, "
                "params)."
            )
        trees = {
            "grad_norm": lambda: gradients.values,
            "update_norm": lambda: updated.updates,
            "param_norm": lambda: optax.apply_updates(updated.params, updated.updates),
        }
        found: dict[str, Any] = {
            name: environment.arrays.squared_norm(tree()) ** 0.5
            for name, tree in trees.items()
            if name in self.names
        }
        if "learning_rate" in self.names:
            found["learning_rate"] = learning_rate(optimizer, before, updated.state)
        if self.needs_local:
            found |= _of_noise(gradients, environment)
        return {name: jnp.asarray(found[name], jnp.float32) for name in self.names}


def _of_noise(gradients: Gradients, environment: Environment) -> Mapping[str, Any]:
    groups = environment.groups
    number = environment.shards.number if groups is None else groups.size
    total = gradients.weight
    active: Any = number if total is None else gradients.sums["shards_with_weight"]
    local = gradients.sums["squared_norm"] / (number if total is None else total)
    # Under SUM the reduced gradient is not divided.
    scale = 1 if environment.divisor == number else number
    reduced = environment.arrays.squared_norm(gradients.values) / scale**2
    examples: Any = number * environment.examples if total is None else total
    variance = (local - reduced) * examples / (active - 1)
    signal = reduced - variance / examples
    return {
        "local_grad_norm": local**0.5,
        "noise_variance": variance,
        "noise_signal": signal,
        "noise_scale": variance / signal,
    }


def learning_rate(optimizer: optax.GradientTransformation, before: Any, after: Any) -> Any:
    """float[]: the learning rate of an update, from the optimizer's state before and after it.

    Raises:
      ArgumentError: the optimizer does not tell it.
    """
    # Beside a schedule's value inject_hyperparams keeps the schedule's state by the same name.
    found = optax.tree.get_all_with_path(after, "learning_rate")
    told = [value for _, value in found if jax.tree_util.all_leaves([value])]
    if len(told) == 1:
        return told[0]
    is_count = lambda node: isinstance(node, optax.ScaleByScheduleState)
    counts = [node for node in jax.tree.leaves(before, is_leaf=is_count) if is_count(node)]
    schedules = list(_schedules(optimizer))
    if not told and len(counts) == len(schedules) == 1:
        # The schedule of a learning rate has the sign of the update.
        return jnp.abs(schedules[0](counts[0].count))
    many = "several learning rates" if told or schedules else "no learning rate"
    raise ArgumentError(
        f"metrics has 'learning_rate', but the optimizer's state tells {many}. Write "
        f"optax.inject_hyperparams(optax.adam)(learning_rate=...), or pass a schedule as the "
        f"learning rate."
    )


def _schedules(optimizer: optax.GradientTransformation) -> Iterable[Any]:
    """The functions from a step count to a step size that an optimizer runs."""
    for function in functions_reached_by([optimizer]):
        if function.__qualname__ == "scale_by_schedule.<locals>.update_fn":
            closed = dict(
                zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            )
            yield closed["step_size_fn"].cell_contents


def check_metrics(metrics: Any) -> Metrics:
    """The checked metrics.

    Raises:
      ArgumentError: an unknown name.
      ArgumentTypeError: not names.
    """
    names = (metrics,) if isinstance(metrics, str) else metrics
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(f"metrics must be names, such as ('grad_norm',); got {metrics!r}.")
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in NAMES:
            raise ArgumentError(f"metrics has {name!r}; the metrics are {', '.join(NAMES)}.")
    return Metrics(names)
