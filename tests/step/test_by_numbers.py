"""What a trace does not decide is checked by numbers at the first call, with noise switched off."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import crossshard
from crossshard.errors import LossError

SHARDS = 4
W = np.float32(np.random.default_rng(0).normal(size=(3, 2)))
BATCH = {
    "x": np.float32(np.random.default_rng(1).normal(size=(16, 3))),
    "mask": np.float32(np.arange(16) % 3 > 0),
}


def undecided(x: Any) -> Any:
    """An identity that no analysis knows."""
    return jax.pure_callback(
        lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


@jax.custom_jvp
def opaque(x: Any) -> Any:
    return undecided(x)


opaque.defjvp(lambda xs, ts: (xs[0], ts[0]))


def made(loss: Any, optimizer: Any = None, **options: Any) -> Any:
    options = {"num_shards": SHARDS} | options
    return crossshard.make_train_step(loss, optimizer or optax.sgd(0.1), **options)


def a_mean(w: Any, batch: Any) -> Any:
    return opaque((batch["x"] @ w) ** 2).mean()


def compared(w: Any, batch: Any) -> Any:
    hidden = opaque(batch["x"] @ w)
    return ((hidden - hidden.mean(0)) ** 2).mean()


def masked(w: Any, batch: Any) -> Any:
    return (opaque(batch["x"] @ w).sum(1) * batch["mask"]).sum() / batch["mask"].sum()


def dropped(w: Any, batch: Any, rng: Any) -> Any:
    keep = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
    return opaque((jnp.where(keep, batch["x"], 0) @ w) ** 2).mean()


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_steps": 2}, {"params": "sharded"}, {"num_shards": 1, "accumulate_steps": 4}],
    ids=str,
)
def test_a_mean_runs_and_is_that_of_one_device(options: dict[str, Any]):
    step = made(a_mean, **options)
    state, _ = step(step.init(W), BATCH)
    want = W - 0.1 * jax.grad(lambda w: ((BATCH["x"] @ w) ** 2).mean())(W)
    np.testing.assert_allclose(step.model(state), want, rtol=0, atol=1e-6)
    assert "if each row is computed alone by pure_callback" in step.describe()
    assert "; by numbers it is" in step.describe()


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"params": "sharded"}], ids=str)
def test_what_compares_rows_is_refused_and_the_state_stays_valid(options: dict[str, Any]):
    step = made(compared, **options)
    state = step.init(W)
    with pytest.raises(
        LossError, match=r"Nothing proves.*test_by_numbers.py.*And by numbers it is not so"
    ):
        step(state, BATCH)
    np.testing.assert_array_equal(step.model(state), W)


def test_with_one_row_on_each_shard_too():
    few = {name: x[:SHARDS] for name, x in BATCH.items()}
    step = made(a_mean)
    step(step.init(W), few)
    step = made(compared)
    with pytest.raises(LossError, match="And by numbers it is not so"):
        step(step.init(W), few)


def of_few_rows(w: Any, batch: Any) -> Any:
    losses = (batch["x"] @ w).sum(1) ** 2
    return losses.mean() if len(losses) <= 8 else (losses**2).mean()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"params": "sharded"},
        {"num_shards": 8},
        {"num_shards": 2, "accumulate_steps": 2},
        {"num_shards": 1, "accumulate_steps": 2},
    ],
    ids=str,
)
def test_the_loss_of_the_whole_batch_is_compared_too(options: dict[str, Any]):
    step = made(of_few_rows, **options)
    with pytest.raises(LossError, match="of rows of the whole batch the loss is"):
        step(step.init(W), BATCH)


def test_a_median_of_two_rows_is_their_mean_and_one_of_four_is_not():
    step = made(lambda w, batch: jnp.median((batch["x"] @ w).sum(1) ** 2))
    with pytest.raises(LossError, match="of rows of the whole batch the loss is"):
        step(step.init(W), {name: x[:SHARDS] for name, x in BATCH.items()})


@pytest.mark.parametrize("model_state", ["mean", "per_shard"])
def test_of_the_whole_batch_with_model_state(model_state: str):
    loss = lambda w, model_state, batch: (of_few_rows(w, batch) * model_state["by"], model_state)
    step = made(loss, model_state=model_state)
    state = step.init(W, model_state={"by": jnp.float32(2)})
    with pytest.raises(LossError, match="of rows of the whole batch the loss is"):
        step(state, BATCH)
    loss = lambda w, model_state, batch: (a_mean(w, batch) * model_state["by"], model_state)
    step = made(loss, model_state=model_state)
    step(step.init(W, model_state={"by": jnp.float32(2)}), BATCH)


def test_numbers_that_are_not_finite_show_nothing():
    step = made(compared)
    with pytest.raises(LossError, match="numbers that are not finite cannot show it"):
        step(step.init(W), BATCH | {"x": np.full_like(BATCH["x"], np.nan)})


def test_a_shard_without_weight_counts_for_nothing():
    mask = np.float32(np.arange(16) >= 8)
    step = made(masked, weight=lambda batch: batch["mask"].sum())
    state, _ = step(step.init(W), BATCH | {"mask": mask})
    want = W - 0.1 * jax.grad(lambda w: (BATCH["x"][8:] @ w).sum(1).mean())(W)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)


def test_gradients_are_compared_too():
    @jax.custom_vjp
    def centered(x: Any) -> Any:
        return x

    centered.defvjp(lambda x: (x, None), lambda _, g: (g - undecided(g).mean(0),))
    step = made(lambda w, batch: opaque(centered(batch["x"] @ w) ** 2).mean())
    with pytest.raises(LossError, match="the gradients are"):
        step(step.init(W), BATCH)


def test_weights_count():
    step = made(masked, weight="mask")
    state, _ = step(step.init(W), BATCH)
    want = W - 0.1 * jax.grad(
        lambda w: ((BATCH["x"] @ w).sum(1) * BATCH["mask"]).sum() / BATCH["mask"].sum()
    )(W)
    np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)
    step = made(masked)
    with pytest.raises(LossError, match="Pass weight='mask'"):
        step(step.init(W), BATCH)


def test_noise_is_switched_off():
    step = made(dropped)
    step(step.init(W), BATCH)
    step = made(lambda w, batch, rng: dropped(w, batch, rng) + compared(w, batch))
    with pytest.raises(LossError, match="And by numbers it is not so"):
        step(step.init(W), BATCH)


def test_each_kind_of_rows_is_checked_once():
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1

    def loss(w: Any, batch: Any) -> Any:
        count()
        return a_mean(w, batch)

    step = made(loss)
    state, _ = step(step.init(W), BATCH)
    before = seen
    state, _ = step(state, BATCH)
    assert seen == before
    step(state, {name: x[:8] for name, x in BATCH.items()})
    assert seen > before


def test_a_step_that_is_lowered_first_says_what_to_do():
    step = made(a_mean)
    types = step.abstract_init(W)
    with pytest.raises(LossError, match="The first call of the step checks it by numbers"):
        step.lower(types, BATCH)
    step(step.init(W), BATCH)
    step.lower(types, BATCH)


def test_inside_a_jit_there_are_no_numbers():
    step = made(a_mean)
    with pytest.raises(LossError, match="The first call of the step checks it by numbers"):
        jax.jit(step)(step.init(W), BATCH)


def test_groups_are_looked_at_one_by_one():
    groups = crossshard.CrossShardOptimizer(optax.sgd(0.1), group_assignment=[[0, 1], [2, 3]])
    step = made(a_mean, groups)
    step(step.init(W), BATCH)
    step = made(compared, groups)
    with pytest.raises(LossError, match="And by numbers it is not so"):
        step(step.init(W), BATCH)


def plain(w: Any, batch: Any) -> Any:
    return ((batch["x"] @ w) ** 2).mean()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_the_mesh_that_is_set(kind: AxisType):
    with jax.set_mesh(jax.make_mesh((SHARDS,), ("data",), (kind,), devices=jax.devices()[:SHARDS])):
        step = made(a_mean)
        state, _ = step(step.init(W), BATCH)
        want = W - 0.1 * jax.grad(plain)(W, BATCH)
        np.testing.assert_allclose(state.params, want, rtol=0, atol=1e-6)
        step = made(compared)
        with pytest.raises(LossError, match="And by numbers it is not so"):
            step(step.init(W), BATCH)


def test_a_loss_of_one_number_of_rows_alone_is_refused_in_words():
    rows = len(BATCH["x"]) // SHARDS

    def loss(w: Any, batch: Any) -> Any:
        return (opaque(batch["x"] @ w) * jnp.ones((rows, 2))).mean()

    step = made(loss)
    with pytest.raises(LossError, match=r"cannot be computed of all rows at once.*loss_over"):
        step(step.init(W), BATCH)


# What is undecided for other reasons than one operation: the whole loss is compared.


def in_chunks(of: Any, dtype: Any) -> Any:
    """A loss over chunks of sorted rows, which a trace does not tell from rows that meet."""

    def loss(w: Any, batch: Any) -> Any:
        hidden = batch["x"].astype(dtype) @ w.astype(dtype)
        hidden = hidden[jnp.argsort(batch["x"][:, 0])]
        chunks = hidden.reshape(2, -1, *hidden.shape[1:])
        return 100 * jax.lax.map(of, chunks).mean().astype(jnp.float32)

    return loss


MANY = {
    "x": np.float32(np.random.default_rng(2).normal(size=(48, 3))),
    "mask": np.float32(np.arange(48) % 3 > 0),
}
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
WAYS = pytest.mark.parametrize(
    "options", [{}, {"params": "sharded"}, {"accumulate_steps": 2}], ids=str
)


@DTYPES
@WAYS
def test_a_mean_in_chunks_runs(options: dict[str, Any], dtype: Any):
    step = made(in_chunks(lambda x: (x**2).mean(), dtype), **options)
    state, _ = step(step.init(W), MANY)
    want = 100 * jax.grad(lambda w: ((MANY["x"] @ w) ** 2).mean())(W)
    moved = (W - np.asarray(step.model(state))) / 0.1
    coarse = 1e-5 if dtype == jnp.float32 else 2e-2
    assert np.linalg.norm(moved - want) <= coarse * np.linalg.norm(want)
    assert "by numbers it is a mean over the rows" in step.describe()


@DTYPES
@WAYS
@pytest.mark.parametrize("of", [jnp.std, lambda x: (x - x.mean(0)).var()], ids=["std", "centred"])
def test_a_comparison_in_chunks_is_refused(of: Any, options: dict[str, Any], dtype: Any):
    step = made(in_chunks(of, dtype), **options)
    with pytest.raises(LossError, match="And by numbers it is not so: of rows of the whole batch"):
        step(step.init(W), MANY)


@DTYPES
def test_the_noise_of_a_rounding_does_not_excuse_what_depends_on_the_order(dtype: Any):
    """Rows in another order give other numbers, where each chunk is compared with its mean."""
    step = made(in_chunks(lambda x: jnp.std(x + 3), dtype), num_shards=2)
    with pytest.raises(LossError, match="And by numbers it is not so"):
        step(step.init(W), MANY)


def of_few_gradients(size: float) -> Any:
    """A mean, whose gradient is another one of many rows than of few."""

    @jax.custom_vjp
    def odd(x: Any) -> Any:
        return x

    odd.defvjp(lambda x: (x, None), lambda _, g: (g if len(g) <= 24 else g * (1 + size),))
    return lambda w, batch: ((odd(batch["x"]) @ w) ** 2 + odd(batch["x"] @ w) ** 2).mean()


@WAYS
def test_gradients_of_the_whole_batch_are_compared(options: dict[str, Any]):
    step = made(of_few_gradients(0), **options)
    step(step.init(W), MANY)
    step = made(of_few_gradients(0.01), **options)
    with pytest.raises(LossError, match=r"whole batch the loss is .*; the gradients are"):
        step(step.init(W), MANY)


def test_and_with_weights():
    def loss(size: float) -> Any:
        of = of_few_gradients(size)

        def ratio(w: Any, batch: Any) -> Any:
            losses = (batch["x"] @ w).sum(1) ** 2 * batch["mask"]
            # An undecided term of no size, which is weighted like the rest.
            return losses.sum() / batch["mask"].sum() + of(w, batch) - of(w, batch)

        return ratio

    step = made(loss(0), weight="mask")
    state, _ = step(step.init(W), MANY)
    mask = MANY["mask"]
    want = jax.grad(lambda w: ((MANY["x"] @ w).sum(1) ** 2 * mask).sum() / mask.sum())(W)
    np.testing.assert_allclose(state.params, W - 0.1 * want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"params": "sharded"}], ids=str)
def test_where_xla_cannot_split_all_rows_each_shard_takes_them(options: dict[str, Any]):
    """It names the axis of the shards."""
    axis = lambda: 0 * jax.lax.axis_index("shards")
    mean = in_chunks(lambda x: (x**2).mean(), jnp.bfloat16)
    step = made(lambda w, batch: mean(w, batch) + axis(), **options)
    step(step.init(W), MANY)
    wrong = in_chunks(jnp.std, jnp.bfloat16)
    step = made(lambda w, batch: wrong(w, batch) + axis(), **options)
    with pytest.raises(LossError, match="of rows of the whole batch the loss is"):
        step(step.init(W), MANY)
