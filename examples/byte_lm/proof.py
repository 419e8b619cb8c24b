"""The proof: compares a run with the same steps on one shard, by JAX and Optax alone.

Adaptive optimizers hide a wrong factor, so ``crossshard.verify`` looks at a step with SGD.
"""

import dataclasses
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
from examples.byte_lm.processes import filled
from examples.byte_lm.training import Values

STEPS = 5

# A tolerance for rounding, including low-precision matmuls on accelerators. Adaptive and sign-based
# optimizers magnify the rounding of small gradients.
_ROUNDING = 0.1

Batch = dict[str, np.ndarray]
# For each step whether each group skipped it; ``None`` where no step can be skipped.
Skipped = Sequence[Sequence[float] | np.ndarray | None]


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


def compare(job: Job, drawn: Sequence[Batch], after: Values, skipped: Skipped) -> Comparison:
    """Compare a run's parameters with those of one shard that takes the same steps.

    Args:
      job: the run.
      drawn: the batches of its first steps.
      after: the run's parameters after them.
      skipped: which of these steps the run has skipped.
    """
    options = job.options
    parts: Any = nnx.split(job.first_model, options.trains, ...)
    graph, first, frozen = parts
    # SUM adds up the members' losses, each a mean over an equal part of the rows.
    factor = len(job.groups[0]) if options.reduction == "sum" else 1
    transformation = optax.with_extra_args_support(job.inner.transformation)

    def cost(params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(lambda x, of: x.astype(of.dtype), params, first)
        return factor * loss(nnx.merge(graph, params, frozen), batch)[0]

    gradients_of = jax.jit(jax.value_and_grad(cost))

    @jax.jit
    def update(gradients: Any, state: Any, params: Any, value: jax.Array) -> tuple[Any, Any]:
        updates, state = transformation.update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), state

    start = optax.tree.cast(first, options.master_dtype)
    before = _by_name(start)
    largest, where, change = -1.0, "", 0.0
    differences = changes = 0.0
    for group, members in enumerate(job.groups):
        params, state = start, transformation.init(start)
        for batch, left_out in zip(drawn, skipped, strict=True):
            if left_out is None or not left_out[group]:
                rows = {name: _rows_of(job, members, whole) for name, whole in batch.items()}
                value, gradients = gradients_of(params, rows)
                params, state = update(gradients, state, params, value)
        for path, alone in _by_name(params).items():
            many = after[path]
            # [shards, …] with groups: check all members, since they must agree.
            found = many[list(members)] if many.ndim > alone.ndim else many[None]
            apart = found.astype(np.float64) - alone
            moved = alone.astype(np.float64) - before[path]
            if np.abs(apart).max() > largest:
                largest, where = float(np.abs(apart).max()), path
            change = max(change, float(np.abs(moved).max()))
            differences += float(np.square(apart).sum()) / len(found)
            changes += float(np.square(moved).sum())
    relative = math.sqrt(differences / changes) if changes else float(differences > 0)
    return Comparison(
        optimizer=job.inner.name,
        steps=len(drawn),
        largest_difference=largest,
        where=where,
        largest_change=change,
        relative=relative,
        same=relative < _ROUNDING,
    )


def verify(job: Job) -> crossshard.tools.Verification | None:
    """The step of the run with plain SGD on all shards and on one; ``None`` if there is one."""
    if job.shards == 1:
        return None
    batch = {name: filled(rows, _parts(job)) for name, rows in next(job.batches()).items()}
    return crossshard.verify(job.step, job.split_model, batch)


def _parts(job: Job) -> int:
    return job.shards * job.options.accumulate_steps


def _rows_of(job: Job, members: Sequence[int], rows: np.ndarray) -> np.ndarray:
    """These shards' rows of a global batch, filled up with rows that do not count."""
    per_shard = filled(rows, _parts(job)).reshape(job.shards, -1, rows.shape[-1])
    return per_shard[list(members)].reshape(-1, rows.shape[-1])


def _by_name(params: Any) -> Values:
    return {name: np.array(value) for name, value in params_by_name(params).items()}
