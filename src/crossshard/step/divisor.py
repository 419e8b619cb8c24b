"""Divisor: what divides a loss that is a ratio of sums, and whether a weight is the same sum."""

import concurrent.futures
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from crossshard import _jax
from crossshard.errors import LossError
from crossshard.gradients.mean import Mean, Moved, with_moved
from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.jaxprs.quotient import Place, Split
from crossshard.jaxprs.rewrite import evaluate, inlined
from crossshard.jaxprs.walk import (
    Call,
    constants,
    control_flow,
    depends,
    equations_of,
    named_axes,
    opened,
)
from crossshard.shards.batch_axes import join
from crossshard.step.microbatches import SumOf, Weight

# How often two functions are compared on random numbers; and up to which relative difference two
# float32 sums of the same numbers, in another order, count as equal.
_TRIALS, _TOLERANCE = 4, 1e-5
_NUMBERS = 32  # how many of the numbers of a program are tried
# float32 rounds off what is added to a count if it is no larger than this.
_ROUNDED = 1e-6
AS_MEAN = (
    "Return the two sums, which are then added up over all shards before they are divided:\n"
    "    total, count = (losses * mask).sum(), mask.sum()\n"
    "    return crossshard.Mean(total, count)\n"
    "and leave weight out."
)


class Divisor(NamedTuple):
    """The sum over rows that divides a loss."""

    of_batch: Callable[[Any], Any]  # computes it, float[], from a batch
    is_of_piece: bool  # whether it computes it from a piece of a batch
    divides_by_weight: (
        bool  # whether the weight is shown to be it, but for a constant, for any batch
    )
    vanishes: bool = True  # whether what it divides is shown to be 0 where nothing counts
    # Where the loss of a piece divides, and chooses where nothing counts; empty if unknown.
    at: frozenset[Place] = frozenset()

    def splits(self, finding: Finding) -> bool:
        """Return whether what it divides has to be told from the rest of the loss.

        It has to if it may be more than 0 where nothing counts, so that no quotient has it; or if
        something is added to a quotient whose divisor is not the sum that counts.
        """
        moves = finding.moved and not (
            _rounds(finding) or (is_exact(finding) and not self.is_of_piece)
        )
        return not self.vanishes or bool(finding.adds and moves)


def divisor_of(
    finding: Finding,
    jaxpr: Any,
    arguments: tuple[Any, ...],
    split: Callable[[Any], tuple[Any, Any]],
    weight: Weight,
) -> Divisor | None:
    """Return what divides a ratio of two sums; ``None`` if it depends on more than the batch.

    ``finding`` is that of the trace ``jaxpr``; ``arguments`` are the
    ``Arguments`` of a piece, or their types.
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
    is_weight = isinstance(weight, SumOf) and _name_of(rows, finding.entry) == weight.key
    of_weight = lambda batch: jnp.asarray(weight(batch), float)
    return Divisor(of_batch, is_of_piece, is_weight or _agree(of_weight, of_batch, given))


def _sum_in(jaxpr: Any, of: Any) -> tuple[Callable[..., Any], list[int]] | None:
    """Return a function for the sum of a value in a closed jaxpr, and which inputs it reads.

    ``of`` is a variable, the place of an input, or ``(output, of)``, a value in the call that has
    this output; see ``Total.of``. Returns ``None`` if it is within a loop, or in a branch.
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
    if any(map(named_axes, equations_of(kept))):
        return None  # it is a sum over the shards
    run = jaxpr_as_fun(kept)
    return lambda *args: run(*args)[0], [place for place, each in enumerate(reads) if each]


def _value_in(jaxpr: Any, args: Sequence[Any], of: Any) -> Any:
    """Return the value if it is computed at the top of the jaxpr or in its calls, else ``None``."""
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
    """Return whether two functions of these types are one program, or agree on random numbers.

    One may be the other times a constant.
    """
    traced = [jax.make_jaxpr(each)(*types) for each in (one, other)]
    if len({str(_jax.without_unread(inlined(each))) for each in traced}) == 1:
        return True
    both = jax.make_jaxpr(lambda *args: (one(*args), other(*args)))(*types)
    kept, reads = _jax.pruned(both, [True, True])
    if any(isinstance(x, jax.core.Tracer) for x in kept.consts):
        return False
    leaves = [x for x, is_read in zip(jax.tree.leaves(types), reads, strict=True) if is_read]
    draw = np.random.default_rng(0)
    atoms = [atom for each in equations_of(kept) for atom in each.invars]
    values = [x.val for x in atoms if isinstance(x, Literal) and np.ndim(x.val) == 0]
    numbers = sorted({float(x) for x in values if math.isfinite(x)})[:_NUMBERS]

    def run() -> Any:
        both = jax.jit(jaxpr_as_fun(kept))
        draws = (
            [_drawn(draw, x.shape, x.dtype, trial, numbers) for x in leaves]
            for trial in range(_TRIALS * (1 + len(numbers)))
        )
        with jax.enable_x64(x64):
            return np.array([jax.device_get(both(*each)) for each in draws], np.float64)

    # In a thread of its own, which is not tracing, and has no mesh set on which arrays would lie.
    x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        found = thread.submit(run).result()
    first, by = found[0]
    if not np.isfinite(found).all() or not first or not by:
        return False
    return all(are_equal(x * by, y * first) for x, y in found)


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two sums of the same numbers are equal but for rounding."""
    one, other = np.float64(one), np.float64(other)
    return bool(np.abs(one - other) <= _TOLERANCE * max(np.abs(one), np.abs(other)))


def _drawn(
    draw: np.random.Generator, shape: Any, dtype: Any, trial: int, numbers: Sequence[float]
) -> Any:
    """Draw numbers of a dtype: small ones, and zeros among them; integers of both signs.

    Later trials have slices of zeros, as rows of padding are, and larger and smaller numbers: a sum
    may have bounds that it reaches only there. The last have the ``numbers`` of the program, too,
    such as a label that does not count, and their neighbours.
    """
    if trial >= _TRIALS and dtype != np.bool_:
        which, trial = divmod(trial - _TRIALS, _TRIALS)
        others = np.asarray(_drawn(draw, shape, dtype, trial, ()))
        near = numbers[which] + draw.integers(-1, 2, shape) * (trial % 2)
        if jnp.issubdtype(dtype, jnp.integer):
            near = np.clip(near, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        return jnp.where(draw.random(shape) < 0.5, jnp.asarray(near, dtype), others)
    kept = np.ones(shape, bool)
    if trial and shape:
        np.moveaxis(kept, (trial - 1) % len(shape), 0)[::2] = False
    if dtype == np.bool_:
        return kept & (draw.random(shape) < 0.5)
    if jnp.issubdtype(dtype, jnp.integer):
        low = 0 if jnp.issubdtype(dtype, jnp.unsignedinteger) else -2
        end = 4 if trial % 3 != 1 else min(1_000, jnp.iinfo(dtype).max)
        return jnp.asarray(kept * draw.integers(low, end, shape), dtype)
    kept &= draw.random(shape) >= 0.3
    size = (1.0, 1e3, 1e-3)[trial % 3]
    return jnp.asarray(np.where(kept, size * draw.uniform(0, 2, shape), 0), dtype)


def is_exact(finding: Finding) -> bool:
    """Return whether the shards' mean, weighted by their divisors, is that of the batch.

    It is, unless what the loss does to the divisor changes a shard's and not the batch's.
    """
    if finding.moved == "guard":
        # A shard that counts nothing has weight 0, but its loss is its total over this number.
        return not (finding.bound and math.isfinite(finding.bound))
    small = {"": 0.0, "max": 1.0, "plus": _ROUNDED}[finding.moved]
    return not finding.moved or (finding.counts and abs(finding.bound) <= small)


def as_mean(loss: Any, divisor: Divisor, finding: Finding, batch: Any, weight: Any) -> Mean:
    """Return a piece's ratio as a ``Mean``, whose last term has the weight alone."""
    moved, count = Moved(finding.moved, finding.bound, not finding.power), divisor.of_batch(batch)
    rest: Any = 0.0
    if isinstance(loss, Split):
        total, rest = loss
    else:
        by = lax.stop_gradient(moved(count))
        total = loss.astype(jnp.promote_types(loss.dtype, by.dtype)) * by
    return with_moved(Mean(total, count), moved) + rest + 0.0 * Mean(0.0, weight, "weight")


def check_weight_of_mean(weight: Weight, rows: Any, whole: Any) -> None:
    """Raise unless the weight of a loss that is a mean over rows is the same for all shards."""
    if not depends(lambda rows: weight(join(rows, whole)), rows):
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
        f"count differently: {describe_weight(weight)}. Leave weight out. Or if rows are to count "
        f"differently: {AS_MEAN}"
    )


def describe_weight(weight: Weight) -> str:
    """Describe a weight as its author wrote it."""
    if isinstance(weight, SumOf):
        return f"{weight.key!r}, which is batch[{weight.key!r}].sum()"
    try:
        lines, first = inspect.getsourcelines(weight)
        file = inspect.getsourcefile(weight) or ""
    except (OSError, TypeError):
        return "weight=, a function"
    text = " ".join(line.strip() for line in lines[:3]) + (" …" if len(lines) > 3 else "")
    return f"{text} ({'/'.join(file.split('/')[-3:])}:{first})"


def wrong_weight_error(weight: Weight, finding: Finding, numbers: str) -> LossError:
    """Return the error for a weight that is not what the loss divides by."""
    code = f"{finding.code} ({finding.source})" if finding.code else finding.source
    return LossError(
        f"The loss divides by one sum over rows, and weight= is another:\n"
        f"    the loss: {code}\n    the weight: {describe_weight(weight)}\n{numbers}{AS_MEAN}"
    )


def _rounds(finding: Finding) -> bool:
    """Return whether what is added to the divisor is lost in rounding where anything counts."""
    return finding.moved == "plus" and abs(finding.bound) <= _ROUNDED


def doubt_of_ratio(
    finding: Finding, where: str, rows: Any, weight: Weight | None, divisor: Divisor | None
) -> str:
    """Return what is in doubt of a ratio; raise if it does not divide by its weight."""
    entry = _name_of(rows, finding.entry)
    if weight is None:
        passed = f"Pass weight={entry!r}, which is how much a shard counts. Or: " if entry else ""
        raise LossError(
            f"The loss divides a sum over the rows of the batch by another one{where}, in which "
            f"shards differ, so that the mean of their losses is not that of the whole batch. "
            f"{passed}{AS_MEAN} Or write loss_over='shard', if all shards are to count the same."
        )
    if entry and isinstance(weight, SumOf) and weight.key != entry:
        raise LossError(
            f"The loss divides by the sum of batch[{entry!r}]{where}, and weight={weight.key!r} "
            f"counts another entry. Pass weight={entry!r}."
        )
    is_of_piece = divisor is not None and divisor.is_of_piece
    is_weight = divisor is not None and divisor.divides_by_weight
    if not is_of_piece and not (is_weight and is_exact(finding)):
        # The sum depends on more than the batch, or the trace does not show it.
        raise LossError(
            f"The loss divides by a sum over rows ({finding.source}) that cannot be computed from "
            f"the rows of one shard alone: it depends on more than the batch, is within a loop or "
            f"a branch, or the loss is another program for so few rows. So it cannot be compared "
            f"with {describe_weight(weight)}. {AS_MEAN}"
        )
    if divisor is not None and divisor.splits(finding) and not divisor.at:
        why = "nothing shows that what it divides is 0 where nothing counts"
        if divisor.vanishes:
            why = "something is added to the quotient, which each shard would add"
        raise LossError(
            f"The loss divides by a sum over rows{where} in a branch or a loop, or is another "
            f"program for so few rows, and {why}. {AS_MEAN}"
        )
    return "" if is_weight else "weight= is what the loss divides by"


def _name_of(rows: Any, place: int | None) -> str | None:
    """Return the name of the entry of a batch whose only array is the leaf at this place."""
    if not isinstance(rows, dict) or place is None:
        return None
    path: Sequence[Any] = jax.tree_util.tree_leaves_with_path(rows)[place][0]
    return str(path[0].key) if len(path) == 1 else None
