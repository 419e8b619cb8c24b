"""CLIP: a contrastive loss compares rows, so that it is given the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.adam(5e-3)
ROWS, SIZE, WIDTH = 64, 12, 32
SHAPES, PLACES, SHADES = 4, 9, 4  # "dark cross, top left": 144 captions of three words


class Towers(nnx.Module):
    """One tower for images and one for captions (Radford et al. 2021, arXiv 2103.00020)."""

    def __init__(self, rngs):
        self.pixels = nnx.Linear(SIZE * SIZE, 256, rngs=rngs)
        self.image = nnx.Linear(256, WIDTH, rngs=rngs)
        self.words = nnx.Embed(SHAPES + PLACES + SHADES, 64, rngs=rngs)
        self.text = nnx.Linear(64, WIDTH, rngs=rngs)

    def __call__(self, batch):
        unit = lambda x: x / jnp.linalg.norm(x, axis=1, keepdims=True)
        images = self.image(nnx.relu(self.pixels(batch["image"])))
        return unit(images), unit(self.text(nnx.relu(self.words(batch["text"]).sum(1))))


def loss_fn(towers, batch):
    """Which caption is whose, and which image: each row is compared with all rows."""
    images, texts = towers(batch)
    logits = images @ texts.T / 0.1
    own = jnp.arange(len(images))
    ask = optax.softmax_cross_entropy_with_integer_labels
    return (ask(logits, own).mean() + ask(logits.T, own).mean()) / 2


def data(rows, seed):
    """Images of shapes, and their captions; 144 rows are all captions, each once."""
    rng = np.random.default_rng(seed)
    caption = rng.permutation(SHAPES * PLACES * SHADES)[:rows]
    shape, place, shade = np.unravel_index(caption, (SHAPES, PLACES, SHADES))
    down, along = np.indices((4, 4)) - 1.5
    forms = [np.hypot(down, along) < 1.6, abs(down) > 1, abs(along) > 1, abs(down) == abs(along)]
    image = rng.normal(0, 0.2, size=(rows, SIZE, SIZE)).astype(np.float32)
    for each, s, p, b in zip(image, shape, place, shade, strict=True):
        corner = each[4 * (p // 3) :, 4 * (p % 3) :][:4, :4]
        corner += forms[s] * (0.5 + 0.5 * b)
    text = np.stack([shape, SHAPES + place, SHAPES + PLACES + shade], axis=1)
    return {"image": image.reshape(rows, -1), "text": text}


def recall(towers):
    """The percentage of new images whose own caption is nearest of all 144."""
    images, texts = towers(data(144, seed=0))
    return 100 * float(((images @ texts.T).argmax(1) == jnp.arange(144)).mean())


def train(shards, loss_over, optimizer, steps):
    """The parameters, and the recall before each tenth step and at the end."""
    step = crossshard.make_train_step(loss_fn, optimizer, num_shards=shards, loss_over=loss_over)
    state, curve = step.init(Towers(nnx.Rngs(0))), []
    for number in range(steps + 1):
        if number % 10 == 0 or number == steps:
            curve.append((number, recall(step.model(state))))
        if number < steps:
            state, _ = step(state, data(ROWS, seed=1 + number))
    return jax.device_get(nnx.state(step.model(state), nnx.Param)), curve


def main(optimizer=OPTIMIZER, steps=60, picture=None):
    """The first try, then the step of one device on eight shards."""
    try:
        train(8, "rows", optimizer, steps)
    except crossshard.errors.LossError as error:
        said = str(error)
        print(f"LossError: {said.split(' (')[0]}.\n{said.split('. ')[-1]}\n")
    runs = {"one device": (1, "batch"), '"batch"': (8, "batch"), '"shard"': (8, "shard")}
    found = {name: train(*run, optimizer, steps) for name, run in runs.items()}
    one, eight, _ = (jax.tree.leaves(params) for params, _ in found.values())
    for other, wanted in zip(eight, one, strict=True):
        np.testing.assert_allclose(other, wanted, atol=1e-4)
    curves = {name: curve for name, (_, curve) in found.items()}
    print("recall of captions (%)   eight shards, loss_over=")
    print("step  " + "  ".join(f"{name:>10}" for name in curves))
    for (number, a), (_, b), (_, c) in zip(*curves.values(), strict=True):
        print(f"{number:4}  {a:10.1f}  {b:10.1f}  {c:10.1f}")
    if picture:
        from _picture import lines

        named = {f"eight shards, loss_over={name}": curves[name] for name in ('"batch"', '"shard"')}
        named = {"one device": curves["one device"], **named}
        lines(picture, ("step", "recall among 144 captions (%)"), named, behind=["one device"])


if __name__ == "__main__":
    main()
