"""A stage of one's own: annealed noise on each shard's gradient (Neelakantan et al. 2015)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import crossshard


class NoiseState(NamedTuple):
    """The state of ``GradientNoise``, one per shard."""

    key: jax.Array  # uint32[2]
    count: jax.Array  # int32[]


@dataclasses.dataclass(frozen=True)
class GradientNoise(crossshard.Stage):
    """Adds normal noise of variance ``eta / (1 + count) ** gamma``, another on each shard."""

    eta: float
    gamma: float = 0.55
    seed: int = 0
    placement = crossshard.pipeline.PER_SHARD

    def init(self, params: Any) -> NoiseState:
        return NoiseState(jax.random.key_data(jax.random.key(self.seed)), jnp.int32(0))

    def update(self, gradients, state, context):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count)
        key = jax.random.fold_in(key, context.shards.index())
        noise = optax.tree.random_like(key, gradients.values)
        scale = jnp.sqrt(self.eta / (1 + state.count) ** self.gamma)
        noisy = jax.tree.map(lambda g, n: g + scale.astype(g.dtype) * n, gradients.values, noise)
        return gradients.replace(values=noisy), state._replace(count=state.count + 1)
