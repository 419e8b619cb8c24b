"""Losses with kernels: proven, or tried alone by numbers; and those that are wrong are refused."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning

import crossshard
from crossshard.errors import ArgumentError, ArgumentTypeError, LossError
from tests.quick import deep_but

ROWS, TIME, WIDTH = 48, 8, 16
RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(ROWS, TIME, WIDTH)))
BATCH = {"x": X, "y": np.float32(RNG.normal(size=(ROWS, TIME, WIDTH)))}
W = np.float32(RNG.normal(size=(WIDTH, WIDTH))) / 4
Block = Callable[[jax.Array], jax.Array]


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


# Kernels.


def softmax_of(x_ref: Any, out_ref: Any) -> None:
    x = x_ref[...].astype(jnp.float32)
    e = jnp.exp(x - x.max(-1, keepdims=True))
    out_ref[...] = (e / e.sum(-1, keepdims=True)).astype(out_ref.dtype)


def pulled_of(y_ref: Any, g_ref: Any, out_ref: Any) -> None:
    y, g = y_ref[...].astype(jnp.float32), g_ref[...].astype(jnp.float32)
    out_ref[...] = (y * (g - (y * g).sum(-1, keepdims=True))).astype(out_ref.dtype)


def in_blocks(kernel: Any, rows: int, *arrays: Any) -> jax.Array:
    """A kernel on blocks of so many rows; on all of them at once with 0."""
    x = arrays[0]
    spec = pl.BlockSpec((rows or len(x), *x.shape[1:]), lambda i: (i, *[0] * (x.ndim - 1)))
    return pl.pallas_call(
        kernel,
        out_shape=like(x),
        grid=(len(x) // (rows or len(x)),),
        in_specs=[spec] * len(arrays),
        out_specs=spec,
        interpret=True,
    )(*arrays)


def softmax(rows: int) -> Block:
    """A softmax over the last axis, forwards and backwards a kernel."""
    run = jax.custom_vjp(functools.partial(in_blocks, softmax_of, rows))
    run.defvjp(lambda x: (y := run(x), y), lambda y, g: (in_blocks(pulled_of, rows, y, g),))
    return run


def attention_of(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = plain_attention(x_ref[...])


def plain_attention(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (jax.nn.softmax(wide @ wide.T / jnp.sqrt(WIDTH)) @ wide).astype(x.dtype)


def with_saved(forward: Block, slope: Any) -> Block:
    """A function whose gradient is one of its input and the gradient."""
    run = jax.custom_vjp(forward)
    run.defvjp(lambda x: (forward(x), x), lambda x, g: (slope(x, g),))
    return run


def with_slope(forward: Block, backward: Block) -> Block:
    return with_saved(forward, lambda _, g: backward(g))


def with_tanh(forward: Block) -> Block:
    return with_saved(forward, lambda x, g: g * (1 - jnp.tanh(x) ** 2))


def called_back(method: str = "broadcast_all", of: Any = np.tanh) -> Block:
    def run(x: jax.Array) -> jax.Array:
        call = lambda x: np.asarray(of(np.float32(x)), x.dtype)
        return jax.pure_callback(call, like(x), x, vmap_method=method)

    return run


def partitioned(rule: Any) -> Block:
    run = custom_partitioning(jnp.tanh)
    run.def_partition(
        partition=lambda mesh, args, out: (mesh, jnp.tanh, out.sharding, [args[0].sharding]),
        infer_sharding_from_operands=lambda mesh, args, out: args[0].sharding,
        sharding_rule=rule,
    )
    return lambda x: run(x)


def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    """Each row by the expert that it chooses, sorted by these."""
    flat = x.reshape(-1, WIDTH)
    chosen = jnp.argmax(flat[:, :3], -1)
    order = jnp.argsort(chosen)
    each = lax.ragged_dot(
        flat[order], jnp.stack([w, 2 * w, -w]), jnp.bincount(chosen, length=3).astype(jnp.int32)
    )
    return jnp.zeros_like(each).at[order].set(each).reshape(x.shape)


def plain(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype)


# A kernel says that a block is a row, forwards; backwards there is none.
in_steps = with_saved(
    functools.partial(in_blocks, softmax_of, 1), lambda x, g: jax.vjp(plain, x)[1](g)[0]
)
attention = with_saved(
    lambda x: pl.pallas_call(attention_of, out_shape=like(x), interpret=True)(x),
    lambda x, g: jax.vjp(plain_attention, x)[1](g)[0],
)
Model = Callable[[jax.Array, jax.Array], jax.Array]


def behind(block: Block) -> Model:
    return lambda x, w: block(x @ w)


# Whether they are proven, and what stands for them without a kernel.
MODELS: dict[str, tuple[bool, Model, Model]] = {
    "softmax, a row a block": (True, behind(in_steps), behind(plain)),
    "softmax in blocks of rows": (False, behind(softmax(2)), behind(plain)),
    "attention under vmap": (True, behind(jax.vmap(attention)), behind(jax.vmap(plain_attention))),
    "called back under vmap": (
        False,
        behind(with_tanh(jax.vmap(called_back("expand_dims")))),
        behind(jnp.tanh),
    ),
    "a rule": (True, behind(with_tanh(partitioned("i j k -> i j k"))), behind(jnp.tanh)),
    "experts": (False, crossshard.rowwise(experts, in_axes=(0, None)), experts),
    "layers": (
        False,
        lambda x, w: lax.scan(
            jax.checkpoint(lambda x, w: (softmax(2)(x @ w), None)), x, jnp.stack([w, w])
        )[0],
        lambda x, w: plain(plain(x @ w) @ w),
    ),
}


def loss_of(model: Model, dtype: Any = jnp.bfloat16) -> Any:
    def loss(w: Any, batch: Any) -> Any:
        out = model(batch["x"].astype(dtype), w.astype(dtype)).astype(jnp.float32)
        return 100 * ((out - batch["y"][..., : out.shape[-1]]) ** 2).mean()

    return loss


def step_of(model: Model, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    loss = loss_of(model, dtype)
    return crossshard.make_train_step(loss, optax.sgd(0.5), num_shards=3, **options)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_proven_needs_no_numbers(name: str):
    is_proven, model, _ = MODELS[name]
    step = step_of(model)
    lower = lambda: step.trace(step.abstract_init(W), BATCH)
    if is_proven:
        lower()
        return
    with pytest.raises(LossError, match=r"each row is computed alone.*The first call of the step"):
        lower()


@pytest.mark.parametrize("name", deep_but(["called back under vmap"], MODELS))
def test_a_kernel_runs_and_follows_one_device(name: str):
    is_proven, model, same = MODELS[name]
    step = step_of(model)
    state, metrics = step(step.init(W), BATCH)
    assert ("each row is computed alone" not in step.describe()) == is_proven
    want, slope = jax.jit(jax.value_and_grad(loss_of(same)))(W, BATCH)
    np.testing.assert_allclose(metrics["loss"], want, rtol=3e-2)
    moved = np.asarray(W - step.model(state)) / 0.5
    assert np.linalg.norm(moved - slope) <= 3e-2 * np.linalg.norm(slope)


@pytest.mark.parametrize("name", [name for name, (is_proven, *_) in MODELS.items() if is_proven])
def test_a_kernel_runs_on_one_row(name: str):
    _, model, same = MODELS[name]
    step, rows = step_of(model), jax.tree.map(lambda x: x[:3], BATCH)
    state, _ = step(step.init(W), rows)
    slope = jax.jit(jax.grad(loss_of(same)))(W, rows)
    moved = np.asarray(W - step.model(state)) / 0.5
    assert np.linalg.norm(moved - slope) <= 1e-2 * np.linalg.norm(slope)


# Faults: an error of a hundredth is found in bfloat16.

NOT_SO = "And by numbers it is not so"


def refused(model: Model, said: str, batch: Any = BATCH, **options: Any) -> None:
    """The first step is refused in these words, and its state stays valid."""
    step = step_of(model, **options)
    state = step.init(W)
    with pytest.raises(LossError, match=said):
        step(state, batch)
    np.testing.assert_array_equal(step.model(state), W)


def centred(x: Any) -> Any:
    return x - 0.01 * x.mean(0)


# Each, and whether it is wrong backwards.
FAULTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    # So little shows only where the other rows are changed.
    "the mean of its rows": (lambda x: x - 0.0015 * x.mean(0), False),
    "the largest of its rows": (lambda x: x + 0.01 * np.abs(x).max(0), True),
    "both neighbours": (lambda x: x + 0.005 * (np.roll(x, 1, 0) + np.roll(x, -1, 0)), True),
    "the number of its rows": (lambda x: x * (1 + 0.01 * np.log2(len(x))), False),
    "the position of a row": (
        lambda x: x * (1 + 0.01 * (np.arange(len(x)) % 2))[:, None, None],
        True,
    ),
    "the first row": (lambda x: x - 0.01 * x[:1], False),
}


@pytest.mark.parametrize("name", deep_but([*FAULTS][:5], FAULTS))
def test_an_operation_that_looks_at_others_is_refused(name: str):
    of, backwards = FAULTS[name]
    wrong, same = called_back(of=of), lambda x: x
    run = with_slope(same, wrong) if backwards else with_slope(wrong, same)
    refused(behind(run), rf"by pure_callback \(.*{NOT_SO}: of th")


def centred_of(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = centred(x_ref[...].astype(jnp.float32)).astype(out_ref.dtype)


@pytest.mark.deep
@pytest.mark.parametrize(("rows", "backwards"), deep_but([(2, True)], [(2, True), (0, False)]))
def test_a_kernel_whose_blocks_mix_rows_is_refused(rows: int, backwards: bool):
    wrong, same = functools.partial(in_blocks, centred_of, rows), lambda x: x
    run = with_slope(same, wrong) if backwards else with_slope(wrong, same)
    refused(behind(run), NOT_SO)


# A product, whose gradient of its weight is that of centred rows.
of_centred_rows = jax.custom_vjp(jnp.matmul)


def _pull(xw: Any, g: jax.Array) -> Any:
    x, w = xw
    return g @ w.T, jnp.einsum("nti,ntj->ij", x, centred(g)).astype(w.dtype)


of_centred_rows.defvjp(lambda x, w: (x @ w, (x, w)), _pull)


# What is wrong in it, and what is said.
WRONG: dict[str, tuple[Model, str]] = {
    "a gradient that is not linear": (
        behind(with_slope(lambda x: x, called_back(of=lambda g: g + 0.01 * np.clip(g, -0.5, 0.5)))),
        "of the same rows scaled",
    ),
    "a word that is not kept": (
        behind(crossshard.rowwise(centred)),
        rf"by rowwise\(centred\).*{NOT_SO}",
    ),
    "a word that is not kept backwards": (
        behind(crossshard.rowwise(with_slope(lambda x: x, centred))),
        "the gradient of rowwise",
    ),
    "a sum over rows for a parameter": (
        crossshard.rowwise(of_centred_rows, in_axes=(0, None)),
        "the gradient of rowwise",
    ),
}


@pytest.mark.parametrize(
    "name", deep_but(lambda name: "backwards" not in name and "word" not in name, WRONG)
)
def test_what_rows_have_in_common_is_found(name: str):
    refused(*WRONG[name])


TURNED = {name: x.swapaxes(0, 1) for name, x in BATCH.items()}


@pytest.mark.deep
def test_weights_that_start_at_zero_hide_nothing():
    step = step_of(behind(with_tanh(called_back(of=centred))))
    with pytest.raises(LossError, match=f"{NOT_SO}: of the same rows"):
        step(step.init(np.zeros_like(W)), BATCH)


@pytest.mark.deep
def test_microbatches_along_another_axis():
    """Of a loss that takes as many steps in time as there are."""
    table = jnp.arange(1.0, TIME + 1)[:, None, None]
    model = behind(with_tanh(called_back()))
    loss = lambda x, w: model(x, w) * table
    step = step_of(loss, jnp.float32, batch_axis=1, accumulate_steps=2)
    step(step.init(W), {name: x[:, :12] for name, x in TURNED.items()})


def test_an_operation_is_tried_on_rows_along_another_axis():
    """Of a loss that takes as many steps in time as there are."""
    table = jnp.arange(1.0, TIME + 1)[:, None, None]
    wrong = called_back(of=lambda x: x - 0.01 * x.mean(1, keepdims=True))
    model = behind(with_slope(wrong, lambda x: x))
    batch = {name: x[:, :12] for name, x in TURNED.items()}
    refused(lambda x, w: model(x, w) * table, f"{NOT_SO}: of the same rows", batch, batch_axis=1)


# rowwise.


def test_rowwise_is_transparent():
    run = crossshard.rowwise(experts, in_axes=(0, None))
    assert (run.__name__, run.__doc__) == (experts.__name__, experts.__doc__)
    loss = lambda f: lambda w, x: (f(x, w) ** 2).sum()
    scan = lambda f: lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0]
    for way in (lambda f: f, lambda f: scan(jax.checkpoint(jax.jit(f)))):
        got, want = (jax.jit(jax.grad(loss(way(f))))(W, X) for f in (run, experts))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    transposed = crossshard.rowwise(lambda x: x.T, out_axes=1)
    np.testing.assert_array_equal(jax.vmap(transposed)(X), X.swapaxes(1, 2))


def test_rowwise_costs_nothing_in_the_compiled_program():
    found = []
    for model in (behind(plain), crossshard.rowwise(behind(plain), in_axes=(0, None))):
        compiled = (
            jax.jit(jax.value_and_grad(loss_of(model, jnp.float32))).lower(W, BATCH).compile()
        )
        found.append([compiled.cost_analysis()["flops"], compiled.as_text().count(" fusion(")])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: crossshard.rowwise(3), "rowwise takes a function; got int"),
        (lambda: crossshard.rowwise(jnp.matmul)(X, W), r"as many rows.*size 48.*size 16"),
        (lambda: crossshard.rowwise(lambda x: x.sum(0))(X), r"as many rows.*size 48.*size 8"),
        (lambda: crossshard.rowwise(experts, in_axes=(0,))(X, W), r"in_axes=\(0,\).*length 1"),
        (lambda: crossshard.rowwise(lambda x: x, in_axes=5)(X), r"in_axes=5 .*axis 5.*rank"),
        (
            lambda: crossshard.rowwise(lambda x: x.sum((1, 2)), out_axes=1)(X),
            r"out_axes=1.*axis 1.*rank",
        ),
    ],
)
def test_rowwise_refuses_in_words(call: Any, said: str):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=said):
        call()


# JAX's own kernels, in interpret mode.


@pytest.mark.deep
@pytest.mark.parametrize("name", ["layer norm", "RMS norm", "attention"])
def test_kernels_of_jax_run(name: str):
    from jax.experimental.pallas.ops.gpu import attention as gpu
    from jax.experimental.pallas.ops.gpu import layer_norm, rms_norm

    def model(x: jax.Array, w: jax.Array) -> jax.Array:
        x = x @ w
        if name == "layer norm":
            return layer_norm.layer_norm(x, 1 + w[0], w[1], interpret=True)
        if name == "RMS norm":
            return rms_norm.rms_norm(x, 1 + w[0], w[1], interpret=True)
        heads = x.reshape(*x.shape[:2], 1, WIDTH)
        return gpu.mha(heads, heads, heads, None, interpret=True).reshape(x.shape)

    step = step_of(model)
    state, _ = step(step.init(W), BATCH)
    assert "each row is computed alone by pallas_call" in step.describe()
    slope = jax.jit(jax.grad(loss_of(model)))(W, BATCH)
    moved = np.asarray(W - step.model(state)) / 0.5
    assert np.linalg.norm(moved - slope) <= 3e-2 * np.linalg.norm(slope)
