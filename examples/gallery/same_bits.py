"""The same bits: a network trained on 1, 2, 4 and 8 shards, and on all of these in turn."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop

OPTIMIZER = optax.adam(1e-2, eps=1e-3)
ROWS = 64


def initial_params():
    """A network with one hidden layer."""
    keys = jax.random.split(jax.random.key(0))
    normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5
    return {
        "first": {"kernel": normal(keys[0], 8, 64), "bias": jnp.zeros(64)},
        "second": {"kernel": normal(keys[1], 64, 1), "bias": jnp.zeros(1)},
    }


def loss_fn(params, batch):
    """The mean squared error."""
    hidden = jnp.tanh(batch["x"] @ params["first"]["kernel"] + params["first"]["bias"])
    out = hidden @ params["second"]["kernel"] + params["second"]["bias"]
    return ((out - batch["y"]) ** 2).mean()


def data(number):
    """The batch of a step."""
    x = np.random.default_rng(number).normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1, keepdims=True))}


def sha(params):
    """The SHA-256 of the bytes of all parameters."""
    return hashlib.sha256(b"".join(map(bytes, jax.tree.leaves(params)))).hexdigest()


def train(shards, virtual_shards, optimizer, steps):
    """Train on so many shards; on several numbers of them in turn, if there are more."""
    state, path = None, []
    for place, parts in enumerate(shards):
        step = crossshard.make_train_step(
            loss_fn, optimizer, num_shards=parts, virtual_shards=virtual_shards
        )
        state = step.init(initial_params()) if state is None else step.reshard(state)
        start, end = (each * steps // len(shards) for each in (place, place + 1))
        for number in range(start, end):
            state, _ = step(state, data(number))
            path.append(jax.device_get(step.model(state)))
        state = step.unshard(state)
    return path


def one_device(optimizer, steps):
    """What one device does: Optax without crossshard."""
    params = initial_params()
    state = optimizer.init(params)
    for number in range(steps):
        gradients = jax.grad(loss_fn)(params, data(number))
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    return params


def furthest(path, other):
    """The largest difference between two runs after each step."""
    distance = lambda x, y: max(np.abs(a - b).max() for a, b in zip(x, y, strict=True))
    return [distance(*map(jax.tree.leaves, both)) for both in zip(path, other, strict=True)]


def main(optimizer=OPTIMIZER, steps=100, picture=None):
    """Train on each number of shards, with and without virtual shards."""
    bits, curves, first = ([], []), {}, None
    print("shards    virtual_shards=8  without")
    for shards in ([1], [2], [4], [8], [8, 2, 4]):
        found = [train(shards, virtual, optimizer, steps) for virtual in (8, None)]
        name = ", ".join(map(str, shards))
        first = first or found
        for path, known in zip(found, bits, strict=True):
            known.append(sha(path[-1]))
        # Runs with the same SHA-256 have the same letter.
        one, other = (chr(ord("A") + known.index(known[-1])) for known in bits)
        print(f"{name:8}  {one}                 {other}")
        curves[name] = [furthest(*both) for both in zip(found, first, strict=True)]
    assert len(set(bits[0])) == 1
    both = map(jax.tree.leaves, (found[0][-1], one_device(optimizer, steps)))
    for leaves in zip(*both, strict=True):
        np.testing.assert_allclose(*leaves, atol=1e-3)
    if picture:
        from _picture import lines

        named = {f"{name} shards, without": enumerate(curves[name][1], 1) for name in "82"}
        named["8, 2, 4 in turn, virtual_shards=8"] = enumerate(curves["8, 2, 4"][0], 1)
        lines(picture, ("step", "furthest parameter from that on 1 shard"), named)


if __name__ == "__main__":
    main()
