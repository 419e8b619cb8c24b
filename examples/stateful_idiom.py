"""The stateful idiom of `tf.compat.v1.tpu`: a step that updates the variables of an NNX model.

`compute_gradients` returns each shard's own gradients, so a shard can clip them. `apply_gradients`
sums them over the shards and updates the variables in place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.adam(1e-2)
MAX_NORM = 0.015  # of one shard, after compute_gradients has divided by the number of shards


class Network(nnx.Module):
    """A network that says whether a point lies in a circle."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(2, 32, rngs=rngs)
        self.out = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))[:, 0]


def data():
    """512 points of the plane, and whether each lies in a circle."""
    x = np.random.default_rng(0).uniform(-1, 1, size=(512, 2))
    return x, (x**2).sum(axis=1) < 0.5


def main(optimizer=OPTIMIZER, steps=100):
    """Train, and return the model and the number of steps that were counted."""
    model = Network(rngs=nnx.Rngs(0))
    opt = crossshard.CrossShardOptimizer(optimizer)
    global_step = nnx.Variable(jnp.array(0))

    @crossshard.shard(num_shards=jax.device_count())  # 8 on a laptop
    def train_step(model, opt, global_step, x, y):
        loss = lambda: optax.sigmoid_binary_cross_entropy(model(x), y).mean()
        pairs = opt.compute_gradients(loss, var_list=model)
        norm = optax.tree.norm([gradient for gradient, _ in pairs])
        scale = jnp.minimum(1, MAX_NORM / norm)
        opt.apply_gradients([(scale * gradient, v) for gradient, v in pairs], global_step)
        return opt.loss, norm

    x, y = data()
    for number in range(steps):
        # Arrays are split over the shards, and each shard's output is one row of the result.
        losses, norms = train_step(model, opt, global_step, x, y)
        if number % 20 == 0 or number == steps - 1:
            clipped = f"{(norms > MAX_NORM).sum()} of {len(norms)} shards clipped"
            print(f"step {number:2}   loss {losses.mean():.4f}   {clipped}")
    print(f"global_step is {global_step[...]}; the optimizer's slots are {opt.get_slot_names()}")
    return model, int(global_step[...])


if __name__ == "__main__":
    main()
