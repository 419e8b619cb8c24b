"""Once only: no reduction inside another."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from crossshard.errors import NestedReductionError

_thread = threading.local()


@contextmanager
def only_reduction() -> Iterator[None]:
    """Refuse another CrossShardOptimizer's update inside: it would reduce a second time."""
    if getattr(_thread, "reducing", False):
        raise NestedReductionError(
            "A CrossShardOptimizer was updated inside another one's update: the gradients would be "
            "reduced twice. Keep the outer one and take the inner one's .inner."
        )
    _thread.reducing = True
    try:
        yield
    finally:
        _thread.reducing = False
