"""Arithmetic on arrays: how long they are, how far two are apart, how exact a mean is."""

import numpy as np

from crossshard.tools.verification.snapshot import Copies


def unstacked(of: Copies, shape: tuple[int, ...], number: int) -> np.ndarray | None:
    """float64[copies, …] of an array that has this shape on one device; ``None`` if it has not.

    If it is stacked, ``[shards, …]``, each shard's part is a copy.
    """
    values = of.values.astype(np.float64)
    own = values.shape[1:]
    if own == shape:
        return values
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
    """The relative difference of two arrays."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    scale = max(norm(one), norm(other))
    return norm(one - other) / scale if scale else 0.0


def standard_error(samples: np.ndarray) -> float:
    """The norm of the standard error of a mean over axis 0, of the worst row."""
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return float(np.linalg.norm(error, axis=-1).max())
