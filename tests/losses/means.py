"""Means over rows: losses of every trade, noise, gradients within, and what is opaque."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import crossshard
from tests.losses.cases import MEAN, enter
from tests.losses.parts import (
    EXPERTS,
    TIME,
    WIDTH,
    attend,
    block,
    cross_entropy,
    kernel,
    opaque,
    out_of,
    projected,
    rms,
    row_losses,
    squares,
    tanh_kernel,
    token_losses,
    unit,
)

# Regression and classification.


# Preferences, rewards, control.


# Ways to compute: fewer bits, adapters, loops, branches, custom gradients.


def layers_scanned_with_checkpoint(p, b):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(rms(x) @ w), None))
    return squares(lax.scan(layer, b["x"], p["layers"])[0], b["y"])


def branch_of_each_row(p, b):
    ways = [lambda x, i=i: jnp.tanh(x @ p["layers"][i]) for i in range(3)]
    found = jax.vmap(lambda i, x: lax.switch(i, ways, x))(b["kind"], b["v"])
    return squares(found, b["z"])


def fixed_point_with_an_implicit_gradient(p, b):
    step = lambda w, x, z: jnp.tanh(z @ (w / 3) + x)

    @jax.custom_vjp
    def solve(w, x):
        return lax.fori_loop(0, 30, lambda _, z: step(w, x, z), jnp.zeros_like(x))

    def backward(kept, g):
        w, x, z = kept
        _, by_z = jax.vjp(lambda z: step(w, x, z), z)
        u = lax.fori_loop(0, 30, lambda _, u: g + by_z(u)[0], g)
        return jax.vjp(lambda w, x: step(w, x, z), w, x)[1](u)

    solve.defvjp(lambda w, x: (solve(w, x), (w, x, solve(w, x))), backward)
    return squares(solve(p["a"], b["v"]), b["z"])


def pallas_kernel_of_each_row(p, b):
    found = jax.vmap(lambda x: kernel(tanh_kernel, x))(b["v"] @ p["a"])
    return squares(found, b["z"])


def callback_marked_as_row_wise(p, b):
    f = crossshard.rowwise(lambda x: opaque(lambda x: np.round(x, 3), x))
    return squares(f(b["v"] @ p["a"]), b["z"])


# Noise.


def dropout_by_the_shards_key(p, b, rng):
    x = jnp.tanh(b["x"] @ p["a"])
    return squares(jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x / 0.8, 0) @ p["b"], b["y"])


def dropout_by_a_key_for_each_row(p, b, keys):
    x = jnp.tanh(b["v"] @ p["a"])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (WIDTH,)))(keys)
    return squares(jnp.where(keep, x / 0.8, 0) @ p["b"], b["z"])


def masked_autoencoder(p, b):
    kept = jnp.take_along_axis(b["x"], b["order"][:, :4, None], 1)
    code = kept + attend(*projected(p, kept), True)
    filled = jnp.concatenate([code, jnp.broadcast_to(p["bias"], code.shape)], 1)
    back = jnp.take_along_axis(filled, jnp.argsort(b["order"], 1)[..., None], 1)
    return squares(block(p, back), b["x"])


# Images, graphs, sets: each row one of them.


def _convolved(x, filters):
    return lax.conv_general_dilated(
        x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convolutions_and_pooling(p, b):
    x = jax.nn.relu(_convolved(b["x"][..., None], p["filter"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(_convolved(x, p["filter2"])).mean((1, 2))
    return cross_entropy(x @ p["head"], b["kind"]).mean()


# Operations along a row.


def _matrix(p, b):
    x = (b["x"] @ p["a"]).astype(jnp.float32)
    return jnp.einsum("rtd,rte->rde", x, x) / TIME + 0.5 * jnp.eye(WIDTH)


def equations_solved_in_each_row(p, b):
    found = jnp.linalg.solve(_matrix(p, b), b["v"].astype(jnp.float32)[..., None])[..., 0]
    return squares(found, b["z"])


# Gradients within the loss.


def _field(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["scale"]


def equation_of_physics(p, b):
    """The Laplacian of each row's field is what the row says."""
    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: _field(p, x))(x)))
    return squares(laplacian(b["v"]), b["advantage"])


def inner_step_of_each_row(p, b):
    def of_row(x, y):
        loss = lambda w: squares(jnp.tanh(x @ w) @ p["b"], y)
        return loss(p["a"] - 0.1 * jax.grad(loss)(p["a"]))

    return jax.vmap(of_row)(b["x"], b["y"]).mean()


# The axis of the shards, named where it is right.


def batch_norm_over_the_axis(p, b):
    x = b["v"] @ p["a"]
    mean = lax.pmean(x.mean(0), "shards")
    spread = lax.pmean((x**2).mean(0), "shards") - mean**2
    return squares(jnp.tanh((x - mean) / jnp.sqrt(spread + 0.1)) @ p["b"], b["z"])


def contrastive_with_all_rows_gathered(p, b):
    one, other = unit(out_of(p, b)), unit(b["z"] @ p["c"])
    everyone = lax.all_gather(other, "shards", tiled=True)
    at = lax.axis_index("shards") * len(one) + jnp.arange(len(one))
    return cross_entropy(5 * one @ everyone.T, at).mean()


def token_mean_summed_over_the_axis(p, b):
    total, count = lax.psum(((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum()), "shards")
    return total / count


def balance_with_the_chosen_of_the_shard_and_the_gates_of_all(p, b):
    """Linear in what is the shard's own."""
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=gates.dtype).mean(0)
    return EXPERTS * (chosen * lax.pmean(gates.mean(0), "shards")).sum()


enter(
    MEAN,
    globals(),
    weight_decay_in_the_loss=lambda p, b: (
        row_losses(p, b).mean() + 1e-2 * ((p["a"] ** 2).sum() + jnp.abs(p["b"]).sum())
    ),
    pallas_kernel_of_all_rows_at_once=lambda p, b: squares(
        kernel(tanh_kernel, b["v"] @ p["a"]), b["z"]
    ),
    median_of_each_row=lambda p, b: (jnp.median(b["x"] @ p["a"], axis=1) ** 2).mean(),
)
