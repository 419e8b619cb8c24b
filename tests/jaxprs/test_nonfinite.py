"""Back from a NaN or an infinity to the equation, or the input, that it comes from."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from crossshard.jaxprs.nonfinite import Element, evaluate, find_origin, first_nonfinite


def origin_of(function: Callable[..., Any], *args: Any) -> tuple[str, Element]:
    """The primitive that made what is not finite, and the rest."""
    given = [jnp.asarray(x, jnp.float32) for x in args]
    jaxpr = jax.make_jaxpr(function)(*given)
    (out,) = evaluate(jaxpr, given)
    np.testing.assert_array_equal(out, function(*given))
    element = first_nonfinite(out)
    assert element is not None
    found = find_origin(jaxpr, given, 0, element)
    return "" if found.equation is None else found.equation.primitive.name, found


MASK = np.array([[0, -np.inf, 0], [-np.inf, -np.inf, -np.inf]])


def test_infinities_of_masks_are_no_fault():
    masked = lambda x: jax.nn.softmax(jnp.where(x > 1, -jnp.inf, x), axis=-1)
    name, found = origin_of(masked, [[0, 2, 0], [2, 2, 2]])
    assert (name, found.index) == ("sub", (1, 0))
    # The mask is an argument.
    name, found = origin_of(
        lambda x, mask: jax.nn.softmax(x + mask, axis=-1), np.ones((2, 3)), MASK
    )
    assert (name, found.index) == ("sub", (1, 0))
    # But it is named if nothing else is at fault.
    assert origin_of(lambda x: x, MASK)[1].number == 0


def test_what_a_select_does_not_choose_is_not_followed():
    def choose(x: Any) -> Any:
        return jnp.where(x > -1, 1 / x, jnp.sqrt(x - 1))

    name, found = origin_of(choose, [2, 0])
    assert (name, found.index) == ("div", (1,))
    assert [float(np.asarray(x).ravel()[-1]) for x in found.given] == [1, 0]


def test_an_overflow_beside_a_nan():
    name, found = origin_of(lambda x: jnp.exp(x)[1:], [np.nan, 1000])
    assert (name, found.index) == ("exp", (1,))
    name, found = origin_of(lambda x: jnp.cumsum(jnp.exp(x)), [1, 1000, np.nan])
    assert (name, found.index) == ("", (2,))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_turn_of_a_scan(reverse: bool):
    def body(carry: Any, x: Any) -> Any:
        return carry + 1 / x, carry

    def scanned(xs: Any) -> Any:
        return lax.scan(body, 0.0, xs, reverse=reverse)[0]

    def stacked(xs: Any) -> Any:
        return lax.scan(body, 0.0, xs, reverse=reverse)[1]

    for function in (scanned, stacked):
        name, found = origin_of(function, [1, 2, 3, 0, 4, 5])
        assert (name, found.scope.loops) == ("div", ((3, 6),))
    # What came in is followed out of the loop, through its carry and its rows.
    assert origin_of(scanned, [1, 2, np.nan, 4])[1].index == (2,)


def test_branches_loops_and_reductions():
    def branch(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: jnp.log(x + 5), x)

    name, found = origin_of(branch, [-4, -5, -6])
    assert (name, found.index, len(found.scope.around)) == ("log", (2,), 1)
    name, found = origin_of(lambda x: x @ x.T, [[1, np.inf, 2], [1, 2, 3]])
    assert (name, found.number, found.index) == ("", 0, (0, 1))

    def turn(carry: Any) -> Any:
        count, x = carry
        return count + 1, x * x

    name, found = origin_of(lambda x: lax.fori_loop(0, 9, lambda i, x: x * x, x), [1, 30])
    assert (name, found.index) == ("mul", (1,))
    # 30 to the power of 2 to the power of 5 is more than float32 holds.
    assert found.scope.loops == ((4, 9),)
    name, found = origin_of(lambda x: lax.while_loop(lambda c: c[0] < 9, turn, (0, x))[1], [1, 30])
    assert found.scope.loops == ((4, 9),)


def test_float16_overflows_as_it_is_written():
    square = lambda x: (x.astype(jnp.float16) * x.astype(jnp.float16)).astype(jnp.float32)
    name, found = origin_of(square, [300])
    assert (name, found.index) == ("mul", (0,))
