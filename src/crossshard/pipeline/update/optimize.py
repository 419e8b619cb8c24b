"""Optimize: the wrapped optimizer's update, on full arrays, slices or global arrays."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _check, _jax
from crossshard._annotations import Given
from crossshard.errors import ArgumentError
from crossshard.gradients.status import check_shapes
from crossshard.jaxprs.repeats import computed_once
from crossshard.jaxprs.walk import equations_of
from crossshard.pipeline.options import check_dtype
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext
from crossshard.pipeline.update.masters import with_masters
from crossshard.pipeline.update.moving_average import (
    Decay,
    check_ema,
    describe_decay,
    with_moving_average,
)
from crossshard.shards.groups import over_all_shards


class Updated(NamedTuple):
    """The result of an optimizer's update.

    Attributes:
      result: full updates, or full updated parameters.
      updates: the updates, split as the optimizer's arrays are.
      params: the parameters before it, split in the same way; ``None`` if the caller passed none.
      state: the optimizer's next state.
    """

    result: Any
    updates: Any = None
    params: Any = None
    state: Any = None


@dataclasses.dataclass(frozen=True)
class Optimize(Stage):
    """The wrapped optimizer, on full arrays, on slices, or on global arrays.

    Attributes:
      inner: the optimizer, as the user passed it.
      master_dtype: the dtype of master weights; ``None`` without them.
      ema: the decay of the moving average of the parameters, or a schedule; ``None`` without one.
    """

    inner: optax.GradientTransformationExtraArgs
    master_dtype: Any = None
    ema: Decay | None = None

    phase = Phase.UPDATE
    scope = ""
    state_field = "inner_state"
    options = ("master_dtype", "ema")

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        """The stage, which is always there.

        Raises:
          ArgumentError, ArgumentTypeError: no such dtype, or no such decay.
        """
        dtype = check_dtype("master_dtype", options.get("master_dtype"))
        return cls(options["inner"], dtype, check_ema(options.get("ema")))

    def written(self) -> dict[str, Given]:
        """The dtype and the decay."""
        return {"master_dtype": self.master_dtype, "ema": self.ema}

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with a moving average and master weights if asked for."""
        optimizer = self.inner
        if self.ema is not None:
            optimizer = with_moving_average(optimizer, self.ema)
        if self.master_dtype is not None:
            optimizer = with_masters(optimizer, self.master_dtype)
        return optimizer

    def init(self, params: Any) -> Any:
        """The optimizer's own state.

        Raises:
          ArgumentError: ``inject_hyperparams`` has called a mask as a schedule.
        """
        state = self.optimizer.init(params)
        _check_hyperparams(state)
        return state

    def update(
        self, gradients: Gradients, state: Any, context: StageContext
    ) -> tuple[Gradients, Any]:
        """The reduced gradients with the update, and the optimizer's next state."""
        arrays, skip, applies = context.arrays, gradients.skip, context.apply_updates
        extra_args, params = self._extra_args(gradients, context), context.params
        if not over_all_shards(context.groups):
            # Typed as they leave, or the branches of an optimizer would not have equal types.
            typed = lambda x: context.shards.as_varying(x) if jnp.shape(x) else x
            state, params = jax.tree.map(typed, (state, params))
        params = None if params is None else arrays.split(params)

        def update(
            state: Any, params: Any, gradients: Gradients = gradients, never: Any = None
        ) -> _Results:
            reduced = arrays.place_gradients(gradients.settled().values)
            updates, after = arrays.run(
                self.optimizer, reduced, state, params, extra_args, never=never
            )
            if params is None and context.shards.number > 1:
                check_shapes(reduced, updates, "its update")
            return updates, after, optax.apply_updates(params, updates) if applies else None

        with jax.named_scope("update"):
            if context.never is not None:
                given = gradients.replace(skip=None, updated=None)
                flag = context.never if skip is None else skip
                if skip is None and _communicates(update, state, params, given, flag):
                    # By its own copy a shard could leave out what the others wait for.
                    flag = context.on_all_shards(flag, differs=True)
                updates, after, updated = _in_loop(
                    update, state, params, flag, given, context.never
                )
            elif skip is None:
                updates, after, updated = update(state, params)
            elif applies and context.skips_by_loop:
                updates, after, updated = _in_loop(update, state, params, skip)
            else:
                new = update(state, params)
                updates, after, updated = _select(new, state, params if applies else None, skip)
        with jax.named_scope("gather"):
            # Gathering parameters is cheaper than gathering updates and applying them everywhere.
            result = arrays.gather(updated if applies else updates)
        after = arrays.place_state(after)
        return gradients.replace(updated=Updated(result, updates, params, after)), after

    def _extra_args(self, gradients: Gradients, context: StageContext) -> dict[str, Any]:
        # Only optimizers that take the loss of a whole step get it; explicit arguments always pass.
        given, takes_loss = context.extra_args, takes_value(self.optimizer)
        extra = {k: x for k, x in gradients.extra.items() if k in given or takes_loss}
        return {**given, **extra}

    def describe(self, update: str = "update") -> str:
        """How it updates, and what the optimizer keeps besides its own state."""
        kept = [] if self.master_dtype is None else [f"{self.master_dtype} masters"]
        kept += [] if self.ema is None else [f"moving average {describe_decay(self.ema)}"]
        return f"{update} ({', '.join(kept)})" if kept else update


# The updates, the optimizer's next state, and the updated parameters.
_Results = tuple[Any, Any, Any]


def _select(new: _Results, state: Any, params: Any, skip: jax.Array) -> _Results:
    """The results of an update, or what was before if it is skipped."""
    old = jax.tree.map(jnp.zeros_like, new[0]), state, params
    return jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, new)


def _in_loop(
    update: Callable[..., _Results], state: Any, params: Any, skip: jax.Array, *given: Any
) -> _Results:
    """The same, from a loop that runs once or not at all.

    It works in place, where XLA for CPUs copies arrays that a select may keep. Nothing that is
    computed of what is ``given`` besides is computed before it.
    """
    types = jax.eval_shape(update, state, params, *given)
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    if of(types[1:]) != of((state, params)):
        # A loop keeps its types, and a select converts them.
        return _select(update(state, params), state, params, skip)
    none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), types[0])

    def turn(before: tuple[Any, ...]) -> tuple[Any, ...]:
        done, _, state, params = before
        if not given:
            return jnp.bool_(True), *update(state, params)
        _, own = lax.optimization_barrier((done, given))
        return jnp.bool_(True), *computed_once(update, state, params, *own)

    _, *results = lax.while_loop(lambda carry: ~carry[0], turn, (skip, none, state, params))
    return tuple(results)


def _communicates(update: Callable[..., _Results], *args: Any) -> bool:
    return any(map(_jax.names_axes, equations_of(jax.make_jaxpr(update)(*args))))


def takes_value(optimizer: optax.GradientTransformation) -> bool:
    """Whether an optimizer's update accepts the loss as ``value``."""
    return takes_keyword(optimizer, "value")


def takes_keyword(optimizer: optax.GradientTransformation, name: str) -> bool:
    """Whether an optimizer's update accepts an extra argument of this name."""
    kinds = {p.name: p.kind for p in inspect.signature(optimizer.update).parameters.values()}
    return name in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def _check_hyperparams(state: Any) -> None:
    """Raise if ``optax.inject_hyperparams`` has made a bool of a function: it was no schedule."""
    injected = lambda node: isinstance(getattr(node, "hyperparams", None), Mapping)
    for node in filter(injected, jax.tree.leaves(state, is_leaf=injected)):
        for name, value in node.hyperparams.items():
            if any(isinstance(leaf, bool) for leaf in jax.tree.leaves(value)):
                raise ArgumentError(
                    f"optax.inject_hyperparams called the function {name} with the number of "
                    f"updates, as a schedule, and it returned {_check.shown(value)}: so Optax "
                    f"would use that for all parameters. Write "
                    f"optax.inject_hyperparams(..., static_args={name!r})."
                )
