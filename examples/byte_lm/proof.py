"""The proof: compares a run with the same steps on one shard, by JAX and Optax alone.

Adaptive optimizers hide a wrong factor, so ``crossshard.verify`` looks at the step with plain SGD.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import crossshard
from examples.byte_lm.job import Job
from examples.byte_lm.model import loss, params_by_name
from examples.byte_lm.training import Values

STEPS = 5

# A tolerance for rounding, including low-precision matmuls on accelerators. Adaptive and sign-based
# optimizers magnify the rounding of small gradients.
_ROUNDING = 0.1

Batch = dict[str, np.ndarray]
# For each step whether each group skipped it; ``None`` where no step can be skipped.
Skipped = Sequence[tuple[float, ...] | None]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The difference between the run and one shard.

    Attributes:
      optimizer: the name of the optimizer.
      steps: the number of steps.
      largest_difference: of any parameter, absolute.
      where: the parameter that it is in.
      largest_change: by which training changed any parameter.
      relative: the norm of all differences over the norm of all changes.
      same: whether the difference is within rounding.
    """

    optimizer: str
    steps: int
    largest_difference: float
    where: str
    largest_change: float
    relative: float
    same: bool


class Proof:
    """Trains on one shard, by JAX and Optax alone, to compare.

    Args:
      job: the run.
      drawn: the batches of its first steps.
    """

    def __init__(self, job: Job, drawn: Sequence[Batch]) -> None:
        self._job = job
        self._drawn = drawn
        parts: Any = nnx.split(job.first_model, job.options.trains, ...)
        self._graph, self._first, self._frozen = parts
        self._start = optax.tree.cast(self._first, job.options.master_dtype)
        # SUM adds up the members' losses, each a mean over an equal part of the rows.
        self._factor = job.groups.size if job.options.reduction == "sum" else 1
        self._gradients = jax.jit(jax.value_and_grad(self._loss))

    def of_run(self, after: Values, skipped: Skipped) -> Comparison:
        """Compare with the run's parameters after its first steps, of which it skipped some."""
        before = _by_name(self._start)
        largest, where, change = -1.0, "", 0.0
        differences = changes = 0.0
        for group, members in enumerate(self._job.groups.members):
            taken = [each is None or not each[group] for each in skipped]
            alone = self._alone(np.array(members), taken)
            for path, start in before.items():
                many = after[path]
                # [shards, …] with groups: check all members, since they must agree.
                found = many[list(members)] if many.ndim > start.ndim else many[None]
                apart = found.astype(np.float64) - alone[path]
                moved = alone[path].astype(np.float64) - start
                if np.abs(apart).max() > largest:
                    largest, where = float(np.abs(apart).max()), path
                change = max(change, float(np.abs(moved).max()))
                differences += float(np.square(apart).sum()) / len(found)
                changes += float(np.square(moved).sum())
        relative = math.sqrt(differences / changes) if changes else float(differences > 0)
        return Comparison(
            optimizer=self._job.inner.name,
            steps=len(self._drawn),
            largest_difference=largest,
            where=where,
            largest_change=change,
            relative=relative,
            same=relative < _ROUNDING,
        )

    def _alone(self, members: np.ndarray, taken: list[bool]) -> Values:
        """The parameters after the steps taken, on one shard with the rows of these shards."""
        transformation = optax.with_extra_args_support(self._job.inner.transformation)

        @jax.jit
        def update(gradients: Any, state: Any, params: Any, value: jax.Array) -> tuple[Any, Any]:
            updates, state = transformation.update(gradients, state, params, value=value)
            return optax.apply_updates(params, updates), state

        params, state = self._start, transformation.init(self._start)
        for batch in itertools.compress(self._drawn, taken):
            rows = {name: self._rows_of(members, whole) for name, whole in batch.items()}
            value, gradients = self._gradients(params, rows)
            params, state = update(gradients, state, params, value)
        return _by_name(params)

    def _rows_of(self, members: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """These shards' rows of a global batch, filled up with rows that do not count."""
        per_shard = _filled(self._job, rows).reshape(self._job.shards, -1, rows.shape[-1])
        return per_shard[members].reshape(-1, rows.shape[-1])

    def _loss(self, params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(lambda x, of: x.astype(of.dtype), params, self._first)
        return self._factor * loss(nnx.merge(self._graph, params, self._frozen), batch)[0]


def verify(job: Job) -> crossshard.Verification | None:
    """The step of the run with plain SGD on all shards and on one; ``None`` if there is one."""
    if job.shards == 1:
        return None
    batch = {name: _filled(job, rows) for name, rows in next(job.batches()).items()}
    return crossshard.verify(job.step, job.split_model, batch)


def _filled(job: Job, rows: np.ndarray) -> np.ndarray:
    """Rows, up to a number that every shard and microbatch has the same part of."""
    parts = job.shards * job.options.accumulate_steps
    return np.pad(rows, ((0, -len(rows) % parts), (0, 0)))


def _by_name(params: Any) -> Values:
    return {name: np.array(value) for name, value in params_by_name(params).items()}
