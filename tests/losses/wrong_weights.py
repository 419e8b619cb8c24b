"""Losses with a weight that is not what they divide by: none may be wrong in silence."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.losses.cases import WRONG_WEIGHT, enter, weighted
from tests.losses.parts import (
    cross_entropy,
    kernel,
    log_probabilities,
    opaque,
    row_losses,
    tanh_kernel,
    token_losses,
    unit,
)

tokens = lambda b: b["mask"].sum()


rows = lambda b: len(b["v"])


def _ratio(losses, there, count=None):
    return (losses * there).sum() / (there.sum() if count is None else count)


def _masked(p, b):
    return _ratio(token_losses(p, b), b["mask"])


@weighted("padded")
def words_in_place_of_a_mask(p, b):
    there = b["padded"] != 0
    return jnp.where(there, token_losses(p, b, "padded"), 0).sum() / there.sum()


@weighted("mask")
def count_that_depends_on_the_parameters(p, b):
    losses = token_losses(p, b)
    hard = lax.stop_gradient((losses > 2.5).astype(losses.dtype)) * b["mask"]
    return _ratio(losses, hard)


@weighted("mask")
def mean_of_the_mask_and_an_epsilon(p, b):
    """Small beside a mean of a half; of many tokens it would be a count of some."""
    return (token_losses(p, b) * b["mask"]).mean() / (b["mask"].mean() + 2e-2)


@weighted("mask")
def ratio_beside_a_contrastive_term(p, b):
    x = b["v"] @ p["a"]
    scores = 5 * unit(x) @ unit(b["z"]).T
    return _masked(p, b) + cross_entropy(scores, jnp.arange(len(x))).mean()


@weighted("spans")
def callback_and_another_mask(p, b):
    x = opaque(lambda x: x, b["x"] @ p["a"])
    return _ratio(((x - b["y"]) ** 2).mean(-1), b["mask"]) + 0 * b["spans"].sum()


@weighted(rows)
def kernel_and_the_number_of_rows(p, b):
    x = jax.vmap(lambda x: kernel(tanh_kernel, x))(b["x"] @ p["a"])
    return _ratio(((x - b["y"]) ** 2).mean(-1), b["mask"]) + 0 * b["v"].sum()


enter(
    WRONG_WEIGHT,
    globals(),
    mask_of_all_and_loss_of_the_shifted=(
        "mask",
        lambda p, b: _ratio(-log_probabilities(p, b["words"]), b["mask"][:, 1:]),
    ),
    shifted_mask_and_loss_of_all=(lambda b: b["mask"][:, 1:].sum(), _masked),
    one_of_two_masks=("mask", lambda p, b: _ratio(token_losses(p, b), b["mask"] * b["spans"])),
    sum_of_two_masks=(
        lambda b: b["mask"].sum() + b["spans"].sum(),
        lambda p, b: _ratio(token_losses(p, b), b["mask"] * b["spans"]),
    ),
    another_mask=(
        "spans",
        lambda p, b: _ratio(token_losses(p, b), b["mask"]) + 0 * b["spans"].sum(),
    ),
    function_that_counts_one_column_more=(
        lambda b: b["mask"].sum() + len(b["mask"]),
        _masked,
    ),
    square_of_the_count=(lambda b: b["mask"].sum() ** 2, _masked),
    one_and_mean_over_tokens=(lambda b: 1.0, _masked),
    plain_mean_with_tokens=(tokens, lambda p, b: token_losses(p, b).mean()),
    mean_over_rows_of_masked_tokens=(
        tokens,
        lambda p, b: ((token_losses(p, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean(),
    ),
    masked_sum_over_all_tokens=("mask", lambda p, b: (token_losses(p, b) * b["mask"]).mean()),
    mean_of_shares_and_an_epsilon=(
        "share",
        lambda p, b: (row_losses(p, b) * b["share"]).mean() / (b["share"].mean() + 1e-2),
    ),
    at_least_forty_tokens=(
        "mask",
        lambda p, b: _ratio(token_losses(p, b), b["mask"], jnp.maximum(b["mask"].sum(), 40)),
    ),
    perplexity=("mask", lambda p, b: jnp.exp(_masked(p, b))),
    mask_in_the_losses_and_another_one_below=(
        "mask",
        lambda p, b: (token_losses(p, b) * b["mask"] * b["spans"]).sum() / b["spans"].sum(),
    ),
    count_that_is_capped=(lambda b: jnp.minimum(b["mask"].sum(), 15), _masked),
)
