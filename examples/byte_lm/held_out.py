"""Bits per byte of held-out text, for the model of each group and for gzip."""

import gzip
import math

import jax
import numpy as np

from crossshard import shard
from examples.byte_lm.groups import Groups
from examples.byte_lm.model import ByteTransformer, nats

# Rows of all members of a group in one call; also the size of the sample taken during training.
ROWS = 128


class HeldOut:
    """Held-out bytes in rows, and the compiled step that predicts them.

    Every group predicts all bytes, its members sharing them out, since each group has parameters
    of its own.

    Args:
      held_out: uint8[bytes].
      context: bytes of a row; a byte is predicted from those before it in its row.
      groups: which shards reduce with which; one group if all do.
    """

    def __init__(self, held_out: np.ndarray, context: int, groups: Groups) -> None:
        self._groups = groups
        rows = math.ceil(len(held_out) / context)
        padding = rows * context - len(held_out)
        # The first byte is predicted too, as if a line had ended before it.
        text = np.pad(held_out, (1, padding), constant_values=ord("\n"))
        self._read = text[:-1].reshape(rows, context)
        self._wanted = text[1:].reshape(rows, context)
        self._counts = np.ones((rows, context), np.float32)
        self._counts[-1, context - padding :] = 0
        self._sample = np.arange(0, rows, math.ceil(rows / ROWS))
        self._per_member = math.ceil(len(self._sample) / groups.size)
        self._cost = shard(num_shards=groups.shards)(_cost)

    def bits_per_byte(self, model: ByteTransformer, *, sample: bool = False) -> list[float]:
        """The bits per byte of the model of each group.

        Args:
          model: whose parameters are those that training left.
          sample: judge by rows spread evenly over the text, as few as fit in one step.
        """
        rows = self._sample if sample else np.arange(len(self._read))
        at_once = self._per_member * self._groups.size
        parts = [rows[first : first + at_once] for first in range(0, len(rows), at_once)]
        nats_per_group = sum(self._nats(model, part) for part in parts)
        return list(nats_per_group / (self._counts[rows].sum() * math.log(2)))

    def _nats(self, model: ByteTransformer, rows: np.ndarray) -> np.ndarray:
        """float64[groups]: the loss of these rows."""
        missing = self._per_member * self._groups.size - len(rows)
        counts = np.pad(self._counts[rows], ((0, missing), (0, 0)))
        places = np.pad(rows, (0, missing)).reshape(self._groups.size, self._per_member)
        of_shards = places[self._groups.position_of].ravel()
        counts = counts.reshape(*places.shape, -1)[self._groups.position_of]
        costs = self._cost(
            model,
            self._read[of_shards],
            self._wanted[of_shards],
            counts.reshape(len(of_shards), -1),
        )
        return np.bincount(self._groups.group_of, weights=np.asarray(costs, np.float64))


def _cost(
    model: ByteTransformer, read: jax.Array, wanted: jax.Array, counts: jax.Array
) -> jax.Array:
    return (nats(model, read, wanted) * counts).sum()


def gzip_bits_per_byte(text: np.ndarray) -> float:
    """The bits per byte of gzip at level 9, for uint8[bytes]."""
    return 8 * len(gzip.compress(text.tobytes(), 9)) / len(text)
