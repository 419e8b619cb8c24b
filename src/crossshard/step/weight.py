"""How much rows count: the weight of a batch, the counts of a ``Mean``, what a loss divides by."""

import concurrent.futures
import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from crossshard import _check, _jax
from crossshard.collectives.sums import sum_over_shards
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from crossshard.gradients.mean import Mean, Moved, counts_of, part_of_mean, with_moved
from crossshard.jaxprs.mean_over_rows import Finding, facts_of_inputs, prove, types_with
from crossshard.jaxprs.rewrite import evaluate, flat
from crossshard.jaxprs.row_facts import Free
from crossshard.jaxprs.walk import Call, constants, control_flow, depends, opened
from crossshard.pipeline.stages.aggregate import as_weight
from crossshard.shards.axes import Shards

# How often two functions are compared on numbers that are drawn; and up to which relative
# difference two float32 sums of the same numbers, in another order, are equal.
_TRIALS, _TOLERANCE = 4, 1e-5

Weight = Callable[[Any], Any]


def check_weight(weight: Any) -> Weight | None:
    """The weight function of the ``weight`` argument: from a shard's batch to its weight.

    Raises:
      ArgumentTypeError: ``weight`` is neither a function nor the name of an entry.
    """
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
    """Raise if a loss does not read the entry of the batch that counts its rows.

    Args:
      weight: the weight function.
      batch: one shard's rows of the batch.
      loss: the loss as a function of the batch and the parameters.
      params: the parameters, or their types.

    Raises:
      ArgumentError: the loss does not read the entry, so rows of weight 0 count in it.
    """
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


def weight_of(weight: Weight, batch: Any) -> jax.Array:
    """float[]: the weight of one shard's rows of the batch; for errors see ``as_weight``."""
    return as_weight(weight(batch), "weight returned")


# The counts of each term, and the model state after the rows that have them, of the rows of one
# piece, given the model state before and the index of the microbatch.
CountOfPiece = Callable[[Any, Any, Any], tuple[tuple[Any, ...], Any]]


@dataclasses.dataclass(frozen=True)
class Counting:
    """How the counts of a ``Mean`` are summed over the parts of the batch.

    Attributes:
      shards: the shards that have them.
      pieces: how many parts each shard has.
      weight: float[], 0 if this shard is left out, else 1; ``None`` if none is.
      counts: float[] of each term, of the whole batch; ``None`` if each shard has one part, which
        sums them where they are computed.
    """

    shards: Shards
    pieces: int
    weight: Any = None
    counts: tuple[Any, ...] | None = None

    def part(self, mean: Mean) -> jax.Array:
        """The loss of one part, so that the mean of the parts' losses is that of the batch."""
        counts = self.counts or self.over_shards(jnp.stack(counts_of(mean)))
        parts = self.shards.size
        if self.weight is not None:
            parts = sum_over_shards(self.weight, self.shards)
        return part_of_mean(mean, counts, parts * self.pieces)

    def over_shards(self, counts: jax.Array) -> tuple[Any, ...]:
        """The sum of a shard's counts over the shards that are not left out."""
        own = lax.stop_gradient(counts)
        own = own if self.weight is None else jnp.where(self.weight != 0, own, 0)
        return tuple(sum_over_shards(own, self.shards))

    def with_counts(self, counts: Any) -> "Counting":
        """The same, where the counts are known."""
        return dataclasses.replace(self, counts=counts)

    def in_order(self, counts: jax.Array) -> tuple[Any, ...]:
        """The sum over virtual shards, ``[of this shard, terms]``, the same for any number."""
        each = len(counts)
        every = jnp.zeros((self.shards.number, *counts.shape), counts.dtype)
        every = sum_over_shards(every.at[self.shards.index()].set(counts), self.shards)
        rows = list(every.reshape(self.shards.number * each, -1))
        while len(rows) > 1:
            odd = rows[len(rows) // 2 * 2 :]
            pairs = zip(rows[::2], rows[1::2], strict=False)
            rows = [one + other for one, other in pairs] + odd
        return tuple(rows[0])


def counts_of_pieces(count: CountOfPiece, number: int, pieces: Any, model_state: Any) -> jax.Array:
    """float[terms]: what the microbatches of a shard, or of a virtual one, count together.

    Args:
      count: computes the counts of one.
      number: how many there are.
      pieces: their rows, stacked.
      model_state: the state before the first.
    """

    def one(before: Any, piece: Any) -> tuple[Any, Any]:
        counts, after = count(piece[1], before, piece[0])
        as_stored = jax.tree.map(lambda x, y: x.astype(y.dtype), after, before)
        return as_stored, jnp.stack(counts)

    return lax.scan(one, model_state, (jnp.arange(number), pieces))[1].sum(0)


def pruned(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns, computed without what it does not need for that."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(*args)
    run = jaxpr_as_fun(_jax.without_unread(jaxpr))
    return jax.tree.unflatten(jax.tree.structure(types), run(*jax.tree.leaves(args)))


def check_takes_mean(*, weight: Any, is_summed: bool) -> None:
    """Raise if a loss that returns a ``Mean`` contradicts the step.

    Raises:
      ArgumentError: it does.
    """
    if weight is not None:
        raise ArgumentError(
            "The loss returns a Mean, which says what its rows count, and weight= says it again. "
            "Leave weight out."
        )
    if is_summed:
        raise ArgumentError(
            "The loss returns a Mean, which is a mean over the whole batch, and the optimizer's "
            "reduction is SUM, which adds up the losses of shards. Use reduction='mean'."
        )


# So little behind a count float32 rounds off.
_ROUNDED = 1e-6
AS_MEAN = (
    "Return the two sums, which are then added up over all shards before they are divided:\n"
    "    total, count = (losses * mask).sum(), mask.sum()\n"
    "    return crossshard.Mean(total, count)\n"
    "and leave weight out."
)


class Divisor(NamedTuple):
    """The sum over rows that divides a loss.

    Attributes:
      of_batch: computes it, float[], from a batch.
      is_of_piece: whether of a piece.
      is_weight: whether the weight is shown to be it, or it times a constant, for any batch.
    """

    of_batch: Callable[[Any], Any]
    is_of_piece: bool
    is_weight: bool


def divisor_of(
    finding: Finding,
    jaxpr: Any,
    arguments: Any,
    split: Callable[[Any], tuple[Any, Any]],
    join: Callable[[Any, Any], Any],
    weight: Weight,
) -> Divisor | None:
    """What divides a loss that is a ratio of two sums; ``None`` if more than the batch says it.

    Args:
      finding: what its trace shows.
      jaxpr: the trace that this is of.
      arguments: what the loss of a piece is computed from, or the types of that.
      split: splits a batch into its rows, and its entries that have none.
      join: joins them again.
      weight: the weight of the step.
    """
    (rows, keys), whole, *_ = arguments
    sizes = [len(jax.tree.leaves(each)) for each in (rows, keys, whole)]
    value = None if finding.by is None else _sum_in(jaxpr, finding.by)
    after = sizes[0] + sizes[1]
    places = [*range(sizes[0]), *range(after, after + sizes[2])]
    if value is None or not set(value[1]) <= set(places):
        return None
    compute, reads = value
    read = [places.index(place) for place in reads]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in jaxpr.in_avals]
    is_of_piece = [x.shape for x in types] == [jnp.shape(x) for x in jax.tree.leaves(arguments)]

    def of_batch(batch: Any) -> Any:
        leaves = jax.tree.leaves(split(batch))
        return compute(*(leaves[place] for place in read))

    of = lambda tree, found: jax.tree.unflatten(jax.tree.structure(tree), found)
    all_rows, all_whole = of(rows, types[: sizes[0]]), of(whole, types[after : after + sizes[2]])
    given = join(all_rows, all_whole)
    is_weight = isinstance(weight, SumOf) and name_of(rows, finding.entry) == weight.key
    of_weight = lambda batch: jnp.asarray(weight(batch), float)
    return Divisor(of_batch, is_of_piece, is_weight or _agree(of_weight, of_batch, given))


def _sum_in(jaxpr: Any, of: Any) -> tuple[Callable[..., Any], list[int]] | None:
    """What computes the sum of a value in a closed jaxpr, and which inputs of that it reads.

    ``None`` if the value is within a loop, or in a branch.

    Args:
      jaxpr: the jaxpr.
      of: a variable of it; the place of an input; or ``(output, of)``, a value in the call that has
        this output. See ``Total.of``.
    """
    found: list[bool] = []

    def compute(*args: Any) -> Any:
        value = args[of] if isinstance(of, int) else _value_in(jaxpr, args, of)
        found.append(value is not None)
        return jnp.asarray(jnp.sum(0.0 if value is None else value), float)

    traced = jax.make_jaxpr(compute)(*jaxpr.in_avals)
    kept, reads = _jax.pruned(traced, [True])
    if not found[0] or any(isinstance(x, jax.core.Tracer) for x in kept.consts):
        return None
    run = jaxpr_as_fun(kept)
    return lambda *args: run(*args)[0], [place for place, each in enumerate(reads) if each]


def _value_in(jaxpr: Any, args: Sequence[Any], of: Any) -> Any:
    """The value, if it is computed at the top of the jaxpr or in calls."""
    (output, inner), wanted, body = of if isinstance(of, tuple) else (None, of), of, opened(jaxpr)
    while isinstance(wanted, tuple):
        _, wanted = wanted
    known = dict(zip(body.constvars, constants(jaxpr), strict=True))
    known |= dict(zip(body.invars, args, strict=True))
    found = [known[wanted]] if wanted in known else []

    def on(equation: Any, given: list[Any]) -> list[Any]:
        call = control_flow(equation) if equation.outvars[:1] == [output] else None
        if isinstance(call, Call) and not found:
            value = _value_in(_jax.closed(call.jaxpr), given, inner)
            found.extend([] if value is None else [value])
        outputs = _jax.bound(equation, given)
        pairs = zip(equation.outvars, outputs, strict=True)
        found.extend(value for variable, value in pairs if variable is wanted)
        return outputs

    evaluate(jaxpr, args, on)
    return found[0] if found else None


def _agree(one: Callable[..., Any], other: Callable[..., Any], *types: Any) -> bool:
    """Whether two functions of inputs of these types are one program, or agree on drawn numbers.

    One may be the other times a constant.
    """
    traced = [jax.make_jaxpr(each)(*types) for each in (one, other)]
    if len({str(_jax.without_unread(flat(each))) for each in traced}) == 1:
        return True
    both = jax.make_jaxpr(lambda *args: (one(*args), other(*args)))(*types)
    kept, reads = _jax.pruned(both, [True, True])
    if any(isinstance(x, jax.core.Tracer) for x in kept.consts):
        return False
    leaves = [x for x, is_read in zip(jax.tree.leaves(types), reads, strict=True) if is_read]
    draw = np.random.default_rng(0)

    def run() -> Any:
        both = jax.jit(jaxpr_as_fun(kept))
        draws = ([_drawn(draw, x.shape, x.dtype) for x in leaves] for _ in range(_TRIALS))
        with jax.enable_x64(x64):
            return np.array([jax.device_get(both(*each)) for each in draws], np.float64)

    # What is traced, and the mesh there, belong to a thread; on the axes of a mesh that the user
    # has set, arrays would lie.
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(run).result()
    first, by = found[0]
    if not np.isfinite(found).all() or not first or not by:
        return False
    return all(are_equal(x * by, y * first) for x, y in found)


def are_equal(one: Any, other: Any) -> bool:
    """Whether two sums of the same numbers are equal but for rounding."""
    one, other = np.float64(one), np.float64(other)
    return bool(np.abs(one - other) <= _TOLERANCE * max(np.abs(one), np.abs(other)))


def _drawn(draw: np.random.Generator, shape: Any, dtype: Any) -> Any:
    """Numbers of a dtype: small ones, and zeros among them; integers of both signs."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        keys = jnp.asarray(draw.integers(0, 2**31, int(np.prod(shape))), jnp.uint32)
        return jax.vmap(jax.random.key)(keys).reshape(shape)
    if dtype == np.bool_:
        return draw.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -2
        return jnp.asarray(draw.integers(low, 4, shape), dtype)
    zeros = draw.random(shape) < 0.3
    return jnp.asarray(np.where(zeros, 0, draw.uniform(0, 2, shape)), dtype)


def is_exact(finding: Finding) -> bool:
    """Whether the mean that is weighed by the divisors of the shards is that of the batch.

    So it is unless what the loss does behind the sum changes a shard's and not that of the batch.
    """
    if finding.moved == "guard":
        # By which number a shard was divided that counts nothing tells what it has above.
        return not (finding.bound and math.isfinite(finding.bound))
    small = {"": 0.0, "max": 1.0, "plus": _ROUNDED}[finding.moved]
    return not finding.moved or (finding.counts and abs(finding.bound) <= small)


def as_mean(loss: Any, divisor: Divisor, finding: Finding, batch: Any, weight: Any) -> Mean:
    """A piece's ratio as the ``Mean`` that it is; the last of its terms has the weight alone."""
    moved, count = Moved(finding.moved, finding.bound, not finding.power), divisor.of_batch(batch)
    by = lax.stop_gradient(moved(count))
    wide = loss.astype(jnp.promote_types(loss.dtype, by.dtype))
    return with_moved(Mean(wide * by, count), moved) + 0.0 * Mean(0.0, weight, "weight")


def check_weight_of_mean(
    weight: Weight,
    rows: Any,
    whole: Any,
    join: Callable[[Any, Any], Any],
    *,
    axes: Sequence[int],
    times: int,
) -> None:
    """Raise unless the weight of a loss that is a mean over rows is the same for all shards.

    Args:
      weight: the weight.
      rows: the rows of a piece of the batch, or their types.
      whole: the entries that have none.
      join: joins them to a batch.
      axes: for each array of the rows the axis along which they are.
      times: of how many pieces the batch is.

    Raises:
      LossError: some shards would count more than others.
    """
    of = lambda rows, whole: jnp.asarray(weight(join(rows, whole)), float)
    leaves, proof = jax.tree.leaves(rows), None
    traces: list[Any] = [jax.make_jaxpr(of)(rows, whole)]
    each = leaves[0].shape[axes[0]]
    while proof is None:
        try:
            more = types_with(rows, axes, len(traces) * times * each)
            traces.append(jax.make_jaxpr(of)(more, whole))
        except Exception as error:  # a weight may raise anything on other shapes
            traces.append(error)
        proof = prove(traces, facts_of_inputs(leaves, axes, whole, ()), each, times)
    (fact,) = proof.facts
    if isinstance(fact, Free) and not fact.own:
        return
    if isinstance(weight, SumOf):
        entry = f"batch[{weight.key!r}]"
        raise LossError(
            f"The loss is a mean over rows, in which all rows count the same, and "
            f"weight={weight.key!r} lets a shard count as the sum of {entry}. Divide by that sum: "
            f"(losses * {entry}).sum() / {entry}.sum(). Or leave weight out."
        )
    raise LossError(
        f"The loss is a mean over rows, in which all rows count the same, and weight= lets shards "
        f"count differently: {said(weight)}. Leave weight out. Or if rows are to count "
        f"differently: {AS_MEAN}"
    )


def said(weight: Weight) -> str:
    """A weight as its author wrote it."""
    if isinstance(weight, SumOf):
        return f"{weight.key!r}, which is batch[{weight.key!r}].sum()"
    try:
        lines, first = inspect.getsourcelines(weight)
        file = inspect.getsourcefile(weight) or ""
    except (OSError, TypeError):
        return "weight=, a function"
    text = " ".join(line.strip() for line in lines[:3]) + (" …" if len(lines) > 3 else "")
    return f"{text} ({'/'.join(file.split('/')[-3:])}:{first})"


def another_sum(weight: Weight, finding: Finding, numbers: str = "") -> LossError:
    """The error for a weight that is not what the loss divides by."""
    code = f"{finding.code} ({finding.source})" if finding.code else finding.source
    return LossError(
        f"The loss divides by one sum over rows, and weight= is another:\n"
        f"    the loss: {code}\n    the weight: {said(weight)}\n{numbers}{AS_MEAN}"
    )


def not_of_the_batch(weight: Weight, finding: Finding) -> LossError:
    """The error for a divisor that is no sum of what the batch alone has, or cannot be seen."""
    return LossError(
        f"The loss divides by a sum over rows ({finding.source}) that cannot be computed from the "
        f"rows of one shard alone: it depends on more than the batch, is within a loop or a "
        f"branch, or the loss is another program for so few rows. So it cannot be compared with "
        f"{said(weight)}. {AS_MEAN}"
    )


def name_of(rows: Any, place: int | None) -> str | None:
    """The name of the entry of a batch whose only array is this one of its leaves."""
    if not isinstance(rows, dict) or place is None:
        return None
    path: Sequence[Any] = jax.tree_util.tree_leaves_with_path(rows)[place][0]
    return str(path[0].key) if len(path) == 1 else None
