"""Measurement: runs a step in all ways that tell something about it."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from crossshard.errors import ArgumentError
from crossshard.tools.verification.arithmetic import (
    apart,
    parameters_of,
    rms,
    standard_error,
    unstacked,
)
from crossshard.tools.verification.built_step import BuiltStep, Taken, rows_of, take_rows
from crossshard.tools.verification.evidence import Evidence, LeafEvidence, Request
from crossshard.tools.verification.states import metrics, others

# Steps of a random one, with other keys each, of which the mean is compared.
SAMPLES = 16
# By which factor updates may be smaller or larger than parameters, before SGD gets another rate.
_FAR = 16.0
# Gradients so much smaller than the largest leaf's may be nothing but rounding.
_SMALL = 1e-3


class Measurement:
    """Runs the step in all ways that tell something."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._notes: list[str] = []
        rows, number = rows_of(request.batch), request.number
        self.rows = rows
        self._blocks = np.arange(rows).reshape(number, -1) if rows % number == 0 else None
        if self._blocks is None and len(request.groups) > 1:
            raise ArgumentError(
                f"The {rows} rows of the batch do not divide over {number} shards, so nobody can "
                f"tell which group has which. Pass a multiple of {number} rows."
            )

    def evidence(self) -> Evidence:
        """Run, and collect."""
        request = self._request
        rate, self._alone = self._alone_at_a_good_rate()
        self._together = BuiltStep(request.many, request.number, rate)
        together = self._run_together(request.batch)
        groups = [self._run_alone(self._rows(members)) for members in request.groups]
        own = self._own()
        is_random = self._is_random(groups[0])
        is_exact = not is_random and request.factor == 1
        names = parameters_of(groups)
        self._shapes = {name: groups[0][1].before[name].values.shape[1:] for name in names}
        self._check_names(names, groups[0][0], together[0])
        self._rounding = {} if is_random else self._rounding_of(names, groups[0][1])
        alone = None if own is None else [own]
        parameters = (
            self._sampled(names, own is not None)
            if is_random
            else tuple(self._leaf(name, [together[1]], [groups], alone) for name in names)
        )
        besides = sorted(set(groups[0][0].before) - set(names)) if not is_random else []
        return Evidence(
            groups=request.groups,
            rows=self.rows,
            parameters=parameters,
            others=others(request.number, besides, together[0], groups, own),
            metrics=metrics(request.number, together[0], groups, own) if is_exact else (),
            is_random=is_random,
            keys_are_equal=is_random and self._keys_are_equal(names, together[1], groups[0][1]),
            notes=tuple(self._notes),
        )

    def flops(self) -> tuple[float, float, float] | None:
        """Operations of a device: on N shards, alone with all rows, alone with a shard's rows."""
        batch, key = self._request.batch, self._request.key
        if self._blocks is None:
            return None
        alone = self._alone
        try:
            found = [
                self._together.flops(batch, key),
                alone.flops(batch, key),
                alone.flops(take_rows(batch, self._blocks[0]), key),
            ]
        except Exception as error:  # of any kind: not every step can be traced as a whole
            self._note(f"whether the batch is split was not checked ({type(error).__name__})")
            return None
        many, one, part = found
        if many is None or one is None or part is None:
            self._note("whether the batch is split was not checked, as the compiler does not tell")
            return None
        return many, one, part

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be measured."""
        return tuple(self._notes)

    # Runs.

    def _alone_at_a_good_rate(self) -> tuple[float, BuiltStep]:
        """SGD on one device, whose updates are about as large as the parameters."""
        request = self._request
        alone = BuiltStep(request.one, 1, 1.0)
        taken = alone.run(self._rows(request.groups[0]), request.key)
        ratios = []
        for name in parameters_of([taken]):
            before, after = (
                x[name].values[0].astype(np.float64) for x in (taken[1].before, taken[1].after)
            )
            if np.any(before):
                ratios.append(rms(before) / rms(after - before))
        wanted = float(np.median(ratios)) if ratios else 1.0
        if not np.isfinite(wanted) or 1 / _FAR <= wanted <= _FAR:
            return 1.0, alone
        # A power of 2, which rounds nothing.
        rate = float(2.0 ** np.clip(np.round(np.log2(wanted)), -60, 60))
        return rate, BuiltStep(request.one, 1, rate)

    def _rows(self, shards: Sequence[int]) -> Sequence[Any]:
        if len(shards) == self._request.number or self._blocks is None:
            return self._request.batch
        return take_rows(self._request.batch, self._blocks[list(shards)].ravel())

    def _run_alone(self, batch: Sequence[Any], seed: int = 0) -> list[Taken]:
        return self._alone.run(batch, self._request.key, seed)

    def _run_together(self, batch: Sequence[Any], seed: int = 0) -> list[Taken]:
        return self._together.run(batch, self._request.key, seed)

    def _own(self, seed: int = 0) -> list[list[Taken]] | None:
        """One device with each shard's rows."""
        if self._blocks is None:
            self._note(
                f"the {self.rows} rows do not divide over {self._request.number} shards, so that "
                "faults are told by their factor alone"
            )
            return None
        try:
            return [self._run_alone(self._rows([i]), seed) for i in range(self._request.number)]
        except Exception as error:  # of any kind: the user's step may want a fixed number of rows
            self._note(
                "the step on one device does not take a shard's rows alone, so that faults are "
                f"told by their factor alone ({type(error).__name__})"
            )
            return None

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)

    def _is_random(self, first: list[Taken]) -> bool:
        if self._request.key is None and not self._alone.has_keys:
            return False
        again = self._run_alone(self._rows(self._request.groups[0]), seed=1)
        moved = lambda run, name: run[1].after[name].values - run[1].before[name].values
        return any(apart(moved(again, x), moved(first, x)) > 1e-3 for x in parameters_of([first]))

    def _keys_are_equal(self, names: Sequence[str], together: Taken, alone: Taken) -> bool:
        """Whether a random update stays when each shard has the rows of the next one.

        A key that makes the same step as on one device is meant to be shared.
        """
        request = self._request
        if self._blocks is None:
            return False
        placed = np.empty_like(self._blocks)
        for members in map(list, request.groups):
            placed[members] = np.roll(self._blocks[members], 1, axis=0)
        moved = self._run_together(take_rows(request.batch, placed.ravel()))[1]
        other = self._run_together(request.batch, seed=1)[1]
        # Asked last, so that all processes take the same steps, whatever they have found.
        if self._most_apart(names, together, alone) < 1e-3:
            return False
        by_key = self._most_apart(names, together, other)
        return by_key > 0 and self._most_apart(names, together, moved) < 0.02 * by_key

    def _most_apart(self, names: Sequence[str], one: Taken, other: Taken) -> float:
        """The largest relative difference of any parameter's updates."""
        found = [0.0]
        for name in names:
            first, second = (self._update_of(x, name) for x in (one, other))
            found.append(apart(first, second))
        return max(found)

    def _rounding_of(self, names: Sequence[str], first: Taken) -> dict[str, float]:
        """How far the order of the rows moves an update that is next to nothing, as a norm."""
        rows = rows_of(self._rows(self._request.groups[0]))
        batch = take_rows(self._rows(self._request.groups[0]), np.arange(rows)[::-1])
        again = self._run_alone(batch)[1]
        pairs = {
            name: [self._update(x, name, 1, self._shapes[name])[0] for x in (first, again)]
            for name in names
        }
        largest = max(rms(x) for x, _ in pairs.values())
        return {
            name: float(np.linalg.norm(x - y)) if rms(x) < _SMALL * largest else 0.0
            for name, (x, y) in pairs.items()
        }

    # Leaves.

    def _check_names(self, names: Sequence[str], alone: Taken, together: Taken) -> None:
        if not names:
            raise ArgumentError(
                "No array of the state changes in a step with the optimizer that make_step was "
                "given. Use that one: make_step(optimizer, num_shards)."
            )
        missing = [name for name in names if name not in together.after]
        if missing:
            raise ArgumentError(
                f"The state has `{missing[0]}` on one shard, and not on {self._request.number}: "
                f"there it has {', '.join(list(together.after)[:6])}. make_step must return "
                "parameters of the same structure for any number."
            )
        for name in names:
            one, many = alone.before[name].values[0], together.before[name].values[0]
            start = unstacked(together.before[name], one.shape, self._request.number)[0]
            if start is None:
                raise ArgumentError(
                    f"`{name}` has shape {list(one.shape)} on one shard and {list(many.shape)} on "
                    f"{self._request.number}. It may be the same, or stacked, "
                    f"[{self._request.number}, …]."
                )
            if apart(start[0], one.reshape(start[0].shape)) > 1e-6:
                raise ArgumentError(
                    f"`{name}` does not start from the same values on 1 and on "
                    f"{self._request.number} shards. Let make_step create it from a fixed seed."
                )

    def _update(self, taken: Taken, name: str, number: int, shape: tuple[int, ...]) -> np.ndarray:
        """float64[copies, size], over the learning rate."""
        after, _ = unstacked(taken.after[name], shape, number)
        before, _ = unstacked(taken.before[name], shape, number)
        assert after is not None
        assert before is not None
        moved = (before - after) / self._alone.learning_rate
        return moved.reshape(len(moved), -1)

    def _update_of(self, taken: Taken, name: str) -> np.ndarray:
        """That of the first copy, of a run on one or on N shards."""
        shape = self._shapes[name]
        is_alone = taken.after[name].values.shape[1:] == shape
        return self._update(taken, name, 1 if is_alone else self._request.number, shape)[0]

    def _leaf(
        self,
        name: str,
        together: Sequence[Taken],
        groups: Sequence[list[list[Taken]]],
        own: Sequence[list[list[Taken]]] | None,
    ) -> LeafEvidence:
        """Of one run, or the mean of several with other keys."""
        first = groups[0][0][1]
        shape = first.before[name].values.shape[1:]
        update = lambda taken, number: self._update(taken, name, number, shape)
        many = [update(taken, self._request.number) for taken in together]
        most = max(map(len, many))
        many_all = np.stack([np.broadcast_to(x, (most, x.shape[1])) for x in many])
        one_all = np.stack([[update(each[1], 1)[0] for each in sample] for sample in groups])
        own_mean = None
        if own is not None:
            own_mean = np.mean([[update(each[1], 1)[0] for each in s] for s in own], axis=0)
        before = first.before[name]
        epsilon = float(jnp.finfo(before.dtype).eps)
        size = np.linalg.norm(before.values[0].astype(np.float64))
        rounding = epsilon * size / self._alone.learning_rate
        spread = [standard_error(x) for x in (many_all, one_all)] if len(many) > 1 else []
        noises = [2 * rounding, 10 * self._rounding.get(name, 0.0), *(4 * x for x in spread)]
        return LeafEvidence(
            name=name,
            shape=shape,
            many=many_all.mean(axis=0),
            one=self._request.factor * one_all.mean(axis=0),
            own=own_mean if own_mean is None else self._request.factor * own_mean,
            noise=float(np.linalg.norm(np.array(noises))),
            epsilon=epsilon,
        )

    def _sampled(self, names: Sequence[str], with_own: bool) -> tuple[LeafEvidence, ...]:
        """The mean of many steps with other keys."""
        request = self._request
        together, groups, own = [], [], []
        for seed in range(SAMPLES):
            together.append(self._run_together(request.batch, seed)[1])
            groups.append([self._run_alone(self._rows(each), seed) for each in request.groups])
            if with_own:
                own.append(self._own(seed) or [])
        return tuple(
            self._leaf(name, together, groups, own if with_own else None) for name in names
        )
