"""Nesting: refuses a CrossShardOptimizer inside another one, which would reduce twice."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crossshard.errors import NestedReductionError

_thread = threading.local()


@contextmanager
def inside_optimizer() -> Iterator[None]:
    """Mark the code inside as part of an inner optimizer."""
    outer = getattr(_thread, "inside", False)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = outer


def is_inside_optimizer() -> bool:
    """Whether the code here is part of an inner optimizer."""
    return getattr(_thread, "inside", False)


def refuse_nesting() -> None:
    """Raise NestedReductionError inside of an inner optimizer."""
    if is_inside_optimizer():
        raise NestedReductionError(
            "A CrossShardOptimizer was updated inside another one's update: the gradients would be "
            "reduced twice. Keep the outer one and take the inner one's .inner."
        )
