"""SigLIP: a sigmoid for every pair of an image and a text of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import crossshard

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95), optax.scale(-1e-3)
)


class TwoTowers(nn.Module):
    @nn.compact
    def __call__(self, image, text):
        zimg = nn.Dense(16, name="img")(image)
        ztxt = nn.Dense(16, name="txt")(nn.Embed(50, 16)(text).max(1))
        zimg /= jnp.linalg.norm(zimg, axis=1, keepdims=True) + 1e-8
        ztxt /= jnp.linalg.norm(ztxt, axis=1, keepdims=True) + 1e-8
        t = self.param("t", lambda _: jnp.log(10.0) * jnp.ones(1))
        b = self.param("b", lambda _: -10.0 * jnp.ones(1))
        return zimg, ztxt, jnp.exp(t), b


model = TwoTowers()


def loss_fn(params, batch):
    zimg, ztxt, t, b = model.apply({"params": params}, batch["image"], batch["labels"])
    logits = jnp.dot(zimg, ztxt.T) * t + b
    eye = jnp.eye(zimg.shape[0])
    m1_diag1 = -jnp.ones_like(logits) + 2 * eye  # 1 on the diagonal, -1 elsewhere
    loglik = jax.nn.log_sigmoid(m1_diag1 * logits)
    return jnp.mean(-jnp.sum(loglik, axis=-1))


def data(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        image = rng.normal(size=(32, 24)).astype(np.float32)
        yield {"image": image, "labels": rng.integers(50, size=(32, 6))}


def main(optimizer=OPTIMIZER, steps=5):
    first = next(data(1))
    params = model.init(jax.random.key(0), first["image"], first["labels"])["params"]
    step = crossshard.make_train_step(loss_fn, optimizer, loss_over="batch")
    state = step.init(params)

    for batch in data(steps):
        state, metrics = step(state, batch)
        print(f"loss {metrics['loss']:.4f}")
    return step.model(state)


if __name__ == "__main__":
    main()
