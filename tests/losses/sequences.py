"""Means over rows: attention of every kind, state spaces, recurrent networks, experts."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.losses.cases import MEAN, enter
from tests.losses.parts import (
    EXPERTS,
    WIDTH,
    block,
    cross_entropy,
    hidden,
    projected,
    squares,
)


def linear_attention(p, b):
    q, k, v = projected(p, b["x"])
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("rthd,rthe->rthde", k, v).cumsum(1)
    norm = jnp.einsum("rthd,rthd->rth", q, k.cumsum(1))
    found = jnp.einsum("rthd,rthde->rthe", q, state) / norm[..., None]
    return squares(found.reshape(b["y"].shape), b["y"])


# State spaces and recurrent networks.


def _combine(one, other):
    return one[0] * other[0], one[1] * other[0] + other[1]


def linear_recurrence_by_associative_scan(p, b):
    keep = jax.nn.sigmoid(b["x"] @ p["a"] + p["decay"])
    _, state = lax.associative_scan(_combine, (keep, (1 - keep) * (b["x"] @ p["b"])), axis=1)
    return squares(state @ p["o"], b["y"])


# Experts, which each token chooses.


def experts_choose_tokens_of_a_row(p, b):
    gates = jax.nn.softmax(b["x"] @ p["route"])
    weights, chosen = lax.top_k(gates.swapaxes(1, 2), 3)
    inside = jax.vmap(lambda x, at: x[at])(b["x"], chosen)
    outside = jnp.einsum("resd,edf->resf", inside, p["experts"]) * weights[..., None]
    add = lambda at, x: jnp.zeros_like(b["x"][0]).at[at.reshape(-1)].add(x.reshape(-1, WIDTH))
    return squares(jax.vmap(add)(chosen, outside), b["y"])


def sorted_experts_with_ragged_dot(p, b):
    tokens = b["x"].reshape(-1, WIDTH)
    chosen = (tokens @ p["route"]).argmax(1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    found = lax.ragged_dot(tokens[order], p["experts"], sizes)
    gate = jax.nn.softmax(tokens @ p["route"]).max(1)
    return squares(found[jnp.argsort(order)] * gate[:, None], b["y"].reshape(-1, WIDTH))


def balance_of_experts_within_each_row(p, b):
    gates = jax.nn.softmax(b["x"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=gates.dtype).mean(1)
    found = jnp.einsum("rte,rtd,edf->rtf", gates, b["x"], p["experts"])
    return squares(found, b["y"]) + 0.1 * (chosen * gates.mean(1)).sum(1).mean()


# Language models.


def cross_entropy_in_chunks_of_tokens(p, b):
    """A fixed number of chunks, whatever the number of rows."""
    tokens = hidden(p, b["words"]).reshape(4, -1, WIDTH)
    labels = b["labels"].reshape(4, -1)

    def one(total, chunk):
        return total + cross_entropy(chunk[0] @ p["out"], chunk[1]).sum(), None

    total, _ = lax.scan(jax.checkpoint(one), jnp.zeros((), tokens.dtype), (tokens, labels))
    return total / labels.size


def cross_entropy_by_lax_map_with_a_batch_size(p, b):
    tokens, labels = hidden(p, b["words"]).reshape(-1, WIDTH), b["labels"].reshape(-1)
    of_token = lambda both: cross_entropy(both[0] @ p["out"], both[1])
    return lax.map(of_token, (tokens, labels), batch_size=5).mean()


def masked_language_model_with_a_mean_for_each_row(p, b):
    found = jnp.where(b["is_there"][..., None], p["embed"][b["words"]], p["bias"])
    losses = cross_entropy(block(p, found) @ p["out"], b["labels"])
    return ((losses * b["mask"]).sum(1) / b["mask"].sum(1)).mean()


enter(
    MEAN,
    globals(),
    attention_of_jax_nn=lambda p, b: squares(
        jax.nn.dot_product_attention(*projected(p, b["x"]), is_causal=True).reshape(b["y"].shape),
        b["y"],
    ),
    language_model=lambda p, b: cross_entropy(hidden(p, b["words"]) @ p["out"], b["labels"]).mean(),
)
