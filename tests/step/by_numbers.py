"""Losses that a trace does not decide, and steps of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard.errors import LossError

SHARDS = 4
W = np.float32(np.random.default_rng(0).normal(size=(3, 2)))


def batch_of(rows: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(rows).normal(size=(rows, 3))
    return {"x": np.float32(x), "mask": np.float32(np.arange(rows) % 3 > 0)}


BATCH, MANY, FEW = batch_of(16), batch_of(48), batch_of(SHARDS)
GROUPS = crossshard.CrossShardOptimizer(optax.sgd(0.1), group_assignment=[[0, 1], [2, 3]])


def undecided(x: Any) -> Any:
    """An identity that no analysis knows."""
    return jax.pure_callback(
        lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


@jax.custom_jvp
def opaque(x: Any) -> Any:
    return undecided(x)


opaque.defjvp(lambda xs, ts: (xs[0], ts[0]))


def made(loss: Any, **options: Any) -> Any:
    options = {"num_shards": SHARDS, "optimizer": optax.sgd(0.1)} | options
    return crossshard.make_train_step(loss, **options)


def moved(step: Any, batch: Any) -> Any:
    """What the first step adds to the parameters, over the rate."""
    state, _ = step(step.init(W), batch)
    return (W - np.asarray(step.model(state))) / 0.1


def refused(loss: Any, said: str, batch: Any = BATCH, **options: Any) -> None:
    """The first step is refused in these words, and its state stays valid."""
    step = made(loss, **options)
    state = step.init(W)
    with pytest.raises(LossError, match=said):
        step(state, batch)
    shard = 0 if "optimizer" in options else None  # groups have their own
    np.testing.assert_array_equal(step.model(state, shard), W)


def a_mean(w: Any, batch: Any) -> Any:
    return opaque((batch["x"] @ w) ** 2).mean()


def plain(w: Any, batch: Any) -> Any:
    return ((batch["x"] @ w) ** 2).mean()


def masked_plain(w: Any, batch: Any) -> Any:
    return (((batch["x"] @ w) ** 2).sum(1) * batch["mask"]).sum() / batch["mask"].sum()


def plain_sum(w: Any, batch: Any) -> Any:
    return ((batch["x"] @ w) ** 2).sum(1) @ batch["mask"]


def compared(w: Any, batch: Any) -> Any:
    hidden = opaque(batch["x"] @ w)
    return ((hidden - hidden.mean(0)) ** 2).mean()


def masked(w: Any, batch: Any) -> Any:
    return (opaque(batch["x"] @ w).sum(1) * batch["mask"]).sum() / batch["mask"].sum()


# Of the whole batch.


def of_few_rows(w: Any, batch: Any) -> Any:
    losses = (batch["x"] @ w).sum(1) ** 2
    return losses.mean() if len(losses) <= 8 else (losses**2).mean()


def in_chunks(of: Any, dtype: Any = jnp.bfloat16) -> Any:
    """A loss over chunks of sorted rows, which a trace does not tell from rows that meet."""

    def loss(w: Any, batch: Any) -> Any:
        hidden = batch["x"].astype(dtype) @ w.astype(dtype)
        hidden = hidden[jnp.argsort(batch["x"][:, 0])]
        chunks = hidden.reshape(2, -1, *hidden.shape[1:])
        return 100 * jax.lax.map(of, chunks).mean().astype(jnp.float32)

    return loss


def meet(x: Any) -> Any:
    """Each row meets another one."""
    return x * x[::-1]


def of_few_gradients(size: float) -> Any:
    """A mean, whose gradient is another one of many rows than of few."""
    odd = jax.custom_vjp(lambda x: x)
    odd.defvjp(lambda x: (x, None), lambda _, g: (g if len(g) <= 24 else g * (1 + size),))
    return lambda w, batch: ((odd(batch["x"]) @ w) ** 2 + odd(batch["x"] @ w) ** 2).mean()


def centred_gradients(w: Any, batch: Any) -> Any:
    centred = jax.custom_vjp(lambda x: x)
    centred.defvjp(lambda x: (x, None), lambda _, g: (g - undecided(g).mean(0),))
    return opaque(centred(batch["x"] @ w) ** 2).mean()


def of_so_many_rows(w: Any, batch: Any) -> Any:
    return (opaque(batch["x"] @ w) * jnp.ones((len(BATCH["x"]) // SHARDS, 2))).mean()


def policy_gradient(w: Any, batch: Any) -> Any:
    """A mean of gains over their mean; they are all 0 in ``NO_GAINS``."""
    scores = opaque(batch["x"] @ w)
    gains = (batch["gain"] - batch["gain"].mean()) / (batch["gain"].std() + 1e-6)
    return (scores[:, 0] * gains + 0.1 * scores[:, 1] ** 2).mean()


def balanced(w: Any, batch: Any) -> Any:
    """A mean and a small addend that is none, in a loss of which bfloat16 rounds off more."""
    scores = opaque(batch["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    gates = jax.nn.softmax(scores.astype(jnp.float32))
    return (scores**2).mean().astype(jnp.float32) + 0.01 * (gates.mean(0) ** 2).sum()


def in_bfloat16(addend: Any) -> Any:
    """A mean and a hundredth of an addend of what nothing is known of, in bfloat16."""

    def loss(w: Any, batch: Any) -> Any:
        scores = opaque(batch["x"].astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
        gates = jax.nn.softmax(scores.astype(jnp.float32))[:, 0]
        return (scores**2).mean().astype(jnp.float32) + 0.01 * addend(gates, batch["mask"])

    return loss


def in_order(w: Any, batch: Any) -> Any:
    """The losses of the rows, sorted, which a trace takes for nothing but numbers."""
    return jnp.sort((batch["x"] @ w).sum(1) ** 2)


def counted_once(w: Any, batch: Any) -> Any:
    """A mean over rows of which those with one id count as one."""
    ids = batch["x"][:, 0]
    _, place, often = jnp.unique(ids, return_inverse=True, return_counts=True, size=len(ids))
    return (((batch["x"] @ w) ** 2).sum(1) / often[place]).mean()


def within_a_budget(w: Any, batch: Any) -> Any:
    """A mean over the rows with a flag, of which half of the batch is taken at most."""
    first = jnp.argsort(-batch["flag"], stable=True)[: len(batch["flag"]) // 2]
    losses, counts = ((batch["x"] @ w) ** 2).sum(1)[first], batch["flag"][first]
    return crossshard.Mean((losses * counts).sum(), counts.sum())


def trimmed_far(w: Any, batch: Any) -> Any:
    """A mean of rows without those that are far, but for a quarter of the rows at most."""
    far = (jnp.abs(batch["x"]) > 3.5).any(1)
    first = jnp.argsort(~far, stable=True)[: len(far) // 4]
    dropped = jnp.zeros(len(far), bool).at[first].set(True) & far
    return (((batch["x"] @ w) ** 2).sum(1) * ~dropped).mean()


def in_epoch(w: Any, batch: Any, share: Any) -> Any:
    """A mean of sorted rows; later of the largest, as many as a shard has."""
    losses = in_order(w, batch)
    return (1 - share) * losses.mean() + share * losses[-4:].mean()


def in_epochs(w: Any, batch: Any) -> list[Any]:
    return [in_epoch(w, batch, share) for share in (1.0, 0.0)]


def summed_in_a_loop(w: Any, batch: Any, divided: Any = jnp.divide) -> Any:
    """A mean over what is there, of sums along an axis, as of tokens in chunks of time."""

    def add(sums: Any, column: Any) -> Any:
        return (sums[0] + (column**2 * batch["mask"]).sum(), sums[1] + batch["mask"].sum()), None

    sums, _ = jax.lax.scan(add, (jnp.float32(0), jnp.float32(0)), (batch["x"] @ w).T)
    return divided(*sums)


def with_axis(loss: Any) -> Any:
    """XLA cannot split all rows of it: each shard takes them."""
    return lambda w, batch: loss(w, batch) + 0 * jax.lax.axis_index("shards")


def of_hard_classes(hardest: Callable[[Any, int], Any]) -> Any:
    """A mean of half of the rows; of these each shard has as many in ``EVEN``."""

    def loss(w: Any, batch: Any) -> Any:
        losses = ((batch["class"] @ w) ** 2).sum(1)
        return hardest(losses, len(losses) // 2).mean()

    return loss


def by_experts(x: Any, chosen: Any, experts: Any) -> Any:
    """Rows are sorted by what they have chosen, multiplied group by group, and put back."""
    order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=len(experts))
    found = jax.lax.ragged_dot(x[order], experts, sizes)
    return jnp.zeros_like(found).at[order].set(found)


def by_masks(x: Any, chosen: Any, experts: Any) -> Any:
    """Do the same without sorting."""
    return jnp.einsum("rd,re,edf->rf", x, jax.nn.one_hot(chosen, len(experts)), experts)


def two_layers(layer: Any) -> Any:
    """The second one's choice depends on the first one's experts."""

    def loss(w: Any, batch: Any) -> Any:
        hidden = layer(batch["x"], batch["class"], jnp.stack([w, -2 * w, 3 * w]))
        found = layer(hidden, (hidden[:, 0] > 0).astype(int), jnp.stack([w[:2], w[1:]]))
        return ((found - batch["mask"][:, None]) ** 2).mean()

    return loss


def with_capacity(capacity: float) -> Any:
    """Rows are sorted by what they have chosen, and those beyond an expert's capacity dropped."""

    def loss(w: Any, batch: Any) -> Any:
        chosen, rows = batch["class"], len(batch["x"])
        order = jnp.argsort(chosen)
        starts = jnp.searchsorted(chosen[order], jnp.arange(4))
        places = jnp.arange(rows) - starts[chosen[order]]
        kept = jnp.where(places < capacity * rows, ((batch["x"] @ w) ** 2).sum(1)[order], 0)
        return jnp.zeros(rows).at[order].set(kept).mean()

    return loss


def undecided_below(x: Any) -> Any:
    """Divide all rows by the largest entry, in a callback, if that is more than 1."""
    of = lambda x: np.float32(x / max(1, np.abs(x).max()))
    return jax.pure_callback(
        of, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


def undecided_unlike(x: Any) -> Any:
    """Return rows from a callback, and NaN if all of them are alike."""
    of = lambda x: np.float32(x / np.ptp(x, 0).astype(bool))
    return jax.pure_callback(
        of, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


def in_groups(x: Any) -> Any:
    """Centre groups of two rows, in a callback."""
    of = lambda x: np.float32(x - np.repeat(np.reshape(x, (-1, 2)).mean(1), 2))
    return jax.pure_callback(of, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@jax.custom_vjp
def with_bounded_gradients(x: Any) -> Any:
    return x


with_bounded_gradients.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -2, 2),))


@jax.custom_vjp
def with_half_gradients(x: Any) -> Any:
    return x


# The rule calls the function whose rule it is, as in JAX's documentation.
with_half_gradients.defvjp(lambda x: (with_half_gradients(x), None), lambda _, g: (g / 2,))


def with_gradients_by_size(x: Any, w: Any) -> Any:
    """A product whose backward pass rounds each row's gradient by its size."""
    product = jax.custom_vjp(jnp.matmul)

    def backward(kept: Any, g: Any) -> Any:
        size = jnp.abs(g).max(1, keepdims=True)
        size = jnp.where(size == 0, 1, size)
        g = (g / size).astype(jnp.float8_e4m3fn).astype(g.dtype) * size
        return g @ kept[1].T, kept[0].T @ g

    product.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return product(x, w)


def in_8_bits(x: Any) -> Any:
    return x.astype(jnp.float8_e5m2).astype(x.dtype)


def with_gradients(of: Callable[[Any], Any], x: Any) -> Any:
    """The same, of whose gradient something is made."""
    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), lambda _, g: (of(g),))
    return same(x)


def two_views(w: Any, batch: Any) -> Any:
    """The first half of the rows are other views of the second half."""
    one, other = (batch["x"] @ w).reshape(2, -1, w.shape[1])
    return ((one - other) ** 2).mean() + ((batch["x"] @ w - 1) ** 2).mean()


def trimmed(losses: Any) -> Any:
    """A mean without the largest."""
    return jnp.sort(losses)[:-1].mean()


def of_rows(w: Any, batch: Any) -> Any:
    return (batch["x"] @ w).sum(1) ** 2


def trimmed_where(chosen: Callable[[Any], Any]) -> Any:
    """A mean, and one without the largest of those rows that are chosen; none are at first."""
    return lambda w, b: of_rows(w, b).mean() + trimmed(of_rows(w, b) * chosen(b))


def weighted(weights: Any, w: Any, batch: Any) -> Any:
    """Two terms, the second of which compares rows."""
    return weights @ jnp.stack([of_rows(w, batch).mean(), trimmed(of_rows(w, batch))])


def of_labels(w: Any, batch: Any) -> Any:
    """A mean of sorted rows, whose labels are beyond the classes if others than the batch's."""
    logits, labels, table = batch["x"] @ w, batch["label"], jnp.tanh(w)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    found += (jax.nn.one_hot(labels, 2) * logits).sum(1) + table[labels].sum(1)
    found += jnp.take(table, labels, 0, mode="clip").sum(1) * jnp.where(labels == 5, 2, 1)
    return jnp.sort(found).mean()


def of_positive(w: Any, batch: Any) -> Any:
    """A mean of sorted rows, where numbers of the other sign are NaN."""
    by = jnp.log(batch["time"]) * jnp.sqrt(batch["by"]).sum() * jnp.sqrt(jnp.abs(w[0, 0]) + w[0, 0])
    return (jnp.sort(of_rows(w, batch) * by)).mean()


ALIKE = BATCH | {"x": np.tile(BATCH["x"][:1], (16, 1)), "class": np.ones(16, np.int32)}
EVEN = {"class": np.float32(2 * np.eye(3)[[0, 1, 0, 2] * SHARDS])}
EXPERTS = MANY | {"class": np.arange(48) % 4}
CLASSES = BATCH | {"class": np.int32(np.arange(16) ** 2 % 3)}
FULL = BATCH | {"mask": np.ones(16, np.float32)}
NO_GAINS = BATCH | {"gain": np.zeros(16, np.float32)}
LATER = BATCH | {"at": np.int32(3)}
TIMES = BATCH | {"time": np.float32(np.linspace(1.5, 9, 16))}
GAINS = TIMES | {"gain": np.float32(np.linspace(0.1, 3, 16))}
LABELS = BATCH | {"label": np.int32(np.arange(16) % 2)}
AT: dict[str, Any] = {"replicated_entries": ["at"]}
WEIGHTED = {"weight": lambda batch: batch["mask"].sum()}
NAN = BATCH | {"x": np.full_like(BATCH["x"], np.nan)}
WHOLE = "of rows of the whole batch the loss is"
COMPARES = "The loss compares rows of the batch"
NOT_SO = "And by numbers it is not so"
