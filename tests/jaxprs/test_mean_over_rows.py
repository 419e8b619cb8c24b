"""What losses are in the rows of their batch: means are proven, and all others are told apart."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

from crossshard.jaxprs.mean_over_rows import Finding, OverRows, over_rows

ROWS, TIME, WIDTH, CLASSES = 6, 5, 4, 3
W = np.float32(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))
KEY = jax.random.key(0)
KERNEL = np.ones((3, 3, 2, 4), np.float32)
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    "sequence": jax.ShapeDtypeStruct((ROWS, TIME, WIDTH), jnp.float32),
    "image": jax.ShapeDtypeStruct((ROWS, 8, 8, 2), jnp.float32),
    "mask": jax.ShapeDtypeStruct((ROWS, TIME), jnp.float32),
    "words": jax.ShapeDtypeStruct((ROWS, TIME), jnp.int32),
    "y": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    "target": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    "weight": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
}
Loss = Callable[[Any, Any, Any], Any]


def found(loss: Loss, w: Any = W) -> Finding:
    return over_rows(lambda batch, w, key: loss(batch, w, key), BATCH, w, own=KEY)


def attention(x: Any, w: Any, mask: Any = None) -> Any:
    q, k = x @ w, x @ w.T
    scores = jnp.einsum("btd,bsd->bts", q, k) / jnp.sqrt(x.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((TIME, TIME), bool)), scores, -1e9)
    if mask is not None:
        scores = jnp.where(mask[:, None, :] > 0, scores, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def cell(w: Any) -> Any:
    return lambda h, x: (jnp.tanh(x @ w + h @ w.T),) * 2


def adapted(w: Any, x: Any) -> Any:
    inner = lambda w: ((x @ w) ** 2).mean()
    return inner(w - 0.1 * jax.grad(inner)(w))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1, 1),))


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(CLASSES)(linen.LayerNorm()(nnx.relu(linen.Dense(8)(x))))


LINEN = Linen()
OF_LINEN = LINEN.init(jax.random.key(1), np.ones((1, WIDTH), np.float32))
MLP = eqx.nn.MLP(WIDTH, CLASSES, 8, 2, key=jax.random.key(2))
HEADS = eqx.nn.MultiheadAttention(2, WIDTH, key=jax.random.key(3))
CONV = nnx.Conv(2, 4, (3, 3), rngs=nnx.Rngs(0))
MHA = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=nnx.Rngs(0))
LSTM = linen.RNN(linen.LSTMCell(6))
OF_LSTM = LSTM.init(jax.random.key(4), np.ones((1, TIME, WIDTH), np.float32))
table = jnp.ones((10, WIDTH))
entropy = optax.softmax_cross_entropy_with_integer_labels


def at_rows(b: Any, w: Any, k: Any) -> Any:
    return -jax.nn.log_softmax(b["x"] @ w)[jnp.arange(ROWS_OF(b)), b["y"]].mean()


def ROWS_OF(b: Any) -> int:
    return b["y"].shape[0]


MEANS: dict[str, Loss] = {
    "squares": lambda b, w, k: ((b["x"] @ w) ** 2).mean(),
    "sum by rows": lambda b, w, k: ((b["x"] @ w) ** 2).sum() / b["x"].shape[0],
    "sum over axis, mean": lambda b, w, k: ((b["x"] @ w) ** 2).sum(1).mean(),
    "of means": lambda b, w, k: jax.vmap(lambda x: ((x @ w) ** 2).mean())(b["x"]).mean(),
    "divided before": lambda b, w, k: ((b["x"] @ w) ** 2 / b["x"].size).sum(),
    "entropy": lambda b, w, k: entropy(b["x"] @ w, b["y"]).mean(),
    "one hot": lambda b, w, k: (
        -(jax.nn.one_hot(b["y"], WIDTH) * jax.nn.log_softmax(b["x"] @ w)).sum(-1).mean()
    ),
    "arange": at_rows,
    "take along": lambda b, w, k: jnp.take_along_axis(
        jax.nn.log_softmax(b["x"] @ w), b["y"][:, None], 1
    ).mean(),
    "regularised": lambda b, w, k: (b["x"] @ w).mean() + 0.1 * (w**2).sum(),
    "two terms": lambda b, w, k: (b["x"] @ w).mean() + 2 * jnp.abs(b["target"]).mean(),
    "attention": lambda b, w, k: attention(b["sequence"], w).mean(),
    "attention, masked": lambda b, w, k: attention(b["sequence"], w, b["mask"]).mean(),
    "attention of JAX": lambda b, w, k: jax.nn.dot_product_attention(
        *[(b["sequence"] @ w)[:, :, None]] * 3, is_causal=True
    ).mean(),
    "embedding": lambda b, w, k: (table[b["words"]] @ w).mean(),
    "language model": lambda b, w, k: entropy((table[b["words"]] @ w), b["words"] % 3).mean(),
    "convolution": lambda b, w, k: lax.conv_general_dilated(
        b["image"], KERNEL, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    ).mean(),
    "nnx convolution": lambda b, w, k: (CONV(b["image"]) ** 2).mean(),
    "pooling": lambda b, w, k: linen.max_pool(b["image"], (2, 2), (2, 2)).mean(),
    "average pooling": lambda b, w, k: (linen.avg_pool(b["image"], (2, 2)) ** 2).mean(),
    "recurrent": lambda b, w, k: lax.scan(
        cell(w), jnp.zeros((ROWS_OF(b), WIDTH)), b["sequence"].swapaxes(0, 1)
    )[1].mean(),
    "recurrent, per row": lambda b, w, k: jax.vmap(
        lambda x: lax.scan(cell(w), jnp.zeros(WIDTH), x)[0].sum()
    )(b["sequence"]).mean(),
    "linen lstm": lambda b, w, k: (LSTM.apply(OF_LSTM, b["sequence"]) ** 2).mean(),
    "loop over time": lambda b, w, k: lax.fori_loop(
        0, TIME, lambda i, h: jnp.tanh(h @ w + b["sequence"][:, i]), b["x"]
    ).mean(),
    "sorted within": lambda b, w, k: (jnp.sort(b["x"], 1) @ w).mean(),
    "top k within": lambda b, w, k: lax.top_k(b["x"] @ w, 2)[0].mean(),
    "norm of rows": lambda b, w, k: jnp.linalg.norm(b["x"] @ w, axis=1).mean(),
    "layer norm": lambda b, w, k: (jax.nn.standardize(b["x"] @ w) ** 3).mean(),
    "custom gradient": lambda b, w, k: clipped(b["x"] @ w).mean(),
    "remat": lambda b, w, k: jax.checkpoint(lambda x: jnp.tanh(x @ w))(b["x"]).mean(),
    "dropout": lambda b, w, k: jnp.where(
        jax.random.bernoulli(k, 0.9, b["x"].shape), b["x"] @ w, 0
    ).mean(),
    "noise": lambda b, w, k: ((b["x"] + jax.random.normal(k, b["x"].shape)) @ w).mean(),
    "noise of a folded key": lambda b, w, k: (
        b["x"] * jax.random.uniform(jax.random.fold_in(k, 3), (ROWS_OF(b), 1))
    ).mean(),
    "keys of rows": lambda b, w, k: jax.vmap(
        lambda x, k: (x * jax.random.normal(k, x.shape)).sum()
    )(b["x"], jax.random.split(k, ROWS_OF(b))).mean(),
    "diffusion": lambda b, w, k: (
        (jnp.sqrt(jax.random.uniform(k, (ROWS_OF(b), 1))) * b["x"]) @ w - b["x"]
    ).mean(),
    "weighted rows": lambda b, w, k: (b["weight"] * (b["x"] @ w).sum(1)).mean(),
    "mean of tokens within": lambda b, w, k: (
        ((b["sequence"] @ w).sum(-1) * b["mask"]).sum(1) / (b["mask"].sum(1) + 1e-6)
    ).mean(),
    "adapted to tasks": lambda b, w, k: jax.vmap(adapted, (None, 0))(w, b["sequence"]).mean(),
    "gradient penalty": lambda b, w, k: (
        (jax.grad(lambda x: jnp.tanh(x @ w).sum())(b["x"]) ** 2).sum(1) ** 0.5
    ).mean(),
    "hinge": lambda b, w, k: jnp.maximum(0, 1 - b["target"] * (b["x"] @ w)[:, 0]).mean(),
    "huber": lambda b, w, k: optax.huber_loss((b["x"] @ w)[:, 0], b["target"]).mean(),
    "linen": lambda b, w, k: entropy(LINEN.apply(OF_LINEN, b["x"]), b["y"] % 3).mean(),
    "equinox": lambda b, w, k: entropy(jax.vmap(MLP)(b["x"]), b["y"] % 3).mean(),
    "equinox attention": lambda b, w, k: jax.vmap(lambda x: HEADS(x, x, x))(b["sequence"]).mean(),
    "nnx attention": lambda b, w, k: (MHA(b["sequence"]) ** 2).mean(),
    "flattened tokens": lambda b, w, k: entropy(
        (b["sequence"] @ w).reshape(-1, WIDTH), b["words"].reshape(-1)
    ).mean(),
    "map over rows": lambda b, w, k: lax.map(lambda x: jnp.tanh(x @ w).sum(), b["x"]).mean(),
    "teacher": lambda b, w, k: (
        (lax.stop_gradient(jax.nn.softmax(b["x"] @ W)) * jax.nn.log_softmax(b["x"] @ w))
        .sum(1)
        .mean()
    ),
    "bfloat16": lambda b, w, k: (b["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).mean(),
    "dqn": lambda b, w, k: optax.l2_loss(
        jnp.take_along_axis(b["x"] @ w, b["y"][:, None], 1)[:, 0],
        lax.stop_gradient(b["target"] + 0.9 * (b["x"] @ W).max(1)),
    ).mean(),
    "ppo": lambda b, w, k: (
        -jnp.minimum(
            jnp.exp(b["target"]) * b["weight"],
            jnp.clip(jnp.exp(b["target"]), 0.8, 1.2) * b["weight"],
        ).mean()
    ),
    "written by index": lambda b, w, k: (
        jnp.zeros((ROWS_OF(b), WIDTH)).at[jnp.arange(ROWS_OF(b)), b["y"]].set(b["target"]) @ w
    ).mean(),
    "average": lambda b, w, k: jnp.average((b["x"] @ w).sum(1)),
    "einsum": lambda b, w, k: jnp.einsum("bi,ij,bj->", b["x"], w, b["x"]) / b["x"].shape[0],
    "first tokens": lambda b, w, k: (b["sequence"][:, 0] @ w).mean(),
    "shifted tokens": lambda b, w, k: (b["sequence"][:, 1:] - (b["sequence"][:, :-1] @ w)).mean(),
}


def contrastive(b: Any, w: Any, k: Any) -> Any:
    scores = (b["x"] @ w) @ (b["x"] @ w.T).T
    return entropy(scores, jnp.arange(scores.shape[0])).mean()


def normed(x: Any) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)


def balanced(b: Any, w: Any, k: Any) -> Any:
    gates = jax.nn.softmax(b["x"] @ w)
    return (gates.mean(0) * jax.nn.one_hot(gates.argmax(1), WIDTH).mean(0)).sum()


COMPARED: dict[str, Loss] = {
    "contrastive": contrastive,
    "batch norm": lambda b, w, k: (normed(b["x"] @ w) ** 3).mean(),
    "batch norm of Flax": lambda b, w, k: (
        nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0))(b["x"] @ w) ** 3
    ).mean(),
    "root of a mean": lambda b, w, k: jnp.sqrt(((b["x"] @ w) ** 2).mean()),
    "standard deviation": lambda b, w, k: (b["x"] @ w).std(),
    "balance of experts": balanced,
    "advantages": lambda b, w, k: (
        (b["target"] - b["target"].mean()) / (b["target"].std() + 1e-8) * (b["x"] @ w)[:, 0]
    ).mean(),
    "time-major": lambda b, w, k: lax.scan(cell(w), jnp.zeros((TIME, WIDTH)), b["sequence"])[
        1
    ].mean(),
    "mixup": lambda b, w, k: ((0.5 * b["x"] + 0.5 * b["x"][::-1]) @ w).mean(),
    "roll": lambda b, w, k: ((b["x"] - jnp.roll(b["x"], 1, 0)) @ w).mean(),
    "permuted": lambda b, w, k: (jax.random.permutation(k, b["x"]) * b["x"] @ w).mean(),
    "first rows": lambda b, w, k: (b["x"][:2] @ w).mean(),
    "largest row": lambda b, w, k: (b["x"] @ w).sum(1).max(),
    "softmax over rows": lambda b, w, k: (jax.nn.softmax(b["x"] @ w, axis=0) ** 2).mean(),
    "sorted rows": lambda b, w, k: jnp.sort(b["x"] @ w, axis=0)[0].mean(),
    "sums so far": lambda b, w, k: (jnp.cumsum(b["x"] @ w, axis=0) ** 2).mean(),
    "distances": lambda b, w, k: (((b["x"] @ w)[:, None] - (b["x"] @ w)[None]) ** 2).mean(),
    "covariance": lambda b, w, k: (jnp.cov((b["x"] @ w).T) ** 2).sum(),
    "gram": lambda b, w, k: (((b["x"] @ w).T @ b["x"]) ** 2).sum(),
    "median": lambda b, w, k: jnp.median(b["x"] @ w, axis=0).sum(),
    "quantile": lambda b, w, k: jnp.quantile((b["x"] @ w).sum(1), 0.9),
    "log of a mean": lambda b, w, k: jnp.log(jnp.exp(b["x"] @ w).mean()),
    "logsumexp over rows": lambda b, w, k: jax.nn.logsumexp(b["x"] @ w, axis=0).sum(),
    "triplet, hardest": lambda b, w, k: ((b["x"] @ w) @ (b["x"] @ w).T).max(1).mean(),
    "segments": lambda b, w, k: (jax.ops.segment_sum(b["x"] @ w, b["y"], CLASSES) ** 2).mean(),
    "each row for each row": lambda b, w, k: (
        jnp.broadcast_to((b["x"] @ w).sum(1)[:, None], (ROWS_OF(b), ROWS_OF(b))).sum() / ROWS_OF(b)
    ),
    "pairs": lambda b, w, k: (b["x"][0::2] @ w - b["x"][1::2] @ w).mean(),
    "product of means": lambda b, w, k: (b["x"] @ w).mean() * b["target"].mean(),
    "position": lambda b, w, k: (jnp.arange(ROWS_OF(b)) * (b["x"] @ w).sum(1)).mean(),
    "position, from 1": lambda b, w, k: ((jnp.arange(ROWS_OF(b)) + 1) * (b["x"] @ w).sum(1)).mean(),
    "a row is written": lambda b, w, k: (b["target"].at[0].set(0.0) * b["x"][:, 0]).mean(),
    "key of a position": lambda b, w, k: jax.vmap(
        lambda i, x: (jax.random.normal(jax.random.fold_in(k, i), x.shape) * x @ w).sum()
    )(jnp.arange(ROWS_OF(b)), b["x"]).mean(),
    "constant noise": lambda b, w, k: (
        jax.random.normal(jax.random.key(1), b["x"].shape) * (b["x"] @ w)
    ).mean(),
    "barlow": lambda b, w, k: (
        (normed(b["x"] @ w).T @ normed(b["x"]) / ROWS_OF(b) - jnp.eye(WIDTH)) ** 2
    ).sum(),
    "clipped by the mean": lambda b, w, k: jnp.minimum((b["x"] @ w).mean(), 1),
    "maximum of two means": lambda b, w, k: jnp.maximum((b["x"] @ w).mean(), b["target"].mean()),
    "argmax": lambda b, w, k: (b["x"][jnp.argmax(b["target"])] @ w).sum(),
    "convolution over rows": lambda b, w, k: jnp.convolve(b["target"], w[0], "same").mean(),
    "neighbours": lambda b, w, k: ((b["x"][1:] - b["x"][:-1]) @ w).mean(),
    "cov of a queue": lambda b, w, k: ((b["x"] @ w) @ jnp.concatenate([b["x"], W]).T).mean(),
    "centered targets": lambda b, w, k: (
        (b["target"] - lax.stop_gradient(b["target"].mean())) * (b["x"] @ w)[:, 0]
    ).mean(),
    "attention between rows": lambda b, w, k: (
        jax.nn.softmax(b["x"] @ b["x"].T) @ (b["x"] @ w)
    ).mean(),
    "a branch on the mean": lambda b, w, k: lax.cond(
        b["target"].mean() > 0, lambda x: (x @ w).mean(), lambda x: (x @ w.T).mean(), b["x"]
    ),
}
RATIOS: dict[str, tuple[Loss, str | None]] = {
    "token mean": (
        lambda b, w, k: ((b["sequence"] @ w).sum(-1) * b["mask"]).sum() / b["mask"].sum(),
        "mask",
    ),
    "token mean, at least 1": (
        lambda b, w, k: (
            ((b["sequence"] @ w).sum(-1) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1)
        ),
        "mask",
    ),
    "weighted mean": (
        lambda b, w, k: jnp.average((b["x"] @ w).sum(1), weights=b["weight"]),
        "weight",
    ),
    "mean where": (
        lambda b, w, k: jnp.mean((b["sequence"] @ w).sum(-1), where=b["mask"] > 0),
        None,
    ),
    "eps": (
        lambda b, w, k: ((b["x"] @ w).sum(1) * b["weight"]).sum() / (b["weight"].sum() + 1e-8),
        "weight",
    ),
    "words that count": (
        lambda b, w, k: (
            ((table[b["words"]] @ w).sum(-1) * (b["words"] > 0)).sum() / (b["words"] > 0).sum()
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_rows_is_proven(name: str):
    assert found(MEANS[name]) == Finding(OverRows.MEAN)


@pytest.mark.parametrize("name", COMPARED)
def test_what_compares_rows_is_found_with_its_line(name: str):
    finding = found(COMPARED[name])
    assert finding.kind is OverRows.COMPARED, finding
    assert finding.reason


@pytest.mark.parametrize("name", RATIOS)
def test_a_ratio_of_sums_is_told_with_its_weight(name: str):
    loss, weight = RATIOS[name]
    finding = found(loss)
    assert finding.kind is OverRows.RATIO, finding
    assert "test_mean_over_rows.py" in finding.source
    entry = None if weight is None else sorted(BATCH).index(weight)
    assert finding.entry == entry


# Their noise is another on halves of the rows.
NOISY = {"dropout", "noise", "noise of a folded key", "keys of rows", "diffusion"}


@pytest.mark.parametrize("name", sorted({*MEANS} - NOISY))
def test_what_is_proven_is_the_mean_of_halves(name: str):
    rng = np.random.default_rng(7)

    def of(x: Any) -> Any:
        if x.dtype == jnp.int32:
            return rng.integers(0, 3, x.shape, np.int32)
        return np.float32(rng.uniform(0.1, 2, x.shape))

    batch = jax.tree.map(lambda x: jnp.asarray(of(x)), BATCH)
    halves = [jax.tree.map(lambda x, at=at: x[at], batch) for at in (slice(3), slice(3, None))]
    whole = MEANS[name](batch, W, KEY)
    parts = sum(MEANS[name](half, W, KEY) for half in halves) / 2
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    np.testing.assert_allclose(float(whole), float(parts), rtol=tolerance, atol=tolerance)


def test_a_sum_is_no_mean():
    assert found(lambda b, w, k: ((b["x"] @ w) ** 2).sum()).kind is OverRows.SUM
    assert found(lambda b, w, k: ((b["x"] @ w) ** 2).sum() / ROWS).kind is OverRows.SUM
    assert found(lambda b, w, k: ((b["x"] @ w) ** 2).sum() / ROWS / 2).kind is OverRows.SUM


def test_the_line_is_the_users():
    def loss(b: Any, w: Any, k: Any) -> Any:
        scores = b["x"] @ w
        return scores.std() + scores.mean()

    line = inspect.getsourcelines(loss)[1] + 2
    assert found(loss).source.endswith(f"test_mean_over_rows.py:{line}")


def test_what_has_other_equations_is_not_decided():
    def loss(b: Any, w: Any, k: Any) -> Any:
        return (b["x"] @ w if ROWS_OF(b) <= ROWS else b["x"] @ w.T).mean()

    assert found(loss).kind is OverRows.UNDECIDED
