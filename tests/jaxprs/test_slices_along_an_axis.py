"""Slices along an axis: what is found in the jaxpr is held against the function on slices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from crossshard.jaxprs.slices import Along, Kind, Mixed, Slices, Slicing
from crossshard.jaxprs.walk import follow

LAYERS, PARTS = 6, 3
WHOLE = jnp.asarray(np.random.default_rng(5).normal(size=(LAYERS, 4, 5)), jnp.float32)
EYE = jnp.eye(4, dtype=jnp.float32)


def kind_of(function: Callable[[Any], Any]) -> Kind:
    """What the analysis says of a function of a stack."""
    slices = WHOLE[: LAYERS // PARTS]
    jaxprs = [jax.make_jaxpr(function)(x) for x in (WHOLE, slices)]
    (found,) = follow(Slices(of_leaves=True), jaxprs, [Along(0)])
    return found


def orthogonal(x: jax.Array) -> jax.Array:
    """The iteration of Newton and Schulz, as Muon does it."""
    x = x / jnp.linalg.norm(x)

    def turn(_: Any, x: jax.Array) -> jax.Array:
        a = x @ x.T
        return 1.5 * x - 0.5 * a @ x

    return lax.fori_loop(0, 3, turn, x)


# Each with the axis along which its value is then sliced.
KEEPS: dict[str, tuple[Callable[[jax.Array], jax.Array], int]] = {
    "a norm of each layer": (lambda x: x / jnp.sqrt((x**2).sum((1, 2), keepdims=True)), 0),
    "a product that puts layers last": (lambda x: jnp.einsum("ij,ljk->ikl", EYE, x), 2),
    "a transposition": (lambda x: x.transpose(1, 0, 2), 1),
    "products of each layer": (lambda x: jnp.einsum("lij,lkj->lik", x, x), 0),
    "flattened layers": (lambda x: x.reshape(len(x), -1), 0),
    "a part of each layer": (lambda x: x[:, 1:3], 0),
    "padded layers": (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2))), 0),
    "halves joined": (lambda x: jnp.concatenate([x[:, :2], x[:, 2:]], 2), 0),
    "turned around": (lambda x: x[:, ::-1], 0),
    "a decomposition": (lambda x: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2) + EYE), 0),
    "one matrix for all": (lambda x: x + jnp.ones(5) * jnp.arange(5.0), 0),
    "a loop over each layer": (jax.vmap(orthogonal), 0),
    "a branch": (lambda x: lax.cond(jnp.float32(1) > 0, jnp.sin, jnp.zeros_like, x), 0),
}
MIXES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "a norm of all": lambda x: x / jnp.linalg.norm(x),
    "neighbours": lambda x: x - jnp.roll(x, 1, 0),
    "a running sum": lambda x: jnp.cumsum(x, 0),
    "turned around": lambda x: x[::-1],
    "a product over layers": lambda x: jnp.einsum("lij,lik->jk", x, x),
    "the number of a layer": lambda x: x * jnp.arange(len(x))[:, None, None],
    "their number": lambda x: x / len(x),
    "a scan over layers": lambda x: lax.scan(lambda c, row: (c + row, c), x[0], x)[1],
    "a branch on a layer": lambda x: lax.cond(x[0, 0, 0] > 0, jnp.sin, jnp.cos, x),
    "columns of layers": lambda x: x.reshape(-1, len(x)),
}


@pytest.mark.parametrize("name", KEEPS)
def test_what_keeps_layers_apart_is_found_and_computes_the_same_on_some(name: str):
    function, axis = KEEPS[name]
    assert kind_of(function) == Along(axis)
    number = LAYERS // PARTS
    some = [function(WHOLE[i * number : (i + 1) * number]) for i in range(PARTS)]
    np.testing.assert_allclose(jnp.concatenate(some, axis), function(WHOLE), atol=1e-5)


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_layers_is_refused(name: str):
    assert isinstance(kind_of(MIXES[name]), Mixed)


def test_one_number_at_every_position_is_a_slice_of_any_kind():
    assert Slices(of_leaves=True).join([Slicing.UNIFORM, Along(1)]) == Along(1)
    assert Slices(of_leaves=True).join([Slicing.UNIFORM, Slicing.SAME]) is Slicing.SAME
    assert isinstance(Slices(of_leaves=True).join([Slicing.SAME, Along(0)]), Mixed)
    assert isinstance(Slices(of_leaves=True).join([Along(1), Along(0)]), Mixed)
