"""The program of tf1_optimization.py in crossshard: eight shards step as one device does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)

SHARDS, STEPS, WARMUP = 8, 20, 5


def scale_by_adam_without_correction(b1=0.9, b2=0.999, eps=1e-6):
    """Adam's direction, its moments as they are."""

    def init(params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return {"m": zeros(), "v": zeros()}

    def update(gradients, state, params=None):
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state["m"], gradients)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state["v"], gradients)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), m, v), {"m": m, "v": v}

    return optax.GradientTransformation(init, update)


def adam_weight_decay(learning_rate, weight_decay_rate=0.01, exclude=("layer_norm", "bias")):
    """The optimizer: `AdamWeightDecayOptimizer` in three parts."""

    def decays(params):
        name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
        is_in = lambda path, _: not any(part in name(path) for part in exclude)
        return jax.tree.map_with_path(is_in, params)

    return optax.chain(
        scale_by_adam_without_correction(),
        optax.add_decayed_weights(weight_decay_rate, mask=decays),
        optax.scale_by_learning_rate(learning_rate),
    )


def warmup_and_decay(init_lr, num_train_steps, num_warmup_steps):
    """The learning rate of a step: it rises from 0, then goes on along a line that ends at 0."""
    decay = optax.linear_schedule(init_lr, 0.0, num_train_steps)

    def rate(step):
        rising = init_lr * step / num_warmup_steps
        return jnp.where(step < num_warmup_steps, rising, decay(step))

    return rate


def create_optimizer(init_lr, num_train_steps, num_warmup_steps, make=adam_weight_decay):
    """The optimizer with its schedule; it clips what it gets, the gradient of the whole batch."""
    rate = warmup_and_decay(init_lr, num_train_steps, num_warmup_steps)
    return crossshard.CrossShardOptimizer(optax.chain(optax.clip_by_global_norm(1.0), make(rate)))


def data():
    """64 rows of 4 numbers, and what to say of each; rows differ in size from shard to shard."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)) * np.repeat(np.linspace(0.5, 2, 8), 8)[:, None]
    return x.astype(np.float32), (3 * np.sin(x[:, 0]) + x[:, 1]).astype(np.float32)


class Network(nnx.Module):
    """A layer, a norm, a layer."""

    def __init__(self):
        rng, rngs = np.random.default_rng(1), nnx.Rngs(0)
        self.dense = nnx.Linear(4, 8, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(8, epsilon=1e-6, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)
        for layer in (self.dense, self.out):
            for value in (layer.kernel, layer.bias):
                value[...] = jnp.float32(0.5 * rng.normal(size=value.shape))

    def __call__(self, x):
        return self.out(self.layer_norm(jnp.tanh(self.dense(x))))[:, 0]


@crossshard.shard(num_shards=SHARDS)
def train_step(model, opt, global_step, x, y):
    """One step of a shard on its rows."""
    loss = lambda: jnp.mean((model(x) - y) ** 2)
    opt.apply_gradients(opt.compute_gradients(loss, var_list=model), global_step)
    return opt.loss


def train(opt, train_step=train_step):
    """Twenty steps on the same 64 rows: the losses, and the model at the end."""
    model, global_step = Network(), nnx.Variable(jnp.array(0))
    losses = [train_step(model, opt, global_step, *data()).mean().item() for _ in range(STEPS)]
    assert global_step[...] == STEPS
    return losses, model


if __name__ == "__main__":
    losses, _ = train(create_optimizer(0.05, STEPS, WARMUP))
    print(f"loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end")
