"""A mixture of experts on a second mesh axis, with a loss that balances them over the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.sgd(0.3, momentum=0.9)
EXPERTS, WIDTH, HIDDEN, ROWS = 8, 8, 32, 256
SPLIT = {"gate": P(), "up": P("expert"), "down": P("expert")}  # expert by expert over its axis


def initial_params():
    """The gate, and the experts along the first axis."""
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[-2] ** 0.5
    return {
        "gate": normal(keys[0], WIDTH, EXPERTS),
        "up": normal(keys[1], EXPERTS, WIDTH, HIDDEN),
        "down": normal(keys[2], EXPERTS, HIDDEN, 1),
    }


def data(seed):
    """Rows of eight kinds, each with a function of its own."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(8, size=ROWS)
    middle = np.random.default_rng(0).normal(size=(8, WIDTH))
    x = middle[kind] + rng.normal(0, 0.5, size=(ROWS, WIDTH))
    y = np.sin(2 * x[np.arange(ROWS), kind] + kind)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)[:, None]}


def loss_fn(params, batch, balance):
    """Each row goes to its best expert, which has room for twice its share of the batch."""
    gates = jax.nn.softmax(batch["x"] @ params["gate"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS)
    place = (chosen.cumsum(0) - 1) * chosen  # in the queue of its expert, in the whole batch
    room = 2 * ROWS // EXPERTS
    dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(int), room)  # [rows, experts, room]
    inside = jnp.einsum("rek,rw->ekw", dispatch, batch["x"])
    inside = jnp.tanh(jnp.einsum("ekw,ewh->ekh", inside, params["up"]))
    inside = jnp.einsum("ekh,eho->eko", inside, params["down"])
    out = jnp.einsum("rek,re,eko->ro", dispatch, gates, inside)  # zero for rows without a place
    share, error = chosen.mean(0), jnp.mean((out - batch["y"]) ** 2)
    even = EXPERTS * (share * gates.mean(0)).sum()  # 1 if all experts get as many rows
    aux = {"share": share, "lost": 1 - dispatch.sum() / ROWS, "error": error}
    return error + balance * even, aux


def train(balance, shape, optimizer, steps):
    """The parameters, what the last step says, and the bytes of parameters on a device."""
    mesh = jax.make_mesh(shape, ("data", "expert"))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    step = crossshard.make_train_step(
        functools.partial(loss_fn, balance=balance),
        optimizer,
        mesh=mesh,
        axis_name="data",
        loss_over="batch",
        has_aux=True,
    )
    state = step.init(jax.tree.map(place, initial_params(), SPLIT))
    for seed in range(steps):
        state, metrics = step(state, data(seed))
    held = sum(x.addressable_data(0).nbytes for x in jax.tree.leaves(state.params))
    return jax.device_get((step.model(state), metrics["aux"])), held


def main(optimizer=OPTIMIZER, steps=80, picture=None):
    """Train on one device and on 2 x 4, without the balance and with it."""
    print("mesh: data x expert  balance  a device has  error   no room  rows of each expert (%)")
    shares = {}
    for balance in (0.0, 0.1):
        for shape in ((1, 1), (2, 4)):
            (params, aux), held = train(balance, shape, optimizer, steps)
            if shape == (1, 1):
                one_device = params
            for found, wanted in zip(*map(jax.tree.leaves, (params, one_device)), strict=True):
                np.testing.assert_allclose(found, wanted, atol=1e-5)
            shares[balance] = 100 * aux["share"]
            each = " ".join(f"{share:2.0f}" for share in shares[balance])
            row = f"{shape[0]} x {shape[1]}", balance, f"{held / 1000:.1f} kB"
            row += aux["error"], f"{100 * aux['lost']:.0f} %"
            print("{:19}  {:<7}  {:12}  {:.4f}  {:7}  {}".format(*row, each))
    if picture:
        from _picture import bars

        names = "without the balance loss", "with it"
        groups = dict(zip(names, shares.values(), strict=True))
        bars(picture, ("expert", "share of the rows (%)"), groups, even=100 / EXPERTS)


if __name__ == "__main__":
    main()
