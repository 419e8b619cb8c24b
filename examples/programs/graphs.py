"""Graph classification: message passing on padded graphs, labels that are missing are masked."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.adam(1e-3)
NODES, EDGES = 8, 16


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, nodes, edges, senders, receivers, node_mask):
        # Of one graph; its padding edges lead from its last node, which is padding too, to itself.
        h = nn.Dense(16)(nodes)
        for _ in range(2):
            messages = nn.relu(nn.Dense(16)(jnp.concatenate([h[senders], edges], -1)))
            received = jax.ops.segment_sum(messages, receivers, NODES)
            h = nn.LayerNorm()(h + nn.relu(nn.Dense(16)(jnp.concatenate([h, received], -1))))
        pooled = (h * node_mask[:, None]).sum(0) / node_mask.sum()
        return nn.Dense(5)(pooled)


net = GraphNet()


def loss_fn(params, batch):
    run = jax.vmap(lambda *graph: net.apply({"params": params}, *graph))
    logits = run(*(batch[k] for k in ("nodes", "edges", "senders", "receivers", "node_mask")))
    valid = ~jnp.isnan(batch["labels"])  # not every graph has every label
    labels = jnp.where(valid, batch["labels"], 0)
    losses = optax.sigmoid_binary_cross_entropy(logits, labels)
    total, count = jnp.sum(jnp.where(valid, losses, 0)), jnp.sum(valid)
    return crossshard.Mean(total, count)


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        size = rng.integers(3, NODES, size=(32, 1))
        ends = rng.integers(size[..., None], size=(32, EDGES, 2))
        real = np.arange(EDGES) < 2 * size
        labels = rng.integers(2, size=(32, 5)).astype(np.float32)
        yield {
            "nodes": rng.normal(size=(32, NODES, 4)).astype(np.float32),
            "edges": rng.normal(size=(32, EDGES, 3)).astype(np.float32),
            "senders": np.where(real, ends[..., 0], NODES - 1),
            "receivers": np.where(real, ends[..., 1], NODES - 1),
            "node_mask": (np.arange(NODES) < size).astype(np.float32),
            "labels": np.where(rng.random((32, 5)) < np.arange(32)[:, None] / 40, np.nan, labels),
        }


def main(optimizer=OPTIMIZER, steps=4):
    first = [x[0] for x in next(data(1)).values()]
    params = net.init(jax.random.key(0), *first[:-1])["params"]
    step = crossshard.make_train_step(loss_fn, optimizer)
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
