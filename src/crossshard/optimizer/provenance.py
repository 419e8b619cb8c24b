"""The gradients that compute_gradients returned in one trace, and which were applied."""

import weakref
from collections.abc import Sequence
from typing import Any

from flax import nnx

from crossshard import _flax
from crossshard.optimizer.names import Named


class Provenance:
    """The variables whose gradients ``compute_gradients`` returned in one trace.

    Attributes:
      names: their names.
    """

    def __init__(self) -> None:
        self.names: Named = {}
        self._trace = _flax.current_trace()
        self._shards: dict[int, tuple[nnx.Variable, int]] = {}
        self._applied: set[int] = set()

    def is_current(self) -> bool:
        """Whether its trace is the current one."""
        return bool(self._trace == _flax.current_trace())

    def add(self, variables: Sequence[nnx.Variable], number_of_shards: int) -> None:
        """Record that their gradients were returned on this many shards."""
        # Keeping the variable keeps its id unique.
        self._shards.update({id(v): (v, number_of_shards) for v in variables})
        self._applied.difference_update(map(id, variables))

    def note_applied(self, variables: Sequence[nnx.Variable]) -> None:
        """Record that their gradients have been applied."""
        self._applied.update(id(v) for v in variables if id(v) in self._shards)

    def first_applied(self, variables: Sequence[nnx.Variable]) -> nnx.Variable | None:
        """The first of the variables whose gradient has been applied; ``None`` if none has."""
        return next((v for v in variables if id(v) in self._applied), None)

    def number_of_shards(self, variable: nnx.Variable) -> int | None:
        """The number of shards when its gradient was returned; ``None`` if it was not."""
        return self._shards.get(id(variable), (None, None))[1]


class ReturnedGradients:
    """The arrays that ``compute_gradients`` returned, as long as anybody has them.

    ``nnx.cond`` and the like run on copies of optimizer and variables, which are told by no trace;
    a gradient that their branches close over is the same array inside.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any, int]] = {}

    def add(self, gradients: Sequence[Any], functions: Any, number_of_shards: int) -> None:
        """Record that an optimizer of these functions returned them on this many shards."""
        for gradient in gradients:
            key = id(gradient)
            forget = lambda _, key=key: self._known.pop(key, None)
            self._known[key] = weakref.ref(gradient, forget), functions, number_of_shards

    def number_of_shards(self, gradient: Any, functions: Any) -> int | None:
        """The number of shards when it was returned; ``None`` if such an optimizer did not."""
        known, by, number = self._known.get(id(gradient), (lambda: None, None, None))
        return number if known() is gradient and by is functions else None
