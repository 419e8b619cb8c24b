"""assert_communication: what it catches, what its message shows, what it lets pass."""

import inspect as python
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from crossshard import (
    ArgumentError,
    ArgumentTypeError,
    CrossshardError,
    inspect,
    make_train_step,
)
from crossshard.errors import CommunicationError
from crossshard.testing import assert_communication

MESH = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))
W = jnp.ones((16, 32))
X = jnp.ones((64, 16))


def grad(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def over(step: Any) -> Any:
    return jax.shard_map(
        step, mesh=MESH, in_specs=(P(), P("shards")), out_specs=P(), check_vma=False
    )


@over
def once(w: Any, x: Any) -> Any:
    return w - lax.pmean(grad(w, x), "shards")


def twice_on_a_shard(w: Any, x: Any) -> Any:
    g = lax.pmean(grad(w, x), "shards")
    g = lax.pmean(jnp.tanh(g), "shards")  # the planted one
    return w - g


twice = over(twice_on_a_shard)


@over
def in_a_loop(w: Any, x: Any) -> Any:
    def one(total: Any, part: Any) -> Any:
        return total + lax.pmean(grad(w, part), "shards"), None

    return w - lax.scan(one, jnp.zeros_like(w), x.reshape(4, 2, 16))[0]


@over
def after_a_loop(w: Any, x: Any) -> Any:
    def one(total: Any, part: Any) -> Any:
        return total + grad(w, part), lax.pmean(jnp.mean(part), "shards")

    total, losses = lax.scan(one, jnp.zeros_like(w), x.reshape(4, 2, 16))
    return w - lax.pmean(total, "shards") + losses.sum()


def test_the_least_passes_and_is_reported():
    assert assert_communication(jax.jit(once), W, X).ratio == 1.0


@pytest.mark.parametrize("stage", ["function", "jitted", "traced", "lowered", "compiled"])
def test_a_step_in_every_stage(stage: str):
    jitted = jax.jit(twice)
    traced = jitted.trace(W, X)
    lowered = traced.lower()
    step, args = {
        "function": (twice, (W, X)),
        "jitted": (jitted, (W, X)),
        "traced": (traced, ()),
        "lowered": (lowered, ()),
        "compiled": (lowered.compile(), ()),
    }[stage]
    with pytest.raises(CommunicationError):
        assert_communication(step, *args)


def test_keyword_arguments_reach_the_step():
    assert assert_communication(lambda *, w, x: once(w, x), w=W, x=X).ratio == 1.0


def test_a_planted_second_reduction_is_caught_and_shown():
    with pytest.raises(CommunicationError) as caught:
        assert_communication(twice, W, X)
    message = str(caught.value)
    lines, start = python.getsourcelines(twice_on_a_shard)
    planted = start + next(i for i, line in enumerate(lines) if "planted" in line)
    assert "sends 2.000 times the lower bound, but only 1 is allowed" in message
    assert f"{__file__}:{planted}" in message
    assert f"{__file__}:{planted - 1}" in message
    assert message.count("all-reduce") == 2
    assert assert_communication(twice, W, X, max_bytes_ratio=2).ratio == 2.0


def test_a_reduction_inside_a_loop_is_caught_and_shown():
    with pytest.raises(CommunicationError) as caught:
        assert_communication(in_a_loop, W, X, max_bytes_ratio=4)
    assert "within a loop" in str(caught.value)
    assert "4 times" in str(caught.value)
    assert __file__ in str(caught.value)
    assert assert_communication(in_a_loop, W, X, max_bytes_ratio=4, in_loop=True).ratio == 4.0


def test_scalars_are_free_in_a_loop_too():
    report = assert_communication(after_a_loop, W, X, forbid=["all-gather"])
    assert any(each.in_loop for each in report.collectives)


def test_a_forbidden_kind_is_caught_and_shown():
    with pytest.raises(CommunicationError, match="forbidden collectives, all-reduce") as caught:
        assert_communication(once, W, X, forbid=("all-gather", "all-reduce"))
    assert __file__ in str(caught.value)
    assert_communication(once, W, X, forbid="all-gather")


def test_all_faults_are_told_at_once():
    with pytest.raises(CommunicationError) as caught:
        assert_communication(in_a_loop, W, X, forbid=["all-reduce"])
    for part in ("forbidden", "within a loop", "4.000 times the lower bound"):
        assert part in str(caught.value)


def test_an_unknown_bound_does_not_pass_in_silence():
    @over
    def given(w: Any, g: Any) -> Any:
        return w - lax.pmean(g[0], "shards")

    gradients = jnp.ones((8, 16, 32))
    with pytest.raises(CommunicationError, match=r"Pass parameters="):
        assert_communication(given, W, gradients)
    assert assert_communication(given, W, gradients, parameters=W).ratio == 1.0
    assert_communication(given, W, gradients, max_bytes_ratio=float("inf"))


def test_a_loop_of_unknown_length_does_not_pass_in_silence():
    @over
    def dynamic(w: Any, x: Any) -> Any:
        rounds = jnp.int32(x[0, 0])
        return lax.fori_loop(0, rounds, lambda _, w: w - lax.pmean(grad(w, x), "shards"), w)

    with pytest.raises(CommunicationError, match="in a loop of unknown length") as caught:
        assert_communication(dynamic, W, X, in_loop=True)
    assert "? times" in str(caught.value)
    report = assert_communication(dynamic, W, X, in_loop=True, max_bytes_ratio=float("inf"))
    assert "at least" in report.table()


@pytest.mark.parametrize("shape", [(4, 8), (10, 3)])
@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_a_loss_in_a_small_bucket_is_free(shape: tuple[int, int], weight_update: Any):
    def loss_fn(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

    params = {"w": jnp.ones(shape), "b": jnp.zeros(shape[1])}
    step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=8, weight_update=weight_update)
    report = assert_communication(step, step.init(params), jnp.ones((16, shape[0])))
    assert report.parameter_bytes == 4 * (shape[0] + 1) * shape[1]


NARROW = {"w": jnp.ones((64, 256), jnp.bfloat16), "v": jnp.ones((256, 4), jnp.bfloat16)}
NARROW_BYTES = 2 * (64 * 256 + 256 * 4)


def narrow_loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(optax.sgd(0.1), id="sgd", marks=pytest.mark.deep),
        pytest.param(optax.adam(1e-3), id="adam"),
    ],
)
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

    step = make_train_step(loss_fn, optax.sgd(0.1), num_shards=8, weight_update="replicated")
    report = assert_communication(step, step.abstract_init(params), jnp.ones((32, 64)))
    assert report.parameter_bytes == NARROW_BYTES + 4 * 64 * 64
    assert report.parameter_dtypes == ("bf16", "f32")


def narrow_step(times: int) -> Any:
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(narrow_loss)(params, x)
        for _ in range(times):
            grads = jax.tree.map(lambda g: jnp.tanh(lax.pmean(g, "shards")), grads)
        return jax.tree.map(jnp.subtract, params, grads)

    return over(step)


def test_16_bits_that_xla_widens_are_free_once():
    x = jnp.ones((32, 64), jnp.bfloat16)
    assert assert_communication(narrow_step(1), NARROW, x).ratio == 2.0
    with pytest.raises(CommunicationError, match=r"sends 3\.000 times"):
        assert_communication(narrow_step(2), NARROW, x)


def test_a_report_says_who_has_widened():
    x = jnp.ones((32, 64), jnp.bfloat16)
    said = "sent as f32, but the parameters are bf16; widened: all-reduce by"
    table = inspect(jax.jit(narrow_step(1)).lower(NARROW, x)).table()
    assert f"{said} XLA, as it does for CPUs" in table

    @over
    def by_itself(params: Any, x: Any) -> Any:
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(narrow_loss)(params, x))
        mean = lax.pmean(wide, "shards")
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), params, mean)

    table = inspect(jax.jit(by_itself).lower(NARROW, x)).table()
    assert f"{said} the step itself" in table

    step = make_train_step(narrow_loss, optax.sgd(0.1), num_shards=8, weight_update="replicated")
    table = inspect(step.lower(step.abstract_init(NARROW), x)).table()
    assert f"{said} the step itself" in table


def test_a_failure_is_an_assertion_and_one_of_ours():
    with pytest.raises(AssertionError) as caught:
        assert_communication(twice, W, X)
    assert isinstance(caught.value, CrossshardError)


def test_an_unknown_kind_is_refused_with_the_list():
    with pytest.raises(ArgumentError, match=r"all-reduce, reduce-scatter.*got 'allreduce'"):
        assert_communication(once, W, X, forbid=["allreduce"])


@pytest.mark.parametrize("ratio", [-1, float("nan"), "1", None, True])
def test_a_ratio_that_is_not_a_number_from_0_on_is_refused(ratio: Any):
    with pytest.raises(ArgumentError, match="max_bytes_ratio"):
        assert_communication(once, W, X, max_bytes_ratio=ratio)


def test_numbers_of_numpy_are_numbers():
    bytes_ = np.int64(W.nbytes)
    assert_communication(once, W, X, max_bytes_ratio=np.float32(1), parameters=bytes_)


@pytest.mark.parametrize("parameters", [0, -1, {}, jnp.ones(1)])
def test_parameters_without_bytes_are_refused(parameters: Any):
    with pytest.raises(ArgumentError, match="parameters must be arrays, not only scalars"):
        assert_communication(once, W, X, parameters=parameters)


@pytest.mark.parametrize("forbid", [5, None])
def test_what_names_no_kinds_is_refused(forbid: Any):
    with pytest.raises(ArgumentTypeError, match="forbid must be kinds"):
        assert_communication(once, W, X, forbid=forbid)


def test_in_loop_is_true_or_false():
    with pytest.raises(ArgumentTypeError, match="in_loop must be True or False; got 'no'"):
        assert_communication(once, W, X, in_loop="no")


def test_arguments_for_a_program_are_refused():
    with pytest.raises(ArgumentTypeError, match="leave out the 2 given"):
        assert_communication(jax.jit(once).lower(W, X), W, X)


def test_what_is_not_a_step_is_refused():
    with pytest.raises(ArgumentTypeError, match="got int"):
        assert_communication(3)
    # A string has a method lower, too.
    with pytest.raises(ArgumentTypeError, match="got str"):
        assert_communication("step", W)
