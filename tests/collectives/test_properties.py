"""What holds for any data, any partition and any order of the shards."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import crossshard
from crossshard import CrossShardOptimizer, cross_replica_sum
from crossshard.errors import GroupAssignmentError
from tests.collectives.test_collectives import MODES, per_shard, summed
from tests.quick import deep

# Near zero Adam turns the sign of a rounding error into a step; a larger eps does not.
ADAM = optax.adam(0.25, eps=1e-2)


def eighths(*shape: int) -> st.SearchStrategy[np.ndarray]:
    """Float32 arrays of small multiples of 1/8, whose sums no order of adding can round."""
    whole = hnp.arrays(np.int8, shape, elements=st.integers(-16, 16))
    return whole.map(lambda x: x.astype(np.float32) / 8)


# The number of shards.


class Trainer:
    """A step on a number of shards, compiled once: each run begins anew with ``reset``."""

    def __init__(self, shards: int):
        self.w, self.b = nnx.Param(jnp.zeros((3, 2))), nnx.Param(jnp.zeros(2))
        self.opt = CrossShardOptimizer(ADAM)
        self.opt.build([self.w, self.b])
        self.fresh = jax.tree.map(jnp.copy, nnx.state(self.opt))

        @crossshard.shard(num_shards=shards)
        def step(w: Any, b: Any, opt: Any, x: Any, y: Any) -> Any:
            loss = lambda: jnp.mean((x @ w[...] + b[...] - y) ** 2)
            return opt.minimize(loss, var_list=[w, b])

        self.step = step

    def run(self, w: Any, x: Any, y: Any, steps: int = 3) -> np.ndarray:
        self.w.set_value(jnp.asarray(w))
        self.b.set_value(jnp.zeros(2))
        nnx.update(self.opt, self.fresh)
        for _ in range(steps):
            self.step(self.w, self.b, self.opt, x, y)
        return np.concatenate([np.ravel(self.w.get_value()), np.ravel(self.b.get_value())])


trainer = functools.cache(Trainer)


@functools.cache
def optax_idiom(shards: int) -> Any:
    """The same three steps in the Optax idiom, in shard_map."""
    opt = CrossShardOptimizer(ADAM)
    loss = lambda p, x, y: jnp.mean((x @ p["w"] + p["b"] - y) ** 2)

    def of_one(w: Any, x: Any, y: Any) -> Any:
        params = {"w": w, "b": jnp.zeros(2)}
        state = opt.init(params)
        for _ in range(3):
            updates, state = opt.update(crossshard.grad(loss)(params, x, y), state, params)
            params = optax.apply_updates(params, updates)
        return jnp.concatenate([jnp.ravel(params["w"]), params["b"]])

    whole, split = jax.P(), jax.P("shards")
    return jax.jit(
        jax.shard_map(
            of_one,
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:shards]), ("shards",)),
            in_specs=(whole, split, split),
            out_specs=whole,
        )
    )


def alone(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Three steps on the whole batch by the bare Optax rule, with the gradient by hand."""
    params = {"w": jnp.asarray(w), "b": jnp.zeros(2)}
    state = ADAM.init(params)
    for _ in range(3):
        error = x.astype(float) @ np.asarray(params["w"], float) + np.asarray(params["b"]) - y
        gradient = {"w": x.T @ error / len(x), "b": error.mean(0)}
        gradient = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), gradient)
        updates, state = ADAM.update(gradient, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return np.concatenate([np.ravel(params["w"]), np.ravel(params["b"])])


BATCH = {"w": eighths(3, 2), "x": eighths(8, 3), "y": eighths(8, 2)}


@settings(max_examples=12)
@given(**BATCH)
def test_any_number_of_shards_equals_one_on_the_whole_batch(w: Any, x: Any, y: Any):
    expected = alone(w, x, y)
    for shards in (1, 2, 4, 8):
        got = trainer(shards).run(w, x, y)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
    for shards in (1, 8):
        got = optax_idiom(shards)(w, x, y)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)


# The order of the shards.


@settings(max_examples=15)
@given(order=st.permutations(range(8)), **BATCH)
def test_the_order_of_the_shards_changes_nothing(order: Any, w: Any, x: Any, y: Any):
    eight = trainer(8)
    ordered = eight.run(w, x, y)
    np.testing.assert_allclose(eight.run(w, x[order], y[order]), ordered, rtol=1e-5, atol=2e-5)


# Partitions.


@st.composite
def partitions(draw: Any, number: int = 8) -> list[list[int]]:
    """Any partition of the shards into groups of one size, in any order."""
    size = draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))
    return np.reshape(draw(st.permutations(range(number))), (-1, size)).tolist()


@pytest.mark.parametrize("mode", ["check_vma", "two axes", deep("pmap")])
@settings(max_examples=12)
@given(groups=partitions(), data=st.data())
def test_any_partition_sums_as_numpy_does(mode: str, groups: list[list[int]], data: Any):
    x = data.draw(eighths(8, data.draw(st.integers(0, 7))))
    axis = {"axis_name": MODES[mode]}
    opt = CrossShardOptimizer(optax.sgd(1.0), group_assignment=groups, **axis)
    total = CrossShardOptimizer(optax.sgd(1.0), "sum", group_assignment=groups, **axis)

    def of_one(v: Any) -> Any:
        return (
            cross_replica_sum(v, groups, **axis),
            opt.update(v, opt.init(v))[0],
            total.update(v, total.init(v))[0],
        )

    got, mean_step, sum_step = per_shard(mode, of_one, x)
    expected = summed(x, groups)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(mean_step, -expected / len(groups[0]))
    np.testing.assert_array_equal(sum_step, -expected)


@settings(max_examples=8)
@given(groups=partitions(), order=st.randoms(use_true_random=False), x=eighths(8, 3))
def test_the_order_of_groups_and_within_groups_changes_nothing(groups: Any, order: Any, x: Any):
    shuffled = [order.sample(group, len(group)) for group in groups]
    order.shuffle(shuffled)
    got = jax.vmap(lambda v: cross_replica_sum(v, shuffled), axis_name="shards")(x)
    np.testing.assert_array_equal(got, summed(x, groups))


# What is no partition.


@st.composite
def broken(draw: Any) -> Any:
    """A partition of eight shards with one thing wrong."""
    groups = draw(partitions())
    g = draw(st.integers(0, len(groups) - 1))
    i = draw(st.integers(0, len(groups[g]) - 1))
    match draw(
        st.sampled_from(["id", "type", "missing", "extra", "size", "rank", "kind", "other"])
    ):
        case "id":
            groups[g][i] = draw(st.integers(-20, 20).filter(lambda n: n != groups[g][i]))
        case "type":
            other = st.sampled_from([None, "0", True, 0.0, 1.5, float("nan"), (), [0], {}, 1j])
            groups[g][i] = draw(other)
        case "missing":
            del groups[g][i]
        case "extra":
            groups[g].append(draw(st.integers(-1, 9)))
        case "size":
            if len(groups) == 1:
                groups = [groups[0][:3], groups[0][3:]]
            else:
                groups[g - 1].append(groups[g].pop())
        case "rank":
            groups = draw(st.sampled_from([groups[0], [groups], [*groups, 0], np.array(groups)[0]]))
        case "kind":
            kinds = [str, iter, lambda rows: dict(enumerate(rows)), lambda rows: set(rows[0])]
            groups = draw(st.sampled_from(kinds))(groups)
        case "other":
            groups = draw(partitions(draw(st.sampled_from([1, 2, 4, 7, 9, 16]))))
    return groups


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Fails if anything was lowered for the compiler, or compiled, inside."""
    seen: list[str] = []

    def note(event: str, *_: Any, **__: Any) -> None:
        if "jaxpr_to_mlir" in event or "backend_compile" in event:
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert not seen


def test_what_watches_the_compiler_sees_it():
    with pytest.raises(AssertionError, match="backend_compile"), nothing_compiled():
        jax.jit(lambda x: 3 * x)(np.float32(1))


def step_with(groups: Any) -> None:
    opt = CrossShardOptimizer(optax.sgd(1.0), group_assignment=groups)
    step = lambda v: opt.update(v, opt.init(v))[0]
    jax.vmap(step, axis_name="shards")(np.ones((8, 3), np.float32))


@functools.cache
def once() -> None:
    """The index of a shard, which JAX compiles at its first use, whatever the groups."""
    step_with([[*range(8)]])


@settings(max_examples=150)
@given(groups=broken())
def test_bad_groups_are_value_errors_and_never_reach_the_compiler(groups: Any):
    once()
    with nothing_compiled(), pytest.raises(GroupAssignmentError) as caught:
        step_with(groups)
    assert isinstance(caught.value, ValueError)


def in_runner(function: Any, x: Any) -> Any:
    return crossshard.shard(function, [x], num_shards=8)


@functools.cache
def where_the_runner_wants_it() -> jax.Array:
    return in_runner(lambda x: x, np.ones((8, 3), np.float32))


@pytest.mark.parametrize("mode", ["check_vma", "runner"])
@settings(max_examples=20)
@given(groups=broken())
def test_nor_does_a_sum_over_them_in_any_mode(mode: str, groups: Any):
    x = where_the_runner_wants_it()
    run = in_runner if mode == "runner" else functools.partial(per_shard, mode)
    with nothing_compiled(), pytest.raises(GroupAssignmentError):
        run(lambda v: cross_replica_sum(v, groups), x)
