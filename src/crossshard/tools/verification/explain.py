"""Explanations: what makes N shards' update of one device's, found by arithmetic."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from crossshard.tools.verification import kinds

# Relative differences that are rounding, unless a dtype is coarser.
ROUNDING = 1e-4
# What 16 bits leave of a number, and more.
COARSE = 2e-2


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What is wrong with some updates; ``sentence`` has no names of leaves."""

    kind: str
    sentence: str
    ratio: float | None = None
    shards: tuple[int, ...] = ()
    is_sure: bool = False


# No fault: shards that normalise by their own rows.
_OF_STATISTICS = Explanation("", "")


@dataclasses.dataclass(frozen=True)
class Case:
    """The updates of one group of shards, of one leaf or of several, flat.

    Attributes:
      many: ``[copies, size]``.
      one: ``[size]``, what is wanted.
      own: ``[shards, size]``, of each shard's own rows; ``None`` if unknown.
      members: the numbers of these shards.
      of_all: the number of shards in all groups.
      rows: those of this group.
      tolerance: the relative difference that is rounding.
      noise: the norm of a difference that is rounding or chance.
      is_random: whether the updates are means of random ones.
    """

    many: np.ndarray
    one: np.ndarray
    own: np.ndarray | None
    members: tuple[int, ...]
    of_all: int
    rows: int
    tolerance: float
    noise: float
    is_random: bool

    @property
    def number(self) -> int:
        """The number of shards in this group."""
        return len(self.members)

    @property
    def update(self) -> np.ndarray:
        """The update, where the copies agree."""
        return self.many[0]

    def close(self, one: np.ndarray, other: np.ndarray) -> bool:
        """Whether two updates are equal, up to rounding and chance."""
        scale = max(norm(one), norm(other))
        return norm(one - other) <= self.tolerance * scale + self.noise

    @property
    def ratio(self) -> float | None:
        """The update over that of one device, by least squares."""
        square = float(self.one @ self.one)
        return float(self.update @ self.one) / square if square else None

    @property
    def residual(self) -> float:
        """What the ratio leaves, relative to the update."""
        scale = norm(self.update)
        return norm(self.update - (self.ratio or 0) * self.one) / scale if scale else 0.0

    @property
    def copies_differ(self) -> bool:
        """Whether copies differ by more than rounding."""
        scale = norm(self.many[0]) + norm(self.one)
        return any(norm(x - self.many[0]) > 1e-5 * scale for x in self.many[1:])


def norm(x: np.ndarray) -> float:
    """The Euclidean norm."""
    return float(np.linalg.norm(x))


def is_fine(case: Case) -> bool:
    """Whether the update is that of one device."""
    if case.copies_differ:
        return False
    if case.close(case.update, case.one):
        return True
    if case.own is None or case.is_random:
        return False
    # How far the mean of the shards' own updates is off tells how exactly the step computes.
    mean = case.own.mean(axis=0)
    apart = norm(mean - case.one) / max(norm(case.one), 1e-300)
    if not 0 < apart < COARSE or norm(case.update - case.one) > 4 * apart * norm(case.one):
        return False
    weights = combination(case.own, case.one, min(case.tolerance, apart / 10))
    return weights is None


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


def explain_copies(case: Case) -> Explanation:
    """Why copies differ."""
    members, many, own = case.members, case.many, case.own
    if own is not None and len(many) == len(own):
        for factor, words in ((1, "its own rows'"), (case.number, "N times its own rows'")):
            if all(case.close(x, factor * y) for x, y in zip(many, own, strict=True)):
                words = f"each shard has {words} gradient: not reduced"
                return Explanation(kinds.NOT_REDUCED, words, shards=members)
    clusters: list[list[int]] = []
    for index, x in enumerate(many):
        same = (c for c in clusters if norm(many[c[0]] - x) <= 1e-5 * (norm(x) + norm(case.one)))
        found = next(same, None)
        clusters.append([index]) if found is None else found.append(index)
    largest = max(clusters, key=len)
    if len(many) != case.number:
        return Explanation(
            kinds.NOT_REDUCED, "devices that should have one copy differ: not reduced"
        )
    if 1 < len(clusters) <= len(many) // 2 and all(len(c) > 1 for c in clusters):
        groups = ", ".join("–".join(str(members[i]) for i in (c[0], c[-1])) for c in clusters)
        words = f"reduced only within groups of shards: {groups}"
        return Explanation(kinds.IN_GROUPS, words, shards=members)
    if len(largest) > len(many) // 2:
        odd = tuple(members[i] for i in range(len(many)) if i not in largest)
        is_own = own is not None and all(
            case.close(many[members.index(i)], own[members.index(i)]) for i in odd
        )
        words = "not reduced" if is_own else "not the same update"
        return Explanation(
            kinds.SHARD_DIFFERS,
            f"{_shards(odd)} differ{'s' if len(odd) == 1 else ''}: {words}",
            shards=odd,
        )
    return Explanation(
        kinds.NOT_REDUCED, "the shards have different copies: not reduced", None, members
    )


def explain_simply(case: Case) -> Explanation | None:
    """A factor, or one shard's own gradient; ``None`` if it is neither."""
    ratio, size = case.ratio, norm(case.update)
    if not size or (ratio is not None and abs(ratio) * 1e6 < 1 and case.residual < case.tolerance):
        return Explanation(kinds.NOT_UPDATED, "0.000: not updated", 0.0)
    off = norm(case.update - (ratio or 0) * case.one)
    # A factor is told with fewer digits, in 16 bits too.
    allowed = case.tolerance * size + case.noise
    if ratio is not None and (off <= allowed or (abs(ratio - 1) > 0.1 and off <= COARSE * size)):
        found = _of_ratio(case, ratio)
        # One number is always some multiple of another.
        is_mean = case.own is not None and case.close(case.update, case.own.mean(axis=0))
        if not (is_mean and found.kind in (kinds.SCALED, kinds.MICROBATCHES) and not found.is_sure):
            return found
        return None
    if case.own is None:
        return None
    for index, own in enumerate(case.own):
        for factor, words in (
            (1.0, "is shard {}'s own gradient: not reduced"),
            (1 / case.number, "is shard {}'s own gradient over N: the others' are missing"),
        ):
            if case.close(case.update, factor * own):
                shard = case.members[index]
                return Explanation(kinds.ONE_SHARD, words.format(shard), None, (shard,))
    return None


def explain_together(case: Case, shares_statistics: bool) -> Explanation | None:
    """How the update is made of the shards' own; ``None`` if it is not, or for statistics alone.

    Args:
      case: the updates, of as many leaves as are wrong together.
      shares_statistics: whether the step normalises by statistics of its rows.
    """
    if case.own is not None and not case.is_random:
        found = _of_combination(case, shares_statistics)
        if found is not None:
            return None if found is _OF_STATISTICS else found
    ratio = case.ratio
    if ratio is not None and abs(ratio - 1) < COARSE and case.residual < COARSE:
        words = f"off by {case.residual:.1g}, as if it was reduced in 16 bits"
        return Explanation(kinds.LOW_PRECISION, words, ratio)
    told = "" if ratio is None else f" (of which {ratio:.3f} times the right one is a part)"
    return Explanation(kinds.OTHER, f"another direction than on one device{told}", ratio)


def combination(own: np.ndarray, of: np.ndarray, within: float) -> np.ndarray | None:
    """The factors of the shards' updates in another, if it is made of them in just one way."""
    if own.shape[1] <= len(own):
        return None
    scale = norm(own) / np.sqrt(len(own))
    if not scale:
        return None
    factors, _, rank, _ = np.linalg.lstsq(own.T / scale, of / scale, rcond=1e-5)
    off = norm(own.T @ factors - of)
    return factors if rank == len(own) and off <= within * max(norm(of), norm(own[0])) else None


def _of_ratio(case: Case, ratio: float) -> Explanation:
    within = kinds.NEAR
    if case.is_random:
        within = min(0.3, kinds.NEAR + case.noise / max(norm(case.update), 1e-300))
    elif case.residual > ROUNDING:
        within = COARSE
    if ratio < 0:
        words = f"{ratio:.3f}: it goes the other way"
        return Explanation(kinds.SCALED, words, ratio)
    kind, words = kinds.name_ratio(ratio, case.number, case.rows, case.of_all, within)
    if case.own is not None and not case.is_random:
        mean, total, n = case.own.mean(axis=0), case.own.sum(axis=0), case.number
        if kind == kinds.AVERAGED_TWICE and case.close(total, case.one):
            words = f"{ratio:.3f} = 1/N: averaged, but the loss is a sum over rows"
            return Explanation(kinds.SUM_AVERAGED, words, ratio)
        if kind == kinds.SUMMED and case.close(mean, n * case.one):
            words = (
                f"{ratio:.3f} = N: on one device too, more rows make a smaller step: divided twice "
                "by the number of rows or microbatches"
            )
            return Explanation(kinds.MICROBATCHES, words, ratio, is_sure=True)
    return Explanation(kind, words, ratio)


def _of_combination(case: Case, shares_statistics: bool) -> Explanation | None:
    own, ratio = case.own, case.ratio
    assert own is not None
    mean = own.mean(axis=0)
    wanted = combination(own, case.one, case.tolerance)
    if case.close(case.update, mean):
        sizes = np.linalg.norm(own, axis=1)
        if np.ptp(sizes) <= 1e-3 * sizes.max() or (wanted is not None and wanted.sum() > 1.01):
            words = (
                f"{ratio or 0:.3f}: the mean of gradients that each shard clipped by its own, "
                "local norm"
            )
            return Explanation(kinds.LOCAL_NORM, words, ratio)
        if wanted is not None:
            return Explanation(kinds.WEIGHTS, _weights(wanted), ratio)
        if shares_statistics:
            return _OF_STATISTICS
        largest = np.abs(own).max(axis=1)
        if np.ptp(largest) <= 1e-4 * largest.max():
            words = "each shard clips its own gradient by value, before the mean"
        else:
            words = (
                "the mean of what each shard does alone, and one device does something else with "
                "all rows: something before the mean is not linear, or the loss compares rows"
            )
        return Explanation(kinds.NOT_LINEAR, words, ratio)
    factors = combination(own, case.update, case.tolerance)
    if factors is None:
        return None
    if wanted is None:
        wanted = np.full(case.number, 1 / case.number)
    each = factors / wanted
    usual = np.median(each)
    if usual <= 0:
        return None
    each = each / usual
    dropped = tuple(case.members[i] for i in np.flatnonzero(np.abs(each) < 0.02))
    twice = tuple(case.members[i] for i in np.flatnonzero(np.abs(each - 2) < 0.02))
    others = np.delete(each, [case.members.index(i) for i in (*dropped, *twice)])
    if np.all(np.abs(others - 1) < 0.02) and (dropped or twice):
        parts = [f"the rows of {_shards(twice).lower()} count twice"] if twice else []
        parts += [f"the rows of {_shards(dropped).lower()} are left out"] if dropped else []
        kind = kinds.ROWS_REPEATED if twice else kinds.ROWS_DROPPED
        return Explanation(kind, ", and ".join(parts), ratio, (*twice, *dropped))
    words = ", ".join(f"{x:.3f}" for x in factors)
    should = ", ".join(f"{x:.3f}" for x in wanted)
    return Explanation(
        kinds.WEIGHTS, f"the shards count as {words}, where one device has them as {should}", ratio
    )


def _weights(wanted: np.ndarray) -> str:
    shares = ", ".join(f"{x:.3f}" for x in wanted)
    return (
        f"every shard counts as 1/N, but their parts of the mean over all rows are {shares}: "
        "uneven weights averaged equally"
    )


def _shards(numbers: Sequence[int]) -> str:
    return f"shard{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
