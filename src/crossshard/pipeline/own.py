"""Own: checks a stage or an aggregator that the user has written, and what it returns."""

from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.pipeline.stage import Gradients, Phase, Stage
from crossshard.shards.cut import PER_SHARD, REPLICATED


def check_stage(stage: Stage) -> None:
    """Raise unless the attributes of a user's own stage are what ``preprocess=`` can run.

    Raises:
      ArgumentError: one of them is not.
    """
    wanted = {
        "placement": ((REPLICATED, PER_SHARD), "pipeline.REPLICATED or pipeline.PER_SHARD"),
        "phase": ((Phase.LOCAL, Phase.ARRIVAL), "Phase.LOCAL or Phase.ARRIVAL, before the sum"),
        "state_field": (("preprocess", ""), "'preprocess', or '' without a state"),
    }
    for name, (among, words) in wanted.items():
        given = getattr(stage, name)
        if type(given) not in map(type, among) or given not in among:
            raise ArgumentError(
                f"{type(stage).__name__}.{name} must be {words}; got {_check.shown(given)}."
            )
    for name in ("scope", "needs_local"):
        if not isinstance(getattr(stage, name), str):
            _check.word(f"{type(stage).__name__}.{name}", getattr(stage, name))


def check_returned(
    returned: Any, gradients: Gradients, state: PyTree, name: str
) -> tuple[Gradients, PyTree]:
    """What ``update`` of a user's own stage has returned, if the next stage can take it.

    Raises:
      ArgumentError: the gradients or the state have another structure.
      ArgumentTypeError: it is not ``(gradients, state)``.
    """
    after = check_pair(returned, name, "(gradients, state)", state)
    if not isinstance(after[0], Gradients):
        raise ArgumentTypeError(
            f"{name} must return (gradients, state), such as (gradients.replace(values=values), "
            f"state), of what it was given; the first was {type(after[0]).__name__}."
        )
    # Of shapes the sum over the shards says what it needs.
    of_values = f"The values that {name} returned"
    check_like(after[0].values, gradients.values, of_values, shapes=False)
    return after


def check_pair(returned: Any, name: str, form: str, state: PyTree) -> tuple[Any, PyTree]:
    """A pair whose second is the next state, of the structure and shapes that it had.

    Raises:
      ArgumentError: the state has others.
      ArgumentTypeError: it is no pair.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        got = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        kind = type(returned).__name__
        raise ArgumentTypeError(f"{name} must return {form}; it returned {kind}{got}.")
    check_like(returned[1], state, f"The state that {name} returned")
    return returned[0], returned[1]


def check_like(given: PyTree, like: PyTree, what: str, *, shapes: bool = True) -> None:
    """Raise unless a tree has arrays, of the structure of another one, and of its shapes.

    Raises:
      ArgumentError: it has not.
      ArgumentTypeError: a leaf is no array.
    """
    structures = jax.tree.structure(given), jax.tree.structure(like)
    if structures[0] != structures[1]:
        raise ArgumentError(
            f"{what} must have the structure that it had, {structures[1]}; got {structures[0]}."
        )
    paths = jax.tree_util.tree_leaves_with_path(given)
    for (path, leaf), old in zip(paths, jax.tree.leaves(like), strict=True):
        where = f"{what}{jax.tree_util.keystr(path)}"
        if jnp.shape(_check.array(where, leaf)) != jnp.shape(old) and shapes:
            raise ArgumentError(
                f"{where} must have shape {jnp.shape(old)}, which it had; got {jnp.shape(leaf)}."
            )
