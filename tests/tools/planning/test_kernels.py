"""The memory that kernels move is what the compiler counts, but in loops as often as they run."""

import jax
import jax.numpy as jnp
import pytest

from crossshard.tools.inspection.hlo import parse
from crossshard.tools.planning.kernels import bytes_moved


def read(function, *args):
    compiled = jax.jit(function).lower(*args).compile()
    return bytes_moved(parse(compiled.as_text())), compiled.cost_analysis()


def test_as_much_as_the_compiler_counts():
    x = jnp.ones((256, 512))
    found, analysis = read(lambda x, w: jnp.tanh(x @ w).sum(axis=1) * 3, x, jnp.ones((512, 128)))
    assert found == pytest.approx(analysis["bytes accessed"], rel=0.2)


def test_an_elementwise_kernel_by_hand():
    found, _ = read(lambda x, y: jnp.exp(x) * y + 1, jnp.ones(1000), jnp.ones(1000))
    assert found == 12_000


def test_a_loop_counts_as_often_as_it_runs_and_reads_slices_of_what_it_scans():
    stacked = jnp.ones((10, 64, 64))
    found, _ = read(
        lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0],
        jnp.ones((64, 64)),
        stacked,
    )
    # Two reads and a write for each product, as many for tanh and for a copy of the slice; far from
    # ten times all ten matrices.
    assert 10 * 3 * 4 * 64 * 64 <= found <= 10 * 10 * 4 * 64 * 64
