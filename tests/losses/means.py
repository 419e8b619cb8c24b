"""Means over rows: losses of every trade, noise, gradients within, and what is opaque."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    log_probabilities,
    opaque,
    out_of,
    projected,
    rms,
    row_losses,
    squares,
    tanh_kernel,
    token_losses,
    unit,
    with_gradient,
)

# Regression and classification.


def connectionist_temporal_classification(p, b):
    logits = (b["x"] @ p["out"]).astype(jnp.float32)
    late = (np.arange(4) >= jnp.minimum(b["length"], 4)[:, None] - 1).astype(jnp.float32)
    return optax.ctc_loss(logits, jnp.zeros_like(logits[..., 0]), b["labels"][:, :4], late).mean()


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


def layers_scanned_with_checkpoint(p, b):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(rms(x) @ w), None))
    return squares(lax.scan(layer, b["x"], p["layers"])[0], b["y"])


def while_loop_over_inputs(p, b):
    """Newton's square root of each number, until all are exact."""

    def turn(carry):
        count, x = carry
        return count + 1, (x + b["v"] ** 2 / x) / 2

    start = (0, jnp.ones_like(b["v"]))
    _, root = lax.while_loop(lambda carry: carry[0] < 6, turn, start)
    return squares(root @ p["a"], b["z"])


def branch_by_a_parameter(p, b):
    is_large = p["scale"].sum() > 0
    found = lax.cond(is_large, lambda x: x @ p["a"], lambda x: x @ p["b"], b["v"])
    return squares(found, b["z"])


def branch_of_each_row(p, b):
    ways = [lambda x, i=i: jnp.tanh(x @ p["layers"][i]) for i in range(3)]
    found = jax.vmap(lambda i, x: lax.switch(i, ways, x))(b["kind"], b["v"])
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


def pallas_kernel_of_each_row(p, b):
    found = jax.vmap(lambda x: kernel(tanh_kernel, x))(b["v"] @ p["a"])
    return squares(found, b["z"])


def pallas_kernel_with_a_grid_over_rows(p, b):
    from jax.experimental import pallas

    x = b["v"] @ p["a"]
    spec = pallas.BlockSpec((1, WIDTH), lambda i: (i, 0))
    options = {"grid": (len(x),), "in_specs": [spec], "out_specs": spec}
    return squares(kernel(tanh_kernel, x, **options), b["z"])


def composite_of_parameters_alone(p, b):
    twice = jax.custom_jvp(lax.composite(lambda x: 2 * jnp.tanh(x), "own.twice"))
    twice.defjvp(lambda xs, ts: (twice(*xs), ts[0] * 2 * (1 - jnp.tanh(xs[0]) ** 2)))
    return squares(b["v"] @ twice(p["a"]), b["z"])


def callback_one_row_after_another(p, b):
    of_row = lambda x: opaque(np.sort, x, vmap_method="sequential")
    return squares(jax.vmap(of_row)(b["v"] @ p["a"]), b["z"])


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


def layers_dropped_by_the_shards_key(p, b, rng):
    x = b["v"]
    for i in range(3):
        keep = jax.random.bernoulli(jax.random.fold_in(rng, i), 0.7, (len(x), 1))
        x = x + jnp.where(keep, jnp.tanh(x @ p["layers"][i]), 0)
    return squares(x, b["z"])


def _variational(p, b, noise):
    mean, spread = b["v"] @ p["a"], jax.nn.softplus(b["v"] @ p["c"]) + 0.1
    found = jnp.tanh(mean + spread * noise.astype(mean.dtype)) @ p["b"]
    return squares(found, b["v"]) + 0.1 * (mean**2 + spread**2 - 2 * jnp.log(spread) - 1).mean()


def diffusion_with_the_shards_noise(p, b, rng):
    of_time, of_noise = jax.random.split(rng)
    time = jax.random.uniform(of_time, (len(b["v"]), 1)).astype(b["v"].dtype)
    noise = jax.random.normal(of_noise, b["v"].shape).astype(b["v"].dtype)
    noisy = jnp.sqrt(1 - time) * b["v"] + jnp.sqrt(time) * noise
    return squares(jnp.tanh(noisy @ p["a"] + time * p["bias"]) @ p["b"], noise)


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


def graph_in_each_row(p, b):
    sent = jnp.einsum("rts,rsd->rtd", b["edges"], jnp.tanh(b["x"] @ p["a"]))
    return squares((sent + b["x"]).mean(1) @ p["b"], b["z"])


def segments_summed_in_each_row(p, b):
    total = jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, 4))(b["x"] @ p["a"], b["segments"])
    return squares(jnp.tanh(total).mean(1) @ p["b"], b["z"])


# Operations along a row.


def spectrum_of_each_row(p, b):
    found = jnp.fft.rfft((b["x"] @ p["a"]).astype(jnp.float32), axis=1)
    return jnp.log1p(jnp.abs(found) ** 2).mean()


def _matrix(p, b):
    x = (b["x"] @ p["a"]).astype(jnp.float32)
    return jnp.einsum("rtd,rte->rde", x, x) / TIME + 0.5 * jnp.eye(WIDTH)


def equations_solved_in_each_row(p, b):
    found = jnp.linalg.solve(_matrix(p, b), b["v"].astype(jnp.float32)[..., None])[..., 0]
    return squares(found, b["z"])


def cholesky_of_each_row(p, b):
    root = jnp.linalg.cholesky(_matrix(p, b))
    white = jax.scipy.linalg.solve_triangular(
        root, b["v"].astype(jnp.float32)[..., None], lower=True
    )
    return (white**2).sum((1, 2)).mean() + jnp.log(jnp.diagonal(root, 0, 1, 2)).sum(1).mean()


# Gradients within the loss.


def _field(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["scale"]


def equation_of_physics(p, b):
    """The Laplacian of each row's field is what the row says."""
    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: _field(p, x))(x)))
    return squares(laplacian(b["v"]), b["advantage"])


def gradient_penalty(p, b):
    slopes = jax.vmap(jax.grad(lambda x: _field(p, x)))(b["v"])
    return ((jnp.linalg.norm(slopes, axis=1) - 1) ** 2).mean() - jax.vmap(lambda x: _field(p, x))(
        b["v"]
    ).mean()


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
    pallas_kernel_of_parameters_alone=lambda p, b: squares(
        b["v"] @ kernel(tanh_kernel, p["a"]), b["z"]
    ),
    approximate_top_k_of_each_row=lambda p, b: lax.approx_max_k((b["v"] @ p["a"]), 3)[0].mean(),
    variational_autoencoder=lambda p, b, rng: _variational(
        p, b, jax.random.normal(rng, b["v"].shape)
    ),
    median_of_each_row=lambda p, b: (jnp.median(b["x"] @ p["a"], axis=1) ** 2).mean(),
)
