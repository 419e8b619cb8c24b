"""Arithmetic on runs: which arrays are parameters, how far two are apart, how exact a mean is."""

from collections.abc import Sequence

import numpy as np

from crossshard.tools.verification.built_step import Taken
from crossshard.tools.verification.snapshot import Copies


def parameters_of(runs: Sequence[list[Taken]]) -> list[str]:
    """What an idle step leaves and the next one changes, in any run."""
    found: dict[str, None] = {}
    for idle, step in runs:
        for name, before in idle.before.items():
            after, last = idle.after.get(name), step.after.get(name)
            if after is None or last is None or before.is_key or not before.is_float:
                continue
            if np.array_equal(before.values, after.values) and not np.array_equal(
                after.values, last.values
            ):
                found[name] = None
    return list(found)


def unstacked(of: Copies, shape: tuple[int, ...], number: int) -> tuple[np.ndarray | None, bool]:
    """float64[copies, …] of an array that is as on one device, or ``[shards, …]``; and which."""
    values = of.values.astype(np.float64)
    own = values.shape[1:]
    if own == shape:
        return values, False
    if own == (number, *shape) or (shape[:1] == (1,) and own == (number, *shape[1:])):
        return values[0].reshape(number, *shape), True
    if own == (number,) and not shape:
        return values[0], True
    return None, False


def apart(one: np.ndarray, other: np.ndarray) -> float:
    """The relative difference of two arrays."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    scale = max(np.linalg.norm(one), np.linalg.norm(other))
    return float(np.linalg.norm(one - other) / scale) if scale else 0.0


def rms(x: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def standard_error(samples: np.ndarray) -> float:
    """The norm of the standard error of a mean over axis 0, of the worst row."""
    error = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return float(np.linalg.norm(error, axis=-1).max())
