"""Optimize: the wrapped optimizer's update, with a moving average and master weights.

``find_unread`` finds gradients that an optimizer does not read, and ``check_transformation`` checks
that something is an Optax transformation.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax import lax

from crossshard import _check
from crossshard._annotations import Given
from crossshard._check import is_inexact
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.status import check_shapes
from crossshard.jaxprs.rewrite import in_loop, zeros
from crossshard.jaxprs.walk import equations_of, named_axes, returned_inputs, sources
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged, Updated

# The decay of an average: a number, or a schedule of the number of updates.
Decay = float | Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Optimize(Stage):
    """The wrapped optimizer, on full arrays, on slices, or on global arrays."""

    inner: optax.GradientTransformationExtraArgs  # the optimizer, as the user passed it
    master_dtype: Any = None  # the dtype of master weights; ``None`` without them
    # The decay of the moving average of the parameters, or a schedule; ``None`` without one.
    ema: Decay | None = None

    phase = Phase.UPDATE
    scope = ""
    state_field = "inner_state"
    options = ("master_dtype", "ema")
    asked_by = ()

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self:
        """Return the stage.

        Raises:
          ArgumentError, ArgumentTypeError: ``master_dtype`` or ``ema`` is not one.
        """
        words = "float32 or float64, the dtype in which weights of 16 bits are also kept"
        given = options.get("master_dtype")
        dtype = _check.dtype("master_dtype", given, ("float32", "float64"), words)
        return cls(options["inner"], dtype, check_ema(options.get("ema")))

    def written(self) -> dict[str, Given]:
        return {"master_dtype": self.master_dtype, "ema": self.ema}

    def follows_params(self, state: Any) -> Any:
        """Return that masters and average are made anew; the optimizer's own state stays."""
        if not isinstance(state, MastersState | MovingAverageState):
            return super().follows_params(state)
        follows = jax.tree.map(lambda _: True, state)
        return follows._replace(inner_state=self.follows_params(state.inner_state))

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, with a moving average and master weights if asked for."""
        optimizer = self.inner if takes_loss(self.inner) else without_loss(self.inner)
        if self.ema is not None:
            optimizer = with_moving_average(optimizer, self.ema)
        if self.master_dtype is not None:
            optimizer = with_masters(optimizer, self.master_dtype)
        return optimizer

    def init(self, params: Any) -> Any:
        """Return the optimizer's own state.

        Raises:
          ArgumentError: ``inject_hyperparams`` has called a mask as a schedule.
        """
        state = self.optimizer.init(params)
        injected = lambda node: isinstance(getattr(node, "hyperparams", None), Mapping)
        for node in filter(injected, jax.tree.leaves(state, is_leaf=injected)):
            for name, value in node.hyperparams.items():
                # A mask is a function that returns bools. This one was called as a schedule.
                if any(isinstance(leaf, bool) for leaf in jax.tree.leaves(value)):
                    raise ArgumentError(
                        f"optax.inject_hyperparams called the function {name} with the number of "
                        f"updates, as a schedule, and it returned {_check.shown(value)}: so Optax "
                        f"would use that for all parameters. Write "
                        f"optax.inject_hyperparams(..., static_args={name!r})."
                    )
        return state

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the reduced gradients with the update, and the optimizer's next state."""
        arrays, skip, applies = context.arrays, gradients.skip, context.apply_updates
        # The loss is passed on only if the optimizer accepts it; explicit arguments always are.
        given, passes_loss, params = context.extra_args, takes_loss(self.optimizer), context.params
        extra = {k: x for k, x in gradients.extra.items() if k in given or passes_loss}
        extra_args = {**given, **extra}
        if context.shards.is_grouped:
            # The results will be varying, so cast now: a cond in the optimizer needs equal types.
            typed = lambda x: context.shards.as_varying(x) if jnp.shape(x) else x
            state, params = jax.tree.map(typed, (state, params))
        params = None if params is None else arrays.split(params)
        loss = extra_args.get("value", jnp.float32(0))
        run = functools.partial(self.optimizer.update, **extra_args)

        def update(
            before: _Kept, gradients: Gradients = gradients, opaque_false: Any = None
        ) -> tuple[_Kept, Any]:
            state, params = before
            reduced = gradients.settled().values
            updates, after = arrays.run(run, reduced, state, params, loss, opaque_false)
            if params is None and context.shards.num_shards > 1:
                check_shapes(reduced, updates, "its update")
            return (after, optax.apply_updates(params, updates) if applies else None), updates

        before, unskipped = (state, params), None
        with jax.named_scope("update"):
            if context.opaque_false is not None:
                inputs = gradients.replace(skip=None, updated=None), context.opaque_false
                flag, trace = context.opaque_false if skip is None else skip, jax.make_jaxpr(update)
                if skip is None and any(map(named_axes, equations_of(trace(before, *inputs)))):
                    # The update communicates. If one shard's copy of the flag were wrong, the
                    # others would wait for it, so all shards decide together.
                    flag = context.on_all_shards(flag, differs=True)
                (after, updated), updates = _in_loop(update, before, *inputs, skip=flag)
            elif skip is None:
                (after, updated), updates = update(before)
            elif applies and context.skips_by_loop:
                (after, updated), updates = _in_loop(update, before, skip=skip)
            else:
                kept = before if applies else (state, None)
                new = update(before)
                unskipped = new[1] if applies else None
                (after, updated), updates = _select(new, kept, skip)
        with jax.named_scope("gather"):
            # Gathering parameters is cheaper than gathering updates and applying them everywhere.
            result = arrays.gather(updated if applies else updates)
        found = Updated(result, updates, params, after, unskipped, updated)
        return gradients.replace(updated=found), after

    def describe(self, update: str = "update") -> str:
        """Describe the update, and what the optimizer keeps besides its own state."""
        kept = [] if self.master_dtype is None else [f"{self.master_dtype} masters"]
        if self.ema is not None:
            # The text must be the same in every process.
            name = getattr(self.ema, "__qualname__", type(self.ema).__name__)
            kept.append(f"moving average {f'by {name}' if callable(self.ema) else self.ema}")
        return f"{update} ({', '.join(kept)})" if kept else update


# The optimizer's state and the parameters.
_Kept = tuple[Any, Any]


def _select(new: tuple[_Kept, Any], before: _Kept, skip: jax.Array) -> tuple[_Kept, Any]:
    """Select the results of an update; if it is skipped, what was before, and zero updates."""
    kept, updates = new
    old = jax.tree.map(jnp.zeros_like, updates), before
    chosen = jax.tree.map(lambda old, new: jnp.where(skip, old, new), old, (updates, kept))
    return chosen[1], chosen[0]


def _in_loop(
    update: Callable[..., tuple[_Kept, Any]], before: _Kept, *given: Any, skip: jax.Array
) -> tuple[_Kept, Any]:
    """Return the results of ``_select``, from a loop that runs the update once or not at all."""
    types_of = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    kept, updates = jax.eval_shape(update, before, *given)
    if types_of(kept) != types_of(before):
        # The carry of a loop cannot change its types; a select converts them.
        return _select(update(before, *given), before, skip)
    # XLA places what the loop carries in this order.
    turn = lambda carry, *given: (update(carry[1], *given)[::-1], ())
    (updates, kept), _ = in_loop(turn, (zeros(updates), before), *given, skip=skip)
    return kept, updates


def takes_loss(optimizer: optax.GradientTransformation) -> bool:
    """Return whether an optimizer's update accepts the loss, as the extra argument ``value``."""
    kinds = {p.name: p.kind for p in inspect.signature(optimizer.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()


def without_loss(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that drops the loss, for one whose update takes none, as SAM's."""

    def update(
        updates: Any, state: Any, params: Any = None, *, value: Any = None, **extra_args: Any
    ) -> tuple[Any, Any]:
        del value
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@dataclasses.dataclass(frozen=True)
class Unread:
    """What an update does not read."""

    # For each parameter, whether no parameter ever depends on its gradient, now or through the
    # optimizer's state.
    gradients: tuple[bool, ...]
    # For each parameter, whether its gradient is not read and the update returns it unchanged, so
    # that it need not be gathered.
    unchanged: tuple[bool, ...]
    # For each array of the optimizer's state, whether it belongs to such an unchanged parameter.
    state: tuple[bool, ...]


def find_unread(update: Callable[..., Any], params: Any, state: Any, loss: Any) -> Unread:
    """Find what ``update(params, state, gradients, loss) -> (params, state)`` does not read.

    With ``optax.clip_by_global_norm`` before it, ``set_to_zero`` leaves nothing unread: the norm
    is that of all gradients.
    """
    shapes = [[leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (params, state)]
    number, arrays = map(len, shapes)
    read = sources(update, params, state, params, loss)
    # Bits of the inputs: parameters, state, gradients.
    before, live = 0, functools.reduce(operator.or_, read[:number], 0)
    while live != before:
        before = live
        for place, bits in enumerate(read[number:], number):
            live |= bits if live >> place & 1 else 0
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


# ---- An optimizer that also keeps a moving average of its parameters, or wider masters.


class MovingAverageState(NamedTuple):
    """The moving average of the parameters, and the state of the optimizer."""

    ema: Any  # the average, with at least 32 bits; at first the parameters
    ema_count: Any  # int32[], the number of updates so far; ``()`` unless the decay is a schedule
    inner_state: Any  # the state of the inner optimizer


class MastersState(NamedTuple):
    """Master weights and the state of the optimizer that updates them."""

    masters: Any  # the parameters, in the dtype of the masters
    inner_state: Any  # the state of the inner optimizer


def with_moving_average(
    inner: optax.GradientTransformationExtraArgs, decay: Decay
) -> optax.GradientTransformationExtraArgs:
    """Keep ``ema = decay * ema + (1 - decay) * params`` after each update of an optimizer."""

    def init(params: Any) -> MovingAverageState:
        count = jnp.int32(0) if callable(decay) else ()
        return MovingAverageState(_copied(params, jnp.float32), count, inner.init(params))

    def update(
        updates: Any, state: MovingAverageState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MovingAverageState]:
        params = _needed(params, "ema")
        updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        after = optax.apply_updates(params, updates)
        now = jnp.asarray(decay(state.ema_count)) if callable(decay) else decay

        def average(old: jax.Array, new: jax.Array) -> jax.Array:
            if not is_inexact(old):
                return new
            # A schedule's decay may have another dtype; a number has none of its own.
            by = now.astype(old.dtype) if isinstance(now, jax.Array) else now
            return by * old + (1 - by) * new

        ema = jax.tree.map(average, state.ema, after)
        count = optax.safe_increment(state.ema_count) if callable(decay) else ()
        return updates, MovingAverageState(ema, count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def with_masters(
    inner: optax.GradientTransformationExtraArgs, dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """Keep wider master weights, which round to the parameters (arXiv 1710.03740).

    The updates are the differences between the rounded masters and the parameters. A parameter that
    is not its rounded master was set since the last update, and becomes the master.
    """

    def init(params: Any) -> MastersState:
        masters = _copied(params, dtype)
        return MastersState(masters, inner.init(masters))

    def update(
        updates: Any, state: MastersState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MastersState]:
        params = _needed(params, "master_dtype")
        masters = jax.tree.map(_unless_set, state.masters, params)
        as_master = lambda g, m: g.astype(m.dtype) if is_inexact(m) else g
        wide = jax.tree.map(as_master, updates, masters)
        updates, inner_state = inner.update(wide, state.inner_state, masters, **extra_args)
        masters = optax.apply_updates(masters, updates)
        # In the dtype of the masters, where it is exact.
        change = jax.tree.map(
            lambda m, p: m.astype(p.dtype).astype(m.dtype) - p.astype(m.dtype), masters, params
        )
        return change, MastersState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _needed(params: Any, option: str) -> Any:
    if params is None:
        raise ArgumentError(
            f"With {option} an update needs the parameters: opt.update(grads, state, params)."
        )
    return params


def _copied(params: Any, dtype: Any) -> Any:
    """Copy the parameters in this dtype, or in their own if it is wider."""

    def one(x: Any) -> jax.Array:
        own = jnp.result_type(x)
        wide = jnp.promote_types(own, dtype) if jnp.issubdtype(own, jnp.inexact) else own
        # Copied, since two arrays of a donated state must not share a buffer.
        return jnp.array(x, wide, copy=True)

    return jax.tree.map(one, params)


def _unless_set(master: Any, param: Any) -> jax.Array:
    """Return the master, or the parameter where that is not the rounded master."""
    wide, narrow = master.dtype, jnp.result_type(param)
    if wide == narrow:
        return jnp.where(param == master, master, param)

    def is_param(rounded: jax.Array) -> jax.Array:
        if narrow.itemsize > 2:
            return param == rounded
        # Compare bits: XLA may compare numbers in the wide dtype, without rounding them.
        pair = (param, rounded)
        bits, others = (lax.bitcast_convert_type(x, f"uint{8 * narrow.itemsize}") for x in pair)
        # Zeros of both signs are equal.
        return (bits == others) | ((bits | others) << 1 == 0)

    # The change that made the parameter is itself rounded, and can tip it over near a tie.
    near = 4 * float(jnp.finfo(wide).eps)
    below, above = (is_param((master * by).astype(narrow)) for by in (1 - near, 1 + near))
    return jnp.where(below | above, master, jnp.asarray(param, wide))


def check_ema(decay: Any) -> Decay | None:
    """Return the checked decay of the moving average; ``None`` without one.

    Raises:
      ArgumentError: not between 0 and 1.
      ArgumentTypeError: neither a number nor a function that returns one.
    """
    if decay is None:
        return None
    if callable(decay):
        try:
            found = jax.eval_shape(decay, jax.ShapeDtypeStruct((), jnp.int32))
        except Exception as error:  # a user's function may raise anything
            raise ArgumentTypeError(
                f"ema is a function that cannot be called with an update's number, int32[]: {error}"
            ) from error
        if not isinstance(found, jax.ShapeDtypeStruct) or found.shape or not is_inexact(found):
            raise ArgumentTypeError(
                f"A schedule for ema returns the decay, float[]; this one returned {found}."
            )
        return decay  # type: ignore[no-any-return]
    is_array = isinstance(decay, jax.Array) and not decay.shape
    if is_array and jnp.issubdtype(decay.dtype, jnp.floating):
        decay = _check.array("ema", decay).item()
    number = _check.number("ema", decay, "It is a decay, or a function of the update's number.")
    if not 0 < number < 1:
        raise ArgumentError(
            f"ema is the decay of the moving average of the parameters, between 0 and 1, such as "
            f"0.999; got {decay!r}."
        )
    return number


_ROOTS_OF_OTHERS = {
    "keras": "Keras",
    "tf_keras": "Keras",
    "tensorflow": "TensorFlow",
    "torch": "PyTorch",
}
# Optimizers of these libraries that have another name in Optax.
_EQUIVALENTS = {"gradientdescent": "sgd", "momentum": "sgd(lr, momentum)"}


def check_transformation(opt: Any, what: str = "The optimizer") -> optax.GradientTransformation:
    """Return ``opt`` if it is an Optax transformation, else raise an error that says what to write.

    Raises:
      ArgumentTypeError: not a transformation; names the missing method, or the Optax equivalent.
    """
    if isinstance(opt, optax.GradientTransformation):
        return opt
    given = opt if isinstance(opt, type) else type(opt)
    for base in given.__mro__:
        library = _ROOTS_OF_OTHERS.get(base.__module__.split(".")[0])
        if library:
            stem = given.__name__.lower().removesuffix("optimizer")
            equivalent = _EQUIVALENTS.get(stem, stem if hasattr(optax, stem) else None)
            write = f"optax.{equivalent}" if equivalent else "an Optax optimizer"
            raise ArgumentTypeError(
                f"{what} must be an Optax transformation; got {library}'s {given.__name__}. Write "
                f"{write} instead."
            )
    missing = [method for method in ("init", "update") if not callable(getattr(opt, method, None))]
    if not missing and not isinstance(opt, type):
        return optax.GradientTransformation(opt.init, opt.update)
    if callable(opt):
        name = getattr(opt, "__name__", repr(opt))
        raise ArgumentTypeError(
            f"{what} must be an Optax transformation; got the function or class {name}, "
            f"which returns one. Call it: {name}(learning_rate)."
        )
    write = "Pass its .tx." if hasattr(opt, "tx") else "Write Optax's own, as optax.sgd(0.1)."
    raise ArgumentTypeError(
        f"{what} must be an Optax transformation, with init and update; got "
        f"{type(opt).__name__} ({_check.shown(opt, 80)}), which has no "
        f"{' and no '.join(missing)}. {write}"
    )
