"""Sums over shards and exchanges between them, against numpy, in every mode that JAX has."""

import functools
from collections.abc import Callable
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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from crossshard import CrossShardOptimizer, all_to_all, collective_permute, cross_replica_sum
from tests.quick import deep

TWO_AXES = ("slice", "shard")
MODES = {
    "check_vma": None,
    "no check_vma": None,
    "nnx.shard_map": None,
    "pmap": None,
    "vmap": None,
    "two axes": TWO_AXES,
    "two axes, no check_vma": TWO_AXES,
    "vmap of vmap": TWO_AXES,
    "vmap in shard_map": TWO_AXES,
}
GROUPS = [[0, 5, 2, 7], [6, 1, 4, 3]]
PAIRS = [[0, 1], [1, 0], [2, 7], [6, 2]]


def auto_mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def per_shard(mode: str, function: Callable[..., Any], *arrays: Any) -> Any:
    """``function`` on row ``i`` of each array at shard ``i`` of eight; its outputs as rows."""
    if mode == "vmap":
        return jax.jit(jax.vmap(function, axis_name="shards"))(*arrays)
    if mode == "pmap":
        return jax.pmap(function, axis_name="shards")(*arrays)
    if mode in ("vmap of vmap", "vmap in shard_map"):
        inner = jax.vmap(function, axis_name="shard")
        outer: Any = jax.vmap(inner, axis_name="slice")
        if mode == "vmap in shard_map":
            outer = jax.shard_map(
                lambda *parts: jax.tree.map(lambda x: x[None], inner(*(p[0] for p in parts))),
                mesh=auto_mesh((2,), ("slice",)),
                in_specs=P("slice"),
                out_specs=P("slice"),
                check_vma=False,
            )
        split = [a.reshape(2, 4, *a.shape[1:]) for a in arrays]
        return jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), jax.jit(outer)(*split))
    names = TWO_AXES if "two axes" in mode else ("shards",)

    def of_one(*parts: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*(part[0] for part in parts)))

    by, jit = (nnx.shard_map, nnx.jit) if mode == "nnx.shard_map" else (jax.shard_map, jax.jit)
    run = by(
        of_one,
        mesh=auto_mesh((2, 4) if len(names) == 2 else (8,), names),
        in_specs=P(names),
        out_specs=P(names),
        check_vma="no check_vma" not in mode,
    )
    return jit(run)(*arrays)


def summed(x: np.ndarray, groups: Any = None) -> np.ndarray:
    """By numpy what each shard has after the sum: ``[shards, …]``."""
    out = np.empty_like(x)
    for group in groups or [list(range(len(x)))]:
        out[group] = x[group].sum(0)
    return out


def exchanged(x: np.ndarray, concat: int, split: int, groups: list[list[int]]) -> np.ndarray:
    """By numpy what each shard has after ``all_to_all``: ``[shards, …]``."""
    out = {}
    for group in groups:
        blocks = {shard: np.split(x[shard], len(group), split) for shard in group}
        for place, shard in enumerate(group):
            out[shard] = np.concatenate([blocks[sender][place] for sender in group], concat)
    return np.stack([out[shard] for shard in range(len(x))])


def sent(x: np.ndarray) -> np.ndarray:
    """By numpy what each shard has after ``collective_permute``: zeros where nobody sends."""
    out = np.zeros_like(x)
    for source, target in PAIRS:
        out[target] = x[source]
    return out


RANDOM = np.random.default_rng(0)
# Multiples of a power of two, so that no order of summing rounds and equality can be exact.
X = (RANDOM.integers(-1000, 1000, (8, 3, 5)) / 64).astype(np.float32)
BLOCKS = (RANDOM.integers(-1000, 1000, (8, 8, 4)) / 64).astype(np.float32)
SEED = (RANDOM.integers(-1000, 1000, (8, 3, 5)) / 64).astype(np.float32)


EXPECTED = {
    "sum": summed(X),
    "sum in groups": summed(X, GROUPS),
    "sum of a scalar": summed(X[:, 0, 0]),
    "sum of nothing": X[:, :0],
    "groups of one": X,
    # That of the incoming gradient, over the same groups.
    "gradient of the sum": summed(SEED),
    "gradient of the sum in groups": summed(SEED, GROUPS),
    "exchange": exchanged(BLOCKS, 1, 0, [list(range(8))]),
    "exchange in groups": exchanged(BLOCKS, 1, 0, GROUPS),
    "exchange back": BLOCKS,
    "permute": sent(X),
    "permute nothing": np.zeros_like(X),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_collective_is_numpys(mode: str):
    """In one program: most of a test's time is compilation."""
    axis = {"axis_name": MODES[mode]}

    def of_one(x: Any, blocks: Any, seed: Any) -> dict[str, Any]:
        exchange = functools.partial(all_to_all, concat_dimension=1, split_dimension=0, **axis)
        rows = functools.partial(all_to_all, concat_dimension=0, split_dimension=1, **axis)
        out = {
            "sum of a scalar": cross_replica_sum(x[0, 0], **axis),
            "sum of nothing": cross_replica_sum(x[:0], GROUPS, **axis),
            "groups of one": cross_replica_sum(x, [[i] for i in range(8)], **axis),
            "exchange": exchange(blocks, split_count=8),
            "exchange in groups": exchange(blocks, split_count=4, group_assignment=GROUPS),
            "exchange back": rows(exchange(blocks, split_count=8), split_count=8),
            "permute": collective_permute(x, PAIRS, **axis),
            "permute nothing": collective_permute(x, [], **axis),
        }
        for name, groups in (("", None), (" in groups", GROUPS)):
            value, pull = jax.vjp(lambda v, g=groups: cross_replica_sum(v, g, **axis), x)
            out["sum" + name] = value
            out["gradient of the sum" + name] = pull(seed)[0]
        return out

    got = per_shard(mode, of_one, X, BLOCKS, SEED)
    assert got.keys() == EXPECTED.keys()
    for name, want in EXPECTED.items():
        np.testing.assert_array_equal(got[name], want, name)
    # As TensorFlow's documentation says: [8, 4] becomes [2, 16].
    assert got["exchange in groups"].shape == (8, 2, 16)


@pytest.mark.parametrize("mode", ["check_vma", "vmap"])
@pytest.mark.parametrize(("split", "concat"), [(0, 0), (1, 1), (-1, 0), (1, -2)])
def test_all_to_all_along_any_dimensions(mode: str, split: int, concat: int):
    x = RANDOM.normal(size=(8, 4, 8)).astype(np.float32)
    function = lambda v: all_to_all(v, concat, split, 4, GROUPS)
    got = per_shard(mode, function, x)
    np.testing.assert_array_equal(got, exchanged(x, concat, split, GROUPS))


DTYPES = ["float16", "bfloat16", "float32", "int32", "uint32"]


def check_dtype(mode: str, dtype: Any) -> None:
    x = np.arange(16).reshape(8, 2) + 1
    got = per_shard(
        mode,
        lambda v: (
            cross_replica_sum(v),
            cross_replica_sum(v, GROUPS),
            collective_permute(v, PAIRS),
            all_to_all(v, 0, 0, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ),
        jnp.asarray(x, dtype),
    )
    assert {leaf.dtype for leaf in got} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(got[0].astype(float), summed(x))
    np.testing.assert_array_equal(got[1].astype(float), summed(x, GROUPS))


@pytest.mark.parametrize("mode", ["check_vma", "no check_vma", "vmap"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(mode: str, dtype: str):
    check_dtype(mode, dtype)


@pytest.mark.parametrize("mode", ["check_vma", "vmap"])
def test_float64(mode: str):
    with jax.enable_x64(True):
        check_dtype(mode, "float64")
        x = np.full((8, 1), 1 + 2.0**-50)
        got = per_shard(mode, lambda v: cross_replica_sum(v, GROUPS), x)
        np.testing.assert_array_equal(got, 4 * x)


def test_a_thousand_and_twenty_four_shards_on_one_device():
    x = RANDOM.integers(-100, 100, (1024, 3)).astype(np.float32)
    groups = RANDOM.permutation(1024).reshape(64, 16).tolist()
    pairs = [[i, (i + 1) % 1024] for i in range(1024)]

    def of_one(v: Any) -> Any:
        value, pull = jax.vjp(lambda u: cross_replica_sum(u, groups), v)
        return cross_replica_sum(v), value, pull(v)[0], collective_permute(v, pairs)

    whole, grouped, gradient, turned = jax.jit(jax.vmap(of_one, axis_name="shards"))(x)
    np.testing.assert_array_equal(whole, summed(x))
    np.testing.assert_array_equal(grouped, summed(x, groups))
    np.testing.assert_array_equal(gradient, summed(x, groups))
    np.testing.assert_array_equal(turned, np.roll(x, 1, 0))


def test_the_sum_is_found_by_its_name_in_the_compiled_program():
    run = jax.jit(jax.vmap(lambda v: cross_replica_sum(v, name="of_losses"), axis_name="shards"))
    assert "of_losses" in run.lower(X).as_text(debug_info=True)


def test_under_check_vma_the_sum_is_typed_as_each_shards_own_and_psum_is_not_taken_twice():
    # A value typed as equal on all shards is each shard's own copy to cross_replica_sum.
    got = per_shard("check_vma", lambda x: cross_replica_sum(cross_replica_sum(x)), X)
    np.testing.assert_array_equal(got, 8 * summed(X))


# Any partition.


def eighths(*shape: int) -> st.SearchStrategy[np.ndarray]:
    """Float32 arrays of small multiples of 1/8, whose sums no order of adding can round."""
    whole = hnp.arrays(np.int8, shape, elements=st.integers(-16, 16))
    return whole.map(lambda x: x.astype(np.float32) / 8)


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
