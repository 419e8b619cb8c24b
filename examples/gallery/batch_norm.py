"""Batch norm: with `loss_over="batch"` eight shards have the statistics of one device."""

import jax
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.sgd(0.05, momentum=0.9)
ROWS, SIZE, SHAPES = 64, 12, ("disc", "ring", "square", "cross")


class Network(nnx.Module):
    """Two convolutions, each with a batch norm, and a linear layer on their mean."""

    def __init__(self, rngs):
        conv = lambda i, o: nnx.Conv(i, o, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.convs = nnx.List([conv(1, 16), conv(16, 32)])
        norm = lambda width: nnx.BatchNorm(width, momentum=0.8, rngs=rngs)
        self.norms = nnx.List([norm(16), norm(32)])
        self.out = nnx.Linear(32, len(SHAPES), rngs=rngs)

    def __call__(self, x, train):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x), use_running_average=not train))
        return self.out(x.mean((1, 2)))


def loss_fn(model, batch):
    """The mean cross-entropy. Batch norm takes its means over the rows that it is given."""
    logits = model(batch["x"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


def correct(model, batch):
    """Whether each image is classified right, with the running statistics."""
    return model(batch["x"], train=False).argmax(-1) == batch["label"]


def data(rows, seed):
    """Noisy shapes at random places. They come in order, one folder after the other."""
    rng = np.random.default_rng(seed)
    label = np.sort(rng.integers(len(SHAPES), size=rows))
    middle = rng.uniform(4, SIZE - 5, size=(2, rows, 1, 1))
    down, along = abs(np.arange(SIZE)[:, None] - middle[0]), abs(np.arange(SIZE) - middle[1])
    far, near, radius = np.maximum(down, along), np.minimum(down, along), np.hypot(down, along)
    shapes = radius < 3.2, abs(radius - 3) < 0.8, far < 3, (near < 0.8) & (far < 4)
    image = np.choose(label[:, None, None], shapes) + rng.normal(0, 0.4, size=radius.shape)
    return {"x": image[..., None].astype(np.float32), "label": label}


def train(shards, loss_over, optimizer, steps):
    """The parameters, the last loss, and the held-out accuracy after each fifth step."""
    step = crossshard.make_train_step(loss_fn, optimizer, num_shards=shards, loss_over=loss_over)
    state = step.init(Network(nnx.Rngs(0)))
    held_out, curve = [data(512, seed=0)], []
    for number in range(1, steps + 1):
        state, metrics = step(state, data(ROWS, seed=number))
        if number % 5 == 0 or number == steps:
            curve.append((number, 100 * float(step.evaluate(state, held_out, correct))))
    params = jax.device_get(nnx.state(step.model(state), nnx.Param))
    return params, float(metrics["loss"]), curve


def main(optimizer=OPTIMIZER, steps=60, picture=None):
    """Train on 1, 2, 4 and 8 shards, and print what comes out."""
    print("shards  loss_over  loss    accuracy  largest difference of a parameter from one device")
    curves = {}
    for shards, over in [*((n, "batch") for n in (1, 2, 4, 8)), *((n, "shard") for n in (2, 4, 8))]:
        params, loss, curve = train(shards, over, optimizer, steps)
        curves[shards, over] = curve
        if shards == 1:
            one_device = params
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(one_device), strict=True)
        apart = max(abs(found - wanted).max() for found, wanted in pairs)
        assert (apart < 1e-4) == (over == "batch"), apart
        shown = "below 0.0001" if over == "batch" else f"{apart:.2f}"
        print(f"{shards:<6}  {over:<9}  {loss:.4f}  {curve[-1][1]:4.1f} %    {shown}")
    if picture:
        from _picture import lines

        names = "one device", 'eight shards, loss_over="batch"', 'eight shards, loss_over="shard"'
        shown = curves[1, "batch"], curves[8, "batch"], curves[8, "shard"]
        named = dict(zip(names, shown, strict=True))
        lines(picture, ("step", "held-out accuracy (%)"), named, behind=names[:1])


if __name__ == "__main__":
    main()
