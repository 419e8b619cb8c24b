"""A mixture of experts on a mesh axis of its own, with a balance that is taken over the batch."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZERS = {"adamw": optax.adamw(3e-3), "sgd": optax.sgd(0.3)}
MESHES = (8, 1), (4, 2), (2, 4)  # shards of the rows, and parts of the experts
ROWS, WIDTH, HIDDEN, EXPERTS = 128, 16, 64, 4
SPLIT = {"router": P(), "up": P("expert"), "down": P("expert")}


def initial_params():
    """A router, and experts of two layers each."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: np.float32(rng.normal(size=shape) / shape[-2] ** 0.5)
    up, down = normal(EXPERTS, WIDTH, HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)
    return {"router": normal(WIDTH, EXPERTS), "up": up, "down": down}


def data(step):
    """Rows of four kinds; each kind is turned by a matrix of its own."""
    turns = np.random.default_rng(0).normal(size=(EXPERTS, WIDTH, WIDTH)) / WIDTH**0.5
    rng = np.random.default_rng(step + 1)
    kind = rng.integers(EXPERTS, size=ROWS)
    x = rng.normal(size=(ROWS, WIDTH)) + 2 * np.eye(WIDTH)[kind]
    return {"x": np.float32(x), "y": np.float32(np.einsum("rd,rde->re", x, turns[kind]))}


def route(params, x):
    """The probabilities of the experts for each row, and the one expert that it takes."""
    gates = jax.nn.softmax(x @ params["router"])
    return gates, jax.nn.one_hot(gates.argmax(-1), EXPERTS)


def loss_fn(params, batch):
    """The mean squared error, and the balance of the Switch Transformer (arXiv 2101.03961)."""
    gates, chosen = route(params, batch["x"])
    hidden = jax.nn.gelu(jnp.einsum("rd,edh->reh", batch["x"], params["up"]))
    out = jnp.einsum("reh,ehd,re->rd", hidden, params["down"], chosen * gates)
    balance = EXPERTS * jnp.sum(chosen.mean(0) * gates.mean(0))  # over all rows: not a mean of rows
    return jnp.mean((out - batch["y"]) ** 2) + 0.1 * balance


def train(shape, optimizer, steps, loss_over):
    """Train on a mesh of this shape: the parameters, the last loss and bytes on each device."""
    axes = {"axis_types": (AxisType.Auto,) * 2, "devices": jax.devices()[: np.prod(shape)]}
    mesh = jax.make_mesh(shape, ("data", "expert"), **axes)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    step = crossshard.make_train_step(
        loss_fn, optimizer, mesh=mesh, axis_name="data", loss_over=loss_over
    )
    state = step.init(jax.tree.map(place, initial_params(), SPLIT))
    for number in range(steps):
        state, metrics = step(state, data(number))
    assert state.params["up"].addressable_shards[0].data.shape[0] == EXPERTS // shape[1]
    leaves = jax.tree.leaves((state.params, state.opt_state))
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    return jax.device_get(step.model(state)), float(metrics["loss"]), held


def train_on_one_device(optimizer, steps):
    """The same with JAX and Optax alone."""
    params = initial_params()
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for number in range(steps):
        params, opt_state = step(params, opt_state, data(number))
    return params


def main(steps=60):
    """Train on each mesh, and compare with one device."""
    print("optimizer  data × expert  loss_over  B on a device    loss  differs from one device")
    for name, optimizer in OPTIMIZERS.items():
        expected = train_on_one_device(optimizer, steps)
        for shape, loss_over in [*((mesh, "batch") for mesh in MESHES), ((8, 1), "shard")]:
            params, loss, held = train(shape, optimizer, steps, loss_over)
            difference = jax.tree.map(jnp.subtract, expected, params)
            far = optax.tree.norm(difference) / optax.tree.norm(expected)
            mesh = " × ".join(map(str, shape))
            print(f"{name:9}  {mesh:13}  {loss_over:9}  {held:13,}  {loss:6.4f}  {far:.0e}")
            assert (far < 1e-5) == (loss_over == "batch")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
