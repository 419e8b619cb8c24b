"""The proof: compares a run with the same steps on one shard, by JAX and Optax alone."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from examples.byte_lm.job import Job
from examples.byte_lm.loop import train_step
from examples.byte_lm.model import ByteTransformer, loss, params_of
from examples.byte_lm.optimizers import InnerOptimizer

STEPS = 5

# Tolerances for rounding, including low-precision matmuls on accelerators. Adaptive and sign-based
# optimizers magnify the rounding of small gradients; SGD does not. A missing or doubled reduction
# makes a relative difference of about 1 or more with SGD; others may hide it.
_ROUNDING = 0.1
_ROUNDING_OF_SGD = 0.02

Batch = tuple[np.ndarray, np.ndarray]
Values = dict[str, np.ndarray]


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
        model = job.new_model()
        self._first = params_of(model)
        self._definition, state = nnx.split(model, nnx.Param)
        self._variables = nnx.to_flat_state(state)
        # SUM adds up the members' losses, each a mean over an equal part of the rows.
        self._factor = job.groups.size if job.options.reduction == "sum" else 1
        self._gradients = jax.jit(jax.value_and_grad(self._loss))

    def of_run(self, after: Values) -> Comparison:
        """Compare with the run's parameters after its first steps, see ``values_of``."""
        return self._compare(self._job.inner, after, _ROUNDING)

    def of_sgd(self) -> Comparison:
        """Compare with plain SGD both ways, since it does not hide a factor."""
        inner = InnerOptimizer("sgd", optax.sgd(0.1), 0.1)
        model, optimizer = self._job.new_model(), self._job.new_optimizer(inner)
        step = train_step(self._job.shards)
        for read, wanted in self._drawn:
            jax.block_until_ready(step(model, optimizer, read, wanted))
        return self._compare(inner, values_of(model), _ROUNDING_OF_SGD)

    def _compare(self, inner: InnerOptimizer, after: Values, rounding: float) -> Comparison:
        before = _copies(self._first)
        largest, where, change = -1.0, "", 0.0
        differences = changes = 0.0
        for members in self._job.groups.members:
            alone = self._alone(inner, np.array(members))
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
            optimizer=inner.name,
            steps=len(self._drawn),
            largest_difference=largest,
            where=where,
            largest_change=change,
            relative=relative,
            same=relative < rounding,
        )

    def _alone(self, inner: InnerOptimizer, members: np.ndarray) -> Values:
        """The parameters after training on one shard with the rows of these shards."""
        transformation = optax.with_extra_args_support(inner.transformation)

        @jax.jit
        def update(gradients: Any, state: Any, params: Any, value: jax.Array) -> tuple[Any, Any]:
            updates, state = transformation.update(gradients, state, params, value=value)
            return optax.apply_updates(params, updates), state

        params, state = self._first, transformation.init(self._first)
        for read, wanted in self._drawn:
            value, gradients = self._gradients(
                params, self._rows_of(members, read), self._rows_of(members, wanted)
            )
            params, state = update(gradients, state, params, value)
        return _copies(params)

    def _rows_of(self, members: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """These shards' rows of a global batch."""
        per_shard = rows.reshape(self._job.shards, -1, rows.shape[-1])
        return per_shard[members].reshape(-1, rows.shape[-1])

    def _loss(self, params: dict[str, jax.Array], read: Any, wanted: Any) -> jax.Array:
        values = zip(self._variables, params.values(), strict=True)
        state = nnx.from_flat_state([(path, old.replace(new)) for (path, old), new in values])
        return self._factor * loss(nnx.merge(self._definition, state), read, wanted)


def values_of(model: ByteTransformer) -> Values:
    """Copies of the parameters that ``params_of`` returns."""
    return _copies(params_of(model))


def _copies(params: dict[str, jax.Array]) -> Values:
    return {name: np.array(value) for name, value in params.items()}
