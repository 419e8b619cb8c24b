"""What a runner's step was given, while the step is traced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from crossshard import _flax
from crossshard._flax import AnyVariable, describe_variable
from crossshard.errors import VariableError
from crossshard.gradients.nesting import watching_constants
from crossshard.nnx.graph import HasSlots, Reached
from crossshard.nnx.slots import SlotStore

_thread = threading.local()


class Bound:
    """The objects that a runner binds while it traces its step.

    Attributes:
      variables: the variables with arrays.
      reached: all that the step was given.
      lacking: functions that make the slots that the step lacks, to be called after its trace.
    """

    def __init__(self, variables: Sequence[AnyVariable], reached: Reached):
        self.variables = variables
        self.reached = reached
        self.lacking: list[Callable[[], None]] = []
        self._slots: dict[int, tuple[HasSlots, SlotStore]] = {}

    def has(self, given: AnyVariable | HasSlots) -> bool:
        """Whether a variable or an optimizer was given to the step."""
        return any(given is each for each in (*self.variables, *self.reached.optimizers))

    def lacks(self, optimizer: HasSlots, make: Callable[[], None]) -> None:
        """Note how to make slots, and give the optimizer a store of its own for this trace."""
        self.lacking.append(make)
        self._slots.setdefault(id(optimizer), (optimizer, optimizer.slots))
        optimizer.slots = SlotStore(optimizer.slots.variables, optimizer.slots.tree)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Trace with this bound; what the step reads besides is refused."""
        _thread.bound = self
        try:
            with watching_constants(_refuse):
                yield
        finally:
            _thread.bound = None
            # What belongs to the trace ends with it.
            for optimizer in self.reached.optimizers:
                optimizer.computed.clear()
            for optimizer, slots in self._slots.values():
                optimizer.slots = slots


def bound() -> Bound | None:
    """What the step that is traced was given; ``None`` outside of a runner."""
    return getattr(_thread, "bound", None)


def _refuse(variable: AnyVariable) -> None:
    raise VariableError(
        f"The step reads {describe_variable(variable)}, which it was not given: the compiled step "
        f"would keep its current value. Pass its module to the step function as an argument."
    )


def check_writable(variable: AnyVariable) -> None:
    """Raise unless the variable can be written in the current trace."""
    if _flax.is_writable(variable):
        return
    around = bound()
    if around is not None and around.has(variable):
        raise VariableError(
            f"{describe_variable(variable)} belongs to the step, and would be written inside of "
            f"jax.lax.cond, jax.lax.scan, jax.jit or the like, which do not support NNX. Use "
            f"nnx.cond, nnx.scan, nnx.fori_loop or nnx.jit, and pass them the module and the "
            f"optimizer as arguments."
        )
    raise VariableError(
        f"The step writes {describe_variable(variable)}, which it was not given. Pass its module "
        f"to the step function as an argument, and run the step with crossshard.shard."
    )
