"""Watch: raises what the metrics of earlier steps report, without waiting for the latest one."""

import collections
from typing import Any

import jax
import numpy as np

from crossshard.errors import NonfiniteError
from crossshard.pipeline.nonfinite import Nonfinite

# Steps that run while the host goes on. All processes look at the same step, so that all raise.
_BEHIND = 2


class Watch:
    """Looks at what each step found, some steps later, and raises.

    Args:
      nonfinite: what a step does about gradients that are not finite.
    """

    def __init__(self, nonfinite: Nonfinite):
        self._nonfinite = nonfinite
        self._found: collections.deque[Any] = collections.deque()

    def add(self, metrics: dict[str, Any]) -> None:
        """Remember what a step found; within a function that JAX traces nothing is known of it."""
        found = metrics["nonfinite"]
        if not isinstance(found.in_a_row, jax.core.Tracer):
            self._found.append(found)

    def look(self, params: Any, behind: int = _BEHIND) -> None:
        """Raise if a step found too much, except for the latest ones, which may still run.

        Raises:
          NonfiniteError: at ``limit`` steps in a row something was not finite.
        """
        while len(self._found) >= max(behind, 1):
            found = self._found.popleft()
            number = _value(found.in_a_row)
            if number < self._nonfinite.limit:
                continue
            self._found.clear()
            what = found.describe(params)
            many = f"Something was not finite in {number} steps in a row; in the last of them "
            raise NonfiniteError(
                f"{many + what if number > 1 else what[0].upper() + what[1:]}. Parameters and "
                f"state hold nothing of it: save them, and look at the batch of that step."
            )


def _value(x: jax.Array) -> int:
    return int(np.asarray(x.addressable_data(0)).ravel()[0])
