"""Steps whose parameters rest in parts: a bound in the bytes that are sent, and faults."""

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
def test_the_bound_is_that_of_the_bytes_that_are_sent(name: str):
    dtype, again, options, gathered, reduced = CASES[name]
    step, *args = scanned(dtype, again, **options)
    report = assert_communication(step, *args)
    (found,) = report.parameters
    assert found.bytes == 4 * (OF_LAYERS + FIRST)
    sent = tuple(None if each == found.bytes else each for each in (gathered, reduced))
    assert (found.gathered, found.reduced) == sent
    assert report.lower_bound == (SHARDS - 1) / SHARDS * (gathered + reduced)
    assert report.ratio == pytest.approx(1, abs=1e-3)
    shown = "2(N−1)/N · P" if gathered + reduced == 2 * found.bytes else "(N−1)/N · (G + R)"
    assert f"{SHARDS} shards need {shown} = " in str(report)


def test_parameters_that_are_named_keep_the_bound_in_parts():
    step, state, batch = scanned(jnp.float32, again=True)
    lowered = step.lower(state, batch)
    found, named = crossshard.inspect(lowered), crossshard.inspect(lowered, parameters=state.params)
    assert found.parameters == named.parameters


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
    report = assert_communication(*by_hand(scatter))
    assert (report.ratio, report.parameter_bytes) == (1.0, 4 * 64 * 256)


FAULTS = {
    "an all-reduce in the place of the gather's transpose": lambda g: own(lax.psum(g, "s")),
    "a sum of what is summed": lambda g: scatter(lax.psum(g, "s") / SHARDS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_gradient_that_is_sent_too_often_is_caught(name: str):
    with pytest.raises(CommunicationError, match="times the lower bound"):
        assert_communication(*by_hand(FAULTS[name]))


def test_a_gather_too_many_is_caught():
    with pytest.raises(CommunicationError, match=r"1\.333 times the lower bound"):
        assert_communication(*by_hand(scatter, again=True))


def test_a_gradient_without_its_sum_is_caught():
    def step(w: Any, v: Any, x: Any) -> Any:
        both = gather(w), gather(v)
        loss = lambda both: jnp.mean(jnp.tanh(x @ both[0]) @ both[1].T)
        first, second = jax.grad(loss)(both)
        return w - scatter(first), v - own(second)

    step = over(step, (SPLIT, SPLIT, SPLIT), (SPLIT, SPLIT))
    with pytest.raises(CommunicationError, match=r"1\.500 times the lower bound"):
        assert_communication(
            step, placed(W, SPLIT, LINE), placed(W, SPLIT, LINE), placed(X, SPLIT, LINE)
        )
