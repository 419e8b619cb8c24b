"""assert_communication: what it catches, what its message shows, what it lets pass."""

import inspect as python
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from crossshard import CrossshardError, inspect, make_train_step
from crossshard.errors import ArgumentError, ArgumentTypeError, CommunicationError
from crossshard.testing import assert_communication
from tests.tools import steps
from tests.tools.steps import SPLIT, WHOLE, each_rule, mean

SGD = optax.sgd(0.1)
W = jnp.ones((16, 32))
X = jnp.ones((64, 16))


def grad(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def over(step: Any) -> Any:
    return steps.over(step, (WHOLE, SPLIT), WHOLE)


@over
def once(w: Any, x: Any) -> Any:
    return w - lax.pmean(grad(w, x), "s")


def twice_on_a_shard(w: Any, x: Any) -> Any:
    g = lax.pmean(grad(w, x), "s")
    g = lax.pmean(jnp.tanh(g), "s")  # the planted one
    return w - g


twice = over(twice_on_a_shard)


@over
def in_a_loop(w: Any, x: Any) -> Any:
    def one(total: Any, part: Any) -> Any:
        return total + lax.pmean(grad(w, part), "s"), None

    return w - lax.scan(one, jnp.zeros_like(w), x.reshape(4, 2, 16))[0]


@over
def after_a_loop(w: Any, x: Any) -> Any:
    def one(total: Any, part: Any) -> Any:
        return total + grad(w, part), mean(jnp.mean(part))

    total, losses = lax.scan(one, jnp.zeros_like(w), x.reshape(4, 2, 16))
    return w - mean(total) + losses.sum()


# What they train.
NAMED = {"parameters": W}


def test_the_least_passes_and_is_reported():
    assert assert_communication(jax.jit(once), W, X, **NAMED).ratio == 1.0


def test_a_step_in_every_stage():
    traced = jax.jit(twice).trace(W, X)
    lowered = traced.lower()
    function = lambda w, x: twice(w, x)
    for step, *args in ([function, W, X], [twice, W, X], [traced], [lowered], [lowered.compile()]):
        with pytest.raises(CommunicationError):
            assert_communication(step, *args, **NAMED)
    assert assert_communication(lambda *, w, x: once(w, x), w=W, x=X, **NAMED).ratio == 1.0


def test_a_planted_second_reduction_is_caught_and_shown():
    with pytest.raises(AssertionError) as caught:
        assert_communication(twice, W, X, **NAMED)
    assert isinstance(caught.value, CommunicationError)
    assert isinstance(caught.value, CrossshardError)
    message = str(caught.value)
    lines, start = python.getsourcelines(twice_on_a_shard)
    planted = start + next(i for i, line in enumerate(lines) if "planted" in line)
    assert "sends 2.000 times the lower bound, but only 1 is allowed" in message
    assert f"{__file__}:{planted}" in message
    assert f"{__file__}:{planted - 1}" in message
    assert message.count("all-reduce") == 2
    assert assert_communication(twice, W, X, max_bytes_ratio=2, **NAMED).ratio == 2.0


def test_a_reduction_inside_a_loop_is_caught_and_shown():
    with pytest.raises(CommunicationError) as caught:
        assert_communication(in_a_loop, W, X, max_bytes_ratio=4, **NAMED)
    assert "within a loop" in str(caught.value)
    assert "4 times" in str(caught.value)
    assert __file__ in str(caught.value)
    report = assert_communication(in_a_loop, W, X, max_bytes_ratio=4, in_loop=True, **NAMED)
    assert report.ratio == 4.0


def test_scalars_are_free_in_a_loop_too():
    report = assert_communication(after_a_loop, W, X, forbid=["all-gather"], **NAMED)
    assert any(each.in_loop for each in report.collectives)


def test_a_forbidden_kind_is_caught_and_shown():
    with pytest.raises(CommunicationError, match="forbidden collectives, all-reduce") as caught:
        assert_communication(once, W, X, forbid=("all-gather", "all-reduce"), **NAMED)
    assert __file__ in str(caught.value)
    assert_communication(once, W, X, forbid="all-gather", **NAMED)


def test_all_faults_are_told_at_once():
    with pytest.raises(CommunicationError) as caught:
        assert_communication(in_a_loop, W, X, forbid=["all-reduce"], **NAMED)
    for part in ("forbidden", "within a loop", "4.000 times the lower bound"):
        assert part in str(caught.value)


def test_an_unknown_bound_does_not_pass_in_silence():
    with pytest.raises(CommunicationError, match=r"Pass parameters="):
        assert_communication(once, W, X)
    assert assert_communication(once, W, X, max_bytes_ratio=float("inf")).ratio is None


def test_a_loop_of_unknown_length_does_not_pass_in_silence():
    @over
    def dynamic(w: Any, x: Any) -> Any:
        rounds = jnp.int32(x[0, 0])
        return lax.fori_loop(0, rounds, lambda _, w: w - mean(grad(w, x)), w)

    with pytest.raises(CommunicationError, match="in a loop of unknown length") as caught:
        assert_communication(dynamic, W, X, in_loop=True, **NAMED)
    assert "? times" in str(caught.value)
    report = assert_communication(dynamic, W, X, in_loop=True, max_bytes_ratio=float("inf"))
    assert "at least" in report.table()


@pytest.mark.parametrize("shape", [(4, 8), (10, 3)])
@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_loss_in_a_small_bucket_is_free(shape: tuple[int, int], weight_update: Any):
    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    params = {"w": jnp.ones(shape), "b": jnp.zeros(shape[1])}
    step = make_train_step(loss_fn, SGD, num_shards=8, weight_update=weight_update)
    report = assert_communication(step, step.init(params), jnp.ones((16, shape[0])))
    assert report.parameter_bytes == 4 * (shape[0] + 1) * shape[1]


NARROW = {"w": jnp.ones((64, 256), jnp.bfloat16), "v": jnp.ones((256, 4), jnp.bfloat16)}
NARROW_BYTES = 2 * (64 * 256 + 256 * 4)


def narrow_loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]).astype(jnp.float32) ** 2)


@each_rule
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_gradients_of_16_bits_are_summed_in_32(weight_update: Any, dtype: Any, rule: Any):
    params = jax.tree.map(lambda w: w.astype(dtype), NARROW)
    step = make_train_step(narrow_loss, rule, num_shards=8, weight_update=weight_update)
    x = jnp.ones((32, 64), dtype)
    report = assert_communication(step, step.abstract_init(params), x)
    assert report.parameter_bytes == NARROW_BYTES
    # They are gathered in 16 bits.
    assert report.ratio == pytest.approx(1.5 if weight_update == "sharded" else 2, abs=0.01)
    with pytest.raises(
        CommunicationError, match=r"sends 1\.0\d\d times .* but only 0\.9 is allowed"
    ):
        assert_communication(step, step.abstract_init(params), x, max_bytes_ratio=0.9)


def test_some_parameters_of_16_bits_beside_others_of_32():
    params = NARROW | {"scale": jnp.ones((64, 64))}

    def loss_fn(params: Any, x: Any) -> Any:
        scaled = jnp.tanh(x.astype(jnp.float32) @ params["scale"]).astype(jnp.bfloat16)
        return narrow_loss(params, scaled)

    step = make_train_step(loss_fn, SGD, num_shards=8, weight_update="replicated")
    report = assert_communication(step, step.abstract_init(params), jnp.ones((32, 64)))
    assert report.parameter_bytes == NARROW_BYTES + 4 * 64 * 64
    assert report.parameter_dtypes == ("f32", "bf16")


def narrow_step(times: int) -> Any:
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(narrow_loss)(params, x)
        for _ in range(times):
            grads = jax.tree.map(lambda g: jnp.tanh(mean(g)), grads)
        return jax.tree.map(jnp.subtract, params, grads)

    return over(step)


def test_16_bits_that_xla_widens_are_free_once():
    x = jnp.ones((32, 64), jnp.bfloat16)
    assert assert_communication(narrow_step(1), NARROW, x, parameters=NARROW).ratio == 2.0
    with pytest.raises(CommunicationError, match=r"sends 3\.000 times"):
        assert_communication(narrow_step(2), NARROW, x, parameters=NARROW)


def test_a_collective_says_whether_xla_sends_it_in_more_bits():
    x = jnp.ones((32, 64), jnp.bfloat16)

    @over
    def by_itself(params: Any, x: Any) -> Any:
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(narrow_loss)(params, x))
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), params, mean(wide))

    # XLA for CPUs widens the former.
    for step, by_xla in ((narrow_step(1), True), (by_itself, False)):
        report = inspect(jax.jit(step).lower(NARROW, x), NARROW)
        assert {each.widened for each in report.collectives} == {by_xla}


NO_RATIOS = [-1, float("nan"), "1", None, True]
NOTHING = [0, -1, {}, jnp.ones(1)]


@pytest.mark.parametrize(
    ("error", "said", "options"),
    [
        (ArgumentError, r"all-reduce, reduce-scatter.*got 'allreduce'", {"forbid": ["allreduce"]}),
        *((ArgumentError, "max_bytes_ratio", {"max_bytes_ratio": ratio}) for ratio in NO_RATIOS),
        *((ArgumentError, "must be arrays, not only", {"parameters": each}) for each in NOTHING),
        (ArgumentError, "axis_name='rows' .* have their shardings", {"axis_name": "rows"}),
        (ArgumentTypeError, "forbid must be kinds", {"forbid": 5}),
        (ArgumentTypeError, "forbid must be kinds", {"forbid": None}),
        (ArgumentTypeError, "in_loop must be True or False; got 'no'", {"in_loop": "no"}),
    ],
)
def test_options_that_are_refused(error: Any, said: str, options: Any):
    with pytest.raises(error, match=said):
        assert_communication(once, W, X, **options)


def test_numbers_of_numpy_are_numbers():
    bytes_ = np.int64(W.nbytes)
    assert_communication(once, W, X, max_bytes_ratio=np.float32(1), parameters=bytes_)


def test_what_is_not_a_step_is_refused():
    # A string has a method lower, too.
    lowered = jax.jit(once).lower(W, X)
    for said, *args in [("leave out the 2", lowered, W, X), ("got int", 3), ("got str", "step", W)]:
        with pytest.raises(ArgumentTypeError, match=said):
            assert_communication(*args)
