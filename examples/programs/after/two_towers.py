"""A recommender of two towers: the other items of the batch are each user's negatives."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

OPTIMIZER = optax.adagrad(0.05)


@hk.without_apply_rng
@hk.transform
def towers(users, items):
    embed = lambda ids, n, name: hk.nets.MLP([32, 16], name=name)(hk.Embed(n, 16)(ids))
    return embed(users, 100, "query"), embed(items, 50, "candidate")


def loss_fn(params, batch):
    queries, candidates = towers.apply(params, batch["user"], batch["item"])
    scores = queries @ candidates.T - jnp.log(batch["frequency"])  # sampling is not uniform
    same = (batch["item"][:, None] == batch["item"]) & ~jnp.eye(len(scores), dtype=bool)
    scores = jnp.where(same, -1e9, scores)  # an item that is there twice is no negative
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def data(steps):
    rng = np.random.default_rng(0)
    frequency = rng.dirichlet(np.ones(50)).astype(np.float32)
    for _ in range(steps):
        item = rng.choice(50, size=32, p=frequency / frequency.sum())
        yield {"user": rng.integers(100, size=32), "item": item, "frequency": frequency[item]}


def main(optimizer=OPTIMIZER, steps=5):
    first = next(data(1))
    params = towers.init(jax.random.key(0), first["user"], first["item"])
    step = crossshard.make_train_step(loss_fn, optimizer, loss_over="batch")
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
