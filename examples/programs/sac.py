"""Soft actor-critic: actor, two critics and a temperature, each updated in one compiled step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import P

import crossshard

OPTIMIZER = optax.adam(1e-3)
GAMMA, TAU, ACTIONS = 0.99, 0.005, 2


class Actor(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(ACTIONS)(x), jnp.tanh(nn.Dense(ACTIONS)(x))


class Critic(nn.Module):
    @nn.compact
    def __call__(self, x, a):
        x = nn.relu(nn.Dense(32)(jnp.concatenate([x, a], -1)))
        return nn.Dense(2)(x)  # two heads


actor_net, critic_net = Actor(), Critic()


def sample(params, obs, key):
    mean, log_std = actor_net.apply(params, obs)
    noise = jax.random.normal(key, mean.shape)
    pre = mean + jnp.exp(log_std) * noise
    squash = 2 * (jnp.log(2) - pre - jax.nn.softplus(-2 * pre))  # log(1 - tanh²)
    return jnp.tanh(pre), (-0.5 * noise**2 - log_std - squash).sum(-1)


@jax.jit
def update(actor, critic, target, alpha, batch, key):
    next_key, pi_key = jax.random.split(key)
    temperature = jnp.exp(alpha.params["log_alpha"])

    next_action, next_log_pi = sample(actor.params, batch["next_obs"], next_key)
    next_q = critic_net.apply(target, batch["next_obs"], next_action).min(-1)
    goal = batch["reward"] + GAMMA * (1 - batch["done"]) * (next_q - temperature * next_log_pi)

    def critic_loss(params):
        q = critic_net.apply(params, batch["obs"], batch["action"])
        return ((q - goal[:, None]) ** 2).mean()

    def actor_loss(params):
        pi, log_pi = sample(params, batch["obs"], pi_key)
        q = critic_net.apply(critic.params, batch["obs"], pi).min(-1)
        return (temperature * log_pi - q).mean(), log_pi

    critic = critic.apply_gradients(grads=jax.grad(critic_loss)(critic.params))
    grads, log_pi = jax.grad(actor_loss, has_aux=True)(actor.params)
    actor = actor.apply_gradients(grads=grads)
    alpha_loss = lambda params: -(jnp.exp(params["log_alpha"]) * (log_pi - ACTIONS)).mean()
    alpha = alpha.apply_gradients(grads=jax.grad(alpha_loss)(alpha.params))
    target = optax.incremental_update(critic.params, target, TAU)
    return actor, critic, target, alpha


def replay_buffer(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        batch = {
            "obs": rng.normal(size=(64, 6)),
            "next_obs": rng.normal(size=(64, 6)),
            "action": rng.uniform(-1, 1, size=(64, ACTIONS)),
            "reward": rng.normal(size=64),
            "done": rng.random(64) < 0.1,
        }
        yield {name: x.astype(np.float32) for name, x in batch.items()}


def main(optimizer=OPTIMIZER, steps=4):
    key, actor_key, critic_key = jax.random.split(jax.random.key(0), 3)
    optimizer = crossshard.CrossShardOptimizer(optimizer)
    obs, action = np.ones((1, 6)), np.ones((1, ACTIONS))
    make = lambda params: TrainState.create(apply_fn=None, params=params, tx=optimizer)
    actor = make(actor_net.init(actor_key, obs))
    critic = make(critic_net.init(critic_key, obs, action))
    alpha, target = make({"log_alpha": jnp.float32(0)}), critic.params
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for batch in replay_buffer(steps):
        batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
        key, update_key = jax.random.split(key)
        actor, critic, target, alpha = update(actor, critic, target, alpha, batch, update_key)
    return actor.params, critic.params, target, alpha.params


if __name__ == "__main__":
    main()
