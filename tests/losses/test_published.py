"""The losses of public training code: on any number of shards as on one device, or refused."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from crossshard import make_train_step
from crossshard.errors import LossError
from tests.losses.published import PARAMS, PUBLISHED
from tests.quick import deep_but
from tests.step.common import assert_close

STEPS, RATE = 2, 0.3

QUICK = ["easylm", "flax gemma", "maxtext experts", "qwix, one scale", "tunix dpo"]


def named(has: Any = lambda published: True) -> Any:
    """Those of the losses that have something, of which few are quick."""
    names = [name for name, published in PUBLISHED.items() if has(published)]
    return pytest.mark.parametrize("name", deep_but(QUICK, names))


of_shards = pytest.mark.parametrize("shards", deep_but([3], (3, 8)))


@functools.cache
def on_one_device(name: str) -> tuple[list[float], Any]:
    """The losses, and the parameters after steps of plain SGD on the whole batch."""
    loss, batch = PUBLISHED[name].as_published, PUBLISHED[name].batch
    params, losses = jax.tree.map(jax.numpy.asarray, PARAMS), []
    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(STEPS):
        value, gradient = step(params, batch)
        losses.append(float(value))
        params = jax.tree.map(lambda p, g: p - RATE * g, params, gradient)
    return losses, params


def run(loss: Any, batch: Any, shards: int, **options: Any) -> tuple[list[float], Any]:
    step = make_train_step(loss, optax.sgd(RATE), num_shards=shards, **options)
    state, losses = step.init(PARAMS), []
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, step.model(state)


def run_or_refusal(*args: Any, **options: Any) -> tuple[Any, str]:
    """What ``run`` returns, or ``None`` and the sentence of a ``LossError``."""
    try:
        return run(*args, **options), ""
    except LossError as error:
        return None, str(error)


def check(found: tuple[list[float], Any], name: str) -> None:
    losses, params = on_one_device(name)
    np.testing.assert_allclose(found[0], losses, rtol=2e-6, atol=2e-6)
    assert_close(found[1], params, atol=2e-6, rtol=2e-6)


@named(lambda published: not published.by_rows)
def test_none_is_trivial(name: str):
    """The mean of the shards' losses is another number, unless the loss passes as it is."""
    published = PUBLISHED[name]
    found = run(published.as_published, published.batch, 8, loss_over="shard")
    if published.passes is True:
        check(found, name)
    else:
        losses, _ = on_one_device(name)
        assert abs(found[0][0] / losses[0] - 1) > 1e-3


@named()
@of_shards
def test_as_it_is_it_passes_or_is_refused(name: str, shards: int):
    published = PUBLISHED[name]
    found, refusal = run_or_refusal(published.as_published, published.batch, shards)
    if found is not None:
        check(found, name)
    assert found is not None or published.passes is not True, refusal
    if isinstance(published.passes, str):
        assert published.passes in refusal


@named()
def test_over_the_batch_it_passes_as_it_is(name: str):
    published = PUBLISHED[name]
    check(run(published.as_published, published.batch, 3, loss_over="batch"), name)


@named(lambda published: published.weight is not None)
@of_shards
def test_with_a_weight(name: str, shards: int):
    published = PUBLISHED[name]
    options = {"weight": published.weight}
    found, refusal = run_or_refusal(published.as_published, published.batch, shards, **options)
    assert found is not None, refusal
    check(found, name)


@named(lambda published: published.with_means)
@of_shards
def test_with_means(name: str, shards: int):
    published = PUBLISHED[name]
    check(run(published.with_means, published.batch, shards), name)


@named(lambda published: published.by_rows)
@of_shards
def test_by_its_own_rows(name: str, shards: int):
    loss, batch = PUBLISHED[name].by_rows
    check(run(loss, batch, shards), name)
