"""Ratios of sums over rows, and sums of several: with the right weight, and as ``Mean``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.losses.cases import RATIO, enter, weighted
from tests.losses.parts import (
    EXPERTS,
    TIME,
    attend,
    cross_entropy,
    hidden,
    kernel,
    log_probabilities,
    opaque,
    out_of,
    projected,
    row_losses,
    squares,
    swapped,
    tanh_kernel,
    token_losses,
)


@weighted("mask")
def mean_over_tokens(p, b, mean):
    return mean((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum())


@weighted(lambda b: b["mask"][:, 1:].sum())
def mean_over_tokens_with_a_shifted_mask(p, b, mean):
    there = b["mask"][:, 1:]
    return mean(-(log_probabilities(p, b["words"]) * there).sum(), there.sum())


@weighted(lambda b: (b["padded"] != 0).sum())
def padding_words_left_out(p, b, mean):
    there = b["padded"] != 0
    losses = token_losses(p, b, "padded")
    return mean(jnp.where(there, losses, 0).sum(), there.sum())


@weighted(lambda b: (b["segments"] > 0).sum())
def packed_rows(p, b, mean):
    x = p["embed"][b["words"]]
    same = b["segments"][:, None, :, None] == b["segments"][:, None, None]
    x = x + attend(*projected(p, x), same & np.tril(np.ones((TIME, TIME), bool)))
    there = b["segments"] > 0
    return mean((cross_entropy(x @ p["out"], b["labels"]) * there).sum(), there.sum())


@weighted("share")
def fractional_weights_of_rows(p, b, mean):
    return mean((row_losses(p, b) * b["share"]).sum(), b["share"].sum())


@weighted(lambda b: jnp.asarray([1.0, 0.25, 3.0, 0.5])[b["kind"]].sum())
def weights_of_classes(p, b, mean):
    weights = jnp.asarray([1.0, 0.25, 3.0, 0.5], b["v"].dtype)[b["kind"]]
    return mean((cross_entropy(b["v"] @ p["route"], b["kind"]) * weights).sum(), weights.sum())


@weighted("mask")
def divided_by_one_where_there_is_none(p, b):
    """As Tunix has it."""
    count = b["mask"].sum()
    return (token_losses(p, b) * b["mask"]).sum() / jnp.where(count == 0, 1, count)


@weighted("mask")
def rows_divided_by_the_total_and_averaged(p, b):
    """As Flax's Gemma has it."""
    rows = (token_losses(p, b) * b["mask"]).sum(1)
    return (rows * len(rows) / b["mask"].sum()).mean()


@weighted("mask")
def tokens_and_a_regulariser(p, b, mean):
    total = mean((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum())
    return total + 1e-2 * (p["a"] ** 2).sum()


@weighted("mask")
def chunks_of_masked_tokens(p, b, mean):
    chunked = lambda x: x.reshape(4, -1, *x.shape[2:])
    chunks = chunked(hidden(p, b["words"])), chunked(b["labels"]), chunked(b["mask"])

    def one(sums, chunk):
        x, labels, there = chunk
        losses = cross_entropy(x @ p["out"], labels) * there
        return (sums[0] + losses.sum(), sums[1] + there.sum()), None

    zero = jnp.zeros((), b["mask"].dtype)
    return mean(*lax.scan(jax.checkpoint(one), (zero, zero), chunks)[0])


@weighted("mask")
def sums_along_time(p, b, mean):
    def one(carry, now):
        state, total, count = carry
        x, y, there = now
        state = jnp.tanh(x @ p["a"] + state @ p["b"])
        losses = ((state - y) ** 2).mean(1) * there
        return (state, total + losses.sum(), count + there.sum()), None

    zero = jnp.zeros((), b["x"].dtype)
    along = tuple(swapped(b[name]) for name in ("x", "y", "mask"))
    (_, total, count), _ = lax.scan(one, (jnp.zeros_like(b["x"][:, 0]), zero, zero), along)
    return mean(total, count)


@weighted("mask")
def each_row_by_lax_map(p, b, mean):
    def of_row(row):
        x, y, there = row
        return (((jnp.tanh(x @ p["a"]) - y) ** 2).mean(-1) * there).sum(), there.sum()

    total, count = lax.map(of_row, (b["x"], b["y"], b["mask"]))
    return mean(total.sum(), count.sum())


@weighted(lambda b: jnp.isfinite(jnp.where(b["is_there"], b["reward"], jnp.nan)).sum())
def labels_that_are_not_a_number(p, b, mean):
    wanted = jnp.where(b["is_there"], b["reward"], jnp.nan)
    known = jnp.isfinite(wanted)
    errors = (b["x"] @ p["scale"] - jnp.where(known, wanted, 0)) ** 2
    return mean((errors * known).sum(), known.sum())


@weighted("mask")
def dropout_over_tokens(p, b, mean, rng):
    x = jnp.tanh(b["x"] @ p["a"])
    x = jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x / 0.8, 0) @ p["b"]
    return mean((((x - b["y"]) ** 2).mean(-1) * b["mask"]).sum(), b["mask"].sum())


@weighted("mask")
def pallas_kernel_over_tokens(p, b, mean):
    x = jax.vmap(lambda x: kernel(tanh_kernel, x))(b["x"] @ p["a"])
    return mean((((x - b["y"]) ** 2).mean(-1) * b["mask"]).sum(), b["mask"].sum())


@weighted("mask")
def callback_over_tokens(p, b, mean):
    x = opaque(lambda x: np.round(x, 3), b["x"] @ p["a"])
    return mean((((x - b["y"]) ** 2).mean(-1) * b["mask"]).sum(), b["mask"].sum())


@jax.custom_vjp
def _with_squares(logits, targets):
    """As MaxText has it: with the squares of the logarithm, whose own gradient is not used."""
    return _with_squares_forward(logits, targets)[0]


def _with_squares_forward(logits, targets):
    squares = 1e-2 * jax.nn.logsumexp(logits, axis=-1) ** 2
    return (cross_entropy(logits, targets) + squares, squares), (logits, targets)


def _with_squares_backward(kept, gradients):
    logits, targets = kept
    shares, total = jax.nn.softmax(logits), jax.nn.logsumexp(logits, axis=-1)
    factor = (1 + 2e-2 * total)[..., None]
    one_hot = jax.nn.one_hot(targets, logits.shape[-1], dtype=logits.dtype)
    return gradients[0][..., None] * (factor * shares - one_hot), None


_with_squares.defvjp(_with_squares_forward, _with_squares_backward)


@weighted("mask")
def entropy_with_a_gradient_of_its_own(p, b, mean):
    losses, _ = _with_squares(hidden(p, b["words"]) @ p["out"], b["labels"])
    return mean((losses * b["mask"]).sum(), b["mask"].sum())


@weighted(lambda b: (b["spans"].sum(1) > 0).sum())
def rows_that_have_any_token(p, b, mean):
    """As Tunix has it."""
    counts = b["spans"].sum(1)
    rows = (token_losses(p, b) * b["spans"]).sum(1) / jnp.maximum(counts, 1)
    return mean(rows.sum(), (counts > 0).sum())


# Several terms, which no one weight fits: as ``Mean`` only.


def tokens_and_balance_of_each_row(p, b, mean):
    x = hidden(p, b["words"])
    gates = jax.nn.softmax(x @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=gates.dtype).mean(1)
    balance = (chosen * gates.mean(1)).sum(1)
    losses = cross_entropy(x @ p["out"], b["labels"]) * b["mask"]
    loss = mean(losses.sum(), b["mask"].sum()) + 0.5 * mean(balance.sum(), len(balance))
    return loss + 1e-2 * (p["out"] ** 2).sum()


def two_masks_of_two_tasks(p, b, mean):
    one = mean((token_losses(p, b) * b["mask"]).sum(), b["mask"].sum())
    errors = ((jnp.tanh(b["x"] @ p["b"]) - b["y"]) ** 2).mean(-1)
    return one + 0.5 * mean((errors * b["spans"]).sum(), b["spans"].sum())


def policy_over_tokens_and_value_of_rows(p, b, mean):
    policy = mean((token_losses(p, b) * b["mask"] * b["advantage"][:, None]).sum(), b["mask"].sum())
    errors = (b["v"] @ p["scale"] - b["z"][:, 0]) ** 2
    shares = jax.nn.softmax(b["v"] @ p["route"])
    order = (shares * jnp.log(shares)).sum(1)
    rows = len(errors)
    return policy + 0.5 * mean(errors.sum(), rows) + 0.1 * mean(order.sum(), rows)


def boxes_over_objects_and_classes_over_rows(p, b, mean):
    there = (b["kind"] > 0).astype(b["v"].dtype)
    boxes = jnp.abs(out_of(p, b) - b["z"]).mean(1) * there
    classes = cross_entropy(b["v"] @ p["route"], b["kind"])
    return mean(classes.sum(), len(classes)) + 2 * mean(boxes.sum(), there.sum())


def weights_that_depend_on_the_parameters(p, b, mean):
    """So that no ``weight=`` has them."""
    losses = token_losses(p, b)
    hard = lax.stop_gradient(jax.nn.sigmoid(losses) * b["mask"])
    return mean((losses * hard).sum(), hard.sum())


def focal_over_the_number_of_objects(p, b, mean):
    """Eight shards have one without objects, the losses of which count none the less."""
    logits = (b["x"] @ p["a"]) @ p["scale"]
    is_object = (b["labels"] == 1).astype(logits.dtype)
    losses = optax.sigmoid_focal_loss(logits, is_object, alpha=0.25, gamma=2.0)
    return mean(losses.sum(), is_object.sum())


def mean_over_rows_and_mean_over_tokens_of_one_loss(p, b, mean):
    losses = token_losses(p, b) * b["mask"]
    rows = (losses.sum(1) / b["mask"].sum(1)).sum()
    return 0.5 * mean(losses.sum(), b["mask"].sum()) + 0.5 * mean(rows, len(losses))


def only_squares_of_rows(p, b, mean):
    found = out_of(p, b)
    return mean(((found - b["z"]) ** 2).sum(), found.size) + 0.1 * squares(p["a"], 0)


enter(RATIO, globals())
