"""Weight-update sharding: which shard updates which part of the parameters, and how (ZeRO-1).

Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training"
(arXiv 2004.13336).
"""

import dataclasses
import enum
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from crossshard.collectives.parts import ANY, Cut, Limits, cut_along_axis, cut_for
from crossshard.errors import ArgumentError, WeightUpdateError
from crossshard.jaxprs.elementwise import why_not_elementwise


class WeightUpdate(enum.StrEnum):
    """Who updates the weights.

    REPLICATED: every shard all of them, with the whole optimizer state.
    SHARDED: every shard its part of them, with its part of the optimizer state.
    AUTO: sharded where the rule is proven elementwise and there is enough to split, else
      replicated.
    """

    AUTO = "auto"
    REPLICATED = "replicated"
    SHARDED = "sharded"


def check_weight_update(weight_update: object) -> WeightUpdate:
    """The checked word, or an ArgumentError that names all of them."""
    try:
        return WeightUpdate(weight_update)  # type: ignore[arg-type]
    except ValueError:
        raise ArgumentError(
            f"weight_update must be one of {', '.join(repr(str(word)) for word in WeightUpdate)}; "
            f"got {weight_update!r}."
        ) from None


class Path(enum.StrEnum):
    """How an update is computed."""

    WHOLE = "whole on every shard"
    PARTS = "in parts"
    GLOBAL = "on sharded global arrays"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the parameters and the optimizer state of one update lie, and why.

    Attributes:
      path: how the update is computed.
      why: the reason, in a few words.
      params: per parameter how it is cut.
      state: per array of the optimizer state how it is cut.
      structure: of the optimizer state.
    """

    path: Path
    why: str
    params: tuple[Cut, ...]
    state: tuple[Cut, ...]
    structure: Any


# Below this the two collectives of a sharded update cost more than the split saves.
_WORTH_BYTES = 1 << 19


def plan_update(
    inner: optax.GradientTransformationExtraArgs,
    params: Any,
    number: int,
    wanted: WeightUpdate = WeightUpdate.AUTO,
    *,
    only_parts: bool = False,
    limits: Limits = ANY,
) -> Plan:
    """How to update these parameters on so many shards.

    Args:
      inner: the update rule.
      params: a pytree with shapes and dtypes.
      number: how many shards share one set of parameters.
      wanted: what was asked for.
      only_parts: whether global arrays are out of reach, as inside a manual region.
      limits: what the platform asks of parts.

    Raises:
      ArgumentError: the rule's state changes its structure, or the rule asks for what a step does
        not have.
      WeightUpdateError: parts are what was asked for and all there is, and the rule mixes them.
    """
    params = jax.tree.map(_abstract, params)
    state = jax.eval_shape(inner.init, params)
    leaves, structure = jax.tree.leaves(params), jax.tree.structure(state)
    _check_state_stays(inner, params, state)

    def whole(why: str) -> Plan:
        return Plan(Path.WHOLE, why, _uncut(params), _uncut(state), structure)

    if wanted is WeightUpdate.REPLICATED:
        return whole("as asked")
    if number == 1:
        return whole("there is one shard")
    cuts = tuple(cut_for(leaf.shape, number, limits) for leaf in leaves)
    to_split = [
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf, cut in zip(leaves, cuts, strict=True)
        if cut.number > 1
    ]
    if not to_split:
        return whole("every parameter is tiny")
    if wanted is WeightUpdate.AUTO and sum(to_split) < _WORTH_BYTES:
        return whole("there is less to split than it would cost")
    of_shape = {cut.shape: cut for cut in cuts}
    parts = Plan(
        Path.PARTS,
        "the update is elementwise",
        cuts,
        tuple(of_shape.get(x.shape, Cut(x.shape)) for x in jax.tree.leaves(state)),
        structure,
    )
    obstacle = _obstacle(inner, params, state, parts)
    if obstacle is None:
        return parts
    if only_parts and wanted is WeightUpdate.SHARDED:
        raise WeightUpdateError(
            f"The weight update cannot be sharded here: where groups differ, or inside of your own "
            f"shard_map, each shard updates its part alone, and this update is not elementwise: "
            f"{obstacle}. Say weight_update='replicated', or use make_train_step without groups."
        )
    if wanted is WeightUpdate.AUTO:
        return whole(f"the update is not elementwise: {obstacle}")
    return Plan(
        Path.GLOBAL,
        f"the update is not elementwise: {obstacle}",
        tuple(cut_along_axis(leaf.shape, number, limits) for leaf in leaves),
        tuple(cut_along_axis(leaf.shape, number, limits) for leaf in jax.tree.leaves(state)),
        structure,
    )


def _check_state_stays(
    inner: optax.GradientTransformationExtraArgs, params: Any, state: Any
) -> None:
    value = jax.ShapeDtypeStruct((), "float32")
    try:
        _, after = jax.eval_shape(functools.partial(step, inner), params, state, params, value)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise ArgumentError(
            f"The rule asks for more than gradients and the loss, which is all that a step has: "
            f"{str(error).splitlines()[0]}. Rules with a line search are such."
        ) from error
    was, now = (
        (jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)])
        for tree in (state, after)
    )
    if was != now:
        raise ArgumentError(
            f"The rule's state changes its structure or types in a step, and a step is compiled "
            f"for one of them: from {was} to {now}."
        )


def _uncut(tree: Any) -> tuple[Cut, ...]:
    return tuple(Cut(leaf.shape) for leaf in jax.tree.leaves(tree))


def _obstacle(
    inner: optax.GradientTransformationExtraArgs, params: Any, state: Any, plan: Plan
) -> str | None:
    def update(params: Any, state: Any, gradients: Any, value: Any) -> tuple[Any, Any]:
        return step(inner, gradients, state, params, value)

    own = in_parts(params, plan.params), in_parts(state, plan.state)
    value = jax.ShapeDtypeStruct((), "float32")
    return why_not_elementwise(update, (params, state, params, value), (*own, own[0], value))


def step(
    inner: optax.GradientTransformationExtraArgs,
    gradients: Any,
    state: Any,
    params: Any,
    value: Any,
) -> tuple[Any, Any]:
    """The parameters and the state after one update; ``value`` is the loss, for rules that ask."""
    extra_args = {"value": value} if takes_value(inner) else {}
    updates, state = inner.update(gradients, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def map_cuts(function: Callable[[Cut, Any], Any], cuts: tuple[Cut, ...], tree: Any) -> Any:
    """A pytree of what a function makes of each leaf and how it is cut."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([function(*pair) for pair in zip(cuts, leaves, strict=True)])


def in_parts(tree: Any, cuts: tuple[Cut, ...]) -> Any:
    """The types of one shard's parts of arrays."""
    return map_cuts(lambda cut, x: jax.ShapeDtypeStruct(cut.part_shape, x.dtype), cuts, tree)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def takes_value(opt: optax.GradientTransformation) -> bool:
    """Whether a rule's update accepts the loss as ``value``."""
    kinds = {p.name: p.kind for p in inspect.signature(opt.update).parameters.values()}
    return "value" in kinds or inspect.Parameter.VAR_KEYWORD in kinds.values()
