"""Model state: the state and the random key that a loss takes besides parameters and batch."""

import enum
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard._check import is_inexact
from crossshard._flax import nnx
from crossshard.collectives.sums import average, to_average, widen
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.jaxprs.walk import sources
from crossshard.pipeline.stage import Gradients
from crossshard.shards.random_streams import is_key, may_be_raw_key


class ModelState(enum.StrEnum):
    """How the state that a loss returns is kept."""

    # Each shard keeps its own, stored [shards, …].
    PER_SHARD = "per_shard"
    # Floating arrays are averaged over the shards, or the group, after each step; others are the
    # same on all of them.
    MEAN = "mean"


def check_model_state(model_state: object) -> ModelState | None:
    """Return the checked ``model_state`` argument."""
    hint = "The state itself is an argument of init."
    if model_state is None:
        return None
    return _check.choice("model_state", model_state, ModelState, hint)


def check_initial(
    kind: ModelState | None, params: Any, model_state: Any, *, has_one_state: bool
) -> Any:
    """Return the state before the first step as arrays; ``()`` if the loss takes none."""
    if kind is None:
        if model_state is not None:
            raise ArgumentError(
                "init got model_state=, but the loss takes none. Write make_train_step(..., "
                "model_state='mean'), and loss_fn(params, model_state, batch)."
            )
        return ()
    if isinstance(params, nnx.Module):
        raise ArgumentError(
            f"{type(params).__name__} is an NNX module, whose variables keep its state, one per "
            f"shard. Leave out model_state=."
        )
    if model_state is None:
        raise ArgumentError(
            f"The step has model_state={str(kind)!r}: pass the state before the first step, "
            f"init(params, model_state=state)."
        )
    if overwritten(model_state) and not has_one_state:
        raise ArgumentError(
            f"model_state[{OVERWRITTEN!r}] takes its next values from the backward pass, such as "
            f"the maxima of fp8 over all rows, and a shard sees its own. Write "
            f"make_train_step(..., loss_over='batch'), without accumulate_steps, and the values "
            f"are one device's."
        )
    _check.arrays("model_state", model_state, or_types=True)
    is_type = lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: x if is_type(x) else jnp.asarray(x), model_state)


# Linen's collection of arrays that a backward pass writes: their "gradients" are their next values.
# It holds the scales and histories of fp8.
OVERWRITTEN = "_overwrite_with_gradient"


def overwritten(state: Any) -> list[Any]:
    """Return the arrays of a state whose gradients are their next values."""
    paths = jax.tree_util.tree_leaves_with_path(state)
    return [leaf for path, leaf in paths if _is_overwritten(path)]


def overwrite(state: Any, values: Sequence[Any]) -> Any:
    """Return a state with these values in the place of ``overwritten(state)``."""
    if not values:
        return state
    left = iter(values)
    one = lambda path, x: next(left).astype(x.dtype) if _is_overwritten(path) else x
    return jax.tree_util.tree_map_with_path(one, state)


def _is_overwritten(path: tuple[Any, ...]) -> bool:
    return jax.tree_util.DictKey(OVERWRITTEN) in path


def holds_keys(path: tuple[Any, ...], state: Any) -> bool:
    """Return whether an array of a per-shard state, or an NNX variable, holds random keys.

    Raises if it may hold raw keys, and its name does not say whether it does.
    """
    arrays = jax.tree.leaves(state)
    if isinstance(state, nnx.RngState):
        return isinstance(state, nnx.RngKey)
    if any(map(is_key, arrays)):
        return True
    if not any(map(may_be_raw_key, arrays)):
        return False
    # "['rngs']['dropout']", "[0]", ".noise"
    *outer, name = re.findall(r"\w+", jax.tree_util.keystr(path)) or [""]
    if is_named_as_key(name) or any(map(_is_named_as_rng, outer)):
        return True
    raise ArgumentError(
        f"model_state{jax.tree_util.keystr(path)} is uint32{list(arrays[0].shape)}, as raw random "
        f"keys are, and with the same key all shards would drop out the same units. Pass "
        f"jax.random.wrap_key_data(x) in its place; if it is no key, keep it as int32."
    )


def split_state(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """Return the state in the output of a loss, and the output without it."""
    form = "(loss, (model_state, aux))" if has_aux else "(loss, model_state)"
    is_pair = lambda x: isinstance(x, tuple | list) and len(x) == 2
    if not is_pair(out) or (has_aux and not is_pair(out[1])):
        raise ArgumentTypeError(
            f"With model_state= a loss returns {form}; this one returned {type(out).__name__}."
        )
    loss, after = out
    return (after[0], (loss, after[1])) if has_aux else (after, loss)


def check_returned(before: Any, after: Any) -> Any:
    """Return the state after the loss, which must have the types of the one before."""
    was, now = jax.tree.structure(before), jax.tree.structure(after)
    if was != now:
        raise ArgumentError(
            f"The loss must return a model_state of the structure that it took: it took {was} and "
            f"returned {now}."
        )

    def one(path: Any, old: Any, new: Any) -> Any:
        # A Python number takes the dtype of the array before it.
        new = new if hasattr(new, "dtype") else jnp.asarray(new, old.dtype)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ArgumentError(
                f"model_state{jax.tree_util.keystr(path)} was {old.dtype}{list(old.shape)}, and "
                f"the loss returned {new.dtype}{list(new.shape)}. Return it as it came."
            )
        return new

    return jax.tree_util.tree_map_with_path(one, before, after)


def check_same_on_shards(state: Any, after: Callable[..., Any], own: Any, params: Any) -> None:
    """Raise if an array that is not averaged would differ between shards.

    ``state`` is the one before the loss, and ``after(own, params)`` returns the one after it.
    ``own`` are the inputs that differ between shards: the rows of the batch and the key.
    """
    paths = jax.tree_util.tree_leaves_with_path(state)
    if all(is_inexact(leaf) for _, leaf in paths):
        return
    of_own = (1 << len(jax.tree.leaves(own))) - 1
    for (path, leaf), bits in zip(paths, sources(after, own, params), strict=True):
        if bits & of_own and not is_inexact(leaf):
            raise ArgumentError(
                f"model_state{jax.tree_util.keystr(path)} ({leaf.dtype}) is computed from the "
                f"batch or the random key, so it differs between shards, and only floating arrays "
                f"are averaged. Make it floating, or pass model_state='per_shard'."
            )


def unless_weightless(
    weight: jax.Array, after: Any, before: Any, changed: Sequence[bool] | None = None
) -> Any:
    """Return a shard's state after the loss of some rows, or before it if they have weight 0.

    ``changed`` says of each array whether the rows have changed it; ``None`` if only its dtype
    tells. The others, such as counters and random streams, go on.
    """
    leaves, tree = jax.tree.flatten(after)
    keeps = map(is_inexact, leaves) if changed is None else changed
    pairs = zip(leaves, jax.tree.leaves(before), keeps, strict=True)
    return tree.unflatten([jnp.where(weight != 0, new, old) if k else new for new, old, k in pairs])


def draws(state: Any) -> list[bool]:
    """Return of each array of a state whether random numbers may be drawn by it.

    In a module these are its random streams; in a function any array may count beside a key.
    """
    own, is_variable = streams(state), lambda leaf: isinstance(leaf, nnx.Variable)
    leaves = jax.tree.leaves(state, is_leaf=is_variable)
    of_module = [is_variable(leaf) for leaf in leaves for _ in jax.tree.leaves(leaf)]
    pairs = list(zip(own, of_module, strict=True))
    any_key = any(is_key for is_key, is_in_module in pairs if not is_in_module)
    return [is_key or (any_key and not is_in_module) for is_key, is_in_module in pairs]


def streams(state: Any) -> list[bool]:
    """Return of each array of a state whether it is a key, or of a random stream of a module."""
    is_variable, found = lambda leaf: isinstance(leaf, nnx.Variable), list[bool]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
        own = isinstance(leaf, nnx.RngState) or holds_keys(path, leaf)
        found += [own] * len(jax.tree.leaves(leaf))
    return found


def no_sum(state: Any) -> Any:
    """Return the sum over no microbatches of a state that is averaged over them."""
    return jax.tree.map(lambda x: jnp.zeros_like(widen(x)) if is_inexact(x) else x, state)


def add(total: Any, after: Any, weight: jax.Array | None) -> Any:
    """Add the state after a microbatch to the sum over those before it."""
    one = lambda x, new: x + to_average(new, weight) if is_inexact(new) else new
    return jax.tree.map(one, total, after)


def mean(total: Any, before: Any, weight: jax.Array | None, number: int) -> Any:
    """Return the mean of a state over microbatches; that before them if nothing has weight."""

    def one(x: Any, old: Any) -> Any:
        if not is_inexact(old):
            return x
        found = average(x, weight, number).astype(old.dtype)
        return found if weight is None else jnp.where(weight != 0, found, old)

    return jax.tree.map(one, total, before)


def to_reduce(kind: ModelState | None, after: Any, weight: jax.Array | None) -> dict[str, Any]:
    """Return the arrays, by name, that the aggregate sums to average a state."""
    if kind is not ModelState.MEAN:
        return {}
    leaves = [leaf for leaf in jax.tree.leaves(after) if is_inexact(leaf)]
    return {"model_state": [to_average(leaf, weight) for leaf in leaves]}


def reduced_state(after: Any, gradients: Gradients, number: int) -> Any:
    """Return the state for the next step, averaged if it was summed.

    A step that is skipped does not use it.

    Args:
      after: this shard's state after the loss.
      gradients: the reduced gradients, with the sums of ``to_reduce``.
      number: the number of shards in a mean.
    """
    if "model_state" not in gradients.sums:
        return after
    totals = iter(gradients.sums["model_state"])
    mean = lambda x: average(next(totals), gradients.weight, number).astype(x.dtype)
    return jax.tree.map(lambda x: mean(x) if is_inexact(x) else x, after)


# The arguments of a loss, with and without a random key.


def with_rng(
    loss_fn: Callable[..., Any], takes: tuple[str, ...] = ("params", "batch")
) -> tuple[Callable[..., Any], bool]:
    """Return the loss as a function of these arguments, and whether it also takes a key."""
    try:
        parameters = inspect.signature(loss_fn).parameters
    except ValueError:
        return loss_fn, False
    needed = [p for p in parameters.values() if p.default is p.empty]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = [p.name for p in needed if p.kind in positional]
    more, kinds = given[len(takes) :], {p.kind for p in needed}
    is_variadic = inspect.Parameter.VAR_POSITIONAL in kinds
    is_odd = len(given) < len(takes) or len(more) > 1 or inspect.Parameter.KEYWORD_ONLY in kinds
    is_key = lambda name: is_named_as_key(name) or not name.strip("_")
    if (is_odd and not is_variadic) or (more and not is_key(more[-1])):
        raise ArgumentTypeError(
            f"loss_fn takes ({', '.join(takes)}) or ({', '.join(takes)}, rng); this one takes "
            f"{[p.name for p in needed]}. Pass all arrays as one batch, such as step(state, "
            f"{{'x': x, 'y': y}}), of which the loss reads batch['x'] and batch['y']. If the last "
            f"one is a key, call it rng."
        )
    if more:
        return loss_fn, True
    bound = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    # Pass an optional key too: without it, dropout would be off.
    optional = [
        name
        for name, p in parameters.items()
        if p.default is None
        and name not in bound
        and name.split("_")[-1].removesuffix("s") in ("key", "prng", "rng")
    ]
    if not optional:
        return loss_fn, False
    (name, *others) = optional
    if others or name.endswith("s") or parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY:
        raise ArgumentTypeError(
            f"loss_fn takes {optional}, but a step has one key for each call. Write "
            f"loss_fn({', '.join(takes)}, rng), and derive the others from rng inside."
        )

    @functools.wraps(loss_fn)
    def wrapped(*args: Any) -> Any:
        *others, rng = args
        return loss_fn(*others, **{name: rng})

    return wrapped, True


def is_named_as_key(name: str) -> bool:
    """Return whether a name is that of a random key or a seed.

    >>> [is_named_as_key(name) for name in ("rngs", "PRNGKey", "key_2", "seed")]
    [True, True, True, True]
    >>> [is_named_as_key(name) for name in ("y", "keypoints", "key_points")]
    [False, False, False]
    """
    words = _words(name)
    return words[-1:] in (["key"], ["seed"]) or _is_named_as_rng(name)


def _is_named_as_rng(name: str) -> bool:
    """Return whether one of the words of a name is ``rng`` or ``prng``, or their plural."""
    return not {"rng", "prng"}.isdisjoint(_words(name))


def _words(name: str) -> list[str]:
    words = re.findall("[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return [word.lower().removesuffix("s") for word in words]
