"""The memory that kernels move is what the compiler counts, but in loops as often as they run."""

import jax
import jax.numpy as jnp
import pytest

from crossshard.inspection.hlo import parse
from crossshard.plans.kernels import kernels


def read(function, *args):
    compiled = jax.jit(function).lower(*args).compile()
    return list(kernels(parse(compiled.as_text()))), compiled.cost_analysis()


def total(found):
    return sum(each.times * each.bytes for each in found)


def test_as_much_as_the_compiler_counts():
    x = jnp.ones((256, 512))
    found, analysis = read(lambda x, w: jnp.tanh(x @ w).sum(axis=1) * 3, x, jnp.ones((512, 128)))
    assert total(found) == pytest.approx(analysis["bytes accessed"], rel=0.2)
    assert sum(each.is_product for each in found) == 1
    assert sum(each.transcendental for each in found) == 256 * 128


def test_an_elementwise_kernel_by_hand():
    found, _ = read(lambda x, y: jnp.exp(x) * y + 1, jnp.ones(1000), jnp.ones(1000))
    assert [(each.bytes, each.transcendental, each.times) for each in found] == [(12_000, 1000, 1)]
    assert found[0].operations == 3000


def test_a_loop_counts_as_often_as_it_runs_and_reads_slices_of_what_it_scans():
    stacked = jnp.ones((10, 64, 64))
    found, _ = read(
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        jnp.ones((64, 64)),
        stacked,
    )
    products = [each for each in found if each.is_product]
    assert sum(each.times for each in products) == 10
    # Two reads and a write for each product, as many for tanh and for a copy of the slice; far from
    # ten times all ten matrices.
    assert 10 * 3 * 4 * 64 * 64 <= total(found) <= 10 * 10 * 4 * 64 * 64
