"""Trial: tries operations of a loss of which nothing shows that they compute each row alone.

The loss is evaluated up to these, equation by equation. Each is given the same rows in another
order, beside other rows, and in halves; so is its gradient. What it computes of a row may differ by
rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from crossshard import _jax
from crossshard._check import is_inexact
from crossshard.jaxprs import rewrite
from crossshard.jaxprs.kernels import (
    DEFINED_BY_JAXPR,
    Assumptions,
    Operation,
    is_rowwise,
    text_of,
)
from crossshard.jaxprs.row_facts import Fact, Free, Rows
from crossshard.jaxprs.walk import (
    Call,
    Cond,
    Scan,
    While,
    control_flow,
    equations_within,
    has_own_derivative,
    jaxprs_within,
    opened,
)
from crossshard.jaxprs.widen import wide
from crossshard.shards.random_streams import quick_key

# The changes that are tried, and how far each may change the result of a row, in units of the
# operation's precision. One program rounds a row's result in one way; with another number of rows
# XLA may tile it differently. Sums over rows, as in the gradient of a weight, are rounded anew.
_ORDER, _BESIDE, _NUMBER, _SCALE = "in another order", "beside other rows", "in halves", "scaled"
_OF_ROWS = {_ORDER: 1 / 8, _BESIDE: 1 / 8, _NUMBER: 1 / 2, _SCALE: 1 / 8}
_OF_SUMS = {_ORDER: 1 / 2, _BESIDE: 1 / 2, _NUMBER: 1.0, _SCALE: 1 / 2}
# The precision of float32 here: sums in another order are some hundred times less exact.
_LEAST_PRECISION = 2e-4


def precision_of(equation: Any) -> float:
    """Return the precision of the coarsest floats of an equation; 0 if there are none."""
    dtypes = [getattr(x.aval, "dtype", None) for x in (*equation.invars, *equation.outvars)]
    exact = [x for x in dtypes if x is not None and jnp.issubdtype(x, np.inexact)]
    return max((float(jnp.finfo(x).eps) for x in exact), default=0.0)


class Trial:
    """Tries the operations of one loss on one shard, and collects what they do."""

    def __init__(self, assumed: Assumptions):
        self.assumed = assumed
        self._seen: set[str] = set()
        # The operations that were reached, even if like ones had been tried before.
        self.reached: set[str] = set()
        # What was tried, and what was changed of the rows.
        self.tried: list[tuple[str, str]] = []
        # For each of these, how far the results are apart, and that relative to what is allowed.
        self.apart: list[jax.Array] = []

    def evaluate(self, jaxpr: Any, inputs: Sequence[Any], *, differentiated: bool = True) -> Any:
        """Evaluate a jaxpr, and try each assumed operation on the way."""

        def on(equation: Any, given: list[Any]) -> Sequence[Any]:
            for operation in self.assumed.operations.get(id(equation), ()):
                self._try(operation, given, differentiated=differentiated)
            return self._run(equation, given, differentiated)

        return rewrite.evaluate(jaxpr, inputs, on)

    def _run(self, equation: Any, given: Sequence[Any], differentiated: bool) -> Sequence[Any]:
        """Evaluate an equation, and try the assumed operations inside it."""
        if not self.assumed.are_in(equation):
            return _jax.bound(equation, given)
        if self.assumed.are_in_rule(equation):
            rule, facts = self.assumed.rules[id(equation)]
            atoms = opened(rule).invars[len(given) :]
            slopes = [_random(x.aval, place, facts[place]) for place, x in enumerate(atoms)]
            self.evaluate(rule, [*given, *slopes], differentiated=False)
        differentiated = differentiated and not has_own_derivative(equation)
        within = lambda jaxpr, given: self.evaluate(jaxpr, given, differentiated=differentiated)
        match control_flow(equation):
            case Call(jaxpr) if not is_rowwise(equation):
                return within(jaxpr, given)
            case Cond(branches):
                for branch in branches:
                    within(branch, given[1:])
            case While(cond, of_cond, body, of_body):
                carry = given[of_cond + of_body :]
                within(cond, [*given[:of_cond], *carry])
                within(body, [*given[of_cond : of_cond + of_body], *carry])
            case Scan(body, constants, carried, (steps, reverse)) if steps:
                first = constants + carried
                turn = [x[steps - 1 if reverse else 0] for x in given[first:]]
                within(body, [*given[:first], *turn])
            case None if equation.primitive.name in DEFINED_BY_JAXPR:
                return within(jaxprs_within(equation)[0], given)
        return _jax.bound(equation, given)

    def _try(self, operation: Operation, given: Sequence[Any], *, differentiated: bool) -> None:
        """Compare what an operation, and its gradient, compute of all rows in several ways."""
        pair, given = operation.pair, _with_distinct_rows(operation, list(map(jnp.asarray, given)))
        self.reached.add(str(operation))
        types = [(x.shape, x.dtype) for x in given]
        # An operation of many layers is one.
        key = str((text_of(pair.other), types, operation.inputs, differentiated))
        if key in self._seen:
            return
        self._seen.add(key)
        within = (pair.other, *equations_within(pair.other))
        precision = max(_LEAST_PRECISION, *map(precision_of, within))
        runs = [lambda given, of=of: _jax.bound(of, given) for of in (pair.one, pair.other)]
        compare = functools.partial(self._compare, precision=precision, rows=pair.rows)
        compare(str(operation), runs, operation.inputs, operation.outputs, given)
        if not differentiated:
            return
        exact = [place for place, x in enumerate(given) if is_inexact(x)]
        sloped = [place for place, x in enumerate(pair.other.outvars) if is_inexact(x.aval)]
        slopes = [
            _random(pair.other.outvars[place].aval, place, operation.outputs[place])
            for place in sloped
        ]

        def backward(run: Callable[..., Any]) -> Callable[..., Any]:
            def pulled(given: Sequence[Any]) -> Any:
                given, slopes = list(given[: len(types)]), list(given[len(types) :])

                def of_exact(values: Sequence[Any]) -> list[Any]:
                    replaced = dict(zip(exact, values, strict=True))
                    found = run([replaced.get(place, x) for place, x in enumerate(given)])
                    return [found[place] for place in sloped]

                _, pull = jax.vjp(of_exact, [given[place] for place in exact])
                return pull(slopes)[0]

            return pulled

        facts = [*operation.inputs, *(operation.outputs[place] for place in sloped)]
        gradients = [operation.inputs[place] for place in exact]
        try:
            jax.eval_shape(backward(runs[1]), [*given, *slopes])
        except Exception:  # it cannot be differentiated, so nothing differentiates it
            return
        name = f"the gradient of {operation}"
        compare(name, list(map(backward, runs)), facts, gradients, [*given, *slopes])

    def _compare(
        self,
        name: str,
        runs: Sequence[Callable[..., Any]],
        inputs: Sequence[Fact],
        outputs: Sequence[Fact],
        given: Sequence[Any],
        *,
        precision: float,
        rows: int,
    ) -> None:
        """Compare the results of an operation on all rows with those on a choice of them.

        ``runs`` take ``rows`` rows, and twice as many; ``given`` are inputs of the latter. An
        output without rows is a sum over them.
        """
        order = np.random.default_rng(0).permutation(2 * rows)
        order = order if np.any(order != np.arange(2 * rows)) else order[::-1]
        first, second = np.arange(rows), np.arange(rows, 2 * rows)
        powered = [bool(getattr(fact, "power", 0)) for fact in inputs]

        def repeated(run: Callable[..., Any], places: Sequence[Any], factors: Any) -> list[Any]:
            """Run it on several choices of rows in a loop, by the same compiled code."""

            def once(chosen: Any) -> Any:
                places, factor = chosen
                taken = [_taken(x, fact, places) for x, fact in zip(given, inputs, strict=True)]
                of_linear = zip(taken, powered, strict=True)
                scaled = [x * factor.astype(x.dtype) if is_ else x for x, is_ in of_linear]
                return list(run(scaled))

            chosen = lax.optimization_barrier((jnp.stack(places), jnp.float32(factors)))
            found = lax.map(once, chosen)
            return [[x[turn] for x in found] for turn in range(len(factors))]

        # One row in the place of all that are not compared.
        beside = np.concatenate([first, np.zeros_like(first)])
        choices, factors = [np.arange(2 * rows), order, beside], [1.0, 1.0, 1.0]
        if any(powered):
            choices, factors = [*choices, choices[0]], [*factors, 0.5]
        whole, moved, single, *scaled = repeated(runs[1], choices, factors)
        one, other = repeated(runs[0], [first, second], [1.0, 1.0])

        def note(change: str, fact: Fact, *arrays: Any) -> None:
            limits = _OF_ROWS if isinstance(fact, Rows) else _OF_SUMS
            distance = _distance(*arrays)
            self.tried.append((name, change))
            self.apart.append(jnp.stack([distance, distance / (precision * limits[change])]))

        for place, fact in enumerate(outputs):
            x, parts = whole[place], [wide(half[place]) for half in (one, other)]
            # The sum of two halves may be less than either, and as exact as these.
            sums = [] if isinstance(fact, Rows) else parts
            note(_ORDER, fact, x, _taken(moved[place], fact, np.argsort(order)), *sums)
            if isinstance(fact, Rows):
                few, both = (_taken(each[place], fact, first) for each in (whole, single))
                note(_BESIDE, fact, few, both)
                note(_NUMBER, fact, few, parts[0])
            else:
                note(_NUMBER, fact, x, parts[0] + parts[1], *sums)
            for each in scaled:
                note(_SCALE, fact, x, 2 * wide(each[place]), *sums)


def _with_distinct_rows(operation: Operation, given: Sequence[Any]) -> list[Any]:
    """Add noise to an operation's inputs if all rows are alike, as with weights that start at 0."""
    floats = [
        isinstance(fact, Rows) and is_inexact(x) and not fact.power
        for fact, x in zip(operation.inputs, given, strict=True)
    ]
    pairs = list(zip(operation.inputs, given, floats, strict=True))
    first = lambda x, fact: _taken(x, fact, np.zeros(2 * operation.pair.rows, int))
    differ = [jnp.any(x != first(x, fact)) for fact, x, is_float in pairs if is_float]
    if not differ:
        return list(given)
    alike = ~functools.reduce(jnp.logical_or, differ)
    noise = lambda x, place: jnp.where(alike, _random(x, place, Free()), 0).astype(x.dtype)
    return [x + noise(x, i) if is_float else x for i, (_, x, is_float) in enumerate(pairs)]


def _random(aval: Any, seed: int, rows: Fact) -> jax.Array:
    """Draw random slopes, with another mean in the second half of the rows than in the first."""
    noise = jax.random.normal(quick_key(seed), aval.shape, jnp.float32)
    if isinstance(rows, Rows):
        number = aval.shape[rows.axis] // (rows.outer * rows.inner)
        signs = np.where(np.arange(number) < number // 2, 1, -1)
        signs = np.tile(np.repeat(signs, rows.inner), rows.outer)
        noise += np.expand_dims(signs, [i for i in range(noise.ndim) if i != rows.axis])
    return noise.astype(aval.dtype)


def _taken(x: Any, fact: Fact, places: Any) -> Any:
    """Take some rows of an array; all of it if it has no rows."""
    if not isinstance(fact, Rows):
        return x
    slices = x.shape[fact.axis] // (fact.outer * fact.inner), fact.inner
    before, after = x.shape[: fact.axis], x.shape[fact.axis + 1 :]
    split = x.reshape(*before, fact.outer, *slices, *after)
    found = jnp.take(split, places, axis=fact.axis + 1)
    return found.reshape(*before, fact.outer * len(places) * fact.inner, *after)


def _distance(one: Any, other: Any, *more: Any) -> jax.Array:
    """Return the distance of two arrays, relative to the largest; of integers, how many differ."""
    if not is_inexact(one):
        return jnp.sqrt(jnp.mean(one != other, dtype=jnp.float32)) if one.size else jnp.float32(0)
    one, other = wide(one), wide(other)
    same = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    norm = lambda x: jnp.sqrt(jnp.sum(jnp.where(same & ~jnp.isfinite(x), 0, jnp.abs(x)) ** 2))
    apart = jnp.sqrt(jnp.sum(jnp.where(same, 0, jnp.abs(one - other)) ** 2))
    largest = functools.reduce(jnp.maximum, map(norm, (one, other, *map(wide, more))))
    # An array of nothing but NaN shows nothing.
    shows = ~jnp.isnan(one).all() if one.size else jnp.bool_(True)
    found = jnp.where(apart == 0, 0, apart / largest)
    return jnp.where(shows, found, jnp.nan).astype(jnp.float32)
