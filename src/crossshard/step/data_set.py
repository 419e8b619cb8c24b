"""Data sets: run a function on each batch of one, of any number of rows, on every shard."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from crossshard import _mesh
from crossshard.distributed.agreement import check_agreement, processes_of
from crossshard.distributed.progress import PROGRESS, entering
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.model.models import Skeleton, combine
from crossshard.shards.batch_axes import join, resized, spec_along, take_rows
from crossshard.shards.context import shard_context
from crossshard.shards.devices import are_of_all_processes
from crossshard.shards.model_axes import only
from crossshard.shards.partition import map_partitions
from crossshard.shards.put import own_parts, put
from crossshard.step.arguments import check_rows
from crossshard.step.at_use import AtUse
from crossshard.step.config import StepConfig
from crossshard.step.entries import WholeEntries


class OverDataSets:
    """Runs functions on each batch of a data set, on every shard.

    Every batch is padded to as many rows as the longest before it. A row of padding is a copy of
    the first row, and does not count.

    Args:
      call: the name of the method that runs them, for the other processes.
      config: what the step is made of.

    Attributes:
      axes: the shard axes.
      rows: the sharding of rows that are split over the shards.
    """

    def __init__(self, call: str, config: StepConfig):
        self.axes: tuple[str, ...] = config.axes
        self.rows: NamedSharding = NamedSharding(config.mesh, PartitionSpec(config.axes))
        self._call = call
        self._mesh = config.mesh
        self._number = config.number_of_shards
        # The shards whose rows this process passes.
        self._parts = own_parts(self.rows, self._number)
        self._in_processes = len(processes_of(config.mesh)) > 1
        self._is_watched = are_of_all_processes(config.mesh) or PROGRESS.is_alone
        self._of_batch = config.loss.batch_axes
        self._whole = WholeEntries(config.mesh, self._of_batch)
        self._takes_state = config.loss.model_state is not None

    def over(self, batches: Iterable[Any], run: Callable[[Any, jax.Array], Any]) -> Iterator[Any]:
        """What ``run`` returns for each batch on the devices, given which of its rows count.

        Raises:
          ArgumentError: there is no batch, its arrays have unequal numbers of rows, or processes
            pass unequal numbers of batches.
          ArgumentTypeError: ``batches`` is a single batch.
        """
        is_one = isinstance(batches, dict | str | bytes) or hasattr(batches, "dtype")
        if is_one or not isinstance(batches, Iterable):
            raise ArgumentTypeError(
                f"batches is an iterable of batches; got {type(batches).__name__}. Write [batch] "
                f"for a single one."
            )
        longest, number = 0, 0
        for batch in batches:
            with self._entering(), _mesh.in_place_of_the_users_mesh(self._mesh):
                with jax.transfer_guard("allow"):
                    placed, counted = self._place(batch, longest, number)
                found = run(placed, counted)
            yield found
            number += 1
            longest = max(longest, counted.shape[0] * self._parts // self._number)
        with self._entering():
            self._check_agreement(f"{number}")
        if not number:
            raise ArgumentError("There is no batch: batches is empty.")

    # A batch.

    def _place(self, batch: Any, longest: int, before: int) -> tuple[Any, jax.Array]:
        """A batch on the devices, padded, and which of its rows count, float32[rows]."""
        batch = jax.tree.map(lambda leaf: _mesh.on_mesh(leaf, None), batch)
        rows, whole = self._whole.split(batch)
        axes, paths = self._of_batch.of_rows(rows), jax.tree_util.tree_leaves_with_path(rows)
        for (path, leaf), axis in zip(paths, axes, strict=True):
            check_rows(path, leaf, axis)
        leaves = [leaf for _, leaf in paths]
        lengths = sorted({leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True)})
        if len(lengths) != 1:
            raise ArgumentError(
                f"All arrays of a batch to evaluate must have as many rows; got {lengths}."
            )
        counted, shardings = np.ones(lengths, np.float32), map(self._along, axes)
        is_placed = all(
            getattr(leaf, "sharding", None) == sharding
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )
        own = lengths[0] * self._parts // self._number if is_placed else lengths[0]
        number = own if is_placed else max(longest, math.ceil(own / self._parts) * self._parts)
        each = ", ".join(
            f"{leaf.dtype}{list(resized(leaf.shape, axis, number))}"
            for leaf, axis in zip(leaves, axes, strict=True)
        )
        self._check_agreement(f"{before} and a further one of {each}")
        if not is_placed:
            put_rows = lambda x, axis: put(_padded(x, axis, number), self._along(axis))
            rows = self._of_batch.map(put_rows, rows)
            counted = np.pad(counted, (0, number - lengths[0]))
        elif self._parts < self._number:
            counted = counted[: lengths[0] * self._parts // self._number]
        return join(rows, self._whole.place(whole)), put(counted, self.rows)

    def _along(self, axis: int) -> NamedSharding:
        """The sharding of what is split along an axis."""
        return NamedSharding(self._mesh, spec_along(axis, self.axes))

    def _entering(self) -> contextlib.AbstractContextManager[None]:
        return entering(self._call) if self._is_watched else contextlib.nullcontext()

    def _check_agreement(self, batches: str) -> None:
        """Raise unless every process passes a batch now, of as many rows, or none does.

        Before each batch: JAX's CPU devices make the host wait within a sum that others never join.
        On accelerators the last batch is still under way.
        """
        if self._in_processes:
            check_agreement(
                self._call,
                lambda: {"batches:": batches},
                self._mesh,
                "Pass as many batches in every process, of as many rows, of which only the last "
                "may have fewer: they are padded to the longest before them.",
            )

    def on_shards(
        self,
        function: Callable[..., Any],
        finish: Callable[[Any, Any, jax.Array], Any],
        skeleton: Skeleton,
        at_use: AtUse,
        arrays: Any,
        batch: Any,
        counted: jax.Array,
        *,
        out_specs: PartitionSpec,
    ) -> Any:
        """``finish(values, rows, counted)`` of what a function returns for the rows of a shard."""

        def of_shard(arrays: Any, batch: Any, counted: jax.Array) -> Any:
            params, frozen, model_state = arrays

            def run(params: Any) -> Any:
                return at_use.with_frozen(functools.partial(of_model, params), frozen)

            def of_model(params: Any, frozen: Any) -> Any:
                model = combine(skeleton, params, frozen, model_state)
                return function(model, *[model_state] * self._takes_state, batch)

            with shard_context(self._number, axis_name=self.axes):
                values = at_use.call(run, params)
            return finish(values, batch, counted)

        split = self.rows.spec
        spec = lambda each, _: PartitionSpec(*only(each.spec(self.axes), self.axes))

        def specs(use: AtUse | None, tree: Any) -> Any:
            if use is None or not use.in_parts:
                return PartitionSpec()
            return map_partitions(spec, use.partitions, tree)

        of_arrays = specs(at_use, arrays[0]), specs(at_use.frozen, arrays[1]), PartitionSpec()
        run = jax.shard_map(
            of_shard,
            mesh=self._mesh,
            axis_names=frozenset(self.axes),
            in_specs=(
                of_arrays,
                self._of_batch.specs(batch, self.axes),
                split,
            ),
            out_specs=out_specs,
            check_vma=False,
        )
        return run(arrays, batch, counted)


def _padded(leaf: Any, axis: int, rows: int) -> Any:
    missing = rows - leaf.shape[axis]
    if not missing:
        return leaf
    xp: Any = jnp if isinstance(leaf, jax.Array) else np
    copies = xp.broadcast_to(take_rows(leaf, axis, slice(1)), resized(leaf.shape, axis, missing))
    return xp.concatenate([leaf, copies], axis)
