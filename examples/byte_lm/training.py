"""Training: a compiled step with its state."""

import dataclasses
from typing import Any

import numpy as np
import optax

from crossshard import TrainState, TrainStep
from examples.byte_lm.model import params_by_name
from examples.byte_lm.processes import ALONE, Processes, whole

Values = dict[str, np.ndarray]


@dataclasses.dataclass
class Training:
    """A compiled step with its state.

    Attributes:
      step: the step.
      state: the state after the last step.
      processes: those that train together.
      accumulate_steps: the microbatches of each shard.
      of_groups: a shard of each group; ``(None,)`` if all shards have one model.
    """

    step: TrainStep
    state: TrainState
    processes: Processes = ALONE
    accumulate_steps: int = 1
    of_groups: tuple[int | None, ...] = (None,)

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Take a step; return its metrics, ``[groups]``, and what each shard returned as aux.

        The batch is that of all processes.
        """
        self.state, metrics = self.step(self.state, self.own_rows(batch, self.accumulate_steps))
        aux = {name: whole(value).astype(np.float64) for name, value in metrics.pop("aux").items()}
        # Reading them blocks on the step: queued steps can deadlock virtual CPU devices.
        return {"aux": aux, **{name: self._of_groups(value) for name, value in metrics.items()}}

    def own_rows(self, batch: Any, parts: int = 1) -> Any:
        """The rows that this process passes of a batch that each shard takes in so many parts."""
        mesh = self.step.mesh
        return self.processes.own_rows(mesh, batch, mesh.devices.shape[0] * parts)

    def _of_groups(self, value: Any) -> tuple[float, ...]:
        of_shards = whole(value).astype(np.float64)
        return tuple(
            float(of_shards if each is None else of_shards[each]) for each in self.of_groups
        )

    def values(self) -> Values:
        """Copies of the parameters, or their masters, by name; ``[shards, …]`` if groups differ."""
        trained = self.state.params
        if optax.tree.get(self.state.opt_state, "masters") is not None:
            trained = optax.tree.get(self.step.unshard(self.state).opt_state, "masters")
        both = params_by_name(self.state.frozen) | params_by_name(trained)
        return {name: whole(value) for name, value in both.items()}
