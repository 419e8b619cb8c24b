"""DQN: a replay buffer, and a target network in Flax's `TrainState`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import P

import crossshard

OPTIMIZER = optax.adam(2.5e-4)
GAMMA, TAU, ACTIONS = 0.99, 0.5, 4


class QNetwork(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(ACTIONS)(nn.relu(nn.Dense(16)(x)))


class TrainState(TrainState):
    target_params: Any


q_network = QNetwork()
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), *5 * [P("data")]), out_specs=P())
def update(q_state, obs, actions, next_obs, rewards, dones):
    q_next = q_network.apply(q_state.target_params, next_obs).max(axis=-1)
    next_q_value = rewards + (1 - dones) * GAMMA * q_next

    def mse_loss(params):
        q_pred = q_network.apply(params, obs)
        q_pred = q_pred[jnp.arange(q_pred.shape[0]), actions]
        return ((q_pred - next_q_value) ** 2).mean()

    loss_value, grads = crossshard.value_and_grad(mse_loss)(q_state.params)
    return jax.lax.pmean(loss_value, "data"), q_state.apply_gradients(grads=grads)


def replay_buffer(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        obs, next_obs = rng.normal(size=(2, 64, 6)).astype(np.float32)
        done = (rng.random(64) < 0.1).astype(np.float32)
        rewards = rng.normal(size=64).astype(np.float32)
        yield obs, rng.integers(ACTIONS, size=64), next_obs, rewards, done


def main(optimizer=OPTIMIZER, steps=6):
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    params = q_network.init(jax.random.key(0), np.ones((1, 6)))
    q_state = TrainState.create(
        apply_fn=q_network.apply, params=params, target_params=params, tx=optimizer
    )
    for number, batch in enumerate(replay_buffer(steps)):
        loss, q_state = update(q_state, *batch)
        print(f"loss {loss:.4f}")
        if number % 2 == 1:
            mixed = optax.incremental_update(q_state.params, q_state.target_params, TAU)
            q_state = q_state.replace(target_params=mixed)
    return q_state.params, q_state.target_params


if __name__ == "__main__":
    main()
