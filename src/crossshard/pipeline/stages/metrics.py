"""Metrics: norms, learning rate and gradient noise scale, from the collectives of the step."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _check
from crossshard._annotations import Given
from crossshard.collectives.sums import average, to_average, to_sum
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged, Updated
from crossshard.pipeline.update.arrays import squared_norm
from crossshard.pipeline.update.optimize import Optimize
from crossshard.shards.cut import PER_SHARD, REPLICATED, Placement

NAMES = {
    "grad_norm": "the norm of the reduced gradient",
    "local_grad_norm": "the root of the mean over the shards of the squared norms of their own",
    "update_norm": "the norm of the update",
    "param_norm": "the norm of the parameters after the update",
    "learning_rate": "the learning rate, from optax.inject_hyperparams",
    "noise_scale": "the gradient noise scale: noise_variance / noise_signal",
    "noise_variance": "an estimate of the trace of the covariance of one example's gradient",
    "noise_signal": "an estimate of the squared norm of the true gradient",
}
_OF_NOISE = frozenset({"noise_scale", "noise_variance", "noise_signal"})
_OF_LOCAL = _OF_NOISE | {"local_grad_norm"}


def need_local(names: Iterable[str]) -> bool:
    """Return whether metrics need the gradient of each shard."""
    return not _OF_LOCAL.isdisjoint(names)


@dataclasses.dataclass(frozen=True)
class LocalNorms(Stage):
    """Measures each shard's gradient for the metrics that need it."""

    phase = Phase.LOCAL
    scope = "metrics"
    state_field = ""
    needs_local = "metrics measure"
    takes_summed = True  # the backward pass measures what it sums
    options = ()
    asked_by = ("metrics",)

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self | None:
        """Return the stage if a metric needs it, else ``None``."""
        return cls() if need_local(check_metrics(options.get("metrics", ()))) else None

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the same gradients, with further values that the aggregate is to sum."""
        del context
        leaves, weight = jax.tree.leaves(gradients.values), gradients.weight
        early = gradients.early or [False] * len(leaves)
        squared = squared_norm(
            [x for x, is_early in zip(leaves, early, strict=True) if not is_early]
        )
        if gradients.early_squares is not None:
            squared += gradients.early_squares
        own, sums = gradients.own_weight, dict(gradients.sums)
        if own is not None:
            squared = average(squared, own)
            own = sums["own_weight"] = to_sum(own, weight)
        sums["squared_norm"] = to_average(squared, weight)
        counted = weight if own is None else own
        if counted is not None:
            sums["shards_with_weight"] = (counted != 0).astype(jnp.float32)
        return gradients.replace(sums=sums), state


@dataclasses.dataclass(frozen=True)
class Metrics(Stage):
    """Keeps the metrics of a step in the state.

    The noise is estimated as in McCandlish et al. 2018 (arXiv 1812.06162, appendix A.1).
    """

    names: tuple[str, ...]
    optimizer: optax.GradientTransformation
    placement: Placement = REPLICATED

    phase = Phase.UPDATE
    scope = state_field = "metrics"
    needs_whole = "metrics= has norms of all arrays"
    options = ("metrics",)
    # Metrics do not change what a step computes.
    is_compared = False

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self | None:
        names = check_metrics(options.get("metrics", ()))
        if not names:
            return None
        optimize = Optimize.from_options(options)
        groups = options["groups"]
        differ = groups is not None and len(groups.groups) > 1
        placement = PER_SHARD if differ else REPLICATED
        return cls(names, optimize.optimizer, placement)

    def init(self, params: Any) -> Any:
        """Return zeros, before the first update.

        Raises:
          ArgumentError: ``learning_rate`` is asked for, and is not in the optimizer's state.
        """
        if "learning_rate" in self.names:
            learning_rate(jax.eval_shape(self.optimizer.init, params))
        return {name: jnp.float32(0) for name in self.names}

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the same gradients, and the metrics of the update."""
        del state
        updated = gradients.updated
        assert updated is not None
        if "param_norm" in self.names and updated.params is None:
            raise ArgumentError(
                "metrics has 'param_norm', which needs the parameters: opt.update(grads, state, "
                "params)."
            )
        norm = lambda tree: context.arrays.squared_norm(tree) ** 0.5
        norms = {
            "grad_norm": lambda: norm(gradients.settled().values),
            "update_norm": lambda: _update_norm(norm, updated, gradients.skip),
            "param_norm": lambda: norm(_updated_params(updated)),
        }
        found: dict[str, Any] = {
            name: compute() for name, compute in norms.items() if name in self.names
        }
        if "learning_rate" in self.names:
            found["learning_rate"] = learning_rate(updated.state)
        if need_local(self.names):
            found |= _of_noise(gradients, context)
        return gradients, {name: jnp.asarray(found[name], jnp.float32) for name in self.names}

    def describe(self) -> str:
        return ""


def _update_norm(norm: Any, updated: Updated, skip: Any) -> Any:
    """Return the norm of the update, 0 if it is skipped."""
    if updated.unskipped is None:
        return norm(updated.updates)
    # XLA would write the zeros of a select of each update to memory.
    return jnp.where(skip, 0, norm(updated.unskipped))


def _updated_params(updated: Updated) -> Any:
    """Return the parameters after the update, split as the optimizer's arrays are."""
    if updated.applied is None:
        return optax.apply_updates(updated.params, updated.updates)
    # XLA would fuse the norms with the update, which then cannot overwrite the parameters.
    return lax.optimization_barrier(updated.applied)


def _of_noise(gradients: Gradients, context: StageContext) -> Mapping[str, Any]:
    sums, number, total = gradients.sums, context.shards.group_size, gradients.weight
    parts: Any = number if total is None else total
    active, examples = sums.get("shards_with_weight", number), context.examples * parts
    local = sums["squared_norm"] / parts
    if "own_weight" in sums:
        # A ``Mean`` multiplies the gradient of a shard by its weight, over the mean weight.
        examples = sums["own_weight"]
        local *= examples / parts
    # Under SUM the reduced gradient is not divided.
    scale = 1 if context.divisor == number else number
    reduced = context.arrays.squared_norm(gradients.settled().values) / scale**2
    variance = (local - reduced) * examples / (active - 1)
    signal = reduced - variance / examples
    return {
        "local_grad_norm": local**0.5,
        "noise_variance": variance,
        "noise_signal": signal,
        "noise_scale": variance / signal,
    }


def learning_rate(state: Any) -> Any:
    """Return the learning rate of an update, float[], from the optimizer's state after it.

    Raises:
      ArgumentError: the state has none, or several.
    """
    # inject_hyperparams keeps a schedule's value and the schedule's state by the same name.
    found = optax.tree.get_all_with_path(state, "learning_rate")
    told = [value for _, value in found if jax.tree_util.all_leaves([value])]
    if len(told) == 1:
        return told[0]
    raise ArgumentError(
        f"metrics has 'learning_rate', but the optimizer's state tells "
        f"{'several learning rates' if told else 'no learning rate'}. Write "
        f"optax.inject_hyperparams(optax.adam)(learning_rate=...); a schedule may be the rate. A "
        f"function that is none, such as a mask, is named: static_args='mask'."
    )


def check_metrics(metrics: Any) -> tuple[str, ...]:
    """Return the checked names of metrics."""
    names = (metrics,) if isinstance(metrics, str) else metrics
    names = [None] if hasattr(names, "dtype") or not isinstance(names, Iterable) else list(names)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"metrics must be names, such as ('grad_norm',); got {_check.shown(metrics)}."
        )
    names = tuple(dict.fromkeys(names))
    for name in names:
        if name not in NAMES:
            raise ArgumentError(f"metrics has {name!r}; the metrics are {', '.join(NAMES)}.")
    return names
