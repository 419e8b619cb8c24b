"""Segmentation: a small U-Net, cross-entropy and a Dice loss over all pixels of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.adam(1e-3)


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        down = nn.relu(nn.GroupNorm(2)(nn.Conv(4, (3, 3))(x)))
        middle = nn.relu(nn.Conv(8, (3, 3))(nn.max_pool(down, (2, 2), strides=(2, 2))))
        up = nn.relu(nn.ConvTranspose(4, (2, 2), strides=(2, 2))(middle))
        return nn.Conv(1, (1, 1))(jnp.concatenate([down, up], -1))[..., 0]


model = UNet()


def dice_loss(logits, masks, smooth=1.0):
    probabilities = jax.nn.sigmoid(logits)
    intersection = jnp.sum(probabilities * masks)
    total = jnp.sum(probabilities) + jnp.sum(masks)
    return 1 - (2 * intersection + smooth) / (total + smooth)


def loss_fn(params, batch):
    logits = model.apply({"params": params}, batch["image"])
    bce = optax.sigmoid_binary_cross_entropy(logits, batch["mask"]).mean()
    return bce + dice_loss(logits, batch["mask"])


def data(steps):
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:8, :8]
    for _ in range(steps):
        center, radius = rng.uniform(2, 6, size=(2, 16, 1, 1)), rng.uniform(1, 3, size=(16, 1, 1))
        mask = ((y - center[0]) ** 2 + (x - center[1]) ** 2 < radius**2).astype(np.float32)
        image = mask + 0.3 * rng.normal(size=mask.shape)
        yield {"image": np.float32(image[..., None]), "mask": mask}


def main(optimizer=OPTIMIZER, steps=4):
    params = model.init(jax.random.key(0), np.ones((1, 8, 8, 1)))["params"]
    step = crossshard.make_train_step(loss_fn, optimizer, loss_over="batch")
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
