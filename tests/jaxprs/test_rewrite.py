"""A jaxpr in which nothing is computed twice computes the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from crossshard.jaxprs.rewrite import computed_once, without_repeats
from crossshard.jaxprs.walk import equations_of


def names(jaxpr: Any) -> list[str]:
    return [equation.primitive.name for equation in equations_of(jaxpr.jaxpr)]


def softmax_twice(x: Any) -> Any:
    return jax.nn.softmax(x) + jax.jit(jax.nn.softmax)(x) * 2


def test_what_is_called_twice_is_computed_once():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5)), jnp.float32)
    before = jax.make_jaxpr(softmax_twice)(x)
    after = without_repeats(before)
    assert names(before).count("div") == 2
    assert names(after).count("div") == names(after).count("exp") == 1
    np.testing.assert_allclose(computed_once(softmax_twice, x), softmax_twice(x), rtol=1e-6)


def test_a_broadcast_that_two_operations_make_is_one():
    x, y = jnp.ones((3, 5)), jnp.full((3, 1), 2.0)
    after = without_repeats(jax.make_jaxpr(lambda x, y: (x / y, x * y))(x, y))
    shapes = [tuple(each.aval.shape for each in e.invars) for e in after.jaxpr.eqns[-2:]]
    assert shapes == [((3, 5), (3, 5))] * 2
    assert names(after).count("broadcast_in_dim") == 1
    for one in jaxpr_as_fun(after)(x, y):
        assert one.shape == (3, 5)


def test_bodies_of_loops_and_what_is_computed_again_in_the_backward_pass():
    layer = jax.checkpoint(lambda x, w: jnp.sin(x @ w) + jnp.sin(x @ w))

    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()

    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((3, 4, 4), (2, 4)))
    jaxpr = without_repeats(jax.make_jaxpr(jax.grad(loss))(w, x))
    found = names(jaxpr)
    # In the loop forward; and backward, where what its derivative reads is computed again.
    assert found.count("sin") == found.count("cos") == 1
    assert any("remat" in name or "checkpoint" in name for name in found)
    np.testing.assert_allclose(computed_once(jax.grad(loss), w, x), jax.grad(loss)(w, x), rtol=1e-5)


def test_random_numbers_of_two_keys_stay_apart():
    draw = lambda key: (
        jax.random.normal(key, (4,)) - jax.random.normal(jax.random.fold_in(key, 1), (4,))
    )
    key = jax.random.key(0)
    np.testing.assert_allclose(computed_once(draw, key), draw(key), rtol=1e-6)
