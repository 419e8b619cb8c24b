"""Means over rows: attention of every kind, state spaces, recurrent networks, experts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.losses.cases import DTYPES, is_mean
from tests.losses.parts import (
    CAUSAL,
    EXPERTS,
    HEADS,
    TIME,
    WIDTH,
    WORDS,
    attend,
    block,
    cross_entropy,
    heads,
    hidden,
    projected,
    rms,
    scan_of,
    squares,
    swapped,
    swiglu,
)


@is_mean()
def causal_attention(p, b):
    return squares(attend(*projected(p, b["x"])) @ p["o"], b["y"])


@is_mean()
def grouped_query_attention(p, b):
    q = heads(b["x"] @ p["q"], 4)
    k, v = (heads(b["x"] @ p[name][:, :4], 2).repeat(2, axis=2) for name in "kv")
    return squares(attend(q, k, v), b["y"])


@is_mean()
def multi_query_attention(p, b):
    x = b["x"]
    q, k, v = heads(x @ p["q"]), x @ p["k"][:, :4], x @ p["v"][:, :4]
    shares = jax.nn.softmax(jnp.where(CAUSAL, jnp.einsum("rthd,rsd->rhts", q, k), -1e9))
    return squares(jnp.einsum("rhts,rsd->rthd", shares, v).reshape(x.shape), b["y"])


@is_mean()
def sliding_window_attention(p, b):
    at = jnp.arange(TIME)
    near = CAUSAL & (at[:, None] - at < 3)
    return squares(attend(*projected(p, b["x"]), near), b["y"])


@is_mean()
def alibi(p, b):
    at = jnp.arange(TIME)
    slopes = 2.0 ** -jnp.arange(1, HEADS + 1, dtype=b["x"].dtype)
    bias = -slopes[:, None, None] * abs(at[:, None] - at).astype(b["x"].dtype)
    return squares(attend(*projected(p, b["x"]), change=lambda s: s + bias), b["y"])


@is_mean()
def rotary_positions(p, b):
    def rotated(x):
        angle = jnp.arange(TIME)[:, None, None] / 10.0 ** jnp.arange(2)
        one, other = jnp.split(x, 2, axis=-1)
        sin, cos = jnp.sin(angle).astype(x.dtype), jnp.cos(angle).astype(x.dtype)
        return jnp.concatenate([one * cos - other * sin, one * sin + other * cos], -1)

    q, k, v = projected(p, b["x"])
    return squares(attend(rotated(q), rotated(k), v), b["y"])


@is_mean()
def soft_capped_logits(p, b):
    capped = attend(*projected(p, b["x"]), change=lambda s: 2 * jnp.tanh(s / 2))
    logits = 5 * jnp.tanh(capped @ p["out"] / 5)
    return cross_entropy(logits, b["labels"]).mean()


@is_mean()
def attention_sinks(p, b):
    q, k, v = projected(p, b["x"])
    scores = jnp.where(CAUSAL, jnp.einsum("rthd,rshd->rhts", q, k), -1e9)
    sink = jnp.broadcast_to(p["scale"][:HEADS, None, None], (*scores.shape[:-1], 1))
    shares = jax.nn.softmax(jnp.concatenate([scores, sink], -1))[..., :-1]
    return squares(jnp.einsum("rhts,rshd->rthd", shares, v).reshape(b["y"].shape), b["y"])


@is_mean()
def linear_attention(p, b):
    q, k, v = projected(p, b["x"])
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    state = jnp.einsum("rthd,rthe->rthde", k, v).cumsum(1)
    norm = jnp.einsum("rthd,rthd->rth", q, k.cumsum(1))
    found = jnp.einsum("rthd,rthde->rthe", q, state) / norm[..., None]
    return squares(found.reshape(b["y"].shape), b["y"])


@is_mean()
def packed_segments_attend_to_their_own(p, b):
    same = b["segments"][:, None, :, None] == b["segments"][:, None, None, :]
    return squares(attend(*projected(p, b["x"]), CAUSAL & same), b["y"])


@is_mean()
def attention_of_jax_nn(p, b):
    return squares(
        jax.nn.dot_product_attention(*projected(p, b["x"]), is_causal=True).reshape(b["y"].shape),
        b["y"],
    )


@is_mean()
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


@is_mean()
def sequence_to_sequence_with_teacher_forcing(p, b):
    source = b["x"] + attend(*projected(p, b["x"]), True)
    words = p["embed"][b["words"]]
    read = attend(heads(words @ p["a"]), heads(source @ p["b"]), heads(source @ p["c"]), True)
    logits = block(p, words + read)[:, :-1] @ p["out"]
    return cross_entropy(logits, b["words"][:, 1:]).mean()


@is_mean()
def axial_attention(p, b):
    image = b["x"].reshape(-1, 2, 4, WIDTH)
    rows = jax.vmap(lambda x: attend(*projected(p, x), True), 1, 1)(image)
    columns = jax.vmap(lambda x: attend(*projected(p, x), True), 2, 2)(rows)
    return squares(columns.reshape(b["y"].shape), b["y"])


@is_mean()
def attention_within_chunks(p, b):
    chunks = b["x"].reshape(-1, 4, WIDTH)
    return squares(attend(*projected(p, chunks), CAUSAL[:4, :4]).reshape(b["y"].shape), b["y"])


@is_mean()
def latents_read_by_attention(p, b):
    scores = jnp.einsum("ld,rtd->rlt", p["latents"] @ p["q"], b["x"] @ p["k"])
    found = jnp.einsum("rlt,rtd->rld", jax.nn.softmax(scores), b["x"] @ p["v"])
    return squares(found.mean(1), b["z"])


@is_mean()
def vision_transformer_with_a_class_token(p, b):
    first = jnp.broadcast_to(p["latents"][:1], (len(b["x"]), 1, WIDTH))
    x = jnp.concatenate([first, b["x"]], 1)
    x = x + attend(*projected(p, rms(x)), True)
    return cross_entropy(x[:, 0] @ p["out"], b["kind"]).mean()


@is_mean()
def learned_relative_positions(p, b):
    at = np.arange(TIME)
    bias = p["position"][:, at[:, None] - at + TIME]
    return squares(attend(*projected(p, b["x"]), change=lambda s: s + bias), b["y"])


@is_mean()
def latent_keys_and_values(p, b):
    shared = b["x"] @ p["small"]
    k, v = heads(shared @ p["narrow"]), heads(shared @ (p["narrow"] * p["scale"]))
    return squares(attend(heads(b["x"] @ p["q"]), k, v), b["y"])


@is_mean()
def differential_attention(p, b):
    q, k, v = projected(p, b["x"])
    one, other = attend(q, k, v), attend(k, q, v)
    return squares(rms(one - jnp.exp(p["bias"].mean()) * other), b["y"])


@is_mean()
def attention_by_vmap_over_heads_and_rows(p, b):
    def of_head(q, k, v):
        return jax.nn.softmax(jnp.where(CAUSAL, q @ k.T, -1e9)) @ v

    over = jax.vmap(jax.vmap(of_head, 1, 1))
    return squares(over(*projected(p, b["x"])).reshape(b["y"].shape), b["y"])


@is_mean()
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


@is_mean()
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


@is_mean()
def linear_recurrence_by_associative_scan(p, b):
    keep = jax.nn.sigmoid(b["x"] @ p["a"] + p["decay"])
    _, state = lax.associative_scan(_combine, (keep, (1 - keep) * (b["x"] @ p["b"])), axis=1)
    return squares(state @ p["o"], b["y"])


@is_mean()
def mamba_block(p, b):
    x = rms(b["x"]) * p["scale"]
    padded = jnp.pad(x @ p["a"], ((0, 0), (2, 0), (0, 0)))
    near = jax.nn.silu(sum(padded[:, i : i + TIME] * p["layers"][i, 0] for i in range(3)))
    step = jax.nn.softplus(near @ p["b"])
    keep = jnp.exp(-step * jnp.exp(p["decay"]))
    _, state = lax.associative_scan(_combine, (keep, step * near), axis=1)
    return squares(b["x"] + (state * jax.nn.silu(x @ p["c"])) @ p["o"], b["y"])


@is_mean()
def rwkv_time_mixing(p, b):
    before = jnp.pad(b["x"], ((0, 0), (1, 0), (0, 0)))[:, :-1]
    mixed = b["x"] * jax.nn.sigmoid(p["bias"]) + before * jax.nn.sigmoid(-p["bias"])
    k, v, r = mixed @ p["k"], mixed @ p["v"], jax.nn.sigmoid(mixed @ p["q"])

    def one(carry, now):
        above, below = carry
        k, v = jnp.exp(now[0]), now[1]
        out = (above + k * v) / (below + k + 1e-3)
        keep = jnp.exp(-jnp.exp(p["decay"]))
        return (keep * above + k * v, keep * below + k), out

    start = jnp.zeros_like(b["x"][:, 0]), jnp.zeros_like(b["x"][:, 0])
    return squares((r * scan_of(one, start, (k, v))) @ p["o"], b["y"])


@is_mean()
def gated_recurrent_unit(p, b):
    def one(state, x):
        update = jax.nn.sigmoid(x @ p["a"] + state @ p["b"])
        state = update * state + (1 - update) * jnp.tanh(x @ p["c"] + state @ p["d"])
        return state, state

    return squares(scan_of(one, jnp.zeros_like(b["x"][:, 0]), b["x"]) @ p["o"], b["y"])


@is_mean()
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


@is_mean()
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


@is_mean()
def delta_rule(p, b):
    q, k, v = (b["x"] @ p[name] for name in "qkv")
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)

    def one(state, now):
        q, k, v = now
        off = v - jnp.einsum("rd,rde->re", k, state)
        state = state + 0.5 * jnp.einsum("rd,re->rde", k, off)
        return state, jnp.einsum("rd,rde->re", q, state)

    start = jnp.zeros((len(q), WIDTH, WIDTH), q.dtype)
    return squares(scan_of(one, start, (q, k, v)), b["y"])


@is_mean()
def long_convolution_by_fft(p, b):
    kernel = jnp.exp(-jnp.arange(TIME)[:, None] * jnp.exp(p["decay"].astype(jnp.float32)))
    found = [jnp.fft.rfft(x.astype(jnp.float32), 2 * TIME, -2) for x in (b["x"], kernel)]
    mixed = jnp.fft.irfft(found[0] * found[1], axis=1)[:, :TIME]
    return squares(mixed @ p["o"], b["y"])


# Experts, which each token chooses.


@is_mean()
def experts_chosen_by_each_token(p, b):
    gates, chosen = lax.top_k(jax.nn.softmax(b["x"] @ p["route"]), 2)
    of_all = jnp.einsum("rtd,xdf->rtxf", b["x"], p["experts"])
    found = jnp.take_along_axis(of_all, chosen[..., None], 2)
    return squares((found * gates[..., None]).sum(2), b["y"])


@is_mean()
def experts_with_room_for_some_tokens_of_a_row(p, b):
    gates = jax.nn.softmax(b["x"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=jnp.int32)
    place = (chosen.cumsum(1) - 1) * chosen
    fits = (chosen * (place < 3)).astype(b["x"].dtype)
    slots = jax.nn.one_hot(place, 3, dtype=b["x"].dtype) * fits[..., None]
    inside = jnp.einsum("rtes,rtd->resd", slots, b["x"])
    outside = jnp.einsum("resd,edf->resf", inside, p["experts"])
    found = jnp.einsum("rtes,resf,rte->rtf", slots, outside, gates)
    return squares(found, b["y"])


@is_mean()
def soft_experts_within_a_row(p, b):
    logits = b["x"] @ p["route"]
    slots = jnp.einsum("rte,rtd->red", jax.nn.softmax(logits, 1), b["x"])
    outside = jnp.einsum("red,edf->ref", slots, p["experts"])
    return squares(jnp.einsum("rte,ref->rtf", jax.nn.softmax(logits, 2), outside), b["y"])


@is_mean()
def experts_choose_tokens_of_a_row(p, b):
    gates = jax.nn.softmax(b["x"] @ p["route"])
    weights, chosen = lax.top_k(gates.swapaxes(1, 2), 3)
    inside = jax.vmap(lambda x, at: x[at])(b["x"], chosen)
    outside = jnp.einsum("resd,edf->resf", inside, p["experts"]) * weights[..., None]
    add = lambda at, x: jnp.zeros_like(b["x"][0]).at[at.reshape(-1)].add(x.reshape(-1, WIDTH))
    return squares(jax.vmap(add)(chosen, outside), b["y"])


@is_mean()
def sorted_experts_with_ragged_dot(p, b):
    tokens = b["x"].reshape(-1, WIDTH)
    chosen = (tokens @ p["route"]).argmax(1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
    found = lax.ragged_dot(tokens[order], p["experts"], sizes)
    gate = jax.nn.softmax(tokens @ p["route"]).max(1)
    return squares(found[jnp.argsort(order)] * gate[:, None], b["y"].reshape(-1, WIDTH))


@is_mean()
def balance_of_experts_within_each_row(p, b):
    gates = jax.nn.softmax(b["x"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=gates.dtype).mean(1)
    found = jnp.einsum("rte,rtd,edf->rtf", gates, b["x"], p["experts"])
    return squares(found, b["y"]) + 0.1 * (chosen * gates.mean(1)).sum(1).mean()


# Language models.


@is_mean()
def language_model(p, b):
    return cross_entropy(hidden(p, b["words"]) @ p["out"], b["labels"]).mean()


@is_mean()
def tied_embeddings(p, b):
    logits = hidden(p, b["words"])[:, :-1] @ p["embed"].T
    return cross_entropy(logits, b["words"][:, 1:]).mean()


@is_mean()
def next_two_tokens(p, b):
    found = hidden(p, b["words"])
    one = cross_entropy(found[:, :-1] @ p["out"], b["words"][:, 1:])
    two = cross_entropy(jnp.tanh(found[:, :-2] @ p["a"]) @ p["out"], b["words"][:, 2:])
    return one.mean() + 0.5 * two.mean()


@is_mean()
def cross_entropy_in_chunks_of_tokens(p, b):
    """A fixed number of chunks, whatever the number of rows."""
    tokens = hidden(p, b["words"]).reshape(4, -1, WIDTH)
    labels = b["labels"].reshape(4, -1)

    def one(total, chunk):
        return total + cross_entropy(chunk[0] @ p["out"], chunk[1]).sum(), None

    total, _ = lax.scan(jax.checkpoint(one), jnp.zeros((), tokens.dtype), (tokens, labels))
    return total / labels.size


@is_mean(may_refuse=DTYPES)
def cross_entropy_by_lax_map_with_a_batch_size(p, b):
    tokens, labels = hidden(p, b["words"]).reshape(-1, WIDTH), b["labels"].reshape(-1)
    of_token = lambda both: cross_entropy(both[0] @ p["out"], both[1])
    return lax.map(of_token, (tokens, labels), batch_size=5).mean()


@is_mean()
def cross_entropy_in_chunks_of_rows(p, b):
    def of_row(row):
        return cross_entropy(jnp.tanh(p["embed"][row[0]] @ p["a"]) @ p["out"], row[1]).mean()

    return lax.map(jax.checkpoint(of_row), (b["words"], b["labels"])).mean()


@is_mean()
def cross_entropy_in_chunks_of_the_vocabulary(p, b):
    x = hidden(p, b["words"])
    parts = p["out"].T.reshape(3, WORDS // 3, WIDTH)

    def one(best, part):
        return jnp.logaddexp(best, jax.nn.logsumexp(x @ part.T, axis=-1)), None

    total, _ = lax.scan(one, jnp.full_like(x[..., 0], -1e9), parts)
    label = (x * p["out"].T[b["labels"]]).sum(-1)
    return (total - label).mean()


@is_mean()
def label_smoothing(p, b):
    logits = jnp.tanh(p["embed"][b["words"]] @ p["a"]) @ p["out"]
    wanted = 0.9 * jax.nn.one_hot(b["labels"], WORDS, dtype=logits.dtype) + 0.1 / WORDS
    return -(wanted * jax.nn.log_softmax(logits)).sum(-1).mean()


@is_mean()
def z_loss(p, b):
    logits = jnp.tanh(p["embed"][b["words"]] @ p["a"]) @ p["out"]
    normal = jax.nn.logsumexp(logits, axis=-1)
    return cross_entropy(logits, b["labels"]).mean() + 0.1 * (normal**2).mean()


@is_mean()
def masked_language_model_with_a_mean_for_each_row(p, b):
    found = jnp.where(b["is_there"][..., None], p["embed"][b["words"]], p["bias"])
    losses = cross_entropy(block(p, found) @ p["out"], b["labels"])
    return ((losses * b["mask"]).sum(1) / b["mask"].sum(1)).mean()


@is_mean()
def swiglu_with_rms_norm(p, b):
    return squares(swiglu(p, rms(b["x"]) * p["scale"]), b["y"])
