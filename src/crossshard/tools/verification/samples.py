"""Samples: what N shards have, what one device has, and how exactly the two can be compared."""

import dataclasses

import jax.numpy as jnp
import numpy as np

# What is further off than so many standard errors is no chance.
_ERRORS = 4.0
_ROUNDING = 1e-5
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
class Mean:
    """An array in one run, or its mean over runs that differ in their random keys.

    What N shards have is compared with what one device has in the same run, so that what differs
    from run to run and is the same on both, such as a schedule, hides nothing.

    Attributes:
      number: of how many runs.
      is_stacked: whether N shards have an array ``[shards, …]`` of it.
      rounding: the norm of a difference that is the rounding of what it was computed from.
    """

    number: int = 0
    is_stacked: bool = False
    rounding: float = 0.0
    _number_of_own: int = 0
    _many: np.ndarray | float = 0.0
    _one: np.ndarray | float = 0.0
    _own: np.ndarray | float = 0.0
    _off: np.ndarray | float = 0.0
    _square: np.ndarray | float = 0.0

    def add(self, many: np.ndarray, one: np.ndarray) -> None:
        """Add a run.

        Args:
          many: float64[copies, size]: on N shards; one copy if all have the same.
          one: float64[groups, size]: on one device with the rows of each group.
        """
        off = many[:, None] - one
        self.number += 1
        # Copies may agree in one run and not in the next.
        self._many, self._one = self._many + many, self._one + one
        self._off, self._square = self._off + off, self._square + off**2

    def add_own(self, own: np.ndarray) -> None:
        """Add a run with each shard's rows, float64[shards, size]; these may be fewer."""
        self._number_of_own += 1
        self._own = self._own + own

    @property
    def many(self) -> np.ndarray:
        """float64[copies, size]."""
        return np.asarray(self._many / self.number)

    @property
    def one(self) -> np.ndarray:
        """float64[groups, size]."""
        return np.asarray(self._one / self.number)

    @property
    def own(self) -> np.ndarray | None:
        """float64[shards, size], if it was run."""
        return np.asarray(self._own / self._number_of_own) if self._number_of_own else None

    @property
    def chance(self) -> np.ndarray:
        """float64[copies, groups]: the norms of differences that may be chance; 0 of one run."""
        if self.number < 2:
            return np.zeros(np.shape(self._off)[:2])
        mean = self._off / self.number
        variance = np.maximum(self._square / self.number - mean**2, 0) / (self.number - 1)
        return np.asarray(_ERRORS * np.sqrt(variance.sum(axis=-1)))

    @property
    def chance_of_own(self) -> float:
        """By how much more the mean over the shards' own may be off by chance."""
        return float(np.sqrt(max(1.0, self.number / max(1, self._number_of_own))))

    @property
    def is_off(self) -> bool:
        """Whether a copy is not what one device has, up to rounding and chance."""
        off = np.linalg.norm(self.many[:, None] - self.one, axis=-1)
        return bool(np.any(off > _ROUNDING * np.linalg.norm(self.one, axis=-1) + self.chance))


@dataclasses.dataclass(frozen=True)
class Case:
    """The update of a parameter by one group of shards.

    Updates are divided by the learning rate, in float64 and flat.

    Attributes:
      many: ``[copies, size]``, of N shards; one copy if all shards have the same.
      one: ``[size]``, of one device with all rows of the group: what is wanted.
      own: ``[shards, size]``, of one device with each shard's rows; ``None`` if it was not run.
      members: the numbers of these shards.
      of_all: the number of shards in all groups.
      rows: those of this group.
      tolerance: the relative difference that is rounding.
      noise: the norm of a difference that is rounding or chance.
      noise_of_own: by how much more noise there is in ``own``.
      is_random: whether the updates are means of several, with other random keys each.
    """

    many: np.ndarray
    one: np.ndarray
    own: np.ndarray | None
    members: tuple[int, ...]
    of_all: int
    rows: int
    tolerance: float
    noise: float
    noise_of_own: float
    is_random: bool

    @property
    def update(self) -> np.ndarray:
        """The update, where the copies agree."""
        return self.many[0]

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
    def is_multiple(self) -> bool:
        """Whether the ratio leaves nothing but rounding and chance."""
        size = norm(self.update)
        return self.residual * size <= self.tolerance * size + self.noise

    @property
    def copies_differ(self) -> bool:
        """Whether copies differ by more than rounding."""
        scale = norm(self.many[0]) + norm(self.one)
        return any(norm(x - self.many[0]) > 1e-5 * scale for x in self.many[1:])

    @property
    def is_hidden(self) -> bool:
        """Whether the update is smaller than what may be chance."""
        return self.is_random and self.noise >= max(norm(self.update), norm(self.one))

    def is_mean_of_own(self) -> bool:
        """Whether the update is the mean of what each shard does alone."""
        if self.own is None:
            return False
        off, mean = self.noise_of_own * self.noise, self.own.mean(axis=0)
        scale = max(norm(self.update), norm(mean))
        return norm(self.update - mean) <= self.tolerance * scale + off

    def is_fine(self) -> bool:
        """Whether the update is that of one device."""
        if self.copies_differ:
            return False
        off, size = norm(self.update - self.one), norm(self.one)
        if off <= self.tolerance * max(norm(self.update), size) + self.noise:
            return True
        if self.own is None or self.is_random:
            return False
        # How far the mean of the shards' own updates is off tells how exactly the step computes.
        exact = norm(self.own.mean(axis=0) - self.one) / max(size, 1e-300)
        if not 0 < exact < COARSE or off > 4 * exact * size:
            return False
        return not is_weighted(self.own, self.one, min(self.tolerance, exact / 10))

    def is_sixteen_bit(self) -> bool:
        """Whether the update was rounded to 16 bits as a whole, after it was computed in more.

        A model that computes in 16 bits is further off than that rounding.
        """
        own, update = self.own, self.update
        if own is None or self.is_random:
            return False
        mean = own.mean(axis=0)
        # Numbers that need no rounding tell nothing.
        if max(norm(self.one - update), norm(self.one - mean)) <= 1e-5 * norm(update):
            return False
        # Elements that are told exactly enough.
        told = np.abs(update) > 2.0**15 * self.noise / np.sqrt(len(update))
        if np.count_nonzero(told) < 4:
            return False
        for dtype, bits in ((jnp.bfloat16, 9), (np.float16, 12)):
            with np.errstate(over="ignore"):
                kept = update.astype(np.float32).astype(dtype).astype(np.float64)
            exact = np.abs(kept - update)[told] <= 2.0**-15 * np.abs(update)[told]
            rounding = 2.0**-bits * (np.abs(own).mean(axis=0) + np.abs(self.one))
            if exact.all() and np.all(np.abs(mean - self.one)[told] <= 2 * rounding[told]):
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
