"""Programs that JAX compiles here: what they send, against the least, and memory."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from crossshard import ArgumentError, ArgumentTypeError, inspect

MESH = jax.make_mesh((8,), ("shards",), axis_types=(AxisType.Auto,))
PARAMS = {"a": jnp.ones((16, 32)), "b": jnp.ones((32, 8)), "c": jnp.ones(32)}
BYTES = 4 * (16 * 32 + 32 * 8 + 32)
BATCH = (jnp.ones((64, 16)), jnp.ones((64, 8)))
SPLIT, WHOLE = P("shards"), P()
OPTIMIZER = optax.adamw(0.1)
STATE = OPTIMIZER.init(PARAMS)


def loss(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["a"] + params["c"]) @ params["b"] - y) ** 2)


def update(params: Any, state: Any, grads: Any) -> Any:
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def over(step: Any, in_specs: Any, out_specs: Any, mesh: Any = MESH) -> Any:
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    )


def mean(tree: Any) -> Any:
    return lax.pmean(tree, "shards")


def replicated(params: Any, state: Any, x: Any, y: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return *update(params, state, mean(grads)), mean(value)


REPLICATED = over(replicated, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE)


def scattered(tree: Any) -> Any:
    return jax.tree.map(lambda g: lax.psum_scatter(g, "shards", tiled=True) / 8, tree)


def gathered(tree: Any) -> Any:
    return jax.tree.map(lambda w: lax.all_gather(w, "shards", tiled=True), tree)


def my_part(w: Any) -> Any:
    return lax.dynamic_slice_in_dim(w, lax.axis_index("shards") * (len(w) // 8), len(w) // 8)


def sharded(params: Any, state: Any, x: Any, y: Any) -> Any:
    grads = scattered(jax.grad(loss)(params, x, y))
    parts, state = update(jax.tree.map(my_part, params), state, grads)
    return gathered(parts), state


STATE_SPEC = jax.tree.map(lambda s: SPLIT if s.ndim else WHOLE, STATE)
SHARDED = over(sharded, (WHOLE, STATE_SPEC, SPLIT, SPLIT), (WHOLE, STATE_SPEC))


def stored_in_parts(params: Any, state: Any, x: Any, y: Any) -> Any:
    return update(params, state, scattered(jax.grad(loss)(gathered(params), x, y)))


def test_a_replicated_step_sends_the_lower_bound():
    report = inspect(REPLICATED.lower(PARAMS, STATE, *BATCH))
    assert {each.kind for each in report.collectives} == {"all-reduce"}
    assert (report.devices, report.shards, report.parameter_bytes) == (8, 8, BYTES)
    assert report.bytes_sent == report.lower_bound == 2 * 7 / 8 * BYTES
    assert report.ratio == 1.0
    assert report.scalar_bytes_sent == 7


def test_a_sharded_step_sends_the_lower_bound():
    report = inspect(SHARDED.lower(PARAMS, STATE, *BATCH))
    assert {each.kind for each in report.collectives} == {"reduce-scatter", "all-gather"}
    assert report.parameter_bytes == BYTES
    assert report.ratio == 1.0


def test_parameters_stored_in_parts_are_counted_whole():
    specs = (SPLIT, STATE_SPEC, SPLIT, SPLIT)
    step = over(stored_in_parts, specs, (SPLIT, STATE_SPEC))
    report = inspect(step.lower(PARAMS, STATE, *BATCH))
    assert report.parameter_bytes == BYTES
    assert report.ratio == 1.0


def test_a_typed_gradient_that_autodiff_sums():
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        return update(params, state, jax.grad(lambda p: mean(loss(p, x, y)))(params))

    specs = (WHOLE, WHOLE, SPLIT, SPLIT)
    typed = jax.jit(jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=WHOLE))
    report = inspect(typed.lower(PARAMS, STATE, *BATCH))
    assert report.parameter_bytes == BYTES
    assert report.ratio == 1.0


def test_a_step_that_the_compiler_parts():
    def arrays(tree: Any, spec: Any) -> Any:
        sharding = NamedSharding(MESH, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    step = jax.jit(lambda p, s, x, y: update(p, s, jax.grad(loss)(p, x, y)))
    args = (arrays(PARAMS, WHOLE), arrays(STATE, WHOLE), *arrays(BATCH, SPLIT))
    report = inspect(step.lower(*args))
    assert report.parameter_bytes == BYTES
    assert report.ratio == 1.0


def test_moments_that_feed_a_metric_are_not_parameters():
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = mean(jax.grad(loss)(params, x, y))
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean(optax.tree.norm(updates))

    step = over(step, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE)
    report = inspect(step.lower(PARAMS, STATE, *BATCH))
    assert report.parameter_bytes == BYTES
    assert report.ratio == 1.0


def test_a_batch_with_the_shape_of_a_moment_is_not_a_parameter():
    # [8, 4] on each shard: the batch, its weight's moment, and the weight's own part.
    weight, x = jnp.ones((64, 4)), jnp.ones((64, 4))

    def step(w: Any, m: Any, x: Any) -> Any:
        g = scattered(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w.T) ** 2))(w))
        m = 0.9 * m + g
        return gathered(my_part(w) - m), m

    step = over(step, (WHOLE, SPLIT, SPLIT), (WHOLE, SPLIT))
    assert inspect(step.lower(weight, weight, x)).parameter_bytes == weight.nbytes


def given_gradients(params: Any, state: Any, grads: Any) -> Any:
    return update(params, state, mean(jax.tree.map(lambda g: g[0], grads)))


def test_a_step_that_is_given_its_gradients_does_not_tell_its_parameters():
    grads = jax.tree.map(lambda w: jnp.ones((8, *w.shape)), PARAMS)
    lowered = over(given_gradients, (WHOLE, WHOLE, SPLIT), WHOLE).lower(PARAMS, STATE, grads)
    report = inspect(lowered)
    assert (report.parameter_bytes, report.lower_bound, report.ratio) == (None, None, None)
    assert "there is no lower bound" in report.table()
    for parameters in (PARAMS, BYTES, jax.eval_shape(lambda: PARAMS)):
        assert inspect(lowered, parameters).ratio == 1.0


def test_groups_that_stay_apart_have_a_bound_of_their_own():
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        params, state = jax.tree.map(lambda v: v[0], (params, state))
        grads = jax.grad(loss)(params, x, y)
        grads = jax.tree.map(lambda g: lax.psum(g, "shards", axis_index_groups=groups) / 4, grads)
        return jax.tree.map(lambda v: v[None], update(params, state, grads))

    stacked = jax.tree.map(lambda v: jnp.stack([v] * 8), (PARAMS, STATE))
    report = inspect(over(step, SPLIT, SPLIT).lower(*stacked, *BATCH))
    (only,) = report.collectives
    assert only.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (report.shards, report.parameter_bytes, report.ratio) == (4, BYTES, 1.0)


def test_two_axes_one_after_the_other_send_more_than_at_once():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(params, x, y)
        return update(params, state, lax.pmean(lax.pmean(grads, "a"), "b"))

    both = P(("a", "b"))
    report = inspect(
        over(step, (WHOLE, WHOLE, both, both), WHOLE, mesh).lower(PARAMS, STATE, *BATCH)
    )
    assert [each.group_size for each in report.collectives] == [2, 4]
    assert report.shards == 8
    assert report.ratio == pytest.approx((1 + 1.5) / 1.75)


def test_a_gradient_sent_wider_than_its_parameter_shows():
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), PARAMS)

    def step(params: Any, x: Any, y: Any) -> Any:
        grads = jax.grad(loss)(params, x, y)
        wide = mean(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), params, wide)

    report = inspect(over(step, (WHOLE, SPLIT, SPLIT), WHOLE).lower(narrow, *BATCH))
    assert report.parameter_bytes == BYTES // 2
    assert report.ratio == 2.0


def test_one_shard_sends_nothing():
    mesh = jax.make_mesh((1,), ("shards",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    step = over(replicated, (WHOLE, WHOLE, SPLIT, SPLIT), WHOLE, mesh)
    report = inspect(step.lower(PARAMS, STATE, *BATCH))
    assert (report.devices, report.bytes_sent, report.scalar_bytes_sent) == (1, 0, 0)
    assert (report.lower_bound or 0, report.ratio) == (0, None)


def test_arguments_that_the_program_drops():
    def step(unused: Any, params: Any, state: Any, x: Any, y: Any) -> Any:
        return replicated(params, state, x, y)

    step = over(step, (WHOLE, WHOLE, WHOLE, SPLIT, SPLIT), WHOLE)
    report = inspect(step.lower(jnp.ones(5), PARAMS, STATE, *BATCH))
    assert report.parameter_bytes == BYTES


def test_every_stage_of_a_step_is_read():
    traced = REPLICATED.trace(PARAMS, STATE, *BATCH)
    lowered = traced.lower()
    reports = [inspect(stage) for stage in (traced, lowered, lowered.compile())]
    assert reports[0] == reports[1] == reports[2]


def test_memory_is_the_compilers():
    compiled = REPLICATED.lower(PARAMS, STATE, *BATCH).compile()
    stats, memory = compiled.memory_analysis(), inspect(compiled).memory
    assert memory is not None
    assert memory.argument == stats.argument_size_in_bytes > BYTES
    assert memory.output == stats.output_size_in_bytes
    assert memory.temp == stats.temp_size_in_bytes
    assert memory.alias == stats.alias_size_in_bytes
    assert memory.peak == stats.peak_memory_in_bytes


def test_json_has_all_of_it():
    report = inspect(REPLICATED.lower(PARAMS, STATE, *BATCH))
    read = json.loads(report.to_json(indent=2))
    assert (read["ratio"], read["bytes_sent"]) == (report.ratio, report.bytes_sent)
    assert read["memory"]["argument"] == report.memory.argument
    assert read["parameters"] == [{"dtype": "f32", "bytes": BYTES, "shards": 8, "updates": 1}]
    for one, each in zip(read["collectives"], report.collectives, strict=True):
        assert one["kind"] == each.kind
        assert one["groups"] == [list(group) for group in each.groups]
        assert one["operands"][0]["dtype"] == each.operands[0].dtype
        assert one["source"] == each.source


def test_the_table_names_the_line():
    report = inspect(REPLICATED.lower(PARAMS, STATE, *BATCH))
    table = str(report)
    assert table == report.table()
    # The line of `mean` above, or of its pmean.
    assert f"{__file__}:" in table
    for part in ("all-reduce", "1 of 8", "ratio 1.000", "5,600 B", "memory per device", "peak"):
        assert part in table


def test_what_is_not_a_program_is_refused_by_name():
    with pytest.raises(ArgumentTypeError, match=r"jax\.jit\(replicated\)\.lower\(\*args\)"):
        inspect(replicated)
    with pytest.raises(ArgumentTypeError, match="got dict"):
        inspect({})


def test_what_are_not_parameters_is_refused_by_name():
    lowered = REPLICATED.lower(PARAMS, STATE, *BATCH)
    with pytest.raises(ArgumentTypeError, match=r"got str at \['a'\]"):
        inspect(lowered, {"a": "b"})
    with pytest.raises(ArgumentError, match="got -1"):
        inspect(lowered, -1)


def test_parameters_of_one_element_stand_aside():
    params = {**PARAMS, "scale": jnp.ones(()), "bias": np.ones(1, np.float32)}

    def step(params: Any, x: Any, y: Any) -> Any:
        grads = mean(jax.grad(lambda p: p["scale"] * loss(p, x, y) + p["bias"][0])(params))
        return jax.tree.map(jnp.subtract, params, grads)

    lowered = over(step, (WHOLE, SPLIT, SPLIT), WHOLE).lower(params, *BATCH)
    for report in (inspect(lowered), inspect(lowered, params)):
        assert report.parameter_bytes == BYTES
        assert report.ratio == 1.0
    assert inspect(lowered).scalar_bytes_sent > 0
