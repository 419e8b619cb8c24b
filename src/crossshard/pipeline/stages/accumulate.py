"""Accumulate: the mean gradient of several microbatches, which is reduced once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from crossshard import _check
from crossshard._annotations import Given
from crossshard._check import is_inexact
from crossshard.collectives.sums import average, wide, widen
from crossshard.errors import ArgumentError
from crossshard.gradients.status import check_shapes
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged
from crossshard.shards.cut import PER_SHARD, REPLICATED


class AccumulateState(NamedTuple):
    """The sums over the microbatches since the last update."""

    count: Any  # int32[], the number of microbatches
    values: Any  # the sum of the shard's gradients times their weights, with at least 32 bits
    value: Any  # float[], the same sum of the loss, if the caller passes it
    weight: Any  # float[], the sum of the weights; the number of microbatches if all count the same


@dataclasses.dataclass(frozen=True)
class Accumulate(Stage):
    """Sums the gradients of ``steps`` calls; only the last of them reduces and updates."""

    steps: int

    placement = PER_SHARD
    phase = Phase.CALL
    scope = state_field = "accumulate"
    needs_local = "accumulate_steps adds up"
    options = ("accumulate_steps",)
    # In a step, the options of its loss have it.
    is_compared = False

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self | None:
        """Return the stage for ``accumulate_steps`` calls; ``None`` for one call."""
        steps = _check.whole_number("accumulate_steps", options.get("accumulate_steps", 1))
        return cls(steps) if steps > 1 else None

    def init(self, params: Any) -> AccumulateState:
        return AccumulateState(jnp.int32(0), *zeros(params))

    def placements(self, state: AccumulateState) -> AccumulateState:
        """Return the placements: all shards have the same count, and each has its own sums."""
        return super().placements(state)._replace(count=REPLICATED)

    def update(self, gradients: Gradients, state: AccumulateState, context: StageContext) -> Staged:
        """Return the mean gradient of the microbatches so far, and the sums with this one."""
        if "grad" in gradients.extra:
            raise ArgumentError(
                "accumulate_steps does not accumulate the extra argument grad, which a line search "
                "takes. Leave accumulate_steps out."
            )
        check_shapes(gradients.values, state.values)
        loss, weight = gradients.extra.get("value"), gradients.weight
        count = context.agreed(state.count) + 1
        sums = add(state[1:], gradients.values, jnp.zeros(()) if loss is None else loss, weight)
        values, value = mean(sums)
        extra = gradients.extra if loss is None else {"value": value.astype(loss.dtype)}
        total = None if weight is None else sums[2]
        gradients = gradients.replace(values=values, extra=extra, weight=total)
        return gradients, AccumulateState(count, *sums)

    def is_last(self, state: AccumulateState) -> Bool[Array, ""]:
        """Return whether this call is the last, given the state with it."""
        return state.count >= self.steps

    def describe(self) -> str:
        return f"accumulate {self.steps} calls"


# The sums of gradients, losses and weights.
Sums = tuple[Any, Any, Any]


def add(
    sums: Sums,
    gradients: Any,
    loss: Any,
    weight: jax.Array | None,
    early: tuple[bool, ...] = (),
) -> Sums:
    """Return the sums with one more microbatch; ``early`` gradients are already weighted."""

    def one(x: Any, new: Any, weight: Any = weight) -> Any:
        if not is_inexact(new):
            return x
        wide = widen(new).astype(x.dtype)
        # `where`, because the gradient of weight 0 may be NaN.
        return x + (wide if weight is None else jnp.where(weight != 0, wide * weight, 0))

    weighted = lambda x, new, is_early: one(x, new, None if is_early else weight)
    values = _map_leaves(weighted, early, sums[0], gradients)
    return values, one(sums[1], loss), sums[2] + (1 if weight is None else weight)


def mean(sums: Sums, early: tuple[bool, ...] = (), *, weighted: bool = False) -> tuple[Any, Any]:
    """Return the mean gradient and loss; zeros if all weights are zero.

    With weights, gradients that are ``early`` stay sums: their weights are those of all shards.
    """

    def one(x: Any, is_early: bool = False) -> Any:
        return average(x, sums[2]) if is_inexact(x) and not (is_early and weighted) else x

    return _map_leaves(one, early, sums[0]), one(sums[1])


def _map_leaves(function: Callable[..., Any], flags: Sequence[bool], *trees: Any) -> Any:
    """Apply ``function(*leaves, flag)`` to each leaf; without flags, all are unset."""
    leaves, structure = jax.tree.flatten(trees[0])
    others = (jax.tree.leaves(tree) for tree in trees[1:])
    every = zip(leaves, *others, flags or [False] * len(leaves), strict=True)
    return structure.unflatten([function(*each) for each in every])


def zeros(params: Any) -> Sums:
    """Return the sums before the first microbatch, given the gradients, or their types."""

    def one(leaf: Any) -> jax.Array:
        dtype = jnp.result_type(leaf)
        return jnp.zeros_like(leaf, wide(dtype) if is_inexact(leaf) else dtype)

    zero = jnp.zeros((), float)
    return jax.tree.map(one, params), zero, zero
