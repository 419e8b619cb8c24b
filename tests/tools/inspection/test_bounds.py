"""What a step sends against the lower bound: what makes it more, and from which line it comes."""

import inspect as python
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import crossshard
from crossshard import inspect, make_train_step
from crossshard.errors import ArgumentError
from tests.quick import deep, deep_but
from tests.tools import steps
from tests.tools.steps import SPLIT, WHOLE, mean, summed

W, X = jnp.ones((16, 32)), jnp.ones((64, 16))


def grad(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def over(step: Any) -> Any:
    return steps.over(step, (WHOLE, SPLIT), WHOLE)


def twice_on_a_shard(w: Any, x: Any) -> Any:
    g = lax.pmean(grad(w, x), "s")
    g = lax.pmean(jnp.tanh(g), "s")  # the planted one
    return w - g


twice = over(twice_on_a_shard)


@over
def after_a_loop(w: Any, x: Any) -> Any:
    def one(total: Any, part: Any) -> Any:
        return total + grad(w, part), mean(jnp.mean(part))

    total, losses = lax.scan(one, jnp.zeros_like(w), x.reshape(4, 2, 16))
    return w - mean(total) + losses.sum()


@over
def in_a_loop_of_unknown_length(w: Any, x: Any) -> Any:
    rounds = jnp.int32(x[0, 0])
    return lax.fori_loop(0, rounds, lambda _, w: w - mean(grad(w, x)), w)


def report_on(step: Any, *args: Any, parameters: Any = None) -> Any:
    program = step if hasattr(step, "lower") else jax.jit(step)
    return inspect(program.lower(*args), parameters)


def test_a_planted_second_reduction_is_counted_and_shown():
    report = report_on(twice, W, X, parameters=W)
    assert report.ratio == 2.0
    lines, start = python.getsourcelines(twice_on_a_shard)
    planted = start + next(i for i, line in enumerate(lines) if "planted" in line)
    assert f"{__file__}:{planted}" in str(report)
    assert f"{__file__}:{planted - 1}" in str(report)
    assert str(report).count("all-reduce") == 2


def test_a_loop_of_unknown_length_counts_once_and_it_is_said():
    report = report_on(in_a_loop_of_unknown_length, W, X, parameters=W)
    assert report.ratio == pytest.approx(1)
    assert all(
        part in str(report) for part in ("? times", "ratio at least 1.000", "sends at least")
    )
    assert [each.kind for each in report.uncounted_loops] == ["all-reduce"]
    assert report.bytes_exposed == report.bytes_sent > 0
    assert "all bytes are exposed" in str(report)


def test_what_is_free():
    # Scalars, in a loop too; and numbers may be numpy's.
    report = report_on(after_a_loop, W, X, parameters=np.int64(W.nbytes))
    assert any(each.in_loop for each in report.collectives)
    assert report.ratio == 1
    # What sends nothing exposes nothing.
    report = report_on(lambda w: 2 * w, jnp.zeros(3))
    assert report.hidden_share is None
    assert "exposed" not in str(report)


def test_copies_that_are_made_equal_before_a_step_are_no_step():
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["a"] + params["b"]) ** 2)

    params = {"a": jnp.ones((64, 128)), "b": jnp.ones(128)}
    options = {"check_divergence": 10, "on_divergence": "repair"}
    step = make_train_step(loss, optax.adam(1e-3), num_shards=8, **options)
    report = report_on(step, step.abstract_init(params), jnp.ones((32, 64)))
    assert report.lower_bound == summed(8, 4 * (64 * 128 + 128))
    assert report.bytes_sent == pytest.approx(report.lower_bound, abs=9)
    # Parameters and both moments, if copies differ.
    seldom = sum(each.bytes_sent for each in report.collectives if each.in_branch)
    assert seldom == pytest.approx(3 * report.lower_bound, rel=0.2)
    # What is compared in every step counts.
    step = make_train_step(loss, optax.adam(1e-3), num_shards=8, check_divergence=1)
    always = report_on(step, step.abstract_init(params), jnp.ones((32, 64)))
    assert not always.uncounted_loops
    # A bit of each word of the six arrays and the count, in 32 bits, and how many are alike.
    assert always.bytes_sent - report.bytes_sent > summed(8, 4 * 33 * 7)


# Parameters of 16 bits, whose gradients are summed in 32.

NARROW = {"w": jnp.ones((64, 256), jnp.bfloat16), "v": jnp.ones((256, 4), jnp.bfloat16)}
NARROW_BYTES = 2 * (64 * 256 + 256 * 4)
NARROW_X = jnp.ones((32, 64), jnp.bfloat16)


def narrow_loss(params: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, deep(jnp.float16)])
@pytest.mark.parametrize("weight_update", ["replicated", "sharded"])
def test_gradients_of_16_bits_are_summed_in_32(weight_update: Any, dtype: Any):
    params = jax.tree.map(lambda w: w.astype(dtype), NARROW)
    step = make_train_step(narrow_loss, optax.sgd(0.1), num_shards=8, weight_update=weight_update)
    args = step, step.abstract_init(params), NARROW_X.astype(dtype)
    report = report_on(*args)
    assert report.parameter_bytes == NARROW_BYTES
    # They are gathered in 16 bits.
    assert report.ratio == pytest.approx(1.5 if weight_update == "sharded" else 2, abs=0.01)


@over
def narrow_step(params: Any, x: Any) -> Any:
    return jax.tree.map(jnp.subtract, params, mean(jax.grad(narrow_loss)(params, x)))


@over
def wide_by_itself(params: Any, x: Any) -> Any:
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(narrow_loss)(params, x))
    return jax.tree.map(lambda w, g: w - g.astype(w.dtype), params, mean(wide))


def test_16_bits_that_are_widened_count_twice_and_it_is_said_by_whom():
    # XLA for CPUs widens the former.
    for step, by_xla in ((narrow_step, True), (wide_by_itself, False)):
        report = report_on(step, NARROW, NARROW_X, parameters=NARROW)
        assert report.ratio == 2.0
        assert {each.widened for each in report.collectives} == {by_xla}


# Sharded parameters.

LAYERS, WIDTH, HIDDEN = 3, 128, 1024
# Two matrices of each layer, and one before them.
OF_LAYERS, FIRST = LAYERS * 2 * WIDTH * HIDDEN, 32 * WIDTH * 16


def _type(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scanned(dtype: Any, again: bool, **options: Any) -> tuple[Any, Any, Any]:
    """A step with sharded, scanned layers, and what to lower it with."""

    def block(x: Any, layer: Any) -> Any:
        return jnp.tanh(x @ layer["up"].astype(dtype)) @ layer["down"].astype(dtype), None

    block = jax.checkpoint(block) if again else block

    def loss_fn(params: Any, x: Any) -> Any:
        x = (x.astype(dtype) @ params["first"].astype(dtype))[:, :WIDTH]
        x, _ = lax.scan(block, x, params["layers"])
        return jnp.mean(x.astype(jnp.float32) ** 2)

    layers = {"up": _type(LAYERS, WIDTH, HIDDEN), "down": _type(LAYERS, HIDDEN, WIDTH)}
    params = {"first": _type(32, WIDTH * 16), "layers": layers}
    step = make_train_step(loss_fn, optax.adam(1e-3), num_shards=8, params="sharded", **options)
    return step, step.abstract_init(params), _type(16, 32)


# In float32: the bytes of what is gathered and reduced.
SPLIT_UP = {
    "once": (jnp.float32, False, {}, 4 * (OF_LAYERS + FIRST), 4 * (OF_LAYERS + FIRST)),
    "layers twice": (jnp.float32, True, {}, 4 * (2 * OF_LAYERS + FIRST), 4 * (OF_LAYERS + FIRST)),
    "all in 16 bits": (
        *(jnp.bfloat16, False, {"reduce_dtype": jnp.bfloat16}),
        *(2 * (OF_LAYERS + FIRST), 2 * (OF_LAYERS + FIRST)),
    ),
}


@pytest.mark.parametrize("name", deep_but(["once", "layers twice"], SPLIT_UP))
def test_what_is_gathered_twice_or_in_fewer_bits_shows_in_the_ratio(name: str):
    dtype, again, options, gathered, reduced = SPLIT_UP[name]
    step, *args = scanned(dtype, again, **options)
    ratio = (gathered + reduced) / (2 * 4 * (OF_LAYERS + FIRST))
    report = report_on(step, *args)
    assert report.parameter_bytes == 4 * (OF_LAYERS + FIRST)
    assert report.ratio == pytest.approx(ratio, abs=1e-3)


# What is refused.


def test_an_axis_of_arrays_that_are_on_no_mesh_is_refused():
    with pytest.raises(ArgumentError, match=r"axis_name='rows' .* have their shardings"):
        inspect(jax.jit(twice).lower(W, X), axis_name="rows")


# The line that a collective is said to come from: the first that is the user's.

PARAMS = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8)), "c": jnp.ones((8, 8))}


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"] @ params["c"]) ** 2)


def lowered(step: Any, *args: Any) -> Any:
    return steps.over(step, (*(WHOLE for _ in args[1:]), SPLIT), WHOLE).lower(*args)


def line_of(function: Any) -> str:
    lines, start = python.getsourcelines(function)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if '# theirs' in line)}"


def sources(program: Any) -> set[str | None]:
    return {each.source for each in inspect(program).collectives}


def test_our_optimizer_in_a_step_of_the_users_and_a_step_of_ours():
    opt = crossshard.CrossShardOptimizer(optax.chain(optax.clip(1.0), optax.adam(1e-3)))

    def step(params: Any, state: Any, x: Any) -> Any:
        updates, state = opt.update(crossshard.grad(loss)(params, x), state, params)  # theirs
        return optax.apply_updates(params, updates), state

    program = lowered(step, PARAMS, opt.init(PARAMS), X)
    assert sources(program) == {line_of(step)}
    assert crossshard.__file__.removesuffix("__init__.py") not in str(inspect(program))
    whole = make_train_step(loss, optax.adam(1e-3), num_shards=8, weight_update="sharded")

    def lower() -> Any:
        return whole.lower(whole.abstract_init(PARAMS), X)  # theirs

    assert sources(lower()) == {line_of(lower)}


def test_a_layer_of_flax_in_a_model_of_the_users():
    graph, state = nnx.split(nnx.BatchNorm(16, axis_name="s", rngs=nnx.Rngs(0)))

    def forward(state: Any, x: Any) -> Any:
        out = nnx.merge(graph, state)(x)  # theirs
        return out.mean()

    assert sources(lowered(forward, state, X)) == {line_of(forward)}


def test_of_several_that_are_combined_one_line_is_kept_and_the_number_said():
    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(params, x)
        return jax.tree.map(jnp.subtract, params, lax.pmean(grads, "s"))  # theirs

    report = inspect(lowered(step, PARAMS, X))
    (only,) = report.collectives
    assert len(only.operands) == 3
    assert f"{line_of(step)} (1 of 3 combined)" in report.table()
