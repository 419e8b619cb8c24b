"""A stage of one's own: annealed noise on each shard's gradient (Neelakantan et al. 2015)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    placement = crossshard.PER_SHARD

    def init(self, params: Any) -> NoiseState:
        return NoiseState(jax.random.key_data(jax.random.key(self.seed)), jnp.int32(0))

    def update(self, gradients, state, environment):
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.count)
        leaves, tree = jax.tree.flatten(gradients.values)
        keys = jax.random.split(jax.random.fold_in(key, environment.shards.index()), len(leaves))
        scale = jnp.sqrt(self.eta / (1 + state.count) ** self.gamma)
        noise = [jax.random.normal(k, g.shape, g.dtype) for k, g in zip(keys, leaves, strict=True)]
        noisy = [g + scale.astype(g.dtype) * n for g, n in zip(leaves, noise, strict=True)]
        return gradients.replace(values=tree.unflatten(noisy)), NoiseState(
            state.key, state.count + 1
        )
