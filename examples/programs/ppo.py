"""PPO: a clipped policy loss over epochs and minibatches, advantages normalised over each."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))
CLIP, VALUE, ENTROPY = 0.2, 0.5, 0.01


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(32)(x))
        x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(4)(x), nn.Dense(1)(x)[:, 0]


agent = ActorCritic()


def ppo_loss(params, batch):
    logits, value = agent.apply({"params": params}, batch["obs"])
    logp_all = jax.nn.log_softmax(logits)
    newlogprob = jnp.take_along_axis(logp_all, batch["action"][:, None], 1)[:, 0]
    ratio = jnp.exp(newlogprob - batch["logprob"])

    advantage = batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
    pg_loss = jnp.maximum(-advantage * ratio, -advantage * clipped).mean()
    v_loss = 0.5 * ((value - batch["return"]) ** 2).mean()
    entropy_loss = -(jnp.exp(logp_all) * logp_all).sum(-1).mean()
    return pg_loss - ENTROPY * entropy_loss + VALUE * v_loss


def rollout(rng):
    """What 128 steps of some environments would give."""
    return {
        "obs": rng.normal(size=(128, 6)).astype(np.float32),
        "action": rng.integers(4, size=128),
        "logprob": np.log(rng.uniform(0.1, 0.5, size=128)).astype(np.float32),
        "advantage": rng.normal(size=128).astype(np.float32) * 3 + 1,
        "return": rng.normal(size=128).astype(np.float32),
    }


def minibatches(storage, rng, number=4):
    for rows in np.split(rng.permutation(128), number):
        yield {name: values[rows] for name, values in storage.items()}


def main(optimizer=OPTIMIZER, iterations=2, epochs=2):
    rng = np.random.default_rng(0)
    params = agent.init(jax.random.key(0), np.ones((1, 6)))["params"]
    step = crossshard.make_train_step(ppo_loss, optimizer, loss_over="batch")
    state = step.init(params)

    for _ in range(iterations):
        storage = rollout(rng)
        for _ in range(epochs):
            for batch in minibatches(storage, rng):
                state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
