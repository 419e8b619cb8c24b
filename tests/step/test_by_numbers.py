"""What a trace does not decide runs where numbers show that it is a mean over rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import crossshard
from crossshard.errors import LossError
from crossshard.jaxprs.walk import equations_of
from crossshard.step.by_numbers import is_ended_by_numbers
from tests.quick import deep_but
from tests.step.by_numbers import (
    BATCH,
    CLASSES,
    EXPERTS,
    FULL,
    GROUPS,
    LABELS,
    MANY,
    NOT_SO,
    SHARDS,
    TIMES,
    WEIGHTED,
    WHOLE,
    W,
    a_mean,
    batch_of,
    by_experts,
    by_masks,
    compared,
    in_epoch,
    in_order,
    made,
    masked,
    masked_plain,
    moved,
    of_few_gradients,
    of_few_rows,
    of_labels,
    of_positive,
    of_rows,
    plain,
    plain_sum,
    refused,
    summed_in_a_loop,
    two_layers,
    with_bounded_gradients,
    with_capacity,
    with_gradients_by_size,
)

WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"accumulate_steps": 2},
    {"params": "sharded"},
    {"optimizer": GROUPS},
)


@pytest.mark.parametrize("options", deep_but(WAYS[2:3], WAYS), ids=str)
def test_a_mean_runs_and_what_compares_rows_is_refused(options: dict[str, Any]):
    said = r"The loss compares rows of the batch.*by_numbers.py"
    refused(compared, said, **options)
    step = made(a_mean, **options)
    state, _ = step(step.init(W), BATCH)
    assert "if each row is computed alone by pure_callback" in step.describe()
    assert "; by numbers it is" in step.describe()
    if "optimizer" not in options:
        want = W - 0.1 * jax.jit(jax.grad(plain))(W, BATCH)
        np.testing.assert_allclose(step.model(state), want, rtol=0, atol=1e-6)


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


of_8_bits = jax.custom_vjp(lambda x, w: x.astype(w.dtype) @ w)
of_8_bits.defvjp(
    lambda x, w: (of_8_bits(x, w), (x, w)),
    lambda kept, g: ((g @ kept[1].T).astype(kept[0].dtype), kept[0].astype(g.dtype).T @ g),
)

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
    "gradients that are rounded by the size of each": (
        lambda w, b: (jnp.tanh(with_gradients_by_size(b["x"], w)) ** 2).mean(),
        lambda w, b: (jnp.tanh(with_gradients_by_size(b["x"], w)) ** 2).mean(),
        BATCH,
        {},
    ),
    # JAX wants the gradient of what has 8 bits in 8 bits, and nothing reads it.
    "rows of 8 bits": (
        lambda w, b: (of_8_bits(b["x"].astype(jnp.float8_e4m3fn), w) ** 2).mean(),
        lambda w, b: (of_8_bits(b["x"].astype(jnp.float8_e4m3fn), w) ** 2).mean(),
        BATCH,
        {},
    ),
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
    # A weight of 0 and less is none.
    "relu of the weights of a Mean": (
        lambda w, b: crossshard.Mean(of_rows(w, b) @ b["time"], jax.nn.relu(b["time"].sum())),
        lambda w, b: of_rows(w, b) @ b["time"] / b["time"].sum(),
        TIMES,
        {},
    ),
    "a bound of a weight": (
        lambda w, b: jnp.sort(of_rows(w, b) * b["time"]).sum() / jnp.maximum(b["time"].sum(), 1e-3),
        lambda w, b: of_rows(w, b) @ b["time"] / b["time"].sum(),
        TIMES,
        {"weight": "time"},
    ),
    "labels": (of_labels, lambda w, b: of_labels(w, b), LABELS, {}),
    "what is positive": (
        of_positive,
        lambda w, b: of_positive(w, b),
        TIMES | {"by": np.float32([1, 2])},
        {"replicated_entries": ["by"]},
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


def test_loops_that_numbers_end_are_told_from_counted_ones():
    """With parameters of other steps a fixed point may not be one, and the loop goes on."""
    of = lambda cond: jax.make_jaxpr(
        lambda start: lax.while_loop(cond, lambda x: (x[0] + 1, x[1] / 2, x[1] < 1), start)
    )((0, 1.0, False))
    conditions = lambda x: x[0] < 9, lambda x: x[1] > 0.1, lambda x: ~x[2], lambda x: x[2]
    ended = [any(map(is_ended_by_numbers, equations_of(of(cond)))) for cond in conditions]
    assert ended == [False, True, True, True]

    # Here the loss grows with what the loop needs to end.
    def loss(p: Any, b: Any) -> Any:
        by = lax.stop_gradient(p["by"].sum())
        found = lax.while_loop(
            lambda x: jnp.abs(x[0] - x[1]) > 1e-4, lambda x: (jnp.cos(by * x[0]), x[0]), (1.0, 0.0)
        )
        return found[0] * in_order(p["w"], b).mean() - p["by"].sum()

    step = made(loss)
    step(step.init({"by": np.float32([0.3, 0.3]), "w": W}), BATCH)


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
