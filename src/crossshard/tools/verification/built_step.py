"""A step as its factory builds it for a number of shards, run on chosen batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from crossshard import _jax
from crossshard.errors import ArgumentError, ArgumentTypeError
from crossshard.shards import batch_axes
from crossshard.shards.batch_axes import BatchAxes
from crossshard.tools.verification.probe import probe
from crossshard.tools.verification.snapshot import (
    Copies,
    copies_of,
    fresh,
    has_keys,
    holds_nnx,
    snapshot,
)

Snapshot = dict[str, Copies]
Factory = Callable[[Any, int], Any]

_ARRAYS = (jax.Array, np.ndarray)


@dataclasses.dataclass(frozen=True)
class Run:
    """Two steps with the same batch: the idle one, and the first that changes parameters.

    Attributes:
      start: the arrays of the state before them.
      idle: those after the idle step.
      last: those after both.
      metrics: the floating scalars that the idle step returned besides, by their path.
    """

    start: Snapshot
    idle: Snapshot
    last: Snapshot
    metrics: Snapshot

    def parameters(self) -> list[str]:
        """The names of what the idle step leaves and the next one changes."""
        return [
            name
            for name, before in self.start.items()
            if before.is_float
            and name in self.idle
            and name in self.last
            and np.array_equal(before.values, self.idle[name].values)
            and not np.array_equal(before.values, self.last[name].values)
        ]


class BuiltStep:
    """A step for a number of shards, with plain SGD, whose first step changes no parameter.

    Args:
      make_step: the user's factory.
      number: the number of shards.
      learning_rate: of SGD.

    Raises:
      ArgumentTypeError: the factory does not return a step with its state.
    """

    def __init__(self, make_step: Factory, number: int, learning_rate: float) -> None:
        returned = make_step(probe(learning_rate), number)
        if not isinstance(returned, tuple) or len(returned) < 2 or not callable(returned[0]):
            raise ArgumentTypeError(
                "make_step(optimizer, num_shards) must return (step, *state): the step, and the "
                f"arguments that it is called with before the batch; got {_described(returned)}."
            )
        self.number = number
        self.learning_rate = learning_rate
        self._step, *self._state = returned

    @property
    def has_keys(self) -> bool:
        """Whether the state has typed random keys."""
        return has_keys(self._state)

    def run(self, batch: Sequence[Any], key: Any = None, seed: int = 0) -> Run:
        """Take the idle step and the first that changes parameters, with the same batch.

        Args:
          batch: the arguments after the state.
          key: the random key, the last argument; none if ``None``.
          seed: other keys for other seeds.
        """
        state = fresh(self._state, seed)
        start, args = snapshot(state), self._args(batch, key, seed)
        state, metrics = self._call(state, args)
        idle = snapshot(state)
        state, _ = self._call(state, args)
        return Run(start, idle, snapshot(state), metrics)

    def flops(self, batch: Sequence[Any], key: Any = None) -> float | None:
        """The floating-point operations of one device, as the compiler counts them, if it does."""
        state = fresh(self._state)
        graph, arrays = nnx.split(state) if holds_nnx(state) else (None, state)
        leaves, tree = jax.tree.flatten((arrays, self._args(batch, key, 0)))
        own = [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)]

        def of_arrays(*own: Any) -> Any:
            given = iter(own)
            # What is no array is a constant.
            filled = [next(given) if isinstance(leaf, _ARRAYS) else leaf for leaf in leaves]
            arrays, args = tree.unflatten(filled)
            state = arrays if graph is None else nnx.merge(graph, arrays)
            out = self._step(*state, *args)
            changed = None if graph is None else nnx.state(state)
            return [x for x in jax.tree.leaves((out, changed)) if isinstance(x, jax.Array)]

        compiled = jax.jit(_jax.placing(of_arrays, own)).lower(*own).compile()
        shardings = jax.tree.leaves(compiled.output_shardings)
        if max(len(each.device_set) for each in shardings) < self.number:
            return None  # the step places its arrays where this cannot see it
        return (compiled.cost_analysis() or {}).get("flops")

    def _args(self, batch: Sequence[Any], key: Any, seed: int) -> list[Any]:
        keys = [] if key is None else [jax.random.fold_in(key, seed) if seed else key]
        # Copied, since a step may donate them.
        return [*fresh(batch), *fresh(keys)]

    def _call(self, state: tuple[Any, ...], args: list[Any]) -> tuple[tuple[Any, ...], Snapshot]:
        trees = [jax.tree.structure(each) for each in state if not holds_nnx(each)]
        out = self._step(*state, *args)
        if len(trees) == 1 and jax.tree.structure(out) == trees[0]:
            out = (out,)
        outs = list(out) if isinstance(out, tuple) else [out]
        returned, rest = outs[: len(trees)], outs[len(trees) :]
        if list(map(jax.tree.structure, returned)) == trees:
            following = iter(returned)
            state = tuple(each if holds_nnx(each) else next(following) for each in state)
            return state, _scalars(rest)
        if holds_nnx(state):
            return state, _scalars(outs)  # all of it was changed in place
        raise ArgumentError(
            "The step must return its next state first: a tuple that starts with "
            f"{'trees' if len(trees) > 1 else 'a tree'} of the same structure as the "
            f"{len(trees)} of the state that make_step returned. It returned {_described(out)}."
        )


def rows_of(batch: Sequence[Any], axes: Sequence[BatchAxes]) -> int:
    """The number of rows of a batch, given the axes of each of its arguments.

    Raises:
      ArgumentError: it has none, or the axes do not fit it.
    """
    for each, of_each in zip(batch, axes, strict=True):
        for leaf, axis in zip(jax.tree.leaves(each), of_each.of(each), strict=True):
            if np.ndim(leaf) and axis is not None:
                return int(np.shape(leaf)[axis])
    raise ArgumentError(
        "The batch has no array with rows. Pass it after make_step: verify(make_step, x, y)."
    )


def take_rows(batch: Sequence[Any], axes: Sequence[BatchAxes], rows: np.ndarray) -> list[Any]:
    """These rows of a batch; what has another number of rows is kept whole."""
    number = rows_of(batch, axes)

    def of_array(x: Any, axis: int) -> Any:
        has_rows = np.ndim(x) and np.shape(x)[axis] == number
        return batch_axes.take_rows(x, axis, rows) if has_rows else x

    return [of_each.map(of_array, each) for each, of_each in zip(batch, axes, strict=True)]


def _scalars(outs: Sequence[Any]) -> Snapshot:
    found = {}
    tree = outs[0] if len(outs) == 1 else tuple(outs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
            copies = copies_of(leaf)
            if copies.is_float and np.size(leaf) <= np.shape(copies.values)[0] * 4096:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                found[name or "the value"] = copies
    return found


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(each).__name__ for each in value)}"
    return type(value).__name__
