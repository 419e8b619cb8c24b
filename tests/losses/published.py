"""Losses shaped as those of public training code, as they stand there and as they are moved here.

Each is written anew after the code that it is named for: what it divides by what, in which order,
is that code's; the model is a toy. ``as_published`` is the loss as one device runs it. The other
forms change at most five of its lines: ``with_weight`` passes ``weight=``, where one count divides
the whole loss; ``with_means`` returns ``crossshard.Mean``, where several do.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import crossshard

Loss = Callable[[Any, Any], Any]

ROWS, LENGTH, WORDS, WIDTH, EXPERTS = 24, 8, 13, 12, 4
EPS = 1e-8


@dataclasses.dataclass(frozen=True)
class Published:
    """A loss of public code.

    Attributes:
      as_published: the loss as it is.
      batch: its batch.
      passes: whether a step takes it as it is, over the shards' rows. What does not pass is refused
        with this sentence, if it is a text.
      weight: the ``weight=`` that is right for the loss as it is; ``None`` if none is.
      with_means: the loss that returns ``crossshard.Mean``; ``None`` if it needs none.
      by_rows: the loss over another arrangement of the batch, and that arrangement; ``None`` if the
        rows of the batch are those of its arrays.
    """

    as_published: Loss
    batch: Any
    passes: bool | str
    weight: Any = None
    with_means: Loss | None = None
    by_rows: tuple[Loss, Any] | None = None


_rng = np.random.default_rng(11)


def _normal(*shape: int) -> np.ndarray:
    return np.float32(_rng.normal(size=shape))


PARAMS = {
    "words": _normal(WORDS, WIDTH),
    "out": _normal(WIDTH, WORDS) / 2,
    "gate": _normal(WIDTH, EXPERTS) / 2,
    "experts": _normal(EXPERTS, WIDTH) / 2,
    "image": _normal(6, WIDTH) / 2,
    "classes": _normal(WIDTH, 5) / 2,
    "scale": np.float32(1.3),
    "shift": np.float32(-0.7),
}

# The lengths rise from row to row, so that each shard has another number of tokens.
_LENGTHS = np.arange(ROWS) * (LENGTH - 2) // (ROWS - 1) + 2
_IS_TOKEN = np.arange(LENGTH) < _LENGTHS[:, None]
_TOKENS = np.where(_IS_TOKEN, _rng.integers(1, WORDS, (ROWS, LENGTH)), 0)
_PROMPT = np.arange(LENGTH) < _LENGTHS[:, None] // 3
# Two documents in each row, and padding after them.
_SEGMENTS = np.where(_IS_TOKEN, 1 + (np.arange(LENGTH) >= _LENGTHS[:, None] // 2), 0)
_IMAGES = _normal(ROWS, 6) * np.linspace(0.3, 2, ROWS, dtype=np.float32)[:, None]


def hidden(params: Any, tokens: Any) -> jax.Array:
    """The hidden states of a toy: each position sees those up to it."""
    x = params["words"][tokens]
    seen = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1)[:, None]
    return jnp.tanh(seen)


def logits_of(params: Any, tokens: Any) -> jax.Array:
    return hidden(params, tokens) @ params["out"]


def log_probabilities(params: Any, tokens: Any) -> jax.Array:
    """Those of the next words, ``[rows, length - 1]``."""
    found = jax.nn.log_softmax(logits_of(params, tokens[:, :-1]))
    return jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[..., 0]


Sums = Callable[[Any, Any], tuple[Any, Any]]


def quotient(sums: Sums, eps: float = 0.0) -> Loss:
    """A loss that divides a sum over rows by how many count."""

    def loss_fn(params: Any, batch: Any) -> Any:
        total, count = sums(params, batch)
        return total / (count + eps) if eps else total / count

    return loss_fn


def means(sums: Sums) -> Loss:
    return lambda params, batch: crossshard.Mean(*sums(params, batch))


# Flax: lm1b and wmt, nlp_seq, gemma and ogbg_molpcba.


def smooth_cross_entropy(logits: Any, targets: Any, smoothing: float = 0.1) -> jax.Array:
    high, low = 1 - smoothing, smoothing / (WORDS - 1)
    least = -(high * np.log(high) + (WORDS - 1) * low * np.log(low + 1e-20))
    soft = jax.nn.one_hot(targets, WORDS) * (high - low) + low
    return -(soft * jax.nn.log_softmax(logits)).sum(-1) - least


def lm1b_sums(params: Any, batch: Any) -> tuple[Any, Any]:
    weights = jnp.where(batch["inputs"] > 0, 1, 0).astype(jnp.float32)
    before = jnp.pad(batch["inputs"], ((0, 0), (1, 0)))[:, :-1]
    loss = smooth_cross_entropy(logits_of(params, before), batch["inputs"])
    return (loss * weights).sum(), weights.sum()


def gemma_rows(params: Any, batch: Any) -> tuple[Any, Any]:
    """The losses of rows, and what the batch counts."""
    inputs, targets = batch["inputs"][:, :-1], batch["inputs"][:, 1:]
    weights = (targets > 0).astype(jnp.float32)
    loss = smooth_cross_entropy(logits_of(params, inputs), targets) * weights
    return loss.sum(axis=1), weights.sum()


def gemma(params: Any, batch: Any) -> Any:
    loss, count = gemma_rows(params, batch)
    of_rows = loss * len(loss) / count
    return of_rows.mean()


def gemma_with_means(params: Any, batch: Any) -> Any:
    loss, count = gemma_rows(params, batch)
    return crossshard.Mean(loss.sum(), count)


def ogbg_sums(params: Any, batch: Any) -> tuple[Any, Any]:
    logits = jnp.tanh(batch["image"] @ params["image"]) @ params["classes"]
    mask = ~jnp.isnan(batch["labels"])
    labels = jnp.where(mask, batch["labels"], -1)
    loss = jnp.maximum(logits, 0) - logits * labels + jnp.log(1 + jnp.exp(-jnp.abs(logits)))
    return jnp.where(mask, loss, 0).sum(), mask.sum()


# MaxText: packed documents, z-loss, experts, tiles of the vocabulary.


@jax.custom_vjp
def maxtext_cross_entropy(logits: Any, targets: Any, z_loss: float) -> tuple[Any, Any]:
    return _maxtext_forward(logits, targets, z_loss)[0]


def _maxtext_forward(logits: Any, targets: Any, z_loss: float) -> Any:
    largest = logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(-1, keepdims=True)
    log_z = jnp.squeeze(jnp.log(total) + largest, -1)
    squares = z_loss * jax.lax.square(log_z)
    loss = -(targets * (logits - largest - jnp.log(total))).sum(-1) + squares
    return (loss, squares), (targets, z_loss, exponentials, total, log_z)


def _maxtext_backward(kept: Any, cotangents: Any) -> Any:
    targets, z_loss, exponentials, total, log_z = kept
    of_loss = cotangents[0][..., None]  # that of the z-loss alone is not used
    factor = targets.sum(-1, keepdims=True) + 2 * z_loss * log_z[..., None]
    return of_loss * (factor * exponentials / total - targets), None, None


maxtext_cross_entropy.defvjp(_maxtext_forward, _maxtext_backward)


def maxtext_sums(params: Any, batch: Any) -> tuple[Any, Any]:
    one_hot = jax.nn.one_hot(batch["targets"], WORDS)
    logits = logits_of(params, batch["inputs"])
    loss, _ = maxtext_cross_entropy(logits, one_hot, 1e-2)
    counted = batch["targets_segmentation"] != 0
    return jnp.sum(loss * counted), jnp.sum(counted)


def balance(params: Any, batch: Any) -> jax.Array:
    """How evenly each sequence uses the experts, a mean over sequences."""
    weights = jax.nn.softmax(hidden(params, batch["inputs"]) @ params["gate"])
    _, chosen = jax.lax.top_k(weights, 2)
    density = jax.nn.one_hot(chosen, EXPERTS).sum(2).mean(1)
    return (density * weights.mean(1)).mean() * EXPERTS**2


def maxtext_experts(params: Any, batch: Any) -> Any:
    total, count = maxtext_sums(params, batch)
    loss = total / (count + EPS)
    loss += 0.01 * balance(params, batch)
    return loss


def maxtext_experts_with_means(params: Any, batch: Any) -> Any:
    total, count = maxtext_sums(params, batch)
    loss = crossshard.Mean(total, count)
    rows = len(batch["inputs"])
    loss += 0.01 * crossshard.Mean(rows * balance(params, batch), rows)
    return loss


TILES = 4


def tiled_sums(params: Any, batch: Any) -> tuple[Any, Any]:
    """Tokens in a fixed number of tiles, one after the other: each crosses the rows' ends."""
    cut = lambda x: x.reshape(TILES, -1, *x.shape[2:])
    counted = batch["targets_segmentation"] != 0

    def one(total: Any, tile: Any) -> Any:
        states, targets, counted = tile
        one_hot = jax.nn.one_hot(targets, WORDS)
        loss, _ = maxtext_cross_entropy(states @ params["out"], one_hot, 1e-2)
        return total + jnp.sum(loss * counted), None

    tiles = cut(hidden(params, batch["inputs"])), cut(batch["targets"]), cut(counted)
    total, _ = jax.lax.scan(jax.checkpoint(one), jnp.float32(0), tiles)
    return total, jnp.sum(counted)


# Tunix: SFT, GRPO and DPO, whose metrics keep sum and count apart.


@dataclasses.dataclass(frozen=True)
class WeightedMetric:
    total: Any
    count: Any
    eps: float | None = None
    at_least: float | None = None

    def compute(self) -> Any:
        count = self.count if self.eps is None else self.count + self.eps
        count = count if self.at_least is None else jnp.maximum(count, self.at_least)
        scale = 1.0 / jnp.where(count == 0, 1.0, count)
        return self.total * jnp.where(count == 0, 0.0, scale)


def tunix_sft_metric(params: Any, batch: Any) -> WeightedMetric:
    logits = logits_of(params, batch["inputs"])[:, :-1]
    mask = batch["input_mask"][:, 1:]
    one_hot = jax.nn.one_hot(batch["inputs"][:, 1:], WORDS) * mask.astype(float)[..., None]
    return WeightedMetric(-(jax.nn.log_softmax(logits) * one_hot).sum(), mask.sum(), eps=1e-8)


def tunix_sft(params: Any, batch: Any) -> Any:
    return tunix_sft_metric(params, batch).compute()


def tunix_sft_with_means(params: Any, batch: Any) -> Any:
    metric = tunix_sft_metric(params, batch)
    return crossshard.Mean(metric.total, metric.count)


def aggregate(loss: Any, mask: Any, mode: str) -> WeightedMetric:
    if mode == "token mean":
        return WeightedMetric((loss * mask).sum(), mask.sum(), at_least=1.0)
    if mode == "sum of tokens by rows":
        return WeightedMetric((loss * mask).sum(), len(loss), at_least=1e-6)
    counts = mask.sum(-1)
    of_rows = (loss * mask).sum(-1) / jnp.clip(counts, min=1.0)
    return WeightedMetric(of_rows.sum(), (counts > 0).sum(), at_least=1.0)


def grpo_metric(mode: str, params: Any, batch: Any) -> WeightedMetric:
    mask = batch["completion_mask"][:, 1:]
    found = log_probabilities(params, batch["inputs"])
    ratio = jnp.exp(jnp.clip(found - batch["old"], -20.0, 20.0))
    advantages = batch["advantages"][:, None]
    clipped = -advantages * jnp.clip(ratio, 0.8, 1.2)
    loss = aggregate(jnp.maximum(-advantages * ratio, clipped), mask, mode)
    apart = batch["reference"] - found
    divergence = aggregate(jnp.exp(apart) - apart - 1, mask, mode)
    total = loss.total + 0.04 * divergence.total
    return dataclasses.replace(loss, total=total)


def grpo(mode: str) -> Loss:
    return lambda params, batch: grpo_metric(mode, params, batch).compute()


def grpo_with_means(mode: str) -> Loss:
    def loss_fn(params: Any, batch: Any) -> Any:
        metric = grpo_metric(mode, params, batch)
        return crossshard.Mean(metric.total, metric.count)

    return loss_fn


def preference(params: Any, tokens: Any, mask: Any, reference: Any) -> Any:
    """DPO: the chosen answers are the first half of the rows, and the refused ones the second."""
    found = (log_probabilities(params, tokens) * mask[:, 1:]).sum(-1) - reference
    half = len(found) // 2
    apart = 0.1 * (found[:half] - found[half:])
    losses = -(jax.nn.log_sigmoid(apart) * 0.95 + jax.nn.log_sigmoid(-apart) * 0.05)
    return WeightedMetric(losses.sum(), jnp.float32(half), at_least=1.0).compute()


def dpo(params: Any, batch: Any) -> Any:
    return preference(params, batch["inputs"], batch["completion_mask"], batch["reference"])


def dpo_of_pairs(params: Any, batch: Any) -> Any:
    """A row is a pair."""
    in_halves = lambda x: jnp.concatenate([x[:, 0], x[:, 1]])
    batch = {name: in_halves(x) for name, x in batch.items()}
    return dpo(params, batch)


# EasyLM.


def easylm(params: Any, batch: Any) -> Any:
    """Each row counts the same, however long it is."""
    valid = batch["input_mask"].astype(jnp.float32)
    length = jnp.maximum(jnp.sum(valid, axis=-1), 1e-10)
    found = jax.nn.log_softmax(logits_of(params, batch["inputs"]).astype(jnp.float32))
    found = jnp.squeeze(jnp.take_along_axis(found, batch["targets"][..., None], axis=-1), -1)
    found = jnp.where(valid > 0, found, jnp.array(0.0))
    return -jnp.mean(jnp.sum(found, axis=-1) / length)


# Quantised training as of qwix.


@jax.custom_vjp
def _rounded(x: jax.Array) -> jax.Array:
    return jnp.round(x)


_rounded.defvjp(lambda x: (_rounded(x), None), lambda _, cotangent: (cotangent,))


def quantized(x: jax.Array, axis: int | None) -> jax.Array:
    """Eight bits with one scale along an axis, or for all; the gradient goes straight through.

    The largest becomes 127. qwix divides by 127.5, so that it stands between two values, and which
    one it takes depends on how XLA compiles the program, on one device too.
    """
    scale = jnp.abs(x).max(axis, keepdims=True) / 127
    return _rounded(x / scale) * scale


def quantized_training(axis: int | None) -> Loss:
    def loss_fn(params: Any, batch: Any) -> Any:
        x = jnp.tanh(quantized(batch["image"], axis) @ quantized(params["image"], 0))
        logits = quantized(x, axis) @ quantized(params["classes"], 0)
        return -(batch["one_hot"] * jax.nn.log_softmax(logits)).sum(-1).mean()

    return loss_fn


_TEXT = {"inputs": _TOKENS}
_PACKED = {
    "inputs": _TOKENS,
    "targets": np.roll(_TOKENS, -1, axis=1),
    "targets_segmentation": np.int32(_SEGMENTS),
}
_MASKED = {
    "inputs": _TOKENS,
    "targets": np.roll(_TOKENS, -1, axis=1),
    "input_mask": np.int32(_IS_TOKEN & ~_PROMPT),
}
_CLASSES = {"image": _IMAGES, "one_hot": np.eye(5, dtype=np.float32)[_rng.integers(0, 5, ROWS)]}
_LABELS = np.where(_IS_TOKEN[:, :5], np.float32(_rng.integers(0, 2, (ROWS, 5))), np.float32("nan"))
# The first four rows have no answer, so that the first of eight shards counts none.
_HAS_ANSWER = np.arange(ROWS)[:, None] > 3
_ANSWERS = {
    "inputs": _TOKENS,
    "completion_mask": np.float32(_IS_TOKEN & ~_PROMPT & _HAS_ANSWER),
    "advantages": _normal(ROWS),
    "old": _normal(ROWS, LENGTH - 1) / 4 - 2,
    "reference": _normal(ROWS, LENGTH - 1) / 4 - 2,
}
_PAIRS = {
    "inputs": _rng.integers(0, WORDS, (ROWS, 2, LENGTH)),
    "completion_mask": np.float32(_rng.integers(0, 2, (ROWS, 2, LENGTH))),
    "reference": _normal(ROWS, 2),
}
_IN_HALVES = {name: np.concatenate([x[:, 0], x[:, 1]]) for name, x in _PAIRS.items()}
_COMPARES = "loss_over='batch'"


def _tokens_of_targets(batch: Any) -> Any:
    return (batch["targets_segmentation"] != 0).sum()


PUBLISHED = {
    "flax lm1b": Published(
        quotient(lm1b_sums),
        _TEXT,
        "weight",
        lambda batch: (batch["inputs"] > 0).sum(),
        means(lm1b_sums),
    ),
    "flax gemma": Published(
        gemma, _TEXT, False, lambda batch: (batch["inputs"][:, 1:] > 0).sum(), gemma_with_means
    ),
    "flax ogbg": Published(
        quotient(ogbg_sums),
        {"image": _IMAGES, "labels": _LABELS},
        False,
        lambda batch: (~jnp.isnan(batch["labels"])).sum(),
        means(ogbg_sums),
    ),
    "maxtext": Published(
        quotient(maxtext_sums, EPS), _PACKED, False, _tokens_of_targets, means(maxtext_sums)
    ),
    "maxtext experts": Published(
        maxtext_experts, _PACKED, False, with_means=maxtext_experts_with_means
    ),
    "maxtext vocabulary in tiles": Published(
        quotient(tiled_sums, EPS), _PACKED, False, _tokens_of_targets, means(tiled_sums)
    ),
    "tunix sft": Published(
        tunix_sft,
        _MASKED,
        False,
        lambda batch: batch["input_mask"][:, 1:].sum(),
        tunix_sft_with_means,
    ),
    "tunix grpo, mean of tokens": Published(
        grpo("token mean"),
        _ANSWERS,
        False,
        lambda batch: batch["completion_mask"][:, 1:].sum(),
        grpo_with_means("token mean"),
    ),
    "tunix grpo, mean of sequences": Published(
        grpo("mean of sequences"),
        _ANSWERS,
        False,
        lambda batch: (batch["completion_mask"][:, 1:].sum(1) > 0).sum(),
        grpo_with_means("mean of sequences"),
    ),
    "tunix grpo, sum of tokens by rows": Published(grpo("sum of tokens by rows"), _ANSWERS, True),
    "tunix dpo": Published(dpo, _IN_HALVES, _COMPARES, by_rows=(dpo_of_pairs, _PAIRS)),
    "easylm": Published(easylm, _MASKED, True),
    "qwix, a scale for each row": Published(quantized_training(1), _CLASSES, True),
    "qwix, one scale": Published(quantized_training(None), _CLASSES, _COMPARES),
}
