"""Steps with sharded parameters: what is gathered and summed, and faults."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import crossshard
from crossshard.errors import CommunicationError
from crossshard.testing import assert_communication
from tests.tools.steps import LINE, SPLIT, gather, over, placed, scatter

SHARDS, LAYERS, WIDTH, HIDDEN = 8, 3, 128, 1024
# Two matrices of each layer, and one before them.
OF_LAYERS, FIRST = LAYERS * 2 * WIDTH * HIDDEN, 32 * WIDTH * 16


def _type(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scanned(dtype: Any, again: bool, **options: Any) -> tuple[Any, Any, Any]:
    """A step with scanned layers in parts, and what to lower it with."""

    def block(x: Any, layer: Any) -> Any:
        return jnp.tanh(x @ layer["up"].astype(dtype)) @ layer["down"].astype(dtype), None

    block = jax.checkpoint(block) if again else block

    def loss_fn(params: Any, x: Any) -> Any:
        x = (x.astype(dtype) @ params["first"].astype(dtype))[:, :WIDTH]
        x, _ = lax.scan(block, x, params["layers"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    layers = {"up": _type(LAYERS, WIDTH, HIDDEN), "down": _type(LAYERS, HIDDEN, WIDTH)}
    params = {"first": _type(32, WIDTH * 16), "layers": layers}
    step = crossshard.make_train_step(
        loss_fn, optax.adam(1e-3), num_shards=SHARDS, params="sharded", **options
    )
    return step, step.abstract_init(params), _type(16, 32)


# In float32: the bytes of what is gathered and reduced.
CASES = {
    "once": (jnp.float32, False, {}, 4 * (OF_LAYERS + FIRST), 4 * (OF_LAYERS + FIRST)),
    "layers twice": (jnp.float32, True, {}, 4 * (2 * OF_LAYERS + FIRST), 4 * (OF_LAYERS + FIRST)),
    "in 16 bits": (jnp.bfloat16, True, {}, 2 * (2 * OF_LAYERS + FIRST), 4 * (OF_LAYERS + FIRST)),
    "all in 16 bits": (
        *(jnp.bfloat16, False, {"reduce_dtype": jnp.bfloat16}),
        *(2 * (OF_LAYERS + FIRST), 2 * (OF_LAYERS + FIRST)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_gathered_twice_or_in_fewer_bits_shows_in_the_ratio(name: str):
    dtype, again, options, gathered, reduced = CASES[name]
    step, *args = scanned(dtype, again, **options)
    ratio = (gathered + reduced) / (2 * 4 * (OF_LAYERS + FIRST))
    report = assert_communication(step, *args, max_bytes_ratio=ratio, in_loop=ratio > 1)
    assert report.parameters == {"f32": 4 * (OF_LAYERS + FIRST)}
    assert report.ratio == pytest.approx(ratio, abs=1e-3)
    assert crossshard.inspect(step.lower(*args), args[0].params) == report
    if ratio > 1:
        with pytest.raises(CommunicationError, match="within a loop"):
            assert_communication(step, *args, max_bytes_ratio=ratio)


# By hand: a gathered parameter, whose gradient a shard sums in several ways.
W, X = _type(64, 256), _type(16, 64)


def by_hand(reduced: Any, again: bool = False) -> tuple[Any, Any, Any]:
    def step(w: Any, x: Any) -> Any:
        whole = gather(w)
        gradient = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(whole)
        if again:
            # Twice is what a checkpoint needs; three times is waste. Each differs, so XLA keeps it.
            for copy in (gather(w[::-1]), gather(w.T, along=1).T):
                gradient += jax.grad(lambda w: jnp.mean(jnp.sin(x @ w) ** 2))(copy)
        return w - 0.1 * reduced(gradient)

    specs = (SPLIT, SPLIT)
    return over(step, specs, SPLIT), placed(W, SPLIT, LINE), placed(X, SPLIT, LINE)


def own(total: Any) -> Any:
    return lax.dynamic_slice_in_dim(total, lax.axis_index("s") * 8, 8)


def test_a_hand_written_one_passes():
    report = assert_communication(*by_hand(scatter), parameters=W)
    assert (report.ratio, report.parameter_bytes) == (1.0, 4 * 64 * 256)


FAULTS = {
    "an all-reduce in the place of the gather's transpose": lambda g: own(lax.psum(g, "s")),
    "a sum of what is summed": lambda g: scatter(lax.psum(g, "s") / SHARDS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_gradient_that_is_sent_too_often_is_caught(name: str):
    with pytest.raises(CommunicationError, match="times the lower bound"):
        assert_communication(*by_hand(FAULTS[name]), parameters=W)


def test_a_gather_too_many_is_caught():
    with pytest.raises(CommunicationError, match=r"2\.000 times the lower bound"):
        assert_communication(*by_hand(scatter, again=True), max_bytes_ratio=1.5, parameters=W)
