"""Measurement: runs a step in all ways that tell something about it."""

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossshard.errors import ArgumentError, NestedContextError
from crossshard.shards.batch_axes import BatchAxes
from crossshard.tools.verification.arithmetic import apart, norm, rms, unstacked
from crossshard.tools.verification.beside import are_of_rows, of_metrics, of_statistics
from crossshard.tools.verification.built_step import (
    BuiltStep,
    Factory,
    Run,
    changed_when_idle,
    rows_of,
    take_rows,
)
from crossshard.tools.verification.evidence import AtOneKey, Case, Evidence, Leaf
from crossshard.tools.verification.samples import Mean
from crossshard.tools.verification.snapshot import Copies

# What is compared: the change of a parameter in the steps with a learning rate, over that rate;
# of another real array in the idle step; and what that step returns besides.
_UPDATE, _STATISTIC, _METRIC = "update", "statistic", "metric"
# Runs with each shard's rows, of a random step.
_OWN_SAMPLES = 16
# Keys at which rows must have no effect, if they are to be left out.
_KEYS = 16
# Relative differences that are rounding, unless a dtype is coarser.
_ROUNDING = 1e-4
# By which factor updates may be smaller or larger than parameters, before SGD gets another rate.
_FAR = 16.0
# Gradients so much smaller than the largest leaf's may be nothing but rounding.
_SMALL = 1e-3
# Updates that are further apart are not equal, up to rounding.
_OTHER = 1e-3
# Updates that are no further apart are the same.
_SAME = 1e-6


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
        self._batch, self._axes, self._key = batch, axes, key
        self._groups, self._factor = groups, factor
        self.number: int = sum(map(len, groups))
        if self.number < 2:
            raise ArgumentError(
                "verify compares N shards with one, and there is one device. Call "
                "crossshard.cpu_devices(8) before the first JAX operation."
            )
        self.rows: int = rows_of(batch, axes)
        divides = self.rows % self.number == 0
        self._blocks = np.arange(self.rows).reshape(self.number, -1) if divides else None
        self._notes: list[str] = []
        if self._blocks is None and len(groups) > 1:
            raise ArgumentError(
                f"The {self.rows} rows of the batch do not divide over {self.number} shards, so "
                f"nobody can tell which group has which. Pass a multiple of {self.number} rows."
            )
        self._alone, self._together = BuiltStep(make_step, 1), BuiltStep(make_step, self.number)
        self._started = False
        self._carried: list[str] = []

    def evidence(self, samples: int = 1) -> Evidence:
        """Run, and collect.

        Args:
          samples: of so many runs the mean is taken, each with other random keys.
        """
        if not self._started:
            self._start()
        while self._number_of_samples < samples:
            self._take(next(self._of_many), _next(self._of_one))
        # What tells why something is off takes the most runs.
        if samples > 1 and any(mean.is_off for mean in self._means.values()):
            while self._of_own and self._number_of_own < min(samples, _OWN_SAMPLES):
                self._take_own(_next(self._of_own))
        statistics = self._of(_STATISTIC)
        are_of_all = len(self._groups) == 1  # else each group has its own
        faults, notes = of_statistics(statistics) if are_of_all else ([], [])
        if are_of_all and self._factor == 1:  # under SUM metrics have another factor
            faults += of_metrics(self._of(_METRIC))
        return Evidence(
            number=self.number,
            rows=self.rows,
            leaves=tuple(self._leaf(name, samples > 1) for name in self._shapes),
            has_statistics=are_of_rows(statistics.values(), self._of(_UPDATE).values()),
            beside=tuple(faults),
            samples=samples,
            at_one_key=self._at_one_key if samples > 1 else AtOneKey(),
            counters=self._of_counters() if samples == 1 else "",
            notes=(*self._notes, *notes),
        )

    def is_random(self) -> bool:
        """Whether the step draws random numbers, in what JAX traces or anywhere else."""
        again = self._run_alone(self._groups[0])
        if self._most_apart(self._one, next(again)) > _OTHER:
            return True  # the host has keys, which a trace would lead astray
        draws = self._alone.draws(self._rows_of(self._groups[0]), self._key)
        # Another step of its has other keys, if it has any.
        return self._most_apart(self._one, next(again)) > _OTHER if draws is None else draws

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
            each = self._alone_with([0]).flops(part, self._key)
        except NestedContextError:
            return ""  # crossshard.shard, which splits its arguments by itself
        except Exception as error:  # of any kind: not every step can be traced as a whole
            return f"whether the batch is split was not checked ({type(error).__name__})"
        if many is None or one is None or each is None:
            return "whether the batch is split was not checked, as the compiler does not tell"
        return many, one, each

    # Runs.

    def _start(self) -> None:
        """Find what a step changes, and how far; take the first sample."""
        self._started = True
        first = next(self._alone.runs(self._rows_of(self._groups[0]), self._key))
        # A rate is a power of 2, which rounds nothing.
        self._rate, self._calls = _good_rate(first), first.calls
        self._of_many = self._run_together(self._batch)
        self._of_one = [self._run_alone(each) for each in self._groups]
        many, one = next(self._of_many), _next(self._of_one)
        self._many, self._one, self._of_groups = many, one[0], one
        names = list(dict.fromkeys(name for run in one for name in run.parameters()))
        self._shapes = {name: self._one.start[name].values.shape[1:] for name in names}
        self._check_names(self._one, many)
        self._rounding = self._rounding_of(self._one)
        idle = changed_when_idle(self._one.start, self._one.idle)
        statistics = sorted(set(idle) - set(names))
        known = ((_UPDATE, names), (_STATISTIC, statistics), (_METRIC, self._one.metrics))
        self._means = {(what, name): Mean() for what, names in known for name in names}
        self._number_of_samples = self._number_of_own = 0
        self._take(many, one)
        self._take_own(self._first_own())

    def _take(self, many: Run, one: Sequence[Run]) -> None:
        """Add a sample."""
        self._number_of_samples += 1
        for (what, name), mean in list(self._means.items()):
            alone = _first_copies(one, what, name)
            raw = _seen(many, what, name)
            copies = None if alone is None else unstacked(raw, alone.shape[1:], self.number)
            if raw is None or alone is None or copies is None:
                del self._means[what, name]  # it is another array there
                continue
            mean.is_stacked = raw.shape[1:] != alone.shape[1:]
            of = (one[0].metrics if what == _METRIC else one[0].idle)[name]
            mean.rounding = 1e-7 + 4 * _epsilon(of) * norm(of.values[0].astype(np.float64))
            factor = self._factor if what == _UPDATE else 1.0
            mean.add(_flat(copies), factor * _flat(alone))

    def _take_own(self, own: Sequence[Run]) -> None:
        """Add a sample of the shards' own."""
        self._number_of_own += 1
        for (what, name), mean in self._means.items():
            alone = _first_copies(own, what, name)
            if alone is not None and _flat(alone).shape[1:] == mean.one.shape[1:]:
                mean.add_own((self._factor if what == _UPDATE else 1.0) * _flat(alone))

    def _of(self, what: str) -> dict[str, Mean]:
        return {name: mean for (kind, name), mean in self._means.items() if kind == what}

    def _rows_of(self, shards: Sequence[int]) -> Sequence[Any]:
        if len(shards) == self.number or self._blocks is None:
            return self._batch
        return self._taken(self._blocks[list(shards)].ravel())

    def _taken(self, rows: np.ndarray) -> list[Any]:
        return take_rows(self._batch, self._axes, rows)

    def _run_together(self, batch: Sequence[Any]) -> Iterator[Run]:
        return self._together.runs(batch, self._key, self._rate, self._calls)

    def _run_alone(
        self, shards: Sequence[int], counters: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> Iterator[Run]:
        """One device with the rows of these shards."""
        alone, rows = self._alone_with(shards), self._rows_of(shards)
        return alone.runs(rows, self._key, self._rate, self._calls, counters)

    def _alone_with(self, shards: Sequence[int]) -> BuiltStep:
        """The step on one device with these shards' part of what is carried from row to row."""
        if self._blocks is None or not self._carried:
            return self._alone
        rows = self._blocks[list(shards)].ravel()
        of_rows = {name: self._one.start[name].values[0][rows] for name in self._carried}
        return self._alone.with_state(of_rows)

    def _run_rows_alone(
        self, rows: Sequence[Any], counters: Mapping[str, np.ndarray] = MappingProxyType({})
    ) -> Iterator[Run]:
        return self._alone.runs(rows, self._key, self._rate, self._calls, counters)

    def _first_own(self) -> list[Run]:
        """One device with the rows of each shard; a note if the step does not take them alone."""
        by_factor = "faults are told by their factor alone"
        self._of_own = []
        if self._blocks is None:
            self._notes.append(
                f"the {self.rows} rows do not divide over {self.number} shards, so that {by_factor}"
            )
            return []
        of_rows = [
            x for x in self._of(_STATISTIC) if self._one.idle[x].values.shape[1:2] == (self.rows,)
        ]
        for self._carried in [[], of_rows] if of_rows else [[]]:
            self._of_own = [self._run_alone([i]) for i in range(self.number)]
            try:
                return _next(self._of_own)
            except Exception as error:  # of any kind: the step may want a fixed number of rows
                kind = type(error).__name__
        self._of_own = []
        self._notes.append(
            "the step on one device does not take a shard's rows alone, so that "
            f"{by_factor} ({kind})"
        )
        return []

    def _rounding_of(self, first: Run) -> dict[str, float]:
        """How far the order of the rows moves an update that is next to nothing, as a norm."""
        batch = self._rows_of(self._groups[0])
        backwards = take_rows(batch, self._axes, np.arange(rows_of(batch, self._axes))[::-1])
        again = next(self._run_rows_alone(backwards))
        updates = {name: self._update(first, name)[0] for name in self._shapes}
        largest = max(map(rms, updates.values()))
        return {
            name: norm(update - self._update(again, name)[0])
            for name, update in updates.items()
            if rms(update) < _SMALL * largest
        }

    @functools.cached_property
    def _at_one_key(self) -> AtOneKey:
        """What other rows change, and what they do not, while all random keys stay."""
        if self._blocks is None:
            return AtOneKey()
        following = np.empty_like(self._blocks)
        for members in map(list, self._groups):
            following[members] = np.roll(self._blocks[members], 1, axis=0)
        moved = next(self._run_together(self._taken(following.ravel())))
        walk = self._run_together(self._batch)
        other = [next(walk), next(walk)][1]
        by_key = self._most_apart(self._many, other)
        stays = by_key > 0 and self._most_apart(self._many, moved) < 0.02 * by_key
        # Noise that has nothing to do with rows, such as that on weights, stays on one device, too.
        rows = following[list(self._groups[0])].ravel()
        alone = next(self._run_rows_alone(self._taken(rows)))
        keys_are_equal = stays and self._most_apart(self._one, alone) > _OTHER
        return AtOneKey(keys_are_equal, self._without_effect(self._blocks, following))

    def _without_effect(self, own: np.ndarray, others: np.ndarray) -> dict[str, tuple[int, ...]]:
        """The shards whose rows change no bit of a parameter that they change on one device."""
        found: dict[str, tuple[int, ...]] = {}
        for group, members in zip(self._of_groups, self._groups, strict=True):
            for shard in members:
                blocks = own.copy()
                blocks[shard] = others[shard]
                left = self._without_change(self._taken(blocks.ravel()))
                if not left:
                    continue
                rows = self._taken(blocks[list(members)].ravel())
                one = next(self._run_rows_alone(rows))
                for name in left:
                    if self._apart(group, one, name) > _OTHER:
                        found[name] = (*found.get(name, ()), shard)
        # What no row changes is not updated, or is frozen.
        return {name: shards for name, shards in found.items() if len(shards) < self.number}

    def _without_change(self, batch: Sequence[Any]) -> list[str]:
        """The parameters whose update on N shards is the same with another batch, at any key."""
        left = list(self._shapes)
        runs = zip(self._run_together(self._batch), self._run_together(batch), strict=True)
        # A shard may drop a layer at one key, as with stochastic depth.
        for one, other in itertools.islice(runs, _KEYS):
            left = [name for name in left if self._apart(one, other, name) <= _SAME]
            if not left:
                break
        return left

    def _of_counters(self) -> str:
        """Which counters make the difference, where N shards have others than one device."""
        counted = {}
        for name, one in self._one.idle.items():
            many = self._many.idle.get(name)
            if many is None or not one.is_counter or many.dtype != one.dtype:
                continue
            values = unstacked(many.values, one.values.shape[1:], self.number)
            if values is not None and np.any(values != one.values[0]):
                counted[name] = np.broadcast_to(values, (self.number, *one.values.shape[1:]))
        if not counted or not self._of_own or self._most_apart(self._many, self._one) < _OTHER:
            return ""
        runs = [
            next(self._run_alone([i], {name: of[i] for name, of in counted.items()}))
            for i in range(self.number)
        ]
        plain_is_off = False
        for name, mean in self._of(_UPDATE).items():
            as_counted = self._factor * np.mean([self._update(run, name)[0] for run in runs], 0)
            if mean.own is None or apart(mean.many[0], as_counted) > _OTHER:
                return ""
            plain_is_off |= apart(mean.many[0], mean.own.mean(axis=0)) > _OTHER
        if not plain_is_off:
            return ""  # without them it is the same
        return "; ".join(
            f"{name} {_counted(of, self._one.idle[name].values[0])}" for name, of in counted.items()
        )

    def _most_apart(self, one: Run, other: Run) -> float:
        """The largest relative difference of any parameter's updates."""
        return max(self._apart(one, other, name) for name in self._shapes)

    def _apart(self, one: Run, other: Run, name: str) -> float:
        return apart(*(self._update(run, name) for run in (one, other)))

    def _update(self, run: Run, name: str) -> np.ndarray:
        """float64[copies, size]."""
        copies = unstacked(_seen(run, _UPDATE, name), self._shapes[name], self.number)
        assert copies is not None
        return _flat(copies)

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
            copies = unstacked(start.values, shape, self.number)
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

    def _leaf(self, name: str, is_random: bool) -> Leaf:
        """Of one run, or the mean of several with other keys."""
        mean = self._means[_UPDATE, name]
        many, own, chance = mean.many, mean.own, mean.chance
        before = self._one.start[name]
        epsilon = _epsilon(before)
        rounding = epsilon * norm(before.values[0].astype(np.float64)) / self._rate
        noises = [2 * rounding, 10 * self._rounding.get(name, 0.0)]
        cases = []
        for index, members in enumerate(self._groups):
            copies = list(members) if len(many) == self.number else slice(None)
            case = Case(
                many=many[copies],
                one=mean.one[index],
                own=None if own is None else own[list(members)],
                members=members,
                of_all=self.number,
                rows=self.rows * len(members) // self.number,
                tolerance=max(_ROUNDING, 4 * epsilon),
                noise=norm(np.array([*noises, chance[copies, index].max()])),
                noise_of_own=mean.chance_of_own,
                is_random=is_random,
            )
            cases.append(case)
        return Leaf(name, self._shapes[name], tuple(cases))


def _seen(run: Run, what: str, name: str) -> np.ndarray | None:
    """float64[copies, …] of what is compared; ``None`` if the run has no such array."""
    if what == _METRIC:
        found = run.metrics.get(name)
        return None if found is None else found.values.astype(np.float64)
    before, after = (run.idle, run.last) if what == _UPDATE else (run.start, run.idle)
    if name not in before or name not in after:
        return None
    moved = after[name].values.astype(np.float64) - before[name].values
    return moved / -run.rate if what == _UPDATE else moved


def _first_copies(runs: Sequence[Run], what: str, name: str) -> np.ndarray | None:
    """float64[runs, …], if all have it in the same shape."""
    found = [_seen(run, what, name) for run in runs]
    firsts = [each[0] for each in found if each is not None]
    alike = len(firsts) == len(runs) and len({x.shape for x in firsts}) == 1
    return np.stack(firsts) if alike else None


def _epsilon(x: Copies) -> float:
    return float(jnp.finfo(x.dtype).eps)


def _flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1)


def _next(walks: Sequence[Iterator[Run]]) -> list[Run]:
    return [next(walk) for walk in walks]


def _good_rate(run: Run) -> float:
    """A learning rate with which updates are about as large as the parameters, from a run at 1."""
    ratios = []
    for name in run.parameters():
        before, after = (x[name].values[0].astype(np.float64) for x in (run.idle, run.last))
        ratios += [norm(before) / norm(after - before)] if np.any(before) else []
    wanted = float(np.median(ratios)) if ratios else 1.0
    if not np.isfinite(wanted) or 1 / _FAR <= wanted <= _FAR:
        return 1.0
    return float(2.0 ** np.clip(np.round(np.log2(wanted)), -60, 60))


def _counted(of: np.ndarray, alone: np.ndarray) -> str:
    """Words for a counter's values on the shards, and on one device."""
    if np.any(of != of[:1]):
        return "differs between the shards"
    shown = f"{of[0]:.0f} on {len(of)} shards and {alone:.0f}" if not alone.ndim else "another one"
    return f"is {shown} on one device after the same number of steps"
