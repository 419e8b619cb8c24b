"""DiLoCo: four workers that train alone, and send less than a hundredth of the bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.adam(3e-3)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
WORKERS = [[0, 1], [2, 3], [4, 5], [6, 7]]  # two shards each
ROWS, EVERY = 128, 20


def initial_params():
    """A network with two hidden layers."""
    sizes, keys = (16, 128, 128, 1), jax.random.split(jax.random.key(0), 3)
    names, both = ("first", "second", "last"), zip(keys, sizes[:3], sizes[1:], strict=True)
    layers = [jax.random.normal(key, (i, o)) / i**0.5 for key, i, o in both]
    return dict(zip(names, layers, strict=True))


def row_losses(params, batch):
    """The squared error of each row."""
    hidden = jnp.tanh(jnp.tanh(batch["x"] @ params["first"]) @ params["second"])
    return ((hidden @ params["last"] - batch["y"]) ** 2)[:, 0]


def loss_fn(params, batch):
    """The mean squared error."""
    return row_losses(params, batch).mean()


def data(number):
    """The batch of a step."""
    x = np.random.default_rng(number).normal(size=(ROWS, 16)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x[:, :1]) + np.tanh(x[:, 1:4].sum(1, keepdims=True))}


def train(steps, optimizer=OPTIMIZER, **options):
    """Train; return the model, the held-out loss now and then, and the bytes sent in a step."""
    groups = WORKERS if "sync_every" in options else None
    optimizer = crossshard.CrossShardOptimizer(optimizer, group_assignment=groups)
    step = crossshard.make_train_step(
        loss_fn, optimizer, num_shards=8, weight_update="replicated", **options
    )
    state, curve, held_out = step.init(initial_params()), [], data(10**6)
    report = crossshard.inspect(step.lower(state, held_out))
    # Between the workers a count is sent, and all else in one of so many steps.
    seldom = report.bytes_in_branches
    between = seldom / options["sync_every"] if groups else report.bytes_sent
    for number in range(1, steps + 1):
        state, _ = step(state, data(number))
        if number % EVERY == 0:
            curve.append((number, float(step.evaluate(state, [held_out], row_losses))))
    return jax.device_get(step.model(state)), curve, between


def by_hand(steps, optimizer=OPTIMIZER):
    """The same workers one after the other on one device: JAX and Optax without crossshard."""
    anchor, count = initial_params(), len(WORKERS)
    outer_state = OUTER.init(anchor)
    params, states = [anchor] * count, [optimizer.init(anchor)] * count
    for number in range(1, steps + 1):
        for worker in range(count):
            rows = {name: np.split(x, count)[worker] for name, x in data(number).items()}
            gradient = jax.grad(loss_fn)(params[worker], rows)
            updates, states[worker] = optimizer.update(gradient, states[worker], params[worker])
            params[worker] = optax.apply_updates(params[worker], updates)
        if number % EVERY == 0:
            moved = jax.tree.map(lambda a, *each: a - sum(each) / count, anchor, *params)
            updates, outer_state = OUTER.update(moved, outer_state, anchor)
            anchor = optax.apply_updates(anchor, updates)
            params = [anchor] * count
    return anchor


def main(steps=400, picture=None):
    """Train in four ways, and compare one of them with the same by hand."""
    rarely = {"sync_every": EVERY, "outer_optimizer": OUTER}
    ways = {
        "every step": {},
        "mean of 4 workers": {"sync_every": EVERY},
        "DiLoCo": rarely,
        "DiLoCo in 4 bits": rarely | {"outer_reduce_dtype": "int4"},
    }
    curves, bytes_of = {}, {}
    print("                    bytes a step  of these  held-out loss")
    for name, options in ways.items():
        _, curves[name], bytes_of[name] = train(steps, **options)
        share = bytes_of[name] / bytes_of["every step"]
        print(f"{name:18} {bytes_of[name]:13,.0f}  {share:8.4f}  {curves[name][-1][1]:13.4f}")
    found, wanted = train(2 * EVERY, **rarely)[0], by_hand(2 * EVERY)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, wanted)
    if picture:
        from _picture import lines

        lines(picture, ("step", "held-out loss"), curves, behind=("every step",))


if __name__ == "__main__":
    main()
