"""A poisoned batch: `nonfinite="quarantine"` names the shard, and takes the mean of the others."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import crossshard

crossshard.cpu_devices(8)  # virtual devices for a laptop; JAX still prefers a GPU or TPU

OPTIMIZERS = {"adam": optax.adam(3e-3), "sgd": optax.sgd(0.1)}
SHARDS, ROWS, BROKEN = 8, 128, 5
ITS_ROWS = np.arange(ROWS) // (ROWS // SHARDS) == BROKEN


def initial_params():
    """A network with one hidden layer."""
    rng = np.random.default_rng(0)
    normal = lambda i, o: np.float32(rng.normal(size=(i, o)) / i**0.5)
    return {"hidden": normal(8, 64), "out": normal(64, 1)}


def data(seed, rows=ROWS):
    """Normal numbers, and a sine along a direction."""
    x = np.random.default_rng(seed).normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": np.sin(2 * x[:, 0] + x[:, 1])}


def poisoned(batch):
    """A batch as a broken reader gives it: NaN in all rows of shard 5."""
    return {**batch, "y": np.where(ITS_ROWS, np.nan, batch["y"]).astype(np.float32)}


def loss_fn(params, batch):
    """The mean squared error on one shard's part of the batch."""
    out = jnp.tanh(batch["x"] @ params["hidden"]) @ params["out"]
    return jnp.mean((out[:, 0] - batch["y"]) ** 2)


def train(optimizer, steps, bad, nonfinite):
    """Train with a poisoned batch in each step of `bad`: the parameters, losses, and reports."""
    step = crossshard.make_train_step(loss_fn, optimizer, num_shards=SHARDS, nonfinite=nonfinite)
    state, curve, reports = step.init(initial_params()), [], {}
    held_out, held_out_loss = data(seed=0, rows=1024), jax.jit(loss_fn)
    for number in range(steps):
        batch = data(seed=number + 1)
        state, metrics = step(state, poisoned(batch) if number in bad else batch)
        if nonfinite and metrics["nonfinite"].in_a_row:
            reports[number] = metrics["nonfinite"].describe(state.params)
        curve.append(float(held_out_loss(state.params, held_out)))
    step.finish(state)  # raises if the last steps were the last of too many in a row
    return step.model(state), curve, reports


def train_on_one_device(optimizer, steps, bad):
    """The same with JAX and Optax alone; in each step of `bad` without the rows of shard 5."""
    params, grad = initial_params(), jax.jit(jax.grad(loss_fn))
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    for number in range(steps):
        rows = ~ITS_ROWS if number in bad else slice(None)
        batch = {name: x[rows] for name, x in data(seed=number + 1).items()}
        updates, opt_state = update(grad(params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def main(steps=120, picture=None):
    """Train through bad batches with each setting of `nonfinite`."""
    bad = range(steps // 3, steps // 2)
    print(f"rows of shard {BROKEN} are NaN in steps {bad.start} to {bad[-1]} of {steps}\n")
    print("optimizer  nonfinite     held-out loss  named  differs from one device without the rows")
    curves = {}
    for name, optimizer in OPTIMIZERS.items():
        expected = train_on_one_device(optimizer, steps, bad)
        for nonfinite in (None, "skip", "quarantine"):
            params, curve, reports = train(optimizer, steps, bad, nonfinite)
            difference = jax.tree.map(jnp.subtract, expected, params)
            far = optax.tree.norm(difference) / optax.tree.norm(expected)
            print(f"{name:9}  {nonfinite!s:12}  {curve[-1]:13.4f}  {len(reports):5}  {far:.0e}")
            curves[name, nonfinite] = curve
            assert list(reports) == (list(bad) if nonfinite else [])
        assert far < 1e-5  # quarantine is the mean over the rows of the other shards
    print(f"\nstep {bad.start}: {reports[bad.start]}")
    assert set(reports.values()) == {f"the gradient of `hidden` is not finite on shard {BROKEN}"}
    if picture:
        draw({what: curve for (of, what), curve in curves.items() if of == "sgd"}, bad, picture)


def draw(curves, bad, path):
    """The held-out loss while it trains."""
    from _chart import COLORS, chart, save

    figure, axes = chart("step", "held-out loss")
    axes.axvspan(bad.start, bad.stop, color="#e8e8e8", label=f"rows of shard {BROKEN} are NaN")
    styles = {None: {"lw": 6, "alpha": 0.35}, "skip": {"ls": "--"}, "quarantine": {}}
    for color, (what, curve) in zip(COLORS[::-1], curves.items(), strict=False):
        axes.plot(curve, color=color, label=f"nonfinite={what!r}", **styles[what])
    axes.legend(frameon=False)
    save(figure, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--picture", metavar="PATH", help="draw the loss to this file")
    main(**vars(parser.parse_args()))
