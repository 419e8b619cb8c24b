"""What a trace does not decide is checked by numbers at the first call, with noise switched off."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import crossshard
from crossshard.errors import LossError
from tests.quick import deep, deep_but

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


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulate_steps": 2},
    {"params": "sharded"},
    {"optimizer": GROUPS},
)


@pytest.mark.parametrize("options", deep_but(WAYS[2:3], WAYS), ids=str)
def test_a_mean_runs_and_what_compares_rows_is_refused(options: dict[str, Any]):
    said = r"The loss compares rows of the batch.*test_by_numbers.py"
    refused(compared, said, **options)
    step = made(a_mean, **options)
    state, _ = step(step.init(W), BATCH)
    assert "if each row is computed alone by pure_callback" in step.describe()
    assert "; by numbers it is" in step.describe()
    if "optimizer" not in options:
        want = W - 0.1 * jax.jit(jax.grad(plain))(W, BATCH)
        np.testing.assert_allclose(step.model(state), want, rtol=0, atol=1e-6)


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


def two_views(w: Any, batch: Any) -> Any:
    """The first half of the rows are other views of the second half."""
    one, other = (batch["x"] @ w).reshape(2, -1, w.shape[1])
    return ((one - other) ** 2).mean() + ((batch["x"] @ w - 1) ** 2).mean()


ALIKE = BATCH | {"x": np.tile(BATCH["x"][:1], (16, 1)), "class": np.ones(16, np.int32)}
EVEN = {"class": np.float32(2 * np.eye(3)[[0, 1, 0, 2] * SHARDS])}
EXPERTS = MANY | {"class": np.arange(48) % 4}
CLASSES = BATCH | {"class": np.int32(np.arange(16) ** 2 % 3)}
FULL = BATCH | {"mask": np.ones(16, np.float32)}
NO_GAINS = BATCH | {"gain": np.zeros(16, np.float32)}
LATER = BATCH | {"at": np.int32(3)}
AT: dict[str, Any] = {"replicated_entries": ["at"]}
WEIGHTED = {"weight": lambda batch: batch["mask"].sum()}
NAN = BATCH | {"x": np.full_like(BATCH["x"], np.nan)}
WHOLE = "of rows of the whole batch the loss is"
COMPARES = "The loss compares rows of the batch"
NOT_SO = "And by numbers it is not so"
# A loss, what is said, the batch and the options.
REFUSED: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "with one row on each shard": (compared, COMPARES, FEW, {}),
    "a branch on the rows": (of_few_rows, WHOLE, BATCH, {"params": "sharded"}),
    "gains that are all 0": (policy_gradient, COMPARES, NO_GAINS, {}),
    "a small addend in bfloat16": (balanced, COMPARES, BATCH, {}),
    "a small addend of sorted rows in bfloat16": (
        in_bfloat16(lambda gates, mask: (jnp.sort(gates) * mask).mean()),
        WHOLE,
        BATCH,
        {},
    ),
    "a small addend of the largest rows in bfloat16": (
        in_bfloat16(lambda gates, mask: 0.001 * jax.lax.top_k(gates, 2)[0].mean()),
        "and then rows are compared",
        BATCH,
        {},
    ),
    # Both are means in a batch without padding, and with gains that are 0.
    "a mask of ones": (
        lambda w, b: (in_order(w, b) * jnp.sort(b["mask"])).mean(),
        r"another order and other numbers in batch\['mask'\], .*of rows of the whole batch",
        FULL,
        {"params": "sharded"},
    ),
    "a mask that is true": (
        lambda w, b: jnp.where(jnp.sort(b["mask"]), in_order(w, b), 0).mean(),
        r"another order and other numbers in batch\['mask'\]",
        BATCH | {"mask": np.ones(16, bool)},
        {"accumulate_steps": 2},
    ),
    "gains that are all 0, of sorted rows": (
        lambda w, b: (in_order(w, b) * jnp.sort(b["gain"]) + 0.1 * in_order(w, b)).mean(),
        r"another order and other numbers in batch\['gain'\]",
        NO_GAINS,
        {},
    ),
    "a column of epochs": (
        lambda w, b: in_epoch(w, b, jnp.clip((b["epoch"].max() - 2) / 4, 0, 1)),
        r"other numbers in batch\['epoch'\]",
        BATCH | {"epoch": np.ones(16, np.float32)},
        {},
    ),
    "a column of counts": (
        lambda w, b: in_epoch(w, b, jnp.where(b["epoch"].max() > 40.5, 1.0, 0.0)),
        r"other numbers in batch\['epoch'\]",
        BATCH | {"epoch": np.full(16, 7, np.int32)},
        {},
    ),
    "a term in one step": (
        lambda w, b: in_epoch(w, b, jnp.where(b["at"] == 70_000, 1.0, 0.0)),
        "with another value where no row decides",
        LATER,
        AT,
    ),
    "a factor in later steps": (
        lambda w, b: in_epoch(w, b, (b["at"] > 70_000).astype(np.float32)),
        "with another value where no row decides",
        LATER,
        AT,
    ),
    "a term that fades in": (
        lambda w, b: in_epoch(w, b, jax.nn.sigmoid((b["at"] - 10**6) / 100)),
        "with another value where no row decides",
        LATER,
        AT,
    ),
    "a term between two steps": (
        lambda w, b: in_epoch(w, b, 1.0 * (b["at"] < 10**7) * jnp.where(b["at"] > 10**6, 1, 0)),
        "with another value where no row decides",
        LATER,
        AT,
    ),
    "fewer rows in later steps": (
        lambda w, b: (
            in_order(w, b)
            * (
                jnp.arange(len(b["x"]))
                < len(b["x"]) - jnp.minimum(b["at"] // 5000, len(b["x"]) // 4)
            )
        ).mean(),
        "with another value where no row decides",
        LATER,
        AT,
    ),
    "a term of layers in later steps": (
        lambda w, b: jax.lax.scan(
            lambda sum, x: (sum + jnp.where(b["at"] > 10**6, *in_epochs(w * x, b)), None),
            0.0,
            jnp.ones(2),
        )[0],
        "with another value where no row decides",
        LATER,
        AT | {"params": "sharded"},
    ),
    "a bound of a parameter": (
        lambda w, b: in_epoch(w, b, jnp.maximum(w[0, 0] - 1e3, 0)),
        "with another value where no row decides",
        BATCH,
        {},
    ),
    "a branch in later steps": (
        lambda w, b: jax.lax.cond(
            b["at"] > 10**6, lambda: in_epochs(w, b)[0], lambda: in_epochs(w, b)[1]
        ),
        r"with another value where no row decides \(tests/step/test_by_numbers",
        LATER,
        AT | {"accumulate_steps": 2},
    ),
    "a gradient of 0": (
        lambda w, b: (in_order(w, b) * (jnp.sort(b["gain"]) == 5)).mean(),
        "the gradient of this batch is 0",
        BATCH | {"gain": np.zeros(16, np.float32)},
        {},
    ),
    "the harder half of sorted rows": (
        of_hard_classes(lambda losses, half: jnp.sort(losses)[half:]),
        r"with the rows in another order and other numbers in batch\['class'\], of rows",
        EVEN,
        {},
    ),
    "the harder half": (
        of_hard_classes(lambda losses, half: jax.lax.top_k(losses, half)[0]),
        "top_k over the rows",
        EVEN,
        {},
    ),
    "a capacity that no expert reaches": (with_capacity(0.75), "with copies of one", EXPERTS, {}),
    "the most frequent class": (
        lambda w, b: (
            ((b["x"] @ w) ** 2).sum(1)
            * (b["class"] != jnp.argmax(jnp.bincount(b["class"], length=3)))
        ).mean(),
        "with copies of one row in each part",
        MANY | {"class": np.tile(np.int32([0, 0, 0, 2]), 12)},
        {},
    ),
    "a flag that is set on every shard": (
        lambda w, b: jnp.where(jnp.any(b["done"]), plain(w, b), 2 * plain(w, b)),
        "In the loss something of all rows decides",
        BATCH | {"done": np.ones(16, bool)},
        {},
    ),
    # The callback does not compute each row alone, either.
    "a callback that is of all rows where one is large": (
        lambda w, b: (undecided_below(b["x"]) @ w).sum(1).mean(),
        "by pure_callback.*the results of pure_callback",
        BATCH | {"x": BATCH["x"] / 100},
        {},
    ),
    "a small addend in bfloat16 beside groups": (
        lambda w, b: balanced(w, b) + (in_groups(b["gain"]) * (b["x"] @ w)[:, 0]).mean(),
        COMPARES,
        BATCH | {"gain": np.float32(np.arange(16) % 5)},
        {},
    ),
    "rows that are alike": (two_views, r"other numbers in batch.*'x'", ALIKE, {}),
    "sums in a loop": (summed_in_a_loop, r"return crossshard\.Mean\(total, count\)", BATCH, {}),
    "a threshold at a mean": (
        lambda w, b: jnp.where(in_order(w, b).mean() > 1e3, 0, plain(w, b)),
        "compares rows of the batch: gt of a sum over rows",
        BATCH,
        {},
    ),
    "a bound that is added": (
        lambda w, b: plain(w, b) + jnp.maximum(1.0, in_order(w, b).mean()),
        "add of a bound of a sum over rows",
        BATCH,
        {},
    ),
    "a spread that is 1": (
        lambda w, b: masked_plain(w, b) / jnp.maximum(1, jnp.ptp(jnp.sort(b["gain"]))),
        r"other numbers in batch\['gain'\]",
        BATCH | {"gain": np.float32(np.arange(16) % 2)},
        WEIGHTED,
    ),
    "numbers that are not finite": (in_chunks(meet), "not finite cannot show it", NAN, {}),
    "ids of which the first batch has each once": (
        counted_once,
        "with the same rows in each part",
        BATCH,
        {},
    ),
    "a budget that no shard fills": (
        within_a_budget,
        "with the rows in another order",
        BATCH | {"flag": np.float32(np.arange(16) % 4 == 0)},
        {},
    ),
    "a class that the first batch lacks": (
        lambda w, b: jnp.where(b["class"] == 7, in_order(w, b), (b["x"] @ w).sum(1) ** 2).mean(),
        r"other numbers in batch\['class'\]",
        EXPERTS,
        {},
    ),
    # Outliers of what is a probability are none.
    "a logarithm that outliers make NaN": (
        lambda w, b: trimmed_far(w, b) - (jnp.log1p(-b["p"]) * (b["x"] @ w).sum(1)).mean(),
        r"in another order and other numbers in .*batch\['p'\].*of rows of the whole batch",
        BATCH | {"x": np.clip(BATCH["x"], -3, 3), "p": np.float32(np.linspace(0.05, 0.95, 16))},
        {},
    ),
    "copies that are not finite": (
        lambda w, b: jnp.sort(undecided_unlike(b["x"]) @ w, 0).mean(),
        "numbers that are not finite cannot show it with copies of one row",
        BATCH,
        {},
    ),
    "gradients": (centred_gradients, COMPARES, BATCH, {}),
    "one number of rows": (
        of_so_many_rows,
        r"cannot be computed of all rows at once.*loss_over",
        BATCH,
        {},
    ),
    "chunks in bfloat16": (in_chunks(meet), f"{NOT_SO}: {WHOLE}", MANY, {}),
    # The noise of a rounding does not excuse that rows in another order give other numbers.
    "the order": (in_chunks(lambda x: meet(x + 3)), NOT_SO, MANY, {"num_shards": 2}),
    "an axis": (with_axis(in_chunks(meet)), WHOLE, MANY, {"params": "sharded"}),
    "gradients of the whole batch": (
        of_few_gradients(0.01),
        r"whole batch the loss is .*; the gradients are",
        MANY,
        {},
    ),
}


# Left to `make test-deep`.
SLOW = {"numbers that are not finite", "a branch in later steps", "rows that are alike"}
SLOW |= {"a term of layers in later steps", "an axis", "chunks in bfloat16", "the order"}


@pytest.mark.parametrize("name", deep_but(lambda name: name not in SLOW, REFUSED))
def test_by_numbers_it_is_not_so(name: str):
    loss, said, batch, options = REFUSED[name]
    refused(loss, said, batch, **options)


# Bounds that training reaches, far from the first parameters. Other numbers of ids change nothing.


IDS = {"ids": np.int32(np.arange(16) // 4 % 3)}


def embedded(w: Any, batch: Any) -> Any:
    """Rows that are parameters."""
    return w[batch["ids"]]


def squares(w: Any, batch: Any) -> Any:
    return (embedded(w, batch) ** 2).sum(1)


@jax.custom_vjp
def with_bounded_gradients(x: Any) -> Any:
    return x


with_bounded_gradients.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -2, 2),))


def apart(one: Any, other: Any) -> Any:
    """How far rows are apart, above a tolerance."""
    return jnp.where(jnp.abs(one - other) > 9, jnp.abs(one - other) - 9, 0)


# A loss, and what is said.
HIDDEN: dict[str, tuple[Any, str]] = {
    "relu of a mean": (
        lambda w, b: squares(w, b).mean() + jax.nn.relu(squares(w, b).mean() - 99),
        "add of a bound of a sum over rows",
    ),
    "relu of means, weighed": (
        lambda w, b: (
            squares(w, b).mean() + 2 * jax.nn.relu((embedded(w, b) ** 2).mean(0) - 50).sum()
        ),
        "reduce_sum of a bound of a sum over rows",
    ),
    "a share that is bounded": (
        lambda w, b: squares(w, b).mean() + jnp.minimum(squares(w, b) / len(b["ids"]), 20).sum(),
        "min of what changes with the number of rows, and of a fixed number.*Divide that number",
    ),
    "a share that is compared, row by row": (
        lambda w, b: jax.lax.map(
            lambda x: jnp.where(x / len(b["ids"]) > 20, 0, x), squares(w, b)
        ).mean(),
        "gt of what changes with the number of rows, and of a fixed number",
    ),
    "a bounded gradient": (
        lambda w, b: (with_bounded_gradients(embedded(w, b)) ** 2).mean(),
        "in a gradient of its own, max of what changes with the number of rows",
    ),
    "neighbours, with a tolerance": (
        lambda w, b: (
            squares(w, b).mean()
            + apart(embedded(w, b)[1:], embedded(w, b)[:-1]).sum() / len(b["ids"])
        ),
        "by numbers it is not so: with larger parameters.*of rows of the whole batch the loss is",
    ),
    "pairs of two halves, with a margin": (
        lambda w, b: squares(w, b).mean() + apart(*jnp.split(embedded(w, b), 2)).mean(),
        "by numbers it is not so: with larger parameters",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_bound_that_training_reaches_is_no_mean(name: str):
    loss, said = HIDDEN[name]

    def both(w: Any) -> tuple[Any, Any]:
        of = jax.value_and_grad(loss)
        parts = [of(w, {"ids": IDS["ids"][at : at + 4]}) for at in range(0, 16, 4)]
        return of(w, IDS), jax.tree.map(lambda *x: sum(x) / 4, *parts)

    near, far = jax.jit(both)(W), jax.jit(both)(16 * W)
    np.testing.assert_allclose(near[0][1], near[1][1], rtol=1e-5, atol=1e-6)
    assert np.abs(far[0][1] - far[1][1]).max() > 0.1
    refused(loss, said, IDS)


@pytest.mark.parametrize("params", [deep("replicated"), "sharded"])
def test_a_layer_that_starts_at_0_hides_nothing(params: str):
    step = made(two_views, params=params)
    state = step.init(np.zeros((3, 2), np.float32))
    with pytest.raises(
        LossError, match=r"another order and other numbers in batch.*'x'\], params, "
    ):
        step(state, BATCH)


def test_a_capacity_that_all_rows_fit_into_runs():
    found = moved(made(with_capacity(1)), EXPERTS)
    np.testing.assert_allclose(found, 2 * jax.grad(plain)(W, MANY), rtol=0, atol=1e-5)


def test_a_loop_that_rows_end_is_given_no_larger_ones():
    """It may end at a tolerance that larger floats do not reach."""
    seen = []

    def turned(x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)

    def loss(w: Any, batch: Any) -> Any:
        jax.debug.callback(lambda x: seen.append(float(x)), jnp.abs(batch["x"]).max())
        by = jax.vmap(turned)(batch["x"][:, 0] ** 2)
        return ((batch["x"] @ w).sum(1) ** 2 * by).mean()

    found = moved(made(loss), BATCH)
    jax.effects_barrier()
    assert max(seen) <= np.abs(BATCH["x"]).max()
    assert len(set(seen)) > SHARDS
    by = BATCH["x"][:, 0] ** 2
    by = by / 2 ** np.ceil(np.log2(np.maximum(by, 1)))
    want = jax.grad(lambda w: ((BATCH["x"] @ w).sum(1) ** 2 * by).mean())(W)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


ZERO_SHARDS = BATCH | {"mask": np.float32(np.arange(16) >= 8)}


# A loss, one of the same numbers, the batch and the options.
TAKEN: dict[str, tuple[Any, Callable[..., Any] | None, Any, dict[str, Any]]] = {
    "a mask of ones": (
        lambda w, b: jnp.sort((b["x"] @ w).sum(1) ** 2 * b["mask"]).mean(),
        lambda w, b: ((b["x"] @ w).sum(1) ** 2).mean(),
        FULL,
        {},
    ),
    "two layers of experts": (two_layers(by_experts), two_layers(by_masks), CLASSES, {}),
    "sums in a loop": (
        lambda w, b: summed_in_a_loop(w, b, crossshard.Mean),
        summed_in_a_loop,
        ZERO_SHARDS,
        {},
    ),
    "a Mean where any row counts": (
        lambda w, b: jax.lax.cond(
            b["mask"].any(),
            lambda: crossshard.Mean(((b["x"] @ w) ** 2).sum(1) @ b["mask"], b["mask"].sum()),
            lambda: crossshard.Mean(0.0, 0.0),
        ),
        masked_plain,
        ZERO_SHARDS,
        {},
    ),
    "a shard without weight": (masked, lambda w, b: masked(w, b), ZERO_SHARDS, WEIGHTED),
    "gradients of the whole batch": (of_few_gradients(0), None, MANY, {}),
    # It changes nothing, and only divides.
    "relu of a count": (
        lambda w, b: plain_sum(w, b) / (jax.nn.relu(b["mask"].sum()) + 1e-8),
        masked_plain,
        BATCH,
        WEIGHTED,
    ),
    "relu of the count of a Mean": (
        lambda w, b: crossshard.Mean(plain_sum(w, b), jax.nn.relu(b["mask"].sum())),
        masked_plain,
        ZERO_SHARDS,
        {},
    ),
    "tiny shares": (
        lambda w, b: jnp.maximum(((b["x"] @ w) ** 2).sum(1) / len(b["x"]), 1e-12).sum(),
        lambda w, b: ((b["x"] @ w) ** 2).sum(1).mean(),
        BATCH,
        {},
    ),
    # A step of a sum gives a row the same gradient, however many there are.
    "bounded gradients of a sum": (
        lambda w, b: (with_bounded_gradients(b["x"] @ w) ** 2).sum(),
        lambda w, b: (with_bounded_gradients(b["x"] @ w) ** 2).sum(),
        BATCH,
        {"optimizer": crossshard.CrossShardOptimizer(optax.sgd(0.1), reduction="sum")},
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_by_numbers_it_is_so(name: str):
    loss, same, batch, options = TAKEN[name]
    found = moved(made(loss, **options), batch)
    if same is not None:
        want = jax.jit(jax.grad(same))(W, batch)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_a_leaf_with_a_small_gradient_is_compared():
    """Beside another one, so large that nothing else counts in the gradient of all."""
    loss = lambda p, b: (
        ((b["x"] @ p["large"] + 1e4) ** 2).mean() + in_order(p["small"], b)[-4:].mean()
    )
    step = made(loss)
    state = step.init({"large": W[:, 0], "small": W / 10})
    with pytest.raises(LossError, match=r"the gradients of params\['small'\] are"):
        step(state, BATCH)


# Noise, of which all rows have the same, and another in each comparison.


def in_pairs(losses: Any) -> Any:
    return jax.nn.softplus(losses[::2] - losses[1::2]).mean()


def with_dropout(w: Any, batch: Any, rng: Any) -> Any:
    hidden = batch["x"] @ w
    for layer in range(2):
        keep = jax.random.bernoulli(jax.random.fold_in(rng, layer), 0.3, hidden.shape)
        hidden = jnp.where(keep, hidden / 0.3, 0)
    return in_pairs((hidden**2).sum(1))


def diffused(w: Any, batch: Any, rng: Any) -> Any:
    of_time, of_noise = jax.random.split(rng)
    time = jax.random.uniform(of_time, (len(batch["x"]), 1))
    noise = jax.random.normal(of_noise, batch["x"].shape)
    return jnp.sort(((time * batch["x"] + (1 - time) * noise) @ w).sum(1) ** 2).mean()


def at_random(often: float) -> Any:
    return lambda w, b, rng: in_epoch(w, b, jnp.where(jax.random.bernoulli(rng, often), 1.0, 0.0))


def along_random_slices(w: Any, batch: Any, rng: Any) -> Any:
    along = jax.random.normal(rng, (2, 5))
    hidden, goals = batch["x"] @ w @ along, batch["x"][:, :2] @ along
    return ((jnp.sort(hidden, 0) - jnp.sort(goals, 0)) ** 2).mean()


def with_the_key_of(place: Any) -> Any:
    def loss(w: Any, batch: Any, rng: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, 3))(place(rng))
        return jnp.sort(((batch["x"] + noise) @ w).sum(1) ** 2).mean()

    return loss


# A loss, the options, and whether it is a mean over rows.
NOISY: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "dropout": (with_dropout, {}, True),
    "noise and times": (diffused, {"accumulate_steps": 2}, True),
    "keys of rows": (with_the_key_of(lambda keys: keys), {"rng_per": "row"}, True),
    "now and then": (at_random(0.01), {}, False),
    "random slices": (along_random_slices, {}, False),
    "the key of another row": (
        with_the_key_of(lambda keys: jnp.roll(keys, 1)),
        {"rng_per": "row"},
        False,
    ),
    "the first key": (
        with_the_key_of(lambda keys: jnp.broadcast_to(keys[0], keys.shape)),
        {"rng_per": "row", "params": "sharded"},
        False,
    ),
}


@pytest.mark.parametrize(
    "name", deep_but(lambda x: x not in ("noise and times", "random slices", "keys of rows"), NOISY)
)
def test_noise_hides_nothing(name: str):
    loss, options, is_mean = NOISY[name]
    step = made(loss, **options)
    state = step.init(W, rng=0)
    if is_mean:
        step(state, BATCH)
        assert "by numbers it is a mean over the rows" in step.describe()
    else:
        with pytest.raises(LossError, match=NOT_SO):
            step(state, BATCH)


def test_of_the_whole_batch_with_model_state():
    loss = lambda w, kept, batch: (of_few_rows(w, batch) * kept["by"], kept)
    step = made(loss, model_state="mean")
    with pytest.raises(LossError, match=WHOLE):
        step(step.init(W, model_state={"by": jnp.float32(2)}), BATCH)


def test_each_kind_of_rows_is_checked_once():
    seen = []

    def loss(w: Any, batch: Any) -> Any:
        seen.append(1)
        return a_mean(w, batch)

    step = made(loss)
    state, _ = step(step.init(W), BATCH)
    before = len(seen)
    state, _ = step(state, BATCH)
    assert len(seen) == before
    step(state, batch_of(8))
    assert len(seen) > before


def test_a_step_that_has_no_numbers_yet_says_what_to_do():
    step = made(a_mean)
    types = step.abstract_init(W)
    for call in (lambda: step.lower(types, BATCH), lambda: jax.jit(step)(step.init(W), BATCH)):
        with pytest.raises(LossError, match="The first call of the step checks it by numbers"):
            call()
    step(step.init(W), BATCH)
    step.lower(types, BATCH)


@pytest.mark.deep
def test_on_the_mesh_that_is_set():
    with jax.set_mesh(
        jax.make_mesh((SHARDS,), ("data",), (AxisType.Explicit,), devices=jax.devices()[:SHARDS])
    ):
        found = moved(made(a_mean), BATCH)
        np.testing.assert_allclose(found, jax.jit(jax.grad(plain))(W, BATCH), rtol=1e-5, atol=1e-5)
        refused(lambda w, b: in_order(w, b)[0], NOT_SO)


def test_jax_does_not_stop_at_what_the_comparison_makes_nan():
    # A quotient that no step reaches, with the other choice.
    safe = lambda w, b: (
        in_order(w, b).mean() * jnp.where(b["at"] > 0, 1 / jnp.maximum(b["at"], 0), 1)
    )
    step = made(safe, replicated_entries=["at"])
    with jax.debug_nans(True), jax.debug_infs(True):
        state, _ = step(step.init(W), BATCH | {"at": np.float32(0)})
    expected = W - 0.1 * jax.grad(lambda w: in_order(w, BATCH).mean())(W)
    np.testing.assert_allclose(step.model(state), expected, atol=1e-6)
