"""Losses that compare rows, or are otherwise no mean over them: none may run as if it were one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.losses.cases import COMPARING, enter
from tests.losses.parts import (
    EXPERTS,
    cross_entropy,
    kernel,
    log_probabilities,
    opaque,
    out_of,
    row_losses,
    squares,
    token_losses,
    unit,
    with_gradient,
)

# Pairs of rows.


def _scores(p, b):
    return unit(out_of(p, b)) @ unit(b["z"] @ p["c"]).T


def contrastive(p, b):
    logits = 5 * _scores(p, b)
    return -jnp.diag(jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)).mean()


def preferences_in_two_halves(p, b):
    """The answers that were chosen are the first half of the rows."""
    found = log_probabilities(p, b["words"]).sum(1)
    half = len(found) // 2
    return -jax.nn.log_sigmoid(found[:half] - found[-half:]).mean()


# Statistics of the batch.


def _standardized(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)


def dice_of_the_batch(p, b):
    found = jax.nn.sigmoid(b["x"] @ p["scale"])
    return 1 - 2 * (found * b["mask"]).sum() / (found.sum() + b["mask"].sum())


def balance_of_experts_over_the_batch(p, b):
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=gates.dtype).mean(0)
    found = jnp.einsum("re,rd,edf->rf", gates, b["v"], p["experts"])
    return squares(found, b["z"]) + EXPERTS * (chosen * gates.mean(0)).sum()


def experts_with_room_for_some_rows(p, b):
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=jnp.int32)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(1)
    found = jnp.einsum("re,re,rd,edf->rf", chosen, gates, b["v"], p["experts"])
    return squares(found * (place < 2)[:, None], b["z"])


def normalized_advantages(p, b):
    gain = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-6)
    return (cross_entropy(b["v"] @ p["route"], b["kind"]) * gain).mean()


# Orders, extremes and places of rows.


def softmax_over_rows(p, b):
    losses = row_losses(p, b)
    return (jax.nn.softmax(losses) * losses).sum()


# Sums, ratios and numbers of rows.


def two_ratios_without_a_weight(p, b):
    losses = token_losses(p, b)
    one = (losses * b["mask"]).sum() / b["mask"].sum()
    return one + (losses * b["spans"]).sum() / b["spans"].sum()


def branch_on_few_rows(p, b):
    losses = row_losses(p, b)
    return losses.mean() if len(losses) <= 12 else (losses**2).mean()


def stops_when_all_rows_are_done(p, b):
    x = b["v"] @ lax.stop_gradient(p["c"])
    _, x = lax.while_loop(
        lambda carry: jnp.abs(carry[1]).max() > 0.3,
        lambda carry: (carry[0] + 1, carry[1] * 0.8),
        (0, x),
    )
    return squares(x @ p["a"], b["z"])


# What no trace sees through.


def callback_that_centres_rows(p, b):
    x = opaque(lambda x: x - x.mean(0), b["v"] @ p["a"])
    return squares(jnp.tanh(x) @ p["b"], b["z"])


def callback_beside_a_contrastive_loss(p, b):
    x = opaque(lambda x: np.round(x, 3), b["v"] @ p["a"])
    return cross_entropy(5 * unit(x) @ unit(b["z"]).T, jnp.arange(len(x))).mean()


def pallas_kernel_that_centres_rows(p, b):
    def body(x, out):
        out[...] = jnp.tanh(x[...] - x[...].mean(0, keepdims=True))

    return squares(kernel(body, b["v"] @ p["a"]), b["z"])


# Gradients that are no mean, though the loss is one.


GRADIENTS = {
    "clips_by_the_norm_of_all_rows": lambda g: g / jnp.maximum(1, 50 * jnp.linalg.norm(g)),
    "clips_by_a_fixed_bound": lambda g: jnp.clip(g, -0.004, 0.004),
    "multiplies_by_the_number_of_rows": lambda g: g * len(g) / 12,
    "is_a_little_more_for_more_rows": lambda g: g * (1 + 0.002 * len(g)),
    "takes_the_sign": jnp.sign,
    "casts_to_8_bits": lambda g: g.astype(jnp.float8_e4m3fn).astype(g.dtype),
    "centres_over_rows_in_a_callback": lambda g: opaque(lambda g: g - g.mean(0), g),
}


def _with_gradient(of):
    return lambda p, b: squares(with_gradient(of)(b["v"] @ p["a"]) @ p["b"], b["z"])


def gradient_penalty_of_the_whole_loss(p, b):
    loss = lambda w: squares(jnp.tanh(b["v"] @ w), b["z"])
    return loss(p["a"]) + (jax.grad(loss)(p["a"]) ** 2).sum()


# A little: about a percent, which bfloat16 must not hide.


def one_percent_of_a_contrastive_loss(p, b):
    logits = 5 * _scores(p, b)
    return row_losses(p, b).mean() - 0.02 * jnp.diag(jax.nn.log_softmax(logits)).mean()


def nearly_a_mean_over_tokens(p, b):
    """The mask is all ones but for some tokens."""
    there = jnp.maximum(b["mask"], b["time"][:, None] > 0.2)
    return (token_losses(p, b) * there).sum() / there.sum()


def callback_with_one_percent_of_the_mean_of_rows(p, b):
    x = opaque(lambda x: x - 0.1 * x.mean(0), b["v"] @ p["a"])
    return squares(x, b["z"])


# The axis of the shards is named, and something else is compared.


def batch_norm_over_the_axis_beside_a_contrastive_loss(p, b):
    x = b["v"] @ p["a"]
    x = x - lax.pmean(x.mean(0), "shards")
    return cross_entropy(5 * unit(x) @ unit(b["z"]).T, jnp.arange(len(x))).mean()


def balance_over_the_axis_beside_one_over_the_shard(p, b):
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=gates.dtype).mean(0)
    return (chosen * gates.mean(0) * lax.pmean(gates.mean(0), "shards")).sum() * EXPERTS**2


def ratio_of_the_axis_times_a_ratio_of_the_shard(p, b):
    losses = token_losses(p, b)
    total, count = lax.psum(((losses * b["mask"]).sum(), b["mask"].sum()), "shards")
    return total / count + (losses * b["spans"]).sum() / b["spans"].sum()


# As a ``Mean`` of what is no sum of rows.


def mean_of_compared_totals(p, b, mean):
    logs = jax.nn.log_softmax(5 * _scores(p, b))
    return mean(-jnp.diag(logs).sum(), len(logs))


def mean_that_counts_once(p, b, mean):
    """A total of rows over one for each shard."""
    return mean(row_losses(p, b).sum(), 1)


enter(
    COMPARING,
    globals(),
    batch_norm=lambda p, b: squares(jnp.tanh(_standardized(b["v"] @ p["a"])) @ p["b"], b["z"]),
    logarithm_of_the_mean=lambda p, b: jnp.log(jnp.exp(row_losses(p, b)).mean()),
    sorted_over_rows=lambda p, b: jnp.abs(jnp.sort(out_of(p, b), 0) - jnp.sort(b["z"], 0)).mean(),
    four_bits_with_one_scale=lambda p, b: squares(
        (jnp.round(b["v"] / jnp.abs(b["v"]).max() * 7) * jnp.abs(b["v"]).max()) @ p["a"], b["z"]
    ),
    largest_over_rows=lambda p, b: row_losses(p, b).max(),
    worst_third=lambda p, b: lax.top_k(row_losses(p, b), len(b["v"]) // 3)[0].mean(),
    first_rows_only=lambda p, b: row_losses(p, b)[:2].mean(),
    spectrum_over_rows=lambda p, b: jnp.log1p(
        jnp.abs(jnp.fft.rfft(out_of(p, b).astype(jnp.float32), axis=0)) ** 2
    ).mean(),
    sum_in_place_of_a_mean=lambda p, b: row_losses(p, b).sum(),
    sum_over_at_least_ten_rows=lambda p, b: row_losses(p, b).sum() / max(len(b["v"]), 10),
    sum_over_all_rows_but_one=lambda p, b: row_losses(p, b).sum() / (len(b["v"]) - 1),
    sum_over_the_root_of_the_number=lambda p, b: row_losses(p, b).sum() / len(b["v"]) ** 0.5,
    regulariser_over_the_number_of_rows=lambda p, b: (
        row_losses(p, b).mean() + (p["a"] ** 2).sum() / len(b["v"])
    ),
    sum_over_the_axis_in_place_of_a_mean=lambda p, b: lax.psum(row_losses(p, b).mean(), "shards"),
    part_of_the_token_mean_of_all=lambda p, b: (
        (token_losses(p, b) * b["mask"]).sum() / lax.psum(b["mask"].sum(), "shards")
    ),
    sum_over_the_axis_by_the_rows_of_a_shard=lambda p, b: (
        lax.psum(row_losses(p, b).sum(), "shards") / len(b["v"])
    ),
    mean_that_counts_by_a_root=lambda p, b, mean: mean(
        (token_losses(p, b) * b["mask"]).sum(), jnp.sqrt(b["mask"].sum())
    ),
    mean_with_a_constant_behind_its_count=lambda p, b, mean: mean(
        (token_losses(p, b) * b["mask"]).sum(), b["mask"].sum() + 20
    ),
    **{f"custom_vjp_that_{name}": _with_gradient(of) for name, of in GRADIENTS.items()},
)
