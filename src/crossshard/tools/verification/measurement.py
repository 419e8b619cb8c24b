"""Measurement: runs a step in all ways that tell something about it."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossshard.errors import ArgumentError
from crossshard.shards.batch_axes import BatchAxes
from crossshard.tools.verification.arithmetic import apart, norm, rms, standard_error, unstacked
from crossshard.tools.verification.beside import (
    Runs,
    changed_when_idle,
    of_metrics,
    of_statistics,
)
from crossshard.tools.verification.built_step import BuiltStep, Factory, Run, rows_of, take_rows
from crossshard.tools.verification.evidence import Case, Evidence, Leaf

# Steps of a random one, with other keys each, of which the mean is compared.
SAMPLES = 16
# Relative differences that are rounding, unless a dtype is coarser.
_ROUNDING = 1e-4
# By which factor updates may be smaller or larger than parameters, before SGD gets another rate.
_FAR = 16.0
# Gradients so much smaller than the largest leaf's may be nothing but rounding.
_SMALL = 1e-3


class Measurement:
    """Runs the step in all ways that tell something.

    Args:
      make_step: the factory of the step.
      batch: the arguments after the state.
      axes: for each of them along which axes its arrays have rows.
      key: the random key; ``None`` if the step takes none.
      groups: the shards that reduce together.
      factor: by which the update on N shards should differ: the size of a group under SUM.

    Raises:
      ArgumentError: there is one shard, or the rows do not divide over groups.
    """

    def __init__(
        self,
        make_step: Factory,
        batch: Sequence[Any],
        axes: Sequence[BatchAxes],
        key: Any,
        groups: Sequence[tuple[int, ...]],
        factor: float = 1.0,
    ) -> None:
        self._make_step, self._batch, self._axes, self._key = make_step, batch, axes, key
        self._groups, self._factor = groups, factor
        self.number = sum(map(len, groups))
        if self.number < 2:
            raise ArgumentError(
                "verify compares N shards with one, and there is one device. Call "
                "crossshard.cpu_devices(8) before the first JAX operation."
            )
        self.rows = rows_of(batch, axes)
        divides = self.rows % self.number == 0
        self._blocks = np.arange(self.rows).reshape(self.number, -1) if divides else None
        self._notes: list[str] = []
        if self._blocks is None and len(groups) > 1:
            raise ArgumentError(
                f"The {self.rows} rows of the batch do not divide over {self.number} shards, so "
                f"nobody can tell which group has which. Pass a multiple of {self.number} rows."
            )

    def evidence(self) -> Evidence:
        """Run, and collect."""
        rate, self._alone = self._alone_at_a_good_rate()
        self._rate, self._together = rate, BuiltStep(self._make_step, self.number, rate)
        many = self._run_together()
        one = self._run_groups()
        own = self._run_own()
        self._is_random = self._other_keys_matter(one[0])
        names = list(dict.fromkeys(name for run in one for name in run.parameters()))
        self._shapes = {name: one[0].start[name].values.shape[1:] for name in names}
        self._check_names(one[0], many)
        self._rounding = {} if self._is_random else self._rounding_of(one[0])
        besides = [] if self._is_random else sorted(set(one[0].start) - set(names))
        statistics = changed_when_idle(besides, one[0])
        faults = self._of_what_is_beside(statistics, Runs(self.number, many, one[0], own))
        # Other keys, of which the mean is compared.
        more = range(1, SAMPLES if self._is_random else 1)
        samples_of_many = [many, *(self._run_together(seed) for seed in more)]
        samples_of_one = [one, *(self._run_groups(seed) for seed in more)]
        samples_of_own = None if own is None else [own, *(self._run_each(seed) for seed in more)]
        return Evidence(
            number=self.number,
            rows=self.rows,
            leaves=tuple(
                self._leaf(name, samples_of_many, samples_of_one, samples_of_own) for name in names
            ),
            has_statistics=bool(statistics),
            beside=tuple(faults),
            keys_are_equal=self._is_random and self._keys_are_equal(many, one[0]),
            notes=tuple(self._notes),
        )

    def flops(self) -> tuple[float, float, float] | str:
        """Operations of a device: on N shards, alone with all rows, alone with a shard's rows.

        Returns:
          They, or why it is not known.
        """
        if self._blocks is None:
            return ""
        part = self._taken(self._blocks[0])
        try:
            many = self._together.flops(self._batch, self._key)
            one = self._alone.flops(self._batch, self._key)
            each = self._alone.flops(part, self._key)
        except Exception as error:  # of any kind: not every step can be traced as a whole
            return f"whether the batch is split was not checked ({type(error).__name__})"
        if many is None or one is None or each is None:
            return "whether the batch is split was not checked, as the compiler does not tell"
        return many, one, each

    # Runs.

    def _alone_at_a_good_rate(self) -> tuple[float, BuiltStep]:
        """SGD on one device, whose updates are about as large as the parameters."""
        alone = BuiltStep(self._make_step, 1, 1.0)
        run = alone.run(self._rows_of(self._groups[0]), self._key)
        ratios = []
        for name in run.parameters():
            before, after = (x[name].values[0].astype(np.float64) for x in (run.idle, run.last))
            ratios += [norm(before) / norm(after - before)] if np.any(before) else []
        wanted = float(np.median(ratios)) if ratios else 1.0
        if not np.isfinite(wanted) or 1 / _FAR <= wanted <= _FAR:
            return 1.0, alone
        # A power of 2, which rounds nothing.
        rate = float(2.0 ** np.clip(np.round(np.log2(wanted)), -60, 60))
        return rate, BuiltStep(self._make_step, 1, rate)

    def _rows_of(self, shards: Sequence[int]) -> Sequence[Any]:
        if len(shards) == self.number or self._blocks is None:
            return self._batch
        return self._taken(self._blocks[list(shards)].ravel())

    def _taken(self, rows: np.ndarray) -> Sequence[Any]:
        return take_rows(self._batch, self._axes, rows)

    def _run_together(self, seed: int = 0) -> Run:
        return self._together.run(self._batch, self._key, seed)

    def _run_groups(self, seed: int = 0) -> list[Run]:
        """One device with the rows of each group."""
        return [self._alone.run(self._rows_of(each), self._key, seed) for each in self._groups]

    def _run_each(self, seed: int = 0) -> list[Run]:
        """One device with the rows of each shard."""
        shards = range(self.number)
        return [self._alone.run(self._rows_of([i]), self._key, seed) for i in shards]

    def _run_own(self) -> list[Run] | None:
        """As ``_run_each``; ``None`` and a note if the step does not take a shard's rows alone."""
        by_factor = "faults are told by their factor alone"
        if self._blocks is None:
            self._notes.append(
                f"the {self.rows} rows do not divide over {self.number} shards, so that {by_factor}"
            )
            return None
        try:
            return self._run_each()
        except Exception as error:  # of any kind: the user's step may want a fixed number of rows
            self._notes.append(
                "the step on one device does not take a shard's rows alone, so that "
                f"{by_factor} ({type(error).__name__})"
            )
            return None

    def _other_keys_matter(self, first: Run) -> bool:
        if self._key is None and not self._alone.has_keys:
            return False
        again = self._alone.run(self._rows_of(self._groups[0]), self._key, seed=1)
        moved = lambda run, name: run.last[name].values - run.idle[name].values
        return any(apart(moved(again, x), moved(first, x)) > 1e-3 for x in first.parameters())

    def _keys_are_equal(self, many: Run, one: Run) -> bool:
        """Whether a random update stays when each shard has the rows of the next one.

        A key that makes the same step as on one device is meant to be shared.
        """
        if self._blocks is None:
            return False
        placed = np.empty_like(self._blocks)
        for members in map(list, self._groups):
            placed[members] = np.roll(self._blocks[members], 1, axis=0)
        moved = self._together.run(self._taken(placed.ravel()), self._key)
        other = self._run_together(seed=1)
        # Asked last, so that all processes take the same steps, whatever they have found.
        if self._most_apart(many, one) < 1e-3:
            return False
        by_key = self._most_apart(many, other)
        return by_key > 0 and self._most_apart(many, moved) < 0.02 * by_key

    def _most_apart(self, one: Run, other: Run) -> float:
        """The largest relative difference of any parameter's updates."""
        return max(
            apart(self._update(one, name)[0], self._update(other, name)[0]) for name in self._shapes
        )

    def _rounding_of(self, first: Run) -> dict[str, float]:
        """How far the order of the rows moves an update that is next to nothing, as a norm."""
        batch = self._rows_of(self._groups[0])
        reverse = np.arange(rows_of(batch, self._axes))[::-1]
        again = self._alone.run(take_rows(batch, self._axes, reverse), self._key)
        updates = {name: self._update(first, name)[0] for name in self._shapes}
        largest = max(map(rms, updates.values()))
        return {
            name: norm(update - self._update(again, name)[0])
            for name, update in updates.items()
            if rms(update) < _SMALL * largest
        }

    # What was found.

    def _check_names(self, one: Run, many: Run) -> None:
        if not self._shapes:
            raise ArgumentError(
                "No array of the state changes in a step with the optimizer that make_step was "
                "given. Use that one: make_step(optimizer, num_shards)."
            )
        for name, shape in self._shapes.items():
            if name not in many.last:
                raise ArgumentError(
                    f"The state has `{name}` on one shard, and not on {self.number}: there it has "
                    f"{', '.join(list(many.last)[:6])}. make_step must return parameters of the "
                    "same structure for any number."
                )
            first, start = one.start[name].values[0], many.start[name]
            copies = unstacked(start, shape, self.number)
            if copies is None:
                raise ArgumentError(
                    f"`{name}` has shape {list(shape)} on one shard and "
                    f"{list(start.values.shape[1:])} on {self.number}. It may be the same, or "
                    f"stacked, [{self.number}, …]."
                )
            if apart(copies[0], first.reshape(copies[0].shape)) > 1e-6:
                raise ArgumentError(
                    f"`{name}` does not start from the same values on 1 and on {self.number} "
                    "shards. Let make_step create it from a fixed seed."
                )

    def _of_what_is_beside(self, statistics: Sequence[str], runs: Runs) -> list[Any]:
        """The faults of statistics and metrics."""
        if self._is_random or len(self._groups) > 1:
            return []  # each group has its own
        faults, notes = of_statistics(statistics, runs)
        self._notes += notes
        # Under SUM metrics have another factor.
        return faults if self._factor != 1 else faults + of_metrics(runs)

    def _update(self, run: Run, name: str) -> np.ndarray:
        """float64[copies, size], over the learning rate."""
        idle, last = (
            unstacked(x[name], self._shapes[name], self.number) for x in (run.idle, run.last)
        )
        assert idle is not None
        assert last is not None
        moved = (idle - last) / self._rate
        return moved.reshape(len(moved), -1)

    def _leaf(
        self,
        name: str,
        many: Sequence[Run],
        one: Sequence[list[Run]],
        own: Sequence[list[Run]] | None,
    ) -> Leaf:
        """Of one run, or the mean of several with other keys."""
        first_copy = lambda samples: np.stack(
            [[self._update(run, name)[0] for run in runs] for runs in samples]
        )
        updates = [self._update(run, name) for run in many]
        copies = max(map(len, updates))
        of_many = np.stack([np.broadcast_to(x, (copies, x.shape[1])) for x in updates])
        of_one = first_copy(one)
        of_own = None if own is None else self._factor * first_copy(own).mean(axis=0)
        before = one[0][0].start[name]
        epsilon = float(jnp.finfo(before.dtype).eps)
        rounding = epsilon * norm(before.values[0].astype(np.float64)) / self._rate
        spread = [standard_error(x) for x in (of_many, of_one)] if len(many) > 1 else []
        noises = [2 * rounding, 10 * self._rounding.get(name, 0.0), *(4 * x for x in spread)]
        cases = []
        for index, members in enumerate(self._groups):
            own_copies = list(members) if copies == self.number else slice(None)
            case = Case(
                many=of_many.mean(axis=0)[own_copies],
                one=self._factor * of_one.mean(axis=0)[index],
                own=None if of_own is None else of_own[list(members)],
                members=members,
                of_all=self.number,
                rows=self.rows * len(members) // self.number,
                tolerance=max(_ROUNDING, 4 * epsilon),
                noise=norm(np.array(noises)),
                is_random=self._is_random,
            )
            cases.append(case)
        return Leaf(name, self._shapes[name], tuple(cases))
