"""Parameters in parts: stacked layers in a `lax.scan`, each gathered where the loss uses it."""

import jax
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZER = optax.sgd(0.2, momentum=0.9)
WIDTH, LAYERS, WORDS, LENGTH = 256, 4, 64, 16


def data():
    """256 sequences: each word is the one before plus 3, of 64."""
    first = np.random.default_rng(0).integers(0, WORDS, size=(256, 1))
    return (first + 3 * np.arange(LENGTH + 1)) % WORDS


def initial_params():
    """Layers with an axis for their number, as a `lax.scan` takes them."""
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5
    return {
        "words": normal(keys[0], WORDS, WIDTH),
        "up": normal(keys[1], LAYERS, WIDTH, 2 * WIDTH),
        "down": normal(keys[2], LAYERS, 2 * WIDTH, WIDTH),
    }


@jax.checkpoint
def block(x, layer):
    """One layer; in the backward pass it is computed again, and its parameters gathered again."""
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"], None


def loss_fn(params, tokens):
    """The mean cross-entropy of the next word, on one shard's part of the batch."""
    x = params["words"][tokens[:, :-1]]
    x, _ = jax.lax.scan(block, x, {name: params[name] for name in ("up", "down")})
    logits = x @ params["words"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def main(optimizer=OPTIMIZER, steps=30):
    """Train, and return the parameters."""
    step = crossshard.make_train_step(loss_fn, optimizer, params="sharded")
    state = step.init(initial_params())
    batch = data()
    for number in range(steps):
        state, metrics = step(state, batch)
        if number % 10 == 0 or number == steps - 1:
            print(f"step {number:2}   loss {metrics['loss']:.4f}")
    print(step.describe())  # where each parameter is gathered, how often, and in what
    up = state.params["up"]
    print(f"up is {up.shape}, and a device has {up.addressable_data(0).shape} of it")
    return step.model(state)


if __name__ == "__main__":
    main()
