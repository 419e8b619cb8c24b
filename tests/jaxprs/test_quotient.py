"""A loss is split into what is divided and the rest, also where the divisor is 0."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crossshard.jaxprs.quotient import places_of, split

divide = jax.jit(lambda total, n: jnp.where(n > 0, total / n, 0))
LOSSES = {
    "a quotient": lambda total, n, rest: 3 * total / n + rest,
    "in a call": lambda total, n, rest: rest - 3 * -divide(total, n),
    "in a checkpoint": lambda total, n, rest: 3 * jax.checkpoint(divide)(total, n) + rest,
    "two quotients": lambda total, n, rest: divide(total, n) + rest + 2 * (total / n),
    "two calls": lambda total, n, rest: divide(total, n) + rest + divide(2 * total, n),
    "of which no slope is": lambda total, n, rest: (
        divide(total, n)
        + jax.lax.stop_gradient(jax.jit(lambda x: jax.lax.stop_gradient(2 * x))(total / n))
        + rest
    ),
    "the other way": lambda total, n, rest: rest + jnp.where(n == 0, 0.0, 3 * total / n),
    "in 16 bits": lambda total, n, rest: (3 * divide(total, n) + rest).astype(jnp.bfloat16),
}


def dividing(jaxpr: Any) -> set[Any]:
    names, within = ("div", "gt", "eq"), [each.params.get("jaxpr") for each in jaxpr.eqns]
    own = {out for each in jaxpr.eqns if each.primitive.name in names for out in each.outvars}
    return own.union(*(dividing(getattr(x, "jaxpr", x)) for x in within if x is not None))


@pytest.mark.parametrize("count", [0.0, 4.0])
@pytest.mark.parametrize("name", LOSSES)
def test_the_total_is_known_where_nothing_counts(name: str, count: float):
    both = lambda total, n, rest: (total / n, LOSSES[name](total, n, rest))
    jaxpr = jax.make_jaxpr(both)(1.0, 1.0, 1.0)
    at = frozenset(places_of(jaxpr, dividing(jaxpr.jaxpr)))

    def parts(total: Any, rest: Any) -> Any:
        beside, (of_total, of_rest) = split(jaxpr, [total, jnp.float32(count), rest], 1, at)
        return (of_total, of_rest), beside

    given = jnp.float32(2), jnp.float32(7)
    found, beside = parts(*given)
    np.testing.assert_array_equal(tuple(map(float, found)), (6, 7))
    np.testing.assert_array_equal(beside, 2 / np.float32(count) if count else np.inf)
    slopes = jax.jacobian(lambda *given: parts(*given)[0], argnums=(0, 1))(*given)
    assert jax.tree.map(float, slopes) == ((1 if name == "of which no slope is" else 3, 0), (0, 1))


def test_a_quotient_in_a_branch_is_not_found():
    loss = lambda total, n: jax.lax.cond(n > 0, lambda: total / n, lambda: 0.0)
    jaxpr = jax.make_jaxpr(loss)(1.0, 1.0)
    (branch,) = [each for each in jaxpr.eqns if each.primitive.name == "cond"]
    inner = branch.params["branches"][1].jaxpr
    assert not places_of(jaxpr, dividing(inner))
