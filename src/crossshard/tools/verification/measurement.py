"""Measurement: compares a step on N shards with one device, and with each shard's rows alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossshard.errors import ArgumentError
from crossshard.tools.verification.runs import (
    METRIC,
    STATISTICS,
    UPDATE,
    BuiltStep,
    Factory,
    Run,
    rows_of,
    rows_taken,
)

# The relative difference that is taken for rounding, unless a dtype is coarser.
_ROUNDING = 1e-4
# The factor between updates and parameters above which SGD gets another learning rate.
_FAR_RATE = 16.0
# How much the order of a sum may change each number of an update, relative to the largest leaf.
_ORDER_ERROR = 1e-6
# The relative difference above which two updates are not equal up to rounding.
_NOT_EQUAL = 1e-3
# A relative difference larger than the rounding of 16 bits.
COARSE = 2e-2


def norm(x: np.ndarray) -> float:
    """Return the Euclidean norm."""
    return float(np.linalg.norm(x))


def rms(x: np.ndarray) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """Return the relative difference of two arrays, which are broadcast to a common shape."""
    one, other = np.broadcast_arrays(one.astype(np.float64), other.astype(np.float64))
    scale = max(norm(one), norm(other))
    return norm(one - other) / scale if scale else 0.0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """An array of a group of shards."""

    members: tuple[int, ...]  # the numbers of these shards
    of_all: int  # the number of shards in all groups
    tolerance: float  # the relative difference that is rounding
    rounding: float  # the norm of the rounding errors of the arrays it was computed from
    is_stacked: bool  # whether N shards keep it as an array [shards, …]
    many: np.ndarray  # float64[copies, size], on N shards; one copy if all have the same
    one: np.ndarray  # float64[size], on one device with all rows of the group: as expected
    own: np.ndarray | None  # float64[shards, size], on one device with each shard's rows, if run

    @property
    def update(self) -> np.ndarray:
        """The value on N shards: the first copy."""
        return self.many[0]

    @property
    def ratio(self) -> float | None:
        """The value on N shards over that on one device, by least squares."""
        square = float(self.one @ self.one)
        return float(self.update @ self.one) / square if square else None

    @property
    def residual(self) -> float:
        """The norm of what the ratio leaves unexplained, relative to the value on N shards."""
        scale = norm(self.update)
        return norm(self.update - (self.ratio or 0) * self.one) / scale if scale else 0.0

    @property
    def is_multiple(self) -> bool:
        """Whether the ratio leaves nothing unexplained but rounding."""
        size = norm(self.update)
        return self.residual * size <= self.tolerance * size + self.rounding

    @property
    def copies_differ(self) -> bool:
        """Whether copies differ by more than rounding."""
        scale = norm(self.update) + norm(self.one)
        return any(norm(x - self.update) > 1e-5 * scale for x in self.many[1:])

    def is_fine(self) -> bool:
        """Return whether N shards have the same as one device."""
        if self.copies_differ:
            return False
        off, size = norm(self.update - self.one), norm(self.one)
        if off <= self.tolerance * max(norm(self.update), size) + self.rounding:
            return True
        if self.own is None:
            return False
        # The error in the mean of the shards' own values shows how exactly the step computes.
        exact = norm(self.own.mean(axis=0) - self.one) / max(size, 1e-300)
        if not 0 < exact < COARSE or off > 4 * exact * size:
            return False
        return not is_weighted(self.own, self.one, min(self.tolerance, exact / 10))


def is_weighted(own: np.ndarray, of: np.ndarray, within: float) -> bool:
    """Return whether an update is a weighted sum of the shards' own, with unique weights."""
    scale = norm(own) / np.sqrt(len(own))
    if own.shape[1] <= len(own) or not scale:
        return False
    weights, _, rank, _ = np.linalg.lstsq(own.T / scale, of / scale, rcond=1e-5)
    off = norm(own.T @ weights - of)
    return rank == len(own) and off <= within * max(norm(of), norm(own[0]))


class Measurement:
    """Runs the step once in each way.

    Raises:
      ArgumentError: there is one shard, the rows do not divide over groups, or the step does not
        start, or is not built, in the same way on 1 and on N shards.
    """

    def __init__(
        self,
        make_step: Factory,
        batch: Sequence[Any],
        axes: Sequence[int | None],
        key: Any,
        groups: Sequence[tuple[int, ...]],
        *,
        has_equal_shards: bool = True,
    ) -> None:
        self._batch, self._axes, self._key = batch, axes, key
        self._groups = groups
        self.number: int = sum(map(len, groups))
        if self.number < 2:
            raise ArgumentError(
                "verify compares N shards with one, and there is one device. Call "
                "crossshard.cpu_devices(8) before the first JAX operation."
            )
        self.rows: int = rows_of(batch, self._axes)
        divides = has_equal_shards and self.rows % self.number == 0
        self._blocks = np.arange(self.rows).reshape(self.number, -1) if divides else None
        self.notes: list[str] = []  # what could not be measured
        if self._blocks is None and len(groups) > 1:
            raise ArgumentError(
                f"The {self.rows} rows of the batch do not divide over {self.number} shards, so "
                f"nobody can tell which group has which. Pass a multiple of {self.number} rows."
            )
        self._alone, self._together = BuiltStep(make_step, 1), BuiltStep(make_step, self.number)
        first = self._alone.run(self._rows_of(groups[0]), key)
        # The rate is a power of 2, so multiplying by it rounds nothing.
        self._rate, self._calls = _good_rate(first), first.calls
        many = self._run(self._together, batch)
        ones = [self._run(self._alone, self._rows_of(each)) for each in groups]
        self._one = ones[0]
        names = list(dict.fromkeys(name for run in ones for name in run.parameters()))
        self.shapes = {name: self._one.start[name].values.shape[1:] for name in names}
        self._check_names(self._one, many)
        self._largest = max(rms(self._update(self._one, name)) for name in names)
        idle = self._one.seen[STATISTICS].items()
        statistics = sorted({name for name, x in idle if np.any(x.values)} - {*names})
        own = self._runs_of_own(has_equal_shards)
        known = ((UPDATE, names), (STATISTICS, statistics), (METRIC, self._one.seen[METRIC]))
        compare = lambda what, name: self._compare(what, name, many, ones, own)
        self._compared = {
            what: {name: found for name in of if (found := compare(what, name))}
            for what, of in known
        }

    def _runs_of_own(self, has_equal_shards: bool) -> list[Run]:
        """Run each shard's rows alone; empty if this cannot be done, with a note."""
        if self._blocks is None:
            self.notes.append(
                f"the {self.rows} rows do not divide over {self.number} shards, so no shard's rows "
                "were run alone"
                if has_equal_shards
                else "shards have unequal numbers of virtual shards, so none's rows were run alone"
            )
            return []
        try:
            return [self._run(self._alone, self._rows_of([i])) for i in range(self.number)]
        except Exception as error:  # the step may want a fixed number of rows
            kind = type(error).__name__
            self.notes.append(f"the step on one device does not take a shard's rows alone ({kind})")
            return []

    def of(self, what: str) -> dict[str, list[Comparison]]:
        """Return the comparisons of one kind, such as ``UPDATE``: by array, one for each group."""
        return self._compared[what]

    def is_random(self) -> bool:
        """Return whether the step draws random numbers, in its jaxpr or anywhere else."""
        rows = self._rows_of(self._groups[0])
        again = self._run(self._alone, rows)
        if self._most_apart(self._one, again) > _NOT_EQUAL:
            return True  # keys on the host, which a trace would leave in a wrong state
        draws = self._alone.draws(rows, self._key)
        if draws is not None:
            return draws
        # The next step would have other keys.
        next_one = self._run(self._alone, rows, skipped=1)
        return self._key is not None or self._most_apart(self._one, next_one) > _NOT_EQUAL

    # Runs.

    def _run(self, built: BuiltStep, rows: Sequence[Any], skipped: int = 0) -> Run:
        return built.run(rows, self._key, self._rate, self._calls, skipped=skipped)

    def _rows_of(self, shards: Sequence[int]) -> Sequence[Any]:
        if len(shards) == self.number or self._blocks is None:
            return self._batch
        return rows_taken(self._batch, self._axes, self._blocks[list(shards)].ravel())

    def _compare(
        self, what: str, name: str, many: Run, ones: Sequence[Run], own: Sequence[Run]
    ) -> list[Comparison]:
        """Compare an array in each group; return nothing if N shards have no such array."""
        of, there = ones[0].seen[what].get(name), many.seen[what].get(name)
        alone, by_shard = _on_one(ones, what, name), _on_one(own, what, name)
        if of is None or there is None or alone is None:
            return []
        shape = of.values.shape[1:]
        copies = there.of_shape(shape, self.number)
        if copies is None:
            return []
        rounding = 1e-7 + 4 * of.rounding
        if what == UPDATE:
            by_order = _ORDER_ERROR * self._largest * np.sqrt(alone.shape[-1])
            rounding = float(np.hypot(2 * of.rounding / self._rate, by_order))
        has_own = by_shard is not None and by_shard.shape[1:] == alone.shape[1:]
        return [
            Comparison(
                members=members,
                of_all=self.number,
                tolerance=max(_ROUNDING, 4 * float(jnp.finfo(of.dtype).eps)),
                rounding=rounding,
                is_stacked=there.values.shape[1:] != shape,
                many=copies[list(members)] if len(copies) == self.number else copies,
                one=of_group,
                own=by_shard[list(members)] if has_own else None,
            )
            for members, of_group in zip(self._groups, alone, strict=True)
        ]

    def _most_apart(self, one: Run, other: Run) -> float:
        """Return the largest relative difference between two runs' updates of a parameter."""
        return max(apart(self._update(one, x), self._update(other, x)) for x in self.shapes)

    def _update(self, run: Run, name: str) -> np.ndarray:
        """Return the update of a parameter in a run, float64[copies, size]."""
        copies = run.seen[UPDATE][name].of_shape(self.shapes[name], self.number)
        assert copies is not None
        return copies

    def _check_names(self, one: Run, many: Run) -> None:
        if not self.shapes:
            raise ArgumentError(
                "No array of the state changes in a step with the optimizer that make_step was "
                "given. Use that one: make_step(optimizer, num_shards)."
            )
        for name, shape in self.shapes.items():
            first, start = one.start[name].values[0], many.start.get(name)
            start = start if name in many.seen[UPDATE] else None
            copies = None if start is None else start.of_shape(shape, self.number)
            if copies is None:
                there = "absent" if start is None else f"of shape {list(start.values.shape[1:])}"
                raise ArgumentError(
                    f"`{name}` has shape {list(shape)} on one shard, and is {there} on "
                    f"{self.number}. It may be the same, or stacked, [{self.number}, …]."
                )
            if apart(copies[0], first.ravel()) > 1e-6:
                raise ArgumentError(
                    f"`{name}` does not start from the same values on 1 and on {self.number} "
                    "shards. Let make_step create it from a fixed seed."
                )


def _on_one(runs: Sequence[Run], what: str, name: str) -> Any:
    """Return float64[runs, size] of runs on one device; ``None`` unless all have the array."""
    found = [x.values[0].ravel() for run in runs if (x := run.seen[what].get(name)) is not None]
    return np.stack(found) if found and len(found) == len(runs) else None


def _good_rate(run: Run) -> float:
    """Return a rate that makes updates about as large as the parameters, from a run at rate 1."""
    sizes = {x: norm(run.start[x].values[0].astype(np.float64)) for x in run.parameters()}
    ratios = [size / norm(run.seen[UPDATE][x].values[0]) for x, size in sizes.items() if size]
    wanted = float(np.median(ratios)) if ratios else 1.0
    if not np.isfinite(wanted) or 1 / _FAR_RATE <= wanted <= _FAR_RATE:
        return 1.0
    return float(2.0 ** np.clip(np.round(np.log2(wanted)), -60, 60))
