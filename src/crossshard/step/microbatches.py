"""Microbatches: the pieces of a shard's rows, how much each counts, and how aux is reduced."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from crossshard import _check
from crossshard._check import is_inexact, is_number
from crossshard.collectives.in_order import sum_of_nodes
from crossshard.collectives.sums import average, sum_over_shards, to_average, to_sum, widen
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.mean import Mean, MeanSums, counts_of, part_of_mean
from crossshard.jaxprs.walk import depends, sources
from crossshard.pipeline.stages.aggregate import as_weight
from crossshard.shards.axes import Shards
from crossshard.shards.batch_axes import BatchAxes, VirtualShards, join


class LocalResult(NamedTuple):
    """What one shard computes from its rows."""

    loss: Any  # float[], the mean loss, or see ``is_weighted``
    values: Any  # its gradient
    weight: Any  # float[], the weight of the rows; ``None`` if all shards count the same
    model_state: Any  # the model state after the loss
    aux: Any  # what else the loss returned
    # The sums and counts of a ``Mean``; ``None`` if the loss is a number.
    terms: MeanSums | None = None
    # For each leaf of the gradient whether the backward pass has summed it over the shards; empty
    # if none is. See ``Gradients``.
    early: tuple[bool, ...] = ()
    # The next residual of each gradient, if the backward pass has sent some in few bits.
    residuals: Any = None
    # float32[], the squared norm of this shard's own gradients of leaves that are summed already;
    # ``None`` if nobody asks.
    squared_norm: Any = None
    # What else the aggregate is to sum, by name; ``None`` for what ``StepLoss.sums`` makes of this.
    sums: dict[str, Any] | None = None
    # Whether loss, values, weight and sums are weighted partial sums over virtual shards,
    # ``[nodes, …]`` of the trees in collectives/in_order.py, and aux is ``[virtual, …]``.
    is_weighted: bool = False


def pieces_of(rows: Any, axes: BatchAxes, number: int, *, interleaved: bool = False) -> Any:
    """Cut rows into equal pieces, stacked: microbatches, or the virtual shards of a shard.

    Args:
      rows: a batch without its whole arrays.
      axes: the axes of its rows.
      number: the number of pieces, which divides that of the rows.
      interleaved: whether the rows are those of all shards. A microbatch then has every
        ``number``-th row, so that each shard gives equally many, whatever their number.
    """

    def one(x: Any, axis: int) -> Any:
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        each = x.shape[axis] // number
        if interleaved:
            return jnp.moveaxis(x.reshape(*before, each, number, *after), axis + 1, 0)
        return jnp.moveaxis(x.reshape(*before, number, each, *after), axis, 0)

    return jax.tree.map(one, rows, axes.tree_of(rows))


def as_stored(after: Any, before: Any) -> Any:
    """Cast a state to the dtypes of the one before, or the carry would change its type."""
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), after, before)


def chosen(flags: Sequence[bool], if_set: Any, otherwise: Any) -> Any:
    """Choose each leaf from ``if_set`` where its flag is set, and else from ``otherwise``."""
    if not flags:
        return otherwise
    leaves, tree = jax.tree.flatten(otherwise)
    every = zip(flags, jax.tree.leaves(if_set), leaves, strict=True)
    return tree.unflatten([one if flag else other for flag, one, other in every])


class AuxReduction(enum.StrEnum):
    """How an array of ``aux`` is reduced over the shards, or the group; see ``StepOptions``."""

    PER_SHARD = "per_shard"  # not at all: ``[shards, …]``
    MEAN = "mean"  # weighted by weight=; beside a Mean all shards count the same
    SUM = "sum"  # over the shards whose weight is not zero


def check_aux_reduction(reduction: Any, has_aux: bool) -> Any:
    """Return the checked ``aux_reduction``, a pytree of reductions; ``None`` is per shard."""
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


def aux_of_microbatches(reduction: Any, aux: Any, weights: jax.Array | None) -> Any:
    """Reduce the stacked ``aux`` of a shard's microbatches; per shard it stays stacked."""

    def one(path: Any, leaf: Any, each: AuxReduction) -> Any:
        if each is AuxReduction.PER_SHARD:
            return leaf
        _check_reducible(path, leaf, each)
        if each is AuxReduction.SUM:
            own = leaf if weights is None else jax.vmap(to_sum)(leaf, weights)
            return own.sum(0, dtype=leaf.dtype)
        if weights is None:
            return average(widen(leaf).sum(0), None, len(leaf)).astype(leaf.dtype)
        total = jax.vmap(to_average)(leaf, weights).sum(0)
        return average(total, weights.sum()).astype(leaf.dtype)

    leaves = [one(path, leaf, each) for (path, leaf), each in pairs_of_aux(reduction, aux)]
    return jax.tree.structure(aux).unflatten(leaves)


def aux_to_reduce(reduction: Any, aux: Any, weight: jax.Array | None) -> dict[str, Any]:
    """Return the arrays, by name, that the aggregate sums to reduce ``aux``."""
    summands = []
    for (path, leaf), each in pairs_of_aux(reduction, aux):
        if each is not AuxReduction.PER_SHARD:
            _check_reducible(path, leaf, each)
            of = to_average if each is AuxReduction.MEAN else to_sum
            summands.append(of(leaf, weight))
    return {"aux": summands} if summands else {}


def check_aux(aux: Any) -> None:
    """Raise if ``aux`` has a leaf that is neither an array nor a number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not is_number(leaf):
            raise ArgumentTypeError(
                f"aux{jax.tree_util.keystr(path)} is {_check.described(leaf)}; aux "
                f"must hold arrays and numbers. Leave out of aux what never changes."
            )


def pairs_of_aux(reduction: Any, aux: Any) -> list[tuple[Any, AuxReduction]]:
    """Return the leaves of ``aux`` with their paths, and the reduction of each."""
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


Weight = Callable[[Any], Any]


def check_weight(weight: Any) -> Weight | None:
    """Return the weight function of the ``weight`` argument, from a shard's batch to its weight."""
    if weight is None or callable(weight):
        return weight
    if isinstance(weight, str):
        return SumOf(weight)
    raise ArgumentTypeError(
        f"weight must be the name of the batch's entry that counts examples or tokens, or a "
        f"function from a shard's batch to its weight; got {_check.described(weight)}."
    )


@dataclasses.dataclass(frozen=True)
class SumOf:
    """The sum of one entry of the batch, such as a mask."""

    key: str

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, dict) or self.key not in batch:
            known = list(batch) if isinstance(batch, dict) else type(batch).__name__
            raise ArgumentError(
                f"weight={self.key!r} names an entry of the batch, but the batch has {known}."
            )
        return jnp.sum(jnp.asarray(batch[self.key], float))


def check_weight_is_read(
    weight: Weight, batch: Any, loss: Callable[[Any, Any], Any], params: Any
) -> None:
    """Raise if a loss of a batch and parameters does not read the entry that counts its rows."""
    if not isinstance(weight, SumOf):
        return
    key = weight.key
    # Raises if there is no such entry.
    jax.eval_shape(weight, batch)
    of_entry = lambda entry, params: loss({**batch, key: entry}, params)
    if not depends(of_entry, batch[key], params):
        raise ArgumentError(
            f"weight={key!r} means that batch[{key!r}] counts rows, but the loss does not read it, "
            f"so rows of weight 0, such as those of padding, count in its mean. Write "
            f"(loss_of_rows * batch[{key!r}]).sum() / batch[{key!r}].sum(). If the loss leaves "
            f"such rows out on its own, pass weight=lambda batch: batch[{key!r}].sum()."
        )


def entries_read(weight: Weight | None, rows: Any, whole: Any) -> list[bool]:
    """Return of each array with rows whether the weight is computed from it."""
    assert weight is not None
    (bits,) = sources(lambda rows: weight(join(rows, whole)), rows)
    return [bool(bits >> place & 1) for place in range(len(jax.tree.leaves(rows)))]


def weight_of(weight: Weight, batch: Any) -> jax.Array:
    """Return the weight of one shard's rows of the batch, float[]; for errors see ``as_weight``."""
    return as_weight(weight(batch), "weight returned")


@dataclasses.dataclass(frozen=True)
class Counting:
    """How the counts of a ``Mean`` are summed over the pieces of the batch."""

    shards: Shards  # the shards that have the pieces
    pieces: int  # how many pieces they have together
    counts_in: Any = None  # float[], 0 if this shard is left out, else 1; ``None`` if none is
    # The count of each term over the whole batch, float[]; ``None`` if each shard has one piece: it
    # sums them where they are computed.
    counts: tuple[Any, ...] | None = None

    def of_piece(self, mean: Mean) -> jax.Array:
        """Return the loss of one piece, such that the mean of the pieces' losses is the batch's."""
        counts = self.counts or self.over_shards(jnp.stack(counts_of(mean)))
        pieces: Any = self.pieces
        if self.counts_in is not None:
            of_shard = self.pieces // self.shards.group_size
            pieces = sum_over_shards(self.counts_in, self.shards) * of_shard
        return part_of_mean(mean, counts, pieces)

    def over_shards(self, counts: jax.Array) -> tuple[Any, ...]:
        """Sum a shard's counts over the shards that are not left out."""
        own = lax.stop_gradient(counts)
        own = own if self.counts_in is None else jnp.where(self.counts_in != 0, own, 0)
        return tuple(sum_over_shards(own, self.shards))

    def in_order(self, counts: jax.Array, virtual: VirtualShards) -> tuple[Any, ...]:
        """Sum counts ``[virtual shards here, terms]`` in one order for any number of shards."""
        every = jnp.zeros((self.shards.num_shards, *counts.shape), counts.dtype)
        every = sum_over_shards(every.at[self.shards.index()].set(counts), self.shards)
        return tuple(sum_of_nodes(virtual.filled(every.reshape(-1, counts.shape[-1]))))
