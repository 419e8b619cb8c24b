"""Means over rows: attention of every kind, state spaces, recurrent networks, experts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.losses.cases import MEAN, enter
from tests.losses.parts import (
    CAUSAL,
    EXPERTS,
    TIME,
    WIDTH,
    attend,
    block,
    cross_entropy,
    hidden,
    projected,
    scan_of,
    squares,
    swapped,
)


def rotary_positions(p, b):
    def rotated(x):
        angle = jnp.arange(TIME)[:, None, None] / 10.0 ** jnp.arange(2)
        one, other = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
        return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1)

    q, k, v = projected(p, b["x"])
    return squares(attend(rotated(q), rotated(k), v), b["y"])


def linear_attention(p, b):
    q, k, v = projected(p, b["x"])
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("rthd,rthe->rthde", k, v).cumsum(1)
    norm = jnp.einsum("rthd,rthd->rth", q, k.cumsum(1))
    found = jnp.einsum("rthd,rthde->rthe", q, state) / norm[..., None]
    return squares(found.reshape(b["y"].shape), b["y"])


def packed_segments_attend_to_their_own(p, b):
    same = b["segments"][:, None, :, None] == b["segments"][:, None, None, :]
    return squares(attend(*projected(p, b["x"]), CAUSAL & same), b["y"])


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


def lstm_read_at_its_last_word(p, b):
    def one(carry, x):
        state, cell = carry
        both = x @ p["gate"] + state @ p["up"]
        keep, new = jnp.split(both, 2, axis=-1)
        cell = jax.nn.sigmoid(keep) * cell + jnp.tanh(new)
        return (jnp.tanh(cell), cell), jnp.tanh(cell)

    zero = jnp.zeros_like(b["x"][:, 0])
    states = scan_of(one, (zero, zero), b["x"])
    last = jnp.take_along_axis(states, (b["length"] - 1)[:, None, None], 1)[:, 0]
    return squares(last, b["z"])


def retention_chunk_by_chunk(p, b):
    q, k, v = (b["x"] @ p[name] for name in "qkv")
    chunks = [swapped(x.reshape(len(x), 2, TIME // 2, WIDTH)) for x in (q, k, v)]
    within = jnp.asarray(
        0.9 ** np.maximum(np.subtract.outer(*[np.arange(4)] * 2), 0) * CAUSAL[:4, :4]
    )

    def one(state, now):
        q, k, v = now
        inner = jnp.einsum("rts,rsd->rtd", jnp.einsum("rtd,rsd->rts", q, k) * within, v)
        return (0.6 * state + jnp.einsum("rtd,rte->rde", k, v)).astype(v.dtype), inner + q @ state

    start = jnp.zeros((len(q), WIDTH, WIDTH), q.dtype)
    _, found = lax.scan(one, start, tuple(chunks))
    return squares(swapped(found).reshape(b["y"].shape), b["y"])


# Experts, which each token chooses.


def experts_chosen_by_each_token(p, b):
    gates, chosen = lax.top_k(jax.nn.softmax(b["x"] @ p["route"]), 2)
    of_all = jnp.einsum("rtd,xdf->rtxf", b["x"], p["experts"])
    found = jnp.take_along_axis(of_all, chosen[..., None], 2)
    return squares((found * gates[..., None]).sum(2), b["y"])


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


def cross_entropy_in_chunks_of_rows(p, b):
    def of_row(row):
        return cross_entropy(jnp.tanh(p["embed"][row[0]] @ p["a"]) @ p["out"], row[1]).mean()

    return lax.map(jax.checkpoint(of_row), (b["words"], b["labels"])).mean()


def masked_language_model_with_a_mean_for_each_row(p, b):
    found = jnp.where(b["is_there"][..., None], p["embed"][b["words"]], p["bias"])
    losses = cross_entropy(block(p, found) @ p["out"], b["labels"])
    return ((losses * b["mask"]).sum(1) / b["mask"].sum(1)).mean()


enter(
    MEAN,
    globals(),
    causal_attention=lambda p, b: squares(attend(*projected(p, b["x"])) @ p["o"], b["y"]),
    attention_of_jax_nn=lambda p, b: squares(
        jax.nn.dot_product_attention(*projected(p, b["x"]), is_causal=True).reshape(b["y"].shape),
        b["y"],
    ),
    language_model=lambda p, b: cross_entropy(hidden(p, b["words"]) @ p["out"], b["labels"]).mean(),
)
