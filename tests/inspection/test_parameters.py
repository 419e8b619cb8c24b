"""Which inputs a program trains, and over how many shards: steps that could mislead the reader."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import inspect

MESH = jax.make_mesh((8,), ("s",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
BOTH = P(("a", "b"))
SPLIT, WHOLE = P("s"), P()
# Square, so that a frozen weight, the batch of a shard and a moment can have its shape.
W = jnp.ones((16, 16))
X = jnp.ones((64, 16))
BYTES = W.nbytes


def loss(w: Any, x: Any, frozen: Any = None) -> Any:
    hidden = x if frozen is None else jnp.tanh(x @ frozen)
    return jnp.mean(jnp.tanh(hidden @ w) ** 2)


def mean(tree: Any) -> Any:
    return lax.pmean(tree, "s")


def gather(x: Any, axis: str = "s", along: int = 0) -> Any:
    return lax.all_gather(x, axis, axis=along, tiled=True)


def scatter(x: Any, axis: str = "s", along: int = 0) -> Any:
    return lax.psum_scatter(x, axis, scatter_dimension=along, tiled=True)


def lowered(step: Callable, in_specs: Any, out_specs: Any, *args: Any, mesh: Mesh = MESH) -> Any:
    over = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(over).lower(*args)


def test_a_frozen_weight_of_the_same_shape_is_not_a_parameter():
    rule = optax.adam(1e-3)
    state = rule.init(W)

    def step(w: Any, frozen: Any, state: Any, x: Any) -> Any:
        g = mean(jnp.tanh(mean(jax.grad(loss)(w, x, frozen))))  # one reduction too many
        updates, state = rule.update(g, state, w)
        return optax.apply_updates(w, updates), frozen, state

    report = inspect(lowered(step, (WHOLE, WHOLE, WHOLE, SPLIT), WHOLE, W, W, state, X))
    assert (report.parameter_bytes, report.ratio) == (BYTES, 2.0)


def test_a_batch_that_all_shards_share_is_not_a_parameter():
    def step(w: Any, x: Any, own: Any) -> Any:
        return w - mean(jax.grad(loss)(w, x + own.mean()))

    report = inspect(lowered(step, (WHOLE, WHOLE, SPLIT), WHOLE, W, W, X))
    assert (report.parameter_bytes, report.ratio) == (BYTES, 1.0)


def test_a_mean_of_parameters_tells_them_though_no_output_depends_on_them_directly():
    rule = optax.adam(1e-3)

    def step(w: Any, frozen: Any, state: Any, x: Any) -> Any:
        updates, state = rule.update(jax.grad(loss)(w, x, frozen), state, w)
        return mean(optax.apply_updates(w, updates)), state

    args = (W, W, rule.init(W), X)
    report = inspect(lowered(step, (WHOLE, WHOLE, WHOLE, SPLIT), WHOLE, *args))
    assert (report.parameter_bytes, report.ratio) == (BYTES, 1.0)


def test_parameters_in_fewer_bits_than_their_master_copy():
    def step(w: Any, master: Any, x: Any) -> Any:
        g = mean(jax.grad(loss)(w, x).astype(jnp.float32))
        master -= g
        return master.astype(w.dtype), master

    args = (W.astype(jnp.float16), W, X.astype(jnp.float16))
    report = inspect(lowered(step, (WHOLE, WHOLE, SPLIT), WHOLE, *args))
    assert (report.parameter_bytes, report.parameter_dtypes) == (BYTES // 2, ("f16",))
    assert report.ratio == 2.0
    assert report.widened == ("f32",)
    assert "sent as f32, but the parameters are f16" in report.table()


def test_complex_parameters():
    def step(w: Any, x: Any) -> Any:
        return w - mean(jnp.conj(jax.grad(lambda w: jnp.mean(jnp.abs(x @ w) ** 4))(w)))

    report = inspect(lowered(step, (WHOLE, SPLIT), WHOLE, W.astype(jnp.complex64), X))
    assert (report.parameter_bytes, report.ratio) == (2 * BYTES, 1.0)


def test_parts_gathered_over_one_axis_and_then_another():
    def step(w: Any, x: Any) -> Any:
        g = jax.grad(loss)(gather(gather(w, "b"), "a"), x)
        return w - scatter(scatter(g, "a"), "b") / 8

    report = inspect(lowered(step, (BOTH, BOTH), BOTH, W, X, mesh=GRID))
    assert (report.shards, report.parameter_bytes, report.ratio) == (8, BYTES, 1.0)


def test_parts_in_two_dimensions():
    def step(w: Any, x: Any) -> Any:
        g = jax.grad(loss)(gather(gather(w, "a"), "b", 1), x)
        return w - scatter(scatter(g, "b", 1), "a") / 8

    spec = P("a", "b")
    report = inspect(lowered(step, (spec, BOTH), spec, W, X, mesh=GRID))
    assert (report.shards, report.parameter_bytes, report.ratio) == (8, BYTES, 1.0)


def test_features_that_are_gathered_as_well_do_not_change_the_parameters():
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]

    def step(w: Any, x: Any) -> Any:
        def contrast(w: Any) -> Any:
            own = jnp.tanh(x @ w)
            of_pair = lax.all_gather(own, "s", axis_index_groups=pairs, tiled=True)
            return jnp.mean((own @ of_pair.T) ** 2)

        return w - scatter(jax.grad(contrast)(gather(w))) / 8

    report = inspect(lowered(step, (SPLIT, SPLIT), SPLIT, W, X))
    assert (report.shards, report.parameter_bytes) == (8, BYTES)
    features = 2 * (X.nbytes // 8)  # gathered, and its gradient scattered: 2 · 1/2 · two shards'
    assert report.bytes_sent == report.lower_bound + features


def test_features_gathered_over_more_shards_than_the_parameters_lie_on():
    def step(w: Any, x: Any) -> Any:
        def contrast(w: Any) -> Any:
            own = jnp.tanh(x @ w)
            return jnp.mean((own @ lax.all_gather(own, ("a", "b"), tiled=True).T) ** 2)

        g = jax.grad(contrast)(gather(w, "b"))
        return w - lax.pmean(scatter(g, "b"), "a") / 4

    report = inspect(lowered(step, (P("b"), BOTH), P("b"), W, X, mesh=GRID))
    assert (report.shards, report.parameter_bytes) == (8, BYTES)


def test_parts_over_one_axis_only_that_the_compiler_gathers():
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(loss)(w, x)

    def given(x: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(GRID, spec))

    jitted = jax.jit(step, out_shardings=NamedSharding(GRID, P("b")))
    report = inspect(jitted.lower(given(W, P("b")), given(X, BOTH)))
    assert (report.shards, report.parameter_bytes) == (8, BYTES)
    assert {each.group_size for each in report.collectives if each.kind == "all-gather"} == {4}


def test_a_metric_over_all_shards_does_not_join_groups():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(w: Any, x: Any) -> Any:
        g = lax.psum(jax.grad(loss)(w[0], x), "s", axis_index_groups=groups) / 4
        return w - g, mean(jnp.tanh(x @ w[0]).mean(0))

    stacked = jnp.stack([W] * 8)
    report = inspect(lowered(step, (SPLIT, SPLIT), (SPLIT, WHOLE), stacked, X))
    assert (report.shards, report.parameter_bytes) == (4, BYTES)


def test_an_argument_that_is_nothing():
    def step(nothing: Any, w: Any, x: Any) -> Any:
        return w - scatter(jax.grad(loss)(gather(w), x)) / 8

    report = inspect(lowered(step, (WHOLE, SPLIT, SPLIT), SPLIT, None, W, X))
    assert (report.parameter_bytes, report.ratio) == (BYTES, 1.0)


def test_a_step_of_nnx_jit():
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def step(model: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean(jnp.tanh(model(x)) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model), grads))

    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(MESH, WHOLE)))
    low = step.lower(model, jax.device_put(X, NamedSharding(MESH, SPLIT)))
    for stage in (low, low.compile()):
        report = inspect(stage)
        assert (report.shards, report.ratio) == (8, 1.0)


@pytest.mark.parametrize("both", [True, False])
def test_branches_are_marked(both: bool):
    def step(w: Any, x: Any, now: Any) -> Any:
        g = jax.grad(loss)(w, x)
        return lax.cond(now, lambda g: w - mean(g), lambda g: w - mean(2 * g) if both else w, g)

    report = inspect(lowered(step, (WHOLE, SPLIT, WHOLE), WHOLE, W, X, jnp.array(True)))
    assert all(each.in_branch for each in report.collectives)
    # Only one is taken.
    assert report.ratio == 1.0
    assert report.bytes_in_branches == report.bytes_sent
    assert "in a branch" in report.table()
    assert "sends at most 1,792 B" in report.table()
    assert "the branch that sends most is counted: 1,792 B of these" in report.table()
