"""What differs between shards is read from the jaxpr, and what is called equal is so by numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from crossshard.jaxprs.walk import sources_of, varying_axes_of_outputs

MESH = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


@jax.custom_vjp
def doubled(x: Any) -> Any:
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

# own: float32[3], each shard's own; same: float32[3], equal on all shards.
CASES = {
    "sums": (
        lambda own, same: (
            lax.psum(own, ("a", "b")),
            lax.pmean(own, "a"),
            lax.psum(lax.psum(own, "a"), "b"),
            lax.psum(same, "b"),
        ),
        ["", "b", "", ""],
    ),
    "index": (lambda own, same: (same + lax.axis_index("a"), lax.axis_index("b")), ["a", "b"]),
    "gather": (lambda own, same: (lax.all_gather(same + lax.axis_index("b"), "b"),), [""]),
    "permute": (lambda own, same: (lax.ppermute(lax.pmean(own, "a"), "b", [(0, 1)]),), ["b"]),
    "jit": (lambda own, same: jax.jit(lambda x, y: (y, lax.psum(x, "a")))(own, same), ["", "b"]),
    "custom vjp": (lambda own, same: (doubled(same), doubled(own)), ["", "ab"]),
    "cond": (
        lambda own, same: (
            lax.cond(same[0] > 0, lambda: same, lambda: -same),
            lax.cond(same[0] > 0, lambda: own, lambda: own),
        ),
        ["", "ab"],
    ),
    "scan": (
        lambda own, same: lax.scan(lambda c, x: (c + x, c * x), same, jnp.stack([same, same])),
        ["", ""],
    ),
    "while": (lambda own, same: (lax.while_loop(lambda c: c[0] < 9, lambda c: c + 1, same),), [""]),
    "gradient": (lambda own, same: (jax.grad(lambda w: doubled(w).sum())(same),), [""]),
    # What JAX has no types for, or other ones.
    "carry that comes to differ": (
        lambda own, same: lax.scan(lambda c, x: (c + x, None), jnp.zeros(()), own)[0],
        ["ab"],
    ),
    "carry that differs after two rounds": (
        lambda own, same: lax.fori_loop(0, 2, lambda i, c: (c[1], own), (same, same))[0],
        ["ab"],
    ),
    "loop that ends at different times": (
        lambda own, same: lax.while_loop(lambda c: c[0] < own[0], lambda c: c + 1, same),
        ["ab"],
    ),
    "branch that shards choose": (
        lambda own, same: lax.cond(own[0] > 0, lambda: same, lambda: -same),
        ["ab"],
    ),
    "sum over groups of what is equal": (
        lambda own, same: lax.psum(same, "b", axis_index_groups=[[0, 1], [2, 3]]),
        ["b"],
    ),
    "axis of vmap beside one of the mesh": (
        lambda own, same: jax.vmap(lambda x: lax.psum(x, ("rows", "a")), axis_name="rows")(own),
        ["b"],
    ),
    "a mutable array": (lambda own, same: _through_a_ref(own, same), ["ab"]),
}  # fmt: skip


def _through_a_ref(own: Any, same: Any) -> Any:
    ref = jax.new_ref(same)
    ref[...] += own
    return ref[...]


def on_mesh(function: Any) -> Any:
    def of_one(own: Any, same: Any) -> Any:
        outputs = function(own, same)
        return jax.tree.map(lambda x: x[None], tuple(jax.tree.leaves(outputs)))

    return jax.shard_map(
        of_one,
        mesh=MESH,
        in_specs=(P(("a", "b")), P()),
        out_specs=P(("a", "b")),
        check_vma=False,
    )


def differing(function: Any) -> Any:
    return jax.make_jaxpr(on_mesh(function))(jnp.ones(24), jnp.ones(3))


@pytest.mark.parametrize("name", CASES)
def test_what_differs(name: str):
    function, expected = CASES[name]
    found = varying_axes_of_outputs(differing(function))
    assert ["".join(sorted(axes)) for axes in found] == expected


@pytest.mark.parametrize("name", CASES)
def test_what_is_called_equal_is_equal(name: str):
    function, _ = CASES[name]
    own = np.random.default_rng(0).normal(size=24).astype(np.float32)
    outputs = jax.jit(on_mesh(function))(own, np.arange(3, dtype=np.float32))
    for axes, value in zip(varying_axes_of_outputs(differing(function)), outputs, strict=True):
        value = np.asarray(value).reshape(2, 4, *value.shape[1:])
        for place, axis in enumerate("ab"):
            if axis not in axes:
                first = np.take(value, [0], axis=place)
                np.testing.assert_array_equal(value, np.broadcast_to(first, value.shape))


def test_what_is_summed_over_one_axis_after_the_other_is_the_same_on_all_shards():
    def reduced(x: Any) -> Any:
        of_both = lax.psum(lax.pmean(x, "a"), "b"), lax.pmax(x, ("a", "b"))
        return *of_both, lax.psum(x, "a"), lax.axis_index("b"), doubled(x)

    jaxpr = jax.make_jaxpr(reduced, axis_env=[("a", 2), ("b", 4)])(1.0)
    assert sources_of(jaxpr, ("a", "b")) == [0, 0, 1, -1, 1]
    assert sources_of(jaxpr) == [1, 1, 1, 0, 1]
