"""A step as its factory builds it for a number of shards, run on chosen batches."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from crossshard import _jax
from crossshard.errors import ArgumentError, ArgumentTypeError
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


@dataclasses.dataclass(frozen=True)
class Taken:
    """A step that was taken.

    Attributes:
      before: the arrays of the state before it.
      after: those after it.
      metrics: the floating scalars that it returned besides, by their path.
    """

    before: Snapshot
    after: Snapshot
    metrics: Snapshot


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

    def run(self, batch: Sequence[Any], key: Any = None, seed: int = 0) -> list[Taken]:
        """Take the idle step and the first that changes parameters, with the same batch.

        Args:
          batch: the arguments after the state.
          key: the random key, the last argument; none if ``None``.
          seed: other keys for other seeds.
        """
        state = fresh(self._state, seed)
        args = self._args(batch, key, seed)
        taken, before = [], snapshot(state)
        for _ in range(2):
            state, metrics = self._call(state, args)
            after = snapshot(state)
            taken.append(Taken(before, after, metrics))
            before = after
        return taken

    def flops(self, batch: Sequence[Any], key: Any = None) -> float | None:
        """The floating-point operations of one device, as the compiler counts them, if it does."""
        state, args = fresh(self._state), self._args(batch, key, 0)
        graph, arrays = nnx.split(state) if holds_nnx(state) else (None, state)

        def pure(arrays: Any, args: Any) -> Any:
            state = arrays if graph is None else nnx.merge(graph, arrays)
            out = self._step(*state, *args)
            return _arrays(out), None if graph is None else nnx.state(state)

        # What is no array is a constant.
        leaves, tree = jax.tree.flatten((arrays, args))
        own = [leaf for leaf in leaves if _is_array(leaf)]

        def of_arrays(*own: Any) -> Any:
            given = iter(own)
            filled = [next(given) if _is_array(leaf) else leaf for leaf in leaves]
            return pure(*tree.unflatten(filled))

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
        structure = jax.tree.structure
        in_place = holds_nnx(state)
        returned = [each for each in state if not holds_nnx(each)]
        trees = [structure(each) for each in returned]
        out = self._step(*state, *args)
        if len(returned) == 1 and structure(out) == trees[0]:
            out = (out,)
        outs = list(out) if isinstance(out, tuple) else [out]
        if [structure(each) for each in outs[: len(trees)]] == trees:
            following, outs = iter(outs[: len(trees)]), outs[len(trees) :]
            state = tuple(each if holds_nnx(each) else next(following) for each in state)
        elif not in_place:
            raise ArgumentError(
                "The step must return its next state first: a tuple that starts with "
                f"{'trees' if len(trees) > 1 else 'a tree'} of the same structure as the "
                f"{len(trees)} of the state that make_step returned. It returned "
                f"{_described(out)}."
            )
        return state, _scalars(outs)


def rows_of(batch: Sequence[Any]) -> int:
    """The number of rows of a batch.

    Raises:
      ArgumentError: it has none.
    """
    for leaf in jax.tree.leaves(tuple(batch)):
        if np.ndim(leaf):
            return int(np.shape(leaf)[0])
    raise ArgumentError(
        "The batch has no array with rows. Pass it after make_step: verify(make_step, x, y)."
    )


def take_rows(batch: Sequence[Any], rows: np.ndarray) -> list[Any]:
    """These rows of a batch; what has another number of rows is kept whole."""
    number = rows_of(batch)
    has_rows = lambda leaf: np.ndim(leaf) and np.shape(leaf)[0] == number
    return [jax.tree.map(lambda x: x[rows] if has_rows(x) else x, each) for each in batch]


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


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def _arrays(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: {', '.join(type(each).__name__ for each in value)}"
    return type(value).__name__
