"""Tables of which `make test` tries some values, and `make test-deep` the others."""

from collections.abc import Callable, Container, Iterable
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
