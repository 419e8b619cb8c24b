"""Means over rows: attention of every kind, state spaces, recurrent networks, experts."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.losses.cases import MEAN, enter
from tests.losses.parts import (
    EXPERTS,
    TIME,
    WIDTH,
    attend,
    cross_entropy,
    hidden,
    projected,
    scan_of,
    squares,
    swapped,
)


def linear_attention(p, b):
    q, k, v = projected(p, b["x"])
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("rthd,rthe->rthde", k, v).cumsum(1)
    norm = jnp.einsum("rthd,rthd->rth", q, k.cumsum(1))
    found = jnp.einsum("rthd,rthde->rthe", q, state) / norm[..., None]
    return squares(found.reshape(b["y"].shape), b["y"])


def attention_block_by_block(p, b):
    """The softmax is made up as keys come in, as FlashAttention does."""
    q, k, v = projected(p, b["x"])
    blocks = [x.reshape(len(x), TIME // 2, 2, *x.shape[2:]).swapaxes(0, 1) for x in (k, v)]

    def one(carry, keys):
        best, total, out = carry
        scores = jnp.einsum("rthd,rshd->rhts", q, keys[0])
        now = jnp.maximum(best, scores.max(-1))
        shares, old = jnp.exp(scores - now[..., None]), jnp.exp(best - now)
        out = out * old[..., None] + jnp.einsum("rhts,rshd->rhtd", shares, keys[1])
        return (now, total * old + shares.sum(-1), out), None

    start = jnp.full_like(q[..., 0].swapaxes(1, 2), -1e9)
    zeros = jnp.zeros_like(q.swapaxes(1, 2))
    (_, total, out), _ = lax.scan(one, (start, jnp.zeros_like(start), zeros), blocks)
    return squares((out / total[..., None]).swapaxes(1, 2).reshape(b["y"].shape), b["y"])


def key_value_cache_filled_step_by_step(p, b):
    q, k, v = projected(p, b["x"])
    empty = jnp.zeros_like(k), jnp.zeros_like(v)

    def one(cache, now):
        at, q, k, v = now
        put = lambda cache, x: lax.dynamic_update_slice_in_dim(cache, x[:, None], at, axis=1)
        keys, values = put(cache[0], k), put(cache[1], v)
        scores = jnp.einsum("rhd,rshd->rhs", q, keys)
        shares = jax.nn.softmax(jnp.where(jnp.arange(TIME) <= at, scores, -1e9))
        return (keys, values), jnp.einsum("rhs,rshd->rhd", shares, values)

    _, found = lax.scan(one, empty, (jnp.arange(TIME), swapped(q), swapped(k), swapped(v)))
    return squares(swapped(found).reshape(b["y"].shape), b["y"])


# State spaces and recurrent networks.


def selective_scan(p, b):
    step = jax.nn.softplus(b["x"] @ p["a"])
    keep = jnp.exp(-step[..., None] * jnp.exp(p["layers"][0]))
    write = (step * b["x"])[..., None] * (b["x"] @ p["b"])[..., None, :]

    def one(state, now):
        state = now[0] * state + now[1]
        return state, (state * now[2][:, None]).sum(-1)

    start = jnp.zeros_like(write[:, 0])
    return squares(scan_of(one, start, (keep, write, b["x"] @ p["c"])), b["y"])


def _combine(one, other):
    return one[0] * other[0], one[1] * other[0] + other[1]


def linear_recurrence_by_associative_scan(p, b):
    keep = jax.nn.sigmoid(b["x"] @ p["a"] + p["decay"])
    _, state = lax.associative_scan(_combine, (keep, (1 - keep) * (b["x"] @ p["b"])), axis=1)
    return squares(state @ p["o"], b["y"])


# Experts, which each token chooses.


def experts_chosen_by_each_token(p, b):
    gates, chosen = lax.top_k(jax.nn.softmax(b["x"] @ p["route"]), 2)
    of_all = jnp.einsum("rtd,xdf->rtxf", b["x"], p["experts"])
    found = jnp.take_along_axis(of_all, chosen[..., None], 2)
    return squares((found * gates[..., None]).sum(2), b["y"])


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


enter(
    MEAN,
    globals(),
    causal_attention=lambda p, b: squares(attend(*projected(p, b["x"])) @ p["o"], b["y"]),
    attention_of_jax_nn=lambda p, b: squares(
        jax.nn.dot_product_attention(*projected(p, b["x"]), is_causal=True).reshape(b["y"].shape),
        b["y"],
    ),
)
