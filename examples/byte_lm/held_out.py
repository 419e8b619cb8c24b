"""Bits per byte of held-out text."""

import math
from typing import Any

import jax
import numpy as np

from examples.byte_lm.model import ByteTransformer, nats
from examples.byte_lm.training import Training

# Rows in one call; also the size of the sample taken during training.
ROWS = 128


class HeldOut:
    """Held-out bytes in rows, which the shards share out; a byte is predicted from its row.

    Args:
      held_out: uint8[bytes].
      context: bytes of a row.
    """

    def __init__(self, held_out: np.ndarray, context: int) -> None:
        rows = math.ceil(len(held_out) / context)
        padding = rows * context - len(held_out)
        # The first byte is predicted too, as if a line had ended before it.
        text = np.pad(held_out, (1, padding), constant_values=ord("\n"))
        counts = np.pad(np.ones(len(held_out), np.float32), (0, padding))
        self._rows = {
            "read": text[:-1].reshape(rows, context),
            "wanted": text[1:].reshape(rows, context),
            "counts": counts.reshape(rows, context),
        }
        self._sample = np.arange(0, rows, math.ceil(rows / ROWS))

    def bits_per_byte(
        self, training: Training, *, sample: bool = False, ema: bool = False
    ) -> float:
        """The bits per byte of the model.

        Args:
          training: whose parameters are those after the last step.
          sample: judge by rows spread evenly over the text, as few as fit in one call.
          ema: judge the moving average of the parameters.
        """
        rows = self._sample if sample else np.arange(len(self._rows["read"]))
        of_call = np.split(rows, range(len(self._sample), len(rows), len(self._sample)))
        batches = [
            training.processes.equal_rows({name: x[part] for name, x in self._rows.items()})
            for part in of_call
        ]
        means = training.step.evaluate(training.state, batches, _costs, ema=ema)
        return float(means["nats"].sum() / means["bytes"].sum()) / math.log(2)


def _costs(model: ByteTransformer, batch: Any) -> dict[str, jax.Array]:
    # Also where the step has a weight: counts are 0 and 1.
    costs = nats(model, batch["read"], batch["wanted"])
    return {"nats": costs * batch["counts"], "bytes": batch["counts"]}
