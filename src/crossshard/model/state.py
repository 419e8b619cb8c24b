"""TrainState: the state of a step between batches."""

import dataclasses
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, UInt32

from crossshard import _check
from crossshard._annotations import PyTree
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.model.models import Skeleton
from crossshard.pipeline.stage import CrossShardState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, step count and random key: a pytree of arrays on the mesh.

    A step takes a state and returns the next. The state is donated: do not read it afterwards.

    Attributes:
      step: int32[], the number of steps taken.
      params: the parameters, replicated; ``[shards, …]`` with groups; with ``params="sharded"``
        split over the shards, in their own shapes.
      opt_state: a ``CrossShardState``: the states of the stages and, as ``inner_state``, that of
        the inner optimizer; partitioned over the shards if the weight update is sharded, and
        ``[shards, …]`` with groups.
      frozen: the arrays of the model that stay unchanged: the parameters that ``wrt`` leaves out,
        and the arrays of a pytree that are not floating; replicated, except for large parameters
        with ``params="sharded"``.
      model_state: the other state of the model: the variables of an NNX module, ``[shards, …]``,
        since each shard keeps its own statistics and random streams; or the state that the loss
        returns.
      rng: uint32[…], the data of the key from which each step and shard derives its own: raw, since
        typed keys slow down every call.
      skeleton: the static part of the model.
      rng_impl: the implementation of the key.
      grouped: whether each group has its own parameters.
      other_axes: the spec on the other axes of the mesh of each array of ``params``, ``frozen`` and
        ``model_state``, in this order; empty if none is split over these axes.
      per_shard: whether each shard has its own ``model_state``.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> state = step.init(jnp.float32(3))
    >>> int(state.step), float(state.params)
    (0, 3.0)
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: CrossShardState
    frozen: PyTree
    model_state: PyTree
    rng: UInt32[Array, " ..."]
    skeleton: Skeleton = dataclasses.field(metadata={"static": True})
    rng_impl: Hashable = dataclasses.field(metadata={"static": True})
    grouped: bool = dataclasses.field(metadata={"static": True})
    other_axes: tuple[PartitionSpec, ...] = dataclasses.field(default=(), metadata={"static": True})
    per_shard: bool = dataclasses.field(default=False, metadata={"static": True})


def names_of(state: TrainState) -> tuple[str, ...]:
    """Return the name of each array of a state, such as ``"opt_state.inner_state[0].mu"``."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    return tuple(
        jax.tree_util.keystr(path).removeprefix(".").removesuffix(".value") for path in paths
    )


def check_state(state: Any, *, or_types: bool = True) -> None:
    """Raise unless ``state`` is a state, of arrays that JAX can hold.

    Args:
      state: the argument to check.
      or_types: whether it may be the types of a state, to compile for.

    Raises:
      ArgumentError: it was donated.
      ArgumentTypeError: it is something else.
    """
    check_is_state(state)
    _check.arrays("state", state, or_types=or_types)


def check_is_state(state: Any) -> None:
    """Raise unless ``state`` is a state that has not been donated; takes about a microsecond.

    Raises: as ``check_state``.
    """
    if not isinstance(state, TrainState):
        raise ArgumentTypeError(
            f"A step takes the state that init(params) or the step before returned; got "
            f"{type(state).__name__}."
        )
    # Types and traced values have no buffers.
    count = state.step
    is_int = isinstance(count, int | np.integer) and not isinstance(count, bool)
    if not is_int and (getattr(count, "shape", None) != () or count.dtype != np.int32):
        raise ArgumentTypeError(
            f"state.step is the number of steps, int32[]; got {_check.described(count)}. A state "
            f"is what init(params) or a step returned, with arrays of the same types."
        )
    has_buffer = isinstance(count, jax.Array) and not isinstance(count, jax.core.Tracer)
    if has_buffer and count.is_deleted():
        raise ArgumentError(
            "This state has been used: it was donated to a step. Use the state that the step "
            "returned: state, metrics = step(state, batch)."
        )
