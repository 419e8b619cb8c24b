"""Optimize: the wrapped optimizer's update, and which gradients it does not read."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from crossshard import _check
from crossshard._annotations import Given
from crossshard.errors import ArgumentError
from crossshard.gradients.status import check_shapes
from crossshard.jaxprs.rewrite import in_loop, zeros
from crossshard.jaxprs.walk import equations_of, named_axes, returned_inputs, sources
from crossshard.pipeline.options import check_dtype
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext
from crossshard.pipeline.update.averages import (
    Decay,
    check_ema,
    describe_decay,
    with_masters,
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
            before: _Kept, gradients: Gradients = gradients, opaque_false: Any = None
        ) -> tuple[_Kept, Any]:
            state, params = before
            reduced = gradients.settled().values
            updates, after = arrays.run(run, reduced, state, params, loss, opaque_false)
            if params is None and context.shards.number > 1:
                check_shapes(reduced, updates, "its update")
            return (after, optax.apply_updates(params, updates) if applies else None), updates

        before, loss = (state, params), extra_args.get("value", jnp.float32(0))
        run = functools.partial(self.optimizer.update, **extra_args)
        with jax.named_scope("update"):
            if context.opaque_false is not None:
                given = gradients.replace(skip=None, updated=None), context.opaque_false
                flag = context.opaque_false if skip is None else skip
                if skip is None and _communicates(update, before, *given):
                    # By its own copy a shard could leave out what the others wait for.
                    flag = context.on_all_shards(flag, differs=True)
                (after, updated), updates = _in_loop(update, before, *given, skip=flag)
            elif skip is None:
                (after, updated), updates = update(before)
            elif applies and context.skips_by_loop:
                (after, updated), updates = _in_loop(update, before, skip=skip)
            else:
                kept = before if applies else (state, None)
                (after, updated), updates = _select(update(before), kept, skip)
        with jax.named_scope("gather"):
            # Gathering parameters is cheaper than gathering updates and applying them everywhere.
            result = arrays.gather(updated if applies else updates)
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


# The optimizer's state and the parameters.
_Kept = tuple[Any, Any]


def _select(new: tuple[_Kept, Any], before: _Kept, skip: jax.Array) -> tuple[_Kept, Any]:
    """The results of an update, or what was before and zeros if it is skipped."""
    kept, updates = new
    old = jax.tree.map(jnp.zeros_like, updates), before
    chosen = jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, (updates, kept))
    return chosen[1], chosen[0]


def _in_loop(
    update: Callable[..., tuple[_Kept, Any]], before: _Kept, *given: Any, skip: jax.Array
) -> tuple[_Kept, Any]:
    """As ``_select``, from a loop that runs once or not at all."""
    of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    kept, updates = jax.eval_shape(update, before, *given)
    if of(kept) != of(before):
        # A loop keeps its types, and a select converts them.
        return _select(update(before), before, skip)
    # XLA places what the loop carries in this order.
    turn = lambda carry, *given: (update(carry[1], *given)[::-1], ())
    (updates, kept), _ = in_loop(turn, (zeros(updates), before), *given, skip=skip)
    return kept, updates


def _communicates(update: Callable[..., Any], *args: Any) -> bool:
    return any(map(named_axes, equations_of(jax.make_jaxpr(update)(*args))))


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


@dataclasses.dataclass(frozen=True)
class Unread:
    """What an update does not read.

    Attributes:
      gradients: for each parameter, whether no parameter ever depends on its gradient, now or
        through the optimizer's state.
      still: for each parameter, whether it stays unchanged besides, so that it need not travel.
      state: for each array of the optimizer's state, whether it is one of such a parameter.
    """

    gradients: tuple[bool, ...]
    still: tuple[bool, ...]
    state: tuple[bool, ...]


def find_unread(update: Callable[..., Any], params: Any, state: Any, loss: Any) -> Unread:
    """What an update from ``(params, state, gradients, loss)`` to the new two does not read.

    With ``optax.clip_by_global_norm`` before it, ``set_to_zero`` leaves nothing unread: the norm
    is that of all gradients.
    """
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (params, state)]
    number, arrays = map(len, shapes)
    read = sources(update, params, state, params, loss)
    # Bits of the inputs: parameters, state, gradients.
    live = 0
    for bits in read[:number]:
        live |= bits
    while True:
        more = live
        for place, bits in enumerate(read[number:]):
            more |= bits if live >> number + place & 1 else 0
        if more == live:
            break
        live = more
    unread = tuple(not live >> number + arrays + place & 1 for place in range(number))
    if not any(unread):
        return Unread(unread, unread, (False,) * arrays)
    after = returned_inputs(update, params, state, params, loss)
    still = tuple(each and after[place] == place for place, each in enumerate(unread))
    of_still = tuple(
        any(
            each and shape == shapes[0][place] and bits >> number + arrays + place & 1
            for place, each in enumerate(still)
        )
        for shape, bits in zip(shapes[1], read[number:], strict=True)
    )
    return Unread(unread, still, of_still)
