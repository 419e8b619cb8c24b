"""Aux reduction: each shard's ``aux``, its mean, or its sum over the shards."""

import enum
from typing import Any

import jax
import jax.numpy as jnp

from crossshard import _check
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_inexact, is_number
from crossshard.pipeline.means import average, to_average, to_sum
from crossshard.pipeline.stage import Gradients


class AuxReduction(enum.StrEnum):
    """How an array of ``aux`` is reduced over the shards, or the group.

    PER_SHARD: not at all: ``[shards, …]``.
    MEAN: the mean, weighted as the loss is.
    SUM: the sum over the shards whose weight is not zero.
    """

    PER_SHARD = "per_shard"
    MEAN = "mean"
    SUM = "sum"


def check_aux_reduction(reduction: Any, has_aux: bool) -> Any:
    """The checked ``aux_reduction`` argument, a pytree of reductions; ``None`` is per shard.

    Raises:
      ArgumentError: an unknown reduction, or the loss returns no ``aux``.
    """
    if reduction is not None and not has_aux:
        raise ArgumentError(
            f"aux_reduction={_check.shown(reduction)} reduces aux, but the loss returns none. Pass "
            f"has_aux=True, and return (loss, aux)."
        )

    def one(leaf: Any) -> AuxReduction:
        hint = "Or a pytree of these that begins as aux does."
        given = AuxReduction.PER_SHARD if leaf is None else leaf
        return _check.choice("aux_reduction", given, AuxReduction, hint)

    return jax.tree.map(one, reduction, is_leaf=lambda leaf: leaf is None)


def of_microbatches(reduction: Any, aux: Any, weights: jax.Array | None) -> Any:
    """A shard's ``aux`` from that of its microbatches, stacked; per shard it stays stacked.

    Raises:
      ArgumentError: the reductions are not a prefix of ``aux``.
      ArgumentTypeError: a leaf cannot be reduced so.
    """

    def one(path: Any, leaf: Any, each: AuxReduction) -> Any:
        if each is AuxReduction.PER_SHARD:
            return leaf
        _check_reducible(path, leaf, each)
        if each is AuxReduction.SUM:
            own = leaf if weights is None else jax.vmap(to_sum)(leaf, weights)
            return own.sum(0, dtype=leaf.dtype)
        if weights is None:
            return average(leaf.sum(0), None, len(leaf)).astype(leaf.dtype)
        total = jax.vmap(to_average)(leaf, weights).sum(0)
        return average(total, weights.sum()).astype(leaf.dtype)

    leaves = [one(path, leaf, each) for (path, leaf), each in _pairs(reduction, aux)]
    return jax.tree.structure(aux).unflatten(leaves)


def to_reduce(reduction: Any, aux: Any, weight: jax.Array | None) -> dict[str, Any]:
    """What the aggregate must sum, by name, to reduce ``aux``.

    Raises:
      ArgumentError: the reductions are not a prefix of ``aux``.
      ArgumentTypeError: a leaf is not a number, or cannot be reduced so.
    """
    check_aux(aux)
    summands = []
    for (path, leaf), each in _pairs(reduction, aux):
        if each is not AuxReduction.PER_SHARD:
            _check_reducible(path, leaf, each)
            of = to_average if each is AuxReduction.MEAN else to_sum
            summands.append(of(leaf, weight))
    return {"aux": summands} if summands else {}


def reduced(
    reduction: Any,
    aux: Any,
    gradients: Gradients,
    number: int,
    *,
    grouped: bool,
    stacked: bool = False,
) -> Any:
    """One shard's ``aux`` with the reduced values, as the metrics store it.

    Args:
      reduction: the reductions.
      aux: this shard's ``aux``.
      gradients: the reduced gradients, with the sums of ``to_reduce``.
      number: the number of shards in a mean.
      grouped: whether each group has its own values.
      stacked: whether ``aux`` is that of several virtual shards already.
    """
    totals = iter(gradients.sums.get("aux", ()))

    def one(leaf: Any, each: AuxReduction) -> jax.Array:
        if each is AuxReduction.PER_SHARD:
            # Stored as one of [shards, …].
            return jnp.asarray(leaf) if stacked else jnp.asarray(leaf)[None]
        dtype = jnp.result_type(leaf)
        if each is AuxReduction.SUM:
            total = next(totals).astype(dtype)
        else:
            total = average(next(totals), gradients.weight, number).astype(dtype)
        return total[None] if grouped else total

    leaves = [one(leaf, each) for (_, leaf), each in _pairs(reduction, aux)]
    return jax.tree.structure(aux).unflatten(leaves)


def check_aux(aux: Any) -> None:
    """Raise if ``aux`` has a leaf that is neither an array nor a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not is_number(leaf):
            raise ArgumentTypeError(
                f"aux{jax.tree_util.keystr(path)} is {_check.described(leaf)}; aux "
                f"must hold arrays and numbers. Leave out of aux what never changes."
            )


def _pairs(reduction: Any, aux: Any) -> list[tuple[Any, AuxReduction]]:
    """The leaves of ``aux`` with their paths, and the reduction of each."""
    try:
        whole = jax.tree.broadcast(reduction, aux)
    except ValueError as error:
        raise ArgumentError(
            f"aux_reduction must begin as aux does, which is {jax.tree.structure(aux)}; got "
            f"{_check.shown(reduction, 100)} ({str(error).splitlines()[0]})."
        ) from None
    leaves = jax.tree_util.tree_leaves_with_path(aux)
    return list(zip(leaves, jax.tree.leaves(whole), strict=True))


def _check_reducible(path: Any, leaf: Any, reduction: AuxReduction) -> None:
    dtype = jnp.result_type(leaf)
    if is_inexact(leaf) or (reduction is AuxReduction.SUM and jnp.issubdtype(dtype, jnp.integer)):
        return
    instead = "'sum', or make it floating" if jnp.issubdtype(dtype, jnp.integer) else "None for it"
    raise ArgumentTypeError(
        f"aux{jax.tree_util.keystr(path)} is {dtype}, of which a step takes no {reduction}. Pass "
        f"aux_reduction={instead}."
    )
