"""What is counted of products, beside XLA's own count of a compiled program, and a hand count."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl

from crossshard.jaxprs.products import products
from crossshard.jaxprs.rewrite import without_checkpoints


def counted(function: Callable[..., Any], *shapes: Any) -> tuple[int, set[str]]:
    """The operations, and the primitives that are not counted."""
    uncounted = set[str]()
    number = products(jax.make_jaxpr(function)(*map(of, shapes)), uncounted)
    return number, {name.partition(" ")[0] for name in uncounted}


def of(shape: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32) if isinstance(shape, tuple) else shape


def by_xla(function: Callable[..., Any], *shapes: Any) -> float:
    return jax.jit(function).lower(*map(of, shapes)).compile().cost_analysis()["flops"]


def conv(**options: Any) -> Callable[..., jax.Array]:
    numbers = ("NHWC", "HWIO", "NHWC")
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": numbers} | options
    return lambda x, kernel: lax.conv_general_dilated(x, kernel, **options)


X, KERNEL = (2, 9, 8, 4), (3, 2, 4, 6)
# Each is one product alone, which XLA counts exactly, without what is multiplied with padding.
ALONE: dict[str, tuple[Any, ...]] = {
    "a matrix": (lambda x, w: x @ w, (5, 7), (7, 3)),
    "a batch": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (4, 5, 7), (4, 7, 3)),
    "two axes": (lambda x, w: jnp.einsum("bij,ijk->bk", x, w), (4, 5, 7), (5, 7, 3)),
    "same": (conv(), X, KERNEL),
    "valid": (conv(padding="VALID"), X, KERNEL),
    "strides": (conv(window_strides=(2, 3)), X, KERNEL),
    "a dilated kernel": (conv(rhs_dilation=(3, 2)), X, KERNEL),
    "a transposed one": (conv(lhs_dilation=(2, 3), padding=((1, 0), (2, -1))), X, KERNEL),
    "groups": (conv(feature_group_count=2), X, (3, 2, 2, 6)),
    "of each channel": (conv(feature_group_count=4), X, (3, 2, 1, 8)),
    "groups of the batch": (conv(batch_group_count=2), X, (3, 2, 4, 6)),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_product_has_as_many_as_xla_counts(name: str):
    assert counted(*ALONE[name]) == (by_xla(*ALONE[name]), set())


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
def test_each_gradient_of_a_convolution_has_as_many_as_itself(strides: tuple[int, int]):
    run = conv(window_strides=strides)
    once, _ = counted(run, X, KERNEL)
    loss = lambda x, kernel: (run(x, kernel) ** 2).sum()
    assert counted(jax.value_and_grad(loss), X, KERNEL)[0] == 2 * once
    assert counted(jax.value_and_grad(loss, (0, 1)), X, KERNEL)[0] == 3 * once


# Loops and branches, of a square matrix x of 4 rows: one product is 2 · 4³ = 128.


def turns(x: jax.Array) -> jax.Array:
    inner = lambda x, _: (lax.fori_loop(0, 3, lambda _, x: x @ x, x), None)
    return lax.scan(inner, x, length=5)[0]


WITHIN: dict[str, tuple[Any, int]] = {
    "loops": (turns, 15),
    "a map": (lambda x: lax.map(lambda row: x @ row, x), 1),
    "a branch": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x), 2),
    "a call": (lambda x: jax.jit(jnp.dot)(x, jax.checkpoint(jnp.dot)(x, x)), 2),
    "vmap": (lambda x: jax.vmap(lambda x: x @ x)(jnp.stack([x, x, x])), 3),
    "a rule": (jax.nn.relu, 0),
    "experts": (lambda x: lax.ragged_dot(x, jnp.ones((2, 4, 4)), jnp.array([1, 3])), 1),
    "nothing": (
        lambda x: jnp.cumsum(jnp.sort(jnp.exp(x))) + jax.random.normal(jax.random.key(0)),
        0,
    ),
}


@pytest.mark.parametrize("name", WITHIN)
def test_what_runs_several_times_counts_as_often(name: str):
    function, number = WITHIN[name]
    assert counted(function, (4, 4)) == (128 * number, set())


def test_the_gradient_of_experts_counts_each_row_once():
    loss = lambda x, w: lax.ragged_dot(x, w, jnp.array([1, 3, 2])).sum()
    once, _ = counted(loss, (6, 4), (3, 4, 5))
    assert once == 2 * 6 * 4 * 5
    assert counted(jax.value_and_grad(loss, (0, 1)), (6, 4), (3, 4, 5)) == (3 * once, set())


def test_each_shard_counts():
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=auto)
    of_one = lambda x: x @ x
    run = jax.shard_map(of_one, mesh=mesh, in_specs=jax.P("rows"), out_specs=jax.P("rows"))
    assert counted(run, (16, 4)) == (8 * 128, set())


def test_a_checkpoint_is_computed_again_or_not():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (jnp.sin(jnp.sin(x @ w) @ w), None))
        return lax.scan(layer, x, w)[0].sum()

    traced = jax.make_jaxpr(loss)(jnp.ones((6, 4, 4)), jnp.ones((4, 4)))
    for jaxpr, number in (traced, 4), (without_checkpoints(traced), 3):
        run = lambda w, x, jaxpr=jaxpr: jax.extend.core.jaxpr_as_fun(jaxpr)(w, x)[0]
        assert counted(jax.value_and_grad(run), (6, 4, 4), (4, 4)) == (2 * 6 * 128 * number, set())


# Kernels.


def in_pallas(kernel: Any, **options: Any) -> Callable[..., Any]:
    return lambda x: pl.pallas_call(kernel, out_shape=of((4, 4)), **options)(x)


def squared(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] @ x_ref[...]


def doubled(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = 2 * x_ref[...]


_COST = pl.CostEstimate(flops=100, transcendentals=0, bytes_accessed=0)
_CALLED = lambda x: jax.pure_callback(lambda x: x, of((4, 4)), x)
KERNELS: dict[str, tuple[Any, int, set[str]]] = {
    "an estimate": (in_pallas(squared, cost_estimate=_COST), 100, set()),
    "none": (in_pallas(squared), 0, {"pallas_call"}),
    "without products": (in_pallas(doubled), 0, set()),
    "without products, with an estimate": (in_pallas(doubled, cost_estimate=_COST), 0, set()),
    "python": (_CALLED, 0, {"pure_callback"}),
    "beside a product": (lambda x: _CALLED(x) @ x, 128, {"pure_callback"}),
    "some turns": (
        lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x),
        0,
        {"while"},
    ),
    "other turns": (lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + x, x), 0, set()),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_counted_or_named(name: str):
    function, *expected = KERNELS[name]
    assert counted(function, (4, 4)) == tuple(expected)


def test_what_is_not_counted_has_its_line():
    uncounted = set[str]()
    products(jax.make_jaxpr(in_pallas(squared))(jnp.ones((4, 4))), uncounted)
    assert all("test_products.py:" in each for each in uncounted)
    assert uncounted


def test_attention_of_cudnn_counts_as_that_of_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *_: False)
    query, key = (jax.ShapeDtypeStruct((2, t, 4, 64), jnp.bfloat16) for t in (128, 256))

    def run(implementation: str) -> Any:
        attend = jax.nn.dot_product_attention
        loss = lambda *qkv: attend(*qkv, implementation=implementation).astype(jnp.float32).sum()
        return counted(jax.value_and_grad(loss, (0, 1, 2)), query, key, key)

    by_hand = 3 * 2 * 2 * (2 * 128 * 4 * 64) * 256
    assert run("cudnn") == run("xla") == (by_hand, set())
