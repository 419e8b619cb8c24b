"""Losses that compare rows, or are otherwise no mean over them: none may run as if it were one."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.losses.cases import are_comparing, is_comparing
from tests.losses.parts import (
    EXPERTS,
    KINDS,
    WIDTH,
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


def _distances(x, y):
    return ((x[:, None] - y) ** 2).mean(-1)


@is_comparing()
def contrastive(p, b):
    logits = 5 * _scores(p, b)
    return -jnp.diag(jax.nn.log_softmax(logits, 0) + jax.nn.log_softmax(logits, 1)).mean()


@is_comparing()
def siglip(p, b):
    signs = 2 * jnp.eye(len(b["v"]), dtype=b["v"].dtype) - 1
    return -jax.nn.log_sigmoid(signs * (5 * _scores(p, b) - 2)).sum(1).mean()


@is_comparing()
def supervised_contrastive(p, b):
    found = unit(out_of(p, b))
    same = (b["kind"][:, None] == b["kind"]).astype(found.dtype)
    logs = jax.nn.log_softmax(found @ found.T * 3)
    return -((same * logs).sum(1) / same.sum(1)).mean()


@is_comparing()
def hardest_triplets_of_the_batch(p, b):
    found = out_of(p, b)
    distances, same = _distances(found, found), b["kind"][:, None] == b["kind"]
    positive = jnp.where(same, distances, -1e9).max(1)
    return jax.nn.relu(positive - jnp.where(same, 1e9, distances).min(1) + 1).mean()


@is_comparing()
def negatives_by_a_roll(p, b):
    found = out_of(p, b)
    wrong = (found * jnp.roll(b["z"], 1, 0)).sum(1)
    return jax.nn.softplus(wrong - (found * b["z"]).sum(1)).mean()


@is_comparing()
def contrastive_with_one_sampled_row(p, b):
    found = out_of(p, b)
    other = b["z"][b["neighbour"] % len(found)]
    return jax.nn.softplus((found * (other - b["z"])).sum(1)).mean()


@is_comparing()
def ranking_of_pairs_of_rows(p, b):
    score = out_of(p, b)[:, 0]
    worse = b["advantage"][:, None] > b["advantage"]
    return jnp.where(worse, jax.nn.softplus(score - score[:, None]), 0).sum() / worse.sum()


@is_comparing()
def maximum_mean_discrepancy(p, b):
    of = lambda x, y: jnp.exp(-_distances(x, y)).mean()
    found = out_of(p, b)
    return of(found, found) - 2 * of(found, b["z"]) + of(b["z"], b["z"])


@is_comparing()
def sinkhorn_over_rows(p, b):
    cost = _distances(out_of(p, b), b["z"])
    uniform = -jnp.log(jnp.asarray(len(cost), cost.dtype))

    def turn(dual, _):
        other = uniform - jax.nn.logsumexp(dual[:, None] - cost, axis=0)
        return uniform - jax.nn.logsumexp(other - cost, axis=1), other

    dual, others = lax.scan(turn, jnp.zeros_like(cost[0]), None, 4)
    return (jnp.exp(dual[:, None] + others[-1] - cost) * cost).sum()


@is_comparing()
def prototypes_of_the_batch(p, b):
    found = out_of(p, b)
    chosen = jax.nn.one_hot(b["kind"], KINDS, dtype=found.dtype)
    centres = chosen.T @ found / (chosen.sum(0)[:, None] + 1)
    return cross_entropy(-_distances(found, centres), b["kind"]).mean()


@is_comparing()
def attention_over_rows(p, b):
    x = b["v"]
    return squares(jax.nn.softmax(x @ p["q"] @ x.T) @ x @ p["a"], b["z"])


@is_comparing()
def proportional_hazards(p, b):
    risk = out_of(p, b)[:, 0]
    later = b["advantage"][:, None] <= b["advantage"]
    at_risk = jax.nn.logsumexp(jnp.where(later, risk, -1e9), axis=1)
    return (at_risk - risk).mean()


# Statistics of the batch.


def _standardized(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)


@is_comparing()
def batch_norm_without_a_gradient(p, b):
    x = b["v"] @ p["a"]
    mean, spread = lax.stop_gradient((x.mean(0), x.var(0)))
    return squares((x - mean) / jnp.sqrt(spread + 0.1), b["z"])


@is_comparing()
def ghost_batch_statistics(p, b):
    """Two groups, or one where there are three rows."""
    x = (b["v"] @ p["a"]).reshape(2 if len(b["v"]) % 2 == 0 else 1, -1, WIDTH)
    x = (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 0.1)
    return squares(x.reshape(-1, WIDTH), b["z"])


@is_comparing()
def vicreg(p, b):
    found = out_of(p, b)
    centred = found - found.mean(0)
    covariance = centred.T @ centred / len(found)
    apart = (covariance**2).sum() - (jnp.diag(covariance) ** 2).sum()
    return squares(found, b["z"]) + jax.nn.relu(1 - jnp.sqrt(found.var(0) + 0.01)).mean() + apart


@is_comparing()
def barlow_twins(p, b):
    one, other = _standardized(out_of(p, b)), _standardized(b["z"] @ p["c"])
    correlation = one.T @ other / len(one)
    return squares(correlation, jnp.eye(WIDTH, dtype=one.dtype))


@is_comparing()
def pearson_correlation(p, b):
    x, y = out_of(p, b)[:, 0], b["advantage"]
    x, y = x - x.mean(), y - y.mean()
    return 1 - (x * y).sum() / jnp.sqrt((x**2).sum() * (y**2).sum())


are_comparing(
    batch_norm=lambda p, b: squares(jnp.tanh(_standardized(b["v"] @ p["a"])) @ p["b"], b["z"]),
    batch_norm_of_inputs_alone=lambda p, b: squares(
        jnp.tanh(_standardized(b["v"]) @ p["a"]) @ p["b"], b["z"]
    ),
    root_of_the_mean_square=lambda p, b: jnp.sqrt(squares(out_of(p, b), b["z"])),
    logarithm_of_the_mean=lambda p, b: jnp.log(jnp.exp(row_losses(p, b)).mean()),
    explained_variance=lambda p, b: 1 - squares(out_of(p, b), b["z"]) / b["z"].var(),
)


@is_comparing()
def dice_of_the_batch(p, b):
    found = jax.nn.sigmoid(b["x"] @ p["scale"])
    return 1 - 2 * (found * b["mask"]).sum() / (found.sum() + b["mask"].sum())


@is_comparing()
def balance_of_experts_over_the_batch(p, b):
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=gates.dtype).mean(0)
    found = jnp.einsum("re,rd,edf->rf", gates, b["v"], p["experts"])
    return squares(found, b["z"]) + EXPERTS * (chosen * gates.mean(0)).sum()


@is_comparing()
def entropy_of_the_mean_prediction(p, b):
    mean = jax.nn.softmax(b["v"] @ p["route"]).mean(0)
    return (mean * jnp.log(mean)).sum() + row_losses(p, b).mean()


@is_comparing()
def experts_with_room_for_some_rows(p, b):
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=jnp.int32)
    place = ((chosen.cumsum(0) - 1) * chosen).sum(1)
    found = jnp.einsum("re,re,rd,edf->rf", chosen, gates, b["v"], p["experts"])
    return squares(found * (place < 2)[:, None], b["z"])


@is_comparing()
def normalized_advantages(p, b):
    gain = (b["advantage"] - b["advantage"].mean()) / (b["advantage"].std() + 1e-6)
    return (cross_entropy(b["v"] @ p["route"], b["kind"]) * gain).mean()


@is_comparing()
def advantages_scaled_by_the_largest(p, b):
    gain = b["advantage"] / jnp.abs(b["advantage"]).max()
    return (cross_entropy(b["v"] @ p["route"], b["kind"]) * gain).mean()


@is_comparing()
def advantages_of_groups_of_rows(p, b):
    """Groups are named by an entry, and their rows stand anywhere."""
    total = jax.ops.segment_sum(b["advantage"], b["kind"], KINDS)
    count = jax.ops.segment_sum(jnp.ones_like(b["advantage"]), b["kind"], KINDS)
    gain = b["advantage"] - (total / jnp.maximum(count, 1))[b["kind"]]
    return (cross_entropy(b["v"] @ p["route"], b["kind"]) * gain).mean()


@is_comparing()
def activations_quantized_by_the_largest_of_all_rows(p, b):
    size = jnp.abs(b["v"]).max() / 7
    x = b["v"] + lax.stop_gradient(jnp.round(b["v"] / size) * size - b["v"])
    return squares(x @ p["a"], b["z"])


@is_comparing()
def reference_of_the_batch_in_kahneman_tversky(p, b):
    gains = (log_probabilities(p, b["words"]) - b["old"][:, 1:]).sum(1)
    reference = lax.stop_gradient(gains.mean())
    return (1 - jax.nn.sigmoid(gains - reference)).mean()


# Orders, extremes and places of rows.


@is_comparing()
def losses_above_the_median_of_the_batch(p, b):
    losses = row_losses(p, b)
    middle = lax.stop_gradient(jnp.median(losses.astype(jnp.float32)))
    return jnp.where(losses > middle, losses, 0).mean()


@is_comparing()
def softmax_over_rows(p, b):
    losses = row_losses(p, b)
    return (jax.nn.softmax(losses) * losses).sum()


@is_comparing()
def loop_over_rows(p, b):
    def one(state, x):
        state = jnp.tanh(x @ p["a"] + state @ p["b"])
        return state, state

    return squares(lax.scan(one, jnp.zeros_like(b["v"][0]), b["v"])[1], b["z"])


@is_comparing()
def number_of_the_row(p, b):
    place = jnp.arange(len(b["v"]), dtype=b["v"].dtype)[:, None] / 10
    return squares(jnp.tanh(b["v"] @ p["a"] + place * p["bias"]), b["z"])


@is_comparing()
def mixup_with_a_roll(p, b):
    mix = lambda x: 0.7 * x + 0.3 * jnp.roll(x, 1, 0)
    return squares(jnp.tanh(mix(b["v"]) @ p["a"]), mix(b["z"]))


@is_comparing()
def tokens_of_all_rows_in_one_sequence(p, b):
    x = b["x"].reshape(1, -1, WIDTH)
    return squares((x @ p["a"]).cumsum(1).reshape(b["y"].shape) / 10, b["y"])


@is_comparing()
def graph_of_rows(p, b):
    sent = jax.ops.segment_sum(b["v"], b["neighbour"] % len(b["v"]), len(b["v"]))
    return squares((b["v"] + sent) @ p["a"], b["z"])


@is_comparing()
def convolution_over_rows(p, b):
    x = b["v"] @ p["a"]
    padded = jnp.pad(x, ((1, 1), (0, 0)))
    return squares((padded[:-2] + x + padded[2:]) @ p["b"], b["z"])


are_comparing(
    sorted_over_rows=lambda p, b: jnp.abs(jnp.sort(out_of(p, b), 0) - jnp.sort(b["z"], 0)).mean(),
    largest_over_rows=lambda p, b: row_losses(p, b).max(),
    worst_third=lambda p, b: lax.top_k(row_losses(p, b), len(b["v"]) // 3)[0].mean(),
    quantile_over_the_batch=lambda p, b: jnp.quantile(row_losses(p, b).astype(jnp.float32), 0.8),
    cumulative_sum_over_rows=lambda p, b: squares(out_of(p, b).cumsum(0) / 5, b["z"]),
    differences_of_rows_that_follow=lambda p, b: squares(jnp.diff(out_of(p, b), axis=0), 0),
    first_rows_only=lambda p, b: row_losses(p, b)[:2].mean(),
    every_second_row=lambda p, b: row_losses(p, b)[::2].mean(),
    first_row_is_a_support=lambda p, b: squares(
        jnp.tanh(b["v"] @ p["a"]) - jnp.tanh(b["v"][0] @ p["a"]), b["z"]
    ),
    rows_in_reverse=lambda p, b: squares(out_of(p, b)[::-1], b["z"]),
    spectrum_over_rows=lambda p, b: jnp.log1p(
        jnp.abs(jnp.fft.rfft(out_of(p, b).astype(jnp.float32), axis=0)) ** 2
    ).mean(),
)


@is_comparing()
def least_squares_over_rows(p, b):
    x = (b["v"] @ p["a"]).astype(jnp.float32)
    y = b["z"].astype(jnp.float32)
    found = jnp.linalg.solve(x.T @ x + jnp.eye(WIDTH), x.T @ y)
    return squares(x @ found, y)


# Sums, ratios and numbers of rows.


@is_comparing()
def two_ratios_without_a_weight(p, b):
    losses = token_losses(p, b)
    one = (losses * b["mask"]).sum() / b["mask"].sum()
    return one + (losses * b["spans"]).sum() / b["spans"].sum()


are_comparing(
    sum_in_place_of_a_mean=lambda p, b: row_losses(p, b).sum(),
    sum_over_a_number_written_down=lambda p, b: row_losses(p, b).sum() / 16,
    sum_over_at_least_four_rows=lambda p, b: row_losses(p, b).sum() / max(len(b["v"]), 4),
    sum_over_at_least_ten_rows=lambda p, b: row_losses(p, b).sum() / max(len(b["v"]), 10),
    sum_over_at_most_sixteen_rows=lambda p, b: row_losses(p, b).sum() / min(len(b["v"]), 16),
    sum_over_all_rows_but_one=lambda p, b: row_losses(p, b).sum() / (len(b["v"]) - 1),
    sum_over_the_root_of_the_number=lambda p, b: row_losses(p, b).sum() / len(b["v"]) ** 0.5,
    token_mean_without_a_weight=lambda p, b: (
        (token_losses(p, b) * b["mask"]).sum() / b["mask"].sum()
    ),
    token_mean_by_where=lambda p, b: token_losses(p, b).mean(where=b["is_there"]),
    regulariser_over_the_number_of_rows=lambda p, b: (
        row_losses(p, b).mean() + (p["a"] ** 2).sum() / len(b["v"])
    ),
    temperature_of_the_number_of_rows=lambda p, b: cross_entropy(
        out_of(p, b) * len(b["v"]) ** 0.5 / 3, b["kind"]
    ).mean(),
)


@is_comparing()
def branch_on_few_rows(p, b):
    losses = row_losses(p, b)
    return losses.mean() if len(losses) <= 12 else (losses**2).mean()


@is_comparing()
def branch_on_many_rows(p, b):
    losses = row_losses(p, b)
    return (losses**2).mean() if len(losses) > 20 else losses.mean()


@is_comparing()
def branch_on_a_table_of_numbers_of_rows(p, b):
    losses = row_losses(p, b)
    return losses.mean() * {3: 1.0, 8: 1.1, 12: 1.2}.get(len(losses), 1.5)


@is_comparing()
def branch_on_a_mean_over_rows(p, b):
    losses = row_losses(p, b)
    found = lax.cond(losses.mean() > 1.4, lambda x: x**2, lambda x: x, losses)
    return found.mean()


@is_comparing()
def stops_when_all_rows_are_done(p, b):
    x = b["v"] @ lax.stop_gradient(p["c"])
    _, x = lax.while_loop(
        lambda carry: jnp.abs(carry[1]).max() > 0.3,
        lambda carry: (carry[0] + 1, carry[1] * 0.8),
        (0, x),
    )
    return squares(x @ p["a"], b["z"])


# Noise that all shards share.


def _with_noise(p, b, noise):
    return squares(jnp.tanh(b["v"] @ p["a"] + noise.astype(b["v"].dtype)) @ p["b"], b["z"])


def _shared(name, draw):
    """A case that draws noise of this kind from a key that is written down."""

    def case(p, b):
        return _with_noise(p, b, draw(jax.random.key(7), b["v"].shape))

    are_comparing(**{f"shared_{name}_noise": case})


_shared("normal", jax.random.normal)
_shared("uniform", jax.random.uniform)
_shared("bernoulli", lambda key, shape: 2 * jax.random.bernoulli(key, 0.5, shape))
_shared("gumbel", jax.random.gumbel)
_shared("gamma", lambda key, shape: jax.random.gamma(key, 1.5, shape))
_shared("beta", lambda key, shape: 3 * jax.random.beta(key, 0.4, 0.4, shape))
_shared(
    "dirichlet", lambda key, shape: 5 * jax.random.dirichlet(key, jnp.ones(shape[1]), shape[:1])
)
_shared("chi_square", lambda key, shape: jax.random.chisquare(key, 2.0, shape=shape))
_shared("log_gamma", lambda key, shape: jax.random.loggamma(key, 2.0, shape))
_shared("poisson", lambda key, shape: jax.random.poisson(key, 1.0, shape))
_shared("categorical", lambda key, shape: jax.random.categorical(key, jnp.zeros(3), shape=shape))
_shared("numpy", lambda key, shape: jnp.asarray(np.random.default_rng(0).normal(size=shape)))
_shared("raw_key", lambda key, shape: jax.random.normal(jax.random.PRNGKey(3), shape))
_shared(
    "key_of_each_row",
    lambda key, shape: jax.vmap(lambda k: jax.random.normal(k, shape[1:]))(
        jax.random.split(key, shape[0])
    ),
)


@is_comparing()
def noise_keyed_by_a_parameter(p, b):
    key = jax.random.key(jnp.int32(100 * p["scale"][0].astype(jnp.float32)))
    return _with_noise(p, b, jax.random.normal(key, b["v"].shape))


@is_comparing()
def permutation_by_a_shared_key(p, b):
    order = jax.random.permutation(jax.random.key(1), len(b["v"]))
    return squares(out_of(p, b)[order], b["z"])


# What no trace sees through.


@is_comparing()
def callback_that_centres_rows(p, b):
    x = opaque(lambda x: x - x.mean(0), b["v"] @ p["a"])
    return squares(jnp.tanh(x) @ p["b"], b["z"])


are_comparing(
    callback_that_sorts_rows=lambda p, b: squares(
        opaque(lambda x: np.sort(x, 0), b["v"] @ p["a"]), b["z"]
    ),
)


@is_comparing()
def callback_beside_a_contrastive_loss(p, b):
    x = opaque(lambda x: np.round(x, 3), b["v"] @ p["a"])
    return cross_entropy(5 * unit(x) @ unit(b["z"]).T, jnp.arange(len(x))).mean()


@is_comparing()
def callback_that_looks_at_the_number_of_rows(p, b):
    x = opaque(lambda x: x * (1 + 0.02 * len(x)), b["v"] @ p["a"])
    return squares(x, b["z"])


@is_comparing()
def pallas_kernel_that_centres_rows(p, b):
    def body(x, out):
        out[...] = jnp.tanh(x[...] - x[...].mean(0, keepdims=True))

    return squares(kernel(body, b["v"] @ p["a"]), b["z"])


@is_comparing()
def pallas_kernel_that_adds_up_rows(p, b):
    def body(x, out):
        out[...] = jnp.cumsum(x[...], 0) / 5

    return squares(kernel(body, b["v"] @ p["a"]), b["z"])


@is_comparing()
def pallas_kernel_that_drops_by_the_place_of_a_row(p, b):
    from jax.experimental import pallas

    def body(x, out):
        out[...] = jnp.tanh(x[...]) * (pallas.program_id(0) % 5 + 1) / 3

    x = b["v"] @ p["a"]
    spec = pallas.BlockSpec((1, WIDTH), lambda i: (i, 0))
    return squares(kernel(body, x, grid=(len(x),), in_specs=[spec], out_specs=spec), b["z"])


# Gradients that are no mean, though the loss is one.


def _gradient(name, of_gradient):
    """A case whose gradient is changed within."""

    def case(p, b):
        return squares(with_gradient(of_gradient)(b["v"] @ p["a"]) @ p["b"], b["z"])

    are_comparing(**{f"custom_vjp_that_{name}": case})


_gradient("clips_by_the_norm_of_all_rows", lambda g: g / jnp.maximum(1, 50 * jnp.linalg.norm(g)))
_gradient("clips_by_a_fixed_bound", lambda g: jnp.clip(g, -0.004, 0.004))
_gradient("multiplies_by_the_number_of_rows", lambda g: g * len(g) / 12)
_gradient("centres_over_rows", lambda g: g - g.mean(0))
_gradient("is_a_little_more_for_more_rows", lambda g: g * (1 + 0.002 * len(g)))
_gradient("takes_the_sign", jnp.sign)
_gradient("adds_a_constant", lambda g: g + 0.01)
_gradient("centres_over_rows_in_a_callback", lambda g: opaque(lambda g: g - g.mean(0), g))
_gradient(
    "depends_on_the_number_of_rows_in_a_callback",
    lambda g: opaque(lambda g: g * (1 + 0.02 * len(g)), g),
)


@is_comparing()
def checkpoint_of_a_contrastive_loss(p, b):
    of = jax.checkpoint(lambda x, y: cross_entropy(5 * unit(x) @ unit(y).T, jnp.arange(len(x))))
    return of(out_of(p, b), b["z"]).mean()


@is_comparing()
def gradient_penalty_of_the_whole_loss(p, b):
    loss = lambda w: squares(jnp.tanh(b["v"] @ w), b["z"])
    return loss(p["a"]) + (jax.grad(loss)(p["a"]) ** 2).sum()


@is_comparing()
def inner_step_on_all_rows(p, b):
    loss = lambda w: squares(jnp.tanh(b["v"] @ w), b["z"])
    return loss(p["a"] - jax.grad(loss)(p["a"]))


# A little: about a percent, which bfloat16 must not hide.


@is_comparing()
def one_percent_of_a_contrastive_loss(p, b):
    logits = 5 * _scores(p, b)
    return row_losses(p, b).mean() - 0.02 * jnp.diag(jax.nn.log_softmax(logits)).mean()


are_comparing(
    one_percent_of_a_variance=lambda p, b: (
        row_losses(p, b).mean() - 0.05 * jnp.sqrt(out_of(p, b).var(0) + 0.01).mean()
    ),
)


@is_comparing()
def nearly_a_mean_over_tokens(p, b):
    """The mask is all ones but for some tokens."""
    there = jnp.maximum(b["mask"], b["time"][:, None] > 0.2)
    return (token_losses(p, b) * there).sum() / there.sum()


@is_comparing()
def callback_with_one_percent_of_the_mean_of_rows(p, b):
    x = opaque(lambda x: x - 0.1 * x.mean(0), b["v"] @ p["a"])
    return squares(x, b["z"])


# The axis of the shards is named, and something else is compared.


@is_comparing(on_axis=True)
def batch_norm_over_the_axis_beside_a_contrastive_loss(p, b):
    x = b["v"] @ p["a"]
    x = x - lax.pmean(x.mean(0), "shards")
    return cross_entropy(5 * unit(x) @ unit(b["z"]).T, jnp.arange(len(x))).mean()


@is_comparing(on_axis=True)
def batch_norm_over_the_axis_beside_a_token_mean(p, b):
    x = b["x"] @ p["a"]
    x = x - lax.pmean(x.mean((0, 1)), "shards")
    errors = ((x - b["y"]) ** 2).mean(-1)
    return (errors * b["mask"]).sum() / b["mask"].sum()


@is_comparing(on_axis=True)
def balance_over_the_axis_beside_one_over_the_shard(p, b):
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=gates.dtype).mean(0)
    return (chosen * gates.mean(0) * lax.pmean(gates.mean(0), "shards")).sum() * EXPERTS**2


@is_comparing(on_axis=True)
def sum_beside_a_mean_over_the_axis(p, b):
    return lax.pmean(b["v"].mean(), "shards") + row_losses(p, b).sum()


@is_comparing(on_axis=True)
def sum_over_the_axis_in_place_of_a_mean(p, b):
    return lax.psum(row_losses(p, b).mean(), "shards")


@is_comparing(on_axis=True)
def shared_noise_beside_a_mean_over_the_axis(p, b):
    noise = jax.random.normal(jax.random.key(2), b["v"].shape)
    return _with_noise(p, b, noise) + lax.pmean(row_losses(p, b).mean(), "shards")


@is_comparing(on_axis=True)
def ratio_of_the_axis_times_a_ratio_of_the_shard(p, b):
    losses = token_losses(p, b)
    total, count = lax.psum(((losses * b["mask"]).sum(), b["mask"].sum()), "shards")
    return total / count + (losses * b["spans"]).sum() / b["spans"].sum()


# As a ``Mean`` of what is no sum of rows.


@is_comparing()
def mean_of_compared_totals(p, b, mean):
    logs = jax.nn.log_softmax(5 * _scores(p, b))
    return mean(-jnp.diag(logs).sum(), len(logs))


@is_comparing()
def mean_that_counts_once(p, b, mean):
    """A total of rows over one for each shard."""
    return mean(row_losses(p, b).sum(), 1)


@is_comparing()
def mean_of_tokens_beside_a_batch_norm(p, b, mean):
    x = _standardized(b["x"] @ p["a"])
    errors = ((x - b["y"]) ** 2).mean(-1)
    return mean((errors * b["mask"]).sum(), b["mask"].sum())


are_comparing(
    mean_that_counts_by_a_root=lambda p, b, mean: mean(
        (token_losses(p, b) * b["mask"]).sum(), jnp.sqrt(b["mask"].sum())
    ),
    mean_with_a_constant_behind_its_count=lambda p, b, mean: mean(
        (token_losses(p, b) * b["mask"]).sum(), b["mask"].sum() + 20
    ),
    mean_times_a_mean=lambda p, b, mean: mean(
        row_losses(p, b).sum() * b["seen"].sum() / 5, len(b["v"])
    ),
)
