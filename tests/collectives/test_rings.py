"""Products with parts in rings: their values and gradients are those of the whole array."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from crossshard.collectives.rings import Product
from crossshard.shards.axes import Shards
from tests.quick import deep

AXIS = "shards"
# The axis of x and that of w over which they are summed, and that along which w is split.
FORMS = {
    "rows": ((3, 5, 24), (24, 6), (2, 0, 0)),
    "columns": ((3, 5, 6), (6, 24), (2, 0, 1)),
    "transposed, rows": ((5, 24), (6, 24), (1, 1, 1)),
    "transposed, columns": ((5, 6), (24, 6), (1, 1, 0)),
    "first of x": ((24, 5), (24, 6), (0, 0, 0)),
    "three axes": ((5, 6), (2, 6, 24), (1, 1, 2)),
    "three axes, first": ((5, 6), (24, 6, 2), (1, 1, 0)),
}


def normal(*shape: int) -> Any:
    return jnp.float32(np.random.default_rng(math.prod(shape)).normal(size=shape))


TORUSES = ((), (4, 2), (3, 2))


# In `make test` each form on one of them.
@pytest.mark.parametrize(
    ("form", "factors"),
    [
        (form, factors) if place % 2 == which else deep((form, factors))
        for place, form in enumerate(FORMS)
        for which, factors in enumerate(TORUSES)
    ],
)
def test_values_and_gradients(form: str, factors: tuple[int, ...]):
    shape_of_x, shape_of_w, (of_x, of_w, axis) = FORMS[form]
    number = math.prod(factors) if factors else 4
    shards = Shards(number, (AXIS,), manual=True, torus_factors=factors)
    how = Product(of_x, of_w, axis, jnp.dtype(jnp.float32))
    x, w = normal(number, *shape_of_x), normal(*shape_of_w)
    plain = lambda x, w: jnp.tensordot(x, w, ((of_x,), (of_w,)))
    gradient = normal(*jax.eval_shape(plain, x[0], w).shape)

    def run(x: Any, part: Any, scale: Any) -> Any:
        x = x[0]
        product, whole = how.forward(x, part, shards)
        sent = lambda found, slice_of: found * slice_of(scale)
        of_x, of_w = how.backward(x, whole, gradient, shards, jnp.float32, sent)
        return product[None], of_x[None], of_w

    split = PartitionSpec(*[AXIS if each == axis else None for each in range(w.ndim)])
    rows, whole = PartitionSpec(AXIS), PartitionSpec()
    found = jax.jit(
        jax.shard_map(
            run,
            mesh=Mesh(np.array(jax.devices()[:number]), (AXIS,)),
            in_specs=(rows, split, whole),
            out_specs=(rows, rows, split),
            check_vma=False,
        )
    )(x, w, scale := normal(*shape_of_w))
    products, back = jax.vjp(lambda x, w: jax.vmap(lambda x: plain(x, w))(x), x, w)
    of_x, of_w = back(jnp.broadcast_to(gradient, products.shape))
    for one, other in zip(found, (products, of_x, of_w * scale), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-4)


def test_sixteen_bits_are_sent_and_added_in_more():
    number, rows = 8, 64
    shards = Shards(number, (AXIS,), manual=True, torus_factors=(4, 2))
    how = Product(1, 0, 0, jnp.dtype(jnp.bfloat16))
    x, w = normal(number, 16, rows).astype(jnp.bfloat16), normal(rows, 8).astype(jnp.bfloat16)
    gradient = normal(16, 8).astype(jnp.bfloat16)

    def run(x: Any, part: Any) -> Any:
        product, whole = how.forward(x[0], part, shards)
        sent = lambda found, slice_of: found
        _, total = how.backward(x[0], whole, gradient, shards, jnp.bfloat16, sent)
        return product[None], total

    split, mesh = PartitionSpec(AXIS), Mesh(np.array(jax.devices()[:number]), (AXIS,))
    program = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(split, split), out_specs=(split, split), check_vma=False
        )
    )
    product, total = program(x, w)
    assert (product.dtype, total.dtype) == (jnp.bfloat16, jnp.float32)
    wide = lambda x: np.asarray(x, np.float64)
    np.testing.assert_allclose(wide(product), wide(x) @ wide(w), rtol=2**-7, atol=2**-7)
    want = np.einsum("sri,rj->ij", wide(x), wide(gradient))
    np.testing.assert_allclose(wide(total), want, rtol=0, atol=0.02 * np.abs(want).max())
    text = program.lower(x, w).as_text()
    permutes = [line for line in text.splitlines() if "collective_permute" in line]
    assert len(permutes) == 2 * (3 + 1)
    assert all("xbf16>" in line.rpartition("->")[2] for line in permutes)
