"""Predict: what a function returns for each row of a data set, in batches of any length."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.gradients.scalars import is_number
from crossshard.model.models import Skeleton
from crossshard.step.at_use import AtUse
from crossshard.step.config import StepConfig
from crossshard.step.data_set import OverDataSets


class Predictor:
    """The values of each row of data sets, compiled once for each function and shape of a batch."""

    def __init__(self, config: StepConfig):
        self._over = OverDataSets("predict", config)
        rows = self._over.rows
        self._rows = jax.jit(self._rows_of_batch, static_argnums=(0, 1, 2), out_shardings=rows)

    def __call__(
        self,
        predict_fn: Callable[..., Any],
        skeleton: Skeleton,
        at_use: AtUse,
        arrays: tuple[Any, Any, Any],
        batches: Iterable[Any],
    ) -> Any:
        """The values of all rows that this process passes, in their order; see ``TrainStep``."""

        def run(batch: Any, counted: jax.Array) -> tuple[Any, jax.Array]:
            return self._rows(predict_fn, skeleton, at_use, arrays, batch, counted), counted

        found: list[Any] = []
        latest = None
        for each in self._over.over(batches, run):
            # One batch later, while the devices compute the next one.
            found += [] if latest is None else [_own_rows(*latest)]
            latest = each
        assert latest is not None
        found.append(_own_rows(*latest))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _rows_of_batch(
        self, predict_fn: Callable[..., Any], skeleton: Skeleton, at_use: AtUse, *batch: Any
    ) -> Any:
        def checked(values: Any, batch: Any, counted: jax.Array) -> Any:
            paths = jax.tree_util.tree_leaves_with_path(values)
            if not paths:
                raise ArgumentError("predict_fn returned nothing.")
            for path, value in paths:
                _check_rows(path, value, counted.shape[0])
            return values

        rows = self._over.rows.spec
        return self._over.on_shards(predict_fn, checked, skeleton, at_use, *batch, out_specs=rows)


def _check_rows(path: Any, value: Any, rows: int) -> None:
    where = f"predict_fn's value{jax.tree_util.keystr(path)}"
    if not is_number(value):
        raise ArgumentTypeError(f"{where} must be an array; got {type(value).__name__}.")
    if np.shape(value)[:1] != (rows,):
        raise ArgumentError(
            f"{where} has shape {np.shape(value)}, but it must have a value for each row, "
            f"[rows, …], here {rows} rows on each shard. For a mean over rows, call evaluate."
        )


def _own_rows(values: Any, counted: jax.Array) -> Any:
    """This process's rows of some arrays, on the host, without those of padding."""
    kept = _own(counted) != 0
    return jax.tree.map(lambda x: _own(x)[kept], values)


def _own(x: jax.Array) -> np.ndarray:
    # By their first rows, since devices along other axes have copies.
    pieces = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([jax.device_get(pieces[start]) for start in sorted(pieces)])
