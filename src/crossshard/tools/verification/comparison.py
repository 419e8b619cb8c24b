"""Comparison: an array that N shards have with that of one device, and how exactly it is known."""

import dataclasses

import jax.numpy as jnp
import numpy as np

# What is further off than so many standard errors is no chance.
_ERRORS = 4.0
# What 16 bits leave of a number, and more.
COARSE = 2e-2


def norm(x: np.ndarray) -> float:
    """The Euclidean norm."""
    return float(np.linalg.norm(x))


def rms(x: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The relative difference of two arrays, whose shapes may be those of a broadcast."""
    one, other = np.broadcast_arrays(one.astype(np.float64), other.astype(np.float64))
    scale = max(norm(one), norm(other))
    return norm(one - other) / scale if scale else 0.0


@dataclasses.dataclass
class Comparison:
    """An array of a group of shards in one run, or its mean over runs with other random keys.

    What N shards have is compared with what one device has in the same run, so that what differs
    from run to run and is the same on both, such as a schedule, hides nothing.

    Attributes:
      members: the numbers of these shards.
      of_all: the number of shards in all groups.
      rows: those of this group.
      tolerance: the relative difference that is rounding.
      rounding: the norm of a difference that is the rounding of what it was computed from.
      is_stacked: whether N shards have an array ``[shards, …]`` of it.
      runs: the number of runs.
      many: float64[copies, size], of N shards; one copy if all shards have the same.
      one: float64[size], of one device with all rows of the group: what is wanted.
      own: float64[shards, size], of one device with each shard's rows, if it was run.
    """

    members: tuple[int, ...]
    of_all: int
    rows: int
    tolerance: float = 0.0
    rounding: float = 0.0
    is_stacked: bool = False
    runs: int = 0
    many: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((1, 1)))
    one: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1))
    own: np.ndarray | None = None
    _own_runs: int = 0
    _off: np.ndarray | float = 0.0
    _square: np.ndarray | float = 0.0

    def add(self, many: np.ndarray, one: np.ndarray) -> None:
        """Add a run to the means, of ``many`` and ``one``."""
        self.runs += 1
        # Copies may agree in one run and not in the next.
        self.many = self.many + (many - self.many) / self.runs
        self.one = self.one + (one - self.one) / self.runs
        self._off, self._square = self._off + (many - one), self._square + (many - one) ** 2

    def add_own(self, own: np.ndarray) -> None:
        """Add a run with each shard's rows; these may be fewer."""
        self._own_runs += 1
        before = np.zeros(1) if self.own is None else self.own
        self.own = before + (own - before) / self._own_runs

    @property
    def chance(self) -> float:
        """The norm of a difference that may be chance; 0 of one run."""
        if self.runs < 2:
            return 0.0
        variance = self._square / self.runs - (self._off / self.runs) ** 2
        squares = np.maximum(variance, 0).sum(axis=-1) / (self.runs - 1)
        return float(_ERRORS * np.sqrt(squares.max()))

    @property
    def noise(self) -> float:
        """The norm of a difference that is rounding or chance."""
        return float(np.hypot(self.rounding, self.chance))

    @property
    def noise_of_own(self) -> float:
        """By how much more noise there is in ``own``."""
        return float(np.sqrt(max(1.0, self.runs / max(1, self._own_runs))))

    @property
    def update(self) -> np.ndarray:
        """What N shards have, where the copies agree."""
        return self.many[0]

    @property
    def ratio(self) -> float | None:
        """What N shards have over what one device has, by least squares."""
        square = float(self.one @ self.one)
        return float(self.update @ self.one) / square if square else None

    @property
    def residual(self) -> float:
        """What the ratio leaves, relative to what N shards have."""
        scale = norm(self.update)
        return norm(self.update - (self.ratio or 0) * self.one) / scale if scale else 0.0

    @property
    def is_multiple(self) -> bool:
        """Whether the ratio leaves nothing but rounding and chance."""
        size = norm(self.update)
        return self.residual * size <= self.tolerance * size + self.noise

    @property
    def is_hidden(self) -> bool:
        """Whether both are smaller than what may be chance."""
        return self.runs > 1 and self.noise >= max(norm(self.update), norm(self.one))

    @property
    def copies_differ(self) -> bool:
        """Whether copies differ by more than rounding."""
        scale = norm(self.update) + norm(self.one)
        return any(norm(x - self.update) > 1e-5 * scale for x in self.many[1:])

    def is_mean_of_own(self) -> bool:
        """Whether N shards have the mean of what each does alone."""
        if self.own is None:
            return False
        mean = self.own.mean(axis=0)
        scale = max(norm(self.update), norm(mean))
        off = self.tolerance * scale + self.noise_of_own * self.noise
        return norm(self.update - mean) <= off

    def is_fine(self) -> bool:
        """Whether N shards have what one device has."""
        if self.copies_differ:
            return False
        off, size = norm(self.update - self.one), norm(self.one)
        if off <= self.tolerance * max(norm(self.update), size) + self.noise:
            return True
        if self.own is None or self.runs > 1:
            return False
        # How far the mean of the shards' own is off tells how exactly the step computes.
        exact = norm(self.own.mean(axis=0) - self.one) / max(size, 1e-300)
        if not 0 < exact < COARSE or off > 4 * exact * size:
            return False
        return not is_weighted(self.own, self.one, min(self.tolerance, exact / 10))

    def is_sixteen_bit(self) -> bool:
        """Whether an update was rounded to 16 bits as a whole, after it was computed in more.

        A model that computes in 16 bits is further off than that rounding.
        """
        own, one, update = self.own, self.one, self.update
        if own is None or self.runs > 1:
            return False
        mean = own.mean(axis=0)
        # Numbers that need no rounding tell nothing.
        if max(norm(one - update), norm(one - mean)) <= 1e-5 * norm(update):
            return False
        # Elements that are told exactly enough.
        told = np.abs(update) > 2.0**15 * self.noise / np.sqrt(len(update))
        if np.count_nonzero(told) < 4:
            return False
        for dtype, bits in ((jnp.bfloat16, 9), (np.float16, 12)):
            with np.errstate(over="ignore"):
                kept = update.astype(np.float32).astype(dtype).astype(np.float64)
            exact = np.abs(kept - update)[told] <= 2.0**-15 * np.abs(update)[told]
            rounding = 2.0**-bits * (np.abs(own).mean(axis=0) + np.abs(one))
            if exact.all() and np.all(np.abs(mean - one)[told] <= 2 * rounding[told]):
                return True
        return False


def is_weighted(own: np.ndarray, of: np.ndarray, within: float) -> bool:
    """Whether an update is a sum of the shards' own, with weights of them, in just one way."""
    scale = norm(own) / np.sqrt(len(own))
    if own.shape[1] <= len(own) or not scale:
        return False
    weights, _, rank, _ = np.linalg.lstsq(own.T / scale, of / scale, rcond=1e-5)
    off = norm(own.T @ weights - of)
    return rank == len(own) and off <= within * max(norm(of), norm(own[0]))
