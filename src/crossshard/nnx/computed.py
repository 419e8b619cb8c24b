"""Where gradients are from: those that an optimizer has computed in the current trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp

from crossshard import _flax
from crossshard._flax import AnyVariable, describe_variable
from crossshard.errors import IncomingError, ShardContextError
from crossshard.gradients.status import GradientStatus

# By the id of the variable; keeping the variable keeps its id unique.
Named: TypeAlias = "dict[int, tuple[AnyVariable, str]]"


class Computed:
    """The variables whose gradients ``compute_gradients`` returned in the current trace."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all of them."""
        self._trace = _flax.current_trace()
        self._names: Named = {}
        self._shards: dict[int, int] = {}
        self._applied: set[int] = set()
        # float[], 0 if a Mean counted no row; None if some always count.
        self.weight: jax.Array | None = None

    @property
    def names(self) -> Named:
        """The names that variables were given in this trace."""
        if self._trace != _flax.current_trace():
            self.clear()
        return self._names

    def add(self, found: Named, number_of_shards: int, empty: jax.Array | None = None) -> None:
        """Note that their gradients were returned on this many shards, and if no row counts."""
        self.names.update(found)
        self.weight = None if empty is None else jnp.where(empty, 0.0, 1.0)
        self._shards.update(dict.fromkeys(found, number_of_shards))
        self._applied.difference_update(found)

    def note_applied(self, variables: Sequence[AnyVariable]) -> None:
        """Note that their gradients have been applied."""
        self._applied.update(id(v) for v in variables if id(v) in self._shards)

    def origin(
        self, variables: Sequence[AnyVariable], number: int, divisor: int, *, declared: bool
    ) -> GradientStatus | None:
        """What the gradients of variables are that are applied on this many shards.

        Args:
          variables: the variables.
          number: the number of shards.
          divisor: what a mean over them divides by; 1 for a sum.
          declared: whether the optimizer says what gradients from elsewhere are.

        Raises:
          IncomingError: the gradients come from elsewhere, or have been applied already.
          ShardContextError: they were computed on another number of shards.
        """
        known = self.names and self._applied
        again = next((v for v in variables if id(v) in known), None)
        if again is not None and divisor > 1:
            raise IncomingError(
                f"The gradient of {describe_variable(again)} has been applied already in this "
                f"step. Call compute_gradients again, or pass incoming='scaled' to apply the same "
                f"gradients twice."
            )
        numbers = [self._shards.get(id(variable)) for variable in variables]
        for variable, computed in zip(variables, numbers, strict=True):
            if computed not in (None, number):
                raise ShardContextError(
                    f"The gradient of {describe_variable(variable)} was computed under {computed} "
                    f"shards and is applied under {number}. Call compute_gradients and "
                    f"apply_gradients in the same step."
                )
        if None not in numbers:
            return GradientStatus.SCALED
        if declared or divisor == 1:
            return None
        raise IncomingError(
            f"The gradient of {describe_variable(variables[numbers.index(None)])} does not come "
            f"from this optimizer's compute_gradients in this step, so it may or may not be "
            f"divided by {divisor} already. Pass incoming='local' to average local gradients, or "
            f"incoming='scaled' if they are divided already, or only to be summed, which is what "
            f"TensorFlow's apply_gradients does."
        )
