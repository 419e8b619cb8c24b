"""LoRA on a frozen base: `wrt` chooses what is trained; nothing else is differentiated or sent."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.adam(1e-2)
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))


class Network(nnx.Module):
    """Three layers with an adapter of rank 2 each (Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, rngs):
        layer = lambda i, o: nnx.LoRALinear(i, o, lora_rank=2, rngs=rngs)
        self.layers = nnx.List([layer(1, 256), layer(256, 256), layer(256, 1)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def data(function=np.sin):
    """512 numbers and the function's values."""
    x = np.random.default_rng(0).uniform(-3, 3, size=(512, 1)).astype(np.float32)
    return {"x": x, "y": function(x)}


def loss_fn(model, batch):
    """The mean squared error on one shard's part of the batch."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(model, batch, wrt, optimizer, steps, shards=8):
    """The trained model, the last loss, and what a device holds and sends."""
    step = crossshard.make_train_step(
        loss_fn, optimizer, num_shards=shards, wrt=wrt, weight_update="replicated"
    )
    state = step.init(model)
    nbytes = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    report = crossshard.inspect(step.lower(state, batch))
    costs = [nbytes(tree) for tree in (state.params, state.frozen, state.opt_state)]
    costs.append(report.bytes_sent)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return step.model(state), float(metrics["loss"]), costs


def arrays(model):
    """All parameters, base and adapters."""
    return jax.device_get(jax.tree.leaves(nnx.state(model, nnx.Param)))


def main(optimizer=OPTIMIZER, steps=200, picture=None):
    """Train a base on a sine, then move it to another one: in whole, and by its adapters."""
    base, _, _ = train(Network(nnx.Rngs(0)), data(), BASE, optax.adam(3e-3), 3 * steps)
    moved = lambda x: np.sin(x + 1) + 0.5
    models = {"the base alone": base}
    print("trained       trained    frozen     optimizer state  sent per step  loss")
    for name, wrt in {"all": nnx.Param, "the adapters": nnx.LoRAParam}.items():
        model, loss, costs = train(base, data(moved), wrt, optimizer, steps)
        models[f"trained: {name}"] = model
        cells = [f"{each / 1000:.1f} kB" for each in costs]
        print("{:12}  {:9}  {:9}  {:15}  {:13}  {:.5f}".format(name, *cells, loss))

    # The same as one device, and the base is what it was.
    few = [train(base, data(moved), wrt, optimizer, 20, shards)[0] for shards in (1, 8)]
    for one, other in zip(*map(arrays, few), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    frozen = lambda model: jax.device_get(jax.tree.leaves(nnx.state(model, BASE)))
    for before, after in zip(frozen(base), frozen(models["trained: the adapters"]), strict=True):
        np.testing.assert_array_equal(before, after)
    print("after 20 steps, 8 shards and 1 device have the same adapters; the base has not changed")
    if picture:
        from _picture import lines

        x = np.linspace(-3, 3, 200, dtype=np.float32)[:, None]
        curves = {"the target": moved, **models}
        points = {name: zip(x, np.asarray(f(x)), strict=True) for name, f in curves.items()}
        lines(picture, ("x", "y"), points, behind=["the target"], bottom=None)


if __name__ == "__main__":
    main()
