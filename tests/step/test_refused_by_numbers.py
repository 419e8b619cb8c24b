"""What numbers show to be no mean over rows is refused at the first call, with its state valid."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import crossshard
from crossshard.errors import LossError
from tests.quick import deep, deep_but
from tests.step.by_numbers import (
    ALIKE,
    AT,
    BATCH,
    COMPARES,
    EVEN,
    EXPERTS,
    FEW,
    FULL,
    GAINS,
    LABELS,
    LATER,
    MANY,
    NAN,
    NO_GAINS,
    NOT_SO,
    WEIGHTED,
    WHOLE,
    W,
    balanced,
    centred_gradients,
    compared,
    counted_once,
    in_8_bits,
    in_bfloat16,
    in_chunks,
    in_epoch,
    in_epochs,
    in_groups,
    in_order,
    made,
    masked_plain,
    meet,
    of_few_gradients,
    of_few_rows,
    of_hard_classes,
    of_so_many_rows,
    plain,
    policy_gradient,
    refused,
    summed_in_a_loop,
    trimmed_far,
    trimmed_where,
    two_views,
    undecided_below,
    undecided_unlike,
    weighted,
    with_axis,
    with_bounded_gradients,
    with_capacity,
    with_gradients,
    with_half_gradients,
    within_a_budget,
)

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
    "a term in one step, and a rule that calls its function": (
        lambda w, b: in_epoch(with_half_gradients(w), b, jnp.where(b["at"] == 70_000, 1.0, 0.0)),
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
        r"with another value where no row decides \(tests/step/test_refused_by_numbers",
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
    "weights of two terms": (
        lambda w, b: weighted(b["at"], w, b),
        r"other numbers in .*batch\['at'\]",
        BATCH | {"at": np.float32([1, 0])},
        AT,
    ),
    # The logarithm is NaN where the times are negative, too.
    "gains that are positive": (
        lambda w, b: trimmed_where(lambda b: b["gain"] < 0)(w, b) + jnp.log(b["time"]).mean(),
        r"other numbers in batch\['gain'\]",
        GAINS,
        # Of four copied rows all times may be positive by chance.
        {"num_shards": 8},
    ),
    "counts that are positive": (
        trimmed_where(lambda b: b["count"] < 0),
        r"other numbers in batch\['count'\]",
        BATCH | {"count": np.float32(np.arange(16) % 4)},
        {},
    ),
    "two labels of three": (
        trimmed_where(lambda b: b["label"] == 2),
        r"other numbers in batch\['label'\]",
        LABELS,
        {},
    ),
    # Beyond these classes it is NaN.
    "a class that one_hot finds": (
        lambda w, b: (
            trimmed_where(lambda b: jax.nn.one_hot(b["label"], 3)[:, 2])(w, b)
            + jnp.take(w, b["label"], 0).mean()
        ),
        r"other numbers in batch\['label'\]",
        LABELS,
        {},
    ),
    "gates that are closed": (
        lambda w, b: weighted(jax.nn.relu(jnp.stack([w[0, 0], w[2, 0]])), w, b),
        "with larger parameters or other signs",
        BATCH,
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
SLOW |= {"a capacity that no expert reaches", "a term between two steps", "a term that fades in"}
SLOW |= {"a factor in later steps", "a bound of a parameter", "fewer rows in later steps"}
SLOW |= {"gains that are all 0, of sorted rows", "a gradient of 0", "a mask that is true"}


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


def apart(one: Any, other: Any) -> Any:
    """How far rows are apart, above a tolerance."""
    return jnp.where(jnp.abs(one - other) > 9, jnp.abs(one - other) - 9, 0)


# A loss, and what is said.
HIDDEN: dict[str, tuple[Any, str]] = {
    "relu of a mean": (
        lambda w, b: squares(w, b).mean() + jax.nn.relu(squares(w, b).mean() - 99),
        "add of a bound of a sum over rows",
    ),
    "relu of means, weighted": (
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
    "a gradient in 8 bits": (
        lambda w, b: 5e4 * (with_gradients(in_8_bits, embedded(w, b)) ** 2).mean(),
        "a cast of what changes with the number of rows.*Divide by a scale before the cast",
    ),
    "a gradient that is rounded to 8 bits": (
        lambda w, b: (
            5e4
            * (
                with_gradients(lambda g: jax.lax.reduce_precision(g, 5, 2), embedded(w, b)) ** 2
            ).mean()
        ),
        "a cast of what changes with the number of rows.*Divide by a scale before the cast",
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


@pytest.mark.parametrize(
    ("start", "kept"), [(0, lambda share: 1 - share), deep((1, lambda share: share))]
)
def test_a_share_of_rows_that_is_trained_hides_nothing(start: int, kept: Any):
    """All rows are kept at first; of whole numbers, all or none are."""

    def loss(p: Any, b: Any) -> Any:
        of_rows = ((b["x"] @ p["w"]) ** 2).sum(1)
        rank = jnp.argsort(jnp.argsort(of_rows))
        is_kept = rank < len(of_rows) * kept(jax.lax.stop_gradient(p["share"]))
        return jnp.where(is_kept, of_rows, 0).mean() + (p["share"] - 0.5) ** 2

    step = made(loss)
    with pytest.raises(LossError, match=r"the position of a row.*other numbers in .*params"):
        step(step.init({"w": W, "share": np.float32(start)}), BATCH)


@pytest.mark.parametrize(
    ("params", "microbatches"), [("replicated", 1), deep(("sharded", 2))], ids=["plain", "sharded"]
)
def test_what_compares_rows_once_they_are_easy_is_no_mean(params: str, microbatches: int):
    """Rows that are classified right do not count, but at least the worst eighth does."""
    rng = np.random.default_rng(0)
    label = np.int32(rng.integers(0, 9, 64))
    batch = {"x": np.float32(rng.normal(size=(9, 8))[label]), "label": label}

    def loss(p: Any, b: Any) -> Any:
        logits = jax.nn.standardize(jnp.tanh(b["x"] @ p["body"])) @ p["head"]
        of_rows = optax.softmax_cross_entropy_with_integer_labels(logits, b["label"])
        sure = jax.lax.stop_gradient(jnp.exp(-of_rows))
        kept = (sure < 0.7) | (jnp.argsort(jnp.argsort(sure)) < len(sure) // 8)
        return crossshard.Mean(jnp.where(kept, of_rows, 0).sum(), kept.sum())

    start = {"body": rng.normal(size=(8, 32)) / 3, "head": np.zeros((32, 9))}
    step = made(loss, params=params, accumulate_steps=microbatches)
    with pytest.raises(LossError, match="steps along its gradient have moved, of rows"):
        step(step.init(jax.tree.map(np.float32, start)), batch)


def test_weights_of_terms_that_each_step_moves_are_compared():
    step = made(lambda w, by, b: (weighted(by, w, b), by / 2 + 0.25), model_state="mean")
    with pytest.raises(LossError, match=r"other numbers in batch.*, model_state, of rows"):
        step(step.init(W, model_state=np.float32([1, 0])), BATCH)


def test_a_leaf_with_a_small_gradient_is_compared():
    """Beside another one, so large that nothing else counts in the gradient of all."""
    loss = lambda p, b: (
        ((b["x"] @ p["large"] + 1e4) ** 2).mean() + in_order(p["small"], b)[-4:].mean()
    )
    step = made(loss)
    state = step.init({"large": W[:, 0], "small": W / 10})
    with pytest.raises(LossError, match=r"the gradients of params\['small'\] are"):
        step(state, BATCH)
