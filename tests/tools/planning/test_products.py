"""The products of a step are counted as by hand, loops and shards included."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from crossshard.tools.planning.products import products
from tests.tools.steps import GRID

A, B = jnp.ones((4, 8)), jnp.ones((8, 16))
ONE = 2 * 4 * 8 * 16


def flops(function, *args, devices=1):
    found = products(jax.make_jaxpr(function)(*args), devices)
    return sum(each.times * each.flops for each in found)


IMAGE, KERNEL = jnp.ones((2, 10, 10, 3)), jnp.ones((3, 3, 3, 5))


def convolve(x, k):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", dimension_numbers=layout)


def test_products_by_hand():
    assert flops(lambda a, b: a @ b, A, B) == ONE
    both = jax.grad(lambda a, b: jnp.sum(jnp.tanh(a @ b)), argnums=(0, 1))
    assert flops(both, A, B) == 3 * ONE
    batched = jnp.ones((3, 4, 8)), jnp.ones((3, 8, 16))
    assert flops(lambda a, b: jnp.einsum("nij,njk->nik", a, b), *batched) == 3 * ONE
    # Of branches the larger one counts.
    branch = lambda p, a: jax.lax.cond(p, lambda a: (a @ B).sum(), lambda a: a.sum(), a)
    assert flops(branch, True, A) == ONE
    assert flops(convolve, IMAGE, KERNEL) == 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)


def test_a_scan_counts_as_often_as_it_runs():
    square = jnp.ones((8, 8))
    loop = lambda x: jax.lax.scan(lambda x, _: (x @ square, None), x, length=7)[0]
    assert flops(loop, A) == 7 * 2 * 4 * 8 * 8
    compiled = jax.jit(loop).lower(A).compile().cost_analysis()
    # The compiler's own analysis counts the body once, which is why it is not used.
    assert compiled["flops"] < 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("manual", [("data",), ("data", "model")])
def test_on_each_of_several_devices(manual):
    work = lambda a: jax.shard_map(
        lambda a: a @ B, mesh=GRID, in_specs=P(manual), out_specs=P(manual), axis_names=set(manual)
    )(a)
    # 32 rows over eight devices, whoever splits them: JAX over manual axes, or XLA over others.
    assert flops(jax.jit(work), jnp.ones((32, 8)), devices=8) == ONE
    assert flops(lambda a: a @ B, jnp.ones((32, 8)), devices=8) == ONE
