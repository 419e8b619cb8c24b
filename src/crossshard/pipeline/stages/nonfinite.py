"""Nonfinite: what a step does about a gradient that is NaN or infinite, and whose it was."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from crossshard import _check
from crossshard._annotations import Given, PyTree
from crossshard._check import is_inexact
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.status import Reduction, leaf_name
from crossshard.pipeline.stage import Gradients, Phase, Stage, StageContext, Staged
from crossshard.shards.axes import Shards


class OnNonfinite(enum.StrEnum):
    """What a step does about a gradient that is not finite.

    QUARANTINE: the shard counts with weight 0, and the mean is that of the others.
    SKIP: parameters and states stay as they are, on all shards.
    RAISE: the same, and ``make_train_step`` raises at once.
    """

    QUARANTINE = "quarantine"
    SKIP = "skip"
    RAISE = "raise"


class NonfiniteState(NamedTuple):
    """What was found at the last update.

    Attributes:
      shard: int32[], the first shard whose gradient was not finite; -1 if all were, or if the loss
        is over the batch, so that no shard has a gradient of its own.
      leaf: int32[], the index of the first such leaf of its gradient; the number after the leaves
        for a NaN in its loss, and the numbers after that for one in the arrays of its model state;
        -1 if nothing was found.
      shards: int32[], the number of shards whose gradients were not finite; 1 with a loss over the
        batch.
      overflow: bool[], whether the reduced gradient was not finite although the gradients that it
        was computed from were.
      in_a_row: int32[], the number of updates in a row at which something was not finite.

    >>> found = NonfiniteState(shard=3, leaf=1, shards=1, overflow=False, in_a_row=2)
    >>> found.describe({"bias": 0.0, "kernel": 0.0})
    'the gradient of `kernel` is not finite on shard 3'
    """

    shard: Int[Array, ""]
    leaf: Int[Array, ""]
    shards: Int[Array, ""]
    overflow: Bool[Array, ""]
    in_a_row: Int[Array, ""]

    def describe(self, params: PyTree, model_state: PyTree = ()) -> str:
        """Describe what was found, given the parameters, and the model state if there is one."""
        number = _as_int(self.shards)
        if number:
            what = f"{_name_of_leaf(_as_int(self.leaf), params, model_state)} is not finite"
            if _as_int(self.shard) < 0:
                return what
            others = f", and on {number - 1} more" if number > 1 else ""
            return f"{what} on shard {_as_int(self.shard)}{others}"
        if _as_int(self.overflow):
            return "every shard's gradient is finite, and their reduction is not: it overflows"
        return "all gradients are finite"


@dataclasses.dataclass(frozen=True)
class Nonfinite(Stage):
    """Keeps gradients that are not finite from the parameters, and names the shard and the leaf.

    A reduced gradient that is not finite is never applied: the step is skipped on all shards, and
    parameters, states and step count stay as they are.

    Attributes:
      action: ``"quarantine"``, ``"skip"`` or ``"raise"``, see ``OnNonfinite``.
      max_consecutive: the number of steps in a row with something that is not finite, after which
        ``make_train_step`` raises, as in ``optax.apply_if_finite``; 1 with ``"raise"``.

    >>> Nonfinite("skip", max_consecutive=5)
    Nonfinite(action=<OnNonfinite.SKIP: 'skip'>, max_consecutive=5)
    """

    action: str = OnNonfinite.QUARANTINE
    # More than the overflows of a dynamic loss scale that is 2.0**16 at first.
    max_consecutive: int = 25

    phase = Phase.UPDATE
    scope = state_field = "nonfinite"
    needs_whole = "nonfinite= asks whether all gradients are finite"
    options = ("nonfinite",)

    def __post_init__(self) -> None:
        action = _check.choice("nonfinite", self.action, OnNonfinite)
        _check.whole_number("max_consecutive", self.max_consecutive, most=None)
        object.__setattr__(self, "action", action)
        if action is OnNonfinite.RAISE:
            object.__setattr__(self, "max_consecutive", 1)

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> "Nonfinite | None":
        """Return the stage of ``nonfinite``; ``None`` without one.

        Raises:
          ArgumentError: an unknown word, or what contradicts other options.
          ArgumentTypeError: neither a word nor a ``Nonfinite``.
        """
        given = options.get("nonfinite")
        if given is None:
            return None
        if not isinstance(given, Nonfinite | str):
            raise ArgumentTypeError(
                f"nonfinite is 'quarantine', 'skip', 'raise', None or a crossshard.Nonfinite; got "
                f"{_check.described(given)}."
            )
        found = Nonfinite(given) if isinstance(given, str) else given
        if found.excludes_shards and options["reduction"] is Reduction.SUM:
            raise ArgumentError(
                "nonfinite='quarantine' leaves a shard out of the mean, but the reduction is SUM, "
                "which would be smaller without it. Use MEAN, or nonfinite='skip'."
            )
        if options.get("loss_scale") is not None and found.action is not OnNonfinite.SKIP:
            raise ArgumentError(
                f"A dynamic loss scale is found by steps that overflow, and are skipped, which "
                f"nonfinite={str(found.action)!r} does not do. Use nonfinite='skip', which names "
                f"the shard."
            )
        return found

    @property
    def excludes_shards(self) -> bool:
        """Whether a shard whose gradient is not finite does not count."""
        return self.action is OnNonfinite.QUARANTINE

    def init(self, params: PyTree) -> NonfiniteState:
        """Return the state before the first update: nothing was found yet."""
        del params
        none = jnp.int32(-1)
        return NonfiniteState(none, none, jnp.int32(0), jnp.bool_(False), jnp.int32(0))

    def update(self, gradients: Gradients, state: NonfiniteState, context: StageContext) -> Staged:
        """Return the reduced gradients, skipped if they must not be applied, and what was found."""
        reported, finite = gradients.sums[REPORTED], gradients.finite
        assert finite is not None
        if context.shards.groups is not None:
            own = reported[context.shards.index()]
            reported = sum_over_shards(_at_own_index(own, context), context.shards.all)
        bad = reported > 0
        some = bad.any()
        shard = jnp.argmax(bad).astype(jnp.int32)
        overflow = ~finite if self.excludes_shards else ~finite & ~some
        after = NonfiniteState(
            jnp.where(some & (not context.over_batch), shard, -1),
            jnp.where(some, reported[shard].astype(jnp.int32) - 1, -1),
            bad.sum(dtype=jnp.int32),
            overflow,
            jnp.where(some | overflow, state.in_a_row + 1, 0),
        )
        return gradients.skipped_if(~finite if self.excludes_shards else ~finite | some), after

    def describe(self) -> str:
        return "skip if not finite"


@dataclasses.dataclass(frozen=True)
class ReportNonfinite(Stage):
    """Reports to ``Nonfinite`` which leaf of this shard's gradient is not finite."""

    excludes_shards: bool  # whether the shard then counts with weight 0

    phase = Phase.ARRIVAL
    scope = "nonfinite"
    state_field = ""
    needs_local = "nonfinite checks"
    takes_summed = True  # a step that is not finite is computed again
    options = ()
    asked_by = ("nonfinite",)

    @classmethod
    def from_options(cls, options: Mapping[str, Given]) -> Self | None:
        """Return the half of ``Nonfinite`` that checks each shard's gradient."""
        stage = Nonfinite.from_options(options)
        return None if stage is None else cls(stage.excludes_shards)

    def update(self, gradients: Gradients, state: Any, context: StageContext) -> Staged:
        """Return the local gradients, with this shard's report, and its weight in the mean."""
        leaves, weight = jax.tree.leaves(gradients.values), gradients.weight
        is_bad = lambda x: ~jnp.isfinite(x).all() if is_inexact(x) else jnp.bool_(False)
        # Then the loss, and the model state.
        flags = jnp.stack([*map(is_bad, leaves), *_of_loss_and_state(gradients)])
        # A shard of weight 0 may hold NaN.
        counts = True if weight is None else (weight != 0).any()
        own = jnp.where(flags.any() & counts, jnp.argmax(flags) + 1, 0)
        reported = _at_own_index(own.astype(jnp.float32), context)
        gradients = gradients.replace(sums={**gradients.sums, REPORTED: reported})
        if self.excludes_shards:
            gradients = gradients.replace(weight=jnp.where(flags.any(), 0, as_counted(weight)))
        return gradients, state

    def describe(self) -> str:
        """Return ``quarantine``, if shards are left out."""
        return "quarantine" if self.excludes_shards else ""


class Rerun(NamedTuple):
    """How a shard computes its loss and gradients again, in a step in which some were not finite.

    Attributes:
      counts: bool[], whether its gradients count in the sums.
      reports: bool[], whether a gradient that the backward pass has summed is to be NaN if what
        this shard added to it was not finite.
    """

    counts: Bool[Array, ""]
    reports: Bool[Array, ""]


# The scope of what runs only in steps in which a gradient is not finite.
RARE = "if_not_finite"
# The name of the reports among the sums: for each shard, one more than the index of the first leaf
# that is not finite; 0 if all are.
REPORTED = "nonfinite"


def as_one_report(reported: Float[Array, " shards"]) -> Float[Array, " shards"]:
    """Return reports on slices of one gradient as one report, of the first leaf."""
    leaf = jnp.where(reported > 0, reported, jnp.inf).min()
    first = jnp.where(jnp.isfinite(leaf), leaf, 0)
    return jnp.where(jnp.arange(len(reported)) == 0, first, 0)


def as_counted(weight: jax.Array | None) -> Float[Array, ""]:
    """Return the weight of a shard where some are left out: 1 if the others count the same."""
    return jnp.ones((), float) if weight is None else weight


def own_weight(gradients: Gradients, weight: jax.Array | None, context: StageContext) -> jax.Array:
    """Return this shard's weight in the reduced gradients: 0 if it was left out."""
    return jnp.where(gradients.sums[REPORTED][context.shards.index()] > 0, 0, as_counted(weight))


def new_nans(after: PyTree, before: PyTree) -> PyTree:
    """Return for each array whether it has a NaN that was not there; infinities may be intended."""

    def one(new: Any, old: Any) -> Any:
        return (jnp.isnan(new) & ~jnp.isnan(old)).any() if is_inexact(new) else jnp.bool_(False)

    return jax.tree.map(one, after, before)


def is_sound(gradients: Gradients) -> Bool[Array, ""]:
    """Return whether this shard's loss and model state have no new NaN, if the shard counts."""
    sound = ~jnp.stack(_of_loss_and_state(gradients)).any()
    # A shard of weight 0 may hold NaN. Virtual shards have a weight each.
    return sound if gradients.weight is None else sound | (gradients.weight == 0).all()


def are_finite(gradients: Gradients) -> Bool[Array, ""]:
    """Return whether this shard's own gradients are finite, if the shard counts."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(gradients.values) if is_inexact(x)]
    found = functools.reduce(jnp.logical_and, finite, jnp.bool_(True))
    return found if gradients.weight is None else found | (gradients.weight == 0).all()


def _name_of_leaf(leaf: int, params: PyTree, model_state: PyTree) -> str:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    of_state = [path for path, _ in jax.tree_util.tree_leaves_with_path(model_state)]
    if leaf < len(paths):
        return f"the gradient of {leaf_name(paths[leaf])}" if paths[leaf] else "the gradient"
    if leaf == len(paths):
        return "the loss, but no gradient,"
    after = leaf - len(paths) - 1
    path = of_state[after] if after < len(of_state) else ()
    name = f" {leaf_name(path)}" if path else ""
    return f"the model state{name}, but no gradient,"


def _of_loss_and_state(gradients: Gradients) -> list[Any]:
    loss = jnp.asarray(gradients.extra.get("value", 0.0))
    return [jnp.isnan(loss).any(), *jax.tree.leaves(gradients.state_has_nans)]


def _at_own_index(own: Float[Array, ""], context: StageContext) -> Float[Array, " shards"]:
    """Return zeros, with this shard's value at its index."""
    shards = context.shards
    return jnp.where(jnp.arange(shards.num_shards) == shards.index(), own, 0)


def with_finite(
    gradients: Gradients, context: StageContext, sound: Bool[Array, ""] | bool = True
) -> Gradients:
    """Return the reduced gradients, with whether all are finite, and all shards ``sound``."""
    shards = context.shards
    totals, tree = jax.tree.flatten(gradients.values)
    partitions = context.arrays.partitions_of(gradients.values)
    # CPU devices share their cores, so each checks another part of what all of them have.
    shares = shards.platform == "cpu" and not shards.other_axes
    parts = [
        _own_part(x, shards) if shares and each.number == 1 else x
        for x, each in zip(totals, partitions, strict=True)
    ]
    means = jax.tree.leaves(gradients.replace(values=tree.unflatten(parts)).settled().values)
    leaves = [jnp.isfinite(mean).all() for mean in means if is_inexact(mean)]
    finite = functools.reduce(jnp.logical_and, [*leaves, jnp.bool_(sound)])
    # All shards must agree, even if the copy of one is damaged: what follows communicates.
    return gradients.replace(finite=context.on_all_shards(finite, differs=True))


def _own_part(x: Any, shards: Shards) -> Any:
    """Return a part of an array; each shard of a group takes another part."""
    if not jnp.shape(x):
        return x
    axis = int(np.argmax(x.shape))
    length = -(-x.shape[axis] // shards.group_size)
    # The last parts may overlap: the start of a slice is moved back until it fits.
    return lax.dynamic_slice_in_dim(x, shards.index_in_group() * length, length, axis)


def if_not_finite(
    done: Staged,
    own: Any,
    function: Callable[[Staged, Any], tuple[Staged, Any]],
    context: StageContext,
) -> Staged:
    """Return what has been reduced, or ``function(done, own)`` if it is not finite.

    Args:
      done: the reduced gradients, with ``finite``, and the state of the aggregator.
      own: the gradients of this shard.
      function: also returns what may take the place of ``own`` in memory. It may communicate, since
        all shards agree.
      context: the context.
    """
    finite = done[0].finite
    assert finite is not None
    if not context.apply_updates:
        # A while loop has no reverse-mode derivative, which callers of an optimizer may want.
        with jax.named_scope(RARE):
            call = lambda done, own: function(done, own)[0]
            return lax.cond(finite, lambda done, _: done, call, done, own)

    def turn(carry: tuple[Any, Staged, Any]) -> tuple[Any, Staged, Any]:
        turns, done, own = carry
        # XLA may compute what does not change in a loop before it, and so in every step.
        _, own = lax.optimization_barrier((turns, own))
        return jnp.bool_(False), *function(done, own)

    # The results of a loop overwrite its inputs, which XLA may copy in a conditional.
    with jax.named_scope(RARE):
        return lax.while_loop(lambda carry: carry[0], turn, (~finite, done, own))[1]


def rerun_if_not_finite(
    reduced: Gradients,
    function: Callable[[jax.Array, Any, Any], Any],
    carry: Any,
    turns: int,
    inputs: Any,
) -> Any:
    """Return the carry, after so many turns if the reduced gradients are not finite.

    Args:
      reduced: the reduced gradients, of which it is known whether they are finite.
      function: ``(turn, carry, inputs) → carry``. It may communicate, since all shards agree.
      carry: what is there before.
      turns: the number of turns.
      inputs: what it computes from.
    """
    assert reduced.finite is not None
    number = jnp.where(reduced.finite, 0, turns)

    def one(indexed: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        turn, carry = indexed
        # What does not change in a loop XLA may compute before it, in every step.
        _, again = lax.optimization_barrier((turn, inputs))
        return turn + 1, function(turn, carry, again)

    with jax.named_scope(RARE):
        return lax.while_loop(lambda indexed: indexed[0] < number, one, (jnp.int32(0), carry))[1]


def _as_int(x: Any) -> int:
    """Return a number of the state, of an array that may repeat it for each shard."""
    local = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return int(np.ravel(jax.device_get(local))[0])
