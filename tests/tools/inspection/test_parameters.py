"""Which inputs a program trains, and over how many shards: steps that could mislead the reader."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard.tools import inspect
from tests.tools.steps import (
    LINE,
    SPLIT,
    WHOLE,
    check,
    gather,
    mean,
    mesh_of,
    placed,
    read,
    scatter,
    updated,
)

GRID = mesh_of(a=2, b=4)
BOTH = P(("a", "b"))
# Square, so that a frozen weight, the batch of a shard and a moment can have its shape.
W, X = jnp.ones((16, 16)), jnp.ones((64, 16))
BYTES = W.nbytes
ADAM = optax.adam(1e-3)
STATE = ADAM.init(W)
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]

# Of each step what it is given, over how many shards it trains how many bytes, and its ratio.
STEPS: dict[str, tuple] = {}


def case(
    specs: Any, out: Any, *args: Any, shards: int = 8, of: int = BYTES, ratio: Any = 1, **how: Any
) -> Callable[[Callable], Callable]:
    def keep(step: Callable) -> Callable:
        name = step.__name__.replace("_", " ")
        STEPS[name] = lambda: check(read(step, specs, out, *args, **how), shards, of, ratio)
        return step

    return keep


def loss(w: Any, x: Any, frozen: Any = None) -> Any:
    hidden = x if frozen is None else jnp.tanh(x @ frozen)
    return jnp.mean(jnp.tanh(hidden @ w) ** 2)


@case((WHOLE, WHOLE, WHOLE, SPLIT), WHOLE, W, W, STATE, X, ratio=2)
def a_frozen_weight_of_the_same_shape(w: Any, frozen: Any, state: Any, x: Any) -> Any:
    g = mean(jnp.tanh(mean(jax.grad(loss)(w, x, frozen))))  # one reduction too many
    w, state = updated(ADAM, w, state, g)
    return w, frozen, state


@case((WHOLE, WHOLE, SPLIT), WHOLE, W, W, X)
def a_batch_that_all_shards_share(w: Any, x: Any, own: Any) -> Any:
    return w - mean(jax.grad(loss)(w, x + own.mean()))


# The parameters are told, though no output depends on them directly.
@case((WHOLE, WHOLE, WHOLE, SPLIT), WHOLE, W, W, STATE, X)
def a_mean_of_parameters(w: Any, frozen: Any, state: Any, x: Any) -> Any:
    w, state = updated(ADAM, w, state, jax.grad(loss)(w, x, frozen))
    return mean(w), state


@case((WHOLE, WHOLE, SPLIT), WHOLE, W, STATE, X)
def moments_that_feed_a_metric(w: Any, state: Any, x: Any) -> Any:
    updates, state = ADAM.update(mean(jax.grad(loss)(w, x)), state, w)
    return optax.apply_updates(w, updates), state, mean(optax.tree.norm(updates))


# [8, 4] on each shard: the batch, its weight's moment, and the weight's own part.
NARROW = jnp.ones((64, 4))


@case((WHOLE, SPLIT, SPLIT), (WHOLE, SPLIT), NARROW, NARROW, NARROW, of=NARROW.nbytes, ratio=None)
def a_batch_with_the_shape_of_a_moment(w: Any, m: Any, x: Any) -> Any:
    g = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w.T) ** 2))(w)
    m = 0.9 * m + scatter(g) / 8
    return gather(lax.dynamic_slice_in_dim(w, lax.axis_index("s") * 8, 8) - m), m


@case((WHOLE, SPLIT), WHOLE, W.astype(jnp.complex64), X, of=2 * BYTES)
def complex_parameters(w: Any, x: Any) -> Any:
    return w - mean(jnp.conj(jax.grad(lambda w: jnp.mean(jnp.abs(x @ w) ** 4))(w)))


@case((BOTH, BOTH), BOTH, W, X, mesh=GRID)
def parts_gathered_over_one_axis_and_then_another(w: Any, x: Any) -> Any:
    g = jax.grad(loss)(gather(gather(w, "b"), "a"), x)
    return w - scatter(scatter(g, "a"), "b") / 8


@case((P("a", "b"), BOTH), P("a", "b"), W, X, mesh=GRID)
def parts_in_two_dimensions(w: Any, x: Any) -> Any:
    g = jax.grad(loss)(gather(gather(w, "a"), "b", 1), x)
    return w - scatter(scatter(g, "b", 1), "a") / 8


@case((P("b"), BOTH), P("b"), W, X, mesh=GRID, ratio=None)
def features_gathered_over_more_shards_than_parameters_lie_on(w: Any, x: Any) -> Any:
    def contrast(w: Any) -> Any:
        own = jnp.tanh(x @ w)
        return jnp.mean((own @ lax.all_gather(own, ("a", "b"), tiled=True).T) ** 2)

    g = jax.grad(contrast)(gather(w, "b"))
    return w - lax.pmean(scatter(g, "b"), "a") / 4


@case((SPLIT, SPLIT), (SPLIT, WHOLE), jnp.stack([W] * 8), X, shards=4, ratio=None)
def a_metric_over_all_shards_does_not_join_groups(w: Any, x: Any) -> Any:
    g = lax.psum(jax.grad(loss)(w[0], x), "s", axis_index_groups=HALVES) / 4
    return w - g, mean(jnp.tanh(x @ w[0]).mean(0))


@case((WHOLE, SPLIT, SPLIT), SPLIT, None, W, X)
def an_argument_that_is_nothing(nothing: Any, w: Any, x: Any) -> Any:
    return w - scatter(jax.grad(loss)(gather(w), x)) / 8


@case((WHOLE, WHOLE, SPLIT), WHOLE, jnp.ones(5), W, X)
def an_argument_that_the_program_drops(unused: Any, w: Any, x: Any) -> Any:
    return w - mean(jax.grad(loss)(w, x))


@pytest.mark.parametrize("name", STEPS)
def test_what_is_trained(name: str):
    STEPS[name]()


def test_parameters_in_fewer_bits_than_their_master_copy():
    def step(w: Any, master: Any, x: Any) -> Any:
        master -= mean(jax.grad(loss)(w, x).astype(jnp.float32))
        return master.astype(w.dtype), master

    args = (W.astype(jnp.float16), W, X.astype(jnp.float16))
    report = read(step, (WHOLE, WHOLE, SPLIT), WHOLE, *args)
    check(report, 8, BYTES // 2, ratio=2)
    assert (report.parameter_dtypes, report.widened) == (("f16",), ("f32",))
    assert "sent as f32, but the parameters are f16" in report.table()


def test_features_that_are_gathered_as_well_do_not_change_the_parameters():
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def step(w: Any, x: Any) -> Any:
        def contrast(w: Any) -> Any:
            own = jnp.tanh(x @ w)
            of_pair = lax.all_gather(own, "s", axis_index_groups=pairs, tiled=True)
            return jnp.mean((own @ of_pair.T) ** 2)

        return w - scatter(jax.grad(contrast)(gather(w))) / 8

    report = read(step, (SPLIT, SPLIT), SPLIT, W, X)
    features = 2 * (X.nbytes // 8)  # gathered, and its gradient scattered: 2 · 1/2 · two shards'
    check(report, 8, BYTES, sent=report.lower_bound + features)


def test_parts_over_one_axis_only_that_the_compiler_gathers():
    step = lambda w, x: w - jax.grad(loss)(w, x)
    jitted = jax.jit(step, out_shardings=NamedSharding(GRID, P("b")))
    report = inspect(jitted.lower(placed(W, P("b"), GRID), placed(X, BOTH, GRID)))
    check(report, 8, BYTES)
    assert {each.group_size for each in report.collectives if each.kind == "all-gather"} == {4}


def test_a_step_of_nnx_jit():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean(jnp.tanh(model(x)) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))

    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(LINE, WHOLE)))
    low = step.lower(model, jax.device_put(X, NamedSharding(LINE, SPLIT)))
    for stage in (low, low.compile()):
        check(inspect(stage), 8, 4 * (16 * 16 + 16), ratio=1)


@pytest.mark.parametrize("both", [True, False])
def test_branches_are_marked(both: bool):
    def step(w: Any, x: Any, now: Any) -> Any:
        g = jax.grad(loss)(w, x)
        return lax.cond(now, lambda g: w - mean(g), lambda g: w - mean(2 * g) if both else w, g)

    report = read(step, (WHOLE, SPLIT, WHOLE), WHOLE, W, X, jnp.array(True))
    assert all(each.in_branch for each in report.collectives)
    # Only one is taken.
    check(report, 8, BYTES, ratio=1, sent=report.bytes_in_branches)
    table = report.table()
    assert "in a branch" in table
    assert "sends at most 1,792 B" in table
    assert "the branch that sends most is counted: 1,792 B of these" in table
