"""Cases of a test that `make test` leaves to `make test-deep`."""

from typing import Any

import pytest


def deep(*cases: tuple[Any, ...]) -> list[Any]:
    """Parameter sets with the mark, for ``pytest.mark.parametrize``."""
    return [pytest.param(*case, marks=pytest.mark.deep) for case in cases]
