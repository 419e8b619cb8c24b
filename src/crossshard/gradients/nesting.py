"""Nesting: a CrossShardOptimizer inside another one would reduce the gradients twice."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crossshard.errors import NestedReductionError

_thread = threading.local()


@contextmanager
def inside_optimizer() -> Iterator[None]:
    """Say that the code inside belongs to an optimizer that a CrossShardOptimizer wraps."""
    outer = getattr(_thread, "inside", False)
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = outer


def is_inside_optimizer() -> bool:
    """Whether the code here belongs to an optimizer that a CrossShardOptimizer wraps."""
    return getattr(_thread, "inside", False)


def refuse_nesting() -> None:
    """Raise NestedReductionError inside of an optimizer that a CrossShardOptimizer wraps."""
    if is_inside_optimizer():
        raise NestedReductionError(
            "A CrossShardOptimizer was updated inside another one's update: the gradients would be "
            "reduced twice. Keep the outer one and take the inner one's .inner."
        )
