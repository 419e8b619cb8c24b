"""Training: a compiled step with its state."""

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from crossshard import TrainState, TrainStep
from crossshard.errors import DivergenceWarning
from crossshard.guards import Divergence
from examples.byte_lm.model import params_by_name
from examples.byte_lm.processes import ALONE, Processes, filled, whole

Values = dict[str, np.ndarray]
# Arrays that a line names: a fault may be in every array.
_MOST = 3


@dataclasses.dataclass
class Training:
    """A compiled step with its state.

    Attributes:
      step: the step.
      state: the state after the last step.
      processes: those that train together.
      pieces: how many pieces a global batch is cut into.
      repairs: whether copies that differ are repaired.
      differs: the step count at which copies were found to differ and were not repaired.
    """

    step: TrainStep
    state: TrainState
    processes: Processes = ALONE
    pieces: int = 1
    repairs: bool = False
    differs: int | None = None

    def __call__(self, batch: Any) -> dict[str, Any]:
        """Take a step; return its metrics, and what each shard returned as aux.

        The batch is that of all processes. The faults that were found are lines of text.

        Raises:
          NonfiniteError, DivergenceError: earlier steps have found too many faults.
        """
        rows = own_rows(self.step, batch, self.pieces)
        with warnings.catch_warnings():
            # A line among the faults says it, two steps earlier.
            warnings.simplefilter("ignore", DivergenceWarning)
            self.state, metrics = self.step(self.state, rows)
        aux = {name: whole(value).astype(np.float64) for name, value in metrics.pop("aux").items()}
        nonfinite, divergence = (metrics.pop(name, None) for name in ("nonfinite", "divergence"))
        # Reading them blocks on the step: queued steps can deadlock virtual CPU devices.
        # Workers that train alone have one each.
        others = {name: np.asarray(whole(x)) for name, x in metrics.items() if name != "loss"}
        found = {name: float(value.mean()) for name, value in others.items()}
        faults = []
        if nonfinite is not None and nonfinite.in_a_row:
            then = "the step is skipped" if found["skipped"] else "the others make the step"
            faults.append(f"{nonfinite.describe(self.state.params)}; {then}")
        if divergence is not None and divergence.diverged:
            faults.append(self._of_copies(divergence))
            if divergence.undecided or not self.repairs:
                self.differs = int(divergence.step)
        return {"aux": aux, "faults": faults, **found}

    def _of_copies(self, found: Divergence) -> str:
        """The shards and the arrays whose copies differ."""
        names = self.step.compared(self.state)
        leaves = [names[leaf] for leaf in np.flatnonzero(found.leaves)]
        what = ", ".join(leaves[:_MOST]) + ", …" * (len(leaves) > _MOST)
        who = ", ".join(map(str, np.flatnonzero(found.shards)))
        if found.undecided:
            return (
                f"the copies of {what} on shards {who} differ, and nobody can tell which is right"
            )
        then = "; it has been repaired" if self.repairs else ""
        return f"another copy of {what} than on most shards is on shard {who}{then}"

    def finish(self) -> None:
        """Raise what the last steps have found.

        Raises:
          NonfiniteError, DivergenceError: as after a step.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)
            self.step.finish(self.state)

    @property
    def is_finite(self) -> bool:
        """Whether all parameters are."""
        return bool(_all_finite(jax.tree.leaves(self.state.params)))

    def values(self) -> Values:
        """Copies of the parameters, or their masters, by name."""
        trained = self.state.params
        if optax.tree.get(self.state.opt_state, "masters") is not None:
            trained = optax.tree.get(self.step.unshard(self.state).opt_state, "masters")
        both = params_by_name(self.state.frozen) | params_by_name(trained)
        return {name: whole(value) for name, value in both.items()}


def own_rows(step: TrainStep, batch: Any, pieces: int) -> Any:
    """The rows of a global batch that this process passes, filled up to so many pieces."""

    def cut(rows: np.ndarray) -> np.ndarray:
        rows = filled(rows, pieces)
        return rows[step.own_rows(len(rows))]

    return jax.tree.map(cut, batch)


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
