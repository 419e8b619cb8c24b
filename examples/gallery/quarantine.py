"""A poisoned batch: the shard whose gradient is NaN is named, and left out of the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.sgd(0.05)
SHARDS, ROWS, BAD_SHARD, BAD_STEPS = 8, 64, 5, range(30, 33)


def initial_params():
    """A network with one hidden layer."""
    keys = jax.random.split(jax.random.key(0))
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5
    return {
        "first": {"kernel": normal(keys[0], 4, 64), "bias": jnp.zeros(64)},
        "second": {"kernel": normal(keys[1], 64, 1), "bias": jnp.zeros(1)},
    }


def row_losses(params, batch):
    """The squared error of each row."""
    hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    out = hidden @ params["second"]["kernel"] + params["second"]["bias"]
    return ((out - batch["y"]) ** 2)[:, 0]


def loss_fn(params, batch):
    """The mean squared error."""
    return row_losses(params, batch).mean()


def data(number):
    """The batch of a step. In a few steps the labels of shard 5 are NaN."""
    x = np.random.default_rng(number + 1).normal(size=(ROWS, 4)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))
    if number in BAD_STEPS:
        y.reshape(SHARDS, -1)[BAD_SHARD] = np.nan
    return {"x": x, "y": y}


def train(nonfinite, optimizer, steps):
    """Train on eight shards, and print what is found in the steps that are not finite."""
    step = crossshard.make_train_step(
        loss_fn, optimizer, num_shards=SHARDS, nonfinite=nonfinite, weight_update="replicated"
    )
    state, losses, held_out = step.init(initial_params()), [], data(-1)
    for number in range(steps):
        state, metrics = step(state, data(number))
        losses.append(float(step.evaluate(state, [held_out], row_losses)))
        found = metrics.get("nonfinite")
        if found is not None and found.shards:
            done = "the step is skipped" if metrics["skipped"] else "the others take the step"
            print(f"  step {number}: {found.describe(state.params)}; {done}")
    if nonfinite is not None:
        step.finish(state)
    return jax.device_get(step.model(state)), losses


def one_device(optimizer, steps):
    """What one device does that is given the good rows alone: Optax without crossshard."""
    params = initial_params()
    state = optimizer.init(params)
    for number in range(steps):
        batch = data(number)
        good = np.isfinite(batch["y"][:, 0])
        gradients = jax.grad(loss_fn)(params, {name: x[good] for name, x in batch.items()})
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def main(optimizer=OPTIMIZER, steps=100, picture=None):
    """Train with and without quarantine."""
    curves, table = {}, []
    for nonfinite in (None, "skip", "quarantine"):
        print(f"nonfinite={nonfinite!r}")
        params, losses = train(nonfinite, optimizer, steps)
        curves[nonfinite] = losses
        bad = sum(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
        table.append(f"{nonfinite!r:12}  {bad} of 4         {losses[-1]:.4f}")
    for found, wanted in zip(
        jax.tree.leaves(params), jax.tree.leaves(one_device(optimizer, steps)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    print("\nnonfinite     arrays with NaN  held-out loss")
    print("\n".join(table))
    if picture:
        from _picture import lines

        named = {f"nonfinite={name!r}": enumerate(losses) for name, losses in curves.items()}
        names = "nonfinite='quarantine'", "nonfinite=None"
        named = {name: named[name] for name in names}
        lines(picture, ("step", "held-out loss"), named, behind=names[:1])


if __name__ == "__main__":
    main()
