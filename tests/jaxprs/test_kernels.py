"""What kernels say of the rows that they are given, in their traces: nothing of this runs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.gpu import layer_norm, rms_norm, softmax
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from crossshard.jaxprs.mean_over_rows import Finding
from crossshard.jaxprs.row_facts import OverRows
from tests.jaxprs.proving import over_rows

ROWS, TIME, WIDTH = 8, 4, 16
X = jax.ShapeDtypeStruct((ROWS, TIME, WIDTH), jnp.bfloat16)
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
Model = Callable[[jax.Array, jax.Array], jax.Array]


def found(model: Model, x: Any = X, w: Any = W) -> Finding:
    loss = lambda x, w, own: (model(x, w).astype(jnp.float32) ** 2).mean()
    return over_rows(loss, x, w)


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def one_row(x: Any) -> Any:
    return jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)


def doubled(x_ref: Any, out_ref: Any, *scratch: Any) -> None:
    out_ref[...] = 2 * x_ref[...]


def on_grid(
    kernel: Any = doubled,
    rows: int = 1,
    given: Any = lambda i: (i, 0, 0),
    out: Any = lambda i: (i, 0, 0),
    **options: Any,
) -> Any:
    """A kernel with a grid over blocks of so many rows."""

    def run(x: jax.Array) -> jax.Array:
        block = (rows, *x.shape[1:])
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(len(x) // rows,),
            in_specs=[pl.BlockSpec(block, given)],
            out_specs=pl.BlockSpec(block, out),
            **options,
        )(x)

    return run


def numbered(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] * pl.program_id(0)


def counted(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] / pl.num_programs(0)


def by_table(kernel: Any, table: Any) -> Model:
    """A kernel of rows and of one more array, whose block the map chooses."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        more = jnp.concatenate([w[None]] * 4)[:, :TIME]
        return pl.pallas_call(
            kernel,
            out_shape=like(x),
            grid=(len(x),),
            in_specs=[
                pl.BlockSpec((1, TIME, WIDTH), lambda i: (i, 0, 0)),
                pl.BlockSpec((1, TIME, WIDTH), table),
            ],
            out_specs=pl.BlockSpec((1, TIME, WIDTH), lambda i: (i, 0, 0)),
        )(x, more)

    return run


def plus(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + y_ref[...]


def summed(x: jax.Array) -> jax.Array:
    """A sum over rows: the same block of the output at every step."""

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] += x_ref[...]

    block = pl.BlockSpec((1, TIME, WIDTH), lambda i: (i, 0, 0))
    one = pl.BlockSpec((1, TIME, WIDTH), lambda i: (0, 0, 0))
    out = jax.ShapeDtypeStruct((1, TIME, WIDTH), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, grid=(len(x),), in_specs=[block], out_specs=one)(x)


def with_rule(rule: Any) -> Any:
    run = custom_partitioning(lambda x: 2 * x)
    run.def_partition(
        partition=lambda *_: None, infer_sharding_from_operands=lambda *_: None, sharding_rule=rule
    )
    return run


SCRATCH = {"scratch_shapes": [pltpu.VMEM((TIME, WIDTH), jnp.float32)]}
whole = pl.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct((TIME, WIDTH), jnp.bfloat16))


composite = functools.partial(lax.composite, name="a.composite")


@jax.custom_batching.custom_vmap
def batched(x: jax.Array) -> jax.Array:
    return 2 * x


batched.def_vmap(lambda size, is_batched, x: (2 * x, True))
called = lambda x: jax.pure_callback(np.tanh, like(x), x, vmap_method="broadcast_all")

PROVEN: dict[str, Model] = {
    "a row a block": lambda x, w: on_grid()(x @ w),
    "several blocks a row": lambda x, w: on_grid()((x @ w).reshape(-1, 2, WIDTH)),
    "under vmap, with a grid": lambda x, w: jax.vmap(on_grid())((x @ w)[:, None]),
    "under vmap, with scratch": lambda x, w: jax.vmap(on_grid(**SCRATCH))((x @ w)[:, None]),
    "in parallel, with scratch": lambda x, w: on_grid(
        **SCRATCH, compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",))
    )(x @ w),
    "beside a table": by_table(plus, lambda i: (1, 0, 0)),
    "a rule": lambda x, w: with_rule("i j k -> i j k")(x @ w),
    "a rule of any axes": lambda x, w: with_rule("... k -> ... k")(x @ w),
    "of the parameters alone": lambda x, w: x @ pl.pallas_call(doubled, out_shape=like(w))(w),
    "in a scan over the rows": lambda x, w: lax.map(whole, x @ w),
    "a composite of the parameters": lambda x, w: x @ composite(jnp.sin)(w),
    "with a batching rule": lambda x, w: batched(x @ w),
}
ASSUMED: dict[str, Model] = {
    "rows in a block": lambda x, w: on_grid(rows=2)(x @ w),
    "one block": lambda x, w: pl.pallas_call(doubled, out_shape=like(x))(x @ w),
    "its own number": lambda x, w: on_grid(numbered)(x @ w),
    "always the first": lambda x, w: on_grid(given=lambda i: (0, 0, 0))(x @ w),
    "a rule that reduces": lambda x, w: with_rule("i j k -> i2 j k")(x @ w),
    "a rule in words": lambda x, w: with_rule(lambda *_: "i j k -> i j k")(x @ w),
    "scratch": lambda x, w: on_grid(**SCRATCH)(x @ w),
    "the number of steps": lambda x, w: on_grid(counted)(x @ w),
    "another row": lambda x, w: on_grid(given=lambda i: (i // 2, 0, 0))(x @ w),
    "the next row": lambda x, w: on_grid(given=lambda i: ((i + 1) % 2, 0, 0))(x @ w),
    "a table by number": by_table(plus, lambda i: (i % 4, 0, 0)),
    "aliased": lambda x, w: on_grid(input_output_aliases={0: 0})(x @ w),
    "called back": lambda x, w: called(x @ w),
    # What vmap_method says is how to batch the call, not that its first axis is a batch.
    "called back under vmap": lambda x, w: jax.vmap(called)(x @ w),
    "of a foreign library": lambda x, w: jax.ffi.ffi_call("f", like(x), vmap_method="sequential")(
        x
    ),
}


@pytest.mark.parametrize("name", PROVEN)
def test_what_a_kernel_says_is_believed(name: str):
    assert found(PROVEN[name]) == Finding(OverRows.MEAN)


@pytest.mark.parametrize("name", ASSUMED)
def test_else_it_is_assumed_and_written_down(name: str):
    finding = found(ASSUMED[name])
    assert finding.kind is OverRows.MEAN
    assert len(finding.assumes) == 1
    assert "test_kernels.py" in finding.assumes[0]
    assert "if each row is computed alone by" in str(finding)


def test_rows_that_are_added_up_are_neither():
    """What is not linear in what a kernel makes of all rows compares these."""
    assert found(lambda x, w: summed(x @ w)).kind is OverRows.COMPARED
    assert found(lambda x, w: lax.approx_max_k(x @ w, 2, reduction_dimension=0)[0]).kind is (
        OverRows.COMPARED
    )


def test_the_largest_of_all_rows_are_no_rows():
    in_order = lambda x, w: lax.approx_max_k(x @ w, len(x), reduction_dimension=0)[0]
    assert found(in_order).assumes


def test_a_kernel_of_the_parameters_must_be_the_same_one():
    def scaled(x: jax.Array, w: jax.Array) -> jax.Array:
        def kernel(w_ref: Any, out_ref: Any) -> None:
            out_ref[...] = w_ref[...] * len(x)

        return x @ pl.pallas_call(kernel, out_shape=like(w))(w)

    assert found(scaled).kind is OverRows.UNDECIDED


def test_what_compares_rows_does_so_whatever_is_assumed():
    """Numbers are not asked, which may hide it: the operation need not keep rows apart."""
    finding = found(lambda x, w: called(x @ w) - called(x @ w).mean(0))
    assert finding.kind is OverRows.COMPARED
    assert not finding.assumes
    assert found(lambda x, w: composite(lambda x: x - x.mean(0))(x @ w)).kind is OverRows.COMPARED


# JAX's own.

Q = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
SQUARE = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


@pytest.fixture
def with_cudnn(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *_: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *_: False)


def attention(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return jax.nn.dot_product_attention(x @ w, x, x, implementation="cudnn", **options)


ATTENTION: dict[str, Model] = {
    "causal": functools.partial(attention, is_causal=True),
    "under vmap": jax.vmap(attention, (0, None)),
    "a mask": lambda x, w: attention(x, w, mask=jnp.tril(jnp.ones((1, 1, 128, 128), bool))),
    "a bias": lambda x, w: attention(x, w, bias=jnp.ones((1, 2, 128, 128), x.dtype)),
    "a bias of each": lambda x, w: attention(x, w, bias=jnp.ones((len(x), 2, 128, 128), x.dtype)),
    "lengths": lambda x, w: attention(
        x,
        w,
        query_seq_lengths=jnp.full(len(x), 9, jnp.int32),
        key_value_seq_lengths=jnp.full(len(x), 9, jnp.int32),
    ),
}


@pytest.mark.usefixtures("with_cudnn")
@pytest.mark.parametrize("name", ATTENTION)
def test_cudnn_attention_is_known(name: str):
    for x in (Q, one_row(Q)):
        assert found(ATTENTION[name], x, SQUARE) == Finding(OverRows.MEAN)


def test_splash_attention_is_proven_forwards():
    masks = [splash_attention_mask.CausalMask((256, 256))] * 2
    run = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask(masks)
    )
    x = jax.ShapeDtypeStruct((4, 2, 256, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    for given in (x, one_row(x)):
        finding = found(lambda x, w: jax.vmap(run)(x @ w, x, x), given, w)
        assert finding.kind is OverRows.MEAN
        # Nothing says that the kernels of the gradient are linear in it.
        assert [each.split()[1] for each in finding.assumes] == [
            "splash_mha_dkv_no_residuals",
            "splash_mha_dq_no_residuals",
        ]
    stopped = lambda x, w: lax.stop_gradient(jax.vmap(run)(x @ w, x, x))
    assert found(stopped, x, w).kind is OverRows.MEAN


def of_norm(norm: Any) -> Model:
    return lambda x, w: norm(x @ w, w[0], w[0], interpret=True)


OTHERS: dict[str, Model] = {
    "flash attention": lambda x, w: flash_attention.flash_attention(
        *[(x @ w).swapaxes(1, 2)] * 3, block_sizes=None
    ),
    "attention of GPUs": lambda x, w: gpu_attention.mha(x @ w, x, x, None, interpret=True),
    "layer norm": of_norm(layer_norm.layer_norm),
    "RMS norm": of_norm(rms_norm.rms_norm),
    "softmax": lambda x, w: softmax.softmax(x @ w),
}


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_of_jax_are_means_if_their_gradients_are_linear(name: str):
    wide = name == "flash attention"
    x = jax.ShapeDtypeStruct((4, 128, 2, 128 if wide else 64), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((4, 128, 64), jnp.bfloat16) if "norm" in name else x
    w = jax.ShapeDtypeStruct((x.shape[-1], x.shape[-1]), jnp.bfloat16)
    for given in (x, one_row(x)):
        assert found(OTHERS[name], given, w).kind is OverRows.MEAN
