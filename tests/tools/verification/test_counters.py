"""Steps whose loss reads a counter are compared on the same step of it on 1 and on N shards."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import crossshard
from tests.tools.steps import SPLIT, WHOLE, first_params, mesh_of, over, updated
from tests.tools.verification.right import X, Y, mse


def scaled(params: Any, count: Any, x: Any, y: Any) -> Any:
    """KL annealing, a temperature and the like."""
    return mse(params, x, y) / (1.0 + count)


def noisy(params: Any, count: Any, x: Any, y: Any) -> Any:
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(0), count), (4,))
    return mse(params, x + noise, y)


def verified(loss: Any, kind: Any, *, mean: bool) -> crossshard.tools.Verification:
    """A counter of this dtype, which is all that the step moves besides parameters."""

    def make_step(optimizer: Any, n: int) -> Any:
        def step(params: Any, state: Any, count: Any, x: Any, y: Any) -> Any:
            gradients = jax.grad(loss)(params, count, x, y)
            gradients = (lax.pmean if mean else lax.psum)(gradients, "s")
            return *updated(optimizer, params, state, gradients), count + jnp.ones((), kind)

        run = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh_of(s=n))
        params = first_params()
        return run, params, optimizer.init(params), jnp.zeros((), kind)

    return crossshard.verify(make_step, X, Y, num_shards=8)


@pytest.mark.parametrize("loss", [scaled, pytest.param(noisy, marks=pytest.mark.deep)])
def test_a_right_step_with_an_integer_counter_is_fine(loss: Any):
    found = verified(loss, np.int32, mean=True)
    assert found.ok, found
    assert {leaf.verdict for leaf in found.leaves} == {"fine"}


def test_a_wrong_step_with_an_integer_counter_is_named():
    (fault,) = verified(scaled, np.uint32, mean=False).faults
    assert (fault.kind, fault.factor) == ("update", "N")


def test_the_counter_of_a_train_step_is_read():

    def loss(params: Any, counter: Any, batch: Any) -> Any:
        return scaled(params, counter, batch["x"], batch["y"]), counter + 1

    step = crossshard.make_train_step(loss, optax.sgd(0.1), num_shards=8, model_state="mean")
    found = crossshard.verify(step, first_params(), jnp.int32(0), {"x": X, "y": Y})
    assert found.ok, found
