"""LoRA on a frozen base: `wrt` chooses what is trained; nothing else is differentiated or sent."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZERS = {"adam": optax.adam(3e-3), "sgd": optax.sgd(0.1)}
BASE = nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam))
TRAINED = {"full": BASE, "LoRA": nnx.LoRAParam}
ROWS, INPUTS, WIDTH, RANK = 256, 16, 128, 2


def network():
    """Three layers with an adapter of low rank each (Hu et al. 2021, arXiv 2106.09685)."""
    rngs = nnx.Rngs(0)
    layer = lambda i, o: nnx.LoRALinear(i, o, lora_rank=RANK, rngs=rngs)
    sizes = (INPUTS, WIDTH), (WIDTH, WIDTH), (WIDTH, 1)
    first, second, last = (layer(*size) for size in sizes)
    return nnx.Sequential(first, jnp.tanh, second, jnp.tanh, last)


def data(task):
    """Waves along one direction in task 0, and along another in task 1."""
    rng = np.random.default_rng(0)
    x, directions = rng.normal(size=(ROWS, INPUTS)), rng.normal(size=(INPUTS, 2)) / INPUTS**0.5
    y = np.sin(2 * x @ (directions[:, :1] + task * directions[:, 1:]))
    return {"x": np.float32(x), "y": np.float32(y)}


def loss_fn(model, batch):
    """The mean squared error on one shard's part of the batch."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(model, optimizer, wrt, batch, steps):
    """Train what `wrt` selects on eight shards: the model, its loss and what a step costs."""
    step = crossshard.make_train_step(loss_fn, optimizer, num_shards=8, wrt=wrt)
    state = step.init(model)
    report = crossshard.inspect(step.lower(state, batch))
    held = sum(x.nbytes for x in jax.tree.leaves(state.opt_state))
    for _ in range(steps):
        state, metrics = step(state, batch)
    cost = report.parameter_bytes, int(report.bytes_sent), held
    return step.model(state), float(metrics["loss"]), cost


def train_on_one_device(model, optimizer, wrt, batch, steps):
    """The same with JAX, Flax and Optax alone."""
    graph, params, frozen = nnx.split(model, wrt, ...)
    grad = jax.jit(jax.grad(lambda params: loss_fn(nnx.merge(graph, params, frozen), batch)))
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(steps):
        updates, opt_state = update(grad(params), opt_state, params)
        params = optax.apply_updates(params, updates)
    return nnx.merge(graph, params, frozen)


def apart(one, other, which):
    """The norm of the difference between two models, relative to the norm of the first."""
    one, other = nnx.state(one, which), nnx.state(other, which)
    return optax.tree.norm(jax.tree.map(jnp.subtract, one, other)) / optax.tree.norm(one)


def main(steps=100, picture=None):
    """Train the base on one task, then all of it or the adapters alone on another."""
    base, loss, _ = train(network(), optax.adam(3e-3), BASE, data(0), 2 * steps)
    print(f"loss of the base: {loss:.4f} on its task, {loss_fn(base, data(1)):.4f} on the next\n")
    print("              trained B     sent B    state B    loss  differs from one device")
    costs = {}
    for name, optimizer in OPTIMIZERS.items():
        for what, wrt in TRAINED.items():
            trained, loss, costs[what, name] = train(base, optimizer, wrt, data(1), steps)
            one_device = train_on_one_device(base, optimizer, wrt, data(1), steps)
            far = apart(one_device, trained, nnx.Param)
            row = "".join(f"{each:11,}" for each in costs[what, name])
            print(f"{name:5} {what:6}{row}  {loss:6.4f}  {far:.0e}")
            assert far < 1e-4
            assert wrt is BASE or apart(base, trained, BASE) == 0  # LoRA leaves the base as it is
    if picture:
        draw({what: costs[what, "adam"] for what in TRAINED}, picture)


def draw(costs, path):
    """The bytes of a step with Adam."""
    from _chart import COLORS, chart, save

    figure, axes = chart("", "kB")
    for number, (what, cost) in enumerate(costs.items()):
        places = np.arange(3) + 0.4 * number - 0.2
        bars = axes.bar(places, np.divide(cost, 1000), 0.36, color=COLORS[number], label=what)
        axes.bar_label(bars, fmt="%.0f")
    axes.set_xticks(range(3), ("trained", "sent per step", "optimizer state"))
    axes.legend(frameon=False)
    save(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--picture", metavar="PATH", help="draw the bytes to this file")
    main(**vars(parser.parse_args()))
