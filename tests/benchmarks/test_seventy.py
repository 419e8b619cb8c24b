"""The model of 70 billion parameters has the shape that it is said to have."""

import math

import jax
import jax.numpy as jnp

from benchmarks import seventy


def test_it_has_the_parameters_of_its_table_and_a_loss():
    given = seventy.make()
    shapes = jax.tree.leaves(given["params"])
    # Attention with 8 key heads of 128, three matrices of 28,672, two norms; 80 layers of them, two
    # tables of words, and a last norm.
    width = 8192
    layer = 2 * width**2 + 2 * width * 1024 + 3 * width * 28672 + 2 * width
    assert sum(math.prod(each.shape) for each in shapes) == 80 * layer + 2 * 128256 * width + width
    assert {each.dtype for each in shapes} == {jnp.dtype("float32")}
    row = given["batch"](1)
    loss, gradients = jax.eval_shape(jax.value_and_grad(seventy.loss_fn), given["params"], row)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, given["params"])
