"""Explanations: what makes N shards' update of one device's, found by arithmetic.

The faults that are returned have no names of parameters yet.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from crossshard.tools.verification import kinds
from crossshard.tools.verification.arithmetic import norm
from crossshard.tools.verification.evidence import Case
from crossshard.tools.verification.report import Fault

# What 16 bits leave of a number, and more.
_COARSE = 2e-2


def is_fine(case: Case) -> bool:
    """Whether the update is that of one device."""
    if case.copies_differ:
        return False
    if case.close(case.update, case.one):
        return True
    if case.own is None or case.is_random:
        return False
    # How far the mean of the shards' own updates is off tells how exactly the step computes.
    off = norm(case.own.mean(axis=0) - case.one) / max(norm(case.one), 1e-300)
    if not 0 < off < _COARSE or norm(case.update - case.one) > 4 * off * norm(case.one):
        return False
    return _combination(case.own, case.one, min(case.tolerance, off / 10)) is None


def is_sixteen_bit(case: Case) -> bool:
    """Whether the update was rounded to 16 bits as a whole, after it was computed in more.

    A model that computes in 16 bits is further off than that rounding.
    """
    own, update = case.own, case.update
    if own is None or case.is_random:
        return False
    mean = own.mean(axis=0)
    # Numbers that need no rounding tell nothing.
    if max(norm(case.one - update), norm(case.one - mean)) <= 1e-5 * norm(update):
        return False
    # Elements that are told exactly enough.
    told = np.abs(update) > 2.0**15 * case.noise / np.sqrt(len(update))
    if np.count_nonzero(told) < 4:
        return False
    for dtype, bits in ((jnp.bfloat16, 9), (np.float16, 12)):
        with np.errstate(over="ignore"):
            kept = update.astype(np.float32).astype(dtype).astype(np.float64)
        exact = np.abs(kept - update)[told] <= 2.0**-15 * np.abs(update)[told]
        rounding = 2.0**-bits * (np.abs(own).mean(axis=0) + np.abs(case.one))
        if exact.all() and np.all(np.abs(mean - case.one)[told] <= 2 * rounding[told]):
            return True
    return False


def explain_copies(case: Case) -> Fault:
    """Why copies differ."""
    members, many, own = case.members, case.many, case.own
    unknown = Fault(kinds.NOT_REDUCED, "the copies differ: not reduced", shards=members)
    if len(many) != case.number:
        return unknown
    is_own = [own is not None and case.close(x, own[place]) for place, x in enumerate(many)]
    if all(is_own):
        words = "each shard has its own rows' gradient: not reduced"
        return Fault(kinds.NOT_REDUCED, words, shards=members)
    alike = _alike(case)
    if 1 < len(alike) <= len(many) // 2 and all(len(each) > 1 for each in alike):
        groups = ", ".join(f"{members[each[0]]}–{members[each[-1]]}" for each in alike)
        words = f"reduced only within groups of shards: {groups}"
        return Fault(kinds.IN_GROUPS, words, shards=members)
    most = max(alike, key=len)
    if len(most) <= len(many) // 2:
        return unknown
    odd = [place for place in range(len(many)) if place not in most]
    shards = tuple(members[place] for place in odd)
    words = "not reduced" if all(is_own[place] for place in odd) else "not the same update"
    differ = "differs" if len(odd) == 1 else "differ"
    return Fault(kinds.SHARD_DIFFERS, f"{_shards(shards)} {differ}: {words}", shards=shards)


def _alike(case: Case) -> list[list[int]]:
    """The places of the copies, those together that have the same."""
    found: list[list[int]] = []
    for place, x in enumerate(case.many):
        within = 1e-5 * (norm(x) + norm(case.one))
        for places in found:
            if norm(case.many[places[0]] - x) <= within:
                places.append(place)
                break
        else:
            found.append([place])
    return found


def explain_simply(case: Case) -> Fault | None:
    """A factor, or one shard's own gradient; ``None`` if it is neither."""
    ratio, size = case.ratio, norm(case.update)
    if not size or (ratio is not None and abs(ratio) * 1e6 < 1 and case.residual < case.tolerance):
        return Fault(kinds.NOT_UPDATED, "0.000: not updated", ratio=0.0)
    if ratio is not None:
        off = norm(case.update - ratio * case.one)
        # A factor is told with fewer digits, in 16 bits too.
        is_multiple = abs(ratio - 1) > 0.1 and off <= _COARSE * size
        if is_multiple or off <= case.tolerance * size + case.noise:
            return _of_ratio(case, ratio)
    for shard, own in zip(case.members, () if case.own is None else case.own, strict=False):
        words = f"is shard {shard}'s own gradient"
        for factor, what in ((1, "not reduced"), (case.number, "over N: the others' are missing")):
            if case.close(case.update, own / factor):
                return Fault(kinds.ONE_SHARD, f"{words}: {what}", shards=(shard,))
    return None


def _of_ratio(case: Case, ratio: float) -> Fault | None:
    within = kinds.NEAR
    if case.is_random:
        within = min(0.3, kinds.NEAR + case.noise / max(norm(case.update), 1e-300))
    elif case.residual > 1e-4:
        within = _COARSE
    kind, words = kinds.name_ratio(ratio, case.number, case.rows, case.of_all, within)
    if case.own is not None:
        mean, n = case.own.mean(axis=0), case.number
        # One number is always some multiple of another.
        if kind in (kinds.SCALED, kinds.MICROBATCHES) and case.is_mean_of_own():
            return None
        if case.is_random:
            pass
        elif kind == kinds.AVERAGED_TWICE and case.close(n * mean, case.one):
            kind = kinds.SUM_AVERAGED
            words = f"{ratio:.3f} = 1/N: averaged, but the loss is a sum over rows"
        elif kind == kinds.SUMMED and case.close(mean, n * case.one):
            kind = kinds.MICROBATCHES
            words = (
                f"{ratio:.3f} = N: on one device too, more rows make a smaller step: divided twice "
                "by the number of rows or microbatches"
            )
    return Fault(kind, words, ratio=ratio)


def explain_together(case: Case, has_statistics: bool) -> Fault | None:
    """How the update is made of the shards' own; ``None`` if statistics alone make a difference.

    Args:
      case: the updates, of as many parameters as are wrong together.
      has_statistics: whether the step normalises by statistics of its rows.
    """
    ratio = case.ratio
    if case.own is not None and case.is_random:
        # Nothing more can be told of a mean that is known with so few digits.
        if case.is_mean_of_own():
            return _not_linear(ratio, has_statistics)
    elif case.own is not None:
        wanted = _combination(case.own, case.one, case.tolerance)
        if case.is_mean_of_own():
            return _mean_of_own(case, case.own, wanted, has_statistics)
        factors = _combination(case.own, case.update, case.tolerance)
        if factors is not None:
            equal = np.full(case.number, 1 / case.number)
            found = _of_factors(case, factors, equal if wanted is None else wanted)
            if found is not None:
                return found
    if ratio is not None and abs(ratio - 1) < _COARSE and case.residual < _COARSE:
        words = f"off by {case.residual:.1g}, as if it was reduced in 16 bits"
        return Fault(kinds.LOW_PRECISION, words, ratio=ratio)
    told = "" if ratio is None else f" (of which {ratio:.3f} times the right one is a part)"
    return Fault(kinds.OTHER, f"another direction than on one device{told}", ratio=ratio)


def _combination(own: np.ndarray, of: np.ndarray, within: float) -> np.ndarray | None:
    """The factors of the shards' updates in another, if it is made of them in just one way."""
    if own.shape[1] <= len(own):
        return None
    scale = norm(own) / np.sqrt(len(own))
    if not scale:
        return None
    factors, _, rank, _ = np.linalg.lstsq(own.T / scale, of / scale, rcond=1e-5)
    off = norm(own.T @ factors - of)
    return factors if rank == len(own) and off <= within * max(norm(of), norm(own[0])) else None


def _mean_of_own(
    case: Case, own: np.ndarray, wanted: np.ndarray | None, has_statistics: bool
) -> Fault | None:
    """Why the mean of what each shard does alone is not what one device does with all rows."""
    ratio, sizes = case.ratio, np.linalg.norm(own, axis=1)
    if np.ptp(sizes) <= 1e-3 * sizes.max() or (wanted is not None and wanted.sum() > 1.01):
        words = "the mean of gradients that each shard clipped by its own, local norm"
        return Fault(kinds.LOCAL_NORM, f"{ratio or 0:.3f}: {words}", ratio=ratio)
    if wanted is not None:
        words = (
            "every shard counts as 1/N, but their parts of the mean over all rows are "
            f"{_decimals(wanted)}: uneven weights averaged equally"
        )
        return Fault(kinds.WEIGHTS, words, ratio=ratio)
    return _not_linear(ratio, has_statistics)


def _not_linear(ratio: float | None, has_statistics: bool) -> Fault | None:
    if has_statistics:
        return None
    words = (
        "the mean of what each shard does alone, and one device does something else with all "
        "rows: something before the mean is not linear, such as a clip of each shard's own "
        "gradient by value, or the loss compares rows"
    )
    return Fault(kinds.NOT_LINEAR, words, ratio=ratio)


def _of_factors(case: Case, factors: np.ndarray, wanted: np.ndarray) -> Fault | None:
    """Why the shards' own updates have these factors, where one device has others."""
    usual = np.median(factors / wanted)
    if usual <= 0:
        return None
    times = dict(zip(case.members, factors / wanted / usual, strict=True))
    counted = lambda often: tuple(i for i, x in times.items() if abs(x - often) < 0.02)
    dropped, twice = counted(0), counted(2)
    if (dropped or twice) and len(dropped + twice + counted(1)) == case.number:
        parts = [f"the rows of {_shards(twice)} count twice"] if twice else []
        parts += [f"the rows of {_shards(dropped)} are left out"] if dropped else []
        kind = kinds.ROWS_REPEATED if twice else kinds.ROWS_DROPPED
        return Fault(kind, ", and ".join(parts), ratio=case.ratio, shards=(*twice, *dropped))
    words = f"the shards count as {_decimals(factors)}, where one device has {_decimals(wanted)}"
    return Fault(kinds.WEIGHTS, words, ratio=case.ratio)


def explain_without(case: Case, missing: tuple[int, ...]) -> Fault:
    """Why the rows of some shards of a random step have no effect."""
    others = [shard for shard in case.members if shard not in missing]
    if len(others) == 1:
        words = f"is shard {others[0]}'s own gradient: the rows of other shards have no effect"
        return Fault(kinds.ONE_SHARD, words, shards=(others[0],))
    words = f"the rows of {_shards(missing)} are left out"
    return Fault(kinds.ROWS_DROPPED, words, shards=missing)


def _decimals(numbers: Iterable[float]) -> str:
    return ", ".join(f"{x:.3f}" for x in numbers)


def _shards(numbers: tuple[int, ...]) -> str:
    return f"shard{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
