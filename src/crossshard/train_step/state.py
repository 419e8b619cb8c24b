"""TrainState: all that a step carries from one batch to the next."""

import dataclasses
from typing import Any

import jax

from crossshard.train_step.models import Skeleton


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, step count and random key: a pytree of arrays on the mesh.

    A step takes it and returns the next; the buffers of the one taken are used again, so it must
    not be read afterwards.

    Attributes:
      step: int32[], how many steps were taken.
      params: the parameters, whole on every shard; ``[shards, …]`` under groups.
      opt_state: a ``CrossShardState``: the states of the stages and, as ``inner_state``, that of
        the wrapped optimizer; in parts over the shards where the weight update is sharded, and
        ``[shards, …]`` under groups.
      model_state: the arrays of the model besides its parameters. Of an NNX module ``[shards, …]``,
        since each shard keeps statistics and random streams of its own.
      rng: uint32[…], the data of the key from which each step and shard draws its own: raw, since
        typed keys slow down every call.
      skeleton: what of the model is not an array.
      rng_impl: what kind of key it is.
      grouped: whether groups have parameters of their own.

    >>> import jax.numpy as jnp, optax
    >>> from crossshard import make_train_step
    >>> step = make_train_step(lambda w, x: (w * x).mean(), optax.sgd(0.1), num_shards=1)
    >>> state = step.init(jnp.float32(3))
    >>> int(state.step), float(state.params)
    (0, 3.0)
    """

    step: Any
    params: Any
    opt_state: Any
    model_state: Any
    rng: Any
    skeleton: Skeleton = dataclasses.field(metadata={"static": True})
    rng_impl: Any = dataclasses.field(metadata={"static": True})
    grouped: bool = dataclasses.field(metadata={"static": True})
