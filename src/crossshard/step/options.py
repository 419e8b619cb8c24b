"""Options: which arrays of a state are of which option of a step, and what a new one needs."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from crossshard.errors import ArgumentError
from crossshard.model.layout import StateLayout, strong_copy
from crossshard.model.state import TrainState
from crossshard.pipeline.pipeline import Pipeline
from crossshard.pipeline.update.optimize import MastersState, MovingAverageState
from crossshard.shards.cut import PER_SHARD, REPLICATED, Placement

# In place of an array that a state lacks.
NEW = type("New", (), {})()
OPTIMIZER, MASTERS, AVERAGE, PREPROCESS = "optimizer", "master_dtype", "ema", "preprocess"
_INNER = ".opt_state.inner_state"

# An option, or "" for what is of none; and where an array is in it, whatever the other options are.
Key = tuple[str, str]


def key_of(path: str, *, masters: bool, average: bool) -> Key:
    """The option and the place of an array, given its path in a state with or without these two."""
    if not path.startswith(_INNER):
        found = re.match(r"\.opt_state\.(?:others\[')?(\w+)", path)
        return (found[1] if found else ""), path
    rest = path.removeprefix(_INNER)
    for option, field, has in ((MASTERS, ".masters", masters), (AVERAGE, ".ema", average)):
        if has and rest.startswith(field):
            return option, rest
        rest = rest.removeprefix(".inner_state") if has else rest
    return OPTIMIZER, rest


def said(new: Iterable[str], gone: Iterable[str], kept: Collection[str]) -> list[str]:
    """What becomes of the states of options, in words.

    Args:
      new: the options with arrays that are made.
      gone: the options with arrays that are dropped.
      kept: the options with arrays that stay.
    """
    new, gone, found = set(new), set(gone), []
    for option in sorted(new | gone):
        how = "from the parameters" if option in (MASTERS, AVERAGE) else "anew"
        if option in kept and option not in new:
            found.append(f"{option} keeps fewer arrays, and the others are dropped")
        elif option in kept and option not in gone:
            found.append(f"{option} keeps more arrays, of which the new ones are made {how}")
        elif option not in new:
            found.append(f"{option} is gone, and its state is dropped")
        elif option not in gone:
            found.append(f"{option} is new, and its state is made {how}")
        else:
            found.append(f"{option} keeps other arrays, of which the new ones are made {how}")
    return found


def adopted(layout: StateLayout, state: TrainState) -> tuple[TrainState, list[str]]:
    """An unsharded state as the step of a layout has it, if a step with other options has left it.

    Returns:
      The state, with ``NEW`` where an option is new; and what was done, in words.

    Raises:
      ArgumentError: its preprocessor is another one.
    """
    own, structure = jax.tree.flatten(layout.types)
    if jax.tree.structure(state.opt_state) == structure:
        return state, []
    trees = state.opt_state, layout.types
    if _differ(*(_wrapped(tree.inner_state)[0] for tree in trees)):
        return state, []
    stages = [tree.preprocess for tree in trees]
    if all(map(jax.tree.leaves, stages)) and _differ(*stages):
        raise ArgumentError(
            "The state is of a step with another preprocess, whose state this one's cannot take "
            "over. Pass the same preprocess, or init with other.model(state)."
        )
    keys, leaves = _keys(layout.types), jax.tree.leaves(state.opt_state)
    given = dict(zip(_keys(state.opt_state), leaves, strict=True))
    new = [key[0] for key in keys if key not in given]
    gone = [key[0] for key in given.keys() - set(keys)]
    found = [_as(like.dtype, given.get(key, NEW)) for key, like in zip(keys, own, strict=True)]
    kept = {key[0] for key in keys if key in given}
    return dataclasses.replace(state, opt_state=structure.unflatten(found)), said(new, gone, kept)


def _differ(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) != jax.tree.structure(other)


def _wrapped(inner: Any) -> tuple[Any, dict[str, bool]]:
    """The state of the optimizer that the user passed, and what is around it."""
    masters = isinstance(inner, MastersState)
    inner = inner.inner_state if masters else inner
    average = isinstance(inner, MovingAverageState)
    return inner.inner_state if average else inner, {"masters": masters, "average": average}


def _keys(opt_state: Any) -> list[Key]:
    around = _wrapped(opt_state.inner_state)[1]
    return [
        key_of(f".opt_state{jax.tree_util.keystr(path)}", **around)
        for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)
    ]


def _as(dtype: Any, x: Any) -> Any:
    return x if x is NEW or x.dtype == dtype else x.astype(dtype)


def completed(layout: StateLayout, state: TrainState, shardings: Sequence[Sharding]) -> TrainState:
    """An unsharded state with what the options' ``init`` makes in place of ``NEW``.

    Args:
      layout: the layout of the step that takes it.
      state: the state; what each shard has of its own may be that of another number of shards.
      shardings: the shardings of all its arrays.
    """
    make, places = _maker(layout, state)
    if not places:
        return state
    run = jax.jit(make, out_shardings=[shardings[place] for place in places])
    return _filled(state, places, run(state.params, _masters(state)))


def completed_types(layout: StateLayout, state: TrainState) -> TrainState:
    """The types of the arrays of ``completed``."""
    make, places = _maker(layout, state)
    if not places:
        return state
    return _filled(state, places, jax.eval_shape(make, state.params, _masters(state)))


def _filled(state: TrainState, places: Sequence[int], found: Sequence[Any]) -> TrainState:
    leaves, tree = jax.tree.flatten(state)
    for place, x in zip(places, found, strict=True):
        leaves[place] = x
    return tree.unflatten(leaves)


def _maker(layout: StateLayout, state: TrainState) -> tuple[Callable[..., Any], list[int]]:
    """What makes the arrays that are ``NEW`` from parameters and masters; and their places."""
    places = [place for place, leaf in enumerate(jax.tree.leaves(state)) if leaf is NEW]
    grouped, shards = layout.groups is not None, layout.number_of_shards

    def spread(placement: Placement, x: Any) -> jax.Array:
        if grouped:
            return x if placement.per_shard else x[0]
        return jnp.broadcast_to(x, (shards, *x.shape)) if placement.per_shard else x

    def make(params: Any, masters: Any) -> list[jax.Array]:
        init = lambda params, masters: _initial(layout.pipeline, params, masters)
        made = (jax.vmap(init) if grouped else init)(params, masters)
        own = PER_SHARD if grouped else REPLICATED
        inner = jax.tree.map(lambda _: own, made.inner_state)
        made = jax.tree.map(spread, layout.pipeline.placements(made, inner), made)
        whole = jax.tree.leaves(dataclasses.replace(state, opt_state=made))
        return [strong_copy(whole[place]) for place in places]

    return make, places


def _initial(pipeline: Pipeline, params: Any, masters: Any) -> Any:
    """The optimizer's state before the first step, around masters that are there already."""
    made = pipeline.init(params)
    if masters is None:
        return made
    of_masters = pipeline.with_options(master_dtype=None).init(masters)
    return made._replace(inner_state=MastersState(masters, of_masters.inner_state))


def _masters(state: TrainState) -> Any:
    inner = state.opt_state.inner_state
    if not isinstance(inner, MastersState):
        return None
    return None if any(x is NEW for x in jax.tree.leaves(inner.masters)) else inner.masters
