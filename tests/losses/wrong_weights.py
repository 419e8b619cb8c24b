"""Losses with a weight that is not what they divide by: none may be wrong in silence."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.losses.cases import is_wrong_weight
from tests.losses.parts import (
    TIME,
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


@is_wrong_weight("mask")
def mask_of_all_and_loss_of_the_shifted(p, b):
    return _ratio(-log_probabilities(p, b["words"]), b["mask"][:, 1:])


@is_wrong_weight(lambda b: b["mask"][:, 1:].sum())
def shifted_mask_and_loss_of_all(p, b):
    return _masked(p, b)


@is_wrong_weight("mask")
def one_of_two_masks(p, b):
    return _ratio(token_losses(p, b), b["mask"] * b["spans"])


@is_wrong_weight(lambda b: (b["mask"] * b["spans"]).sum())
def two_masks_and_loss_of_one(p, b):
    return _masked(p, b) + 0 * b["spans"].sum()


@is_wrong_weight(lambda b: b["mask"].sum() + b["spans"].sum())
def sum_of_two_masks(p, b):
    return _ratio(token_losses(p, b), b["mask"] * b["spans"])


@is_wrong_weight("padded")
def words_in_place_of_a_mask(p, b):
    there = b["padded"] != 0
    return jnp.where(there, token_losses(p, b, "padded"), 0).sum() / there.sum()


@is_wrong_weight(lambda b: b["padded"].size)
def padding_that_counts(p, b):
    there = b["padded"] != 0
    return jnp.where(there, token_losses(p, b, "padded"), 0).sum() / there.sum()


@is_wrong_weight("segments")
def segments_in_place_of_a_mask(p, b):
    there = b["segments"] > 0
    return jnp.where(there, token_losses(p, b), 0).sum() / there.sum()


@is_wrong_weight("spans")
def another_mask(p, b):
    return _ratio(token_losses(p, b), b["mask"]) + 0 * b["spans"].sum()


@is_wrong_weight("all_ones")
def weight_of_ones_that_the_loss_reads(p, b):
    return _ratio(token_losses(p, b) * b["all_ones"], b["mask"])


@is_wrong_weight("all_ones")
def loss_of_rows_each_over_its_own_tokens(p, b):
    return ((token_losses(p, b) * b["all_ones"]).sum(1) / b["mask"].sum(1)).mean() * 0 + _masked(
        p, b
    )


@is_wrong_weight(lambda b: b["mask"].sum() + len(b["mask"]))
def function_that_counts_one_column_more(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: (jnp.arange(TIME) <= b["length"][:, None]).sum())
def lengths_that_count_one_more(p, b):
    return _ratio(token_losses(p, b), (jnp.arange(TIME) < b["length"][:, None]) * 1.0)


@is_wrong_weight(lambda b: b["mask"].sum() ** 2)
def square_of_the_count(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: jnp.sqrt(b["mask"].sum()))
def root_of_the_count(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: b["mask"].mean(1).max())
def longest_row(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: (b["mask"].sum(1) > 3).sum() + 1)
def rows_that_are_long(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: 1.0 * len(b["mask"]))
def number_of_rows_and_mean_over_tokens(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: 1.0)
def one_and_mean_over_tokens(p, b):
    return _masked(p, b)


@is_wrong_weight(tokens)
def plain_mean_with_tokens(p, b):
    return token_losses(p, b).mean()


@is_wrong_weight(tokens)
def mean_over_rows_of_masked_tokens(p, b):
    return ((token_losses(p, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean()


@is_wrong_weight("mask")
def mean_over_rows_of_masked_tokens_by_name(p, b):
    return ((token_losses(p, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean()


@is_wrong_weight("mask")
def masked_sum_over_all_tokens(p, b):
    return (token_losses(p, b) * b["mask"]).mean()


@is_wrong_weight("seen")
def masked_mean_over_all_rows(p, b):
    return (row_losses(p, b) * b["seen"]).mean()


@is_wrong_weight("mask")
def masked_sum_over_nothing(p, b):
    return (token_losses(p, b) * b["mask"]).sum()


@is_wrong_weight("mask")
def count_that_depends_on_the_parameters(p, b):
    losses = token_losses(p, b)
    hard = lax.stop_gradient((losses > 2.5).astype(losses.dtype)) * b["mask"]
    return _ratio(losses, hard)


@is_wrong_weight("share")
def fractional_weights_over_at_least_one(p, b):
    return _ratio(row_losses(p, b), b["share"], jnp.maximum(b["share"].sum(), 1))


@is_wrong_weight("share")
def fractional_weights_and_an_epsilon_that_is_large(p, b):
    return _ratio(row_losses(p, b), b["share"], b["share"].sum() + 0.1)


@is_wrong_weight("mask")
def one_behind_the_count(p, b):
    return _ratio(token_losses(p, b), b["mask"], b["mask"].sum() + 1)


@is_wrong_weight("mask")
def mean_of_the_mask_and_an_epsilon(p, b):
    """Small beside a mean of a half; of many tokens it would be a count of some."""
    return (token_losses(p, b) * b["mask"]).mean() / (b["mask"].mean() + 2e-2)


@is_wrong_weight("share")
def mean_of_shares_and_an_epsilon(p, b):
    return (row_losses(p, b) * b["share"]).mean() / (b["share"].mean() + 1e-2)


@is_wrong_weight("mask")
def at_least_forty_tokens(p, b):
    return _ratio(token_losses(p, b), b["mask"], jnp.maximum(b["mask"].sum(), 40))


@is_wrong_weight("mask")
def root_of_the_count_below(p, b):
    return _ratio(token_losses(p, b), b["mask"], jnp.sqrt(b["mask"].sum()))


@is_wrong_weight("mask")
def two_terms_of_two_weights(p, b):
    losses = token_losses(p, b)
    return _ratio(losses, b["mask"]) + _ratio(losses, b["spans"])


@is_wrong_weight("mask")
def tokens_and_a_mean_over_rows(p, b):
    return _masked(p, b) + row_losses(p, b).mean()


@is_wrong_weight("mask")
def tokens_and_rows_left_out_by_one_weight(p, b):
    return _masked(p, b) + _ratio(row_losses(p, b), b["seen"])


@is_wrong_weight("all_rows")
def rows_without_padding_and_tokens(p, b):
    losses = token_losses(p, b) * b["all_rows"][:, None]
    return _ratio(losses, b["mask"])


@is_wrong_weight("mask")
def ratio_beside_a_contrastive_term(p, b):
    x = b["v"] @ p["a"]
    scores = 5 * unit(x) @ unit(b["z"]).T
    return _masked(p, b) + cross_entropy(scores, jnp.arange(len(x))).mean()


@is_wrong_weight("mask")
def ratio_of_squares(p, b):
    return _masked(p, b) ** 2


@is_wrong_weight("mask")
def perplexity(p, b):
    return jnp.exp(_masked(p, b))


@is_wrong_weight("spans")
def callback_and_another_mask(p, b):
    x = opaque(lambda x: x, b["x"] @ p["a"])
    return _ratio(((x - b["y"]) ** 2).mean(-1), b["mask"]) + 0 * b["spans"].sum()


@is_wrong_weight("mask")
def callback_and_a_shifted_mask(p, b):
    x = opaque(lambda x: x, b["x"] @ p["a"])
    return _ratio(((x - b["y"]) ** 2).mean(-1)[:, 1:], b["mask"][:, 1:])


@is_wrong_weight(rows)
def kernel_and_the_number_of_rows(p, b):
    x = jax.vmap(lambda x: kernel(tanh_kernel, x))(b["x"] @ p["a"])
    return _ratio(((x - b["y"]) ** 2).mean(-1), b["mask"]) + 0 * b["v"].sum()


@is_wrong_weight("mask")
def mask_in_the_losses_and_another_one_below(p, b):
    return (token_losses(p, b) * b["mask"] * b["spans"]).sum() / b["spans"].sum()


@is_wrong_weight(lambda b: jnp.where(b["mask"].sum() > 12, 2.0, 1.0))
def two_kinds_of_shards(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: b["mask"][0].sum())
def first_row_counts_for_all(p, b):
    return _masked(p, b)


@is_wrong_weight(lambda b: jnp.minimum(b["mask"].sum(), 15))
def count_that_is_capped(p, b):
    return _masked(p, b)
