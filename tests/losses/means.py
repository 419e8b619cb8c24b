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
    cross_entropy,
    kernel,
    log_probabilities,
    opaque,
    out_of,
    squares,
    tanh_kernel,
    token_losses,
    unit,
    with_gradient,
)

# Preferences, rewards, control.


def _margins(p, b):
    won = log_probabilities(p, b["words"]) - b["old"][:, 1:]
    lost = log_probabilities(p, b["rejected"]) - b["old_rejected"][:, 1:]
    return won.sum(1) - lost.sum(1)


def group_relative_policy_with_given_advantages(p, b):
    ratio = jnp.exp(log_probabilities(p, b["words"]) - b["old"][:, 1:])
    gain = 1 + b["advantage"][:, None]
    losses = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    there = b["mask"][:, 1:]
    return ((losses * there).sum(1) / there.sum(1)).mean()


def proximal_policy_with_a_value_and_an_entropy(p, b):
    logits, value = b["v"] @ p["route"], b["v"] @ p["scale"]
    chosen = -cross_entropy(logits, b["kind"])
    ratio = jnp.exp(chosen - b["old"][:, 0] - 1)
    gain = b["advantage"]
    policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(1).mean()
    return policy + 0.5 * squares(value, b["z"][:, 0]) - 0.01 * entropy


# Ways to compute: fewer bits, adapters, loops, branches, custom gradients.


def _rounded(x, levels=7):
    size = jnp.abs(x).max() / levels
    return x + lax.stop_gradient(jnp.round(x / size) * size - x)


def branch_by_a_parameter(p, b):
    is_large = p["scale"].sum() > 0
    found = lax.cond(is_large, lambda x: x @ p["a"], lambda x: x @ p["b"], b["v"])
    return squares(found, b["z"])


@jax.custom_jvp
def _stable(x):
    return jnp.log1p(jnp.exp(x))


_stable.defjvp(lambda xs, ts: (_stable(*xs), ts[0] * jax.nn.sigmoid(xs[0])))


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


def gradients_in_8_bits_with_a_scale_for_each_row(p, b):
    """A product with a backward pass of its own, as those for fp8 are."""

    def in_8_bits(g):
        size = jnp.abs(g).max(-1, keepdims=True) / 448
        size = jnp.where(size == 0, 1, size)
        return (g / size).astype(jnp.float8_e4m3fn).astype(g.dtype) * size

    product = jax.custom_vjp(jnp.matmul)
    product.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, g: (in_8_bits(g) @ kept[1].T, kept[0].T @ in_8_bits(g)),
    )
    return squares(product(jnp.tanh(product(b["v"], p["a"])), p["b"]), b["z"])


def callback_one_row_after_another(p, b):
    of_row = lambda x: opaque(np.sort, x, vmap_method="sequential")
    return squares(jax.vmap(of_row)(b["v"] @ p["a"]), b["z"])


def callback_marked_as_row_wise(p, b):
    f = crossshard.rowwise(lambda x: opaque(lambda x: np.round(x, 3), x))
    return squares(f(b["v"] @ p["a"]), b["z"])


# Noise.


def _variational(p, b, noise):
    mean, spread = b["v"] @ p["a"], jax.nn.softplus(b["v"] @ p["c"]) + 0.1
    found = jnp.tanh(mean + spread * noise.astype(mean.dtype)) @ p["b"]
    return squares(found, b["v"]) + 0.1 * (mean**2 + spread**2 - 2 * jnp.log(spread) - 1).mean()


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
    direct_preference_optimization=lambda p, b: -jax.nn.log_sigmoid(0.5 * _margins(p, b)).mean(),
    quantized_weights_straight_through=lambda p, b: squares(
        jnp.tanh(b["v"] @ _rounded(p["a"])) @ _rounded(p["b"]), b["z"]
    ),
    custom_jvp=lambda p, b: squares(_stable(b["v"] @ p["a"]), b["z"]),
    custom_vjp_that_reverses=lambda p, b: squares(
        with_gradient(lambda g: -g)(b["v"] @ p["a"]) @ p["b"], b["z"]
    ),
    pallas_kernel_of_all_rows_at_once=lambda p, b: squares(
        kernel(tanh_kernel, b["v"] @ p["a"]), b["z"]
    ),
    approximate_top_k_of_each_row=lambda p, b: lax.approx_max_k((b["v"] @ p["a"]), 3)[0].mean(),
    variational_autoencoder=lambda p, b, rng: _variational(
        p, b, jax.random.normal(rng, b["v"].shape)
    ),
    median_of_each_row=lambda p, b: (jnp.median(b["x"] @ p["a"], axis=1) ** 2).mean(),
)
