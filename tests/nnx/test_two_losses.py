"""Two losses in one step of the stateful idiom, each a ``Mean`` of which no row may count."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import crossshard
from crossshard import Mean
from tests.stateful import sgd

N = 4
ROWS = np.random.default_rng(0).normal(size=(5, 2 * N, 3)).astype(np.float32)
# In each step, which rows count in the loss of "a", and in that of "b".
EVERY, SOME, NONE = np.ones(2 * N), np.arange(2 * N) % 3 == 0, np.zeros(2 * N)
COUNTED = [
    {"a": np.float32(a), "b": np.float32(b)}
    for a, b in [(EVERY, SOME), (SOME, NONE), (NONE, EVERY), (NONE, NONE), (SOME, SOME)]
]
START = {"a": jnp.array([0.1, 0.2, 0.3]), "b": jnp.array([0.3, -0.2, 0.1])}
MOMENTA = [None, 0.9]


class Model(nnx.Module):
    def __init__(self):
        self.a, self.b = (nnx.Param(START[name]) for name in "ab")


def losses_of(values: Any, x: Any) -> dict[str, Any]:
    """The loss of each row; both read all parameters."""
    of_a, of_b = x @ values["a"], x @ values["b"]
    return {"a": (of_a + of_b**2 - 1) ** 2, "b": jnp.tanh(of_a * of_b)}


def trained(body: Callable[..., None], momentum: float | None, **options: Any) -> Any:
    """The parameters after five steps of a body, and how often a global step was counted."""
    model, opt, count = Model(), sgd(0.1, momentum, **options), nnx.Variable(jnp.array(0))

    @crossshard.shard(num_shards=N)
    def step(model: Any, opt: Any, count: Any, x: Any, a: Any, b: Any) -> None:
        def mean(name: str, rows: Any) -> Mean:
            found = losses_of({"a": model.a[...], "b": model.b[...]}, x)[name]
            return Mean((found * rows).sum(), rows.sum())

        body(model, opt, count, lambda: mean("a", a), lambda: mean("b", b))

    for x, counted in zip(ROWS, COUNTED, strict=True):
        step(model, opt, count, x, counted["a"], counted["b"])
    return {"a": model.a[...], "b": model.b[...]}, int(count[...])


def mean_of(values: Any, x: Any, rows: Any, name: str) -> Any:
    return (losses_of(values, x)[name] * rows).sum() / max(rows.sum(), 1)


def on_one(trains: Sequence[str], momentum: float | None, *, apart: bool) -> Any:
    """The same on one device, by plain Optax; a mean of no rows is 0.

    Args:
      trains: the parameters that each loss trains, such as ``["ab", "ab"]``.
      momentum: that of SGD.
      apart: whether each set has an update of its own, which is left out without rows.
    """
    values, optimizer, number = START, optax.sgd(0.1, momentum), 0
    states = {name: optimizer.init(values[name]) for name in "ab"}
    for x, counted in zip(ROWS, COUNTED, strict=True):
        gradients = {name: jnp.zeros(3) for name in "ab"}
        for loss, names in zip("ab", trains, strict=True):
            of_loss = jax.grad(mean_of)(values, x, counted[loss], loss)
            gradients |= {name: gradients[name] + of_loss[name] for name in names}
        has_rows = [name for name in "ab" if counted[name].any()]
        number += len(has_rows) if apart else bool(has_rows)
        for name in has_rows if apart or not has_rows else "ab":
            updates, states[name] = optimizer.update(gradients[name], states[name])
            values = {**values, name: values[name] + updates}
    return values, number


def assert_equal(found: Any, wanted: Any) -> None:
    for name in "ab":
        np.testing.assert_allclose(found[0][name], wanted[0][name], atol=1e-6)
    assert found[1] == wanted[1]


@pytest.mark.parametrize(
    ("momentum", "order", "options"),
    [
        (None, "ab", {}),
        (0.9, "ab", {}),
        (0.9, "ba", {}),
        (0.9, "ba", {"nonfinite": "skip"}),
        (0.9, "ab", {"loss_scale": crossshard.DynamicLossScale(256.0)}),
    ],
)
def test_of_two_sets_each_is_updated_if_its_own_rows_count(
    momentum: float | None, order: str, options: Any
):
    def body(model: Any, opt: Any, count: Any, of_a: Any, of_b: Any) -> None:
        losses = {"a": of_a, "b": of_b}
        pairs = [opt.compute_gradients(losses[name], [getattr(model, name)]) for name in order]
        for each in pairs:
            opt.apply_gradients(each, count)

    wanted = on_one(["a", "b"], momentum, apart=True)
    assert_equal(trained(body, momentum, **options), wanted)


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_two_sets_in_one_call_are_updated_if_any_row_counts(momentum: float | None):
    def body(model: Any, opt: Any, count: Any, of_a: Any, of_b: Any) -> None:
        pairs = opt.compute_gradients(of_a, [model.a])
        opt.apply_gradients(pairs + opt.compute_gradients(of_b, [model.b]), count)

    assert_equal(trained(body, momentum), on_one(["a", "b"], momentum, apart=False))


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_gradients_added_by_hand_are_applied_if_any_row_counts(momentum: float | None):
    def body(model: Any, opt: Any, count: Any, of_a: Any, of_b: Any) -> None:
        both = zip(
            opt.compute_gradients(of_a, model), opt.compute_gradients(of_b, model), strict=True
        )
        opt.apply_gradients([(one + other, v) for (one, v), (other, _) in both], count)

    assert_equal(trained(body, momentum), on_one(["ab", "ab"], momentum, apart=False))


@pytest.mark.parametrize("plain_first", [True, False])
def test_a_mean_without_rows_skips_its_own_update_and_no_loss_beside_it(plain_first: bool):
    def body(model: Any, opt: Any, count: Any, of_a: Any, of_b: Any) -> None:
        decay = lambda: 0.1 * (model.a[...] ** 2 + model.b[...] ** 2).sum()
        losses = [decay, of_b] if plain_first else [of_b, decay]
        both = zip(*(opt.compute_gradients(loss, model) for loss in losses), strict=True)
        opt.apply_gradients([(one + other, v) for (one, v), (other, _) in both], count)
        # What was applied before is no part of this update.
        opt.minimize(of_a, count, model)

    values, optimizer, number = START, optax.sgd(0.1, 0.9), 0
    state = optimizer.init(values)
    decay = lambda values, *_: 0.1 * sum((x**2).sum() for x in values.values())
    for x, counted in zip(ROWS, COUNTED, strict=True):
        for name, other in [("b", decay), ("a", lambda *_: 0.0)][: 1 + counted["a"].any()]:
            both = lambda values, *rest, other=other: mean_of(values, *rest) + other(values)
            gradients = jax.grad(both)(values, x, counted[name], name)
            updates, state = optimizer.update(gradients, state)
            values, number = optax.apply_updates(values, updates), number + 1
    assert_equal(trained(body, 0.9), (values, number))
