"""Models of every kind, whose losses are means over rows: proven, and right on three shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import over_rows
from tests.step.common import follows_one_device

# 24 rows, which 3 shards divide.
ROWS, TIME, WIDTH, WORDS, HEADS, EXPERTS, HIDDEN, KINDS = 24, 8, 8, 12, 2, 4, 16, 4


def params() -> dict[str, Any]:
    """The parameters, of which a case trains those that it reads."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    square = {name: normal(WIDTH, WIDTH) / 3 for name in "q k v o a b c".split()}
    return square | {
        "embed": normal(WORDS, WIDTH) / 2,
        "out": normal(WIDTH, WORDS) / 3,
        "up": normal(WIDTH, HIDDEN) / 3,
        "gate": normal(WIDTH, HIDDEN) / 3,
        "down": normal(HIDDEN, WIDTH) / 4,
        "scale": 1 + normal(WIDTH) / 4,
        "bias": normal(WIDTH) / 4,
        "decay": normal(WIDTH),
        "route": normal(WIDTH, EXPERTS),
        "experts": normal(EXPERTS, WIDTH, WIDTH) / 3,
        "layers": normal(3, WIDTH, WIDTH) / 3,
        "filter": normal(3, 3, 1, 4) / 3,
        "filter2": normal(3, 3, 4, 4) / 6,
        "head": normal(4, KINDS) / 2,
    }


def batch() -> dict[str, Any]:
    """The rows. Later ones are larger, so that shards differ."""
    rng = np.random.default_rng(1)
    size = np.linspace(0.5, 1.5, ROWS)
    normal = lambda *shape: np.float32(
        rng.normal(size=(ROWS, *shape)) * size.reshape(-1, *[1] * len(shape))
    )
    words = lambda: rng.integers(1, WORDS, size=(ROWS, TIME)).astype(np.int32)
    return {
        "x": normal(TIME, WIDTH),
        "y": normal(TIME, WIDTH),
        "v": normal(WIDTH),
        "z": normal(WIDTH),
        "words": words(),
        "labels": words(),
        "kind": (rng.permutation(ROWS) % KINDS).astype(np.int32),
        "advantage": normal(),
        "order": np.argsort(rng.random((ROWS, TIME)), 1).astype(np.int32),
    }


PARAMS, BATCH = params(), batch()
CAUSAL = np.tril(np.ones((TIME, TIME), bool))
swapped = lambda x: jnp.swapaxes(x, 0, 1)


def rms(x: Any) -> Any:
    """RMSNorm without its scale."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-3)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """Of each label."""
    found = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(found, labels[..., None], -1)[..., 0]


def heads(x: Any, number: int = HEADS) -> Any:
    """``[..., time, heads, width]`` of ``[..., time, heads × width]``."""
    return x.reshape(*x.shape[:-1], number, -1)


def attend(q: Any, k: Any, v: Any, mask: Any = CAUSAL, change: Any = lambda scores: scores) -> Any:
    """Attention of ``[rows, time, heads, width]``, as ``[rows, time, heads × width]``."""
    scores = change(jnp.einsum("rthd,rshd->rhts", q, k) * q.shape[-1] ** -0.5)
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    out = jnp.einsum("rhts,rshd->rthd", shares, v)
    return out.reshape(*out.shape[:2], -1)


def projected(p: Any, x: Any) -> Any:
    """Queries, keys and values."""
    return heads(x @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])


def squares(found: Any, wanted: Any) -> Any:
    """The mean square error."""
    return ((found - wanted) ** 2).mean()


def swiglu(p: Any, x: Any) -> Any:
    """A gated layer and back."""
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def block(p: Any, x: Any) -> Any:
    """A layer of a transformer."""
    x = x + attend(*projected(p, rms(x) * p["scale"]))
    return x + swiglu(p, rms(x))


def hidden(p: Any, ids: Any) -> Any:
    """What a language model makes of its words, before its logits."""
    return block(p, p["embed"][ids])


def row_losses(p: Any, b: Any) -> Any:
    """``[rows]``: of a small regression."""
    return ((jnp.tanh(b["v"] @ p["a"]) @ p["b"] - b["z"]) ** 2).mean(1)


def scan_of(step: Any, start: Any, x: Any) -> Any:
    """What a loop over ``[rows, time, …]`` returns at each time, ``[rows, time, …]``."""
    _, found = jax.lax.scan(step, start, jax.tree.map(lambda x: x.swapaxes(0, 1), x))
    return found.swapaxes(0, 1)


# Attention, state spaces, experts.


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


def experts_chosen_by_each_token(p, b):
    gates, chosen = lax.top_k(jax.nn.softmax(b["x"] @ p["route"]), 2)
    of_all = jnp.einsum("rtd,xdf->rtxf", b["x"], p["experts"])
    found = jnp.take_along_axis(of_all, chosen[..., None], 2)
    return squares((found * gates[..., None]).sum(2), b["y"])


def balance_of_experts_within_each_row(p, b):
    gates = jax.nn.softmax(b["x"] @ p["route"])
    chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS, dtype=gates.dtype).mean(1)
    found = jnp.einsum("rte,rtd,edf->rtf", gates, b["x"], p["experts"])
    return squares(found, b["y"]) + 0.1 * (chosen * gates.mean(1)).sum(1).mean()


def cross_entropy_in_chunks_of_tokens(p, b):
    """A fixed number of chunks, whatever the number of rows."""
    tokens = hidden(p, b["words"]).reshape(4, -1, WIDTH)
    labels = b["labels"].reshape(4, -1)

    def one(total, chunk):
        return total + cross_entropy(chunk[0] @ p["out"], chunk[1]).sum(), None

    total, _ = lax.scan(jax.checkpoint(one), jnp.zeros((), tokens.dtype), (tokens, labels))
    return total / labels.size


# Loops, branches, gradients within, images.


def layers_scanned_with_checkpoint(p, b):
    layer = jax.checkpoint(lambda x, w: (x + jnp.tanh(rms(x) @ w), None))
    return squares(lax.scan(layer, b["x"], p["layers"])[0], b["y"])


def branch_of_each_row(p, b):
    ways = [lambda x, i=i: jnp.tanh(x @ p["layers"][i]) for i in range(3)]
    found = jax.vmap(lambda i, x: lax.switch(i, ways, x))(b["kind"], b["v"])
    return squares(found, b["z"])


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


def masked_autoencoder(p, b):
    kept = jnp.take_along_axis(b["x"], b["order"][:, :4, None], 1)
    code = kept + attend(*projected(p, kept), True)
    filled = jnp.concatenate([code, jnp.broadcast_to(p["bias"], code.shape)], 1)
    back = jnp.take_along_axis(filled, jnp.argsort(b["order"], 1)[..., None], 1)
    return squares(block(p, back), b["x"])


def _convolved(x, filters):
    return lax.conv_general_dilated(
        x, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def convolutions_and_pooling(p, b):
    x = jax.nn.relu(_convolved(b["x"][..., None], p["filter"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = jax.nn.relu(_convolved(x, p["filter2"])).mean((1, 2))
    return cross_entropy(x @ p["head"], b["kind"]).mean()


def equations_solved_in_each_row(p, b):
    x = (b["x"] @ p["a"]).astype(jnp.float32)
    matrix = jnp.einsum("rtd,rte->rde", x, x) / TIME + 0.5 * jnp.eye(WIDTH)
    found = jnp.linalg.solve(matrix, b["v"].astype(jnp.float32)[..., None])[..., 0]
    return squares(found, b["z"])


def _field(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["scale"]


def equation_of_physics(p, b):
    """The Laplacian of each row's field is what the row says."""
    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: _field(p, x))(x)))
    return squares(laplacian(b["v"]), b["advantage"])


def inner_step_of_each_row(p, b):
    def of_row(x, y):
        loss = lambda w: squares(jnp.tanh(x @ w) @ p["b"], y)
        return loss(p["a"] - 0.1 * jax.grad(loss)(p["a"]))

    return jax.vmap(of_row)(b["x"], b["y"]).mean()


Loss = Callable[[Any, Any], Any]
MODELS: dict[str, Loss] = {
    each.__name__: each
    for each in (
        linear_attention,
        attention_block_by_block,
        key_value_cache_filled_step_by_step,
        selective_scan,
        linear_recurrence_by_associative_scan,
        experts_chosen_by_each_token,
        balance_of_experts_within_each_row,
        cross_entropy_in_chunks_of_tokens,
        layers_scanned_with_checkpoint,
        branch_of_each_row,
        fixed_point_with_an_implicit_gradient,
        masked_autoencoder,
        convolutions_and_pooling,
        equations_solved_in_each_row,
        equation_of_physics,
        inner_step_of_each_row,
    )
} | {
    "causal attention": lambda p, b: squares(attend(*projected(p, b["x"])) @ p["o"], b["y"]),
    "attention of jax.nn": lambda p, b: squares(
        jax.nn.dot_product_attention(*projected(p, b["x"]), is_causal=True).reshape(b["y"].shape),
        b["y"],
    ),
    "weight decay": lambda p, b: (
        row_losses(p, b).mean() + 1e-2 * ((p["a"] ** 2).sum() + jnp.abs(p["b"]).sum())
    ),
    "median of each row": lambda p, b: (jnp.median(b["x"] @ p["a"], axis=1) ** 2).mean(),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_mean_over_rows_is_proven(name: str):
    loss = lambda batch, params, own: MODELS[name](params, batch)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype), BATCH)
    assert over_rows(loss, rows, PARAMS, times=3).kind is OverRows.MEAN


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_one_device(name: str):
    follows_one_device(MODELS[name], optax.sgd(0.3), PARAMS, [BATCH], num_shards=3, atol=5e-6)
