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


def compare(
    job: Job, batches: Sequence[Batch], after: Values, skipped: Sequence[bool]
) -> Comparison:
    """Compare a run's parameters with those of one shard that takes the same steps.

    Args:
      job: the run.
      batches: those of its first steps.
      after: the run's parameters after them.
      skipped: which of these steps the run has skipped.
    """
    options = job.options
    parts: Any = nnx.split(job.first_model, options.trains, ...)
    graph, first, frozen = parts
    # SUM adds up the shards' losses, each a mean over an equal part of the rows.
    parts = options.virtual_shards or job.shards
    factor = parts if options.reduction == "sum" else 1
    transformation = optax.with_extra_args_support(job.inner.transformation)

    def cost(params: Any, batch: Batch) -> jax.Array:
        params = jax.tree.map(lambda x, of: x.astype(of.dtype), params, first)
        return factor * loss(nnx.merge(graph, params, frozen), batch)[0]

    @jax.jit
    def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(cost)(params, batch)
        updates, state = transformation.update(gradients, state, params, value=value)
        return optax.apply_updates(params, updates), state

    params = optax.tree.cast(first, options.master_dtype)
    before, state = _by_name(params), transformation.init(params)
    for batch, is_skipped in zip(batches, skipped, strict=True):
        if not is_skipped:
            params, state = step(params, state, batch)
    alone = _by_name(params)
    apart = {name: after[name].astype(np.float64) - x for name, x in alone.items()}
    moved = {name: x.astype(np.float64) - before[name] for name, x in alone.items()}
    where = max(apart, key=lambda name: np.abs(apart[name]).max())
    changes = _norm(moved)
    relative = _norm(apart) / changes if changes else float(_norm(apart) > 0)
    return Comparison(
        optimizer=options.optimizer,
        steps=len(batches),
        largest_difference=float(np.abs(apart[where]).max()),
        where=where,
        largest_change=max(float(np.abs(each).max()) for each in moved.values()),
        relative=relative,
        same=relative < _ROUNDING,
    )


def _norm(values: Values) -> float:
    return math.sqrt(sum(float(np.square(each).sum()) for each in values.values()))


def verify(job: Job) -> crossshard.tools.Verification | None:
    """The step of the run with plain SGD on all shards and on one; ``None`` if there is one."""
    if job.shards == 1:
        return None
    parts = job.options.pieces(job.shards)
    batch = {name: filled(rows, parts) for name, rows in next(job.batches()).items()}
    return crossshard.verify(job.step, job.first_model, batch)


def _by_name(params: Any) -> Values:
    return {name: np.array(value) for name, value in params_by_name(params).items()}
