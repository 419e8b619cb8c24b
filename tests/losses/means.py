"""Means over rows: losses of every trade, noise, gradients within, and what is opaque."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import crossshard
from tests.losses.cases import is_mean
from tests.losses.parts import (
    EXPERTS,
    KINDS,
    TIME,
    WIDTH,
    WORDS,
    attend,
    block,
    cross_entropy,
    hidden,
    kernel,
    log_probabilities,
    opaque,
    out_of,
    projected,
    rms,
    row_losses,
    scan_of,
    squares,
    swapped,
    swiglu,
    tanh_kernel,
    token_losses,
    unit,
    with_gradient,
)

# Regression and classification.


@is_mean()
def huber(p, b):
    return optax.huber_loss(out_of(p, b), b["z"], delta=0.5).mean()


@is_mean()
def quantiles(p, b):
    off = b["z"][..., None] - (out_of(p, b)[..., None] + p["scale"][:3])
    levels = jnp.asarray([0.1, 0.5, 0.9], off.dtype)
    return jnp.maximum(levels * off, (levels - 1) * off).mean()


@is_mean()
def hinge(p, b):
    return jax.nn.relu(1 - jnp.sign(b["z"]) * out_of(p, b)).mean()


@is_mean()
def multiclass_hinge(p, b):
    scores = out_of(p, b)[:, :KINDS]
    right = jnp.take_along_axis(scores, b["kind"][:, None], 1)
    return jax.nn.relu(1 + scores - right).sum(1).mean() - 1


@is_mean()
def focal(p, b):
    losses = token_losses(p, b)
    return ((1 - jnp.exp(-losses)) ** 2 * losses).mean()


@is_mean()
def sigmoid_of_each_label(p, b):
    wanted = (b["z"] > 0).astype(b["z"].dtype)
    return optax.sigmoid_binary_cross_entropy(out_of(p, b), wanted).sum(1).mean()


@is_mean()
def dice_of_each_row(p, b):
    found = jax.nn.sigmoid(jnp.einsum("rtd,d->rt", b["x"] @ p["a"], p["scale"]))
    both = (found * b["mask"]).sum(1)
    return (1 - (2 * both + 1) / (found.sum(1) + b["mask"].sum(1) + 1)).mean()


@is_mean()
def gaussian_likelihood(p, b):
    spread = jax.nn.softplus(b["v"] @ p["c"]) + 0.1
    return (jnp.log(spread) + ((out_of(p, b) - b["z"]) / spread) ** 2 / 2).mean()


@is_mean()
def mixture_density(p, b):
    logits, centres = b["v"] @ p["route"], jnp.einsum("rd,edf->ref", b["v"], p["experts"])
    errors = -((centres - b["z"][:, None]) ** 2).sum(-1) / 2
    return -jax.nn.logsumexp(jax.nn.log_softmax(logits) + errors, axis=1).mean()


@is_mean()
def cosine_of_two_views(p, b):
    one, other = unit(out_of(p, b)), unit(b["z"] @ p["c"])
    return -(one * lax.stop_gradient(other)).sum(1).mean()


@is_mean()
def contrastive_within_a_row(p, b):
    found, wanted = unit(b["x"] @ p["a"]), unit(b["y"] @ p["b"])
    scores = jnp.einsum("rtd,rsd->rts", found, wanted) * 5
    return -jnp.trace(jax.nn.log_softmax(scores), axis1=1, axis2=2).mean()


@is_mean()
def connectionist_temporal_classification(p, b):
    logits = (b["x"] @ p["out"]).astype(jnp.float32)
    late = (np.arange(4) >= jnp.minimum(b["length"], 4)[:, None] - 1).astype(jnp.float32)
    return optax.ctc_loss(logits, jnp.zeros_like(logits[..., 0]), b["labels"][:, :4], late).mean()


@is_mean()
def conditional_random_field(p, b):
    scores, moves = b["x"] @ p["route"], p["route"][:EXPERTS]
    tags = b["labels"] % EXPERTS

    def one(alpha, score):
        return jax.nn.logsumexp(alpha[:, :, None] + moves, axis=1) + score, None

    alpha, _ = lax.scan(one, scores[:, 0], swapped(scores[:, 1:]))
    path = jnp.take_along_axis(scores, tags[..., None], 2)[..., 0].sum(1)
    path += moves[tags[:, :-1], tags[:, 1:]].sum(1)
    return (jax.nn.logsumexp(alpha, axis=1) - path).mean()


@is_mean()
def ranking_within_each_row(p, b):
    scores, wanted = (b["x"] @ p["scale"]), b["reward"]
    worse = (wanted[:, :, None] > wanted[:, None]).astype(scores.dtype)
    losses = jax.nn.softplus(scores[:, None] - scores[:, :, None])
    return ((losses * worse).sum((1, 2)) / worse.sum((1, 2))).mean()


@is_mean()
def weight_decay_in_the_loss(p, b):
    return row_losses(p, b).mean() + 1e-2 * ((p["a"] ** 2).sum() + jnp.abs(p["b"]).sum())


@is_mean()
def spectral_norm_of_a_parameter(p, b):
    def turn(u, _):
        v = unit(p["a"].T @ u)
        return unit(p["a"] @ v), v

    u, v = lax.scan(turn, jnp.ones(WIDTH, p["a"].dtype), None, 3)
    return squares(b["v"] @ (p["a"] / (u @ p["a"] @ v[-1])), b["z"])


# Preferences, rewards, control.


def _margins(p, b):
    won = log_probabilities(p, b["words"]) - b["old"][:, 1:]
    lost = log_probabilities(p, b["rejected"]) - b["old_rejected"][:, 1:]
    return won.sum(1) - lost.sum(1)


@is_mean()
def direct_preference_optimization(p, b):
    return -jax.nn.log_sigmoid(0.5 * _margins(p, b)).mean()


@is_mean()
def identity_preference_optimization(p, b):
    return ((_margins(p, b) - 0.5) ** 2).mean()


@is_mean()
def kahneman_tversky_with_a_given_reference(p, b):
    gains = (log_probabilities(p, b["words"]) - b["old"][:, 1:]).sum(1)
    return jnp.where(
        b["kind"] % 2 == 0, 1 - jax.nn.sigmoid(gains - 0.1), jax.nn.sigmoid(gains - 0.1)
    ).mean()


@is_mean()
def simple_preference_optimization(p, b):
    score = lambda ids, there: (log_probabilities(p, ids) * there).sum(1) / there.sum(1)
    margin = score(b["words"], b["mask"][:, 1:]) - score(b["rejected"], b["mask"][:, 1:])
    return -jax.nn.log_sigmoid(2 * margin - 0.3).mean()


@is_mean()
def reward_model(p, b):
    score = lambda ids: hidden(p, ids)[:, -1] @ p["scale"]
    return -jax.nn.log_sigmoid(score(b["words"]) - score(b["rejected"])).mean()


@is_mean()
def group_relative_policy_with_given_advantages(p, b):
    ratio = jnp.exp(log_probabilities(p, b["words"]) - b["old"][:, 1:])
    gain = 1 + b["advantage"][:, None]
    losses = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    there = b["mask"][:, 1:]
    return ((losses * there).sum(1) / there.sum(1)).mean()


@is_mean()
def advantages_of_a_group_that_is_one_row(p, b):
    """Eight answers to each question stand in one row."""
    gain = b["reward"] - b["reward"].mean(1, keepdims=True)
    gain = gain / (b["reward"].std(1, keepdims=True) + 1e-3)
    return (gain * token_losses(p, b)).mean()


@is_mean()
def proximal_policy_with_a_value_and_an_entropy(p, b):
    logits, value = b["v"] @ p["route"], b["v"] @ p["scale"]
    chosen = -cross_entropy(logits, b["kind"])
    ratio = jnp.exp(chosen - b["old"][:, 0] - 1)
    gain = b["advantage"]
    policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
    entropy = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(1).mean()
    return policy + 0.5 * squares(value, b["z"][:, 0]) - 0.01 * entropy


@is_mean()
def reinforce(p, b):
    return (cross_entropy(b["v"] @ p["route"], b["kind"]) * b["advantage"]).mean()


@is_mean()
def temporal_difference_target(p, b):
    value = lambda x: jnp.tanh(x @ p["a"]) @ p["route"]
    now = jnp.take_along_axis(value(b["v"]), b["kind"][:, None], 1)[:, 0]
    target = b["advantage"] + 0.9 * lax.stop_gradient(value(b["z"]).max(1))
    return optax.huber_loss(now, target).mean()


@is_mean()
def generalized_advantages_along_a_row(p, b):
    values = b["x"] @ p["scale"]
    errors = b["reward"][:, :-1] + 0.9 * values[:, 1:] - values[:, :-1]
    one = lambda later, error: (error + 0.8 * later,) * 2
    _, gains = lax.scan(one, jnp.zeros_like(errors[:, 0]), swapped(errors), reverse=True)
    target = lax.stop_gradient(swapped(gains) + values[:, :-1])
    return squares(values[:, :-1], target)


@is_mean()
def distillation(p, b):
    teacher = jax.nn.softmax(b["x"] @ lax.stop_gradient(p["out"]) * 2)
    student = jax.nn.log_softmax(jnp.tanh(b["x"] @ p["a"]) @ p["out"])
    return (teacher * (jnp.log(teacher) - student)).sum(-1).mean()


# Ways to compute: fewer bits, adapters, loops, branches, custom gradients.


@is_mean()
def low_rank_adapter(p, b):
    return squares(b["v"] @ (lax.stop_gradient(p["a"]) + 2 * p["small"] @ p["narrow"]), b["z"])


def _rounded(x, levels=7):
    size = jnp.abs(x).max() / levels
    return x + lax.stop_gradient(jnp.round(x / size) * size - x)


@is_mean()
def quantized_weights_straight_through(p, b):
    return squares(jnp.tanh(b["v"] @ _rounded(p["a"])) @ _rounded(p["b"]), b["z"])


@is_mean()
def quantized_activations_with_a_scale_for_each_token(p, b):
    size = jnp.abs(b["x"]).max(-1, keepdims=True) / 7
    x = b["x"] + lax.stop_gradient(jnp.round(b["x"] / size) * size - b["x"])
    return squares(x @ p["a"], b["y"])


@is_mean()
def eight_bit_floats(p, b):
    to_eight = lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype)
    cast = lambda x: x + lax.stop_gradient(to_eight(x) - x)
    return squares(cast(b["v"]) @ cast(p["a"]), b["z"])


@is_mean()
def sixteen_bits_inside(p, b):
    x = b["v"].astype(jnp.bfloat16).astype(jnp.float32)
    return squares(jnp.tanh(x @ p["a"].astype(jnp.float32)), b["z"].astype(jnp.float32))


@is_mean()
def layers_scanned_with_checkpoint(p, b):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(rms(x) @ w), None))
    return squares(lax.scan(layer, b["x"], p["layers"])[0], b["y"])


@is_mean()
def checkpoint_with_a_policy(p, b):
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return squares(jax.checkpoint(lambda x: swiglu(p, rms(x)), policy=saved)(b["x"]), b["y"])


@is_mean()
def while_loop_over_inputs(p, b):
    """Newton's square root of each number, until all are exact."""

    def turn(carry):
        count, x = carry
        return count + 1, (x + b["v"] ** 2 / x) / 2

    start = (0, jnp.ones_like(b["v"]))
    _, root = lax.while_loop(lambda carry: carry[0] < 6, turn, start)
    return squares(root @ p["a"], b["z"])


@is_mean()
def fori_loop(p, b):
    return squares(lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ p["a"]), b["v"]), b["z"])


@is_mean()
def branch_by_a_parameter(p, b):
    is_large = p["scale"].sum() > 0
    found = lax.cond(is_large, lambda x: x @ p["a"], lambda x: x @ p["b"], b["v"])
    return squares(found, b["z"])


@is_mean()
def branch_of_each_row(p, b):
    ways = [lambda x, i=i: jnp.tanh(x @ p["layers"][i]) for i in range(3)]
    found = jax.vmap(lambda i, x: lax.switch(i, ways, x))(b["kind"], b["v"])
    return squares(found, b["z"])


@jax.custom_jvp
def _stable(x):
    return jnp.log1p(jnp.exp(x))


_stable.defjvp(lambda xs, ts: (_stable(*xs), ts[0] * jax.nn.sigmoid(xs[0])))


@is_mean()
def custom_jvp(p, b):
    return squares(_stable(b["v"] @ p["a"]), b["z"])


@is_mean()
def custom_vjp_that_reverses(p, b):
    return squares(with_gradient(lambda g: -g)(b["v"] @ p["a"]) @ p["b"], b["z"])


@is_mean()
def custom_vjp_that_shrinks_small_entries_of_each_row(p, b):
    shrunk = lambda g: g * jnp.abs(g) / jnp.abs(g).max(1, keepdims=True)
    return squares(with_gradient(shrunk)(b["v"] @ p["a"]), b["z"])


@is_mean()
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


@is_mean()
def pallas_kernel_of_each_row(p, b):
    found = jax.vmap(lambda x: kernel(tanh_kernel, x))(b["v"] @ p["a"])
    return squares(found, b["z"])


@is_mean()
def pallas_kernel_with_a_grid_over_rows(p, b):
    from jax.experimental import pallas

    x = b["v"] @ p["a"]
    spec = pallas.BlockSpec((1, WIDTH), lambda i: (i, 0))
    options = {"grid": (len(x),), "in_specs": [spec], "out_specs": spec}
    return squares(kernel(tanh_kernel, x, **options), b["z"])


@is_mean()
def pallas_kernel_of_all_rows_at_once(p, b):
    return squares(kernel(tanh_kernel, b["v"] @ p["a"]), b["z"])


@is_mean()
def pallas_kernel_of_parameters_alone(p, b):
    return squares(b["v"] @ kernel(tanh_kernel, p["a"]), b["z"])


@is_mean()
def composite_of_parameters_alone(p, b):
    twice = jax.custom_jvp(lax.composite(lambda x: 2 * jnp.tanh(x), "own.twice"))
    twice.defjvp(lambda xs, ts: (twice(*xs), ts[0] * 2 * (1 - jnp.tanh(xs[0]) ** 2)))
    return squares(b["v"] @ twice(p["a"]), b["z"])


@is_mean()
def callback_expanded(p, b):
    return squares(opaque(lambda x: np.round(x, 3), b["v"] @ p["a"]), b["z"])


@is_mean()
def callback_one_row_after_another(p, b):
    of_row = lambda x: opaque(np.sort, x, vmap_method="sequential")
    return squares(jax.vmap(of_row)(b["v"] @ p["a"]), b["z"])


@is_mean()
def callback_marked_as_row_wise(p, b):
    f = crossshard.rowwise(lambda x: opaque(lambda x: np.round(x, 3), x))
    return squares(f(b["v"] @ p["a"]), b["z"])


@is_mean()
def pallas_kernel_marked_as_row_wise(p, b):
    f = crossshard.rowwise(lambda x: kernel(tanh_kernel, x))
    return squares(f(b["v"] @ p["a"]), b["z"])


@is_mean()
def approximate_top_k_of_each_row(p, b):
    return lax.approx_max_k((b["v"] @ p["a"]), 3)[0].mean()


# Noise.


@is_mean()
def dropout_by_the_shards_key(p, b, rng):
    x = jnp.tanh(b["x"] @ p["a"])
    return squares(jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x / 0.8, 0) @ p["b"], b["y"])


@is_mean(rng_per="row")
def dropout_by_a_key_for_each_row(p, b, rng):
    x = jnp.tanh(b["v"] @ p["a"])
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, (WIDTH,)))(rng)
    return squares(jnp.where(keep, x / 0.8, 0) @ p["b"], b["z"])


@is_mean()
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


@is_mean()
def variational_autoencoder(p, b, rng):
    return _variational(p, b, jax.random.normal(rng, b["v"].shape))


@is_mean(rng_per="row")
def variational_autoencoder_by_row(p, b, rng):
    return _variational(p, b, jax.vmap(lambda key: jax.random.normal(key, (WIDTH,)))(rng))


@is_mean()
def gumbel_softmax(p, b, rng):
    logits = b["v"] @ p["route"]
    noise = jax.random.gumbel(rng, logits.shape).astype(logits.dtype)
    chosen = jax.nn.softmax((logits + noise) * 2)
    return squares(jnp.einsum("re,edf,rd->rf", chosen, p["experts"], b["v"]), b["z"])


@is_mean()
def diffusion_with_given_noise(p, b):
    angle = b["time"][:, None] * 1.5
    noisy = jnp.cos(angle) * b["v"] + jnp.sin(angle) * b["noise"]
    return squares(jnp.tanh(noisy @ p["a"] + angle * p["bias"]) @ p["b"], b["noise"])


@is_mean()
def diffusion_with_the_shards_noise(p, b, rng):
    of_time, of_noise = jax.random.split(rng)
    time = jax.random.uniform(of_time, (len(b["v"]), 1)).astype(b["v"].dtype)
    noise = jax.random.normal(of_noise, b["v"].shape).astype(b["v"].dtype)
    noisy = jnp.sqrt(1 - time) * b["v"] + jnp.sqrt(time) * noise
    return squares(jnp.tanh(noisy @ p["a"] + time * p["bias"]) @ p["b"], noise)


@is_mean()
def flow_matching(p, b):
    time = b["time"][:, None]
    between = (1 - time) * b["noise"] + time * b["v"]
    return squares(jnp.tanh(between @ p["a"] + time * p["bias"]) @ p["b"], b["v"] - b["noise"])


@is_mean()
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


@is_mean()
def convolutions_and_pooling(p, b):
    x = jax.nn.relu(_convolved(b["x"][..., None], p["filter"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(_convolved(x, p["filter2"])).mean((1, 2))
    return cross_entropy(x @ p["head"], b["kind"]).mean()


@is_mean()
def group_norm_of_images(p, b):
    x = _convolved(b["x"][..., None], p["filter"])
    x = (x - x.mean((1, 2), keepdims=True)) / jnp.sqrt(x.var((1, 2), keepdims=True) + 1e-2)
    return cross_entropy(jax.nn.gelu(x).mean((1, 2)) @ p["head"], b["kind"]).mean()


@is_mean()
def down_and_up_again(p, b):
    x = _convolved(b["x"][..., None], p["filter"])
    small = jax.nn.gelu(_convolved(x.reshape(-1, 4, 2, 4, 2, 4).mean((2, 4)), p["filter2"]))
    large = jax.image.resize(small, x.shape, "nearest")
    return squares((x + large) @ p["head"], b["y"][..., None])


@is_mean()
def mixer(p, b):
    mixed = b["x"] + jnp.einsum("rtd,ts->rsd", rms(b["x"]), p["c"])
    return squares(mixed + swiglu(p, rms(mixed)), b["y"])


@is_mean()
def graph_in_each_row(p, b):
    sent = jnp.einsum("rts,rsd->rtd", b["edges"], jnp.tanh(b["x"] @ p["a"]))
    return squares((sent + b["x"]).mean(1) @ p["b"], b["z"])


@is_mean()
def segments_summed_in_each_row(p, b):
    total = jax.vmap(lambda x, s: jax.ops.segment_sum(x, s, 4))(b["x"] @ p["a"], b["segments"])
    return squares(jnp.tanh(total).mean(1) @ p["b"], b["z"])


@is_mean()
def bag_of_words(p, b):
    return cross_entropy(p["embed"][b["words"]].sum(1) @ p["out"], b["labels"][:, 0]).mean()


@is_mean()
def two_towers(p, b):
    user, item = p["embed"][b["words"][:, 0]], p["embed"][b["labels"][:, 0]]
    return squares((jnp.tanh(user @ p["a"]) * (item @ p["b"])).sum(1), b["advantage"])


# Operations along a row.


@is_mean()
def spectrum_of_each_row(p, b):
    found = jnp.fft.rfft((b["x"] @ p["a"]).astype(jnp.float32), axis=1)
    return jnp.log1p(jnp.abs(found) ** 2).mean()


@is_mean()
def sorted_within_each_row(p, b):
    return jnp.abs(jnp.sort(b["x"] @ p["a"], 1) - jnp.sort(b["y"], 1)).mean()


@is_mean()
def median_of_each_row(p, b):
    return (jnp.median(b["x"] @ p["a"], axis=1) ** 2).mean()


def _matrix(p, b):
    x = (b["x"] @ p["a"]).astype(jnp.float32)
    return jnp.einsum("rtd,rte->rde", x, x) / TIME + 0.5 * jnp.eye(WIDTH)


@is_mean()
def equations_solved_in_each_row(p, b):
    found = jnp.linalg.solve(_matrix(p, b), b["v"].astype(jnp.float32)[..., None])[..., 0]
    return squares(found, b["z"])


@is_mean()
def cholesky_of_each_row(p, b):
    root = jnp.linalg.cholesky(_matrix(p, b))
    white = jax.scipy.linalg.solve_triangular(
        root, b["v"].astype(jnp.float32)[..., None], lower=True
    )
    return (white**2).sum((1, 2)).mean() + jnp.log(jnp.diagonal(root, 0, 1, 2)).sum(1).mean()


@is_mean()
def einsums(p, b):
    one = jnp.einsum("rtd,rsd,de->rtse", b["x"], b["y"], p["a"])
    two = jnp.einsum("rtse,rte->rs", one, b["x"]) / 20
    return squares(jnp.einsum("rs,srd->rd", two, swapped(b["y"])), b["z"])


@is_mean()
def window_that_starts_where_each_row_says(p, b):
    cut = jax.vmap(lambda x, at: lax.dynamic_slice_in_dim(x, at, 3))(b["x"], b["start"])
    return squares(jnp.tanh(cut @ p["a"]).mean(1), b["z"])


@is_mean()
def scattered_within_each_row(p, b):
    put = jax.vmap(lambda at, x: jnp.zeros((WORDS, WIDTH), x.dtype).at[at].add(x))
    return squares(put(b["words"], b["x"] @ p["a"])[:, :TIME], b["y"])


@is_mean()
def splines_by_search(p, b):
    knots = jnp.linspace(-2, 2, WIDTH)
    at = jax.vmap(lambda x: jnp.searchsorted(knots, x))(b["v"])
    return squares(p["scale"][jnp.clip(at, 0, WIDTH - 1)] * b["v"] + p["bias"], b["z"])


@is_mean()
def top_words_of_each_row(p, b):
    scores, at = lax.top_k(b["x"] @ p["scale"], 3)
    return squares(
        (jnp.take_along_axis(b["x"], at[..., None], 1) * scores[..., None]).sum(1), b["z"]
    )


# Gradients within the loss.


def _field(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["scale"]


@is_mean()
def equation_of_physics(p, b):
    """The Laplacian of each row's field is what the row says."""
    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: _field(p, x))(x)))
    return squares(laplacian(b["v"]), b["advantage"])


@is_mean()
def gradient_penalty(p, b):
    slopes = jax.vmap(jax.grad(lambda x: _field(p, x)))(b["v"])
    return ((jnp.linalg.norm(slopes, axis=1) - 1) ** 2).mean() - jax.vmap(lambda x: _field(p, x))(
        b["v"]
    ).mean()


@is_mean()
def gradient_of_a_sum_over_rows(p, b):
    """Each row's slope, as people take it: the gradient of the sum."""
    slopes = jax.grad(lambda x: _field(p, x).sum())(b["v"])
    return squares(slopes, b["z"])


@is_mean()
def sliced_score_matching(p, b):
    score = lambda x: jnp.tanh(x @ p["a"]) @ p["b"]
    found, along = jax.jvp(score, (b["v"],), (b["noise"],))
    return ((along * b["noise"]).sum(1) + (found**2).sum(1) / 2).mean()


@is_mean()
def inner_step_of_each_row(p, b):
    def of_row(x, y):
        loss = lambda w: squares(jnp.tanh(x @ w) @ p["b"], y)
        return loss(p["a"] - 0.1 * jax.grad(loss)(p["a"]))

    return jax.vmap(of_row)(b["x"], b["y"]).mean()


@is_mean()
def hypernetwork(p, b):
    weights = jnp.einsum("rd,edf->ref", b["v"], p["experts"])
    return squares(
        jnp.tanh(jnp.einsum("rtd,red->rte", b["x"], weights)) @ p["head"], b["y"][..., :KINDS]
    )


@is_mean()
def ordinary_differential_equation(p, b):
    slope = lambda x: jnp.tanh(x @ p["a"]) @ p["b"]

    def step(x, _):
        one = slope(x)
        two = slope(x + one / 8)
        return x + (one + 2 * two + slope(x + two / 4)) / 16, None

    return squares(lax.scan(step, b["v"], None, 4)[0], b["z"])


@is_mean()
def normalizing_flow(p, b):
    one, other = jnp.split(b["v"], 2, axis=1)
    scale, shift = jnp.split(jnp.tanh(one @ p["a"][:4]), 2, axis=1)
    other = other * jnp.exp(scale) + shift
    return ((one**2).sum(1) / 2 + (other**2).sum(1) / 2 - scale.sum(1)).mean()


@is_mean()
def mean_by_vmap_and_by_sum_over_the_number(p, b):
    losses = jax.vmap(lambda x, y: ((jnp.tanh(x @ p["a"]) - y) ** 2).sum())(b["v"], b["z"])
    return losses.sum() / len(losses) / WIDTH


@is_mean()
def scores_of_a_walk_along_time(p, b):
    one = lambda at, x: ((0.9 * at + jnp.tanh(x @ p["a"])), ((at - x) ** 2).mean(1))
    return scan_of(one, jnp.zeros_like(b["v"]), b["x"]).mean()


# The axis of the shards, named where it is right.


@is_mean(on_axis=True)
def batch_norm_over_the_axis(p, b):
    x = b["v"] @ p["a"]
    mean = lax.pmean(x.mean(0), "shards")
    spread = lax.pmean((x**2).mean(0), "shards") - mean**2
    return squares(jnp.tanh((x - mean) / jnp.sqrt(spread + 0.1)) @ p["b"], b["z"])


@is_mean(on_axis=True)
def mean_over_the_axis(p, b):
    return lax.pmean(row_losses(p, b).mean(), "shards")


@is_mean(on_axis=True)
def contrastive_with_all_rows_gathered(p, b):
    one, other = unit(out_of(p, b)), unit(b["z"] @ p["c"])
    everyone = lax.all_gather(other, "shards", tiled=True)
    at = lax.axis_index("shards") * len(one) + jnp.arange(len(one))
    return cross_entropy(5 * one @ everyone.T, at).mean()


@is_mean(on_axis=True)
def token_mean_summed_over_the_axis(p, b):
    total, count = lax.psum(((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum()), "shards")
    return total / count


@is_mean(on_axis=True)
def token_count_summed_over_the_axis(p, b):
    count = lax.pmean(b["mask"].sum(), "shards")
    return (token_losses(p, b) * b["mask"]).sum() / count


@is_mean(on_axis=True)
def balance_with_the_chosen_of_the_shard_and_the_gates_of_all(p, b):
    """Linear in what is the shard's own."""
    gates = jax.nn.softmax(b["v"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(1), EXPERTS, dtype=gates.dtype).mean(0)
    return EXPERTS * (chosen * lax.pmean(gates.mean(0), "shards")).sum()


@is_mean(on_axis=True)
def advantages_normalized_over_the_axis(p, b):
    gain = b["advantage"]
    mean = lax.pmean(gain.mean(), "shards")
    spread = jnp.sqrt(lax.pmean((gain**2).mean(), "shards") - mean**2)
    return (cross_entropy(b["v"] @ p["route"], b["kind"]) * (gain - mean) / spread).mean()
