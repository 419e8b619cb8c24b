"""Arithmetic on arrays: how long they are, how far two are apart, how exact a mean is."""

import numpy as np


def unstacked(values: np.ndarray | None, shape: tuple[int, ...], number: int) -> np.ndarray | None:
    """``[copies, …]`` of an array that has this shape on one device; ``None`` if it has not.

    If it is stacked, ``[1, shards, …]``, each shard's part is a copy.
    """
    if values is None or values.shape[1:] == shape:
        return values
    own = values.shape[1:]
    if own == (number, *shape) or (shape[:1] == (1,) and own == (number, *shape[1:])):
        return values[0].reshape(number, *shape)
    return None


def norm(x: np.ndarray) -> float:
    """The Euclidean norm."""
    return float(np.linalg.norm(x))


def rms(x: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The relative difference of two arrays, whose shapes may be those of a broadcast."""
    one, other = np.broadcast_arrays(one.astype(np.float64), other.astype(np.float64))
    scale = max(norm(one), norm(other))
    return norm(one - other) / scale if scale else 0.0
