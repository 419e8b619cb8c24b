"""Loss scale: gradients of a scaled loss in float16, and the skipping of steps that overflow."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from crossshard import _check
from crossshard._annotations import Given, PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class LossScaleState(NamedTuple):
    """The current loss scale."""

    scale: Any  # float32[], the factor of the loss
    good_steps: Any  # int32[], the steps since the last change of the scale


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(Stage):
    """A loss scale that all shards agree on, for gradients in float16.

    A step whose reduced gradient is not finite is skipped: parameters and states stay as they are,
    and the scale is multiplied by ``backoff_factor``. After ``growth_interval`` good steps it is
    multiplied by ``growth_factor`` (Micikevicius et al. 2018, arXiv 1710.03740).

    The loss is multiplied by it rounded to 8 bits, which numbers of 16 bits hold.

    Attributes:
      initial: the first scale.
      growth_interval: the number of good steps before the scale grows.
      growth_factor: the factor by which it grows.
      backoff_factor: the factor by which it shrinks.

    >>> DynamicLossScale(initial=4.0).init(None).scale
    Array(4., dtype=float32)
    """

    initial: float = 2.0**16
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5

    phase = Phase.UPDATE
    scope = state_field = "loss_scale"
    needs_whole = "loss_scale= changes if any gradient is not finite"
    options = ("loss_scale",)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check.number(f"{field.name} of DynamicLossScale", getattr(self, field.name))
        wanted = {
            "initial": _SMALLEST <= self.initial <= _LARGEST,
            "growth_interval": self.growth_interval % 1 == 0 < self.growth_interval < 2**31,
            "growth_factor": 1 <= self.growth_factor < np.inf,
            "backoff_factor": 0 < self.backoff_factor < 1,
        }
        for name, is_good in wanted.items():
            if not is_good:
                raise ArgumentError(
                    f"DynamicLossScale takes initial > 0 and finite in float32, growth_interval a "
                    f"whole number >= 1, growth_factor >= 1 and 0 < backoff_factor < 1; got "
                    f"{name}={getattr(self, name)!r}."
                )

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> "DynamicLossScale | None":
        """Return the stage of ``loss_scale``; ``None`` without one.

        Raises:
          ArgumentTypeError: neither ``"dynamic"`` nor a ``DynamicLossScale``.
        """
        given = options.get("loss_scale")
        if given is None or isinstance(given, DynamicLossScale):
            return given
        if isinstance(given, str) and given == "dynamic":
            return cls()
        initial = f"(initial={given!r})" if isinstance(given, int | float) else ""
        raise ArgumentTypeError(
            f"loss_scale must be 'dynamic' or a crossshard.DynamicLossScale; got "
            f"{_check.described(given)}. Write crossshard.DynamicLossScale{initial or '()'}."
        )

    def init(self, params: PyTree) -> LossScaleState:
        del params
        return LossScaleState(jnp.float32(self.initial), jnp.int32(0))

    def update(self, gradients: Gradients, state: LossScaleState, context: StageContext) -> Staged:
        """Return the reduced gradients, skipped if they are not finite, and the next scale."""
        finite = gradients.finite
        assert finite is not None
        grows = state.good_steps + 1 >= self.growth_interval
        # Bounded, so that neither the scale nor its inverse becomes infinite or zero.
        grown = jnp.minimum(state.scale * self.growth_factor, 2.0**120)
        shrunk = jnp.maximum(state.scale * self.backoff_factor, 2.0**-120)
        after = LossScaleState(
            jnp.where(finite, jnp.where(grows, grown, state.scale), shrunk),
            jnp.where(finite & ~grows, state.good_steps + 1, 0),
        )
        if gradients.skip is not None:
            # A step without gradients says nothing about the scale.
            idle = context.on_all_shards(gradients.skip)
            after = jax.tree.map(lambda new, old: jnp.where(idle, old, new), after, state)
        return gradients.skipped_if(~finite), after

    def describe(self) -> str:
        return "skip if not finite"
