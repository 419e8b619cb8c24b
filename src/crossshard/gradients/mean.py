"""Mean: a loss as a sum over rows and their count, so that shards and microbatches add up."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from crossshard import _check
from crossshard._check import is_number
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from crossshard.shards.axes import Shards


class Moved(NamedTuple):
    """What a loss does to a sum over all rows before it divides by that sum."""

    # "max": at least the bound; "plus": the bound is added; "guard": the bound in the place of 0.
    how: str = ""
    bound: float = 0.0
    of_mean: bool = False  # whether it is done to the mean over the parts, rather than to their sum

    def __call__(self, count: Any, parts: Any = 1) -> Any:
        """Return the divisor, given the sum over so many parts."""
        bound = self.bound * parts if self.of_mean else self.bound
        if self.how == "max":
            return jnp.maximum(count, bound)
        if self.how == "guard":
            return jnp.where(count == 0, bound, count)
        return count + bound if self.how == "plus" else count


_UNMOVED = Moved()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["total", "count", "scale"],
    meta_fields=["name", "is_fixed", "moved"],
)
@dataclasses.dataclass(frozen=True)
class Term:
    """One quotient of a ``Mean``."""

    total: Any  # the sum over rows
    count: Any  # how many count, which divides it
    scale: Any = 1.0  # what multiplies the quotient
    name: str = ""  # in ``metrics``; empty without one
    is_fixed: bool = False  # whether the count is a number, and not an array of JAX, and not 0
    moved: Moved = _UNMOVED  # what is done to the count of the batch before it divides


class Mean:
    """Divides a sum over rows by their count, both summed over the whole batch first.

    A loss returns it in place of a number. The loss of the batch is the sum of the totals of all
    rows, divided by the sum of their counts, whatever shard or microbatch has them. Means add up
    and scale, and a number that is a mean over rows, or the same for any rows, may be added:
    ``Mean(ce, tokens) + 0.01 * Mean(balance, rows) + 1e-4 * l2(params)``.

    Args:
      total: float[], the sum over the rows that are given, such as ``(losses * mask).sum()``.
      count: number[], how many count in it, such as ``mask.sum()`` or the number of rows. No
        gradient flows through it.
      name: the name of this term in ``metrics["terms"]`` and ``metrics["counts"]``.

    Raises:
      ArgumentError: the total or the count is not a scalar.
      ArgumentTypeError: they are not numbers.

    >>> import jax.numpy as jnp, optax
    >>> import crossshard
    >>> def loss_fn(w, batch):
    ...     errors = (w * batch["x"] - 1) ** 2
    ...     return crossshard.Mean((errors * batch["mask"]).sum(), batch["mask"].sum(), "error")
    >>> step = crossshard.make_train_step(loss_fn, optax.sgd(0.1), num_shards=1)
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "mask": jnp.array([1.0, 1.0, 0.0])}
    >>> state, metrics = step(step.init(jnp.float32(0)), batch)
    >>> float(metrics["loss"]), float(metrics["counts"]["error"])
    (1.0, 2.0)
    """

    # A NumPy number leaves arithmetic to this class.
    __array_ufunc__ = None

    def __init__(self, total: ArrayLike, count: ArrayLike, name: str | None = None):
        _check.scalar(total, "The total of a Mean")
        _check.scalar(count, "The count of a Mean", (jnp.floating, jnp.integer))
        if name is not None:
            _check.word("The name of a Mean", name)
        is_fixed = not isinstance(count, jax.Array) and bool(count)
        self.terms: tuple[Term, ...] = (Term(total, count, 1.0, name or "", is_fixed),)
        self.rest: Any = None  # what is added to the terms, as a regulariser

    def value(self) -> Float[Array, ""]:
        """Return the loss of the given rows alone, as on one device: 0 where nothing counts.

        >>> float((Mean(6.0, 3) + 0.5 * Mean(4.0, 2)).value())
        3.0
        """
        return part_of_mean(self, counts_of(self), 1)

    def __repr__(self) -> str:
        terms = " + ".join(f"{t.scale} * Mean({t.total}, {t.count})" for t in self.terms)
        return terms if self.rest is None else f"{terms} + {self.rest}"

    def _scaled(self, by: Callable[[Any], Any]) -> Mean:
        terms = tuple(dataclasses.replace(each, scale=by(each.scale)) for each in self.terms)
        return _mean(terms, None if self.rest is None else by(self.rest))

    def __add__(self, other: Mean | ArrayLike) -> Mean:
        if isinstance(other, Mean):
            terms, rest = (*self.terms, *other.terms), other.rest
        else:
            terms, rest = self.terms, _factor(other, "added to")
        rests = [x for x in (self.rest, rest) if x is not None]
        return _mean(terms, functools.reduce(operator.add, rests) if rests else None)

    def __mul__(self, other: ArrayLike) -> Mean:
        factor = _factor(other, "multiplied with")
        return self._scaled(lambda x: x * factor)

    def __truediv__(self, other: ArrayLike) -> Mean:
        factor = _factor(other, "divided by")
        return self._scaled(lambda x: x / factor)

    def __neg__(self) -> Mean:
        return self._scaled(lambda x: -x)

    def __sub__(self, other: Mean | ArrayLike) -> Mean:
        return self + (-other if isinstance(other, Mean) else -_factor(other, "less"))

    def __rsub__(self, other: ArrayLike) -> Mean:
        return -self + other

    __radd__, __rmul__ = __add__, __mul__

    def _refuse(self, *_: Any) -> NoReturn:
        raise ArgumentTypeError(
            "A Mean may be added to others, and multiplied with a number or divided by one, so "
            "that what shards have of it adds up. Of anything else take value(), with "
            "loss_over='batch', whose loss has all rows."
        )

    __rtruediv__ = __pow__ = __rpow__ = __abs__ = __float__ = _refuse


def _mean(terms: tuple[Term, ...], rest: Any) -> Mean:
    made = object.__new__(Mean)
    made.terms, made.rest = terms, rest
    return made


jax.tree_util.register_pytree_node(
    Mean, lambda mean: ((mean.terms, mean.rest), None), lambda _, children: _mean(*children)
)


def with_moved(mean: Mean, moved: Moved) -> Mean:
    """Return the mean with ``moved`` applied to the counts of the batch before they divide."""
    return _mean(tuple(dataclasses.replace(each, moved=moved) for each in mean.terms), mean.rest)


def _factor(x: Any, what: str) -> Any:
    """Return a number that a ``Mean`` is combined with, if it is one."""
    if isinstance(x, Mean) or not is_number(x):
        raise ArgumentTypeError(
            f"A Mean was {what} {type(x).__name__}. Means add up; a number may multiply or divide "
            f"one, or be added."
        )
    return _check.scalar(x, f"What a Mean is {what}", (jnp.floating, jnp.integer))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["totals", "counts"],
    meta_fields=["names", "is_never_empty", "has_rest"],
)
@dataclasses.dataclass(frozen=True)
class MeanSums:
    """The sums and counts of a ``Mean``, to be added up over microbatches and shards."""

    totals: tuple[Any, ...]
    counts: tuple[Any, ...]
    names: tuple[str, ...]
    is_never_empty: bool  # whether some count is fixed, so that some row always counts
    has_rest: bool  # whether something is added to the terms

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return the mean and the count of each term, of sums over all rows."""
        pairs = zip(self.totals, self.counts, strict=True)
        means = [jnp.where(count != 0, total / _or_one(count), 0) for total, count in pairs]
        return {
            "terms": dict(zip(self.names, means, strict=True)),
            "counts": dict(zip(self.names, self.counts, strict=True)),
        }

    def own_weight(self, weight: Any) -> Any:
        """Return what all of a shard's gradient is weighted by; ``None`` if its parts differ.

        Of a ratio that is a ``Mean`` since it has a ``weight``, the last count is that.
        """
        is_one = len(self.counts) == 1 and not self.has_rest
        return self.counts[-1] if weight is not None or is_one else None

    def are_empty(self) -> Any:
        """Return whether no row counts in any term; ``None`` if some row always does."""
        if self.is_never_empty:
            return None
        return functools.reduce(jnp.logical_and, [count == 0 for count in self.counts])


def sums_of(mean: Mean) -> MeanSums:
    """Return the sums and counts of a ``Mean``, whose terms must have different names."""
    names = tuple(each.name or f"term_{place}" for place, each in enumerate(mean.terms))
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ArgumentError(
            f"Two terms of the loss are named {twice[0]!r}, and metrics has one of each name. Pass "
            f"Mean(total, count, name) another one."
        )
    totals = tuple(_wide(jax.lax.stop_gradient(each.total)) for each in mean.terms)
    is_never_empty = any(each.is_fixed for each in mean.terms)
    return MeanSums(totals, counts_of(mean), names, is_never_empty, mean.rest is not None)


def counts_of(mean: Mean) -> tuple[Any, ...]:
    """Return the count of each term, float[], which raises if a gradient would flow through it."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(mean)]
    if shape := max(shapes):
        raise ArgumentError(
            f"A loss is one number, and it returned a Mean with arrays of shape {shape}, as "
            f"jax.vmap makes of several. Return totals and counts from the mapped function, and "
            f"add up: sum(Mean(total, count) for total, count in zip(totals, counts))."
        )
    return tuple(
        _counted(jnp.asarray(each.count, float), f"the Mean {each.name or place + 1!s}")
        for place, each in enumerate(mean.terms)
    )


def _counted(count: Any, name: str) -> Any:
    @jax.custom_jvp
    def identity(x: Any) -> Any:
        return x

    def derivative(primals: Any, tangents: Any) -> tuple[Any, Any]:
        (x,), (change,) = primals, tangents
        if not isinstance(change, jax.custom_derivatives.SymbolicZero):
            raise LossError(
                f"A gradient would flow through the count of {name}: it depends on the parameters, "
                f"or comes from a function with a gradient of its own that takes them. The counts "
                f"of all shards are summed before the backward pass. Write Mean(total, "
                f"jax.lax.stop_gradient(count)), if it counts; or total / count, with "
                f"loss_over='batch', if its gradient is meant."
            )
        return x, jnp.zeros_like(x)

    identity.defjvp(derivative, symbolic_zeros=True)
    return identity(count)


def part_of_mean(mean: Mean, counts: tuple[Any, ...], parts: Any) -> Float[Array, ""]:
    """Return the loss of a part of the batch; the mean of all parts' losses is that of the batch.

    Args:
      mean: what the loss returned for the rows of this part.
      counts: for each term, the count of the batch.
      parts: how many parts the batch has.
    """
    found = []
    for each, count in zip(mean.terms, counts, strict=True):
        by = each.moved(count, parts)
        found.append(each.scale * _wide(each.total) * jnp.where(by != 0, parts / _or_one(by), 0))
    return functools.reduce(jnp.add, found, _wide(0.0 if mean.rest is None else mean.rest))


def part_of_shard(mean: Mean, shards: Shards) -> tuple[Float[Array, ""], Bool[Array, ""] | None]:
    """Return the loss of a shard; the mean over the shards, or the group, is that of the batch.

    The second result is whether no row of any of them counts; ``None`` if some row always does.
    """
    own = jax.lax.stop_gradient(shards.as_varying(jnp.stack(counts_of(mean))))
    counts = tuple(sum_over_shards(own, shards))
    found = dataclasses.replace(sums_of(mean), counts=counts)
    return part_of_mean(mean, counts, shards.group_size), found.are_empty()


def _wide(x: Any) -> Any:
    """Return ``x`` in at least 32 bits, in which totals are divided."""
    x = jnp.asarray(x)
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else jnp.result_type(float)
    return x.astype(jnp.promote_types(dtype, jnp.float32))


def _or_one(count: Any) -> Any:
    return jnp.where(count != 0, count, 1)
