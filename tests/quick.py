"""Tables of which `make test` tries some values, and `make test-deep` the others."""

import itertools
import random
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import pytest


def deep_but(quick: Container[Any] | Callable[[Any], bool], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test, marked deep unless they are quick.

    Of several such parameters of one test, `make test` tries where all are quick.
    """
    is_quick = quick if callable(quick) else quick.__contains__
    return [value if is_quick(value) else deep(value) for value in values]


def deep(value: Any) -> Any:
    """A value, or a tuple of one for each name, that only `make test-deep` tries."""
    # An optimizer is a tuple too, and one value.
    values = value if type(value) is tuple else (value,)
    return pytest.param(*values, marks=pytest.mark.deep)


def covering(
    factors: Mapping[str, tuple[Any, ...]],
    make: Callable[..., Any],
    seed: int,
    *,
    one: str | None = None,
    **fixed: Any,
) -> list[Any]:
    """Cases in which every pair of values occurs, of one factor if named.

    Args:
      factors: the values of each factor.
      make: makes a case of one value of each; ``None`` if there is no such case.
      seed: of the search.
      one: a factor; others are not paired with each other.
      fixed: the one value of some factors.
    """
    draw = random.Random(seed)
    names = [name for name in factors if name not in fixed]
    both = [pair for pair in itertools.combinations(names, 2) if one is None or one in pair]
    # In a dict, since the order of a set differs between runs.
    missing = dict.fromkeys((a, x, b, y) for a, b in both for x in factors[a] for y in factors[b])

    def filled(a: str, x: Any, b: str, y: Any) -> Any:
        for _ in range(100):
            values = {name: draw.choice(factors[name]) for name in names} | {a: x, b: y}
            if (case := make(**values, **fixed)) is not None:
                return case
        return None

    def new(case: Any) -> list[Any]:
        pairs = ((a, getattr(case, a), b, getattr(case, b)) for a, b in both)
        return [pair for pair in pairs if pair in missing]

    found: list[Any] = []
    while missing:
        pair = next(iter(missing))
        candidates = [case for _ in range(8) if (case := filled(*pair)) is not None]
        if not candidates:
            del missing[pair]
            continue
        found.append(max(candidates, key=lambda case: len(new(case))))
        for each in new(found[-1]):
            del missing[each]
    return found


def fewest(cases: list[Any], shown: Callable[[Any], set[Any]]) -> list[Any]:
    """Of the cases as many as show all that they show together, those that show most first."""
    found: list[Any] = []
    missing = set().union(*map(shown, cases))
    while missing:
        found.append(max(cases, key=lambda case: len(missing & shown(case))))
        missing -= shown(found[-1])
    return found
